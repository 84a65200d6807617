"""Random operations on several sequences, against a model of what every layer and head holds.

``BEACONKV_MACHINE_RUNS=20000 pytest tests/test_machine.py`` runs more of them than the 500 of
every day.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from beaconkv_gguf import _native, llama_cpp
from beaconkv_gguf import reference as ref
from native import Context, Model, budget

RUNS = int(os.environ.get("BEACONKV_MACHINE_RUNS", "500"))

BUDGET, WINDOW, N_SINK, N_RECENT, PIN_SHARE = 96, 24, 2, 8, 0.25
N_BATCH = ref.max_batch(BUDGET, WINDOW, N_SINK, N_RECENT, PIN_SHARE)  # 40
N_CTX = 1024
N_SEQ = 4

_stop = llama_cpp.ggml_abort_callback(lambda _data: True)
_go = llama_cpp.ggml_abort_callback(lambda _data: False)


@dataclass
class Sequence:
    """What one sequence must look like: DESIGN's words in Python."""

    heads: list[tuple[int, int]]  # (layer, KV head)
    held: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # ascending positions
    boundary: int = 0
    n_pin: int = 0
    prompt_open: bool = True

    def __post_init__(self) -> None:
        self.held = {head: [] for head in self.heads}

    @property
    def any_head(self) -> list[int]:
        return self.held[self.heads[0]]

    @property
    def pos_max(self) -> int:
        return self.any_head[-1] if self.any_head else -1

    @property
    def n_prefix(self) -> int:
        return sum(p < max(N_SINK, self.n_pin) for p in self.any_head)

    def reset(self) -> None:
        self.boundary, self.n_pin, self.prompt_open = 0, 0, True

    def begin_batch(self, k: int) -> None:
        """A short prompt is pinned when a single token follows it."""
        is_short = len(self.any_head) <= BUDGET * PIN_SHARE
        if k == 1 and self.prompt_open and self.boundary == 0 and is_short:
            self.n_pin = max(self.n_pin, self.pos_max + 1)
        self.prompt_open = k > 1

    def n_keep(self, k: int) -> int | None:
        """Cells that stay of those before a batch of k; None if it fits without a compaction."""
        n = len(self.any_head)
        if n + k <= BUDGET:
            return None
        length = max(self.pos_max + 1, n)  # there may be holes
        return ref.n_keep(length, k, BUDGET, WINDOW, self.n_prefix, N_RECENT)

    def compact(self, n_keep: int, now: dict[tuple[int, int], list[int]]) -> None:
        """Take what the cache kept, if it may have kept that."""
        n_prefix = self.n_prefix
        first_recent = self.any_head[-N_RECENT]
        for head, before in self.held.items():
            kept = now[head][:n_keep]
            assert set(kept) <= set(before)
            assert kept[:n_prefix] == before[:n_prefix]  # sinks and pins
            assert kept[-N_RECENT:] == before[-N_RECENT:]
            self.held[head] = kept
        self.boundary = max(self.boundary, first_recent)

    def append(self, k: int) -> None:
        positions = range(self.pos_max + 1, self.pos_max + 1 + k)
        for held in self.held.values():
            held.extend(positions)

    def remove(self, p0: int, p1: int) -> bool:
        """``seq_rm``: exact, or False and nothing changes."""
        p0, p1 = max(p0, 0), N_CTX if p1 < 0 else p1
        if p0 >= p1 or p0 > self.pos_max:
            return True
        to_end = p1 > self.pos_max
        if p0 < self.boundary and not (to_end and p0 <= max(N_SINK, self.n_pin)):
            return False
        if to_end:
            n_pin = min(self.n_pin, p0) if p0 > self.any_head[0] else 0
            if p0 < self.boundary or p0 <= self.any_head[0]:
                self.reset()
            self.n_pin = n_pin
        for head, held in self.held.items():
            self.held[head] = [p for p in held if not p0 <= p < p1]
        return True


class Machine(RuleBasedStateMachine):
    model: Model
    ctx: Context | None = None

    @initialize(n_seq=st.integers(1, N_SEQ))
    def create(self, n_seq: int) -> None:
        params = budget(
            BUDGET,
            window=WINDOW,
            n_sink=N_SINK,
            n_recent=N_RECENT,
            n_beacon=4,
            n_probe=4,
            pin_share=PIN_SHARE,
        )
        self.ctx = Context(self.model, params, n_ctx=N_CTX, n_batch=N_BATCH, n_seq_max=n_seq)
        heads = list(self.ctx.positions())
        self.seqs = [Sequence(heads) for _ in range(n_seq)]
        self.saved: list[tuple[bytes, Sequence]] = []

    def teardown(self) -> None:
        if self.ctx is not None:
            self.ctx.close()

    # --- helpers --------------------------------------------------------------------------------

    def pick(self, number: int) -> int:
        return number % len(self.seqs)

    def check(self) -> None:
        assert self.ctx is not None
        for s, seq in enumerate(self.seqs):
            stats = self.ctx.stats(s)
            assert self.ctx.positions(s) == seq.held
            assert self.ctx.seq_pos_max(s) == seq.pos_max
            assert stats["n_held"] == len(seq.any_head) <= BUDGET
            assert stats["n_pinned"] == seq.n_pin
            assert _native.boundary(self.ctx.ptr, s) == seq.boundary

    def decode_batch(self, chunks: dict[int, list[int]]) -> bool:
        """One decode of all or nothing; False if a sequence has no room for it."""
        assert self.ctx is not None
        for s in chunks:
            self.ctx.length[s] = self.seqs[s].pos_max + 1
        if any(self.ctx.length[s] + len(ids) > N_CTX for s, ids in chunks.items()):
            assert self.ctx.try_decode(chunks) == 1
            return False
        for s, ids in chunks.items():
            self.seqs[s].begin_batch(len(ids))
        keeps = {s: self.seqs[s].n_keep(len(ids)) for s, ids in chunks.items()}
        status = self.ctx.try_decode(chunks)
        fits = True
        for s, n_keep in keeps.items():
            if n_keep is None or not fits:
                continue
            fits = n_keep + len(chunks[s]) <= BUDGET and n_keep < len(self.seqs[s].any_head)
            if fits:
                self.seqs[s].compact(n_keep, self.ctx.positions(s))
        assert status == (0 if fits else 1)
        if fits:
            for s, ids in chunks.items():
                self.seqs[s].append(len(ids))
        self.check()
        return fits

    def decode_all(self, s: int, n: int, seed: int, batch: int) -> list[Any]:
        ids = np.random.default_rng(seed).integers(3, 259, n).tolist()
        logits = []
        for i in range(0, n, batch):
            if not self.decode_batch({s: ids[i : i + batch]}):
                break
            assert self.ctx is not None
            logits.append(self.ctx.logits())
        return logits

    # --- operations -----------------------------------------------------------------------------

    @rule(
        s=st.integers(0, N_SEQ - 1),
        n=st.one_of(st.integers(1, 60), st.integers(1, 700)),
        batch=st.integers(1, N_BATCH),
        seed=st.integers(0, 99),
    )
    def decode(self, s: int, n: int, batch: int, seed: int) -> None:
        self.decode_all(self.pick(s), n if batch > 4 else min(n, 60), seed, batch)

    @precondition(lambda self: len(self.seqs) > 1)
    @rule(
        sizes=st.lists(st.integers(0, 10), min_size=N_SEQ, max_size=N_SEQ),
        seed=st.integers(0, 99),
        n=st.integers(1, 8),
    )
    def decode_together(self, sizes: list[int], seed: int, n: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(n):
            chunks = {
                s: rng.integers(3, 259, size).tolist()
                for s, size in enumerate(sizes[: len(self.seqs)])
                if size
            }
            if chunks and not self.decode_batch(chunks):
                return

    @rule(s=st.integers(0, N_SEQ - 1), n=st.integers(1, N_BATCH))
    def abort(self, s: int, n: int) -> None:
        s = self.pick(s)
        assert self.ctx is not None
        seq = self.seqs[s]
        self.ctx.length[s] = seq.pos_max + 1
        if seq.pos_max + 1 + n > N_CTX:
            return
        seq.begin_batch(n)
        n_keep = seq.n_keep(n)
        fits = n_keep is None or (n_keep + n <= BUDGET and n_keep < len(seq.any_head))
        llama_cpp.llama_set_abort_callback(self.ctx.ptr, _stop, None)
        status = self.ctx.try_decode({s: [5] * n})
        llama_cpp.llama_set_abort_callback(self.ctx.ptr, _go, None)
        assert status == (2 if fits else 1)
        self.check()

    @rule(s=st.integers(0, N_SEQ - 1), back=st.integers(0, 80), n=st.integers(-1, 20))
    def remove_near_the_end(self, s: int, back: int, n: int) -> None:
        p0 = self.seqs[self.pick(s)].pos_max + 1 - back
        self.remove(s, p0, -1 if n < 0 else p0 + n)

    @rule(s=st.integers(0, N_SEQ - 1), p0=st.integers(-1, 60), n=st.integers(-1, 200))
    def remove_near_the_front(self, s: int, p0: int, n: int) -> None:
        self.remove(s, p0, -1 if n < 0 else max(p0, 0) + n)

    def remove(self, s: int, p0: int, p1: int) -> None:
        s = self.pick(s)
        assert self.ctx is not None
        expected = self.seqs[s].remove(p0, p1)
        assert self.ctx.seq_rm(p0, p1, s) == expected
        self.check()

    @precondition(lambda self: len(self.seqs) > 1)
    @rule(a=st.integers(0, N_SEQ - 1), b=st.integers(0, N_SEQ - 1))
    def copy(self, a: int, b: int) -> None:
        a, b = self.pick(a), self.pick(b)
        assert self.ctx is not None
        llama_cpp.llama_memory_seq_cp(self.ctx.memory, a, b, -1, -1)
        self.seqs[b] = copy.deepcopy(self.seqs[a])
        self.check()

    @rule(s=st.integers(0, N_SEQ - 1), n=st.integers(-1, 40))
    def pin(self, s: int, n: int) -> None:
        s = self.pick(s)
        assert self.ctx is not None
        seq = self.seqs[s]
        n = max(n, 0)
        n_cells = sum(p < n for p in seq.any_head)
        fits = max(n, n_cells) <= BUDGET * PIN_SHARE and n <= seq.pos_max + 1
        fits = fits and (seq.boundary == 0 or n <= max(N_SINK, seq.n_pin))
        try:
            _native.pin(self.ctx.ptr, s, n)
        except _native.BeaconError:
            assert not fits
        else:
            assert fits
            seq.n_pin = n
        self.check()

    @rule(s=st.integers(0, N_SEQ - 1))
    def save(self, s: int) -> None:
        s = self.pick(s)
        assert self.ctx is not None
        self.saved = [*self.saved[-2:], (self.ctx.save(s), copy.deepcopy(self.seqs[s]))]
        self.check()

    @precondition(lambda self: self.saved)
    @rule(i=st.integers(0, 2), s=st.integers(0, N_SEQ - 1), flip=st.integers(-3, 1 << 20))
    def load(self, i: int, s: int, flip: int) -> None:
        s = self.pick(s)
        assert self.ctx is not None
        state, seq = self.saved[i % len(self.saved)]
        if flip < 0:
            assert self.ctx.load(state, s)
            self.seqs[s] = copy.deepcopy(seq)
        else:
            damaged = bytearray(state)
            damaged[8 + flip % (len(state) - 8)] ^= 1 << flip % 8
            assert not self.ctx.load(bytes(damaged), s)
        self.check()

    @rule(
        s=st.integers(0, N_SEQ - 1),
        to=st.integers(0, N_SEQ - 1),
        n=st.integers(1, 120),
        batch=st.integers(1, N_BATCH),
        seed=st.integers(0, 99),
    )
    def restored_goes_on_as_never_saved(
        self, s: int, to: int, n: int, batch: int, seed: int
    ) -> None:
        s, to = self.pick(s), self.pick(to)
        assert self.ctx is not None
        state, before = self.ctx.save(s), copy.deepcopy(self.seqs[s])
        logits = self.decode_all(s, n, seed, batch)
        after = copy.deepcopy(self.seqs[s])
        assert self.ctx.load(state, to)
        self.seqs[to] = before
        np.testing.assert_array_equal(self.decode_all(to, n, seed, batch), logits)
        assert self.seqs[to] == after

    @rule()
    def clear(self) -> None:
        assert self.ctx is not None
        llama_cpp.llama_memory_clear(self.ctx.memory, True)
        self.seqs = [Sequence(seq.heads) for seq in self.seqs]
        self.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama"])
def test_no_sequence_of_operations_leaves_the_model(name: str, tiny_path: Any) -> None:
    path: Path = tiny_path(name)
    model = Model(path)
    machine = type("MachineOfTiny", (Machine,), {"model": model})
    run = machine.TestCase
    run.settings = settings(
        max_examples=RUNS,
        stateful_step_count=15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run().runTest()
    finally:
        model.close()
