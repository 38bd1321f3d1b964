"""Speed and memory of `sprinter gate label` on the built-in pair.

    python benchmarks/gate/labelling.py --data DIR

Speed: whole steps (cut and tokenise, complete, score, label, hash, write and synchronise a shard) against the two
models' own teacher-forced scoring of texts of the same lengths, in tokens/s of whole texts, prompts included. Scoring
is the plain forward pass in batches of 16, 32 and 64, sorted by length; the fastest counts. "every position" gives
logits everywhere; "labelled positions" (harder to match) at the labelled ones only. Labelling is also measured without
completions (all texts of the class original). Arms take turns step by step, their order rotates; ratios have 95 %
bootstrap intervals over steps. Processor time is given beside wall time: other work on the machine disturbs it less.

Memory: peak resident set of the command at 1,000 and at 20,000 prompts (some texts are too short, and more are read),
one process each, on texts that are cut short.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

import sprinter
from benchmarks.common import cells, command, environment, interval, option_parser, write_results
from benchmarks.smoke import sized
from sprinter.training.label_step import Labeller, LabelSettings, LabelStep, steps
from sprinter.training.prefixes import PrefixRow
from sprinter.training.prompts import PromptRule, PromptSplitter, read_texts
from sprinter.training.records import shard_name

TEXTS = {
    "Wikipedia articles": ["wikipedia_en_2015_00.txt.gz", "wikipedia_en_2015_01.txt.gz"],
    "GSM8K questions": ["gsm8k_train.jsonl.gz"],
}
MEMORY = ["lm1b_sample_dev.txt.gz", "gsm8k_train.jsonl.gz", "wikinews_en_2022_00.jsonl.gz"]
BATCHES = sized((16, 32, 64), (4,))
SETTINGS = sized(LabelSettings(), LabelSettings(new_tokens=4, batch_size=2))


@torch.inference_mode()
def score(pair: sprinter.Pair, texts: Sequence[Sequence[int]], batch: int, keep: int) -> None:
    """Both models read all texts; ``keep`` 0: logits at every position, else at the last so many."""
    texts = sorted(texts, key=len)
    for at in range(0, len(texts), batch):
        part = texts[at : at + batch]
        longest = max(map(len, part))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in part])
        for model in (pair.models.target.model, pair.models.draft.model):
            model(input_ids=ids, use_cache=False, logits_to_keep=keep)


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """(wall seconds, processor seconds)."""
    wall, busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - busy


def speed(pair: sprinter.Pair, data: Path, files: list[str], count: int, folder: Path) -> dict[str, Any]:
    """Seconds of each arm on each step, interleaved, and the ratios."""
    settings = SETTINGS
    rule = PromptRule(settings.prompt_share, settings.prompt_tokens, settings.new_tokens, pair.models.context)
    splitter = PromptSplitter(rule, pair.tokenizer, pair.models.vocab_size)
    sources = [str(data / name) for name in files]
    work = list(islice(steps(splitter(read_texts(sources)), settings), count + 1))
    if len(work) < count + 1:
        sys.exit(f"error: {', '.join(files)} give only {len(work)} steps, {count + 1} are needed")
    raw = list(islice(read_texts(sources), splitter.texts))
    labeller = Labeller(pair.models, settings, "0" * 64)

    def label(step: LabelStep, original: bool) -> None:
        texts = [raw[row.prompt] for row in step.rows]
        kinds = [0 if original else row.kind for row in step.rows]
        prompts = PromptSplitter(rule, pair.tokenizer, pair.models.vocab_size)(texts)
        rows = (
            PrefixRow(row.prompt, kind, prompt.ids, prompt.original)
            for row, kind, prompt in zip(step.rows, kinds, prompts, strict=True)
        )
        write(folder / shard_name(step.number), labeller(LabelStep(step.number, tuple(rows))))

    arms: dict[str, Callable[[LabelStep], None]] = {
        "labelling": lambda step: label(step, False),
        "labelling without completions": lambda step: label(step, True),
    }
    for batch in BATCHES:
        for keep, where in ((0, "every position"), (settings.new_tokens + 1, "labelled positions")):
            arms[f"scoring, {where}, {batch}"] = lambda step, batch=batch, keep=keep: score(
                pair, [[*row.ids, *row.original] for row in step.rows], batch, keep
            )
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    names = list(arms)
    for i, step in enumerate(work):
        for name in [*names[i % len(names) :], *names[: i % len(names)]]:
            took = timed(lambda name=name, step=step: arms[name](step))
            if i > 0:  # the first step warms up
                seconds[name].append(took)
        print(f"\r{files[0]} {i}/{count}", end="", file=sys.stderr)
    print(file=sys.stderr)
    tokens = np.array([sum(len(row.ids) + len(row.original) for row in step.rows) for step in work[1:]])
    return {"texts_per_step": settings.batch_size, "tokens": int(tokens.sum()), **ratios(seconds, tokens)}


def ratios(seconds: dict[str, list[tuple[float, float]]], tokens: np.ndarray) -> dict[str, Any]:
    """Tokens/s of each arm, and labelling over the fastest scoring, by wall and by processor time."""
    out: dict[str, Any] = {"tokens_per_s": {}, "labelling_over_scoring": {}}
    for clock, kind in enumerate(("wall", "processor")):
        spent = {name: np.array([took[clock] for took in rows]) for name, rows in seconds.items()}
        out["tokens_per_s"][kind] = {name: float(tokens.sum() / each.sum()) for name, each in spent.items()}
        for where in ("every position", "labelled positions"):
            best = min(
                (f"scoring, {where}, {batch}" for batch in BATCHES), key=lambda name: spent[name].sum()
            )
            for name in ("labelling", "labelling without completions"):
                key = f"{name} / scoring, {where}"
                out["labelling_over_scoring"].setdefault(key, {})[kind] = interval(spent[best], spent[name])
    return out


def write(path: Path, shard: bytes) -> None:
    """As the shelf does."""
    import os

    with open(path, "wb") as file:
        file.write(shard)
        file.flush()
        os.fsync(file.fileno())


def peak_mib(data: Path, limit: int, folder: Path) -> dict[str, Any]:
    """Peak memory of one whole run of the command in a process of its own."""
    # not getrusage, whose peak a child takes over from its parent
    code = (
        "import re, sys; from sprinter.cli import main; status = main(sys.argv[1:]); "
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); sys.exit(status)"
    )
    files = [str(data / name) for name in MEMORY]
    args = ["gate", "label", "--data", *files, "--out", str(folder / str(limit)), "--json"]
    args += ["--limit", str(limit), "--prompt-tokens", "12", "--max-new-tokens", "4"]
    done = subprocess.run([sys.executable, "-c", code, *args], check=True, capture_output=True, text=True)
    told, peak = done.stdout.strip().splitlines()[-2:]
    found = json.loads(told)
    kept = ("prompts", "positions", "shards", "seconds", "tokens_per_s")
    return {"texts": limit, "peak_mib": int(peak) / 1024, **{name: found[name] for name in kept}}


def table(speeds: dict[str, Any], memory: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = ["| texts | ratio | wall time | processor time |", "| --- | --- | --- | --- |"]
    for name, found in speeds.items():
        for key, row in found["labelling_over_scoring"].items():
            lines.append(f"| {name} | {key} | {cells(row['wall'])} | {cells(row['processor'])} |")
    lines += ["", "| texts read | prompts | positions | peak memory, MiB |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['texts']:,} | {row['prompts']:,} | {row['positions']:,} | {row['peak_mib']:.0f} |"
        for row in memory
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, write."""
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=sized(8, 1), help="steps of 128 texts that are measured")
    parser.add_argument(
        "--memory", type=int, nargs="*", default=sized([1050, 22500], [6]), help="texts of the memory runs"
    )
    args = parser.parse_args()
    began = time.time()
    pair = sprinter.load_pair(compile=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speeds = {what: speed(pair, args.data, files, args.steps, folder) for what, files in TEXTS.items()}
        memory = [peak_mib(args.data, limit, folder) for limit in args.memory]
    results = {
        "benchmark": "gate/labelling",
        "command": command(),
        "environment": environment(),
        "new_tokens": SETTINGS.new_tokens,
        "speed": speeds,
        "memory": memory,
        "seconds": round(time.time() - began, 1),
    }
    write_results("gate/labelling", results, table(speeds, memory))


if __name__ == "__main__":
    main()
