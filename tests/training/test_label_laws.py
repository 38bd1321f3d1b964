"""Labels of two laws: against the definitions, in double precision, on awkward laws too."""

from __future__ import annotations

import math

import pytest
import torch
from tests.tools import FALSE_ALARM, chi_square_p
from torch import Tensor

from sprinter.decode.accept.fuzzy import DIVERGENCES
from sprinter.laws import Sampling, entropy, overlap, process, raw_law
from sprinter.random import AddressedDraws, Purpose
from sprinter.training.prefixes import PrefixRow, Readings
from sprinter.training.records import LAMBDAS, TEMPERATURES, TOP
from sprinter.training.scoring import law_columns, make_records

Columns = dict[str, Tensor]


def make_logits(n: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """q and p logits, from nearly equal to far apart, from flat to peaked."""
    chance = torch.Generator().manual_seed(seed)
    q = torch.randn(n, vocab, generator=chance) * torch.linspace(0.1, 6, n)[:, None]
    return q, q + torch.randn(n, vocab, generator=chance) * torch.linspace(4, 0.01, n)[:, None]


def columns_of(q: Tensor, p: Tensor, seed: int = 0) -> Columns:
    tokens = torch.arange(len(q)) % q.shape[-1]
    return law_columns(q, p, tokens, [(AddressedDraws(seed, i), 7) for i in range(len(q))])


@pytest.mark.parametrize("vocab", [5, 64, 100, 500])
def test_every_column_is_what_its_definition_says(vocab: int) -> None:
    q_logits, p_logits = make_logits(48, vocab)
    got = columns_of(q_logits, p_logits)
    q, p = raw_law(q_logits.double()), raw_law(p_logits.double())
    rows = torch.arange(len(q))
    x, token = got["x"].long(), rows % vocab
    ratio = q / p
    wanted = {name: measure(p, q) for name, measure in DIVERGENCES.items()}
    wanted |= {
        "entropy": entropy(q),
        "max_q": q.amax(-1),
        "log_q": q[rows, x].log(),
        "log_p": p[rows, x].log(),
        "log_q_token": q[rows, token].log(),
        "log_p_token": p[rows, token].log(),
        "greedy_ratio": ratio[rows, q.argmax(-1)],
        "expected_ratio": torch.stack([(q * (ratio <= most)).sum(-1) for most in LAMBDAS], -1),
        "overlap": torch.stack(
            [
                overlap(*(process(each.double(), Sampling(temperature=at)) for each in (p_logits, q_logits)))
                for at in TEMPERATURES
            ],
            -1,
        ),
    }
    for name, column in wanted.items():
        torch.testing.assert_close(got[name].double(), column, atol=2e-5, rtol=2e-5, msg=name)
    assert got["x"].tolist() == [
        AddressedDraws(0, i).token(raw_law(q_logits[i]), 0, 7, Purpose.DRAFT, 1) for i in range(len(q))
    ]


@pytest.mark.parametrize("vocab", [5, 64, 100, 500])
def test_the_tops_are_the_union_and_the_rest_is_the_rest(vocab: int) -> None:
    q_logits, p_logits = make_logits(20, vocab)
    got = columns_of(q_logits, p_logits)
    q, p = raw_law(q_logits.double()), raw_law(p_logits.double())
    k = min(TOP, vocab)
    for i in range(len(q)):
        ids = got["top_ids"][i]
        held = ids[ids >= 0].long()
        union = {*q[i].topk(k).indices.tolist(), *p[i].topk(k).indices.tolist()}
        assert len(held) == len(union) and set(held.tolist()) == union
        assert ids[:k].tolist() == q[i].topk(k).indices.tolist(), "the draft's stand first, likeliest first"
        for law, name in ((q, "q"), (p, "p")):
            top = got[f"top_{name}"][i]
            torch.testing.assert_close(top[ids >= 0].double(), law[i, held], atol=1e-6, rtol=1e-5)
            assert (top[ids < 0] == 0).all()
            rest = 1 - law[i, held].sum()
            assert got[f"rest_{name}"][i].item() == pytest.approx(rest.item(), abs=1e-6)


def test_equal_laws() -> None:
    q, _ = make_logits(6, 40)
    got = columns_of(q, q.clone())
    for name in DIVERGENCES:
        assert got[name].max() <= 1e-6, name
    assert torch.allclose(got["overlap"], torch.ones(6, 3), atol=1e-6)
    assert torch.allclose(got["expected_ratio"], torch.ones(6, 3), atol=1e-6)
    assert torch.equal(got["greedy_ratio"], torch.ones(6)) and torch.equal(got["log_q"], got["log_p"])


def test_laws_with_disjoint_supports_give_finite_records() -> None:
    q = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]])
    p = torch.tensor([[-math.inf, -math.inf, 0.0, 0.0]])
    got = columns_of(q, p)
    assert all(bool(column.isfinite().all()) for column in got.values())
    assert got["overlap"][0].tolist() == [0, 0, 0] and got["expected_ratio"][0].tolist() == [0, 0, 0]
    assert got["tv"].item() == 1 and got["js"].item() == pytest.approx(math.log(2), abs=1e-6)
    assert got["kl"].item() > 1000 and got["kl_reversed"].item() > 1000 and got["js_reference"].item() > 1000
    assert got["greedy_ratio"].item() > 1e30


def rows_of(
    n: int, new: int, logits: tuple[Tensor, Tensor], tokens: Tensor
) -> tuple[list[PrefixRow], Readings]:
    rows = [PrefixRow(10 * i, i % 4, tuple(range(1, 3 + i)), tuple([1] * new)) for i in range(n)]
    hidden = torch.arange(n * (new + 1) * 2.0).view(n, new + 1, 2)
    q, p = (each.view(n, new, -1) for each in logits)
    return rows, Readings(tokens, q, p, hidden)


def test_records_stand_text_by_text_and_nothing_follows_an_end() -> None:
    tokens = torch.tensor([[4, 5, 6], [0, 5, 0], [4, 9, 6], [4, 5, 0]])
    rows, readings = rows_of(4, 3, make_logits(12, 30), tokens)
    records = make_records(rows, readings, 0, (0, 9))
    assert records.prompt.tolist() == [0, 0, 0, 10, 20, 20, 30, 30, 30]
    assert records.kind.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3]
    assert records.step.tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 2]
    assert records.position.tolist() == [2, 3, 4, 3, 4, 5, 5, 6, 7]
    assert records.token.tolist() == [4, 5, 6, 0, 4, 9, 4, 5, 0]
    flat = readings.hidden
    assert torch.equal(records.hidden[4:6], flat[2, :2]) and torch.equal(records.hidden_x[4:6], flat[2, 1:3])
    one = law_columns(readings.q[2, 1:2], readings.p[2, 1:2], tokens[2, 1:2], [(rows[2].draws(0), 5)])
    assert all(torch.equal(records.columns()[name][5:6], column) for name, column in one.items())
    assert len(make_records(rows, readings, 0, ())) == 12


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.ones(6, 5, dtype=torch.long)
    rows, readings = rows_of(6, 5, make_logits(30, 90), tokens)
    whole = make_records(rows, readings, 3, ())
    monkeypatch.setattr("sprinter.training.scoring._BLOCK", 7)
    parts = make_records(rows, readings, 3, ())
    assert torch.equal(whole.x, parts.x) and torch.equal(whole.top_ids, parts.top_ids)
    assert torch.allclose(whole.overlap, parts.overlap, atol=1e-6)


@pytest.mark.statistical
def test_x_is_drawn_from_q() -> None:
    """Chi-square over 20,000 positions of one law, false-alarm rate 1e-4; and labels meet their expectations at 5 σ."""
    n = 20_000
    q_logits, p_logits = (each[3:4].expand(n, -1) for each in make_logits(6, 12, seed=5))
    got = columns_of(q_logits, p_logits, seed=11)
    q = raw_law(q_logits[0].double())
    counts = torch.bincount(got["x"].long(), minlength=12).tolist()
    assert chi_square_p(counts, q.tolist()) > FALSE_ALARM
    ratio, accept = (got["log_q"] - got["log_p"]).exp(), (got["log_p"] - got["log_q"]).clamp(max=0).exp()
    for i, most in enumerate(LAMBDAS):
        assert (ratio <= most).double().mean().item() == pytest.approx(
            got["expected_ratio"][0, i].item(), abs=5 * 0.5 / n**0.5
        )
    assert accept.double().mean().item() == pytest.approx(got["overlap"][0, 0].item(), abs=5 * 0.5 / n**0.5)
