"""What a model's memory is made of, told from the metadata of its GGUF file: `read_layout`.

ggml reads the file; no weights are loaded. Which layers attend to everything, which to a sliding
window (SWA) and which keep a recurrent state follows llama.cpp's rules by architecture. Where they
are not written down here, the layout is `Layout.unsure` and not guessed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
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
_STRING, _ARRAY = 8, 9


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
    with open(path, "rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file: it does not begin with 'GGUF'")
    init = _library.function(
        "ggml-base", "gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParams
    )
    with error_log.collect(quiet=True) as errors:
        context = init(os.fsencode(path), _InitParams(no_alloc=True))
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
        n_kv = _gguf("get_n_kv", ctypes.c_int64)(context)
        return dict(_pair(context, i) for i in range(n_kv))
    finally:
        _gguf("free", None)(context)


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
