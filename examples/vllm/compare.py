"""vLLM alone, with its own draft model, and with our methods, on the same prompts: see the README beside."""

import argparse
import gc
import json
import time
from typing import Any

from vllm import LLM, SamplingParams

from sprinter.doors.vllm import engine_args

WORDS = [
    "The",
    "river",
    "A",
    "man",
    "In",
    "1914",
    "the",
    "Most",
    "people",
    "Water",
    "is",
    "When",
    "they",
    "Some",
    "of",
    "the",
    "first",
    "It",
    "was",
    "never",
    "Children",
    "like",
    "Many",
    "of",
]


def counted(llm: LLM) -> dict[str, float]:
    """vLLM's own counts of speculation."""
    return {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}


def run(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[int, float]:
    """New tokens, and seconds after one prompt to warm up."""
    llm.generate(prompts[:1], params, use_tqdm=False)
    began = time.perf_counter()
    made = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(one.outputs[0].token_ids) for one in made), time.perf_counter() - began


def main() -> None:
    """Run the arms one after the other, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--gate")
    parser.add_argument("--method", action="append", default=[])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--gamma", type=int, default=4, help="of vLLM's own draft model")
    args = parser.parse_args()
    prompts = [" ".join((WORDS * 9)[i : i + 3 + i % 5]) for i in range(args.prompts)]
    shared: dict[str, Any] = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": args.rows,
        "kv_cache_memory_bytes": 256 << 20, "disable_log_stats": False,
    }  # fmt: skip

    def params(method: str | None) -> SamplingParams:
        extra = None if method is None else {"sprinter": method}
        return SamplingParams(
            temperature=args.temperature,
            max_tokens=args.new_tokens,
            seed=0,
            ignore_eos=True,
            extra_args=extra,
        )

    own = {"method": "draft_model", "model": args.draft, "num_speculative_tokens": args.gamma}
    for name, more in (("vllm", {}), ("vllm draft_model", {"speculative_config": own})):
        llm = LLM(args.target, **shared, **more)
        tokens, seconds = run(llm, prompts, params(None))
        counts = counted(llm)
        drafts, accepted = (
            counts.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens")
        )
        each = 1 + accepted / drafts if drafts else 1.0
        print(
            json.dumps(
                {"arm": name, "tokens_per_pass": round(each, 3), "tokens": tokens, "s": round(seconds, 2)}
            )
        )
        del llm
        gc.collect()
    llm = LLM(args.target, **shared, **engine_args(args.draft, gate=args.gate))
    for method in args.method or ["svip"]:
        tokens, seconds = run(llm, prompts, params(method))
        last = list(llm.collective_rpc("sprinter_reports")[0].values())[-len(prompts) :]
        calls = sum(one["target_calls"] for one in last)
        drift = sum(one["drift_sum"] or 0.0 for one in last) / sum(one["new_tokens"] for one in last)
        line = {"arm": method, "tokens_per_pass": round(tokens / calls, 3), "drift": round(drift, 4)}
        print(json.dumps({**line, "tokens": tokens, "s": round(seconds, 2)}))


if __name__ == "__main__":
    main()
