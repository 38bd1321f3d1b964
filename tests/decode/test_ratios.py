"""``ratio`` of tokens, and what the statistics of a text make of it, against enumerated laws of texts."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from tests.decode.chains import Text, ids, paths
from tests.decode.test_head import LOSSY

from sprinter.decode.accept import Cactus, Fly, Lenient, Opt, Relaxed, Threshold, Typical
from sprinter.decode.draft import Origin, Record, Token
from sprinter.decode.enumerate import MarkovPair, run_chain, target_joint_law
from sprinter.decode.loop import Limits
from sprinter.decode.method import Method
from sprinter.decode.stop import Confidence, Fixed, Untrusted
from sprinter.decode.trust import Gate
from sprinter.random import AddressedDraws

PAIR = MarkovPair(3, 4)
COVERING = {
    "gate": LOSSY["gate"],
    "gate, tail": LOSSY["gate, tail"],
    "draft alone": LOSSY["draft alone"],
    "gate and lenient": LOSSY["gate and lenient"],
    "lenient": Method(stop=Fixed(2), accept=Lenient(0.5)),
    "opt": Method(stop=Fixed(2), accept=Opt(0.1)),
    "threshold": Method(stop=Fixed(2), accept=Threshold(total=0.6)),
    "taken back": Method(trust=Gate(0.3), stop=Untrusted(tail=1), cap=3, tail_ratio=0.5),
}
"""Methods that can write whatever the target can, on this pair."""
OTHERS = {
    "fuzzy": LOSSY["fuzzy"],
    "greedy": LOSSY["greedy under svip"],
    "relaxed": Method(stop=Fixed(2), accept=Relaxed(1, 0.1)),
    "typical": Method(stop=Fixed(2), accept=Typical()),
    "fly": Method(stop=Fixed(3), accept=Fly(1, 0.0)),
    "cactus": Method(stop=Fixed(3), accept=Cactus(0.3)),
    "sees the token": Method(trust=Gate(0.3), stop=Confidence(0.4), cap=3),
    "sees the token, lenient": Method(trust=Gate(0.3), stop=Confidence(0.4), accept=Lenient(0.5), cap=3),
    "sees the token, typical": Method(trust=Gate(0.3), stop=Confidence(0.4), accept=Typical(), cap=3),
    "sees the token, taken back": Method(
        trust=Gate(0.3), stop=Confidence(0.4), accept=Typical(), cap=3, tail_ratio=0.4
    ),
}


def weighed(method: Method) -> tuple[dict[Text, float], dict[Text, float], dict[Text, float], float]:
    """By text: the law, E[Π ratio], E[Π min(1, ratio)]; and the mean of ``text_drift``."""
    law: defaultdict[Text, float] = defaultdict(float)
    weights: defaultdict[Text, float] = defaultdict(float)
    common: defaultdict[Text, float] = defaultdict(float)
    mean = 0.0
    for chance, record in paths(method, PAIR, 3, complete=True):
        ratios = [token.ratio for token in record.tokens]
        known = [ratio for ratio in ratios if ratio is not None]
        assert len(known) == len(ratios) == 3, "the complete meter knows every token"
        assert record.stats.text_drift is not None and record.stats.changed is not None
        assert record.stats.text_drift <= record.stats.changed + 1e-12
        law[ids(record)] += chance
        weights[ids(record)] += chance * math.prod(known)
        common[ids(record)] += chance * math.prod(min(1.0, ratio) for ratio in known)
        mean += chance * record.stats.text_drift
    return law, weights, common, mean


@pytest.mark.parametrize("name", COVERING)
def test_ratios_are_importance_weights(name: str) -> None:
    """The law of the texts, weighed with Π ratio, is the target's."""
    target = target_joint_law(PAIR, 3)
    law, weights, *_ = weighed(COVERING[name])
    assert max(abs(weights[text] - chance) for text, chance in target.items()) < 1e-12
    assert max(abs(law[text] - chance) for text, chance in target.items()) > 1e-3


@pytest.mark.parametrize("name", [*COVERING, *OTHERS])
def test_the_text_drift_bounds_the_law_of_the_texts(name: str) -> None:
    """Π min(1, ratio) is a part that both laws of texts contain, text by text."""
    target = target_joint_law(PAIR, 3)
    law, _, common, mean = weighed({**COVERING, **OTHERS}[name])
    for text in law:
        assert common[text] <= min(law[text], target.get(text, 0.0)) + 1e-12
    gap = sum(abs(law.get(text, 0.0) - target.get(text, 0.0)) for text in law.keys() | target.keys()) / 2
    assert 1e-3 < gap <= mean + 1e-12 and mean < 1


@pytest.mark.parametrize("name", COVERING)
def test_changed_has_the_mean_of_the_sum_of_drifts(name: str) -> None:
    changed, drifts = 0.0, 0.0
    for chance, record in paths(COVERING[name], PAIR, 3, complete=True):
        assert record.stats.changed is not None and record.stats.drift_sum is not None
        changed += chance * record.stats.changed
        drifts += chance * record.stats.drift_sum
        by_origin = record.stats.drift_by_origin
        assert sum(by_origin.values()) == pytest.approx(record.stats.drift_sum)
        assert set(by_origin) == {token.origin.value for token in record.tokens}
    assert changed == pytest.approx(drifts, abs=1e-12) and drifts > 1e-3


def test_a_lossless_text_has_ratio_1() -> None:
    for method in (Method(stop=Fixed(3)), Method(trust=Gate(0.4), stop=Untrusted(), cap=3, tail_ratio=1)):
        record = run_chain(method, PAIR, (0,), Limits(20), AddressedDraws(2))
        assert [token.ratio for token in record.tokens] == pytest.approx([1.0] * 20)
        assert record.stats.text_drift == pytest.approx(0) and record.stats.changed == pytest.approx(0)


def test_what_is_not_scored_is_not_known() -> None:
    record = run_chain(replace(LOSSY["draft alone"]), PAIR, (0,), Limits(5), AddressedDraws(2))
    assert record.stats.text_drift is record.stats.changed is record.stats.least_ratio is None
    record.tokens = [
        Token(0, Origin.TRUSTED, 0, 0.5, ratio=0.25),
        Token(1, Origin.ACCEPTED, 0, 0.1, ratio=2.0),
    ]
    stats = record.count()
    assert (stats.least_ratio, stats.largest_ratio, stats.changed, stats.text_drift) == (
        0.25,
        2.0,
        0.75,
        0.75,
    )
    assert stats.drift_by_origin == {"trusted": 0.5, "accepted": 0.1}
    record.tokens.append(Token(1, Origin.TRUSTED, 1))
    assert record.count().text_drift is None and record.stats.changed == 0.75
    assert Record().count().text_drift is None
