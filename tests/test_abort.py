"""Calls that are stopped, threads, and failures: an exception, and the next call works."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beaconkv_gguf import Aborted, Llama, llama_cpp, states
from native import Context, Model, budget, child_environment, random_tokens

BUDGET = 384
Tiny = Callable[[str], Model]


@pytest.fixture(scope="module")
def model_path(tiny_path: Callable[[str], Path]) -> Path:
    return tiny_path("llama")


def load(path: Path, **kwargs: Any) -> Llama:
    settings = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    return Llama(path, **{**settings, "kv_budget": BUDGET, **kwargs})


@pytest.fixture
def llm(model_path: Path) -> Iterator[Llama]:
    with load(model_path) as llm:
        yield llm


@pytest.fixture(scope="module")
def slow(smollm2_path: Path) -> Iterator[Llama]:
    """A model whose prompt of 2,000 tokens takes seconds."""
    with load(smollm2_path, n_ctx=4096, kv_budget=1024) as llm:
        yield llm


def later(seconds: float, call: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer


# --- abort ----------------------------------------------------------------------------------------


def test_a_prompt_stops_being_read_and_the_next_call_works(slow: Llama) -> None:
    tokens = np.random.default_rng(0).integers(1000, 40000, 2000).tolist()
    later(0.3, slow.abort)
    reply = slow.create_completion(tokens, max_tokens=5)
    assert reply["choices"][0]["text"] == ""
    assert reply["choices"][0]["finish_reason"] == "abort"
    assert slow.n_tokens < 2000
    reply = slow.create_completion(tokens[:100], max_tokens=5, temperature=0.0)
    assert reply["usage"]["completion_tokens"] > 0
    assert reply["choices"][0]["finish_reason"] in ("stop", "length")


def test_writing_stops_with_what_was_written(slow: Llama) -> None:
    later(0.5, slow.abort)
    reply = slow.create_completion(
        "One, two, three,",
        max_tokens=3000,
        temperature=0.0,
        logit_bias={slow.token_eos(): -100.0, 0: -100.0},
    )
    assert reply["choices"][0]["finish_reason"] == "abort"
    assert 0 < reply["usage"]["completion_tokens"] < 1000
    assert reply["choices"][0]["text"]


def test_a_stream_stops_between_two_chunks(llm: Llama) -> None:
    chunks = llm.create_completion(random_tokens(30), max_tokens=500, stream=True)
    next(chunks)
    n_tokens = llm.n_tokens
    llm.abort()
    assert list(chunks)[-1]["choices"][0]["finish_reason"] == "abort"
    assert llm.n_tokens == n_tokens


def test_chats_tell_that_they_were_stopped(slow: Llama) -> None:
    chunks = slow.create_chat_completion(
        [{"role": "user", "content": "Count to a hundred."}], stream=True, temperature=0.0
    )
    next(chunks)
    next(chunks)
    slow.abort()
    assert list(chunks)[-1]["choices"][0]["finish_reason"] == "abort"


def test_eval_and_generate(llm: Llama) -> None:
    written = llm.generate(random_tokens(30), temp=0.0)
    first = [next(written) for _ in range(3)]
    llm.abort()
    assert list(written) == []
    written = llm.generate(random_tokens(30), temp=0.0)
    assert [next(written) for _ in range(3)] == first
    next(llm.generate(random_tokens(5)))  # takes over
    with pytest.raises(RuntimeError, match="another one was started"):
        next(written)


def test_an_abort_with_nothing_at_work_does_nothing(llm: Llama) -> None:
    llm.abort()
    llm.eval(random_tokens(10))
    assert llm.n_tokens == 10


def test_eval_raises_and_keeps_the_batches_before(slow: Llama) -> None:
    tokens = np.random.default_rng(1).integers(1000, 40000, 3000).tolist()
    slow.reset()
    later(0.5, slow.abort)
    with pytest.raises(Aborted, match="stopped by abort"):
        slow.eval(tokens)
    n = slow.n_tokens
    assert n % slow.n_batch == 0 and n < 3000
    slow.eval(tokens[n : n + 50])
    assert slow.kv_stats().n_logical == n + 50


def test_a_hundred_aborted_streams_leave_a_llama_that_answers(llm: Llama) -> None:
    prompt = random_tokens(120)
    expected = llm.create_completion(prompt, max_tokens=20, temperature=0.0)["choices"]
    for i in range(100):
        chunks = llm.create_completion(prompt[: 20 + i], max_tokens=60, stream=True)
        next(chunks)
        if i % 2:
            llm.abort()
            list(chunks)
        chunks.close()
    assert llm.create_completion(prompt, max_tokens=20, temperature=0.0)["choices"] == expected


def test_an_aborted_compaction_leaves_every_cell(tiny: Tiny) -> None:
    def context() -> Context:
        ctx = Context(tiny("llama"), budget(128, window=32, n_recent=16, n_probe=8), n_ctx=1024)
        ctx.decode(random_tokens(300))
        while ctx.stats()["n_held"] < 128:
            ctx.decode([7])
        return ctx

    stop = llama_cpp.ggml_abort_callback(lambda _data: True)
    go = llama_cpp.ggml_abort_callback(lambda _data: False)
    with context() as ctx, context() as other:
        before = ctx.positions(), ctx.stats()["n_compact"]
        llama_cpp.llama_set_abort_callback(ctx.ptr, stop, None)
        assert ctx.try_decode({0: [9]}) == 2
        assert (ctx.positions(), ctx.stats()["n_compact"]) == before
        llama_cpp.llama_set_abort_callback(ctx.ptr, go, None)
        tokens = random_tokens(100, seed=1)
        np.testing.assert_array_equal(ctx.step(tokens), other.step(tokens))
        assert ctx.positions() == other.positions()


_INTERRUPT = """
import sys
import beaconkv_gguf
sys.path[:0] = [sys.argv[2]]
from test_abort import load
import numpy as np
tokens = np.random.default_rng(0).integers(1000, 40000, 3000).tolist()
with load(sys.argv[1], n_ctx=4096, kv_budget=1024) as llm:
    expected = llm.create_completion(tokens[:50], max_tokens=8, temperature=0.0)["choices"]
    print("ready", flush=True)
    try:
        llm.create_completion(tokens, max_tokens=3000)
        print("not interrupted")
    except KeyboardInterrupt:
        print("interrupted", llm.n_tokens < 3000)
    assert llm.create_completion(tokens[:50], max_tokens=8, temperature=0.0)["choices"] == expected
    print("answers")
"""


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to one process")
def test_a_keyboard_interrupt_stops_and_the_next_call_works(smollm2_path: Path) -> None:
    folder = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPT, str(smollm2_path), folder],
        cwd=Path(__file__).parent,  # not where the sources of the package are
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted True\nanswers\n"
    assert process.returncode == 0


# --- interrupts at the worst moment ---------------------------------------------------------------


class Interrupted:
    """Calls a function, and is interrupted right after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            call(*args, **kwargs)
            monkeypatch.setattr(owner, name, call)
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, name, interrupted)


def greedy(llm: Llama, prompt: list[int], n: int) -> list[int]:
    written = llm.generate(prompt, temp=0.0)
    return [next(written) for _ in range(n)]


def test_an_interrupt_while_a_state_is_loaded_leaves_no_mixture(
    llm: Llama, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.eval(random_tokens(300, seed=1))
    state = llm.save_state()
    llm.eval(random_tokens(500))
    text = llm.input_ids[:800].tolist()
    Interrupted(monkeypatch, states, "set_context")
    with pytest.raises(KeyboardInterrupt):
        llm.load_state(state)
    with load(model_path) as cold:
        assert greedy(llm, text, 50) == greedy(cold, text, 50)


def test_an_interrupt_while_a_prompt_is_put_back_leaves_no_mixture(
    llm: Llama, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = random_tokens(500), random_tokens(500, seed=1)
    greedy(llm, a, 50)
    greedy(llm, b, 50)
    Interrupted(monkeypatch, llm._snapshots, "restore")
    with pytest.raises(KeyboardInterrupt):
        greedy(llm, a, 50)
    with load(model_path) as cold:
        assert greedy(llm, b, 50) == greedy(cold, b, 50)


@pytest.mark.parametrize("n_written", [0, 1, 7])
def test_an_interrupt_after_a_decode_loses_no_token(
    n_written: int, llm: Llama, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_tokens(60)
    written = llm.generate(prompt, temp=0.0)
    for _ in range(n_written):
        next(written)
    Interrupted(monkeypatch, sys.modules["llama_cpp"], "llama_decode")
    with pytest.raises(KeyboardInterrupt):
        next(written)
    with load(model_path) as cold:
        assert greedy(llm, prompt, 50) == greedy(cold, prompt, 50)


def test_an_interrupt_in_sampling_after_a_load_loses_no_token(
    llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.eval(random_tokens(30))
    llm.load_state(llm.save_state())
    for _ in range(3):
        Interrupted(monkeypatch, sys.modules["llama_cpp"], "llama_decode")
        with pytest.raises(KeyboardInterrupt):
            llm.sample()
    assert llm.n_tokens == 30


# --- threads --------------------------------------------------------------------------------------


def test_a_second_thread_gets_an_error_and_the_first_its_answer(slow: Llama) -> None:
    started = threading.Event()
    reply: list[Any] = []

    def stop_or_go(input_ids: Any, logits: Any) -> bool:
        started.set()
        return False

    def complete() -> None:
        reply.append(
            slow.create_completion(
                "One, two,",
                max_tokens=400,
                temperature=0.0,
                logit_bias={slow.token_eos(): -100.0, 0: -100.0},
                stopping_criteria=llama_cpp_criteria(stop_or_go),
            )
        )

    thread = threading.Thread(target=complete)
    thread.start()
    assert started.wait(60)
    calls = {
        "create_completion": lambda: slow.create_completion("x", max_tokens=1),
        "stream": lambda: next(slow.create_completion("x", max_tokens=1, stream=True)),
        "eval": lambda: slow.eval([5]),
        "sample": lambda: slow.sample(),
        "save_state": lambda: slow.save_state(),
        "reset": lambda: slow.reset(),
        "pin": lambda: slow.pin(0),
        "positions": lambda: slow.kv_positions(0, 0),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match="at work in another thread"):
            call()
            pytest.fail(name)
    assert slow.kv_stats().n_logical > 0  # this one any thread may ask
    thread.join()
    assert reply[0]["choices"][0]["finish_reason"] in ("stop", "length")


def llama_cpp_criteria(criterion: Callable[[Any, Any], bool]) -> Any:
    from beaconkv_gguf import StoppingCriteriaList

    return StoppingCriteriaList([criterion])


def test_a_stream_may_go_from_thread_to_thread(llm: Llama) -> None:
    expected = "".join(
        chunk["choices"][0]["text"]
        for chunk in llm.create_completion(
            random_tokens(30), max_tokens=40, stream=True, temperature=0.0
        )
    )
    chunks = llm.create_completion(random_tokens(30), max_tokens=40, stream=True, temperature=0.0)
    texts: list[str] = []

    def take() -> None:
        chunk = next(chunks, None)
        texts.append(chunk["choices"][0]["text"] if chunk else "")

    for _ in range(60):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    assert "".join(texts) == expected


def test_two_llamas_in_two_threads_do_not_meet(model_path: Path) -> None:
    def tokens_of(llm: Llama, seed: int) -> list[int]:
        written = llm.generate(random_tokens(200, seed), temp=0.0)
        return [next(written) for _ in range(400)]

    expected = []
    for seed in (0, 1):
        with load(model_path) as llm:
            expected.append(tokens_of(llm, seed))
    results: dict[int, list[int]] = {}

    def work(seed: int) -> None:
        with load(model_path) as llm:
            results[seed] = tokens_of(llm, seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[0], results[1]] == expected


def test_close_stops_what_another_thread_is_in(smollm2_path: Path) -> None:
    llm = load(smollm2_path, n_ctx=4096, kv_budget=1024)
    tokens = np.random.default_rng(0).integers(1000, 40000, 3000).tolist()
    reply: list[Any] = []
    thread = threading.Thread(
        target=lambda: reply.append(llm.create_completion(tokens, max_tokens=5))
    )
    thread.start()
    time.sleep(0.5)
    llm.close()
    thread.join(30)
    assert not thread.is_alive()
    assert reply[0]["choices"][0]["finish_reason"] == "abort"
    with pytest.raises(RuntimeError, match="closed"):
        llm.kv_stats()


def test_statistics_disturb_no_stream(llm: Llama) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            llm.kv_stats()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(5):
            assert len(greedy(llm, random_tokens(50), 60)) == 60
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("look", ["boundary", "kv_positions", "save_state"])
def test_a_look_at_a_paused_stream_does_not_undo_its_abort(look: str, llm: Llama) -> None:
    chunks = llm.create_completion(random_tokens(30), max_tokens=200, stream=True)
    next(chunks)
    llm.abort()
    attribute = getattr(llm, look)
    if callable(attribute):
        attribute(*((0, 0) if look == "kv_positions" else ()))
    assert list(chunks)[-1]["choices"][0]["finish_reason"] == "abort"


def test_close_within_a_call_waits_for_its_end(model_path: Path) -> None:
    llm = load(model_path)

    def close(_ids: Any, _logits: Any) -> bool:
        llm.close()
        return False

    reply = llm.create_completion(random_tokens(30), max_tokens=50, stopping_criteria=close)
    assert reply["choices"][0]["finish_reason"] == "abort"
    with pytest.raises(RuntimeError, match="closed"):
        llm.kv_stats()
    with pytest.raises(RuntimeError, match="closed"):
        llm.eval([5])
    llm.close()


def test_del_frees_the_model_at_once(model_path: Path) -> None:
    llm = load(model_path)
    llm.create_completion(random_tokens(50), max_tokens=3)
    closed = []
    close = llm._stack.callback(lambda: closed.append(True))
    gc.disable()
    try:
        del llm, close
        assert closed == [True]
    finally:
        gc.enable()
