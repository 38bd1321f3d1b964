"""Specs, presets, names and what methods say of themselves."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from tests.decode.chains import LikelyToken, UnlikelyToken, Unsure

from sprinter.decode import registry
from sprinter.decode.accept import Exact, Lenient
from sprinter.decode.drafter import Nothing
from sprinter.decode.registry import Registry
from sprinter.decode.spec import ACCEPT, METHODS, STOP, TRUST, Method, method_table, parse_method, preset
from sprinter.decode.stop import Fixed, Never, Untrusted
from sprinter.decode.trust import Coin, Everyone, Gate, Nobody
from sprinter.errors import UserError


def parts(method: Method) -> tuple[object, ...]:
    return method.trust, method.stop, method.accept, method.cap, method.drafter


# --- presets ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("autoregressive", Method(drafter=Nothing())),
        ("draft-only", Method(trust=Everyone(), stop=Never())),
        ("speculative", Method(stop=Fixed(5))),
        ("speculative(gamma=3)", Method(stop=Fixed(3))),
        ("speculative()", Method(stop=Fixed(5))),
        ("sprinter", Method(trust=Gate("recorded"), stop=Untrusted(), cap=20)),
        ("sprinter(tau=0.5)", Method(trust=Gate(0.5), stop=Untrusted(), cap=20)),
        ("sprinter(tau=0.7)", Method(trust=Gate(0.7), stop=Untrusted(), cap=20)),
        ("sprinter(tau=0, cap=4)", Method(trust=Gate(0), stop=Untrusted(), cap=4)),
        ("sprinter(cap=none)", Method(trust=Gate("recorded"), stop=Untrusted(), cap=None)),
        (" sprinter( tau = 1.0 ) ", Method(trust=Gate(1.0), stop=Untrusted(), cap=20)),
        ("coin", Method(trust=Coin(0.5), stop=Untrusted(), cap=20)),
        ("coin(rate=0.25, cap=8)", Method(trust=Coin(0.25), stop=Untrusted(), cap=8)),
    ],
)
def test_presets(spec: str, wanted: Method) -> None:
    assert parts(parse_method(spec)) == parts(wanted)


@pytest.mark.parametrize("name", METHODS.names())
def test_every_preset_has_documented_defaults_and_takes_a_cap(name: str) -> None:
    method = parse_method(name)
    assert method.name.startswith(name)
    assert method.paper
    assert METHODS.get(name).__doc__
    assert parts(parse_method(method.name)) == parts(method)  # the canonical name says all
    assert parse_method(method.name).name == method.name
    capped = parse_method(f"{name}(cap=7)")
    assert parts(capped) == (method.trust, method.stop, method.accept, 7, method.drafter)
    assert capped.paper == method.paper


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("autoregressive", "autoregressive"),
        ("draft-only", "draft-only"),
        ("speculative", "speculative(gamma=5)"),
        ("speculative(gamma=3)", "speculative(gamma=3)"),
        ("coin(rate=0.25)", "coin(rate=0.25, cap=20)"),
        ("speculative(gamma=3, cap=2)", "speculative(gamma=3, cap=2)"),
        ("speculative(cap=2)", "speculative(gamma=5, cap=2)"),
        ("autoregressive(cap=2)", "autoregressive(cap=2)"),
        ("trust=gate(tau=0.6), stop=fixed(gamma=8)", "trust=gate(tau=0.6),stop=fixed(gamma=8)"),
    ],
)
def test_names_are_canonical(spec: str, name: str) -> None:
    assert parse_method(spec).name == name
    assert parts(parse_method(name)) == parts(parse_method(spec))


def test_a_replaced_rule_stays() -> None:
    method = parse_method("sprinter(tau=0.6)").replace(accept=Lenient())
    assert parse_method(method.name).accept == Lenient()
    with pytest.raises(TypeError, match="tau"):  # the preset would make another accept rule
        method.replace(tau=0.7)
    # Its guard does not go with the rules of the preset, which it has no longer.
    trusting = parse_method("speculative").replace(trust=Gate(0.5), tail_ratio=0.5)
    assert parse_method(trusting.name).is_as(trusting)


def test_a_method_passes_through() -> None:
    method = Method(stop=Fixed(2))
    assert parse_method(method) is method


@pytest.mark.parametrize("name", METHODS.names())
def test_every_parameter_of_a_preset_is_in_its_name(name: str) -> None:
    others = {"signal": "margin", "divergence": "kl", "base": "greedy", "deferral": "chow", "widths": "2x2",
              "counts": "3x2x2x1", "tree": "0x1", "reads": "1x1x1x1", "kind": "mtp"}  # fmt: skip
    for key, parameter in inspect.signature(METHODS.get(name)).parameters.items():
        usual = parameter.default
        number = usual + 1 if type(usual) is int else 0.25 if usual != 0.25 else 0.5
        other = others.get(key, not usual if isinstance(usual, bool) else number)
        method = parse_method(f"{name}({key}={other})")
        assert method.name.startswith(name) and f"{key}={other}" in method.name
        assert parse_method(name).replace(**{key: other}) == parse_method(method.name) == method


def test_a_number_is_held_by_its_rule_alone() -> None:
    method = parse_method("sprinter(tau=0.6, cap=none)")
    assert replace(method, trust=Gate(0.7)).name == "sprinter(tau=0.7, cap=None, tail=0)"
    assert method.replace(cap=4).name == "sprinter(tau=0.6, cap=4, tail=0)"
    assert method.replace(tau=0.7) == replace(method, trust=Gate(0.7))


@pytest.mark.parametrize(("spec", "dial"), [("sprinter", "tau"), ("trust=certain", "threshold")])
def test_a_threshold_that_a_budget_chooses_is_not_replaced(spec: str, dial: str) -> None:
    method = parse_method(spec).replace(budget=0.1)
    message = (
        f"the budget of method {method.name} chooses its {dial}: leave {dial}= out, or give budget=None too"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        method.replace(**{dial: 0.7})
    with pytest.raises(
        UserError, match=r"unknown parameter of method speculative\(gamma=5\) 'gama'.*'gamma'\?"
    ):
        parse_method("speculative").replace(gama=3)
    free = parse_method("sprinter(budget=0.1)").replace(tau=0.7, budget=None)
    assert free == parse_method("sprinter(tau=0.7)")


# --- composition -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("trust=nobody", Method(stop=Fixed(5), cap=40)),
        ("accept=exact", Method(stop=Fixed(5), cap=40)),
        ("cap=3", Method(stop=Fixed(5), cap=3)),
        ("stop=never", Method(stop=Never(), cap=40)),
        ("trust=gate", Method(trust=Gate("recorded"), stop=Untrusted(), cap=20)),
        ("trust=coin(rate=0)", Method(trust=Coin(0), stop=Fixed(5), cap=40)),
        (
            "trust=gate(tau=0.6),stop=fixed(gamma=8),accept=exact,cap=20",
            Method(Gate(0.6), Fixed(8), Exact(), 20),
        ),
        ("cap = 9 , stop = fixed( gamma = 2 )", Method(stop=Fixed(2), cap=9)),
        ("stop=fixed,cap=none", Method(stop=Fixed(5), cap=None)),
    ],
)
def test_compositions(spec: str, wanted: Method) -> None:
    assert parts(parse_method(spec)) == parts(wanted)


def test_a_method_is_printed_as_a_spec() -> None:
    method = parse_method("sprinter(tau=0.5)")
    assert str(method) == method.name == "sprinter(tau=0.5, cap=20, tail=0)"
    assert "to_horizon=False" in repr(method)


# --- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "the method is empty: give a name such as 'sprinter' or 'speculative(gamma=5)'"),
        ("   ", "the method is empty: give a name such as 'sprinter' or 'speculative(gamma=5)'"),
        ("sprintr", "unknown method 'sprintr': did you mean 'sprinter'?"),
        ("speculativ(gamma=3)", "unknown method 'speculativ': did you mean 'speculative'?"),
        ("Sprinter", "unknown method 'Sprinter': did you mean 'sprinter'?"),
        ("fallback(f=0.5)", "'fallback' is a stop rule: write stop=fallback(f=0.5)"),
        ("onehot", "'onehot' is an accept rule: write accept=onehot"),
        ("gate,budget=0.02", "'gate' in method 'gate,budget=0.02' is not part=rule: write trust=gate"),
        (
            "sprinter,budget=0.02",
            "'sprinter' in method 'sprinter,budget=0.02' is not part=rule: write sprinter(budget=0.02)",
        ),
        (
            "sprinter(tau=0.5), cap=9",
            "'sprinter(tau=0.5)' in method 'sprinter(tau=0.5), cap=9' is not part=rule: write "
            "sprinter(tau=0.5, cap=9)",
        ),
        (
            "sprinter,stop=never",
            "'sprinter' in method 'sprinter,stop=never' is not part=rule: write trust=..., ",
        ),
        ("speculative(gama=3)", "unknown parameter of speculative 'gama': did you mean 'gamma'?"),
        ("sprinter(threshold=1)", "unknown parameter of sprinter 'threshold': known: "),
        ("autoregressive(gamma=1)", "method 'autoregressive' takes no parameters, and got 'gamma'"),
        ("speculative(gamma=0)", "gamma=0 is out of range: give a whole number >= 1"),
        ("speculative(gamma=2.5)", "gamma=2.5 is out of range: give a whole number >= 1"),
        ("speculative(gamma=true)", "gamma=True is out of range: give a whole number >= 1"),
        ("speculative(gamma=)", "gamma= is out of range: give a whole number >= 1"),
        ("speculative(gamma=none)", "gamma=None is out of range: give a whole number >= 1"),
        ("sprinter(tau=7)", "tau=7 is out of range: give a number in [0, 1]"),
        ("sprinter(tau=nan)", "tau=nan is out of range: give a number in [0, 1]"),
        ("sprinter(tau=high)", "tau=high is out of range: give a number in [0, 1]"),
        ("coin(rate=-1)", "rate=-1 is out of range: give a number in [0, 1]"),
        ("sprinter(cap=0)", "cap=0 is out of range: give a whole number >= 1"),
        ("speculative(cap=0)", "cap=0 is out of range: give a whole number >= 1"),
        ("stop=fixed,cap=0", "cap=0 is out of range: give a whole number >= 1"),
        ("speculative(gamma=1, gamma=2)", "'gamma=' stands twice in 'speculative(gamma=1, gamma=2)'"),
        ("speculative(3)", "'3' in 'speculative(3)' is not name=value: parameters are given by keyword"),
        (
            "speculative(gamma=3,)",
            "'' in 'speculative(gamma=3,)' is not name=value: parameters are given by keyword",
        ),
        ("speculative(=3)", "'=3' in 'speculative(=3)' is not name=value: parameters are given by keyword"),
        ("speculative(gamma=3", "parentheses do not match in method 'speculative(gamma=3'"),
        ("speculative)gamma=3(", "parentheses do not match in method 'speculative)gamma=3('"),
        ("speculative(gamma=3))", "parentheses do not match in method 'speculative(gamma=3))'"),
        ("speculative(gamma=3)x", "'speculative(gamma=3)x' does not end with its closing parenthesis"),
        ("sprinter, coin", "'sprinter' in method 'sprinter, coin' is not part=rule: write trust=..., "),
        ("trust=gate,trust=coin", "'trust=' stands twice in method 'trust=gate,trust=coin'"),
        ("cap=3,cap=4", "'cap=' stands twice in method 'cap=3,cap=4'"),
        ("trsut=gate", "unknown part of a method 'trsut': did you mean 'trust'?"),
        ("trust=gaet", "unknown trust rule 'gaet': did you mean 'gate'?"),
        ("stop=fixd", "unknown stop rule 'fixd': did you mean 'fixed'?"),
        ("accept=exct", "unknown accept rule 'exct': did you mean 'exact'?"),
        ("trust=nobody(tau=1)", "trust rule 'nobody' takes no parameters, and got 'tau'"),
        ("trust=gate(0.5)", "'0.5' in 'gate(0.5)' is not name=value: parameters are given by keyword"),
        ("lookup(n=abc)", "n=abc is out of range: give a whole number >= 1"),
        ("lookup(n=none)", "n=None is out of range: give a whole number >= 1"),
        ("trust=gate(tau=0.5", "parentheses do not match in method 'trust=gate(tau=0.5'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_method(spec)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


# --- what methods say of themselves ----------------------------------------------------------------------------------
def test_the_table_has_one_row_a_method() -> None:
    rows = method_table()
    assert [row["name"] for row in rows] == METHODS.names()
    assert len({row["name"] for row in rows}) == len(rows)
    by_name = {row["name"]: row for row in rows}
    assert by_name["sprinter"]["trust"] == "gate(tau=recorded)"
    assert by_name["sprinter"]["lossless"] is False
    assert by_name["coin"]["trust"] == "coin(rate=0.5)"
    assert by_name["draft-only"]["lossless"] is False
    assert by_name["autoregressive"]["lossless"] is True
    wanted = {"spec": "speculative(gamma=5)", "stop": "fixed(gamma=5)", "accept": "exact", "lossless": True}
    assert wanted.items() <= by_name["speculative"].items()
    assert by_name["speculative"]["paper"].startswith("Leviathan et al. 2023")


class Greedy(Exact):
    lossless = False
    lossless_greedy = True


@pytest.mark.parametrize(
    ("method", "sampled", "greedy"),
    [
        (Method(drafter=Nothing(), trust=Everyone()), True, True),
        (Method(), True, True),
        (Method(trust=Coin(0)), True, True),
        (Method(trust=Coin(0.1)), False, False),
        (Method(trust=Gate(1.0)), False, False),
        (Method(accept=Greedy()), False, True),
        (Method(trust=Gate(), accept=Greedy()), False, False),
    ],
)
def test_which_methods_are_lossless(method: Method, sampled: bool, greedy: bool) -> None:
    assert method.lossless() is sampled
    assert method.lossless(greedy=True) is greedy


def test_what_a_method_needs() -> None:
    assert parse_method("speculative").needs == frozenset()
    assert parse_method("sprinter").needs == {"gate"}
    assert parse_method("coin").needs == {"uniform"}
    assert Method(trust=Gate(), stop=UnlikelyToken()).needs == {"gate", "token_prob"}
    assert [
        parse_method(spec).needs_target for spec in ("draft-only", "draft-only(cap=5)", "sprinter(tau=0)")
    ] == [
        False,
        True,
        True,
    ]


def test_who_looks_at_the_token() -> None:
    assert not Method(trust=Gate(), stop=Fixed()).sees_token
    assert Method(trust=LikelyToken()).sees_token
    assert Method(trust=Gate(), stop=UnlikelyToken()).sees_token


def test_a_token_that_was_looked_at_is_not_discarded() -> None:
    class Both(UnlikelyToken):
        discards = True

    with pytest.raises(UserError, match="discards a token that it looks at"):
        Method(stop=Both())
    with pytest.raises(UserError, match=r"discards a token that trust rule LikelyToken\(c=0.4\) looks at"):
        Method(trust=LikelyToken(), stop=Unsure())
    assert Method(trust=Gate(), stop=Unsure()).stop.discards


# --- other packages --------------------------------------------------------------------------------------------------
def quick() -> Method:
    """A method of another package."""
    return Method(trust=Gate(0.9))


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that adds a rule of each kind and a method."""
    points = {
        "sprinter.trust": ("likely", "tests.decode.chains:LikelyToken"),
        "sprinter.stop": ("unsure", "tests.decode.chains:Unsure"),
        "sprinter.accept": ("strict", "tests.decode.test_methods:Greedy"),
        "sprinter.methods": ("quick", "tests.decode.test_methods:quick"),
    }
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint(*points[group], group)])
    for known in (TRUST, STOP, ACCEPT, METHODS):
        monkeypatch.setattr(known, "_items", dict(known._items))
        monkeypatch.setattr(known, "_loaded", False)


@pytest.mark.usefixtures("plugins")
def test_rules_and_methods_of_other_packages_are_understood() -> None:
    assert parse_method("trust=likely(c=0.3),accept=strict").trust == LikelyToken(0.3)
    assert parse_method("stop=unsure").stop == Unsure()
    assert parse_method("quick").trust == Gate(0.9)
    assert "quick" in [row["name"] for row in method_table()]
    with pytest.raises(UserError, match="unknown parameter of unsure 'd'"):
        parse_method("stop=unsure(d=1)")


def test_a_preset_is_registered_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_items", dict(METHODS._items))

    @preset("mine", "a paper")
    def mine(*, gamma: int = 2) -> Method:
        """Mine."""
        return Method(stop=Fixed(gamma))

    assert parse_method("mine(gamma=4)").name == "mine(gamma=4)"
    assert parse_method("mine").paper == "a paper"
    with pytest.raises(ValueError, match="method 'mine' is registered already"):
        preset("mine", "again")(mine)
    with pytest.raises(ValueError, match="method 'speculative' is registered already"):
        preset("speculative", "again")(mine)


def test_registries_are_those_of_the_entry_point_groups() -> None:
    kinds = {registry.kind: registry for registry in (TRUST, STOP, ACCEPT, METHODS)}
    assert list(kinds) == ["trust rule", "stop rule", "accept rule", "method"]
    assert all(isinstance(registry, Registry) for registry in kinds.values())
    assert {"nobody", "everyone", "gate", "coin"} <= set(TRUST.names())
    assert {"fixed", "untrusted", "never"} <= set(STOP.names())
    assert "exact" in ACCEPT.names()
    assert Nobody() == TRUST.get("nobody")()
