"""Labels: what a head is trained to estimate, computed from the columns of records.

================================  ====================================================================================
ratio(lambda=1.2, at=drawn)       1 if q(x)/p(x) <= λ (the SPRINTER paper, with x ~ q); at=greedy takes x = argmax q,
                                  at=text the text's own token
expected-ratio(lambda=1.2)        its expectation over x ~ q
overlap(temperature=1.0)          β = Σ min(p, q), the chance that exact acceptance keeps a draft token;
                                  temperature=own takes the value of the feature "temperature"
agreement                         1 if argmax q = argmax p: the overlap at temperature 0
accept(at=drawn)                  min(1, p/q)(x), the chance that exact acceptance keeps this x (SpecDec++ with at=text)
fuzzy(divergence=js,              1 if the divergence of p and q is below the threshold (the classifier that the fuzzy
threshold=0.3)                    paper proposes, section 7.1); js, kl, kl_reversed, tv, js_reference
================================  ====================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.fuzzy import DIVERGENCES
from sprinter.decode.checks import Parameters, choice, number, one_of
from sprinter.decode.spec import parse_call
from sprinter.errors import UserError, did_you_mean
from sprinter.training.records import LAMBDAS, TEMPERATURES

__all__ = [
    "LABELS", "Accept", "Agreement", "Columns", "ExpectedRatio", "FuzzyLabel", "Label", "Overlap", "Ratio",
    "above_median", "parse_label",
]  # fmt: skip

Columns = Mapping[str, Tensor]
"""Name → column of records, ``[n]`` or ``[n, ...]``."""
_OWN = "own"


class Label(Parameters, ABC):
    """A pure function of the columns; ``str()`` gives the spec that ``parse_label`` reads.

    Attributes:
        name: name in a spec.
        soft: whether values may be anywhere in [0, 1]; otherwise they are 0 or 1.
    """

    name: ClassVar[str]
    soft: ClassVar[bool] = False

    @property
    def at_text(self) -> bool:
        """Whether it depends on the text's own token; it is then meaningful only where the draft wrote that token."""
        return getattr(self, "at", "") == "text"

    @property
    def sees_token(self) -> bool:
        """Whether it depends on one token x, not on the laws alone."""
        return hasattr(self, "at")

    @abstractmethod
    def values(self, columns: Columns) -> Tensor:
        """Labels ``[n]``, float32 in [0, 1], of the positions in ``columns``."""

    def __str__(self) -> str:
        inside = ", ".join(f"{f.name.rstrip('_')}={getattr(self, f.name)}" for f in fields(self))  # type: ignore[arg-type]
        return f"{self.name}({inside})" if inside else self.name


def _column_of(name: str, value: float, known: tuple[float, ...]) -> int:
    """Index of the column that holds this λ or temperature."""
    if value not in known:
        raise UserError(
            f"label parameter '{name}' = {value} is not among the recorded ones: "
            f"give one of {', '.join(map(str, known))}"
        )
    return known.index(value)


@dataclass(frozen=True, slots=True)
class Ratio(Label):
    """1 if q(x)/p(x) <= λ (SPRINTER, section 3).

    Args:
        lambda_: threshold λ, above 0.
        at: which x: "drawn" from q, "greedy" (argmax q), or "text" (the text's own token).
    """

    lambda_: float = number(1.2, 1e-6, 1e6)
    at: str = choice("drawn", "token of the label", ("drawn", "greedy", "text"))
    name: ClassVar[str] = "ratio"

    def values(self, columns: Columns) -> Tensor:
        """0 or 1 ``[n]``; where p(x) is 0 the ratio is infinite."""
        if self.at == "greedy":
            return (columns["greedy_ratio"] <= self.lambda_).float()
        end = "_token" if self.at == "text" else ""
        log_ratio = columns["log_q" + end].double() - columns["log_p" + end].double()
        return (log_ratio.exp() <= self.lambda_).float()


@dataclass(frozen=True, slots=True)
class ExpectedRatio(Label):
    """P(q(x)/p(x) <= λ) over x ~ q: the paper's label without the noise of one draw.

    Args:
        lambda_: 1, 1.2 or 1.5.
    """

    lambda_: float = 1.2
    name: ClassVar[str] = "expected-ratio"
    soft: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _column_of("lambda", self.lambda_, LAMBDAS)

    def values(self, columns: Columns) -> Tensor:
        """The recorded probability ``[n]``."""
        return columns["expected_ratio"][:, LAMBDAS.index(self.lambda_)].clamp(0, 1)


@dataclass(frozen=True, slots=True)
class Overlap(Label):
    """β = Σ min(p, q) of the laws at a temperature.

    Args:
        temperature: 1, 0.7, 0, or "own": the value of the feature "temperature".
    """

    temperature: float | str = 1.0
    name: ClassVar[str] = "overlap"
    soft: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.temperature != _OWN:
            if isinstance(self.temperature, str):
                raise did_you_mean("temperature of the label", self.temperature, [_OWN])
            _column_of("temperature", self.temperature, TEMPERATURES)

    def values(self, columns: Columns) -> Tensor:
        """β ``[n]`` at the temperature.

        Raises:
            UserError: temperature "own" without the feature "temperature".
        """
        overlap = columns["overlap"].clamp(0, 1)
        if isinstance(self.temperature, float | int):
            return overlap[:, TEMPERATURES.index(self.temperature)]
        if "temperature" not in columns:
            raise UserError(f"label {self} goes with the feature 'temperature': add it to the features")
        chosen = columns["temperature"].unsqueeze(1) == torch.tensor(TEMPERATURES)
        return (overlap * chosen).sum(1)


@dataclass(frozen=True, slots=True)
class Agreement(Label):
    """1 if both laws have the same argmax: whether greedy decoding keeps the draft token."""

    name: ClassVar[str] = "agreement"

    def values(self, columns: Columns) -> Tensor:
        """0 or 1 ``[n]``, from the overlap at temperature 0."""
        return (columns["overlap"][:, TEMPERATURES.index(0.0)] > 0.5).float()


@dataclass(frozen=True, slots=True)
class Accept(Label):
    """min(1, p/q)(x), the soft label of SpecDec++.

    Args:
        at: which x: "drawn" from q, or "text" (the text's own token).
    """

    at: str = choice("drawn", "token of the label", ("drawn", "text"))
    name: ClassVar[str] = "accept"
    soft: ClassVar[bool] = True

    def values(self, columns: Columns) -> Tensor:
        """Acceptance probability of x, ``[n]``."""
        end = "_token" if self.at == "text" else ""
        return (columns["log_p" + end] - columns["log_q" + end]).clamp(max=0).exp()


@dataclass(frozen=True, slots=True)
class FuzzyLabel(Label):
    """1 if the divergence of p and q is below a threshold: what fuzzy speculative decoding accepts.

    Args:
        divergence: js, kl, kl_reversed, tv or js_reference.
        threshold: at least 0, in nats (tv: a probability).
    """

    divergence: str = choice("js", "divergence", DIVERGENCES)
    threshold: float = number(0.3, 0.0, 1e6)
    name: ClassVar[str] = "fuzzy"

    def values(self, columns: Columns) -> Tensor:
        """0 or 1 ``[n]``."""
        return (columns[self.divergence] < self.threshold).float()


LABELS: Mapping[str, Callable[..., Label]] = {
    kind.name: kind for kind in (Ratio, ExpectedRatio, Overlap, Agreement, Accept, FuzzyLabel)
}
"""Label kinds by name."""


def parse_label(spec: str | Label) -> Label:
    """Parse ``name`` or ``name(param=value, ...)``; a Label is returned unchanged.

    Raises:
        UserError: unknown names and parameters (with a did-you-mean), values out of range, bad syntax.
    """
    if isinstance(spec, Label):
        return spec
    name, params = parse_call(spec.strip())
    one_of("label", name, LABELS)
    known = {f.name.rstrip("_"): f.name for f in fields(LABELS[name])}  # type: ignore[arg-type]
    for key in params:
        if not known:
            raise UserError(f"label '{name}' takes no parameters, and got '{key}'")
        one_of(f"parameter of label {name}", key, known)
    return LABELS[name](
        **{known[key]: float(value) if type(value) is int else value for key, value in params.items()}
    )


def above_median(values: Tensor) -> Tensor:
    """1 where a soft label is above its own median, ``[n]`` float32."""
    return (values > torch.median(values)).float()
