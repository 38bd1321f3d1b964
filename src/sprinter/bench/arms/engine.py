"""Arms for the methods of this package, on its own engine."""

from __future__ import annotations

import copy
import time
from collections import Counter

import torch

from sprinter.bench.arm import ArmAnswer, Ask
from sprinter.decode.method import Method
from sprinter.decode.spec import parse_method
from sprinter.engine.lookahead import AUTO
from sprinter.engine.options import GenerationOptions
from sprinter.engine.pair import Pair
from sprinter.errors import SprinterError
from sprinter.laws import Sampling

__all__ = ["AutoArm", "EngineArm", "settle"]


class EngineArm:
    """A method of this package, streamed token by token.

    Times exclude the meter's closing forward passes (``Stats.closing_s``). Every text begins with a new rule state, so
    that an answer depends on its seed alone.
    """

    engine = "sprinter"

    def __init__(self, method: Method) -> None:
        self.name = self.spec = method.name
        self.method = method
        self._pair: Pair | None = None

    def fit(self, pair: Pair) -> None:
        """Fill in the thresholds that come from the pair's heads, so that ``spec`` contains them."""
        self.method = pair._runtime.settle(self.method)
        self.spec = self.method.name

    @property
    def _asked(self) -> GenerationOptions:
        """The options that name the method."""
        return GenerationOptions(method=self.method)

    def start(self, pair: Pair) -> None:
        """Prepare the pair.

        Raises:
            UserError: the pair lacks a draft or a head that the method needs.
        """
        self.fit(pair)
        quiet = copy.copy(pair)  # shares models, heads and caches
        # Only token ids are needed; detokenisation would add to the arm's time.
        quiet.tokenizer, quiet._runtime = None, pair._runtime.without_text()
        quiet.stream([0], method=self.method, max_new_tokens=1).close()  # checks the request, does no work
        self._pair = quiet

    def lossless(self, sampling: Sampling) -> bool | None:
        """Whether the method is lossless with this sampling."""
        return self.method.lossless(sampling.greedy)

    def versions(self) -> dict[str, str]:
        """Version of torch."""
        return {"torch": str(torch.__version__)}

    def answer(self, ask: Ask) -> ArmAnswer:
        """Answer with all fields known; ``extra`` holds the engine's stats and the finish reason."""
        if self._pair is None:
            raise SprinterError(f"arm {self.name} was not started")
        options = self._asked
        self._pair.clear_suffix_cache()  # the same request may have been answered before
        began = time.perf_counter()
        stream = self._pair.stream(
            ask.ids, options, max_new_tokens=ask.new_tokens, sampling=ask.sampling, seed=ask.seed,
            meter="complete", stop_token_ids=ask.stop_token_ids,
        )  # fmt: skip
        arrivals = [time.perf_counter() - began for _ in stream]
        settle(self._pair.models.target.model.device)
        wall_s = time.perf_counter() - began
        made = stream.generation
        # The last token is yielded after the closing forward passes.
        arrivals[-1] -= made.stats.closing_s
        drifts = [token.distance for token in made.tokens if token.distance is not None]
        return ArmAnswer(
            ids=[token.id for token in made.tokens],
            wall_s=wall_s - made.stats.closing_s,
            arrivals_s=arrivals,
            accept_lengths=made.accept_lengths,
            target_calls=made.stats.target_calls,
            draft_steps=made.stats.draft_steps,
            origins=dict(Counter(token.origin.value for token in made.tokens)),
            drifts=drifts,
            remote=dict(made.stats.remote),
            extra={"finish_reason": made.finish_reason, "stats": made.to_dict()["stats"]},
        )

    def close(self) -> None:
        """Release the pair."""
        self._pair = None


class AutoArm(EngineArm):
    """``auto(budget=b)`` as a user asks for it: the pair's profile, if it has one, names the method."""

    def __init__(self, budget: float | None = None) -> None:
        super().__init__(parse_method(AUTO if budget is None else f"{AUTO}(budget={budget})"))
        self._options = GenerationOptions(method=AUTO, budget=budget)

    @property
    def _asked(self) -> GenerationOptions:
        """As a user asks, so that texts unlike those of the tuning are noticed."""
        return self._options

    def fit(self, pair: Pair) -> None:
        """Find the method, so that ``spec`` is that method's."""
        self.method = pair.method_for(self._options)
        self.spec = self.method.name


def settle(device: torch.device) -> None:
    """Host synchronisation: wait until the device is idle."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
