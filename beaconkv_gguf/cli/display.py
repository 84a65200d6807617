"""What ``beaconkv-gguf run`` shows while a model writes."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..stats import MIB, KVStats


class Display(Protocol):
    """Takes the text piece by piece; a context manager, so that a terminal is always restored."""

    def update(self, text: str, stats: KVStats, rate: float) -> None:
        """Show a piece of text; `rate` is in tokens per second."""

    def finish(self, summary: str) -> None:
        """Show the last lines; also after Ctrl-C."""


class PlainDisplay(contextlib.AbstractContextManager["PlainDisplay"]):
    """Text to stdout, and every two seconds a line of statistics to stderr."""

    interval = 2.0

    def __init__(self) -> None:
        self._due = time.monotonic() + self.interval

    def __exit__(self, *exc_info: object) -> None:
        sys.stdout.flush()

    def update(self, text: str, stats: KVStats, rate: float) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self.interval
            print(f"{stats}, {rate:.1f} tokens/s", file=sys.stderr, flush=True)

    def finish(self, summary: str) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()
        print(summary, file=sys.stderr, flush=True)


class TerminalDisplay(contextlib.AbstractContextManager["TerminalDisplay"]):
    """Text that scrolls above a panel of statistics."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._line = ""  # what was written since the last line break

    def __enter__(self) -> TerminalDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def update(self, text: str, stats: KVStats, rate: float) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._console.print(Text(line))
        width = self._console.width
        while len(self._line) >= width:  # wrap at a word, as far as there is one
            cut = self._line.rfind(" ", 1, width)
            cut = cut if cut > 0 else width
            self._console.print(Text(self._line[:cut]))
            self._line = self._line[cut:].lstrip(" ")
        self._live.update(Group(Text(self._line), panel(stats, rate)))

    def finish(self, summary: str) -> None:
        self._live.update(Text(self._line))
        self._live.stop()
        if self._line:
            self._console.print(Text(self._line))
        self._console.print(Panel(Text(summary), title="beaconkv", border_style="cyan"))


def panel(stats: KVStats, rate: float) -> Panel:
    """Bars of the logical context, the cells and the memory."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="cyan")
    grid.add_column(width=24)
    grid.add_column()

    def row(name: str, done: float, total: float, text: str) -> None:
        grid.add_row(name, ProgressBar(total=total, completed=done, width=24), text)

    cells = stats.budget or stats.n_ctx_seq
    held, full = stats.bytes_allocated / MIB, stats.bytes_full / MIB
    row("tokens", stats.n_logical, stats.n_ctx_seq, f"{stats.n_logical:,} of {stats.n_ctx_seq:,}")
    row("KV cells", stats.n_held, cells, f"{stats.n_held:,} of {cells:,} in {stats.n_layer} layers")
    row("memory", held, full, f"{held:.1f} MiB held; a full cache takes {full:.1f} MiB")
    grid.add_row(
        "compactions",
        str(stats.n_compact),
        f"{stats.n_evicted:,} tokens evicted, {stats.seconds_compact:.2f} s; {rate:.1f} tokens/s",
    )
    return Panel(grid, title="beaconkv", border_style="cyan", expand=False)
