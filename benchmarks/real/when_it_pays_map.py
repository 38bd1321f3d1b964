"""The map: counts of methods times costs of passes, by pair, text, cost of a draft step and fixed cost of a call.

    python benchmarks/real/when_it_pays_map.py

Reads what ``when_it_pays.py`` has counted and timed. The speed of a method is tokens over (target calls x seconds of a
pass over the mean number of tokens that it read + draft steps x seconds of a step); a fixed cost is added to each call.
The best exact and the best lossy method of equal accuracy stand side by side; ``scripts/figures.py`` draws them.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

from benchmarks.common import RESULTS, cells, grid, option_parser, save
from benchmarks.real.when_it_pays import PAIRS, PLAIN, as_costs, of_gate, unpacked
from sprinter.bench.statistics import BootstrapInterval, bootstrap, ratio_of_ratios
from sprinter.decode.costs import PassCosts
from sprinter.decode.spec import parse_method

NAME = "real/when_it_pays_map"
DELAYS_S = 0.0, 0.02, 0.1
RATIOS = 0.02, 0.05, 0.1, 0.2, 0.3, 0.5
WALLS = "speculative(gamma=5)", "svip", "certain", "sprinter"
LIMITS = 0.01, 0.02, 0.05, 0.1
LOW = 0.01
"""Drift up to which a text whose answers are not checked counts as equal."""
PAPERS = (
    ("GPT-Neo 125M/1.3B", 8.01 / 64.65, {"Wiki-Summary": 2.17, "LM1B": 1.95}),
    ("GPT-2 small/XL", 7.25 / 71.78, {"Wiki-Summary": 2.01, "LM1B": 2.05}),
)


@dataclass(frozen=True, eq=False)
class Cell:
    """What a method did on a suite.

    Attributes:
        arm, suite: names. how: "run" or "replay".
        rows: tokens, target calls, draft steps, tokens read by the target, drift, right or NaN, ``[texts, 6]``.
    """

    arm: str
    suite: str
    how: str
    rows: np.ndarray

    @property
    def lossless(self) -> bool:
        """Whether a greedy text is the target's."""
        return exact(self.arm)

    @property
    def gated(self) -> bool:
        """Whether a gate scores each draft token."""
        return "gate" in self.arm or "sprinter" in self.arm

    @property
    def drift(self) -> float:
        """Mean drift a token."""
        return float(self.rows[:, 4].sum() / self.rows[:, 0].sum())

    def seconds(self, costs: PassCosts) -> np.ndarray:
        """Of each text, without its prompt's pass; ``costs`` has a step with the gate as one that reads 2 tokens."""
        calls, steps, read = self.rows[:, 1:4].T
        a_pass = costs.target_s(max(1.0, read.sum() / calls.sum())) if calls.sum() else 0.0
        found: np.ndarray = calls * a_pass + steps * costs.draft_s(2 if self.gated else 1)
        return found

    def speed(self, costs: PassCosts) -> float:
        """Over plain decoding."""
        return float(costs.target_s(1) * self.rows[:, 0].sum() / self.seconds(costs).sum())


@cache
def exact(arm: str) -> bool:
    """Whether a method is lossless on greedy texts."""
    return parse_method(of_gate(arm)[1]).lossless(True)


class Found(NamedTuple):
    """The best exact method and the best lossy one of equal accuracy, in one place of the map."""

    exact: Cell
    exact_speed: float
    lossy: Cell | None
    gain: BootstrapInterval
    lost: BootstrapInterval | None


def read(part: str, pair: str) -> dict[str, Any] | None:
    """What ``when_it_pays.py`` has left, if it has."""
    path = RESULTS / "real" / f"when_it_pays_{part}_{pair}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def cells_of(counts: Mapping[str, Any]) -> list[Cell]:
    """All cells of a pair; a run takes the place of a replay."""
    found: dict[tuple[str, str], Cell] = {}
    for how in ("replay", "run"):
        for arm, suites in counts[f"{how}s"].items():
            for suite, lines in suites.items():
                found[arm, suite] = Cell(arm, suite, how, np.array(unpacked(lines)))
    return [*found.values()]


def lost(plain: Cell, other: Cell) -> BootstrapInterval | None:
    """Share of right answers lost against plain decoding, paired by prompt; None where nothing was checked."""
    if np.isnan(plain.rows[:, 5]).any() or np.isnan(other.rows[:, 5]).any():
        return None
    less = plain.rows[:, 5] - other.rows[:, 5]
    return bootstrap(lambda rows: less[rows].mean(-1), len(less))


@cache
def equal(plain: Cell, other: Cell) -> bool:
    """Whether a lossy method's answers count as good: no loss that its interval sets apart from 0, or little drift."""
    loss = lost(plain, other)
    if loss is None:
        return other.drift <= LOW and np.isnan(plain.rows[:, 5]).all()
    return loss[1] is not None and loss[1] <= 0


def best(cells_here: Sequence[Cell], costs: PassCosts) -> Found:
    """The fastest methods of one suite at given costs."""
    plain = next(cell for cell in cells_here if cell.arm == PLAIN)
    exact = max((cell for cell in cells_here if cell.lossless), key=lambda cell: cell.speed(costs))
    fit = [cell for cell in cells_here if not cell.lossless and equal(plain, cell)]
    if not fit:
        return Found(exact, exact.speed(costs), None, (math.nan, None, None), None)
    lossy = max(fit, key=lambda cell: cell.speed(costs))
    gain = ratio_of_ratios((lossy.rows[:, 0], lossy.seconds(costs)), (exact.rows[:, 0], exact.seconds(costs)))
    return Found(exact, exact.speed(costs), lossy, gain, lost(plain, lossy))


def places(timed: Mapping[str, Any]) -> Iterator[tuple[str, str, float, PassCosts]]:
    """(what is varied, its name, draft step over target pass, costs): measured ones first, then those in between."""
    for factor, one in timed.items():
        for delay in DELAYS_S if factor == "1" else (0.0,):
            costs = as_costs(one, delay)
            yield "measured", f"pass x {factor}" + f" + {1e3 * delay:.0f} ms" * bool(delay), costs.step, costs
    first = timed["1"]
    for ratio in RATIOS:
        step = ratio * first["target"][0][1]
        draft = {"draft": step, "gated": step + first["gated"] - first["draft"]}
        yield "ratio", f"ratio {ratio:g}", ratio, as_costs({**first, **draft})
        flat = {**draft, "target": [[n, first["target"][0][1]] for n, _ in first["target"]]}
        yield "flat", f"ratio {ratio:g}, passes of any length cost the same", ratio, as_costs(flat)


def within(here: Sequence[Cell], found: Found, costs: PassCosts) -> dict[str, Any]:
    """By limit of drift: the fastest lossy method, its speed over the best exact one, and its drift."""
    kept = {}
    for limit in LIMITS:
        fit = [cell for cell in here if not cell.lossless and cell.drift <= limit]
        if fit:
            lossy = max(fit, key=lambda cell: cell.speed(costs))
            kept[str(limit)] = [lossy.arm, lossy.speed(costs) / found.exact_speed, lossy.drift]
    return kept


def shown(arm: str) -> str:
    """A method's name in a table."""
    gate, method = of_gate(arm)
    return f"`{method}`, {gate} gate" if gate else f"`{method}`"


def lines_of(pair: str, counts: Mapping[str, Any], timed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One entry for each suite and place."""
    every = cells_of(counts)
    for suite in counts["suites"]:
        here = [cell for cell in every if cell.suite == suite]
        _, greedy, overlap = counts["agreement"][suite]
        for kind, name, ratio, costs in places(timed):
            found = best(here, costs)
            yield {
                "pair": pair, "suite": suite, "kind": kind, "place": name, "ratio": ratio, "agreement": greedy,
                "overlap": overlap, "exact": found.exact.arm, "exact_speed": found.exact_speed,
                "lossy": found.lossy and found.lossy.arm, "how": found.lossy and found.lossy.how,
                "gain": list(found.gain), "drift": found.lossy and found.lossy.drift,
                "lost": found.lost and list(found.lost),
                "within": within(here, found, costs),
            }  # fmt: skip


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """The measured places."""
    lines = []
    for one in entries:
        gain = "–" if one["lossy"] is None else cells(tuple(one["gain"]))
        loss = "–" if one["lost"] is None else cells(tuple(one["lost"]))
        lines.append(
            f"{one['pair']} | {one['suite']} | {one['place']} | {one['ratio']:.3f} | {one['agreement']:.3f} | "
            f"{shown(one['exact'])} | {one['exact_speed']:.2f} | "
            + (
                "– | – | "
                if one["lossy"] is None
                else f"{shown(one['lossy'])}, {one['how']} | {one['drift']:.4f} | "
            )
            + f"{loss} | {gain}"
        )
    heads = (
        "pair | text | place | draft step ÷ pass | β | best exact method | its speed over plain, a product | "
        "best lossy method of equal accuracy | drift | right answers lost | speed over the exact one, a product"
    )
    return "\n".join(grid(heads, lines))


def within_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Speeds over the best exact method by limit of drift, whatever becomes of the answers."""
    lines = []
    for one in entries:
        row = [one["pair"], one["suite"], one["place"], f"{1 - one['agreement']:.3f}"]
        for limit in LIMITS:
            arm, gain, _ = one["within"].get(str(limit), ("", math.nan, 0.0))
            row.append(f"{gain:.2f} {shown(arm)}" if arm else "–")
        lines.append(" | ".join(row))
    heads = ["pair", "text", "place", "1 − β", *(f"drift up to {limit:g}, a product" for limit in LIMITS)]
    return "\n".join(grid(" | ".join(heads), lines))


def answers(counts: Mapping[str, Any], timed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each lossy method that was run on whole answers lost and gained, in the measured places."""
    every, found = cells_of(counts), []
    plain = next(cell for cell in every if cell.arm == PLAIN)
    for cell in every:
        if cell.how == "run" and not cell.lossless:
            gains = {}
            for _, name, _, costs in (one for one in places(timed) if one[0] == "measured"):
                exact = best([one for one in every if one.lossless], costs).exact
                top, base = ((one.rows[:, 0], one.seconds(costs)) for one in (cell, exact))
                gains[name] = list(ratio_of_ratios(top, base))
            right = [float(one.rows[:, 5].sum()) for one in (plain, cell)]
            less = lost(plain, cell)
            found.append(
                {
                    "method": cell.arm,
                    "drift": cell.drift,
                    "right": right,
                    "lost": less and list(less),
                    "gains": gains,
                }
            )
    return found


def answers_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Speeds over the best exact method beside the answers lost."""
    lines = [
        f"{shown(one['method'])} | {one['drift']:.3f} | {one['right'][1]:.0f} of {one['right'][0]:.0f} | "
        f"{cells(tuple(one['lost']))} | " + " | ".join(cells(tuple(gain)) for gain in one["gains"].values())
        for one in entries
    ]
    heads = ["whole answers to GSM8K", "drift", "right", "lost", *(entries[0]["gains"] if entries else ())]
    return "\n".join(grid(" | ".join(heads), lines))


def walls(timed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The newest published run of README's real pair: measured speeds over plain decoding, and counts times costs.

    Both from the first token on; methods that copy or choose by costs are left out.
    """
    path = max((RESULTS / "real").glob("readme-real.*.jsonl.gz"))
    _, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    costs, found = as_costs(timed["1"]), dict[tuple[str, str], list[list[float]]]()
    for row in map(json.loads, lines):
        choice = row["choices"][0]
        tokens, seconds = choice["new_tokens"][0], choice["wall_time"][0] - row["ttft_s"][0]
        calls, steps = ((row[name] or [0])[0] for name in ("target_calls", "draft_steps"))
        counted = [tokens, calls, steps, calls + steps, 0.0, math.nan, seconds]
        found.setdefault((row["suite"], row["model_id"]), []).append(counted)
    entries = []
    for (suite, arm), rows in sorted(found.items()):
        if arm not in WALLS:
            continue
        plain, own = np.array(found[suite, PLAIN]), np.array(rows)
        measured = ratio_of_ratios((own[:, 0], own[:, 6]), (plain[:, 0], plain[:, 6]))
        product = Cell(arm, suite, "run", own[:, :6]).speed(costs)
        facts = {"run": path.name.split(".")[1], "suite": suite, "method": arm}
        entries.append({**facts, "measured": list(measured), "product": product})
    return entries


def walls_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Measured speeds beside counts times costs."""
    lines = [
        f"{one['suite']} | `{one['method']}` | {cells(tuple(one['measured']))} | {one['product']:.2f}"
        for one in entries
    ]
    return "\n".join(
        grid("text, README's run | method | speed over plain, measured | counts times costs", lines)
    )


def paper_points() -> list[dict[str, Any]]:
    """SPRINTER's pairs: FLOPs of a token of draft and target, and the overlap that its Tables 2 and 3 imply.

    Speculative decoding accepts A tokens a round there. With drafts of any length that were β / (1 - β), with shorter
    ones β is larger; the draft length is not printed.
    """
    return [
        {"pair": pair, "text": text, "ratio": ratio, "overlap": accepted / (1 + accepted)}
        for pair, ratio, texts in PAPERS
        for text, accepted in texts.items()
    ]


def main() -> None:
    """Multiply, and write the table."""
    option_parser(__doc__, data=False).parse_args()
    began, entries, used, whole = time.time(), list[dict[str, Any]](), {}, list[dict[str, Any]]()
    for pair in PAIRS:
        counts, timed = read("counts", pair), read("costs", PAIRS[pair].costs or pair)
        if counts is None or timed is None or PLAIN not in counts["runs"]:
            continue
        if pair == "whole" and (more := read("counts", "taught")) is not None:
            counts["runs"] |= more["runs"]
            used["taught"] = {"counts": more["environment"]["commit"]}
        if pair == "whole":
            whole = answers(counts, timed["costs"])
        used[pair] = {"counts": counts["environment"]["commit"], "costs": timed["environment"]["commit"]}
        entries += lines_of(pair, counts, timed["costs"])
    measured = [one for one in entries if one["kind"] == "measured"]
    checked = walls(qwen["costs"]) if (qwen := read("costs", "qwen")) is not None else []
    tables = [
        table(measured),
        within_table(measured),
        answers_table(whole) if whole else "",
        walls_table(checked),
    ]
    text = "\n\n".join(one for one in tables if one)
    save(
        NAME, text, began, 0, entries=entries, papers=paper_points(), used=used, walls=checked, answers=whole
    )


if __name__ == "__main__":
    main()
