"""The vLLM door: our methods in vLLM's V1 model runner, see docs/vllm.md.

    LLM(model="org/target", **sprinter.doors.vllm.engine_args("org/draft", method="svip"))

A request may name its own: ``SamplingParams(extra_args={"sprinter": {"method": "sprinter", "budget": 0.05}})``, over
HTTP ``"vllm_xargs": {"sprinter": "svip"}``, or the object as JSON.
"""

from __future__ import annotations

from typing import Any

from sprinter.decode.checks import at_least
from sprinter.doors.rules import method_of
from sprinter.doors.vllm.plugin import Endpoints, register

__all__ = ["Endpoints", "engine_args", "register"]

_WORKER = f"{__name__}.worker"  # needs vLLM


def engine_args(
    draft: str | None = None, *, gate: str | None = None, method: str = "speculative", longest: int = 20
) -> dict[str, Any]:
    """Arguments for ``vllm.LLM``, ``AsyncEngineArgs`` and ``LLMConfig(engine_kwargs=...)`` that open the door.

    Args:
        draft: directory, hub id or GGUF file of the draft model; None: methods that need none, such as lookup.
        gate: directory or hub id of a gate, for methods that read one.
        method: of requests that name none.
        longest: maximum number of tokens in a draft, which vLLM verifies in one pass.

    Raises:
        UserError: the method does not run in another engine.
    """
    at_least("longest", longest, 1)
    method_of(method, method)
    own = {"draft": draft, "gate": gate, "method": method}
    return {
        "worker_cls": f"{_WORKER}.Worker",
        "speculative_config": {
            "method": "custom_class", "model": f"{_WORKER}.DraftProposer", "num_speculative_tokens": longest,
        },
        "additional_config": {"sprinter": {key: value for key, value in own.items() if value is not None}},
    }  # fmt: skip
