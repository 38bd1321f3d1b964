"""``sprinter bench``: measures methods and other engines on suites of prompts; results of runs."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sprinter.bench.settings import BenchSettings
from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import FieldOption, JsonOption, RestartOption, RunCodeOption, SystemOption
from sprinter.cli.pages import console, print_files, print_json, print_table
from sprinter.cli.progress import Progress
from sprinter.cli.signature import option, takes
from sprinter.decode.registry import did_you_mean
from sprinter.errors import UserError
from sprinter.plots import no_plots

__all__ = ["GROUP"]


Words = list[str] | None
_judging = partial(option, panel="Judging")
_SHOWN = {"temperatures": {"default": "1"}, "bases": {"default": "the plain ones"}}


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the options in a TOML file as this command's defaults."""
    if path is None:
        return None
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read --config '{path}' ({error}): give a TOML file of options") from None
    names = {flag.removeprefix("--"): one for one in context.command.params for flag in one.opts}
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key not in names or key == "config":
            raise did_you_mean("option", key, sorted(name for name in names if not name.startswith("-")))
        several = names[key].multiple
        if isinstance(value, dict) or (isinstance(value, list) and not several):
            raise UserError(f"{key} in --config '{path}' is {value!r}: give one value")
        found[str(names[key].name)] = [value] if several and not isinstance(value, list) else value
    context.default_map = {**(context.default_map or {}), **found}
    return path


@loads("suffix_cache", "template")
@takes("settings", BenchSettings, without=("min_p",), panels={"Sampling": "top_k top_p"}, more=_SHOWN)
def run(
    context: typer.Context,
    suite: Annotated[
        Words,
        option(
            "A suite ('bench list' names them) or a .txt/.jsonl file; LIMIT: number of prompts. May be repeated.",
            "--suite",
            "-s",
            default=False,
            metavar="NAME[:LIMIT]",
        ),
    ] = None,
    arm: Annotated[
        Words,
        option(
            "A method, another engine (transformers:plain, ...), or a set (methods, peers, all); may be repeated.",
            "--arm",
            "-a",
            default="the best known methods, and transformers plain and assisted (GGUF files: llama.cpp's own)",
            metavar="SPEC",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        option("Directory with the suites' files.", default="by name from the hub", panel="Texts"),
    ] = None,
    rule: Annotated[
        str | None,
        option(
            "How to make prompts from running text: share=0.5,words=200,min_words=60, long=64 (with -n 0), whole.",
            default="first 30 % of the words",
            panel="Texts",
        ),
    ] = None,
    field: FieldOption = None,
    chat: Annotated[
        bool, option("Ask in chat form, by the pair's chat template.", "--chat", panel="Texts")
    ] = False,
    system: SystemOption = None,
    out: Annotated[Path, option("Directory for results.", "--out", "-o")] = Path("bench-results"),
    config: Annotated[
        Path | None,
        option(
            "TOML file of these options, by their long names; options of the command line override them.",
            default=False,
            is_eager=True,
            callback=_read_config,
        ),
    ] = None,
    loading: Loading = Loading(),
    settings: Any = None,
    quality: Annotated[bool, _judging("ROUGE, perplexity under the target, exact match, ...")] = True,
    likelihood: Annotated[
        bool,
        _judging("Score each answer by a forward pass of the target: perplexity, judge."),
    ] = True,
    run_code: RunCodeOption = False,
    judge: Annotated[
        str | None,
        _judging(
            "OpenAI-compatible endpoint that judges the texts.",
            default="target log-likelihood",
            metavar="URL",
        ),
    ] = None,
    judge_model: Annotated[str | None, _judging("Name of the model at --judge.")] = None,
    judge_price: Annotated[
        tuple[float, float] | None,
        _judging(
            "Price of a million input and output tokens, to report the cost of judging.",
            default=False,
            metavar="IN OUT",
        ),
    ] = None,
    analysis: Annotated[
        bool, _judging("Compute both models' laws along texts, for the report's figures.")
    ] = True,
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Run arms on suites, interleaved prompt by prompt; write results.json and report.html into --out.

    To continue a run that was interrupted, give the same command again.
    """
    if context.invoked_subcommand is not None:
        return
    from sprinter.bench.arms import parse_arms
    from sprinter.bench.grading import JudgeSettings
    from sprinter.bench.quality.measure import QualitySettings
    from sprinter.bench.run import Extras, run_bench
    from sprinter.bench.suites import check_suite, load_suite
    from sprinter.engine.runners import choose_runner

    if not suite:
        raise UserError(
            "no suite was given: give --suite, for example --suite wiki-summary:100 (see 'bench list')"
        )
    with_llama = loading.runner == "llamacpp"
    if loading.runner == "auto" and loading.target is not None and loading.target.endswith(".gguf"):
        with_llama = not choose_runner(
            loading.target, loading.draft, loading.arguments()
        ).options  # nor PyTorch
    tuned = () if loading.profile is None else ("auto",)
    arms = parse_arms(arm or (*tuned, *_USUAL, *(_LLAMA if with_llama else _TRANSFORMERS)))
    if settings.bases != BenchSettings().bases:
        _known(settings.bases, [each.name for each in arms])
    measures = QualitySettings(run_code=run_code, likelihood=likelihood) if quality else None
    judging = JudgeSettings(judge, judge_model, *((None, None) if judge_price is None else judge_price))
    extras = Extras(measures, judging, analysis, shlex.join(["sprinter", *sys.argv[1:]]))
    shape: dict[str, Any] = {"rule": rule, "field": field, "chat": chat, "system": system}
    wanted = [*map(_limited, suite)]
    for name, _ in wanted:  # before the models, which may take minutes
        check_suite(name, data, **shape)
    pair = load(loading)
    shape |= {"tokenizer": pair.tokenizer}
    suites = [load_suite(name, data, limit=limit, **shape) for name, limit in wanted]
    with Progress() as progress:
        results = run_bench(
            pair, arms, suites, settings, out, extras, restart=restart,
            progress=lambda done, wanted, note: progress(note, done, wanted),
        )  # fmt: skip
    if json:
        print_json({key: value for key, value in results.items() if key != "rows"} | {"out": str(out)})
    else:
        _print_summary(results)
        _print_written(out / "results.json", out / "report.html")


_USUAL = (
    "autoregressive", "speculative", "sprinter", "coin", "opt", "fuzzy", "svip", "lookup", "draft-only",
)  # fmt: skip
_TRANSFORMERS = "transformers:plain", "transformers:assisted"
_LLAMA = "llamacpp:plain", "llamacpp:lookup"


def _known(bases: Sequence[str], arms: Sequence[str]) -> None:
    for base in bases:
        if base not in arms:
            raise UserError(
                f"--base {base} is not an arm of this run: give one of {', '.join(arms)}, or add --arm {base}"
            )


def _limited(text: str) -> tuple[str, int | None]:
    """Split NAME or NAME:LIMIT into a name and a limit, None without one."""
    name, colon, limit = text.rpartition(":")
    if not colon or not name or not re.fullmatch(r"-?[0-9]+", limit):
        return text, None
    if int(limit) < 1:
        raise UserError(f"--suite {text} asks for no prompt: give a limit of 1 or more")
    return name, int(limit)


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="results.json, or the directory of a run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The same for the later run.")],
    base: Annotated[
        str | None, option("Speeds are judged relative to this arm.", default="a plain one")
    ] = None,
    tolerance: Annotated[float, option("Relative change to accept in addition to chance.", min=0.0)] = 0.0,
    across: Annotated[
        bool, option("Compare runs even if models, prompts or settings differ.", "--across")
    ] = False,
    everything: Annotated[bool, option("Show unchanged numbers too.", "--all")] = False,
    json: JsonOption = False,
) -> int:
    """Compare two runs; exit status 1 if anything became worse by more than chance explains (95 % intervals)."""
    from sprinter.bench.compare import compare as compared
    from sprinter.bench.results import read_results

    if tolerance >= 1:
        raise UserError(f"tolerance={tolerance} is out of range: give a share below 1, such as 0.02")
    changes = compared(
        read_results(before), read_results(after), base=base, tolerance=tolerance, across=across
    )
    worse = any(change.verdict == "worse" for change in changes)
    if json:
        print_json({"regression": worse, "changes": [asdict(change) for change in changes]})
    else:
        _print_changes(changes, everything)
    return 1 if worse else 0


def report(
    results: Annotated[Path, typer.Argument(help="results.json, or the directory of a run.")],
    out: Annotated[
        Path | None, option("HTML file.", "--out", "-o", default="report.html in the same directory")
    ] = None,
) -> None:
    """Write the report of a run as one self-contained HTML file."""
    from sprinter.bench.report import write_report
    from sprinter.bench.results import read_results

    folder = results if results.is_dir() else results.parent
    found, file = read_results(results), out or folder / "report.html"
    try:
        path = write_report(found, file)
    except OSError as error:
        raise UserError(f"cannot write '{file}' ({error.strerror}): give another --out") from None
    _print_written(path)


def names(json: JsonOption = False) -> None:
    """List the names of the suites and arms."""
    from sprinter.bench.arms import arm_names
    from sprinter.bench.suites import suite_names

    suites, arms = suite_names(), arm_names()
    if json:
        print_json({"suites": suites, "arms": arms})
        return
    print_table(("name", "what it is"), suites.items(), title="suites", left=2)
    rows = ((arm["name"], arm["spec"], arm["engine"]) for arm in arms)
    print_table(("name", "spec", "engine"), rows, title="arms", left=3)


def _interval(value: Sequence[float | None] | None, digits: int = 2) -> str:
    if value is None:
        return "–"
    middle, low, high = value
    if low is None or high is None:
        return f"{middle:.{digits}f} (n=1)"
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _print_summary(results: dict[str, Any]) -> None:
    """Print one table per suite and temperature, fastest arm first; then the arms that failed."""
    summary = results["summary"]
    bases = [name for name in results["settings"]["bases"] if any(name in s["speed_over"] for s in summary)][
        :2
    ]
    columns = (
        "arm", "tokens/s", *(f"÷ {base}" for base in bases), "calls/token", "mean drift", "TTFT ms", "gap p95",
        "lossless",
    )  # fmt: skip
    keys = {(s["suite"], s["temperature"]) for s in summary}
    for suite, temperature in sorted(keys, key=lambda key: (key[0], -key[1])):
        rows = [
            (
                s["arm"], f"{s['tokens_per_s']:.0f}", *(_interval(s["speed_over"].get(base)) for base in bases),
                _number(s["target_calls_per_token"] and s["target_calls_per_token"][0], 3),
                _interval(s["mean_drift"], 3), _number(s["ttft_ms"] and s["ttft_ms"]["p50"], 1),
                _number(s["gap_ms"] and s["gap_ms"]["p95"], 1), {True: "yes", False: "no", None: "?"}[s["lossless"]],
            )
            for s in sorted(summary, key=lambda s: -s["tokens_per_s"])
            if (s["suite"], s["temperature"]) == (suite, temperature)
        ]  # fmt: skip
        print_table(columns, rows, title=f"{suite}, temperature {temperature:g}")
    for arm in results["arms"]:
        if arm["status"] == "failed":
            console().print(f"failed: {arm['name']}: {arm['error']}", style="red", markup=False)
    console().print(f"{results['seconds']:.0f} s; 95 % bootstrap intervals over prompts, arms interleaved.")


def _print_written(*files: Path) -> None:
    """Name the files of a run, and say so if the report has no pictures."""
    reason = no_plots()
    print_files(files, f" without pictures; {reason}" if reason else "")


def _print_changes(changes: Sequence[Any], everything: bool) -> None:
    """Print what ``compare`` found; unchanged numbers only with ``everything``."""
    from rich.text import Text

    shown = [change for change in changes if everything or change.verdict in ("worse", "better")]
    rows = (
        (
            Text(one.verdict, {"worse": "red", "better": "green"}.get(one.verdict, "")), one.arm, one.suite,
            f"{one.temperature:g}", one.measure, f"{one.before:.4g}", f"{one.after:.4g}", _interval(one.ratio, 3),
        )
        for one in shown
    )  # fmt: skip
    if shown:
        print_table(("verdict", "arm", "suite", "T", "measure", "before", "after", "change"), rows, left=5)
    worse, better = (sum(one.verdict == verdict for one in changes) for verdict in ("worse", "better"))
    console().print(f"{worse} worse, {better} better, of {len(changes)} numbers.")


GROUP = {"": run, "compare": compare, "report": report, "list": names}
