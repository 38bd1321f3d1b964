"""Our worker for vLLM's V2 model runner: vLLM's own speculators draft, and our rules judge.

A speculator drafts a fixed number of tokens on the device. Before vLLM schedules them, each request's loop takes what
its stop rule leaves of them, so the target reads no more; the draft steps for the rest are spent. The loop then judges
in place of vLLM's rejection sampler, which hands it p, made by vLLM's own code, and the speculator's logits.

The samplers are what ``ModelState.custom_sampler`` would return. It belongs to a model's class; a worker reaches every
model, and sees which requests end and which are only set aside.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sprinter.decode.draft import Draft
from sprinter.decode.signals import SIGNALS, read_signals
from sprinter.doors.vllm.config import READ, check_version
from sprinter.doors.vllm.requests import Reporting, Requests, Served
from sprinter.errors import UserError
from sprinter.laws import one_hot, raw_law

RELEASE = check_version(READ)

from vllm.distributed.parallel_state import get_pp_group  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.worker.gpu.sample.sampler import Sampler  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler  # noqa: E402

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

__all__ = ["SpeculatedWorker"]

_HEATED = RELEASE == "0.27"
"""Whether the speculator's logits are kept after temperature; later releases keep them before it."""
_SEEDS = 0x9E3779B97F4A7C15  # odd: a round's seed is another one for each round


def _names(function: Any) -> list[str]:
    return [*inspect.signature(function).parameters][2:]  # behind self and logits


_SAMPLE, _VERIFY = _names(Sampler.sample), _names(RejectionSampler._verify)
_APPLY = [name for name in _names(Sampler.apply_sampling_params) if name != "skip_top_k_top_p"]


class SpeculatedDoor(Requests):
    """Our decoding of a V2 model runner's requests."""

    def __init__(self, runner: Any, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.states, self.speculator = runner.req_states, runner.speculator
        self.sampling = runner.sampler.sampling_states
        self._scored: set[str] = set()
        self._width = 0  # of the target's laws

    def follow(self, scheduled: Any) -> None:
        """Take up the requests that a step begins, and end those that are over; those set aside wait."""
        for name in scheduled.finished_req_ids & self.served.keys():
            self.end(name)
        for new in scheduled.scheduled_new_reqs:
            params, known = new.sampling_params, self.served.get(new.req_id)
            if params is None or (known is not None and not known.hosted.over):
                continue
            if known is not None:  # a session goes on with more input
                self.end(new.req_id)
            # The draft does not know what vLLM forbids or forces: a lossy rule could take another token.
            masks = (params.structured_outputs, params.allowed_token_ids, params.bad_words, params.min_tokens)
            forced = getattr(params, "thinking_token_budget", None) is not None
            masked = any((*masks, params.logit_bias, forced))
            text = new.prompt_token_ids
            length = len(text) if text is not None else len(new.prefill_token_ids)
            self.begin(new.req_id, params, text or [0] * length, {}, text is None, masked)

    def of(self, slots: Any) -> list[Served] | None:
        """The requests in these slots; None: it is a run that only measures."""
        names = [self.states.index_to_req_id.get(int(slot)) for slot in slots]
        if any(name not in self.served for name in names):
            return None
        self._scored.update(name for name in names if name is not None)
        return [self.served[name] for name in names if name is not None]

    def judge(
        self,
        requests: Sequence[Served],
        slots: Any,
        laws: Tensor,
        logits: Tensor,
        rows: Any,
        places: Tensor,
        drafts: Tensor | None = None,
    ) -> list[list[int]]:
        """The tokens of each request, at least one.

        Args:
            laws: p ``[n, V]``. logits: the target's own, same shape. rows: where each request's begin, and the end.
            places: of the token before each row, in its text. drafts: the draft tokens; the first of each request's
                rows is the text's last token, -1 is none.
        """
        self._width, made = laws.shape[-1], []
        last = places[torch.as_tensor(rows[1:], device=places.device) - 1].tolist()
        tokens = None if drafts is None else drafts.tolist()
        for i, one in enumerate(requests):
            start, end, hosted = rows[i], rows[i + 1], one.hosted
            if last[i] + 1 < self.states.prefill_len.np[slots[i]]:  # prefill goes on: nothing is sampled
                made.append([0])
                self._scored.discard(self.states.index_to_req_id[int(slots[i])])
                continue
            own = [] if tokens is None else tokens[start + 1 : end]
            n = next((j for j, token in enumerate(own) if token < 0), len(own))
            assert hosted.draft[:n] == own[:n], "vLLM verifies another draft"
            raw = raw_law(logits[start : start + n + 1]) if hosted.method.accept.needs_raw else None
            made.append(hosted.score(laws[start : start + n + 1], raw))
            # Rules that look at tokens behind one that they refuse must not see the same noise twice.
            seed = one.seed + hosted.sequence.round * _SEEDS & (1 << 63) - 1
            self.sampling.seeds.np[slots[i]] = seed
        self.sampling.seeds.copy_to_uva()
        return made

    def keep(self, names: Sequence[str]) -> list[list[int]]:
        """Of the speculator's drafts for these requests, those that their loops keep."""
        going = [name for name in names if name in self._scored]
        self._scored.clear()
        slots = [self.states.req_id_to_index[name] for name in going]
        drafts = dict(zip(going, self.states.draft_tokens[slots].tolist(), strict=True))
        for name, slot in zip(going, slots, strict=True):
            own = drafts[name]
            n = next((i for i, token in enumerate(own) if token < 0), len(own))
            self._take(self.served[name], slot, own[:n])
        return [self.served[name].hosted.draft if name in drafts else [] for name in names]

    def _take(self, one: Served, slot: int, tokens: list[int]) -> None:
        hosted, stats = one.hosted, one.hosted.record.stats
        if hosted.wants is None:
            return
        logits = self.speculator.draft_logits[slot, : len(tokens)].float()
        heat, at = float(self.sampling.temperature.np[slot]), 0
        stats.draft_steps += len(tokens)  # less than longest where vLLM drafts less for large batches
        laws = one_hot(logits) if heat == 0 else torch.softmax(logits if _HEATED else logits / heat, -1)
        raws = raw_law(logits * heat if _HEATED and heat else logits)
        laws, raws = (pad(each, (0, self._width - each.shape[-1])) for each in (laws, raws))
        read = torch.tensor(tokens, device=laws.device)
        names = hosted.method.needs & SIGNALS.keys()
        signals = {
            name: own.to("cpu", torch.float64) for name, own in read_signals(names, laws, raws, read).items()
        }
        while (ask := hosted.wants) is not None:
            end = min(len(tokens), at + ask.at_most)
            raw = raws[at:end] if hosted.method.accept.needs_raw else None
            own = {name: values[at:end] for name, values in signals.items()}
            hosted.answer(Draft(tuple(tokens[at:end]), laws[at:end], own, raw))
            at = end


class _RuledSampler(Sampler):
    """vLLM's sampler, for steps without drafts."""

    door: SpeculatedDoor

    def sample(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As in vLLM; runs that only measure are vLLM's own."""
        given = dict(zip(_SAMPLE, args, strict=False)) | kwargs
        slots = given["idx_mapping_np"]
        requests = self.door.of(slots)
        if requests is None:
            return super().sample(logits, *args, **kwargs)  # type: ignore[no-any-return]
        heated = self.apply_sampling_params(logits, *(given[name] for name in _APPLY))
        laws = _laws(heated, self.sampling_states, slots, np.ones(len(slots), dtype=int))
        made = self.door.judge(requests, slots, laws, logits, range(len(slots) + 1), given["pos"])
        return torch.tensor([text[0] for text in made], device=logits.device), heated


class _RuledVerifier(RejectionSampler):
    """vLLM's rejection sampler, with our rules in place of its test."""

    door: SpeculatedDoor

    def _verify(self, logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As in vLLM."""
        given = dict(zip(_VERIFY, args, strict=False))
        slots, rows = given["idx_mapping_np"], given["cu_num_logits"].tolist()
        requests = self.door.of(slots)
        if requests is None:
            return super()._verify(logits, *args)  # type: ignore[no-any-return]
        given["input_ids"] = given["draft_sampled"]
        heated = self.sampler.apply_sampling_params(logits, *(given[name] for name in _APPLY))
        laws = _laws(heated, self.sampler.sampling_states, slots, np.diff(rows))
        drafts = given.get("verify_draft_sampled", given["draft_sampled"])
        made = self.door.judge(requests, slots, laws, logits, rows, given["pos"], drafts)
        texts = torch.zeros(len(made), self.num_speculative_steps + 1, dtype=torch.int64)
        for row, text in zip(texts, made, strict=True):
            row[: len(text)] = torch.tensor(text)
        counts = torch.tensor([len(text) for text in made], dtype=torch.int32)
        return heated, texts.to(logits.device), counts.to(logits.device)


def _laws(logits: Tensor, sampling: Any, slots: Any, counts: Any) -> Tensor:
    """p ``[n, V]`` of logits after temperature and truncation, as vLLM samples; ``counts``: rows of each request."""
    greedy = torch.from_numpy(np.repeat(sampling.temperature.np[slots] == 0, counts)).to(logits.device)
    laws = torch.softmax(logits.float(), -1)
    return torch.where(greedy.unsqueeze(-1), one_hot(logits.float()), laws) if bool(greedy.any()) else laws


class SpeculatedWorker(Reporting, _Worker):
    """vLLM's worker of this platform, whose V2 model runner judges by our rules."""

    door: SpeculatedDoor | None

    def load_model(self, **kwargs: Any) -> None:
        """Load the models, and put our samplers in place of vLLM's."""
        super().load_model(**kwargs)
        if (why := self._lacks()) is not None:
            raise UserError(f"{why} (docs/vllm.md): give engine_args(..., runner=2)")
        if not get_pp_group().is_last_rank:
            return  # the last stage drafts and samples
        runner = self.model_runner
        if type(runner.sampler) is not Sampler or type(runner.rejection_sampler) is not RejectionSampler:
            raise UserError(
                "the model, or a watermark, brings a sampler of its own: serve it without sprinter"
            )
        if runner.speculator.draft_logits is None:
            raise UserError('the speculator hands out no logits: give draft_sample_method="probabilistic"')
        first, door = runner.sampler, SpeculatedDoor(runner, self.vllm_config)
        first.__class__ = _RuledSampler  # with vLLM's state of it
        judging = _RuledVerifier(first, self.vllm_config.speculative_config, self.device)
        judging.door = first.door = self.door = door
        runner.rejection_sampler = judging

    def _lacks(self) -> str | None:
        """What of the configuration does not go with our rules."""
        config = self.vllm_config
        if not self.use_v2_model_runner:
            return "this worker is for the V2 model runner: set VLLM_USE_V2_MODEL_RUNNER=1"
        if config.speculative_config is None:
            return "no speculator drafts"
        if config.scheduler_config.async_scheduling:
            return "what stays of a draft is known after the target's pass alone: async_scheduling=False"
        if getattr(config.parallel_config, "enable_batch_sharded_sampling", False):
            return "each rank samples other requests: enable_batch_sharded_sampling=False"
        if getattr(config.speculative_config, "enable_adaptive_verification", False):
            return "vLLM cuts drafts on the device: enable_adaptive_verification=False"
        return None

    def compile_or_warm_up_model(self) -> Any:
        """As in vLLM; its requests are not ours."""
        door, self.door = self.door, None
        try:
            return super().compile_or_warm_up_model()
        finally:
            self.door = door

    def execute_model(self, scheduler_output: Any) -> Any:
        """As in vLLM."""
        if self.door is not None:
            self.door.follow(scheduler_output)
        return super().execute_model(scheduler_output)

    def take_draft_token_ids(self) -> Any:
        """As in vLLM, but for what stop rules leave of the drafts."""
        drafts = super().take_draft_token_ids()
        if self.door is not None and drafts is not None:
            drafts.draft_token_ids = self.door.keep(drafts.req_ids)
        return drafts
