"""Laws of texts through vLLM's whole sampler, on a narrow vocabulary: for the test of the door and its benchmark."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from sprinter.decode.enumerate import MarkovPair, joint_law, target_joint_law
from sprinter.decode.spec import parse_method
from sprinter.doors.vllm import engine_args
from sprinter.laws import Sampling, process

WARPED = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.3}
"""What else a request may ask for."""
LAWS: tuple[tuple[str, Mapping[str, float]], ...] = (
    *((spec, {}) for spec in ("speculative(gamma=2)", "svip", "fuzzy(threshold=0.2,gamma=3)")),
    *((spec, warped) for spec in ("block(gamma=3)", "opt(epsilon=0.1,gamma=3)", "coin(rate=0.5,cap=1)")
      for warped in ({}, WARPED)),
)  # fmt: skip
"""Methods and sampling. Fuzzy's divergence is of laws before sampling, which ``NarrowPair`` does not tell apart."""
LENGTH = 4


@dataclass(frozen=True)
class NarrowPair(MarkovPair):
    """Two random models of 4 tokens, and their laws as a request's sampling makes them."""

    vocab: int = 4
    models: Mapping[str, Any] = field(default_factory=dict)
    warped: Mapping[str, float] = field(default_factory=dict)

    def _law(self, which: str, prefix: tuple[int, ...]) -> torch.Tensor:
        if (which, prefix) not in self._memory:
            with torch.no_grad():
                logits = self.models[which](torch.tensor([prefix])).logits[0, -1].double()
            seen, by = sorted({*prefix}), self.warped.get("repetition_penalty", 1.0)
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / by, logits[seen] * by)
            sampling = Sampling(self.warped.get("temperature", 1.0), top_p=self.warped.get("top_p", 1.0))
            self._memory[which, prefix] = process(logits, sampling)
        return self._memory[which, prefix]


def random_model(folder: Path, seed: int, vocab: int, layers: int = 1) -> Any:
    """A random model with a tokenizer of as many words, saved."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return model


def engine(folder: Path, rows: int, **more: Any) -> LLM:
    """An engine on such a model."""
    return LLM(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=rows, block_size=32,
        kv_cache_memory_bytes=64 << 20, disable_log_stats=False, **more,
    )  # fmt: skip


def narrow(folder: Path) -> tuple[LLM, dict[str, Any]]:
    """An engine with our worker on a random pair of 4 tokens, and its models by name."""
    made = {which: random_model(folder / which, seed, 4) for seed, which in enumerate("pq")}
    return engine(folder / "p", 64, **engine_args(str(folder / "q"), longest=3)), made


def chi_square(found: Counter[tuple[int, ...]], law: Mapping[tuple[int, ...], float]) -> tuple[float, int]:
    """Standard normal deviate of Pearson's statistic (by Wilson and Hilferty), and its degrees of freedom."""
    count = found.total()
    if any(law.get(text, 0.0) <= 0 for text in found):
        return math.inf, len(law)
    large = [text for text, chance in law.items() if chance * count >= 5]
    rest = count - sum(found[text] for text in large), 1 - sum(law[text] for text in large)
    pairs = [*((found[text], law[text]) for text in large), *([rest] if rest[1] * count >= 5 else [])]
    chi, k = sum((n - count * chance) ** 2 / (count * chance) for n, chance in pairs), len(pairs) - 1
    return ((chi / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k)), k


def law_row(
    llm: LLM, models: Mapping[str, Any], spec: str, warped: Mapping[str, float], count: int
) -> dict[str, Any]:
    """So many texts of 4 tokens through vLLM's whole sampler, against the declared law and against the target's.

    vLLM asks for no draft before the first token: it is the target's, and the method's law holds for the others.
    """
    each = min(count, 500)
    params = [
        SamplingParams(
            n=each, seed=i, max_tokens=LENGTH, detokenize=False, extra_args={"sprinter": spec}, **warped
        )
        for i in range(0, count, each)
    ]
    outs = llm.generate([{"prompt_token_ids": [0]}] * len(params), params, use_tqdm=False)
    found = Counter(tuple(text.token_ids) for out in outs for text in out.outputs)
    return compared(found, NarrowPair(models=models, warped=warped), spec)


def compared(found: Counter[tuple[int, ...]], pair: NarrowPair, spec: str) -> dict[str, Any]:
    """Texts against the law that the method declares, and against the target's."""
    method, declared = parse_method(spec), dict[tuple[int, ...], float]()
    for x, chance in enumerate(pair.p((0,)).tolist()):
        if chance > 0:
            parts = joint_law(method, pair, LENGTH - 1, prompt=(0, x))
            declared |= {(x, *text): chance * own for text, own in parts.items()}
    (z, freedom), (other, _) = chi_square(found, declared), chi_square(found, target_joint_law(pair, LENGTH))
    return {
        "method": spec, "sampling": dict(pair.warped), "texts": found.total(), "freedom": freedom, "z": z,
        "z_of_target": other, "lossless": method.lossless(),
    }  # fmt: skip


def session_goes_on(plain: LLM, door: LLM, parts: Sequence[str]) -> None:
    """A session of several inputs writes in both engines the same, and is reported for each input."""
    written = []
    for llm in (plain, door):
        engine, core = llm.llm_engine, llm.llm_engine.engine_core
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        texts = []
        for part in parts:
            asked = engine.input_processor.process_inputs(
                "session", part, params, supported_tasks=("generate",), resumable=True
            )
            core.add_request(asked)
            texts.append([])
            while len(texts[-1]) < 12:
                texts[-1] += [id for out in core.get_output().outputs for id in out.new_token_ids]
        core.abort_requests(["session"])
        llm.generate(parts[:1], params, use_tqdm=False)
        written.append(texts)
    assert written[0] == written[1]
    (report,) = door.collective_rpc("sprinter_reports", args=("session",))[0].values()
    assert report["new_tokens"] == 12 and report["accepted"] > 0
