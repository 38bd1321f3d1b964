"""``sprinter eval``: tasks of lm-evaluation-harness, by one method or several."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from sprinter.cli.generating import AT_DEFAULTS, generates
from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import JsonOption, RunCodeOption, complete_method
from sprinter.cli.pages import print_files, print_json, print_table, write_json
from sprinter.cli.signature import option
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError, install_line

__all__ = ["eval"]


@loads("profile")
@generates("budget", "require_lossless", "seed")
def eval(
    tasks: Annotated[
        str, option("Names of tasks, with commas between them: 'lm_eval ls tasks'.", default=False)
    ],
    method: Annotated[
        list[str] | None,
        option(
            "May be repeated: each is a run of its own.",
            "--method",
            "-m",
            default="exact",
            autocompletion=complete_method,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        option(
            "Directory with files of gsm8k, commonsenseqa, mmlu and humaneval, read in place of the hub's."
        ),
    ] = None,
    include_path: Annotated[Path | None, option("Directory with task files of your own.")] = None,
    limit: Annotated[int | None, option("Questions of each task, at most.", default="all", min=1)] = None,
    num_fewshot: Annotated[
        int | None, option("Solved examples before each question.", default="by task", min=0)
    ] = None,
    chat: Annotated[bool, option("Write prompts by the tokenizer's chat template.", "--chat")] = False,
    system: Annotated[str | None, option("System message before all prompts.", default=False)] = None,
    rows: Annotated[int, option("Texts that share passes.", min=1)] = 8,
    out: Annotated[
        Path | None, option("The harness's results of all methods, as JSON.", "--out", "-o")
    ] = None,
    run_code: RunCodeOption = False,
    loading: Loading = Loading(),
    options: GenerationOptions = AT_DEFAULTS,
    json: JsonOption = False,
) -> None:
    """Evaluate a pair on tasks of lm-evaluation-harness: accuracy by method, and what it cost.

    Log-likelihoods are those of the target; answers are decoded by each method in turn.
    """
    if find_spec("lm_eval") is None:
        raise UserError(f"lm-evaluation-harness is not installed: {install_line('lm-eval')}")
    decoding = {"budget": options.budget, "require_lossless": options.require_lossless, "seed": options.seed}
    for one in method or ():
        options.replace(method=one)  # refused before models are loaded
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data} is no directory: give the one with the tasks' files")
    pair = load(loading)
    from sprinter.doors.lm_eval import evaluate as run

    results = run(
        pair, [name.strip() for name in tasks.split(",") if name.strip()], method or [None], data=data,
        include_path=include_path, rows=rows, decoding=decoding, limit=limit, num_fewshot=num_fewshot,
        apply_chat_template=chat, system_instruction=system, confirm_run_unsafe_code=run_code,
    )  # fmt: skip
    if out is not None:
        write_json(out, {"runs": results})
    if json:
        print_json({"runs": results})
        return
    rows_of_table = [line for one in results for line in _lines(one)]
    columns = ("method", "task", "metric", "value", "± s.e.", "drift", "coverage", "calls/token", "seconds")
    print_table(columns, rows_of_table, left=3)
    print_files([out] if out else [])


def _lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line of the table for each task and metric."""
    config = result["config"]
    lines: list[tuple[str, ...]] = []
    cost = (
        _number(config.get("mean_drift"), 3), _percent(config.get("drift_coverage")),
        _number(config.get("target_calls_per_token"), 2), f"{result['seconds']:.0f}",
    )  # fmt: skip
    for task, values in result["results"].items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not kind:
                continue
            label = metric if kind == "none" else f"{metric} ({kind})"
            error = values.get(f"{metric}_stderr,{kind}")
            lines.append((config["method"], task, label, f"{value:.3f}", _number(error, 3), *cost))
    return lines


def _number(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def _percent(value: Any) -> str:
    return f"{value:.0%}" if isinstance(value, int | float) else "-"
