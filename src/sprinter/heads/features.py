"""Features that a head can read: values that a driver has when it drafts, each a pure function of one draft step.

=============  ===========================================================================  ===========
name           value                                                                        shape
=============  ===========================================================================  ===========
hidden         the draft's last hidden state that produced q (of the token before x)        ``[..., d]``
entropy        H(q) in nats                                                                 ``[...]``
max_q          max q                                                                        ``[...]``
top_q(k=10)    the k largest probabilities of q, in falling order                           ``[..., k]``
position       position of x in its draft run, from 1                                       ``[...]``
temperature    sampling temperature: one head then serves all temperatures                  ``[...]``
hidden_x       the draft's last hidden state after x was fed: needs one more draft step     ``[..., d]``
log_q          ln q(x)                                                                      ``[...]``
=============  ===========================================================================  ===========

q is the raw law (softmax at temperature 1). ``hidden_x`` and ``log_q`` depend on the token x, the others do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.errors import UserError, did_you_mean
from sprinter.laws import entropy

__all__ = [
    "FEATURES", "LARGEST_K", "DraftStep", "feature_width", "parse_features", "read_features", "sees_token",
    "stack_features", "top_k_of",
]  # fmt: skip

LARGEST_K = 64
"""Maximum k of top_q(k): the number of the draft's probabilities that the records of ``sprinter.training`` keep."""
_DEFAULT_K = 10


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Values that a driver has after drafting x. The leading shape is arbitrary and common to all.

    Attributes:
        hidden: ``[..., d]``, hidden state that produced q.
        law: ``[..., V]``, raw q.
        position: ``[...]``, position of x in its draft run, from 1.
        token: ``[...]``, x, for features that depend on it.
        hidden_x: ``[..., d]``, hidden state after x was fed, for features that depend on x.
        temperature: ``[...]``, sampling temperature, 0 for greedy decoding.
    """

    hidden: Tensor | None = None
    law: Tensor | None = None
    position: Tensor | None = None
    token: Tensor | None = None
    hidden_x: Tensor | None = None
    temperature: Tensor | None = None


def _given(value: Tensor | None, feature: str) -> Tensor:
    if value is None:
        raise UserError(f"the head reads '{feature}', and the driver did not give what it is made of")
    return value


def _top_q(step: DraftStep, k: int) -> Tensor:
    law = _given(step.law, "top_q")
    best = law.topk(min(k, law.shape[-1]), -1).values
    return best if best.shape[-1] == k else torch.nn.functional.pad(best, (0, k - best.shape[-1]))


def _log_q(step: DraftStep, k: int) -> Tensor:
    token = _given(step.token, "log_q").unsqueeze(-1)
    return _given(step.law, "log_q").gather(-1, token).squeeze(-1).log()


FEATURES: Mapping[str, Callable[[DraftStep, int], Tensor]] = {
    "hidden": lambda step, k: _given(step.hidden, "hidden"),
    "entropy": lambda step, k: entropy(_given(step.law, "entropy")),
    "max_q": lambda step, k: _given(step.law, "max_q").amax(-1),
    "top_q": _top_q,
    "position": lambda step, k: _given(step.position, "position"),
    "temperature": lambda step, k: _given(step.temperature, "temperature"),
    "hidden_x": lambda step, k: _given(step.hidden_x, "hidden_x"),
    "log_q": _log_q,
}
"""Function of each feature: (step, k) -> values; only top_q uses k."""

_SEES_TOKEN = frozenset({"hidden_x", "log_q"})
_VECTORS = frozenset({"hidden", "hidden_x"})


def parse_features(spec: str | Iterable[str]) -> tuple[str, ...]:
    """Names of features in their canonical spelling: "hidden, top_q" -> ("hidden", "top_q(k=10)").

    Raises:
        UserError: unknown names (with a did-you-mean), duplicates, no name at all, k out of range.
    """
    words = re.split(r",(?![^(]*\))", spec) if isinstance(spec, str) else list(spec)
    names = tuple(_canonical(word.strip()) for word in words if word.strip())
    if not names:
        raise UserError(f"no features: give at least one of {', '.join(FEATURES)}")
    bases = [_base(name) for name in names]
    if twice := [base for base in bases if bases.count(base) > 1]:
        raise UserError(f"the feature '{twice[0]}' stands twice: name it once")
    return names


def read_features(names: Iterable[str], step: DraftStep) -> dict[str, Tensor]:
    """The named features of one draft step, as ``Head.score`` takes them.

    Raises:
        UserError: the step lacks a value that a feature needs.
    """
    return {name: FEATURES[_base(name)](step, top_k_of(name)) for name in names}


def stack_features(names: Iterable[str], values: Mapping[str, Tensor]) -> Tensor:
    """Concatenate the features in the order of ``names``: ``[..., n]`` float32, the input of a network.

    Raises:
        UserError: a feature is missing.
    """
    columns = []
    for name in names:
        if name not in values:
            raise UserError(f"the head reads '{name}', and got {', '.join(values) or 'nothing'}")
        column = values[name].float()
        columns.append(column if _is_vector(name) else column.unsqueeze(-1))
    return columns[0] if len(columns) == 1 else torch.cat(columns, -1)


def feature_width(name: str, hidden_size: int) -> int:
    """Number of values of a feature: d, k or 1."""
    return hidden_size if name in _VECTORS else top_k_of(name) if _base(name) == "top_q" else 1


def sees_token(names: Iterable[str]) -> bool:
    """Whether a feature depends on x, so that x must be drafted first (and fed to the draft for ``hidden_x``)."""
    return not _SEES_TOKEN.isdisjoint(names)


def top_k_of(name: str) -> int:
    """k of ``top_q(k=...)``, 0 for other features."""
    found = re.search(r"k=(\d+)\)$", name)
    return int(found[1]) if found else 0


def _base(name: str) -> str:
    return name.partition("(")[0]


def _is_vector(name: str) -> bool:
    return name in _VECTORS or _base(name) == "top_q"


def _canonical(word: str) -> str:
    found = re.fullmatch(r"\s*([\w-]+)\s*(?:\(\s*k\s*=\s*(\d+)\s*\))?", word)
    base = found[1] if found else _base(word)
    if base not in FEATURES:
        raise did_you_mean("feature", base, FEATURES)
    if base != "top_q" and found is not None and found[2] is None:
        return base
    if base != "top_q" or found is None:
        raise UserError(f"'{word}' is not a feature: only top_q takes a parameter, as top_q(k={_DEFAULT_K})")
    k = int(found[2] or _DEFAULT_K)
    if not 1 <= k <= LARGEST_K:
        raise UserError(f"k={k} of top_q is out of range: give a whole number from 1 to {LARGEST_K}")
    return f"top_q(k={k})"
