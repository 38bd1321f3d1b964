"""Samples of a suite, and how an answer is checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Sample", "SampleCheck", "Suite"]

CheckKind = Literal["number", "choice", "text", "code"]


@dataclass(frozen=True, slots=True)
class SampleCheck:
    """How an answer is checked.

    Attributes:
        kind: "number": the last number of the text equals ``answer`` (GSM8K). "choice": the first choice letter of the
            text is ``answer`` (MMLU, CommonsenseQA). "text": the text is ``answer``, apart from case, space and a final
            full stop. "code": prompt + text + ``answer`` (a test) runs (HumanEval).
        answer: the right number, letter or text, or the test's source code.
        entry_point: for "code", the function that the test calls.
        code: for "code" in chat form, the beginning of the function; "": the prompt is that.
    """

    kind: CheckKind
    answer: str
    entry_point: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, or the prompts of one conversation.

    Attributes:
        id: unique within the suite, and the same in every run.
        category: group within the suite ("qa"), for tables by group.
        turns: the user's messages, in order, at least one. Each after the first follows the answer to the one before.
        references: reference answers, one per turn, or none.
        check: how the last answer is checked; None: it is not.
        system: system message before the turns in chat form; "": none.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[str, ...] = ()
    check: SampleCheck | None = None
    system: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Samples under one name, and where they come from.

    Attributes:
        name: "spec-bench", "wiki-summary", ..., or a file's stem.
        samples: samples in the order in which they are asked.
        new_tokens: the suite's default limit of new tokens per turn.
        sources: {"name": file name or hub id, "sha256": hash of what was read} of each file or data set.
        skipped: number of texts that gave no sample, by reason ("too_short", "empty", ...).
        rule: short description of how a text becomes a prompt.
        chat: whether the pair's chat template is applied to the turns; otherwise they are text to be continued.
        system: system message of the user's choice; None: none, or those of the samples.
    """

    name: str
    samples: tuple[Sample, ...]
    new_tokens: int
    sources: tuple[dict[str, str], ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    rule: str = ""
    chat: bool = False
    system: str | None = None

    def facts(self) -> dict[str, Any]:
        """The suite's entry in a results file."""
        chosen = {} if self.system is None else {"system": self.system}
        return {
            "name": self.name, "samples": len(self.samples), "new_tokens": self.new_tokens,
            "sources": list(self.sources), "skipped": dict(self.skipped), "rule": self.rule, "chat": self.chat,
            **chosen,
        }  # fmt: skip
