"""What other packages add through entry points, as a user meets it: specs, methods, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from sprinter.decode import registry
from sprinter.decode.drafter import Drafter, Model
from sprinter.decode.method import Method
from sprinter.decode.methods import parse_method
from sprinter.decode.trust import Coin, Gate
from sprinter.errors import UserError

Install = Callable[[registry.Registry, str, str], None]


@dataclass(frozen=True)
class Parrot(Drafter):
    """A third party's drafter."""

    n: int = 2


@dataclass(frozen=True)
class Loud(Model):
    """A built-in drafter with other ways, which no driver would ask about."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Add an entry point to a registry for one test: (registry, name, object of this module)."""
    points: dict[str, list[EntryPoint]] = {}
    monkeypatch.setattr(registry, "entry_points", lambda group: points.get(group, []))

    def add(into: registry.Registry, name: str, attribute: str) -> None:
        monkeypatch.setattr(into, "_items", dict(into._items))
        monkeypatch.setattr(into, "_loaded", False)
        group = f"sprinter.{'drafter' if into is registry.DRAFTER else 'trust'}"
        points[group] = [EntryPoint(name, f"tests.decode.test_plugins:{attribute}", group)]

    return add


def test_a_drafter_of_a_plug_in_is_refused(install: Install) -> None:
    install(registry.DRAFTER, "parrot", "Parrot")
    with pytest.raises(UserError, match=r"drafter Parrot\(n=3\).*only the built-in drafters.*model, lookup"):
        parse_method("drafter=parrot(n=3),stop=fixed(gamma=4)")


@pytest.mark.parametrize("drafter", [Parrot(), Loud(), Model, "model"])
def test_drafters_that_no_driver_serves_are_refused(drafter: Any) -> None:
    with pytest.raises(UserError, match="only the built-in drafters"):
        Method(drafter=drafter)


def test_a_rule_in_another_rules_place_is_refused(install: Install) -> None:
    install(registry.TRUST, "odd", "Parrot")
    with pytest.raises(UserError, match=r"trust=Parrot\(n=2\) is no trust rule"):
        parse_method("trust=odd")
    for wrong in ({"trust": "gate"}, {"stop": Coin()}, {"accept": Gate}):
        (part,) = wrong
        with pytest.raises(UserError, match=rf"^{part}=.* is no {part} rule"):
            Method(**wrong)  # type: ignore[arg-type]
