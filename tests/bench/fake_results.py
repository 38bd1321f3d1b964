"""Results files as a run would leave them, from a simple model of rounds: the whole schema, any number of arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sprinter.bench.summary import summarise

TARGET_S, DRAFT_S = 0.0075, 0.0011
BASES = ("autoregressive", "speculative", "transformers:plain", "transformers:assisted")


@dataclass(frozen=True)
class FakeArm:
    """How an arm behaves: chance that a draft token is kept, drift, and how long its drafts are."""

    name: str
    spec: str = ""
    engine: str = "sprinter"
    kept: float = 0.0
    drift: float = 0.0
    lossless: bool | None = True
    gamma: int = 0
    trusted: float = 0.0
    overhead: float = 1.0
    tells: bool = True
    error: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        status = "failed" if self.error else "ok"
        versions = {"transformers": "5.3.0"} if self.engine == "transformers" else {}
        return {
            "name": self.name, "spec": self.spec or self.name, "engine": self.engine, "versions": versions,
            "status": status, "error": self.error,
        }  # fmt: skip


def _lossy(name: str, kept: float, drift: float, gamma: int = 5, trusted: float = 0.0) -> FakeArm:
    return FakeArm(name, kept=kept, drift=drift, lossless=False, gamma=gamma, trusted=trusted)


ARMS: tuple[FakeArm, ...] = (
    FakeArm("autoregressive"),
    FakeArm("draft-only", kept=1.0, drift=0.27, lossless=False, gamma=10_000),
    *(FakeArm("speculative" if g == 5 else f"speculative(gamma={g})", kept=0.72, gamma=g) for g in (5, 3, 8, 12)),
    FakeArm("heuristic", kept=0.72, gamma=6),
    FakeArm("confidence(c=0.4)", kept=0.77, gamma=6),
    *(FakeArm(f"svip(h={h}, c=0.15)", kept=0.74 + h / 10, gamma=g) for h, g in ((0.3, 4), (0.5, 7), (0.7, 9))),
    FakeArm("adaedl", kept=0.76, gamma=5),
    FakeArm("specdec++(h=0.7)", kept=0.78, gamma=5, overhead=1.15),
    FakeArm("disco(threshold=0.5)", kept=0.78, gamma=5, overhead=1.05),
    FakeArm("batch(drafts=2, gamma=5)", kept=0.78, gamma=5, overhead=1.5),
    FakeArm("specinfer(drafts=2, gamma=5)", kept=0.79, gamma=5, overhead=1.5),
    FakeArm("spectr(drafts=2, gamma=5)", kept=0.775, gamma=5, overhead=1.5),
    FakeArm("lookup(n=3, gamma=5)", kept=0.2, gamma=5, overhead=0.7),
    *(_lossy(f"sprinter(tau={t}, cap=20, tail=0)", 0.97 - 0.5 * (t - 0.3), 0.16 * (1 - t) ** 0.8, 20, 0.6)
      for t in (0.3, 0.5, 0.6, 0.7, 0.8)),
    _lossy("sprinter(tau=0.5, cap=20, tail=4)", 0.86, 0.062, 20, 0.5),
    *(_lossy(f"coin(rate={r}, cap=20)", r, 0.26 * r, 20, r) for r in (0.3, 0.5, 0.7)),
    *(_lossy(f"fuzzy(divergence=js_reference, threshold={t}, gamma=5)", 0.74 + 0.22 * t, 0.25 * t)
      for t in (0.1, 0.3, 0.5, 0.8)),
    *(_lossy(f"opt(epsilon={e}, gamma=5)", 0.75 + 2.2 * e, 1.4 * e) for e in (0.01, 0.03, 0.06)),
    *(_lossy(f"uno(epsilon={e}, gamma=5)", 0.75 + 2.2 * e, 1.9 * e) for e in (0.01, 0.03, 0.06)),
    *(_lossy(f"mentored(kl={k}, gamma=5)", 0.76 + 0.5 * k, 0.35 * k) for k in (0.05, 0.1, 0.2)),
    *(_lossy(f"lenient(w={w}, gamma=5)", 0.72 + 0.3 * (1 - w), 0.28 * (1 - w)) for w in (0.9, 0.8, 0.5)),
    _lossy("typical(epsilon=0.09, delta=0.3, gamma=5)", 0.9, 0.19),
    _lossy("bild(fallback=0.6, rollback=5.0)", 0.93, 0.22),
    *(_lossy(f"random(rate={r}, gamma=5)", 0.72 + 0.25 * r, 0.25 * r) for r in (0.25, 0.5)),
    *(FakeArm(f"allocation(share={s})", kept=s, drift=0.27 * s, lossless=False, gamma=8, overhead=0.6)
      for s in (0.25, 0.5)),
    FakeArm("trust=gate(tau=0.6),stop=svip(h=0.5),accept=exact", kept=0.9, drift=0.045, lossless=False, gamma=12,
            trusted=0.5),
    FakeArm("transformers:plain", "generate", "transformers", overhead=1.35, tells=False),
    FakeArm("transformers:assisted", "assistant_model, constant", "transformers", 0.71, gamma=5, overhead=1.7,
            tells=False),
    FakeArm("transformers:dynamic", "assistant_model, dynamic", "transformers", 0.76, gamma=6, overhead=1.6,
            tells=False),
    FakeArm("transformers:lookup", "prompt_lookup_num_tokens=5", "transformers", 0.2, gamma=5, overhead=1.5,
            tells=False),
    FakeArm("vllm:draft", "draft_model", "vllm", error="vLLM is not installed: pip install vllm"),
)  # fmt: skip
"""Forty-odd arms; the last one failed at its start."""

CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class FakeSuite:
    """A suite and how easy its texts are for the draft."""

    name: str
    prompts: int = 6
    new_tokens: int = 40
    ease: float = 0.0
    categories: tuple[str, ...] = ("text",)
    turns: int = 1


SUITES = (
    FakeSuite("spec-bench", 12, 48, 0.03, CATEGORIES, 2),
    FakeSuite("wiki-summary", 8, 20),
    FakeSuite("long", 4, 400, 0.02),
)


def fake_results(
    arms: Sequence[FakeArm] = ARMS,
    suites: Sequence[FakeSuite] = SUITES,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    *,
    seed: int = 0,
    laws: bool = True,
) -> dict[str, Any]:
    """Contents of a ``results.json``."""
    chance = np.random.default_rng(seed)
    rows = [
        _row(chance, arm, suite, temperature, i)
        for suite in suites
        for temperature in temperatures
        for i in range(suite.prompts)
        for arm in arms
        if not arm.error
    ]
    model = {
        "sha256": "0f" * 32,
        "parameters": 15_600_000,
        "dtype": "float32",
        "context": 1024,
        "vocab_size": 2048,
    }
    return {
        "schema": "sprinter-bench/1",
        "created": "2026-01-02T03:04:05+00:00",
        "seconds": 1234.5,
        "command": "sprinter bench --suite spec-bench --suite wiki-summary --arm all --temperature 0 --temperature 1",
        "environment": {
            "cpu": "Some CPU @ 2.00GHz", "cores": 2, "threads": 2, "gpu": None, "driver": None, "cuda": None,
            "system": "Linux x86_64", "python": "3.11.7", "torch": "2.13.0", "transformers": "5.3.0",
            "sprinter": "0.1.0", "commit": "4061823+",
        },
        "pair": {"target": {"name": "builtin-target", **model}, "draft": {"name": "builtin-draft", **model},
                 "gate": {"sha256": "ab" * 32, "parameters": 257, "features": ["hidden"]}},
        "settings": {"temperatures": list(temperatures), "new_tokens": None, "repeats": 1, "seed": 0, "top_k": 0,
                     "top_p": 1.0, "min_p": 0.0, "warmup": 1, "bases": list(BASES)},
        "suites": [
            {"name": s.name, "samples": s.prompts, "new_tokens": s.new_tokens, "rule": "first 30 % of the words",
             "sources": [{"name": f"{s.name}.jsonl", "sha256": "cd" * 32}], "skipped": {"too_short": 2},
             "left_out": {"too_long": 1}}
            for s in suites
        ],
        "arms": [arm.facts for arm in arms],
        "rows": rows,
        "summary": summarise(rows, {arm.name: arm.engine for arm in arms}, BASES),
        "judge": {"base": "autoregressive", "status": "ok", "error": None, "duels": 120, "judge": "likelihood"},
        "analysis": fake_analysis(temperatures[-1] if temperatures else 1.0) if laws else None,
    }  # fmt: skip


def _row(
    chance: np.random.Generator, arm: FakeArm, suite: FakeSuite, temperature: float, i: int
) -> dict[str, Any]:
    exact = arm.lossless is True
    kept = arm.kept if arm.kept in (0.0, 1.0) else min(0.98, arm.kept + suite.ease + 0.06 * (1 - temperature))
    drift = 0.0 if exact else arm.drift * float(chance.uniform(0.8, 1.2))
    turns = [_turn(chance, arm, suite, kept, 30 + 5 * i) for _ in range(suite.turns)]
    new = [sum(lengths) for lengths, _, _ in turns]
    lengths = [n for turn, _, _ in turns for n in turn]
    drafted = sum(n - 1 for n in lengths if n > 1)
    trusted = round(arm.trusted * drafted)
    likelihood = -(2.1 + 0.9 * drift + float(chance.normal(0, 0.03)))
    tokens = sum(new)
    quality = {
        "rougeL": 0.31 - 0.3 * drift + float(chance.normal(0, 0.01)), "perplexity": math.exp(-likelihood),
        "log_likelihood_per_token": likelihood, "log_likelihood": likelihood * tokens,
        "scored_tokens": float(tokens), "distinct2": 0.81, "repeated4": 0.04,
    }  # fmt: skip
    if arm.name != "autoregressive":
        quality["win_tie"] = float(chance.random() < 0.6 - drift)
    return {
        "question_id": f"q{i}", "category": suite.categories[i % len(suite.categories)], "model_id": arm.name,
        "choices": [{"index": 0, "turns": ["text"] * len(turns), "decoding_steps": [len(t[0]) for t in turns],
                     "new_tokens": new, "wall_time": [t[1][-1] for t in turns],
                     "accept_lengths": lengths if arm.tells else []}],
        "tstamp": 0.0, "suite": suite.name, "temperature": temperature, "repeat": 0, "seed": i,
        "lossless": arm.lossless, "prompt_tokens": [30 + 5 * i + sum(new[:t]) for t in range(len(turns))],
        "ttft_s": [t[1][0] for t in turns], "arrivals_ms": [[round(1000 * s, 3) for s in t[1]] for t in turns],
        "target_calls": [len(t[0]) if arm.tells else None for t in turns],
        "draft_steps": [t[2] if arm.tells else None for t in turns],
        "origins": {"trusted": trusted, "accepted": drafted - trusted, "replacement": len(lengths) // 2,
                    "target": len(lengths) - len(lengths) // 2} if arm.tells else {},
        "drift_sum": drift * tokens if arm.engine == "sprinter" else None,
        "drift_tokens": tokens if arm.engine == "sprinter" else 0,
        "token_ids": [[1] * n for n in new], "quality": quality,
    }  # fmt: skip


def _turn(
    chance: np.random.Generator, arm: FakeArm, suite: FakeSuite, kept: float, prompt: int
) -> tuple[list[int], list[float], int]:
    """Tokens of each round, arrival of each token in seconds, draft steps."""
    lengths: list[int] = []
    arrivals: list[float] = []
    clock, steps = 0.004 + 2e-5 * prompt, 0
    while (left := suite.new_tokens - sum(lengths)) > 0:
        gamma = min(arm.gamma, left)
        run = gamma if kept >= 1 else min(gamma, int(chance.geometric(1 - kept)) - 1) if kept else 0
        added = min(left, run + (arm.gamma < 10_000))
        slow = arm.overhead * (1 + (prompt + sum(lengths)) / 1500) * float(chance.uniform(0.95, 1.05))
        clock += slow * (DRAFT_S * gamma + TARGET_S * (arm.gamma < 10_000))
        lengths.append(added)
        arrivals += [clock] * added
        steps += gamma
    return lengths, arrivals, steps


def fake_analysis(temperature: float = 1.0) -> dict[str, Any]:
    """The result of ``sprinter.bench.analysis.analyse``."""
    centres = [0.125 + 0.25 * i for i in range(24)]
    means = [1 - 0.16 * math.sqrt(h) for h in centres]

    def spread(values: list[float], width: float) -> dict[str, list[float | None]]:
        shifts = {"mean": 0.0, "p10": -2.0, "p25": -1.0, "p50": 0.1, "p75": 1.0, "p90": 2.0}
        told: dict[str, list[float | None]] = {
            name: [max(0.0, v * (1 + width * by)) for v in values] for name, by in shifts.items()
        }
        for column in told.values():
            column[3] = None
        return told

    overlaps = spread(means, 0.04)
    overlaps = {k: [None if v is None else min(1.0, v) for v in column] for k, column in overlaps.items()}
    share = [(i + 0.5) / 100 for i in range(100)]
    truth = [0.3 + 0.69 * s**0.6 for s in share]
    return {
        "sampling": {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        "new_tokens": 64, "texts": 40, "positions": 2560, "overlap": 0.745, "entropy_overlap_correlation": -0.41,
        "cap": 32,
        "entropy": {"edges": [0.25 * i for i in range(25)], "count": [0 if i == 3 else 40 + i for i in range(24)],
                    "overlap": overlaps, "tv": [None if m is None else 1 - m for m in overlaps["mean"]],
                    "length": spread([0.5 + 9 * math.exp(-h) for h in centres], 0.2)},
        "ratio": {"edges": [round(1 + 0.05 * i, 2) for i in range(41)],
                  "count": [int(600 * math.exp(-((i - 3) ** 2) / 18)) for i in range(40)], "above": 31, "left_out": 12,
                  "p10": 1.05, "p25": 1.1, "p50": 1.17, "p75": 1.26, "p90": 1.41, "share_to_1_3": 0.79},
        "bounds": {"share": share, "truth": truth, "pinsker": [t - 0.12 + 0.08 * t for t in truth],
                   "bretagnolle_huber": [t - 0.2 + 0.16 * t for t in truth],
                   "entropy": [t - 0.25 + 0.2 * t + 0.04 * math.sin(9 * t) for t in truth], "c": 0.15,
                   "violations": {"pinsker": 0.0, "bretagnolle_huber": 0.0, "entropy": 0.121}},
        "position": {"reached": [0.75**i for i in range(32)], "kept": [0.74 + 0.004 * i for i in range(32)]},
    }  # fmt: skip
