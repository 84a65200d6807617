"""What a model's memory is made of, told from the metadata of its GGUF file: `read_layout`.

`check_model` refuses the files that would end the process: llama.cpp aborts on some wrong values.

ggml reads the file; no weights are loaded. Which layers attend to everything, which to a sliding
window (SWA) and which keep a recurrent state follows llama.cpp's rules by architecture. Where they
are not written down here, the layout is `Layout.unsure` and not guessed.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from . import _library
from ._log import error_log


class _InitParams(ctypes.Structure):
    """``struct gguf_init_params``"""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


_NUMBERS: dict[int, Any] = {  # enum gguf_type
    0: ctypes.c_uint8, 1: ctypes.c_int8, 2: ctypes.c_uint16, 3: ctypes.c_int16,
    4: ctypes.c_uint32, 5: ctypes.c_int32, 6: ctypes.c_float, 7: ctypes.c_bool,
    10: ctypes.c_uint64, 11: ctypes.c_int64, 12: ctypes.c_double,
}  # fmt: skip
_INT32, _STRING, _ARRAY = 5, 8, 9


@functools.cache
def _gguf(name: str, restype: Any, *more: Any) -> Any:
    """Function ``gguf_*`` that takes a ``struct gguf_context *`` first."""
    return _library.function("ggml-base", f"gguf_{name}", restype, ctypes.c_void_p, *more)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Key-value pairs of a GGUF file whose tensors are complete.

    Arrays of strings and of the tokenizer are given by their length: of vocabularies only the size
    matters, and making objects of them takes seconds.

    Raises
    ------
    OSError
        The file can't be opened.
    ValueError
        It is no GGUF file, ggml refuses it, or it is truncated.
    """
    with _opened(path) as (context, _):
        return _pairs(context)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[int, int]]:
    """A file's ``struct gguf_context``, and the ``struct ggml_context`` of its tensors."""
    with open(path, "rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file: it does not begin with 'GGUF'")
    init = _library.function(
        "ggml-base", "gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParams
    )
    tensors = ctypes.c_void_p()
    params = _InitParams(no_alloc=True, ctx=ctypes.addressof(tensors))
    with error_log.collect(quiet=True) as errors:
        context = init(os.fsencode(path), params)
    if not context:
        raise ValueError(f"{path} is damaged or truncated: {'; '.join(errors)}")
    try:
        needed = _gguf("get_data_offset", ctypes.c_size_t)(context)
        last = _gguf("get_n_tensors", ctypes.c_int64)(context) - 1  # ggml wants them in order
        if last >= 0:
            for of_tensor in ("get_tensor_offset", "get_tensor_size"):
                needed += _gguf(of_tensor, ctypes.c_size_t, ctypes.c_int64)(context, last)
        if needed > n_bytes:
            raise ValueError(
                f"{path} is truncated: it has {n_bytes:,} bytes, its tensors need {needed:,}"
            )
        yield context, tensors.value or 0
    finally:
        _gguf("free", None)(context)
        _library.function("ggml-base", "ggml_free", None, ctypes.c_void_p)(tensors)


def _pairs(context: int) -> dict[str, Any]:
    return dict(_pair(context, i) for i in range(_gguf("get_n_kv", ctypes.c_int64)(context)))


def _pair(context: int, i: int) -> tuple[str, Any]:
    """Key and value number `i`."""

    def get(name: str, restype: Any) -> Any:
        value = _gguf(f"get_{name}", restype, ctypes.c_int64)(context, i)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    key, kind = get("key", ctypes.c_char_p), get("kv_type", ctypes.c_int)
    n = get("arr_n", ctypes.c_size_t)  # 1 of a scalar
    is_array = kind == _ARRAY
    if is_array:
        kind = get("arr_type", ctypes.c_int)
        if kind == _STRING or key.startswith("tokenizer."):
            return key, n
    if kind == _STRING:
        return key, get("val_str", ctypes.c_char_p)
    data = get("arr_data", ctypes.c_void_p)  # takes scalars, too
    values = ctypes.cast(data, ctypes.POINTER(_NUMBERS[kind]))[:n]
    return key, values if is_array else values[0]


class Attention(NamedTuple):
    """One layer that has keys and values of its own."""

    is_swa: bool  # it attends to a sliding window
    n_head: int
    n_head_kv: int
    head_k: int  # numbers in a key of one head
    head_v: int  # numbers in a value; 0: no cache of them


@dataclass(frozen=True)
class Layout:
    """What a model's memory is made of."""

    arch: str  # architecture, as in the file
    weights: int = 0  # bytes of the model's files
    n_ctx_train: int = 0  # tokens of context that it was trained with
    n_vocab: int = 0  # tokens of the vocabulary
    n_embd: int = 0  # width of the residual stream
    n_ff: int = 0  # width of the widest feed-forward part
    n_layer: int = 0
    attention: tuple[Attention, ...] = ()  # layers with keys and values of their own, in order
    n_swa: int = 0  # tokens of the sliding window; 0: none
    n_recurrent: int = 0  # layers with a recurrent state
    n_state: int = 0  # float32 numbers of that state, per layer and sequence
    declined: str = ""  # why it can't live in a budget, in the native part's words; "": it can
    unsure: str = ""  # why its sizes can't be told, and `attention` is empty; "": they can

    @property
    def full(self) -> list[Attention]:
        """Layers that attend to everything: those that a budget bounds."""
        return [layer for layer in self.attention if not layer.is_swa]

    @property
    def swa(self) -> list[Attention]:
        return [layer for layer in self.attention if layer.is_swa]


# Architectures whose memory is no plain cache of keys and values, by why a budget is refused.
_DECLINED = {
    "it is an encoder, which keeps no history": {
        "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2",
        "jina-bert-v3", "eurobert", "gemma-embedding", "wavtokenizer-dec", "t5", "t5encoder",
        "eagle3", "dflash",
    },
    "it is a diffusion model, which keeps no history": {"dream", "llada", "llada-moe", "rnd1"},
    "it is recurrent, its memory is bounded already": {
        "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7",
    },
}  # fmt: skip
_MIRRORED = {
    "deepseek32", "deepseek4", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "minimax-m3",
    "qwen4exp",
}  # fmt: skip
# The metadata does not tell which caches their layers have.
_UNTOLD = {"gemma4-assistant", "graniteswitch", "minimax-01", "nanbeige"}

# Hybrids: layers without KV heads are recurrent; every n-th layer attends; all layers do both.
_RECURRENT_WITHOUT_KV = {
    "granitehybrid", "jamba", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "plamo2",
}  # fmt: skip
_ATTENDS_EVERY = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
_ATTENDS_AND_RECURS = {"falcon-h1"}
_HYBRID = _RECURRENT_WITHOUT_KV | _ATTENDS_EVERY.keys() | _ATTENDS_AND_RECURS
_STATE_KEYS = ("ssm.state_size", "wkv.head_size", "kda.head_dim", "shortconv.l_cache")

# Every n-th layer attends to all tokens where the file neither lists the layers nor has the n.
_SWA_PERIOD = {
    "cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "llama4": 4,
    "olmo2": 4,
}  # fmt: skip
# Windows that the file need not have, and windows of the file that llama.cpp leaves out.
_SWA_DEFAULT = {"gemma2": 4096, "llama4": 8192}
_SWA_IGNORED = {"llama", "mistral3", "phi3", "phimoe", "qwen2", "qwen2moe", "qwen3", "qwen3moe"}


def _integer(metadata: dict[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int):
        raise ValueError(f"{key} must be an integer, not {value!r}")
    return value


class _Keys:
    """Metadata of one architecture."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.arch = str(metadata.get("general.architecture", ""))

    def get(self, key: str, default: int | None = None) -> int:
        return _integer(self.metadata, f"{self.arch}.{key}", default)

    def per_layer(self, key: str, n: int, default: list[int] | int = 0) -> list[int]:
        """One number for each of `n` layers, out of an array or of one number for all."""
        values = self.metadata.get(f"{self.arch}.{key}", default)
        if not isinstance(values, list):
            return [self.get(key, values)] * n
        if len(values) < n:
            raise ValueError(f"{self.arch}.{key} has {len(values)} values for {n} layers")
        return values[:n]


def read_layout(path: str | os.PathLike[str]) -> Layout:
    """Layout of the model in a GGUF file; of a split one, `path` is the first part.

    Raises
    ------
    OSError
        A file can't be opened.
    ValueError
        A file is no GGUF file or truncated, has not the metadata of a language model, or is
        another part of a split one.
    """
    path = Path(path)
    metadata = read_metadata(path)
    try:
        _check_numbers(_Keys(metadata))
        files = _files(path, _integer(metadata, "split.count", 1))
        layout = layout_of(metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for part in files[1:]:
        read_metadata(part)  # complains if it is truncated
    return dataclasses.replace(layout, weights=sum(file.stat().st_size for file in files))


def _files(path: Path, n: int) -> list[Path]:
    """The `n` files of a model whose first one is `path`."""
    if n <= 1:
        return [path]
    suffix = f"-00001-of-{n:05d}.gguf"
    if not path.name.endswith(suffix):
        raise ValueError(f"it is a part of a split model; pass the one that ends in {suffix}")
    prefix = path.name[: -len(suffix)]
    return [path.with_name(f"{prefix}-{i:05d}-of-{n:05d}.gguf") for i in range(1, n + 1)]


def layout_of(metadata: dict[str, Any]) -> Layout:
    """Layout that the metadata of `read_metadata` tells, without the bytes of the weights.

    Raises
    ------
    ValueError
        A key that every language model has is missing, or has too few values.
    """
    keys = _Keys(metadata)
    n_all, n_embd = keys.get("block_count"), keys.get("embedding_length")
    n_ff = keys.per_layer("feed_forward_length", n_all)
    n_used = keys.per_layer("expert_used_count", n_all)
    n_ff_expert = keys.per_layer("expert_feed_forward_length", n_all)
    layout = Layout(
        arch=keys.arch,
        n_ctx_train=keys.get("context_length"),
        n_vocab=_integer(metadata, "tokenizer.ggml.tokens", 0),
        n_embd=n_embd,
        n_ff=max([*n_ff, *(n * width for n, width in zip(n_used, n_ff_expert))], default=0),
        n_layer=n_all,
        declined=_reason_to_decline(keys),
        unsure=_reason_to_be_unsure(keys),
    )
    if layout.unsure:
        return layout

    heads = keys.per_layer("attention.head_count", n_all)
    heads_kv = keys.per_layer("attention.head_count_kv", n_all, heads)
    n_layer = n_all - keys.get("nextn_predict_layers", 0)  # the rest predicts several tokens ahead
    attends, recurs = _kinds(keys, n_layer, heads_kv, n_ff)
    n_swa, is_swa = _windows(keys, n_layer)
    # the others read the keys and values of these
    n_own = min(n_layer, 20) if keys.arch == "gemma3n" else n_layer
    n_own -= keys.get("attention.shared_kv_layers", 0) if keys.arch == "gemma4" else 0

    default = n_embd // heads[0] if heads and heads[0] else 0
    head_k = keys.get("attention.key_length", default)
    head_v = keys.get("attention.value_length", default)
    swa_k = keys.get("attention.key_length_swa", head_k)
    swa_v = keys.get("attention.value_length_swa", head_v)
    if keys.get("attention.key_length_mla", 0):
        head_v = swa_v = 0  # values are a part of the keys
    sizes = {False: (head_k, head_v), True: (swa_k, swa_v)}
    return dataclasses.replace(
        layout,
        attention=tuple(
            Attention(is_swa[il], heads[il], heads_kv[il], *sizes[is_swa[il]])
            for il in range(n_own)
            if attends[il]
        ),
        n_swa=n_swa,
        n_recurrent=sum(recurs),
        n_state=_n_state(keys),
    )


def _reason_to_decline(keys: _Keys) -> str:
    """Why a budget would be refused, in the native part's words and order; "" if it would not."""
    arch = keys.arch
    for reason, archs in _DECLINED.items():
        if arch in archs:
            return reason
    if not keys.get("attention.causal", True):
        return "it is an encoder, which keeps no history"
    if keys.get("attention.key_length_mla", 0):
        return "its attention is MLA, which has no cache of values"
    has_alibi = arch in ("bloom", "refact") or (
        arch == "baichuan" and keys.get("block_count") == 40
    )
    if has_alibi or keys.metadata.get(f"{arch}.attention.max_alibi_bias"):
        return "its attention is ALiBi, which needs the true position of every cell"
    if arch in _MIRRORED:
        return "its memory has caches that mirror each other's cells"
    return ""


def _reason_to_be_unsure(keys: _Keys) -> str:
    """Why the metadata does not tell the sizes of the caches; "" if it does."""
    arch = keys.arch
    if arch in _MIRRORED or any(arch in archs for archs in _DECLINED.values()):
        return "its memory is not a cache of keys and values alone"
    if arch in _UNTOLD:
        return "which caches its layers have can't be told from the metadata"
    if any(keys.get(key, 0) for key in _STATE_KEYS) and arch not in _HYBRID:
        return "which of its layers are recurrent can't be told from the metadata"
    known = arch in _SWA_PERIOD or arch in _SWA_IGNORED
    listed = isinstance(keys.metadata.get(f"{arch}.attention.sliding_window_pattern"), list)
    if keys.get("attention.sliding_window", 0) and not known and not listed:
        return "which of its layers have a sliding window can't be told from the metadata"
    return ""


def _kinds(
    keys: _Keys, n_layer: int, heads_kv: list[int], n_ff: list[int]
) -> tuple[list[bool], list[bool]]:
    """Which layers have a cache of keys and values, and which a recurrent state."""
    if keys.arch in _ATTENDS_AND_RECURS:
        return [True] * n_layer, [True] * n_layer
    recurs = [False] * n_layer
    if keys.arch in _RECURRENT_WITHOUT_KV:
        recurs = [n == 0 for n in heads_kv[:n_layer]]
    if keys.arch.startswith("nemotron_h"):  # the feed-forward parts are layers of their own
        recurs = [recurs[il] and n_ff[il] == 0 for il in range(n_layer)]
    if keys.arch in _ATTENDS_EVERY:
        n = max(1, keys.get("full_attention_interval", _ATTENDS_EVERY[keys.arch]))
        default = [(il + 1) % n for il in range(n_layer)]
        recurs = [bool(r) for r in keys.per_layer("attention.recurrent_layers", n_layer, default)]
    return [n > 0 and not r for n, r in zip(heads_kv, recurs)], recurs


def _windows(keys: _Keys, n_layer: int) -> tuple[int, list[bool]]:
    """Tokens of the sliding window, and which layers have it."""
    n_swa = keys.get("attention.sliding_window", _SWA_DEFAULT.get(keys.arch, 0))
    if not n_swa or keys.arch in _SWA_IGNORED:
        return 0, [False] * n_layer
    key = "attention.sliding_window_pattern"
    if isinstance(keys.metadata.get(f"{keys.arch}.{key}"), list):
        return n_swa, [bool(value) for value in keys.per_layer(key, n_layer)]
    n = keys.get(key, _SWA_PERIOD[keys.arch])
    return n_swa, [n == 0 or (il + 1) % n != 0 for il in range(n_layer)]


def _n_state(keys: _Keys) -> int:
    """float32 numbers of one layer's recurrent state: convolution and state proper."""
    if keys.get("shortconv.l_cache", 0):
        return keys.get("embedding_length") * (keys.get("shortconv.l_cache") - 1)
    inner, state = keys.get("ssm.inner_size", 0), keys.get("ssm.state_size", 0)
    rows = max(0, keys.get("ssm.conv_kernel", 0) - 1)
    return rows * (inner + 2 * keys.get("ssm.group_count", 0) * state) + state * inner


# --- values that llama.cpp does not survive -----------------------------------------------------

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
_MAX_CONTEXT = 2**28
_ALIGNMENT = 32  # TENSOR_ALIGNMENT
_SWA_SIZES = (
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
)
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_NO_VOCABULARY = ("none", "no_vocab")
_BYTE_TYPE = 6  # LLAMA_TOKEN_TYPE_BYTE
_BYTE_TOKENS = frozenset(f"<0x{i:02X}>".encode() for i in range(256))
_HALVES = (1, 30)  # ggml's numbers of f16 and bf16
# ggml's numbers of types that no matrix product takes: q8_1, q8_K, integers, f64
_NO_WEIGHTS = (9, 15, 24, 25, 26, 27, 28)


def check_model(
    path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None, halves: bool = False
) -> None:
    """Refuse a file that would end the process: llama.cpp asserts what it should check.

    What llama.cpp refuses itself is left to it, a file that can't be read too.

    Parameters
    ----------
    path : str or path
        A GGUF file; of a split one, the first part.
    overrides : mapping, optional
        Metadata to take for the file's.
    halves : bool, default False
        Vectors of 16-bit floats can be computed with: some GPUs can, the CPU can't.

    Raises
    ------
    ValueError
        It has such a value; the message has its name, the value and what is allowed.
    """
    parts = [Path(path)]
    for part in parts:
        with contextlib.ExitStack() as stack:
            try:
                context, tensors = stack.enter_context(_opened(part))
                metadata = _pairs(context)
            except (OSError, ValueError):
                return
            try:
                if part is parts[0]:
                    metadata.update(overrides or {})
                    _check_numbers(_Keys(metadata))
                    _check_vocabulary(context, metadata.get("tokenizer.ggml.model"))
                    with contextlib.suppress(ValueError):
                        parts += _files(part, _integer(metadata, "split.count", 1))[1:]
                _check_tensors(context, tensors, halves)
            except ValueError as error:
                raise ValueError(f"{part}: {error}") from None


def _check_numbers(keys: _Keys) -> None:
    """Sizes and scalars: what holds for all architectures, then what some of them assert."""
    arch, metadata = keys.arch, keys.metadata

    def require(key: str, value: Any, allowed: str, ok: bool) -> None:
        if not ok:
            raise ValueError(f"{arch}.{key} is {value!r}; allowed is {allowed}")

    def number(key: str, default: int = 0) -> int:
        """A key's number, the largest of a list; `default` where there is none."""
        value = metadata.get(f"{arch}.{key}", default)
        values = value if isinstance(value, list) else [value]
        return max((v for v in values if isinstance(v, int)), default=default)

    n_layer = number("block_count", 1)
    require("block_count", n_layer, f"1 to {_MAX_LAYERS}", 1 <= n_layer <= _MAX_LAYERS)
    n_next = number("nextn_predict_layers")
    require("nextn_predict_layers", n_next, f"0 to block_count={n_layer}", n_next <= n_layer)

    n_expert, n_used = number("expert_count"), number("expert_used_count")
    require("expert_count", n_expert, f"0 to {_MAX_EXPERTS}", n_expert <= _MAX_EXPERTS)
    if n_expert > 1 or not arch.startswith("hunyuan"):
        least, text = min(1, n_expert), f"to expert_count={n_expert}"
        require("expert_used_count", n_used, f"{least} {text}", least <= n_used <= n_expert)
    n_group, n_group_used = number("expert_group_count"), number("expert_group_used_count")
    most = max(0, n_expert - 1)
    require("expert_group_count", n_group, f"0 to {most}", n_group <= most)
    if n_group > 1:
        text = f"a divisor of expert_count={n_expert}"
        require("expert_group_count", n_group, text, n_expert % n_group == 0)
        text = f"1 to {n_group - 1}"
        require("expert_group_used_count", n_group_used, text, 1 <= n_group_used < n_group)

    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    require("rope.scaling.type", scaling, ", ".join(_ROPE_SCALINGS), scaling in _ROPE_SCALINGS)
    for key, value in metadata.items():
        if key.startswith(f"{arch}.") and key.endswith("epsilon") and isinstance(value, float):
            require(key[len(arch) + 1 :], value, "0 or more", value >= 0)

    # llama_cpp makes room for that many tokens whenever it tokenizes
    n_ctx = number("context_length")
    require("context_length", n_ctx, f"0 to {_MAX_CONTEXT}", n_ctx <= _MAX_CONTEXT)
    n_embd, heads = number("embedding_length"), metadata.get(f"{arch}.attention.head_count", 0)
    n_head = heads[0] if isinstance(heads, list) and heads else heads
    if isinstance(n_head, int) and n_head > 0:
        head_k = number("attention.key_length", n_embd // n_head)
        for suffix in ("", "_swa"):
            key = f"rope.dimension_count{suffix}"
            size, n_rot = number(f"attention.key_length{suffix}", head_k), number(key)
            # two families rotate nothing
            if f"{arch}.{key}" in metadata and not arch.startswith(("kimi", "glm5")):
                text = f"an even number from 2 to the size of a head, {size}"
                require(key, n_rot, text, n_rot % 2 == 0 and 2 <= n_rot <= size)
        if arch == "gpt-oss":  # its tensors have the sizes that RoPE's dimensions tell
            head_v = number("attention.value_length", n_embd // n_head)
            require("attention.value_length", head_v, f"a key's size, {head_k}", head_v == head_k)
            for key in ("rope.dimension_count", *_SWA_SIZES):
                size = number(key, head_k)
                require(key, size, f"a key's size, {head_k}", size == head_k)
    if number("attention.key_length_mla"):
        n_head_kv, n_rot = number("attention.head_count_kv"), number("rope.dimension_count")
        require("attention.head_count_kv", n_head_kv, "1 with MLA", n_head_kv == 1)
        size = number("attention.key_length_mla")
        require("attention.key_length_mla", size, f"more than {n_rot}, RoPE's", size > n_rot)
        if arch.startswith("deepseek"):
            size, rank = number("attention.key_length"), number("attention.kv_lora_rank")
            text = f"kv_lora_rank={rank} and {n_rot} for RoPE"
            require("attention.key_length", size, text, size == rank + n_rot)
    if arch in ("granitehybrid", "jamba"):
        inner = number("ssm.inner_size")
        require("ssm.inner_size", inner, f"2 x embedding_length={n_embd}", inner == 2 * n_embd)
    if arch in _SWA_PERIOD:
        n_swa, is_swa = _windows(keys, n_layer)
        pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
        text = f"what gives one of {n_layer} layers the window of {n_swa} tokens"
        require("attention.sliding_window_pattern", pattern, text, not n_swa or any(is_swa))


def _check_vocabulary(context: int, model: Any) -> None:
    """Tokens that llama.cpp asserts, or takes for granted when it tokenizes.

    `model` is the kind of tokenizer.
    """
    i, n = _array(context, "tokenizer.ggml.tokens", _STRING)
    text_of = _gguf("get_arr_str", ctypes.c_char_p, ctypes.c_int64, ctypes.c_size_t)
    tokens = [text_of(context, i, j) for j in range(n)]
    tokens = [token for token in tokens if token]  # llama.cpp names the empty ones itself
    if model in _NO_VOCABULARY:
        return
    if len(set(tokens)) < len(tokens):
        token, count = collections.Counter(tokens).most_common(1)[0]
        raise ValueError(f"tokenizer.ggml.tokens has {token!r} {count} times; allowed is once")
    n_bytes = len(_BYTE_TOKENS.intersection(tokens))
    if model == "llama" and n_bytes not in (0, 256):
        raise ValueError(
            f"tokenizer.ggml.tokens has {n_bytes} of the tokens '<0x00>' to '<0xFF>'; allowed are "
            "all of them, or none"
        )
    i, n = _array(context, "tokenizer.ggml.token_type", _INT32)
    if model == "bert" and n:
        data = _gguf("get_arr_data", ctypes.c_void_p, ctypes.c_int64)(context, i)
        if _BYTE_TYPE in ctypes.cast(data, ctypes.POINTER(ctypes.c_int32))[:n]:
            raise ValueError("tokenizer.ggml.token_type has bytes; allowed with 'bert' are none")


def _array(context: int, key: str, kind: int) -> tuple[int, int]:
    """Place and length of a key's array of a kind; length 0 if it has none."""
    i = _gguf("find_key", ctypes.c_int64, ctypes.c_char_p)(context, key.encode())
    if i < 0 or _gguf("get_kv_type", ctypes.c_int, ctypes.c_int64)(context, i) != _ARRAY:
        return i, 0
    if _gguf("get_arr_type", ctypes.c_int, ctypes.c_int64)(context, i) != kind:
        return i, 0
    return i, _gguf("get_arr_n", ctypes.c_size_t, ctypes.c_int64)(context, i)


def _check_tensors(context: int, tensors: int, halves: bool) -> None:
    """Types that nothing computes with, and where the data begins: shapes llama.cpp checks."""
    begin = _gguf("get_data_offset", ctypes.c_size_t)(context)
    n_tensors = _gguf("get_n_tensors", ctypes.c_int64)(context)
    if n_tensors and begin % _ALIGNMENT != 0:  # files with a vocabulary alone have none
        raise ValueError(f"tensors begin at byte {begin}; allowed is a multiple of {_ALIGNMENT}")
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    n_dims_of = _library.function("ggml-base", "ggml_n_dims", number, pointer)
    name_of = _library.function("ggml-base", "ggml_get_name", text, pointer)
    type_name = _library.function("ggml-base", "ggml_type_name", text, number)
    is_quantized = _library.function("ggml-base", "ggml_is_quantized", ctypes.c_bool, number)
    first = _library.function("ggml-base", "ggml_get_first_tensor", pointer, pointer)
    following = _library.function("ggml-base", "ggml_get_next_tensor", pointer, pointer, pointer)
    type_of = _gguf("get_tensor_type", number, ctypes.c_int64)
    tensor = first(tensors)
    for i in range(n_tensors):
        name, kind = name_of(tensor).decode("utf-8", "replace"), type_of(context, i)
        is_vector = n_dims_of(tensor) == 1 or name.endswith((".bias", "_norm.weight"))
        allowed = ""
        if kind in _NO_WEIGHTS and name.endswith((".weight", ".bias")) and "tid2eid" not in name:
            allowed = "floats and quantised types of weights"
        elif is_vector and (is_quantized(kind) or (kind in _HALVES and not halves)):
            allowed = "f32, f16 or bf16" if halves else "f32"
        if allowed:
            kind_name = type_name(kind).decode()
            raise ValueError(f"tensor {name} has the type {kind_name}; allowed are {allowed}")
        tensor = following(tensors, tensor)
