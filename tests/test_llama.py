"""`Llama` with and without a budget, on a tiny model: how the class behaves."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny_models

from beaconkv_gguf import (
    BeaconConfig,
    BeaconError,
    Llama,
    LlamaTokenizer,
    LogitsProcessorList,
    llama_cpp,
)
from beaconkv_gguf.llama import CACHE_TYPES

BUDGET = 384
N_LAYER, N_HEAD_KV, N_EMBD_KV = 2, 2, 128  # of the tiny model


@pytest.fixture(scope="module")
def model_path(tiny_path: Callable[[str], Path]) -> Path:
    return tiny_path("llama")


def load(path: Path, **kwargs: Any) -> Llama:
    defaults = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    return Llama(path, **{**defaults, **kwargs})


@pytest.fixture(scope="module")
def bounded(model_path: Path) -> Iterator[Llama]:
    """1,024 logical tokens in 384 cells."""
    with load(model_path, kv_budget=BUDGET) as llm:
        yield llm


def endless(llm: Llama) -> LogitsProcessorList:
    """Keeps the model from ending its text."""
    ends = [t for t in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(llm._model.vocab, t)]

    def process(input_ids: Any, scores: Any) -> Any:
        scores[ends] = -np.inf
        return scores

    return LogitsProcessorList([process])


def write(llm: Llama, prompt: str, max_tokens: int | None) -> dict[str, Any]:
    result = llm.create_completion(
        prompt, max_tokens=max_tokens, temperature=0.0, logits_processor=endless(llm)
    )
    assert isinstance(result, dict)
    return result


# --- it runs on -------------------------------------------------------------------------------


def test_generation_reaches_the_logical_context(bounded: Llama) -> None:
    result = write(bounded, "Once upon a time", max_tokens=None)
    assert result["usage"]["total_tokens"] == bounded.n_ctx() == 1024
    assert result["choices"][0]["finish_reason"] == "length"
    stats = bounded.kv_stats()
    assert stats.n_logical in (1023, 1024)  # of the last token it matters that it was sampled
    assert stats.n_held <= BUDGET
    assert stats.n_evicted == stats.n_logical - stats.n_held
    assert stats.n_compact >= (1023 - BUDGET) // 128
    assert stats.us_compact > 0


def test_every_head_holds_sinks_and_the_recent_window(bounded: Llama) -> None:
    write(bounded, "Once upon a time", max_tokens=600)
    n_logical = bounded.kv_stats().n_logical
    assert 0 < bounded.boundary <= n_logical - 32
    for layer in range(N_LAYER):
        for head in range(N_HEAD_KV):
            positions = bounded.kv_positions(layer, head)
            assert positions.dtype == np.int32
            assert len(positions) == bounded.kv_stats().n_held <= BUDGET
            assert np.all(np.diff(positions) > 0)
            assert positions[:4].tolist() == [0, 1, 2, 3]
            tail = np.arange(bounded.boundary, n_logical)
            assert positions[-len(tail) :].tolist() == tail.tolist()


def test_max_tokens_and_a_new_chat_after_the_cells_ran_out(bounded: Llama) -> None:
    result = write(bounded, "The lighthouse", max_tokens=500)
    assert result["usage"]["completion_tokens"] == 500
    assert result["choices"][0]["finish_reason"] == "length"
    reply = bounded.create_chat_completion(
        [{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0.0
    )
    assert reply["usage"]["completion_tokens"] <= 8  # type: ignore[index]
    assert reply["choices"][0]["message"]["content"]  # type: ignore[index]


def test_same_greedy_output_cold_and_warm(bounded: Llama) -> None:
    bounded.reset()
    cold = write(bounded, "A list of colours:", max_tokens=40)
    warm = write(bounded, "A list of colours:", max_tokens=40)
    write(bounded, "A list of colours: red", max_tokens=500)  # evicts
    again = write(bounded, "A list of colours:", max_tokens=40)
    texts = {result["choices"][0]["text"] for result in (cold, warm, again)}
    assert len(texts) == 1


def test_detokenize_is_the_parent_s(smollm2_path: Path) -> None:
    with load(smollm2_path, vocab_only=True) as llm:
        parent = LlamaTokenizer(llm)
        tokens = llm.tokenize(" Žluťoučký kůň 🐎 <|im_end|>".encode(), special=True)
        for ids in (tokens, [llm.token_bos(), *tokens], [], list(range(2000))):
            for special in (False, True):
                assert llm.detokenize(ids, special=special) == parent.detokenize(
                    ids, special=special
                )


def test_max_tokens_in_mid_character(bounded: Llama) -> None:
    """The tiny model writes random bytes: its text ends in an incomplete character at times."""
    for n in range(1, 12):
        result = write(bounded, f"prompt {n}", max_tokens=n)
        assert result["usage"]["completion_tokens"] == n
        assert result["choices"][0]["finish_reason"] == "length"
        chunks: Any = bounded.create_completion(
            f"prompt {n}", max_tokens=n, temperature=0.0, stream=True
        )
        assert list(chunks)[-1]["choices"][0]["finish_reason"] in ("length", "stop")


def test_prompt_that_fits_is_never_refused(bounded: Llama) -> None:
    tokens = [65] + [65] * (bounded.n_ctx() - 2)
    result = bounded.create_completion(tokens, max_tokens=5, temperature=0.0)
    assert result["usage"]["prompt_tokens"] == 1023  # type: ignore[index]
    assert result["usage"]["completion_tokens"] == 1  # type: ignore[index]


def test_prompt_beyond_the_context_is_one_clear_error(bounded: Llama) -> None:
    with pytest.raises(ValueError, match=r"\(1100\).* 1024"):
        bounded.create_completion([65] * 1100)
    assert write(bounded, "Still", max_tokens=4)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("kv_budget", [None, BUDGET])
def test_eval_beyond_the_context_is_refused_and_changes_nothing(
    model_path: Path, kv_budget: int | None
) -> None:
    with load(model_path, n_ctx=512, kv_budget=kv_budget) as llm:
        llm.eval([65] * 500)
        with pytest.raises(ValueError, match=r"\(520\).* 512"):
            llm.eval([65] * 20)
        assert llm.n_tokens == llm.kv_stats().n_logical == 500
        llm.eval([65] * 12)
        tokens = llm.generate([65, 66, 67], temp=0.0, logits_processor=endless(llm))
        with pytest.raises(ValueError, match="exceed context window of 512"):
            list(tokens)
        assert write(llm, "Still", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_eval_takes_arrays(model_path: Path) -> None:
    tokens = np.arange(3, 203)
    with load(model_path, kv_budget=BUDGET) as llm, load(model_path, kv_budget=BUDGET) as other:
        llm.eval(tokens)
        other.eval(tokens.tolist())
        assert llm.sample(temp=0.0) == other.sample(temp=0.0)


def test_context_that_is_no_multiple_of_256(model_path: Path) -> None:
    with load(model_path, n_ctx=300) as llm:
        result = write(llm, "Once", max_tokens=None)
        assert result["usage"]["total_tokens"] == llm.n_ctx() == 512


def test_setting_n_tokens_back_reads_again(bounded: Llama) -> None:
    write(bounded, "Once upon a time", max_tokens=600)
    kept = bounded._input_ids[:300].tolist()
    bounded.n_tokens = 300
    bounded.eval([65])
    assert bounded._input_ids.tolist() == [*kept, 65]
    assert bounded.kv_stats().n_logical == 301


def test_sizes_of_batches_leave_no_trace(model_path: Path) -> None:
    tokens = [65, *np.random.default_rng(0).integers(32, 127, 799).tolist()]
    held = set()
    for n_batch in (32, 64, 512):
        with load(model_path, kv_budget=BUDGET, n_batch=n_batch) as llm:
            assert llm.n_batch <= n_batch
            llm.eval(tokens)
            held.add(llm.kv_stats().n_held)
    assert len(held) == 1


# --- budget, statistics, pins -----------------------------------------------------------------


def test_stats_count_the_memory(model_path: Path) -> None:
    with load(model_path) as full, load(model_path, kv_budget=BUDGET) as llm:
        full_stats, stats = full.kv_stats(), llm.kv_stats()
    assert full_stats.budget == 0
    assert full_stats.bytes_k == full_stats.bytes_v == N_LAYER * 1024 * N_EMBD_KV * 2
    assert full_stats.bytes_ring == full_stats.bytes_beacon == full_stats.n_compact == 0
    assert full_stats.ratio == pytest.approx(1.0, abs=0.01)
    assert (stats.budget, stats.n_ctx_seq, stats.n_layer) == (BUDGET, 1024, N_LAYER)
    assert stats.bytes_k == stats.bytes_v == N_LAYER * BUDGET * N_EMBD_KV * 2
    assert stats.bytes_full == full_stats.bytes_k + full_stats.bytes_v
    parts = stats.bytes_k + stats.bytes_v + stats.bytes_ring + stats.bytes_beacon
    assert parts <= stats.bytes_allocated <= 1.01 * parts
    assert stats.ratio == stats.bytes_full / stats.bytes_allocated
    assert "384 cells" in str(stats)
    with pytest.raises(AttributeError):
        stats.budget = 1  # type: ignore[misc]


@pytest.mark.parametrize(("cache_type", "ratio"), [("f16", 5.8), ("q8_0", 10.0)])
def test_memory_is_really_not_allocated(smollm2_path: Path, cache_type: str, ratio: float) -> None:
    """1,280 cells for 8,192 tokens, with query rows and centroids, against the full f16 cache."""
    with load(smollm2_path, n_ctx=8192) as llm:
        full = llm.kv_stats().bytes_allocated
    types = {"type_k": cache_type, "type_v": cache_type}
    with load(smollm2_path, n_ctx=8192, kv_budget=1280, **types) as llm:
        assert full >= ratio * llm.kv_stats().bytes_allocated


@pytest.mark.parametrize(
    ("kv_budget", "n_ctx", "cells"),
    [(512, 1024, 512), (0.5, 1024, 512), ("auto", 4096, 1024), ("auto", 1024, None)],
)
def test_forms_of_a_budget(model_path: Path, kv_budget: Any, n_ctx: int, cells: int | None) -> None:
    with load(model_path, n_ctx=n_ctx, kv_budget=kv_budget) as llm:
        assert llm.kv_budget == cells
        assert llm.kv_stats().budget == (cells or 0)
        assert llm.n_ctx() == n_ctx


def test_context_of_the_model(model_path: Path) -> None:
    with load(model_path, n_ctx=0, kv_budget=0.25) as llm:
        assert (llm.n_ctx(), llm.kv_budget) == (8192, 2048)


def test_sinks_and_recent_are_arguments(model_path: Path) -> None:
    config = BeaconConfig(n_sink=16, n_recent=64, window=64, n_probe=16, pin_share=0.0)
    with load(model_path, n_ctx=768, kv_budget=BUDGET, beacon=config) as llm:
        write(llm, "Once", max_tokens=500)
        positions = llm.kv_positions(1, 1)
        assert positions[:16].tolist() == list(range(16))
        assert positions[-64:].tolist() == list(range(positions[-1] - 63, positions[-1] + 1))


def test_prompt_is_pinned(bounded: Llama) -> None:
    n_prompt = len(bounded.tokenize(b"A short problem statement: add 2 and 3."))
    write(bounded, "A short problem statement: add 2 and 3.", max_tokens=500)
    assert bounded.kv_stats().n_pinned >= n_prompt
    assert bounded.kv_positions(1, 0)[:n_prompt].tolist() == list(range(n_prompt))


def test_pin(bounded: Llama) -> None:
    bounded.reset()
    bounded.eval([65] * 150)
    bounded.pin(90)
    assert bounded.kv_stats().n_pinned == 90
    bounded.eval([70] * 600)
    assert bounded.kv_positions(0, 0)[:90].tolist() == list(range(90))
    with pytest.raises(ValueError, match="-1"):
        bounded.pin(-1)
    with pytest.raises(BeaconError):
        bounded.pin(BUDGET)


def test_no_budget_has_no_pins(model_path: Path) -> None:
    with load(model_path) as llm:
        assert llm.boundary == 0
        with pytest.raises(BeaconError, match="budget"):
            llm.pin(4)
        with pytest.raises(BeaconError, match="budget"):
            llm.kv_positions(0, 0)


def test_positions_of_a_layer_that_is_not_there(bounded: Llama) -> None:
    with pytest.raises(ValueError, match="99"):
        bounded.kv_positions(99, 0)
    with pytest.raises(ValueError, match="7"):
        bounded.kv_positions(0, 7)


def test_budget_switches_flash_attention_on(
    model_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with load(model_path, kv_budget=BUDGET, verbose=True) as llm:
        assert llm.context_params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        assert llm.n_batch == llama_cpp.llama_n_batch(llm.ctx)
    assert "flash attention on" in capfd.readouterr().err


def test_pickle_carries_the_budget(model_path: Path) -> None:
    config = BeaconConfig(window=64, n_probe=16)
    with load(model_path, kv_budget=BUDGET, beacon=config, type_k="q8_0") as llm:
        copy = pickle.loads(pickle.dumps(llm))
    with copy:
        assert (copy.kv_budget, copy.beacon) == (BUDGET, config)
        assert copy.kv_stats().budget == BUDGET
        assert copy.context_params.type_k == CACHE_TYPES["q8_0"]


# --- cache types ------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_budget", [None, BUDGET])
def test_cache_types_by_name_and_number(model_path: Path, kv_budget: int | None) -> None:
    sizes = []
    for type_kv in ("f16", "q8_0", CACHE_TYPES["q8_0"]):
        with load(
            model_path, kv_budget=kv_budget, type_k=type_kv, type_v=type_kv, flash_attn=True
        ) as llm:
            stats = llm.kv_stats()
            sizes.append(stats.bytes_k + stats.bytes_v)
    assert sizes[1] == sizes[2] == sizes[0] * 34 / 64


@pytest.mark.parametrize("type_kv", ["bf16", "q4_0"])
def test_quantised_caches_run_past_the_budget(model_path: Path, type_kv: str) -> None:
    with load(model_path, kv_budget=BUDGET, type_k=type_kv, type_v=type_kv) as llm:
        write(llm, "Once upon a time", max_tokens=450)
        assert llm.kv_stats().n_compact > 0


# --- bad input: clear, in under a second, and the process lives -----------------------------


def truncated(path: Path, n_bytes: int, folder: Path) -> Path:
    short = folder / "short.gguf"
    with path.open("rb") as source:
        short.write_bytes(source.read(n_bytes))
    return short


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"kv_budget": 40}, ValueError, "minimum"),
        ({"kv_budget": -1}, ValueError, "-1"),
        ({"kv_budget": 2048}, ValueError, "2048 cells is above n_ctx=1024"),
        ({"kv_budget": float("nan")}, ValueError, "nan"),
        ({"kv_budget": "lots"}, ValueError, "lots"),
        ({"kv_budget": True}, TypeError, "True"),
        ({"kv_budget": BUDGET, "beacon": {"window": 3}}, TypeError, "BeaconConfig"),
        ({"kv_budget": BUDGET, "embedding": True}, ValueError, "embedding"),
        ({"kv_budget": BUDGET, "vocab_only": True}, BeaconError, "vocabulary"),
        ({"type_k": "q9"}, ValueError, "q8_0 (8)"),
        ({"type_v": 1000}, ValueError, "q8_0 (8)"),
        ({"type_v": "q8_0"}, ValueError, "flash_attn=True"),
    ],
)
def test_bad_arguments(
    model_path: Path, arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    start = time.perf_counter()
    with pytest.raises(kind) as caught:
        load(model_path, **arguments)
    assert text in str(caught.value)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("n_ctx", [1024, 0])
def test_bad_files(model_path: Path, tmp_path: Path, n_ctx: int) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    cases = [
        (tmp_path / "missing.gguf", "does not exist"),
        (text, "magic"),
        (truncated(model_path, 500_000, tmp_path), "corrupted or incomplete"),
        (tmp_path, "failed to load"),
    ]
    for path, reason in cases:
        for kv_budget in (None, 0.5):
            start = time.perf_counter()
            with pytest.raises(ValueError, match=reason):
                load(path, n_ctx=n_ctx, kv_budget=kv_budget)
            assert time.perf_counter() - start < 1.0


@pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="this build has a GPU")
@pytest.mark.parametrize("n_gpu_layers", [-1, 20])
def test_gpu_layers_without_a_gpu_warn(model_path: Path, n_gpu_layers: int) -> None:
    with pytest.warns(RuntimeWarning, match=f"n_gpu_layers={n_gpu_layers}"):
        load(model_path, n_gpu_layers=n_gpu_layers).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(model_path).close()


def test_misspelt_keyword_warns(model_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="kv_buget"):
        load(model_path, kv_buget=3).close()


# --- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(tiny_models.BOUNDED))
def test_models_chat_twice_past_the_budget(tiny_path: Callable[[str], Path], name: str) -> None:
    with load(tiny_path(name), kv_budget=BUDGET, chat_format="chatml") as llm:
        for text in ("Hello", "Something else"):
            reply: Any = llm.create_chat_completion(
                [{"role": "user", "content": text}],
                max_tokens=BUDGET + 100,
                temperature=0.0,
                logits_processor=endless(llm),
            )
            assert reply["usage"]["completion_tokens"] == BUDGET + 100
            assert reply["choices"][0]["finish_reason"] == "length"
        stats = llm.kv_stats()
        assert stats.n_held <= BUDGET < stats.n_logical


@pytest.mark.parametrize("name", sorted(tiny_models.REFUSED))
def test_refused_models_are_named(tiny_path: Callable[[str], Path], name: str) -> None:
    path = tiny_path(name)
    with pytest.raises(BeaconError, match=f"{path}: .*can't live in a KV budget: "):
        load(path, kv_budget=BUDGET)


# --- closing ----------------------------------------------------------------------------------


def test_close_twice_and_use_after_it(model_path: Path) -> None:
    llm = load(model_path, kv_budget=BUDGET)
    llm.close()
    llm.close()
    for use in (llm.kv_stats, lambda: llm("hello"), lambda: llm.eval([1])):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_memory_returns_after_close(model_path: Path) -> None:
    process = psutil.Process()

    def once() -> int:
        with load(model_path, kv_budget=BUDGET) as llm:
            write(llm, "Hello", max_tokens=2)
        return process.memory_info().rss

    first = [once() for _ in range(3)][-1]
    last = [once() for _ in range(10)][-1]
    assert last < first + 16 * 1024 * 1024


def test_memory_is_flat_over_20000_tokens(model_path: Path) -> None:
    tokens = [i * 7 % 200 + 3 for i in range(200)]
    with load(model_path, n_ctx=32768, kv_budget=BUDGET) as llm:
        llm.eval(tokens * 10)
        before = psutil.Process().memory_info().rss
        for _ in range(90):
            llm.eval(tokens[:180])
            for token in tokens[180:]:
                llm.eval([token])
        assert llm.n_tokens == 20_000 and llm.kv_stats().n_held <= BUDGET
        assert psutil.Process().memory_info().rss < before + 4 * 1024 * 1024
