"""Cases of our ggml operators (native/ggml/beacon-ops.h), and what the reference makes of them.

The cases are computed by a program of their own (kernels/run.cpp), by any backend: the CPU's
kernels, those of CUDA and Metal with a stand-in for their built-ins, or a real device.
"""

from __future__ import annotations

import functools
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import gguf
import numpy as np
from numpy.typing import NDArray

from beaconkv_gguf import _library
from beaconkv_gguf import reference as ref

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parent / "native" / "ggml"
EMULATED = ("cuda-emulated", "metal-emulated")
STEP = 3.2e-7  # GGML_BEACON_STEP
KINDS = {kind.name.lower(): kind for kind in gguf.GGMLQuantizationType}

Array = NDArray[Any]


def source_tree() -> Path:
    """The patched llama.cpp that the tested libraries were built from."""
    roots = [HERE.parent / "build", Path(_library.library_path("llama")).resolve().parents[2]]
    for root in roots:
        for header in root.glob("**/ggml/include/ggml-backend.h"):
            return header.parents[2]
    raise FileNotFoundError(f"no llama.cpp with ggml's headers in any of {roots}")


def build_runner(folder: Path, flags: Sequence[str] = ("-O2",)) -> Path:
    """Compile kernels/run.cpp with the kernels of all backends. Needs a C++17 compiler."""
    tree, libraries = source_tree(), _library.library_dir()
    metal = tree / "ggml" / "src" / "ggml-metal"
    units = [
        ([HERE / "kernels" / "run.cpp"], []),
        ([HERE / "kernels" / "cuda" / "emulated.cpp"], [HERE / "kernels" / "cuda"]),
        (
            [HERE / "kernels" / "metal" / "emulated.cpp"],
            [HERE / "kernels" / "metal", metal, metal / "kernels"],
        ),
    ]
    includes = [HERE / "kernels", NATIVE, tree / "ggml" / "include", tree / "ggml" / "src"]
    objects = []
    for sources, first in units:
        for source in sources:
            objects.append(folder / f"{source.parent.name}-{source.stem}.o")
            paths = [f"-I{path}" for path in [*first, *includes]]
            command = ["c++", "-std=c++17", "-g", *flags, *paths, "-c", source, "-o", objects[-1]]
            subprocess.run(command, check=True)
    program = folder / "run"
    found = [_library.library_path(name) for name in ("ggml", "ggml-base", "ggml-cpu")]
    rpath = f"-Wl,-rpath,{libraries}"
    subprocess.run(["c++", *flags, *objects, *found, rpath, "-o", program], check=True)
    return program


def encode_rows(x: Array, kind: str) -> Array:
    """Bytes of x [.., d] in a ggml type, [.., bytes of a row]."""
    x = np.ascontiguousarray(x, np.float32)
    if kind in ("f32", "f16"):
        return x.astype(
            np.dtype(kind.replace("f", "<f").replace("32", "4").replace("16", "2"))
        ).view(np.uint8)
    return (
        gguf.quants.quantize(x.reshape(-1, x.shape[-1]), KINDS[kind])
        .view(np.uint8)
        .reshape(*x.shape[:-1], -1)
    )


def decode_rows(data: Array, kind: str) -> Array:
    """Inverse of encode_rows, as float32."""
    data = np.ascontiguousarray(data)
    if kind in ("f32", "f16"):
        return data.view("<f4" if kind == "f32" else "<f2").astype(np.float32)
    rows = gguf.quants.dequantize(data.reshape(-1, data.shape[-1]), KINDS[kind])
    return rows.reshape(*data.shape[:-1], -1)


@dataclass
class Tensor:
    """What run.cpp reads as one tensor."""

    kind: str
    shape: tuple[int, ...]  # ne, innermost first
    data: Array

    def encode(self) -> bytes:
        shape = self.shape + (1,) * (4 - len(self.shape))
        return struct.pack("<i4q", int(KINDS[self.kind]), *shape) + self.data.tobytes()


def tensor(x: Array, kind: str = "f32") -> Tensor:
    """x, whose last axis is the innermost."""
    if kind in ("f32", "i32"):
        x = np.ascontiguousarray(x, "<f4" if kind == "f32" else "<i4")
        return Tensor(kind, x.shape[::-1], x)
    return Tensor(kind, x.shape[::-1], encode_rows(x, kind))


def encode_case(
    op: int, stream: int, n_threads: int, words: bytes, tensors: Sequence[Tensor | None]
) -> bytes:
    head = struct.pack("<4i", op, stream, n_threads, len(words) // 4) + words
    parts = [struct.pack("<i", -1) if t is None else t.encode() for t in tensors]
    return head + struct.pack("<i", len(tensors)) + b"".join(parts)


@dataclass
class Turning:
    """Rotation of a layer: what the operators get of it."""

    rope: ref.Rope
    n_pos: int

    def words(self) -> bytes:
        r = self.rope
        pairs = 0 if r.n_rot == 0 else 2 if r.neox else 1
        scale = ref.rope_angles([0], r)[1] if r.n_rot else 1.0
        return struct.pack("<2if", r.n_rot, pairs, 1.0 / scale)

    def table(self) -> Tensor | None:
        if self.rope.n_rot == 0:
            return None
        pos = np.concatenate([np.arange(256), np.arange(1 + self.n_pos // 256) * 256])
        theta, _ = ref.rope_angles(pos, self.rope)
        theta = theta.reshape(len(pos), -1)
        return tensor(np.concatenate([np.cos(theta), np.sin(theta)], axis=1))


@dataclass
class Score:
    """One case of GGML_OP_BEACON_SCORE."""

    kind_k: str = "f16"
    kind_v: str = "f16"
    d: int = 64
    e: int = 64
    h: int = 2
    group: int = 3
    n: int = 31
    n_stream: int = 1
    stream: int = 0
    n_beacon: int = 8
    n_recent: int = 5  # queries, each with `group` heads
    n_witness: int = 12
    n_sink: int = 4
    rope: ref.Rope = field(default_factory=lambda: ref.Rope(64, neox=True))
    n_hadamard: int = 0
    softcap: float = 0.0
    n_threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        n, h = self.n, self.h
        n_cells = n + 7
        self.turning = Turning(self.rope, 40_000)
        self.cells = np.sort(rng.choice(n_cells, n, replace=False))
        rows = [rng.standard_normal((self.n_stream, n_cells, h, size)) for size in (self.d, self.e)]
        self.k, self.v = (encode_rows(x, kind) for x, kind in zip(rows, (self.kind_k, self.kind_v)))
        # positions in the table: old ones below the boundary, and some that queries do not see
        self.table_pos = np.arange(n) * 2
        self.boundary = int(self.table_pos[n // 2])
        self.recent_pos = rng.integers(self.boundary, 2 * n + 1, self.n_recent)
        self.pos = np.sort(rng.choice(40_000, (h, n), replace=False), axis=1)
        self.count = rng.integers(0, 3, (h, self.n_beacon))
        self.probes = rng.standard_normal((h, self.n_beacon + self.n_recent * self.group, self.d))
        newest = rng.choice(n, min(self.n_witness, n), replace=False)
        self.newer = np.sort(np.append(newest, n - 1)) if self.n_witness else np.array([], int)
        self.newer = np.unique(self.newer)

    def floats(self) -> tuple[Array, Array]:
        """K and V of the cells, [h, n, d] and [h, n, e]."""
        cells = self.cells
        k = decode_rows(self.k[self.stream][cells], self.kind_k).transpose(1, 0, 2)
        v = decode_rows(self.v[self.stream][cells], self.kind_v).transpose(1, 0, 2)
        return k, v

    def units(self) -> Array:
        """Keys with all rotations undone and values, each of length 1: [h, n, d + e]."""
        k, v = self.floats()
        pre = ref.unrope_keys(k.astype(np.float64), self.pos, self.rope, self.n_hadamard)
        return np.concatenate(
            [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (pre, v.astype(np.float64))], -1
        )

    def encode(self) -> bytes:
        d, e, h = self.d, self.e, self.h
        has_probes = self.probes.shape[1] > 0
        words = struct.pack(
            "<4i2f",
            self.n_beacon,
            self.n_sink,
            self.boundary,
            self.n_hadamard,
            1 / np.sqrt(d),
            self.softcap,
        )
        n_cells = self.k.shape[1]
        seen = np.concatenate(
            [np.full(self.n_beacon, 1 << 30), np.tile(self.recent_pos, self.group)]
        )
        meta = np.concatenate([self.table_pos, seen, self.newer])
        tensors = [
            Tensor(self.kind_k, (d, h, n_cells, self.n_stream), self.k),
            Tensor(self.kind_v, (e, h, n_cells, self.n_stream), self.v),
            tensor(self.probes) if has_probes else None,
            tensor(self.units()[:, self.newer]) if len(self.newer) else None,
            tensor(self.cells, "i32"),
            tensor(meta, "i32"),
            tensor(self.pos, "i32"),
            self.turning.table() if len(self.newer) else None,
            tensor(self.count[..., None]) if self.n_beacon else None,
        ]
        if tensors[7] is None:
            return encode_case(
                1, self.stream, self.n_threads, words + struct.pack("<2if", 0, 0, 1.0), tensors
            )
        return encode_case(1, self.stream, self.n_threads, words + self.turning.words(), tensors)

    @functools.cached_property
    def attention(self) -> list[tuple[Array, Array]]:
        """Of the beacons, then of the recent queries: how many have a vote [h], and the mean of
        their attention [h, n]."""
        k, _ = self.floats()
        count = self.count if self.n_beacon else np.zeros((self.h, 0))
        seen = self.table_pos >= self.n_sink
        before = self.table_pos[None] <= self.recent_pos[:, None]
        sees = (seen & (before | (self.table_pos < self.boundary))).any(1)
        votes = (count > 0).sum(1) * seen.any(), np.full(self.h, sees.sum() * self.group)
        mean = (
            ref.importance(
                k, self.probes, count, self.recent_pos, self.table_pos, self.boundary,
                self.n_sink, 1 / np.sqrt(self.d), share, self.softcap,
            )
            for share in (1.0, 0.0)
        )  # fmt: skip
        return list(zip(votes, mean))

    @functools.cached_property
    def likeness(self) -> Array:
        """Of each cell to each witness, [h, n, w]; -inf to those that are not newer."""
        units = self.units()
        likeness = units @ units[:, self.newer].transpose(0, 2, 1) / 2
        return np.where(self.newer[None, :] > np.arange(self.n)[:, None], likeness, -np.inf)

    def check(self, result: list[bytes]) -> None:
        h, n = self.h, self.n
        beacon, recent, restated = np.frombuffer(result[0], "<f4").reshape(4, h, n)[:3]
        twin = np.frombuffer(result[0], "<i4").reshape(4, h, n)[3]
        for found, size, (votes, mean) in zip(
            (beacon, recent), (self.n_beacon, self.n_recent), self.attention
        ):
            if size == 0:
                assert not found.any()
                continue
            np.testing.assert_allclose(found.sum(1), votes, rtol=1e-4, atol=1e-6)
            expected = mean * votes[:, None]
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)
        if len(self.newer) == 0:
            assert not restated.any()
            return
        has_newer = np.isfinite(self.likeness).any(-1)  # [h, n]
        assert not restated[~has_newer].any()
        rank = (self.likeness + np.arange(len(self.newer)) * STEP)[has_newer]
        chosen = twin[has_newer]
        assert ((chosen >= 0) & (chosen < len(self.newer))).all()
        row = np.arange(len(chosen))
        assert (rank[row, chosen] >= rank.max(-1) - 1e-5).all()
        likeness = self.likeness[has_newer][row, chosen]
        np.testing.assert_allclose(restated[has_newer], likeness, atol=2e-5)


@dataclass
class Track:
    """One case of GGML_OP_BEACON_TRACK."""

    d: int = 64
    h: int = 2
    group: int = 3
    n: int = 31  # query rows
    n_stream: int = 1
    stream: int = 0
    n_beacon: int = 8
    rope: ref.Rope = field(default_factory=lambda: ref.Rope(64, neox=True))
    n_threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        s, h, m, d = self.n_stream, self.h, self.n_beacon, self.d
        self.turning = Turning(self.rope, 40_000)
        self.count = rng.integers(0, 4, (s, h, m)).astype(float)
        self.count[:, :, 0] = 5  # reference: no queries at all means that there are no clusters yet
        self.mean = (rng.standard_normal((s, h, m, d)) * (self.count > 0)[..., None]).astype("<f4")
        self.norm = np.linalg.norm(self.mean, axis=-1) * 1.1
        self.q = rng.standard_normal((s, self.n + 3, h * self.group * d)).astype("<f2")
        self.rows = rng.permutation(self.n + 3)[: self.n]
        self.pos = np.sort(rng.choice(40_000, self.n, replace=False))

    def encode(self) -> bytes:
        tensors = [
            tensor(self.mean),
            tensor(self.count[..., None]),
            tensor(self.norm[..., None]),
            Tensor("f16", (self.q.shape[2], self.q.shape[1], 1, self.n_stream), self.q),
            tensor(np.stack([self.rows, self.pos]), "i32"),
            self.turning.table(),
        ]
        return encode_case(0, self.stream, self.n_threads, self.turning.words(), tensors)

    def check(self, result: list[bytes]) -> None:
        q = self.q[self.stream][self.rows].astype(np.float64)
        pre = ref.unrope(q.reshape(self.n, -1, self.d), self.pos, self.rope)
        before = [np.asarray(x, "<f4") for x in (self.mean, self.count, self.norm)]
        expected = ref.track(*(x[self.stream].astype(np.float64) for x in before), pre)
        for data, whole, part in zip(result, before, expected):
            found = np.frombuffer(data, "<f4").reshape(whole.shape)
            np.testing.assert_allclose(found[self.stream], part, rtol=1e-4, atol=1e-5)
            others = [s for s in range(self.n_stream) if s != self.stream]
            np.testing.assert_array_equal(found[others], whole[others])


@dataclass
class Move:
    """One case of GGML_OP_BEACON_MOVE."""

    kinds: tuple[str, ...] = ("f16", "f16")  # of the caches
    sizes: tuple[int, ...] = (64, 64)  # elements of a row, of each cache
    n_layer: int = 1
    h: int = 2
    n: int = 31
    n_keep: int = 20
    first: int = 0
    n_stream: int = 1
    stream: int = 0
    n_threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.caches = []
        for kind, size in zip(self.kinds, self.sizes):
            block, n_bytes = gguf.GGML_QUANT_SIZES[KINDS[kind]]
            shape = (self.n_stream, self.n, self.h, size // block * n_bytes)
            self.caches.append(rng.integers(0, 256, shape, np.uint8))
        rest = np.arange(self.first, self.n)
        lists = [
            np.sort(rng.choice(rest, self.n_keep, replace=False))
            for _ in range(self.n_layer * self.h)
        ]
        self.index = np.array(lists).reshape(self.n_layer, self.h, self.n_keep)

    def encode(self) -> bytes:
        tensors: list[Tensor | None] = [tensor(self.index, "i32")]
        for kind, size, data in zip(self.kinds, self.sizes, self.caches):
            tensors.append(Tensor(kind, (size, self.h, self.n, self.n_stream), data))
        return encode_case(2, self.stream, self.n_threads, struct.pack("<i", self.first), tensors)

    def check(self, result: list[bytes]) -> None:
        for c, (data, before) in enumerate(zip(result, self.caches)):
            index = self.index[c * self.n_layer // len(self.caches)]
            expected = before.copy()
            for head in range(self.h):
                kept = before[self.stream, index[head], head]
                expected[self.stream, self.first : self.first + self.n_keep, head] = kept
            found = np.frombuffer(data, np.uint8).reshape(before.shape)
            n_valid = self.first + self.n_keep  # what lies behind is of no use any more
            np.testing.assert_array_equal(found[:, :n_valid], expected[:, :n_valid])
            others = [s for s in range(self.n_stream) if s != self.stream]
            np.testing.assert_array_equal(found[others], before[others])


Case = Union[Score, Track, Move]


def compute(
    program: Path, device: str, cases: Sequence[Case]
) -> tuple[list[list[bytes]], list[int]]:
    """Results of the cases, and microseconds of each."""
    data = b"".join(case.encode() for case in cases)
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    run = subprocess.run(
        [program, device], input=data, capture_output=True, env=environment, check=False
    )
    if run.returncode != 0:
        sys.stderr.write(run.stderr.decode(errors="replace")[-8000:])
        raise RuntimeError(f"{program.name} {device} exited with {run.returncode}")
    results, times, at = [], [], 0
    for case in cases:
        n_parts = (
            1 if isinstance(case, Score) else 3 if isinstance(case, Track) else len(case.kinds)
        )
        parts = []
        for _ in range(n_parts):
            size = int(np.frombuffer(run.stdout, "<i8", 1, at)[0])
            parts.append(run.stdout[at + 8 : at + 8 + size])
            at += 8 + size
        times.append(int(np.frombuffer(run.stdout, "<i8", 1, at)[0]))
        at += 8
        results.append(parts)
    assert at == len(run.stdout)
    return results, times


def check(program: Path, device: str, cases: Sequence[Case]) -> None:
    """All cases on a device against the reference; an AssertionError names the first that fails."""
    results, _ = compute(program, device, cases)
    for case, result in zip(cases, results):
        try:
            case.check(result)
        except AssertionError as error:
            raise AssertionError(f"{device}: {case}: {error}") from None
