"""vLLM as a peer: a worker process, perhaps with another interpreter, that loads the pair from the same source."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sprinter.bench.arm import ArmAnswer, Ask
from sprinter.bench.arms import vllm_worker
from sprinter.bench.arms.process import JsonProcess
from sprinter.decode.checks import at_least
from sprinter.decode.registry import did_you_mean
from sprinter.engine.pair import Pair
from sprinter.errors import SprinterError, UserError
from sprinter.laws import Sampling
from sprinter.models.pair import LoadedModel

__all__ = ["VllmDraft", "VllmHeads", "VllmNgram", "VllmPlain"]

_PYTHON = "SPRINTER_VLLM_PYTHON"
_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLING = ("greedy", "probabilistic")
_HEADS = ("eagle3", "eagle", "medusa")


@dataclass(eq=False, kw_only=True)
class VllmPlain:
    """vLLM with the target alone.

    The worker keeps its engine between requests. Its clock runs from passing the ids to the last token, as for other
    arms. Prefix caching is off.

    Attributes:
        python: interpreter that has vllm; None: environment variable SPRINTER_VLLM_PYTHON, otherwise this one.
        dtype: dtype; None: the pair's.
        cache_gib: size of the KV cache in GiB.
        eager: compile nothing: starts faster, runs slower.
    """

    engine = "vllm"
    python: str | None = None
    dtype: str | None = None
    cache_gib: float = 1.0
    eager: bool = False
    name: str = field(default="", init=False)
    spec: str = field(default="", init=False)
    _worker: JsonProcess | None = field(default=None, init=False, repr=False)
    _versions: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _eos_ids: tuple[int, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise did_you_mean("dtype", str(self.dtype), list(_DTYPES))
        if not isinstance(self.cache_gib, int | float) or not self.cache_gib > 0:
            raise UserError(f"cache_gib={self.cache_gib} is out of range: give a number above 0")
        if not isinstance(self.eager, bool):
            raise UserError(f"eager={self.eager} is neither true nor false")

    def start(self, pair: Pair) -> None:
        """Start the worker and wait until its engine is ready (about a minute if it compiles).

        Raises:
            UserError: vllm cannot be imported, the models are not on disk, or the device differs from the pair's.
            SprinterError: vLLM rejects the pair; the message is vLLM's.
        """
        self.close()
        python = self.python or os.environ.get(_PYTHON) or sys.executable
        settings = {"engine": self._settings(pair), "python": python}
        command = [python, str(Path(vllm_worker.__file__))]
        self._worker = JsonProcess(command, self._environment(), f"vLLM's worker ({self.name})")
        try:
            ready = self._worker.ask(settings)
            ours = pair.models.target.model.device.type
            if ready["device"] != ours:
                raise UserError(
                    f"vLLM runs on {ready['device']} there and the pair on {ours}: load the pair on the same device"
                )
        except Exception:
            self.close()
            raise
        self._versions, self._eos_ids = ready["versions"], pair.models.target.eos_ids

    def lossless(self, sampling: Sampling) -> bool | None:
        """True: vLLM's rejection sampling keeps the target's law (``vllm_worker`` fixes a bug on CPUs)."""
        return True

    def versions(self) -> dict[str, str]:
        """Versions of vllm, torch and transformers in the worker, and what was fixed in vllm."""
        return dict(self._versions)

    def answer(self, ask: Ask) -> ArmAnswer:
        """Ids, times and counts; ``extra`` holds vLLM's own speculation metrics."""
        return self.answer_all([ask])[0]

    def answer_all(self, asks: Sequence[Ask]) -> list[ArmAnswer]:
        """As ``answer``, for requests submitted together; each ``wall_s`` ends with the request's own last token."""
        if self._worker is None:
            raise SprinterError(f"arm {self.name} was not started")
        asked = [{"ids": list(ask.ids), "params": self._params(ask)} for ask in asks]
        return [self._read(**one) for one in self._worker.ask({"asks": asked})["answers"]]

    def _params(self, ask: Ask) -> dict[str, Any]:
        """vLLM's sampling parameters."""
        s = ask.sampling
        return {
            "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p,
            "max_tokens": ask.new_tokens, "seed": None if s.greedy else ask.seed,
            "stop_token_ids": [*self._eos_ids, *ask.stop_token_ids], "ignore_eos": True,  # the pair's EOS ids only
        }  # fmt: skip

    def _read(self, speculation: dict[str, Any] | None, **reply: Any) -> ArmAnswer:
        steps, extra = (
            self._draft_steps(speculation),
            {} if speculation is None else {"speculation": speculation},
        )
        return ArmAnswer(**reply, target_calls=len(reply["accept_lengths"]), draft_steps=steps, extra=extra)

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _settings(self, pair: Pair) -> dict[str, Any]:
        """vLLM's engine arguments."""
        target = pair.models.target
        self._check_weights(target)
        settings = {
            "model": _source(target, "target"), "revision": target.revision,
            "dtype": self.dtype or str(target.model.dtype).removeprefix("torch."),
            "max_model_len": pair.models.context, "skip_tokenizer_init": True, "generation_config": "vllm",
            "enable_prefix_caching": False, "enforce_eager": self.eager, "disable_log_stats": True,
            "kv_cache_memory_bytes": int(self.cache_gib * 2**30),
        }  # fmt: skip
        speculation = self._speculation(pair)
        return settings if speculation is None else settings | {"speculative_config": speculation}

    def _check_weights(self, model: LoadedModel) -> None:
        if model.quantised and not self.dtype:
            raise UserError(
                f"the pair's weights are in {model.quantised}, which vLLM would not run: give vllm:...(dtype=bfloat16)"
            )

    def _speculation(self, pair: Pair) -> dict[str, Any] | None:
        return None

    def _draft_steps(self, speculation: dict[str, Any] | None) -> int | None:
        return 0

    def _environment(self) -> dict[str, str]:
        # One process: vLLM's default of three costs a small model more than it saves with one request at a time.
        ours = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }  # fmt: skip
        return os.environ | ours


@dataclass(eq=False, kw_only=True)
class VllmDraft(VllmPlain):
    """vLLM's speculative decoding with the draft model.

    ``draft_sampling``: "greedy" (vLLM's default) or "probabilistic", which has a much higher acceptance rate when texts
    are sampled. The draft steps are the draft tokens that vLLM reports as checked, without those beyond the end of a
    text.
    """

    tokens: int = 5
    draft_sampling: str = "greedy"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("tokens", self.tokens, 1)
        if self.draft_sampling not in _SAMPLING:
            raise did_you_mean("draft_sampling", str(self.draft_sampling), list(_SAMPLING))

    def _speculation(self, pair: Pair) -> dict[str, Any] | None:
        draft = pair.models.draft
        if draft is None:
            raise UserError(f"{self.name} needs a draft model, and this pair has none: give draft=...")
        source = _source(draft, "draft")
        self._check_weights(draft)
        if not self.dtype and draft.model.dtype != pair.models.target.model.dtype:
            raise UserError(
                f"the draft is in {draft.weights} and the target in {pair.models.target.weights}, and vLLM runs both "
                "in one dtype: give vllm:draft_model(dtype=bfloat16)"
            )
        return {
            "method": "draft_model", "model": source, "revision": draft.revision,
            "num_speculative_tokens": self.tokens, "draft_sample_method": self.draft_sampling,
        }  # fmt: skip

    def _draft_steps(self, speculation: dict[str, Any] | None) -> int | None:
        return None if speculation is None else int(speculation["num_draft_tokens"])


@dataclass(eq=False, kw_only=True)
class VllmHeads(VllmDraft):
    """vLLM's speculative decoding with heads on the target.

    ``head``: folder of the heads, such as one of ``sprinter draft train --kind eagle3``. ``kind``: vLLM's name of the
    method: "eagle3", "eagle" or "medusa". ``draft_sampling``: as in ``VllmDraft``.
    """

    head: str = "heads"
    kind: str = "eagle3"
    tokens: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.head, str) or not self.head:
            raise UserError(f"head={self.head!r} names no folder: give head=FOLDER of heads")
        if self.kind not in _HEADS:
            raise did_you_mean("kind", str(self.kind), list(_HEADS))
        if self.kind == "medusa" and self.draft_sampling != "greedy":
            raise UserError("vLLM drafts greedily with Medusa's heads: leave draft_sampling out")

    def _speculation(self, pair: Pair) -> dict[str, Any] | None:
        # vLLM would look for a folder that is not there on the hub.
        if not (Path(self.head) / "config.json").is_file():
            raise UserError(
                f"head='{self.head}' is not a folder with a config.json: give head=FOLDER of heads"
            )
        return {
            "method": self.kind, "model": str(Path(self.head).resolve()), "num_speculative_tokens": self.tokens,
            "draft_sample_method": self.draft_sampling,
        }  # fmt: skip

    def _draft_steps(self, speculation: dict[str, Any] | None) -> int | None:
        steps = super()._draft_steps(speculation)
        # Medusa's heads draft all tokens of a round in one step.
        return steps if steps is None or self.kind != "medusa" else steps // self.tokens


@dataclass(eq=False, kw_only=True)
class VllmNgram(VllmPlain):
    """vLLM's prompt lookup: copy up to ``tokens`` tokens from after an earlier occurrence of the last tokens."""

    tokens: int = 5
    lookup_min: int = 2
    lookup_max: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("tokens", self.tokens, 1)
        at_least("lookup_min", self.lookup_min, 1)
        at_least("lookup_max", self.lookup_max, self.lookup_min)

    def _speculation(self, pair: Pair) -> dict[str, Any] | None:
        return {
            "method": "ngram", "num_speculative_tokens": self.tokens,
            "prompt_lookup_min": self.lookup_min, "prompt_lookup_max": self.lookup_max,
        }  # fmt: skip


def _source(model: LoadedModel, which: str) -> str:
    """The directory or hub id that vLLM can load."""
    model.module("vLLM here")
    if not Path(model.id).is_dir() and model.revision is None:
        raise UserError(
            f"vLLM reads models from disk, and the {which} {model.id} is in memory: save it and load it"
        )
    return model.id
