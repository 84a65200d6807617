"""``beaconkv-gguf serve``."""

import contextlib
import signal
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.text import Text
from typer.core import TyperCommand

from ..config import POLICIES, BeaconConfig
from ..fit import needs
from ..gguf_layout import read_layout
from ..server import API_KEY_VARIABLE, Server
from ..stats import MIB
from .common import (
    GpuLayers,
    ModelArgument,
    TypeK,
    TypeV,
    errors,
    fetch_default_model,
    one_line_errors,
    one_line_warnings,
    parse_budget,
    parse_type,
)

_REST = "llama-server"


class PassesRestOn(TyperCommand):
    """A command whose arguments after ``--`` are another program's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            i = args.index("--")
            args, ctx.meta[_REST] = args[:i], args[i + 1 :]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):  # NoSuchOption, of click or of typer's copy
                error.message += f" ({_REST}'s own options come after --)"  # type: ignore[attr-defined]
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- LLAMA-SERVER'S OPTIONS]"]


def serve(
    context: typer.Context,
    model: ModelArgument = None,
    n_ctx: Annotated[
        int,
        typer.Option(
            "--n-ctx",
            "--ctx-size",
            min=0,
            help="Logical context of each chat in tokens; 0: what the model names.",
        ),
    ] = 8192,
    kv_budget: Annotated[
        str,
        typer.Option(help="KV cells per layer of each chat, a share of n-ctx, 'auto' or 'off'."),
    ] = "auto",
    kv_policy: Annotated[
        str, typer.Option(help=f"What a budget keeps: {', '.join(POLICIES)}.")
    ] = BeaconConfig.policy,
    parallel: Annotated[
        int, typer.Option(min=1, help="Chats answered at the same time, each with its budget.")
    ] = 1,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")
    ] = 8080,
    api_key: Annotated[
        Optional[str],
        typer.Option(
            envvar=API_KEY_VARIABLE,
            help="What clients have to send. Other users of the machine can see it here, not in "
            "the variable.",
        ),
    ] = None,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    threads: Annotated[
        Optional[int], typer.Option(min=1, help="CPU threads. Default: llama-server's choice.")
    ] = None,
    n_gpu_layers: GpuLayers = 0,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the chat page in a browser.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the server's log.")] = False,
) -> None:
    """Serve a model: a chat page, and OpenAI's API for other programs.

    Runs llama.cpp's llama-server. What stands after -- is handed on to it, as in
    `serve model.gguf -- --temp 0.6 --alias mine`.

    Ctrl-C (SIGTERM, SIGHUP) stops it, a second one at once. The exit code is the server's: 0 where
    it was stopped.
    """
    server = None
    with one_line_errors(), one_line_warnings(), _interrupting_signals():
        try:
            path = model if model is not None else fetch_default_model()
            with contextlib.nullcontext() if verbose else errors.status("loading the model"):
                server = Server(
                    path,
                    kv_budget=parse_budget(kv_budget),
                    n_ctx=n_ctx,
                    parallel=parallel,
                    host=host,
                    port=port,
                    api_key=api_key,
                    beacon=BeaconConfig(policy=kv_policy),
                    type_k=parse_type(type_k),
                    type_v=parse_type(type_v),
                    n_gpu_layers=n_gpu_layers,
                    threads=threads,
                    args=context.meta.get(_REST, ()),
                    verbose=verbose,
                )
            with server:
                print(_summary(server), flush=True)
                if open_page:
                    webbrowser.open(server.url)
                code = _wait(server.process)
                if code != 0:
                    errors.print(
                        Text(
                            f"error: {_REST} ended with exit code {code}: {server.log_errors}",
                            style="bold red",
                        )
                    )
        except KeyboardInterrupt:
            code = server.process.wait() if server else 128 + signal.SIGINT
    raise typer.Exit(code if code >= 0 else 128 - code)


def _wait(process: subprocess.Popen[Any]) -> int:
    """Exit code of a process, when it has ended."""
    while True:
        # Windows looks for Ctrl-C in between alone
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.5 if sys.platform == "win32" else None)


@contextlib.contextmanager
def _interrupting_signals() -> Iterator[None]:
    """Signals that end a program do it as Ctrl-C does."""
    names = ("SIGTERM", "SIGHUP", "SIGBREAK")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in signals}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _summary(server: Server) -> str:
    """Where the page is, and what is served, in one line."""
    cache = server.cache
    text = f"{server.url} serves {Path(server.model_path).name}: "
    text += f"{cache.n_seq} x " if cache.n_seq > 1 else ""
    text += f"{server.n_ctx:,} tokens"
    if cache.budget is not None:
        text += f" in {cache.budget:,} cells"
    layout = read_layout(server.model_path)
    if not layout.unsure:
        text += f", {needs(layout, cache).kv / MIB:,.1f} MiB"
    return text
