"""vLLM worker: reads one JSON object per line; the first has the engine's settings, the others have requests.

It is run by an interpreter that has vllm, perhaps not that of this package, so it imports only the standard library and
vllm. It ends when its input ends.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import sys
import time
import traceback
from queue import Queue
from threading import Thread
from typing import Any, TextIO

__all__ = ["VllmEngine", "main"]


class VllmEngine:
    """vLLM's engine; requests of one message are batched.

    Args:
        settings: arguments of ``EngineArgs``.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        kinds: Any = importlib.import_module("vllm.sampling_params")
        self._kind = kinds.RequestOutputKind.DELTA
        known = getattr(self._vllm.EngineArgs, "__dataclass_fields__", {})
        if "speculative_config" in settings and "per_request_spec_decode_metrics" in known:
            settings = settings | {"per_request_spec_decode_metrics": "summary"}
        self._engine = self._vllm.LLMEngine.from_engine_args(self._vllm.EngineArgs(**settings))
        self._device = str(importlib.import_module("vllm.platforms").current_platform.device_type)
        broken = "speculative_config" in settings and self._device == "cpu"
        self._fixed = _fix_draft_sampling() if broken else {}
        self._asked = 0

    def facts(self) -> dict[str, Any]:
        """Versions and device."""
        modules = {name: importlib.import_module(name) for name in ("vllm", "torch", "transformers")}
        versions = {name: str(getattr(module, "__version__", "unknown")) for name, module in modules.items()}
        return {"versions": versions | self._fixed, "device": self._device}

    def answer(self, asks: list[dict[str, Any]]) -> dict[str, Any]:
        """For each request, in order, the fields of ``ArmAnswer`` that vLLM knows, and its speculation metrics.

        Args:
            asks: ``ids`` and ``params`` of requests that are submitted together.
        """
        kind = {"detokenize": False, "output_kind": self._kind}
        chosen = [self._vllm.SamplingParams(**ask["params"], **kind) for ask in asks]
        names = [str(self._asked + i) for i in range(len(asks))]
        self._asked += len(asks)
        gc.collect()
        gc.disable()
        try:
            return {"answers": self._run(names, [ask["ids"] for ask in asks], chosen)}
        except BaseException:
            self._engine.abort_request(names)
            raise
        finally:
            gc.enable()

    def _run(self, names: list[str], prompts: list[list[int]], params: list[Any]) -> list[dict[str, Any]]:
        answers: dict[str, dict[str, Any]] = {
            name: {"ids": [], "wall_s": 0.0, "arrivals_s": [], "accept_lengths": [], "speculation": None}
            for name in names
        }
        began = time.perf_counter()
        for name, ids, one in zip(names, prompts, params, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": ids}, one)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                _note(answers[output.request_id], output.outputs[0], now)
        return list(answers.values())


def _note(answer: dict[str, Any], given: Any, now: float) -> None:
    """Add the output of a step to the answer of one request."""
    answer["wall_s"] = now
    if given.token_ids:
        answer["arrivals_s"] += [now] * len(given.token_ids)
        answer["accept_lengths"].append(len(given.token_ids))
        answer["ids"] += given.token_ids
    metrics = getattr(given, "spec_decode_metrics", None)
    answer["speculation"] = None if metrics is None else metrics.to_dict()


def _fix_draft_sampling() -> dict[str, str]:
    """Fix vLLM's speculative decoding on a CPU, so that it samples from the target's law; return a note if it did.

    On a CPU vLLM 0.32.0 leaves the temperature, top-k and top-p of each draft token unset (vllm-project/vllm, issue
    55005), so that its texts do not follow the target's law. A version that sets them is not changed.
    """
    torch: Any = importlib.import_module("torch")
    sampler: Any = importlib.import_module("vllm.v1.sample.rejection_sampler")

    def expand(x: Any, ends: Any, tokens: int, replace_from: float = 0, replace_to: float = 0) -> Any:
        """x[i] for each token of request i, whose tokens end before ends[i]."""
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=tokens)

    ends = torch.tensor([2, 5], dtype=torch.int32)
    for given in (
        torch.tensor([0.7, 0.0]),
        torch.tensor([0.25, 1.5]),
        torch.tensor([7, 3], dtype=torch.int32),
    ):
        if not torch.equal(
            sampler.expand_batch_to_tokens(given, ends, 5, 0, 1), expand(given, ends, 5, 0, 1)
        ):
            sampler.expand_batch_to_tokens = expand
            return {"mended in vllm": "temperatures of draft tokens on a CPU, issue 55005"}
    return {}


def main() -> None:
    """Set up, then answer until the input ends."""
    out, lines = _own_stdout(), _input()
    settings = json.loads(lines.get())
    try:
        engine = VllmEngine(settings["engine"])
        _say(out, engine.facts())
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        fix = "install it there, or give python=PATH (or SPRINTER_VLLM_PYTHON) of an interpreter that has it"
        _say(out, {"mistake": f"{settings['python']} has no vllm: {fix}"})
        return
    except Exception as error:
        _say(out, _trouble(error))
        return
    while True:
        try:
            _say(out, engine.answer(**json.loads(lines.get())))
        except Exception as error:
            _say(out, _trouble(error))


def _input() -> Queue[str]:
    """Queue of input lines. A thread reads them, so that the process ends with its input even during set-up."""
    lines: Queue[str] = Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    Thread(target=read, daemon=True).start()
    return lines


def _own_stdout() -> TextIO:
    """A stream to the parent process; everything else that this process prints goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that the last line is flushed
    return out


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def _trouble(error: Exception) -> dict[str, str]:
    """One line for the parent; the full error goes to stderr."""
    traceback.print_exception(error)
    lines = str(error).strip().splitlines() or ["no message"]
    return {"error": f"{type(error).__name__}: {lines[0]}"}


if __name__ == "__main__":
    # Modules in this directory must not shadow others with the same name.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    main()
