"""transformers' generation with the pair's modules: plain, with the draft as assistant, with prompt lookup.

In transformers prefill gives a token and counts as a target call, so that the lengths of the rounds sum to the new
tokens. (In this package's engine prefill gives no token and is counted separately.) Tokens of a round arrive together
and share a time.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from sprinter.bench.arm import ArmAnswer, Ask, LookupSettings
from sprinter.bench.arms.engine import settle
from sprinter.decode.checks import at_least
from sprinter.decode.registry import did_you_mean
from sprinter.engine.pair import Pair, load_pair
from sprinter.errors import SprinterError, UserError
from sprinter.laws import Sampling

__all__ = ["Assisted", "TransformersLookup", "TransformersPlain", "TransformersStatic"]

_SCHEDULES = {"constant": ("constant", 0.0), "heuristic": ("heuristic", 0.0), "dynamic": ("constant", 0.4)}
"""Name → (num_assistant_tokens_schedule, assistant_confidence_threshold)."""


class _Listener(BaseStreamer):
    """Records when tokens arrive and how many at a time; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


@dataclass(eq=False, kw_only=True)
class TransformersPlain:
    """transformers' ``generate`` with the target alone.

    Args:
        dtype: load the pair's files a second time with weights of this type ("bfloat16"), as transformers would run
            them; None: the pair's own modules.
    """

    engine, hooked = "transformers", True
    dtype: str | None = None
    name: str = field(default="", init=False)
    spec: str = field(default="", init=False)
    _pair: Pair | None = field(default=None, init=False, repr=False)
    _assistant: GenerationConfig | None = field(default=None, init=False, repr=False)

    def start(self, pair: Pair) -> None:
        """Prepare the pair.

        Raises:
            UserError: llama.cpp runs the pair, or its files cannot be loaded with this ``dtype``.
        """
        if self.dtype is not None:
            draft = pair.models.draft
            names = (pair.models.target.id, None if draft is None else draft.id)
            pair = load_pair(*names, runner="torch", dtype=self.dtype, compile=False)
        for model in (pair.models.target, pair.models.draft):
            if model is not None:
                model.module(self.name)
        self._pair = pair

    def lossless(self, sampling: Sampling) -> bool | None:
        """True: all three arms follow the target's law."""
        return True

    def versions(self) -> dict[str, str]:
        """Versions of transformers and torch."""
        return {"transformers": transformers.__version__, "torch": str(torch.__version__)}

    def answer(self, ask: Ask) -> ArmAnswer:
        """Ids, times and counts; the models' generation configurations are replaced during the call."""
        if self._pair is None:
            raise SprinterError(f"arm {self.name} was not started")
        target, draft = self._pair.models.target.module(self.name), self._pair.models.draft
        config = self._config(ask, self._pair.models.target.eos_ids)
        listener, options = _Listener(), {}
        torch.manual_seed(ask.seed)
        with ExitStack() as stack:
            stack.enter_context(_hushed())
            calls, steps = stack.enter_context(_lent(target, config, self.hooked)), [0]
            if self._assistant is not None and draft is not None:
                options["assistant_model"] = assistant = draft.module(self.name)
                steps = stack.enter_context(_lent(assistant, self._assistant))
            began = time.perf_counter()
            ids = torch.tensor([ask.ids], device=target.device)
            out: Any = target.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), streamer=listener, **options
            )
            settle(target.device)
            wall_s = time.perf_counter() - began
        sizes, times = listener.sizes[1:], listener.times[1:]
        return ArmAnswer(
            ids=out[0, len(ask.ids) :].tolist(),
            wall_s=wall_s,
            arrivals_s=[at - began for size, at in zip(sizes, times, strict=True) for _ in range(size)],
            accept_lengths=sizes,
            target_calls=calls[0] if self.hooked else len(sizes),
            draft_steps=steps[0],
        )

    def close(self) -> None:
        """Release the pair."""
        self._pair = None

    def _config(self, ask: Ask, eos_ids: tuple[int, ...]) -> GenerationConfig:
        """A new configuration; that of the checkpoint (a repetition penalty, ...) would give another law."""
        s = ask.sampling
        drawn = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p or None}
        return GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=ask.new_tokens, do_sample=not s.greedy, eos_token_id=[*eos_ids, *ask.stop_token_ids] or None,
            pad_token_id=eos_ids[0] if eos_ids else None, **({} if s.greedy else drawn), **self._options(),
        )  # fmt: skip

    def _options(self) -> dict[str, Any]:
        return {}


@dataclass(eq=False, kw_only=True)
class TransformersStatic(TransformersPlain):
    """transformers' ``generate`` over a static cache, with which it compiles its steps on CUDA."""

    hooked = False

    def _options(self) -> dict[str, Any]:
        return {"cache_implementation": "static"}


@dataclass(eq=False, kw_only=True)
class Assisted(TransformersPlain):
    """transformers' ``assistant_model``: the draft proposes, the target checks.

    ``schedule``: "constant"; "heuristic" (+2 if all tokens were accepted, else −1, and the length carries over to the
    next text, as in transformers); "dynamic": up to ``tokens``, stopping at a token with a draft probability below 0.4,
    a threshold that transformers adapts if scikit-learn is installed. transformers' default is tokens=20,
    schedule=dynamic.
    """

    tokens: int = 5
    schedule: str = "constant"

    def __post_init__(self) -> None:
        at_least("tokens", self.tokens, 1)
        if self.schedule not in _SCHEDULES:
            raise did_you_mean("schedule", str(self.schedule), list(_SCHEDULES))

    def start(self, pair: Pair) -> None:
        """Prepare the pair.

        Raises:
            UserError: there is no draft, or transformers would treat its vocabulary as a different one.
        """
        target, draft = pair.models.target, pair.models.draft
        if draft is None:
            raise UserError(f"{self.name} needs a draft model, and this pair has none: give draft=...")
        if target.vocab_size != draft.vocab_size:
            raise UserError(
                f"transformers takes models of {target.vocab_size} and {draft.vocab_size} logits for ones with "
                f"different tokenizers: {self.name} cannot serve this pair"
            )
        schedule, threshold = _SCHEDULES[self.schedule]
        self._assistant = GenerationConfig(  # type: ignore[no-untyped-call]
            num_assistant_tokens=self.tokens, num_assistant_tokens_schedule=schedule,
            assistant_confidence_threshold=threshold,
        )  # fmt: skip
        super().start(pair)

    def versions(self) -> dict[str, str]:
        """Versions, with scikit-learn if the schedule depends on it."""
        if self.schedule != "dynamic":
            return super().versions()
        try:
            found = version("scikit-learn")
        except PackageNotFoundError:
            found = "not installed, the threshold stays at 0.4"
        return super().versions() | {"scikit-learn": found}


@dataclass(eq=False, kw_only=True)
class TransformersLookup(LookupSettings, TransformersPlain):
    """transformers' prompt lookup: copy up to ``tokens`` tokens from after a match of up to ``ngram`` tokens."""

    def _options(self) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": self.tokens, "max_matching_ngram_size": self.ngram}


@contextmanager
def _lent(model: PreTrainedModel, config: GenerationConfig, hooked: bool = True) -> Iterator[list[int]]:
    """Replace the model's generation configuration; yields a list that counts its forward passes, if these may have a
    hook: one that counts has compiled passes compiled anew."""
    holder: Any = model
    own, count = holder.generation_config, [0]

    def add(*_: object) -> None:
        count[0] += 1

    hook = model.register_forward_hook(add) if hooked else None
    holder.generation_config = config
    try:
        yield count
    finally:
        holder.generation_config = own
        if hook is not None:
            hook.remove()


@contextmanager
def _hushed() -> Iterator[None]:
    """Silence transformers' log messages below the level of errors."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
