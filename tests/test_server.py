"""llama-server under a budget, through the clients that people have."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from beaconkv_gguf.server import Server, server_path

try:
    server_path()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

BUDGET, N_CTX = 512, 4096
GREEDY = {"temperature": 0, "seed": 1}
HELLO = [{"role": "user", "content": "Say hello."}]
STORY = [{"role": "user", "content": "Tell a long story about a lighthouse."}]
# about 1,300 tokens: far above a quarter of the budget, so it is not pinned
CHRONICLE = " ".join(
    f"In year {1900 + i} keeper number {i} painted the tower in colour {i * 7 % 13}."
    for i in range(60)
)


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two slots, each within `BUDGET` cells."""
    slots = tmp_path_factory.mktemp("slots")
    arguments = ["--slot-save-path", f"{slots}{os.sep}"]
    with Server(
        smollm2_path, kv_budget=BUDGET, n_ctx=N_CTX, parallel=2, threads=2, args=arguments
    ) as server:
        yield server


@pytest.fixture(scope="module")
def single(smollm2_path: Path) -> Iterator[Server]:
    """One slot within `BUDGET` cells."""
    with Server(smollm2_path, kv_budget=BUDGET, n_ctx=N_CTX, threads=2) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def ask(
    server: Server, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and answer; `body` is JSON, or bytes that are sent as they are."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/{path}", data, headers or {})
    if data is not None and not request.has_header("Content-type"):
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()


def chat(server: Server, messages: list[dict[str, str]], n: int, **settings: Any) -> Any:
    """A reply of up to `n` tokens, greedy."""
    body = {"messages": messages, "max_tokens": n, **GREEDY, **settings}
    status, answer = ask(server, "v1/chat/completions", body)
    assert status == 200, answer
    return answer


def text(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"]


def kv_of(answer: Any) -> dict[str, int]:
    """What the timings of an answer tell of its slot."""
    prefix = "beaconkv_"
    timings = answer["timings"].items()
    return {name[len(prefix) :]: value for name, value in timings if name.startswith(prefix)}


def wait_for_free_slots(server: Server, within: float) -> float:
    """Seconds until no slot is at work."""
    started = time.monotonic()
    while any(slot["is_processing"] for slot in ask(server, "slots")[1]):
        assert time.monotonic() - started < within, "a slot is still at work"
        time.sleep(0.02)
    return time.monotonic() - started


# --- clients


def test_openai_chats(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="any", messages=HELLO, max_tokens=8, **GREEDY)
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_openai_streams_the_same_with_its_usage_at_the_end(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="any", messages=STORY, max_tokens=24, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model="any",
            messages=STORY,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len(pieces) > 10
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_openai_gets_the_json_that_its_schema_asks_for(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"enum": [7, 8]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    reply = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "A child, please."}],
        response_format={"type": "json_schema", "json_schema": {"name": "child", "schema": schema}},
        max_tokens=64,
        **GREEDY,
    )
    child = json.loads(reply.choices[0].message.content)
    assert child.keys() == {"name", "age"}
    assert child["name"] in ("Ann", "Bob") and child["age"] in (7, 8)


# What a model with tools and thinking brings along; SmolLM2's own template has neither.
TEMPLATE = r"""{%- if tools %}
    {{- '<|im_start|>system\nTools:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
    {%- endif %}
    {%- if message.content %}
        {{- message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def thinker(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A model that can think and call tools, as far as its template goes."""
    template = tmp_path_factory.mktemp("template") / "thinks.jinja"
    template.write_text(TEMPLATE)
    with Server(
        smollm2_path,
        kv_budget=BUDGET,
        n_ctx=2048,
        threads=2,
        args=["--chat-template-file", str(template)],
    ) as server:
        yield openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def test_openai_gets_a_tool_call(thinker: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
                "required": ["city"],
            },
        },
    }
    messages: list[Any] = []
    for i in range(3):  # so that the model knows how
        function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        call = {"id": str(i), "type": "function", "function": function}
        messages += [
            {"role": "user", "content": "How is the weather in Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": str(i), "content": "cold"},
            {"role": "assistant", "content": "It is cold."},
        ]
    messages.append({"role": "user", "content": "How is the weather in Rome?"})
    reply = thinker.chat.completions.create(
        model="any", messages=messages, tools=[tool], max_tokens=64, **GREEDY
    )
    (call,) = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_openai_gets_thinking_apart(thinker: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "extra_body": {"grammar": r'root ::= "<think>\ntwo and two\n</think>\n\nfour"'},
        "max_tokens": 32,
        "model": "any",
        "messages": [{"role": "user", "content": "2 + 2?"}],
    }
    message = thinker.chat.completions.create(**settings).choices[0].message
    stream = thinker.chat.completions.create(stream=True, **settings)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert message.content == "four"
    assert message.reasoning_content.strip() == "two and two"
    thinking = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thinking.strip() == "two and two"
    assert "".join(delta.content or "" for delta in deltas) == "four"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_streams(server: Server) -> None:
    body = {"messages": STORY, "max_tokens": 5, "stream": True, **GREEDY}
    command = ["curl", "--silent", "--no-buffer", "--fail", f"{server.base_url}/chat/completions"]
    command += ["--header", "Content-Type: application/json", "--data", json.dumps(body)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n\n")
    events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert len([e for e in events[:-1] if json.loads(e)["choices"][0]["delta"].get("content")]) == 5


# --- the budget


def test_a_reply_goes_on_past_the_budget_and_tells_what_is_held(single: Server) -> None:
    before = ask(single, "metrics")[1]
    answer = chat(single, STORY, 700, ignore_eos=True)
    kv = kv_of(answer)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert kv["budget"] == BUDGET and kv["n_ctx"] == N_CTX
    # the last token is sampled, not read
    assert kv["n_logical"] == answer["usage"]["prompt_tokens"] + 700 - 1
    assert kv["n_held"] <= BUDGET
    assert kv["n_evicted"] == kv["n_logical"] - kv["n_held"] > 0
    assert kv["n_compact"] == -(-(kv["n_logical"] - BUDGET) // 128)  # each frees a window
    assert kv["n_pinned"] == answer["usage"]["prompt_tokens"]
    # f16, 30 layers, 3 heads of 64
    assert kv["bytes_full"] == 2 * 2 * 30 * 3 * 64 * N_CTX
    assert 2 * 2 * 30 * 3 * 64 * BUDGET < kv["bytes_held"] < kv["bytes_full"] / 6

    assert {
        k: v for k, v in ask(single, "slots")[1][0]["beaconkv"].items() if k != "us_compact"
    } == {k: v for k, v in kv.items() if k != "us_compact"}
    props = ask(single, "props")[1]["beaconkv"]
    assert props["policy"] == "beacon" and props["window"] == 128
    assert [slot["n_held"] for slot in props["slots"]] == [kv["n_held"]]

    def metric(page: str, name: str) -> float:
        return float(re.search(rf"^beaconkv_{name}(?:{{slot=\"0\"}})? (\S+)$", page, re.M)[1])

    after = ask(single, "metrics")[1]
    assert metric(after, "budget_cells") == BUDGET
    assert metric(after, "held_cells") == kv["n_held"]
    assert metric(after, "logical_tokens") == kv["n_logical"]
    assert metric(after, "held_bytes") == kv["bytes_held"]
    counted = metric(after, "compactions_total") - metric(before, "compactions_total")
    assert counted == kv["n_compact"]
    # a conversation that begins anew was not compacted yet; the counter goes on
    assert kv_of(chat(single, HELLO, 4, cache_prompt=False))["n_compact"] == 0
    assert metric(ask(single, "metrics")[1], "compactions_total") == metric(
        after, "compactions_total"
    )


def test_a_stream_tells_what_is_held_with_each_token(single: Server) -> None:
    body = {"messages": STORY, "max_tokens": 600, "stream": True, "timings_per_token": True}
    body.update(GREEDY, ignore_eos=True, cache_prompt=False)
    request = urllib.request.Request(
        f"{single.base_url}/chat/completions", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    held = [kv_of(e)["n_held"] for e in events if "timings" in e]
    assert len(held) > 500
    assert max(held) <= BUDGET
    assert any(a > b for a, b in zip(held, held[1:])), "no compaction was seen"


def test_a_chat_ends_with_length_at_its_context(smollm2_path: Path) -> None:
    with Server(smollm2_path, kv_budget=256, n_ctx=512, threads=2) as server:
        answer = chat(server, STORY, -1, ignore_eos=True)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 512
        assert chat(server, HELLO, 4)["usage"]["completion_tokens"] <= 4


def test_without_a_budget_the_slots_tell_the_full_cache(smollm2_path: Path) -> None:
    with Server(smollm2_path, kv_budget=None, n_ctx=1024, threads=2) as server:
        kv = kv_of(chat(server, HELLO, 4))
        assert kv["budget"] == 0
        assert kv["n_held"] == kv["n_logical"] > 0
        assert kv["bytes_held"] == kv["bytes_full"]


# --- prompts that come back


def test_an_answer_asked_for_again_is_the_same_without_reading_the_prompt(single: Server) -> None:
    messages = [{"role": "user", "content": CHRONICLE + " Tell their story."}]
    first = chat(single, messages, 200, ignore_eos=True, cache_prompt=False)
    again = chat(single, messages, 200, ignore_eos=True)
    n_prompt = first["usage"]["prompt_tokens"]
    assert kv_of(first)["n_pinned"] == 0
    assert kv_of(first)["n_compact"] > n_prompt // BUDGET
    assert first["timings"]["cache_n"] == 0
    assert again["timings"]["cache_n"] >= n_prompt - 5
    assert text(again) == text(first)


def test_an_edited_question_keeps_what_was_read_before_it(single: Server) -> None:
    messages = [
        {"role": "user", "content": CHRONICLE},
        {"role": "assistant", "content": "I have read it."},
    ]
    first = {"role": "user", "content": "Who painted in 1923?"}
    other = {"role": "user", "content": "What happened in 1950?"}
    chat(single, [*messages, first], 150, ignore_eos=True, cache_prompt=False)
    edited = chat(single, [*messages, other], 150, ignore_eos=True)
    n_prompt = edited["usage"]["prompt_tokens"]
    # a checkpoint stands less than a batch before the end of each prompt
    assert n_prompt - BUDGET / 2 <= edited["timings"]["cache_n"] < n_prompt
    assert kv_of(edited)["n_held"] <= BUDGET


def test_a_pinned_prompt_is_gone_back_to_exactly(single: Server) -> None:
    cold = chat(single, STORY, 600, ignore_eos=True, cache_prompt=False)
    n_prompt = cold["usage"]["prompt_tokens"]
    assert kv_of(cold)["n_compact"] > 0
    warm = chat(single, STORY, 600, ignore_eos=True)
    assert warm["timings"]["cache_n"] == n_prompt - 1
    assert text(warm) == text(cold)


def test_chats_that_take_turns_in_a_slot_come_back(single: Server) -> None:
    chronicle = [{"role": "user", "content": CHRONICLE}]
    n_prompt = chat(single, chronicle, 16, cache_prompt=False)["usage"]["prompt_tokens"]
    texts = []
    for _ in range(2):
        chat(single, STORY, 8)
        answer = chat(single, chronicle, 16)
        assert answer["timings"]["cache_n"] >= n_prompt - 5
        texts.append(text(answer))
    assert texts[0] == texts[1]


def test_a_slot_is_saved_and_restored(server: Server, smollm2_path: Path) -> None:
    messages = [{"role": "user", "content": CHRONICLE}]
    first = chat(server, messages, 150, id_slot=0, ignore_eos=True, cache_prompt=False)
    status, saved = ask(server, "slots/0?action=save", {"filename": "chronicle.bin"})
    assert status == 200, saved
    assert ask(server, "slots/0?action=erase", {})[0] == 200
    assert ask(server, "slots")[1][0]["beaconkv"]["n_held"] == 0
    status, restored = ask(server, "slots/0?action=restore", {"filename": "chronicle.bin"})
    assert status == 200, restored
    assert restored["n_restored"] == saved["n_saved"]
    turn = [*messages, {"role": "assistant", "content": text(first)}, *HELLO]
    on = chat(server, turn, 8, id_slot=0)
    assert on["timings"]["cache_n"] >= first["usage"]["prompt_tokens"]

    folder = next(Path(a) for a in server.process.args if a.startswith(os.sep) and "slots" in a)
    with Server(
        smollm2_path,
        kv_budget=BUDGET + 256,
        n_ctx=N_CTX,
        parallel=2,
        threads=1,
        args=["--slot-save-path", f"{folder}{os.sep}"],
    ) as other:
        status, refused = ask(other, "slots/0?action=restore", {"filename": "chronicle.bin"})
        assert status == 400
        assert "kv_budget = 512, this context has 768" in refused["error"]["message"]
        assert chat(other, HELLO, 4)["usage"]["completion_tokens"] > 0


def test_a_prompt_cut_short_within_a_sliding_window_is_answered(
    tiny_path: Callable[[str], Path],
) -> None:
    # its end is one token behind a checkpoint, which the window can't be cut back to
    tokens = [3 + i * 7 % 240 for i in range(169)]
    with Server(tiny_path("gemma3"), kv_budget=256, n_ctx=1024, threads=1) as server:
        for prompt in (tokens, *(tokens[:-cut] for cut in (4, 5, 6))):
            body = {"prompt": prompt, "n_predict": 150, "ignore_eos": True, **GREEDY}
            status, answer = ask(server, "completion", body)
            assert status == 200 and answer["tokens_predicted"] == 150


def test_counters_count_no_compaction_twice(single: Server) -> None:
    def n_compactions() -> float:
        page = ask(single, "metrics")[1]
        return float(re.search(r"^beaconkv_compactions_total (\S+)$", page, re.M)[1])

    messages = [{"role": "user", "content": CHRONICLE + " Sum it up."}]
    before = n_compactions()
    first = kv_of(chat(single, messages, 150, ignore_eos=True, cache_prompt=False))
    assert n_compactions() - before == first["n_compact"] > 4
    # back to the checkpoint at the prompt's end, and on
    assert chat(single, messages, 8)["timings"]["prompt_n"] < 8
    assert n_compactions() - before == first["n_compact"]


def test_a_request_for_a_busy_slot_waits(server: Server) -> None:
    def answer(n: int, messages: list[dict[str, str]], **settings: Any) -> None:
        answers[n] = chat(server, messages, n, id_slot=1, ignore_eos=True, **settings)

    answers: dict[int, Any] = {}
    alone = text(chat(server, STORY, 120, id_slot=1, ignore_eos=True, cache_prompt=False))
    first = threading.Thread(target=answer, args=(120, STORY), kwargs={"cache_prompt": False})
    other = threading.Thread(target=answer, args=(9, [{"role": "user", "content": CHRONICLE}]))
    first.start()
    time.sleep(0.3)
    other.start()
    for thread in (first, other):
        thread.join(60)
    assert text(answers[120]) == alone
    assert answers[9]["usage"]["completion_tokens"] == 9


def test_a_request_that_waited_behind_a_saved_slot_is_answered(single: Server) -> None:
    # what is wrong with the second shows only when it would start
    chats = [{"messages": STORY, "max_tokens": 60}, {"messages": HELLO, "grammar": "root ::= ("}]
    chats.append({"messages": HELLO, "max_tokens": 3})
    threads, statuses = [], []
    for body in chats:
        threads.append(
            threading.Thread(
                target=lambda body: statuses.append(ask(single, "v1/chat/completions", body)[0]),
                args=(body,),
            )
        )
        threads[-1].start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(60)
    assert sorted(statuses) == [200, 200, 400]


def test_two_answers_to_one_prompt(server: Server) -> None:
    messages = [{"role": "user", "content": CHRONICLE}]
    body = {"messages": messages, "max_tokens": 12, "n": 2, **GREEDY}
    status, answer = ask(server, "v1/chat/completions", body)
    assert status == 200, answer
    first, second = (choice["message"]["content"] for choice in answer["choices"])
    assert first == second != ""


def test_drafts_change_nothing_but_the_speed(smollm2_path: Path) -> None:
    ngrams = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
    itself = ["--spec-type", "draft-simple", "--model-draft", str(smollm2_path)]
    texts = []
    for arguments in ([], ngrams, itself):
        with Server(smollm2_path, kv_budget=256, n_ctx=2048, threads=2, args=arguments) as server:
            # says the same over and over, so that drafts are taken
            answer = chat(server, STORY, 500, ignore_eos=True)
        texts.append(text(answer)[:200])
        assert kv_of(answer)["n_compact"] > 0
        assert kv_of(answer)["n_held"] <= 256
        assert answer["timings"].get("draft_n_accepted", 0) > (50 if arguments else -1)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--embeddings"], "embeddings are asked for"),
        (["--kv-pin-share", "0.9"], "pin_share = 0.9 is not in"),
        (["--kv-window", "0"], "window = 0 is not in"),
        (["--flash-attn", "off"], "flash attention is off"),
    ],
)
def test_what_a_budget_cannot_serve_is_refused_by_name(
    smollm2_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        Server(smollm2_path, kv_budget=BUDGET, n_ctx=2048, threads=1, args=arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-budget", "-5"], "--kv-budget must be 0 or more, not -5"),
        (["--kv-policy", "best"], "--kv-policy must be one of beacon, recent"),
        (["--kv-quota", "x"], "--kv-quota must be a number from 0 to 1, not 'x'"),
    ],
)
def test_wrong_options_are_named(smollm2_path: Path, arguments: list[str], message: str) -> None:
    command = [str(server_path()), "-m", str(smollm2_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert message in done.stderr + done.stdout


# --- hostile input


def test_a_prompt_beyond_the_context_is_named(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "hello world " * 4000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="any", messages=long, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        assert f"({N_CTX} tokens)" in caught.value.message


BAD_VALUES: list[tuple[str, Any]] = [
    ("max_tokens", -5),
    ("max_tokens", "many"),
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", -0.5),
    ("top_p", 1.5),
    ("top_k", -2),
    ("min_p", -1),
    ("seed", "x"),
    ("seed", -5),
    ("n", 0),
    ("n", 99),
    ("top_logprobs", -4),
    ("stop", 5),
    ("stop", [5]),
    ("stream", "yes"),
    ("stream_options", 5),
    ("model", 5),
    ("tools", "x"),
    ("tools", [1]),
    ("tool_choice", 5),
    ("response_format", "x"),
    ("response_format", {"type": "nope"}),
    ("logit_bias", "x"),
    ("grammar", 5),
    ("grammar", "root ::= ("),
    ("chat_template_kwargs", 5),
    ("reasoning_format", "x"),
    ("grammar", "root ::= " + "(" * 50_000),
    ("messages", None),
    ("messages", "hello"),
    ("messages", [1]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": 5, "content": "x"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("id_slot", -7),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda value: f"{value}"[:30])
def test_a_wrong_value_is_an_error_of_the_client(server: Server, name: str, value: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 2, name: value}
    status, answer = ask(server, "v1/chat/completions", body)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    "path", ["v1/chat/completions", "v1/responses", "v1/messages", "apply-template", "tokenize"]
)
@pytest.mark.parametrize("n", [1001, 1_000_000])
def test_what_is_nested_too_deep_is_refused(server: Server, path: str, n: int) -> None:
    deep = b'{"items":' * n + b"1" + b"}" * n
    body = b'{"messages": [{"role": "user", "content": "((((\\"[[[["}], "tools": ' + deep + b"}"
    status, answer = ask(server, path, body)
    assert status == 400
    assert answer["error"]["message"] == "the request is nested more than 1000 levels deep"
    if path == "v1/chat/completions":
        text = [{"role": "user", "content": '\\" ' + "[{(" * 2000}]  # brackets of a text are none
        assert chat(server, text, 1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'"x"', b"{", b"nope", b'{"messages": ["\xff"]}', b"[" * 100_000, b"\0" * 100],
    ids=["empty", "array", "string", "cut", "word", "not UTF-8", "deep", "zeros"],
)
def test_what_is_no_request_is_an_error_of_the_client(server: Server, body: bytes) -> None:
    status, answer = ask(server, "v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


def test_ten_megabytes_are_refused_with_a_reason(server: Server) -> None:
    big = {"messages": [{"role": "user", "content": "a " * 5_000_000}]}
    status, answer = ask(server, "v1/chat/completions", big)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, answer = ask(server, "v1/chat/completions", big, form)
    assert status == 413
    assert answer["error"]["type"] == "invalid_request_error"
    assert chat(server, HELLO, 2)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost.elsewhere.example"}, 403),
        ({"Host": "rebound.example:8080"}, 403),
        ({"Host": "[::1].rebound.example"}, 403),
        ({"Host": "localhost:80.rebound.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "http://[::1].elsewhere.example"}, 403),
        ({"Origin": "http://localhost:80.elsewhere.example"}, 403),
        ({"Host": "LocalHost.:1"}, 200),
        ({"Host": "127.0.0.2:1"}, 200),
        ({"Host": "[::1]:1"}, 200),
        ({}, 200),
    ],
)
def test_pages_from_elsewhere_cannot_use_the_server(
    server: Server, headers: dict[str, str], status: int
) -> None:
    # text/plain is what a page may send without asking first
    headers = {**headers, "Content-Type": "text/plain"}
    body = {"messages": HELLO, "max_tokens": 1}
    n_before = _n_prompts(server)
    got, answer = ask(server, "v1/chat/completions", body, headers)
    assert got == status, answer
    assert (_n_prompts(server) > n_before) == (status == 200)


def _n_prompts(server: Server) -> float:
    page = ask(server, "metrics")[1]
    return float(re.search(r"^llamacpp:n_decode_total (\S+)$", page, re.M)[1])


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("127.0.0.1", {"Origin": "https://mine.example"}, 200),
        ("127.0.0.1", {"Origin": "https://elsewhere.example"}, 403),
        ("127.0.0.1", {"Host": "rebound.example"}, 403),
        ("0.0.0.0", {"Host": "rebound.example:1", "Origin": "http://rebound.example:1"}, 403),
        ("0.0.0.0", {"Host": "192.168.1.9:1", "Origin": "http://192.168.1.9:1"}, 200),
        ("0.0.0.0", {"Host": "mypc:1", "Origin": "http://mypc:1"}, 200),
        ("0.0.0.0", {"Host": "mine.example", "Origin": "https://mine.example"}, 200),
    ],
)
@pytest.mark.filterwarnings("ignore:the server listens on")
def test_listed_origins_alone_are_let_in(
    tiny_path: Callable[[str], Path], host: str, headers: dict[str, str], status: int
) -> None:
    arguments = ["--cors-origins", "https://mine.example,https://other.example"]
    with Server(
        tiny_path("llama"), host=host, kv_budget=256, n_ctx=512, threads=1, args=arguments
    ) as server:
        assert ask(server, "props", None, headers)[0] == status


def test_the_answer_is_hidden_from_pages_from_elsewhere(server: Server) -> None:
    for origin, allowed in (("https://elsewhere.example", None), ("http://localhost:3000",) * 2):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("OPTIONS", "/v1/chat/completions", headers={"Origin": origin})
            answer = connection.getresponse()
            assert answer.getheader("Access-Control-Allow-Origin") == allowed


# --- clients that hang up, and the end


def _hang_up(server: Server, body: dict[str, Any], after: int) -> None:
    """Send a request, read `after` bytes of the answer and be gone."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        while after > 0:
            after -= len(connection.recv(after))


def test_a_hundred_clients_that_hang_up_leave_free_slots(server: Server) -> None:
    chronicle = [{"role": "user", "content": CHRONICLE}]
    endless = {"max_tokens": -1, "ignore_eos": True, "cache_prompt": False}
    kinds = [
        ({"messages": STORY, "stream": True, **endless}, 600),  # in a streamed reply
        ({"messages": STORY, **endless}, 0),  # in a reply that is sent at its end
        ({"messages": chronicle, "stream": True, **endless}, 0),  # in a prompt
        ({"messages": chronicle, **endless}, 0),
    ]
    for i in range(25):
        threads = [threading.Thread(target=_hang_up, args=(server, *kind)) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if i % 8 == 0:
            assert chat(server, HELLO, 2)["usage"]["completion_tokens"] > 0
    wait_for_free_slots(server, 10)
    assert chat(server, HELLO, 4)["usage"]["completion_tokens"] > 0
    assert server.poll() is None


def test_a_slot_is_free_within_a_batch_of_hanging_up(single: Server) -> None:
    body = {"messages": STORY, "max_tokens": -1, "ignore_eos": True}
    thread = threading.Thread(target=_hang_up, args=(single, {**body, "stream": True}, 600))
    thread.start()
    thread.join()
    # a batch of one token, or a compaction; upstream looks for it each second
    assert wait_for_free_slots(single, 5) < 1


@pytest.mark.skipif(os.name == "nt", reason="SIGTERM of POSIX")
@pytest.mark.parametrize("busy", [False, True])
def test_sigterm_ends_it_within_five_seconds(smollm2_path: Path, busy: bool) -> None:
    with Server(smollm2_path, kv_budget=BUDGET, n_ctx=N_CTX, parallel=2, threads=2) as server:
        body = {"messages": STORY, "max_tokens": -1, "ignore_eos": True}
        threads = []
        for stream in (True, False) if busy else ():
            target = _read_all, (server, {**body, "stream": stream})
            threads.append(threading.Thread(target=target[0], args=target[1]))
            threads[-1].start()
        time.sleep(1 if busy else 0)
        os.kill(server.pid, signal.SIGTERM)
        server.process.wait(5)
        for thread in threads:
            thread.join()


def _read_all(server: Server, body: dict[str, Any]) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        ask(server, "v1/chat/completions", body)
