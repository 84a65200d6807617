"""Settings of the bounded cache: `BeaconConfig`, and what `kv_budget` may be."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any, Union

from . import _native

#: Budgets are best a multiple of this: attention reads the cache in steps of it.
CELL_STEP = 256

#: What a bounded cache may keep: "beacon" and what others do, on the same engine. All hold the same
#: budget, sinks, recent window and pins.
#:
#: =============== ===============================================================================
#: "beacon"        beacons and recent queries, what is said again out of the way (the default)
#: "recent"        attention of the recent queries, as SnapKV (arXiv 2404.14469)
#: "redundancy"    the same, and how alike the keys are, as R-KV (arXiv 2505.24133)
#: "expected"      attention of queries like those so far, as Expected Attention (arXiv 2510.00636)
#: "accumulated"   attention summed up since a token came, as H2O (arXiv 2306.14048)
#: "streaming"     the newest, as StreamingLLM (arXiv 2309.17453)
#: =============== ===============================================================================
POLICIES = _native.policies()

AUTO_MIN = 1024
AUTO_RATIO = 5.8

KVBudget = Union[int, float, str, None]


@dataclass(frozen=True)
class BeaconConfig:
    """How a bounded cache chooses what to keep. The defaults are measured; most programs need none.

    Parameters
    ----------
    window : int, default 128
        Decoded tokens between two compactions, and the cells that one frees.
    n_sink : int, default 4
        First positions, never evicted and left out of the scoring softmax.
    n_recent : int, default 32
        Newest positions, never evicted.
    n_beacon : int, default 16
        Beacon queries (centroids of the query history) per layer and KV head.
    n_probe : int, default 16
        Recent queries kept per layer as probes, and as many to track the history with.
    beacon_share : float, default 0.5
        Share of the beacons in the importance of a cell, 0 to 1; recent queries have the rest.
    restated : float, default 1.0
        How much the likeness of a cell to a newer one lowers its importance, 0 to 1.
    quota : float, default 0.5
        Share of the free cells that goes to the least restated cells, 0 to 1.
    policy : str, default "beacon"
        What is kept: one of `POLICIES`. The others are there to compare with; `n_beacon`,
        `beacon_share`, `restated` and `quota` belong to "beacon" alone.
    pin_share : float, default 0.25
        A prompt of up to this share of the budget is pinned: no compaction evicts it. 0 to 0.5.

    Raises
    ------
    TypeError
        A field has the wrong type (a bool is no number here).
    ValueError
        A field is NaN, negative or otherwise out of its range.
    """

    window: int = 128
    n_sink: int = 4
    n_recent: int = 32
    n_beacon: int = 16
    n_probe: int = 16
    beacon_share: float = 0.5
    restated: float = 1.0
    quota: float = 0.5
    policy: str = "beacon"
    pin_share: float = 0.25

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, str):
                continue
            if isinstance(field.default, int):
                _check_count(field.name, value)
            else:
                _check_share(field.name, value, 0.5 if field.name == "pin_share" else 1.0)
        _native.check_params(self.params(budget=1 << 29))

    def params(self, budget: int) -> Any:
        """``struct beacon_params *`` for a budget of `budget` cells."""
        fields = {**dataclasses.asdict(self), "policy": POLICIES.index(self.policy)}
        return _native.params(budget=budget, **fields)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if not 0 <= int(value) < 1 << 31:
        raise ValueError(f"{name} must be an integer from 0 to 2147483647, not {value}")


def _check_share(name: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not 0.0 <= float(value) <= most:  # false for NaN
        raise ValueError(f"{name} must be a number from 0 to {most:g}, not {value}")


def min_budget(config: BeaconConfig) -> int:
    """Smallest budget in cells that leaves room for a batch of one token."""
    low, high = 0, 1
    while _native.max_batch(config.params(high)) < 1:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _native.max_batch(config.params(middle)) < 1:
            low = middle
        else:
            high = middle
    return high


def auto_budget(n_ctx: int) -> int | None:
    """Rule of ``kv_budget="auto"``: a fixed share of the context, never too few cells.

    ``n_ctx / 5.8`` rounded down to a multiple of 256, at least 1024; off where that is more than
    half of `n_ctx`, since a full cache costs little there. Nothing but `n_ctx` enters, so the same
    call gives the same budget on every model and machine whose memory can hold it; for the others
    see ``fit.recommend_budget``.

    ======= ======== ==================
    n_ctx   budget   cells, full : held
    ======= ======== ==================
    1,024   off
    2,048   1,024    2.0
    4,096   1,024    4.0
    8,192   1,280    6.4
    32,768  5,632    5.8
    131,072 22,528   5.8
    ======= ======== ==================

    Parameters
    ----------
    n_ctx : int
        Logical context in tokens.

    Returns
    -------
    int or None
        Cells per layer and sequence; None: no budget.
    """
    budget = max(AUTO_MIN, _round_down(n_ctx / AUTO_RATIO))
    return budget if 2 * budget <= n_ctx else None


def _round_down(cells: float) -> int:
    return math.floor(cells / CELL_STEP) * CELL_STEP


def resolve_budget(
    kv_budget: KVBudget, n_ctx: int, config: BeaconConfig | None = None
) -> int | None:
    """Cells that a `kv_budget` stands for.

    Parameters
    ----------
    kv_budget : int, float, "auto" or None
        int: cells per layer and sequence. float: share of `n_ctx`, above 0 and up to 1, rounded
        down to a multiple of 256 cells. "auto": see `auto_budget`; where the model is known,
        `Llama` looks at the memory too. None: no budget.
    n_ctx : int
        Logical context in tokens.
    config : BeaconConfig, optional
        The rest of the settings; they decide how small a budget may be.

    Returns
    -------
    int or None
        Cells per layer and sequence; None: no budget.

    Raises
    ------
    TypeError
        `kv_budget` is none of the above.
    ValueError
        The share is out of its range, the budget is above `n_ctx` or below the minimum that
        `config` needs (sinks, recent window, compaction window and one batch); the message names
        both numbers.
    """
    forms = 'an integer (cells), a float (share of n_ctx), "auto" or None'
    if kv_budget is None:
        return None
    if isinstance(kv_budget, str):
        if kv_budget != "auto":
            raise ValueError(f"kv_budget must be {forms}, not {kv_budget!r}")
        budget = auto_budget(n_ctx)
        if budget is None:
            return None
    elif isinstance(kv_budget, bool) or not isinstance(kv_budget, numbers.Real):
        raise TypeError(f"kv_budget must be {forms}, not {kv_budget!r}")
    elif isinstance(kv_budget, numbers.Integral):
        budget = int(kv_budget)
        if budget <= 0:
            raise ValueError(f"kv_budget must be above 0 cells, not {budget}; None: no budget")
    else:
        if not 0.0 < kv_budget <= 1.0:  # false for NaN
            raise ValueError(
                f"kv_budget={kv_budget}: a float is a share of n_ctx, above 0 and up to 1; "
                "pass an integer for a number of cells"
            )
        budget = _round_down(kv_budget * n_ctx)

    if budget > n_ctx:
        raise ValueError(f"kv_budget={budget} cells is above n_ctx={n_ctx} tokens")
    least = min_budget(config or BeaconConfig())
    if budget < least:
        raise ValueError(
            f"kv_budget={budget} cells is below the minimum of {least}: sinks or pinned prompt, "
            "recent window, compaction window and one batch"
        )
    return budget
