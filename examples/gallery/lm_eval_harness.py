"""lm-evaluation-harness: how many answers stay the target's own, by method and cost. pip install '.[lm-eval]'"""

import json
import tempfile
from pathlib import Path

import draw

import sprinter
from sprinter.cli import main

METHODS = ["autoregressive", "speculative(gamma=4)", "sprinter(tau=0.7)", "coin(rate=0.5)", "draft-only"]
OPENINGS = ["Once upon a time", "One day, a boy", "The old king", "A small bird", "Anna and Tom", "It was raining",
            "The big red dog", "My mother said"]  # fmt: skip
pair, folder = sprinter.load_pair(), Path(tempfile.mkdtemp())
plain = pair.generate(OPENINGS, method="autoregressive", temperature=0, max_new_tokens=24)
docs = [
    {"question": prompt, "answer": out.text.partition("\n")[0]}
    for prompt, out in zip(OPENINGS, plain, strict=True)
]
(folder / "data.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
task = {
    "task": "own_words", "output_type": "generate_until", "dataset_path": "json", "test_split": "test",
    "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
    "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip
(folder / "own_words.yaml").write_text(json.dumps(task))
command = [
    "eval",
    "--tasks",
    "own_words",
    "--include-path",
    str(folder),
    "--out",
    str(folder / "results.json"),
]
assert main([*command, *(word for method in METHODS for word in ("--method", method))]) == 0
points: dict[str, list[tuple[float, float]]] = {}
for method, run in zip(METHODS, json.loads((folder / "results.json").read_text())["runs"], strict=True):
    calls = run["config"]["target_calls_per_token"]
    points[method] = [(calls, run["results"]["own_words"]["exact_match,none"])]
draw.chart("lm_eval_harness", points, "target calls a token", "answers that are the target's own", lines=())
