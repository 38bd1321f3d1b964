"""``sprinter reproduce``: a paper's tables on the user's pair, beside the paper's own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import JsonOption, RestartOption
from sprinter.cli.pages import print_files, print_json, print_table
from sprinter.cli.progress import Progress
from sprinter.cli.signature import option, takes
from sprinter.decode.checks import one_of
from sprinter.reproduce.settings import ReproduceSettings

__all__ = ["reproduce"]


@loads("profile", "suffix_cache", "template")
@takes("settings", ReproduceSettings)
def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="sprinter, svip, fsd or yin.")],
    data: Annotated[
        Path | None, option("Directory with the suites' files.", default="by name from the hub")
    ] = None,
    part: Annotated[
        list[str] | None,
        option("A part of the paper, such as speed; may be repeated.", default="all", metavar="NAME"),
    ] = None,
    suite: Annotated[
        list[str] | None,
        option(
            "One of FSD's data sets, gsm8k, commonsenseqa, mmlu or humaneval; may be repeated.",
            default="all",
            metavar="NAME",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option("Directory for results; a run in it goes on.", "--out", "-o", default="reproduce-PAPER"),
    ] = None,
    settings: Any = None,
    loading: Loading = Loading(),
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Run a paper's protocol on a pair: its tables compared with the paper's, and a verdict on each claim."""
    from sprinter.bench.quality.rouge import check_rouge
    from sprinter.reproduce.claims import ENOUGH
    from sprinter.reproduce.papers import PAPERS, check_suites, trials
    from sprinter.reproduce.papers import reproduce as run
    from sprinter.reproduce.study import Study

    one_of("paper", paper, PAPERS)
    for name in part or ():
        one_of("part", name, PAPERS[paper].parts)
    check_suites(paper, suite or ())
    check_rouge()  # before models are loaded
    folder, command = out or Path(f"reproduce-{paper}"), shlex.join(["sprinter", *sys.argv[1:]])
    pair = load(loading, prefix_cache_bytes=0)  # each arm reads its own prompt
    with Progress() as progress:
        study = Study(
            pair, data, folder, settings, PAPERS[paper].usual, suites=suite or (), command=command,
            restart=restart,
            progress=lambda done, wanted, note: progress(note, done, wanted),
        )  # fmt: skip
        results = run(paper, study, part or (), command)
    if json:
        print_json({**results, "out": str(folder)})
        return
    print_table(("claim", "verdict"), list(results["verdicts"].items()), left=2)
    if few := trials(results):
        print(f"note: a trial, of fewer than {ENOUGH} prompts: {'; '.join(few)}", file=sys.stderr)
    print_files([folder / f"{paper}.md", folder / f"{paper}.json"])
