"""When the engine runs the target's forward pass, and how much of prompts it reads in a step."""

from __future__ import annotations

from dataclasses import dataclass

from sprinter.decode.checks import at_least, between

__all__ = ["Policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """When to run the target: its forward pass costs about as much for few rows as for many, so rows may wait.

    The target runs as soon as one of two conditions holds, ``share`` or ``age``. No policy changes a text.

    Attributes:
        share: share of the active rows that wait for the target, in [0, 1]; 1: all of them, 0: do not wait. Rows that
            read a prompt do not count.
        age: number of engine steps that a row has waited; 0: do not wait, None: no limit, so that a request may wait
            indefinitely while others only draft.
        first: whether a request that has no text yet does not wait for other rows; nor for their passes, if its owner
            has no other request and others have.
        prompt_piece: size of a prefill chunk in tokens, so that a long prompt does not block other requests.
        prompt_tokens: number of tokens of prompts that a step reads in each model, over all rows, or one chunk if that
            is more; None: no limit. Owners take turns, and of one owner the rows: new ones first.
        target_tokens: number of tokens that a pass of the target reads over all rows, drafts included, or one row's if
            that is more; None: no limit. Those that have waited longest go first.
        draft_steps: number of draft steps after which drafts go on in another pass; None: as many as are known to be
            needed, at most eight. A request that arrives waits for one pass.
    """

    share: float = 0.5
    age: int | None = 16
    first: bool = False
    prompt_piece: int = 128
    prompt_tokens: int | None = None
    target_tokens: int | None = None
    draft_steps: int | None = None

    def __post_init__(self) -> None:
        between("share", self.share, 0.0, 1.0)
        at_least("prompt_piece", self.prompt_piece, 1)
        for name in ("prompt_tokens", "target_tokens", "draft_steps"):
            if (most := getattr(self, name)) is not None:
                at_least(name, most, 1)
        if self.age is not None:
            at_least("age", self.age, 0)

    def calls(self, waiting: int, live: int, longest: int, silent: bool = False) -> bool:
        """Whether to run the target now.

        Args:
            waiting: number of requests that wait for the target, at least one.
            live: number of requests that have read their prompts.
            longest: longest waiting time among them, in steps.
            silent: whether one that waits has no text yet.
        """
        if self.first and silent:
            return True
        return waiting >= self.share * live or (self.age is not None and longest >= self.age)
