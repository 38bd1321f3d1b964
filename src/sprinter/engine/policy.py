"""When the engine runs the target's pass."""

from __future__ import annotations

from dataclasses import dataclass

from sprinter.decode.checks import at_least, between

__all__ = ["Policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A pass of the target costs much the same for few rows as for many, so that rows may wait for company.

    The pass is run as soon as one of the two holds; neither changes a text.

    Attributes:
        share: so many of the rows under way wait for the target, in [0, 1]: 1 is all of them, 0 does not wait at all.
        age: one of them was passed over in so many steps of the engine: 0 does not wait at all. None: however long it
            takes, and others that keep their rows busy may make it wait for ever.
        prompt_piece: most tokens of a prompt that a row reads in a step, so that a long one does not hold up others.
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
        """Whether to run the pass now.

        Args:
            waiting: requests that wait for the target, at least one; live: requests that have rows.
            longest: steps in which one of them was passed over.
        """
        return waiting >= self.share * live or (self.age is not None and longest >= self.age)
