"""Label kinds, by hand on small laws."""

from __future__ import annotations

import math

import pytest
import torch
from tests.training.synthetic import make_records

from sprinter.errors import UserError
from sprinter.training.objectives import (
    LABELS,
    Accept,
    Agreement,
    FuzzyLabel,
    Overlap,
    Ratio,
    above_median,
    parse_label,
)


def columns(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def logs(name: str, *values: float) -> dict[str, list[float]]:
    return {name: [math.log(value) if value else -math.inf for value in values]}


def test_ratio_is_the_papers_label() -> None:
    # q/p = 1.2, 1.21, 0.5, infinite
    of = columns(**logs("log_q", 0.3, 0.242, 0.1, 0.5), **logs("log_p", 0.25, 0.2, 0.2, 0.0))
    assert Ratio(1.2).values(of).tolist() == [1, 0, 1, 0]
    assert Ratio(1.5).values(of).tolist() == [1, 1, 1, 0]
    assert Ratio(1.0).values(of).tolist() == [0, 0, 1, 0]


def test_ratio_of_the_greedy_and_of_the_texts_own_token() -> None:
    of = columns(greedy_ratio=[0.9, 1.3], **logs("log_q_token", 0.5, 0.1), **logs("log_p_token", 0.1, 0.5))
    assert Ratio(1.2, "greedy").values(of).tolist() == [1, 0]
    assert Ratio(1.2, "text").values(of).tolist() == [0, 1]


def test_accept_is_the_chance_that_exact_acceptance_keeps_x() -> None:
    of = columns(**logs("log_q", 0.4, 0.2, 0.5), **logs("log_p", 0.1, 0.8, 0.0))
    assert Accept().values(of).tolist() == pytest.approx([0.25, 1.0, 0.0])


def test_overlap_and_agreement_take_their_temperature() -> None:
    of = columns(overlap=[[0.7, 0.6, 1.0], [0.4, 0.3, 0.0]])
    assert Overlap().values(of).tolist() == pytest.approx([0.7, 0.4])
    assert Overlap(0.7).values(of).tolist() == pytest.approx([0.6, 0.3])
    assert Agreement().values(of).tolist() == [1, 0] == Overlap(0).values(of).tolist()


def test_expected_ratio_takes_its_lambda() -> None:
    of = columns(expected_ratio=[[0.1, 0.2, 0.3]])
    assert [float(parse_label(f"expected-ratio(lambda={value})").values(of)) for value in (1, 1.2, 1.5)] == (
        pytest.approx([0.1, 0.2, 0.3])
    )


def test_fuzzy_is_strict_as_the_rule_is() -> None:
    of = columns(js=[0.29, 0.3, 0.31], tv=[0.0, 0.0, 0.0])
    assert FuzzyLabel().values(of).tolist() == [1, 0, 0]
    assert FuzzyLabel("tv", 0.0).values(of).tolist() == [0, 0, 0]


@pytest.mark.statistical
def test_expected_labels_are_the_means_of_drawn_ones() -> None:
    """Over 19,200 positions; a difference of 5 standard errors (at most 0.5/√n each): false alarm 1e-5."""
    of = make_records(200, 24, seed=5).columns()
    for drawn, expected in (("ratio(lambda=1.2)", "expected-ratio(lambda=1.2)"), ("accept", "overlap")):
        gap = parse_label(drawn).values(of).mean() - parse_label(expected).values(of).mean()
        assert abs(float(gap)) < 5 * 0.5 / math.sqrt(19_200)


@pytest.mark.parametrize("name", LABELS)
def test_every_label_is_spelled_as_it_is_read_and_stays_in_bounds(name: str) -> None:
    label = parse_label(name)
    assert parse_label(f" {label} ") == label
    values = label.values(make_records(3, 8).columns())
    assert values.shape == (96,) and values.dtype == torch.float32
    assert float(values.min()) >= 0 and float(values.max()) <= 1
    assert label.soft or set(values.tolist()) <= {0.0, 1.0}


def test_above_median_splits_in_half() -> None:
    assert above_median(torch.tensor([0.1, 0.2, 0.3, 0.4])).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ratoi", "did you mean 'ratio'"),
        ("", "unknown label"),
        ("ratio(", "closing parenthesis"),
        ("ratio(1.2)", "by keyword"),
        ("ratio(lamda=1.2)", "did you mean 'lambda'"),
        ("ratio(lambda=0)", "lambda=0"),
        ("ratio(lambda=x)", "lambda=x"),
        ("ratio(lambda=nan)", "lambda=nan"),
        ("ratio(at=gredy)", "did you mean 'greedy'"),
        ("accept(at=greedy)", "unknown token"),
        ("agreement(x=1)", "takes no parameters"),
        ("overlap(temperature=0.5)", "one of 1.0, 0.7, 0.0"),
        ("expected-ratio(lambda=2)", "one of 1.0, 1.2, 1.5"),
        ("fuzzy(divergence=jss)", "did you mean 'js'"),
        ("fuzzy(threshold=-1)", "threshold=-1"),
    ],
)
def test_wrong_labels_are_one_line(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_label(spec)
    assert "\n" not in str(caught.value)
