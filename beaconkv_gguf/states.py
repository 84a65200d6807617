"""Saved states of a `Llama`: in memory, on disk, and of prompts that will be asked again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from . import _native


class LlamaState(llama_cpp.LlamaState):
    """llama_cpp's state with a checksum over all of it, and one of the model it is of."""

    def __init__(self, *args: Any, model: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model = model
        self.checksum = self._compute_checksum()

    def _compute_checksum(self) -> int:
        tokens = np.ascontiguousarray(self.input_ids[: self.n_tokens], np.int32)
        head = f"{self.n_tokens} {self.seed} {self.llama_state_size} {self.model}"
        value = zlib.crc32(head.encode())
        for data in (tokens.data, np.ascontiguousarray(self.scores).data, self.llama_state):
            value = zlib.crc32(data, value)
        return value

    def check(self) -> None:
        """Raise ValueError if the state is not what was saved."""
        if self.checksum != self._compute_checksum():
            raise ValueError("the saved state is damaged: its checksum is wrong")


_N_SAMPLES, _SAMPLE_BYTES = 512, 256


def model_checksum(path: str, lora_path: str | None, lora_scale: float) -> str:
    """Checksum of some of a model's bytes all over its file, and of its adapter's."""
    value = zlib.crc32(f"{lora_scale if lora_path else 1}".encode())
    for name in filter(None, (path, lora_path)):
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for i in range(_N_SAMPLES):
                file.seek(size * i // _N_SAMPLES)
                value = zlib.crc32(file.read(_SAMPLE_BYTES), value)
    return f"{value:08x}"


def get_context(ctx: int) -> bytes:
    """State of a whole context.

    Raises
    ------
    BeaconError
        llama.cpp could not write it.
    """
    size = llama_cpp.llama_state_get_size(ctx)
    data = (ctypes.c_uint8 * size)()
    if size == 0 or llama_cpp.llama_state_get_data(ctx, data, size) != size:
        raise _native.BeaconError(_native.last_error() or "the state could not be saved")
    return bytes(data)


def set_context(ctx: int, state: bytes) -> bool:
    """Replace a whole context; False if llama.cpp refused."""
    data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
    return llama_cpp.llama_state_set_data(ctx, data, len(state)) == len(state) > 0


# --- files ----------------------------------------------------------------------------------------

_FIELDS = ("llama_state", "input_ids", "scores", "n_tokens", "seed", "model")


def write(path: str | os.PathLike[str], state: LlamaState) -> None:
    """Write a state to a file, which has the old content or the new one and never a part.

    The format is numpy's ``.npz``: a zip archive whose members have checksums.

    Raises
    ------
    OSError
        The file could not be written; what was there before is still there.
    """
    path = Path(path).resolve()  # of a link, what it leads to
    data = {
        "llama_state": np.frombuffer(state.llama_state, np.uint8),
        "input_ids": np.asarray(state.input_ids[: state.n_tokens], np.int32),
        "scores": state.scores,
        "n_tokens": np.int64(state.n_tokens),
        "seed": np.int64(state.seed),
        "model": np.array(state.model),
    }
    file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - renamed while closed
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False
    )
    try:
        with file:
            np.savez(file, **data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(file.name, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(file.name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise


def read(path: str | os.PathLike[str]) -> LlamaState:
    """Read what `write` wrote.

    Raises
    ------
    OSError
        The file can't be read.
    ValueError
        It is not a complete state.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {name: file[name] for name in _FIELDS}
        blob = data["llama_state"].tobytes()
        return LlamaState(
            input_ids=data["input_ids"],
            scores=data["scores"],
            n_tokens=int(data["n_tokens"]),
            llama_state=blob,
            llama_state_size=len(blob),
            seed=int(data["seed"]),
            model=str(data["model"]),
        )
    except OSError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many kinds
        raise ValueError(f"{os.fspath(path)} is not a complete saved state: {error}") from error


def _umask() -> int:
    """The process's, which can only be read by setting it."""
    value = os.umask(0o077)
    os.umask(value)
    return value


# --- ends of prompts ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Sequence 0 as it was at the end of a prompt."""

    tokens: npt.NDArray[np.int32]  # [n_tokens]
    boundary: int  # first position to which it can be cut back
    state: bytes

    def n_reusable(self, tokens: npt.NDArray[np.int32]) -> int:
        """How many tokens of a prompt need not be read again once this is restored."""
        n = common_prefix(self.tokens, tokens)
        return n if n == len(self.tokens) or n >= self.boundary else 0


class Snapshots:
    """The ends of the latest prompts, within a limit of host memory.

    Parameters
    ----------
    ctx : int
        ``struct llama_context *``.
    max_bytes : int
        What all of them may take; the oldest go first. 0: none is taken.
    """

    def __init__(self, ctx: int, max_bytes: int) -> None:
        self._ctx = ctx
        self._max_bytes = max_bytes
        self._items: list[Snapshot] = []  # the latest last

    @property
    def n_bytes(self) -> int:
        """Host memory in use."""
        return sum(len(item.state) for item in self._items)

    def take(self, tokens: npt.NDArray[np.int32]) -> None:
        """Keep sequence 0, which these tokens made; not if it alone is above the limit."""
        if self._max_bytes == 0:
            return
        size = llama_cpp.llama_state_seq_get_size(self._ctx, 0)
        if not 0 < size <= self._max_bytes:
            return
        self._items = [item for item in self._items if not np.array_equal(item.tokens, tokens)]
        while self.n_bytes + size > self._max_bytes:
            del self._items[0]
        data = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(self._ctx, data, size, 0) == size:
            # windows and recurrent states are saved for the end of the sequence alone
            is_plain = _native.stats(self._ctx, 0)["bytes_other"] == 0
            boundary = _native.boundary(self._ctx, 0) if is_plain else len(tokens)
            self._items.append(Snapshot(tokens.copy(), boundary, bytes(data)))

    def best(self, tokens: npt.NDArray[np.int32]) -> tuple[int, Snapshot | None]:
        """The one that saves most of a prompt, and how many tokens it saves."""
        best = max(self._items, key=lambda item: item.n_reusable(tokens), default=None)
        return (best.n_reusable(tokens), best) if best else (0, None)

    def restore(self, snapshot: Snapshot) -> bool:
        """Put it in the place of sequence 0; False if llama.cpp refused, which changed nothing."""
        data = (ctypes.c_uint8 * len(snapshot.state)).from_buffer_copy(snapshot.state)
        n = llama_cpp.llama_state_seq_set_data(self._ctx, data, len(snapshot.state), 0)
        self._items.remove(snapshot)
        self._items.append(snapshot)
        return n == len(snapshot.state)


def common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """How many first tokens are the same."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
