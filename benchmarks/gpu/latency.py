"""Latency with random weights: the compute of real sizes, with acceptance and trust set to given rates.

Two random models do not agree as a real pair does. So the rates are set: ``random(rate=r)`` keeps each draft token with
chance r, ``coin(rate=r)`` trusts each with chance r. Every pass, law, draw and meter is still computed. These rows are
SYNTHETIC: they tell what a round costs and what speed follows from given rates, and nothing of quality. transformers'
assisted decoding keeps by the two random laws, as it must; its tokens a round are reported beside its speed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

import sprinter
from benchmarks.gpu.arms import PEERS, PLAIN, make_arms, measure
from benchmarks.gpu.loop import KINDS, PlainLoop
from benchmarks.gpu.roofline import Passes, copy_gb_per_s, describe, load_captured, pass_kinds
from benchmarks.gpu.stage import Run, TimeUp, check_time, first_line, free
from sprinter.bench.sample import Sample, Suite
from sprinter.bench.settings import BenchSettings
from sprinter.engine.pair import Pair
from sprinter.models.kernels import round_linears
from sprinter.theory.flops import config_of

PROMPT_TOKENS = 128
GAMMA = 5
ACCEPTANCE = (0.6, 0.8)
TRUST = (0.5, 0.8)
ASSISTED, STATIC = "transformers:assisted", "transformers:static"
SHOWN_EAGER = f"synthetic acceptance {ACCEPTANCE[-1]:g}"
LEAST_S = 8.0  # a case that has less time than this is left out


@dataclass(frozen=True)
class Case:
    """A target and, where something is drafted, a draft; ``eight_bits``: the linear layers of both are rounded."""

    name: str
    target: PreTrainedConfig
    draft: PreTrainedConfig | None = None
    eight_bits: bool = False


def _llama(
    width: int, layers: int, heads: int, feed_forward: int, tied: bool, groups: int = 8
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, intermediate_size=feed_forward, max_position_embeddings=8192,
        tie_word_embeddings=tied,
    )  # fmt: skip


def _qwen(width: int, layers: int, heads: int, feed_forward: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151936, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=2, intermediate_size=feed_forward, max_position_embeddings=8192,
        tie_word_embeddings=True,
    )  # fmt: skip


def cases(smoke: bool) -> tuple[Case, ...]:
    """What is timed; sizes of Llama 3.2 1B and Llama 3.1 8B, one of 0.16 B, Qwen2.5 1.5B and 0.5B, GPT-2."""
    if smoke:
        small, large = (
            GPT2Config(vocab_size=300, n_positions=256, n_embd=32, n_layer=n, n_head=2) for n in (1, 2)
        )
        pair = (large, small)
        return Case("tiny-gpt2", small), Case("tiny-gpt2-pair", *pair), Case("tiny-gpt2-int8", *pair, True)
    large, small = _llama(4096, 32, 32, 14336, False), _llama(2048, 16, 32, 8192, True)
    return (
        Case("llama-8b by llama-1b", large, small),
        Case("llama-1b by llama-160m", small, _llama(768, 12, 12, 3072, True, 12)),
        Case("qwen-1.5b by qwen-0.5b", _qwen(1536, 28, 12, 8960), _qwen(896, 24, 14, 4864)),
        Case("llama-8b by llama-1b, int8", large, small, True),
        Case("gpt2", config_of("gpt2")),
        Case("gpt2-xl by gpt2", config_of("gpt2-xl"), config_of("gpt2")),
    )


def random_model(run: Run, config: PreTrainedConfig) -> PreTrainedModel:
    """Random weights, made on the device; a text of such a model ends at its limit alone."""
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    half = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    with torch.device(run.device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=half)
    model.generation_config.eos_token_id = None
    return model.to(run.device).eval()


def number_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token i is the word "i"."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(vocab)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def number_suite(run: Run, vocab: int) -> Suite:
    """Prompts of random tokens."""
    chance = random.Random(0)
    texts = [
        " ".join(str(chance.randrange(vocab)) for _ in range(PROMPT_TOKENS))
        for _ in range(run.sizes.latency_prompts)
    ]
    samples = tuple(Sample(str(i), "random", (text,)) for i, text in enumerate(texts))
    return Suite(
        "random tokens", samples, run.sizes.latency_new_tokens, rule=f"{PROMPT_TOKENS} random tokens"
    )


def specs_of(case: Case) -> dict[str, str]:
    """Name -> spec."""
    if case.draft is None:
        return {PLAIN: "autoregressive", PEERS[0]: PEERS[0]}
    peers = (
        () if case.eight_bits else (PEERS[0], STATIC, ASSISTED)
    )  # transformers has no fast layers of this kind
    kept = {f"synthetic acceptance {r:g}": f"random(rate={r},gamma={GAMMA})" for r in ACCEPTANCE}
    trusted = {f"synthetic trust {r:g}": f"coin(rate={r})" for r in TRUST}
    return {
        PLAIN: "autoregressive",
        **kept,
        **trusted,
        "draft-only": "draft-only",
        **{peer: peer for peer in peers},
    }


def load_case(case: Case, run: Run) -> Pair:
    """A pair of random models."""
    target = random_model(run, case.target)
    draft = random_model(run, case.draft) if case.draft else None
    for model in (target, draft):
        if model is not None and case.eight_bits:
            round_linears(model)
    return sprinter.load_pair(
        target, draft=draft, tokenizer=number_tokenizer(case.target.vocab_size), compile=False
    )


def with_rounds(summary: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with what a round takes: its tokens over its speed."""
    rows = []
    for row in summary:
        tokens = row["tokens_per_round"]
        rows.append({**row, "round_ms": None if tokens is None else 1000 * tokens[0] / row["tokens_per_s"]})
    return rows


def run_case(run: Run, case: Case, large: float, deadline: float) -> dict[str, Any]:
    """Arms and passes of one pair of sizes."""
    pair = load_case(case, run)
    models = pair.models
    draft = models.draft.model if models.draft else None
    load = partial(sprinter.load_pair, models.target.model, draft=draft, tokenizer=pair.tokenizer)
    captured, why_not = load_captured(run, load)  # the same weights: memory is needed once
    settings = BenchSettings(
        (1.0,),
        new_tokens=run.sizes.latency_new_tokens,
        bases=(PLAIN, f"captured {PLAIN}", *(() if case.eight_bits else (*PEERS[:1], ASSISTED))),
    )
    told: dict[str, Any] = {
        "case": case.name,
        "eight_bits": case.eight_bits,
        "synthetic": case.draft is not None,
    }
    told |= {"captured": why_not or "yes", "models": {}}
    for role, loaded in (("target", models.target), ("draft", models.draft)):
        if loaded is not None:
            facts = told["models"][role] = describe(run, loaded.model, large)
            lengths = {"eager": run.sizes.passes[::3], "captured": run.sizes.passes}
            facts["passes"] = [
                row for kind in pass_kinds(run)
                for row in Passes(run, loaded.model, lengths[kind], facts["copy_gb_per_s"], kind).timed()
            ]  # fmt: skip
    arms = make_arms(specs_of(case), captured, () if case.eight_bits and captured else (PLAIN, SHOWN_EAGER))
    if not case.eight_bits and case.target.model_type in KINDS:
        arms.append(PlainLoop())
    suite = number_suite(run, models.vocab_size)
    found = measure(run, f"latency-{case.name.replace(' ', '-')}", pair, arms, suite, settings, deadline)
    return told | found | {"summary": with_rounds(found["summary"])}


def run_stage(run: Run, deadline: float) -> None:
    """All cases, each with an equal share of the time that is left; a case that fails leaves the others."""
    large, chosen = copy_gb_per_s(run, run.sizes.copy_bytes), cases(run.smoke)
    done: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    note = "random weights; rows named synthetic have acceptance or trust set to a rate"
    run.keep("latency", note=note, prompt_tokens=PROMPT_TOKENS, gamma=GAMMA, cases=done, left_out=left_out)
    for i, case in enumerate(chosen):
        try:
            check_time(deadline, 0.0 if run.smoke else LEAST_S)
            run.say(f"latency: {case.name}")
            share = (deadline - time.monotonic()) / (len(chosen) - i)
            done.append(run_case(run, case, large, time.monotonic() + share))
        except TimeUp:
            left_out[case.name] = "out of time"
        except Exception as error:  # memory, above all: smaller cards hold the smaller cases
            if run.smoke:
                raise
            left_out[case.name] = first_line(error)
            run.say(f"{case.name}: {first_line(error)}")
        run.keep("latency")
        free(run.device)
