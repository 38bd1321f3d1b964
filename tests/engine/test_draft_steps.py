"""Draft steps of rows that read different things, on a backend without a network."""

from __future__ import annotations

import time

import torch
from tests.engine.table_backend import TableModel, TableRunner
from torch import Tensor

from sprinter.engine.backends.base import Drafted, DraftPlan, DraftRow
from sprinter.engine.backends.eager import EagerBackend
from sprinter.heads.head import Head, HeadConfig
from sprinter.laws import Sampling
from sprinter.random import AddressedDraws


class SlowHead(Head):
    """A head that takes its time."""

    def score(self, features: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().score(features)


def plan_of(kind: type[Head], feature: str) -> DraftPlan:
    config = HeadConfig(1, "draft", "target", features=(feature,))
    return DraftPlan(Sampling(), (), {"gate": kind(config, config.network())})


def drafted(rows: list[DraftRow], length: int = 8) -> list[Drafted]:
    backend = EagerBackend(TableRunner(TableModel(3, 2), len(rows), length), 3, "draft")
    made = backend.draft(rows)
    assert all(isinstance(one, Drafted) for one in made)
    return made  # type: ignore[return-value]


def test_only_rows_with_a_head_are_charged_for_it() -> None:
    plans = [plan_of(SlowHead, "hidden"), *[DraftPlan(Sampling())] * 3]
    made = drafted([DraftRow(i, [1], 1, 1, AddressedDraws(), plan) for i, plan in enumerate(plans)])
    assert made[0].gate_s >= 0.01 > 10 * sum(one.gate_s for one in made[1:])
    assert all(one.draft_s == made[0].draft_s > 0 for one in made)


def test_a_run_of_any_length_is_drafted() -> None:
    """With a head that reads the state at x each token is a step of its own."""
    row = DraftRow(0, [1], 1, 1, AddressedDraws(), plan_of(Head, "hidden_x"), count=1000)
    (made,) = drafted([row], 1002)
    assert len(made.tokens) == len(made.laws) == 1000 and torch.isfinite(made.signals["gate"]).all()
