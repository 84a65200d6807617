"""`Llama`: llama_cpp's class with a KV budget."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import _internals

from . import _native
from ._chat import ChatView, extends, wants_usage, with_usage
from ._log import error_log
from ._native import BeaconError
from .config import BeaconConfig, KVBudget, resolve_budget
from .fit import F16, Cache, model_budget
from .reasoning import check_format
from .stats import KVStats

#: What `type_k` and `type_v` may be: these names or their numbers in ggml.
CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
_FLOAT_TYPES = {CACHE_TYPES[name] for name in ("f32", "f16", "bf16")}


@contextlib.contextmanager
def _load_errors(model_path: str, kv_budget: int | None = None) -> Iterator[None]:
    """Give a ValueError of llama_cpp's constructors the reasons that llama.cpp logged."""
    with error_log.collect() as errors:
        try:
            yield
        except ValueError as error:
            refusal = _native.last_error() if kv_budget is not None else ""
            if refusal:
                raise BeaconError(f"{model_path}: {refusal}") from error
            if errors:
                raise ValueError(f"{error}: " + "; ".join(errors)) from error
            raise


class _Closed:
    """Stands in for what `Llama.close` freed: a later use raises instead of crashing."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("this Llama was closed")


class _Tokenizer(llama_cpp.LlamaTokenizer):
    """llama_cpp's tokenizer that looks each token up once.

    A completion asks for its whole text with every token; at 8,000 tokens the parent's look-ups
    take as long as decoding does.
    """

    def __init__(self, llama: llama_cpp.Llama) -> None:
        super().__init__(llama)
        self._pieces = {special: self._Pieces(self._model, special) for special in (False, True)}

    class _Pieces(dict[int, bytes]):
        def __init__(self, model: Any, special: bool) -> None:
            super().__init__()
            self._model = model
            self._special = special

        def __missing__(self, token: int) -> bytes:
            piece: bytes = self._model.detokenize([token], special=self._special)
            self[token] = piece
            return piece

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        text = b"".join(map(self._pieces[special].__getitem__, tokens))
        begins = len(tokens) > 0 and tokens[0] == self._model.token_bos()
        return text[1:] if begins and text.startswith(b" ") else text

    @contextlib.contextmanager
    def showing(self, tokens: Iterable[int]) -> Iterator[None]:
        """Special tokens among these have a text in this context, without `special` too."""
        pieces = self._pieces[False]
        hidden = {token: pieces[token] for token in tokens}
        pieces.update((token, self._pieces[True][token]) for token in hidden)
        try:
            yield
        finally:
            pieces.update(hidden)


class _TokenLimit:
    """Stopping criterion that ends a completion with its last token, in mid-character too.

    The parent does not look at `max_tokens` while a UTF-8 character is incomplete: it writes up to
    three tokens more, and past the end of the context that is an error.
    """

    def __init__(self, max_tokens: int | None, n_ctx: int) -> None:
        self.max_tokens = max_tokens if max_tokens and max_tokens > 0 else n_ctx
        self.n_ctx = n_ctx
        self.n_prompt: int | None = None
        self.reached = False

    def __call__(self, input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]) -> bool:
        if self.n_prompt is None:  # called first when the prompt alone was evaluated
            self.n_prompt = len(input_ids)
        n_written = len(input_ids) - self.n_prompt
        self.reached |= n_written >= min(self.max_tokens, self.n_ctx - self.n_prompt)
        return self.reached


class Llama(llama_cpp.Llama):
    """llama_cpp's ``Llama`` whose KV cache can live in a budget.

    Every argument and method of the parent works unchanged. Without a budget nothing differs from
    it. With one, `n_ctx` stays the logical context while each attention layer holds at most the
    budget's cells; when they run out, the cache is compacted and generation goes on.

    Parameters
    ----------
    model_path : str or path
        A GGUF file.
    kv_budget : int, float, "auto" or None, default None
        KV cells per attention layer: a number of cells, a share of `n_ctx` (above 0 and up to 1),
        "auto": a share of `n_ctx` that the memory can hold (see ``fit.model_budget``), or no
        budget.
    beacon : BeaconConfig, optional
        How the cache chooses what to keep; without a budget it has nothing to do.
    type_k, type_v : int or str, optional
        Cache types, as ggml's number or name: "f16" (default), "bf16", "f32", "q8_0", "q5_1",
        "q5_0", "q4_1", "q4_0", "iq4_nl". A quantised `type_v` needs flash attention.
    reasoning_format : str, default "auto"
        What `create_chat_completion` does with a model's thinking: "auto" splits it from the answer
        where the chat template tells how the model marks it, "deepseek" takes ``<think>`` where it
        does not, and "none" leaves the text as llama_cpp does.
    **kwargs
        Everything else that ``llama_cpp.Llama`` takes. A budget switches `flash_attn` on, lowers
        `n_batch` to what fits beside the kept cells, and leaves sliding-window layers at the size
        of their window (`swa_full` False unless given).

    Attributes
    ----------
    kv_budget : int or None
        The budget in cells.
    beacon : BeaconConfig
        The settings in use.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, the file is missing or no complete GGUF model, or the context could
        not be made; the message says why.
    BeaconError
        The model or context cannot live in a budget; the message names both and the reason.
    """

    kv_budget: int | None = None
    beacon: BeaconConfig
    reasoning_format: str
    n_tokens: int
    input_ids: npt.NDArray[np.intc]
    scores: npt.NDArray[np.single]

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv_budget: KVBudget = None,
        beacon: BeaconConfig | None = None,
        n_gpu_layers: int = 0,
        n_ctx: int = 512,
        n_batch: int = 512,
        embedding: bool = False,
        flash_attn: bool = False,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        reasoning_format: str = "auto",
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        _warn_unknown(kwargs)
        self.reasoning_format = check_format(reasoning_format)
        if beacon is not None and not isinstance(beacon, BeaconConfig):
            raise TypeError(f"beacon must be a BeaconConfig, not {beacon!r}")
        self.beacon = beacon or BeaconConfig()
        model_path = os.fspath(model_path)
        if kv_budget is not None and n_ctx == 0:
            n_ctx = _n_ctx_train(model_path)
        type_k = cache_type("type_k", type_k)
        type_v = cache_type("type_v", type_v)
        if isinstance(kv_budget, str) and kv_budget == "auto":
            cache = Cache(
                n_ctx,
                type_k=F16 if type_k is None else type_k,
                type_v=F16 if type_v is None else type_v,
                n_ubatch=min(n_batch, kwargs.get("n_ubatch", 512)),
                swa_full=kwargs.get("swa_full"),
                beacon=self.beacon,
            )
            kv_budget = model_budget(
                model_path, cache, n_gpu_layers, kwargs.get("offload_kqv", True)
            )
        self.kv_budget = resolve_budget(kv_budget, n_ctx, self.beacon)

        scope: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.kv_budget is not None:
            if embedding:
                raise ValueError(
                    "kv_budget and embedding=True exclude each other: embeddings share one cache "
                    "among many sequences"
                )
            params = self.beacon.params(self.kv_budget)
            scope = _native.scope(params)
            n_batch = min(n_batch, _native.max_batch(params))
            flash_attn = True
            # the parent's default is a sliding-window cache of n_ctx cells; the window suffices
            if kwargs.get("swa_full") is None:
                kwargs["swa_full"] = False
            if verbose:
                print(
                    f"beaconkv: {self.kv_budget} KV cells for a context of {n_ctx} tokens, "
                    f"flash attention on, n_batch {n_batch}",
                    file=sys.stderr,
                )
        elif type_v not in (None, *_FLOAT_TYPES) and not flash_attn:
            raise ValueError("a quantised type_v needs flash attention: pass flash_attn=True")

        if n_gpu_layers != 0 and not llama_cpp.llama_supports_gpu_offload():
            warnings.warn(
                f"n_gpu_layers={n_gpu_layers} has no effect: no GPU backend is compiled in, or it "
                "found no device. The model runs on the CPU. 'beaconkv-gguf info' shows both.",
                RuntimeWarning,
                stacklevel=2,
            )

        try:
            with _load_errors(model_path, self.kv_budget), scope:
                super().__init__(
                    model_path,
                    n_gpu_layers=n_gpu_layers,
                    n_ctx=n_ctx,
                    n_batch=n_batch,
                    embedding=embedding,
                    flash_attn=flash_attn,
                    type_k=type_k,
                    type_v=type_v,
                    verbose=verbose,
                    **kwargs,
                )
        except BaseException:
            self.close()
            raise

        if kwargs.get("tokenizer") is None:
            self.tokenizer_ = _Tokenizer(self)
        # The context rounds n_ctx up to a multiple of 256, and max_tokens is clamped to that.
        if self._n_ctx > len(self.input_ids):
            self.input_ids = np.empty(self._n_ctx, self.input_ids.dtype)
            if self._logits_all:
                self.scores = np.empty((self._n_ctx, self._n_vocab), self.scores.dtype)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those that were evaluated already.

        Where `n_tokens` was set back to a place that the cache cannot return to exactly, the
        earlier tokens are read again first.

        Parameters
        ----------
        tokens : sequence of int
            Token ids.

        Raises
        ------
        ValueError
            They do not fit into the logical context; nothing was evaluated.
        RuntimeError
            llama.cpp could not decode; the message has its error lines.
        """
        n_total = self.n_tokens + len(tokens)
        if n_total > self._n_ctx:
            raise ValueError(f"Requested tokens ({n_total}) exceed context window of {self._n_ctx}")
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            tokens = [*self._input_ids.tolist(), *tokens]
            self.n_tokens = 0
        with error_log.collect() as errors:
            try:
                super().eval(tokens)
            except RuntimeError as error:
                if not errors:
                    raise
                raise RuntimeError(
                    f"{error} at position {self.n_tokens}: " + "; ".join(errors)
                ) from error

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        limit = _TokenLimit(kwargs["max_tokens"], self._n_ctx)
        if self.draft_model is None:  # the parent counts drafted tokens as written
            criteria = kwargs["stopping_criteria"] or ()
            kwargs["stopping_criteria"] = llama_cpp.StoppingCriteriaList([*criteria, limit])
        for chunk in super()._create_completion(*args, **kwargs):
            if limit.reached and chunk["choices"][0]["finish_reason"] is not None:
                chunk["choices"][0]["finish_reason"] = "length"
            yield chunk

    @extends(llama_cpp.Llama.generate)
    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """As the parent's."""
        tokens = list(tokens)
        self._n_prompt_and_written = counts = [len(tokens), 0]
        reply = None
        with contextlib.closing(super().generate(tokens, *args, **kwargs)) as written:
            while True:
                try:
                    token = written.send(reply)
                except StopIteration:
                    return
                counts[1] += not llama_cpp.llama_vocab_is_eog(self._model.vocab, token)
                reply = yield token

    @extends(llama_cpp.Llama.create_completion)
    def create_completion(
        self, *args: Any, stream_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """As the parent's.

        Parameters
        ----------
        stream_options : dict, optional
            ``{"include_usage": True}``: the last chunk of a stream has no `choices` and the `usage`
            that a completion has which is no stream.
        """
        usage = wants_usage(stream_options)
        result = super().create_completion(*args, **kwargs)
        return with_usage(self, result) if usage and not isinstance(result, dict) else result

    @extends(llama_cpp.Llama.create_chat_completion)
    def create_chat_completion(
        self,
        *args: Any,
        reasoning_format: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stream_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent's, with the model's thinking apart.

        The message, or the delta of a chunk, has the thinking in ``reasoning_content`` and the
        answer in ``content``, both without the tags. A text that ends in mid-thought is thinking
        alone. Without any thinking both are as the parent's. A grammar, `response_format` and a
        forced tool leave no room to think in, unless the grammar has the tags.

        Parameters
        ----------
        reasoning_format : str, optional
            For this call; see the constructor's.
        chat_template_kwargs : dict, optional
            More variables for the chat template, as ``{"enable_thinking": False}``.
        stream_options : dict, optional
            See `create_completion`.

        Raises
        ------
        ValueError
            `reasoning_format` is unknown, or `chat_template_kwargs` are for a handler without a
            Jinja template, or name what the call itself sets.
        """
        usage = wants_usage(stream_options)
        if reasoning_format is None:
            reasoning_format = self.reasoning_format
        view = ChatView(self, reasoning_format, chat_template_kwargs)
        if view.form is None and not chat_template_kwargs:
            result = super().create_chat_completion(*args, **kwargs)
        else:
            result = view.split(llama_cpp.Llama.create_chat_completion(view, *args, **kwargs))
        return with_usage(self, result) if usage and not isinstance(result, dict) else result

    def kv_stats(self) -> KVStats:
        """What the cache holds now; works without a budget too."""
        stats = KVStats.of(self.ctx, 0)
        if stats.budget == 0 and self._ctx.memory is not None:  # a full cache holds all it has seen
            n_held = llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, 0) + 1
            stats = dataclasses.replace(stats, n_logical=n_held, n_held=n_held)
        return stats

    def kv_positions(self, layer: int, head: int) -> npt.NDArray[np.int32]:
        """Positions that one KV head holds.

        Parameters
        ----------
        layer : int
            Layer of the model, from 0; one that lives in the budget.
        head : int
            KV head of the layer, from 0.

        Returns
        -------
        numpy.ndarray
            int32, [n_held], ascending.

        Raises
        ------
        ValueError
            No such layer or head in the budget.
        BeaconError
            There is no budget.
        """
        return _native.positions(self.ctx, 0, layer, head)

    def pin(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` positions from now on: no compaction evicts them.

        Parameters
        ----------
        n_tokens : int
            At most the budget's `pin_share`. Fewer than before unpins; 0 leaves the sinks.

        Raises
        ------
        ValueError
            A negative number.
        BeaconError
            There is no budget, that many are more than may be pinned, or some were evicted.
        """
        if n_tokens < 0:
            raise ValueError(f"n_tokens must not be negative: {n_tokens}")
        _native.pin(self.ctx, 0, n_tokens)

    @property
    def boundary(self) -> int:
        """First position from which every head holds every token; 0 if nothing was evicted."""
        return max(0, _native.boundary(self.ctx, 0))

    def save_state(self) -> llama_cpp.LlamaState:
        """As the parent's, for a sequence of which nothing was evicted.

        Raises
        ------
        BeaconError
            Tokens were evicted: what is left can't be told from the whole by a saved state.
        """
        if self.kv_budget is not None and self.boundary > 0:
            raise BeaconError(
                f"the state can't be saved: {self.kv_stats().n_evicted} of {self.n_tokens} tokens "
                "were evicted from the KV cache"
            )
        return super().save_state()

    def set_cache(self, cache: Any) -> None:
        """As the parent's, without a budget.

        Raises
        ------
        BeaconError
            There is a budget: a cache saves the state after each completion, and the state of a
            compacted sequence can't be saved.
        """
        if cache is not None and self.kv_budget is not None:
            raise BeaconError(
                "a cache of saved states can't be used with a KV budget; the prompt's longest "
                "common prefix is reused without one"
            )
        super().set_cache(cache)

    def close(self) -> None:
        """Free the model and its cache. A second call does nothing; any other use then raises."""
        stack = getattr(self, "_stack", None)
        if stack is None:
            return
        stack.close()
        closed: Any = _Closed()
        self._ctx = self._model = self._batch = self.tokenizer_ = closed

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "kv_budget": self.kv_budget,
            "beacon": self.beacon,
            "reasoning_format": self.reasoning_format,
        }


def cache_type(name: str, value: int | str | None) -> int | None:
    """ggml's number of a cache type; ValueError lists what is allowed."""
    if value is None:
        return None
    number = CACHE_TYPES.get(value.lower()) if isinstance(value, str) else value
    if isinstance(number, bool) or number not in CACHE_TYPES.values():
        allowed = ", ".join(f"{key} ({number})" for key, number in CACHE_TYPES.items())
        raise ValueError(f"{name}={value!r} is no cache type; allowed are {allowed}")
    return number


def _n_ctx_train(model_path: str) -> int:
    """Context length that a model was trained with, out of its metadata alone."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    with _load_errors(model_path):
        model = _internals.LlamaModel(path_model=model_path, params=params, verbose=False)
    with contextlib.closing(model):
        metadata = model.metadata()
    return int(metadata[f"{metadata['general.architecture']}.context_length"])


def _warn_unknown(kwargs: dict[str, Any]) -> None:
    """The parent takes any keyword and ignores those that it does not know: say so."""
    known = inspect.signature(llama_cpp.Llama.__init__).parameters
    unknown = sorted(kwargs.keys() - known.keys())
    if unknown:
        warnings.warn(
            f"Llama ignores unknown arguments: {', '.join(unknown)}", RuntimeWarning, stacklevel=3
        )
