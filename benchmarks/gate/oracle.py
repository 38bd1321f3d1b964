"""How much a gate can win at all: the share of positions that may be trusted at a given drift, on recorded labels.

    python benchmarks/gate/oracle.py --work FOLDER        # the folder of study.py, after it ran

Test prompts of the study. Positions are trusted in the order of a score until the drift of what is trusted, over all
positions, reaches 0.05, 0.10 and 0.15. The oracle scores by the overlap β itself: no gate on the prefix trusts more.
The coin trusts at random.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor

import sprinter
from benchmarks.common import command, environment, option_parser, write_results
from benchmarks.gate.study import ALL, DRIFTS, SEED, make_gates
from benchmarks.smoke import SMOKE, scratch
from sprinter.heads.gate import load_gate
from sprinter.training.dataset import Positions, read_positions
from sprinter.training.records import TEMPERATURES

GATES = {
    "paper, λ=1.2": "paper-λ=1.2",
    "overlap": "overlap",
    "overlap, mlp, hidden and law": "overlap-mlp-hidden-and-law",
    "own overlap, mlp, hidden, law and T": "own-overlap-mlp-hidden-law-and-T",
}


def share(scores: Tensor, distance: Tensor, drift: float) -> float:
    """Of positions, trusted from the highest score down."""
    spent = distance[scores.argsort(descending=True)].cumsum(0) / len(distance)
    return int((spent <= drift).sum()) / len(distance)


def scores_of(folder: Path, positions: dict[tuple[str, ...], Positions], temperature: float) -> Tensor:
    """Of a saved gate, at the positions of this temperature."""
    head = load_gate(folder)
    chosen = positions[head.features]
    rows = chosen.at_temperature(temperature)
    with torch.inference_mode():
        return head.calibration(head.network(chosen.inputs[rows])).clone()


def main() -> None:
    """Read, order, write."""
    parser = option_parser(__doc__, data=SMOKE)
    parser.add_argument(
        "--work",
        type=Path,
        required=not SMOKE,
        default=scratch("work") if SMOKE else None,
        help="folder of study.py",
    )
    args = parser.parse_args()
    began, folder = time.time(), args.work / "builtin"
    if SMOKE:
        make_gates(
            sprinter.load_pair(compile=False), args.data, list(GATES), 40, folder
        )  # what study.py would have left
    specs = [("hidden",), tuple(ALL.split(", ")), (*ALL.split(", "), "temperature")]
    positions = {}
    for spec in specs:
        read = read_positions([folder / "labels"], spec)
        positions[spec] = read.select(read.parts(SEED) == 2)
    base = positions["hidden",]
    rows: dict[str, dict[str, list[float]]] = {}
    for i, temperature in enumerate(TEMPERATURES):
        distance = (1 - base.columns["overlap"][:, i]).double()
        found = {
            "oracle": [share(-distance, distance, drift) for drift in DRIFTS],
            "coin": [min(1.0, drift / float(distance.mean())) for drift in DRIFTS],
        }
        for name, saved in GATES.items():
            scores = scores_of(folder / saved, positions, temperature)
            found[name] = [share(scores, distance, drift) for drift in DRIFTS]
        rows[str(temperature)] = found
    results: dict[str, Any] = {
        "benchmark": "gate/oracle", "command": command(), "environment": environment(),
        "positions": len(base), "prompts": len(torch.unique(base.group)), "new_tokens": 32, "drifts": DRIFTS,
        "trusted_share": rows, "seconds": round(time.time() - began, 1),
    }  # fmt: skip
    write_results("gate/oracle", results, table(rows))


def table(rows: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: trusted share at each temperature and drift."""
    heads = [f"T={t}, drift {drift:.2f}" for t in TEMPERATURES for drift in DRIFTS]
    lines = [f"| score | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    lines += [
        f"| {name} | {' | '.join(f'{v:.3f}' for t in TEMPERATURES for v in rows[str(t)][name])} |"
        for name in rows["1.0"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
