"""``sprinter gate``: label texts, train a gate on the labels, evaluate it. One module per command, ``gate_NAME.py``."""

from __future__ import annotations

import typer

from sprinter.cli import gate_label, gate_mine, gate_roc, gate_train

__all__ = ["gate"]

gate = typer.Typer(help="Make a gate for your pair and your texts: label, train, evaluate.")
for name, module in (
    ("label", gate_label),
    ("mine", gate_mine),
    ("train", gate_train),
    ("roc", gate_roc),
):
    gate.command(name)(module.command)


@gate.callback(invoke_without_command=True)
def _before(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
