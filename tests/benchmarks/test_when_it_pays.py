"""Counts are those of the loop, replays of exact methods are runs, and the map multiplies them as it says."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from benchmarks.real.when_it_pays import as_costs, packed, unpacked
from benchmarks.real.when_it_pays_map import Cell, best, equal, lost, paper_points
from tests.benchmarks.as_script import ROOT, run_script

TIMES = {"target": [[1, 0.1], [2, 0.09], [8, 0.2]], "draft": 0.01, "gated": 0.012}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = ROOT / "benchmarks" / "real" / "when_it_pays.py"
    ended = run_script(script, "counts", "--smoke", folder=tmp_path_factory.mktemp("counts"))
    assert ended.status == 0, ended.err[-2000:]
    found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return found


def test_an_exact_method_is_replayed_as_it_runs(counted: dict[str, Any]) -> None:
    arm = "speculative(gamma=2)"
    assert counted["replays"][arm] == counted["runs"][arm]
    (rows,) = counted["runs"]["autoregressive"].values()
    assert all(
        tokens == calls and steps == drift == 0 for tokens, calls, steps, _, drift, _ in unpacked(rows)
    )


def cell(arm: str, rows: list[list[float]]) -> Cell:
    return Cell(arm, "a suite", "run", np.array(rows))


def test_seconds_are_counts_times_costs() -> None:
    plain = cell("autoregressive", [[10, 10, 0, 10, 0, 1], [10, 10, 0, 10, 0, 1]])
    exact = cell("speculative(gamma=1)", [[10, 5, 10, 15, 0, 1], [10, 5, 10, 15, 0, 1]])
    assert plain.speed(as_costs(TIMES)) == pytest.approx(1)
    costs = as_costs(TIMES, fixed=0.05)
    assert costs.target_s(2) == pytest.approx(0.15), (
        "a longer pass costs no less, and each call a fixed time more"
    )
    mean_pass = costs.target_s(3)
    assert exact.seconds(costs).tolist() == pytest.approx([5 * mean_pass + 0.1] * 2)
    gated = cell("sprinter(tau=0.5)", [[10, 5, 10, 15, 0, 1]])
    assert gated.seconds(costs).tolist() == pytest.approx([5 * mean_pass + 0.12])


def test_a_lossy_method_counts_only_where_no_loss_is_seen() -> None:
    plain = cell("autoregressive", [[10, 10, 0, 10, 0, 1]] * 20)
    exact = cell("speculative(gamma=1)", [[10, 6, 10, 16, 0, math.nan]] * 20)
    bad = cell("certain(threshold=1)", [[10, 1, 10, 11, 2, 0]] * 15 + [[10, 1, 10, 11, 2, 1]] * 5)
    good = cell("certain(threshold=0.1)", [[10, 4, 10, 14, 0, 1]] * 19 + [[10, 4, 10, 14, 0, 0]])
    assert lost(plain, exact) is None and not equal(plain, bad) and equal(plain, good)
    found = best([plain, exact, bad, good], as_costs(TIMES))
    assert (found.exact, found.lossy) == (exact, good)
    assert found.gain[0] == pytest.approx(good.speed(as_costs(TIMES)) / exact.speed(as_costs(TIMES)))


def test_rows_come_back_as_they_were_packed() -> None:
    rows = [[12.0, 3.0, 12.0, 15.0, 0.25, None], [5.0, 5.0, 0.0, 5.0, 0.0, 1.0]]
    back = unpacked(packed(rows))
    assert back[1] == rows[1] and back[0][:5] == rows[0][:5] and math.isnan(back[0][5])


def test_points_of_the_paper_are_within_the_plane() -> None:
    assert all(0.05 < one["ratio"] < 0.2 and 0.6 < one["overlap"] < 0.8 for one in paper_points())
