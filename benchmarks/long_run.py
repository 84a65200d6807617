"""Whether it runs on: a long generation and a long prompt under a small budget.

    python benchmarks/long_run.py [--model FILE] [--threads N]

Reads a prompt of 6,000 tokens in batches of 64, 512 and 2,048 under a budget of 1,024 cells. Then
writes 8,000 tokens: no layer and head may ever hold more cells, the memory of the process must stay
flat after the first compaction, and the completion must end with its last token. Ends with 1 if a
check fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import psutil

from beaconkv_gguf import Llama, _native
from beaconkv_gguf.default_model import default_model_path
from beaconkv_gguf.generation import never_end

N_CTX, BUDGET, N_WRITE, N_PROMPT = 8192, 1024, 8000, 6000
MIB = 1024 * 1024
RSS_SLACK = 16 * MIB


def most_held(llm: Llama) -> int:
    """Cells that the fullest KV head of any layer holds."""
    return max(
        len(llm.kv_positions(il, head))
        for il in _native.layers(llm.ctx).tolist()
        for head in range(_native.n_head_kv(llm.ctx, il))
    )


def write(model: str, threads: int) -> list[tuple[str, bool]]:
    """Generate; what was checked, and whether it held."""
    process = psutil.Process()
    llm = Llama(
        model,
        n_ctx=N_CTX,
        kv_budget=BUDGET,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    rss_first = most = 0
    start = time.perf_counter()
    reason = None
    n_chunks = 0
    chunks: Any = llm.create_completion(
        "The history of the lighthouse, told in many chapters.\n\n",
        max_tokens=N_WRITE,
        repeat_penalty=1.1,
        seed=1,
        stream=True,
        logits_processor=never_end(llm),
    )
    with llm:
        for chunk in chunks:
            n_chunks += 1
            reason = chunk["choices"][0]["finish_reason"]
            stats = llm.kv_stats()
            if not rss_first and stats.n_compact == 1:
                rss_first = process.memory_info().rss
            if n_chunks % 100 == 0:
                most = max(most, most_held(llm))
            if n_chunks % 1000 == 0:
                rss = process.memory_info().rss
                print(f"  {stats}, RSS {rss / MIB:.0f} MiB", flush=True)
        growth = process.memory_info().rss - rss_first
        n_prompt = len(llm.tokenize(b"The history of the lighthouse, told in many chapters.\n\n"))
        n_total = llm.kv_stats().n_logical
    seconds = time.perf_counter() - start
    print(f"wrote {N_WRITE} tokens in {seconds:.0f} s, {N_WRITE / seconds:.1f} tokens/s")
    return [
        (f"finish_reason is {reason}", reason == "length"),
        (
            f"{n_total} tokens evaluated for {n_prompt} + {N_WRITE}",
            n_prompt + N_WRITE - n_total in (0, 1),
        ),
        (f"at most {most} of {BUDGET} cells held in any layer and head", 0 < most <= BUDGET),
        (f"RSS grew by {growth / MIB:.1f} MiB after the first compaction", growth <= RSS_SLACK),
    ]


def read(model: str, threads: int) -> list[tuple[str, bool]]:
    """Read the long prompt in batches of three sizes."""
    held = {}
    for n_batch in (64, 512, 2048):
        with Llama(
            model,
            n_ctx=N_CTX,
            kv_budget=BUDGET,
            n_batch=n_batch,
            n_ubatch=n_batch,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        ) as llm:
            tokens = random.Random(1).choices(range(1000, llm.n_vocab()), k=N_PROMPT)
            start = time.perf_counter()
            llm.eval(tokens)
            held[n_batch] = llm.kv_stats().n_held
            seconds = time.perf_counter() - start
            print(f"  n_batch {n_batch} ({llm.n_batch} used): {seconds:.1f} s, {llm.kv_stats()}")
    return [(f"cells held after {N_PROMPT} tokens: {held}", len(set(held.values())) == 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="GGUF file; default: the embedded default model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    model = arguments.model or str(default_model_path())
    checks = read(model, arguments.threads) + write(model, arguments.threads)
    for text, passed in checks:
        print(f"{'ok  ' if passed else 'FAIL'} {text}")
    return int(not all(passed for _, passed in checks))


if __name__ == "__main__":
    sys.exit(main())
