"""``beaconkv-gguf bench``."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .. import bench as library
from ..plots import check_plot
from ..stats import MIB
from .common import (
    GpuLayers,
    ModelArgument,
    Threads,
    TypeK,
    TypeV,
    errors,
    fetch_default_model,
    one_line_errors,
    one_line_warnings,
    parse_budget,
    parse_type,
)


def bench(
    model: ModelArgument = None,
    depth: Annotated[
        Optional[list[int]],
        typer.Option(min=1, help="Tokens already in the context; repeatable. Default: 4096."),
    ] = None,
    kv_budget: Annotated[
        Optional[list[str]],
        typer.Option(
            help="KV cells per layer and sequence, a share of n-ctx, or 'auto'; repeatable. "
            "Default: auto."
        ),
    ] = None,
    parallel: Annotated[
        Optional[list[int]],
        typer.Option(
            min=1, help="Sequences decoded together, each with its budget; repeatable. Default: 1."
        ),
    ] = None,
    n_ctx: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            help="Logical context per sequence in tokens, for the bytes and the shares. "
            "Default: the largest depth and all rounds after it.",
        ),
    ] = None,
    tokens: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            help="Tokens decoded per measurement; take multiples of the compaction window (128), "
            "so that each has as many compactions. Default: two windows.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each case.")] = 3,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    threads: Threads = None,
    n_gpu_layers: GpuLayers = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the results as JSON to stdout, and no tables.")
    ] = False,
    plot: Annotated[
        Optional[Path],
        typer.Option(help="Draw decode speed over depth into this PNG file. Needs matplotlib."),
    ] = None,
) -> None:
    """Compare memory and speed of KV budgets with the full cache.

    The caches are measured in alternating rounds, so that a machine whose speed
    drifts hits them alike. Where a budget can't return to the depth, all caches
    begin the next round where the last one ended.
    """
    budgets = [parse_budget(text) for text in kv_budget or ["auto"]]
    if None in budgets:
        raise typer.BadParameter("the full cache is always measured: leave --kv-budget off out")
    try:
        with one_line_errors(), one_line_warnings():
            if plot is not None:
                check_plot(plot)
            path = model if model is not None else fetch_default_model()
            with _progress() as progress:
                report = library.bench(
                    path,
                    depths=depth or [4096],
                    kv_budgets=budgets,
                    parallels=parallel or [1],
                    n_ctx=n_ctx,
                    tokens=tokens,
                    rounds=rounds,
                    type_k=parse_type(type_k),
                    type_v=parse_type(type_v),
                    threads=threads,
                    n_gpu_layers=n_gpu_layers,
                    progress=progress,
                )
            if as_json:
                json.dump(report.as_dict(), sys.stdout, indent=2)
                print()
            else:
                console = Console(highlight=False)
                for n in dict.fromkeys(case.parallel for case in report.cases):
                    console.print(_speed_table(report, n))
                console.print(_memory_table(report))
            if plot is not None:
                library.plot(report, plot)
                errors.print(Text(f"wrote {plot}"))
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(130) from None


@contextmanager
def _progress() -> Iterator[library.Progress]:
    """A bar with the time left; drawn seldom, so that it takes no time from the measurement."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=errors,
        transient=True,
        refresh_per_second=1,
        speed_estimate_period=600,
        disable=not errors.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None)

        def report(what: str, done: float, total: float) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report


def _spread(samples: library.Samples, scale: float = 1.0) -> str:
    median, low, high = (x * scale for x in (samples.median, samples.low, samples.high))
    digits = 0 if median >= 100 else 1
    return f"{median:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def _cells(kv_budget: Optional[int]) -> str:
    return "full" if kv_budget is None else f"{kv_budget:,}"


def _table(title: str, caption: str, *columns: str) -> Table:
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.title_justify = table.caption_justify = "left"
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _speed_table(report: library.Report, parallel: int) -> Table:
    sequences = "1 sequence" if parallel == 1 else f"{parallel} sequences"
    table = _table(
        f"{report.model} ({report.description}), {sequences}, threads: {report.threads}",
        f"tokens/s: median (min..max) of {report.rounds} x {report.tokens} decoded tokens"
        f"{'' if parallel == 1 else ' per sequence'};\n"
        "x: times the full cache, median of rounds; compacting: % of decode time",
        *("depth", "cells", "prompt", "x", "decode", "x", "compacting"),
    )
    for case in report.cases:
        if case.parallel != parallel:
            continue
        is_full = case.kv_budget is None
        table.add_row(
            f"{case.depth:,}",
            _cells(case.kv_budget),
            _spread(case.prompt),
            "" if is_full else f"{case.prompt_ratio:.2f}",
            _spread(case.decode),
            "" if is_full else f"{case.decode_ratio:.2f}",
            "" if is_full else _spread(case.compact_share, 100),
        )
    return table


def _memory_table(report: library.Report) -> Table:
    table = _table(
        f"MiB of a context of {report.n_ctx:,} tokens per sequence, "
        f"K {report.type_k}, V {report.type_v}",
        "queries: query rows and centroids; other: other caches;\n"
        "host: tables in host memory; x: times smaller than full;\n"
        "RSS: growth of the process by all this and its buffers",
        *("seqs", "cells", "K", "V", "queries", "other", "host", "total", "x", "RSS"),
    )
    full = 0
    for memory in report.memory:
        is_full = memory.kv_budget is None
        full = memory.bytes_total if is_full else full
        sizes = (
            memory.bytes_k,
            memory.bytes_v,
            memory.bytes_ring + memory.bytes_beacon,
            memory.bytes_other,
            memory.bytes_host,
            memory.bytes_total,
        )
        table.add_row(
            str(memory.parallel),
            _cells(memory.kv_budget),
            *(f"{size / MIB:.1f}" for size in sizes),
            "" if is_full else f"{full / memory.bytes_total:.2f}",
            "?" if memory.rss_growth is None else f"{memory.rss_growth / MIB:.1f}",
        )
    return table
