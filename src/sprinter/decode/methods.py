"""Method = trust x stop x accept: presets, the spec language, the registry.

A spec is a preset, ``name`` or ``name(param=value, ...)``, or a composition such as
``trust=gate(tau=0.5),stop=fixed(gamma=8),accept=exact,cap=20``. ``cap=`` is understood everywhere.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sprinter.decode.accept import (
    Batch,
    Bild,
    Exact,
    Fuzzy,
    Judge,
    Lenient,
    Mentored,
    Opt,
    RandomAccept,
    SeveralRule,
    SpecInfer,
    SpecTr,
    Typical,
    Uno,
)
from sprinter.decode.checks import at_least
from sprinter.decode.drafter import Allocated, Drafter, Lookup, Model, Nothing
from sprinter.decode.registry import ACCEPT, DRAFTER, METHODS, STOP, TRUST, Registry, did_you_mean
from sprinter.decode.stop import (
    AdaEdl,
    BildFallback,
    Confidence,
    Fixed,
    Heuristic,
    Never,
    StopRule,
    Svip,
    Untrusted,
)
from sprinter.decode.trust import Coin, Everyone, Gate, Nobody, TrustRule
from sprinter.errors import UserError

__all__ = ["ACCEPT", "METHODS", "STOP", "TRUST", "Method", "method_table", "parse_method", "preset"]

_SPECULATIVE = "Leviathan et al. 2023; Chen et al. 2023"
_SPRINTER = "SPRINTER (2025), Algorithm 2"


@dataclass(frozen=True, slots=True)
class Method:
    """A decoding method.

    Attributes:
        trust, stop, accept: the three rules.
        cap: most tokens a draft run may have (None: as many as the text has room for); the token at the cap is checked.
        drafter: who proposes.
        to_horizon: also draft the last token of the text, which else is left to the target call that comes anyway
            (Theorems 1 and 3 of Yin et al. count rejections of such drafts).
        name, paper: label and source.
    """

    trust: TrustRule = Nobody()
    stop: StopRule = Fixed()
    accept: Judge = Exact()
    cap: int | None = None
    drafter: Drafter = Model()
    to_horizon: bool = False
    name: str = "composed"
    paper: str = ""

    def __post_init__(self) -> None:
        if self.cap is not None:
            at_least("cap", self.cap, 1)
        if self.stop.discards and self.sees_token:
            seeing = "it" if self.stop.sees_token else f"trust rule {self.trust!r}"
            raise UserError(
                f"stop rule {self.stop!r} discards a token that {seeing} looks at: this would bias texts"
            )
        if isinstance(self.drafter, Lookup) and "gate" in self.needs:
            raise UserError(
                "a gate reads the draft model's states, and looked-up tokens have none: give another rule"
            )
        if self.drafter.drafts > 1:
            self._check_several()

    def _check_several(self) -> None:
        if not isinstance(self.accept, SeveralRule):
            raise UserError(
                f"accept rule {self.accept!r} judges one draft: give batch, specinfer or spectr, or drafts=1"
            )
        if not self.trust.never or not isinstance(self.stop, Fixed):
            raise UserError("several drafts go with trust=nobody and stop=fixed(gamma=...)")

    @property
    def length(self) -> int | None:
        """Tokens of a draft if that is fixed, cap included."""
        if not isinstance(self.stop, Fixed):
            return None
        return self.stop.gamma if self.cap is None else min(self.cap, self.stop.gamma)

    @property
    def needs(self) -> frozenset[str]:
        """Signals that the rules ask a driver for."""
        return self.trust.needs | self.stop.needs

    @property
    def needs_target(self) -> bool:
        """Whether the target is ever called (False for the draft model alone)."""
        trusts_all = isinstance(self.trust, Everyone) and isinstance(self.stop, Never) and self.cap is None
        return not (trusts_all and isinstance(self.drafter, Model))

    @property
    def sees_token(self) -> bool:
        """Whether the choice of what is trusted looks at x (then drift is metered by its unbiased one-sample form)."""
        return self.trust.sees_token or self.stop.sees_token

    def lossless(self, greedy: bool = False) -> bool:
        """Whether the text has the target's own law (``greedy``: at temperature 0)."""
        if not self.drafter.proposes:
            return True
        return self.trust.never and (self.accept.lossless_greedy if greedy else self.accept.lossless)


def preset(name: str, paper: str) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    """Register a function with keyword parameters that returns a Method; its defaults are the documented ones."""

    def register(build: Callable[..., Method]) -> Callable[..., Method]:
        def named(**params: Any) -> Method:
            return dataclasses.replace(build(**params), name=_spell(name, build, params), paper=paper)

        named.__doc__, named.__signature__ = build.__doc__, inspect.signature(build)  # type: ignore[attr-defined]
        named.paper = paper  # type: ignore[attr-defined]
        METHODS.add(name, named)
        return named

    return register


def _spell(name: str, build: Callable[..., Method], params: dict[str, Any]) -> str:
    values = {key: p.default for key, p in inspect.signature(build).parameters.items()} | params
    inside = ", ".join(f"{key}={value}" for key, value in values.items())
    return f"{name}({inside})" if inside else name


@preset("autoregressive", "plain decoding")
def autoregressive() -> Method:
    """The target alone, one token a pass."""
    return Method(drafter=Nothing())


@preset("draft-only", "plain decoding")
def draft_only() -> Method:
    """The draft model alone: the target is never asked."""
    return Method(trust=Everyone(), stop=Never())


@preset("speculative", _SPECULATIVE)
def speculative(*, gamma: int = 5) -> Method:
    """Exact speculative decoding with gamma draft tokens a round."""
    return Method(stop=Fixed(gamma))


@preset("sprinter", _SPRINTER)
def sprinter(*, tau: float = 0.5, cap: int = 20, tail: int = 0) -> Method:
    """A gate trusts draft tokens one by one; the first that it refuses, and a tail, are checked by the target."""
    return Method(trust=Gate(tau), stop=Untrusted(tail), cap=cap)


@preset("heuristic", "transformers, num_assistant_tokens_schedule")
def heuristic(*, start: int = 5) -> Method:
    """Exact speculative decoding whose draft length follows success."""
    return Method(stop=Heuristic(start), cap=40)


@preset("confidence", "transformers, assistant_confidence_threshold")
def confidence(*, c: float = 0.4) -> Method:
    """Exact speculative decoding that stops where the draft is unsure of its token."""
    return Method(stop=Confidence(c), cap=40)


@preset("svip", "SVIP (Zhang et al. 2024), equation 6")
def svip(*, h: float = 0.3, c: float = 0.15) -> Method:
    """Exact speculative decoding that stops where the draft's entropy is high."""
    return Method(stop=Svip(h, c), cap=40)


@preset("adaedl", "AdaEDL (Agrawal et al. 2024)")
def adaedl() -> Method:
    """As svip, with a threshold that follows the acceptance rate."""
    return Method(stop=AdaEdl(), cap=40)


@preset("allocation", "Fuzzy Speculative Decoding, section 5.3")
def allocation(*, share: float = 0.5) -> Method:
    """Each text wholly by the draft or wholly by the target: what every dial must beat."""
    return Method(trust=Everyone(), stop=Never(), drafter=Allocated(share))


@preset("coin", "baseline of this project")
def coin(*, rate: float = 0.5, cap: int = 20) -> Method:
    """SPRINTER with a coin for a gate: what a gate must beat at the same trusted share."""
    return Method(trust=Coin(rate), stop=Untrusted(), cap=cap)


@preset("opt", "Yin et al. 2024, Theorem 4")
def opt(*, epsilon: float = 0.01, gamma: int = 5) -> Method:
    """Acceptance with slack ε and the best replacement for it: on the Pareto front."""
    return Method(stop=Fixed(gamma), accept=Opt(epsilon))


@preset("uno", "Yin et al. 2024, baseline of Theorem 4")
def uno(*, epsilon: float = 0.01, gamma: int = 5) -> Method:
    """Acceptance with slack ε, replacement from p."""
    return Method(stop=Fixed(gamma), accept=Uno(epsilon))


@preset("fuzzy", "Fuzzy Speculative Decoding (Holsman et al. 2025)")
def fuzzy(*, divergence: str = "js_reference", threshold: float = 0.3, gamma: int = 5) -> Method:
    """Keep all tokens where the two laws are close."""
    return Method(stop=Fixed(gamma), accept=Fuzzy(divergence, threshold))


@preset("mentored", "Tran-Thien 2024")
def mentored(*, kl: float = 0.1, gamma: int = 5) -> Method:
    """The most acceptance that a budget of KL(p‖π) allows."""
    return Method(stop=Fixed(gamma), accept=Mentored(kl))


@preset("lenient", "transformers, assistant_ensemble_weight")
def lenient(*, w: float = 0.8, gamma: int = 5) -> Method:
    """Exact acceptance against a mixture of target and draft."""
    return Method(stop=Fixed(gamma), accept=Lenient(w))


@preset("typical", "Medusa (Cai et al. 2024)")
def typical(*, epsilon: float = 0.09, delta: float = 0.3, gamma: int = 5) -> Method:
    """Keep what the target finds likely enough."""
    return Method(stop=Fixed(gamma), accept=Typical(epsilon, delta))


@preset("bild", "Big Little Decoder (Kim et al. 2023)")
def bild(*, fallback: float = 0.6, rollback: float = 5.0) -> Method:
    """The draft hands over where it is unsure; the target rolls back what it finds absurd."""
    return Method(stop=BildFallback(fallback), accept=Bild(rollback), cap=10)


@preset("random", "Fuzzy Speculative Decoding, Appendix E")
def random(*, rate: float = 0.5, gamma: int = 5) -> Method:
    """Keep each token with a fixed chance."""
    return Method(stop=Fixed(gamma), accept=RandomAccept(rate))


@preset("batch", "Yin et al. 2024, Algorithm 4 (corrected)")
def batch(*, drafts: int = 2, gamma: int = 5) -> Method:
    """Several drafts, tried in order for the first token; the accepted one is followed."""
    return Method(stop=Fixed(gamma), accept=Batch(), drafter=Model(drafts=drafts))


@preset("specinfer", "SpecInfer (Miao et al. 2024)")
def specinfer(*, drafts: int = 2, gamma: int = 5) -> Method:
    """Several drafts, tried in order at every depth."""
    return Method(stop=Fixed(gamma), accept=SpecInfer(), drafter=Model(drafts=drafts))


@preset("spectr", "SpecTr (Sun et al. 2023), k-SEQ")
def spectr(*, drafts: int = 2, gamma: int = 5) -> Method:
    """Several drafts, chosen by k-SEQ at every depth."""
    return Method(stop=Fixed(gamma), accept=SpecTr(), drafter=Model(drafts=drafts))


@preset("lookup", "prompt lookup decoding (Saxena 2023)")
def lookup(*, n: int = 3, gamma: int = 5) -> Method:
    """Draft by copying what followed the same words before; no draft model."""
    return Method(stop=Fixed(gamma), drafter=Lookup(n, least=min(2, n)))


def spell(rule: object) -> str:
    """A rule as a spec writes it, without the parameters that stand at their defaults of None: ``gate(tau=0.5)``."""
    for registry in (TRUST, STOP, ACCEPT, DRAFTER):
        for name in registry.names():
            if registry.get(name) is type(rule):
                values = [(f.name, getattr(rule, f.name)) for f in dataclasses.fields(rule)]  # type: ignore[arg-type]
                inside = ", ".join(f"{key}={value}" for key, value in values if value is not None)
                return f"{name}({inside})" if inside else name
    return repr(rule)


def method_table() -> list[dict[str, Any]]:
    """One row a method at its defaults: name, spec, drafter, trust, stop, accept, lossless, paper.

    Parts that a method never uses are None: plain decoding asks no rule, the draft alone no accept rule.
    """
    rows = []
    for name in METHODS.names():
        method: Method = METHODS.get(name)()
        parts = {part: spell(getattr(method, part)) for part in ("drafter", "trust", "stop", "accept")}
        unused = (
            ("trust", "stop", "accept")
            if not method.drafter.proposes
            else ()
            if method.needs_target
            else ("accept",)
        )
        rows.append(
            {
                "name": name,
                "spec": method.name,
                **parts,
                **dict.fromkeys(unused),
                "lossless": method.lossless(),
            }
            | {"paper": method.paper}
        )
    return rows


def parse_method(spec: str | Method) -> Method:
    """A Method from a spec string (a Method passes through).

    Raises:
        UserError: unknown names (with a did-you-mean), unknown parameters, values out of range, bad syntax.
    """
    if isinstance(spec, Method):
        return spec
    if not isinstance(spec, str):
        raise UserError(f"the method is {spec!r}: give a name such as 'sprinter', a spec, or a Method")
    items = _split(spec.strip())
    if not items or items == [""]:
        raise UserError("the method is empty: give a name such as 'sprinter' or 'speculative(gamma=5)'")
    if len(items) == 1 and _assignment(items[0]) is None:
        return _preset_from(items[0])
    return _composed_from(spec, items)


def _preset_from(text: str) -> Method:
    name, params = _call(text)
    capped = "cap" in params and "cap" not in _parameters(METHODS.get(name))
    cap = params.pop("cap") if capped else None
    method: Method = _build(METHODS, name, params)
    if not capped:
        return method
    return dataclasses.replace(
        method,
        cap=cap,
        name=f"{method.name[:-1]}, cap={cap})" if "(" in method.name else f"{name}(cap={cap})",
    )


def _composed_from(spec: str, items: list[str]) -> Method:
    parts: dict[str, Any] = {}
    registries = {"drafter": DRAFTER, "trust": TRUST, "stop": STOP, "accept": ACCEPT}
    for item in items:
        pair = _assignment(item)
        if pair is None:
            raise UserError(
                f"'{item}' in method '{spec}' is not part=rule: write trust=..., stop=..., accept=... or cap=..."
            )
        key, value = pair
        if key in parts:
            raise UserError(f"'{key}=' stands twice in method '{spec}'")
        if key == "cap":
            parts[key] = _value(value)
        elif key in registries:
            name, params = _call(value)
            parts[key] = _build(registries[key], name, params)
        else:
            raise did_you_mean("part of a method", key, [*registries, "cap"])
    trusting = "trust" in parts and not parts["trust"].never
    defaults = {"stop": Untrusted(), "cap": 20} if trusting else {"stop": Fixed(), "cap": 40}
    return Method(**{**defaults, **parts}, name=spec.replace(" ", ""))


def _build(registry: Registry, name: str, params: dict[str, Any]) -> Any:
    factory = registry.get(name)
    known = _parameters(factory)
    if isinstance(params.get("under"), str):  # a rule within a rule
        params = {**params, "under": _build(STOP, *_call(params["under"]))}
    for key in params:
        if key not in known:
            if not known:
                raise UserError(f"{registry.kind} '{name}' takes no parameters, and got '{key}'")
            raise did_you_mean(f"parameter of {name}", key, list(known))
    return factory(**params)


def _parameters(factory: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(factory).parameters)


def _split(text: str) -> list[str]:
    """At the commas outside parentheses."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth != 0:
        raise UserError(f"parentheses do not match in method '{text}'")
    return [part.strip() for part in parts]


def _assignment(text: str) -> tuple[str, str] | None:
    """``key=value`` outside parentheses, or None."""
    head, sign, tail = text.partition("=")
    return (head.strip(), tail.strip()) if sign and "(" not in head else None


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """``name`` or ``name(key=value, ...)``."""
    name, opened, inside = text.partition("(")
    if opened and not inside.endswith(")"):
        raise UserError(f"'{text}' does not end with its closing parenthesis")
    params: dict[str, Any] = {}
    for item in _split(inside[:-1].strip()) if inside[:-1].strip() else []:
        pair = _assignment(item)
        if pair is None or not pair[0]:
            raise UserError(f"'{item}' in '{text}' is not name=value: parameters are given by keyword")
        if pair[0] in params:
            raise UserError(f"'{pair[0]}=' stands twice in '{text}'")
        params[pair[0]] = _value(pair[1])
    return name.strip(), params


def _value(text: str) -> Any:
    """A number, true/false/none, or the word itself."""
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
