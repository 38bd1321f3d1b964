"""When the engine runs the target's forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from sprinter.decode.checks import at_least, between

__all__ = ["Policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """When to run the target: a forward pass costs about as much for few rows as for many, so rows may wait.

    It runs as soon as one of the two conditions holds. No policy changes a text.

    Attributes:
        share: this share of the active rows waits for the target, in [0, 1]; 1: all of them, 0: never wait.
        age: a row has waited for this many steps of the engine; 0: never wait, None: no limit, so that a request may
            wait for ever beside others that only draft.
        prompt_piece: size of a prefill chunk in tokens, so that a long prompt does not hold up other requests.
    """

    share: float = 0.5
    age: int | None = 16
    prompt_piece: int = 128

    def __post_init__(self) -> None:
        between("share", self.share, 0.0, 1.0)
        at_least("prompt_piece", self.prompt_piece, 1)
        if self.age is not None:
            at_least("age", self.age, 0)

    def calls(self, waiting: int, live: int, longest: int) -> bool:
        """Whether to run the target now.

        Args:
            waiting: number of requests that wait for the target, at least one.
            live: number of requests that have rows.
            longest: number of steps that one of them has waited.
        """
        return waiting >= self.share * live or (self.age is not None and longest >= self.age)
