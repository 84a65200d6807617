"""Binding of ``beaconkv.h`` (cffi, ABI mode) to the libllama that llama_cpp uses.

Contexts are the integers that ``llama_cpp`` hands out (``llm.ctx``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import numpy as np
import numpy.typing as npt
from cffi import FFI

from . import _library


class BeaconError(RuntimeError):
    """The bounded cache refused: this model or context, or the state that the cache is in."""


def _declarations() -> str:
    """C declarations of ``beaconkv.h``, as cffi takes them."""
    package = Path(__file__).resolve().parent
    paths = [
        package / "include" / "beaconkv.h",
        package.parent / "native" / "include" / "beaconkv.h",
    ]
    header = next((path for path in paths if path.exists()), None)
    if header is None:
        searched = "".join(f"\n  {path}" for path in paths)
        raise ImportError(f"beaconkv_gguf: beaconkv.h not found. Searched:{searched}")
    text = header.read_text(encoding="utf-8")
    text = text.split("// cdef begin", 1)[1].split("// cdef end", 1)[0]
    return re.sub(r"//[^\n]*", "", text).replace("BEACON_API ", "")


def _open(ffi: FFI) -> Any:
    path = _library.library_path("llama")
    _library.load("llama")  # for its message, should the system refuse
    lib = ffi.dlopen(str(path))
    try:
        lib.beacon_version  # noqa: B018 - looks the symbol up
    except AttributeError:
        raise ImportError(
            f"beaconkv_gguf: {path} is a stock llama.cpp without the bounded cache (no symbol "
            f"beacon_version). Reinstall beaconkv-gguf, or point {_library.LIB_DIR_VARIABLE} at a "
            "build of it."
        ) from None
    return lib


ffi: Any = FFI()
ffi.cdef(_declarations())
lib: Any = _open(ffi)


def version() -> str:
    """Version of the native part."""
    return ffi.string(lib.beacon_version()).decode()


def last_error() -> str:
    """Message of this thread's last failed call, "" if none."""
    return ffi.string(lib.beacon_last_error()).decode("utf-8", "replace")


def check(status: int) -> None:
    """Turn a ``beacon_status`` into an exception.

    Raises
    ------
    ValueError
        ``BEACON_INVALID``: an argument is out of its range.
    BeaconError
        Any other failure.
    """
    if status == lib.BEACON_OK:
        return
    message = last_error() or f"beacon status {status}"
    raise ValueError(message) if status == lib.BEACON_INVALID else BeaconError(message)


def policies() -> tuple[str, ...]:
    """Names of the policies, in the order of ``enum beacon_policy``."""
    names: list[str] = []
    while (name := lib.beacon_policy_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return tuple(names)


def params(**values: Any) -> Any:
    """A ``struct beacon_params *``: the defaults, with the fields of `values` set."""
    result = ffi.new("struct beacon_params *")
    lib.beacon_params_default(result)
    for name, value in values.items():
        setattr(result, name, value)
    return result


def as_dict(struct: Any) -> dict[str, Any]:
    """Fields of what a pointer to a struct points at, by name."""
    return {name: getattr(struct, name) for name, _ in ffi.typeof(struct).item.fields}


def address(function: str) -> int:
    """Address of a C function, to hand to ctypes."""
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, function)))


def check_params(params: Any, n_ctx: int = 0) -> None:
    """Raise ValueError unless `params` suit `n_ctx` logical tokens (0: not known yet)."""
    check(lib.beacon_params_check(params, n_ctx))


def max_batch(params: Any) -> int:
    """Largest number of tokens that one decode may bring per sequence."""
    return lib.beacon_max_batch(params)


@contextlib.contextmanager
def scope(params: Any) -> Iterator[None]:
    """Contexts that this thread creates inside live in the budget of `params`."""
    check(lib.beacon_scope_begin(params))
    try:
        yield
    finally:
        lib.beacon_scope_end()


def context(ctx: Any) -> Any:
    """``struct llama_context *`` of llama_cpp's integer."""
    return ffi.cast("struct llama_context *", ctx)


def enabled(ctx: Any) -> bool:
    """Whether the context lives in a budget."""
    return lib.beacon_enabled(context(ctx))


def device_fused(device: str) -> bool:
    """Whether ggml's device of this name has the fused operators for common shapes."""
    result = ffi.new("bool *")
    check(lib.beacon_device_fused(device.encode(), result))
    return bool(result[0])


def get_params(ctx: Any) -> dict[str, Any]:
    """Parameters of the context's budget by name."""
    result = ffi.new("struct beacon_params *")
    check(lib.beacon_get_params(context(ctx), result))
    return as_dict(result)


def read_stats(ctx: Any, seq_id: int = -1) -> Any:
    """A new ``struct beacon_stats *`` of one sequence (-1: all)."""
    result = ffi.new("struct beacon_stats *")
    check(lib.beacon_get_stats(context(ctx), seq_id, result))
    return result


def stats(ctx: Any, seq_id: int = -1) -> dict[str, int]:
    """``struct beacon_stats`` of one sequence (-1: all) by name; works without a budget too."""
    return as_dict(read_stats(ctx, seq_id))


def _array(read: Callable[[Any, Any], int], ctype: str, dtype: Any) -> npt.NDArray[Any]:
    """Array that a C function fills: asked for its size first, then for its content.

    Parameters
    ----------
    read : callable
        ``read(destination, n)`` with ``size_t * n``: in, capacity; out, what there is.
    """
    n = ffi.new("size_t *")
    status = read(ffi.NULL, n)
    if status != lib.BEACON_BUFFER_TOO_SMALL:
        check(status)
    result = np.empty(n[0], dtype)
    check(read(ffi.from_buffer(ctype, result), n))
    return result[: n[0]]


def layers(ctx: Any) -> npt.NDArray[np.int32]:
    """Model layers that live in the budget, ascending, [n_layer]."""
    return _array(lambda dst, n: lib.beacon_get_layers(context(ctx), dst, n), "int32_t[]", np.int32)


def n_head_kv(ctx: Any, il: int) -> int:
    """KV heads of layer `il`; 0 if the layer is not in the budget."""
    return lib.beacon_n_head_kv(context(ctx), il)


def positions(ctx: Any, seq_id: int, il: int, head: int) -> npt.NDArray[np.int32]:
    """Positions that KV head `head` of layer `il` holds, ascending, [n_held]."""
    return _array(
        lambda dst, n: lib.beacon_get_positions(context(ctx), seq_id, il, head, dst, n),
        "int32_t[]",
        np.int32,
    )


def pin(ctx: Any, seq_id: int, n: int) -> None:
    """Pin the first `n` positions of the sequence; 0 leaves the sinks."""
    check(lib.beacon_pin(context(ctx), seq_id, n))


def boundary(ctx: Any, seq_id: int) -> int:
    """First position from which every head holds every token; negative: no such sequence."""
    return lib.beacon_boundary(context(ctx), seq_id)


def can_seq_rm(ctx: Any, seq_id: int, p0: int, p1: int) -> bool:
    """Whether ``llama_memory_seq_rm(seq_id, p0, p1)`` would succeed."""
    return lib.beacon_can_seq_rm(context(ctx), seq_id, p0, p1)


def set_trace(ctx: Any, on: bool = True) -> None:
    """Keep the intermediate results of each layer's last compaction."""
    check(lib.beacon_set_trace(context(ctx), on))


# Type and shape of every traced array. Letters as in beaconkv.h; "*" is what the size leaves over.
_TRACE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "meta": (np.int32, ("*",)),
    "pos": (np.int32, ("H", "n")),
    "table_pos": (np.int32, ("n",)),
    "k": (np.uint8, ("n", "*")),
    "v": (np.uint8, ("n", "*")),
    "k_after": (np.uint8, ("n_keep", "*")),
    "v_after": (np.uint8, ("n_keep", "*")),
    "k_f32": (np.float32, ("H", "n", "*")),
    "v_f32": (np.float32, ("H", "n", "*")),
    "k_pre": (np.float32, ("H", "n", "*")),
    "q_track": (np.float32, ("N", "n_head", "*")),
    "q_track_pos": (np.int32, ("N",)),
    "q_pre": (np.float32, ("N", "n_head", "*")),
    "q_recent": (np.float32, ("R", "n_head", "*")),
    "q_recent_pos": (np.int32, ("R",)),
    "centroids_before": (np.float32, ("H", "m", "*")),
    "centroids": (np.float32, ("H", "m", "*")),
    "counts_before": (np.float32, ("H", "m")),
    "counts": (np.float32, ("H", "m")),
    "norms_before": (np.float32, ("H", "m")),
    "norms": (np.float32, ("H", "m")),
    "probes": (np.float32, ("H", "P", "*")),
    "importance": (np.float32, ("H", "n")),
    "similar": (np.float32, ("H", "n")),
    "expected": (np.float32, ("H", "n")),
    "score": (np.float32, ("H", "n")),
    "newer": (np.int32, ("*",)),
    "carried_before": (np.float32, ("H", "n")),
    "carried": (np.float32, ("H", "n")),
    "twin": (np.int32, ("H", "n")),
    "keep": (np.int32, ("H", "n_keep")),
}

_META = ("n", "N", "R", "n_keep", "n_prefix", "boundary", "next_pos", "n_head", "m", "P")


def trace(ctx: Any, il: int, name: str) -> npt.NDArray[Any]:
    """Array `name` of layer `il` of the last traced compaction, shaped as beaconkv.h says.

    Rows of "k" and "v" are bytes, as the cache stores them.
    """
    dtype, shape = _TRACE[name]
    raw = _array(
        lambda dst, n: lib.beacon_get_trace(context(ctx), il, name.encode(), dst, n),
        "uint8_t[]",
        np.uint8,
    ).view(dtype)
    if name == "meta":
        return raw
    sizes = trace_meta(ctx, il)
    known = [sizes[letter] for letter in shape if letter != "*"]
    rest = raw.size // int(np.prod(known)) if all(known) else 0
    return raw.reshape([rest if letter == "*" else sizes[letter] for letter in shape])


def trace_meta(ctx: Any, il: int) -> dict[str, int]:
    """Sizes of layer `il`'s last traced compaction by the letters of beaconkv.h."""
    sizes = dict(zip(_META, trace(ctx, il, "meta").tolist()))
    sizes["H"] = n_head_kv(ctx, il)
    return sizes
