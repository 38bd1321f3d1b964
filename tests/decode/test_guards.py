"""The guards ``only=`` and ``tail_ratio=``: enumerated laws, drifts and refusals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.decode.chains import Text, ids, law_of, paths
from tests.decode.test_head import LOSSY

from sprinter.decode.accept import Block, Exact, Lenient, Threshold, Typical
from sprinter.decode.conformance import check_accept, check_same_law
from sprinter.decode.enumerate import MarkovPair, joint_law, run_chain, target_joint_law
from sprinter.decode.loop import Limits
from sprinter.decode.method import Method
from sprinter.decode.review import TailRatio
from sprinter.decode.spec import full_spec, parse_method
from sprinter.decode.stop import Confidence, Never, Svip, Untrusted
from sprinter.decode.trust import Everyone, Gate
from sprinter.errors import UserError
from sprinter.laws import tv_distance
from sprinter.random import AddressedDraws


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_the_rule_of_the_guard_is_sound(ratio: float) -> None:
    check_accept(TailRatio(ratio))


def in_span(text: Sequence[int]) -> bool:
    """Lossy after an even number of tokens 2 in the new text: spans that close and open."""
    return sum(x == 2 for x in text[1:]) % 2 == 0


def given_prefix(law: dict[Text, float], prefix: Text) -> torch.Tensor | None:
    """The law of the next token; None if the prefix has no mass."""
    chances = torch.zeros(3, dtype=torch.float64)
    for text, chance in law.items():
        if text[: len(prefix)] == prefix:
            chances[text[len(prefix)]] += chance
    total = float(chances.sum())
    return chances / total if total > 1e-12 else None


@pytest.mark.parametrize(("name", "ahead"), [*((name, 1) for name in LOSSY), ("gate, tail", 2), ("fly", 2)])
def test_only_the_span_is_lossy(name: str, ahead: int) -> None:
    pair, method = MarkovPair(3, 4), replace(LOSSY[name], only="code")
    law = joint_law(method, pair, 3, ahead=ahead, lossy=in_span)
    assert abs(sum(law.values()) - 1) < 1e-9
    gaps: defaultdict[bool, list[float]] = defaultdict(list)
    for prefix in sorted({text[:n] for text in law for n in range(3)}):
        found = given_prefix(law, prefix)
        if found is not None:
            gaps[in_span((0, *prefix))].append(float(tv_distance(found, pair.p((0, *prefix)))))
    assert max(gaps[False]) < 1e-9, "a token outside the span has another law than the target's"
    assert max(gaps[True]) > 1e-3, "the method is not lossy in the span, so that the test shows nothing"


@pytest.mark.parametrize("name", ["gate", "gate, tail", "draft alone", "gate and lenient"])
def test_the_meter_knows_the_law_at_the_border_of_a_span(name: str) -> None:
    """Weighed with the ratios of its tokens the law of texts is the target's: trust depends on no token's effect."""
    pair, method = MarkovPair(3, 4), replace(LOSSY[name], only="code")
    weights: defaultdict[Text, float] = defaultdict(float)
    for chance, record in paths(method, pair, 3, complete=True, lossy=in_span):
        ratios = [token.ratio for token in record.tokens if token.ratio is not None]
        assert len(ratios) == 3
        weights[ids(record)] += chance * math.prod(ratios)
    check_same_law(weights, target_joint_law(pair, 3), name)


def test_a_run_that_leaves_the_span_is_judged_by_one_rule() -> None:
    """The tokens behind a span are exact: their drift is 0."""
    method = replace(LOSSY["gate and lenient"], only="code")
    limits = Limits(60, lossy=in_span)
    record = run_chain(method, MarkovPair(3, 2, distance=0.4), (0,), limits, AddressedDraws(1), complete=True)
    text = [0]
    drifts: defaultdict[bool, list[float]] = defaultdict(list)
    for token in record.tokens:
        lossy = in_span(text)
        assert lossy or token.origin.value != "trusted"
        drifts[lossy].append(token.drift or 0.0)
        text.append(token.id)
    assert max(drifts[False]) == 0 < max(drifts[True])


TRIED = {
    "gate": Method(trust=Gate(0.4), stop=Untrusted(), cap=3),
    "gate, tail": Method(trust=Gate(0.3), stop=Untrusted(tail=1), cap=3),
    "gate, block": Method(trust=Gate(0.3), stop=Untrusted(tail=2), accept=Block(), cap=4),
    "gate under svip": Method(trust=Gate(0.4), stop=Svip(0.6), cap=2),
    "gate, sees the token": Method(trust=Gate(0.3), stop=Confidence(0.3), cap=3),
    "everyone": Method(trust=Everyone(), stop=Never(), cap=2),
    "another exact rule": Method(trust=Gate(0.3), stop=Confidence(0.3), accept=Threshold(), cap=2),
}


@pytest.mark.parametrize("name", TRIED)
def test_at_ratio_1_a_learned_stop_is_left(name: str) -> None:
    pair, method = MarkovPair(3, 4, zeros=0.2), replace(TRIED[name], tail_ratio=1)
    assert method.lossless() and not TRIED[name].lossless()
    every = list(paths(method, pair, 3))
    check_same_law(law_of(every), target_joint_law(pair, 3), name)
    found = [record for _, record in every]
    origins = {token.origin.value for record in found for token in record.tokens}
    assert "trusted" not in origins and "accepted" in origins  # each was judged
    assert any(record.stats.taken_back for record in found)
    ends = lambda text: "eos" if text[-1] == 1 else None  # noqa: E731
    check_same_law(joint_law(method, pair, 3, ends=ends), target_joint_law(pair, 3, ends=ends), name)


@pytest.mark.parametrize("name", TRIED)
def test_at_ratio_0_the_law_is_that_without_a_guard(name: str) -> None:
    pair, method = MarkovPair(3, 4), TRIED[name]
    check_same_law(joint_law(replace(method, tail_ratio=0), pair, 3), joint_law(method, pair, 3), name)


@pytest.mark.parametrize("ratio", [0.3, 0.7])
def test_where_all_is_trusted_the_law_is_the_declared_one(ratio: float) -> None:
    pair, rule = MarkovPair(3, 4, zeros=0.2), TailRatio(ratio)
    method = Method(trust=Everyone(), stop=Never(), cap=9, tail_ratio=ratio)
    law: dict[Text, float] = {(): 1.0}
    drift = 0.0
    for _ in range(3):
        longer: dict[Text, float] = {}
        for text, chance in law.items():
            p, q = pair.p((0, *text)), pair.q((0, *text))
            drift += chance * float(rule.drift(p, q))
            longer |= {(*text, x): chance * one for x, one in enumerate(rule.law(p, q).tolist()) if one > 0}
        law = longer
    found: defaultdict[Text, float] = defaultdict(float)
    metered = 0.0
    for weight, record in paths(method, pair, 3):
        found[ids(record)] += weight
        metered += weight * sum(token.drift or 0.0 for token in record.tokens)
        assert record.stats.drift_coverage == 1 and record.stats.closing_passes == 0
    check_same_law(found, law, "texts")
    assert metered == pytest.approx(drift, abs=1e-12)


@pytest.mark.parametrize("accept", [Exact(), Lenient(0.5), Typical()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("stop", [Untrusted(tail=1), Confidence(0.3)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_the_sum_of_drifts_bounds_the_law_of_the_text(ratio: float, stop: object, accept: object) -> None:
    pair = MarkovPair(3, 5)
    method = Method(trust=Gate(0.3), stop=stop, accept=accept, cap=3, tail_ratio=ratio)  # type: ignore[arg-type]
    found: defaultdict[Text, float] = defaultdict(float)
    bound = 0.0
    for weight, record in paths(method, pair, 3):
        found[ids(record)] += weight
        bound += weight * sum(token.drift or 0.0 for token in record.tokens)
    target = target_joint_law(pair, 3)
    gap = sum(abs(found.get(text, 0.0) - target.get(text, 0.0)) for text in found.keys() | target.keys()) / 2
    assert 1e-3 < gap <= bound + 1e-12 and bound < 3 * 3 * gap


@pytest.mark.parametrize(
    "spec",
    ["sprinter(tau=0.6, only=not-code)", "fuzzy(only=think, head=2)", "sprinter(tau=0.5, tail_ratio=0.1)",
     "trust=gate(tau=0.5),stop=untrusted,accept=exact,cap=20,tail_ratio=0"],
)  # fmt: skip
def test_they_are_parts_of_a_spec(spec: str) -> None:
    method = parse_method(spec)
    assert parse_method(full_spec(method)) == method
    assert method.only is not None or method.tail_ratio is not None


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("sprinter(only=cod)", r"unknown span 'cod': did you mean 'code'\?"),
        ("sprinter(only=3)", "only=3 is not a name of a span"),
        ("sprinter(tail_ratio=1.5)", "tail_ratio=1.5 is out of range"),
        ("fuzzy(tail_ratio=0.5)", "no token is trusted"),
        ("draft-only(tail_ratio=0.5)", "give cap=20"),
        ("accept=fuzzy,drafter=model(drafts=2),stop=fixed,only=code", "judges one draft"),
    ],
)
def test_refusals_say_what_to_do(spec: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        parse_method(spec)


def test_without_a_text_spans_are_refused() -> None:
    with pytest.raises(UserError, match="leave only= out"):
        run_chain(parse_method("draft-only(only=code)"), MarkovPair(3), (0,), Limits(3), AddressedDraws(0))
