"""Arms on a pair, asked by the bench's own harness: interleaved, synchronised, metered in full, with intervals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.roofline import load_captured
from benchmarks.gpu.stage import Run, TimeUp, free
from benchmarks.gpu.train import load_trained, trained_pair
from sprinter.bench.arm import Arm, ArmAnswer, Ask
from sprinter.bench.arms import parse_arm
from sprinter.bench.harness import Harness
from sprinter.bench.journal import Journal
from sprinter.bench.sample import Sample, Suite
from sprinter.bench.settings import BenchSettings
from sprinter.bench.suites import TextRule
from sprinter.bench.summary import summarise
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.laws import Sampling
from train_builtin import Document

TEMPERATURES = (1.0, 0.0)
TUNING_SHARE = 0.12  # of the time of a temperature
RULE = TextRule(share=0.3, words=200, min_words=40, paragraphs=True)
PEERS = ("transformers:plain", "transformers:assisted", "transformers:lookup")
PLAIN, EXACT = "autoregressive", "speculative"


class Captured:
    """An arm of our engine on another copy of the pair, whose steps are captured."""

    def __init__(self, arm: Arm, pair: Pair) -> None:
        self._arm, self._pair = arm, pair
        self.name, self.spec, self.engine = f"captured {arm.name}", arm.spec, arm.engine

    def start(self, pair: Pair) -> None:
        self._arm.start(self._pair)

    def lossless(self, sampling: Sampling) -> bool | None:
        return self._arm.lossless(sampling)

    def versions(self) -> dict[str, str]:
        return self._arm.versions()

    def answer(self, ask: Ask) -> ArmAnswer:
        return self._arm.answer(ask)

    def close(self) -> None:
        self._arm.close()


def make_arms(specs: dict[str, str], captured: Pair | None, both: Container[str] = ()) -> list[Arm]:
    """Arms by name. With a captured pair our own run on that one, and those named in ``both`` eagerly as well."""
    arms: list[Arm] = []
    for name, spec in specs.items():
        arm = parse_arm(f"{spec} as {name}")
        ours = captured is not None and arm.engine == "sprinter"
        if not ours or name in both:
            arms.append(arm)
        if ours and captured is not None:
            arms.append(Captured(parse_arm(f"{spec} as {name}"), captured))
    return arms


def measure(
    run: Run,
    name: str,
    pair: Pair,
    arms: Sequence[Arm],
    suite: Suite,
    settings: BenchSettings,
    deadline: float,
) -> dict[str, Any]:
    """Ask until all is answered or the time is up; reported over the prompts that every arm answered.

    The rows stay in the folder's rows/NAME.
    """
    said = time.monotonic()

    def progress(done: int, wanted: int, note: str) -> None:
        nonlocal said
        if time.monotonic() - said > 10:
            said = time.monotonic()
            run.say(f"{name}: {done} of {wanted}, {note}")
        if time.monotonic() >= deadline:
            raise TimeUp

    journal = Journal(run.out / "rows" / name, {"suite": suite.facts(), **settings.facts()}, restart=True)
    harness = Harness(pair, arms, [suite], settings, journal, progress)
    stopped = False
    try:
        harness.run()
    except TimeUp:
        stopped = True
    finally:
        harness.close()
    live = {arm.name for arm in arms} - harness.failed.keys()
    answered = Counter((row["question_id"], row["repeat"]) for row in journal.rows if row["model_id"] in live)
    rows = [row for row in journal.rows if answered[row["question_id"], row["repeat"]] == len(live)]
    engines = {arm.name: arm.engine for arm in arms}
    return {
        "temperature": settings.temperatures[0],
        "new_tokens": settings.new_tokens,
        "prompts_wanted": len(suite.samples),
        "stopped_by_time": stopped,
        "arms": [
            {"name": a.name, "spec": a.spec, "engine": a.engine, "error": harness.failed.get(a.name)}
            for a in arms
        ],
        "summary": summarise(rows, engines, settings.bases),
    }


def text_suite(documents: Sequence[Document], count: int, new_tokens: int) -> Suite:
    """One prompt a document: the beginning of its first paragraph that is long enough."""
    samples = []
    for document in documents:
        prompts = (RULE.cut(line)[0] for line in document.text.split("\n"))
        if prompt := next((found for found in prompts if found), ""):
            samples.append(Sample(f"{document.source}:{document.id}", "text", (prompt,)))
    if len(samples) < 2:
        raise UserError("the held-out text has no paragraphs of 40 words: give text with longer lines")
    return Suite("held-out", tuple(samples[:count]), new_tokens, rule=str(RULE))


def part(suite: Suite, samples: Sequence[Sample]) -> Suite:
    """The same suite with some of its samples."""
    return Suite(suite.name, tuple(samples), suite.new_tokens, rule=suite.rule)


def our_specs(gamma: int, taus: Sequence[float], shares: Sequence[float]) -> dict[str, str]:
    """Name -> spec of our methods."""
    gates = {
        f"sprinter trusting {share:.0%}": f"sprinter(tau={tau})"
        for share, tau in zip(shares, taus, strict=True)
    }
    return {
        PLAIN: "autoregressive",
        EXACT: f"speculative(gamma={gamma})",
        "svip": "svip",
        "lookup": "lookup",
        **dict(sorted(gates.items())),
        "coin": "coin(rate=0.5)",
        "opt": f"opt(epsilon=0.1,gamma={gamma})",
        "fuzzy": f"fuzzy(threshold=0.1,gamma={gamma})",
        "draft-only": "draft-only",
    }


def best_gamma(
    run: Run, pair: Pair, suite: Suite, temperature: float, deadline: float
) -> tuple[int, dict[str, float]]:
    """The fastest γ of exact speculative decoding on the captured pair if there is one, and all speeds."""
    specs = {str(gamma): f"speculative(gamma={gamma})" for gamma in run.sizes.gammas}
    settings = BenchSettings((temperature,), new_tokens=run.sizes.new_tokens, bases=())
    found = measure(run, f"tuning-T{temperature:g}", pair, make_arms(specs, None), suite, settings, deadline)
    speeds = {row["arm"]: float(row["tokens_per_s"]) for row in found["summary"]}
    if not speeds:  # no time for it
        return run.sizes.gammas[len(run.sizes.gammas) // 2], {}
    return int(max(speeds, key=lambda name: speeds[name])), speeds


def run_stage(run: Run, deadline: float) -> None:
    """Our methods and transformers' on the trained pair, at both temperatures."""
    facts, documents = trained_pair(run)
    sizes, gate = run.sizes, facts["gate"]
    suite = text_suite(documents, sizes.tuning_prompts + sizes.prompts, sizes.new_tokens)
    tuning, asked = suite.samples[: sizes.tuning_prompts], suite.samples[sizes.tuning_prompts :]
    pair = load_trained(run, compile=False)
    captured, why_not = load_captured(run, partial(load_trained, run))
    found: list[dict[str, Any]] = []
    run.keep("arms", captured=why_not or "yes", temperatures=found)
    for i, temperature in enumerate(TEMPERATURES):
        began = time.monotonic()
        left = (deadline - began) / (len(TEMPERATURES) - i)
        gamma, speeds = best_gamma(
            run, captured or pair, part(suite, tuning), temperature, began + TUNING_SHARE * left
        )
        specs = our_specs(gamma, gate["taus"], gate["trusted_shares"]) | {peer: peer for peer in PEERS}
        bases = (PLAIN, EXACT, f"captured {EXACT}", *PEERS[:2])
        settings = BenchSettings((temperature,), new_tokens=sizes.new_tokens, bases=bases)
        arms, name = make_arms(specs, captured, (PLAIN, EXACT)), f"arms-T{temperature:g}"
        measured = measure(run, name, pair, arms, part(suite, asked), settings, began + left)
        found.append({"gamma": gamma, "gamma_speeds": speeds, **measured})
        run.keep("arms")
    free(run.device)
