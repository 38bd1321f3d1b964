"""What a paper says, what was measured here, and whether it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sprinter.bench.statistics import BootstrapInterval
from sprinter.reproduce.pictures import PaperPicture

__all__ = ["DECIDES", "ENOUGH", "Check", "Claim", "PaperTable", "cell"]

ENOUGH = 20
"""Prompts that a table needs."""
DECIDES = 6
"""Prompts that a verdict needs: of fewer, even if all agree, a sign test finds nothing at 5 %."""


def cell(of: BootstrapInterval, digits: int = 2) -> str:
    """value [low, high]; the value alone where a single prompt shows no variance; a dash for a division by zero."""
    value, low, high = of
    if not math.isfinite(value):
        return "–"
    if low is None or high is None:
        return f"{value:.{digits}f} (n=1)"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Check:
    """A measured number that ought to lie above (or below) a bound.

    Attributes:
        what: in a few words.
        value: with its 95 % interval over prompts.
        bound: what the claim needs.
        above: whether the value ought to be larger.
    """

    what: str
    value: BootstrapInterval
    bound: float
    above: bool = True

    @property
    def outcome(self) -> bool | None:
        """True or False where the whole interval lies on one side of the bound, else None."""
        value, low, high = self.value
        if low is None or high is None or not math.isfinite(value):
            return None
        if not self.above:
            return True if high < self.bound else False if low >= self.bound else None
        return True if low > self.bound else False if high <= self.bound else None

    def line(self) -> str:
        """What was measured, the bound, whether it passes."""
        digits = 3 if abs(self.value[0]) < 1 else 2 if abs(self.value[0]) < 10 else 1
        answer = {True: "yes", False: "no", None: "undecided"}[self.outcome]
        sign = "above" if self.above else "below"  # ">" at the start of a wrapped line is a quotation
        return f"{self.what}: {cell(self.value, digits)}, {sign} {self.bound:.3g}: {answer}"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper says, with its numbers, and the checks that it is broken into.

    Attributes:
        says: the claim, with what is required of the measured numbers.
        checks: all of them must be shown.
        missing: why it cannot be tested here; "": it can.
    """

    says: str
    checks: tuple[Check, ...] = ()
    missing: str = ""

    @property
    def verdict(self) -> str:
        """Held (all checks), not held (none shown, some refuted), held in part, undecided, or not testable here."""
        outcomes = [check.outcome for check in self.checks]
        if self.missing or not outcomes:
            return "not testable here"
        if all(outcome is True for outcome in outcomes):
            return "held"
        if True in outcomes:
            return "held in part"
        return "not held" if False in outcomes else "undecided"

    def line(self, verdict: str) -> str:
        """Markdown: verdict, claim, and what the numbers say; of several checks a line each."""
        claim = f"- **{verdict[0].upper()}{verdict[1:]}.** {self.says}"
        if self.missing:
            return f"{claim} {self.missing[0].upper()}{self.missing[1:]}."
        if len(self.checks) == 1:
            return f"{claim} {self.checks[0].line()}."
        return claim + "".join(f"\n    - {check.line()}" for check in self.checks)

    def facts(self, verdict: str) -> dict[str, Any]:
        """As JSON values, which know no NaN."""
        checks = [
            {
                **asdict(one),
                "value": [part if part is None or math.isfinite(part) else None for part in one.value],
            }
            for one in self.checks
        ]
        return {"verdict": verdict, **asdict(self), "checks": checks}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Claim:
        """From what ``facts`` gave."""

        def value(parts: Sequence[float | None]) -> BootstrapInterval:
            return math.nan if parts[0] is None else parts[0], parts[1], parts[2]

        checks = (Check(**{**one, "value": value(one["value"])}) for one in facts["checks"])
        return cls(facts["says"], tuple(checks), facts["missing"])


@dataclass(frozen=True, slots=True)
class PaperTable:
    """One table of a paper, measured again.

    Attributes:
        title: paper and table.
        measured: what was run: texts, settings, and what stands for a number that cannot be had here.
        head, rows: its cells; the paper's own numbers stand in columns and rows of their own.
        claims: what the paper says of it.
        prompts: on how many it rests; None: it shows no means.
        picture: its curves.
    """

    title: str
    measured: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    claims: Sequence[Claim] = ()
    prompts: int | None = None
    picture: PaperPicture | None = None

    @property
    def trial(self) -> bool:
        """Whether it rests on too few prompts."""
        return self.prompts is not None and self.prompts < ENOUGH

    def verdict(self, claim: Claim) -> str:
        """Of one of the claims: undecided where too few prompts were asked to decide anything."""
        few = self.prompts is not None and self.prompts < DECIDES
        return "undecided" if few and claim.verdict != "not testable here" else claim.verdict

    def markdown(self, pictures: str) -> str:
        """Heading, what was run, table, picture, verdicts; ``pictures``: what the names of their files begin with."""
        lines = [f"| {' | '.join(self.head)} |", "| --- " * len(self.head) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        few = f" **A trial: {self.prompts} prompts, fewer than {ENOUGH}.**" if self.trial else ""
        few += f" Fewer than {DECIDES} decide nothing." if (self.prompts or ENOUGH) < DECIDES else ""
        parts = [f"## {self.title}", self.measured + few, "\n".join(lines)]
        parts += [self.picture.markdown(pictures)] if self.picture else []
        parts += ["\n".join(claim.line(self.verdict(claim)) for claim in self.claims)] if self.claims else []
        return "\n\n".join(parts)

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "title": self.title,
            "measured": self.measured,
            "head": [*self.head],
            "rows": [[*row] for row in self.rows],
            "claims": [claim.facts(self.verdict(claim)) for claim in self.claims],
            "prompts": self.prompts,
            "picture": asdict(self.picture) if self.picture else None,
        }

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> PaperTable:
        """From what ``facts`` gave."""
        drawn = facts.get("picture")
        return cls(
            facts["title"], facts["measured"], facts["head"], facts["rows"], [*map(Claim.of, facts["claims"])],
            facts.get("prompts"), PaperPicture(**drawn) if drawn else None,
        )  # fmt: skip
