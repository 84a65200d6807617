"""Two models in two threads at once: each writes what it would write alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beaconkv_gguf import Llama
from native import random_tokens


def write(path: Path, kv_budget: int | None, seed: int, n_threads: int) -> list[int]:
    """What a model of its own writes after a prompt, until long after its cells ran out."""
    settings: dict[str, Any] = {"n_threads": n_threads, "n_threads_batch": n_threads}
    with Llama(path, n_ctx=1024, kv_budget=kv_budget, verbose=False, **settings) as llm:
        written = []
        for token in llm.generate(random_tokens(300, seed), temp=0.0):
            written.append(token)
            if len(written) == 300:
                break
        stats = llm.kv_stats()
        assert (stats.n_compact > 0) == (kv_budget is not None)
        if kv_budget is not None:
            assert len(llm.kv_positions(1, 1)) == stats.n_held <= kv_budget
    return written


@pytest.mark.parametrize("n_threads", [1, 2])
def test_two_models_in_two_threads_write_what_each_would_alone(
    tiny_path: Callable[[str], Path], n_threads: int
) -> None:
    jobs: list[tuple[Path, int | None, int, int]] = [
        (tiny_path("llama"), 384, 1, n_threads),
        (tiny_path("gemma3"), 384, 2, n_threads),
        (tiny_path("llama"), None, 3, n_threads),
    ]
    alone = [write(*job) for job in jobs]
    together: dict[int, list[int]] = {}

    def work(i: int) -> None:
        together[i] = write(*jobs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together.get(i) for i in range(len(jobs))] == alone
