"""``sprinter draft vocabulary``: the tokens that a draft needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import ON_TARGET, READING, DataOption, JsonOption, MoreOption
from sprinter.cli.pages import console, print_json, print_table
from sprinter.cli.signature import option, takes
from sprinter.training.sources import ReadingSettings

__all__ = ["command"]


@loads(*ON_TARGET, "profile")
@takes("reading", ReadingSettings, without=("chat", "system"), panels={"Texts": READING})
def command(
    data: DataOption,
    out: Annotated[Path, option("File to write.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    size: Annotated[int, option("Number of tokens.")] = 32768,
    reading: ReadingSettings = ReadingSettings(),
    json: JsonOption = False,
) -> None:
    """Choose the tokens that a draft may write, the most frequent ones of your texts, for --draft-vocabulary.

    Where a vocabulary is large, its output layer is a large part of a small draft. Exact methods stay exact.
    """
    from sprinter.training.drafts.vocabulary import choose_vocabulary

    models = load(loading).models
    facts = choose_vocabulary(
        models,
        [*data, *(more or ())],
        size,
        out,
        field=reading.field,
        split=reading.split,
        limit=reading.limit,
    )
    if json:
        print_json({"out": str(out), **facts})
        return
    rows = ((f"{int(count):,}", f"{share:.2%}") for count, share in facts["covered"].items())
    title = f"{facts['texts']} texts, one in ten apart"
    print_table(("tokens", "covered, of the texts apart"), rows, title=title, left=0)
    console().print(f"saved in {out}; use it with --draft-vocabulary {out}")
