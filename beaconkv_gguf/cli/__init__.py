"""Command line: ``beaconkv-gguf``. One module for each command."""

import typer

from . import info, run

app = typer.Typer(
    help="llama.cpp with a bounded KV cache for long reasoning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(run.run)
app.command()(info.info)
