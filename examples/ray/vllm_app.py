"""Our methods in Ray Serve LLM and Ray Data, which run vLLM: the arguments of its engine, and nothing else.

    serve run examples.ray.vllm_app:app target=org/large draft=org/small method=svip replicas=2

A request names its method as with `vllm serve`: ``"vllm_xargs": {"sprinter": "svip"}``. Each node has this package
installed without dependencies, beside its vLLM (docs/vllm.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.llm import LLMConfig, build_openai_app

from sprinter.doors.vllm import engine_args

ENV = {"env_vars": {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_PLUGINS": "sprinter"}}
"""Of the processes that run vLLM: the door is in its V1 model runner."""


def config(
    target: str,
    draft: str,
    gate: str | None = None,
    method: str = "svip",
    name: str = "model",
    replicas: int = 2,
    engine: Mapping[str, Any] | None = None,
    **given: Any,
) -> LLMConfig:
    """A deployment of Ray Serve LLM; ``engine``: further arguments of vLLM's engine, ``given``: of ``LLMConfig``."""
    return LLMConfig(
        model_loading_config={"model_id": name, "model_source": target},
        engine_kwargs={**engine_args(draft, gate=gate, method=method), **(engine or {})},
        deployment_config={"num_replicas": replicas, **given.pop("deployment_config", {})},
        runtime_env=ENV,
        **given,
    )


def app(args: dict[str, str]) -> Any:
    """The application of ``serve run``; ``args`` are target, draft, gate, method, name and replicas."""
    given = {name: args[name] for name in ("target", "draft", "gate", "method", "name") if name in args}
    return build_openai_app({"llm_configs": [config(**given, replicas=int(args.get("replicas", 2)))]})


def batches(
    target: str,
    draft: str,
    gate: str | None = None,
    method: str = "svip",
    engine: Mapping[str, Any] | None = None,
    **given: Any,
) -> Any:
    """A processor of Ray Data: rows with ``prompt``, ``max_tokens`` and ``method`` get a ``text``.

    ``engine``: further arguments of vLLM's engine, ``given``: of ``vLLMEngineProcessorConfig``.
    """
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    settings = vLLMEngineProcessorConfig(
        model_source=target,
        engine_kwargs={**engine_args(draft, gate=gate, method=method), **(engine or {})},
        runtime_env=ENV,
        chat_template_stage=False, tokenize_stage=False, detokenize_stage=False,
        **given,
    )  # fmt: skip

    def asked(row: dict[str, Any]) -> dict[str, Any]:
        extra = {"extra_args": {"sprinter": row["method"]}}
        return {**row, "sampling_params": {"temperature": 0.0, "max_tokens": row["max_tokens"], **extra}}

    return build_processor(
        settings,
        preprocess=asked,
        postprocess=lambda row: {name: row[of] for name, of in _KEPT.items()},
    )


_KEPT = {"prompt": "prompt", "method": "method", "text": "generated_text"}
