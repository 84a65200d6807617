"""The fused operators against the NumPy reference: on the CPU, and the kernels of CUDA and Metal as
the CPU runs them with a stand-in for their built-ins."""

from __future__ import annotations

import functools
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import operators
import pytest
from operators import EMULATED, Case, Move, Score, Track

from beaconkv_gguf import reference as ref

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("c++") is None,
    reason="the stand-in for a GPU's threads needs Linux and a C++ compiler",
)

DEVICES = ("cpu", *EMULATED)
HEADS = {64: 64, 96: 96, 128: 128, 192: 128, 256: 256, 576: 512}  # of K: of V
GROUPS = (1, 3, 7)
COUNTS = (1, 31, 257, 4095)
KINDS = ("f16", "bf16", "q8_0", "q4_0")
PLAIN = ref.Rope(64, neox=True)


def rope(d: int, i: int) -> ref.Rope:
    """Rotations of many kinds, by turns."""
    kinds = [
        ref.Rope(d, neox=True),
        ref.Rope(d),
        ref.Rope(d // 2, neox=True, base=5e5, attn_factor=1.3),
        ref.Rope(d, scale=0.25, ext_factor=1.0, n_ctx_orig=2048, base=1e6),
        ref.Rope(0),
    ]
    return kinds[i % len(kinds)]


@functools.lru_cache(maxsize=1)  # one count at a time: all devices, then the next one
def score_matrix(counts: tuple[int, ...]) -> list[Case]:
    """Types x head sizes x heads of a group x counts; 1 to 4 sequences by turns."""
    cases: list[Case] = []
    for kind, d, group, n in itertools.product(KINDS, HEADS, GROUPS, counts):
        i = len(cases)
        cases.append(
            Score(
                kind, KINDS[i % 4], d, HEADS[d], 1 if n > 1000 else 1 + i % 3, group, n,
                n_stream=1 + i % 4, stream=i % (1 + i % 4),
                n_sink=(4, 0)[i % 2], rope=rope(d, i), softcap=(0.0, 20.0)[i % 5 == 0],
                n_hadamard=d & -d if kind[0] == "q" and i % 3 else 0, n_threads=1 + i % 5, seed=i,
            )
        )  # fmt: skip
    return cases


def track_matrix() -> list[Case]:
    return [
        Track(
            d,
            1 + i % 3,
            group,
            n,
            1 + i % 4,
            i % (1 + i % 4),
            (8, 5, 70)[i % 3],
            rope(d, i),
            seed=i,
        )
        for i, (d, group, n) in enumerate(itertools.product(HEADS, GROUPS, (1, 31, 67)))
    ]


def move_matrix(counts: tuple[int, ...]) -> list[Case]:
    """Everything kept, some, one; rows behind a front that stays; all word sizes of a row."""
    cases: list[Case] = []
    kinds = (*KINDS, "q5_0", "f32")
    for kind, d, n in itertools.product(kinds, (32, 96, 256, 576), counts):
        i = len(cases)
        for n_keep, first in ((n, 0), (1, 0), (max(1, n * 2 // 3), 0), (max(1, n // 2), n // 4)):
            n_layer = 1 + i % 4
            pair = (kind, kinds[i % len(kinds)])
            cases.append(
                Move(
                    pair * n_layer, (d, 64) * n_layer, n_layer, 1 + i % 3, n, n_keep, first,
                    n_stream=1 + i % 4, stream=i % (1 + i % 4), n_threads=1 + i % 5, seed=i,
                )
            )  # fmt: skip
    return cases


def edges() -> list[Case]:
    """What a policy, or a sequence that has just begun, does without."""
    return [
        Score(n_beacon=0),
        Score(n_recent=0),
        Score(n_witness=0),
        Score(n_beacon=0, n_recent=0),
        Score(n_sink=1000),  # no cell that a probe may see
        Score(n_witness=200, n=200),
        Score(
            d=576, e=512, h=8, n=257, rope=ref.Rope(64)
        ),  # Metal: likeness in more than one batch
        Score(n_beacon=130, n_recent=40, n=100),
        Score("f32", "f32", 80, 112, rope=ref.Rope(80)),
        Score("q8_0", "f16", 192, 64, n_hadamard=64, rope=ref.Rope(128, neox=True)),
        Track(rope=ref.Rope(0)),
    ]


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return operators.build_runner(tmp_path_factory.mktemp("operators"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", COUNTS)
def test_score_is_the_reference(runner: Path, device: str, n: int) -> None:
    operators.check(runner, device, score_matrix((n,)))


@pytest.mark.parametrize("device", DEVICES)
def test_score_without_some_of_its_inputs(runner: Path, device: str) -> None:
    operators.check(runner, device, edges())


@pytest.mark.parametrize("device", DEVICES)
def test_track_is_the_reference(runner: Path, device: str) -> None:
    operators.check(runner, device, track_matrix())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", COUNTS)
def test_move_keeps_every_byte(runner: Path, device: str, n: int) -> None:
    operators.check(runner, device, move_matrix((n,)))


def test_threads_make_no_difference(runner: Path) -> None:
    cases = [Score(n=257, n_threads=n) for n in (1, 2, 5, 16)]
    results, _ = operators.compute(runner, "cpu", cases)
    for case, result in zip(cases, results):
        case.check(result)


@pytest.mark.parametrize(("sanitizer", "step"), [("address,undefined", 7), ("thread", 19)])
def test_kernels_under_a_sanitizer(sanitizer: str, step: int, tmp_path: Path) -> None:
    """Reads out of bounds, and races within a block and between blocks.

    Every `step`-th case; ``python tests/kernels/sanitize.py`` takes them all.
    """
    probe = [*["c++", "-x", "c++", "-", "-o"], tmp_path / "probe", f"-fsanitize={sanitizer}"]
    if subprocess.run(probe, input=b"int main() {}", check=False).returncode != 0:
        pytest.skip("the compiler's sanitizers are not installed")
    program = operators.build_runner(tmp_path, ("-O1", f"-fsanitize={sanitizer}"))
    cases = [*score_matrix((31, 65)), *track_matrix(), *move_matrix((257,)), *edges()]
    for device in EMULATED:
        operators.check(program, device, cases[::step])
