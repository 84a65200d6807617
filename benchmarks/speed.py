"""Speed under a budget against a stock build of the same llama.cpp, alternating in one run.

    python benchmarks/speed.py --stock FOLDER [--model FILE] [--threads N] [--rounds N]
                               [--json FILE]

FOLDER holds a stock ``llama-bench``. Stock decodes at its own depths (``llama-bench -d``), ours at
the same logical depths under a budget of 1,280 cells, compactions included; both read a prompt of
4,000 tokens in batches of 512. Depths above 10,000 are measured in the first round only. Prints
medians, ratios and whether each target is met; ends with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beaconkv_gguf import Llama
from beaconkv_gguf.default_model import default_model_path

BUDGET, N_BATCH = 1280, 512
DEPTHS = (7500, 12000, 32000)
STOCK_DEPTHS = (1280, *DEPTHS)
N_PROMPT = 4000
N_STOCK = 64  # tokens that stock decodes at a depth
N_OURS = 512  # ours decodes more, for several compactions
LONG = 10_000


@dataclass
class Target:
    """A ratio, and what it has to be."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None
    goal: float | None = None

    @property
    def met(self) -> bool:
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )

    def __str__(self) -> str:
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        goal = f", goal {self.goal:g}" if self.goal is not None else ""
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:<6} {self.name}: {self.value:.3f} ({bound}{goal})"


class Stock:
    """A stock ``llama-bench``."""

    def __init__(self, folder: Path, model: str, threads: int) -> None:
        program = folder / ("llama-bench.exe" if sys.platform == "win32" else "llama-bench")
        self._command = [str(program), "-m", model, "-t", str(threads), "-fa", "1", "-r", "1"]
        self._command += ["-b", str(N_BATCH), "-ub", str(N_BATCH), "-ngl", "0", "-o", "json"]

    def _run(self, *arguments: str) -> float:
        result = subprocess.run(
            [*self._command, *arguments], check=True, stdout=subprocess.PIPE, text=True
        )
        return float(json.loads(result.stdout)[0]["avg_ts"])

    def decode(self, depth: int) -> float:
        """Tokens per second at a depth."""
        return self._run("-p", "0", "-n", str(N_STOCK), "-d", str(depth))

    def prompt(self) -> float:
        """Tokens per second of the prompt."""
        return self._run("-p", str(N_PROMPT), "-n", "0")


class Ours:
    """The same under a budget, through `Llama`."""

    def __init__(self, model: str, threads: int) -> None:
        self._arguments: dict[str, Any] = {
            "model_path": model,
            "kv_budget": BUDGET,
            "n_batch": N_BATCH,
            "n_threads": threads,
            "n_threads_batch": threads,
            "verbose": False,
        }

    def _load(self, n_ctx: int) -> tuple[Llama, list[int]]:
        llm = Llama(n_ctx=n_ctx, **self._arguments)
        return llm, random.Random(1).choices(range(llm.n_vocab()), k=n_ctx)

    def decode(self, depth: int) -> tuple[float, float]:
        """Tokens per second at a logical depth, and the share of it that compactions take."""
        llm, tokens = self._load(depth + N_OURS)
        with llm:
            llm.eval(tokens[:depth])
            before = llm.kv_stats()
            start = time.perf_counter()
            for token in tokens[depth : depth + N_OURS]:
                llm.eval([token])
            seconds = time.perf_counter() - start
            after = llm.kv_stats()
        assert after.n_compact > before.n_compact
        return N_OURS / seconds, (after.us_compact - before.us_compact) / 1e6 / seconds

    def prompt(self) -> float:
        """Tokens per second of the prompt."""
        llm, tokens = self._load(N_PROMPT + N_BATCH)
        with llm:
            llm.eval(tokens[:N_BATCH])  # llama-bench warms up as well
            llm.reset()
            start = time.perf_counter()
            llm.eval(tokens[:N_PROMPT])
            return N_PROMPT / (time.perf_counter() - start)


def measure(stock: Stock, ours: Ours, rounds: int) -> dict[str, list[float]]:
    """Samples by name; tokens per second, or shares."""
    samples: dict[str, list[float]] = defaultdict(list)

    def add(name: str, value: float) -> None:
        samples[name].append(value)
        print(f"  {name}: {value:.3f}", file=sys.stderr, flush=True)

    for i in range(rounds):
        print(f"round {i + 1} of {rounds}", file=sys.stderr)
        for depth in STOCK_DEPTHS:
            if i > 0 and depth > LONG:
                continue
            add(f"stock decode {depth}", stock.decode(depth))
            if depth in DEPTHS:
                speed, share = ours.decode(depth)
                add(f"ours decode {depth}", speed)
                add(f"ours compaction share {depth}", share)
        add("stock prompt", stock.prompt())
        add("ours prompt", ours.prompt())
    return samples


def targets(median: dict[str, float]) -> list[Target]:
    decode = {depth: median[f"ours decode {depth}"] for depth in DEPTHS}
    stock = {depth: median[f"stock decode {depth}"] for depth in STOCK_DEPTHS}
    shares = [median[f"ours compaction share {depth}"] for depth in DEPTHS]
    return [
        Target("decode at 7,500 / stock at 1,280", decode[7500] / stock[1280], 0.9, goal=0.97),
        Target("decode at 7,500 / stock at 7,500", decode[7500] / stock[7500], 2.5),
        Target("decode at 12,000 / stock at 12,000", decode[12000] / stock[12000], 4.3),
        Target("decode at 32,000 / stock at 32,000", decode[32000] / stock[32000], 8.0),
        Target("largest share of compactions in decoding", max(shares), most=0.08, goal=0.03),
        Target("time of the prompt / stock", median["stock prompt"] / median["ours prompt"],
               most=1.15),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock", type=Path, required=True, help="folder of a stock llama-bench")
    parser.add_argument("--model", help="GGUF file; default: the embedded default model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write samples and ratios to this file")
    arguments = parser.parse_args()
    model = arguments.model or str(default_model_path())
    threads = arguments.threads

    samples = measure(
        Stock(arguments.stock, model, threads), Ours(model, threads), arguments.rounds
    )
    median = {name: statistics.median(values) for name, values in samples.items()}
    results = targets(median)
    for name, value in median.items():
        print(f"{name:<32} {value:10.3f}")
    for target in results:
        print(target)
    if arguments.json:
        report = {"samples": samples, "targets": [{**asdict(t), "met": t.met} for t in results]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(not all(target.met for target in results))


if __name__ == "__main__":
    sys.exit(main())
