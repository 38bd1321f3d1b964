"""The requests that a model runner of vLLM's serves: our decoding of each, and what is told of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sprinter.doors.drafting import DraftedRequest
from sprinter.doors.rules import HostedRequest, method_of
from sprinter.doors.vllm.config import DoorConfig, endings_of, method_for, start_of
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

__all__ = ["Reporting", "Requests", "Served", "is_named"]

_KEPT, _EACH = 1 << 20, 256
"""New tokens of ended requests whose reports are kept, and how many a request counts as besides its own."""
_COUNTS = ("new_tokens", "target_calls", "draft_steps", "trusted", "accepted")
_log = logging.getLogger("sprinter")


@dataclass(slots=True)
class Served:
    """A request of vLLM's.

    Attributes:
        hosted: our decoding of it. seed: of its random numbers. error: what is wrong with it, or None.
        told: whether it is reported: not if it asks for laws alone.
        state: in the V1 model runner. drafted: of the requests that we draft for.
    """

    hosted: HostedRequest
    seed: int
    error: str | None = None
    told: bool = True
    state: Any = None
    drafted: DraftedRequest | None = None

    def report(self) -> dict[str, Any]:
        """What is told of it."""
        error = self.error or (None if self.drafted is None else self.drafted.error)
        return {**self.hosted.report(), **({} if error is None else {"error": error})}


class Requests:
    """A model runner's requests, by vLLM's name."""

    def __init__(self, vllm_config: Any) -> None:
        config = DoorConfig.of(vllm_config)
        if config is None:
            raise UserError(
                "additional_config names no sprinter: give LLM(**sprinter.doors.vllm.engine_args(...))"
            )
        self.config = config
        self.longest: int = vllm_config.speculative_config.num_speculative_tokens
        self.served: dict[str, Served] = {}
        self._model_config = vllm_config.model_config
        self._ended: dict[str, dict[str, Any]] = {}
        self._totals = {**dict.fromkeys(_COUNTS, 0), "requests": 0, "drift_sum": 0.0, "metered_tokens": 0}
        self._begun = self._kept = 0

    def begin(
        self,
        name: str,
        params: Any,
        text: Sequence[int],
        taus: Mapping[str, float],
        plainly: bool = False,
        exactly: bool = False,
    ) -> Served:
        """A new request.

        Args:
            text: its prompt. taus: of the heads that there are.
            plainly: whether it can have no draft. exactly: whether it can have none that a lossy rule judges.
        """
        error = None
        try:
            method = method_for(params, self.config).settle(taus)
        except UserError as wrong:  # the frontend refuses it; here the engine would end with it
            error, method = str(wrong), method_of("autoregressive", "")
            _log.warning("%s; the request is decoded plainly", wrong)
        told = start_of(params) is None
        if plainly or not told or (exactly and not method.lossless()):
            method = method_of("autoregressive", "")
        given, base = params.seed, self._model_config.seed or 0
        draws = AddressedDraws(*((base, 1 + self._begun) if given is None else (given, 0)))
        self._begun += 1
        most = max(1, min(params.max_tokens, self._model_config.max_model_len - len(text)))
        ends = endings_of(params)
        hosted = HostedRequest(text, method, most, ends, draws, self.longest, params.min_tokens)
        seed = base + self._begun if given is None else given
        self.served[name] = Served(hosted, seed, error, told)
        return self.served[name]

    def end(self, name: str) -> None:
        """vLLM has dropped a request."""
        one = self.served.pop(name)
        if not one.told:
            return
        self._forget(name)
        report = self._ended[name] = one.report()
        self._totals["requests"] += 1
        for key in _COUNTS:
            self._totals[key] += report[key]
        self._totals["drift_sum"] += report["drift_sum"] or 0.0
        self._totals["metered_tokens"] += round(report["drift_coverage"] * report["new_tokens"])
        self._kept += _EACH + report["new_tokens"]
        while self._kept > _KEPT:
            self._forget(next(iter(self._ended)))

    def _forget(self, name: str) -> None:
        if (report := self._ended.pop(name, None)) is not None:
            self._kept -= _EACH + report["new_tokens"]

    def leave(self) -> None:
        """End the requests that vLLM has dropped and not told of."""

    def reports(self, request: str | None = None) -> dict[str, dict[str, Any]]:
        """Reports of requests, running and ended, by vLLM's name; ``request``: of this one, as it was named outside."""
        self.leave()
        found = {**self._ended, **{name: one.report() for name, one in self.served.items() if one.told}}
        return {name: of for name, of in found.items() if request is None or is_named(name, request)}

    def totals(self) -> dict[str, float]:
        """Sums over the requests that have ended."""
        self.leave()
        return dict(self._totals)


def is_named(name: str, request: str) -> bool:
    """Whether vLLM's name is of a request that was named ``request`` outside.

    vLLM puts the number of the text before it (``n``), and behind it the number of the prompt and random digits.
    """
    return re.fullmatch(rf"(\d+_)?{re.escape(request)}(-\d+)?(-[0-9a-f]{{8}})?", name) is not None


class Reporting:
    """What ``collective_rpc`` asks a worker."""

    door: Requests | None = None

    def sprinter_reports(self, request: str | None = None) -> dict[str, dict[str, Any]]:
        """See ``Requests.reports``."""
        return {} if self.door is None else self.door.reports(request)

    def sprinter_totals(self) -> dict[str, float]:
        """See ``Requests.totals``."""
        return {} if self.door is None else self.door.totals()
