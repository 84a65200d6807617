"""Long life of one process: conversations under random budgets, and its memory.

Prints the resident set after each conversation and fails if it grows by more than 1 MiB per 10,000
tokens. The 200,000 tokens of the default take about three quarters of an hour on one core.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from beaconkv_gguf import BeaconConfig, Llama, LlamaRAMCache
from beaconkv_gguf.config import POLICIES
from beaconkv_gguf.default_model import default_model_path
from beaconkv_gguf.traces import synthetic

MIB = 1 << 20
N_CTX = 8192


def converse(llm: Llama, rng: random.Random, n_tokens: int, folder: Path) -> int:
    """Turns that read, write, are aborted, saved and loaded until `n_tokens` are evaluated."""
    words = synthetic(rng.randrange(1000)).text.split()
    history: list[int] = []
    n_done = 0
    while n_done < n_tokens and len(history) < N_CTX - 1500:
        at = rng.randrange(len(words) // 2)
        question = " ".join(words[at : at + rng.choice([20, 100, 400])])
        history += llm.tokenize(question.encode(), add_bos=not history)
        n_write = rng.choice([20, 100, 400, 800])
        abort_at = rng.choice([None, None, None, n_write // 2])
        answer = []
        for token in llm.generate(history, temp=0.7):
            answer.append(token)
            if len(answer) == abort_at:
                llm.abort()
            if len(answer) == n_write:
                break
        n_done += len(history) - llm.kv_stats().n_reused + len(answer)
        # as often as not the turn was thinking, which the next prompt does not have
        history += rng.choice([answer, answer[-10:]])
        if rng.random() < 0.2:
            llm.save_state_file(folder / "state")
            llm.load_state_file(folder / "state")
        if llm.kv_budget:
            assert llm.kv_stats().n_held <= llm.kv_budget
    return n_done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file [SmolLM2-135M-Instruct]")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = args.model or default_model_path()
    rng = random.Random(args.seed)
    process = psutil.Process()
    seen, rss = [0], []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.conversations):
            budget = rng.choice([512, 768, 1024, 1280, 2048])
            types = rng.choice(["f16", "q8_0"])
            with Llama(
                model,
                n_ctx=N_CTX,
                kv_budget=budget,
                beacon=BeaconConfig(policy=rng.choice(POLICIES)),
                type_k=types,
                type_v=types,
                n_threads=args.threads,
                n_threads_batch=args.threads,
                seed=i,
                verbose=False,
            ) as llm:
                if rng.random() < 0.2:
                    llm.set_cache(LlamaRAMCache(64 * MIB))
                n = converse(llm, rng, args.tokens // args.conversations, Path(folder))
                n_compact = llm.kv_stats().n_compact
            del llm
            gc.collect()
            seen.append(seen[-1] + n)
            rss.append(process.memory_info().rss / MIB)
            print(
                f"{i + 1:3} of {args.conversations}: {seen[-1]:8,} tokens, budget {budget:5} "
                f"{types}, {n_compact:3} compactions, {rss[-1]:7.1f} MiB, "
                f"{time.monotonic() - start:5.0f} s",
                flush=True,
            )
    n_warm = len(rss) // 5  # buffers that are made once
    slope = np.polyfit(seen[1 + n_warm :], rss[n_warm:], 1)[0] * 10_000
    print(f"{slope:+.3f} MiB per 10,000 tokens after the first {n_warm} conversations")
    return 0 if slope < 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
