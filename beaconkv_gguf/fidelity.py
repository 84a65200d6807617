"""What a budget costs: the same text through the full cache and through bounded ones.

Teacher forced: every cache reads the same tokens, in chunks, and after each token its distribution
of the next one is compared with the full cache's. Nothing is kept of the distributions but a few
numbers per token, so a trace may be long.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Callable

import llama_cpp
import numpy as np
import numpy.typing as npt

from . import _library, _native
from ._log import error_log
from .config import BeaconConfig, min_budget
from .generation import never_end, prompt_tokens
from .llama import Llama
from .stats import KVStats
from .traces import Trace, problem

Floats = npt.NDArray[np.floating]
Progress = Callable[[int, int], None]

#: Share of the tokens that count as revisiting where no construction tells: those whose attention
#: under the full cache goes furthest back.
FAR_SHARE = 0.05
HEAT_STEP = 16  # positions per row of a heat map
F16 = 1  # ggml's number


class Model:
    """A loaded GGUF file that many contexts share.

    Parameters
    ----------
    path : path
        A GGUF file.
    n_gpu_layers : int, default 0
        Layers on the GPU; -1: all.

    Raises
    ------
    ValueError
        The file is missing or no model.
    """

    def __init__(self, path: str | os.PathLike[str], n_gpu_layers: int = 0) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"Model path does not exist: {path}")
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        with error_log.collect(quiet=True) as errors:
            self.ptr = llama_cpp.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self.ptr:
            raise ValueError(f"Failed to load model from file: {path}: {'; '.join(errors)}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.ptr)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text, with the model's BOS token where it wants one."""
        raw = text.encode()
        n = -llama_cpp.llama_tokenize(self.vocab, raw, len(raw), None, 0, True, False)  # needed
        tokens = (llama_cpp.llama_token * max(n, 0))()
        llama_cpp.llama_tokenize(self.vocab, raw, len(raw), tokens, len(tokens), True, False)
        return list(tokens)

    def piece(self, token: int) -> bytes:
        """Text of a token."""
        buffer = ctypes.create_string_buffer(256)
        n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[: max(n, 0)]

    def close(self) -> None:
        """Free the model; its contexts have to be closed before."""
        if self.ptr:
            llama_cpp.llama_model_free(self.ptr)
        self.ptr = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Context:
    """One sequence on a shared model, whose every token gives logits.

    Parameters
    ----------
    params : struct beacon_params *, optional
        The budget; None: a full cache.
    """

    def __init__(
        self,
        model: Model,
        params: Any = None,
        *,
        n_ctx: int,
        n_batch: int,
        n_threads: int | None = None,
        type_k: int | None = None,
        type_v: int | None = None,
        flash_attn: bool = True,
        cb_eval: Any = None,
    ) -> None:
        p = llama_cpp.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch = n_ctx, n_batch, n_batch
        p.swa_full, p.type_k, p.type_v = False, type_k or F16, type_v or F16
        p.flash_attn_type = int(flash_attn)
        p.n_threads = p.n_threads_batch = n_threads or max((os.cpu_count() or 1) // 2, 1)
        if cb_eval is not None:
            p.cb_eval = cb_eval
        self._cb_eval = cb_eval  # as long as the context may call it
        self._model = model
        with (
            error_log.collect(quiet=True) as errors,
            _native.scope(params) if params is not None else contextlib.nullcontext(),
        ):
            self.ptr = llama_cpp.llama_init_from_model(model.ptr, p)
        if not self.ptr:
            refusal = _native.last_error() if params is not None else ""
            raise _native.BeaconError(f"{model.path}: {refusal or '; '.join(errors)}")
        self.n_tokens = 0
        self._batch = llama_cpp.llama_batch_init(n_batch, 0, 1)

    def decode(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Read one batch of tokens; logits after each, [tokens, n_vocab], valid until the next."""
        batch = self._batch
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.n_tokens + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, True
        batch.n_tokens = len(tokens)
        status = llama_cpp.llama_decode(self.ptr, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}: {_native.last_error()}")
        self.n_tokens += len(tokens)
        logits = llama_cpp.llama_get_logits(self.ptr)
        return np.ctypeslib.as_array(logits, (len(tokens), self._model.n_vocab))

    @property
    def stats(self) -> KVStats:
        """What the cache holds."""
        return KVStats.of(self.ptr, 0)

    @property
    def evicted(self) -> bool:
        """Whether a token was evicted."""
        return _native.boundary(self.ptr, 0) > 0

    def held(self) -> npt.NDArray[np.int32]:
        """Positions that are held, of all layers and KV heads one after the other."""
        return np.concatenate(
            [
                _native.positions(self.ptr, 0, il, head)
                for il in _native.layers(self.ptr).tolist()
                for head in range(_native.n_head_kv(self.ptr, il))
            ]
        )

    def close(self) -> None:
        """Free the context."""
        if self.ptr:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self.ptr)
        self.ptr = None

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Case:
    """One bounded cache to compare: `budget` cells and the rest of its settings."""

    budget: int
    config: BeaconConfig = dataclasses.field(default_factory=BeaconConfig)
    label: str = ""

    @property
    def name(self) -> str:
        """`label`, or the policy."""
        return self.label or self.config.policy


@dataclass(frozen=True)
class Text:
    """Tokens to read, and which of them revisit something far back.

    Attributes
    ----------
    tokens : [T] ids
    kinds : dict of [T] bool
        By kind of revisit, the tokens that say something again.
    source : [T] position of what a revisiting token says again; -1 elsewhere
    n_prompt : tokens of the problem at the start
    """

    name: str
    tokens: list[int]
    kinds: dict[str, npt.NDArray[np.bool_]]
    source: npt.NDArray[np.int64]
    n_prompt: int = 0

    @classmethod
    def of(cls, trace: Trace, model: Model, max_tokens: int | None = None) -> Text:
        """A trace in the model's tokens, cut to `max_tokens`."""
        tokens = model.tokenize(trace.text)
        sizes = [len(model.piece(token)) for token in tokens]
        # a BOS token, or the space that some vocabularies put in front, is no part of the text
        extra = sum(sizes) - len(trace.text.encode())
        tokens = tokens[:max_tokens]
        ends = np.cumsum(sizes)[: len(tokens)] - extra
        starts = ends - sizes[: len(tokens)]

        def at(character: int) -> int:  # token that holds a character
            return int(np.searchsorted(ends, len(trace.text[:character].encode()), "right"))

        kinds = {kind: np.zeros(len(tokens), bool) for kind in {r.kind for r in trace.revisits}}
        source = np.full(len(tokens), -1, np.int64)
        for r in trace.revisits:
            start, end = (len(trace.text[:c].encode()) for c in (r.start, r.end))
            inside = (ends > start) & (starts < end)
            kinds[r.kind] |= inside
            source[inside] = at(r.source)
        n_prompt = at(trace.n_prompt) if trace.n_prompt else 0
        return cls(trace.name, tokens, dict(sorted(kinds.items())), source, n_prompt)

    @classmethod
    def written(
        cls,
        path: str | os.PathLike[str],
        n_tokens: int,
        seed: int = 1,
        *,
        progress: Progress | None = None,
        **llama: Any,
    ) -> Text:
        """A text that the model writes itself about `traces.problem`, with a full cache.

        Sampled at temperature 0.8 with a repeat penalty of 1.1; the model is not let end.

        Parameters
        ----------
        n_tokens : int
            Length with the problem.
        **llama
            Arguments of `Llama`.
        """
        with Llama(path, n_ctx=n_tokens, seed=seed, verbose=False, **llama) as llm:
            prompt = prompt_tokens(llm, problem(seed))
            if len(prompt) >= n_tokens:
                raise ValueError(f"the problem alone has {len(prompt)} tokens, not {n_tokens}")
            writing = llm.generate(
                prompt, temp=0.8, repeat_penalty=1.1, logits_processor=never_end(llm)
            )
            tokens = list(prompt)
            for token in itertools.islice(writing, n_tokens - len(prompt)):
                tokens.append(token)
                if progress:
                    progress(len(tokens), n_tokens)
        return cls(f"self-written-{seed}", tokens, {}, np.full(n_tokens, -1), len(prompt))


@dataclass(frozen=True)
class Part:
    """Agreement with the full cache over some of the tokens: how many, KL in nats, top-1 share."""

    n: int
    kl: float
    top1: float


@dataclass(frozen=True)
class Result:
    """One bounded cache against the full one, over the tokens after its first eviction.

    Attributes
    ----------
    policy, budget : of the case
    ratio : bytes of a full cache of `n_ctx` tokens to all bytes of this one
    n : tokens compared
    kl, kl_p95, kl_p99 : KL divergence of the full cache's next-token distribution, nats
    top1 : share of tokens where both have the same most likely next token
    perplexity_ratio : perplexity of the text under this cache to that under the full one
    revisits : the same at the tokens that say again what stands further back than the budget, or
        that are marked as "far"
    n_compact : compactions
    n_tokens : length of the text
    heat : [chunks, runs of HEAT_STEP positions] share of layers and KV heads that hold them, after
        each chunk
    """

    policy: str
    budget: int
    ratio: float
    n: int
    kl: float
    kl_p95: float
    kl_p99: float
    top1: float
    perplexity_ratio: float
    revisits: dict[str, Part]
    n_compact: int
    n_tokens: int
    config: dict[str, Any] = dataclasses.field(repr=False)
    heat: npt.NDArray[np.float32] | None = dataclasses.field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        result = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del result["heat"]
        result["revisits"] = {k: dataclasses.asdict(part) for k, part in self.revisits.items()}
        return result


def budget_for_ratio(
    model: Model, n_ctx: int, ratio: float, config: BeaconConfig | None = None, **context: Any
) -> int:
    """Cells of the largest budget that takes `ratio` times less than a full cache, all included.

    Query rows and beacons count: the cells are fewer than ``n_ctx / ratio``.

    Raises
    ------
    ValueError
        That is below the smallest budget that `config` allows.
    """
    config = config or BeaconConfig()
    least = min_budget(config)
    with Context(model, config.params(least), n_ctx=n_ctx, n_batch=1, **context) as probe:
        stats = probe.stats
    per_cell = (stats.bytes_k + stats.bytes_v) / least
    cells = int(n_ctx / ratio - (stats.bytes_ring + stats.bytes_beacon) / per_cell)
    if cells < least:
        raise ValueError(
            f"{ratio:g}x of a context of {n_ctx} tokens leaves {cells} cells beside query rows and "
            f"beacons; the least is {least}: take a longer text or a smaller ratio"
        )
    return cells


class _Comparison:
    """Numbers per token of one bounded cache, filled chunk by chunk."""

    def __init__(self, case: Case, context: Context, n_tokens: int) -> None:
        self.case, self.context = case, context
        self.kl, self.nll = np.zeros(n_tokens), np.zeros(n_tokens)
        self.same = np.zeros(n_tokens, bool)
        self.counts = np.zeros(n_tokens, bool)
        self.heat: list[npt.NDArray[np.float32]] = []


class _Reference:
    """The full cache's distribution of a chunk, to compare others with."""

    def __init__(self, logits: npt.NDArray[np.float32]) -> None:
        self.top = logits.argmax(-1)
        shifted = logits - logits.max(-1, keepdims=True)
        self.p = np.exp(shifted)
        total = self.p.sum(-1, keepdims=True)
        self.p /= total
        self.log_total = np.log(total[:, 0].astype(np.float64))
        self.mean = np.einsum("ij,ij->i", self.p, shifted)  # of the shifted logits under p
        self._shifted = shifted

    def nll(self, following: npt.NDArray[np.int64]) -> Floats:
        """Negative log-likelihood of the tokens that follow."""
        rows = np.arange(len(following))
        return self.log_total[: len(following)] - self._shifted[rows, following]

    def compare(
        self, logits: npt.NDArray[np.float32], following: npt.NDArray[np.int64]
    ) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """KL divergence, negative log-likelihood and top-1 agreement of another cache's logits."""
        shifted = logits - logits.max(-1, keepdims=True)
        log_total = np.log(np.exp(shifted).sum(-1).astype(np.float64))
        mean = np.einsum("ij,ij->i", self.p, shifted)
        kl = (self.mean - self.log_total) - (mean - log_total)
        nll = log_total[: len(following)] - shifted[np.arange(len(following)), following]
        return np.maximum(kl, 0.0), nll, logits.argmax(-1) == self.top


class _AttentionSink:
    """Takes each layer's attention out of the graph while it is computed, mean over its heads."""

    def __init__(self) -> None:
        self.n_tokens = 0  # of the batch
        self.layers: dict[int, npt.NDArray[np.float32]] = {}
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._name = _library.function("ggml-base", "ggml_get_name", ctypes.c_char_p, pointer)
        self._nbytes = _library.function("ggml-base", "ggml_nbytes", size, pointer)
        self._nrows = _library.function("ggml-base", "ggml_nrows", ctypes.c_int64, pointer)
        self._get = _library.function(
            "ggml-base", "ggml_backend_tensor_get", None, pointer, pointer, size, size
        )
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)

    def _on_tensor(self, tensor: int, ask: bool, user_data: Any) -> bool:
        name = self._name(tensor).decode()
        if not name.startswith("kq_soft_max-"):
            return not ask  # not wanted; and go on
        if not ask:
            weights = np.empty(self._nbytes(tensor) // 4, np.float32)
            self._get(tensor, weights.ctypes.data, 0, weights.nbytes)
            n_head = self._nrows(tensor) // self.n_tokens
            weights = weights.reshape(n_head, self.n_tokens, -1)  # [.., .., cells]
            self.layers[int(name.rsplit("-", 1)[1])] = weights.mean(0)
        return True


def far_attention(
    model: Model,
    tokens: Sequence[int],
    distance: int,
    *,
    n_sink: int = 4,
    chunk: int = 128,
    progress: Progress | None = None,
    **context: Any,
) -> Floats:
    """Share of each token's attention that goes further back than `distance`, under a full cache.

    Mean over the layers and heads that attend to everything, sinks left out. Flash attention is
    off for it, so that there are weights to see, and V is f16, which that needs; the matrix of one
    layer and chunk is in memory.

    Parameters
    ----------
    tokens : [T] ids
    distance : int
        In tokens.

    Returns
    -------
    [T] from 0 to 1
    """
    n_tokens = len(tokens)
    least = min_budget(BeaconConfig())
    n_ctx = -(-max(n_tokens, least) // 256) * 256
    with Context(model, BeaconConfig().params(least), n_ctx=n_ctx, n_batch=1, **context) as probe:
        layers = _native.layers(probe.ptr).tolist()  # the others attend to a window alone
    share = np.zeros(n_tokens)
    sink = _AttentionSink()
    context["type_v"] = F16  # a quantised one needs flash attention
    with Context(
        model, n_ctx=n_ctx, n_batch=chunk, flash_attn=False, cb_eval=sink.callback, **context
    ) as full:
        for begin in range(0, n_tokens, chunk):
            ids = list(tokens[begin : begin + chunk])
            sink.n_tokens = len(ids)
            full.decode(ids)
            position = np.arange(begin, begin + len(ids))
            for il in layers:
                weights = sink.layers[il]  # [tokens, cells]; a full cache's cells are positions
                weights[:, :n_sink] = 0
                is_far = np.arange(weights.shape[1]) <= position[:, None] - distance
                total = weights.sum(1)
                share[position] += (
                    (weights * is_far).sum(1) / np.where(total > 0, total, 1) / len(layers)
                )
            if progress:
                progress(begin + len(ids), n_tokens)
    return share


def with_far_tokens(
    text: Text, model: Model, distance: int, progress: Progress | None = None, **context: Any
) -> Text:
    """The text with the kind "far": the FAR_SHARE of tokens whose attention goes furthest back.

    Each is the one that the attending token foretells. Only tokens more than `distance` from the
    start count, and attention that goes further back than that; take the largest budget for it.
    """
    share = far_attention(model, text.tokens, distance, progress=progress, **context)
    reach = share[distance:-1]
    far = np.zeros(len(text.tokens), bool)
    n_far = max(1, round(FAR_SHARE * len(reach)))
    far[distance + 1 + np.argsort(-reach, kind="stable")[:n_far]] = True
    return dataclasses.replace(
        text, kinds={**text.kinds, "far": far}, source=np.where(far, 0, text.source)
    )


def check_length(n_tokens: int, cases: Sequence[Case], chunk: int = 32) -> None:
    """Raise ValueError unless a text of `n_tokens` is read on past an eviction in every case."""
    for case in cases:
        if n_tokens <= -(-(case.budget + 1) // chunk) * chunk:  # the last token has no following
            raise ValueError(
                f"the text has {n_tokens} tokens, a budget of {case.budget} cells holds all of "
                "them, or all but the last few: take a longer text or a smaller budget"
            )


def compare(
    model: Model,
    text: Text,
    cases: Sequence[Case],
    *,
    chunk: int = 32,
    pin: bool = False,
    heat: bool = False,
    progress: Progress | None = None,
    **context: Any,
) -> list[Result]:
    """Read a text through the full cache and through every case, side by side.

    Parameters
    ----------
    model : Model
    text : Text
    cases : sequence of Case
        Each takes the memory of its own bounded context.
    chunk : int, default 32
        Tokens per batch; a cache is compacted between two of them. Well below the window, so that
        the cells in use go up and down as they do when a text is written.
    pin : bool, default False
        Pin the prompt, as `Llama` does by default. It has to fit ``pin_share`` of every budget.
    heat : bool, default False
        Keep which positions were held when.
    progress : callable, optional
        ``progress(done, total)`` in tokens read, over all caches.
    **context
        n_threads, type_k, type_v for every context.

    Returns
    -------
    list of Result
        In the order of `cases`.

    Raises
    ------
    ValueError
        The text is no longer than a budget, so that nothing would be evicted.
    BeaconError
        The model cannot live in a budget, or the prompt cannot be pinned.
    """
    tokens = np.asarray(text.tokens)
    n_tokens = len(tokens)
    check_length(n_tokens, cases, chunk)
    if pin and text.n_prompt == 0:
        raise ValueError(f"the text {text.name} has no prompt to pin")
    n_ctx = -(-n_tokens // 256) * 256
    with contextlib.ExitStack() as stack:

        def open_context(params: Any = None) -> Context:
            return stack.enter_context(
                Context(model, params, n_ctx=n_ctx, n_batch=chunk, **context)
            )

        full = open_context()
        runs = []
        for case in cases:
            params = case.config.params(case.budget)
            if _native.max_batch(params) < chunk:
                raise ValueError(
                    f"a budget of {case.budget} cells takes at most {_native.max_batch(params)} "
                    f"tokens at once, the chunks have {chunk}"
                )
            runs.append(_Comparison(case, open_context(params), n_tokens))

        nll = np.zeros(n_tokens)
        total = n_tokens * (1 + len(runs))
        for begin in range(0, n_tokens, chunk):
            ids = tokens[begin : begin + chunk]
            end = begin + len(ids)
            following = tokens[begin + 1 : end + 1]
            scored = slice(begin, begin + len(following))
            reference = _Reference(full.decode(ids.tolist()))
            nll[scored] = reference.nll(following)
            for i, run in enumerate(runs):
                logits = run.context.decode(ids.tolist())
                if pin and begin < text.n_prompt <= end:
                    _native.pin(run.context.ptr, 0, text.n_prompt)
                run.counts[begin:end] = run.context.evicted
                run.kl[begin:end], run.nll[scored], run.same[begin:end] = reference.compare(
                    logits, following
                )
                if heat:
                    run.heat.append(_shares(run.context, n_tokens))
                if progress:
                    progress(begin * (1 + len(runs)) + len(ids) * (2 + i), total)
        return [_summary(run, text, nll, n_ctx) for run in runs]


def _shares(context: Context, n_tokens: int) -> npt.NDArray[np.float32]:
    """Share of the layers and KV heads that hold each run of HEAT_STEP positions."""
    held = context.held()
    n_heads = sum(_native.n_head_kv(context.ptr, il) for il in _native.layers(context.ptr).tolist())
    n_bins = -(-n_tokens // HEAT_STEP)
    counts = np.bincount(held // HEAT_STEP, minlength=n_bins)
    return (counts / (n_heads * HEAT_STEP)).astype(np.float32)


def _summary(run: _Comparison, text: Text, nll: Floats, n_ctx: int) -> Result:
    stats = run.context.stats
    n_tokens = len(text.tokens)
    counts = run.counts.copy()
    counts[-1] = False  # nothing follows it
    kl = run.kl[counts]

    # row t tells of token t + 1
    following = np.arange(1, n_tokens + 1).clip(max=n_tokens - 1)
    distance = following - text.source[following]
    far = counts & (text.source[following] >= 0) & (distance > run.case.budget)
    revisits = {}
    for kind, tokens in text.kinds.items():
        rows = far & tokens[following]
        if rows.any():
            revisits[kind] = Part(int(rows.sum()), run.kl[rows].mean(), run.same[rows].mean())

    return Result(
        policy=run.case.name,
        budget=run.case.budget,
        ratio=stats.bytes_full * n_ctx / stats.n_ctx_seq / stats.bytes_allocated,
        n=int(counts.sum()),
        kl=float(kl.mean()),
        kl_p95=float(np.quantile(kl, 0.95)),
        kl_p99=float(np.quantile(kl, 0.99)),
        top1=float(run.same[counts].mean()),
        perplexity_ratio=float(np.exp((run.nll - nll)[counts].mean())),
        revisits=revisits,
        n_compact=stats.n_compact,
        n_tokens=n_tokens,
        config=dataclasses.asdict(run.case.config),
        heat=np.stack(run.heat) if run.heat else None,
    )


def plot(results: Sequence[Result], title: str, path: str | os.PathLike[str]) -> None:
    """Draw KL divergence against the budget, and below which positions were held when.

    Parameters
    ----------
    results : sequence of Result
        From `compare` with ``heat=True``. The pictures of held positions are of the first two
        results at the budget in the middle.
    title : str
        Model and text.
    path : path
        PNG, SVG or PDF, by its ending.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(r.policy for r in results))
    budgets = sorted({r.budget for r in results})
    middle = budgets[len(budgets) // 2]
    maps = [r for r in results if r.heat is not None and r.budget == middle][:2]
    figure = Figure(figsize=(9, 4.5 + 4 * bool(maps)), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(1 + bool(maps), max(len(maps), 1))

    axes = figure.add_subplot(grid[0, :])
    for policy in policies:
        mine = sorted((r for r in results if r.policy == policy), key=lambda r: r.budget)
        axes.plot([r.budget for r in mine], [r.kl for r in mine], "o-", label=policy)
    ratios = {r.budget: r.ratio for r in results}
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"{n:,}\n{ratios[n]:.1f}x less" for n in budgets])
    axes.minorticks_off()
    axes.set(
        xlabel="budget (KV cells per layer; times less memory than the full cache)",
        ylabel="mean KL to the full cache (nats)",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(title="policy")

    for i, result in enumerate(maps):
        assert result.heat is not None
        axes = figure.add_subplot(grid[1, i])
        n_bins = result.heat.shape[1]
        image = axes.imshow(
            result.heat.T,
            origin="lower",
            aspect="auto",
            norm=PowerNorm(0.5, vmin=0, vmax=1),  # few heads hold what is old
            cmap="viridis",
            extent=(0, result.n_tokens, 0, n_bins * HEAT_STEP),
        )
        axes.set(
            title=f"{result.policy}, {result.budget:,} cells",
            xlabel="tokens read",
            ylabel="position" if i == 0 else "",
        )
        if i == len(maps) - 1:
            figure.colorbar(image, ax=axes, label="share of layers and KV heads that hold it")
    figure.savefig(path, dpi=150)
