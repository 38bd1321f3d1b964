"""The simulation of ``sprinter theory fleet`` against the server: everything it is told first, then the load.

    python benchmarks/serve/fleet.py --data DIR

The built-in pair, 16 rows. Told are costs of passes and of the host (``measure_load``, in this process before and after
the load, as this machine's speed drifts), chances that tokens stay or are trusted (texts of other prompts in this
process), and what serving adds to a text, a step and an event of it: the same plain texts in turn through the server
and through an ``Engine`` here, 1 and 8 at a time, of one token and of 20. The load: clients that ask without a pause,
methods in turn. No number of the load goes into the simulation.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx2
import numpy as np

import sprinter
from benchmarks.common import grid, heldout_prompts, option_parser, save
from benchmarks.serve.clients import StreamTimes, latencies, stream
from benchmarks.serve.servers import free_port, sprinter_server, started
from benchmarks.smoke import scratch, sized
from sprinter.theory.fleet import forecast
from sprinter.theory.machines import MeasuredPasses
from sprinter.theory.passes import LoadCosts, measure_load
from sprinter.theory.settings import FleetSettings

NAME = "serve/fleet"
METHODS = {"plain": "autoregressive", "exact": "speculative(gamma=4)", "trust": "sprinter(tau=0.6)"}
STREAMS = sized({1: 20, 4: 20, 16: 32, 64: 64}, {1: 2, 2: 2})
"""Clients -> texts of a method in a round."""
ROWS, TOKENS, AT_ONCE, SHORT = 16, sized(32, 4), sized(8, 2), sized(20, 3)
SEEDS, REPEATS, REPEATS_HTTP = sized(3, 1), sized(4, 1), sized(10, 1)


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


async def added(pair: sprinter.Pair, http: httpx2.AsyncClient, prompts: list[str]) -> dict[str, float]:
    """Milliseconds that serving adds to a text, to a step and to an event of the engine alone."""

    async def remote(many: int, tokens: int) -> None:
        await crowd(lambda i: stream(http, request(prompts[i], "plain", tokens, i)), many, many)

    async def here(many: int, tokens: int) -> None:
        with sprinter.Engine(pair, ROWS, max_len=512) as engine:
            for i in range(many):
                engine.add(prompts[i], method=METHODS["plain"], max_new_tokens=tokens, seed=i)
            engine.finish()

    took: dict[tuple[int, int], list[list[float]]] = {
        (many, tokens): [[], []] for many in (1, AT_ONCE) for tokens in (1, SHORT)
    }
    for repeat in range(REPEATS_HTTP + 1):  # the first warms up
        for cell, times in took.items():
            for of, side in enumerate((remote, here)):
                began = time.perf_counter()
                await side(*cell)
                if repeat:
                    times[of].append(1e3 * (time.perf_counter() - began))
    more = {cell: median(times[0]) - median(times[1]) for cell, times in took.items()}
    one, all_of_them = (max(0.0, more[many, SHORT] - more[many, 1]) / (SHORT - 1) for many in (1, AT_ONCE))
    event = max(0.0, min(one, (all_of_them - one) / (AT_ONCE - 1)))
    return {"text_ms": max(0.0, more[1, 1] - one), "step_ms": one - event, "event_ms": event}


def request(prompt: str, method: str, tokens: int, seed: int) -> dict[str, Any]:
    """A request for a text of that many tokens."""
    return {
        "model": "model", "prompt": prompt, "max_tokens": tokens, "seed": seed,
        "stream_options": {"include_usage": True}, "sprinter": {"method": METHODS[method]},
    }  # fmt: skip


Runs = dict[tuple[str, int], tuple[list[StreamTimes], float]]


async def load(http: httpx2.AsyncClient, prompts: list[str]) -> Runs:
    """Texts and seconds, by method and number of clients."""
    made = Runs()
    for clients, texts in STREAMS.items():
        for method in METHODS:
            at = sum(len(found) for found, _ in made.values())
            ask = partial(
                _ask, http, [f"{at + i}. {prompts[(at + i) % len(prompts)]}" for i in range(texts)], method
            )
            made[method, clients] = await crowd(ask, clients, texts)
    return made


async def _ask(http: httpx2.AsyncClient, prompts: list[str], method: str, i: int) -> StreamTimes:
    found = await stream(http, request(prompts[i], method, TOKENS, i))
    if found.ended != "done":
        raise SystemExit(f"error: {method}: {found.ended}")
    return found


def mean_of(costs: list[LoadCosts]) -> LoadCosts:
    """Costs that were measured several times."""
    each = [asdict(one) for one in costs]
    named = {name: np.mean([one[name] for one in each], 0).tolist() for name in each[0]}
    return LoadCosts.from_json({**named, "rows": list(costs[0].rows), "tokens": list(costs[0].tokens)})


def predicted(settings: FleetSettings, costs: MeasuredPasses, method: str, clients: int) -> dict[str, Any]:
    """The same of the simulation: means over its seeds."""
    runs = [
        forecast(replace(settings, texts=STREAMS[clients], seed=seed), costs, method, clients)
        for seed in range(SEEDS)
    ]
    pick = {
        "first_ms": [one.first_ms for one in runs],
        "between_ms": [one.between_ms or (0, 0) for one in runs],
    }
    return {
        "tokens_per_s": float(np.mean([one.tokens_per_s for one in runs])),
        "tokens_per_event": float(np.mean([one.tokens_per_event for one in runs])),
        **{name: np.mean(values, 0).round(2).tolist() for name, values in pick.items()},
    }


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
    texts = sum(STREAMS.values())
    prompts = heldout_prompts(args.data, sized(100, 4), longest=100)
    mine, theirs = prompts[: sized(24, 2)], prompts[sized(24, 2) :]
    port, options = free_port(), ("--rows", str(ROWS), "--max-len", "512", "--max-waiting", str(texts))
    with started("sprinter", sprinter_server(port, *options), port, scratch("fleet") / "log") as server:
        pair = sprinter.load_pair()
        chances = rates(pair, mine)

        async def all_of_it() -> tuple[dict[str, float], list[LoadCosts], Runs]:
            costs = [measure_load(pair, ROWS, repeats=REPEATS)]
            async with server.client() as http:
                http_ms = await added(pair, http, mine)
                made = await load(http, theirs)
            return http_ms, [*costs, measure_load(pair, ROWS, repeats=REPEATS)], made

        http_ms, costs, made = asyncio.run(all_of_it())
    assert pair.tokenizer is not None
    lengths = scratch("fleet") / "lengths.txt"
    ids = [pair.tokenizer(f"{100 + i}. {prompt}").input_ids for i, prompt in enumerate(theirs)]
    lengths.write_text("".join(f"{len(one)} {TOKENS}\n" for one in ids))
    settings, between = FleetSettings(rows=ROWS, lengths=lengths, **chances, **http_ms), mean_of(costs)
    rows = []
    for (method, clients), (times, seconds) in made.items():
        found = latencies(times, seconds)
        told = predicted(settings, MeasuredPasses(between, method == "trust"), method, clients)
        rows.append({"method": method, "streams": clients, "measured": found, "predicted": told})
    text = table(rows)
    given = {
        **chances,
        **http_ms,
        "prompt_tokens": float(np.mean([*map(len, ids)])),
        "costs": [*map(asdict, costs)],
    }
    save(NAME, text, began, texts * len(METHODS), told=given, rows=rows)


if __name__ == "__main__":
    main()
