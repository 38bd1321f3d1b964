"""Drafters against plain decoding in one run: suffixes, lookup, chains of drafters and ``auto``, five sets of prompts.

    python benchmarks/methods/drafters.py --data DIR [--pair builtin|smollm2|qwen] [--prompts 10] [--new-tokens 96]
        [--temperatures 0 0.7] [--methods NAME ...] [--ignore-eos] [--rows FILE]

Sets: HumanEval, GSM8K, MT-bench (both turns), *summaries* of encyclopaedia articles, and *edits*, as an agent asks for
them: functions of this repository (those of ``src/sprinter/decode`` that have 8 to 24 lines, by name), each four times
in a row with another edit. The seed is the prompt's number in its set. With a chat template prompts are asked in chat.
``--ignore-eos`` is for the built-in pair, which ends its texts after a few tokens where a prompt is no story.

Every arm answers every prompt in turn. Each has a cache of earlier texts of its own, as an owner has, which is empty
before each set and temperature and keeps all texts of the set; no KV cache of a prompt is reused. Speed is that of
decoding; the record has it with the prompt's time too. The fastest arm of a set is bold, chosen by these numbers.

The record is written after every prompt. A call that was interrupted goes on at that prompt when it is repeated, since
answers are kept in ``--rows``, of one command, commit and machine. Its arms get their earlier texts back, without what
``recycle`` knew from them.
"""

from __future__ import annotations

import ast
import copy
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

import sprinter
from benchmarks.common import ROOT, cells, command, environment, grid, in_turn, option_parser, write_results
from benchmarks.real.arms import DRAFT, SMOLLM2, TARGET
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.journal import KeptLines
from sprinter.bench.sample import Sample
from sprinter.bench.statistics import ratio_of_ratios, ratio_of_sums
from sprinter.bench.suites import load_suite, turn_prompt
from sprinter.engine.suffixes import SuffixCache

NAME = "methods/drafters"
WORDS = 160  # of an article
WARM = 16  # tokens
PAIRS: Mapping[str, tuple[str, ...]] = {"builtin": (), "smollm2": (SMOLLM2,), "qwen": (TARGET, DRAFT)}
EDITS = (
    "Add a comment above each line that is not obvious.", "Rename its first parameter to `given`.",
    "Write its docstring anew, in one sentence.", "Raise a ValueError at its beginning if its first argument is None.",
)  # fmt: skip
PLAIN = "plain"
METHODS = {
    PLAIN: "autoregressive", "lookup": "lookup", "suffix": "suffix", "auto": "auto",
    "suffix, then recycle": "drafter=suffix(otherwise=recycle),stop=never,accept=match,cap=15",
    "svip": "svip", "hybrid": "hybrid",
    "suffix, then model": "drafter=suffix(otherwise=model),stop=svip,cap=40",
}  # fmt: skip
"""Exact methods; those after the last chain of copies need a draft model."""
ALONE = tuple(METHODS)[:5]
KEPT = "new_tokens", "wall_s", "closing_s", "prefill_s", "target_calls", "draft_steps", "draft_s", "rounds"
"""Counts and times of an answer, summed over its turns."""


def edits() -> Iterator[Sample]:
    """Requests to edit functions, those about one function in a row."""
    for path in sorted((ROOT / "src/sprinter/decode").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            lines = ast.get_source_segment(text, node) or ""
            if isinstance(node, ast.FunctionDef) and 8 <= len(lines.splitlines()) <= 24:
                for n, edit in enumerate(EDITS):
                    ask = f"```python\n{lines}\n```\n\n{edit} Answer with the whole function."
                    yield Sample(f"{path.stem}.{node.name} {n}", "edits", (ask,))


def summaries(data: Path) -> Iterator[Sample]:
    """Requests to summarise articles."""
    for one in load_suite("wiki-summary", data).samples:
        yield Sample(
            one.id, "summaries", (f"{' '.join(one.turns[0].split()[:WORDS])}\n\nSummarise this text.",)
        )


def prompts(pair: sprinter.Pair, data: Path, count: int, new_tokens: int) -> dict[str, list[Sample]]:
    """The first prompts of each set that fit the context."""
    chat = bool(pair.tokenizer is not None and pair.tokenizer.chat_template)
    suites = {
        name: load_suite(name, data, chat=chat and name != "mt-bench").samples
        for name in ("humaneval", "gsm8k", "mt-bench")
    }

    def fits(sample: Sample) -> bool:
        return len(turn_prompt(pair, sample, 0, []).ids) + new_tokens <= pair.models.context

    sets = {**suites, "summaries": summaries(data), "edits": edits()}
    return {name: list(islice(filter(fits, samples), count)) for name, samples in sets.items()}


class DrafterArm:
    """A method on a pair, with earlier texts of its own."""

    def __init__(self, name: str, pair: sprinter.Pair, new_tokens: int, **sampling: Any) -> None:
        self.name, self._new, self._sampling = name, new_tokens, sampling
        self._pair = copy.copy(pair)  # shares models, heads and costs
        self._pair._runtime = copy.copy(pair._runtime)
        self.forget()

    def forget(self) -> None:
        """Begin without earlier texts."""
        self._pair._runtime.suffixes = SuffixCache()

    def remember(self, turns: Sequence[Sequence[Sequence[int]]]) -> None:
        """Keep the texts of an answer that an interrupted call gave."""
        for prompt, text in turns:
            self._pair._runtime.suffixes.add("", prompt, text)

    def answer(self, sample: Sample, seed: int, new_tokens: int | None = None) -> dict[str, Any]:
        """Counts and times of an answer to all turns, and the token ids of the ends of prompts and of texts."""
        texts, turns, sums = list[str](), list[tuple[list[int], list[int]]](), dict.fromkeys(KEPT, 0.0)
        limit = self._new if new_tokens is None else new_tokens
        for turn in range(len(sample.turns)):
            ids, ends = turn_prompt(self._pair, sample, turn, texts)
            if len(ids) + limit > self._pair.models.context:
                break  # a later turn
            out = self._pair.generate(
                ids, method=METHODS[self.name], seed=seed, max_new_tokens=limit, stop_token_ids=list(ends),
                **self._sampling,
            )  # fmt: skip
            if out.stats.cached_tokens:
                raise ValueError(f"{self.name} found its prompt in the cache")
            for name in KEPT:
                sums[name] += getattr(out.stats, name)
            turns.append((ids[-64:], [token.id for token in out.tokens]))
            texts.append(out.text)
        return {**{name: round(value, 6) for name, value in sums.items()}, "turns": turns}


def row_of(
    name: str, temperature: float, arm: str, answers: Sequence[Mapping[str, Mapping[str, Any]]]
) -> dict[str, Any]:
    """Ratios of an arm on a set, by the answers of all arms to each prompt, with what each prompt took."""

    def of(arm: str, field: str) -> np.ndarray:
        return np.array([one[arm][field] for one in answers])

    def seconds(arm: str, prompt: bool) -> np.ndarray:
        return of(arm, "wall_s") - of(arm, "closing_s") - (0 if prompt else of(arm, "prefill_s"))

    def over_plain(prompt: bool) -> list[float | None]:
        both = [(of(one, "new_tokens"), seconds(one, prompt)) for one in (arm, PLAIN)]
        return list(ratio_of_ratios(*both))

    texts = [[[ids for _, ids in one[each]["turns"]] for one in answers] for each in (arm, PLAIN)]
    rounds = of(arm, "rounds").sum()
    return {
        "set": name, "temperature": temperature, "arm": arm, "texts": len(answers), "over_plain": over_plain(False),
        "over_plain_with_prompt": over_plain(True),
        "tokens_a_call": list(ratio_of_sums(of(arm, "new_tokens"), of(arm, "target_calls"))),
        "draft_us_a_round": float(1e6 * of(arm, "draft_s").sum() / rounds) if rounds else None,
        "as_plain": sum(one == other for one, other in zip(*texts, strict=True)),
        "new_tokens": of(arm, "new_tokens").tolist(), "decoding_s": seconds(arm, False).round(4).tolist(),
        "prefill_s": of(arm, "prefill_s").round(4).tolist(), "target_calls": of(arm, "target_calls").tolist(),
    }  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Speed over plain decoding, a column a set."""
    sets = list(dict.fromkeys(row["set"] for row in rows))
    speeds = {(row["temperature"], row["arm"], row["set"]): row["over_plain"] for row in rows}
    lines = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        arms = dict.fromkeys(row["arm"] for row in rows if row["temperature"] == temperature)
        some = [one for one in sets if (temperature, PLAIN, one) in speeds]
        best = {one: max(arms, key=lambda arm: speeds[temperature, arm, one][0]) for one in some}
        for arm in arms:
            told = [
                f"**{text}**" if best.get(one) == arm else text
                for one in sets
                for text in [cells(speeds[temperature, arm, one]) if one in some else "–"]
            ]
            if arm != PLAIN:
                lines.append(f"{temperature:g} | {arm} | {' | '.join(told)}")
    return "\n".join(grid(f"temperature | over plain | {' | '.join(sets)}", lines))


def opened(path: Path, session: dict[str, Any]) -> tuple[KeptLines, list[dict[str, Any]]]:
    """The answers so far, and the sessions that gave them, this one last."""
    kept = KeptLines(path, lambda row: tuple(row["key"]), "delete it")
    sessions = [row["session"] for row in kept.rows if "session" in row]

    def made(one: Mapping[str, Any]) -> list[Any]:
        here = one["environment"]
        return [
            one["command"],
            *(here[name] for name in ("commit", "dirty", "cpu", "isa", "cores", "threads")),
        ]

    if any(made(one) != made(session) for one in sessions):
        sys.exit(
            f"error: {path} is of another command, commit or machine: delete it, or give another with --rows"
        )
    kept.add({"key": ["session", len(sessions)], "session": session})
    return kept, [*sessions, session]


def main() -> None:
    """Ask all arms in turn, set by set, at each temperature."""
    parser = option_parser(__doc__)
    parser.add_argument("--pair", choices=PAIRS, default="builtin", help="smollm2: a target alone")
    parser.add_argument("--prompts", type=int, default=sized(10, 2), help="prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=sized(96, 8), help="most tokens of a turn")
    parser.add_argument("--temperatures", type=float, nargs="+", default=sized([0.0, 0.7], [0.7]))
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, help="default: all that the pair has models for"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="write all tokens")
    parser.add_argument("--rows", type=Path, help="file of the answers; default: .work/drafters-PAIR.jsonl")
    options = parser.parse_args()
    began, models = time.time(), PAIRS[options.pair]
    pair = sprinter.load_pair(*models, prefix_cache_bytes=0, **({"dtype": "gguf"} if models else {}))
    names = options.methods or (METHODS if pair.models.draft else ALONE)
    arms_of = list(dict.fromkeys([PLAIN, *names]))
    if pair.models.draft and "auto" in arms_of:
        pair.pass_costs  # noqa: B018  # measured before the arms share them
    usual = scratch("rows") if SMOKE else Path(".work")
    path = options.rows or usual / f"drafters-{options.pair}.jsonl"
    kept, sessions = opened(path, {"command": command(), "environment": environment()})
    sets = prompts(pair, options.data, options.prompts, options.new_tokens)
    rows = dict[tuple[Any, ...], dict[str, Any]]()

    def note(name: str, temperature: float, show: bool = False) -> None:
        """Compute the rows of a set again, and write the record."""
        own = [row["answers"] for row in kept.rows if row["key"][:2] == [name, temperature]]
        for arm in arms_of if own else ():
            rows[name, temperature, arm] = row_of(name, temperature, arm, own)
        seconds = round(time.time() - began, 1)
        results = {
            "benchmark": f"{NAME}_{options.pair}", **sessions[0], "resumed": sessions[1:], "prompts": options.prompts,
            "new_tokens": options.new_tokens, "methods": {arm: METHODS[arm] for arm in arms_of},
            "sets": {one: len(samples) for one, samples in sets.items()}, "rows": [*rows.values()],
            "seconds": seconds,
        }  # fmt: skip
        results["environment"] = {**results["environment"], "load_at_end": environment()["load"]}
        write_results(f"{NAME}_{options.pair}", results, table(results["rows"]), show=show)

    for temperature, (name, samples) in product(options.temperatures, sets.items()):
        left = {i for i in range(len(samples)) if (name, temperature, i) not in kept.done}
        arms = [
            DrafterArm(arm, pair, options.new_tokens, temperature=temperature, ignore_eos=options.ignore_eos)
            for arm in arms_of
        ]
        for arm in arms if left else ():
            arm.answer(samples[-1], 0, min(WARM, options.new_tokens))
            arm.forget()
        answers = dict[str, Any]()
        for i, arm in in_turn(arms, len(samples), f"{name} at {temperature:g}") if left else ():
            if i in left:
                answers[arm.name] = arm.answer(samples[i], i)
            else:  # in their order: no answer copies from a later text
                arm.remember(kept.get((name, temperature, i))["answers"][arm.name]["turns"])
            if len(answers) == len(arms):
                kept.add({"key": [name, temperature, i], "answers": answers})
                answers = {}
                note(name, temperature)
        note(name, temperature)
    note(name, temperature, show=True)


if __name__ == "__main__":
    main()
