"""What other packages add through entry points, as a user meets it: specs, methods, refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
from torch import Tensor

import sprinter
from sprinter.decode import registry
from sprinter.decode.accept import SpecInfer
from sprinter.decode.drafter import Context, Drafter, Model, Proposal, Proposer
from sprinter.decode.drafter_conformance import check_drafter
from sprinter.decode.enumerate import MarkovPair, run_chain
from sprinter.decode.loop import Limits
from sprinter.decode.method import Method
from sprinter.decode.spec import parse_method
from sprinter.decode.stop import Fixed, Never
from sprinter.decode.trust import RECORDED, Coin, Everyone, Gate, State, TrustRule
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

Install = Callable[[registry.Registry, str, str], None]


@dataclass(frozen=True)
class Parrot(Drafter):
    """A third party's drafter: says the last token again."""

    n: int = 2

    @property
    def uses_model(self) -> bool:
        return False

    @property
    def proposer(self) -> Callable[[], Proposer]:
        return lambda: Echo(self.n)


class Echo(Proposer):
    """As ``Parrot``."""

    def __init__(self, n: int) -> None:
        self.n = n

    def propose(self, context: Context) -> Proposal:
        return context.certain([context.text[-1]] * min(self.n, context.at_most))


@dataclass(frozen=True)
class Loud(Model):
    """A kind of the built-in drafter."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Add an entry point to a registry for one test: (registry, name, object of this module)."""
    points: dict[str, list[EntryPoint]] = {}
    monkeypatch.setattr(registry, "entry_points", lambda group: points.get(group, []))

    def add(into: registry.Registry, name: str, attribute: str) -> None:
        monkeypatch.setattr(into, "_items", dict(into._items))
        monkeypatch.setattr(into, "_loaded", False)
        group = into._group
        points[group] = [EntryPoint(name, f"tests.decode.test_plugins:{attribute}", group)]

    return add


def test_a_drafter_of_a_plug_in_drafts(install: Install) -> None:
    builtin_pair = sprinter.load_pair()
    install(registry.DRAFTER, "parrot", "Parrot")
    spec = "drafter=parrot(n=3),stop=fixed(gamma=4),accept=exact"
    assert parse_method(spec).drafter == Parrot(3)
    greedy = {"max_new_tokens": 24, "temperature": 0.0}
    out = builtin_pair.generate("Once upon a time", method=spec, **greedy)  # type: ignore[arg-type]
    plain = builtin_pair.generate("Once upon a time", method="autoregressive", **greedy)  # type: ignore[arg-type]
    assert [token.id for token in out.tokens] == [token.id for token in plain.tokens]
    assert out.stats.lossless and out.stats.checked > 0 and out.stats.draft_steps == 0
    svip = parse_method(
        "drafter=parrot,stop=svip(h=0.3),accept=exact"
    )  # signals come of the proposal's own laws
    assert builtin_pair.generate("Once upon a time", method=svip, max_new_tokens=8).stats.checked > 0


@pytest.mark.parametrize("drafter", [Parrot(), Loud()])
def test_drafters_of_others_pass_the_check_and_keep_the_law(drafter: Drafter) -> None:
    check_drafter(drafter)
    assert Method(drafter=drafter).lossless()


@pytest.mark.parametrize("drafter", [Model, "model", None])
def test_what_is_no_drafter_is_refused(drafter: Any) -> None:
    with pytest.raises(UserError, match=r"^drafter=.* is not a drafter: give one"):
        Method(drafter=drafter)


def test_a_proposer_goes_with_no_head(install: Install) -> None:
    install(registry.DRAFTER, "parrot", "Parrot")
    with pytest.raises(UserError, match="a gate head reads the draft model's states"):
        parse_method("drafter=parrot,trust=gate")


def test_a_rule_in_another_rules_place_is_refused(install: Install) -> None:
    install(registry.TRUST, "odd", "Parrot")
    with pytest.raises(UserError, match=r"trust=Parrot\(n=2\) is not a trust rule"):
        parse_method("trust=odd")
    for wrong in ({"trust": "gate"}, {"stop": Coin()}, {"accept": Gate}):
        (part,) = wrong
        with pytest.raises(UserError, match=rf"^{part}=.* is not an? {part} rule"):
            Method(**wrong)  # type: ignore[arg-type]


# --- methods of other packages ---------------------------------------------------------------------------------------
def plain(*, gamma: int = 3) -> Method:
    """A function that says neither name nor paper."""
    return Method(stop=Fixed(gamma))


def named(*, gamma: int = 3) -> Method:
    """A function whose method says both."""
    return Method(stop=Fixed(gamma), paper="Me 2026")


def attributed() -> Method:
    """A function that carries its paper."""
    return Method(stop=Fixed(2))


attributed.paper = "You 2026"  # type: ignore[attr-defined]


def no_method() -> str:
    return "speculative"


@pytest.mark.parametrize(("function", "spec", "paper"), [
    ("plain", "theirs(gamma=3)", ""), ("named", "theirs(gamma=3)", "Me 2026"), ("attributed", "theirs", "You 2026"),
])  # fmt: skip
def test_a_plain_function_keeps_its_name_and_paper(
    install: Install, function: str, spec: str, paper: str
) -> None:
    install(registry.METHODS, "theirs", function)
    row = sprinter.methods()[-1]
    assert (row["name"], row["spec"], row["paper"]) == ("theirs", spec, paper)
    method = parse_method("theirs(cap=2)")
    assert method.cap == 2 and method.paper == paper and method.name.startswith("theirs(")
    if function == "plain":
        assert parse_method("theirs(gamma=7, cap=2)").name == "theirs(gamma=7, cap=2)"


def test_a_function_that_returns_no_method_is_named(install: Install) -> None:
    install(registry.METHODS, "theirs", "no_method")
    with pytest.raises(UserError, match="method 'theirs' returned 'speculative'"):
        parse_method("theirs")


# --- rules that go on from a built-in one ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Careful(Gate):
    """A gate that never trusts below a floor."""

    floor: float = 0.9

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        decision, state = Gate.trust(self, signals, state)
        return decision & (signals["gate"] >= self.floor), state


@dataclass(frozen=True)
class Either(TrustRule):
    """Leaves thresholds to two heads, one of them in a rule within."""

    h: float | str = RECORDED
    inner: Gate = field(default_factory=Gate)
    needs: ClassVar[frozenset[str]] = frozenset({"gate", "disco"})

    def settle(self, taus: Mapping[str, float]) -> Either:
        return replace(self, h=taus.get("disco", self.h), inner=self.inner.settle(taus))

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return self.inner.trust(signals, state)


def test_a_rule_made_from_gate_stays_itself_when_its_threshold_is_filled_in() -> None:
    settled = Method(trust=Careful(floor=0.8)).settle({"gate": 0.7})
    assert settled.trust == Careful(0.7, floor=0.8)
    assert type(settled.trust) is Careful
    assert settled.name == "trust=Careful(tau=0.7,floor=0.8),stop=fixed(gamma=5),cap=None", (
        "not registered: as Python writes it"
    )


@pytest.mark.parametrize(
    ("taus", "rule"),
    [
        ({"disco": 0.2}, Either(0.2)), ({"gate": 0.3}, Either(inner=Gate(0.3))),
        ({"gate": 0.3, "disco": 0.2}, Either(0.2, Gate(0.3))), ({"specdec++": 0.3}, Either()),
    ],
)  # fmt: skip
def test_a_rule_may_settle_on_any_head(taus: dict[str, float], rule: Either) -> None:
    assert Method(trust=Either()).settle(taus).trust == rule


@dataclass(frozen=True, slots=True)
class Shorter(Fixed):
    """Stops a token sooner than the rule that it is made from."""

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["drafted"] >= self.gamma - 1, state


@dataclass(frozen=True, slots=True)
class Some(Everyone):
    """Trusts every other token."""

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["drafted"] % 2 == 1, state


@dataclass(frozen=True, slots=True)
class Once(Never):
    """Stops at once."""

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["drafted"] >= 1, state


def test_a_rule_made_from_a_built_in_one_is_asked() -> None:
    pair = MarkovPair(seed=7, distance=0.0)  # p = q: all is accepted
    record = run_chain(Method(stop=Shorter(4)), pair, (0,), Limits(8), AddressedDraws(1))
    assert record.accept_lengths == [4, 4]  # three drafts and a bonus a round
    assert Method(stop=Shorter(4)).length is None
    for rules in ({"trust": Some(), "stop": Never()}, {"trust": Everyone(), "stop": Once()}):
        assert Method(**rules).needs_target
    with pytest.raises(UserError, match="several drafts go with trust=nobody and stop=fixed"):
        Method(stop=Shorter(4), accept=SpecInfer(), drafter=Model(drafts=2))
