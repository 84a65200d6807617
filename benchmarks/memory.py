"""What a budget saves: bytes of the KV cache, out of ggml's own buffer sizes.

    python benchmarks/memory.py [--model FILE]

Compares contexts of 8,192 tokens under a budget of 1,280 cells with the full f16 cache, query rows
and centroids included. Ends with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys

from beaconkv_gguf import KVStats, Llama
from beaconkv_gguf.default_model import default_model_path

N_CTX, BUDGET = 8192, 1280
TARGETS = {"f16": 5.8, "q8_0": 10.0}  # times smaller than the full f16 cache
MIB = 1024 * 1024


def stats(model: str, kv_budget: int | None, cache_type: str) -> KVStats:
    with Llama(
        model, n_ctx=N_CTX, kv_budget=kv_budget, type_k=cache_type, type_v=cache_type, verbose=False
    ) as llm:
        return llm.kv_stats()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="GGUF file; default: the embedded default model")
    model = parser.parse_args().model or str(default_model_path())

    full = stats(model, None, "f16").bytes_allocated
    print(f"full f16 cache of {N_CTX} cells: {full / MIB:.2f} MiB")
    missed = 0
    for cache_type, target in TARGETS.items():
        held = stats(model, BUDGET, cache_type)
        ratio = full / held.bytes_allocated
        met = ratio >= target
        missed += not met
        print(
            f"{BUDGET} cells of {cache_type}: {held.bytes_allocated / MIB:.2f} MiB "
            f"(K {held.bytes_k / MIB:.2f}, V {held.bytes_v / MIB:.2f}, query rows "
            f"{held.bytes_ring / MIB:.2f}, centroids {held.bytes_beacon / MIB:.2f}), {ratio:.2f} "
            f"times smaller; target {target:g}: {'met' if met else 'MISSED'}"
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
