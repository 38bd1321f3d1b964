"""Many streams for minutes, with clients that leave: errors, memory, rows, fairness, latency.

    python benchmarks/serve/load.py --data DIR [--pair builtin|smollm2] [--minutes 10] [--streams 64]

A server with 16 rows and as many API keys as clients. Each client asks again as soon as its text has ended: a random
prompt of the held-out paragraphs, 16 to 96 tokens, one of some methods; one text in six is left after a random number
of events (some before the first). Six texts of a client in a row have six lengths, in random order, and the longest is
left: clients differ in what they get and not in what they ask for. Before and after it, a single client without
company. Memory is the server's resident set, every 5 seconds; flat is the median of the last fifth over that of the
second fifth.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

from benchmarks.common import (
    grid,
    heldout_prompts,
    note_run,
    option_parser,
    write_results,
)  # fmt: skip
from benchmarks.serve.clients import StreamTimes, latencies, stream
from benchmarks.serve.servers import SMOLLM2, ServerProcess, free_port, sprinter_server, started
from benchmarks.smoke import scratch, sized

NAME = "serve/load"
PAIRS: dict[str, tuple[list[str], list[str]]] = {  # options of the server, methods
    "builtin": ([], ["speculative(gamma=4)", "sprinter(tau=0.6)", "svip(h=0.6)", "autoregressive"]),
    "smollm2": (
        ["--target", SMOLLM2, "--runner", "torch", "--dtype", "gguf"],
        ["lookup(n=3, gamma=5)", "autoregressive"],
    ),
}
LENGTHS = (16, 32, 48, 64, 80, 96)
ALONE = sized(30.0, 1.0)  # seconds


def planned(chance: random.Random) -> Iterator[tuple[int, bool]]:
    """Lengths in tokens, and whether the text is left (the longest): six after six, in random order."""
    while True:
        for length in chance.sample(LENGTHS, len(LENGTHS)):
            yield length, length == max(LENGTHS)


class Clients:
    """Clients that ask without a pause.

    Args:
        methods, prompts: drawn for every text.
    """

    def __init__(
        self, server: ServerProcess, keys: list[str], methods: list[str], prompts: list[str]
    ) -> None:
        self._server, self._keys, self._methods, self._prompts = server, keys, methods, prompts
        self.found: list[list[StreamTimes]] = [[] for _ in keys]
        self._phase = 0  # each has prompts of its own

    async def run(self, count: int, seconds: float, leave: bool) -> list[StreamTimes]:
        """The streams of this time; texts that are open at its end are read to their end.

        Args:
            leave: whether one text in six is left.
        """
        end = time.perf_counter() + seconds
        self.found, self._phase = [[] for _ in self._keys], self._phase + 1
        await asyncio.gather(*(self._client(i, end, leave) for i in range(count)))
        return [one for texts in self.found for one in texts]

    async def _client(self, i: int, end: float, leave: bool) -> None:
        chance = random.Random(f"client {i}, phase {self._phase}")
        plan = planned(chance)
        async with self._server.client(self._keys[i]) as http:
            while time.perf_counter() < end:
                length, left = next(plan)
                body = {
                    "model": "model",
                    "prompt": chance.choice(self._prompts),
                    "max_tokens": length,
                    "seed": chance.randrange(2**31),
                    "stream_options": {"include_usage": True},
                    "sprinter": {"method": chance.choice(self._methods), "tokens": True},
                }
                goes = chance.randint(0, 12) if left and leave else None
                self.found[i].append(await stream(http, body, goes))


async def watch(server: ServerProcess, samples: list[tuple[float, float]], every: float) -> None:
    """Resident memory, until cancelled."""
    began = time.perf_counter()
    while True:
        samples.append((time.perf_counter() - began, server.rss_mib()))
        await asyncio.sleep(every)


async def gauges(server: ServerProcess, key: str) -> dict[str, float]:
    """Texts that run and wait, and failed requests."""
    async with server.client(key) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}
    return {
        "running": values["sprinter_texts_running"],
        "waiting": values["sprinter_texts_waiting"],
        "server_errors": sum(
            value
            for name, value in values.items()
            if name.startswith("sprinter_requests_total")
            and 'status="5' in name
            and "/health" not in name  # 503 while the models are loaded
        ),
    }


async def by_itself(clients: Clients) -> dict[str, Any]:
    """Latencies of a single client."""
    began = time.perf_counter()
    texts = await clients.run(1, ALONE, leave=False)
    return latencies(texts, time.perf_counter() - began)


async def measure(server: ServerProcess, clients: Clients, keys: list[str], seconds: float) -> dict[str, Any]:
    """One client alone, all of them, one alone again."""
    alone = [await by_itself(clients)]
    samples: list[tuple[float, float]] = []
    watching = asyncio.create_task(watch(server, samples, sized(5.0, 0.2)))
    began = time.perf_counter()
    texts = await clients.run(len(keys), seconds, leave=True)
    took = time.perf_counter() - began
    ended = time.perf_counter()
    while (now := await gauges(server, keys[0]))["running"] or now["waiting"]:
        if time.perf_counter() - ended > 30:
            break
        await asyncio.sleep(0.05)
    freed = time.perf_counter() - ended
    watching.cancel()
    tokens = [sum(one.tokens for one in mine) for mine in clients.found]
    alone.append(await by_itself(clients))
    rss = np.array([value for _, value in samples])
    fifth = max(1, len(rss) // 5)
    early, late = np.median(rss[fifth : 2 * fifth]), np.median(rss[-fifth:])
    return {
        "seconds": round(took, 1),
        "texts": len(texts),
        "ended": dict(Counter(one.ended for one in texts)),
        "crowd": latencies(texts, took),
        "alone": alone,
        "tokens_of_clients": {"least": min(tokens), "most": max(tokens), "ratio": max(tokens) / min(tokens)},
        "rows_free_after_s": round(freed, 3),
        "left_over": now,
        "rss_mib": [[round(at, 1), round(value, 1)] for at, value in samples],
        "rss_growth": float(late / early - 1),
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for pair, run in results["load"].items():
        for name, found in (
            ("alone, before", run["alone"][0]),
            ("crowd", run["crowd"]),
            ("alone, after", run["alone"][1]),
        ):
            first, between = (found[what] or [float("nan")] * 2 for what in ("first_ms", "between_ms"))
            rows.append(
                f"{pair} | {name} | {found['streams']} | {found['tokens_per_s']:.0f} | {first[0]:.0f} | {first[1]:.0f} "
                f"| {between[0]:.1f} | {between[1]:.1f} | {found['tokens_per_event']:.2f}"
            )
    lines = grid(
        "pair | clients | texts | tokens/s | first text, ms (median) | (95 %) | between events, ms (median) | (95 %) "
        "| tokens an event",
        rows,
    )
    for pair, run in results["load"].items():
        bad = sum(count for name, count in run["ended"].items() if name not in ("done", "left"))
        tokens = run["tokens_of_clients"]
        lines += [
            "",
            f"{pair}: {run['streams']} clients for {run['seconds']:.0f} s, {run['texts']} texts, "
            f"{run['ended'].get('left', 0)} of them left; {bad} failed, {run['left_over']['server_errors']:.0f} "
            f"answers with status 5xx; most over least tokens of a client {tokens['ratio']:.2f}; memory "
            f"{run['rss_growth']:+.1%}; all rows free {run['rows_free_after_s']:.2f} s after the last text.",
        ]
    return "\n".join(lines)


def main() -> None:
    """Start the server, load it, write."""
    parser = option_parser(__doc__)
    parser.add_argument("--pair", choices=[*PAIRS], default="builtin")
    parser.add_argument("--minutes", type=float, default=sized(10.0, 0.05))
    parser.add_argument("--streams", type=int, default=sized(64, 4))
    parser.add_argument("--rows", type=int, default=sized(16, 2))
    args = parser.parse_args()
    began = time.time()
    options, methods = PAIRS[args.pair]
    prompts = heldout_prompts(args.data, sized(100, 4))
    folder = scratch("load")
    keys = [f"client-{i:03d}-of-the-load-test" for i in range(args.streams)]
    (folder / "keys").write_text("".join(f"client{i} {key}\n" for i, key in enumerate(keys)))
    port = free_port()
    server_options = [
        *options, "--rows", str(args.rows), "--max-len", "512", "--max-waiting", str(2 * args.streams),
        "--api-keys", str(folder / "keys"),
    ]  # fmt: skip
    with started("sprinter", sprinter_server(port, *server_options), port, folder / "log") as server:
        clients = Clients(server, keys, methods, prompts)
        found = asyncio.run(measure(server, clients, keys, 60 * args.minutes))
    results = {"benchmark": NAME}
    results.setdefault("load", {})[args.pair] = {
        "streams": args.streams,
        "rows": args.rows,
        "methods": methods,
        **found,
    }
    note_run(results, args.pair, began)
    write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
