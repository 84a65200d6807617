"""``beaconkv-gguf fit``."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import CELL_STEP, resolve_budget
from ..fit import COMPUTE_RULE, Cache, Memory, device_memory, needs, recommend, recommend_budget
from ..gguf_layout import Layout, read_layout
from ..llama import CACHE_TYPES, cache_type
from ..stats import MIB
from .common import one_line_errors, parse_budget, parse_type

TYPE_NAMES = {number: name for name, number in CACHE_TYPES.items()}
DEFAULT_TYPES = ["f16", "q8_0", "q4_0"]
DEFAULT_BUDGETS = ["off", "auto", "5.8x"]
USUAL_CONTEXTS = [4096, 8192, 32768, 131072]


def fit(
    model: Annotated[Path, typer.Argument(help="GGUF file; of a split one, the first part.")],
    memory: Annotated[
        Optional[str],
        typer.Option(help="Memory to fit into, such as 8GiB. Default: what is free here."),
    ] = None,
    n_ctx: Annotated[
        Optional[list[int]],
        typer.Option(
            min=1,
            help="Context per sequence in tokens; repeatable. Default: usual ones up to that of "
            "the model's training.",
        ),
    ] = None,
    kv_budget: Annotated[
        Optional[list[str]],
        typer.Option(
            help="'off', 'auto', a ratio such as 5.8x, a number of cells or a share of n-ctx; "
            "repeatable. Default: off, auto and 5.8x."
        ),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, max=256, help="Sequences.")] = 1,
    type_k: Annotated[
        Optional[str], typer.Option(help="Cache type of K. Default: f16, q8_0 and q4_0.")
    ] = None,
    type_v: Annotated[
        Optional[str], typer.Option(help="Cache type of V. Default: that of K.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell from a model's metadata what its KV cache takes, and which budget fits."""
    with one_line_errors():
        room = parse_memory(memory) if memory else device_memory()
        layout = read_layout(model)
        usual = [n for n in USUAL_CONTEXTS if n < layout.n_ctx_train]
        caches = [
            Cache(
                n,
                type_k=cache_type("type_k", parse_type(type_k or name)) or 0,
                type_v=cache_type("type_v", parse_type(type_v or name)) or 0,
                n_seq=parallel,
            )
            for n in sorted(set(n_ctx or [*usual, layout.n_ctx_train]))
            for name in ([type_k] if type_k else DEFAULT_TYPES)
        ]
        usable = [] if layout.unsure else [cache for cache in caches if cache.fits_heads(layout)]
        best = recommend(layout, room, usable)
        report = {
            "model": str(model),
            "architecture": layout.arch,
            "n_ctx_train": layout.n_ctx_train,
            "layers": {
                "all": layout.n_layer,
                "full": len(layout.full),
                "swa": len(layout.swa),
                "recurrent": layout.n_recurrent,
            },
            "bytes_weights": layout.weights,
            "memory": {"bytes": room.n_bytes, "source": room.source},
            "declined": layout.declined or None,
            "unsure": layout.unsure or None,
            "rows": _rows(layout, room, usable, kv_budget),
            "recommended": _choice(best) if best else None,
            "notes": _notes(layout, [cache for cache in caches if cache not in usable]),
        }
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, layout)


def parse_memory(text: str) -> Memory:
    """Memory of a text such as ``8GiB``.

    Raises
    ------
    ValueError
        It is no positive number with a unit: B, KiB, MiB, GiB, TiB, KB, MB, GB or TB.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) *(?:([kmgt])(i?))?b", text.strip(), re.IGNORECASE)
    n_bytes = 0
    if match:
        power = "kmgt".index(match[2].lower()) + 1 if match[2] else 0
        n_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if n_bytes <= 0:
        raise ValueError(f"memory {text!r} must be a positive number with a unit, such as 8GiB")
    return Memory(n_bytes, "as given")


def _budget(text: str, cache: Cache, layout: Layout, room: Memory) -> Optional[int]:
    """Cells of a budget given as text; ValueError if it is not possible."""
    if text == "auto":
        return recommend_budget(cache, layout, room)
    ratio = re.fullmatch(r"(\d+\.?\d*)x", text)
    if ratio and float(ratio[1]) >= 1:
        cells = int(cache.n_ctx / float(ratio[1])) // CELL_STEP * CELL_STEP
        return resolve_budget(cells, cache.n_ctx, cache.beacon)
    return resolve_budget(parse_budget(text), cache.n_ctx, cache.beacon)


def _choice(cache: Cache) -> dict[str, Any]:
    return {
        "n_ctx": cache.n_ctx,
        "kv_budget": cache.budget,
        "type_k": TYPE_NAMES[cache.type_k],
        "type_v": TYPE_NAMES[cache.type_v],
        "parallel": cache.n_seq,
    }


def _rows(
    layout: Layout, room: Memory, caches: list[Cache], budgets: Optional[list[str]]
) -> list[dict[str, Any]]:
    """What each of `caches` takes under each budget; those of as many cells only once."""
    rows = {}
    for cache in caches:
        for text in ["off"] if layout.declined else budgets or DEFAULT_BUDGETS:
            try:
                choice = replace(cache, budget=_budget(text, cache, layout, room))
            except ValueError:
                if budgets and text != "auto":
                    raise
                continue
            if choice not in rows:
                needed = needs(layout, choice)
                rows[choice] = {
                    **_choice(choice),
                    "asked": text,
                    **{f"bytes_{kind}": n for kind, n in asdict(needed).items()},
                    "bytes_kv": needed.kv,
                    "bytes_needed": needed.total,
                    "fits": needed.total <= room.n_bytes,
                }
    return list(rows.values())


def _notes(layout: Layout, left_out: list[Cache]) -> list[str]:
    """What the numbers alone do not say."""
    notes = [] if layout.unsure else [f"Compute buffers: {COMPUTE_RULE}."]
    if layout.unsure:
        notes.append(f"The sizes of its caches can't be told: {layout.unsure}.")
    elif left_out:
        types = dict.fromkeys(f"{TYPE_NAMES[c.type_k]}/{TYPE_NAMES[c.type_v]}" for c in left_out)
        notes.append(f"Left out, as heads are no whole blocks of them: {', '.join(types)}.")
    if layout.swa:
        notes.append(
            "Sliding-window layers hold their window under a budget; without one they hold n_ctx "
            "cells unless swa_full=False is passed."
        )
    if layout.declined:
        notes.append(f"{layout.arch} takes no KV budget: {layout.declined}.")
    return notes


def _print(report: dict[str, Any], layout: Layout) -> None:
    console = Console(highlight=False)
    best, room = report["recommended"], report["memory"]
    kinds = {
        "full attention": len(layout.full),
        f"sliding window of {layout.n_swa:,}": len(layout.swa),
        "recurrent": layout.n_recurrent,
    }
    counts = ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n) or "not known"
    weights, free = _mib(layout.weights), _mib(room["bytes"])
    name = Path(report["model"]).name
    console.print(Text(f"{name}: {layout.arch}, {layout.n_layer} layers", style="bold"))
    console.print(Text(f"Caches by layers: {counts}"))
    console.print(Text(f"Weights {weights} MiB; memory {free} MiB ({room['source']})"))
    if report["rows"]:
        console.print(_table(report["rows"]))
    for note in report["notes"]:
        console.print(Text(note))
    if best:
        keys = ["n_ctx", "kv_budget"]
        if {best["type_k"], best["type_v"]} != {"f16"}:
            keys += ["type_k", "type_v"]
        advice = "Recommended: " + ", ".join(f"{key}={best[key]!r}" for key in keys)
        console.print(Text(advice, style="bold green"))
    elif not layout.unsure:
        advice = "Nothing fits: take a smaller model or context, or more memory."
        console.print(Text(advice, style="bold red"))


def _table(rows: list[dict[str, Any]]) -> Table:
    caption = "Caches and what is needed in MiB; needed: with weights and buffers"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    lines = [_cells(row) for row in rows]
    names = [name for name in lines[0] if any(line[name] != "0.0" for line in lines)]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for i, (row, line) in enumerate(zip(rows, lines)):
        last = i + 1 == len(rows) or rows[i + 1]["n_ctx"] != row["n_ctx"]
        style = "green" if row["fits"] else "red"
        table.add_row(*(line[name] for name in names), style=style, end_section=last)
    return table


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """A row of the table by column."""
    budget = "off" if row["kv_budget"] is None else f"{row['kv_budget']:,}"
    exact = row["asked"] in ("off", str(row["kv_budget"]))
    return {
        "context": f"{row['n_ctx']:,}",
        "K/V": "/".join(dict.fromkeys((row["type_k"], row["type_v"]))),
        "budget": budget if exact else f"{row['asked']}: {budget}",
        "full": _mib(row["bytes_k"] + row["bytes_v"]),
        "beacons": _mib(row["bytes_ring"] + row["bytes_beacon"]),
        "window": _mib(row["bytes_swa"]),
        "recurrent": _mib(row["bytes_recurrent"]),
        "compute": _mib(row["bytes_compute"]),
        "needed": _mib(row["bytes_needed"]),
        "fits": "yes" if row["fits"] else "no",
    }


def _mib(n_bytes: int) -> str:
    mib = n_bytes / MIB
    return f"{mib:,.1f}" if mib < 1000 else f"{mib:,.0f}"
