"""How far the bench can be trusted: the same arm twice, and an arm that is made 5 % slower.

    python benchmarks/bench/noise.py --data DIR

20 runs. In each, ``speculative`` takes part twice (A and B), beside plain decoding and a third copy that is held up by
5 % of its own time after each answer. Reported: in how many runs the 95 % interval of A's speed over B's holds 1, how
wide it is, in how many pairs of runs ``compare`` flags the slowed copy, and in how many it flags the same arm wrongly.
"""

from __future__ import annotations

import sys
import time
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import sprinter
from benchmarks.common import NEW_TOKENS, heldout_prompts, option_parser, save
from benchmarks.smoke import sized
from sprinter.bench.arm import ArmAnswer, Ask
from sprinter.bench.arms import parse_arm
from sprinter.bench.compare import compare
from sprinter.bench.harness import Harness
from sprinter.bench.journal import Memory
from sprinter.bench.results import SCHEMA
from sprinter.bench.sample import Sample, Suite
from sprinter.bench.settings import BenchSettings
from sprinter.bench.statistics import ratio_of_ratios
from sprinter.bench.summary import groups

RUNS = sized(20, 5)
POOLED = sized(4, 2)  # runs taken together, as repeats of one run
SLOWER = 0.05
SPEC = "speculative(gamma=3)"


class Slowed:
    """An arm that takes ``share`` longer."""

    def __init__(self, arm: Any, share: float) -> None:
        self._arm, self._share = arm, share
        self.name, self.spec, self.engine = "slowed", arm.spec, arm.engine
        self.start, self.lossless, self.versions, self.close = (
            arm.start,
            arm.lossless,
            arm.versions,
            arm.close,
        )

    def answer(self, ask: Ask) -> ArmAnswer:
        began = time.perf_counter()
        answer = self._arm.answer(ask)
        until = time.perf_counter() + self._share * answer.wall_s
        while time.perf_counter() < until:
            pass
        answer.wall_s += self._share * answer.wall_s
        assert time.perf_counter() - began >= answer.wall_s
        return answer


def one_run(pair: sprinter.Pair, suite: Suite, seed: int) -> list[dict[str, Any]]:
    """Rows of one run."""
    arms = [parse_arm("autoregressive"), parse_arm(f"{SPEC} as A"), parse_arm(f"{SPEC} as B")]
    arms.append(Slowed(parse_arm(SPEC), SLOWER))
    journal = Memory()
    harness = Harness(pair, arms, [suite], BenchSettings(seed=seed), journal)
    harness.run()
    harness.close()
    if harness.failed:
        raise RuntimeError(str(harness.failed))
    return journal.rows


def results_of(rows: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    """A results file in which ``arm`` is called "A"; beside it the base."""
    kept = [row for row in rows if row["model_id"] in (arm, "autoregressive")]
    renamed = [row | {"model_id": "A"} if row["model_id"] == arm else row for row in kept]
    return {"schema": SCHEMA, "rows": renamed, "settings": {"bases": ["autoregressive"]}}


def verdict(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What ``compare`` says of A's speed over the base."""
    (change,) = (c for c in compare(before, after) if c.arm == "A" and c.measure.startswith("speed"))
    return change.verdict


def facts(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """All counts."""
    intervals = []
    for rows in runs:
        found = {key[0]: group for key, group in groups(rows).items()}
        intervals.append(ratio_of_ratios(found["A"].speed, found["B"].speed))
    longer = [pooled(runs[i : i + POOLED]) for i in range(0, len(runs) - POOLED + 1, POOLED)]
    slowed, same = verdicts(list(pairwise(runs)))
    slowed_longer, same_longer = verdicts(list(combinations(longer, 2)))
    return {
        "runs": len(runs),
        "intervals": intervals,
        "hold_1": sum(low <= 1 <= high for _, low, high in intervals),
        "widest_half": max((high - low) / 2 for _, low, high in intervals),
        "pairs": len(slowed),
        "slowed_flagged": slowed.count("worse"),
        "same_flagged": len(same) - same.count("same"),
        "pooled": POOLED,
        "pairs_pooled": len(slowed_longer),
        "slowed_flagged_pooled": slowed_longer.count("worse"),
        "same_flagged_pooled": len(same_longer) - same_longer.count("same"),
    }


Rows = list[dict[str, Any]]


def pooled(runs: list[Rows]) -> Rows:
    """Several runs as the repeats of one."""
    return [row | {"repeat": repeat} for repeat, rows in enumerate(runs) for row in rows]


def verdicts(pairs: list[tuple[Rows, Rows]]) -> tuple[list[str], list[str]]:
    """Of the slowed arm and of the same arm, one a pair of runs."""
    slowed = [verdict(results_of(a, "A"), results_of(b, "slowed")) for a, b in pairs]
    return slowed, [verdict(results_of(a, "A"), results_of(b, "B")) for a, b in pairs]


def table(found: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    runs, pairs = f"of {found['runs']} runs", f"of {found['pairs']} pairs"
    longer, longer_pairs = f"{found['pooled']} repeats", f"of {found['pairs_pooled']} pairs"
    rows = (
        ("what", "result"),
        ("---", "---"),
        ("the same arm twice: 95 % interval of the speed ratio holds 1", f"{found['hold_1']} {runs}"),
        ("widest of these intervals", f"± {100 * found['widest_half']:.1f} %"),
        ("`compare` of two runs flags an arm made 5 % slower", f"{found['slowed_flagged']} {pairs}"),
        ("`compare` of two runs flags the same arm (wrongly)", f"{found['same_flagged']} {pairs}"),
        (f"... of two runs of {longer}, 5 % slower", f"{found['slowed_flagged_pooled']} {longer_pairs}"),
        (f"... of two runs of {longer}, the same arm", f"{found['same_flagged_pooled']} {longer_pairs}"),
    )
    return "\n".join(f"| {what} | {result} |" for what, result in rows)


def main() -> None:
    """Run 20 times, saving after each."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(60, 2))
    args = parser.parse_args()
    began = time.time()
    pair = sprinter.load_pair(compile=False)
    prompts = heldout_prompts(args.data, args.prompts)
    suite = Suite("heldout", tuple(Sample(str(i), "", (text,)) for i, text in enumerate(prompts)), NEW_TOKENS)
    runs: list[list[dict[str, Any]]] = []
    for i in range(RUNS):
        runs.append(one_run(pair, suite, seed=0))  # the same texts: what differs is the clock
        if i:
            found = facts(runs)
            save("bench/noise", table(found), began, len(prompts), **found)


if __name__ == "__main__":
    main()
