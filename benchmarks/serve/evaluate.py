"""lm-evaluation-harness through the server and on transformers: the same log-likelihoods and the same greedy answers.

    python benchmarks/serve/evaluate.py --data DIR [--items 200]

SmolLM2-135M-Instruct in float32, dequantised from its file. Items are the choices of CommonsenseQA's questions (one
log-likelihood each); greedy answers continue questions of GSM8K. ``SPRINTER_LM_EVAL_PYTHON`` names a Python with
lm-eval, torch and transformers; the harness runs there twice, as ``hf`` and as ``local-completions``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import command, environment, grid, option_parser, write_results
from benchmarks.real.arms import dequantised
from benchmarks.serve.servers import SMOLLM2, free_port, sprinter_server, started
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.errors import UserError

NAME = "serve/evaluate"
HEAD = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{task}.jsonl}}}}
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
"""
TASKS = {
    "choices": """\
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
""",
    "greedy": """\
output_type: generate_until
generation_kwargs: {{until: ["\\n\\n"], do_sample: false, temperature: 0.0, max_gen_toks: {tokens}}}
metric_list: [{{metric: exact_match}}]
""",
}
"""The harness's tasks, in its YAML."""


def records(path: Path, count: int) -> list[dict[str, Any]]:
    """The first records of a file of JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def write_tasks(folder: Path, data: Path, items: int, answers: int) -> None:
    """The harness's two tasks and their data."""
    questions = []
    for one in records(data / "commonsenseqa_dev.jsonl", -(-items // 5)):
        choices = one["question"]["choices"]
        questions.append(
            {
                "question": one["question"]["stem"],
                "choices": [choice["text"] for choice in choices],
                "answer": [choice["label"] for choice in choices].index(one["answerKey"]),
            }
        )
    greedy = [
        {"question": one["question"], "answer": one["answer"]}
        for one in records(data / "gsm8k_test.jsonl", answers)
    ]
    for name, rows in (("choices", questions), ("greedy", greedy)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = (HEAD + TASKS[name]).format(task=name, folder=folder, tokens=sized(48, 4))
        (folder / f"{name}.yaml").write_text(text)


def harness(folder: Path, name: str, model: list[str]) -> dict[str, list[Any]]:
    """Run both tasks; the model's answers to each, in order."""
    python = os.environ.get("SPRINTER_LM_EVAL_PYTHON")
    if python is None:
        raise UserError("lm-eval is not at hand: set SPRINTER_LM_EVAL_PYTHON to a Python that has it")
    out = folder / name
    shutil.rmtree(out, ignore_errors=True)  # samples of an earlier run
    line = [
        python, "-m", "lm_eval", *model, "--tasks", "choices,greedy", "--include_path", str(folder),
        "--output_path", str(out), "--log_samples", "--batch_size", "1",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "HF_DATASETS_CACHE": str(folder / "cache")}
    ended = subprocess.run(line, env=os.environ | offline, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise UserError(f"lm-eval failed: {ended.stderr[-2000:]}")
    return {task: [*_responses(out, task)] for task in ("choices", "greedy")}


def _responses(out: Path, task: str) -> Iterator[Any]:
    (path,) = out.rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for sample in sorted(samples, key=lambda one: one["doc_id"]):
        yield from sample["filtered_resps"] if task == "choices" else [sample["resps"][0][0]]


def compare(ours: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """One row a task."""
    pairs = [
        ((float(a[0]), str(a[1]) == "True"), (float(b[0]), str(b[1]) == "True"))
        for a, b in zip(ours["choices"], theirs["choices"], strict=True)
    ]
    same = [a == b for a, b in zip(ours["greedy"], theirs["greedy"], strict=True)]
    return [
        {
            "task": "log-likelihoods",
            "items": len(pairs),
            "largest_difference": max(abs(a[0] - b[0]) for a, b in pairs),
            "equal": sum(abs(a[0] - b[0]) <= 1e-3 for a, b in pairs),
            "same_is_greedy": sum(a[1] == b[1] for a, b in pairs),
        },
        {"task": "greedy answers", "items": len(same), "equal": sum(same)},
    ]


def main() -> None:
    """Write the tasks, run the harness on both, compare."""
    parser = option_parser(__doc__)
    parser.add_argument("--items", type=int, default=sized(200, 5), help="log-likelihoods")
    parser.add_argument("--answers", type=int, default=sized(40, 1), help="greedy answers")
    args = parser.parse_args()
    began = time.time()
    folder = (scratch("evaluate") if SMOKE else Path(".work/evaluate")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder, args.data, args.items, args.answers)
    weights = dequantised(folder / "smollm2", "float32", SMOLLM2)
    port = free_port()
    options = ["--target", SMOLLM2, "--runner", "torch", "--dtype", "float32", "--max-len", "1024"]
    with started("sprinter", sprinter_server(port, *options), port, folder / "log"):
        ours = harness(
            folder,
            "served",
            [
                "--model", "local-completions", "--model_args",
                f"model=model,base_url=http://127.0.0.1:{port}/v1/completions,tokenizer={weights},"
                "num_concurrent=4,max_length=1024",
            ],
        )  # fmt: skip
    theirs = harness(
        folder, "hf", ["--model", "hf", "--model_args", f"pretrained={weights},dtype=float32,max_length=1024",
                       "--device", "cpu"],
    )  # fmt: skip
    rows = compare(ours, theirs)
    results = {
        "benchmark": NAME, "command": command(), "environment": environment(), "rows": rows,
        "seconds": round(time.time() - began, 1),
    }  # fmt: skip
    shown = [
        f"{row['task']} | {row['items']} | {row['equal']} | "
        + (f"{row['largest_difference']:.1e}" if "largest_difference" in row else "–")
        for row in rows
    ]
    table = grid("through the server against transformers | items | equal | largest difference", shown)
    write_results(NAME, results, "\n".join(table))


if __name__ == "__main__":
    main()
