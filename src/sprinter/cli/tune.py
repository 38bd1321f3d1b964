"""``sprinter tune``: finds the fastest method of a pair on the user's prompts, and writes a profile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import FieldOption, FiguresOption, JsonOption, RestartOption
from sprinter.cli.pages import console, print_json, print_table, write_file
from sprinter.cli.progress import Progress
from sprinter.cli.signature import option, takes
from sprinter.errors import UserError
from sprinter.tuning.settings import Goal, TuneSettings

__all__ = ["tune"]

_LINE_TOKENS = 128  # new tokens after a whole text
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_KEPT = "probe_texts", "keep", "first", "repeats", "finalists"
_PANELS = {"Sampling": "temperature top_k top_p min_p"}
_MORE: dict[str, Any] = {
    "budgets": {"default": "0.05; none with --quality"}, "quality": {"metavar": "NAME>=RATIO"}, "time_s": {"kind": str},
}  # fmt: skip


def _seconds(text: str) -> float | None:
    """Seconds of 90s, 10m, 1h or a number; None for "none"."""
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None:
        raise UserError(f"--time '{text}' is not a duration: give 90s, 10m, 1h or none")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _read(given: dict[str, Any]) -> dict[str, Any]:
    if quality := given.get("quality"):
        given = {"budgets": (), **given, "quality": tuple(map(Goal.parse, quality))}
    return {**given, "time_s": _seconds(given["time_s"])}


@loads("profile", "suffix_cache", "template")
@takes("settings", TuneSettings, without=_KEPT, panels=_PANELS, more=_MORE, read=_read, time_s="10m")
def tune(
    data: Annotated[
        str,
        option(
            "Your prompts: .txt, one per line, or .jsonl (prompt and answer, question, messages); or a suite of "
            "'sprinter bench list'.",
            "--data",
            default=False,
        ),
    ],
    out: Annotated[Path, option("The profile.", "--out", "-o")] = Path("profile.json"),
    loading: Loading = Loading(),
    prompts: Annotated[int, option("Number of prompts, at most.", min=1, panel="Texts")] = 64,
    settings: Any = None,
    rule: Annotated[
        str | None,
        option(
            "How to make prompts from running text, as in 'sprinter bench'.",
            default="lines of a .txt file as they are",
            panel="Texts",
        ),
    ] = None,
    field: FieldOption = None,
    figures: FiguresOption = True,
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Find the fastest method within a budget on drift, on your prompts and this machine; write a profile.

    The same command again continues a tuning that was interrupted or ran out of time.
    """
    from sprinter.bench.suites import load_suite
    from sprinter.plots import check_plots, png
    from sprinter.tuning import tune as run
    from sprinter.tuning.picture import draw_tuning, plot_text

    if figures:
        check_plots("give --no-figures")
    if not out.parent.is_dir():
        raise UserError(f"--out '{out}': there is no directory '{out.parent}': make it, or give another file")
    pair = load(loading)
    whole = "whole" if rule is None and data.removesuffix(".gz").endswith(".txt") else rule
    usual = _LINE_TOKENS if whole == "whole" else None
    suite = load_suite(
        data, limit=prompts, rule=whole, field=field, tokenizer=pair.tokenizer, new_tokens=usual
    )
    with Progress() as progress:
        profile = run(
            pair, suite, out, settings, restart=restart,
            progress=lambda done, wanted, note: progress(note, done, wanted),
        )  # fmt: skip
    picture = write_file(out.with_suffix(".png"), png(lambda: draw_tuning(profile))) if figures else None
    if json:
        print_json({**profile, "out": str(out), "picture": picture and str(picture)})
        return
    _show(profile)
    console().print(plot_text(profile), markup=False, highlight=False)
    _tell(profile, out, picture)


def _show(profile: Mapping[str, Any]) -> None:
    goals = profile["goal"]["quality"]
    columns = ("method", "speed-up", "95 %", "tokens/s", "drift", "changed/text", *goals, "prompts")
    rows = []
    for one in profile["settings"]:
        speed, low, high = one["speed_up"]
        rows.append((
            one["spec"], f"{speed:.2f}x", "-" if low is None else f"{low:.2f} to {high:.2f}",
            f"{one['tokens_per_s']:.1f}", "0 (exact)" if one["lossless"] else f"{one['drift'][0]:.3f}",
            f"{one['changed']:.1f}", *(_kept(one, goal) for goal in goals), str(one["prompts"]),
        ))  # fmt: skip
    print_table(columns, rows, title="Finalists")


def _kept(entry: Mapping[str, Any], goal: str) -> str:
    value, low, _ = entry["quality"][goal]
    return f"{value:.3f}" + ("" if low is None else f" (> {low:.3f})")


def _tell(profile: Mapping[str, Any], out: Path, picture: Path | None) -> None:
    page, speeds = console(), {one["spec"]: one["speed_up"][0] for one in profile["settings"]}
    for one in profile["chosen"]:
        page.print(f"{one['goal']}: {one['spec']}, {speeds[one['spec']]:.2f}x", markup=False, highlight=False)
    for spec, error in profile["race"]["failed"].items():
        page.print(f"failed: {spec}: {error}", markup=False, highlight=False)
    if not profile["race"]["decided"]:
        page.print(
            "time was up before the finalists were statistically distinguishable: the same command again continues"
        )
    files = str(out) if picture is None else f"{out}, {picture}"
    page.print(f"wrote {files} in {profile['seconds']:.0f} s; use it: sprinter generate ... --profile {out}")
