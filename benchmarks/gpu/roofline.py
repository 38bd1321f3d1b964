"""The roofline: how near a pass comes to the bandwidth that a plain copy reaches, and what a step costs beside it.

Bytes of a pass: the weights that it reads (of an input embedding that is not tied only the rows of its tokens), and the
keys and values that it reads and writes. Bandwidth of a copy: bytes read and bytes written over time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sprinter_kernels.layers import RoundedLinear
from transformers import PreTrainedModel

from benchmarks.gpu.stage import Run, TimeUp, check_time, first_line, free, synchronise
from benchmarks.gpu.train import load_trained
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.models.choose import make_runner
from sprinter.models.memory import token_bytes

PROFILED = 5  # passes under the profiler
STEPS = (8, 40)  # new tokens; the difference of the two runs is free of the prompt's pass


def copy_gb_per_s(run: Run, size_bytes: int) -> float:
    """Bandwidth of copying a buffer of random bytes to another, in 10^9 bytes a second, the median of a few."""
    one = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=run.device)
    other = torch.empty_like(one)
    copies = max(3, min(200, (16 << 30) // max(1, size_bytes))) if run.device.type == "cuda" else 3
    rates = []
    for _ in range(5):
        synchronise(run.device)
        began = time.perf_counter()
        for _ in range(copies):
            other.copy_(one)
        synchronise(run.device)
        rates.append(2 * size_bytes * copies / (time.perf_counter() - began) / 1e9)
    return statistics.median(rates)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that every pass reads."""
    rounded = [part for part in model.modules() if isinstance(part, RoundedLinear)]
    total = sum(one.nbytes for one in (*model.parameters(), *(one for p in rounded for one in p.buffers())))
    rows, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = not isinstance(head, RoundedLinear) and rows.data_ptr() == head.weight.data_ptr()
    return total - (0 if tied else rows.nbytes)


def cache_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of the keys and values of so many tokens."""
    return token_bytes(model) * tokens


class Passes:
    """Passes of our runner over a few tokens behind ``cached`` ones.

    Args:
        rates: bandwidths to hold them against, in 10^9 bytes a second, by name.
        kind: "eager" or "captured".
    """

    def __init__(
        self,
        run: Run,
        model: PreTrainedModel,
        lengths: tuple[int, ...],
        rates: dict[str, float],
        kind: str = "eager",
    ) -> None:
        self._run, self._model, self._lengths, self._rates = run, model, lengths, rates
        self._cached, self._kind = run.sizes.cached, kind
        cached = self._cached
        self._runner = make_runner(model, max_len=cached + max(lengths), compile=kind == "captured")
        chance = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self._runner.vocab_size, (1, cached + max(lengths)), generator=chance)
        self._ids = ids.to(run.device)
        self._runner.extend(self._ids[:, :cached], logits=False)

    def _work(self, tokens: int) -> torch.Tensor | None:
        self._runner.rewind([self._cached])
        return self._runner.extend(self._ids[:, self._cached : self._cached + tokens]).logits

    def _fractions(self, moved: int, seconds: float) -> dict[str, float]:
        return {name: moved / seconds / 1e9 / rate for name, rate in self._rates.items()}

    def timed(self) -> list[dict[str, Any]]:
        """One row a length: bytes, median time of a pass, its share of each bandwidth, and whether its first token
        has the logits of the shortest pass, to the bit."""
        rows: list[dict[str, Any]] = []
        first = None
        for n in self._lengths:
            times_s = []
            logits = self._work(n)
            assert logits is not None
            first = logits[0, 0].clone() if first is None else first
            same = torch.equal(logits[0, 0], first)
            for _ in range(self._run.sizes.pass_repeats + 3):
                synchronise(self._run.device)
                began = time.perf_counter()
                self._work(n)
                synchronise(self._run.device)
                times_s.append(time.perf_counter() - began)
            moved = weight_bytes(self._model) + cache_bytes(self._model, self._cached + n)
            pass_s = statistics.median(times_s[3:])
            fraction = self._fractions(moved, pass_s)
            row = {"kind": self._kind, "tokens": n, "bytes": moved, "pass_ms": 1000 * pass_s}
            rows.append(row | {"fraction": fraction, "same_bits": same})
        return rows

    def add_kernels(self, rows: list[dict[str, Any]]) -> None:
        """Add the time that the device itself works on each pass, by torch's profiler, or why it gives none."""
        for row in rows:
            busy_ms = kernel_ms(self._run, partial(self._work, row["tokens"]))
            row["kernel_ms"] = busy_ms
            if not isinstance(busy_ms, str):
                row["kernel_fraction"] = self._fractions(row["bytes"], busy_ms / 1000)
                row["host_overhead_ms"] = row["pass_ms"] - busy_ms


def kernel_ms(run: Run, work: Callable[[], object]) -> float | str:
    """Time that the device itself works, a call; why it is not known, where the profiler gives nothing."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = run.device.type == "cuda"
    try:
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
            for _ in range(PROFILED):
                work()
            synchronise(run.device)
        name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        total_us = sum(getattr(event, name) for event in found.key_averages())
    except Exception as error:  # profilers fail in many ways; the rest of the table is worth having
        return first_line(error)
    return total_us / PROFILED / 1000 if total_us > 0 else "the profiler saw no kernel"


def step_ms(run: Run, pair: Pair, method: str) -> float:
    """Time of one decoding step of a method that makes a token a step: pass, law, draw and loop."""
    chance = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, pair.models.vocab_size, (run.sizes.cached,), generator=chance).tolist()
    walls: dict[int, list[float]] = {n: [] for n in STEPS}
    for repeat in range(4):
        for n in STEPS:
            out = pair.generate(prompt, method=method, max_new_tokens=n, seed=repeat)
            # A text that met its end early has fewer tokens: it says nothing about n of them.
            if repeat and len(out.tokens) == n:
                walls[n].append(out.stats.wall_s - out.stats.closing_s)
    if not all(walls.values()):
        raise UserError("every timed text ended early: the model's end-of-text token is too likely")
    few, many = (statistics.median(walls[n]) for n in STEPS)
    return 1000 * (many - few) / (STEPS[1] - STEPS[0])


def load_captured(run: Run, load: Callable[..., Pair]) -> tuple[Pair | None, str | None]:
    """The pair once more with captured steps (``load_pair(..., compile=True)``), or why there is none."""
    if run.device.type != "cuda":
        return None, "steps are captured on a GPU alone"
    try:
        return load(compile=True, prefix_cache_bytes=0), None  # the bench clears the eager pair's alone
    except UserError as error:
        return None, first_line(error)


def pass_kinds(run: Run) -> tuple[str, ...]:
    """What kinds of passes there are here; see ``Passes``."""
    return ("eager", "captured") if run.device.type == "cuda" else ("eager",)


def describe(run: Run, model: PreTrainedModel, large: float) -> dict[str, Any]:
    """Size of a model, and the bandwidths that its passes are held against."""
    size = weight_bytes(model)
    return {"weight_bytes": size, "copy_gb_per_s": {"large": large, "same_size": copy_gb_per_s(run, size)}}


def run_stage(run: Run, deadline: float) -> None:
    """Copies, passes of target and draft, and steps, eager and (where the engine can) captured."""
    large = copy_gb_per_s(run, run.sizes.copy_bytes)
    run.say(f"copy: {large:,.0f} GB/s")
    pairs = {"eager": load_trained(run, compile=False)}
    captured, why_not = load_captured(run, partial(load_trained, run))
    if captured is not None:
        pairs["captured"] = captured
    copy = {"copy_bytes": run.sizes.copy_bytes, "copy_gb_per_s": large, "cached": run.sizes.cached}
    models: dict[str, Any] = {}
    run.keep("roofline", **copy, captured=why_not or "yes", models=models)
    timed: list[tuple[str, Passes, list[dict[str, Any]]]] = []
    loaded = {"target": pairs["eager"].models.target, "draft": pairs["eager"].models.draft}
    try:
        for role, method in (("target", "autoregressive"), ("draft", "draft-only")):
            check_time(deadline)
            models[role] = facts = describe(run, loaded[role].model, large)
            facts["passes"] = []
            for kind in pass_kinds(run):
                passes = Passes(run, loaded[role].model, run.sizes.passes, facts["copy_gb_per_s"], kind)
                rows = passes.timed()
                timed.append((role, passes, rows))
                facts["passes"] += rows
            facts["steps"] = {name: {"step_ms": step_ms(run, pair, method)} for name, pair in pairs.items()}
            add_step_facts(facts)
            run.keep("roofline")
        for role, passes, rows in timed:
            check_time(deadline)
            passes.add_kernels(rows)
            add_step_facts(models[role])
            run.keep("roofline")
    except TimeUp:
        run.keep("roofline", stopped="out of time")
    free(run.device)


def add_step_facts(facts: dict[str, Any]) -> None:
    """Fractions of each step, from the bytes and kernels of the pass over one token."""
    one = facts["passes"][0]
    for step in facts["steps"].values():
        moved_per_ms = one["bytes"] / step["step_ms"] / 1e6
        step["fraction"] = {name: moved_per_ms / rate for name, rate in facts["copy_gb_per_s"].items()}
        if isinstance(one.get("kernel_ms"), float):
            step["beyond_kernels_ms"] = step["step_ms"] - one["kernel_ms"]
