"""What a context's KV cache holds: `KVStats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _native

MIB = 1024 * 1024


@dataclass(frozen=True)
class KVStats:
    """Statistics of a KV cache, with or without a budget. See ``Llama.kv_stats()``.

    Counts are of the sequence and in tokens or cells; bytes and microseconds are of the context.

    Attributes
    ----------
    budget : int
        Cells per attention layer and sequence; 0 without a budget.
    n_ctx_seq : int
        Logical context per sequence, tokens.
    n_seq_max : int
        Sequences that the context was made for.
    n_layer : int
        Layers that live in the budget (without one: that have a full-attention cache).
    n_fused : int
        Of these, compacted by fused operators; the others by graphs of ggml's own operators.
    n_logical : int
        Tokens that the sequence has seen and not removed.
    n_held : int
        Cells in use per layer.
    n_evicted : int
        ``n_logical - n_held``.
    n_pinned : int
        First positions that no compaction moves.
    n_compact : int
        Compactions so far.
    n_evicted_total : int
        Cells that they evicted, per layer.
    bytes_k, bytes_v : int
        K and V of the budgeted layers.
    bytes_ring, bytes_beacon : int
        Query rows, and centroids with their counts and norms (the policy "expected": moments).
    bytes_allocated : int
        What ggml's buffers of these four really take, padding included.
    bytes_other : int
        Sliding-window and recurrent caches of the same model; the budget leaves them alone.
    bytes_host : int
        Positions and what is carried along per layer, KV head and cell, in host memory.
    bytes_scratch : int
        The backends' buffers for the largest graph of a compaction; decoding uses them too.
    bytes_full : int
        K and V of the same layers in a cache of `n_ctx_seq` cells.
    us_compact, us_score, us_select, us_move : int
        Microseconds in compactions, and in their three parts.
    n_reused : int
        Tokens of the last prompt that were not read again (`Llama` alone).
    bytes_snapshots : int
        Host memory in use for the ends of prompts (`Llama` alone).
    """

    budget: int
    n_ctx_seq: int
    n_seq_max: int
    n_layer: int
    n_fused: int
    n_logical: int
    n_held: int
    n_evicted: int
    n_pinned: int
    n_compact: int
    n_evicted_total: int
    bytes_k: int
    bytes_v: int
    bytes_ring: int
    bytes_beacon: int
    bytes_allocated: int
    bytes_other: int
    bytes_host: int
    bytes_scratch: int
    bytes_full: int
    us_compact: int
    us_score: int
    us_select: int
    us_move: int
    n_reused: int = 0
    bytes_snapshots: int = 0

    @classmethod
    def of(cls, ctx: Any, seq_id: int = -1) -> KVStats:
        """Statistics of sequence `seq_id` (-1: all) of a context, as ``llm.ctx``."""
        return cls(**_native.stats(ctx, seq_id))

    @property
    def ratio(self) -> float:
        """How many times smaller than a full cache: ``bytes_full / bytes_allocated``."""
        return self.bytes_full / self.bytes_allocated if self.bytes_allocated else 1.0

    @property
    def seconds_compact(self) -> float:
        """Seconds in compactions."""
        return self.us_compact / 1e6

    def __str__(self) -> str:
        cells = f"{self.n_held} of {self.budget} cells" if self.budget else f"{self.n_held} cells"
        return (
            f"{self.n_logical} tokens in {cells}, {self.bytes_allocated / MIB:.1f} MiB "
            f"(full cache {self.bytes_full / MIB:.1f} MiB, {self.ratio:.1f} times), "
            f"compactions: {self.n_compact} in {self.seconds_compact:.2f} s"
        )
