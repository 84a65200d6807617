"""Which layers are compacted by our own operators, and that nothing depends on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from typer.testing import CliRunner

from beaconkv_gguf import KVStats, cli
from beaconkv_gguf.config import POLICIES
from native import Context, Model, budget, log, random_tokens

Tiny = Callable[[str], Model]

BUDGET = budget(128, window=32, n_recent=16, n_probe=8)


def run(model: Model, fused: str, patch: pytest.MonkeyPatch, **kwargs: object) -> Context:
    patch.setenv("BEACONKV_FUSED", fused)
    return Context(model, kwargs.pop("params", BUDGET), n_ctx=1024, n_batch=48, **kwargs)


def test_all_layers_of_the_cpu_are_fused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEACONKV_FUSED", raising=False)
    with log() as lines, Context(tiny("llama"), BUDGET, n_ctx=1024, n_batch=48) as ctx:
        stats = KVStats.of(ctx.ptr)
        assert stats.n_fused == stats.n_layer == 2
    assert any("2 of 2 layers are compacted by fused operators" in line for line in lines)


@pytest.mark.parametrize(("value", "n_fused"), [("0", 0), ("1", 2), ("require", 2)])
def test_the_environment_decides(
    value: str, n_fused: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(tiny("llama"), value, monkeypatch) as ctx:
        assert ctx.stats()["n_fused"] == n_fused


@pytest.mark.parametrize("value", ["", "2", "on"])
def test_another_value_is_refused(value: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=f"0, 1 or require, not '{value}'"):
        run(tiny("llama"), value, monkeypatch)


def test_info_says_which_devices_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, word in (("1", "CPU: fused"), ("0", "CPU: composed")):
        monkeypatch.setenv("BEACONKV_FUSED", value)
        assert word in CliRunner().invoke(cli.app, ["info"]).stdout


def test_scratch_is_less(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = []
    for value in ("0", "1"):
        with run(tiny("llama"), value, monkeypatch, params=budget(1024)) as ctx:
            scratch.append(ctx.stats()["bytes_scratch"])
    assert 0 < scratch[1] < scratch[0] / 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_every_policy_keeps_the_same_cells(
    policy: str, kind: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = budget(128, window=32, n_recent=16, n_probe=8, policy=POLICIES.index(policy))
    tokens = random_tokens(300)
    found = []
    for value in ("0", "require"):
        with run(tiny("llama"), value, monkeypatch, params=params, type_k=kind, type_v=kind) as ctx:
            ctx.decode(tokens)
            found.append((ctx.positions(), ctx.step(tokens[:40])))
            assert ctx.stats()["n_compact"] > 3
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-3, atol=1e-3)


def test_cells_that_were_taken_again_out_of_order(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows can't be moved in place then: a later position may lie in front of an earlier one."""
    tokens = random_tokens(400)
    found = []
    for value in ("0", "require"):
        with run(tiny("llama"), value, monkeypatch) as ctx:
            ctx.decode(tokens[:100])
            assert ctx.seq_rm(30, 50)
            ctx.decode(tokens[100:300])
            found.append((ctx.positions(), ctx.step(tokens[300:340])))
            assert ctx.stats()["n_compact"] > 2
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-3, atol=1e-3)
