"""What is asked: samples of a suite, and how an answer to one may be checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Sample", "SampleCheck", "Suite"]

CheckKind = Literal["number", "choice", "code"]


@dataclass(frozen=True, slots=True)
class SampleCheck:
    """How an answer is judged right or wrong.

    Attributes:
        kind: "number": the last number of the text equals ``answer`` (GSM8K). "choice": the first choice letter of the
            text is ``answer`` (MMLU, CommonsenseQA). "code": prompt + text + ``answer`` (a test) runs (HumanEval).
        answer: the right number or letter, or the test's source.
        entry_point: of "code": the function that the test calls.
    """

    kind: CheckKind
    answer: str
    entry_point: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, or the prompts of one talk.

    Attributes:
        id: unique within the suite, stable from run to run.
        category: group within the suite ("qa"), for tables by group.
        turns: what the user says, in order; at least one. Each turn after the first follows the answer before it.
        references: reference answers, one a turn, or none.
        check: how the last answer is judged; None: it is not.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[str, ...] = ()
    check: SampleCheck | None = None


@dataclass(frozen=True, slots=True)
class Suite:
    """Samples under one name, and where they come from.

    Attributes:
        name: "spec-bench", "wiki-summary", ..., or a file's stem.
        samples: in the order in which they are asked.
        new_tokens: the suite's usual limit of new tokens a turn.
        sources: of each file or data set: {"name": file name or hub id, "sha256": of what was read}.
        skipped: texts that gave no sample, by reason ("too_short", "empty", ...).
        rule: in a few words, how a text became a prompt.
        chat: whether a pair's chat template is put around the turns; without one they are text to go on from.
    """

    name: str
    samples: tuple[Sample, ...]
    new_tokens: int
    sources: tuple[dict[str, str], ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    rule: str = ""
    chat: bool = False

    def facts(self) -> dict[str, Any]:
        """What a results file says of the suite."""
        return {
            "name": self.name,
            "samples": len(self.samples),
            "new_tokens": self.new_tokens,
            "sources": list(self.sources),
            "skipped": dict(self.skipped),
            "rule": self.rule,
            "chat": self.chat,
        }
