"""The fast engine: passes and draft steps against the machine's limit, decoding against transformers, captured = eager.

    python benchmarks/engine.py --data DIR [--parts passes steps decoding equality context] [--prompts 20]

Arms are interleaved in one process and one thread. Bandwidth is measured on a buffer as large as what a pass reads,
since small weights live in the processor's cache. Times of a pass are the lower quartile of its repeats.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import NEW_TOKENS, ROOT, environment, heldout_prompts, write_results
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import sprinter
from sprinter.engine.captured import CapturedDraftSteps
from sprinter.engine.rows import Rows
from sprinter.engine.steps import DraftPlan, DraftRow, DraftSteps, EagerDraftSteps
from sprinter.laws import Sampling
from sprinter.models.memory import cache_bytes
from sprinter.models.runner import Runner, make_runner
from sprinter.random import AddressedDraws

LENGTHS = (1, 2, 4, 6, 8, 16, 32)
CONTEXT = 128
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
METHODS = ("autoregressive", "speculative(gamma=4)", "sprinter")
PARTS = ("passes", "steps", "decoding", "equality", "context")


def times(arms: Mapping[str, Callable[[], Any]], repeats: int = 60) -> dict[str, float]:
    """Seconds of each arm, the lower quartile, arms in turn."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 3):
        for name, run in arms.items():
            began = time.perf_counter()
            run()
            if repeat >= 3:
                taken[name].append(time.perf_counter() - began)
    return {name: float(np.quantile(values, 0.25)) for name, values in taken.items()}


def weight_bytes(model: PreTrainedModel) -> int:
    """What one pass reads of the weights: an embedding that is not also the output's is read a row at a time."""
    head, inputs = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    total = sum(weights.numel() * weights.element_size() for weights in model.parameters())
    return total if head is inputs else total - inputs.numel() * inputs.element_size()


def limit_s(n_bytes: int) -> float:
    """Seconds to read so many bytes."""
    buffer = torch.ones(n_bytes // 4)
    return times({"read": buffer.sum}, 30)["read"]


def filled(model: PreTrainedModel, max_len: int, context: int, compile: bool) -> Runner:
    """A runner that holds ``context`` tokens."""
    runner = make_runner(model, max_len=max_len, compile=compile)
    runner.extend(torch.arange(context)[None] % 1000 + 5, logits=False)
    return runner


def pass_arm(runner: Runner, n: int, context: int) -> Callable[[], Any]:
    """A pass over n tokens after the context."""
    tokens = torch.arange(n)[None] + 7

    def run() -> None:
        runner.rewind([context])
        runner.extend(tokens)

    return run


def gpt2_small() -> PreTrainedModel:
    """GPT-2's smallest size, random weights."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config()).eval()


def passes(model: PreTrainedModel) -> dict[str, Any]:
    """Times of the eager and the captured pass at each length, and the share of the bandwidth at length one."""
    eager, captured = (filled(model, 512, CONTEXT, compile) for compile in (False, True))
    rows: dict[str, Any] = {}
    for n in LENGTHS:
        arms = {"eager": pass_arm(eager, n, CONTEXT), "captured": pass_arm(captured, n, CONTEXT)}
        rows[str(n)] = {name: 1e6 * value for name, value in times(arms).items()}
    read = weight_bytes(model) + cache_bytes(model, CONTEXT)
    limit = 1e6 * limit_s(read)
    return {
        "us": rows,
        "bytes": read,
        "limit_us": limit,
        "share_of_bandwidth": {name: limit / rows["1"][name] for name in ("eager", "captured")},
    }


def steps(pair: sprinter.Pair, k: int = 4) -> dict[str, Any]:
    """A draft step: eager, captured, the captured pass alone, and what the host adds to the captured unit."""
    model = pair.models.draft.model
    eager, captured = (
        Rows(make_runner(model, max_len=512, compile=c), pair.models.vocab_size, "draft")
        for c in (False, True)
    )
    facts: dict[str, Any] = {}
    for name, heads in (("bare", {}), ("gate", {"gate": pair.gate})):
        row = DraftRow(
            0, [9], CONTEXT, 1, AddressedDraws(1), DraftPlan(Sampling(), ("entropy",), heads), count=k
        )
        arms: dict[str, Callable[[], Any]] = {}
        for arm, rows, make in (
            ("eager", eager, EagerDraftSteps),
            ("captured", captured, CapturedDraftSteps),
        ):
            rows.runner.rewind([0])
            rows.runner.extend(torch.arange(CONTEXT)[None] + 5, logits=False)
            arms[arm] = draft_arm(rows, make(rows), row)
        spent = {arm: 1e6 * value / k for arm, value in times(arms).items()}
        inner = unit_us(captured, arms["captured"], k)
        facts[name] = {
            **{f"{arm}_us": value for arm, value in spent.items()},
            "unit_us": inner,
            "host_share": (spent["captured"] - inner) / inner,
        }
    read = weight_bytes(model) + cache_bytes(model, CONTEXT)
    alone = times({"pass": pass_arm(captured.runner, 1, CONTEXT)})["pass"]
    return {
        "steps_a_look": k,
        **facts,
        "pass_us": 1e6 * alone,
        "share_of_bandwidth": 1e6 * limit_s(read) / facts["gate"]["captured_us"],
    }


def draft_arm(rows: Rows, drafter: DraftSteps, row: DraftRow) -> Callable[[], Any]:
    """Draft steps of one row after the context."""

    def run() -> None:
        rows.runner.rewind([CONTEXT])
        drafter([row])

    return run


def unit_us(rows: Rows, run: Callable[[], Any], k: int) -> float:
    """Microseconds a step that the compiled code itself takes, while ``run`` runs."""
    units: Any = rows.runner._units  # type: ignore[attr-defined]
    spent: list[float] = []
    before = dict(units._found)

    def timed(code: Any) -> Any:
        def call(inputs: list[torch.Tensor]) -> Any:
            began = time.perf_counter()
            made = code(inputs)
            spent[-1] += time.perf_counter() - began
            return made

        return call

    units._found.update({key: timed(code) for key, code in before.items()})
    for _ in range(60):
        spent.append(0.0)
        run()
    units._found.update(before)
    return 1e6 * float(np.quantile(spent, 0.25)) / k


def decoding(pair: sprinter.Pair, prompts: list[str], temperature: float) -> dict[str, Any]:
    """Tokens a second of transformers' plain and assisted decoding and of ours, interleaved."""
    target, draft = pair.models.target.model, pair.models.draft.model
    encoded = {prompt: torch.tensor([pair.tokenizer(prompt)["input_ids"]]) for prompt in prompts}

    def theirs(assistant: PreTrainedModel | None) -> Callable[[str, int], int]:
        def run(prompt: str, seed: int) -> int:
            torch.manual_seed(seed)
            out = target.generate(
                encoded[prompt], max_new_tokens=NEW_TOKENS, do_sample=temperature > 0, assistant_model=assistant,
                **({"temperature": temperature, "top_k": 0} if temperature > 0 else {}),
            )  # fmt: skip
            return int(out.shape[1] - encoded[prompt].shape[1])

        return run

    def ours(method: str) -> Callable[[str, int], int]:
        return lambda prompt, seed: (
            pair.generate(
                prompt, method=method, max_new_tokens=NEW_TOKENS, temperature=temperature, seed=seed, ahead=4
            ).stats.new_tokens
        )

    arms = {"transformers plain": theirs(None), "transformers assisted": theirs(draft)}
    exact = [f"speculative(gamma={gamma})" for gamma in (1, 2, 3, 4, 6)]
    arms |= {method: ours(method) for method in ("autoregressive", *exact, "sprinter")}
    spent = {name: [0, 0.0] for name in arms}
    for run in arms.values():
        run(prompts[0], 0)
    for seed, prompt in enumerate(prompts):
        for name, run in arms.items():
            began = time.perf_counter()
            spent[name][0] += run(prompt, seed)
            spent[name][1] += time.perf_counter() - began
    speed = {name: tokens / seconds for name, (tokens, seconds) in spent.items()}
    best = max(exact, key=speed.__getitem__)
    return {
        "tokens_per_s": speed,
        "best_exact": best,
        "plain_over_transformers": speed["autoregressive"] / speed["transformers plain"],
        "exact_over_assisted": speed[best] / speed["transformers assisted"],
        "sprinter_over_exact": speed["sprinter"] / speed[best],
    }


def equality(dtype: str, prompts: list[str], seeds: int = 50) -> dict[str, float]:
    """Share of texts that part, captured against eager, by method."""
    captured, eager = (sprinter.load_pair(dtype=dtype, compile=compile) for compile in (True, False))
    parted = dict.fromkeys(METHODS, 0)
    for seed in range(seeds):
        for method in METHODS:
            one, other = (
                pair.generate(prompts[seed % len(prompts)], method=method, seed=seed, ahead=4).tokens
                for pair in (captured, eager)
            )
            parted[method] += [token.id for token in one] != [token.id for token in other]
    return {method: count / seeds for method, count in parted.items()}


def context() -> dict[str, Any]:
    """Microseconds of a captured pass of one token by context, and what attention's bytes alone would add."""
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 2}
    config = LlamaConfig(**size, vocab_size=3072, max_position_embeddings=8448, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    runner = make_runner(model, max_len=8400, compile=True)
    spent, read = {}, {}
    for length in CONTEXTS:
        held = runner.lengths[0]
        runner.extend(torch.arange(length - held)[None] % 1000 + 5, logits=False)
        spent[str(length)] = 1e6 * times({"pass": pass_arm(runner, 1, length)})["pass"]
        read[str(length)] = 1e6 * limit_s(cache_bytes(model, length))
    return {"us": spent, "attention_bytes_us": read}


def table(results: dict[str, Any]) -> str:
    """What people read."""
    lines = ["# The fast engine", ""]
    for part in PARTS:
        if part in results:
            lines += [f"## {part}", "", "```", json.dumps(results[part], indent=1), "```", ""]
    return "\n".join(lines).rstrip()


def main() -> None:
    """Measure the parts that were asked for; parts that were measured before are kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the text files")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--prompts", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = heldout_prompts(options.data, options.prompts)
    pair = sprinter.load_pair(compile=True)
    old = ROOT / "benchmarks" / "results" / "engine.json"
    results: dict[str, Any] = (
        json.loads(old.read_text(encoding="utf-8")) if old.exists() else {"benchmark": "engine"}
    )
    makers: dict[str, Callable[[], Any]] = {
        "passes": lambda: {
            "target": passes(pair.models.target.model), "draft": passes(pair.models.draft.model),
            "gpt2-small (random)": passes(gpt2_small()),
        },
        "steps": lambda: steps(pair),
        "decoding": lambda: {str(t): decoding(pair, prompts, t) for t in (1.0, 0.0)},
        "equality": lambda: {dtype: equality(dtype, prompts) for dtype in ("float32", "bfloat16")},
        "context": context,
    }  # fmt: skip
    for part in options.parts:
        began = time.time()
        results[part] = makers[part]()
        results.setdefault("seconds", {})[part] = round(time.time() - began, 1)
        results.setdefault("environments", {})[part] = environment()
        write_results("engine", results, table(results))


if __name__ == "__main__":
    main()
