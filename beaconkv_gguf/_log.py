"""What llama.cpp logs."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import llama_cpp


class ErrorLog:
    """Collects the error lines that llama.cpp logs, and passes all lines on as before, or none.

    llama.cpp has one log callback per process. Ours is in its place only while somebody collects,
    and stays alive for good: another thread may be in it.
    """

    def __init__(self) -> None:
        self._callback = llama_cpp.llama_log_callback(self._on_log)
        self._previous = llama_cpp.llama_log_callback()
        self._previous_data = ctypes.c_void_p()
        self._n_collectors = 0
        self._lock = threading.Lock()
        self._thread = threading.local()

    def _on_log(self, level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
        lines = getattr(self._thread, "lines", None)
        if lines is not None and level == 4:  # GGML_LOG_LEVEL_ERROR
            lines.append(text.decode("utf-8", "replace").strip())
        if self._previous and not getattr(self._thread, "quiet", False):
            self._previous(level, text, self._previous_data)

    @contextlib.contextmanager
    def collect(self, quiet: bool = False) -> Iterator[list[str]]:
        """Error lines of this thread, as a list that grows; `quiet`: no line is passed on."""
        lines: list[str] = []
        with self._lock:
            if self._n_collectors == 0:
                llama_cpp.llama_log_get(
                    ctypes.byref(self._previous), ctypes.byref(self._previous_data)
                )
                llama_cpp.llama_log_set(self._callback, ctypes.c_void_p())
            self._n_collectors += 1
        outer = getattr(self._thread, "lines", None), getattr(self._thread, "quiet", False)
        self._thread.lines, self._thread.quiet = lines, quiet
        try:
            yield lines
        finally:
            self._thread.lines, self._thread.quiet = outer
            with self._lock:
                self._n_collectors -= 1
                if self._n_collectors == 0:
                    llama_cpp.llama_log_set(self._previous, self._previous_data)


error_log = ErrorLog()
