"""llama.cpp as a runner: our plain decoding against llama-cpp-python's own loop, and what the methods gain on it.

Two targets: the built-in one, and the same at the cost of a model of 17 M parameters (``enlarged.py``: equal logits, so
equal texts, drifts and accepted shares; only the cost of its passes is another). For each way to store the weights, in
one run with all arms interleaved on the same prompts:

* our plain decoding over llama-cpp-python's own loop (0.95 is wanted);
* speed against drift of sprinter, opt, fuzzy and lookup, and exact speculation with the γ that was fastest on others;
* what a pass over n tokens costs, and what the methods would gain if the passes were all that cost: why each that
  loses does.

The best setting of each method is chosen on every other prompt and reported on the rest, so that the choice does not
flatter it.

Run: python benchmarks/llamacpp/speed.py --data DIR [--prompts 40] [--dtypes f32 f16] [--targets builtin enlarged]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import sprinter
from benchmarks.common import (
    Arm,
    best_gamma,
    heldout_prompts,
    interleave,
    interval,
    method_arm,
    option_parser,
    peer_arm,
    save,
    speed_ratio,
)  # fmt: skip
from benchmarks.enlarged import write_enlarged
from benchmarks.llamacpp.tables import DRIFT, SIZES, predict, table
from benchmarks.smoke import sized
from sprinter.decode.spec import parse_method
from sprinter.models.convert import convert_gguf
from sprinter.models.pair import builtin_paths
from sprinter.models.runner import make_runner
from sprinter.theory.figures import check_matplotlib

NAME = "llamacpp/speed"
TARGETS = {"builtin": "the built-in target", "enlarged": "the built-in target at the cost of a 17 M one"}
PLAIN, OWN = "autoregressive", ("llamacpp:plain", "llamacpp:lookup")
CONTEXT, PASSES = 80, sized(40, 2)  # about the middle of a text of the prompts
PARTS = ("prefill_s", "draft_s", "gate_s", "target_s", "other_s")


def families(gamma: int) -> dict[str, list[str]]:
    """Each method at several settings of its dial, around the γ that suits exact speculation."""
    longer = (gamma, gamma + 1, gamma + 2)  # what accepts more may draft more
    return {
        "speculative": [f"speculative(gamma={g})" for g in longer[:2]],
        "lookup": ["lookup"],
        "opt": [f"opt(epsilon={slack}, gamma={g})" for g in longer for slack in (0.01, 0.05)],
        "fuzzy": [f"fuzzy(threshold={gap}, gamma={g})" for g in longer for gap in (0.1, 0.2)],
        "sprinter": [f"sprinter(tau={tau})" for tau in (0.45, 0.55, 0.6, 0.65, 0.7, 0.75)],
    }


def passes(pair: sprinter.Pair) -> dict[str, dict[int, float]]:
    """Median ms of a pass over n tokens after ``CONTEXT`` others, sizes interleaved, target and draft.

    "target, another size": where the pass before had another number of tokens, so that llama.cpp makes its graph anew.
    """
    found: dict[str, dict[int, float]] = {}
    for which, model in (("target", pair.models.target), ("draft", pair.models.draft)):
        assert model is not None
        runner = make_runner(model.model, max_len=256)
        tokens = torch.randint(
            1, pair.models.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(0)
        )
        runner.extend(tokens)
        times: dict[bool, dict[int, list[float]]] = {again: {n: [] for n in SIZES} for again in (False, True)}
        for _ in range(PASSES):
            for n in SIZES:
                for again in (False, True):
                    began = time.perf_counter()
                    runner.extend(tokens[:, :n])
                    times[again][n].append(time.perf_counter() - began)
                    runner.rewind([CONTEXT])
        for again, name in ((True, which), (False, f"{which}, another size")):
            found[name] = {n: 1e3 * median(values) for n, values in times[again].items()}
    return found


def measure(
    pair: sprinter.Pair, prompts: list[str], tuning: list[str], temperature: float, note: str
) -> dict[str, Any]:
    """Rows of all arms, the best of each method, and the costs of passes."""
    costs = passes(pair)
    gamma, tuned = best_gamma(pair, tuning, temperature)
    groups = families(gamma)
    own = [peer_arm(pair, spec, temperature) for spec in OWN]
    plain = method_arm(pair, PLAIN, temperature)
    methods = {
        name: [method_arm(pair, spec, temperature) for spec in specs] for name, specs in groups.items()
    }
    ours = [plain, *(arm for arms in methods.values() for arm in arms)]
    interleave([*own, *ours], prompts, note=note)
    rows = [arm_row(arm, plain, own[0]) for arm in own]
    rows += [arm_row(arm, plain, own[0]) | counts(arm) for arm in ours]
    base = next(row for row in rows if row["arm"] == PLAIN)
    for row in rows:
        if "drift" in row:
            row |= predict(row, base, costs)
    best = {name: told for name, arms in methods.items() if (told := chosen(arms, plain))}
    best |= {"any": told} if (told := chosen(ours[1:], plain)) else {}
    return {"gamma": gamma, "tuned": tuned, "rows": rows, "best": best, "passes_ms": costs}


def arm_row(arm: Arm, plain: Arm, own: Arm) -> dict[str, Any]:
    """Speeds."""
    return {
        "arm": arm.name,
        "tokens_per_s": float(arm.tokens.sum() / arm.busy_s.sum()),
        "over_plain": speed_ratio(arm, plain),
        "over_own_loop": speed_ratio(arm, own),
    }


def counts(arm: Arm) -> dict[str, Any]:
    """Drift, counts and milliseconds a token."""
    new = arm.total("new_tokens")
    names = ("target_calls", "target_tokens", "draft_steps", "draft_tokens")
    return {
        "drift": interval(arm.drift, arm.tokens),
        "sizes_change": parse_method(arm.name).length is None,
        "per_token": {name: arm.total(name) / new for name in names},
        "ms_per_token": {part: 1e3 * arm.total(part) / new for part in PARTS},
    }


def chosen(arms: Sequence[Arm], plain: Arm) -> dict[str, Any] | None:
    """The fastest within the bound on every other prompt, measured on the rest; None where none is within it."""
    halves = {arm.name: (half(arm, 0), half(arm, 1)) for arm in arms}
    within = [one for one, _ in halves.values() if one.drift.sum() <= DRIFT * one.tokens.sum()]
    if not within:
        return None
    fastest = max(within, key=lambda arm: float(arm.tokens.sum() / arm.busy_s.sum()))
    rest = halves[fastest.name][1]
    return {
        "arm": fastest.name,
        "over_plain": speed_ratio(rest, half(plain, 1)),
        "drift": interval(rest.drift, rest.tokens),
    }


def half(arm: Arm, which: int) -> Arm:
    """The arm on every other prompt."""
    return Arm(arm.name, arm.run, arm.outs[which::2])


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(40, 4))
    parser.add_argument("--tuning-prompts", type=int, default=sized(6, 1))
    parser.add_argument(
        "--dtypes", nargs="+", default=sized(["f32", "f16"], ["f32"]), choices=["f32", "f16", "q8_0"]
    )
    parser.add_argument(
        "--targets", nargs="+", default=sized(list(TARGETS), ["builtin"]), choices=list(TARGETS)
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    check_matplotlib()
    began, paths = time.time(), builtin_paths()
    results: dict[str, Any] = {}
    texts = heldout_prompts(args.data, args.prompts + args.tuning_prompts)
    prompts, tuning = texts[: args.prompts], texts[args.prompts :]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = {"builtin": paths["target"], "enlarged": folder / "enlarged"}
        if "enlarged" in args.targets:
            write_enlarged(paths["target"], sources["enlarged"])
        for which in args.targets:
            for dtype in args.dtypes:
                target = convert_gguf(sources[which], folder / f"{which}-{dtype}.gguf", dtype)
                draft = convert_gguf(paths["draft"], folder / f"draft-{dtype}.gguf", dtype)
                pair = sprinter.load_pair(target, draft=draft, gate=paths["gate"])
                key = f"{TARGETS[which]}, {dtype}"
                results[key] = measure(pair, prompts, tuning, args.temperature, key)
                results[key] |= {"parameters": pair.models.target.size}
                facts = {"temperature": args.temperature, "results": results}
                save(NAME, table(results), began, args.prompts, **facts)


if __name__ == "__main__":
    main()
