"""What a context with a budget promises: what it holds, what it forgets, what can be removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from beaconkv_gguf import _library, _native, llama_cpp
from beaconkv_gguf import reference as ref
from native import Context, Model, budget, log, prose, random_tokens

Tiny = Callable[[str], Model]

CELLS = 256
FIELDS = {"window": 32, "n_sink": 4, "n_recent": 16, "n_beacon": 8, "n_probe": 8}


def bounded(**fields: Any) -> Any:
    return budget(CELLS, **{**FIELDS, **fields})


def unpinned(**fields: Any) -> Any:
    return bounded(pin_share=0.0, **fields)


def assert_sane(ctx: Context, seq_id: int = 0) -> None:
    """Every head holds what it must, nothing twice, nothing that was never there."""
    length, boundary = ctx.length[seq_id], _native.boundary(ctx.ptr, seq_id)
    stats = ctx.stats(seq_id)
    front = set(range(min(max(FIELDS["n_sink"], stats["n_pinned"]), length)))
    assert stats["n_held"] <= CELLS
    assert stats["n_logical"] == length == ctx.seq_pos_max(seq_id) + 1
    assert stats["n_evicted"] == length - stats["n_held"]
    for held in ctx.positions(seq_id).values():
        assert len(held) == stats["n_held"]
        assert held == sorted(set(held))
        assert front | set(range(boundary, length)) <= set(held) <= set(range(length))


# --- how much is held -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_models.BOUNDED)
def test_models_run_past_their_budget_and_stay_finite(name: str, tiny: Tiny) -> None:
    model, spec = tiny(name), tiny_models.ALL[name]()
    with Context(model, unpinned(), n_ctx=1024, n_batch=64) as ctx:
        assert _native.layers(ctx.ptr).tolist() == list(spec.layers)
        ctx.decode(random_tokens(500))
        logits = ctx.step(random_tokens(100, seed=1))
        assert np.isfinite(logits).all()
        assert ctx.stats()["n_compact"] > 3
        assert_sane(ctx)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_cache_types_run_past_their_budget(kind: str, tiny: Tiny) -> None:
    with Context(tiny("llama"), unpinned(), n_ctx=1024, type_k=kind, type_v=kind) as ctx:
        assert np.isfinite(ctx.decode(random_tokens(900))).all()
        assert_sane(ctx)


def test_no_layer_or_head_ever_holds_more_than_the_budget(tiny: Tiny) -> None:
    tokens = random_tokens(1000)
    with Context(tiny("llama"), unpinned(), n_ctx=1024) as ctx:
        for i, token in enumerate(tokens):
            ctx.decode([token])
            assert ctx.stats()["n_held"] == ref.n_held(i + 1, CELLS, FIELDS["window"])
            if i % 45 == 0:
                assert_sane(ctx)
        assert len({tuple(held) for held in ctx.positions().values()}) > 1  # heads differ


def test_memory_is_that_of_the_budget(tiny: Tiny) -> None:
    with Context(tiny("llama"), unpinned(), n_ctx=4096) as ctx:
        stats = ctx.stats()
        row = 2 * 64 * 2  # KV heads, head size, bytes of f16
        assert stats["bytes_k"] == stats["bytes_v"] == 2 * CELLS * row
        assert stats["bytes_full"] == 2 * 2 * 4096 * row
        ring = 2 * (2 * FIELDS["n_probe"] + 1) * 4 * 64 * 2  # layers, rows, heads, head size, f16
        assert stats["bytes_ring"] == ring


def test_only_layers_with_full_attention_are_bounded(tiny: Tiny) -> None:
    with Context(tiny("gemma3"), unpinned(), n_ctx=4096) as ctx:
        assert _native.layers(ctx.ptr).tolist() == [1, 3]
        assert _native.n_head_kv(ctx.ptr, 0) == 0
        assert ctx.stats()["bytes_other"] > 0


@pytest.mark.parametrize("cells", [CELLS, 512])
def test_a_prompt_in_any_chunks_ends_at_the_same_size(cells: int, tiny: Tiny) -> None:
    tokens = random_tokens(2000)
    held = []
    for n_batch in (64, 512, 2048):
        params = budget(cells, pin_share=0.0, **FIELDS)
        with Context(tiny("llama"), params, n_ctx=2048, n_batch=n_batch) as ctx:
            most = ref.max_batch(cells, FIELDS["window"], 4, FIELDS["n_recent"], 0.0)
            assert ctx.n_batch == min(n_batch, most) == min(n_batch, _native.max_batch(params))
            ctx.decode(tokens)
            held.append(ctx.stats()["n_held"])
            if cells == CELLS:
                assert_sane(ctx)
    assert held == [ref.n_held(2000, cells, FIELDS["window"])] * 3


def test_decoding_past_the_logical_context_is_an_error_and_no_overrun(tiny: Tiny) -> None:
    with Context(tiny("llama"), unpinned(), n_ctx=512) as ctx:
        ctx.decode(random_tokens(512))
        before = ctx.positions(), ctx.stats()["n_held"]
        assert ctx.try_decode({0: [7]}) != 0
        assert ctx.try_decode({0: [7, 8, 9]}) != 0
        assert (ctx.positions(), ctx.stats()["n_held"]) == before
        assert ctx.seq_rm(500)
        assert np.isfinite(ctx.decode([7] * 12)).all()
        assert ctx.try_decode({0: [7]}) != 0


# --- what can be removed --------------------------------------------------------------------------


def test_removal_from_the_boundary_on_is_exact(tiny: Tiny) -> None:
    tokens = random_tokens(700)
    with Context(tiny("llama"), unpinned(), n_ctx=1024) as ctx:
        ctx.decode(tokens[:620])
        boundary = _native.boundary(ctx.ptr, 0)
        assert 620 - CELLS < boundary <= 620 - FIELDS["n_recent"]
        before = ctx.positions()
        for p0 in (615, boundary + 3, boundary):
            assert _native.can_seq_rm(ctx.ptr, 0, p0, -1)
            assert ctx.seq_rm(p0)
            assert ctx.length[0] == p0
            expected = {key: [p for p in held if p < p0] for key, held in before.items()}
            assert ctx.positions() == expected
            assert ctx.stats()["n_held"] == len(expected[0, 0])
            assert _native.boundary(ctx.ptr, 0) == boundary
        ctx.decode(tokens[boundary:])
        assert_sane(ctx)


def test_tokens_read_again_after_a_removal_give_the_same_logits(tiny: Tiny) -> None:
    tokens = random_tokens(600)
    with Context(tiny("llama"), unpinned(), n_ctx=1024) as ctx:
        ctx.decode(tokens[:590])
        done = ctx.stats()["n_compact"]
        first = ctx.step(tokens[590:600])
        assert ctx.seq_rm(590)
        np.testing.assert_array_equal(ctx.step(tokens[590:600]), first)
        assert ctx.stats()["n_compact"] == done > 0


def test_removal_inside_the_compacted_part_is_refused_and_changes_nothing(tiny: Tiny) -> None:
    tokens = random_tokens(640)
    with (
        Context(tiny("llama"), unpinned(), n_ctx=1024) as ctx,
        Context(tiny("llama"), unpinned(), n_ctx=1024) as twin,
    ):
        for c in (ctx, twin):
            c.decode(tokens[:620])
        boundary = _native.boundary(ctx.ptr, 0)
        before = ctx.positions(), ctx.stats()["n_held"], boundary
        refused = [
            (boundary - 1, -1),
            (boundary // 2, -1),
            (FIELDS["n_sink"] + 1, -1),
            (boundary - 20, boundary + 5),
            (10, 20),
            (2, boundary),
        ]
        for p0, p1 in refused:
            assert not _native.can_seq_rm(ctx.ptr, 0, p0, p1)
            assert not ctx.seq_rm(p0, p1)
            after = ctx.positions(), ctx.stats()["n_held"], _native.boundary(ctx.ptr, 0)
            assert after == before
        np.testing.assert_array_equal(ctx.step(tokens[620:]), twin.step(tokens[620:]))


def test_an_empty_removal_is_true_and_changes_nothing(tiny: Tiny) -> None:
    with Context(tiny("llama"), unpinned(), n_ctx=1024) as ctx:
        assert ctx.seq_rm(0)
        ctx.decode(random_tokens(600))
        before = ctx.positions()
        for p0, p1 in ((600, -1), (900, -1), (600, 700), (100, 100)):
            assert _native.can_seq_rm(ctx.ptr, 0, p0, p1)
            assert ctx.seq_rm(p0, p1)
            assert ctx.positions() == before


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite_hybrid"])
def test_can_seq_rm_foretells_the_answer(name: str, tiny: Tiny) -> None:
    with Context(tiny(name), bounded(), n_ctx=1024, n_batch=64) as ctx:
        for length in (150, 500, 700):
            ctx.decode(random_tokens(length - ctx.length[0], seed=length))
            boundary = max(_native.boundary(ctx.ptr, 0), 1)
            for p0 in (length, length - 1, boundary, boundary - 1, 100, 5, 0):
                before = ctx.positions()
                can = _native.can_seq_rm(ctx.ptr, 0, p0, -1)
                assert ctx.seq_rm(p0) == can, p0
                if not can:
                    assert ctx.positions() == before
                ctx.decode(random_tokens(length - ctx.length[0], seed=length))


def test_a_recurrent_state_cannot_go_back(tiny: Tiny) -> None:
    with Context(tiny("granite_hybrid"), bounded(), n_ctx=1024, n_batch=64) as ctx:
        for length in (150, 500):  # before anything was evicted, and after
            ctx.decode(random_tokens(length - ctx.length[0]))
            before = ctx.positions()
            for p0 in (length - 1, length - 10, 1):
                assert not _native.can_seq_rm(ctx.ptr, 0, p0, -1)
                assert not ctx.seq_rm(p0)
                assert ctx.positions() == before
            assert _native.can_seq_rm(ctx.ptr, 0, length, -1)
        assert _native.can_seq_rm(ctx.ptr, 0, 0, -1)
        assert ctx.seq_rm(0)
        assert ctx.stats()["n_held"] == 0


@pytest.mark.parametrize(
    ("n_pinned", "p0"),
    [(40, 40), (40, 20), (40, 4), (40, 1), (2, 4), (0, 4), (0, 1)],  # there are 4 sinks
)
def test_removal_from_the_end_of_sinks_and_pins_or_below_starts_afresh(
    n_pinned: int, p0: int, tiny: Tiny
) -> None:
    tokens, others = random_tokens(600), random_tokens(300, seed=5)
    with (
        Context(tiny("llama"), bounded(), n_ctx=1024) as ctx,
        Context(tiny("llama"), bounded(), n_ctx=1024) as fresh,
    ):
        ctx.decode(tokens[:40])
        _native.pin(ctx.ptr, 0, n_pinned)
        ctx.decode(tokens[40:])
        assert _native.boundary(ctx.ptr, 0) > 40
        most = max(n_pinned, FIELDS["n_sink"])
        assert not _native.can_seq_rm(ctx.ptr, 0, most + 1, -1)
        assert not ctx.seq_rm(most + 1)
        assert _native.can_seq_rm(ctx.ptr, 0, p0, -1)
        assert ctx.seq_rm(p0)
        assert ctx.stats()["n_pinned"] == min(n_pinned, p0)
        assert ctx.length[0] == p0
        assert all(held == list(range(p0)) for held in ctx.positions().values())
        assert _native.boundary(ctx.ptr, 0) in (0, p0)
        fresh.decode(tokens[:p0])
        # nothing of what was dropped is left in attention
        a, b = ctx.step(others[:50]), fresh.step(others[:50])
        np.testing.assert_allclose(a, b, atol=1e-3)
        ctx.decode(others[50:])
        assert_sane(ctx)


def test_removal_of_everything_resets_the_tracker(tiny: Tiny) -> None:
    tokens = random_tokens(700)
    with Context(tiny("llama"), unpinned(), n_ctx=1024) as ctx:
        ctx.decode(tokens)
        first = ctx.positions()
        for remove in ("seq_rm", "clear"):
            if remove == "seq_rm":
                assert ctx.seq_rm(0)
            else:
                llama_cpp.llama_memory_clear(ctx.memory, True)
                ctx.length[0] = 0
            stats = ctx.stats()
            assert stats["n_held"] == stats["n_logical"] == stats["n_pinned"] == 0
            assert _native.boundary(ctx.ptr, 0) == 0
            assert all(held == [] for held in ctx.positions().values())
            ctx.decode(tokens)
            assert ctx.positions() == first  # the beacons began again


def test_positions_cannot_be_shifted(tiny: Tiny) -> None:
    with Context(tiny("llama"), unpinned(), n_ctx=1024) as ctx:
        assert not llama_cpp.llama_memory_can_shift(ctx.memory)


# --- pins -----------------------------------------------------------------------------------------


def test_a_short_prompt_is_pinned_and_a_long_one_is_not(tiny: Tiny) -> None:
    tokens = random_tokens(900)
    for n_prompt, n_pinned in ((50, 50), (64, 64), (100, 0)):  # a quarter of the budget is 64
        with Context(tiny("llama"), bounded(), n_ctx=1024) as ctx:
            ctx.decode(tokens[:n_prompt])
            ctx.step(tokens[n_prompt : n_prompt + 3])
            assert ctx.stats()["n_pinned"] == n_pinned
            ctx.decode(tokens[n_prompt + 3 :])
            whole = set(range(n_prompt))
            kept = [whole <= set(held) for held in ctx.positions().values()]
            assert all(kept) if n_pinned else not any(kept)
            assert_sane(ctx)


@pytest.mark.parametrize(
    ("n_prompt", "p0", "n_pinned"),
    [(30, 35, 30), (30, 30, 30), (30, 20, 20), (100, 50, 0)],  # 100 are too many, 50 would not be
)
def test_single_tokens_after_a_removal_at_the_end_pin_no_more(
    n_prompt: int, p0: int, n_pinned: int, tiny: Tiny
) -> None:
    tokens = random_tokens(130)
    with Context(tiny("llama"), bounded(), n_ctx=1024) as ctx:
        ctx.decode(tokens[:n_prompt])
        ctx.step(tokens[n_prompt : n_prompt + 10])
        assert ctx.seq_rm(p0)
        assert ctx.stats()["n_pinned"] == n_pinned
        ctx.step(tokens[p0 : p0 + 5])
        assert ctx.stats()["n_pinned"] == n_pinned


def test_pins_hold_until_they_are_taken_away(tiny: Tiny) -> None:
    tokens = random_tokens(1000)
    with Context(tiny("llama"), bounded(), n_ctx=1024) as ctx:
        ctx.decode(tokens[:150])
        _native.pin(ctx.ptr, 0, 60)
        ctx.decode(tokens[150:600])
        assert all(held[:60] == list(range(60)) for held in ctx.positions().values())
        _native.pin(ctx.ptr, 0, 0)
        ctx.decode(tokens[600:])
        assert not any(held[:60] == list(range(60)) for held in ctx.positions().values())
        assert_sane(ctx)


def test_a_pin_that_cannot_hold_is_refused_and_changes_nothing(tiny: Tiny) -> None:
    with Context(tiny("llama"), bounded(), n_ctx=1024) as ctx:
        ctx.decode(random_tokens(50))
        for n in (CELLS, 51):  # more than may be pinned; more than there is
            with pytest.raises((ValueError, _native.BeaconError), match="pin"):
                _native.pin(ctx.ptr, 0, n)
        ctx.decode(random_tokens(600))
        with pytest.raises((ValueError, _native.BeaconError), match="pin"):
            _native.pin(ctx.ptr, 0, 60)  # partly evicted
        assert ctx.stats()["n_pinned"] == 0


# --- several sequences ----------------------------------------------------------------------------


def test_sequences_beside_each_other_keep_what_they_keep_alone(tiny: Tiny) -> None:
    tokens = {s: random_tokens(500 + 40 * s, seed=s) for s in range(4)}
    with Context(tiny("llama"), unpinned(), n_ctx=1024, n_seq_max=4) as ctx:
        at = dict.fromkeys(tokens, 0)
        while any(at[s] < len(tokens[s]) for s in tokens):
            step = {s: tokens[s][at[s] : at[s] + 8] for s in tokens if at[s] < len(tokens[s])}
            assert ctx.try_decode(step) == 0
            for s, ids in step.items():
                at[s] += len(ids)
        for s in tokens:
            assert_sane(ctx, s)
            with Context(tiny("llama"), unpinned(), n_ctx=1024) as alone:
                for i in range(0, len(tokens[s]), 8):
                    alone.decode(tokens[s][i : i + 8])
                for key, held in alone.positions().items():
                    beside = ctx.positions(s)[key]
                    assert len(set(held) ^ set(beside)) <= 2  # rounding in another batch shape
                np.testing.assert_allclose(
                    ctx.decode([9], s), alone.decode([9]), atol=0.05 * float(alone.logits().std())
                )


def test_removing_one_sequence_leaves_the_others_alone(tiny: Tiny) -> None:
    with Context(tiny("llama"), unpinned(), n_ctx=1024, n_seq_max=2) as ctx:
        for s in (0, 1):
            ctx.decode(random_tokens(600, seed=s), s)
        before = ctx.positions(1)
        assert ctx.seq_rm(0, -1, 0)
        assert ctx.positions(1) == before
        assert ctx.stats(0)["n_held"] == 0
        ctx.decode(random_tokens(400, seed=2), 0)
        ctx.decode(random_tokens(100, seed=3), 1)
        assert_sane(ctx, 0)
        assert_sane(ctx, 1)


def test_a_copied_sequence_goes_on_like_its_source(tiny: Tiny) -> None:
    tokens = random_tokens(700)
    with Context(tiny("llama"), unpinned(), n_ctx=1024, n_seq_max=2) as ctx:
        ctx.decode(tokens[:600], 0)
        llama_cpp.llama_memory_seq_cp(ctx.memory, 0, 1, -1, -1)
        ctx.length[1] = 600
        assert ctx.positions(1) == ctx.positions(0)
        assert _native.boundary(ctx.ptr, 1) == _native.boundary(ctx.ptr, 0)
        a, b = ctx.step(tokens[600:], 0), ctx.step(tokens[600:], 1)  # through compactions
        np.testing.assert_array_equal(a, b)
        assert ctx.positions(1) == ctx.positions(0)
        assert_sane(ctx, 1)


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite_hybrid"])
def test_a_copy_takes_the_whole_sequence_or_nothing(name: str, tiny: Tiny) -> None:
    tokens = random_tokens(620)
    with Context(tiny(name), unpinned(), n_ctx=1024, n_seq_max=2) as ctx:
        ctx.decode(tokens[:600], 0)
        llama_cpp.llama_memory_seq_cp(ctx.memory, 0, 1, 0, 300)
        assert llama_cpp.llama_memory_seq_pos_max(ctx.memory, 1) == -1  # in both halves
        assert "copied as a whole" in _native.last_error()
        llama_cpp.llama_memory_seq_cp(ctx.memory, 0, 1, 0, 600)
        ctx.length[1] = 600
        np.testing.assert_array_equal(ctx.step(tokens[600:], 0), ctx.step(tokens[600:], 1))
        assert ctx.positions(1) == ctx.positions(0)


def test_a_unified_cache_of_several_sequences_is_declined(tiny: Tiny) -> None:
    with pytest.raises(RuntimeError, match="kv_unified"):
        Context(tiny("llama"), unpinned(), n_ctx=1024, n_seq_max=2, kv_unified=True)
    with Context(tiny("llama"), unpinned(), n_ctx=1024, n_seq_max=1, kv_unified=True) as ctx:
        ctx.decode(random_tokens(600))
        assert_sane(ctx)


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_models.BOUNDED)
def test_logits_are_the_full_cache_s_until_something_is_evicted(name: str, tiny: Tiny) -> None:
    tokens = random_tokens(256)
    with Context(tiny(name), unpinned(), n_ctx=1024, n_batch=64) as ctx:
        bounded_logits = ctx.decode(tokens[:150]), ctx.step(tokens[150:])
        assert ctx.stats()["n_compact"] == 0
    with Context(tiny(name), n_ctx=1024, n_batch=64) as ctx:
        full_logits = ctx.decode(tokens[:150]), ctx.step(tokens[150:])
    for a, b in zip(bounded_logits, full_logits):
        np.testing.assert_array_equal(a, b)


def test_a_budget_that_is_never_reached_changes_no_bit_of_a_real_model(
    smollm2: Model, gemma: Model
) -> None:
    for model in (smollm2, gemma):
        tokens = model.tokenize(prose(8))[:260]
        logits = []
        for params in (budget(512), None):
            with Context(model, params, n_ctx=1024, n_batch=64) as ctx:
                ctx.decode(tokens[:230])
                logits.append(ctx.step(tokens[230:]))
        np.testing.assert_array_equal(*logits)


def test_reused_graphs_are_right_across_a_compaction(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(500)
    results = []
    for disable in ("0", "1"):
        monkeypatch.setenv("LLAMA_GRAPH_REUSE_DISABLE", disable)
        with Context(tiny("llama"), unpinned(), n_ctx=1024) as ctx:
            ctx.decode(tokens[:240])
            results.append((ctx.step(tokens[240:]), ctx.positions()))
            assert ctx.stats()["n_compact"] > 5
            reused = llama_cpp.llama_perf_context(ctx.ptr).n_reused
            assert (reused > 200) if disable == "0" else (reused == 0)
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.skipif(
    not os.environ.get("BEACONKV_STOCK_LIB_DIR"),
    reason="BEACONKV_STOCK_LIB_DIR names no stock build of the same llama.cpp",
)
@pytest.mark.parametrize("path", ["smollm2_path", "gemma_path"])
def test_without_a_budget_the_library_is_the_stock_one_to_the_bit(
    path: str, request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(path)
    script = Path(__file__).with_name("logits_run.py")
    results = []
    for folder in (os.environ["BEACONKV_STOCK_LIB_DIR"], str(_library.library_dir())):
        done = subprocess.run(
            [sys.executable, str(script), folder, str(model), "300"],
            check=True,
            capture_output=True,
            text=True,
        )
        results.append(json.loads(done.stdout))
    stock, ours = results
    assert len(stock["sizes"]) >= 4
    assert any("nodes" in what for what, _ in stock["sizes"])
    assert ours == stock


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek2", "MLA"),
        ("deepseek32", "MLA|mirror"),
        ("bloom", "ALiBi"),
        ("bert", "encoder"),
    ],
)
def test_models_that_a_budget_cannot_serve_are_refused_by_name(
    name: str, reason: str, tiny: Tiny
) -> None:
    with pytest.raises(RuntimeError, match=reason) as error:
        Context(tiny(name), unpinned(), n_ctx=512)
    assert tiny_models.ALL[name]().arch in str(error.value)
    with Context(tiny(name), n_ctx=512) as ctx:  # without a budget they load as ever
        assert ctx.stats()["budget"] == 0


def test_a_budget_without_flash_attention_is_refused(tiny: Tiny) -> None:
    with pytest.raises(RuntimeError, match="flash attention"):
        Context(tiny("llama"), unpinned(), n_ctx=1024, flash_attn=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": 60},  # below sinks + recent + one window
        {"window": 0},
        {"n_probe": 0},
        {"n_beacon": 0},
        {"beacon_share": 1.5},
        {"quota": float("nan")},
        {"pin_share": 0.9},
    ],
)
def test_parameters_out_of_range_are_refused(fields: dict[str, Any], tiny: Tiny) -> None:
    params = _native.params(**{"budget": CELLS, **FIELDS, **fields})
    with pytest.raises(ValueError):
        _native.check_params(params, 1024)
    with pytest.raises((ValueError, RuntimeError)):
        Context(tiny("llama"), params, n_ctx=1024)


def test_a_budget_above_the_logical_context_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="512"):
        _native.check_params(_native.params(budget=1024), 512)


def test_creating_a_context_says_what_the_budget_is(tiny: Tiny) -> None:
    with log() as lines:
        Context(tiny("llama"), unpinned(), n_ctx=1024).close()
    assert any("256 cells" in line for line in lines)
