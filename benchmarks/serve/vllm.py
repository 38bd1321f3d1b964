"""Our methods in vLLM on a CPU, beside vLLM alone and its own speculation; all of a page's numbers in one run.

    python benchmarks/serve/vllm.py --data DIR [--target FOLDER --draft FOLDER --gate FOLDER --head FOLDER --name NAME]

By a Python that has vLLM (docs/vllm.md), in float32: greedy texts of exact methods against vLLM's, 8 at a time; sampled
texts of a narrow vocabulary against the declared laws; tokens a target pass and time, an engine for each arm, all arms
on each batch in turn; drift here and in our own engine, on the same requests. ``--head``: EAGLE-3's, for vLLM itself.

SmolLM2: ``benchmarks.real.arms.dequantised`` writes the target's folder from its GGUF file; draft and gate are made of
2,221 paragraphs of Wikipedia and Wikinews (40 to 100 words) that are not among the held-out ones, by

    sprinter draft distill --target FILE --dtype gguf --data prompts.jsonl -n 64 --prompt-tokens 64 --out DRAFT
      --width 256 --layers 2 --tokens 1024 --minutes 18 --precision bfloat16
    sprinter gate label --target FILE --dtype gguf --draft DRAFT --draft-dtype float32 --data prompts.jsonl
      --limit 1000 --prompt-tokens 64 -n 32 --out LABELS
    sprinter gate train --labels LABELS --preset mlp --out GATE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import numpy as np
from tests.doors.laws import LAWS, law_row, narrow
from vllm import LLM, SamplingParams

import sprinter
from benchmarks.common import cells, grid, heldout_prompts, in_turn, option_parser, save
from benchmarks.smoke import scratch, sized
from sprinter.bench.statistics import bootstrap, ratio_of_ratios, ratio_of_sums
from sprinter.doors.vllm import engine_args, register

EXACT = (
    "speculative(gamma=4)", "svip", "adaedl", "block(gamma=4)", "auto(step=0.3,token=0.02,reads=free)", "lookup",
)  # fmt: skip
LOSSY = ("sprinter(budget=0.05)", "sprinter(budget=0.1)")


def _settings(rows: int, context: int) -> dict[str, Any]:
    return {
        "dtype": "float32", "enforce_eager": True, "max_model_len": context, "max_num_seqs": rows, "block_size": 32,
        "kv_cache_memory_bytes": 256 << 20, "disable_log_stats": False, "enable_prefix_caching": False,
    }  # fmt: skip


@dataclass
class Served:
    """An engine, and what it gave on each batch: new tokens, target passes (of each text, summed), seconds, drift."""

    name: str
    llm: LLM
    method: str | None = None
    sums: list[tuple[float, float, float, float]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def answer(
        self, prompts: Sequence[list[int]], seed: int = 0, **given: Any
    ) -> tuple[list[Any], list[Any]]:
        """Outputs and, of our methods, reports; a prompt's seed is its number and ``seed``."""
        extra = {} if self.method is None else {"extra_args": {"sprinter": self.method}}
        params = [SamplingParams(**extra, **given, seed=seed + i) for i in range(len(prompts))]
        drafts, began = self._drafts(), time.perf_counter()
        outs = self.llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        seconds, tokens = time.perf_counter() - began, sum(len(out.outputs[0].token_ids) for out in outs)
        # each text has a pass without a draft, that of its prompt
        reports, calls, drift = [], self._drafts() - drafts + len(prompts), 0.0
        if self.method is not None:
            found = self.llm.collective_rpc("sprinter_reports")[0]
            by = {name.rpartition("-")[0]: report for name, report in found.items()}
            reports = [by[out.request_id] for out in outs]
            self.reports += reports
            calls, drift = (sum(one[what] for one in reports) for what in ("target_calls", "drift_sum"))
        elif self.llm.llm_engine.vllm_config.speculative_config is None:
            calls = tokens
        self.sums.append((tokens, calls, seconds, drift))
        return [out.outputs[0] for out in outs], reports

    def _drafts(self) -> float:
        """Drafts that were verified, by this engine's own counter: ``get_metrics`` reads those of the last engine."""
        counter = self.llm.llm_engine.logger_manager.stat_loggers[-1].spec_decoding_prom
        if not counter.spec_decoding_enabled:
            return 0
        (found,) = counter.counter_spec_decode_num_drafts[0].collect()
        return sum(one.value for one in found.samples if one.name.endswith("_total"))


def greedy_row(
    plain: Served, wanted: list[Any], door: Served, prompts: list[Any], most: int
) -> dict[str, Any]:
    """Whether texts are vLLM's; where one is not, the distance of vLLM's first two choices at its first other token."""
    made, reports = door.answer(prompts, temperature=0.0, max_tokens=most)
    unlike = []
    for i, (own, other) in enumerate(zip(wanted, made, strict=True)):
        if (text := list(own.token_ids)) != (found := list(other.token_ids)):
            at = next(j for j in range(most) if text[j : j + 1] != found[j : j + 1])
            first, _ = plain.answer([[*prompts[i], *text[:at]]], temperature=0.0, max_tokens=1, logprobs=2)
            best, second = sorted((one.logprob for one in first[0].logprobs[0].values()), reverse=True)[:2]
            unlike.append({"prompt": i, "token": at, "gap_nats": best - second})
    calls, tokens = (sum(one[name] for one in reports) for name in ("target_calls", "new_tokens"))
    return {"method": door.method, "texts": len(wanted), "equal": len(wanted) - len(unlike), "unlike": unlike,
            "tokens_per_pass": tokens / calls}  # fmt: skip


def drift_row(
    pair: sprinter.Pair, door: Served, prompts: list[Any], rows: int, most: int, heat: float
) -> dict[str, Any]:
    """Drift of the last requests in vLLM, and of the same ones in our engine."""
    given = {"method": door.method, "max_new_tokens": most, "temperature": heat, "meter": "complete"}
    own = pair.generate_batch(prompts, seed=list(range(len(prompts))), rows=rows, **given)
    sums = [(one["drift_sum"], one["new_tokens"]) for one in door.reports[-len(prompts) :]]
    both = np.array(
        [(*there, here.stats.drift_sum, here.stats.new_tokens) for there, here in zip(sums, own, strict=True)]
    )
    a, b, c, d = both.T
    return {
        "method": door.method, "requests": len(prompts), "vllm": ratio_of_sums(a, b), "own": ratio_of_sums(c, d),
        "apart": bootstrap(lambda i: a[i].sum(-1) / b[i].sum(-1) - c[i].sum(-1) / d[i].sum(-1), len(prompts)),
    }  # fmt: skip


def main() -> None:
    """Start all engines, measure, write."""
    paths, parser = sprinter.builtin_paths(), option_parser(__doc__)
    for name in ("target", "draft", "gate"):
        parser.add_argument(f"--{name}", default=str(paths[name]), help="a folder; else of the built-in pair")
    parser.add_argument("--head", help="of EAGLE-3, for vLLM's own speculation: a folder")
    parser.add_argument("--name", default="builtin", help="of the results")
    parser.add_argument("--texts", type=int, default=sized(100, 4), help="greedy ones")
    parser.add_argument("--batches", type=int, default=sized(24, 2), help="at most, at each number of rows")
    parser.add_argument("--rows", type=int, nargs="+", default=sized([1, 8], [1, 2]))
    parser.add_argument("--new-tokens", type=int, default=sized(48, 8))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--samples", type=int, default=sized(4000, 200), help="texts of each law; 0: no laws")
    args = parser.parse_args()
    began, most = time.time(), args.new_tokens
    register()
    own = {"method": "draft_model", "model": args.draft, "num_speculative_tokens": 4}
    stock = {"vLLM": None, "vLLM, draft_model": own,
             "vLLM, draft_model, sampled": {**own, "draft_sample_method": "probabilistic"}}  # fmt: skip
    if args.head:
        stock["vLLM, eagle3"] = {"method": "eagle3", "model": args.head, "num_speculative_tokens": 3}
    settings = _settings(8, 512)

    def ours(method: str) -> Served:
        door = engine_args(args.draft, gate=args.gate, method=method)
        return Served(f"ours, {method}", LLM(args.target, **settings, **door), method)

    arms = [
        Served(name, LLM(args.target, **settings, **({} if one is None else {"speculative_config": one})))
        for name, one in stock.items()
    ]
    arms += [ours(method) for method in ("speculative(gamma=4)", "svip", *LOSSY)]
    plain, words = arms[0], arms[0].llm.get_tokenizer()
    prompts = [words(text).input_ids for text in heldout_prompts(args.data, args.texts, longest=100)]
    facts: dict[str, Any] = {key: [] for key in ("greedy", "laws", "timed", "drift")}

    wanted, _ = plain.answer(prompts, temperature=0.0, max_tokens=most)
    for method in EXACT:
        door = Served(method, arms[-1].llm, method)
        facts["greedy"].append(greedy_row(plain, wanted, door, prompts, most))
    llm, laws = narrow(scratch("narrow"))
    for case in LAWS if args.samples else ():
        facts["laws"].append(law_row(llm, laws, *case, args.samples))
    for rows in args.rows:
        for arm in arms:
            arm.answer(prompts[-rows:], temperature=1.0, max_tokens=most)  # warms up
            arm.sums.clear()
        for i, arm in in_turn(arms, min(args.batches, len(prompts) // rows), f"{rows} rows"):
            batch = prompts[i * rows : (i + 1) * rows]
            arm.answer(batch, seed=rows * i, temperature=args.temperature, max_tokens=most)
        base = list(zip(*plain.sums, strict=True))
        for arm in arms:
            tokens, calls, seconds, drift = zip(*arm.sums, strict=True)
            facts["timed"].append({
                "arm": arm.name, "rows": rows, "batches": len(tokens), "tokens_per_s": sum(tokens) / sum(seconds),
                "tokens_per_pass": ratio_of_sums(tokens, calls), "drift": ratio_of_sums(drift, tokens),
                "speed_over_vllm": ratio_of_ratios((tokens, seconds), (base[0], base[2])),
            })  # fmt: skip
    pair = sprinter.load_pair(args.target, args.draft, gate=args.gate, dtype="float32", prefix_cache_bytes=0)
    for arm in arms[-len(LOSSY) :]:
        many = prompts[: len(arm.sums) * args.rows[-1]]
        facts["drift"].append(drift_row(pair, arm, many, args.rows[-1], most, args.temperature))
    models = {name: Path(getattr(args, name)).name for name in ("target", "draft", "gate")}
    save(f"serve/vllm_{args.name}", "\n".join(table(facts)), began, len(prompts), models=models,
         temperature=args.temperature, new_tokens=most, **facts)  # fmt: skip


def table(facts: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """What was measured, in Markdown."""
    timed = [
        f"{one['rows']} | {one['arm']} | {cells(one['tokens_per_pass'])} | {one['tokens_per_s']:.1f} | "
        f"{cells(one['speed_over_vllm'])} | {cells(one['drift'], 4)}" for one in facts["timed"]
    ]  # fmt: skip
    greedy = [
        f"{one['method']} | {one['equal']} of {one['texts']} | {one['tokens_per_pass']:.2f} | "
        f"{max((each['gap_nats'] for each in one['unlike']), default=0):.1e}" for one in facts["greedy"]
    ]  # fmt: skip
    laws = [
        f"{one['method']} | {one['sampling'] or 'as it is'} | {one['texts']} | {one['freedom']} | {one['z']:.2f} | "
        f"{one['z_of_target']:.2f}" for one in facts["laws"]
    ]  # fmt: skip
    drift = [
        f"{one['method']} | {one['requests']} | {cells(one['vllm'], 4)} | {cells(one['own'], 4)} | "
        f"{cells(one['apart'], 4)}"
        for one in facts["drift"]
    ]
    return [
        *grid("rows | arm | tokens a target pass | tokens/s | over vLLM | drift", timed), "",
        *grid("exact method, greedy | texts as vLLM's | tokens a target pass | gap where not, nats", greedy), "",
        *grid("sampled law | sampling | texts | degrees of freedom | z, declared law | z, target's law", laws), "",
        *grid("method | requests | drift in vLLM | in our engine | difference", drift),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
