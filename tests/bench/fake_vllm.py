"""A package that looks like vllm to the worker: two tokens a step, until the limit or a stop token."""

from __future__ import annotations

from pathlib import Path

_INIT = """
from dataclasses import dataclass
from types import SimpleNamespace
import sys

__version__ = "0.0.fake"
print("this goes to stdout, which is not ours to write to")


@dataclass
class EngineArgs:
    model: str
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int = 0
    skip_tokenizer_init: bool = False
    generation_config: str = "auto"
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    disable_log_stats: bool = False
    kv_cache_memory_bytes: int = 0
    speculative_config: dict | None = None
    per_request_spec_decode_metrics: str = "none"


@dataclass
class SamplingParams:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_tokens: int
    seed: int | None
    stop_token_ids: list
    ignore_eos: bool
    detokenize: bool
    output_kind: str


class LLMEngine:
    @classmethod
    def from_engine_args(cls, args):
        engine = cls()
        engine.args, engine.waiting = args, {}
        if args.max_model_len == 13:
            raise ValueError("thirteen is unlucky\\nand more of it")
        return engine

    def add_request(self, name, prompt, params):
        if params.max_tokens == 13:
            raise ValueError("thirteen new tokens")
        if params.max_tokens == 14:
            print("the engine burst", file=sys.stderr)
            sys.exit(3)
        stop, ids = params.stop_token_ids, []
        for i in range(params.max_tokens):
            ids.append(prompt["prompt_token_ids"][i % len(prompt["prompt_token_ids"])])
            if ids[-1] in stop:
                break
        self.waiting[name] = ids

    def abort_request(self, names):
        for name in names:
            self.waiting.pop(name, None)

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        return [self.go_on(name) for name in list(self.waiting)]

    def go_on(self, name):
        ids = self.waiting[name]
        now, self.waiting[name] = ids[:2], ids[2:]
        done = not self.waiting[name]
        if done:
            del self.waiting[name]
        wanted = self.args.per_request_spec_decode_metrics == "summary"
        told = {"num_draft_tokens": 7, "dtype": self.args.dtype, "config": self.args.speculative_config}
        metrics = SimpleNamespace(to_dict=lambda: told) if done and wanted else None
        given = SimpleNamespace(token_ids=now, spec_decode_metrics=metrics)
        return SimpleNamespace(request_id=name, outputs=[given])
"""
_FILES = {
    "vllm/__init__.py": _INIT,
    "vllm/sampling_params.py": "class RequestOutputKind:\n    DELTA = 'delta'\n",
    "vllm/platforms.py": "from types import SimpleNamespace\ncurrent_platform = SimpleNamespace(device_type='cpu')\n",
    "torch.py": "__version__ = '1.fake'\n",
    "transformers.py": "__version__ = '2.fake'\n",
}


_SAMPLER = """
import torch


def expand_batch_to_tokens(x, ends, tokens, replace_from=0, replace_to=0):
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(torch.tensor([2, 3])) + {error}
"""


def install(folder: Path, error: float | None = None) -> Path:
    """Write the package; the folder belongs on PYTHONPATH.

    Args:
        error: what its sampler adds to each temperature; None: it has no sampler, and there is but the name of torch.
    """
    files = dict(_FILES)
    if error is not None:
        del files["torch.py"]
        files |= {"vllm/v1/__init__.py": "", "vllm/v1/sample/__init__.py": ""}
        files["vllm/v1/sample/rejection_sampler.py"] = _SAMPLER.format(error=error)
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder
