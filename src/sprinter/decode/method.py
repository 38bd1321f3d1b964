"""A method combines a trust, a stop and an accept rule with a drafter."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Integral
from typing import Any

from sprinter.decode.accept import Exact, Judge
from sprinter.decode.checks import at_least, ranged
from sprinter.decode.costs import MEASURED, PassCosts
from sprinter.decode.drafter import Drafter, Model
from sprinter.decode.registry import ACCEPT, DRAFTER, METHODS, STOP, TRUST, did_you_mean
from sprinter.decode.regression import PREDICTORS
from sprinter.decode.sequence import Siblings
from sprinter.decode.signals import GIVEN, HEADS, TARGET_HEADS, state_signals
from sprinter.decode.spans import check_only
from sprinter.decode.stop import Fixed, Never, StopRule, Untrusted
from sprinter.decode.trust import Everyone, Nobody, TrustRule
from sprinter.errors import OptionError, UserError, refuse_long

__all__ = ["VALUES", "Method", "defaults_of", "spell"]

VALUES = ("cap", "head", "only", "tail_ratio", "budget")
"""Parts of a method that are numbers or names, not rules."""
_RULES = ("drafter", "trust", "stop", "accept")

_LARGEST = 2**20
"""Largest whole number in a method: more tokens than any context has, and far from the ends of 64 bits."""


@dataclass(frozen=True, slots=True)
class Method:
    """A decoding method.

    Attributes:
        trust, stop, accept: the three rules.
        cap: maximum length of a draft run, tokens; the token at the cap is checked. None: limited by the text alone.
        drafter: proposes the draft tokens.
        head: number of tokens at the beginning of a text that are decoded exactly: none is trusted, and the exact rule
            judges them.
        only: a span of the text, such as "think" or "code", or "not-code" for what is outside: the rest of the text is
            decoded exactly, as a head. None: the whole text may be lossy.
        tail_ratio: take a trusted token back where p(x)/q(x), once scored, is below this number in [0, 1], with the
            probability at which the exact rule refuses it. Trusted tokens are then final at the next target call. At 1
            they are judged exactly: the trust rule is a stop rule. None: trusted tokens stay.
        budget: the drifts of the first n tokens of a text sum to at most the budget times n, for every n, see
            ``decode.budget``; at 0 it is decoded exactly. Trusted tokens are then final at the next target call, and a
            trust rule with a threshold (gate, certain, online) has it chosen token by token: one that is given is left
            out. None: no limit.
        to_horizon: also draft the last token of the text, which otherwise the target call draws (Theorems 1 and 3 of
            Yin et al. count rejections of such drafts).
        preset: the registered function that made it; "": it was composed.
        paper: its source.
    """

    trust: TrustRule = Nobody()
    stop: StopRule = Fixed()
    accept: Judge = Exact()
    cap: int | None = None
    drafter: Drafter = Model()
    head: int = 0
    only: str | None = None
    tail_ratio: float | None = None
    budget: float | None = None
    to_horizon: bool = False
    preset: str = ""
    paper: str = ""
    _name: str = field(default="", init=False, repr=False, compare=False)  # once it is known

    def __post_init__(self) -> None:
        self._check_parts()
        if self.chooses_threshold and (dial := self.trust.dial) is not None:
            usual = {one.name: one.default for one in fields(self.trust)}  # type: ignore[arg-type]
            object.__setattr__(self, "trust", replace(self.trust, **{dial: usual[dial]}))  # type: ignore[type-var]
        self.check_counts(_LARGEST, "any text has tokens")
        if self.cap is not None:
            at_least("cap", self.cap, 1)
        at_least("head", self.head, 0)
        self._check_guards()
        if self.stop.discards and self.sees_token:
            seeing = "it" if self.stop.sees_token else f"trust rule {self.trust!r}"
            raise UserError(
                f"stop rule {self.stop!r} discards a token that {seeing} looks at: this would bias texts"
            )
        if not self.drafter.reads_states and (unread := sorted(self.needs & state_signals())):
            what = f"a {unread[0]} head" if unread[0] in HEADS else f"signal {unread[0]}"
            whose = "drafts of heads" if self.drafter.by_heads else "looked-up tokens"
            whose = whose if self.drafter.tokens_a_pass == 1 else "tokens of one pass"
            raise UserError(
                f"{what} reads the draft model's states, and {whose} have none: give another rule"
            )
        if self.grows or self.drafter.drafts > 1:
            self._check_tree()
        elif Siblings.ALONE not in self.accept.siblings:
            raise UserError(
                f"accept rule {self.accept!r} judges trees of siblings that are {_listed(self.accept)}, and drafter "
                f"{self.drafter!r} drafts chains: give drafter=static or drafter=dynamic, or another accept rule"
            )

    @property
    def name(self) -> str:
        """It as a spec: its preset with all parameters, or its rules, where they are not what a spec means anyway.

        Parameters of which a budget takes the place are left out.
        """
        if not self._name:
            object.__setattr__(self, "_name", self._spelt())
        return self._name

    def _spelt(self) -> str:
        if (made := self._remade()) is not None:
            params = {key: value for key, value in self._params.items() if value is not None}
            inside = ", ".join(f"{key}={value}" for key, value in {**params, **self._beside(made)}.items())
            return f"{self.preset}({inside})" if inside else self.preset
        rules = {part: getattr(self, part) for part in _RULES}
        usual = defaults_of(rules)
        written = {
            part: spell(rule, self._chosen if part == "trust" else None) if part in _RULES else str(rule)
            for part, rule in (rules | {key: getattr(self, key) for key in VALUES}).items()
            if rule != usual[part]
        }
        return ",".join(f"{part}={text}" for part, text in written.items()).replace(" ", "") or "trust=nobody"

    def __str__(self) -> str:
        """Its name; ``repr`` has every part."""
        return self.name

    def is_as(self, other: Method) -> bool:
        """Whether it decodes as another method does, wherever the two come from."""
        return replace(self, preset="", paper="") == replace(other, preset="", paper="")

    @property
    def _params(self) -> dict[str, Any]:
        """The parameters of its preset, which its rules hold by the same names; without one that a budget chooses."""
        build = METHODS.get(self.preset)
        held: dict[str, Any] = {}
        for part in (self.drafter, self.accept, self.stop, self.trust):
            held |= _parameters(part)
        held |= {key: getattr(self, key) for key in VALUES}
        renamed, usual = getattr(build, "renamed", {}), inspect.signature(build).parameters
        found = {key: held.get(renamed.get(key, key)) for key in usual if key != self._chosen}
        return {key: usual[key].default if value is None else value for key, value in found.items()}

    @property
    def _chosen(self) -> str | None:
        """Name of the trust rule's threshold if a budget has its place."""
        return self.trust.dial if self.chooses_threshold else None

    def _remade(self) -> Method | None:
        """What its preset makes of its parameters; None: it is not a preset's, or has other rules by now."""
        if not self.preset or self.preset not in METHODS.names():
            return None
        try:
            made: Method = METHODS.get(self.preset)(**self._params)
            return made if self.is_as(replace(made, **{key: getattr(self, key) for key in VALUES})) else None
        except UserError:  # the guards go with the other rules alone
            return None

    def _beside(self, made: Method) -> dict[str, Any]:
        """Values that its preset does not give it."""
        return {key: getattr(self, key) for key in VALUES if getattr(self, key) != getattr(made, key)}

    def replace(self, **values: Any) -> Method:
        """With other parts, or other parameters of its preset.

        Raises:
            UserError: a value is out of range, or does not go with the method. OptionError: it has no such part.
        """
        if (dial := self._chosen) in values:
            if values.get("budget", self.budget):
                raise OptionError(
                    f"the budget of method {self.name} chooses its {dial}: leave {dial}= out, or give budget=None too"
                )
            return self.replace(budget=values.pop("budget")).replace(**values)
        made = self._remade()
        params = {} if made is None else self._params
        known = [*dict.fromkeys((*params, *_RULES, *VALUES, "to_horizon"))]
        if unknown := [key for key in values if key not in known]:
            raise OptionError(str(did_you_mean(f"parameter of method {self.name}", unknown[0], known)))
        if made is None or params.keys().isdisjoint(values):
            return replace(self, **values)
        own = {key: values.pop(key) for key in [*values] if key in params}
        kept = {key: value for key, value in self._beside(made).items() if key not in own}
        kept |= {"preset": self.preset, "paper": self.paper}
        again: Method = METHODS.get(self.preset)(**params | own)
        return replace(again, **kept | values)

    def _check_parts(self) -> None:
        kinds: dict[str, type] = {
            "trust": TrustRule, "stop": StopRule, "accept": Judge, "drafter": Drafter,
        }  # fmt: skip
        for part, kind in kinds.items():
            if not isinstance(rule := getattr(self, part), kind):
                what = {"drafter": "a drafter", "accept": "an accept rule"}.get(part, f"a {part} rule")
                raise UserError(f"{part}={rule!r} is not {what}: give one that 'sprinter methods' shows")

        if strange := sorted(self.accept.needs - TARGET_HEADS):
            raise UserError(
                f"accept rule {self.accept!r} needs a head '{strange[0]}': accept rules read heads on the target, "
                f"{' or '.join(sorted(TARGET_HEADS))}"
            )

    def check_counts(self, most: int, what: str) -> None:
        """Refuse whole numbers above ``most`` and their default: most are lengths and widths of drafts.

        Args:
            what: what ``most`` is, for the message.

        Raises:
            UserError: names the first such parameter.
        """
        for name, value, usual in _counts(self):
            if value > max(most, usual):
                refuse_long(name, value)
                raise UserError(f"{name}={value} is more than {what}: give at most {most}")

    def _check_guards(self) -> None:
        if self.budget is not None:
            ranged(self, "budget", 0.0, 1.0)
            if self.budget and not self.trust.never and not self.accept.lossless:
                raise UserError(
                    f"budget= limits what is trusted or what is accepted: give accept=exact beside {self.trust!r}"
                )
        if self.only is not None:
            check_only(self.only)
        if self.tail_ratio is None:
            return
        ranged(self, "tail_ratio", 0.0, 1.0)
        if self.trust.never:
            raise UserError("tail_ratio= takes trusted tokens back, and no token is trusted: leave it out")
        if self.cap is None and type(self.stop) is Never:
            raise UserError("tail_ratio= needs target calls, and no run of this method ends: give cap=20")

    def _check_tree(self) -> None:
        drafter, accept = self.drafter, self.accept
        if drafter.drafts > max(1, accept.max_drafts):
            raise UserError(
                f"accept rule {accept!r} judges one draft: give batch, specinfer, spectr or traversal, or drafts=1"
            )
        if drafter.proposer is not None:
            raise UserError(
                f"drafter {drafter!r} proposes by itself: give drafts=1, several are the model's alone"
            )
        if drafter.siblings not in accept.siblings:
            raise UserError(
                f"accept rule {accept!r} judges siblings that are {_listed(accept)}, and those of {drafter!r} are "
                f"{drafter.siblings.value}: give {_JUDGES[drafter.siblings]} or traversal"
            )
        guards = {"head": self.head or None, "only": self.only, "budget": self.budget}
        given = [f"{name}={value}" for name, value in guards.items() if value is not None]
        if given and not replace(self, head=0, only=None, budget=None).lossless():
            raise UserError(
                f"{given[0]} has the exact rule judge one draft, and {accept!r} is a lossy rule for trees: "
                "leave it out, or give a drafter of chains"
            )
        self._check_tree_stop()

    def _check_tree_stop(self) -> None:
        stop = self.stop
        if self.drafter.siblings is Siblings.INDEPENDENT and not (self.trust.never and type(stop) is Fixed):
            raise UserError("several drafts go with trust=nobody and stop=fixed(gamma=...)")
        if not self.trust.never:
            raise UserError(f"drafter {self.drafter!r} grows trees, which go with trust=nobody")
        reads = stop.sees_token or stop.discards or stop.needs & (state_signals() | GIVEN.keys())
        if reads or stop.chains_only:
            raise UserError(
                f"stop rule {stop!r} is for chains, and drafter {self.drafter!r} grows trees: give stop=never, fixed, "
                "heuristic, svip, adaedl or calibrated"
            )
        if self.levels is None:
            raise UserError(f"the trees of {self.drafter!r} have no largest depth: give stop=fixed or cap=20")

    @property
    def grows(self) -> bool:
        """Whether the draft model grows trees."""
        return self.drafter.siblings is not Siblings.ALONE

    @property
    def levels(self) -> int | None:
        """Largest number of tokens on a path of a draft; None: no part of the method limits it."""
        bounds = [one for one in (self.drafter.levels, self.length, self.cap) if one is not None]
        return min(bounds, default=None)

    @property
    def length(self) -> int | None:
        """Length of a draft run in tokens, cap included, if it is fixed; else None."""
        if type(self.stop) is not Fixed:  # a subclass may stop elsewhere
            return None
        return self.stop.gamma if self.cap is None else min(self.cap, self.stop.gamma)

    @property
    def needs(self) -> frozenset[str]:
        """Names of the signals that the trust and stop rules read, and those that a budget predicts drift from."""
        return self.trust.needs | self.stop.needs | frozenset(self.predicts)

    @property
    def predicts(self) -> tuple[str, ...]:
        """Signals from which a budget predicts the drift of a token that would be trusted; (): nothing is predicted."""
        if not self.budget or self.trust.never:
            return ()
        own = self.trust.certainty if self.chooses_threshold else ()
        return tuple(dict.fromkeys((*own, "entropy")))

    @property
    def chooses_threshold(self) -> bool:
        """Whether a budget has the place of the trust rule's threshold; else it limits what the rule trusts."""
        signals = self.trust.certainty if self.budget else ()
        return bool(signals) and {*signals} <= PREDICTORS

    @property
    def heads(self) -> frozenset[str]:
        """Kinds of the heads that its rules read, of either model."""
        return (self.needs & HEADS) | self.accept.needs

    @property
    def learned_from(self) -> frozenset[str] | None:
        """Names of the signals that rules which learn are shown with the target's verdicts; None: none learns."""
        rules: tuple[TrustRule | StopRule, ...] = (self.trust, self.stop)
        needs = [rule.needs for rule in rules if rule.learns]
        needs += [frozenset(self.predicts)] if self.predicts else []
        return frozenset().union(*needs) if needs else None

    @property
    def learns_if_it_pays(self) -> bool:
        """Whether what the stop rule reads is "measured": a signal from which it learns, or none."""
        return getattr(self.stop, "signal", None) == MEASURED

    @property
    def needs_target(self) -> bool:
        """Whether the target is ever called (False for the draft model alone)."""
        return (
            bool(self.drafter.needs_target or self.drafter.target_states or self.head) or not self.trusts_all
        )

    @property
    def trusts_all(self) -> bool:
        """Whether every draft token is trusted and no run ends, so that no target call follows a trusted token."""
        free = self.cap is None and self.only is None and self.budget is None
        return free and type(self.trust) is Everyone and type(self.stop) is Never

    @property
    def sees_token(self) -> bool:
        """Whether the decision to trust x depends on x (drift is then metered in its one-sample form)."""
        return self.trust.sees_token or self.stop.sees_token

    @property
    def measures(self) -> bool:
        """Whether a parameter is "measured" on this machine."""
        return self.stop.measures or self.drafter.measures

    def settle(
        self,
        taus: Mapping[str, float],
        costs: PassCosts | None = None,
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> Method:
        """The method with numbers in place of "recorded" (of heads) and "measured", also in its name.

        Args:
            taus: by kind of head, the threshold that it records.
            costs: of the pair's forward passes; None: those that are "measured" stay so.
            accuracies: of the heads that draft, () without any; None: a tree whose shape they record stays open.

        Raises:
            UserError: a tree takes its shape from heads that record none.
        """
        rules: dict[str, Any] = {"trust": self.trust, "accept": self.accept.settle(taus)}
        if not self.chooses_threshold:
            rules["trust"] = self.trust.settle(taus)
        rules["stop"] = self.stop if costs is None else self.stop.priced(costs)
        rules["drafter"] = self.drafter if accuracies is None else self.drafter.settle(accuracies)
        rules["drafter"] = rules["drafter"] if costs is None else rules["drafter"].priced(costs)
        if all(rule == getattr(self, part) for part, rule in rules.items()):
            return self
        return replace(self, **rules)

    def lossless(self, greedy: bool = False) -> bool:
        """Whether the text has the target's own law (``greedy``: at temperature 0)."""
        if not self.drafter.proposes or self.budget == 0:
            return True
        trusts = not self.trust.never and self.tail_ratio != 1
        return not trusts and (self.accept.lossless_greedy if greedy else self.accept.lossless)


def spell(rule: object, hidden: str | None = None) -> str:
    """A rule as a spec writes it, without parameters that are None or ``hidden``: ``gate(tau=0.5)``; else its repr."""
    for registry in (TRUST, STOP, ACCEPT, DRAFTER):
        if (name := registry.name_of(type(rule))) is not None:
            values = [(one.name, getattr(rule, one.name)) for one in fields(rule)]  # type: ignore[arg-type]
            inside = ", ".join(
                f"{key}={spell(value) if is_dataclass(value) else value}"
                for key, value in values
                if value is not None and key != hidden
            )
            return f"{name}({inside})" if inside else name
    return repr(rule)


def defaults_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """What a composed spec means by the parts that it leaves out.

    Args:
        parts: rules by part; those that are missing are of no consequence.
    """
    trust, usual = parts.get("trust"), {one.name: one.default for one in fields(Method) if one.init}
    trusts = isinstance(trust, TrustRule) and not trust.never
    usual |= {"stop": Untrusted(), "cap": 20} if trusts else {"stop": Fixed(), "cap": 40}
    if getattr(parts.get("drafter"), "levels", None) is not None:  # its trees end by themselves
        usual["stop"] = Never()
    return usual


_JUDGES = {
    Siblings.INDEPENDENT: "specinfer, batch, spectr",
    Siblings.DRAWN: "without",
    Siblings.WIDENED: "without",
    Siblings.CHOSEN: "onehot",
}
"""The exact accept rules for each kind of siblings, beside traversal."""


def _listed(rule: Judge) -> str:
    """The kinds of siblings that a rule judges."""
    return " or ".join(kind.value for kind in Siblings if kind in rule.siblings)


def _counts(part: object) -> Iterator[tuple[str, int, int]]:
    """Each whole number among the parameters of a rule, and of the rules in it, with its default (0: none)."""
    for one in fields(part) if is_dataclass(part) else ():
        value = getattr(part, one.name)
        counts = "float" not in str(one.type)  # others may be whole numbers too
        if counts and type(value) is not bool and isinstance(value, Integral):
            yield one.name, int(value), one.default if isinstance(one.default, int) else 0
        yield from _counts(value)


def _parameters(rule: object) -> dict[str, Any]:
    """The parameters of a rule, and of the rules in it where it has none of the same name."""
    own = {one.name: getattr(rule, one.name) for one in fields(rule)} if is_dataclass(rule) else {}
    nested = [_parameters(value) for value in own.values()]
    return {key: value for part in (*nested, own) for key, value in part.items()}
