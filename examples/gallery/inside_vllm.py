"""Inside vLLM: our methods by request, and what vLLM reports of each. An environment with vLLM."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}

import draw
from vllm import LLM, SamplingParams

import sprinter
from sprinter.doors.vllm import engine_args, register

register()
paths = {name: str(path) for name, path in sprinter.builtin_paths().items()}
llm = LLM(
    paths["target"], dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8,
    num_gpu_blocks_override=48, kv_cache_memory_bytes=64 << 20,
    **engine_args(paths["draft"], gate=paths["gate"], method="speculative(gamma=4)"),
)  # fmt: skip
prompts = [
    "Once upon a time, there was a little",
    "The old mill stood by",
    "One morning a small bird",
    "Tom and Anna",
]
points = {}
for method in ("speculative(gamma=4)", "svip", "sprinter(tau=0.7)", "sprinter(tau=0.5)", "coin(rate=0.5)"):
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, extra_args={"sprinter": method})
    llm.generate(prompts, params)
    reports = [*llm.collective_rpc("sprinter_reports")[0].values()][-len(prompts) :]
    count = sum(one["new_tokens"] for one in reports)
    drift = sum((one["mean_drift"] or 0.0) * one["new_tokens"] for one in reports) / count
    points[method] = [(drift, sum(one["target_calls"] for one in reports) / count)]
draw.chart("inside_vllm", points, "mean drift", "target calls a token", lines=())
