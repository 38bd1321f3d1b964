"""``sprinter eval``: tasks of lm-evaluation-harness, by one method or several."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from sprinter.cli.generating import AT_DEFAULTS, generates
from sprinter.cli.loading import Loading, check_models, load, loads
from sprinter.cli.options import JsonOption, RunCodeOption, complete_method
from sprinter.cli.pages import print_files, print_json, print_table, write_json
from sprinter.cli.signature import option
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError, install_line

__all__ = ["eval"]


@loads("profile", "suffix_cache", "template")
@generates("budget", "require_lossless", "seed")
def eval(
    tasks: Annotated[
        str, option("Names of tasks, with commas between them: 'lm_eval ls tasks'.", default=False)
    ],
    method: Annotated[
        list[str] | None,
        option(
            "May be repeated: each method is a separate run.",
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
        Path | None,
        option(
            "The harness's results of all methods, as JSON; answers are kept beside it, and the same command goes on.",
            "--out",
            "-o",
        ),
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
        check_models(options.replace(method=one), loading)  # refused before models are loaded
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data} is no directory: give the one with the tasks' files")
    from sprinter.bench.environment import environment
    from sprinter.bench.journal import replies
    from sprinter.doors.lm_eval import evaluate, find_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    manager = find_tasks(names, data, include_path, run_code)
    made = {"command": shlex.join(["sprinter", *sys.argv[1:]]), "environment": environment()}
    results: list[dict[str, Any]] = []
    with nullcontext() if out is None else replies(out.with_name(f"{out.stem}.answers.jsonl")) as kept:
        for result in evaluate(
            load(loading), names, method or [None], manager=manager, rows=rows, decoding=decoding, kept=kept,
            limit=limit, num_fewshot=num_fewshot, apply_chat_template=chat, system_instruction=system,
            confirm_run_unsafe_code=run_code,
        ):  # fmt: skip
            results.append(result)
            if out is not None:
                write_json(out, {**made, "runs": results})
    if json:
        print_json({**made, "runs": results})
        return
    rows_of_table = [line for one in results for line in _lines(one)]
    columns = ("method", "task", "metric", "value", "± s.e.", "drift", "coverage", "calls/token", "drafted/token",
               "seconds")  # fmt: skip
    print_table(columns, rows_of_table, left=3)
    print_files([out] if out else [])


def _lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line of the table for each task and metric."""
    config, lines = result["config"], []
    for task, values in result["results"].items():
        costs = config["tasks"].get(task, {})
        cost = (
            _number(costs.get("mean_drift"), 3), _percent(costs.get("drift_coverage")),
            *(_number(costs.get(f"{name}_per_token"), 2) for name in ("target_calls", "drafted")),
            f"{result['seconds']:.0f}",
        )  # fmt: skip
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
