"""An arm: one way to answer. Our methods and other engines answer the same ``Ask`` and are timed by the same clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from sprinter.engine.pair import Pair
from sprinter.laws import Sampling

__all__ = ["Arm", "ArmAnswer", "Ask"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. All arms get the same token ids.

    Attributes:
        ids: the prompt.
        new_tokens: exact limit; a text also ends at an end-of-sequence token of the target.
        sampling: temperature and truncation.
        seed: for arms that draw.
        meter: "complete": an arm that can meter drift scores every trusted token, outside ``ArmAnswer.wall_s``.
    """

    ids: tuple[int, ...]
    new_tokens: int
    sampling: Sampling
    seed: int
    meter: Literal["running", "complete"] = "complete"


@dataclass(slots=True)
class ArmAnswer:
    """What an arm gave. What it cannot know is None.

    Attributes:
        ids: new tokens, an end-of-sequence token included.
        wall_s: from the request to the last token, prompt's own pass included, passes that only meter not.
        arrivals_s: for each new token the time since the request at which the caller had it; empty: unknown.
        accept_lengths: tokens that each round (target call) added.
        target_calls, draft_steps: passes, the prompt's own apart.
        origins: new tokens by origin (trusted, accepted, replacement, bonus, target).
        drifts: TV(π, p) of each token that was metered.
        extra: anything else worth keeping, JSON values.
    """

    ids: list[int]
    wall_s: float
    arrivals_s: list[float] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    target_calls: int | None = None
    draft_steps: int | None = None
    origins: dict[str, int] = field(default_factory=dict)
    drifts: list[float] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Arm(Protocol):
    """One way to answer; see ``sprinter.bench.arms`` for those that come with the bench and for plug-ins.

    Attributes:
        name: unique in a run; what tables show.
        spec: what it was made from, so that the run can be repeated.
        engine: "sprinter", "transformers", "vllm", ...
    """

    name: str
    spec: str
    engine: str

    def start(self, pair: Pair) -> None:
        """Get ready to answer for this pair (load, compile, start a process).

        Raises:
            UserError: the arm cannot serve this pair or its software is not installed.
        """
        ...

    def lossless(self, sampling: Sampling) -> bool | None:
        """Whether its texts follow the target's law; None: not known."""
        ...

    def versions(self) -> dict[str, str]:
        """Of the software that it runs on, beyond our own."""
        ...

    def answer(self, ask: Ask) -> ArmAnswer:
        """Answer one request; the device is idle when it returns."""
        ...

    def close(self) -> None:
        """Give everything back; may be called twice."""
        ...
