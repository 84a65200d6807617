"""Command line: ``beaconkv-gguf``. One module for each command."""

import typer

from . import bench, chat, fidelity, fit, info, run, serve

app = typer.Typer(
    help="llama.cpp with a bounded KV cache for long reasoning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(run.run)
app.command()(chat.chat)
app.command(cls=serve.PassesRestOn)(serve.serve)
app.command()(fidelity.fidelity)
app.command()(bench.bench)
app.command()(fit.fit)
app.command()(info.info)
