"""The fast engine: passes and draft steps against the machine's limit, captured = eager, cost by context.

    python benchmarks/engine/passes.py --data DIR [--parts passes steps equality context meter ahead]

Decoding is timed by benchmarks/engine/decoding.py. One process, one thread, arms interleaved; a part is saved when it
is done, and parts that were measured before stay. A pass is run a few times in a row and only the last one is taken, so
that arms do not push each other's weights out of the cache; the time is the lower quartile of such turns. The bandwidth
is measured in the same way on a buffer as large as what a pass reads, since small weights live in the cache. A target
pass "after drafts" follows three draft steps, as it does in decoding. What is not on the disk is compiled first, which
takes about a minute a shape; compiled code lies in the user's cache directory, or in SPRINTER_CACHE.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import sprinter
from benchmarks.common import (
    NEW_TOKENS,
    cells,
    grid,
    heldout_prompts,
    note_run,
    option_parser,
    write_results,
)  # fmt: skip
from benchmarks.smoke import sized
from sprinter.bench.statistics import ratio_of_sums
from sprinter.decode.meter import Meter
from sprinter.engine.captured import CapturedDraftSteps
from sprinter.engine.rows import CacheRows
from sprinter.engine.steps import DraftPlan, DraftRow, DraftSteps, EagerDraftSteps
from sprinter.laws import Sampling
from sprinter.models.memory import cache_bytes
from sprinter.models.quantised.library import kernel
from sprinter.models.runner import Runner, make_runner
from sprinter.random import AddressedDraws

LENGTHS = sized((1, 2, 4, 6, 8, 16, 32), (1, 2))
CONTEXT = sized(128, 16)
CONTEXTS = sized((128, 512, 1024, 2048, 4096, 8192), (16, 32))
AHEAD = (1, 4)
METHODS = sized(("autoregressive", "speculative(gamma=4)", "sprinter(tau=0.5)"), ("sprinter(tau=0.5)",))
NAME = "engine/passes"
PARTS = ("passes", "steps", "equality", "context", "meter", "ahead")
AHEAD_SETTINGS: tuple[int | Literal["auto"], ...] = (1, 2, 4, "auto")
AHEAD_METHODS = sized(("sprinter(tau=0.65)", "sprinter(tau=0.45)", "svip"), ("svip",))
METERED = sized(
    ("sprinter(tau=0.45)", "sprinter(tau=0.65)", "coin(rate=0.6, cap=20)"), ("coin(rate=0.6, cap=20)",)
)
PROMPTS = sized(25, 2)
DTYPES = ("float32", "bfloat16")
WARM_UP = sized(3, 0)  # rounds that are not timed
WARM = sized(4, 1)  # a pass finds its weights where the pass before it left them


def times(
    arms: Mapping[str, Callable[[], Any]], repeats: int = sized(60, 1), warm: int = WARM
) -> dict[str, float]:
    """Seconds of each arm, the lower quartile, arms in turn; ``warm`` runs before each one that is timed."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + WARM_UP):
        for name, run in arms.items():
            for _ in range(warm):
                run()
            began = time.perf_counter()
            run()
            if repeat >= WARM_UP:
                taken[name].append(time.perf_counter() - began)
    return {name: float(np.quantile(values, 0.25)) for name, values in taken.items()}


def weight_bytes(model: PreTrainedModel) -> int:
    """What one pass reads of the weights: an embedding that is not also the output's is read a row at a time."""
    head, inputs = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    total = sum(weights.numel() * weights.element_size() for weights in model.parameters())
    return total if head is inputs else total - inputs.numel() * inputs.element_size()


def limit_s(n_bytes: int) -> float:
    """Seconds to read so many bytes, by the faster of two ways."""
    buffer = torch.ones(n_bytes // 4)
    return min(times({"sum": buffer.sum, "dot": lambda: buffer.dot(buffer)}, 20).values())


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
    return GPT2LMHeadModel(GPT2Config(**sized({}, {"n_layer": 1}))).eval()


def passes(
    model: PreTrainedModel, draft: Runner | None = None, repeats: int = sized(60, 1)
) -> dict[str, Any]:
    """Times of the eager and the captured pass at each length, and the share of the bandwidth at length one.

    With ``draft``, a captured runner, also the captured pass after three of its steps.
    """
    runners = {"eager": filled(model, 512, CONTEXT, False), "captured": filled(model, 512, CONTEXT, True)}
    rows: dict[str, Any] = {}
    for n in LENGTHS:
        arms = {name: pass_arm(runner, n, CONTEXT) for name, runner in runners.items()}
        rows[str(n)] = {name: 1e6 * value for name, value in times(arms, repeats).items()}
        if draft is not None:
            rows[str(n)]["after drafts"] = 1e6 * after_drafts(arms["captured"], pass_arm(draft, 1, CONTEXT))
    read = weight_bytes(model) + cache_bytes(model, CONTEXT)
    limit = 1e6 * limit_s(read)
    return {
        "us": rows,
        "bytes": read,
        "limit_us": limit,
        "share_of_bandwidth": {name: limit / rows["1"][name] for name in runners},
    }


def after_drafts(run: Callable[[], Any], draft: Callable[[], Any], repeats: int = sized(120, 2)) -> float:
    """Seconds of a pass that follows three draft steps each time, the lower quartile."""
    taken = []
    for _ in range(repeats):
        for _ in range(3):
            draft()
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return float(np.quantile(taken, 0.25))


def all_passes(pair: sprinter.Pair) -> dict[str, Any]:
    """The built-in pair in both dtypes, and a model of another kind and size."""
    made: dict[str, Any] = {}
    for dtype in DTYPES:
        half = pair if dtype == "float32" else sprinter.load_pair(dtype=dtype, compile=True)
        assert half.models.draft is not None
        target, draft = half.models.target.model, half.models.draft.model
        made[f"target, {dtype}"] = passes(target, filled(draft, 512, CONTEXT, True))
        made[f"draft, {dtype}"] = passes(draft)
    return made | {"GPT-2 small, random, float32": passes(gpt2_small(), repeats=8)}


def steps(pair: sprinter.Pair) -> dict[str, Any]:
    """A draft step: eager, captured, the compiled code in it, the compiled pass alone; what the host adds."""
    assert pair.models.draft is not None
    model = pair.models.draft.model
    eager, captured = (
        CacheRows(filled(model, 512, 1, c), pair.models.vocab_size, "draft") for c in (False, True)
    )
    makers: dict[str, tuple[CacheRows, Callable[[CacheRows], DraftSteps]]] = {
        "eager": (eager, EagerDraftSteps), "captured": (captured, CapturedDraftSteps),
    }  # fmt: skip
    drafters = {name: (rows, make(rows)) for name, (rows, make) in makers.items()}
    for rows in (eager, captured):
        rows.runner.rewind([0])
        rows.runner.extend(torch.arange(CONTEXT)[None] + 5, logits=False)
    alone = 1e6 * times({"pass": pass_arm(captured.runner, 1, CONTEXT)})["pass"]
    read = weight_bytes(model) + cache_bytes(model, CONTEXT)
    limit = 1e6 * limit_s(read)
    found = []
    for name, heads in (("no head", {}), ("gate", {"gate": pair.gate} if pair.gate else {})):
        for k in AHEAD:
            plan = DraftPlan(Sampling(), ("entropy",), heads)
            row = DraftRow(0, [9], CONTEXT + 1, 1, AddressedDraws(1), plan, count=k)
            arms = {arm: draft_arm(rows, drafter, row) for arm, (rows, drafter) in drafters.items()}
            spent = {arm: 1e6 * value / k for arm, value in times(arms).items()}
            unit = unit_us(captured, arms["captured"], k)
            found.append(
                {
                    "heads": name, "steps_a_look": k, "eager_us": spent["eager"], "captured_us": spent["captured"],
                    "unit_us": unit, "host_over_unit": spent["captured"] / unit - 1,
                    "share_of_bandwidth": limit / spent["captured"],
                }
            )  # fmt: skip
    return {"rows": found, "pass_us": alone, "bytes": read, "limit_us": limit}


def draft_arm(rows: CacheRows, drafter: DraftSteps, row: DraftRow) -> Callable[[], Any]:
    """Draft steps of one row after the context."""

    def run() -> None:
        rows.runner.rewind([CONTEXT])
        drafter([row])

    return run


def unit_us(rows: CacheRows, run: Callable[[], Any], k: int) -> float:
    """Microseconds a step that the compiled code itself takes, our kernels' pass included, while ``run`` runs."""
    units: Any = type(rows.runner._units)  # type: ignore[attr-defined]
    straight = "sprinter.models.quantised.straight"
    spent: list[float] = []
    find = units.find

    def counted(code: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            began = time.perf_counter()
            made = code(*inputs)
            spent[-1] += time.perf_counter() - began
            return made

        return call

    def timed(*asked: Any) -> Any:
        code = find(*asked)
        return code and counted(code)

    kernels = SimpleNamespace(run_pass=counted(kernel().run_pass))
    with patch.object(units, "find", timed), patch(f"{straight}.kernel", lambda: kernels):
        for _ in range(sized(60, 2)):
            spent.append(0.0)
            run()
    assert min(spent) > 0, "no compiled code ran"
    return 1e6 * float(np.quantile(spent, 0.25)) / k


def equality(dtype: str, prompts: Sequence[Sequence[int]], seeds: int) -> dict[str, dict[str, Any]]:
    """Texts that part, captured against eager, by method, and where."""
    captured, eager = (sprinter.load_pair(dtype=dtype, compile=compile) for compile in (True, False))
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        places = []
        for seed in range(seeds):
            one, other = (
                [
                    t.id
                    for t in pair.generate(
                        prompts[seed % len(prompts)], method=method, seed=seed, max_new_tokens=NEW_TOKENS
                    ).tokens
                ]
                for pair in (captured, eager)
            )
            if one != other:
                places.append(
                    next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1)
                )
            print(f"\r{dtype} {method} {seed + 1}/{seeds}", end="", file=sys.stderr)
        print(file=sys.stderr)
        found[method] = {
            "texts": seeds, "parted": len(places), "median_token": float(np.median(places)) if places else None,
        }  # fmt: skip
    return found


def longer(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same shape with random weights and room for the longest context."""
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = CONTEXTS[-1] + 256
    torch.manual_seed(0)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}  # not those of joined layers
    return AutoModelForCausalLM.from_config(config, **options).eval()


def context(model: PreTrainedModel) -> list[dict[str, float]]:
    """A captured pass of one token by context, and the time that reading keys and values takes at least."""
    runner = make_runner(model, max_len=CONTEXTS[-1] + 8, compile=True)
    rows = []
    for length in CONTEXTS:
        held = runner.lengths[0]
        runner.extend(torch.arange(length - held)[None] % 1000 + 5, logits=False)
        spent = 1e6 * times({"pass": pass_arm(runner, 1, length)})["pass"]
        read = 1e6 * limit_s(cache_bytes(model, length))
        rows.append({"context": length, "us": spent, "attention_bytes_us": read})
        runner.rewind([length])
    return rows


def meter(pair: sprinter.Pair, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Seconds of generating with the running meter over seconds with one that only forgets, arms in turn."""
    found = []
    for method in METERED:
        spent: dict[str, list[float]] = {"on": [], "off": []}
        for turn in range(-2, 2 * len(prompts)):
            for state in ("on", "off") if turn % 2 else ("off", "on"):
                with patch.object(Meter, "score", Meter.score if state == "on" else _forget):
                    prompt = prompts[turn % len(prompts)]
                    out = pair.generate(prompt, method=method, seed=max(turn, 0), max_new_tokens=NEW_TOKENS)
                if turn >= 0:
                    spent[state].append(out.stats.wall_s)
        found.append({"method": method, "on_over_off": ratio_of_sums(spent["on"], spent["off"])})
    return found


def steps_ahead(pair: sprinter.Pair, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Seconds with one draft step a host synchronisation over seconds with more, and draft steps a token."""
    found = []
    for method in AHEAD_METHODS:
        outs: dict[Any, list[Any]] = {ahead: [] for ahead in AHEAD_SETTINGS}
        for turn in range(-1, len(prompts)):
            for i in range(len(AHEAD_SETTINGS)):
                ahead = AHEAD_SETTINGS[(turn + i) % len(AHEAD_SETTINGS)]
                given = {"method": method, "max_new_tokens": NEW_TOKENS, "ahead": ahead}
                out = pair.generate(prompts[turn], seed=max(turn, 0), **given)
                outs[ahead] += [out.stats] if turn >= 0 else []
        one = [stats.wall_s for stats in outs[1]]
        found += [
            {
                "method": method,
                "ahead": ahead,
                "over_one": ratio_of_sums(one, [stats.wall_s for stats in some]),
                "steps_a_token": sum(s.draft_steps for s in some) / sum(s.new_tokens for s in some),
            }
            for ahead, some in outs.items()
        ]
    return found


def _forget(self: Meter, start: int, scores: Any) -> None:
    self._waiting.clear()


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown tables."""
    makers: dict[str, Callable[[Any], list[str]]] = {
        "passes": _passes_table, "steps": _steps_table, "equality": _equality_table,
        "context": _context_table, "meter": _meter_table, "ahead": _ahead_table,
    }  # fmt: skip
    lines = ["# The fast engine"]
    for part, make in makers.items():
        if part in results:
            lines += ["", *make(results[part])]
    return "\n".join(lines)


def _passes_table(part: Mapping[str, Any]) -> list[str]:
    lines = [
        f"Microseconds of a pass over n tokens after {CONTEXT}: eager / captured / captured after drafts.",
        "",
    ]
    rows = [
        " | ".join(
            [
                name, *(" / ".join(f"{us:.0f}" for us in facts["us"][str(n)].values()) for n in LENGTHS),
                f"{facts['limit_us']:.0f}", f"{facts['share_of_bandwidth']['captured']:.2f}",
            ]
        )
        for name, facts in part.items()
    ]  # fmt: skip
    head = " | ".join(["model", *(f"n = {n}" for n in LENGTHS), "limit at 1", "share of the bandwidth at 1"])
    return [*lines, *grid(head, rows)]


def _steps_table(part: Mapping[str, Any]) -> list[str]:
    lines = [
        f"A draft step in microseconds; the compiled pass alone takes {part['pass_us']:.0f}, "
        f"reading its bytes {part['limit_us']:.0f}.",
        "",
    ]
    rows = [
        f"{r['heads']} | {r['steps_a_look']} | {r['eager_us']:.0f} | {r['captured_us']:.0f} | {r['unit_us']:.0f} "
        f"| {r['host_over_unit']:.0%} | {r['captured_us'] / part['pass_us'] - 1:.0%} | {r['share_of_bandwidth']:.2f}"
        for r in part["rows"]
    ]
    head = "heads | steps a synchronisation | eager | captured | its compiled code"
    head += " | host adds | over the pass alone | bandwidth"
    return [*lines, *grid(head, rows)]


def _equality_table(part: Mapping[str, Any]) -> list[str]:
    rows = [
        f"{dtype} | `{method}` | {r['texts']} | {r['parted']} | "
        f"{'–' if r['median_token'] is None else r['median_token']}"
        for dtype, methods in part.items()
        for method, r in methods.items()
    ]
    lines = ["Texts of captured steps that are not those of eager ones.", ""]
    return [*lines, *grid("dtype | method | texts | parted | median token", rows)]


def _context_table(part: Mapping[str, Any]) -> list[str]:
    lines = [
        "A captured pass of one token by context, random weights, and reading keys and values alone.",
        "",
    ]
    rows = [
        f"{name} | {r['context']} | {r['us']:.0f} | {r['us'] - rows[0]['us']:.0f} "
        f"| {r['attention_bytes_us'] - rows[0]['attention_bytes_us']:.0f}"
        for name, rows in part.items()
        for r in rows
    ]
    head = f"model | context | microseconds | more than at {CONTEXT} | more bytes take at least"
    return [*lines, *grid(head, rows)]


def _meter_table(part: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["Time with the running meter over time without it.", ""]
    return [
        *lines,
        *grid("method | ratio", [f"`{r['method']}` | {cells(r['on_over_off'], 3)}" for r in part]),
    ]


def _ahead_table(part: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        f"`{r['method']}` | {r['ahead']} | {cells(r['over_one'])} | {r['steps_a_token']:.2f}" for r in part
    ]
    lines = ["Speed with several draft steps a host synchronisation (`ahead`) over one, captured.", ""]
    return [*lines, *grid("method | ahead | speed over one | draft steps a token", rows)]


def main() -> None:
    """Measure the parts that were asked for; parts that were measured before are kept."""
    parser = option_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, default=sized(50, 1), help="texts a method of the part equality")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = sprinter.load_pair(compile=True)
    assert pair.tokenizer is not None and pair.models.draft is not None
    prompts = [pair.tokenizer(text)["input_ids"] for text in heldout_prompts(options.data, PROMPTS)]
    models = {"target": pair.models.target.model, "draft": pair.models.draft.model}
    results = {"benchmark": NAME}
    makers: dict[str, Callable[[], Any]] = {
        "passes": lambda: all_passes(pair),
        "steps": lambda: steps(pair),
        "equality": lambda: {dtype: equality(dtype, prompts, options.seeds) for dtype in DTYPES},
        "context": lambda: {name: context(longer(model)) for name, model in models.items()},
        "meter": lambda: meter(pair, prompts),
        "ahead": lambda: steps_ahead(pair, prompts),
    }
    for part in options.parts:
        began = time.time()
        results[part] = makers[part]()
        note_run(results, part, began)
        write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
