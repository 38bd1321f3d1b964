"""Names, and what other packages add."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from sprinter.decode import registry
from sprinter.decode.registry import Registry, did_you_mean
from sprinter.errors import SprinterError, UserError


def one() -> int:
    return 1


def two() -> int:
    return 2


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[EntryPoint]]:
    """Entry points by group, to be filled; nothing that is installed shows."""
    points: dict[str, list[EntryPoint]] = {}
    monkeypatch.setattr(registry, "entry_points", lambda group: points.get(group, []))
    return points


def point(name: str, function: str, group: str = "sprinter.things") -> EntryPoint:
    return EntryPoint(name, f"tests.decode.test_registry:{function}", group)


def make(plugins: Any) -> Registry:
    things = Registry("thing", "sprinter.things")
    things.add("own", one)
    return things


def test_a_name_is_given_once(plugins: Any) -> None:
    things = make(plugins)
    with pytest.raises(ValueError, match=r"^thing 'own' is registered already$"):
        things.add("own", two)
    assert things.get("own") is one


def test_a_rule_registers_where_it_is_written(plugins: Any) -> None:
    things = make(plugins)
    assert things.rule("new")(two) is two
    assert things.get("new") is two
    assert things.names() == ["own", "new"]


def test_other_packages_add_names(plugins: dict[str, list[EntryPoint]]) -> None:
    plugins["sprinter.things"] = [point("theirs", "two")]
    plugins["sprinter.others"] = [point("elsewhere", "two", "sprinter.others")]
    things = make(plugins)
    assert things.get("theirs")() == 2
    assert things.names() == ["own", "theirs"]


def test_other_packages_cannot_replace_a_built_in_name(plugins: dict[str, list[EntryPoint]]) -> None:
    plugins["sprinter.things"] = [point("own", "two")]
    things = make(plugins)
    assert things.names() == ["own"]
    assert things.get("own")() == 1


def test_plugins_are_read_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [point("theirs", "two")]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    things = make(None)
    things.get("own")
    assert asked == []
    things.get("theirs")
    things.names()
    assert asked == ["sprinter.things"]


def test_an_unknown_name_hints_at_the_nearest(plugins: Any) -> None:
    things = make(plugins)
    with pytest.raises(UserError, match=r"^unknown thing 'oen': did you mean 'own'[?]$"):
        things.get("oen")
    with pytest.raises(UserError, match=r"^unknown thing 'xyz': known: own$"):
        things.get("xyz")
    assert str(did_you_mean("part", "stp", ["trust", "stop"])) == "unknown part 'stp': did you mean 'stop'?"


def test_a_broken_plug_in_is_named_every_time(plugins: dict[str, list[EntryPoint]]) -> None:
    plugins["sprinter.things"] = [point("broken", "nothing_of_this_name")]
    things = make(plugins)
    assert things.get("own") is one, "what is registered needs no plug-in"
    for _ in range(2):
        with pytest.raises(SprinterError, match=r"the plug-in 'broken' .* cannot be loaded \(AttributeError"):
            things.names()
