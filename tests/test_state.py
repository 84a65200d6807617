"""Saved states: a restored context goes on as the one that was never saved, or it is refused."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from beaconkv_gguf import _native, llama_cpp
from native import Context, Model, budget, child_environment, log, random_tokens

Tiny = Callable[[str], Model]

CELLS = 128
FIELDS: dict[str, Any] = {
    "window": 32,
    "n_sink": 4,
    "n_recent": 16,
    "n_beacon": 4,
    "n_probe": 8,
    "pin_share": 0.25,
}
COUNTS = ("n_logical", "n_held", "n_pinned", "n_compact", "n_evicted_total")


def bounded(cells: int = CELLS, **fields: Any) -> Any:
    return budget(cells, **{**FIELDS, **fields})


def filled(model: Model, n: int = 300, seed: int = 0, **kwargs: Any) -> Context:
    """A context whose sequence 0 was compacted and then grew by single tokens."""
    ctx = Context(model, kwargs.pop("params", bounded()), n_ctx=1024, n_batch=64, **kwargs)
    tokens = random_tokens(n + 21, seed)
    ctx.decode(tokens[:n])
    ctx.step(tokens[n:])
    return ctx


def facts(ctx: Context, seq_id: int = 0) -> Any:
    stats = ctx.stats(seq_id)
    return [stats[name] for name in COUNTS], ctx.positions(seq_id)


def assert_same_future(a: Context, b: Context, seq_a: int = 0, seq_b: int = 0) -> None:
    """Bit by bit, over several compactions."""
    assert facts(a, seq_a) == facts(b, seq_b)
    for chunk in (1, 50, 7, 64, 64, 1):
        tokens = random_tokens(chunk, seed=chunk)
        np.testing.assert_array_equal(a.decode(tokens, seq_a), b.decode(tokens, seq_b))
        assert facts(a, seq_a) == facts(b, seq_b)


# --- what is restored -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", range(len(_native.policies())))
def test_a_restored_sequence_goes_on_bit_by_bit_under_each_policy(policy: int, tiny: Tiny) -> None:
    params = bounded(policy=policy)
    with filled(tiny("llama"), params=params) as saved:
        state = saved.save(0)
        with Context(tiny("llama"), params, n_ctx=1024, n_batch=64) as other:
            other.decode(random_tokens(200, seed=9))  # is replaced
            assert other.load(state, 0)
            assert_same_future(saved, other)


@pytest.mark.parametrize("name", tiny_models.BOUNDED)
def test_a_restored_context_goes_on_for_each_kind_of_model(name: str, tiny: Tiny) -> None:
    with filled(tiny(name)) as saved:
        state = saved.save()
        with Context(tiny(name), bounded(), n_ctx=1024, n_batch=64) as other:
            assert other.load(state)
            assert_same_future(saved, other)


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_0"])
def test_each_cache_type_is_restored(kind: str, tiny: Tiny) -> None:
    types = {"type_k": kind, "type_v": kind}
    with filled(tiny("llama"), **types) as saved, filled(tiny("llama"), 40, **types) as other:
        assert other.load(saved.save(0), 0)
        assert_same_future(saved, other)


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite_hybrid"])
def test_a_partial_state_of_a_compacted_cache_is_the_whole(name: str, tiny: Tiny) -> None:
    partial = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: llama-server's checkpoints
    with filled(tiny(name)) as saved, filled(tiny(name)) as other:
        state = saved.save(0, partial)
        other.decode(random_tokens(200, seed=2))
        assert other.load(state, 0, partial)
        assert_same_future(saved, other)


def test_a_context_goes_back_to_its_own_past(tiny: Tiny) -> None:
    tokens = random_tokens(150, seed=3)
    with filled(tiny("llama")) as ctx:
        state, before = ctx.save(0), facts(ctx)
        first = ctx.step(tokens)
        after = facts(ctx)
        assert ctx.load(state, 0)
        assert facts(ctx) == before
        np.testing.assert_array_equal(ctx.step(tokens), first)
        assert facts(ctx) == after


def test_cells_that_were_removed_in_between_stay_free(tiny: Tiny) -> None:
    with filled(tiny("llama")) as saved, filled(tiny("llama"), 40) as other:
        length = saved.length[0]
        assert saved.seq_rm(length - 9, length - 5)  # a hole that the next tokens fill
        assert other.load(saved.save(0), 0)
        assert_same_future(saved, other)


def test_one_sequence_out_of_several_goes_into_another_slot(tiny: Tiny) -> None:
    with filled(tiny("llama"), n_seq_max=3) as saved, filled(tiny("llama"), n_seq_max=3) as other:
        saved.decode(random_tokens(222, seed=5), 2)
        other.decode(random_tokens(333, seed=6), 1)
        before = facts(other, 0), facts(other, 1)
        assert other.load(saved.save(2), 2)
        assert (facts(other, 0), facts(other, 1)) == before
        assert other.load(saved.save(2), 1)
        assert facts(other, 0) == before[0]
        assert_same_future(saved, other, 2, 1)


def test_a_whole_context_brings_every_sequence(tiny: Tiny) -> None:
    with filled(tiny("llama"), n_seq_max=3) as saved, filled(tiny("llama"), n_seq_max=3) as other:
        saved.decode(random_tokens(222, seed=5), 2)
        other.decode(random_tokens(50, seed=6), 1)  # goes: sequence 1 was empty
        assert other.load(saved.save())
        assert other.length == {0: 321, 1: 0, 2: 222}
        assert_same_future(saved, other, 0, 0)
        assert_same_future(saved, other, 2, 2)


def test_an_empty_sequence_empties_the_one_it_replaces(tiny: Tiny) -> None:
    with Context(tiny("gemma3"), bounded(), n_ctx=1024) as empty, filled(tiny("gemma3")) as other:
        assert other.load(empty.save(0), 0)
        assert other.length[0] == 0 and other.stats()["n_held"] == 0
        assert_same_future(empty, other)


def test_a_copy_that_waits_for_the_next_batch_is_saved(tiny: Tiny) -> None:
    with filled(tiny("llama"), n_seq_max=2) as saved, filled(tiny("llama"), 40) as other:
        llama_cpp.llama_memory_seq_cp(saved.memory, 0, 1, -1, -1)
        saved.length[1] = saved.length[0]
        state = saved.save(1)
        with Context(tiny("llama"), bounded(), n_ctx=1024, n_batch=64, n_seq_max=2) as other:
            assert other.load(state, 0)
            assert_same_future(saved, other)


_RESTART = """
import sys
sys.path[:0] = [sys.argv[4]]
import numpy as np
from native import Context, Model, random_tokens
from test_state import bounded
model = Model(sys.argv[1])
with Context(model, bounded(), n_ctx=1024, n_batch=64) as ctx:
    assert ctx.load(open(sys.argv[2], "rb").read(), 0)
    np.save(sys.argv[3], ctx.step(random_tokens(100, seed=3)))
"""


def test_a_state_outlives_the_process(
    tiny: Tiny, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    state, logits = tmp_path / "state", tmp_path / "logits.npy"
    with filled(tiny("llama")) as ctx:
        state.write_bytes(ctx.save(0))
        subprocess.run(
            [
                sys.executable,
                "-c",
                _RESTART,
                str(tiny_path("llama")),
                str(state),
                str(logits),
                str(Path(__file__).parent),
            ],
            cwd=Path(__file__).parent,  # not where the sources of the package are
            env=child_environment(),
            check=True,
        )
        np.testing.assert_array_equal(ctx.step(random_tokens(100, seed=3)), np.load(logits))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cells": 160}, "kv_budget = 128, this context has 160"),
        ({"window": 48}, "window = 32, this context has 48"),
        ({"n_sink": 5}, "n_sink = 4, this context has 5"),
        ({"n_recent": 17}, "n_recent = 16, this context has 17"),
        ({"n_beacon": 5}, "n_beacon = 4, this context has 5"),
        ({"n_probe": 7}, "n_probe = 8, this context has 7"),
        ({"beacon_share": 0.25}, "beacon_share = 0.5, this context has 0.25"),
        ({"restated": 0.25}, "restated = 1, this context has 0.25"),
        ({"quota": 0.25}, "quota = 0.5, this context has 0.25"),
        ({"pin_share": 0.125}, "pin_share = 0.25, this context has 0.125"),
        ({"policy": 1}, "policy = beacon, this context has recent"),
    ],
)
def test_another_budget_is_refused_by_name(
    change: dict[str, Any], message: str, tiny: Tiny
) -> None:
    with filled(tiny("llama")) as saved, filled(tiny("llama"), params=bounded(**change)) as other:
        before = other.save(0)
        assert not other.load(saved.save(0), 0)
        assert message in _native.last_error()
        assert other.save(0) == before


def test_another_cache_type_or_model_or_number_of_sequences_is_refused_by_name(
    tiny: Tiny,
) -> None:
    with filled(tiny("llama")) as saved:
        state = saved.save(0)
        with filled(tiny("llama"), type_k="q8_0") as other:
            assert not other.load(state, 0)
            assert "type_k = f16, this context has q8_0" in _native.last_error()
        with filled(tiny("qwen2")) as other:
            assert not other.load(state, 0)
            assert "the state was saved with model = " in _native.last_error()
        with filled(tiny("llama"), n_seq_max=2) as other:
            assert not other.load(state, 0)
            assert "sequences = 1, this context has 2" in _native.last_error()


def test_a_whole_context_is_not_taken_for_one_sequence(tiny: Tiny) -> None:
    with filled(tiny("llama")) as ctx:
        before = ctx.save(0)
        assert not ctx.load(ctx.save(), 0)
        assert ctx.save(0) == before


def test_a_sequence_that_is_longer_than_the_context_is_refused(tiny: Tiny) -> None:
    with (
        filled(tiny("llama"), 400) as saved,
        Context(tiny("llama"), bounded(), n_ctx=256, n_batch=64) as other,
    ):
        other.decode(random_tokens(200))
        before = other.save(0)
        assert not other.load(saved.save(0), 0)
        assert "421 tokens, this context takes 256" in _native.last_error()
        assert other.save(0) == before


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite_hybrid"])
def test_truncated_and_damaged_states_leave_the_context_as_it_was(name: str, tiny: Tiny) -> None:
    rng = np.random.default_rng(0)
    with filled(tiny(name)) as ctx, filled(tiny(name), 200, seed=1) as other:
        state, before = ctx.save(0), other.save(0)
        cuts = [0, 3, 4, 8, 12, 20, 300, *rng.integers(0, len(state), 20).tolist(), len(state) - 1]
        for cut in cuts:
            assert not other.load(state[:cut], 0), cut
            assert other.save(0) == before
        # llama.cpp ignores bytes 4 to 8, which say what sequence it was
        for at in [0, *range(8, 64), *rng.integers(64, len(state), 40).tolist(), len(state) - 1]:
            damaged = bytearray(state)
            damaged[at] ^= 1 << int(rng.integers(8))
            assert not other.load(bytes(damaged), 0), at
            assert other.save(0) == before
        assert other.load(state, 0)
        assert_same_future(ctx, other)


def _checksum(data: bytes, seed: int = 0xCBF29CE484222325) -> int:
    """As in beacon-state.cpp."""
    value = seed ^ len(data)
    for (word,) in struct.iter_unpack("<Q", data + b"\0" * (-len(data) % 8)):
        value = (value ^ word) * 0x100000001B3 % 2**64
        value ^= value >> 29
    return value


class Section:
    """What a saved sequence knows beside its cells: to be changed, and signed again."""

    _numbers = "<3BIiQQIi"
    _names = ("beacons", "empty", "open", "n_pin", "boundary")
    _names += ("n_compact", "n_evicted", "n_round", "pos_seen")

    def __init__(self, state: bytes) -> None:
        n = struct.unpack_from("<Q", state, 20)[0]  # of the fingerprint
        self._before, self._fingerprint = state[:28], state[28 : 28 + n]
        payload = memoryview(state)[28 + n + 16 :]
        self._head, self._at, self._payload = bytes(payload[:12]), 12, payload
        self.used, self.rows = self._take(np.uint32), self._take(np.int32)
        values = struct.unpack_from(self._numbers, payload, self._at)
        self.numbers = dict(zip(self._names, values))
        self._at += struct.calcsize(self._numbers)
        self.carried, self.twin, self.pos = map(self._take, (np.float32, np.int32, np.int32))
        self.rest = bytearray(payload[self._at :])

    def _take(self, dtype: Any) -> Any:
        n = struct.unpack_from("<Q", self._payload, self._at)[0]
        data = np.frombuffer(self._payload, dtype, n, self._at + 8).copy()
        self._at += 8 + data.nbytes
        return data

    def signed(self) -> bytes:
        vectors = [self.used, self.rows, self.carried, self.twin, self.pos]
        packed = [struct.pack("<Q", len(v)) + v.tobytes() for v in vectors]
        numbers = struct.pack(self._numbers, *self.numbers.values())
        payload = b"".join([self._head, *packed[:2], numbers, *packed[2:], self.rest])
        checksum = _checksum(payload, _checksum(self._fingerprint))
        head = self._before + self._fingerprint + struct.pack("<QQ", len(payload), checksum)
        return head + payload

    def first_cell(self) -> int:
        """Where the position of the first cell stands in `rest`."""
        return self.rest.index(struct.pack("<II", 1, len(self.used))) + 8


def test_a_section_that_is_signed_again_loads(tiny: Tiny) -> None:
    with filled(tiny("llama")) as ctx:
        state = ctx.save(0)
        assert Section(state).signed() == state


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.used.__setitem__(5, s.used[6]),
        lambda s: s.used.__setitem__(5, 1 << 30),
        lambda s: s.twin.__setitem__(7, CELLS),
        lambda s: s.rows.__setitem__(0, 0),
        lambda s: s.rows.__setitem__(1, 1_000_000_000),
        lambda s: s.rows.__setitem__(-1, 100_000),
        lambda s: s.numbers.update(n_pin=0x7FFFFFFF),
        lambda s: s.numbers.update(boundary=0x7FFFFFFF),
        lambda s: s.numbers.update(boundary=-1),
        lambda s: s.numbers.update(pos_seen=-5),
        lambda s: setattr(s, "pos", s.pos[:0]),
        lambda s: [setattr(s, name, s.pos[:0]) for name in ("pos", "twin", "carried")],
        lambda s: struct.pack_into("<i", s.rest, s.first_cell(), -1000),
        lambda s: struct.pack_into("<i", s.rest, s.first_cell() + 8, 3),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    change: Callable[[Section], Any], tiny: Tiny
) -> None:
    with filled(tiny("llama")) as ctx, filled(tiny("llama"), 200, seed=1) as other:
        section = Section(ctx.save(0))
        change(section)
        before = other.save(0)
        loaded = other.load(section.signed(), 0)
        if loaded:  # the sequence that a cell was of does not matter
            assert facts(other) == facts(ctx)
        else:
            assert other.save(0) == before
        other.decode(random_tokens(100))


def test_a_negative_position_is_refused_where_nothing_was_evicted(tiny: Tiny) -> None:
    with Context(tiny("llama"), bounded(), n_ctx=1024) as ctx, filled(tiny("llama")) as other:
        ctx.decode(random_tokens(60))
        section = Section(ctx.save(0))
        struct.pack_into("<i", section.rest, section.first_cell(), -1000)
        before = other.save(0)
        assert not other.load(section.signed(), 0)
        assert other.save(0) == before


def test_flipped_bits_of_a_state_without_checksum_end_no_process(tiny: Tiny) -> None:
    rng = np.random.default_rng(0)
    with Context(tiny("llama"), n_ctx=1024) as stock:
        stock.decode(random_tokens(100))
        state = stock.save(0)
    with filled(tiny("llama")) as ctx:
        for at in range(8, 8 + 8 + 12 * 100, 7):  # numbers of streams, cells, positions
            damaged = bytearray(state)
            damaged[at] ^= 1 << int(rng.integers(8))
            if ctx.load(bytes(damaged), 0):
                assert ctx.stats()["n_held"] <= CELLS
                ctx.positions()
            ctx.seq_rm(0)
            ctx.decode(random_tokens(200))


def test_a_state_without_a_budget_loads_and_is_tracked_afresh(tiny: Tiny) -> None:
    tokens = random_tokens(400)
    with Context(tiny("llama"), n_ctx=1024, n_batch=64) as stock:
        stock.decode(tokens[:100])
        states = {None: stock.save(), 0: stock.save(0)}
        stock.decode(tokens[100:200])
        too_long = stock.save(0)
    for seq_id, state in states.items():
        with filled(tiny("llama")) as ctx:
            assert ctx.load(state, seq_id)
            assert ctx.positions()[0, 0] == list(range(100))
            assert ctx.stats()["n_pinned"] == 0
            ctx.decode(tokens[100:])
            assert ctx.stats()["n_compact"] > 0 and ctx.stats()["n_logical"] == 400
            before = ctx.save(0)
            with log() as lines:
                assert not ctx.load(too_long, 0)  # 200 tokens, 128 cells
            assert "not enough cells" in "".join(lines)
            assert ctx.save(0) == before


def test_a_truncated_state_without_a_budget_leaves_the_context_as_it_was(tiny: Tiny) -> None:
    with Context(tiny("llama"), n_ctx=1024) as stock:
        stock.decode(random_tokens(100))
        state = stock.save(0)
    with filled(tiny("llama")) as ctx:
        before = ctx.save(0)
        for cut in (8, 11, 12, 16, 500, len(state) // 2, len(state) - 1):
            assert not ctx.load(state[:cut], 0), cut
            assert ctx.save(0) == before


def test_a_state_under_a_budget_is_refused_by_a_context_without_one(tiny: Tiny) -> None:
    with filled(tiny("llama")) as saved, Context(tiny("llama"), n_ctx=1024) as stock:
        stock.decode(random_tokens(50))
        before = stock.save(0)
        assert not stock.load(saved.save(0), 0)
        assert "saved under a KV budget" in _native.last_error()
        assert stock.save(0) == before
