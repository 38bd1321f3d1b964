"""Answers requests with vLLM: one JSON object a line, the first sets up the engine, each one after it holds requests.

Run by an interpreter that has vllm, which may be another than ours: only the standard library and vllm are imported.
Ends when its input ends.
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
    """vLLM's engine; requests that come together are served together.

    Args:
        settings: of ``EngineArgs``.
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
        self._mended = _mend() if "speculative_config" in settings and self._device == "cpu" else {}
        self._asked = 0

    def facts(self) -> dict[str, Any]:
        """Where it runs, and on what."""
        names = ("vllm", "torch", "transformers")
        versions = {
            name: str(getattr(importlib.import_module(name), "__version__", "unknown")) for name in names
        }
        return {"versions": versions | self._mended, "device": self._device}

    def answer(self, asks: list[dict[str, Any]]) -> dict[str, Any]:
        """For each request, in order, the fields of ``Answer`` that vLLM knows, and its numbers of the speculation.

        Args:
            asks: ``ids`` and ``params`` of requests that are handed over together.
        """
        chosen = [
            self._vllm.SamplingParams(**ask["params"], detokenize=False, output_kind=self._kind)
            for ask in asks
        ]
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
        told: dict[str, dict[str, Any]] = {
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
                _note(told[output.request_id], output.outputs[0], now)
        return list(told.values())


def _note(told: dict[str, Any], given: Any, now: float) -> None:
    """What a step gave one request."""
    told["wall_s"] = now
    if given.token_ids:
        told["arrivals_s"] += [now] * len(given.token_ids)
        told["accept_lengths"].append(len(given.token_ids))
        told["ids"] += given.token_ids
    metrics = getattr(given, "spec_decode_metrics", None)
    told["speculation"] = None if metrics is None else metrics.to_dict()


def _mend() -> dict[str, str]:
    """Makes vLLM's speculative decoding on a CPU draw from the target's law, where it does not; says what was done.

    vLLM 0.32.0 leaves the temperature, top-k and top-p of each draft token unset there (vllm-project/vllm, issue
    55005), so that its texts follow no law. A version that sets them is left as it is.
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
        mend = "install it there, or give python=PATH (or SPRINTER_VLLM_PYTHON) of an interpreter that has it"
        _say(out, {"mistake": f"{settings['python']} has no vllm: {mend}"})
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
    """Lines as they come. A thread reads them, so that this process ends with its input even while it sets up."""
    lines: Queue[str] = Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    Thread(target=read, daemon=True).start()
    return lines


def _own_stdout() -> TextIO:
    """Our own way to the parent: what else is printed in this process goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that last words come last
    return out


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def _trouble(error: Exception) -> dict[str, str]:
    """One line for the parent, the whole to stderr."""
    traceback.print_exception(error)
    lines = str(error).strip().splitlines() or ["no message"]
    return {"error": f"{type(error).__name__}: {lines[0]}"}


if __name__ == "__main__":
    # The modules of our folder are not to be taken for others of the same name.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    main()
