"""Our rules in another engine, which verifies what it likes of a draft: laws of texts, and what a request may say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from sprinter.decode.enumerate import (
    ChainDriver,
    EnumeratedDraws,
    MarkovPair,
    check_same_law,
    joint_law,
    target_joint_law,
)
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import parse_method
from sprinter.doors.rules import HostedRequest, method_of
from sprinter.doors.vllm.requests import Requests
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

ALL = 99
PARAMS = SimpleNamespace(
    extra_args=None, seed=None, temperature=1.0, max_tokens=64, min_tokens=0, stop_token_ids=[], eos_token_id=None
)  # fmt: skip
PAIR = MarkovPair(seed=3)
LOSSY = [
    "sprinter(tau=0.5,cap=2)",
    "sprinter(tau=0.5,tail=1,cap=3)",
    "coin(rate=0.5,cap=1)",
    "fuzzy(gamma=2)",
]


def _decode(
    pair: MarkovPair, spec: str, draws: EnumeratedDraws, length: int, verified: Sequence[int]
) -> HostedRequest:
    """An engine that verifies so many draft tokens in each step, and all of them after those."""
    method = parse_method(spec)
    hosted = HostedRequest((0,), method, length, (), draws, 4)
    driver = ChainDriver(pair, draws, 1, method.accept.needs_raw, method.drafter, needs=method.needs)
    steps = iter(verified)
    while not hosted.over:
        while (ask := hosted.wants) is not None:
            hosted.answer(driver.answer(ask))
        text, draft = hosted.sequence.tokens, hosted.draft
        n = min(len(draft), next(steps, ALL))
        ends = range(hosted.sequence.scored + 1, hosted.sequence.scored + 2 + n)
        p = torch.stack([pair.p(tuple(text[:end])) for end in ends])
        made = hosted.score(p, p if method.accept.needs_raw else None)
        assert 1 <= len(made) <= n + 1, "the engine has room for one token more than it verifies"
        assert made[:-1] == draft[: len(made) - 1], "the engine's keys and values are those of the draft"
    return hosted


def law_of(
    pair: MarkovPair, spec: str, length: int, verified: Sequence[int] = ()
) -> tuple[dict[tuple[int, ...], float], float]:
    """The law of texts, and the mean sum of their drifts."""
    law: defaultdict[tuple[int, ...], float] = defaultdict(float)
    draws, drift = EnumeratedDraws(), 0.0
    while True:
        record = _decode(pair, spec, draws, length, verified).record
        law[tuple(token.id for token in record.tokens)] += draws.weight
        drift += draws.weight * sum(token.drift or 0.0 for token in record.tokens)
        if not draws.next_path():
            return dict(law), drift


@pytest.mark.parametrize("spec", LOSSY)
def test_a_text_has_the_law_that_it_has_in_our_engine(spec: str) -> None:
    check_same_law(law_of(PAIR, spec, 3)[0], joint_law(parse_method(spec), PAIR, 3), spec)


@pytest.mark.parametrize(
    "spec", ["speculative(gamma=2)", "block(gamma=3)", "svip(h=0.35)", "calibrated(rate=0.3)"]
)
@pytest.mark.parametrize("verified", [(0, ALL), (0, 1, 0), (1, 1, 1)])
def test_exact_methods_stay_exact_whatever_is_verified(spec: str, verified: Sequence[int]) -> None:
    check_same_law(law_of(PAIR, spec, 3, verified)[0], target_joint_law(PAIR, 3), spec)


@pytest.mark.parametrize("spec", [LOSSY[0], LOSSY[3], "coin(rate=0.5,cap=1,budget=0.3)"])
def test_drift_bounds_the_distance_whatever_is_verified(spec: str) -> None:
    length = 2 if "budget" in spec else 3
    law, drift = law_of(PAIR, spec, length, (0, 1))
    exact = target_joint_law(PAIR, length)
    distance = sum(abs(law.get(text, 0.0) - exact.get(text, 0.0)) for text in law | exact) / 2
    assert distance <= drift + 1e-9
    assert drift > 0
    if "budget" in spec:
        assert drift <= 0.3 * length + 1e-9


def test_what_is_forgotten_of_a_draft_is_unread_again() -> None:
    draws = AddressedDraws()
    hosted = HostedRequest((0,), parse_method("speculative(gamma=3)"), 8, (), draws, 4)
    driver = ChainDriver(PAIR, draws)
    while (ask := hosted.wants) is not None:
        hosted.answer(driver.answer(ask))
    hosted.sequence.draft.read = 3
    assert len(hosted.draft) == 3
    assert len(hosted.score(PAIR.p((0,)).unsqueeze(0))) == 1
    assert hosted.sequence.draft.read == 1
    assert hosted.record.stats.target_calls == 1
    assert isinstance(hosted.sequence, TokenSequence) and len(hosted.sequence) == 2


@pytest.mark.parametrize("given", ["svip", {"method": "svip"}, '{"method": "svip"}'])
def test_a_request_names_its_method(given: object) -> None:
    assert method_of(given, "speculative").preset == "svip"


def test_a_request_that_says_nothing_has_the_default() -> None:
    assert method_of(None, "speculative(gamma=3)").name == "speculative(gamma=3)"
    assert method_of({"budget": 0.05}, "sprinter").budget == 0.05


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"metod": "svip"},
            "is not without metod: give a method, or some of method, budget, require_lossless",
        ),
        ("{nonsense", "is not JSON"),
        (3, "is not an object"),
        ({"budget": "much"}, "budget='much' is not a number"),
        ({"method": "sprinter", "require_lossless": True}, "is lossy: give a lossless method"),
        ("specinfer", "it drafts trees"),
        ("draft-only", "it never calls the target"),
        ("sprinter(only=think)", "only= follows spans"),
    ],
)
def test_a_request_that_cannot_run_is_refused(given: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        method_of(given, "speculative")


def test_an_ending_before_the_least_length_does_not_end_a_text() -> None:
    """As in vLLM with ``min_tokens``: a copied EOS may be accepted by a lossy rule, and the engine goes on."""
    hosted = HostedRequest((0, 1), parse_method("autoregressive"), 6, (1,), AddressedDraws(), 4, least=3)
    for token, over in ((1, False), (1, False), (1, True)):
        law = torch.zeros(1, 3)
        law[0, token] = 1.0
        assert hosted.score(law) == [token] and hosted.over is over
    assert hosted.record.finish == "eos"


def test_reports_of_ended_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their tokens, of which each has an origin, and by their number; a name that comes again is one report."""
    monkeypatch.setattr("sprinter.doors.vllm.requests._KEPT", 4096)
    config = SimpleNamespace(
        additional_config={"sprinter": {"method": "autoregressive"}},
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        model_config=SimpleNamespace(seed=0, max_model_len=2048),
    )
    requests, law = Requests(config), torch.tensor([[0.5, 0.5]])
    for name in (*map(str, range(40)), *["same"] * 40, *(f"long{i}" for i in range(20))):
        one = requests.begin(name, PARAMS, [0], {})
        while "long" in name and not one.hosted.over:
            one.hosted.score(law)
        requests.end(name)
        if name == "39":
            assert len(requests.reports()) == 4096 // 256
        if name == "same":
            assert "39" in requests.reports() and len(requests.reports()) == 4096 // 256
    assert list(requests.reports()) == [f"long{i}" for i in range(20 - 4096 // (256 + 64), 20)]
    assert requests.totals()["requests"] == 100 and requests.totals()["new_tokens"] == 20 * 64
