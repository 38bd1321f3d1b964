"""``sprinter theory``: simulate, draw and use the papers' theorems. One module per command, ``theory_NAME.py``."""

from __future__ import annotations

import typer

from sprinter.cli import theory_flops, theory_pareto, theory_predict, theory_simulate

__all__ = ["theory"]

theory = typer.Typer(help="The papers' theorems: simulate, draw, count, and predict your pair with them.")
for name, module in (
    ("simulate", theory_simulate),
    ("pareto", theory_pareto),
    ("flops", theory_flops),
    ("predict", theory_predict),
):
    theory.command(name)(module.command)


@theory.callback(invoke_without_command=True)
def _before(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
