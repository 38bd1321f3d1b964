"""What a fleet is asked for: load, method, server and machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sprinter.errors import UserError
from sprinter.parameters import LISTED, Natural, Positive, RealNumber, checked, stated

__all__ = ["MOST", "FleetSettings"]

MOST = 4096
"""Replicas of a fleet, at most."""


@checked
class FleetSettings:
    """Load, method and machines of a fleet.

    Raises:
        UserError: a value out of range.
    """

    streams: Annotated[tuple[int, ...], LISTED] = stated(
        (1, 4, 16, 64), "Clients that ask again as soon as an answer has ended."
    )
    rate: RealNumber | None = stated(None, "Texts a second, at random times. None: streams.", gt=0)
    replicas: Natural = stated(0, "Replicas. 0: one, or with a rate as many as the latencies need.", le=MOST)
    rows: Positive = stated(16, "Texts that a replica decodes at the same time, if its memory holds them.")
    prompt_tokens: RealNumber = stated(256.0, "Mean length of prompts.", ge=1)
    answer_tokens: RealNumber = stated(128.0, "Mean length of answers.", ge=1)
    spread: RealNumber = stated(0.0, "Standard deviation of lengths over their mean.", ge=0, le=4)
    lengths: Path | None = stated(
        None, "File of lengths: those of a prompt and its answer per line. None: drawn."
    )
    texts: Positive = stated(400, "Simulated texts per replica.")
    seed: Natural = stated(0, "The same seed gives the same result.")
    gamma: Positive = stated(4, "Draft tokens of an exact round.")
    accept: RealNumber = stated(
        0.7, "Chance that the target keeps a draft token of an exact round.", ge=0, le=1
    )
    trust: RealNumber = stated(0.8, "Chance that a draft token is trusted.", ge=0, le=1)
    tail: Natural = stated(0, "Tokens drafted after the first one that is not trusted.")
    keep: RealNumber = stated(0.5, "Chance that the target keeps a token that is not trusted.", ge=0, le=1)
    cap: Positive = stated(20, "Longest run of trusted tokens, with the one that is checked.")
    round_trip_ms: RealNumber = stated(0.0, "Round trip to a remote target, in milliseconds.", ge=0)
    slowdown: RealNumber = stated(
        1.0, "Engine's time while clients and server run, divided by its time alone.", gt=0
    )
    step_ms: RealNumber = stated(0.0, "Milliseconds of the server for a step of the engine.", ge=0)
    event_ms: RealNumber = stated(0.0, "Milliseconds of the server for an event of a stream.", ge=0)
    text_ms: RealNumber = stated(0.0, "Milliseconds of the server for a request.", ge=0)
    first_ms: RealNumber = stated(
        1000.0, "With a rate: limit of the time to the first token, for 95 %.", gt=0
    )
    between_ms: RealNumber = stated(200.0, "With a rate: limit of the time between events, for 95 %.", gt=0)
    step_tokens: Natural = stated(0, "Tokens of prompts in a step, of all rows. 0: 64; on GPUs 2048.")
    parameters: RealNumber | None = stated(
        None, "Billions of weights of a target on GPUs. None: costs are measured here.", gt=0
    )
    draft_parameters: RealNumber = stated(1.0, "Billions of weights of its draft, whole on each GPU.", gt=0)
    weight_bits: RealNumber = stated(16.0, "Bits of a weight.", gt=0)
    kv_kib: RealNumber = stated(128.0, "KiB of a token's keys and values.", ge=0)
    gpus: Positive = stated(1, "GPUs of a replica (tensor parallelism).")
    bandwidth: RealNumber = stated(3.35, "TB/s of a GPU's memory.", gt=0)
    tflops: RealNumber = stated(989.0, "TFLOPS of a GPU.", gt=0)
    memory_gb: RealNumber = stated(80.0, "GB of a GPU's memory.", gt=0)
    efficiency: RealNumber = stated(0.7, "Share of bandwidth and TFLOPS that is reached.", gt=0, le=1)
    pass_ms: RealNumber = stated(0.0, "Further milliseconds of a pass: launches, links.", ge=0)

    def __post_init__(self) -> None:
        if not self.streams or min(self.streams) < 1:
            raise UserError(f"streams={self.streams} is out of range: give whole numbers >= 1")
