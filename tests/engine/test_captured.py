"""Captured steps give what eager steps give: the same tokens, laws, signals and scores."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.models.eager_units import captured
from tests.models.fake_cuda import fake_cuda
from tests.models.test_graphs import runner_of
from tests.models.tiny import CONTEXT, VOCAB, tiny

from sprinter.decode.signals import SIGNALS
from sprinter.engine.backends.base import Drafted, DraftPlan, DraftRow, RowInput, Scored, TargetRow
from sprinter.engine.backends.cuda_graph import GraphBackend
from sprinter.engine.backends.eager import EagerBackend
from sprinter.errors import SprinterError
from sprinter.heads.head import Head, HeadConfig
from sprinter.laws import Sampling
from sprinter.models.choose import make_runner
from sprinter.random import AddressedDraws

SAMPLINGS = [Sampling(), Sampling(0.6), Sampling(0.0), Sampling(0.9, 7, 0.8, 0.02)]
PROMPT = [3, 9, 11, 4]


def head(*features: str) -> Head:
    config = HeadConfig(32, "draft", "target", architecture="mlp", features=features, width=8)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Head(config, config.network())


def both(batch: int, kind: str = "llama") -> tuple[EagerBackend, GraphBackend]:
    """An eager and a captured backend that hold the same text."""
    eager = EagerBackend(make_runner(tiny(kind), batch=batch, max_len=CONTEXT), VOCAB, "draft")
    graphs = GraphBackend(captured(kind, batch, CONTEXT), VOCAB, "draft")
    for rows in (eager, graphs):
        rows.runner.extend(torch.tensor([PROMPT] * batch), logits=False)
    return eager, graphs


def drafted(one: Drafted | SprinterError) -> Drafted:
    assert isinstance(one, Drafted)
    return one


def same(one: Sequence[Drafted | SprinterError], other: Sequence[Drafted | SprinterError]) -> None:
    for x, y in zip(map(drafted, one), map(drafted, other), strict=True):
        assert x.tokens == y.tokens
        torch.testing.assert_close(x.laws, y.laws, rtol=0, atol=1e-5)
        assert (x.raws is None) == (y.raws is None)
        if x.raws is not None and y.raws is not None:
            torch.testing.assert_close(x.raws, y.raws, rtol=0, atol=1e-5)
        assert x.signals.keys() == y.signals.keys()
        for name, values in x.signals.items():
            torch.testing.assert_close(values, y.signals[name], rtol=0, atol=1e-4)
        assert (x.passes, x.read) == (y.passes, y.read)


def asked_of(batch: int, seed: int, plan: DraftPlan) -> list[DraftRow]:
    """Rows of several lengths and counts, some of which sit out; row 2 has a plan of its own."""
    bare = DraftPlan(SAMPLINGS[0])
    return [
        DraftRow(
            row, PROMPT[: 1 + (seed + row) % 3], 5 + (seed + row) % 3, seed, AddressedDraws(seed),
            bare if row == 2 else plan, row, 2, 1 + (seed + 2 * row) % 5,
        )
        for row in range(batch)
        if batch == 1 or (seed + row) % 4
    ]  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("batch", [1, 3])
def test_draft_steps_are_those_of_the_eager_way(sampling: Sampling, batch: int) -> None:
    eager, rows = both(batch)
    heads = {"gate": head("hidden", "entropy", "max_q", "top_q(k=4)", "position", "temperature")}
    plan = DraftPlan(sampling, tuple(SIGNALS), heads, raw=True)
    for seed in range(12):
        for each in (eager, rows):
            each.runner.rewind([4] * batch)
        asked = asked_of(batch, seed, plan)
        same(rows.draft(asked), eager.draft(asked))
        assert rows.runner.lengths == eager.runner.lengths
    assert rows.runner._units.calls.keys() >= {"draft"}  # type: ignore[attr-defined]


def test_draft_steps_in_graphs_are_those_of_the_eager_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    eager, _ = both(2)
    rows = GraphBackend(runner_of("llama", 2, CONTEXT), VOCAB, "draft")
    rows.runner.extend(torch.tensor([PROMPT] * 2), logits=False)
    plan = DraftPlan(Sampling(0.8), tuple(SIGNALS), {"gate": head("hidden", "entropy")}, raw=True)
    for seed in range(4):
        for each in (eager, rows):
            each.runner.rewind([4, 4])
        asked = [
            DraftRow(
                row,
                PROMPT[: 1 + (seed + row) % 3],
                5 + (seed + row) % 3,
                seed,
                AddressedDraws(seed),
                plan,
                row,
                1,
                2 + row,
            )
            for row in range(2)
        ]
        same(rows.draft(asked), eager.draft(asked))
    units = rows.runner._units  # type: ignore[attr-defined]
    assert any(key[0].startswith("draft") for key in units._graphs) and not units._refused


def test_rows_with_and_without_heads_step_together() -> None:
    eager, rows = both(2)
    gate = {"gate": head("hidden")}
    asked = [
        DraftRow(0, [5], 5, 1, AddressedDraws(1), DraftPlan(Sampling(), ("entropy",), {}), 0, 1, 3),
        DraftRow(1, [5], 5, 1, AddressedDraws(2), DraftPlan(Sampling(0.5), (), gate), 0, 1, 2),
    ]
    made = rows.draft(asked)
    same(made, eager.draft(asked))
    assert [sorted(drafted(row).signals) for row in made] == [["entropy"], ["gate"]]
    assert [len(drafted(row).tokens) for row in made] == [3, 2]
    assert rows.runner._units.calls["draft"] == 1  # type: ignore[attr-defined]


def test_signals_that_methods_ask_for_make_units_of_their_own() -> None:
    eager, rows = both(2)
    common = ("entropy", "max_prob_processed", "token_prob")
    for names in ((), common, ("margin",), ("margin", *common)):
        for each in (eager, rows):
            each.runner.rewind([4, 4])
        plans = [DraftPlan(Sampling(0.7, 5), names), DraftPlan(Sampling())]
        asked = [DraftRow(i, [5], 5, 1, AddressedDraws(i), plan, 0, 1, 2) for i, plan in enumerate(plans)]
        made = rows.draft(asked)
        same(made, eager.draft(asked))
        assert [set(drafted(row).signals) for row in made] == [set(names), set()]
    columns = {tuple(sorted(unit.plan.columns[1:])) for unit in rows._captured.kept.values()}
    usual = {name for name, one in SIGNALS.items() if one.capture == "always"}
    assert columns == {tuple(sorted(usual)), tuple(sorted({*usual, "margin"}))}
    assert rows.runner._units.calls["draft"] == 4  # type: ignore[attr-defined]


def test_signals_that_are_not_captured_go_the_eager_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("margin", "margin_processed"):
        monkeypatch.setitem(SIGNALS, name, replace(SIGNALS[name], capture="never"))
    eager, rows = both(1)
    asked = [DraftRow(0, [5], 5, 1, AddressedDraws(1), DraftPlan(Sampling(), ("margin",)), 0, 1, 3)]
    same(rows.draft(asked), eager.draft(asked))
    assert "draft" not in rows.runner._units.calls  # type: ignore[attr-defined]


def test_signals_are_those_of_the_laws_that_tokens_were_drawn_from() -> None:
    plan = DraftPlan(Sampling(0.7, 5), tuple(SIGNALS), {}, raw=True)
    for rows in both(1):
        one = drafted(rows.draft([DraftRow(0, [5], 5, 1, AddressedDraws(3), plan, 0, 1, 4)])[0])
        assert one.raws is not None and one.signals.keys() == SIGNALS.keys()
        for name, values in one.signals.items():
            wanted = SIGNALS[name](one.laws, one.raws, torch.tensor(one.tokens)).double()
            torch.testing.assert_close(values, wanted, rtol=0, atol=1e-5)


def test_a_head_that_reads_the_state_at_x_goes_the_eager_way() -> None:
    eager, rows = both(1)
    plan = DraftPlan(Sampling(), (), {"specdec++": head("hidden_x")})
    asked = [DraftRow(0, [5], 5, 1, AddressedDraws(1), plan, 0, 1, 3)]
    same(rows.draft(asked), eager.draft(asked))
    assert "draft" not in rows.runner._units.calls  # type: ignore[attr-defined]


def test_rows_without_processors_keep_their_way() -> None:
    eager, rows = both(3)
    plan, none = DraftPlan(Sampling(0.0)), torch.full((1, VOCAB), -torch.inf)
    only = none.index_fill(-1, torch.tensor([7]), 0.0)
    asked = [
        DraftRow(i, [5], 5, 1, AddressedDraws(i), plan, adjust=(lambda _: only) if i == 1 else None)
        for i in range(3)
    ]
    made = rows.draft(asked)
    same(made, eager.draft(asked))
    assert drafted(made[1]).tokens == [7]
    assert rows.runner._units.calls == {"draft": 1, "pass": 1, "read": 1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_target_passes_are_those_of_the_eager_way(sampling: Sampling) -> None:
    eager, rows = both(3)
    asked = [
        TargetRow(RowInput(0, 4, [1, 2, 3]), sampling, True),
        TargetRow(RowInput(2, 4, [7]), Sampling(0.4)),
    ]
    for one, other in zip(rows.score(asked), eager.score(asked), strict=True):
        assert isinstance(one, Scored) and isinstance(other, Scored)
        torch.testing.assert_close(one.laws, other.laws, rtol=0, atol=1e-5)
        assert (one.raw is None) == (other.raw is None)
    assert rows.runner.lengths == eager.runner.lengths == [7, 4, 5]


def test_logits_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = both(1)
    weight = tiny("llama").get_output_embeddings().weight
    monkeypatch.setattr(weight, "data", torch.full_like(weight, torch.nan))
    row = DraftRow(0, [5], 5, 1, AddressedDraws(1), DraftPlan(Sampling()), count=3)
    (error,) = rows.draft([row])
    assert isinstance(error, SprinterError)
    assert "the draft model's logits are NaN at position 4" in str(error)
    (error,) = rows.score([TargetRow(RowInput(0, 4, [5, 6]), Sampling())])
    assert isinstance(error, SprinterError)
    assert "logits are NaN at position 4" in str(error)
