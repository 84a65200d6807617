"""Thinking: splitting it from the answer, template variables, and usage in streams."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp as parent
import numpy as np
import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from beaconkv_gguf import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList, reasoning
from beaconkv_gguf.reasoning import THINK, Harmony, Tags, format_of

HARMONY = Harmony()

# --- the parsers: format, end of the prompt, text, thinking, answer ---------------------------

CASES: list[tuple[reasoning.Format, str, str, str, str]] = [
    (THINK, "", "<think>2 + 2</think>4", "2 + 2", "4"),
    (THINK, "", "<think>\n2 + 2\n = 4 \n</think>\n\n4\n", "2 + 2\n = 4", "4\n"),
    (THINK, "", "\n <think>a</think>b", "a", "b"),
    (THINK, "<think>\n", "a < b\n</think>\nc", "a < b", "c"),
    (THINK, "<think>", "<think>\nwritten again</think>c", "written again", "c"),
    (THINK, "<think>\n\n</think>\n\n", "\n 4 ", "", "\n 4 "),
    (THINK, "", "<think>\n\n</think>\n\n4", "", "4"),
    (THINK, "", "4 </think> <think>5</think>", "", "4 </think> <think>5</think>"),
    (THINK, "", "<thing>4", "", "<thing>4"),
    (THINK, "", "", "", ""),
    (THINK, "", " \n", "", " \n"),
    (THINK, "", "<thin", "", "<thin"),
    (THINK, "<think>\n", "", "", ""),
    (THINK, "<think>\n", "\n<t", "<t", ""),
    (THINK, "", "<think>a</think", "a</think", ""),  # may be meant: "a<" is
    (THINK, "", "<think>cut off ", "cut off ", ""),
    (THINK, "", "<think>a </thinking> b</think>c</think>", "a </thinking> b", "c</think>"),
    (THINK, "", "<think>žluťoučký 🐎</think>ůň", "žluťoučký 🐎", "ůň"),
    (Tags("[THINK]", "[/THINK]"), "", "[THINK]a[0][/[/THINK]b", "a[0][/", "b"),
    (Tags("<|channel>thought", "<channel|>"), "", "<|channel>thought\na<channel|>b", "a", "b"),
    (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>4",
        "2 + 2",
        "4",
    ),
    (HARMONY, "", "<|channel|>final<|message|>4", "", "4"),
    (HARMONY, "", "<|channel|>analysis<|message|>cut off <", "cut off <", ""),
    (HARMONY, "", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|chan", "a", ""),
    (HARMONY, "", "<|channel|>ana", "", ""),
    (HARMONY, "", "", "", ""),
    (HARMONY, "", "no header, 2 < 3", "", "no header, 2 < 3"),
    (HARMONY, "<|start|>assistant<|channel|>analysis<|message|>", "a<|end|>", "a", ""),
    (HARMONY, "<|start|>user<|message|>", "<|channel|>final<|message|>4", "", "4"),
    (
        HARMONY,
        "",
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>a<|channel|>final"
        "<|constrain|>json<|message|>{}",
        "a",
        "{}",
    ),
    (
        HARMONY,
        "",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look. <|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        '<|message|>{"x": 1}',
        "a",
        'I look. <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}',
    ),
    (
        HARMONY,
        "",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>"
        "analysis<|message|>{}",
        "a",
        "to=functions.f<|channel|>analysis<|message|>{}",
    ),
]


def parsed(form: reasoning.Format, prompt: str, pieces: list[str]) -> tuple[str, str]:
    parser = form.parser(prompt)
    parts = [parser.feed(piece) for piece in pieces] + [parser.close()]
    thinking, content = map("".join, zip(*parts))
    return thinking, content


@pytest.mark.parametrize(("form", "prompt", "text", "thinking", "answer"), CASES)
def test_every_cut_of_a_text_splits_it_alike(
    form: reasoning.Format, prompt: str, text: str, thinking: str, answer: str
) -> None:
    assert parsed(form, prompt, [text]) == (thinking, answer)
    assert parsed(form, prompt, list(text)) == (thinking, answer)
    for i in range(len(text) + 1):
        assert parsed(form, prompt, [text[:i], text[i:]]) == (thinking, answer)
        for j in range(i, len(text) + 1):
            assert parsed(form, prompt, [text[:i], text[i:j], text[j:]]) == (thinking, answer)


def test_nothing_waits_that_can_be_told() -> None:
    parser = THINK.parser("<think>\n")
    assert parser.feed("one two") == ("one two", "")
    assert parser.feed(" three\n") == (" three", "")
    assert parser.feed("four <") == ("\nfour", "")
    assert parser.feed("5") == (" <5", "")
    assert parser.feed("</think>") == ("", "")
    assert parser.feed(" six ") == ("", "six ")
    assert parser.feed("<") == ("", "<")


@pytest.mark.parametrize(
    ("template", "start"),
    [
        ("{{ '<|im_start|>assistant\n<think>\n' }}", "<think>"),
        ("{{ content.split('</think>')[-1] }}", "<think>"),
        ("[THINK]{{ message.thinking }}[/THINK]", "[THINK]"),
        ("<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>"),
        ("{% set begin = '<seed:think>' %}", "<seed:think>"),
        ("<|turn>system\n<|think|>{{ '<|channel>thought\n<channel|>' }}", "<|channel>thought"),
        ("<|begin|>assistant<|think|>{{ message.reasoning }}<|end|>", "<|think|>"),
        ("{% set begin = '<think{}>'.format(x) %}", "<think:opensource>"),
    ],
)
def test_format_is_chosen_by_the_template(template: str, start: str) -> None:
    form = format_of(template)
    assert isinstance(form, Tags)
    assert form.start == start


def test_templates_of_harmony_and_of_no_thinking() -> None:
    assert isinstance(format_of("<|start|>assistant<|channel|>final<|message|>"), Harmony)
    for template in ("", "<|im_start|>assistant\n", "Think before you answer."):
        assert format_of(template) is None


# --- a model that writes what it is told ------------------------------------------------------

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASSISTANT = "<|im_start|>assistant\n"
THINKS = TURNS + ASSISTANT + "{# <think> #}"
OPENS = TURNS + ASSISTANT + "{{ '<think>\n' }}"
SWITCH = OPENS + "{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}"
USER = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(scope="module")
def loaded(smollm2_path: Path) -> Iterator[Llama]:
    with Llama(smollm2_path, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False) as llm:
        yield llm


@pytest.fixture
def llm(loaded: Llama, monkeypatch: pytest.MonkeyPatch) -> Llama:
    monkeypatch.setattr(loaded, "chat_handler", None)  # and back after the test
    return loaded


def set_template(llm: Llama, template: str) -> None:
    llm.chat_handler = Jinja2ChatFormatter(
        template, eos_token="<|im_end|>", bos_token="", stop_token_ids=[llm.token_eos()]
    ).to_chat_handler()


def writing(llm: Llama, text: str) -> LogitsProcessorList:
    """Makes the model write a text and end it."""
    tokens = [*llm.tokenize(text.encode(), add_bos=False, special=True), llm.token_eos()]
    rest = iter(tokens)

    def process(input_ids: Any, scores: Any) -> Any:
        token = next(rest)
        scores[:] = -np.inf
        scores[token] = 0.0
        return scores

    return LogitsProcessorList([process])


def ask(llm: Any, text: str, stream: bool = False, **kwargs: Any) -> Any:
    """A reply to USER whose text is `text`; that of a stream is put together again."""
    arguments = {"messages": USER, "temperature": 0.0, **kwargs}
    result = llm.create_chat_completion(
        stream=stream, logits_processor=writing(llm, text), **arguments
    )
    if not stream:
        return result
    message: dict[str, Any] = {"content": ""}
    finish = None
    for chunk in result:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        assert len(delta) <= 1
        assert finish is None
        finish = choice["finish_reason"]
        for key, value in delta.items():
            message[key] = message.get(key, "") + value
    return {"choices": [{"message": message, "finish_reason": finish}]}


def both(llm: Llama, text: str, **kwargs: Any) -> dict[str, Any]:
    """The message; that of a stream is the same."""
    whole = ask(llm, text, **kwargs)["choices"][0]
    streamed = ask(llm, text, stream=True, **kwargs)["choices"][0]
    assert streamed["message"] == whole["message"]
    assert streamed["finish_reason"] == whole["finish_reason"]
    message = whole["message"]
    assert message.pop("role") == "assistant"
    return message


def test_thinking_is_apart_in_message_and_deltas(llm: Llama) -> None:
    set_template(llm, THINKS)
    message = both(llm, "<think>\nTwo and two.\n</think>\n\nIt is 4.")
    assert message == {"content": "It is 4.", "reasoning_content": "Two and two."}


def test_template_that_opens_the_tag_starts_in_thinking(llm: Llama) -> None:
    set_template(llm, OPENS)
    message = both(llm, "Two and two.\n</think>\n\nIt is 4.")
    assert message == {"content": "It is 4.", "reasoning_content": "Two and two."}


def test_text_that_ends_in_mid_thought_is_thinking_alone(llm: Llama) -> None:
    set_template(llm, OPENS)
    text = "Two and two and two and two and two.\n</think>\n\nIt is 10."
    choice = ask(llm, text, max_tokens=3)["choices"][0]
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "Two and two"
    assert choice["finish_reason"] == "length"
    assert both(llm, text, max_tokens=3)["reasoning_content"] == "Two and two"


def test_harmony(llm: Llama) -> None:
    set_template(llm, TURNS + "<|start|>assistant{# <|channel|>x<|message|> #}")
    text = (
        "<|channel|>analysis<|message|>Two and two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 4."
    )
    assert both(llm, text) == {"content": "It is 4.", "reasoning_content": "Two and two."}


def test_tags_that_are_special_tokens(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama_cpp gives special tokens no text; others than the tags still have none."""
    monkeypatch.setattr(reasoning, "FORMATS", (Tags("<repo_name>", "<file_sep>"),))
    set_template(llm, TURNS + ASSISTANT + "{# <repo_name> #}")
    text = "<repo_name>Two <gh_stars>and two.<file_sep>It <gh_stars>is 4."
    assert both(llm, text) == {"content": "It is 4.", "reasoning_content": "Two and two."}
    assert both(llm, text, reasoning_format="none") == {"content": "Two and two.It is 4."}
    assert llm.detokenize(llm.tokenize(text.encode(), special=True)) == b"Two and two.It is 4."
    stream = llm.create_chat_completion(
        USER, stream=True, temperature=0.0, logits_processor=writing(llm, text)
    )
    for _ in range(3):
        next(stream)
    assert llm.detokenize(llm.tokenize(text.encode(), special=True)) == b"Two and two.It is 4."
    stream.close()


def test_thinking_template_without_thinking_keeps_the_text(llm: Llama) -> None:
    set_template(llm, THINKS)
    assert both(llm, "\n\nIt is <think> 4. ") == {"content": "\n\nIt is <think> 4. "}


def same_but_ids(result: Any) -> Any:
    return {key: value for key, value in result.items() if key not in ("id", "created")}


@pytest.mark.parametrize("template", [TURNS + ASSISTANT, THINKS, OPENS])
def test_left_as_the_parent_s_without_tags_or_with_none(llm: Llama, template: str) -> None:
    set_template(llm, template)
    text = "<think>\nTwo and two.\n</think>\n\nIt is 4."
    named = {} if template == TURNS + ASSISTANT else {"reasoning_format": "none"}

    def run(create: Callable[..., Any], **kwargs: Any) -> Any:
        return create(messages=USER, temperature=0.0, logits_processor=writing(llm, text), **kwargs)

    def parents(**kwargs: Any) -> Any:
        return parent.Llama.create_chat_completion(llm, **kwargs)

    assert same_but_ids(run(llm.create_chat_completion, **named)) == same_but_ids(run(parents))
    chunks = [run(llm.create_chat_completion, stream=True, **named), run(parents, stream=True)]
    ours, theirs = ([same_but_ids(chunk) for chunk in stream] for stream in chunks)
    assert ours == theirs


def test_deepseek_splits_whatever_the_template(llm: Llama) -> None:
    text = "<think>Two and two.</think>It is 4."
    assert both(llm, text) == {"content": text}
    split = {"content": "It is 4.", "reasoning_content": "Two and two."}
    assert both(llm, text, reasoning_format="deepseek") == split


def test_chat_format_of_a_model_that_thinks(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "chat_format", "chatml")
    monkeypatch.setitem(llm.metadata, "tokenizer.chat_template", OPENS)
    split = {"content": "It is 4.", "reasoning_content": "Two and two."}
    assert both(llm, "<think>Two and two.</think>It is 4.") == split


@pytest.mark.parametrize("name", ["yes", "", "DeepSeek"])
def test_unknown_reasoning_format_names_what_is_allowed(
    llm: Llama, smollm2_path: Path, name: str
) -> None:
    allowed = f"reasoning_format='{name}' is none of 'auto', 'none', 'deepseek'"
    with pytest.raises(ValueError, match=allowed):
        llm.create_chat_completion(USER, reasoning_format=name)
    with pytest.raises(ValueError, match=allowed):
        Llama(smollm2_path, reasoning_format=name)


def test_reasoning_format_of_the_constructor(smollm2_path: Path) -> None:
    given = Llama(smollm2_path, vocab_only=True, verbose=False, reasoning_format="none")
    with given, pickle.loads(pickle.dumps(given)) as copy:
        assert given.reasoning_format == copy.reasoning_format == "none"


def test_constructor_s_format_holds_where_a_call_has_none(
    llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(llm, THINKS)
    monkeypatch.setattr(llm, "reasoning_format", "none")
    text = "<think>Two and two.</think>It is 4."
    assert both(llm, text) == {"content": text}
    assert both(llm, text, reasoning_format="auto")["content"] == "It is 4."


def test_answers_that_a_grammar_forces_are_no_thinking(llm: Llama) -> None:
    set_template(llm, OPENS)
    text = '{"sum": 4}'
    message = both(llm, text, response_format={"type": "json_object"})
    assert message == {"content": text}
    grammar = LlamaGrammar.from_string('root ::= "so</think>" [0-9]', verbose=False)
    assert both(llm, "so</think>4", grammar=grammar) == {
        "content": "4",
        "reasoning_content": "so",
    }


def test_forced_tool_call_is_left_alone(llm: Llama) -> None:
    set_template(llm, OPENS)
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    tool = {"type": "function", "function": {"name": "answer", "parameters": schema}}
    choice = {"type": "function", "function": {"name": "answer"}}
    call = {"tools": [tool], "tool_choice": choice}
    message = ask(llm, '{"sum": 4}', **call)["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == '{"sum": 4}'
    chunks = llm.create_chat_completion(
        USER, stream=True, temperature=0.0, logits_processor=writing(llm, '{"sum": 4}'), **call
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["tool_calls"][0] for delta in deltas if delta.get("tool_calls")]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"sum": 4}'


def test_stop_strings_end_the_thinking(llm: Llama) -> None:
    set_template(llm, OPENS)
    message = both(llm, "Two and <two.</think>It is 4.", stop=["<two"])
    assert message == {"content": "", "reasoning_content": "Two and "}


def test_logprobs_of_every_token_come(smollm2_path: Path) -> None:
    with Llama(
        smollm2_path, n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False
    ) as llm:
        set_template(llm, OPENS)
        text = "Two.\n</think>\n\n4."
        chunks = llm.create_chat_completion(
            USER,
            stream=True,
            temperature=0.0,
            logits_processor=writing(llm, text),
            logprobs=True,
            top_logprobs=1,
        )
        logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    tokens = [item["token"] for entry in logprobs if entry for item in entry["content"]]
    assert "".join(tokens) == text


# --- what goes into the prompt ----------------------------------------------------------------


def prompt_of(llm: Llama, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """The prompt that a call makes, out of the tokens that it evaluated."""
    llm.create_chat_completion(messages, max_tokens=1, **kwargs)
    return llm.detokenize(llm._input_ids.tolist(), special=True).decode()


@pytest.mark.parametrize("reasoning_format", ["auto", "none"])
def test_template_variables_of_a_call(llm: Llama, reasoning_format: str) -> None:
    set_template(llm, SWITCH)
    options = {"reasoning_format": reasoning_format}
    thinking = prompt_of(llm, USER, **options)
    silent = prompt_of(llm, USER, chat_template_kwargs={"enable_thinking": False}, **options)
    assert thinking.startswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert thinking.endswith("<think>\n")
    assert silent == thinking + "\n</think>\n\n"
    assert prompt_of(llm, USER, **options) == thinking


def test_thinking_switched_off_starts_with_the_answer(llm: Llama) -> None:
    set_template(llm, SWITCH)
    message = both(llm, "It is 4.", chat_template_kwargs={"enable_thinking": False})
    assert message == {"content": "It is 4."}


def test_template_variables_reach_the_template_of_the_model(llm: Llama) -> None:
    assert llm.chat_format == "chat_template.default"
    off = {"add_nothing": True}  # a variable that it does not use
    assert prompt_of(llm, USER, chat_template_kwargs=off) == prompt_of(llm, USER)


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt"])
def test_template_variables_of_the_call_itself_are_refused(llm: Llama, name: str) -> None:
    with pytest.raises(ValueError, match=f"chat_template_kwargs can't set {name}"):
        llm.create_chat_completion(USER, chat_template_kwargs={name: None})


def test_template_variables_without_a_template_are_refused(
    llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"enable_thinking": False}
    with monkeypatch.context() as patch:
        patch.setattr(llm, "chat_format", "chatml")
        with pytest.raises(ValueError, match=r"'enable_thinking'.*chat_format='chatml'"):
            llm.create_chat_completion(USER, chat_template_kwargs=variables)
        assert "2 + 2?" in prompt_of(llm, USER, chat_template_kwargs={})
    llm.chat_handler = lambda **kwargs: kwargs
    with pytest.raises(ValueError, match=r"'enable_thinking'.*chat_handler"):
        llm.create_chat_completion(USER, chat_template_kwargs=variables)
    with pytest.raises(TypeError, match="'off'"):
        llm.create_chat_completion(USER, chat_template_kwargs="off")


def test_thinking_of_earlier_turns_reaches_the_template(llm: Llama) -> None:
    set_template(
        llm,
        "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}]"
        "{% endfor %}{# <think> #}",
    )
    history = [*USER, {"role": "assistant", "content": "4", "reasoning_content": "two twos"}]
    assert prompt_of(llm, history) == "[user||2 + 2?][assistant|two twos|4]"


# --- usage in streams -------------------------------------------------------------------------

INCLUDE = {"include_usage": True}


@pytest.mark.parametrize("max_tokens", [4, None])
def test_usage_of_a_streamed_completion(llm: Llama, max_tokens: int | None) -> None:
    text = "Two and two is four. 🐎"
    n_text = len(llm.tokenize(text.encode(), add_bos=False))
    n_prompt = len(llm.tokenize(b"Once upon"))
    n_written = min(n_text, max_tokens or n_text)

    def run(**kwargs: Any) -> Any:
        return llm.create_completion(
            "Once upon",
            max_tokens=max_tokens,
            temperature=0.0,
            logits_processor=writing(llm, text),
            **kwargs,
        )

    *chunks, last = run(stream=True, stream_options=INCLUDE)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == run()["usage"]
    assert last["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_written,
        "total_tokens": n_prompt + n_written,
    }
    assert {key: last[key] for key in ("id", "object", "created", "model")} == {
        key: chunks[0][key] for key in ("id", "object", "created", "model")
    }
    for options in (None, {}, {"include_usage": False}):
        plain = list(run(stream=True, stream_options=options))
        assert len(plain) == len(chunks)
        assert all("usage" not in chunk for chunk in plain)


@pytest.mark.parametrize("template", [TURNS + ASSISTANT, THINKS])
def test_usage_of_a_streamed_chat(llm: Llama, template: str) -> None:
    set_template(llm, template)
    text = "<think>Two and two.</think>It is 4."
    whole = ask(llm, text)
    *chunks, last = llm.create_chat_completion(
        USER,
        stream=True,
        temperature=0.0,
        logits_processor=writing(llm, text),
        stream_options=INCLUDE,
    )
    assert last["object"] == "chat.completion.chunk"
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["usage"]["completion_tokens"] == len(llm.tokenize(text.encode(), add_bos=False))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    json.dumps([*chunks, last])


def test_usage_where_a_criterion_or_a_stop_string_ends_the_text(llm: Llama) -> None:
    def third(input_ids: Any, logits: Any) -> bool:
        return len(input_ids) >= 4

    ends: list[dict[str, Any]] = [
        {"stop": ["two"]},
        {"stopping_criteria": StoppingCriteriaList([third])},
    ]
    for end in ends:
        usages = []
        for options in ({}, {"stream": True, "stream_options": INCLUDE}):
            processor = writing(llm, "One and two and three")
            result: Any = llm.create_completion(
                "Once upon", temperature=0.0, logits_processor=processor, **end, **options
            )
            result = result if isinstance(result, dict) else list(result)[-1]
            usages.append(result["usage"])
        assert usages[0] == usages[1]
        assert 0 < usages[0]["completion_tokens"] < 5


def test_wrong_stream_options_are_refused(llm: Llama) -> None:
    with pytest.raises(TypeError, match=r"stream_options.*True"):
        llm.create_completion("Once", stream=True, stream_options=True)


def test_aborted_streams_leave_nothing_behind(llm: Llama) -> None:
    set_template(llm, OPENS)
    text = "Two and two.</think>It is 4."
    for n in range(20):
        stream = llm.create_chat_completion(
            USER, stream=True, logits_processor=writing(llm, text), stream_options=INCLUDE
        )
        for _ in range(n % 7):
            next(stream)
        stream.close()
    assert both(llm, text) == {"content": "It is 4.", "reasoning_content": "Two and two."}


def test_generate_hands_on_what_is_sent(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def generate(self: Llama, tokens: list[int], **kwargs: Any) -> Iterator[int]:
        events.append((tokens, kwargs))
        try:
            events.append((yield 65))
            yield 66
        finally:
            events.append("closed")

    monkeypatch.setattr(parent.Llama, "generate", generate)
    written = llm.generate([1, 2], temp=0.5)
    assert next(written) == 65
    assert written.send([3]) == 66
    written.close()
    assert events == [([1, 2], {"temp": 0.5}), [3], "closed"]


@pytest.mark.parametrize("name", ["create_completion", "create_chat_completion", "generate"])
def test_signatures_are_the_parent_s_and_our_keywords(name: str) -> None:
    theirs = inspect.signature(getattr(parent.Llama, name)).parameters
    ours = inspect.signature(getattr(Llama, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert set(ours) - set(theirs) <= {
        "stream_options",
        "reasoning_format",
        "chat_template_kwargs",
    }
