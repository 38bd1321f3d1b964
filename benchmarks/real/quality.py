"""Accuracy, drift and counts of every method on a real instruct pair, in chat: many texts in one batch, not timed.

    python benchmarks/real/quality.py --data DIR [--arms ...] [--suites humaneval:40 gsm8k:40] [--gate DIR]

``speed.py`` times one text at a time, which would take hours an arm for so many texts on two cores. Here our kernels
run the same GGUF blocks on all prompts at once, and an arm takes minutes. With them a token's law does not depend on
the batch that it is in, so greedy exact methods write the target's own texts, and every change of accuracy is the
method's.
With ``--name named`` the six arms of most interest are asked 80 prompts more of both suites, and other suites; the
tables hold the first prompts too. With ``--name sampled`` drift is measured on the beginnings of answers, and nobody
asks whether they are right. With ``--name precision --dtype int8`` (or ``bfloat16``, ...) an arm reads other weights,
made from the same file, and is compared with the arm that reads the file's own blocks.
Each arm's measures are kept, a run goes on where an earlier one stopped, and ``--merge`` makes the tables of what is
there without running a model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import sprinter
from benchmarks.common import RESULTS, command, environment, option_parser, write_results
from benchmarks.real import gate_prompts
from benchmarks.real.arms import DRAFT, EVERY, PARTS, SMOKE_ARMS, TARGET, right, runnable
from benchmarks.real.collect import collect, read_speeds
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.quality.measure import QualitySettings, measure, prepare
from sprinter.bench.sample import Sample, Suite
from sprinter.bench.suites import load_suite, turn_prompt
from sprinter.bench.suites.makers import group_of_spec_bench
from sprinter.decode import Origin, Token
from sprinter.engine.generation import Generation
from sprinter.files import write_atomic

ANSWERS, NAMED, PRECISION, SAMPLED = "quality", "named", "precision", "sampled"
SUITES = {
    ANSWERS: ("humaneval:40:256", "gsm8k:40:400"),
    PRECISION: ("humaneval:40:256", "gsm8k:40:400"),
    NAMED: (
        "humaneval:40-120:256", "gsm8k:40-120:400", "mt-bench:40:128", "spec-bench:60:128", "wiki-summary:40:64",
    ),
    SAMPLED: ("humaneval:12:96", "gsm8k:12:96", "mt-bench:12:96"),
}  # fmt: skip
"""Name of results -> their suites; those of ``sampled`` are too short to be right or wrong: drift alone."""
DTYPE = sized("gguf", None)
"""Type of the weights where none is asked for: the blocks of the file."""
RUNNING_TEXT = ("wiki-summary",)
"""Suites that are continued, not asked in chat."""


@dataclass(frozen=True)
class Question:
    """The first turn of a sample: its prompt's token ids, the tokens that end the answer, and its longest length."""

    suite: str
    sample: Sample
    ids: list[int]
    ends: tuple[int, ...]
    new_tokens: int


def questions(pair: sprinter.Pair, suites: Sequence[Suite]) -> list[Question]:
    """Every sample's first turn."""
    return [
        Question(
            suite.name,
            sample,
            *turn_prompt(pair, sample, 0, [], chat=suite.chat),
            new_tokens=suite.new_tokens,
        )
        for suite in suites
        for sample in suite.samples
    ]


def overshoots(tokens: Sequence[Token]) -> list[float]:
    """max(0, ln q(x)/p(x)) of every draft token in the text: how much surer the draft was than the target."""
    return [
        max(0.0, token.draft_logprob - token.logprob)
        for token in tokens
        if token.origin in (Origin.TRUSTED, Origin.ACCEPTED)
        and token.logprob is not None
        and token.draft_logprob is not None
    ]


def shortfalls(tokens: Sequence[Token]) -> list[float]:
    """ln of the target's largest probability over p(x), of every token: 0 where x is the target's first choice."""
    return [
        token.top_logprobs[0].logprob - token.logprob
        for token in tokens
        if token.top_logprobs and token.logprob is not None
    ]


def line(
    arm: str, temperature: float, asked: Question, made: Generation, quality: dict[str, float]
) -> dict[str, Any]:
    """One text: its counts, drift and whether it is right."""
    drifts = [token.distance for token in made.tokens if token.distance is not None]
    over, below = overshoots(made.tokens), shortfalls(made.tokens)
    return {
        "suite": asked.suite,
        "question_id": asked.sample.id,
        "category": asked.sample.category,
        "temperature": temperature,
        "model_id": arm,
        "right": right(quality),
        "rouge1": quality.get("rouge1"),
        "prompt_tokens": len(asked.ids),
        "new_tokens": made.stats.new_tokens,
        "finish": made.finish_reason,
        "target_calls": made.stats.target_calls,
        "draft_steps": made.stats.draft_steps,
        "trusted": Counter(token.origin.value for token in made.tokens).get("trusted", 0),
        "drift_sum": sum(drifts),  # of rules of chains: one sample a round
        "drift_first": sum(drifts[:16]),
        "drift_tokens": len(drifts),
        "drift_most": max(drifts, default=0.0),
        "least_ratio": made.stats.least_ratio,
        "over_sum": sum(over),
        "over_most": max(over, default=0.0),
        "log_likelihood": sum(math.nan if token.logprob is None else token.logprob for token in made.tokens),
        "below_sum": sum(below),
        "below_most": max(below, default=0.0),
        "text_hash": hashlib.sha256(made.text.encode()).hexdigest()[:12],  # equal for equal texts
    }


def run_arm(
    pair: sprinter.Pair, arm: str, temperature: float, asked: list[Question], rows: int
) -> list[dict[str, Any]]:
    """One line a text."""
    settings = QualitySettings(run_code=not SMOKE, likelihood=False)
    # Long prompts first: rows that become free are filled with shorter texts.
    order = sorted(range(len(asked)), key=lambda i: -len(asked[i].ids))
    made = pair.generate_batch(
        [asked[i].ids for i in order], rows=rows, method=arm, temperature=temperature, seed=order, meter="complete",
        max_new_tokens=[asked[i].new_tokens for i in order], stop_token_ids=[list(asked[i].ends) for i in order],
        logprobs=1,
    )  # fmt: skip
    found = dict(zip(order, made, strict=True))
    lines = []
    for i, one in enumerate(asked):
        ids = [token.id for token in found[i].tokens]
        quality = measure(pair, one.sample, [one.ids], [ids], [found[i].text], settings)
        lines.append(line(arm, temperature, one, found[i], quality))
    return lines


def kept(folder: Path) -> list[dict[str, Any]]:
    """What earlier runs have measured: one record an arm and temperature."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def check_same_run(folder: Path, chosen: Any) -> None:
    """Refuse to add an arm to others that had other prompts or weights."""
    fixed = ("suites", "system") if folder.name == PRECISION else ("suites", "system", "dtype")
    mine = {name: getattr(chosen, name) for name in fixed}
    for record in kept(folder):
        if any(record[name] != value for name, value in mine.items()):
            theirs = {name: record[name] for name in mine}
            sys.exit(f"error: {folder} has {record['arm']} with {theirs}: choose another --name for {mine}")


def by_group(text: dict[str, Any]) -> list[dict[str, Any]]:
    """A text of Spec-Bench once for the suite and once for its group; another one as it is."""
    if text["suite"] != "spec-bench":
        return [text]
    return [text, {**text, "suite": f"spec-bench, {group_of_spec_bench(text['category'])}"}]


def label(folder: Path, record: dict[str, Any]) -> str:
    """An arm's name in the tables; with the weights' type where that is what differs."""
    other = folder.name == PRECISION and record["dtype"] != DTYPE
    return f"{record['arm']}, {record['dtype']}" if other else str(record["arm"])


def merge(folder: Path, data: Path) -> None:
    """Write the results of all arms that are there, and the tables."""
    records = kept(folder)
    if not records:
        sys.exit(f"error: no arm was measured in {folder}: run without --merge first")
    suites = records[0]["suites"]
    if folder.name in (NAMED, PRECISION) and not SMOKE:  # the same arms' first prompts, or other weights
        arms = {(record["arm"], record["temperature"]) for record in records}
        first = [one for one in kept(folder.with_name(ANSWERS)) if (one["arm"], one["temperature"]) in arms]
        lacking = arms - {(record["arm"], record["temperature"]) for record in first}
        if lacking or any(one["system"] != records[0]["system"] for one in first):
            sys.exit(f"error: {ANSWERS} has not measured {lacking or 'with this --system'}: do so first")
        suites, records = list(dict.fromkeys([*first[0]["suites"], *suites])), first + records
    order = {arm: at for at, arm in enumerate(EVERY)}
    records.sort(key=lambda record: order.get(record["arm"], len(order)))
    seen = trained_on(data, folder.name)
    lines = [
        {**text, "model_id": label(folder, record)}
        for record in records for text in record["texts"] if (text["suite"], text["question_id"]) not in seen
    ]  # fmt: skip
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}  # by command and environment
    for record in records:
        made = record["command"], json.dumps(record["environment"], sort_keys=True)
        runs.setdefault(made, []).append(record)
    facts = {
        "dtype": ", ".join(dict.fromkeys(str(record["dtype"]) for record in records)),
        "system": records[0]["system"],
        "suites": suites,
        "benchmark": f"real/{folder.name}",
        "prompts": len({(text["suite"], text["question_id"]) for text in lines}),
        "runs": {
            ", ".join(dict.fromkeys(f"`{label(folder, one)}`" for one in own)): {
                "command": said, "environment": json.loads(where),
            }
            for (said, where), own in runs.items()
        },
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "gate": next((record["gate"] for record in records if record["gate"]), None),
    }  # fmt: skip
    for text in lines:
        if text["suite"] == "spec-bench":  # most of its derivations are longer than its answers may be here
            text["right"] = None
    if folder.name == SAMPLED:  # a few tokens of each answer
        lines = [{**text, "right": None} for text in lines]
        lines += [
            {**text, "suite": "together", "question_id": f"{text['suite']}/{text['question_id']}"}
            for text in lines
        ]
    lines = [shown for text in lines for shown in by_group(text)]
    collected, shown = collect(lines, read_speeds(RESULTS / "real" / "speed.json"))
    write_results(f"real/{folder.name}", facts | collected, shown)


def main() -> None:
    """Run the arms that are missing; write."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--arms", nargs="+", default=SMOKE_ARMS, help="default: all, without a gate all that need none"
    )
    parser.add_argument(
        "--suites", nargs="+", help="NAME:PROMPTS:TOKENS of an answer; PROMPTS is a number or FROM-TO"
    )
    parser.add_argument("--system", help="system message of all prompts")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--rows", type=int, default=80, help="texts that are decoded at the same time")
    parser.add_argument("--target", default=sized(TARGET, None))
    parser.add_argument("--draft", default=sized(DRAFT, None))
    parser.add_argument("--gate", help="directory of a gate for the draft")
    parser.add_argument("--heads", nargs="+", default=(), help="directories of other heads for the draft")
    parser.add_argument("--dtype", default=DTYPE, help="of both models' weights")
    parser.add_argument("--name", choices=SUITES, default=ANSWERS, help="of the results")
    parser.add_argument("--merge", action="store_true", help="only make the tables")
    chosen = parser.parse_args()
    chosen.suites = chosen.suites or sized([*SUITES[chosen.name]], ["gsm8k:1-2:8", "spec-bench:1:8"])
    chosen.out = scratch(chosen.name) if SMOKE else RESULTS / "real" / chosen.name
    if chosen.name == PRECISION and chosen.dtype == DTYPE and not (SMOKE or chosen.merge):
        sys.exit(f"error: --name {PRECISION} compares other weights with those of {DTYPE}: give --dtype")
    chosen.out.mkdir(parents=True, exist_ok=True)
    check_same_run(chosen.out, chosen)
    if not chosen.merge:
        measure_arms(chosen)
    merge(chosen.out, chosen.data)


def trained_on(data: Path, name: str) -> set[tuple[str, str]]:
    """Suite and id of the samples that a result leaves out, as gates were trained on their first turn."""
    if name not in (NAMED, SAMPLED) or SMOKE:
        return set()
    seen = set(gate_prompts.questions(data))
    return {
        (suite, sample.id)
        for suite in ("mt-bench", "spec-bench")
        for sample in load_suite(suite, data).samples
        if sample.turns[0] in seen
    }


def part_of(named: str, chosen: Any, chat: bool) -> Suite:
    """The samples of a suite that an option NAME:PROMPTS:TOKENS names, without those of ``trained_on``."""
    name, prompts, new_tokens = named.split(":")
    first, _, last = prompts.rpartition("-")
    asked = chat and name not in RUNNING_TEXT
    suite = load_suite(
        name, chosen.data, limit=int(last), new_tokens=int(new_tokens), chat=asked,
        system=chosen.system if asked else None,
    )  # fmt: skip
    seen = trained_on(chosen.data, chosen.name)
    chosen_samples = suite.samples[int(first or 0) :]
    return replace(suite, samples=[one for one in chosen_samples if (suite.name, one.id) not in seen])


def measure_arms(chosen: Any) -> None:
    """Measure each arm that the folder lacks; an arm is written as soon as it has ended."""
    weights = {} if chosen.dtype is None else {"runner": "torch", "dtype": chosen.dtype}
    # All arms read the same prompts: from the second arm on they come from the cache.
    pair = sprinter.load_pair(
        chosen.target,
        chosen.draft,
        gate=chosen.gate,
        heads=chosen.heads,
        prefix_cache_bytes=4 << 30,
        prefix_reuse="all",
        **weights,
    )
    chat = bool(pair.tokenizer is not None and pair.tokenizer.chat_template)
    asked = questions(pair, [part_of(suite, chosen, chat) for suite in chosen.suites])
    prepare(QualitySettings(run_code=not SMOKE, likelihood=False), [one.sample for one in asked])
    arms = chosen.arms or runnable(PARTS[NAMED] if chosen.name == NAMED else EVERY, chosen.gate, chosen.heads)
    for temperature in chosen.temperatures:
        for arm in arms:
            named = f"{arm}-{chosen.dtype}" if chosen.name == PRECISION else arm
            path = chosen.out / f"{re.sub(r'[^a-z0-9.+-]+', '-', named).strip('-')}-t{temperature:g}.json"
            if path.exists():
                continue
            began = time.perf_counter()
            texts = run_arm(pair, arm, temperature, asked, chosen.rows)
            seconds = time.perf_counter() - began
            record = {
                "arm": arm, "temperature": temperature, "seconds": round(seconds, 1), "ended": time.time(),
                "command": command("real/quality"), "environment": environment(), "suites": chosen.suites,
                "dtype": chosen.dtype, "system": chosen.system, "gate": Path(chosen.gate).name if chosen.gate else None,
                "texts": texts,
            }  # fmt: skip
            write_atomic(path, json.dumps(record) + "\n")
            tokens = sum(text["new_tokens"] for text in texts)
            print(
                f"{time.strftime('%H:%M')} {arm}: {tokens} tokens, {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    main()
