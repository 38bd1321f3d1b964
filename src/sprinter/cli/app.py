"""The typer application: its commands and the options before a command."""

from __future__ import annotations

from typing import Annotated

import typer

from sprinter import __version__
from sprinter.cli.bench import bench
from sprinter.cli.chat import chat
from sprinter.cli.convert import convert
from sprinter.cli.demo_command import demo
from sprinter.cli.doctor import doctor
from sprinter.cli.draft import draft
from sprinter.cli.gate import gate
from sprinter.cli.generate import generate
from sprinter.cli.methods import methods
from sprinter.cli.serve import serve
from sprinter.cli.theory import theory
from sprinter.cli.tune import tune

__all__ = ["app"]

app = typer.Typer(
    name="sprinter",
    help="Speculative decoding with a dial: faster tokens, and a measure of how far they drift from the target model.",
    epilog="Exit status: 0 done, 2 your mistake, 1 anything else. SPRINTER_DEBUG=1 shows tracebacks.",
    rich_markup_mode=None,  # its columns cut names of options off at 80 characters
    pretty_exceptions_enable=False,  # errors are shown by sprinter.cli.running
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, serve, methods, doctor, demo, tune):
    app.command()(command)
app.add_typer(gate, name="gate")
app.add_typer(draft, name="draft")
app.add_typer(theory, name="theory")
app.add_typer(bench, name="bench")
app.add_typer(convert, name="convert")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"sprinter {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _before(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
