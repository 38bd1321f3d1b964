"""The simulation of ``sprinter theory fleet`` against the server: everything it is told first, then the load.

    python benchmarks/serve/fleet.py --data DIR

The built-in pair, 16 rows, one thread in each process. Told are costs of passes and of the host (``measure_load``, in
this process before and after each part of the load, as this machine's speed drifts), chances that tokens stay or are
trusted (texts of other prompts in this process), how much slower the engine is beside clients and server, and what
these add to a text, a step and an event: short texts of those prompts in turn through the server and through an
``Engine`` here, 1, 4 and 16 at a time, by least squares. The load: clients that ask without a pause, methods in turn,
in rounds. No number of the load goes into the simulation.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx2
import numpy as np
import torch

import sprinter
from benchmarks.common import grid, heldout_prompts, option_parser, save
from benchmarks.serve.clients import StreamTimes, latencies, stream
from benchmarks.serve.servers import free_port, sprinter_server, started
from benchmarks.smoke import scratch, sized
from sprinter.theory.fleet import forecast
from sprinter.theory.load_costs import LoadCosts, fit, measure_load
from sprinter.theory.machines import MeasuredPasses
from sprinter.theory.settings import FleetSettings

NAME = "serve/fleet"
METHODS = {"plain": "autoregressive", "exact": "speculative(gamma=4)", "trust": "sprinter(tau=0.6)"}
STREAMS = sized({1: 20, 4: 40, 16: 96, 64: 128}, {1: 2, 2: 2})
"""Clients -> texts of a method in a round."""
ROWS, TOKENS, AT_ONCE, SHORT = sized(16, 2), sized(32, 4), sized((1, 4, 16), (1, 2)), sized(20, 3)
ROUNDS, SEEDS, PROMPT, MEASURING_S = sized(2, 1), sized(3, 1), 48, sized(3.0, 0.0)


async def crowd(ask: Callable[[int], Awaitable[Any]], clients: int, texts: int) -> tuple[list[Any], float]:
    """What ``clients`` got for ``texts`` requests, each asking for the next one as soon as it is free; seconds."""
    left, found, began = iter(range(texts)), list[Any](), time.perf_counter()

    async def client(numbers: Iterator[int]) -> None:
        for i in numbers:
            found.append(await ask(i))

    await asyncio.gather(*(client(left) for _ in range(clients)))
    return found, time.perf_counter() - began


def rates(pair: sprinter.Pair, prompts: list[str]) -> dict[str, float]:
    """Chances of the simulation, of texts that are written here."""
    found = {}
    for name in ("exact", "trust"):
        with sprinter.Engine(pair, ROWS, max_len=512) as engine:
            for i, prompt in enumerate(prompts):
                engine.add(prompt, method=METHODS[name], max_new_tokens=TOKENS, seed=i)
            all_stats = [out.stats for out in engine.finish().values()]
        accepted, checked, trusted = (
            sum(getattr(stats, what) for stats in all_stats) for what in ("accepted", "checked", "trusted")
        )
        found[name] = accepted / max(1, checked)
    return {"accept": found["exact"], "keep": found["trust"], "trust": trusted / max(1, trusted + checked)}


Facts = list[tuple[tuple[float, float, float, float], float]]
"""Milliseconds of the engine alone, texts, steps and events; milliseconds through the server."""


async def beside(pair: sprinter.Pair, http: httpx2.AsyncClient, prompts: list[str], found: Facts) -> None:
    """The same short texts through the server and through an engine here; adds a line for each number at a time."""
    for many, (method, tokens) in product(AT_ONCE, [("plain", 1), *((name, SHORT) for name in METHODS)]):
        first = 100 + len(found)  # each text begins with a number of its own: nothing is read already
        texts = [f"{first + i}. {prompts[(first + i) % len(prompts)]}" for i in range(2 * many)]
        _, seconds = await crowd(partial(_ask, http, texts, method, tokens), many, len(texts))
        alone, steps, events = here(pair, texts, method, tokens, many)
        found.append(((1e3 * alone, len(texts), steps, events), 1e3 * seconds))


def here(
    pair: sprinter.Pair, texts: list[str], method: str, tokens: int, many: int
) -> tuple[float, int, int]:
    """Seconds of an engine's steps for these texts, so many at a time; its steps and events."""
    with sprinter.Engine(pair, ROWS, max_len=512) as engine:
        left, inside, steps, events = list(enumerate(texts)), 0.0, 0, 0
        while left or engine.unfinished:
            while left and engine.unfinished < many:
                seed, text = left.pop(0)
                engine.add(text, method=METHODS[method], max_new_tokens=tokens, seed=seed)
            began = time.perf_counter()
            made = engine.step()
            inside += time.perf_counter() - began
            steps, events = steps + 1, events + sum(bool(event.tokens) for event in made)
    return inside, steps, events


def request(prompt: str, method: str, tokens: int, seed: int) -> dict[str, Any]:
    """A request for a text of that many tokens."""
    return {
        "model": "model", "prompt": prompt, "max_tokens": tokens, "seed": seed,
        "stream_options": {"include_usage": True}, "sprinter": {"method": METHODS[method]},
    }  # fmt: skip


@dataclass
class Part:
    """Texts of one method by a number of clients, in a round of the load."""

    method: str
    clients: int
    times: list[StreamTimes]
    seconds: float


async def load(http: httpx2.AsyncClient, prompts: list[str], method: str, clients: int, first: int) -> Part:
    """A part of the load; ``first``: number of its first text, with which that begins."""
    numbers = range(first, first + STREAMS[clients])
    texts = [f"{i}. {prompts[i % len(prompts)]}" for i in numbers]
    return Part(
        method, clients, *await crowd(partial(_ask, http, texts, method, TOKENS), clients, len(texts))
    )


async def _ask(http: httpx2.AsyncClient, prompts: list[str], method: str, tokens: int, i: int) -> StreamTimes:
    found = await stream(http, request(prompts[i], method, tokens, i))
    if found.ended != "done":
        raise SystemExit(f"error: {method}: {found.ended}")
    return found


def predicted(settings: FleetSettings, costs: LoadCosts, part: Part) -> dict[str, Any]:
    """The same of the simulation: means over its seeds."""
    runs = [
        forecast(
            replace(settings, texts=len(part.times), seed=seed),
            MeasuredPasses(costs, part.method == "trust"), part.method, part.clients,
        )
        for seed in range(SEEDS)
    ]  # fmt: skip
    return {
        "tokens_per_s": float(np.mean([one.tokens_per_s for one in runs])),
        "tokens_per_event": float(np.mean([one.tokens_per_event for one in runs])),
        "first_ms": np.mean([one.first_ms for one in runs], 0).round(2).tolist(),
        "between_ms": np.mean([one.between_ms or (0, 0) for one in runs], 0).round(2).tolist(),
    }


def together(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Predictions of parts with as many tokens each: rates by their time, all else by means."""
    found = {name: np.mean([one[name] for one in told], 0).round(4).tolist() for name in told[0]}
    return {**found, "tokens_per_s": len(told) / sum(1 / one["tokens_per_s"] for one in told)}


def table(rows: list[dict[str, Any]]) -> str:
    """Measured and predicted, and the error of each, as Markdown."""
    lines = []
    for row in rows:
        cells = [f"{row['method']} | {row['streams']}"]
        for name in ("tokens_per_s", "first_ms", "between_ms"):
            if row["measured"][name] is None:  # texts of one event, with --smoke
                cells.append("- | - | -")
                continue
            seen, told = (float(np.atleast_1d(row[side][name])[0]) for side in ("measured", "predicted"))
            row.setdefault("error", {})[name] = round(told / seen - 1, 4)
            cells.append(f"{seen:.4g} | {told:.4g} | {told / seen - 1:+.0%}")
        lines.append(" | ".join(cells))
    heads = "tokens/s | predicted | error | first text, ms | predicted | error | between events, ms | predicted | error"
    return "\n".join(grid(f"method | streams | {heads}", lines))


def main() -> None:
    """Measure costs, load the server, simulate, write."""
    args, began = option_parser(__doc__).parse_args(), time.time()
    torch.set_num_threads(1)  # as the server has
    prompts = heldout_prompts(args.data, sized(160, 4), longest=100)
    mine, theirs = prompts[: sized(60, 2)], prompts[sized(60, 2) :]
    port, options = free_port(), ("--rows", str(ROWS), "--max-len", "512", "--max-waiting", str(max(STREAMS)))
    parts, costs, facts, first = list[Part](), list[LoadCosts](), Facts(), 100
    with started("sprinter", sprinter_server(port, *options), port, scratch("fleet") / "log") as server:
        pair = sprinter.load_pair()
        chances = rates(pair, mine)

        async def all_of_it() -> None:
            async with server.client() as http:
                await beside(pair, http, mine, Facts())  # warms up
                for part in [None, *product(range(ROUNDS), STREAMS, METHODS)]:
                    if part is not None:
                        _, clients, method = part
                        at = first + sum(len(one.times) for one in parts)
                        parts.append(await load(http, theirs, method, clients, at))
                    costs.append(measure_load(pair, ROWS, prompt=PROMPT, seconds=MEASURING_S))
                    await beside(pair, http, mine, facts)

        asyncio.run(all_of_it())
    assert pair.tokenizer is not None
    slowdown, *http_ms = fit(*zip(*facts, strict=True)).tolist()
    serving = {"slowdown": slowdown, **dict(zip(("text_ms", "step_ms", "event_ms"), http_ms, strict=True))}
    lengths = scratch("fleet") / "lengths.txt"
    ids = [pair.tokenizer(f"{100 + i}. {prompt}").input_ids for i, prompt in enumerate(theirs)]
    lengths.write_text("".join(f"{len(one)} {TOKENS}\n" for one in ids))
    settings = FleetSettings(rows=ROWS, lengths=lengths, **chances, **serving)
    rows = []
    for clients, method in product(STREAMS, METHODS):
        own = [(i, one) for i, one in enumerate(parts) if (one.clients, one.method) == (clients, method)]
        found = latencies([time for _, one in own for time in one.times], sum(one.seconds for _, one in own))
        told = [predicted(settings, LoadCosts.mean(costs[i : i + 2]), one) for i, one in own]
        rows.append({"method": method, "streams": clients, "measured": found, "predicted": together(told)})
    given = {
        **chances,
        **serving,
        "prompt_tokens": float(np.mean([*map(len, ids)])),
        "costs": [*map(asdict, costs)],
        "beside": facts,
    }
    save(NAME, table(rows), began, sum(len(one.times) for one in parts), told=given, rows=rows)


if __name__ == "__main__":
    main()
