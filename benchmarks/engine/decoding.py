"""Decoding with captured passes: against transformers, against vLLM, and the dial against our own exact decoding.

    python benchmarks/engine/decoding.py --data DIR [--pairs builtin enlarged gpt2 gpt2-xl] [--prompts 24] [--no-vllm]

Pairs: the built-in one; ``enlarged``, whose target has the built-in target's law at the cost of a 16.8 M one
(benchmarks/enlarged.py; drifts and accepted shares are the built-in pair's own); GPT-2 small and XL with random
weights, plain decoding alone, since their laws mean nothing. All in float32 and in bfloat16, but XL, which is run step
by step in float32 and for a few tokens. Settings of exact decoding, ours and transformers', are tuned on other prompts
beforehand; vLLM's are not, since each would be a process of its own. transformers runs in float32. One process, one
thread, arms interleaved prompt by prompt; vLLM answers from processes of its own on the same core, its interpreter
named by SPRINTER_VLLM_PYTHON.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import sprinter
from benchmarks.common import (
    NEW_TOKENS,
    cells,
    grid,
    heldout_prompts,
    in_turn,
    note_run,
    option_parser,
    write_results,
)  # fmt: skip
from benchmarks.enlarged import write_enlarged
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.arm import ArmAnswer, Ask
from sprinter.bench.arms import parse_arm
from sprinter.bench.statistics import BootstrapInterval, ratio_of_ratios
from sprinter.laws import Sampling
from sprinter.models.pair import builtin_paths

NAME = "engine/decoding"
PAIRS = ("builtin", "enlarged", "gpt2", "gpt2-xl")
DTYPES = ("float32", "bfloat16")
EXACT = tuple(f"speculative(gamma={gamma})" for gamma in sized(range(1, 7), range(1, 2)))
ASSISTED = (
    *(f"transformers:assisted(tokens={tokens})" for tokens in sized(range(1, 6), range(1, 2))),
    "transformers:assisted(schedule=heuristic)", "transformers:assisted(tokens=20, schedule=dynamic)",
)  # fmt: skip
DIAL = (
    *(f"sprinter(tau={tau})" for tau in (0.3, 0.45, 0.55, 0.6, 0.65, 0.7, 0.76, 0.82)),
    *(
        f"sprinter(tau={tau}, tail={tail})"
        for tau, tail in ((0.6, 2), (0.65, 2), (0.65, 4), (0.7, 2), (0.7, 4))
    ),
)  # a tail of untrusted tokens is checked at each call: it pays where calls are dear
DIAL = sized(DIAL, DIAL[:2])
ASSISTED = sized(ASSISTED, ASSISTED[:1])
VLLM = {
    "float32": ("vllm:plain",),
    "bfloat16": (
        "vllm:plain(dtype=bfloat16)",
        *(
            f"vllm:draft_model(tokens={n}, draft_sampling=probabilistic, dtype=bfloat16)"
            for n in (1, 2, 3, 5)
        ),
        *(f"vllm:ngram(tokens={n}, dtype=bfloat16)" for n in (3, 5)),
    ),
}  # what speculates does so faster in bfloat16
DRIFT = 0.15
CONDITIONS = (
    "transformers runs in float32. Its assisted and our exact decoding are tuned on other prompts; of vLLM's "
    "settings the fastest on the reported prompts is taken. The dial's setting is chosen on every other prompt, "
    "and reported on the rest."
)
TEMPERATURES = sized((1.0, 0.0), (1.0,))
TUNING_PROMPTS = sized(5, 1)


@dataclass
class Timed:
    """An arm of the bench on a pair, and tokens, seconds and drifts of each text."""

    name: str
    answer: Callable[[Ask], ArmAnswer]
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)

    def texts(self, first: int) -> Timed:
        """The arm on every other text."""
        some = (kept[first::2] for kept in (self.tokens, self.seconds, self.drift))
        return Timed(self.name, self.answer, *some)

    @property
    def tokens_per_s(self) -> float:
        """Over all texts."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def mean_drift(self) -> float:
        """Drift per token over all texts."""
        return sum(self.drift) / sum(self.tokens)

    def over(self, base: Timed) -> BootstrapInterval:
        """Ratio of tokens a second, with its 95 % interval over prompts."""
        return ratio_of_ratios((self.tokens, self.seconds), (base.tokens, base.seconds))


class Arms:
    """Arms that were started, closed together."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def start(self, pair: sprinter.Pair, specs: Sequence[str], note: str = "") -> list[Timed]:
        """Ready to answer."""
        made = [parse_arm(spec) for spec in specs]
        for arm in made:
            arm.start(pair)
            self._open.append(arm)
        return [Timed(arm.name + note, arm.answer) for arm in made]

    def close(self) -> None:
        """Processes of peers end."""
        for arm in self._open:
            arm.close()


def interleave(
    arms: Sequence[Timed],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    note: str,
    new_tokens: int = NEW_TOKENS,
) -> None:
    """Every arm on every prompt in turn, two warm-up texts thrown away; begins anew."""

    def ask(i: int) -> Ask:
        return Ask(tuple(prompts[i]), new_tokens, Sampling(temperature), i)

    for arm in arms:
        arm.tokens, arm.seconds, arm.drift = [], [], []
        arm.answer(ask(0))
        arm.answer(ask(0))
    for i, arm in in_turn(arms, len(prompts), f"{note} T={temperature:g}"):
        made = arm.answer(ask(i))
        arm.tokens.append(len(made.ids))
        arm.seconds.append(made.wall_s)
        arm.drift.append(sum(made.drifts or ()))


def fastest(arms: Sequence[Timed]) -> Timed | None:
    """By tokens a second."""
    return max(arms, key=lambda arm: arm.tokens_per_s, default=None)


def tuned(
    arms: Arms, pairs: dict[str, sprinter.Pair], prompts: Sequence[Sequence[int]], temperature: float
) -> tuple[dict[str, str], str, dict[str, float]]:
    """The fastest exact decoding by dtype, transformers' fastest assisted one in float32, and all speeds."""
    exact = {dtype: arms.start(pair, EXACT, f", {dtype}") for dtype, pair in pairs.items()}
    assisted = arms.start(pairs["float32"], ASSISTED)
    every = [*assisted, *(arm for some in exact.values() for arm in some)]
    interleave(every, prompts, temperature, "tuning")
    speeds = {arm.name: arm.tokens_per_s for arm in every}
    chosen = {
        dtype: EXACT[max(range(len(EXACT)), key=lambda i, some=some: some[i].tokens_per_s)]  # type: ignore[misc]
        for dtype, some in exact.items()
    }
    best = fastest(assisted)
    assert best is not None
    return chosen, best.name, speeds


def decoding(
    pairs: dict[str, sprinter.Pair],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    peers: Sequence[Timed],
) -> dict[str, Any]:
    """Tokens a second of every arm, and the ratios that were asked for; ``peers``: vLLM's arms."""
    with closing(Arms()) as arms:
        chosen, assisted, speeds = tuned(arms, pairs, prompts[:TUNING_PROMPTS], temperature)
        theirs, helped = arms.start(pairs["float32"], ("transformers:plain", assisted))
        ours = {
            dtype: arms.start(pair, ("autoregressive", chosen[dtype], "lookup", *DIAL), f", {dtype}")
            for dtype, pair in pairs.items()
        }
        every = [theirs, helped, *(arm for some in ours.values() for arm in some), *peers]
        interleave(every, prompts[TUNING_PROMPTS:], temperature, "decoding")
    plain_peers, best_peer = [arm for arm in peers if "plain" in arm.name], fastest(peers)
    rows = [
        {
            "arm": arm.name,
            "tokens_per_s": arm.tokens_per_s,
            "over_transformers": arm.over(theirs),
            "over_assisted": arm.over(helped),
            "over_exact": arm.over(_exact_beside(arm, ours)),
            "mean_drift": arm.mean_drift,
        }
        for arm in every
    ]
    exact = [some[1] for some in ours.values()]
    lossless = fastest([arm for some in ours.values() for arm in some[:3]])
    assert lossless is not None
    return {
        "rows": rows,
        "tuning": speeds,
        "plain_over_transformers": {dtype: some[0].over(theirs) for dtype, some in ours.items()},
        "exact_over_assisted": {dtype: some[1].over(helped) for dtype, some in ours.items()},
        "sprinter_over_exact": {dtype: _dial(some) for dtype, some in ours.items()},
        "plain_over_vllm_plain": {
            dtype: some[0].over(arm) for (dtype, some), arm in zip(ours.items(), plain_peers, strict=False)
        },
        "exact_over_best_vllm": {arm.name: arm.over(best_peer) for arm in exact} if best_peer else {},
        "lossless_over_best_vllm": (
            {"ours": lossless.name, "vllm": best_peer.name, "ratio": lossless.over(best_peer)}
            if best_peer
            else {}
        ),
    }


def _exact_beside(arm: Timed, ours: dict[str, list[Timed]]) -> Timed:
    """Our exact decoding in the arm's own dtype."""
    return next((some[1] for some in ours.values() if arm in some), ours["float32"][1])


def _dial(arms: Sequence[Timed]) -> dict[str, Any] | None:
    """The fastest setting within the drift on half of the texts; over plain and over exact decoding on the others."""
    seen = [arm.texts(0) for arm in arms[3:]]
    best = fastest([arm for arm in seen if arm.mean_drift <= DRIFT])
    if best is None:
        return None
    plain, exact, told = (arm.texts(1) for arm in (arms[0], arms[1], arms[3 + seen.index(best)]))
    return {
        "arm": told.name, "drift": told.mean_drift, "over_exact": told.over(exact), "over_plain": told.over(plain)
    }  # fmt: skip


def builtin() -> dict[str, sprinter.Pair]:
    """The built-in pair in each dtype, compiled."""
    return {dtype: sprinter.load_pair(dtype=dtype, compile=not SMOKE) for dtype in DTYPES}


def enlarged(folder: Path) -> dict[str, sprinter.Pair]:
    """By dtype: the same draft and gate, a target of the same law that costs more."""
    paths, target = builtin_paths(), folder / "target"
    write_enlarged(paths["target"], target)
    rest = {"draft": paths["draft"], "gate": paths["gate"]}
    return {dtype: sprinter.load_pair(target, **rest, dtype=dtype, compile=not SMOKE) for dtype in DTYPES}


def gpt2(folder: Path, prompts: Sequence[Sequence[int]], large: bool) -> dict[str, Any]:
    """Plain decoding of a GPT-2 with random weights: ours, and transformers' in float32."""
    torch.manual_seed(0)
    sizes = {"n_layer": 48, "n_embd": 1600, "n_head": 25} if large else sized({}, {"n_layer": 1})
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder / "gpt2")
    AutoTokenizer.from_pretrained(builtin_paths()["target"]).save_pretrained(folder / "gpt2")
    dtypes = DTYPES[:1] if large else DTYPES
    pairs = {
        dtype: sprinter.load_pair(folder / "gpt2", dtype=dtype, compile=not large and not SMOKE)
        for dtype in dtypes
    }
    with closing(Arms()) as arms:
        (theirs,) = arms.start(pairs["float32"], ("transformers:plain",))
        ours = [
            arm
            for dtype, pair in pairs.items()
            for arm in arms.start(pair, ("autoregressive",), f", {dtype}")
        ]
        interleave([theirs, *ours], prompts, 1.0, "GPT-2", 8 if large else NEW_TOKENS)
    return {
        "rows": [
            {"arm": arm.name, "tokens_per_s": arm.tokens_per_s, "over_transformers": arm.over(theirs)}
            for arm in [theirs, *ours]
        ]
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown tables."""
    lines = ["# Decoding with captured passes", "", CONDITIONS]
    for name in ("builtin", "enlarged"):
        for temperature, facts in results.get(name, {}).items():
            rows = [
                f"`{r['arm']}` | {r['tokens_per_s']:.0f} | {cells(r['over_transformers'])} "
                f"| {cells(r['over_assisted'])} | {cells(r['over_exact'])} | {r['mean_drift']:.3f}"
                for r in facts["rows"]
            ]
            head = "arm | tokens/s | ÷ transformers plain | ÷ assisted (tuned) | ÷ exact of its dtype (tuned) | drift"
            title = f"**{name} pair, temperature {temperature}**, {NEW_TOKENS} new tokens"
            lines += ["", title, "", *grid(head, rows), "", *_said(facts)]
    titles = {
        "gpt2": "GPT-2 small, random weights",
        "gpt2-xl": "GPT-2 XL, random weights, passes not captured",
    }
    for name, title in titles.items():
        if name in results:
            rows = [
                f"`{r['arm']}` | {r['tokens_per_s']:.3g} | {cells(r['over_transformers'])}"
                for r in results[name]["rows"]
            ]
            head = "arm | tokens/s | ÷ transformers plain"
            lines += ["", f"**{title}, temperature 1**", "", *grid(head, rows)]
    return "\n".join(lines)


def _said(facts: dict[str, Any]) -> list[str]:
    """The main ratios, a line each."""
    told = [
        f"{key.replace('_', ' ')}: {name} {cells(value)}"
        for key in (
            "plain_over_transformers",
            "exact_over_assisted",
            "plain_over_vllm_plain",
            "exact_over_best_vllm",
        )
        for name, value in facts[key].items()
    ]
    if best := facts["lossless_over_best_vllm"]:
        told.append(
            f"our fastest without drift over vLLM's: {best['ours']} / {best['vllm']} {cells(best['ratio'])}"
        )
    for dtype, dial in facts["sprinter_over_exact"].items():
        told.append(
            f"sprinter within drift {DRIFT}, {dtype}: {dial['arm']} at {dial['drift']:.3f}: "
            f"{cells(dial['over_exact'])} over exact, {cells(dial['over_plain'])} over plain"
            if dial
            else f"sprinter within drift {DRIFT}, {dtype}: none of the settings"
        )
    return [f"- {line}" for line in told]


def main() -> None:
    """Measure the pairs that were asked for; those that were measured before are kept."""
    parser = option_parser(__doc__)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=sized(PAIRS, PAIRS[::2]))
    parser.add_argument("--prompts", type=int, default=sized(24, 2))
    parser.add_argument("--temperatures", nargs="+", type=float, default=TEMPERATURES)
    parser.add_argument("--no-vllm", action="store_true", default=SMOKE)
    options = parser.parse_args()
    if options.prompts < 2:
        parser.error("--prompts: give 2 or more: the dial is chosen on one half and reported on the other")
    torch.set_num_threads(1)
    results = {"benchmark": NAME}
    tokenizer = AutoTokenizer.from_pretrained(builtin_paths()["target"])
    texts = heldout_prompts(options.data, TUNING_PROMPTS + options.prompts)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        for name in options.pairs:
            began = time.time()
            if name.startswith("gpt2"):
                large = name == "gpt2-xl"
                results[name] = gpt2(Path(folder), prompts[: 4 if large else 6], large)
            else:
                pairs = builtin() if name == "builtin" else enlarged(Path(folder))
                with closing(Arms()) as vllm:
                    specs = {} if options.no_vllm else VLLM
                    peers = [arm for dtype, some in specs.items() for arm in vllm.start(pairs[dtype], some)]
                    for temperature in options.temperatures:
                        made = decoding(pairs, prompts, temperature, peers)
                        results.setdefault(name, {})[f"{temperature:g}"] = made
                        note_run(
                            results, name, began
                        )  # what is kept is reported even if the rest is not reached
                        write_results(NAME, results, table(results))
            note_run(results, name, began)
            write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
