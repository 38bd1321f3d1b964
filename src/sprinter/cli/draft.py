"""``sprinter draft``: makes drafts for a target. One module per command, ``draft_NAME.py``."""

from __future__ import annotations

import typer

from sprinter.cli import draft_distill, draft_sizes, draft_train, draft_vocabulary

__all__ = ["draft"]

draft = typer.Typer(
    help="Make a draft for your target: distil a model, find the size that pays, train heads, cut the vocabulary."
)
draft.command("distill")(draft_distill.command)
draft.command("sizes")(draft_sizes.command)
draft.command("train")(draft_train.command)
draft.command("vocabulary")(draft_vocabulary.command)


@draft.callback(invoke_without_command=True)
def _before(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
