"""When does which dial pay: counts of methods on pairs of models, costs of passes, and the two multiplied.

    python benchmarks/real/when_it_pays.py counts --pair qwen --data DIR [--gates paper=DIR harm=DIR]
    python benchmarks/real/when_it_pays.py costs --pair qwen --data DIR [--factors 1 4 8]
    python benchmarks/real/when_it_pays.py wall --pair qwen --data DIR [--factors 1 4 8]

``counts`` writes answers, greedy but for the built-in pair: target calls, draft steps, tokens that the target read,
drift, right answers, which do not depend on the machine's load. Each method is one run over all prompts; an interrupted
call goes on where it ended. Exact methods, whose texts are the target's own, and settings between those that were run
are replayed on both models' laws along the target's texts. ``costs`` times passes, on a quiet machine. ``wall`` times
texts and compares them with their counts times these costs. ``when_it_pays_map.py`` multiplies.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import sprinter
from benchmarks.common import (
    RESULTS,
    STARTED,
    cells,
    command,
    environment,
    grid,
    interleave,
    method_arm,
    option_parser,
    speed_ratio,
    write_results,
)  # fmt: skip
from benchmarks.real.arms import DRAFT, SMOLLM2, TARGET
from benchmarks.real.padded import padded
from benchmarks.real.rows import OPENINGS
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.quality.measure import Answered, QualitySettings, measure, prepare
from sprinter.bench.sample import Sample
from sprinter.bench.suites import load_suite, turn_prompt
from sprinter.decode.costs import PassCosts
from sprinter.decode.spec import parse_method
from sprinter.engine import costs as passes
from sprinter.engine.backends.base import DraftPlan
from sprinter.engine.lookahead import best_ahead
from sprinter.laws import Sampling
from sprinter.theory.recording import Passage, Recording, read_passages
from sprinter.theory.replay import replay

BENCHMARK, NAME = "real/when_it_pays", "real/when_it_pays_{part}_{pair}"
GREEDY = Sampling(0.0)
ROWS = sized(32, 4)
CONTEXT, REPEATS = sized((256, 7), (8, 2))
LENGTHS = sized((1, 2, 4, 6, 8, 12, 16, 24, 32), (1, 2, 4))
"""Tokens of the target passes that are timed."""
WALL_TOKENS = sized(64, 8)
FIELDS = "tokens", "target_calls", "draft_steps", "target_tokens", "drift", "right"


@dataclass(frozen=True)
class Setting:
    """How a pair is loaded, and what it is asked.

    Attributes:
        options: of ``load_pair``.
        suites: name -> (prompts, most new tokens, in chat form).
        run: number of these suites, the first ones, on which lossy methods are run; on the others they are replayed.
        arms: methods that are run; (): those of ``RUNS``.
        costs: the pair whose passes cost the same; "": its own.
        temperature: of all texts.
    """

    options: Mapping[str, Any]
    suites: Mapping[str, tuple[int, int, bool]]
    run: int = 4
    arms: Sequence[str] = ()
    costs: str = ""
    temperature: float = 0.0


PLAIN = "autoregressive"
_TAIL = "stop=untrusted(tail=15,under=calibrated(rate=0.4)),cap=30"
_ON_QWEN = {"target": TARGET, "runner": "torch", "dtype": "gguf"}
_QWEN = {**_ON_QWEN, "draft": DRAFT, "gate": "examples/gates/qwen2.5-coder-1.5b-0.5b"}
_WHOLE = (
    PLAIN, f"trust=gate(tau=0.7),{_TAIL}", f"trust=certain,{_TAIL},budget=0.05", f"trust=online(tau=0.6),{_TAIL}",
    "stop=calibrated(rate=0.4),accept=margin(theta=0.9)", f"trust=certain,{_TAIL},budget=0.1", "draft-only",
    f"trust=gate(tau=0.8),{_TAIL},accept=margin(theta=0.95)",
)  # fmt: skip
_TAUGHT = (
    f"harm trust=gate(tau=0.9),{_TAIL}",
    "paper sprinter(tau=0.5)",
    f"trust=gate(tau=0.7),{_TAIL},head=16",
)
_FOREIGN = (
    PLAIN, f"trust=certain(threshold=1.0),{_TAIL}", f"trust=certain,{_TAIL},budget=0.02", "svip", "draft-only",
    f"trust=certain,{_TAIL},budget=0.1", "certain(threshold=0.3, tail=3)", "fuzzy(threshold=0.1, gamma=8)",
)  # fmt: skip
_FEW = (
    PLAIN, f"trust=certain,{_TAIL},budget=0.1", "draft-only", f"trust=certain,{_TAIL},budget=0.02",
)  # fmt: skip
_SUITES = {"humaneval": (20, 256, True), "gsm8k": (20, 256, True), "mt-bench": (20, 96, True),
           "wiki-summary": (20, 64, False)}  # fmt: skip
PAIRS = {
    "qwen": Setting(_QWEN, _SUITES, run=2),
    "smollm2": Setting(
        {"target": SMOLLM2, "draft": ".work/smol/draft", "gate": ".work/smol/gate", "runner": "torch",
         "dtype": "gguf", "draft_dtype": "int8"},
        {"humaneval": (24, 128, True), "gsm8k": (24, 128, True), "mt-bench": (24, 128, True),
         "wiki-summary": (24, 64, False)},
    ),
    "whole": Setting(_QWEN, {"gsm8k": (24, 400, True)}, arms=_WHOLE, costs="qwen"),
    "taught": Setting(_QWEN, {"gsm8k": (24, 400, True)}, arms=_TAUGHT, costs="qwen"),
    "foreign": Setting({**_ON_QWEN, "draft": SMOLLM2}, _SUITES, run=2, arms=_FOREIGN),
    "cheap": Setting(
        {**_ON_QWEN, "draft": ".work/smollm2-for-qwen", "draft_dtype": "int4"}, _SUITES, run=2, arms=_FEW
    ),
    "builtin": Setting(
        {"target": None, "compile": True},
        {"openings": (24, 400, False), "wiki-summary": (24, 96, False), "heldout": (24, 96, False)},
        temperature=1.0,
    ),
}  # fmt: skip
if SMOKE:
    PAIRS = {name: Setting({"target": None}, {"wiki-summary": (4, 8, False)}) for name in PAIRS}

TAUS = {"smollm2": 0.8, "builtin": 0.8} | dict.fromkeys(("qwen", "foreign", "cheap", "whole", "taught"), 0.9)
RUNS = sized(
    (
        PLAIN, f"trust=certain(threshold=1.0),{_TAIL}", f"trust=gate(tau={{tau}}),{_TAIL}", "paper sprinter(tau=0.5)",
        f"trust=certain,{_TAIL},budget=0.02", "fuzzy(threshold=0.1, gamma=8)", "draft-only",
        f"trust=certain(threshold=0.3),{_TAIL}", "sprinter(tau={tau})", "certain(tail=8, budget=0.05)",
        "online(tau=0.8, tail=8)", "opt(epsilon=0.1, gamma=8)", "fuzzy(gamma=8)", "certain(threshold=0.3, tail=3)",
        "sprinter(tau={tau}, tail=8)", "paper sprinter(tau=0.5, tail=8)", "speculative(gamma=8)", "svip",
        "certain(tail=8, budget=0.01)", "certain(tail=8, budget=0.1)",
        "auto(step={step}, token={token}, reads={reads})",
    ),
    (PLAIN, "speculative(gamma=2)", "paper sprinter(tau=0.5)", "certain(tail=2, budget=0.05)"),
)  # fmt: skip
"""Methods that are run, in order of their weight; "paper": with the gate of this name, {tau}: of ``TAUS``."""
STOPS = (
    *(f"speculative(gamma={gamma})" for gamma in sized(range(1, 16), (1, 2))),
    *sized((
        "svip(h=0.2)", "svip", "svip(h=0.4)", "svip(h=0.6)", "adaedl", "confidence", "heuristic", "block(gamma=2)",
        "optimal(step={step}, token={token})", "optimal(step={step}, token={token}, signal=gate)",
        "calibrated(rate=0.2)", "calibrated(rate=0.4)", "calibrated(rate=0.6)", "calibrated(rate=0.4, signal=gate)",
    ), ("svip",)),
)  # fmt: skip
"""Exact methods, replayed; block verification is the same for greedy texts."""
DIALS = sized(
    (
        *(f"paper sprinter(tau=0.5, tail={tail})" for tail in (0, 3, 5, 8)),
        *(f"sprinter(tau={{tau}}, tail={tail})" for tail in (0, 3, 5, 8)),
        *(f"certain(threshold={t}, tail={tail})" for t in (0.3, 1.0) for tail in (0, 3, 5, 8)),
        f"trust=gate(tau={{tau}}),{_TAIL}",
        *(f"trust=certain(threshold={t}),{_TAIL}" for t in (0.3, 1.0)),
        "online(tau=0.8)", "online(tau=0.8, tail=8)", f"trust=online(tau=0.8),{_TAIL}",
        *(f"trust=certain,{_TAIL},budget={b}" for b in (0.01, 0.02, 0.05, 0.1)),
        *(f"fuzzy(threshold={t}, gamma=8)" for t in (0.1, 0.3)), "opt(epsilon=0.1, gamma=8)",
        *(f"trust=gate(tau={t}),{_TAIL}{more}" for t in (0.6, 0.7, 0.8) for more in ("", ",head=16")),
        *(f"trust=online(tau={t},signal={s}),{_TAIL}" for t in (0.6, 0.7) for s in ("entropy", "entropy+gate")),
        *(f"stop=calibrated(rate={r}),accept=margin(theta={t})" for r in (0.2, 0.4) for t in (0.9, 0.95)),
        f"trust=gate(tau=0.8),{_TAIL},accept=margin(theta=0.95)",
    ),
    ("certain(tail=2)", "paper sprinter(tau=0.5)"),
)  # fmt: skip
"""Lossy methods, replayed."""
WALL = sized(
    ("speculative(gamma=4)", "svip", "sprinter(tau={tau})", "certain(threshold=0.3, tail=8)"),
    ("speculative(gamma=2)",),
)


# --- pairs and prompts ------------------------------------------------------------------------------------------------
def of_gate(arm: str) -> tuple[str, str]:
    """Name of the gate that an arm takes, "" for the pair's own, and its method."""
    name, _, method = arm.partition(" ")
    return (name, method) if name.isidentifier() and method else ("", arm)


def gated(pair: sprinter.Pair, gate: str) -> sprinter.Pair:
    """The same models with another gate; "": the same gate."""
    if not gate:
        return pair
    assert pair.models.draft is not None
    return sprinter.load_pair(
        pair.models.target.model, pair.models.draft.model, gate=gate, tokenizer=pair.tokenizer
    )


def asked(
    pair: sprinter.Pair, setting: Setting, data: Path
) -> dict[str, list[tuple[Sample, list[int], tuple[int, ...]]]]:
    """By suite: each sample with its first prompt's token ids, and the tokens that end an answer."""
    found = {}
    for name, (count, _, chat) in setting.suites.items():
        suite = load_suite(OPENINGS if name == "openings" else name, data, limit=count, chat=chat)
        prompts = [(one, turn_prompt(pair, one, 0, [], chat=suite.chat)) for one in suite.samples]
        found[name] = [(sample, prompt.ids, prompt.stop_token_ids) for sample, prompt in prompts]
    return found


def graded(
    pair: sprinter.Pair, samples: Sequence[Sample], outs: Sequence[sprinter.Generation]
) -> list[float | None]:
    """1 for each right answer, 0 for another, None where nothing is checked."""
    how = QualitySettings(rouge=False, likelihood=False, run_code=True)
    prepare(how, samples)
    answers = [
        Answered(
            replace(sample, turns=sample.turns[:1]),
            [out.prompt_ids],
            [[t.id for t in out.tokens]],
            [out.text],
        )
        for sample, out in zip(samples, outs, strict=True)
    ]
    found = measure(pair, answers, how)
    return [one.get("exact_match", one.get("pass_at_1")) for one in found]


def packed(rows: Sequence[Sequence[float | None]]) -> list[str]:
    """Rows of ``FIELDS`` as the file has them: a line a text, "-" where nothing is checked."""
    return [
        " ".join("-" if one is None else f"{one:.4g}" if one % 1 else f"{one:.0f}" for one in row)
        for row in rows
    ]


def unpacked(lines: Sequence[str]) -> list[list[float]]:
    """The rows; NaN where nothing is checked."""
    return [[math.nan if one == "-" else float(one) for one in line.split()] for line in lines]


# --- counts -----------------------------------------------------------------------------------------------------------
def run(
    pair: sprinter.Pair, method: str, prompts: Mapping[str, Any], setting: Setting
) -> tuple[dict[str, Any], Any]:
    """One method on all prompts: by suite a row of ``FIELDS`` for each; and the texts."""
    flat = [(suite, *one) for suite, each in prompts.items() for one in each]
    outs = pair.generate_batch(
        [ids for _, _, ids, _ in flat], method=method, temperature=setting.temperature, meter="complete", rows=ROWS,
        max_new_tokens=[setting.suites[suite][1] for suite, *_ in flat],
        stop_token_ids=[list(ends) for *_, ends in flat],
    )  # fmt: skip
    right = graded(pair, [sample for _, sample, _, _ in flat], outs)
    found: dict[str, Any] = {suite: [] for suite in prompts}
    for (suite, *_), out, one in zip(flat, outs, right, strict=True):
        stats = out.stats
        drift = sum(token.distance or 0.0 for token in out.tokens)
        found[suite].append(
            [stats.new_tokens, stats.target_calls, stats.draft_steps, stats.target_tokens, drift, one]
        )
    return {suite: packed(rows) for suite, rows in found.items()}, outs


def record(
    pairs: Mapping[str, sprinter.Pair], outs: Sequence[Any], suites: Sequence[str], law: Sampling = GREEDY
) -> dict[str, Any]:
    """Both models' laws and the scores of all gates along the target's own texts, by suite."""
    found, pair = {}, pairs[""]
    heads = {**pair.heads, **{name: one.heads["gate"] for name, one in pairs.items() if name}}
    both: Any = SimpleNamespace(models=pair.models, heads=heads)
    for suite in dict.fromkeys(suites):
        texts = [
            Passage(tuple(out.prompt_ids), tuple(token.id for token in out.tokens))
            for out, of in zip(outs, suites, strict=True) if of == suite
        ]  # fmt: skip
        found[suite] = replace(read_passages(both, texts, sampling=law), writer="target")
    return found


def replayed(recordings: Mapping[str, Recording], method: str) -> dict[str, Any]:
    """Counts of a method by replay, by suite a row of ``FIELDS`` for each text; nothing is checked."""
    rows = {}
    for suite, recording in recordings.items():
        texts = replay(recording, parse_method(method)).by_text.tolist()
        # the target reads every draft token, and one more a call
        all_of = [[tokens, calls, steps, calls + steps, drift, None] for tokens, calls, drift, steps in texts]
        rows[suite] = packed(all_of)
    return rows


def agreement(recordings: Mapping[str, Recording]) -> dict[str, Any]:
    """By suite: positions, mean overlap (greedy: share of equal first choices), the same at temperature 1."""
    found = {}
    for suite, one in recordings.items():
        overlap = float(sprinter.laws.overlap(one.raw_p, one.raw_q).mean())
        found[suite] = [len(one.ids), float(sprinter.laws.overlap(one.p, one.q).mean()), overlap]
    return found


def counts(options: Any) -> None:
    """Run and replay what is not yet in the file."""
    setting, name = PAIRS[options.pair], NAME.format(part="counts", pair=options.pair)
    began, path = time.time(), RESULTS / f"{name}.json"
    kept = json.loads(path.read_text()) if path.is_file() and not SMOKE else {}
    same = kept.get("command") == command() and kept["environment"]["commit"] == STARTED["commit"]
    results: dict[str, Any] = kept if same else {
        "benchmark": BENCHMARK, "command": command(), "environment": environment(), "fields": FIELDS, "runs": {},
        "replays": {}, "seconds": 0.0,
        "suites": {suite: list(one) for suite, one in setting.suites.items()},
    }  # fmt: skip
    before = results["seconds"]
    pair = sprinter.load_pair(**setting.options)
    pairs = {name: gated(pair, gate) for name, gate in [("", ""), *options.gates]}
    prompts = asked(pair, setting, options.data)
    words = {"tau": TAUS[options.pair], "step": options.step, "token": options.token, "reads": options.reads}

    def note() -> None:
        results["seconds"] = round(before + time.time() - began, 1)
        results["environment"] |= {"load_at_end": environment()["load"]}
        write_results(name, results, _table(results))

    outs: Any = None
    for arm in setting.arms or RUNS:
        arm = arm.format(**words)
        gate, method = of_gate(arm)
        done = arm in results["runs"] and not (arm == PLAIN and not results["replays"])
        if done or gate not in pairs:
            continue
        if time.time() - began > options.seconds:
            break
        some = dict([*prompts.items()][: None if arm in (PLAIN, "svip") else setting.run])
        results["runs"][arm], texts = run(pairs[gate], method, some, setting)
        note()
        if arm == PLAIN:
            outs = texts
            of = [suite for suite, each in prompts.items() for _ in each]
            recordings = record(pairs, outs, of, Sampling(setting.temperature))
            if options.keep is not None:
                torch.save(recordings, options.keep)
            _replay_all(results, recordings, [*STOPS, *DIALS], words)
            results["agreement"] = agreement(recordings)
            note()


def _replay_all(results: Any, recordings: Mapping[str, Any], arms: Sequence[str], words: Any) -> None:
    for arm in arms:
        arm = arm.format(**words)
        gate, method = of_gate(arm)
        gate = gate or ("gate" if "gate" in parse_method(method).heads else "")
        if gate and any(gate not in one.signals for one in recordings.values()):
            continue
        own = {
            suite: replace(one, signals={**one.signals, "gate": one.signals[gate]}) if gate else one
            for suite, one in recordings.items()
        }
        results["replays"][arm] = replayed(own, method)
        print(f"\rreplayed {len(results['replays'])}", end="", file=sys.stderr)


def _table(results: Any) -> str:
    """A line an arm and suite: what was counted a token."""
    lines = []
    for how in ("runs", "replays"):
        for arm, suites in results[how].items():
            for suite, lines_of in suites.items():
                rows = unpacked(lines_of)
                tokens, calls, steps, read, drift, right = (
                    sum(one[i] for one in rows) for i in range(len(FIELDS))
                )
                share = "" if math.isnan(right) else f"{right / len(rows):.3f}"
                lines.append(
                    f"{suite} | `{arm}` | {how[:-1]} | {calls / tokens:.4f} | {steps / tokens:.3f} | "
                    f"{read / tokens:.3f} | {drift / tokens:.4f} | {share}"
                )
    heads = "suite | method | how | target calls a token | draft steps | tokens read by the target | drift | right"
    return "\n".join(grid(heads, lines))


# --- costs ------------------------------------------------------------------------------------------------------------
def timed(pair: sprinter.Pair, repeats: int, sampling: Sampling) -> dict[str, Any]:
    """Median seconds of target passes by their tokens, of a draft step, and of one with the gate."""
    models = passes.borrow(pair.models, CONTEXT + max(LENGTHS))
    ids, ahead = passes.read_prompts(models, CONTEXT, max(LENGTHS)), best_ahead(models.sync, 1.0, 0.5)
    jobs: dict[Any, Any] = {n: passes.target_input(ids, CONTEXT, n, sampling) for n in LENGTHS}
    for name, heads in (("draft", {}), ("gated", {} if pair.gate is None else {"gate": pair.gate})):
        plan = DraftPlan(sampling, ("entropy",), heads)
        jobs[name] = passes.draft_input(ids, CONTEXT, 1, plan, count=ahead)
    times = passes.run_interleaved(models, jobs, repeats).items()
    seconds = {what: statistics.median(each) / (1 if what in LENGTHS else ahead) for what, each in times}
    return {
        "target": [[n, seconds[n]] for n in LENGTHS],
        "draft": seconds["draft"],
        "gated": seconds["gated"],
    }


def as_costs(found: Mapping[str, Any], fixed: float = 0.0) -> PassCosts:
    """Costs of passes; each target pass costs ``fixed`` seconds more, and a step with a gate is "of two tokens"."""
    points, most = [], 0.0
    for n, seconds in found["target"]:  # a longer pass costs no less
        most = max(most, seconds)
        points.append((float(n), most + fixed))
    return PassCosts(tuple(points), ((1.0, found["draft"]), (2.0, max(found["draft"], found["gated"]))))


def factors_of(options: Any) -> dict[int, sprinter.Pair]:
    """The pair with targets padded by each factor."""
    setting = PAIRS[options.pair]
    pair = sprinter.load_pair(**setting.options, prefix_cache_bytes=0)
    gate, draft = setting.options.get("gate"), pair.models.draft
    assert draft is not None
    larger = {one: padded(pair, draft.model, one, gate=gate) for one in options.factors if one != 1}
    return {factor: larger.get(factor, pair) for factor in options.factors}


def costs(options: Any) -> None:
    """Time passes, by factor."""
    began, name = time.time(), NAME.format(part="costs", pair=options.pair)
    law, found = Sampling(PAIRS[options.pair].temperature), dict[str, Any]()
    for factor, pair in factors_of(options).items():
        found[str(factor)] = timed(pair, REPEATS if factor == 1 else 3, law)
    lines = [
        " | ".join([factor, *(f"{1e3 * s:.1f}" for _, s in one["target"]), f"{1e3 * one['draft']:.2f}",
                    f"{1e3 * one['gated']:.2f}", f"{one['draft'] / one['target'][0][1]:.3f}"])
        for factor, one in found.items()
    ]  # fmt: skip
    lengths = " | ".join(f"{n} tokens, ms" for n in LENGTHS)
    heads = f"times the pass | {lengths} | draft step | with gate | ratio"
    facts = {"benchmark": BENCHMARK, "command": command(), "environment": environment(), "costs": found}
    facts["seconds"] = round(time.time() - began, 1)
    write_results(name, facts, "\n".join(grid(heads, lines)))


# --- wall time --------------------------------------------------------------------------------------------------------
def wall(options: Any) -> None:
    """Texts with the clock running, and what their counts times the costs of passes would have given."""
    began, name = time.time(), NAME.format(part="wall", pair=options.pair)
    rows, lines, setting = [], [], PAIRS[options.pair]
    for factor, pair in factors_of(options).items():
        known = as_costs(
            timed(pair, REPEATS if factor == 1 else 3, Sampling(PAIRS[options.pair].temperature))
        )
        suites = asked(pair, setting, options.data).values()
        prompts = [one[1] for group in zip(*suites, strict=False) for one in group][: options.prompts]
        methods = [arm.format(tau=TAUS[options.pair]) for arm in (PLAIN, *WALL)]
        arms = [method_arm(pair, arm, 0.0, new_tokens=WALL_TOKENS) for arm in methods]
        interleave(arms, prompts, note=f"factor {factor}")
        seconds = {arm.name: _seconds([out.stats for out in arm.outs], known) for arm in arms}
        expected = {arm.name: seconds[arm.name] / arm.total("new_tokens") for arm in arms}
        for arm in arms[1:]:
            measured = speed_ratio(arm, arms[0])
            product = expected[arms[0].name] / expected[arm.name]
            row = {"factor": factor, "method": arm.name, "measured": list(measured), "product": product}
            rows.append(row)
            lines.append(f"{factor} | `{arm.name}` | {cells(measured)} | {product:.2f}")
    facts = {
        "benchmark": BENCHMARK, "command": command(), "environment": environment(), "prompts": options.prompts,
        "new_tokens": WALL_TOKENS, "rows": rows, "seconds": round(time.time() - began, 1),
    }  # fmt: skip
    heads = "times the pass | method | speed over plain, measured | counts times costs"
    write_results(name, facts, "\n".join(grid(heads, lines)))


def _seconds(all_stats: Sequence[Any], known: PassCosts) -> float:
    calls, steps, read = (sum(getattr(one, name) for one in all_stats) for name in FIELDS[1:4])
    return float(calls * known.target_s(max(1.0, read / calls)) + steps * known.draft_s(1))


PARTS = {"counts": counts, "costs": costs, "wall": wall}


def main() -> None:
    """Do one part."""
    parser = option_parser(__doc__)
    parser.add_argument("part", choices=PARTS, nargs=None if not SMOKE else "?", default="wall")
    parser.add_argument("--pair", choices=PAIRS, default="builtin")
    parser.add_argument(
        "--gates", nargs="+", type=lambda one: one.partition("=")[::2], default=sized([], [("paper", "")]),
        metavar="NAME=DIR", help="further gates; paper: as in the paper, linear on the hidden state",
    )  # fmt: skip
    parser.add_argument("--factors", type=int, nargs="+", default=[1])
    parser.add_argument("--prompts", type=int, default=sized(20, 2), help="number of prompts that are timed")
    parser.add_argument(
        "--keep", type=Path, help="file for the recorded laws, which when_it_pays_harm.py reads"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no method after these")
    parser.add_argument("--step", type=float, default=0.1, help="cost of a draft step, for `optimal`")
    parser.add_argument("--token", type=float, default=0.05, help="the same of each further token")
    parser.add_argument("--reads", default="1.05x1.1x1.2x1.5", help="costs of passes, as `auto` takes them")
    options = parser.parse_args()
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
