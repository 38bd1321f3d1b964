"""``sprinter draft vocabulary``: the tokens that a draft needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sprinter.cli.draft_common import (
    DataOption,
    FieldOption,
    JsonOption,
    LimitOption,
    MoreOption,
    SplitOption,
)
from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.pages import console, print_json

__all__ = ["command"]


@loads(
    without=(
        "draft",
        "draft_revision",
        "draft_vocabulary",
        "draft_dtype",
        "draft_runner",
        "gate",
        "head",
        "compile",
        "profile",
    )
)
def command(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="File to write.", show_default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    size: Annotated[int, typer.Option(help="Number of tokens.")] = 32768,
    field: FieldOption = None,
    split: SplitOption = "lines",
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """Choose the tokens that a draft may write, the most frequent ones of your texts, for --draft-vocabulary.

    Where a vocabulary is large, its output layer is a large part of a small draft. Exact methods stay exact.
    """
    from sprinter.training.drafts.vocabulary import choose_vocabulary

    models = load(loading).models
    facts = choose_vocabulary(
        models, [*data, *(more or ())], size, out, field=field, split=split, limit=limit
    )
    if json:
        print_json({"out": str(out), **facts})
        return
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, title=f"{facts['texts']} texts, one in ten apart", title_justify="left"
    )
    table.add_column("tokens", justify="right")
    table.add_column("covered, of the texts apart", justify="right")
    for count, share in facts["covered"].items():
        table.add_row(f"{int(count):,}", f"{share:.2%}")
    console().print(table)
    console().print(f"saved in {out}; use it with --draft-vocabulary {out}")
