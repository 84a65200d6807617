"""One thread at a time, and a way to stop it: the rules of a `Llama`'s native calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator
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
        self._ctx = ctx
        self._lock = threading.RLock()
        self._depth = 0  # of the thread that has the lock
        self._flag = _native.ffi.new("bool *")
        self._callback = llama_cpp.ggml_abort_callback(_native.address("beacon_is_raised"))
        llama_cpp.llama_set_abort_callback(
            ctx, self._callback, int(_native.ffi.cast("uintptr_t", self._flag))
        )
        self._stats = _native.read_stats(ctx, 0)

    @contextlib.contextmanager
    def use(self, resumes: bool = False) -> Iterator[None]:
        """Hold the context for a call.

        Parameters
        ----------
        resumes : bool
            The call goes on with one that paused, as a stream does: an `abort` in between counts.

        Raises
        ------
        RuntimeError
            Another thread is in a call.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this Llama is at work in another thread: it takes one call at a time"
            )
        try:
            if self._depth == 0 and not resumes:
                self._flag[0] = False
            self._depth += 1
            yield
        finally:
            self._depth -= 1
            self._lock.release()

    @contextlib.contextmanager
    def last_use(self) -> Iterator[None]:
        """Stop the call at work, if any, and wait for its end."""
        self.abort()
        with self._lock:
            yield

    def abort(self) -> None:
        """Stop the call at work within one batch; without one, nothing happens."""
        self._flag[0] = True

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` was called since the call at work began."""
        return bool(self._flag[0])

    def steps(self, generator: Any, resumes: bool = False) -> Generator[Any, Any, None]:
        """The generator, with the context held at each of its steps and not in between."""
        reply = None
        with contextlib.closing(generator):
            while True:
                try:
                    with self.use(resumes):
                        item = generator.send(reply)
                except StopIteration:
                    return
                reply, resumes = (yield item), True

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
        if self._lock.acquire(blocking=False):
            try:
                self._stats = _native.read_stats(self._ctx, 0)
            finally:
                self._lock.release()
        return _native.as_dict(self._stats)
