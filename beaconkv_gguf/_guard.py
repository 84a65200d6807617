"""One thread at a time, and a way to stop it: the rules of a `Llama`'s native calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import llama_cpp

from . import _native


class Aborted(RuntimeError):
    """``Llama.abort()`` stopped the call; what was evaluated before the batch at work remains."""


class Guard:
    """Stands between a `Llama` and its context.

    llama.cpp's contexts are no place for two threads. A second one gets an error here, but for
    `abort` and `stats`, which any thread may call at any time.

    Parameters
    ----------
    ctx : int
        ``struct llama_context *``, as ``llm.ctx``.
    """

    def __init__(self, ctx: int) -> None:
        self._ctx: int | None = ctx
        self._lock = threading.RLock()
        self._depth = 0  # calls within calls
        self._owner = 0  # thread of the outermost one
        self._is_closing = False
        self._free: Callable[[], None] | None = None  # when the call at work has ended
        self._flag = _native.ffi.new("bool *")
        self._callback = llama_cpp.ggml_abort_callback(_native.address("beacon_is_raised"))
        llama_cpp.llama_set_abort_callback(
            ctx, self._callback, int(_native.ffi.cast("uintptr_t", self._flag))
        )
        self._stats = _native.read_stats(ctx, 0)

    @contextlib.contextmanager
    def use(self, begins: bool = False) -> Iterator[None]:
        """Hold the context for a call.

        Parameters
        ----------
        begins : bool
            The call begins work: an `abort` before it does not count. One that goes on with work
            that paused, as a stream does, or that looks at the cache leaves it standing.

        Raises
        ------
        RuntimeError
            Another thread is in a call, or the `Llama` was closed.
        """
        # `stats` takes the lock for a moment; a call keeps it for longer
        if not self._lock.acquire(timeout=0.1):
            raise RuntimeError(
                "this Llama is at work in another thread: it takes one call at a time"
            )
        depth = self._depth
        try:
            if depth == 0:
                self._check_open()
                self._owner = threading.get_ident()
                if begins:
                    self._flag[0] = False
            self._depth = depth + 1
            yield
        finally:
            self._depth = depth
            if depth == 0 and self._free is not None:
                self._close(self._free)
            self._lock.release()

    def _check_open(self) -> None:
        if self._is_closing:
            raise RuntimeError("this Llama was closed")

    def close(self, free: Callable[[], None]) -> None:
        """Stop the call at work, wait for its end, and free what it used, once.

        Within a call of the same thread, as in a signal handler, it is freed when that has ended.
        """
        if self._ctx is None:
            return
        self._is_closing = True
        self.abort()
        if self._depth > 0 and self._owner == threading.get_ident():
            self._free = free
            return
        with self._lock:
            self._close(free)

    def _close(self, free: Callable[[], None]) -> None:
        self._ctx = self._free = None
        free()

    def abort(self) -> None:
        """Stop the call at work within one batch; without one, nothing happens."""
        self._flag[0] = True

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` was called since the call at work began."""
        return bool(self._flag[0])

    def steps(self, generator: Any, begins: bool = False) -> Generator[Any, Any, None]:
        """The generator, with the context held at each of its steps and not in between."""
        reply = None
        with contextlib.closing(generator):
            while True:
                try:
                    with self.use(begins):
                        item = generator.send(reply)
                except StopIteration:
                    return
                begins = False
                reply = yield item

    def check(self) -> None:
        """Raise `Aborted` if the call at work shall stop."""
        if self._flag[0]:
            raise Aborted("stopped by abort()")

    def decode(self, batch: Any) -> None:
        """``LlamaContext.decode`` that can be stopped.

        Raises
        ------
        Aborted
            ``abort()`` was called.
        RuntimeError
            llama.cpp could not decode.
        """
        self.check()
        status = llama_cpp.llama_decode(self._ctx, batch.batch)
        self._stats = _native.read_stats(self._ctx, 0)
        if status == 2:
            raise Aborted("stopped by abort()")
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def stats(self) -> dict[str, int]:
        """``struct beacon_stats`` of sequence 0; while another thread is in a call, as of its last
        batch."""
        self._check_open()
        if self._lock.acquire(blocking=False):
            try:
                self._check_open()
                self._stats = _native.read_stats(self._ctx, 0)
            finally:
                self._lock.release()
        return _native.as_dict(self._stats)
