"""Our worker for vLLM's V1 model runner: its samplers ask our rules, and its proposer our draft model.

vLLM verifies a draft in one target pass and hands the logits to its rejection sampler. Ours makes p as vLLM does
(penalties, bad words, temperature, top-k, top-p) and lets each request's loop judge. What vLLM does not verify of a
draft (a step's token budget, preemption, the end of the context) the loop forgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sprinter.doors.drafting import DraftModel
from sprinter.doors.vllm.config import adjustments_of, check_version, sampling_of
from sprinter.doors.vllm.requests import Reporting, Requests, Served
from sprinter.errors import UserError
from sprinter.laws import one_hot, raw_law

check_version()

from vllm.distributed.parallel_state import get_pp_group  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.outputs import SamplerOutput  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessors  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p  # noqa: E402
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

__all__ = ["DraftProposer", "Worker"]


class Door(Requests):
    """Our decoding of a V1 model runner's requests."""

    def __init__(self, runner: Any, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.runner = runner
        self.model: DraftModel | None = None
        self._most = vllm_config.scheduler_config.max_num_seqs

    def load(self) -> None:
        """Load the draft model; without one, what copies from the text still drafts."""
        config, own = self.config, self._model_config
        self.model = DraftModel(
            config.draft, vocab=own.get_vocab_size(), rows=self._most, context=self.runner.max_model_len,
            tokenizer=own.tokenizer, gate=config.gate, device=str(self.runner.device),
        )  # fmt: skip

    # --- what the samplers ask ---
    def judge(self, laws: Tensor, logits: Tensor, counts: Sequence[int]) -> Tensor:
        """The tokens of each request of the batch, ``[batch, longest]`` int32, after which placeholders stand.

        Args:
            laws: p ``[n, V]``, of each request in turn one row more than ``counts``, the number of its draft tokens.
            logits: the target's own, same shape.
        """
        batch, texts, at = self.runner.input_batch, [], 0
        self.leave()
        passed_over = self.runner.discard_request_mask.np  # prefill goes on: nothing is sampled
        for i, name in enumerate(batch.req_ids):
            end = at + counts[i] + 1
            if passed_over[i]:
                texts.append([0])
            else:
                hosted = self._serve(name).hosted
                raw = raw_law(logits[at:end]) if hosted.method.accept.needs_raw else None
                texts.append(hosted.score(laws[at:end], raw))
            at = end
        made = torch.full((len(texts), max(counts) + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
        for row, text in zip(made, texts, strict=True):
            row[: len(text)] = torch.tensor(text, dtype=torch.int32)
        return made.to(laws.device)

    def propose(self, sampled: Sequence[Sequence[int]]) -> list[list[int]]:
        """The drafts of the batch's requests; ``sampled``: the tokens of this step, none where prefill goes on."""
        names = self.runner.input_batch.req_ids
        going = {
            name: self.served[name]
            for name, own in zip(names, sampled, strict=True)
            if own and name in self.served
        }
        asking = [(name, one.drafted) for name, one in going.items() if one.drafted is not None]
        assert self.model is not None
        self.model.draft(asking)
        return [going[name].hosted.draft if name in going else [] for name in names]

    # --- requests ---
    def _serve(self, name: str) -> Served:
        one, state = self.served.get(name), self.runner.requests[name]
        if (
            one is not None and one.hosted.over and not state.output_token_ids
        ):  # a session goes on with more input
            self._drop(name)
            one = None
        return one or self._begin(name, state)

    def _begin(self, name: str, state: Any) -> Served:
        params, prompt, model = state.sampling_params, state.prompt_token_ids, self.model
        assert model is not None
        # Where vLLM masks p by what only it knows, a draft would be of another law: nothing is drafted.
        masked = params.structured_outputs is not None or params.allowed_token_ids or prompt is None
        text = [0] * state.num_prompt_tokens if prompt is None else prompt
        forced = params.thinking_token_budget is not None
        one = self.begin(name, params, text, model.taus, bool(masked), forced)
        one.state = state
        if one.hosted.method.drafter.proposes:
            one.drafted = model.request(one.hosted, sampling_of(params), adjustments_of(params))
        return one

    def leave(self) -> None:
        """End the requests that vLLM has dropped."""
        held = self.runner.requests
        for name in [name for name, one in self.served.items() if held.get(name) is not one.state]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        assert self.model is not None
        self.model.end(name)
        self.end(name)


class _FirstSampler(Sampler):
    """vLLM's sampler, for steps without drafts."""

    door: Door
    judging: _JudgingSampler

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> SamplerOutput:
        """As in vLLM; runs that only measure (their metadata is not the batch's) are vLLM's own."""
        if args or kwargs or sampling_metadata is not self.door.runner.input_batch.sampling_metadata:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        n = len(logits)
        none, every = torch.empty(0, dtype=torch.int64), torch.arange(n)
        ends = torch.arange(1, n + 1, dtype=torch.int32)
        metadata = SpecDecodeMetadata(
            none.int(), [0] * n, torch.zeros(n, dtype=torch.int32), ends, none, every, every
        )
        return self.judging(metadata, None, logits, sampling_metadata)


class _JudgingSampler(RejectionSampler):
    """vLLM's rejection sampler, with our rules in place of its test."""

    door: Door

    def forward(
        self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> SamplerOutput:
        """As in vLLM, but for ``draft_probs``: the laws of drafts are ours."""
        if sampling_metadata is not self.door.runner.input_batch.sampling_metadata:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        drafted, bonus = metadata.target_logits_indices, metadata.bonus_logits_indices
        counts, adjusted = metadata.num_draft_tokens, logits.to(torch.float32, copy=True)
        others = replace(sampling_metadata, logitsprocs=LogitsProcessors())
        adjusted[bonus] = self.sampler.apply_logits_processors(adjusted[bonus], others, True)
        if len(drafted):
            adjusted[drafted] = self.apply_logits_processors(adjusted[drafted], others, metadata)
        # min_tokens, at each position: vLLM takes the last one's for the first one's
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            adjusted = processor.apply_with_spec_decode(adjusted, [n + 1 for n in counts])
        laws, heated = _laws(adjusted, sampling_metadata, counts)
        tokens, logprobs = self.door.judge(laws, logits, counts), None
        if sampling_metadata.max_num_logprobs is not None:
            shown = heated if self.is_processed_logprobs_mode else logits.float()
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs, metadata, logits, shown[drafted], shown[bonus], tokens
            )
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def _laws(logits: Tensor, sampling: Any, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """p ``[n, V]`` of adjusted logits, and the logits after temperature and truncation: as vLLM samples."""
    if sampling.all_greedy:
        return one_hot(logits), logits
    each = torch.tensor([n + 1 for n in counts], device=logits.device)

    def spread(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat_interleave(each)

    heat = sampling.temperature.repeat_interleave(each)
    greedy = (heat < 1e-5).unsqueeze(-1)
    heated = logits / torch.where(greedy, 1.0, heat.unsqueeze(-1))
    heated = apply_top_k_top_p(heated, spread(sampling.top_k), spread(sampling.top_p))
    laws = torch.softmax(heated, -1)
    return (torch.where(greedy, one_hot(logits), laws) if bool(greedy.any()) else laws), heated


class DraftProposer:
    """vLLM's ``custom_class`` proposer: our draft model."""

    def __init__(self, vllm_config: Any) -> None:
        self.door: Door | None = None

    def load_model(self, target: Any) -> None:
        """Load the draft model."""
        if self.door is None:
            raise UserError(
                'the proposer goes with our worker: give worker_cls="sprinter.doors.vllm.worker.Worker"'
            )
        self.door.load()

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The drafts of the batch's requests."""
        assert self.door is not None
        return self.door.propose(sampled_token_ids)


class Worker(Reporting, _Worker):
    """vLLM's worker of this platform, whose model runner judges by our rules."""

    door: Door | None

    def init_device(self) -> None:
        """Make the model runner, and put our samplers in place of its own."""
        super().init_device()
        runner, speculative = self.model_runner, self.vllm_config.speculative_config
        if self.use_v2_model_runner:
            raise UserError("the V2 model runner has no door: set VLLM_USE_V2_MODEL_RUNNER=0 (docs/vllm.md)")
        if speculative is None or not str(speculative.model).endswith(f".{DraftProposer.__name__}"):
            raise UserError(
                "the worker goes with our proposer: give LLM(**sprinter.doors.vllm.engine_args(...))"
            )
        if not get_pp_group().is_last_rank:
            return  # the last stage drafts and samples
        drafter = runner.drafter
        door = drafter.door = self.door = Door(runner, self.vllm_config)
        own = runner.sampler
        judging = _JudgingSampler(own, speculative, self.device)
        first = _FirstSampler(own.logprobs_mode, own.use_fp64_gumbel)
        judging.door = first.door = door
        first.judging = judging
        runner.sampler, runner.rejection_sampler = first, judging
        # Else, near the end of one text's context, every request of the batch would draft nothing but zeros.
        runner.effective_drafter_max_model_len += self.door.longest + 1
