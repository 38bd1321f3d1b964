"""What vLLM's frontend loads: the check of requests at admission, and routes for reports and metrics."""

from __future__ import annotations

import logging
from typing import Any

from sprinter.doors.vllm.config import READ, DoorConfig, check_version, method_for
from sprinter.doors.vllm.scoring import ScoreAnswers, add_routes, open_scores, read_from_start
from sprinter.errors import UserError

__all__ = ["Endpoints", "register"]

_log = logging.getLogger("sprinter")


def register() -> None:
    """Entry point of ``vllm.general_plugins``: a request whose method does not run is refused when it comes.

    vLLM has no hook for this with speculation; the worker could only end the whole engine. In a vLLM that is not known
    nothing is changed, and one line says that what requests say of sprinter is not read.
    """
    try:
        check_version(READ)
    except UserError as error:
        _log.warning("%s; what requests say of sprinter is not read", error)
        return
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.worker_base import WorkerBase

    checked = InputProcessor._validate_params
    if getattr(checked, "by_sprinter", False):
        return

    def validate(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        found = checked(self, params, *args, **kwargs)
        config = DoorConfig.of(self.vllm_config)
        if isinstance(params, SamplingParams):
            try:
                if config is not None and _has_worker(self.vllm_config):
                    method_for(params, config)
                elif "sprinter" in (params.extra_args or {}):
                    raise UserError(
                        "the server runs without sprinter's worker: leave sprinter out (docs/vllm.md)"
                    )
            except UserError as error:
                raise VLLMValidationError(str(error), parameter="sprinter") from error
        return found

    validate.by_sprinter = True  # type: ignore[attr-defined]
    InputProcessor._validate_params = validate
    WorkerBase.sprinter_open_scores = open_scores
    read_from_start(KVCacheManager)


def _has_worker(vllm_config: Any) -> bool:
    """Whether vLLM runs with a worker of ours: without one, no method of ours runs."""
    return str(vllm_config.parallel_config.worker_cls).startswith(f"{__package__}.")


class Endpoints:
    """Entry point of ``vllm.endpoint_plugins``: ``/sprinter/requests?id=``, ``/sprinter/metrics`` and ``/v1/score``."""

    name = "sprinter"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._scores: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the routes."""
        from fastapi import Response

        async def requests(id: str | None = None) -> Any:
            return (await self._engine.collective_rpc("sprinter_reports", args=(id,)))[-1]

        async def metrics() -> Any:
            totals = (await self._engine.collective_rpc("sprinter_totals"))[-1]
            lines = [
                line for name, value in totals.items()
                for line in (f"# TYPE sprinter:{name}_total counter", f"sprinter:{name}_total {value}")
            ]  # fmt: skip
            return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

        app.get("/sprinter/requests")(requests)
        app.get("/sprinter/metrics")(metrics)
        add_routes(app, lambda: self._scores)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep the engine, which the routes ask."""
        self._engine = engine_client
        self._scores = ScoreAnswers(engine_client, args.served_model_name or [args.model])
