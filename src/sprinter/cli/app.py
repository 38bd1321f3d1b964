"""The typer application: its commands and the options before a command."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from sprinter import __version__
from sprinter.cli.signature import CommandGroup, LaterCommands, group, option, show_help

__all__ = ["app"]

_ABOUT = {
    "generate": "Generate a text; show the origin of each token and the statistics.",
    "chat": "Talk to a chat model; show the origin of each token, and what each answer cost.",
    "serve": "Serve the pair over HTTP, with OpenAI's interface: completions, chat completions, models.",
    "methods": "List the decoding methods, their rules, and whether they preserve the target distribution.",
    "doctor": (
        "Check the installation: versions, devices, models, runners, and a short generation; or probe your own texts."
    ),
    "advise": "Ask three questions, then print the command line for your case, and the reason for it.",
    "demo": "Compare plain decoding, an exact method and a lossy one with drift of at most 0.1 (well under a minute).",
    "eval": "Evaluate a pair on tasks of lm-evaluation-harness: accuracy by method, and what it cost.",
    "tune": "Find the fastest method within a budget on drift, on your prompts and this machine; write a profile.",
    "gate": "Make a gate for your pair and your texts: label, train, evaluate.",
    "draft": "Make a draft for your target: distil a model, find its best size, train heads, reduce the vocabulary.",
    "theory": "The papers' theorems: simulate them, draw them, and predict your pair with them.",
    "bench": "Measure methods and other engines on suites of prompts: speed, drift, quality; one report.",
    "reproduce": "Run a paper's protocol on a pair: its tables compared with the paper's, and a verdict on each claim.",
    "convert": "Write a model in another format.",
}
"""The commands, each in the module of its name: a function of this name, or a group, whose functions are in GROUP."""


def _made(name: str) -> Any:
    """The function of a command, or the group of this name."""
    module = import_module(f"sprinter.cli.{name}")
    if (commands := getattr(module, "GROUP", None)) is None:
        return getattr(module, name)
    return group(name, _ABOUT[name], commands)


class _AllCommands(CommandGroup):
    """All commands, each imported when it is needed: --help needs none."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**given, "commands": LaterCommands(_ABOUT, _made)})


app = typer.Typer(
    name="sprinter",
    cls=_AllCommands,
    help="Speculative decoding with a dial: faster tokens, and a measure of how far they drift from the target model.",
    epilog="Exit status: 0 done, 2 a usage error, 1 anything else. SPRINTER_DEBUG=1 shows tracebacks.",
    rich_markup_mode=None,  # its columns cut names of options off at 80 characters
    pretty_exceptions_enable=False,  # errors are shown by sprinter.cli.running
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"sprinter {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _before(
    context: typer.Context,
    version: Annotated[
        bool, option("Print the version and exit.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    show_help(context)
