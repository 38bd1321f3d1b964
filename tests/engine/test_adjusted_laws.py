"""The joint laws of texts with logits processors on, through the engine's driver and runners: every draw enumerated."""

from __future__ import annotations

import pytest
import torch
from tests.decode.adjusted import adjusted
from tests.engine.joint_laws import PROMPT, Text, distance
from tests.engine.test_runner_laws import CLOSE, OWN, Pair, law_through
from tests.models.tiny import uncached
from torch import Tensor

from sprinter.decode.adjust import Adjustments
from sprinter.decode.enumerate import joint_law, target_joint_law
from sprinter.decode.spec import parse_method

PENALTIES = Adjustments(1.6, 0.5, -0.8, ((1, 0.7),))
FORBIDDING = Adjustments(1.3, min_new_tokens=2, ends=(2,), bad_words=((0, 1, 1), (0, 0, 2)))


class AdjustedPair(Pair):
    """The same models; logits are adjusted to the text before they become laws."""

    def __init__(self, settings: Adjustments) -> None:
        super().__init__(3)
        self._settings = settings

    def _read_once(self, which: int, text: Text) -> tuple[Tensor, Tensor]:
        logits, hidden = uncached(self.models[which], list(text))
        n = len(PROMPT)
        return torch.softmax(adjusted(self._settings, text[:n], text[n:], logits[-1]), -1), hidden[-1]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(3)


@pytest.mark.parametrize("settings", [PENALTIES, FORBIDDING], ids=["penalties", "forbidding"])
@pytest.mark.parametrize(
    ("name", "kind", "ahead"),
    [
        ("autoregressive", "row", 1),
        ("speculative(gamma=2)", "row", 1),
        ("speculative(gamma=2)", "captured", 3),
        ("speculative(gamma=1)", "crop", 2),
        ("svip(h=0.3)", "row", 2),
        ("batch", "row", 1),
        ("specinfer", "row", 1),
        ("lookup(n=2, gamma=2)", "row", 1),
        ("lookup(n=3, gamma=2)", "captured", 1),
    ],
)
def test_lossless_methods_write_the_adjusted_targets_texts(
    pair: Pair, settings: Adjustments, name: str, kind: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = parse_method(OWN.get(name, name))
    found = law_through(kind, pair, method, 3, ahead, monkeypatch, adjustments=settings)
    assert distance(found, target_joint_law(AdjustedPair(settings), 3, prompt=PROMPT)) < CLOSE


@pytest.mark.parametrize(
    "name",
    ["sprinter(tau=0.5, cap=2)", "draft-only", "opt(epsilon=0.1, gamma=2)"],
)
def test_lossy_methods_follow_the_adjusted_laws_of_both_models(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rules read a gate or nothing: signals of raw laws do not see the processors."""
    method = parse_method(name)
    found = law_through("row", pair, method, 3, 1, monkeypatch, adjustments=PENALTIES)
    wanted = joint_law(method, AdjustedPair(PENALTIES), 3, prompt=PROMPT)
    assert distance(found, wanted) < CLOSE
    assert distance(found, joint_law(method, pair, 3, prompt=PROMPT)) > 0.01, "the processors change the law"


def test_the_laws_would_tell_processors_that_are_missing(pair: Pair) -> None:
    plain = target_joint_law(pair, 3, prompt=PROMPT)
    for settings in (PENALTIES, FORBIDDING):
        wanted = AdjustedPair(settings)
        assert distance(target_joint_law(wanted, 3, prompt=PROMPT), plain) > 0.01
        assert float((wanted.q((*PROMPT, 1)) - pair.q((*PROMPT, 1))).abs().max()) > 0.03
