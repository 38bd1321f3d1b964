"""llama-cpp-python's generation with the pair's GGUF file: plain, and with its prompt lookup.

As in transformers' arms, prefill gives a token and counts as a target call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sprinter.bench.arm import ArmAnswer, Ask, LookupSettings
from sprinter.engine.pair import Pair
from sprinter.errors import SprinterError, UserError
from sprinter.laws import Sampling
from sprinter.models.gguf.library import loading
from sprinter.models.gguf.load import GgufModel
from sprinter.models.source import find

__all__ = ["LlamaLookup", "LlamaPlain"]


def _file(pair: Pair) -> Path | None:
    """The target's GGUF file, run by llama.cpp or by PyTorch; None if it has none."""
    target = pair.models.target
    if isinstance(target.model, GgufModel):
        return Path(target.model.path)
    return find(target.id, "target").gguf if target.stored else None


@dataclass(eq=False, kw_only=True)
class LlamaPlain:
    """llama-cpp-python's ``Llama.generate`` with the target alone."""

    engine = "llama.cpp"
    name: str = field(default="", init=False)
    spec: str = field(default="", init=False)
    _llama: Any = field(default=None, init=False, repr=False)
    _eos_ids: tuple[int, ...] = field(default=(), init=False, repr=False)

    def start(self, pair: Pair) -> None:
        """Load the target's file a second time, whatever runs it for the other arms.

        Raises:
            UserError: the target is not a GGUF file.
        """
        target, path = pair.models.target, _file(pair)
        if path is None:
            raise UserError(f"{self.name} runs GGUF files, and the target {target.id} is none: give one")
        llama_cpp = import_module("llama_cpp")
        threads = torch.get_num_threads()
        own = target.model if isinstance(target.model, GgufModel) else None
        cache = 0 if own and own.cache_dtype == torch.float32 else 1  # GGML_TYPE_F32, GGML_TYPE_F16
        on_gpu = bool(own and own.on_gpu)
        repack = own is None or bool(own.repacking.on)  # as llama.cpp does by itself, or as it runs the pair
        with loading(on_gpu, repack):  # ``Llama`` has no such argument
            self._llama = llama_cpp.Llama(
                str(path), n_ctx=pair.models.context, n_threads=threads, n_threads_batch=threads,
                n_gpu_layers=-1 if on_gpu else 0, type_k=cache, type_v=cache, flash_attn=on_gpu,
                draft_model=self._drafter(), verbose=False,
            )  # fmt: skip
        self._eos_ids = target.eos_ids

    def lossless(self, sampling: Sampling) -> bool | None:
        """True without truncation; otherwise unknown, because llama.cpp truncates before it applies the temperature."""
        truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        return None if truncated and not sampling.greedy else True

    def versions(self) -> dict[str, str]:
        """Version of llama-cpp-python."""
        return {"llama-cpp-python": version("llama-cpp-python")}

    def answer(self, ask: Ask) -> ArmAnswer:
        """Ids, times and counts."""
        if self._llama is None:
            raise SprinterError(f"arm {self.name} was not started")
        llama, s = self._llama, ask.sampling
        sizes: list[int] = []
        evaluate = type(llama).eval

        def counted(tokens: Sequence[int]) -> None:
            sizes.append(0)
            evaluate(llama, tokens)

        llama.eval = counted
        llama.set_seed(ask.seed)
        llama.reset()
        ids: list[int] = []
        ends = {*self._eos_ids, *ask.stop_token_ids}
        arrivals: list[float] = []
        began = time.perf_counter()
        stream = llama.generate(
            list(ask.ids), temp=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, repeat_penalty=1.0
        )
        for token in stream:
            ids.append(int(token))
            sizes[-1] += 1
            arrivals.append(time.perf_counter() - began)
            if len(ids) == ask.new_tokens or token in ends:
                break
        wall_s = time.perf_counter() - began
        stream.close()
        rounds = [size for size in sizes if size]
        return ArmAnswer(
            ids, wall_s, arrivals, accept_lengths=rounds, target_calls=len(rounds), draft_steps=0
        )

    def close(self) -> None:
        """Release the model."""
        if self._llama is not None:
            self._llama.close()
        self._llama = None

    def _drafter(self) -> Any:
        return None


@dataclass(eq=False, kw_only=True)
class LlamaLookup(LookupSettings, LlamaPlain):
    """llama-cpp-python's prompt lookup: copy up to ``tokens`` tokens from after a match of up to ``ngram`` tokens."""

    def _drafter(self) -> Any:
        drafters = import_module("llama_cpp.llama_speculative")
        return drafters.LlamaPromptLookupDecoding(max_ngram_size=self.ngram, num_pred_tokens=self.tokens)
