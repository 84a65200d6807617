"""``beaconkv-gguf fidelity``."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .. import fidelity as library
from .._log import error_log
from ..config import POLICIES, BeaconConfig, resolve_budget
from ..llama import cache_type
from ..plots import check_plot
from ..traces import Trace, synthetic
from .common import (
    GpuLayers,
    ModelArgument,
    Threads,
    TypeK,
    TypeV,
    errors,
    fetch_default_model,
    one_line_errors,
    parse_budget,
    parse_type,
)

WORDS_PER_TOKEN = 0.75  # more than any vocabulary needs: the text is cut to its tokens


def fidelity(
    model: ModelArgument = None,
    text: Annotated[
        str,
        typer.Option(
            help="A file; 'synthetic:SEED', a made-up problem with a plan and facts that later "
            "steps go back to; or 'self:SEED', what the model writes about such a problem."
        ),
    ] = "synthetic:1",
    tokens: Annotated[int, typer.Option(min=64, help="Length of the text in tokens.")] = 4096,
    kv_budget: Annotated[
        Optional[list[str]],
        typer.Option(
            help="Cells, a share of the text, or '5.8x': that many times less memory than a full "
            "cache, everything included. Repeatable. Default: 4x and 5.8x."
        ),
    ] = None,
    policy: Annotated[
        Optional[list[str]],
        typer.Option(
            help=f"{', '.join(POLICIES)}; with settings of its own as in "
            "'beacon,beacon_share=0'. Repeatable. Default: beacon and recent."
        ),
    ] = None,
    set_: Annotated[
        Optional[list[str]],
        typer.Option("--set", help="NAME=VALUE of BeaconConfig, for every policy; repeatable."),
    ] = None,
    facts: Annotated[int, typer.Option(min=1, help="Facts of a synthetic text.")] = 26,
    steps: Annotated[int, typer.Option(min=1, max=12, help="Its plan items.")] = 12,
    pin: Annotated[
        bool, typer.Option("--pin", help="Pin the prompt; otherwise nothing but the sinks is.")
    ] = False,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per batch.")] = 32,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    threads: Threads = None,
    n_gpu_layers: GpuLayers = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout, no table.")] = False,
    plot: Annotated[
        Optional[Path], typer.Option(help="Draw KL against the budget, and what was held when.")
    ] = None,
) -> None:
    """Measure what a budget costs: the same text through the full cache and through bounded ones.

    Numbers are over the tokens after the first eviction. KL is the divergence of the next-token
    distribution from the full cache's, in nats; top-1 the share of tokens where both prefer the
    same. Revisits are the tokens that need what stands further back than the budget.
    """
    policies = policy or ["beacon", "recent"]
    budgets = kv_budget or ["4x", "5.8x"]
    with one_line_errors():
        if plot is not None:
            check_plot(plot)
        configs = [_config(name, set_ or []) for name in policies]
        context: dict[str, Any] = {
            "n_threads": threads,
            "type_k": cache_type("type_k", parse_type(type_k)),
            "type_v": cache_type("type_v", parse_type(type_v)),
        }
        path = model if model is not None else fetch_default_model()
        with (
            error_log.collect(quiet=True),
            library.Model(path, n_gpu_layers) as loaded,
            _progress() as bar,
        ):
            n_ctx = -(-tokens // 256) * 256
            cases = [
                library.Case(_cells(budget, loaded, n_ctx, config, context), config, name)
                for budget in budgets
                for name, config in zip(policies, configs)
            ]
            library.check_length(tokens, cases, chunk)
            words = _text(text, loaded, path, tokens, facts, steps, bar, threads, n_gpu_layers)
            library.check_length(len(words.tokens), cases, chunk)
            if not words.kinds:
                reach = max(case.budget for case in cases)
                with _task(bar, "attention of the full cache") as report:
                    words = library.with_far_tokens(words, loaded, reach, report, **context)
            with _task(bar, f"{len(words.tokens):,} tokens through {1 + len(cases)} caches") as go:
                results = library.compare(
                    loaded,
                    words,
                    cases,
                    chunk=chunk,
                    pin=pin,
                    heat=plot is not None,
                    progress=go,
                    **context,
                )
        if plot is not None:
            library.plot(results, f"{path.stem}, {words.name}, {len(words.tokens):,} tokens", plot)
    if as_json:
        print(
            json.dumps(
                {
                    "model": path.name,
                    "text": words.name,
                    "n_tokens": len(words.tokens),
                    "n_prompt": words.n_prompt,
                    "pinned": pin,
                    "results": [result.as_dict() for result in results],
                },
                indent=1,
            )
        )
    else:
        Console().print(_table(results, f"{path.name}, {words.name}, {len(words.tokens):,} tokens"))


def _config(policy: str, settings: Sequence[str]) -> BeaconConfig:
    """Settings of ``POLICY[,NAME=VALUE..]``, its own after those for all."""
    defaults = dataclasses.asdict(BeaconConfig())
    del defaults["policy"]
    policy, *own = policy.split(",")
    values: dict[str, Any] = {"policy": policy}
    for setting in [*settings, *own]:
        name, _, value = setting.partition("=")
        if name not in defaults:
            raise ValueError(f"setting {setting!r}: allowed are {', '.join(defaults)}")
        try:
            values[name] = type(defaults[name])(value)
        except ValueError:
            raise ValueError(f"setting {setting!r}: {value!r} is no number") from None
    return BeaconConfig(**values)


def _cells(
    text: str, model: library.Model, n_ctx: int, config: BeaconConfig, context: dict[str, Any]
) -> int:
    if text.endswith("x"):
        try:
            ratio = float(text[:-1])
        except ValueError:
            ratio = 0.0
        if not ratio > 1.0:
            raise ValueError(f"--kv-budget {text}: a ratio is a number above 1, as in 5.8x")
        return library.budget_for_ratio(model, n_ctx, ratio, config, **context)
    cells = resolve_budget(parse_budget(text), n_ctx, config)
    if cells is None:
        raise ValueError(f"--kv-budget {text} is no budget for a text of this length")
    return cells


def _text(
    source: str,
    model: library.Model,
    path: Path,
    n_tokens: int,
    facts: int,
    steps: int,
    bar: Progress,
    threads: Optional[int],
    n_gpu_layers: int,
) -> library.Text:
    kind, _, seed = source.partition(":")
    if kind in ("synthetic", "self") and seed.isdigit():
        if kind == "self":
            with _task(bar, f"the model writes {n_tokens:,} tokens") as report:
                return library.Text.written(
                    path,
                    n_tokens,
                    int(seed),
                    progress=report,
                    n_threads=threads,
                    n_gpu_layers=n_gpu_layers,
                )
        trace = synthetic(int(seed), int(n_tokens * WORDS_PER_TOKEN), facts, steps)
    elif Path(source).is_file():
        trace = Trace(Path(source).name, Path(source).read_text(encoding="utf-8"))
    else:
        raise ValueError(
            f"--text {source}: no such file, and not 'synthetic:SEED' or 'self:SEED' either"
        )
    return library.Text.of(trace, model, n_tokens)


@contextmanager
def _progress() -> Iterator[Progress]:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as bar:
        yield bar


@contextmanager
def _task(bar: Progress, what: str) -> Iterator[library.Progress]:
    task = bar.add_task(what, total=None)
    yield lambda done, total: bar.update(task, completed=done, total=total)
    bar.remove_task(task)


def _table(results: Sequence[library.Result], title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, header_style="cyan")
    for name in ("policy", "cells", "less", "KL", "p95", "p99", "top-1", "perplexity"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    kinds = sorted({kind for result in results for kind in result.revisits})
    for kind in kinds:
        table.add_column(kind, justify="right", no_wrap=True)
    if kinds:
        table.caption = (
            f"{', '.join(kinds)}: top-1 at the tokens that look back / how many they are"
        )
    for result in results:
        table.add_row(
            result.policy,
            f"{result.budget:,}",
            f"{result.ratio:.1f}x",
            f"{result.kl:.3f}",
            f"{result.kl_p95:.2f}",
            f"{result.kl_p99:.2f}",
            f"{result.top1:.1%}",
            f"x{result.perplexity_ratio:.3f}",
            *(_part(result.revisits.get(kind)) for kind in kinds),
        )
    return table


def _part(part: Optional[library.Part]) -> str:
    return "" if part is None else f"{part.top1:.0%}/{part.n}"
