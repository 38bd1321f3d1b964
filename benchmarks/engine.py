"""The fast engine: passes and draft steps against the machine's limit, decoding against transformers, captured = eager.

    python benchmarks/engine.py --data DIR [--parts passes steps decoding equality context] [--prompts 20]

One process, one thread, arms interleaved; a part is saved when it is done, and parts that were measured before stay.
Times of a pass are the lower quartile of its repeats. The bandwidth is measured on a buffer as large as what a pass
reads, since small weights live in the processor's cache. What is not on the disk is compiled first, which takes about a
minute a shape; compiled code lies in the user's cache directory, or in SPRINTER_CACHE.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import NEW_TOKENS, ROOT, cells, command, environment, heldout_prompts, write_results
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import sprinter
from sprinter.bench.arm import Answer, Ask
from sprinter.bench.arms import parse_arm
from sprinter.bench.statistics import Interval, ratio_of_ratios
from sprinter.engine.captured import CapturedDraftSteps
from sprinter.engine.rows import Rows
from sprinter.engine.steps import DraftPlan, DraftRow, DraftSteps, EagerDraftSteps
from sprinter.laws import Sampling
from sprinter.models.memory import cache_bytes
from sprinter.models.runner import Runner, make_runner
from sprinter.random import AddressedDraws

LENGTHS = (1, 2, 4, 6, 8, 16, 32)
CONTEXT = 128
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
AHEAD = (1, 4)
METHODS = ("autoregressive", "speculative(gamma=4)", "sprinter")
EXACT = tuple(f"speculative(gamma={gamma})" for gamma in range(1, 7))
ASSISTED = (
    *(f"transformers:assisted(tokens={tokens})" for tokens in range(1, 6)),
    "transformers:assisted(schedule=heuristic)", "transformers:assisted(tokens=20, schedule=dynamic)",
)  # fmt: skip
DIAL = tuple(f"sprinter(tau={tau})" for tau in (0.3, 0.45, 0.6, 0.68, 0.74, 0.8, 0.86))
DRIFT = 0.15
TEMPERATURES = (1.0, 0.0)
TUNING_PROMPTS = 6
PARTS = ("passes", "steps", "decoding", "equality", "context")


def times(arms: Mapping[str, Callable[[], Any]], repeats: int = 60) -> dict[str, float]:
    """Seconds of each arm, the lower quartile, arms in turn."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 3):
        for name, run in arms.items():
            began = time.perf_counter()
            run()
            if repeat >= 3:
                taken[name].append(time.perf_counter() - began)
    return {name: float(np.quantile(values, 0.25)) for name, values in taken.items()}


def weight_bytes(model: PreTrainedModel) -> int:
    """What one pass reads of the weights: an embedding that is not also the output's is read a row at a time."""
    head, inputs = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    total = sum(weights.numel() * weights.element_size() for weights in model.parameters())
    return total if head is inputs else total - inputs.numel() * inputs.element_size()


def limit_s(n_bytes: int) -> float:
    """Seconds to read so many bytes, by the faster of two ways."""
    buffer = torch.ones(n_bytes // 4)
    return min(times({"sum": buffer.sum, "dot": lambda: buffer.dot(buffer)}, 20).values())


def filled(model: PreTrainedModel, max_len: int, context: int, compile: bool) -> Runner:
    """A runner that holds ``context`` tokens."""
    runner = make_runner(model, max_len=max_len, compile=compile)
    runner.extend(torch.arange(context)[None] % 1000 + 5, logits=False)
    return runner


def pass_arm(runner: Runner, n: int, context: int) -> Callable[[], Any]:
    """A pass over n tokens after the context."""
    tokens = torch.arange(n)[None] + 7

    def run() -> None:
        runner.rewind([context])
        runner.extend(tokens)

    return run


def gpt2_small() -> PreTrainedModel:
    """GPT-2's smallest size, random weights."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config()).eval()


def passes(model: PreTrainedModel, repeats: int = 60) -> dict[str, Any]:
    """Times of the eager and the captured pass at each length, and the share of the bandwidth at length one."""
    runners = {"eager": filled(model, 512, CONTEXT, False), "captured": filled(model, 512, CONTEXT, True)}
    rows: dict[str, Any] = {}
    for n in LENGTHS:
        arms = {name: pass_arm(runner, n, CONTEXT) for name, runner in runners.items()}
        rows[str(n)] = {name: 1e6 * value for name, value in times(arms, repeats).items()}
    read = weight_bytes(model) + cache_bytes(model, CONTEXT)
    limit = 1e6 * limit_s(read)
    return {
        "us": rows,
        "bytes": read,
        "limit_us": limit,
        "share_of_bandwidth": {name: limit / rows["1"][name] for name in runners},
    }


def steps(pair: sprinter.Pair) -> dict[str, Any]:
    """A draft step: eager, captured, the compiled code in it, the compiled pass alone; what the host adds."""
    assert pair.models.draft is not None
    model = pair.models.draft.model
    eager, captured = (Rows(filled(model, 512, 1, c), pair.models.vocab_size, "draft") for c in (False, True))
    makers: dict[str, tuple[Rows, Callable[[Rows], DraftSteps]]] = {
        "eager": (eager, EagerDraftSteps), "captured": (captured, CapturedDraftSteps),
    }  # fmt: skip
    drafters = {name: (rows, make(rows)) for name, (rows, make) in makers.items()}
    for rows in (eager, captured):
        rows.runner.rewind([0])
        rows.runner.extend(torch.arange(CONTEXT)[None] + 5, logits=False)
    alone = 1e6 * times({"pass": pass_arm(captured.runner, 1, CONTEXT)})["pass"]
    read = weight_bytes(model) + cache_bytes(model, CONTEXT)
    limit = 1e6 * limit_s(read)
    found = []
    for name, heads in (("no head", {}), ("gate", {"gate": pair.gate} if pair.gate else {})):
        for k in AHEAD:
            plan = DraftPlan(Sampling(), ("entropy",), heads)
            row = DraftRow(0, [9], CONTEXT, 1, AddressedDraws(1), plan, count=k)
            arms = {arm: draft_arm(rows, drafter, row) for arm, (rows, drafter) in drafters.items()}
            spent = {arm: 1e6 * value / k for arm, value in times(arms).items()}
            unit = unit_us(captured, arms["captured"], k)
            found.append(
                {
                    "heads": name, "steps_a_look": k, "eager_us": spent["eager"], "captured_us": spent["captured"],
                    "unit_us": unit, "host_over_unit": spent["captured"] / unit - 1,
                    "share_of_bandwidth": limit / spent["captured"],
                }
            )  # fmt: skip
    return {"rows": found, "pass_us": alone, "bytes": read, "limit_us": limit}


def draft_arm(rows: Rows, drafter: DraftSteps, row: DraftRow) -> Callable[[], Any]:
    """Draft steps of one row after the context."""

    def run() -> None:
        rows.runner.rewind([CONTEXT])
        drafter([row])

    return run


def unit_us(rows: Rows, run: Callable[[], Any], k: int) -> float:
    """Microseconds a step that the compiled code itself takes, while ``run`` runs."""
    units: Any = rows.runner._units  # type: ignore[attr-defined]
    spent: list[float] = []
    before = dict(units._found)

    def timed(code: Any) -> Any:
        def call(inputs: list[torch.Tensor]) -> Any:
            began = time.perf_counter()
            made = code(inputs)
            spent[-1] += time.perf_counter() - began
            return made

        return call

    units._found.update({key: timed(code) for key, code in before.items() if code is not None})
    for _ in range(60):
        spent.append(0.0)
        run()
    units._found.update(before)
    return 1e6 * float(np.quantile(spent, 0.25)) / k


@dataclass
class Timed:
    """An arm of the bench, and tokens, seconds and drifts of each text."""

    name: str
    answer: Callable[[Ask], Answer]
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Over all texts."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def mean_drift(self) -> float:
        """Of all tokens; those that were not metered have none."""
        return sum(self.drift) / sum(self.tokens)

    def over(self, base: Timed) -> Interval:
        """Ratio of tokens a second, with its 95 % interval over prompts."""
        return ratio_of_ratios((self.tokens, self.seconds), (base.tokens, base.seconds))


def timed(pair: sprinter.Pair, specs: Sequence[str], note: str = "") -> list[Timed]:
    """Arms that are ready to answer."""
    arms = [parse_arm(spec) for spec in specs]
    for arm in arms:
        arm.start(pair)
    return [Timed(arm.name + note, arm.answer) for arm in arms]


def interleave(
    arms: Sequence[Timed], prompts: Sequence[Sequence[int]], temperature: float, note: str
) -> None:
    """Every arm on every prompt in turn, the order of arms rotated, one warm-up prompt thrown away."""

    def ask(i: int) -> Ask:
        return Ask(tuple(prompts[i]), NEW_TOKENS, Sampling(temperature), i)

    for arm in arms:
        arm.answer(ask(0))
    gc.collect()
    gc.disable()
    try:
        for i in range(len(prompts)):
            for arm in [*arms[i % len(arms) :], *arms[: i % len(arms)]]:
                made = arm.answer(ask(i))
                arm.tokens.append(len(made.ids))
                arm.seconds.append(made.wall_s)
                arm.drift.append(sum(made.drifts or ()))
            print(f"\r{note} T={temperature:g} {i + 1}/{len(prompts)}", end="", file=sys.stderr)
    finally:
        gc.enable()
        print(file=sys.stderr)


def decoding(
    pair: sprinter.Pair, half: sprinter.Pair, prompts: Sequence[Sequence[int]], temperature: float
) -> dict[str, Any]:
    """Tokens a second against transformers and against our own exact decoding, settings of both tuned beforehand."""
    tuned = timed(pair, (*EXACT, *ASSISTED))
    interleave(tuned, prompts[:TUNING_PROMPTS], temperature, "tuning")
    exact, assisted = (
        max(some, key=lambda arm: arm.tokens_per_s).name
        for some in (tuned[: len(EXACT)], tuned[len(EXACT) :])
    )
    arms = timed(pair, ("transformers:plain", assisted, "autoregressive", exact, *DIAL))
    halves = timed(half, ("autoregressive", exact), ", bfloat16")
    interleave([*arms, *halves], prompts[TUNING_PROMPTS:], temperature, "decoding")
    theirs, helped, plain, best = arms[:4]
    rows = [
        {
            "arm": arm.name,
            "tokens_per_s": arm.tokens_per_s,
            "over_transformers": arm.over(theirs),
            "over_assisted": arm.over(helped),
            "over_exact": arm.over(best),
            "mean_drift": arm.mean_drift,
        }
        for arm in [*arms, *halves]
    ]
    bounded = [arm for arm in arms[4:] if arm.mean_drift <= DRIFT]
    fast = max(bounded, key=lambda arm: arm.tokens_per_s, default=None)
    return {
        "rows": rows,
        "tuning": {arm.name: arm.tokens_per_s for arm in tuned},
        "plain_over_transformers": plain.over(theirs),
        "exact_over_assisted": best.over(helped),
        "sprinter_over_exact": {"arm": fast.name, "ratio": fast.over(best)} if fast else None,
    }


def equality(dtype: str, prompts: Sequence[Sequence[int]], seeds: int) -> dict[str, dict[str, Any]]:
    """Texts that part, captured against eager, by method, and where."""
    captured, eager = (sprinter.load_pair(dtype=dtype, compile=compile) for compile in (True, False))
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        places = []
        for seed in range(seeds):
            one, other = (
                [t.id for t in pair.generate(prompts[seed % len(prompts)], method=method, seed=seed).tokens]
                for pair in (captured, eager)
            )
            if one != other:
                places.append(
                    next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1)
                )
            print(f"\r{dtype} {method} {seed + 1}/{seeds}", end="", file=sys.stderr)
        print(file=sys.stderr)
        found[method] = {
            "texts": seeds, "parted": len(places), "median_token": float(np.median(places)) if places else None,
        }  # fmt: skip
    return found


def longer(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same shape with random weights and room for the longest context."""
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = CONTEXTS[-1] + 256
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def context(model: PreTrainedModel) -> list[dict[str, float]]:
    """A captured pass of one token by context, and the time that reading keys and values takes at least."""
    runner = make_runner(model, max_len=CONTEXTS[-1] + 8, compile=True)
    rows = []
    for length in CONTEXTS:
        held = runner.lengths[0]
        runner.extend(torch.arange(length - held)[None] % 1000 + 5, logits=False)
        spent = 1e6 * times({"pass": pass_arm(runner, 1, length)})["pass"]
        read = 1e6 * limit_s(cache_bytes(model, length))
        rows.append({"context": length, "us": spent, "attention_bytes_us": read})
        runner.rewind([length])
    return rows


def table(results: Mapping[str, Any]) -> str:
    """What people read."""
    makers: dict[str, Callable[[Any], list[str]]] = {
        "passes": _passes_table, "steps": _steps_table, "decoding": _decoding_table, "equality": _equality_table,
        "context": _context_table,
    }  # fmt: skip
    lines = ["# The fast engine"]
    for part, make in makers.items():
        if part in results:
            lines += ["", *make(results[part])]
    return "\n".join(lines)


def _grid(head: str, rows: Sequence[str]) -> list[str]:
    return [f"| {head} |", "| --- " * (head.count("|") + 1) + "|", *(f"| {row} |" for row in rows)]


def _passes_table(part: Mapping[str, Any]) -> list[str]:
    lines = [f"Microseconds of a pass over n tokens after {CONTEXT}, eager / captured.", ""]
    rows = [
        " | ".join(
            [
                name, *(f"{facts['us'][str(n)]['eager']:.0f} / {facts['us'][str(n)]['captured']:.0f}" for n in LENGTHS),
                f"{facts['limit_us']:.0f}", f"{facts['share_of_bandwidth']['captured']:.2f}",
            ]
        )
        for name, facts in part.items()
    ]  # fmt: skip
    head = " | ".join(["model", *(f"n = {n}" for n in LENGTHS), "limit at 1", "share of the bandwidth at 1"])
    return [*lines, *_grid(head, rows)]


def _steps_table(part: Mapping[str, Any]) -> list[str]:
    lines = [
        f"A draft step in microseconds; the compiled pass alone takes {part['pass_us']:.0f}, "
        f"reading its bytes {part['limit_us']:.0f}.",
        "",
    ]
    rows = [
        f"{r['heads']} | {r['steps_a_look']} | {r['eager_us']:.0f} | {r['captured_us']:.0f} | {r['unit_us']:.0f} "
        f"| {r['host_over_unit']:.0%} | {r['captured_us'] / part['pass_us'] - 1:.0%} | {r['share_of_bandwidth']:.2f}"
        for r in part["rows"]
    ]
    head = "heads | steps a look | eager | captured | its compiled code | host adds | over the pass alone | bandwidth"
    return [*lines, *_grid(head, rows)]


def _decoding_table(part: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for temperature, facts in part.items():
        rows = [
            f"`{r['arm']}` | {r['tokens_per_s']:.0f} | {cells(r['over_transformers'])} | {cells(r['over_assisted'])} "
            f"| {cells(r['over_exact'])} | {r['mean_drift']:.3f}"
            for r in facts["rows"]
        ]
        head = "arm | tokens/s | ÷ transformers plain | ÷ assisted (tuned) | ÷ exact (tuned) | mean drift"
        lines += [
            f"Decoding at temperature {temperature}, {NEW_TOKENS} new tokens.",
            "",
            *_grid(head, rows),
            "",
        ]
    return lines[:-1]


def _equality_table(part: Mapping[str, Any]) -> list[str]:
    rows = [
        f"{dtype} | `{method}` | {r['texts']} | {r['parted']} | "
        f"{'–' if r['median_token'] is None else r['median_token']}"
        for dtype, methods in part.items()
        for method, r in methods.items()
    ]
    lines = ["Texts of captured steps that are not those of eager ones.", ""]
    return [*lines, *_grid("dtype | method | texts | parted | median token", rows)]


def _context_table(part: Mapping[str, Any]) -> list[str]:
    lines = [
        "A captured pass of one token by context, random weights, and reading keys and values alone.",
        "",
    ]
    rows = [
        f"{name} | {r['context']} | {r['us']:.0f} | {r['us'] - rows[0]['us']:.0f} "
        f"| {r['attention_bytes_us'] - rows[0]['attention_bytes_us']:.0f}"
        for name, rows in part.items()
        for r in rows
    ]
    head = f"model | context | microseconds | more than at {CONTEXT} | more bytes take at least"
    return [*lines, *_grid(head, rows)]


def main() -> None:
    """Measure the parts that were asked for; parts that were measured before are kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the text files")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=50, help="texts a method of the part equality")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = sprinter.load_pair(compile=True)
    assert pair.tokenizer is not None and pair.models.draft is not None
    texts = heldout_prompts(options.data, TUNING_PROMPTS + options.prompts)
    prompts = [pair.tokenizer(text)["input_ids"] for text in texts]
    models = {"target": pair.models.target.model, "draft": pair.models.draft.model}
    old = ROOT / "benchmarks" / "results" / "engine.json"
    results: dict[str, Any] = {"benchmark": "engine"}
    if old.exists():
        results = json.loads(old.read_text(encoding="utf-8"))

    def measure_decoding() -> dict[str, Any]:
        half = sprinter.load_pair(dtype="bfloat16", compile=True)
        return {f"{t:g}": decoding(pair, half, prompts, t) for t in TEMPERATURES}

    makers: dict[str, Callable[[], Any]] = {
        "passes": lambda: (
            {name: passes(model) for name, model in models.items()}
            | {"GPT-2 small, random": passes(gpt2_small(), repeats=8)}
        ),
        "steps": lambda: steps(pair),
        "decoding": measure_decoding,
        "equality": lambda: {
            dtype: equality(dtype, prompts, options.seeds) for dtype in ("float32", "bfloat16")
        },
        "context": lambda: {name: context(longer(model)) for name, model in models.items()},
    }
    for part in options.parts:
        began = time.time()
        results[part] = makers[part]()
        done = {"command": command("engine"), "seconds": round(time.time() - began, 1)}
        results.setdefault("runs", {})[part] = {**done, "environment": environment()}
        write_results("engine", results, table(results))


if __name__ == "__main__":
    main()
