"""Parallel chats on the bundled server under a budget, against a stock llama-server, in one run.

    python benchmarks/server.py --stock FOLDER [--model FILE] [--kv-budget N] [--parallel N]
                                [--tokens N] [--threads N] [--json FILE]

FOLDER holds a stock ``llama-server`` (``python tools/build_stock.py --server``). Both get the same
options but the budget, and write the same number of tokens in the same number of chats at once.
Ends with 1 if a chat does not finish, a slot is above its budget, the memory grows, or decoding
all chats is not at least 1.5 times as fast as stock's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import socket
from typing import Any

import psutil

from beaconkv_gguf.default_model import default_model_path
from beaconkv_gguf.server import server_path

MIB = 1 << 20
LEAST_RATIO = 1.5
MOST_GROWTH = 8 * MIB  # of the resident memory, from a quarter of the run to its end
TOPICS = ("a lighthouse", "a clockmaker", "an island", "a railway", "a library", "a glacier")


@dataclass
class Run:
    """What one server did."""

    tokens: int
    seconds: float
    finish_reasons: list[str]
    most_held: int
    rss_quarter: int
    rss_end: int
    seconds_compact: float

    @property
    def rate(self) -> float:
        """Decoded tokens per second, of all chats."""
        return self.tokens / self.seconds


def ask(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"{url}/{path}", data, timeout=3600) as reply:
        return json.load(reply)


@contextmanager
def serving(program: Path, arguments: list[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A server with a model loaded: its URL and process."""
    with closing(socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(program), "--port", str(port), *arguments]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            while True:
                if server.poll() is not None:
                    log.seek(0)
                    sys.exit(f"error: {program} ended: {log.read().decode()[-1000:]}")
                try:
                    ask(url, "health")
                    break
                except OSError:
                    time.sleep(0.1)
            yield url, psutil.Process(server.pid)
        finally:
            server.terminate()


def write(url: str, topic: str, n_tokens: int) -> dict[str, Any]:
    """One chat: a reply of exactly `n_tokens`, greedy."""
    question = f"Tell a long story about {topic}, in many chapters."
    return ask(
        url,
        "v1/chat/completions",
        {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": n_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "repeat_penalty": 1.1,
        },
    )


def measure(program: Path, arguments: list[str], parallel: int, n_tokens: int) -> Run:
    """Write `parallel` chats at once and watch the slots and the memory meanwhile."""
    with serving(program, arguments) as (url, process):
        write(url, "a mill", 8)  # pages in the weights
        held, memory, done = [0], [], threading.Event()

        def watch() -> None:
            while not done.wait(0.5):
                slots = ask(url, "slots")
                held.extend(slot.get("beaconkv", {}).get("n_held", 0) for slot in slots)
                written = sum(
                    slot["next_token"][0]["n_decoded"] for slot in slots if "next_token" in slot
                )
                memory.append((written, process.memory_info().rss))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(parallel) as pool:
                topics = [TOPICS[i % len(TOPICS)] for i in range(parallel)]
                replies = list(pool.map(lambda topic: write(url, topic, n_tokens), topics))
        finally:
            done.set()
            watcher.join()
    timings = [reply["timings"] for reply in replies]
    quarter = parallel * n_tokens / 4
    return Run(
        tokens=sum(t["predicted_n"] for t in timings),
        # they start together and are equally long
        seconds=max(t["predicted_ms"] for t in timings) / 1000,
        finish_reasons=[reply["choices"][0]["finish_reason"] for reply in replies],
        most_held=max(held),
        rss_quarter=next(rss for written, rss in memory if written >= quarter),
        rss_end=memory[-1][1],
        seconds_compact=max(t.get("beaconkv_us_compact", 0) for t in timings) / 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--kv-budget", type=int, default=768)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    model = options.model or default_model_path()
    n_ctx = (options.tokens // 1024 + 1) * 1024
    arguments = ["-m", str(model), "-np", str(options.parallel), "--no-kv-unified", "-fa", "on"]
    arguments += ["-c", str(n_ctx * options.parallel), "-t", str(options.threads), "--slots"]
    budget = ["--kv-budget", str(options.kv_budget)]
    runs = {}
    for name, program, more in (
        ("stock", options.stock / server_path().name, []),
        ("budget", server_path(), budget),
    ):
        run = measure(program, arguments + more, options.parallel, options.tokens)
        runs[name] = run
        print(
            f"{name:<7} {run.tokens} tokens in {run.seconds:.1f} s: {run.rate:.1f} tokens/s; "
            f"most cells held by a slot: {run.most_held or 'all'}; "
            f"RSS {run.rss_quarter / MIB:.0f} MiB at a quarter, {run.rss_end / MIB:.0f} at the end"
            + (f"; compactions {run.seconds_compact:.1f} s" if run.most_held else ""),
            flush=True,
        )
    ours = runs["budget"]
    ratio = ours.rate / runs["stock"].rate
    checks = {
        "all finish": ours.finish_reasons == ["length"] * options.parallel,
        f"no slot above {options.kv_budget} cells": 0 < ours.most_held <= options.kv_budget,
        "memory flat": ours.rss_end - ours.rss_quarter <= MOST_GROWTH,
        f"{ratio:.2f} times stock's speed, at least {LEAST_RATIO}": ratio >= LEAST_RATIO,
    }
    for what, met in checks.items():
        print(f"{'met' if met else 'MISSED':<6} {what}")
    if options.json:
        result = {name: {**asdict(run), "rate": run.rate} for name, run in runs.items()}
        options.json.write_text(json.dumps({**result, "ratio": ratio}, indent=2) + "\n")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
