"""``sprinter gate mine``: finds tokens of the draft that leave the target's answers as they are."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import READING, JsonOption
from sprinter.cli.pages import print_json
from sprinter.cli.progress import Progress
from sprinter.cli.signature import option, takes
from sprinter.training.sources import ReadingSettings

if TYPE_CHECKING:
    from sprinter.training.examples import Example

__all__ = ["command"]


@loads("draft_vocabulary", "gate", "head", "compile", "profile")
@takes("reading", ReadingSettings, without=("split",), panels={"Texts": READING})
def command(
    data: Annotated[
        list[str],
        option(
            "Prompts whose answers can be compared: records with a prompt, question or messages; may be repeated.",
            default=False,
        ),
    ],
    out: Annotated[Path, option("Directory for the mined tokens.", default=False)],
    loading: Loading = Loading(),
    compare: Annotated[
        Literal["number", "choice"],
        option("What of two answers must agree: the final number (as in GSM8K), or the chosen letter."),
    ] = "number",
    reading: ReadingSettings = ReadingSettings(),
    new_tokens: Annotated[int, option("Maximum length of an answer.", "--max-new-tokens")] = 256,
    method: Annotated[
        str, option("Lossless method that writes the answers.", "--method", "-m")
    ] = "autoregressive",
    rows: Annotated[int, option("Prompts at a time; each group of them is a file.")] = 16,
    share: Annotated[float, option("Share of the tokens that differ which is tried.")] = 1.0,
    seed: Annotated[int, option("Of the share.")] = 0,
    json: JsonOption = False,
) -> None:
    """Put the draft's token where it differs from the target's greedy answer, and see whether the answer stays.

    'sprinter gate train --head judge' and '--head diversed' learn from it. To continue a run that was interrupted, give
    the same command again.
    """
    from sprinter.bench.quality.checks import final_number, first_choice
    from sprinter.training.mine import MineSettings, mine, read_mined

    settings = MineSettings(compare, new_tokens, method, rows, share, seed, reading.limit)
    examples = _examples(data, reading)
    pair = load(loading)
    began = time.perf_counter()
    with Progress() as progress:
        mine(
            pair, examples, final_number if compare == "number" else first_choice, out, settings,
            lambda done, wanted, tried: progress(f"{tried} tokens tried", done, wanted),
        )  # fmt: skip
    mined = read_mined(out)
    facts = {
        "out": str(out), "prompts": mined.info["prompts"], "skipped": mined.info["skipped"],
        "answered": mined.info["answered"], "tokens": len(mined.same),
        "harmless": round(float(mined.same.double().mean()), 4) if len(mined.same) else None,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    if json:
        print_json(facts)
        return
    skipped = "".join(
        f", {count} skipped ({why.replace('_', ' ')})" for why, count in facts["skipped"].items()
    )
    counts = f"{facts['prompts']} prompts{skipped}, {facts['answered']} ended with a {compare}"
    if len(mined.same):
        print(f"{counts}: {facts['tokens']} tokens tried, {facts['harmless']:.1%} harmless; saved in {out}")
    else:
        print(f"{counts}, no token to try: give more prompts, or more --max-new-tokens")


def _examples(data: list[str], reading: ReadingSettings) -> list[Example]:
    from sprinter.training.examples import Example, read_examples

    found = read_examples(data, reading.field, chat=reading.chat, system=reading.system)
    return [one if isinstance(one, Example) else Example(one, None, "") for one in found]
