"""``beaconkv-gguf bench``: the structure of what it measures; never how fast anything is."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_cli import invoke, start

from beaconkv_gguf import BeaconConfig, Llama, bench

TinyPath = Callable[[str], Path]

BEACON = BeaconConfig(window=32, n_sink=4, n_recent=16, n_beacon=8, n_probe=8)
CELLS, TOKENS, ROUNDS = 256, 64, 2
SMALL: dict[str, Any] = {
    "kv_budgets": [CELLS], "tokens": TOKENS, "rounds": ROUNDS, "threads": 1, "beacon": BEACON,
}  # fmt: skip


def measure(path: Path, **arguments: Any) -> bench.Report:
    return bench.bench(path, **{**SMALL, **arguments})


def by_cache(report: bench.Report, depth: int, parallel: int = 1) -> dict[int | None, bench.Case]:
    cases = [c for c in report.cases if (c.depth, c.parallel) == (depth, parallel)]
    return {case.kv_budget: case for case in cases}


@pytest.fixture(scope="module")
def report(tiny_path: TinyPath) -> bench.Report:
    """Two depths, two budgets, one and two sequences."""
    return measure(
        tiny_path("llama"), depths=[1400, 600], kv_budgets=[CELLS, 320, CELLS], parallels=[1, 2]
    )


# --- what is measured -----------------------------------------------------------------------------


def test_every_cache_is_measured_at_every_depth(report: bench.Report) -> None:
    assert [(c.parallel, c.depth, c.kv_budget) for c in report.cases] == [
        (parallel, depth, cells)
        for parallel in (1, 2)
        for depth in (600, 1400)
        for cells in (None, CELLS, 320)
    ]
    assert [(m.parallel, m.kv_budget) for m in report.memory] == [
        (parallel, cells) for parallel in (1, 2) for cells in (None, CELLS, 320)
    ]
    for case in report.cases:
        assert len(case.decode.values) == len(case.n_compact) == ROUNDS
        assert min(case.decode.values + case.prompt.values) > 0


def test_rounds_of_compacted_caches_go_on_at_one_depth(report: bench.Report) -> None:
    for case in report.cases:
        assert case.positions == (case.depth, case.depth + TOKENS)


def test_every_round_has_a_compaction_for_each_window(report: bench.Report) -> None:
    for case in report.cases:
        n = 0 if case.kv_budget is None else case.parallel * TOKENS // BEACON.window
        assert case.n_compact == (n, n)
        for share in case.compact_share.values:
            assert (share > 0) == (n > 0)
            assert share < 1


def test_ratios_are_of_the_same_round(report: bench.Report) -> None:
    for depth in (600, 1400):
        cases = by_cache(report, depth)
        for case in cases.values():
            pairs = zip(case.decode.values, cases[None].decode.values)
            assert case.decode_ratio == statistics.median(a / b for a, b in pairs)
        assert cases[None].decode_ratio == cases[None].prompt_ratio == 1


def test_the_ratio_is_the_median_of_pairs_not_of_medians() -> None:
    full, bounded = bench.Samples((1.0, 10.0, 4.0)), bench.Samples((3.0, 10.0, 8.0))
    assert bounded.ratio(full) == 2.0
    assert (bounded.median, bounded.low, bounded.high) == (8.0, 3.0, 10.0)


def test_caches_return_to_the_depth_where_nothing_was_compacted(tiny_path: TinyPath) -> None:
    with pytest.warns(RuntimeWarning, match="at a depth of 100 tokens .* 256 cells is not full"):
        report = measure(tiny_path("llama"), depths=[100])
    for case in report.cases:
        assert case.positions == (100, 100)
        assert case.n_compact == (0, 0)


def test_none_returns_where_the_sliding_window_went_on(tiny_path: TinyPath) -> None:
    with pytest.warns(RuntimeWarning, match="not full"):
        report = measure(tiny_path("gemma3"), depths=[100], kv_budgets=[1536], tokens=1000)
    assert {case.positions for case in report.cases} == {(100, 1100)}


@pytest.mark.parametrize("name", ["gemma3", "granite_hybrid"])
def test_models_with_other_caches_run(name: str, tiny_path: TinyPath) -> None:
    report = measure(tiny_path(name), depths=[600])
    assert all(case.positions[0] == 600 for case in report.cases)
    assert all(memory.bytes_other > 0 for memory in report.memory)


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite_hybrid"])
def test_a_depth_that_rounds_went_past_is_read_anew(name: str, tiny_path: TinyPath) -> None:
    report = measure(tiny_path(name), depths=[600, 650])
    assert {case.positions for case in report.cases if case.depth == 650} == {(650, 650 + TOKENS)}


def test_bytes_are_those_of_the_cache(report: bench.Report, tiny_path: TinyPath) -> None:
    assert report.n_ctx == 1536  # the largest depth and all rounds, in steps of 256
    for memory in report.memory:
        with Llama(
            tiny_path("llama"), n_ctx=report.n_ctx, kv_budget=memory.kv_budget, beacon=BEACON,
            flash_attn=True, swa_full=False, verbose=False,
        ) as llm:  # fmt: skip
            stats = llm.kv_stats()
        assert memory.n_ctx == report.n_ctx
        for name in ("bytes_k", "bytes_v", "bytes_ring", "bytes_beacon", "bytes_other"):
            assert getattr(memory, name) == memory.parallel * getattr(stats, name), name
    full, bounded = report.memory[:2]
    assert full.bytes_k == report.n_ctx * bounded.bytes_k // CELLS
    assert full.bytes_total > bounded.bytes_total > bounded.bytes_allocated


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_processes_grow_by_their_caches(report: bench.Report) -> None:
    for memory in report.memory:
        assert memory.rss_growth is not None
        assert memory.rss_growth > memory.bytes_total


def test_cache_types_and_n_ctx_are_those_asked_for(tiny_path: TinyPath) -> None:
    full, bounded = measure(
        tiny_path("llama"), depths=[900], n_ctx=3000, kv_budgets=[0.25], type_k="q8_0", type_v=2
    ).memory
    assert (full.n_ctx, bounded.kv_budget) == (3072, 768)
    assert full.bytes_k * 18 == full.bytes_v * 34  # bytes of a block of q4_0, and of q8_0


def test_progress_ends_with_all_work_done(tiny_path: TinyPath) -> None:
    seen: list[tuple[str, float, float]] = []
    measure(tiny_path("llama"), depths=[600, 650], progress=lambda *step: seen.append(step))
    assert seen[-1][1] == seen[-1][2]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert any("decoding at 600 tokens, 256 cells" in what for what, _, _ in seen)


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"depths": []}, ValueError, "depth must be at least 1"),
        ({"depths": [0]}, ValueError, "depth must be at least 1, not 0"),
        ({"tokens": 0}, ValueError, "tokens must be at least 1"),
        ({"rounds": -1}, ValueError, "rounds must be at least 1"),
        ({"threads": 0}, ValueError, "threads must be at least 1"),
        ({"parallels": [0]}, ValueError, "parallel must be at least 1"),
        ({"kv_budgets": []}, ValueError, "no budget"),
        ({"kv_budgets": [None]}, ValueError, "no budget"),
        ({"kv_budgets": ["auto"]}, ValueError, "is no budget for n_ctx=768"),
        ({"kv_budgets": [9000]}, ValueError, "9000 cells is above n_ctx=768"),
        ({"kv_budgets": [10]}, ValueError, "below the minimum"),
        ({"kv_budgets": [66], "parallels": [4]}, ValueError, "too few for 4 sequences"),
        ({"n_ctx": 700}, ValueError, "need 728"),
        ({"type_k": "q9"}, ValueError, "q8_0"),
        ({"parallels": [1000]}, (ValueError, bench.BenchError), "sequences|n_seq_max"),
    ],
)
def test_nonsense_is_refused(
    tiny_path: TinyPath, arguments: dict[str, Any], error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        measure(tiny_path("llama"), **{"depths": [600], **arguments})


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.gguf"):
        measure(tmp_path / "missing.gguf")


def test_what_a_worker_can_not_load_is_told(tiny_path: TinyPath, tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    with pytest.raises(bench.BenchError, match="magic"):
        measure(text, depths=[600])
    with pytest.raises(bench.BenchError, match="ALiBi"):
        measure(tiny_path("bloom"), depths=[600])


def test_a_depth_beyond_the_trained_context_warns(tiny_path: TinyPath) -> None:
    with pytest.warns(RuntimeWarning, match="more than the 8192"):
        measure(tiny_path("llama"), depths=[8100])


def test_a_dead_worker_is_told_with_its_last_lines() -> None:
    with bench._Remote(CELLS) as worker:
        assert worker._process.stdin is not None
        worker._process.stdin.write("no JSON\n")
        with pytest.raises(bench.BenchError, match=r"256 cells\) died with status 1: .*JSON"):
            worker.ask(op="memory")


@pytest.mark.skipif(os.name == "nt", reason="no signals")
def test_a_killed_worker_is_told() -> None:
    with bench._Remote(None) as worker:
        worker._process.kill()
        with pytest.raises(bench.BenchError, match=r"full cache\) died of SIGKILL"):
            worker.ask(op="memory")


def test_a_worker_ends_when_its_owner_is_gone() -> None:
    with bench._Remote(None) as worker:
        assert worker._process.stdin is not None
        worker._process.stdin.close()
        assert worker._process.wait(timeout=30) == 0


# --- the command ----------------------------------------------------------------------------------

OPTIONS = [
    "--depth", "600", "--kv-budget", "384", "--tokens", "128", "--rounds", "2", "--threads", "1",
]  # fmt: skip


def test_tables(tiny_path: TinyPath) -> None:
    result = invoke("bench", tiny_path("llama"), *OPTIONS, "--parallel", "1", "--parallel", "2")
    assert result.exit_code == 0, result.output
    for text in ("1 sequence,", "2 sequences,", "600", "full", "384", "compacting", "MiB", "RSS"):
        assert text in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stderr == ""


def test_json_is_all_of_stdout(tiny_path: TinyPath) -> None:
    result = invoke("bench", tiny_path("llama"), *OPTIONS, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    full, bounded = report["cases"]
    assert (full["kv_budget"], bounded["kv_budget"]) == (None, 384)
    assert full["positions"] == bounded["positions"] == [600, 728]
    assert bounded["decode"]["median"] == statistics.median(bounded["decode"]["samples"])
    pairs = zip(bounded["decode"]["samples"], full["decode"]["samples"])
    assert bounded["decode_ratio"] == statistics.median(a / b for a, b in pairs)
    assert report["memory"][1]["bytes_total"] > 0
    assert report["model"] == "llama.gguf"


def test_the_default_model_is_taken(smollm2_path: Path) -> None:
    result = invoke(
        "bench", "--depth", "64", "--kv-budget", "256", "--tokens", "1", "--rounds", "1", "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"] == smollm2_path.name
    assert result.stderr.startswith("warning: at a depth of 64 tokens")


def test_plot(report: bench.Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "speed.png"
    bench.plot(report, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "text"), [("missing/speed.png", "no such folder"), ("speed.txt", ".png")]
)
def test_a_plot_that_can_not_be_written_is_refused_before_measuring(
    tiny_path: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "bench", lambda *_, **__: pytest.fail("it measured"))
    result = invoke("bench", tiny_path("llama"), *OPTIONS, "--plot", tmp_path / name)
    assert result.exit_code == 1
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_missing_matplotlib_is_told_before_measuring(
    tiny_path: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(bench, "bench", lambda *_, **__: pytest.fail("it measured"))
    result = invoke("bench", tiny_path("llama"), *OPTIONS, "--plot", tmp_path / "speed.png")
    assert result.exit_code == 1
    assert 'pip install "beaconkv_gguf[plot]"' in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["missing.gguf"], 1, "missing.gguf"),
        (["--kv-budget", "9000"], 1, "9000 cells is above n_ctx=1024"),
        (["--kv-budget", "off"], 2, "always measured"),
        (["--kv-budget", "much"], 2, "much"),
        (["--depth", "0"], 2, "depth"),
        (["--n-ctx", "100"], 1, "n_ctx=100 is too small"),
        (["--type-v", "q9"], 1, "q8_0"),
    ],
)
def test_errors_are_one_line(
    tiny_path: TinyPath, arguments: list[str], code: int, text: str
) -> None:
    model = [] if "missing.gguf" in arguments else [tiny_path("llama")]
    result = invoke("bench", *model, *OPTIONS, *arguments)
    assert result.exit_code == code, result.output
    assert text in result.stderr
    assert "Traceback" not in result.output
    if code == 1:
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("error: ")


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT for one process")
def test_ctrl_c_leaves_no_process(tiny_path: TinyPath) -> None:
    process = start(
        "bench", tiny_path("llama"), *OPTIONS, "--rounds", "20",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    workers: list[psutil.Process] = []
    deadline = time.monotonic() + 30
    while len(workers) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        workers = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert len(workers) == 2
    # one that was only just started is not killed, but finds its stdin closed
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    assert process.returncode == 130
    assert (output, errors.strip()) == ("", "interrupted")
