from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beaconkv_gguf import BeaconConfig, _native
from beaconkv_gguf.config import POLICIES, auto_budget, min_budget, resolve_budget


def test_defaults_are_the_library_s() -> None:
    native = _native.as_dict(_native.params())
    assert native.pop("budget") == 0
    native["policy"] = _native.policies()[native["policy"]]
    assert dataclasses.asdict(BeaconConfig()) == native


@pytest.mark.parametrize("number", [-1, len(POLICIES)])
def test_a_policy_that_is_none_is_refused_by_the_library(number: int) -> None:
    with pytest.raises(ValueError, match=f"policy = {number} is none"):
        _native.check_params(_native.params(budget=1024, policy=number))


def test_a_policy_is_taken_by_name() -> None:
    for i, name in enumerate(POLICIES):
        assert BeaconConfig(policy=name).params(budget=1024).policy == i
    with pytest.raises(ValueError, match=r"policy must be one of beacon, .* not 'lru'"):
        BeaconConfig(policy="lru")


def test_config_is_frozen_and_reaches_the_library() -> None:
    config = BeaconConfig(window=64, n_sink=2, beacon_share=0.25)
    params = _native.as_dict(config.params(budget=1280))
    assert (params["budget"], params["window"], params["n_sink"]) == (1280, 64, 2)
    assert params["beacon_share"] == 0.25
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("window", True, TypeError),
        ("window", 128.0, TypeError),
        ("window", "128", TypeError),
        ("window", -1, ValueError),
        ("window", 0, ValueError),
        ("window", 1 << 40, ValueError),
        ("n_recent", None, TypeError),
        ("n_beacon", -3, ValueError),
        ("n_sink", -1, ValueError),
        ("n_probe", -1, ValueError),
        ("beacon_share", math.nan, ValueError),
        ("beacon_share", 1.5, ValueError),
        ("restated", -0.1, ValueError),
        ("restated", True, TypeError),
        ("quota", math.inf, ValueError),
        ("quota", "0.5", TypeError),
        ("pin_share", 0.6, ValueError),
    ],
)
def test_bad_field_is_named(field: str, value: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=field) as caught:
        BeaconConfig(**{field: value})  # type: ignore[arg-type]
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)


def test_numpy_numbers_are_numbers() -> None:
    assert BeaconConfig(window=np.int64(64), quota=np.float32(0.5)).window == 64
    assert resolve_budget(np.int32(1280), 8192) == 1280


@pytest.mark.parametrize(
    ("n_ctx", "budget"),
    [
        (512, None),
        (1024, None),
        (2048, 1024),
        (4096, 1024),
        (8192, 1280),
        (32768, 5632),
        (131072, 22528),
    ],
)
def test_auto_rule(n_ctx: int, budget: int | None) -> None:
    assert auto_budget(n_ctx) == budget
    assert resolve_budget("auto", n_ctx) == budget
    if budget is not None:
        row = f"{n_ctx:<7,} {budget:<8,} {n_ctx / budget:.1f}"
        assert row in (auto_budget.__doc__ or ""), "the table in the docstring"


@given(st.integers(0, 1 << 24))
def test_auto_is_a_multiple_and_at_most_half(n_ctx: int) -> None:
    budget = auto_budget(n_ctx)
    if budget is not None:
        assert budget % 256 == 0
        assert 1024 <= budget <= n_ctx // 2


@pytest.mark.parametrize(
    ("kv_budget", "n_ctx", "cells"),
    [
        (None, 8192, None),
        (1280, 8192, 1280),
        (8192, 8192, 8192),
        (1000, 8192, 1000),
        (0.2, 8192, 1536),
        (0.25, 4096, 1024),
        (1.0, 1024, 1024),
    ],
)
def test_forms_of_a_budget(kv_budget: float | None, n_ctx: int, cells: int | None) -> None:
    assert resolve_budget(kv_budget, n_ctx) == cells


@pytest.mark.parametrize(
    ("kv_budget", "kind", "text"),
    [
        (0, ValueError, "not 0"),
        (-5, ValueError, "-5"),
        (9000, ValueError, "9000 cells is above n_ctx=8192"),
        (10, ValueError, "10 cells is below the minimum of"),
        (math.nan, ValueError, "nan"),
        (math.inf, ValueError, "inf"),
        (-0.5, ValueError, "-0.5"),
        (1.5, ValueError, "1.5"),
        (1280.0, ValueError, "1280.0"),
        (0.001, ValueError, "minimum"),
        ("all", ValueError, "'all'"),
        (True, TypeError, "True"),
        ([1280], TypeError, "1280"),
    ],
)
def test_bad_budget_is_named(kv_budget: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match="kv_budget") as caught:
        resolve_budget(kv_budget, 8192)  # type: ignore[arg-type]
    assert text in str(caught.value)


@pytest.mark.parametrize("config", [BeaconConfig(), BeaconConfig(window=512, n_recent=200)])
def test_minimum_is_the_smallest_that_works(config: BeaconConfig) -> None:
    least = min_budget(config)
    assert resolve_budget(least, 8192, config) == least
    with pytest.raises(ValueError, match=str(least)):
        resolve_budget(least - 1, 8192, config)
