"""Public checks for rules that draft, built-in or from plug-ins: ``check_trust``, ``check_stop``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from sprinter.decode.conformance import check_exact, check_lossless
from sprinter.decode.enumerate import JOINT, MarkovPair, joint_law
from sprinter.decode.method import Method
from sprinter.decode.signals import GIVEN, SIGNALS, Given, Signal
from sprinter.decode.stop import StopRule, Untrusted
from sprinter.decode.trust import Gate, State, TrustRule

__all__ = ["check_stop", "check_trust"]


def _spans(seeing: bool = False) -> dict[str, tuple[float, float]]:
    """(low, high) by signal that rules may read; ``seeing``: only of signals that depend on x."""
    tables: dict[str, Given | Signal] = {
        **{name: one for name, one in GIVEN.items() if one.source in ("head", "draws")},
        **SIGNALS,
    }
    return {name: one.span for name, one in tables.items() if one.sees_token or not seeing}


def _signals(count: int, seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    signals: dict[str, Tensor] = {}
    for name, (low, high) in _spans().items():
        signals[name] = low + (high - low) * torch.rand(count, generator=chance, dtype=torch.float64)
    signals["trusted"] = torch.rand(count, generator=chance) < 0.5
    signals["drafted"] = torch.randint(1, 20, (count,), generator=chance)
    signals["copied"] = torch.tensor(False)
    return signals


@contextmanager
def _in_words(rule: TrustRule | StopRule) -> Iterator[None]:
    """What a rule raises becomes an AssertionError."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:  # a rule may raise anything
        name = error.args[0] if isinstance(error, KeyError) else None
        if name in SIGNALS or name in GIVEN:
            raise AssertionError(f"{rule}: reads signal '{name}', which its needs do not name") from error
        told = f"{rule}: raises {type(error).__name__}: {error}"
        if isinstance(error, IndexError | ValueError) and type(rule).start in (
            TrustRule.start,
            StopRule.start,
        ):
            told += " (it defines no start, so its state is empty)"
        raise AssertionError(told) from error


def _check_form(rule: TrustRule | StopRule, base: type[TrustRule | StopRule]) -> None:
    """Check what the class must be, before the rule is asked anything."""
    assert isinstance(rule, base), f"{rule!r} is not a {base.__name__}"
    params = getattr(rule, "__dataclass_params__", None)
    assert params is not None and params.frozen, (
        f"{rule!r}: a rule is a frozen dataclass, with its state in start()"
    )
    hooks = () if base is StopRule else ("begin_round", "end_round", "ahead", "stop")
    assert not (strange := [hook for hook in hooks if hasattr(rule, hook)]), (
        f"{rule}: {strange[0]} is called only of stop rules; a trust rule has start, possible, trust and learn"
    )
    silent = type(rule).learns in (False, StopRule.learns)
    assert not silent or type(rule).learn is base.learn, (
        f"{rule}: learn is never called without learns = True"
    )
    _check_state(rule, "start", rule.start())
    assert rule.possible(rule.start()), f"{rule}: calls the state of its own start impossible"


def _check_state(rule: TrustRule | StopRule, hook: str, state: State) -> None:
    assert isinstance(state, tuple) and all(isinstance(part, Tensor) for part in state), (
        f"{rule}: {hook} must give a tuple of tensors as the state, and gives {state!r}"
    )
    shapes = [[part.shape for part in one] for one in (state, rule.start())]
    assert shapes[0] == shapes[1], f"{rule}: {hook} changes the shapes of the state"


def _decide(rule: TrustRule | StopRule, decide: str, signals: Mapping[str, Tensor]) -> tuple[Tensor, State]:
    """The decision and the next state, from the start."""
    found = getattr(rule, decide)(signals, rule.start())
    assert isinstance(found, tuple) and len(found) == 2, f"{rule}: {decide} must return (decision, state)"
    assert isinstance(found[0], Tensor) and found[0].dtype == torch.bool, (
        f"{rule}: the decision must be a bool tensor"
    )
    return found


def _check_decision(rule: TrustRule | StopRule, decide: str) -> None:
    """Check that a decision is pure, boolean, elementwise, and independent of x unless ``sees_token`` is set."""
    known, given = _signals(64, 1), {"drafted", "copied"} | ({"trusted"} if decide == "stop" else set())
    assert rule.needs <= known.keys(), f"{rule}: needs unknown signals {sorted(rule.needs - known.keys())}"
    signals = {name: values for name, values in known.items() if name in rule.needs | given}
    before = {name: values.clone() for name, values in signals.items()}
    for i in range(64):
        one = {name: values.expand(64)[i] for name, values in signals.items()}
        first, state = _decide(rule, decide, one)
        _check_state(rule, decide, state)
        again, _ = _decide(rule, decide, one)
        assert bool(first) == bool(again), f"{rule}: the decision is not a function of signals and state"
        batched, _ = _decide(rule, decide, signals)
        assert bool(batched.expand(64)[i]) == bool(first), f"{rule}: batched and single decisions differ"
        if not rule.sees_token:
            seeing = {name: span for name, span in _spans(seeing=True).items() if name in one}
            others = {name: low + high - one[name] for name, (low, high) in seeing.items()}
            other, _ = _decide(rule, decide, {**one, **others})
            assert bool(first) == bool(other), f"{rule}: looks at x and does not say so (sees_token)"
    changed = sorted(name for name, values in before.items() if not torch.equal(values, signals[name]))
    assert not changed, f"{rule}: writes into the signals {changed}, which others read too"


def _check_learning(rule: TrustRule | StopRule) -> None:
    signals = {name: values for name, values in _signals(64, 2).items() if name in rule.needs}
    overlaps = torch.rand(64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    start = rule.start()
    first, again = (rule.learn(signals, overlaps, rule.start()) for _ in range(2))
    _check_state(rule, "learn", first)
    assert all(torch.equal(*parts) for parts in zip(first, again, strict=True)), (
        f"{rule}: the state is not a function of the overlaps"
    )
    assert all(torch.equal(*parts) for parts in zip(start, rule.start(), strict=True)), (
        f"{rule}: learning changes the state that it starts from"
    )
    dtypes = [[part.dtype for part in state] for state in (start, first)]
    assert dtypes[0] == dtypes[1], f"{rule}: learning changes the dtypes of the state"
    assert rule.possible(first), f"{rule}: learning leads to a state that it calls impossible"


def check_trust(rule: TrustRule) -> None:
    """Check form and decision of a rule, that untrusted tokens keep the target's law, ``never`` and ``sees_token``.

    Of a rule that learns also that its states are possible, of unchanged shapes, and follow from the overlaps alone.

    Raises:
        AssertionError: says which property does not hold.
    """
    with _in_words(rule):
        _check_form(rule, TrustRule)
        _check_decision(rule, "trust")
        if rule.learns:
            _check_learning(rule)
        method = Method(trust=rule, stop=Untrusted(), cap=3)
        if rule.never:
            check_lossless(method, f"{rule}")
        if not rule.sees_token:
            pair = MarkovPair(seed=3, distance=0.0)  # p = q: the law is p, whichever tokens are trusted
            check_exact(method, pair, 3, f"{rule} with p = q")
        for ahead in (1, 3):
            law = joint_law(method, MarkovPair(seed=4), 3, ahead=ahead)
            assert abs(sum(law.values()) - 1) <= JOINT, (
                f"{rule}: the chances of all texts sum to {sum(law.values())}"
            )


def check_stop(rule: StopRule) -> None:
    """Check form and decision of a rule, and that texts keep the target's law under exact acceptance, learning on.

    The law must hold also when tokens are drafted ahead, and when the rule stops a run of trusted tokens.

    Raises:
        AssertionError: says which property does not hold.
    """
    with _in_words(rule):
        _check_form(rule, StopRule)
        begun = rule.begin_round(rule.start())
        _check_state(rule, "begin_round", begun)
        _check_state(rule, "end_round", rule.end_round(begun, 3, 2, 1))
        _check_decision(rule, "stop")
        if rule.learns:
            _check_learning(rule)
        assert not (rule.discards and rule.sees_token), f"{rule}: discards a token that it looks at"
        for ahead, longest in ((1, 4), (3, 3)):  # tokens drafted ahead and discarded multiply the paths
            check_lossless(Method(stop=rule, cap=3), f"{rule} with ahead={ahead}", ahead, longest)
        pair = MarkovPair(seed=5, distance=0.0)
        trusting = Method(trust=Gate(0.5), stop=rule, cap=3)
        check_exact(trusting, pair, 3, f"{rule} under a gate with p = q")
