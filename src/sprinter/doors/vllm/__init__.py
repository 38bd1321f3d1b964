"""The vLLM door: our methods in vLLM's model runners, see docs/vllm.md.

    LLM(model="org/target", **sprinter.doors.vllm.engine_args("org/draft", method="svip"))

A request may name its own: ``SamplingParams(extra_args={"sprinter": {"method": "sprinter", "budget": 0.05}})``, over
HTTP ``"vllm_xargs": {"sprinter": "svip"}``, or the object as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sprinter.decode.checks import at_least
from sprinter.decode.spec import parse_method
from sprinter.doors.rules import method_of
from sprinter.doors.vllm.config import check_speculated
from sprinter.doors.vllm.plugin import Endpoints, register
from sprinter.errors import UserError

__all__ = ["Endpoints", "engine_args", "register"]

_WORKER = f"{__name__}.worker"  # needs vLLM
_SPECULATED = f"{__name__}.v2"  # needs vLLM


def engine_args(
    draft: str | None = None,
    *,
    gate: str | None = None,
    method: str = "speculative",
    longest: int = 20,
    runner: int = 1,
    speculator: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments for ``vllm.LLM``, ``AsyncEngineArgs`` and ``LLMConfig(engine_kwargs=...)`` that open the door.

    Args:
        draft: directory, hub id or GGUF file of the draft model; None: methods that need none, such as lookup.
        gate: directory or hub id of a gate, for methods that read one.
        method: of requests that name none.
        longest: maximum number of tokens in a draft, which vLLM verifies in one pass.
        runner: vLLM's model runner, 1 or 2 (``VLLM_USE_V2_MODEL_RUNNER``). In 2 vLLM's own speculator drafts,
            ``longest`` tokens for each request.
        speculator: with ``runner=2``, vLLM's ``speculative_config`` in place of its "draft_model".

    Raises:
        UserError: the method does not run in another engine, or an argument is of the other runner.
    """
    at_least("longest", longest, 1)
    method_of(method, method)
    if runner not in (1, 2) or (speculator is not None and runner == 1) or (gate is not None and runner == 2):
        raise UserError(f"runner={runner}: give 1, with draft= and gate=, or 2, with draft= or speculator=")
    if runner == 2:
        check_speculated(parse_method(method))
        model = {"method": "draft_model", "model": draft, "num_speculative_tokens": longest}
        return {
            "worker_cls": f"{_SPECULATED}.SpeculatedWorker",
            "speculative_config": {**(speculator or model), "draft_sample_method": "probabilistic"},
            "additional_config": {"sprinter": {"method": method, "runner": 2}},
            "async_scheduling": False,
        }
    own = {"draft": draft, "gate": gate, "method": method}
    return {
        "worker_cls": f"{_WORKER}.Worker",
        "speculative_config": {
            "method": "custom_class", "model": f"{_WORKER}.DraftProposer", "num_speculative_tokens": longest,
        },
        "additional_config": {"sprinter": {key: value for key, value in own.items() if value is not None}},
    }  # fmt: skip
