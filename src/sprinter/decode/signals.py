"""Signals are what trust and stop rules read of a draft token. This module is their only definition.

A signal of the draft's laws is one function, whose parameter names select its inputs:

* ``law``: a draft law, ``[..., V]``. The function defines two signals: ``name`` on the raw law (temperature 1, no
  truncation) and ``name_processed`` on the processed law, which x is drawn from;
* ``raw``: the raw law in both signals, ``[..., V]``;
* ``token``: x, ``[...]``. Such a signal sees the token: a rule that reads it declares ``sees_token``;
* ``state``: the hidden state that the laws come from, ``[..., d]``. Copied tokens and simulated chains have no state.

It returns ``[...]``, finite numbers in the law's dtype, and must not depend on which ids the probabilities belong to
(tokens copied by prompt lookup, whose laws are one-hot, share one set of values). ``SIGNALS`` is
the table used by draft steps (eager and captured), enumeration, simulation, recordings and their replay, public checks.

``GIVEN`` describes the signals that are not computed from a law: scores of heads, random numbers, values of the loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from sprinter import laws
from sprinter.kinds import HEAD_KINDS

__all__ = [
    "ENDINGS", "GIVEN", "HEADS", "MARGIN_CAP", "SIGNALS", "TARGET_HEADS", "Given", "Signal", "given_by",
    "prefix_signals", "read_signals", "signal", "state_signals",
]  # fmt: skip

ENDINGS: Mapping[str, str] = {"raw": "", "processed": "_processed"}
"""Suffix of a signal's name, by the law that it is computed from."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal of the draft's laws: a function of some of (processed law, raw law, x, state).

    Attributes:
        name: the name that rules list in ``needs``. base: the name without the suffix.
        function: see the module's docstring.
        inputs: (parameter of the function, its argument: "law", "raw", "token" or "state").
        span: (low, high) of the values that matter to rules; public checks draw numbers from this range.
        capture: in captured draft steps, "always" (computed for every method, so that methods share one unit), "asked"
            (in a separate unit for methods that read it) or "never" (methods that read it step eagerly).
    """

    name: str
    base: str
    function: Callable[..., Tensor]
    inputs: tuple[tuple[str, str], ...]
    span: tuple[float, float]
    capture: Literal["always", "asked", "never"]

    def reads(self, what: str) -> bool:
        """Whether the signal reads the "law" (processed), the "raw" law, the "token" or the "state"."""
        return any(given == what for _, given in self.inputs)

    @property
    def sees_token(self) -> bool:
        """Whether the value depends on x beyond its prefix."""
        return self.reads("token")

    def __call__(
        self, law: Tensor | None, raw: Tensor | None, token: Tensor | None = None, state: Tensor | None = None
    ) -> Tensor:
        """Compute the values ``[...]``.

        Args:
            law, raw: processed and raw laws ``[..., V]``. token: ids ``[...]``. state: ``[..., d]``. Inputs that the
                signal does not read may be None.
        """
        given = {"law": law, "raw": raw, "token": token, "state": state}
        return self.function(**{parameter: given[what] for parameter, what in self.inputs})


SIGNALS: dict[str, Signal] = {}
"""All signals of the draft's laws, by name; ``signal`` adds to it."""
_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def signal(
    *,
    span: tuple[float, float] = (0.0, 1.0),
    capture: Literal["always", "asked", "never"] = "asked",
) -> Callable[[_Function], _Function]:
    """Decorator: register a function as two signals, one of the raw law and one of the processed law.

    Args:
        span, capture: see ``Signal``.

    Raises:
        ValueError: the name is taken, or the function has an unknown parameter.
    """

    def register(function: _Function) -> _Function:
        parameters, base = tuple(inspect.signature(function).parameters), function.__name__
        if unknown := set(parameters) - {"law", "raw", "token", "state"}:
            raise ValueError(
                f"signal {base} reads {', '.join(sorted(unknown))}: give law, raw, token or state"
            )
        for of, ending in ENDINGS.items():
            name, law = base + ending, "raw" if of == "raw" else "law"
            if name in SIGNALS or name in GIVEN:
                raise ValueError(f"signal {name} is defined already")
            inputs = tuple((one, law if one == "law" else one) for one in parameters)
            SIGNALS[name] = Signal(name, base, function, inputs, span, capture)
        return function

    return register


def read_signals(
    names: Collection[str],
    law: Tensor,
    raw: Tensor,
    token: Tensor | None = None,
    state: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute signals by name; arguments and shapes as in ``Signal``. If ``raw is law``, both signals share values."""
    made: dict[str, Tensor] = {}
    for name in names:
        base = SIGNALS[name].base
        made[name] = made[base] if law is raw and base in made else SIGNALS[name](law, raw, token, state)
    return made


def prefix_signals() -> frozenset[str]:
    """Names of the signals of ``SIGNALS`` that do not depend on x; recordings hold them by position."""
    return frozenset(name for name, one in SIGNALS.items() if not one.sees_token)


def state_signals() -> frozenset[str]:
    """Names of the signals, heads' scores included, that read the draft model's hidden state."""
    return HEADS | {name for name, one in SIGNALS.items() if one.reads("state")}


@dataclass(frozen=True, slots=True)
class Given:
    """A signal that is not computed from the draft's laws.

    Attributes:
        source: where it comes from: a trained "head", addressed "draws", the "loop" itself (always present), or
            "chain": only in simulations on Markov chains.
        about: what it is, in one line.
        sees_token: whether it depends on x beyond its prefix.
        span: as in ``Signal``.
    """

    source: Literal["head", "draws", "loop", "chain"]
    about: str
    sees_token: bool = False
    span: tuple[float, float] = (0.0, 1.0)


GIVEN: Mapping[str, Given] = {
    **{
        kind: Given("head", head.about, head.sees_token)
        for kind, head in HEAD_KINDS.items()
        if head.model == "draft"
    },
    "uniform": Given("draws", "one addressed number in [0, 1) a token"),
    "drafted": Given("loop", "place of x in its draft run, from 1", span=(1, 20)),
    "copied": Given(
        "loop", "whether x was copied from the text where else the draft model drafts: its law is one-hot"
    ),
    "trusted": Given("loop", "the trust rule's answer, for stop rules; it sees x where that rule does"),
    "acceptable": Given("chain", "whether q(x) <= p(x)", sees_token=True),
}
"""Signals that are not computed from a law, by name."""


def given_by(source: str) -> frozenset[str]:
    """Names in ``GIVEN`` with this source."""
    return frozenset(name for name, one in GIVEN.items() if one.source == source)


HEADS = given_by("head")
"""Names of the signals that are scores of trained heads."""
TARGET_HEADS = frozenset(kind for kind, head in HEAD_KINDS.items() if head.model == "target")
"""Kinds of heads that read the target's hidden states, for accept rules: no rule that drafts can read them."""


@signal(span=(0.0, 4.0), capture="always")
def entropy(law: Tensor) -> Tensor:
    """H(q) = −Σ q ln q in nats, in [0, ln V]."""
    return laws.entropy(law)


@signal(capture="always")
def max_prob(law: Tensor) -> Tensor:
    """max q, a probability."""
    return law.amax(-1)


@signal(capture="always")
def token_prob(law: Tensor, token: Tensor) -> Tensor:
    """q(x), a probability."""
    return law.gather(-1, token[..., None])[..., 0]


MARGIN_CAP = 80.0
"""Largest ``margin``, nats: e^-80 is still a normal number in float32, so that precisions and devices agree."""


@signal(span=(0.0, 8.0))
def margin(law: Tensor) -> Tensor:
    """ln q1 − ln q2 of the two largest probabilities in nats, in [0, ``MARGIN_CAP``].

    At temperature 1 this is the difference of the two largest logits. One-hot laws, and vocabularies of one token, have
    ``MARGIN_CAP``.
    """
    first = laws.first_largest(law)
    second = law.scatter(-1, first, 0.0).amax(-1)
    return (law.amax(-1).log() - second.log()).clamp(max=MARGIN_CAP)
