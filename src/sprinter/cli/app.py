"""The typer application: its commands and the options before a command."""

from __future__ import annotations

from typing import Annotated

import typer

from sprinter import __version__
from sprinter.cli import (
    bench,
    bench_results,
    convert,
    draft_distill,
    draft_sizes,
    draft_train,
    draft_vocabulary,
    gate_label,
    gate_mine,
    gate_roc,
    gate_train,
    theory_flops,
    theory_pareto,
    theory_predict,
    theory_simulate,
)
from sprinter.cli.chat import chat
from sprinter.cli.demo import demo
from sprinter.cli.doctor import doctor
from sprinter.cli.generate import generate
from sprinter.cli.methods import methods
from sprinter.cli.serve import serve
from sprinter.cli.signature import CommandGroup, ListedCommand, group, listed, option, show_help
from sprinter.cli.tune import tune

__all__ = ["app"]

app = typer.Typer(
    name="sprinter",
    cls=CommandGroup,
    help="Speculative decoding with a dial: faster tokens, and a measure of how far they drift from the target model.",
    epilog="Exit status: 0 done, 2 your mistake, 1 anything else. SPRINTER_DEBUG=1 shows tracebacks.",
    rich_markup_mode=None,  # its columns cut names of options off at 80 characters
    pretty_exceptions_enable=False,  # errors are shown by sprinter.cli.running
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, serve, methods, doctor, demo, tune):
    app.command(cls=ListedCommand)(listed(command))
for each in (
    group(
        "gate", "Make a gate for your pair and your texts: label, train, evaluate.",
        label=gate_label.command, mine=gate_mine.command, train=gate_train.command, roc=gate_roc.command,
    ),
    group(
        "draft",
        "Make a draft for your target: distil a model, find the size that pays, train heads, cut the vocabulary.",
        distill=draft_distill.command, sizes=draft_sizes.command, train=draft_train.command,
        vocabulary=draft_vocabulary.command,
    ),
    group(
        "theory", "The papers' theorems: simulate, draw, count, and predict your pair with them.",
        simulate=theory_simulate.command, pareto=theory_pareto.command, flops=theory_flops.command,
        predict=theory_predict.command,
    ),
    group(
        "bench", "Measure methods and other engines on suites of prompts: speed, drift, quality; one report.",
        bench.run, compare=bench_results.compare, report=bench_results.report, list=bench_results.names,
    ),
    group("convert", "Write a model in another format.", gguf=convert.gguf),
):  # fmt: skip
    app.add_typer(each)


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
