"""What our ggml operators save: compactions by them and by graphs of ggml's own, in one run.

    python benchmarks/fused.py [--device CPU|CUDA0|...] [--model FILE] [--cells N] [--threads N]
                                   [--rounds N] [--runner FILE] [--markdown]

First, two contexts with all layers on the device and a budget of 4,096 cells (--cells): one
composes compactions of ggml's operators, one has ours (BEACONKV_FUSED=0 and =require). By turns,
each decodes 256 random tokens, one by one, which is two compactions. Then each operator alone, at
the shapes of SmolLM2 and of a model of 8 billion parameters, against how fast the device copies a
large tensor; what fits into a cache can be faster. Prints medians with the lowest and the highest
value. Needs a C++17 compiler, or --runner: the program that tests/gpu.py compiles.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import operators  # noqa: E402

from beaconkv_gguf import Llama, llama_cpp  # noqa: E402
from beaconkv_gguf import reference as ref  # noqa: E402
from beaconkv_gguf.default_model import default_model_path  # noqa: E402

MODES = {"composed": "0", "fused": "require"}
N_DECODE = 256  # tokens of a turn
SHAPES = {"SmolLM2": (64, 3, 3), "8B": (128, 8, 4)}  # head size, KV heads, queries of each
N_BEACON, N_RECENT, N_WITNESS, WINDOW = 8, 16, 160, 128
N_LAYER = 4  # that one move takes
COPY_BYTES = 256 << 20
MIB = 1024 * 1024

Samples = list[float]


@dataclass
class Copy:
    """A case of the runner: one tensor to another."""

    n_threads: int
    kinds = ()  # tensors that are given back

    def encode(self) -> bytes:
        zeros = operators.tensor(np.zeros((COPY_BYTES // 4096, 1024)))
        return operators.encode_case(3, 0, self.n_threads, b"", [zeros, zeros])


def open_context(model: str, device: str, cells: int, n_ctx: int, threads: int | None) -> Llama:
    """A context with a budget and all layers on a device."""
    where: dict[str, Any] = {"n_gpu_layers": 0, "op_offload": False}
    if device != "CPU":
        number = re.search(r"\d+$", device)
        where = {
            "n_gpu_layers": 999,
            "split_mode": llama_cpp.LLAMA_SPLIT_MODE_NONE,
            "main_gpu": int(number[0]) if number else 0,
        }
    return Llama(
        model,
        kv_budget=cells,
        n_ctx=n_ctx,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        **where,
    )


def decode(llm: Llama, tokens: Sequence[int]) -> dict[str, float]:
    """Milliseconds of a compaction by part, and their share of the time."""
    before = llm.kv_stats()
    start = time.perf_counter()
    for token in tokens:
        llm.eval([token])
        llama_cpp.llama_synchronize(llm.ctx)  # who samples waits for the logits
    seconds = time.perf_counter() - start
    after = llm.kv_stats()
    n = after.n_compact - before.n_compact
    assert n > 0
    result = {}
    for part in ("score", "select", "move", "compact"):
        spent = getattr(after, f"us_{part}") - getattr(before, f"us_{part}")
        result[part] = spent / 1e3 / n
    result["share"] = result["compact"] * n / 10 / seconds
    return result


def compactions(
    model: str, device: str, cells: int, threads: int | None, rounds: int
) -> dict[str, dict[str, Samples]]:
    """Samples by mode and part."""
    samples: dict[str, dict[str, Samples]] = {}
    contexts = {}
    n_ctx = cells + (rounds + 1) * N_DECODE
    for mode, value in MODES.items():
        os.environ["BEACONKV_FUSED"] = value  # read when a context is made
        llm = contexts[mode] = open_context(model, device, cells, n_ctx, threads)
        tokens = random.Random(1).choices(range(llm.n_vocab()), k=n_ctx)
        llm.eval(tokens[:cells])
        decode(llm, tokens[cells : cells + N_DECODE])
        stats = llm.kv_stats()
        assert stats.n_fused == (stats.n_layer if mode == "fused" else 0)
        samples[mode] = {"scratch": [stats.bytes_scratch / MIB]}
    del os.environ["BEACONKV_FUSED"]
    for i in range(cells + N_DECODE, n_ctx, N_DECODE):
        for mode, llm in contexts.items():
            for part, value in decode(llm, tokens[i : i + N_DECODE]).items():
                samples[mode].setdefault(part, []).append(value)
    for llm in contexts.values():
        llm.close()
    return samples


def row_bytes(kind: str, size: int) -> int:
    return operators.encode_rows(np.zeros((1, size)), kind).nbytes


def operator_cases(cells: int, threads: int) -> dict[str, tuple[Any, int]]:
    """Cases by name, and the bytes that each has to read and to write."""
    cases: dict[str, tuple[Any, int]] = {}
    for shape, (d, h, group) in SHAPES.items():
        rope = ref.Rope(d, neox=True)
        track = operators.Track(
            d, h, group, N_RECENT, n_beacon=N_BEACON, rope=rope, n_threads=threads
        )
        n_bytes = N_RECENT * h * group * d * 2 + 2 * h * N_BEACON * (d + 2) * 4
        cases[f"track, {shape}"] = track, n_bytes
        for kind in ("f16", "q8_0"):
            size = row_bytes(kind, d)
            score = operators.Score(
                kind, kind, d, d, h, group, cells, n_beacon=N_BEACON, n_recent=N_RECENT,
                n_witness=N_WITNESS, rope=rope, n_hadamard=d if kind == "q8_0" else 0,
                n_threads=threads,
            )  # fmt: skip
            n_probe = N_BEACON + N_RECENT * group
            n_bytes = cells * h * (2 * size + 4) + h * (n_probe * d + N_WITNESS * 2 * d) * 4
            cases[f"score, {shape}, {kind}"] = score, n_bytes + 4 * 4 * cells * h
            move = operators.Move(
                (kind, kind) * N_LAYER, (d, d) * N_LAYER, N_LAYER, h, cells, cells - WINDOW,
                n_threads=threads,
            )  # fmt: skip
            moved = int((move.index != np.arange(cells - WINDOW)).sum())
            cases[f"move of {N_LAYER} layers, {shape}, {kind}"] = (
                move,
                moved * 2 * 2 * size + move.index.size * 4,
            )
    return cases


def times(program: Path, device: str, case: Any, rounds: int) -> Samples:
    """Microseconds of a case, in one process; the first one warms up."""
    data = case.encode()
    case.encode = lambda: data
    return [float(us) for us in operators.compute(program, device, [case] * (rounds + 1))[1][1:]]


def spread(values: Samples) -> str:
    median = statistics.median(values)
    digits = 0 if median >= 100 else 1 if median >= 10 else 2
    text = f"{median:,.{digits}f}"
    if len(values) == 1:
        return text
    return f"{text} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def show(title: str, header: Sequence[str], rows: list[list[str]], markdown: bool) -> None:
    if markdown:
        print(f"\n{title}\n")
        for row in [list(header), ["---"] * len(header), *rows]:
            print(f"| {' | '.join(row)} |", flush=True)
        return
    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def show_compactions(samples: dict[str, dict[str, Samples]], title: str, markdown: bool) -> None:
    names = {
        "score": "track and score, ms",
        "select": "select on the host, ms",
        "move": "move, ms",
        "compact": "a compaction in all, ms",
        "share": "share of the decode time, %",
        "scratch": "scratch, MiB",
    }
    rows = []
    for part, name in names.items():
        composed, fused = (samples[mode][part] for mode in MODES)
        ratio = statistics.median(composed) / max(statistics.median(fused), 1e-9)
        rows.append([name, spread(composed), spread(fused), f"{ratio:.1f}"])
    show(title, ("", "composed", "fused", "ratio"), rows, markdown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="CPU", help="ggml's name of a device")
    parser.add_argument("--model", help="GGUF file; default: the embedded default model")
    parser.add_argument("--cells", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runner", type=Path, help="compiled tests/kernels/run.cpp")
    parser.add_argument("--markdown", action="store_true", help="print tables of Markdown")
    options = parser.parse_args()
    model = options.model or str(default_model_path())
    device, threads, rounds = options.device, options.threads, options.rounds

    samples = compactions(model, device, options.cells, threads, rounds)
    title = f"{Path(model).name} in {options.cells:,} cells on {device}, {rounds} rounds"
    show_compactions(samples, title, options.markdown)

    with tempfile.TemporaryDirectory() as folder:
        program = options.runner or operators.build_runner(Path(folder))
        copy = 2 * COPY_BYTES / 1e3 / statistics.median(times(program, device, Copy(threads), 3))
        rows = []
        for name, (case, n_bytes) in operator_cases(options.cells, threads).items():
            us = times(program, device, case, rounds)
            speed = n_bytes / 1e3 / statistics.median(us)
            rows.append([name, spread(us), f"{n_bytes / MIB:.2f}", f"{speed:.2f}"])
            rows[-1].append(f"{100 * speed / copy:.1f} %")
    title = f"Operators at {options.cells:,} cells on {device}, which copies at {copy:,.1f} GB/s"
    header = ("operator", "µs", "MiB to read and write", "GB/s", "of a copy's")
    show(title, header, rows, options.markdown)


if __name__ == "__main__":
    main()
