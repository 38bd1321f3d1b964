"""``/v1/score`` in vLLM, for pairs whose target it serves (``sprinter.models.remote``).

A text is a request of one token that says from which place on its laws are wanted (``extra_args``). Its prompt is read
from there on at the latest, whatever vLLM's prefix cache holds. The laws come back in the request's output, in the
field that vLLM has for scores of prompt tokens.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable, Container
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sprinter.doors.vllm.config import START, check_version, start_of
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint, words_fingerprint
from sprinter.serve.api_errors import Refusal
from sprinter.serve.request_parsing import check_laws
from sprinter.serve.schema import ScoreRequest

__all__ = ["ScoreAnswers", "add_routes", "open_scores", "read_from_start"]


# --- the scheduler ----------------------------------------------------------------------------------------------------
def read_from_start(manager: Any) -> None:
    """Let vLLM's ``KVCacheManager`` take only cached tokens before the place from which on laws are wanted."""
    for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
        setattr(manager, name, _until_start(getattr(manager, name)))


def _until_start(cached: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(cached)
    def found(self: Any, request: Any) -> Any:
        if (start := start_of(request.sampling_params)) is not None:
            request = copy.copy(request)  # the last token of a text is never taken from the cache
            request._all_token_ids = request._all_token_ids[: start + 1]
        return cached(self, request)

    return found


# --- the worker -------------------------------------------------------------------------------------------------------
class _LawReader:
    """Laws of texts that are being read.

    Args:
        running: names of the requests that there are.
    """

    def __init__(self, running: Container[str]) -> None:
        self._running, self._rows = running, dict[str, list[Tensor]]()

    def read(
        self, logits: Any, name: str, start: int, begin: int, states: Tensor, length: int
    ) -> Tensor | None:
        """Take a pass over the places from ``begin`` on of a text of so many tokens.

        Args:
            logits: of hidden states. states: ``[places, hidden]``.

        Returns:
            Logarithms of the laws ``[length - start, V]`` when the text has been read; None before.
        """
        for gone in [one for one in self._rows if one not in self._running]:
            del self._rows[gone]
        if begin <= start:  # the text begins, or begins again after preemption
            self._rows[name] = []
        rows, end = self._rows.setdefault(name, []), begin + len(states)
        if end > start and (made := logits(states[max(start - begin, 0) :])) is not None:
            rows.append(torch.log_softmax(made.float(), -1).cpu())
        if end < length:
            return None
        laws = torch.cat(self._rows.pop(name)) if rows else None
        return laws if laws is not None and len(laws) == length - start else None


def open_scores(worker: Any) -> dict[str, Any]:
    """Let a worker of vLLM's hand out laws; returns the fingerprint and number of its parameters.

    Where vLLM repacks weights for a CPU, the layers that have lost theirs say how many they were.
    """
    runner = worker.model_runner
    opened = _open_second if worker.use_v2_model_runner else _open_first
    if not hasattr(runner, "sprinter_laws"):
        opened(runner)
    model = runner.get_model()
    packed = (one for one in model.modules() if hasattr(one, "cpu_linear") and not one.weight.numel())
    size = sum(own.numel() for own in model.parameters())
    size += sum(one.input_size_per_partition * one.output_size_per_partition for one in packed)
    return {"fingerprint": weights_fingerprint(model), "parameters": size}


def _open_first(runner: Any) -> None:
    """In the V1 model runner: laws are read beside log-probabilities of prompts."""
    laws, made = _LawReader(runner.requests), dict[str, Tensor]()
    own, sample = runner._get_prompt_logprobs_dict, runner.sample_tokens

    def read(states: Tensor, counts: dict[str, int]) -> Any:
        for name, count in counts.items():
            request = runner.requests[name]
            if (start := start_of(request.sampling_params)) is None:
                continue
            at = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
            done = laws.read(
                runner.model.compute_logits, name, start, request.num_computed_tokens,
                states[at : at + count], len(request.prompt_token_ids),
            )  # fmt: skip
            if done is not None:
                made[name] = done
        return own(states, counts)

    def sample_tokens(*args: Any) -> Any:
        made.clear()
        output = sample(*args)
        if made:
            told = getattr(output, "_model_runner_output", output)
            told.prompt_token_id_logprobs_dict = dict(made)
        return output

    runner._get_prompt_logprobs_dict, runner.sample_tokens, runner.sprinter_laws = read, sample_tokens, laws


def _open_second(runner: Any) -> None:
    """In the V2 model runner: it has an object for log-probabilities of prompts, in the last stage."""
    worker, starts = runner.prompt_logprobs_worker, dict[str, int]()
    laws = runner.sprinter_laws = _LawReader(starts)
    if worker is None:
        return
    add, remove, own = worker.add_request, worker.remove_request, worker.compute_prompt_token_id_logprobs

    def add_request(name: str, slot: int, params: Any) -> None:
        add(name, slot, params)
        if (start := start_of(params)) is not None:
            starts[name] = start

    def remove_request(name: str) -> None:
        remove(name)
        starts.pop(name, None)

    def compute(logits: Any, states: Tensor, batch: Any, lengths: Any) -> Any:
        made = own(logits, states, batch, lengths)
        for i, name in enumerate(batch.req_ids):
            if name in starts:
                at, length = batch.query_start_loc_np[i : i + 2], int(lengths[batch.idx_mapping_np[i]])
                begin = int(batch.num_computed_prefill_tokens_np[i])
                done = laws.read(logits, name, starts[name], begin, states[at[0] : at[1]], length)
                if done is not None:
                    made[name] = done
        return made

    worker.add_request, worker.remove_request = add_request, remove_request
    worker.compute_prompt_token_id_logprobs = compute


# --- the frontend -----------------------------------------------------------------------------------------------------
class ScoreAnswers:
    """What ``GET`` and ``POST /v1/score`` answer."""

    def __init__(self, engine: Any, models: list[str]) -> None:
        self._engine, self._models = engine, models
        self._about: dict[str, Any] | None = None

    async def about(self) -> dict[str, Any]:
        """What ``sprinter serve`` tells of its target. A text has one token less than vLLM's context: one is drawn."""
        if self._about is None:
            try:
                check_version()
            except UserError as error:
                raise Refusal(501, str(error)) from error
            engine, config = self._engine, self._engine.model_config
            told = await engine.collective_rpc("sprinter_open_scores")
            ends = config.try_get_generation_config().get("eos_token_id", config.hf_config.eos_token_id)
            self._about = {
                "model": self._models[0],
                "fingerprint": told[0]["fingerprint"],
                "vocabulary": words_fingerprint(engine.get_tokenizer().get_vocab()),
                "vocab_size": config.get_vocab_size(),
                "context": config.max_model_len - 1,
                "eos_ids": ends if isinstance(ends, list) else [] if ends is None else [ends],
                "parameters": sum(one["parameters"] for one in told),
                "weights": str(config.dtype).removeprefix("torch."),
            }
        return self._about

    async def laws(self, asked: ScoreRequest) -> bytes:
        """The laws of each text, one after the other.

        Raises:
            Refusal: another model, a text that is no text of it, more laws than an answer may hold.
        """
        about = await self.about()
        if asked.model not in (None, *self._models):
            raise Refusal(
                404, f"there is no model {asked.model!r} here: give {self._models[0]!r}", param="model"
            )
        check_laws(asked, about["fingerprint"], about["vocab_size"])
        for one in asked.texts:
            if not one.start < len(one.ids) <= about["context"] or max(one.ids) >= about["vocab_size"]:
                raise Refusal(
                    400,
                    f"a text has {len(one.ids)} tokens and start {one.start}: give at most {about['context']} tokens "
                    f"below {about['vocab_size']}, and a start among them",
                )
        found = await asyncio.gather(*(self._laws(one.ids, one.start) for one in asked.texts))
        return b"".join(law.to(getattr(torch, asked.dtype)).numpy().tobytes() for law in found)

    async def _laws(self, ids: list[int], start: int) -> Tensor:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={START: start},
        )  # fmt: skip
        made = None
        async for out in self._engine.generate(tokens_input(ids), params, f"score-{uuid.uuid4().hex}"):
            made = out.prompt_token_id_logprobs
        if made is None:
            raise Refusal(
                500, "vLLM took places from a cache whose laws were asked for: serve without a KV connector"
            )
        return torch.from_numpy(made)


def add_routes(app: Any, scores: Callable[[], ScoreAnswers]) -> None:
    """Add ``GET`` and ``POST /v1/score``."""
    from fastapi import Response
    from fastapi.responses import JSONResponse

    async def answered(work: Any) -> Any:
        try:
            return await work
        except Refusal as error:
            return JSONResponse(error.body(), error.status, error.headers)

    async def about() -> Any:
        return await answered(scores().about())

    async def laws(body: ScoreRequest) -> Any:
        found = await answered(scores().laws(body))
        return Response(found, media_type="application/octet-stream") if isinstance(found, bytes) else found

    app.get("/v1/score", response_model=None)(about)
    app.post("/v1/score", response_model=None)(laws)
