"""`Llama`: llama_cpp's class with a KV budget."""

from __future__ import annotations

import contextlib
import functools
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

from . import _native, states
from ._chat import ChatView, extends, wants_usage, with_usage
from ._guard import Aborted, Guard
from ._log import error_log
from ._native import BeaconError
from .config import BeaconConfig, KVBudget, resolve_budget
from .fit import F16, Cache, model_budget
from .gguf_layout import check_model
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
FLOAT_TYPES = {CACHE_TYPES[name] for name in ("f32", "f16", "bf16")}


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
            if not 0 <= token < self._model.n_vocab():  # llama.cpp would end the process
                raise ValueError(f"token {token} is not in the vocabulary")
            piece: bytes = self._model.detokenize([token], special=self._special)
            self[token] = piece
            return piece

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        if llama_cpp.llama_vocab_type(self._model.vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise ValueError("the model has no vocabulary: it takes token ids, not text")
        tokens: list[int] = super().tokenize(text, add_bos, special)
        return tokens

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
    three tokens more, and past the end of the context that is an error. An abort counts as well:
    the parent takes the text so far only where a criterion says so.
    """

    def __init__(self, max_tokens: int | None, n_ctx: int, guard: Guard) -> None:
        self._guard = guard
        self.max_tokens = max_tokens if max_tokens and max_tokens > 0 else n_ctx
        self.n_ctx = n_ctx
        self.n_prompt: int | None = None
        self.reached = False

    def __call__(self, input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]) -> bool:
        if self.n_prompt is None:  # called first when the prompt alone was evaluated
            self.n_prompt = len(input_ids)
        n_written = len(input_ids) - self.n_prompt
        self.reached |= n_written >= min(self.max_tokens, self.n_ctx - self.n_prompt)
        return self.reached or self._guard.is_aborted


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
    snapshot_bytes : int, default 512 MiB
        Host memory for the ends of prompts under a budget. A prompt that is too long to be pinned
        can't be gone back to once its cells were evicted; its copy is put back instead of reading
        it again, in the next turn of a chat whose thinking is stripped, or for another answer. A
        copy is as large as the cells in use, the oldest go first. 0: none.
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
    snapshot_bytes: int
    _ctx: Any
    _model: Any
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
        snapshot_bytes: int = 512 << 20,
        reasoning_format: str = "auto",
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        _warn_unknown(kwargs)
        if snapshot_bytes < 0:
            raise ValueError(f"snapshot_bytes must not be negative: {snapshot_bytes}")
        self.snapshot_bytes = snapshot_bytes
        self.reasoning_format = check_format(reasoning_format)
        if beacon is not None and not isinstance(beacon, BeaconConfig):
            raise TypeError(f"beacon must be a BeaconConfig, not {beacon!r}")
        self.beacon = beacon or BeaconConfig()
        model_path = os.fspath(model_path)
        check_model(
            model_path, kwargs.get("kv_overrides"), halves=llama_cpp.llama_supports_gpu_offload()
        )
        if kv_budget is not None and n_ctx == 0:
            n_ctx = n_ctx_train(model_path)
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
        elif type_v not in (None, *FLOAT_TYPES) and not flash_attn:
            raise ValueError("a quantised type_v needs flash attention: pass flash_attn=True")

        warn_without_gpu(n_gpu_layers, stacklevel=3)
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
        self._guard = Guard(self.ctx)
        vars(self._ctx)["decode"] = self._guard.decode  # no reference to self: del frees the model
        self._snapshots = states.Snapshots(self.ctx, snapshot_bytes)
        self._n_generations = 0
        self._prompt: npt.NDArray[np.int32] | None = None  # while it is evaluated
        self._n_reused = 0
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
        Aborted
            `abort` was called.
        RuntimeError
            llama.cpp could not decode, and the message has its error lines; or another thread is
            in a call.
        """
        n_total = self.n_tokens + len(tokens)
        if n_total > self._n_ctx:
            raise ValueError(f"Requested tokens ({n_total}) exceed context window of {self._n_ctx}")
        with self._guard.use(begins=True), error_log.collect() as errors:
            is_there = self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
            if not is_there or self._is_lost():
                tokens = [*self._input_ids.tolist(), *tokens]
                self.n_tokens = 0
            n_reused = self.n_tokens
            prompt, self._prompt = self._prompt, None
            if len(tokens) > 0:  # an array too
                self._requires_eval = True  # until they are evaluated: the logits are others'
            # What is evicted while a prompt is read depends on where its batches begin: not on
            # how much of it was there already.
            n_first = self.n_batch - self.n_tokens % self.n_batch if self.kv_budget else 0
            try:
                super().eval(tokens[:n_first])
                super().eval(tokens[n_first:])
            except Aborted:
                raise
            except RuntimeError as error:
                if not errors:
                    raise
                raise RuntimeError(
                    f"{error} at position {self.n_tokens}: " + "; ".join(errors)
                ) from error
            if prompt is not None:
                self._n_reused = n_reused
                self._keep_prompt(prompt)

    def _is_lost(self) -> bool:
        """Whether a failure in the midst of a compaction emptied the cache."""
        if self.kv_budget is None:
            return False
        return llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, 0) + 1 < self.n_tokens

    @property
    def _scores(self) -> npt.NDArray[np.single]:
        """As the parent's, but that there is a last row before anything was evaluated."""
        return self.scores[: max(1, self.n_tokens), :]

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As the parent's. After `load_state` the last token is evaluated again first.

        Raises
        ------
        RuntimeError
            Nothing was evaluated, or another thread is in a call.
        """
        with self._guard.use(begins=True):
            n = self.n_tokens
            if n == 0:
                raise RuntimeError("there is nothing to sample from: no token was evaluated")
            if self._requires_eval:  # the logits belong to another state
                self.n_tokens = n - 1
                try:
                    self.eval([int(self.input_ids[n - 1])])
                except BaseException:
                    self.n_tokens = n
                    raise
            return super().sample(*args, **kwargs)

    def reset(self) -> None:
        with self._guard.use(begins=True):
            super().reset()

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        with self._guard.use(begins=True):
            return super().embed(*args, **kwargs)

    def abort(self) -> None:
        """Stop what this Llama does, from any thread.

        It stops within one batch, while a prompt is read, between tokens and in a compaction; on a
        CPU within a part of one. A completion ends with what was written and `finish_reason`
        "abort", `generate` ends, `eval` raises `Aborted`. All can be called again. Where nothing is
        at work, nothing happens.
        """
        self._guard.abort()

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        limit = _TokenLimit(kwargs["max_tokens"], self._n_ctx, self._guard)
        if self.draft_model is not None:  # the parent counts drafted tokens as written
            limit.max_tokens = self._n_ctx
        criteria = kwargs["stopping_criteria"]
        kwargs["stopping_criteria"] = llama_cpp.StoppingCriteriaList(
            [criteria, limit] if criteria else [limit]
        )
        chunks = super()._create_completion(*args, **kwargs)
        with contextlib.closing(self._guard.steps(chunks, begins=True)) as steps:
            for chunk in steps:
                choice = chunk["choices"][0]
                if choice["finish_reason"] is not None and self._guard.is_aborted:
                    choice["finish_reason"] = "abort"
                elif choice["finish_reason"] is not None and limit.reached:
                    choice["finish_reason"] = "length"
                yield chunk

    @extends(llama_cpp.Llama.generate)
    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """As the parent's. What the cache holds of the prompt is not read again, see `kv_stats`.

        Raises
        ------
        RuntimeError
            Another thread is in a call, or another completion was started meanwhile.
        """
        tokens = list(tokens)
        written = super().generate(tokens, *args, **kwargs)
        with self._guard.use(begins=True):
            self._n_generations += 1
            generation = self._n_generations
            self._n_prompt_and_written = counts = [len(tokens), 0]
            self._prompt = np.array(tokens, np.int32)
            if self._resets(args, kwargs):
                self._rewind(self._prompt)
        reply = None
        with contextlib.closing(self._guard.steps(written)) as steps:
            while True:
                try:
                    token = steps.send(reply)
                except (StopIteration, Aborted):
                    return
                counts[1] += not llama_cpp.llama_vocab_is_eog(self._model.vocab, token)
                reply = yield token
                if generation != self._n_generations:
                    raise RuntimeError(
                        "this completion can't go on: another one was started on the same Llama"
                    )

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
        """What the cache holds now; works without a budget too.

        Any thread may ask at any time: while another one is in a call, it is told how things stood
        after the last batch.
        """
        return KVStats(
            **self._guard.stats(),
            n_reused=self._n_reused,
            bytes_snapshots=self._snapshots.n_bytes,
        )

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
        with self._guard.use():
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
        with self._guard.use():
            _native.pin(self.ctx, 0, n_tokens)

    @property
    def boundary(self) -> int:
        """First position from which every head holds every token; 0 if nothing was evicted."""
        with self._guard.use():
            return max(0, _native.boundary(self.ctx, 0))

    def save_state(self) -> states.LlamaState:
        """The context as it is; `load_state` goes on from it with the same tokens and evictions.

        Raises
        ------
        BeaconError
            llama.cpp could not write it.
        """
        with self._guard.use():
            blob = states.get_context(self.ctx)
            return states.LlamaState(
                input_ids=self._input_ids.copy(),
                # without logits_all llama_cpp leaves them empty
                scores=self._scores[: self.n_tokens if self._logits_all else 0].copy(),
                n_tokens=self.n_tokens,
                llama_state=blob,
                llama_state_size=len(blob),
                seed=self._seed,
                model=self._model_id,
            )

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Go on from what `save_state` returned, here or in another process.

        Parameters
        ----------
        state : LlamaState
            Of the same model, cache types, budget and `BeaconConfig`; one of llama_cpp's own class
            too if nothing was evicted.

        Raises
        ------
        ValueError
            The state is damaged, or longer than `n_ctx`.
        BeaconError
            It is of another model, cache type, budget or parameter; the message names it. Nothing
            has changed then. (Without a budget llama.cpp finds that out too late: the context is
            empty.)
        """
        if isinstance(state, states.LlamaState):
            state.check()
            ours, theirs = self._model_id, state.model
            if theirs and theirs.rpartition(" ")[2] != ours.rpartition(" ")[2]:
                raise BeaconError(
                    f"the state can't be loaded: it was saved with model = {theirs}, this is {ours}"
                )
        if not 0 <= state.n_tokens <= min(self._n_ctx, len(state.input_ids)):
            raise ValueError(
                f"the saved state has {state.n_tokens} tokens; n_ctx is {self._n_ctx}, and the "
                f"state names {len(state.input_ids)}"
            )
        with self._guard.use(), error_log.collect() as errors:
            # whatever interrupts this, the tokens are not taken for what the cache holds
            n_tokens, self.n_tokens, self._requires_eval = self.n_tokens, 0, True
            if not states.set_context(self.ctx, state.llama_state):
                if self.kv_budget is None:
                    self.reset()
                else:
                    self.n_tokens = n_tokens
                raise BeaconError("; ".join(["the state can't be loaded", *errors]))
            self._n_generations += 1  # whoever was writing can't go on
            self.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
            if self._logits_all:
                n_scores = min(len(state.scores), state.n_tokens)
                self.scores[:n_scores] = state.scores[:n_scores]
                self.scores[n_scores:] = 0.0
            self._seed = state.seed
            self.n_tokens = state.n_tokens

    @functools.cached_property
    def _model_id(self) -> str:
        """Name and checksum: fine-tuned models may differ in nothing but their weights."""
        checksum = states.model_checksum(self.model_path, self.lora_path, self.lora_scale)
        return f"{os.path.basename(self.model_path)} {checksum}"

    def save_state_file(self, path: str | os.PathLike[str]) -> None:
        """`save_state` into a file, which is replaced as a whole or not at all.

        Raises
        ------
        OSError
            It could not be written.
        """
        states.write(path, self.save_state())

    def load_state_file(self, path: str | os.PathLike[str]) -> None:
        """`load_state` from what `save_state_file` wrote.

        Raises
        ------
        OSError, ValueError
            It can't be read, or is no complete state.
        BeaconError
            As `load_state`.
        """
        self.load_state(states.read(path))

    def _resets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The argument `reset` of `generate`."""
        bound = inspect.signature(llama_cpp.Llama.generate).bind(self, [], *args, **kwargs)
        return bool(bound.arguments.get("reset", True))

    def _rewind(self, prompt: npt.NDArray[np.int32]) -> None:
        """Go back to where most of the prompt need not be read again.

        The parent goes back to the longest common prefix or to the beginning. In between there is
        the end of what is pinned, and there are the snapshots.
        """
        if self.kv_budget is None or len(prompt) == 0:
            return
        n = states.common_prefix(self._input_ids, prompt)
        if n == len(prompt) == self.n_tokens and not self._requires_eval:
            return
        n = min(n, len(prompt) - 1)  # the last one makes the logits
        if not _native.can_seq_rm(self.ctx, 0, n, -1):
            n = min(n, self._guard.stats()["n_pinned"])
        if n <= self.beacon.n_sink:  # a few tokens that every prompt begins with
            n = 0
        n_saved, snapshot = self._snapshots.best(prompt[:-1])
        if snapshot is not None and n_saved > n:
            # whatever interrupts this, the tokens are not taken for what the cache holds
            n_tokens, self.n_tokens, self._requires_eval = self.n_tokens, 0, True
            if self._snapshots.restore(snapshot):
                n_tokens, n = len(snapshot.tokens), n_saved
                self.input_ids[:n_tokens] = snapshot.tokens
            self.n_tokens = n_tokens
        if n < self.n_tokens and self._ctx.kv_cache_seq_rm(-1, n, -1):
            self.n_tokens = n
            self._requires_eval = True

    def _keep_prompt(self, prompt: npt.NDArray[np.int32]) -> None:
        """A prompt was evaluated: take a snapshot if no pin will bring it back."""
        is_all = len(prompt) == self.n_tokens
        if self._logits_all:
            return  # scores would be another text's
        if self.kv_budget and is_all and len(prompt) > self.beacon.pin_share * self.kv_budget:
            self._snapshots.take(prompt)

    def close(self) -> None:
        """Free the model and its cache. A second call does nothing; any other use then raises.

        What is at work is aborted first. In a signal handler or a callback of that very call, it is
        freed when the call ends.
        """
        stack = getattr(self, "_stack", None)
        if stack is None:
            return
        guard = getattr(self, "_guard", None)
        if guard is None:  # the constructor failed
            self._free()
        else:
            guard.close(self._free)

    def _free(self) -> None:
        self._stack.close()
        closed: Any = _Closed()
        self._ctx = self._model = self._batch = self.tokenizer_ = self._snapshots = closed

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
            "snapshot_bytes": self.snapshot_bytes,
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


def warn_without_gpu(n_gpu_layers: int, stacklevel: int) -> None:
    """Say so where `n_gpu_layers` asks for what is not there."""
    if n_gpu_layers != 0 and not llama_cpp.llama_supports_gpu_offload():
        warnings.warn(
            f"n_gpu_layers={n_gpu_layers} has no effect: no GPU backend is compiled in, or it "
            "found no device. The model runs on the CPU. 'beaconkv-gguf info' shows both.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


def n_ctx_train(model_path: str) -> int:
    """Context length that a model was trained with, out of its metadata alone."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    with _load_errors(model_path):
        model = _internals.LlamaModel(path_model=model_path, params=params, verbose=False)
    with contextlib.closing(model):
        metadata = model.metadata()
    key = f"{metadata['general.architecture']}.context_length"
    if key not in metadata:
        raise ValueError(f"{model_path}: n_ctx=0 takes the model's context, and {key} is missing")
    return int(metadata[key])


def _warn_unknown(kwargs: dict[str, Any]) -> None:
    """The parent takes any keyword and ignores those that it does not know: say so."""
    known = inspect.signature(llama_cpp.Llama.__init__).parameters
    unknown = sorted(kwargs.keys() - known.keys())
    if unknown:
        warnings.warn(
            f"Llama ignores unknown arguments: {', '.join(unknown)}", RuntimeWarning, stacklevel=3
        )
