"""What a KV budget does to memory, prompt speed and decode speed, against the full cache.

Each cache is a worker process of its own: one with the full cache, one with the budget, and one
more for each further budget. They live through all measurements and take turns, so that a machine
whose speed drifts hits all of them alike, and a ratio is the median of the ratios of neighbours.
Only one computes at a time; the others wait on their pipes. Each number of parallel sequences has
a set of processes of its own.

A depth is reached by reading random tokens after those of the depth before, in as many pieces as
there are rounds, none shorter than a batch; a piece is a sample of the prompt speed. Then each
round decodes the same number of tokens, one by one and without sampling. Between rounds all caches
return to the depth if *all* of them can. A cache that was compacted can't: what it evicted is
gone. Then none returns, and the next round goes on where the last one ended, so that all caches
are at the same position all the time; `Case.positions` has the true ones. Where the rounds left
less than a batch to the next depth, or went past it, all caches are emptied and read anew.

A round decodes a multiple of the compaction window: once the cells have run out, each window has
one compaction, wherever in the window a round begins. So every round pays for as many compactions
as a long generation does. That is also why a bounded cache is not cut back to its boundary, as far
as it could be: the next compaction would come late.

All caches have flash attention on, sliding-window layers at the size of their window, and batches
of 512 tokens, fewer where a budget has no room for that: the prompt is then slower, and the
sliding-window layers, which have room for a batch as well, are smaller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional

import llama_cpp
import numpy as np
from llama_cpp import _internals

from . import _native
from .config import CELL_STEP, BeaconConfig, KVBudget, resolve_budget
from .llama import _load_errors, cache_type
from .plots import check_plot
from .stats import KVStats

N_BATCH = 512
N_WARM = 64  # tokens read unmeasured: they page the weights in and start the threads
N_WINDOW = 2  # compaction windows that a round decodes unless told otherwise
DECODE_WORK = 4  # what a decoded token costs in tokens of a prompt, roughly: for the time left

#: ``progress(what, done, total)`` in units of work, which take about the same time each.
Progress = Callable[[str, float, float], None]
Budget = Optional[int]  # cells; None: the full cache


class BenchError(RuntimeError):
    """A worker process failed or died; the message has its last lines."""


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """One quantity, a value for each round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def ratio(self, full: Samples) -> float:
        """Median of the ratios to the full cache's value of the same round."""
        return statistics.median(a / b for a, b in zip(self.values, full.values))

    def as_dict(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "min": self.low,
            "max": self.high,
            "samples": list(self.values),
        }


@dataclass(frozen=True)
class Case:
    """Speed of one cache at one depth.

    Attributes
    ----------
    kv_budget : int or None
        Cells per layer and sequence; None: the full cache.
    parallel : int
        Sequences decoded together.
    depth : int
        Tokens in each sequence when the first round began.
    positions : tuple of int
        The same for every round: rounds may go on instead of returning to the depth.
    prompt : Samples
        Tokens per second of all sequences, while they were filled up to the depth.
    decode : Samples
        Tokens per second of all sequences, compactions included.
    compact_share : Samples
        Share of the decode time spent in compactions, 0 to 1.
    n_compact : tuple of int
        Compactions in each round, of all sequences.
    prompt_ratio, decode_ratio : float
        To the full cache: median of the ratios of the same round.
    """

    kv_budget: Budget
    parallel: int
    depth: int
    positions: tuple[int, ...]
    prompt: Samples
    decode: Samples
    compact_share: Samples
    n_compact: tuple[int, ...]
    prompt_ratio: float
    decode_ratio: float

    def as_dict(self) -> dict[str, Any]:
        return {
            name: value.as_dict() if isinstance(value, Samples) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class Memory:
    """Bytes of one cache, from the context that was measured.

    Attributes
    ----------
    kv_budget : int or None
        Cells per layer and sequence; None: the full cache.
    parallel : int
        Sequences in the context, each with cells of its own.
    n_ctx : int
        Tokens that each of them may have.
    n_batch : int
        Prompt tokens per batch.
    bytes_k, bytes_v, bytes_ring, bytes_beacon, bytes_allocated, bytes_other, bytes_host : int
        As in `KVStats`.
    rss_growth : int or None
        Growth of the process since its model was loaded, compute buffers included; weights on a
        GPU and its buffers are not. None: this system doesn't tell.
    """

    kv_budget: Budget
    parallel: int
    n_ctx: int
    n_batch: int
    bytes_k: int
    bytes_v: int
    bytes_ring: int
    bytes_beacon: int
    bytes_allocated: int
    bytes_other: int
    bytes_host: int
    rss_growth: int | None

    @property
    def bytes_total(self) -> int:
        """All that the context's caches take, on the device and in host memory."""
        return self.bytes_allocated + self.bytes_other + self.bytes_host

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "bytes_total": self.bytes_total}


@dataclass(frozen=True)
class Report:
    """What `bench` measured.

    Attributes
    ----------
    model : str
        Name of the file.
    description : str
        Architecture, size and quantisation.
    n_ctx : int
        Tokens that each sequence may have.
    tokens, rounds, threads, n_gpu_layers : int
        As asked for, or what that stood for.
    type_k, type_v : int or str
        Cache types.
    cases : tuple of Case
        By number of sequences, depth and cache, the full one first.
    memory : tuple of Memory
        By number of sequences and cache, the full one first.
    """

    model: str
    description: str
    n_ctx: int
    tokens: int
    rounds: int
    threads: int
    n_gpu_layers: int
    type_k: int | str
    type_v: int | str
    cases: tuple[Case, ...]
    memory: tuple[Memory, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON takes it; speeds in tokens per second, sizes in bytes."""
        return {
            **vars(self),
            "cases": [case.as_dict() for case in self.cases],
            "memory": [memory.as_dict() for memory in self.memory],
        }


# --- measuring ------------------------------------------------------------------------------------


def bench(
    model: str | os.PathLike[str],
    *,
    depths: Sequence[int] = (4096,),
    kv_budgets: Sequence[KVBudget] = ("auto",),
    parallels: Sequence[int] = (1,),
    n_ctx: int | None = None,
    tokens: int | None = None,
    rounds: int = 3,
    beacon: BeaconConfig | None = None,
    type_k: int | str = "f16",
    type_v: int | str = "f16",
    threads: int | None = None,
    n_gpu_layers: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure budgets against the full cache; see the module for how.

    Parameters
    ----------
    model : str or path
        A GGUF file.
    depths : sequence of int, default (4096,)
        Tokens in the context when decoding begins.
    kv_budgets : sequence of int, float or "auto", default ("auto",)
        As ``kv_budget`` of `Llama`; shares are of `n_ctx`.
    parallels : sequence of int, default (1,)
        Numbers of sequences that are decoded together, each with a budget of its own.
    n_ctx : int, optional
        Tokens that each sequence may have, rounded up to a multiple of 256. Default: the largest
        depth and all rounds after it.
    tokens : int, optional
        Tokens that a round decodes in each sequence. Default: two compaction windows, 256.
    rounds : int, default 3
        Measurements of each case.
    beacon : BeaconConfig, optional
        How the budgets choose what to keep.
    type_k, type_v : int or str, default "f16"
        Cache types of all caches, as `Llama` takes them.
    threads : int, optional
        CPU threads. Default: half of them.
    n_gpu_layers : int, default 0
        Layers on the GPU; -1: all.
    progress : callable, optional
        Called as the work goes on.

    Returns
    -------
    Report

    Raises
    ------
    FileNotFoundError
        There is no such model.
    TypeError, ValueError
        An argument is wrong; the message says which and why.
    BenchError
        A worker process could not make its context, failed or died.

    Warns
    -----
    RuntimeWarning
        A depth goes beyond what the model was trained with, or leaves a budget room to the end of
        a round, so that nothing is compacted.
    """
    beacon = beacon or BeaconConfig()
    path = Path(model)
    if not path.is_file():
        raise FileNotFoundError(f"model file does not exist: {path}")
    if tokens is None:
        tokens = N_WINDOW * beacon.window
    if threads is None:
        threads = max((os.cpu_count() or 1) // 2, 1)
    for name, values in (
        ("depth", depths),
        ("parallel", parallels),
        ("tokens", [tokens]),
        ("rounds", [rounds]),
        ("threads", [threads]),
    ):
        if not values or min(values) < 1:
            raise ValueError(f"{name} must be at least 1, not {min(values, default=None)}")
    if n_gpu_layers != 0 and not llama_cpp.llama_supports_gpu_offload():
        raise ValueError(
            f"n_gpu_layers={n_gpu_layers}: no GPU backend is compiled in, or it found no device"
        )
    for name, value in (("type_k", type_k), ("type_v", type_v)):
        cache_type(name, value)

    depths = sorted(set(depths))
    n_needed = depths[-1] + rounds * tokens
    if n_ctx is not None and n_ctx < n_needed:
        raise ValueError(
            f"n_ctx={n_ctx} is too small: a depth of {depths[-1]} and {rounds} rounds of {tokens} "
            f"tokens need {n_needed}"
        )
    n_ctx = math.ceil((n_ctx or n_needed) / CELL_STEP) * CELL_STEP
    budgets = _budgets(kv_budgets, n_ctx, beacon)
    _check_fit(budgets, depths, max(parallels), tokens, beacon)

    settings = {
        "model": str(path),
        "n_ctx": n_ctx,
        "beacon": dataclasses.asdict(beacon),
        "type_k": type_k,
        "type_v": type_v,
        "threads": threads,
        "n_gpu_layers": n_gpu_layers,
    }
    parallels = list(dict.fromkeys(parallels))
    n_tokens = sum(parallels) * (1 + len(budgets))
    meter = _Meter(n_tokens * (depths[-1] + DECODE_WORK * len(depths) * rounds * tokens), progress)
    cases: list[Case] = []
    memory: list[Memory] = []
    for parallel in parallels:
        with _Group([None, *budgets], parallel, settings, meter) as group:
            n_ctx_train = group.opened["n_ctx_train"]
            if n_needed > n_ctx_train and parallel == parallels[0]:
                _warn(
                    f"{n_needed} tokens are more than the {n_ctx_train} that the model was trained "
                    "with: speeds hold, text would not"
                )
            for depth in depths:
                cases += group.measure(depth, tokens, rounds)
            memory += group.memory()
            description = group.opened["description"]
    return Report(
        model=path.name,
        description=description,
        n_ctx=n_ctx,
        tokens=tokens,
        rounds=rounds,
        threads=threads,
        n_gpu_layers=n_gpu_layers,
        type_k=type_k,
        type_v=type_v,
        cases=tuple(cases),
        memory=tuple(memory),
    )


def _budgets(kv_budgets: Sequence[KVBudget], n_ctx: int, beacon: BeaconConfig) -> list[int]:
    """Cells of the budgets, each once."""
    budgets = []
    for kv_budget in kv_budgets:
        cells = resolve_budget(kv_budget, n_ctx, beacon)
        if cells is None:
            raise ValueError(
                f"kv_budget={kv_budget!r} is no budget for n_ctx={n_ctx}: give a number of cells"
            )
        budgets.append(cells)
    if not budgets:
        raise ValueError("there is no budget to measure")
    return list(dict.fromkeys(budgets))


def _check_fit(
    budgets: list[int], depths: list[int], parallel: int, tokens: int, beacon: BeaconConfig
) -> None:
    """Whether budgets take the batches, and depths fill the budgets."""
    for budget in budgets:
        n_batch = _native.max_batch(beacon.params(budget))
        if parallel > n_batch:
            raise ValueError(
                f"kv_budget={budget} cells leaves room for batches of {n_batch} tokens: too few "
                f"for {parallel} sequences"
            )
        shallow = [f"{depth:,}" for depth in depths if depth + tokens <= budget]
        if shallow:
            _warn(
                f"at a depth of {', '.join(shallow)} tokens a budget of {budget:,} cells is not "
                "full: nothing is compacted while a round decodes"
            )


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


class _Meter:
    """Counts work and reports it."""

    def __init__(self, total: float, progress: Progress | None) -> None:
        self.total = total
        self._progress = progress
        self._done = 0.0
        self._what = ""

    def begin(self, what: str) -> None:
        self._what = what
        self.add(0)

    def add(self, work: float) -> None:
        self._done += work
        if self._progress is not None:
            self._progress(self._what, self._done, self.total)


class _Group(contextlib.AbstractContextManager["_Group"]):
    """Workers that stay at the same position, the full cache first."""

    def __init__(
        self, caches: list[Budget], parallel: int, settings: dict[str, Any], meter: _Meter
    ) -> None:
        self._parallel = parallel
        self._meter = meter
        self._position = 0
        self._depth = 0
        with contextlib.ExitStack() as stack:
            self._workers = {cache: stack.enter_context(_Remote(cache)) for cache in caches}
            for cache, worker in self._workers.items():
                meter.begin(f"loading, {label(cache)}")
                self.opened = worker.ask(kv_budget=cache, parallel=parallel, **settings)
            self._stack = stack.pop_all()

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _turn(self, i: int) -> Iterable[tuple[Budget, _Remote]]:
        """Workers in the order of round `i`: every other one is backwards."""
        return list(self._workers.items())[:: -1 if i % 2 else 1]

    def _advance(self, cache: Budget, worker: _Remote, op: str, to: int) -> dict[str, Any]:
        """Let one worker fill or decode up to position `to`; its answer, and tokens per second."""
        doing, work = ("reading", 1) if op == "fill" else ("decoding", DECODE_WORK)
        self._meter.begin(f"{doing} at {self._position:,} tokens, {label(cache)}")
        n = left = self._parallel * (to - self._position)

        def on_tokens(n_done: int) -> None:
            nonlocal left
            left -= n_done
            self._meter.add(n_done * work)

        answer = worker.ask(on_tokens, op=op, to=to)
        on_tokens(left)
        return {**answer, "speed": n / answer["seconds"]}

    def _cut(self, position: int) -> None:
        """Go back to a position, if all can."""
        workers = self._workers.values()
        if all(worker.ask(op="can_cut", to=position)["ok"] for worker in workers):
            for worker in workers:
                worker.ask(op="cut", to=position)
            self._position = position

    def measure(self, depth: int, tokens: int, rounds: int) -> list[Case]:
        """Fill up to a depth, and decode there in rounds."""
        prompt = self._fill(depth, rounds)
        positions, answers = self._decode(depth, tokens, rounds)

        def samples(cache: Budget, name: str) -> Samples:
            return Samples(tuple(answer[name] for answer in answers[cache]))

        return [
            Case(
                kv_budget=cache,
                parallel=self._parallel,
                depth=depth,
                positions=tuple(positions),
                prompt=prompt[cache],
                decode=samples(cache, "speed"),
                compact_share=samples(cache, "compact_share"),
                n_compact=tuple(answer["n_compact"] for answer in answers[cache]),
                prompt_ratio=prompt[cache].ratio(prompt[None]),
                decode_ratio=samples(cache, "speed").ratio(samples(None, "speed")),
            )
            for cache in self._workers
        ]

    def _fill(self, depth: int, rounds: int) -> dict[Budget, Samples]:
        """Prompt speed of each cache up to a depth."""
        if depth - self._position < N_BATCH:
            self._cut(0)
        start, n = self._position, depth - self._position
        self._meter.total += (n - (depth - self._depth)) * self._parallel * len(self._workers)
        self._depth = depth
        n_pieces = max(1, min(rounds, n // N_BATCH))
        speeds: dict[Budget, list[float]] = {cache: [] for cache in self._workers}
        for i in range(n_pieces):
            to = start + n * (i + 1) // n_pieces
            for cache, worker in self._turn(i):
                speeds[cache].append(self._advance(cache, worker, "fill", to)["speed"])
            self._position = to
        return {cache: Samples(tuple(values)) for cache, values in speeds.items()}

    def _decode(
        self, depth: int, tokens: int, rounds: int
    ) -> tuple[list[int], dict[Budget, list[dict[str, Any]]]]:
        """Position of each round, and what each cache's worker answered in it."""
        positions = []
        answers: dict[Budget, list[dict[str, Any]]] = {cache: [] for cache in self._workers}
        for i in range(rounds):
            if i > 0:
                self._cut(depth)
            positions.append(self._position)
            to = self._position + tokens
            for cache, worker in self._turn(i):
                answers[cache].append(self._advance(cache, worker, "decode", to))
            self._position = to
        return positions, answers

    def memory(self) -> list[Memory]:
        """Bytes of every cache."""
        return [
            Memory(kv_budget=cache, parallel=self._parallel, **worker.ask(op="memory"))
            for cache, worker in self._workers.items()
        ]


def label(kv_budget: Budget) -> str:
    """What a cache is called."""
    return "full cache" if kv_budget is None else f"{kv_budget:,} cells"


class _Remote(contextlib.AbstractContextManager["_Remote"]):
    """A worker process that is asked over its pipes, in JSON lines. It dies with its owner."""

    def __init__(self, kv_budget: Budget) -> None:
        self._label = label(kv_budget)
        # a pipe would have to be drained
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        # the worker must find the same package, wherever this process found it: not the one that
        # may lie in the folder of work, as with -m
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _serve; _serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="utf-8",
        )

    def ask(self, on_tokens: Callable[[int], None] | None = None, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; `on_tokens` gets the tokens done meanwhile."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):  # the pipe is broken: no answer comes either
            print(json.dumps(request), file=self._process.stdin, flush=True)
        for line in iter(self._process.stdout.readline, ""):
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise BenchError(answer["error"])
            if "n_tokens" not in answer:
                return answer
            if on_tokens is not None:
                on_tokens(answer["n_tokens"])
        raise BenchError(self._obituary())

    def _obituary(self) -> str:
        status = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").split("\n")
        last = " | ".join([line.strip() for line in lines if line.strip()][-5:])
        how = f"with status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how = f"of {signal.Signals(-status).name}"
        return f"the worker process ({self._label}) died {how}: {last or 'it said nothing'}"

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):  # what was not sent to a dead process
                stream.close()  # type: ignore[union-attr]


# --- in the worker --------------------------------------------------------------------------------


class _Worker:
    """A model and a context, one position further with each token in all of its sequences."""

    def __init__(
        self,
        tell: Callable[[int], None],
        *,
        model: str,
        kv_budget: Budget,
        parallel: int,
        n_ctx: int,
        beacon: dict[str, Any],
        type_k: int | str,
        type_v: int | str,
        threads: int,
        n_gpu_layers: int,
    ) -> None:
        self._tell = tell
        self._parallel = parallel
        self._position = 0
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = n_gpu_layers
        with _load_errors(model):
            self._model = _internals.LlamaModel(
                path_model=model, params=model_params, verbose=False
            )
        self._rss_start = self._rss_most = _rss()

        scope: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._n_batch = N_BATCH
        if kv_budget is not None:
            params = BeaconConfig(**beacon).params(kv_budget)
            self._n_batch = min(N_BATCH, _native.max_batch(params))
            scope = _native.scope(params)
        p = llama_cpp.llama_context_default_params()
        p.n_ctx, p.n_seq_max, p.kv_unified = n_ctx * parallel, parallel, False
        p.n_batch = p.n_ubatch = self._n_batch
        p.n_threads = p.n_threads_batch = threads
        p.type_k, p.type_v = cache_type("type_k", type_k), cache_type("type_v", type_v)
        p.flash_attn_type, p.swa_full = 1, False
        with _load_errors(model, kv_budget), scope:
            self._context = _internals.LlamaContext(model=self._model, params=p, verbose=False)
        self._batch = llama_cpp.llama_batch_init(self._n_batch, 0, 1)
        rng = np.random.default_rng(0)  # the same tokens in all workers
        self._tokens = rng.integers(0, self._model.n_vocab(), (parallel, n_ctx)).tolist()

        n_warm = min(N_WARM, self._n_batch)
        self.fill(n_warm)
        self.decode(n_warm + 1)
        self.cut(0)

    def opened(self) -> dict[str, Any]:
        return {"description": self._model.desc(), "n_ctx_train": self._model.n_ctx_train()}

    def fill(self, to: int) -> dict[str, Any]:
        """Read up to position `to`, one sequence after the other."""
        start = time.perf_counter()
        for seq_id in range(self._parallel):
            for p0 in range(self._position, to, self._n_batch):
                self._eval([seq_id], p0, min(p0 + self._n_batch, to))
        return self._went(to, start)

    def decode(self, to: int) -> dict[str, Any]:
        """Decode up to position `to`, all sequences together."""
        before = self._stats()
        start = time.perf_counter()
        for position in range(self._position, to):
            self._eval(range(self._parallel), position, position + 1)
        answer = self._went(to, start)
        after = self._stats()
        seconds = (after.us_compact - before.us_compact) / 1e6
        answer["compact_share"] = seconds / answer["seconds"]
        answer["n_compact"] = after.n_compact - before.n_compact
        return answer

    def _eval(self, seq_ids: Iterable[int], p0: int, p1: int) -> None:
        """One batch: positions `p0` to `p1` of some sequences, with logits after each."""
        i = 0
        for seq_id in seq_ids:
            for position in range(p0, p1):
                self._batch.token[i] = self._tokens[seq_id][position]
                self._batch.pos[i] = position
                self._batch.n_seq_id[i] = 1
                self._batch.seq_id[i][0] = seq_id
                self._batch.logits[i] = position == p1 - 1
                i += 1
        self._batch.n_tokens = i
        status = llama_cpp.llama_decode(self._context.ctx, self._batch)
        if status != 0:
            raise RuntimeError(
                f"llama_decode returned {status} at position {p0}: {_native.last_error()}"
            )
        llama_cpp.llama_synchronize(self._context.ctx)  # as whoever reads the logits does
        self._tell(i)

    def _went(self, to: int, start: float) -> dict[str, Any]:
        seconds = time.perf_counter() - start
        self._position = to
        ends = {self._seq_pos_max(seq_id) + 1 for seq_id in range(self._parallel)}
        if ends != {to}:
            raise RuntimeError(f"sequences end at {sorted(ends)}, not at {to}")
        rss = _rss()
        if rss is not None and self._rss_most is not None:
            self._rss_most = max(self._rss_most, rss)
        return {"seconds": seconds}

    def _seq_pos_max(self, seq_id: int) -> int:
        return llama_cpp.llama_memory_seq_pos_max(self._context.memory, seq_id)

    def can_cut(self, to: int) -> dict[str, Any]:
        ctx = self._context.ctx
        seq_ids = range(self._parallel)
        return {"ok": all(_native.can_seq_rm(ctx, seq_id, to, -1) for seq_id in seq_ids)}

    def cut(self, to: int) -> dict[str, Any]:
        """Remove everything from position `to` on."""
        for seq_id in range(self._parallel):
            if not llama_cpp.llama_memory_seq_rm(self._context.memory, seq_id, to, -1):
                raise RuntimeError(f"the cache could not return to position {to}")
        self._position = to
        return {}

    def _stats(self) -> KVStats:
        return KVStats.of(self._context.ctx)

    def memory(self) -> dict[str, Any]:
        stats = dataclasses.asdict(self._stats())
        names = ("k", "v", "ring", "beacon", "allocated", "other", "host")
        start, most = self._rss_start, self._rss_most
        return {
            "n_ctx": stats["n_ctx_seq"],
            "n_batch": self._n_batch,
            **{f"bytes_{name}": stats[f"bytes_{name}"] for name in names},
            "rss_growth": most - start if start is not None and most is not None else None,
        }


def _rss() -> int | None:
    """Resident bytes of this process, where the system or an installed psutil tells."""
    with contextlib.suppress(OSError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(ImportError):
        import psutil

        return int(psutil.Process().memory_info().rss)
    return None


@contextlib.contextmanager
def _private_stdout() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A way to answer on stdout; whatever else is written there goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        yield lambda answer: print(json.dumps(answer), file=out, flush=True)


def _serve() -> None:
    """Answer requests until stdin ends: the first line makes the context."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the owner, who ends this process
    with _private_stdout() as answer:
        n_tokens, due = 0, 0.0

        def tell(n: int) -> None:
            nonlocal n_tokens, due
            n_tokens += n
            now = time.monotonic()
            if now >= due:
                answer({"n_tokens": n_tokens})
                n_tokens, due = 0, now + 1.0

        worker: _Worker | None = None
        for line in iter(sys.stdin.readline, ""):
            request = json.loads(line)
            n_tokens, due = 0, time.monotonic() + 1.0
            try:
                if worker is None:
                    worker = _Worker(tell, **request)
                    answer(worker.opened())
                else:
                    answer(getattr(worker, request.pop("op"))(**request))
            except (OSError, RuntimeError, TypeError, ValueError) as error:
                answer({"error": str(error)})


# --- picture --------------------------------------------------------------------------------------


def plot(report: Report, path: str | os.PathLike[str]) -> None:
    """Draw decode speed over depth, a panel for each number of sequences.

    Parameters
    ----------
    report : Report
        What to draw.
    path : str or path
        File to write, PNG by its name; overwritten.

    Raises
    ------
    RuntimeError, ValueError
        As `check_plot`.
    OSError
        The file can't be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    panels: dict[int, dict[Budget, list[Case]]] = {}
    for case in report.cases:
        panels.setdefault(case.parallel, {}).setdefault(case.kv_budget, []).append(case)
    figure = Figure(figsize=(1.5 + 5.5 * len(panels), 5), layout="constrained")
    axes_row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (parallel, caches) in zip(axes_row, panels.items()):
        for i, (budget, cases) in enumerate(caches.items()):
            # true depths: rounds may have gone on instead of returning
            x = [statistics.median(case.positions) for case in cases]
            low, high = [case.decode.low for case in cases], [case.decode.high for case in cases]
            color = "black" if budget is None else f"C{i - 1}"
            axes.plot(
                x, [case.decode.median for case in cases], "o-", color=color, label=label(budget)
            )
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
            if len(cases) == 1:  # a band has no width there
                axes.vlines(x, low, high, color=color, alpha=0.5, linewidth=4)
        axes.set_xlabel("tokens in the context" + (", each sequence" if parallel > 1 else ""))
        axes.set_ylabel("decode speed (tokens/s" + (", all sequences)" if parallel > 1 else ")"))
        if len(panels) > 1 or parallel > 1:
            axes.set_title("1 sequence" if parallel == 1 else f"{parallel} sequences", fontsize=10)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left")  # speeds start at 0: there is room
    budgets = ", ".join(label(budget) for budget in caches if budget is not None)
    figure.suptitle(
        f"{report.model}\n{budgets} against the full cache\n"
        f"median and range of {report.rounds} rounds of {report.tokens} tokens, "
        f"threads: {report.threads}, K {report.type_k}, V {report.type_v}",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)
