"""Failures of the machine: an exception, nothing changed, and the next call works.

ggml's functions are made to fail by a library that is preloaded (faults.cpp), so the cases run in
processes of their own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from operators import NATIVE, source_tree

from beaconkv_gguf import _library
from native import child_environment

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="preloading is done as on Linux"
)

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled faults.cpp."""
    library = tmp_path_factory.mktemp("faults") / "libfaults.so"
    include = source_tree() / "ggml" / "include"
    command = ["c++", "-shared", "-fPIC", f"-I{include}", f"-I{NATIVE}", str(HERE / "faults.cpp")]
    subprocess.run([*command, "-o", str(library), "-ldl"], check=True)
    return library


_PREAMBLE = """
import ctypes, sys
import beaconkv_gguf
sys.path[:0] = [sys.argv[2]]
import numpy as np
from beaconkv_gguf import _native
from native import Context, Model, budget, random_tokens

faults = ctypes.CDLL(sys.argv[3])
def arm(name, n=0):
    global keep
    keep = name.encode()
    faults.fault_arm(keep, n)

model = Model(sys.argv[1])
def context(**kwargs):
    params = budget(128, window=32, n_recent=16, n_probe=8)
    return Context(model, params, n_ctx=1024, n_batch=48, **kwargs)
def full():
    ctx = context()
    ctx.decode(random_tokens(300))
    while ctx.stats()["n_held"] < 128:
        ctx.decode([7])
    return ctx
def facts(ctx):
    return ctx.positions(), ctx.stats()["n_compact"], ctx.length[0]
def assert_same_future(a, b):
    tokens = random_tokens(100, seed=1)
    np.testing.assert_array_equal(a.step(tokens), b.step(tokens))
    assert facts(a) == facts(b)
"""


@pytest.fixture
def run(faults: Path, tiny_path: Callable[[str], Path]) -> Callable[[str], str]:
    def run(script: str, model: str = "llama") -> str:
        done = subprocess.run(
            [sys.executable, "-c", _PREAMBLE + script, str(tiny_path(model)), str(HERE), faults],
            env=child_environment(
                LD_PRELOAD=str(faults), FAULTS_GGML=str(_library.library_path("ggml-base"))
            ),
            cwd=HERE,  # not where the sources of the package are
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("function", ["alloc_buffer", "alloc_tensors", "reserve"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_each_allocation_of_a_context_may_fail(
    function: str, model: str, run: Callable[..., str]
) -> None:
    out = run(
        f"""
n = 0
while True:
    arm("{function}", n)
    try:
        ctx = context()
    except RuntimeError as error:
        assert str(error), n
        n += 1
        assert n < 200
        continue
    if faults.fault_left() >= 0:
        break  # it takes fewer than n
    n += 1  # ggml coped with it
    ctx.close()
arm("", -1)
assert_same_future(ctx, context())
print(n)
""",
        model,
    )
    assert int(out) >= 1


@pytest.mark.parametrize(("function", "status"), [("alloc_graph", -2), ("compute", -3)])
def test_a_score_graph_that_fails_leaves_everything(
    function: str, status: int, run: Callable[..., str]
) -> None:
    run(
        f"""
with full() as ctx, full() as other:
    before = facts(ctx)
    for _ in range(3):
        arm("{function}")
        assert ctx.try_decode({{0: [9]}}) == {status}
        assert "score graph of a compaction failed" in _native.last_error()
        assert facts(ctx) == before
    assert_same_future(ctx, other)
"""
    )


def test_a_move_without_memory_leaves_everything(run: Callable[..., str]) -> None:
    run(
        """
with full() as ctx, full() as other:
    before = facts(ctx)
    arm("alloc_graph", 1)
    assert ctx.try_decode({0: [9]}) == -2
    assert "move graph of a compaction failed" in _native.last_error()
    assert facts(ctx) == before
    ctx.decode(random_tokens(100, seed=1))
    assert ctx.stats()["n_compact"] > before[1]
"""
    )


def test_rows_that_moved_in_part_are_given_up_by_name(run: Callable[..., str]) -> None:
    run(
        """
with full() as ctx:
    arm("compute", 1)
    assert ctx.try_decode({0: [9]}) == -3
    assert "sequence 0 is lost" in _native.last_error()
    assert ctx.stats()["n_held"] == 0
    ctx.length[0] = 0
    tokens = random_tokens(200)
    with context() as other:
        np.testing.assert_array_equal(ctx.step(tokens), other.step(tokens))
        assert ctx.positions() == other.positions()
"""
    )


@pytest.mark.parametrize(("function", "status"), [("alloc_graph", -2), ("compute", -3)])
def test_a_decode_that_fails_can_be_tried_again(
    function: str, status: int, run: Callable[..., str]
) -> None:
    run(
        f"""
with full() as ctx, full() as other:
    ctx.step([5, 6])
    other.step([5, 6])
    before = facts(ctx)
    arm("{function}")
    assert ctx.try_decode({{0: [9, 8]}}) == {status}  # of another size: no graph is reused
    assert facts(ctx) == before
    assert_same_future(ctx, other)
"""
    )


@pytest.mark.parametrize("at", [0, 1])  # the score graph, and the move: then all is read again
def test_llama_tells_where_and_why_and_goes_on(at: int, run: Callable[..., str]) -> None:
    run(
        f"""
from beaconkv_gguf import BeaconConfig, Llama
beacon = BeaconConfig(window=32, n_recent=16, n_probe=8)
with Llama(sys.argv[1], n_ctx=1024, kv_budget=128, beacon=beacon, verbose=False) as llm:
    llm.eval(random_tokens(400))
    arm("compute", {at})
    try:
        llm.eval(random_tokens(60, seed=1))
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "at position 4" in str(error) and "failed" in str(error), error
    llm.eval(random_tokens(60, seed=1)[llm.n_tokens - 400 :])
    assert llm.n_tokens == llm.kv_stats().n_logical == 460
"""
    )


_LIMITED = """
import resource, sys
import beaconkv_gguf
from beaconkv_gguf import Llama
small = dict(n_ctx=512, kv_budget=256, verbose=False)
Llama(sys.argv[1], **small).close()
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
try:
    Llama(sys.argv[1], n_ctx=1 << 24, kv_budget=1 << 23, verbose=False)
    raise SystemExit("no error")
except (ValueError, RuntimeError, MemoryError) as error:
    print(error)
with Llama(sys.argv[1], **small) as llm:
    llm.eval([5] * 300)
"""


def test_a_budget_beyond_the_memory_is_an_error(tiny_path: Callable[[str], Path]) -> None:
    done: Any = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tiny_path("llama"))],
        cwd=HERE,
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("operator", ["wrong_score", "wrong_move"])
def test_an_operator_that_computes_something_else_is_not_used(
    operator: str, run: Callable[..., str]
) -> None:
    run(
        f"""
import os
from native import log
arm("{operator}")
os.environ["BEACONKV_FUSED"] = "require"
try:
    context()
except RuntimeError as error:
    assert "only 0 of 2 layers" in str(error), error
else:
    raise AssertionError("required, and not there")
del os.environ["BEACONKV_FUSED"]
with log() as lines:
    wrong = full()
assert wrong.stats()["n_fused"] == 0
assert any("fused operators disagree" in line for line in lines), lines
os.environ["BEACONKV_FUSED"] = "0"
assert_same_future(wrong, full())
"""
    )
