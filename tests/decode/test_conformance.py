"""The public checks pass for every registered rule, and fail for rules that break their word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from tests.decode.chains import LikelyToken, UnlikelyToken
from torch import Tensor

from sprinter.decode import check_stop, check_trust, conformance
from sprinter.decode.accept import AcceptRule, Exact
from sprinter.decode.conformance import check_accept, check_same_law, law_pairs
from sprinter.decode.draft import Control
from sprinter.decode.spec import ACCEPT, STOP, TRUST
from sprinter.decode.stop import Fixed, StopRule
from sprinter.decode.trust import Coin, Everyone, Gate, Nobody, State, TrustRule
from sprinter.laws import tv_distance


# --- every registered rule -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TRUST.names())
def test_registered_trust_rules(name: str) -> None:
    check_trust(TRUST.get(name)())


@pytest.mark.parametrize("name", STOP.names())
def test_registered_stop_rules(name: str) -> None:
    check_stop(STOP.get(name)())


@cache
def many_pairs(count: int, vocab: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    return list(law_pairs(count, vocab, seed))


@pytest.mark.parametrize("name", ACCEPT.names())
def test_registered_accept_rules_on_ten_thousand_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(count: int = 1000, vocab: int = 8, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The same pairs, made once for all rules."""
        return iter(many_pairs(count, vocab, seed))

    monkeypatch.setattr(conformance, "law_pairs", once)
    check_accept(ACCEPT.get(name)(), count=10_000)


@pytest.mark.parametrize("rule", [Coin(1.0), Gate(0.0), LikelyToken()], ids=str)
def test_trust_rules_with_other_parameters(rule: TrustRule) -> None:
    check_trust(rule)


# --- the pairs -------------------------------------------------------------------------------------------------------
def test_the_pairs_hold_the_edge_cases() -> None:
    pairs = many_pairs(10_000, 8, 0)
    assert len(pairs) >= 10_000
    p, q = torch.stack([p for p, _ in pairs]), torch.stack([q for _, q in pairs])
    for laws in (p, q):
        assert laws.dtype == torch.float64
        assert bool((laws >= 0).all())
        assert float((laws.sum(-1) - 1).abs().max()) < 1e-12
    tv = tv_distance(p, q)
    assert bool((tv == 0).any()), "p = q"
    assert bool((tv == 1).any()), "disjoint supports"
    assert bool(((p.amax(-1) == 1) & (q.amax(-1) == 1) & (tv == 1)).any()), "one-hot and different"
    assert bool(((p.amax(-1) == 1) & (q.amax(-1) == 1) & (tv == 0)).any()), "one-hot and alike"
    assert int(((p == 0) & (q > 0)).any(-1).sum()) > 1000
    assert int(((p > 0) & (q == 0)).any(-1).sum()) > 1000
    assert int(((tv > 0) & (tv < 0.01)).sum()) > 100, "close to one another"
    assert bool(((p > 0) & (p < 1e-250)).any()), "hardly any mass"


def test_same_law_sees_a_billionth() -> None:
    law = {(0,): 0.5, (1,): 0.5}
    check_same_law(law, {(0,): 0.5 + 5e-10, (1,): 0.5}, "law")
    with pytest.raises(AssertionError, match=r"law: text \(0,\) has chance 0.5, not 0.50"):
        check_same_law(law, {(0,): 0.5 + 5e-9, (1,): 0.5}, "law")
    with pytest.raises(AssertionError, match=r"text \(2,\)"):
        check_same_law(law, {**law, (2,): 1e-8}, "law")
    with pytest.raises(AssertionError, match=r"text \(2,\)"):
        check_same_law({**law, (2,): 1e-8}, law, "law")


# --- accept rules that break their word ------------------------------------------------------------------------------
class Lossy(Exact):
    """Keeps a tenth more than it may, and says so; broken in one way by each class below."""

    @property
    def lossless(self) -> bool:
        return False

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return (1.1 * Exact.keep(self, p, q)).clamp(max=1)

    def drift(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return tv_distance(self.law(p, q), p)


class KeepsTooMuch(Lossy):
    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return 1.1 * Exact.keep(self, p, q)


class KeepsLessThanNothing(Lossy):
    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return Exact.keep(self, p, q) - 0.1


class ReplacesByNoLaw(Lossy):
    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return 0.9 * p


class ReplacesByNegativeChances(Lossy):
    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return 2 * p - q


class TellsAnotherLaw(Lossy):
    def law(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return p


class TellsAnotherDrift(Lossy):
    def drift(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return tv_distance(self.law(p, q), p) / 2


class GivesOneChanceForAll(Lossy):
    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return Exact.keep(self, p, q).amin(-1, keepdim=True)


class ClaimsToBeLossless(Lossy):
    lossless = True

    def drift(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return Lossy.drift(self, p, q)


class ClaimsToBeGreedilyLossless(Lossy):
    lossless_greedy = True

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return torch.full_like(p, 0.5)


class HidesItsPower(Exact):
    lossless = False
    lossless_greedy = True


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (KeepsTooMuch(), "a keep chance is outside"),
        (KeepsLessThanNothing(), "a keep chance is outside"),
        (ReplacesByNoLaw(), "a replacement law does not sum to 1"),
        (ReplacesByNegativeChances(), "a replacement law has a negative entry"),
        (TellsAnotherLaw(), "law differs from q·b"),
        (TellsAnotherDrift(), r"drift is not TV\(π, p\)"),
        (GivesOneChanceForAll(), "must have the shape of p"),
        (ClaimsToBeLossless(), r"claims lossless, but TV\(π, p\) reaches"),
        (ClaimsToBeGreedilyLossless(), "claims lossless_greedy and is not"),
        (HidesItsPower(), "does not claim lossless, but never differs from p"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, AcceptRule) else "",
)
def test_broken_accept_rules_are_caught(rule: AcceptRule, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_accept(rule)


def test_the_rule_that_they_break_is_sound() -> None:
    check_accept(Lossy())


# --- trust and stop rules that break their word ----------------------------------------------------------------------
@dataclass(frozen=True)
class Flips(Nobody):
    """Answers by turns."""

    turns: list[bool]

    @property
    def never(self) -> bool:
        return False

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        self.turns.append(not self.turns[-1])
        return torch.tensor(self.turns[-1]), state


class SaysNumbers(Nobody):
    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return torch.tensor(0.0), state


class PoolsTheBatch(Nobody):
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    never = False

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["entropy"] >= signals["entropy"].mean(), state


class HidesThatItLooks(LikelyToken):
    sees_token = False


class ClaimsNeverToTrust(Gate):
    never = True


class WantsTheUnknown(Nobody):
    needs: ClassVar[frozenset[str]] = frozenset({"weather"})


class ReadsUnasked(Nobody):
    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["margin"] > 9, state


class SaysTrue(Nobody):
    def trust(self, signals: Mapping[str, Tensor], state: State) -> Any:
        return True, state


class SaysNoState(Nobody):
    def trust(self, signals: Mapping[str, Tensor], state: State) -> Any:
        return torch.tensor(False)


class HasRounds(Nobody):
    def begin_round(self, state: State) -> State:
        return state


class LearnsInVain(Nobody):
    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        return state


@dataclass(frozen=True)
class Counts(Everyone):
    """Has a state that is sound from 1 on."""

    first: float = 1.0

    def start(self) -> Any:
        return (torch.tensor(self.first),)

    def possible(self, state: State) -> bool:
        return bool(state[0] >= 1)


class CountsInPython(Counts):
    def start(self) -> Any:
        return (True,)


class LosesTheCount(Counts):
    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return torch.tensor(True), ()


class LearnsANumber(Counts):
    learns = True

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> Any:
        return (float(overlaps[-1]),)


class StartsNowhere(Nobody):
    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return state[0] > 1, state


@dataclass
class Thaws(TrustRule):
    """Not frozen."""

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return torch.tensor(False), state


class Bare(TrustRule):
    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return torch.tensor(False), state


def test_the_rule_with_a_state_that_they_break_is_sound() -> None:
    check_trust(Counts())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Flips([False]), "not a function of signals and state"),
        (SaysNumbers(), "must be a bool tensor"),
        (PoolsTheBatch(), "batched and single decisions differ"),
        (HidesThatItLooks(), "looks at x and does not say so"),
        (ClaimsNeverToTrust(), "has chance"),
        (WantsTheUnknown(), r"needs unknown signals \['weather'\]"),
        (ReadsUnasked(), "reads signal 'margin', which its needs do not name"),
        (SaysTrue(), "must be a bool tensor"),
        (SaysNoState(), r"trust must return \(decision, state\)"),
        (HasRounds(), "begin_round is called only of stop rules"),
        (LearnsInVain(), "learn is never called without learns = True"),
        (CountsInPython(), r"start must give a tuple of tensors as the state, and gives \(True,\)"),
        (LosesTheCount(), "trust changes the shapes of the state"),
        (LearnsANumber(), "learn must give a tuple of tensors"),
        (StartsNowhere(), r"raises IndexError: .* \(it defines no start, so its state is empty\)"),
        (Counts(0.0), "calls the state of its own start impossible"),
        (Thaws(), "a rule is a frozen dataclass"),
        (Bare(), "a rule is a frozen dataclass"),
        (Fixed(), "is not a TrustRule"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_broken_trust_rules_are_caught(rule: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_trust(rule)


class HidesThatItLooksToStop(UnlikelyToken):
    sees_token = False


class StopsByNumbers(Fixed):
    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["drafted"], state


class WritesIntoSignals(Fixed):
    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["drafted"].clamp_(max=2) < 0, state


class BeginsWithANumber(Fixed):
    def begin_round(self, state: State) -> Any:
        return (0,)


class EndsWithAList(Fixed):
    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> Any:
        return []


class LearnsUnasked(Fixed):
    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        return state


class Divides(Fixed):
    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["drafted"] > 1 // 0, state


@dataclass
class Adds(StopRule):
    """Keeps its state in itself."""

    count: int = 0

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        self.count += 1
        return signals["drafted"] >= 3, state


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (BeginsWithANumber(), "begin_round must give a tuple of tensors"),
        (EndsWithAList(), "end_round must give a tuple of tensors"),
        (LearnsUnasked(), "learn is never called without learns = True"),
        (Divides(), "raises ZeroDivisionError"),
        (Adds(), "a rule is a frozen dataclass"),
        (WritesIntoSignals(), r"writes into the signals \['drafted'\]"),
        (HidesThatItLooksToStop(), "looks at x and does not say so"),
        (StopsByNumbers(), "must be a bool tensor"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_broken_stop_rules_are_caught(rule: StopRule, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_stop(rule)
