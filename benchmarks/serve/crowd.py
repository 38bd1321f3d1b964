"""One seed alone and in a crowd: how many texts are the same, and where the others part.

    python benchmarks/serve/crowd.py --data DIR [--pair builtin|smollm2] [--dtypes float32 ...]

A server with 33 rows. Every request is streamed twice: alone, and while 32 other streams run, which are other requests
of this kind or have random lengths, and some of which are left. Same: the same token ids. A dtype is that of
``sprinter serve --dtype``; "gguf" and "int8" run in kernels in which a token has the same law in every forward pass.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx2

from benchmarks.common import grid, heldout_prompts, note_run, option_parser, write_results
from benchmarks.serve.clients import StreamTimes, stream
from benchmarks.serve.servers import SMOLLM2, free_port, sprinter_server, started
from benchmarks.smoke import scratch, sized
from sprinter.errors import UserError

NAME = "serve/crowd"
OTHERS = sized(32, 3)
AT_ONCE = sized(16, 2)  # requests that are compared; the rest of the crowd is not
NEW_TOKENS = sized(48, 6)
LOSSY_LOOKUP = "drafter=lookup(n=2),stop=fixed(gamma=4),accept=typical"
PAIRS: dict[str, tuple[list[str], list[str]]] = {  # methods, dtypes
    "builtin": (
        ["autoregressive", "speculative(gamma=4)", "svip(h=0.6)", "sprinter(tau=0.6)", "typical(gamma=3)"],
        ["float64", "float32", "bfloat16", "int8"],
    ),
    "smollm2": (
        ["autoregressive", "lookup(n=2, gamma=4)", LOSSY_LOOKUP],
        ["float64", "float32", "bfloat16", "int8", "gguf"],
    ),
}


def options_of(pair: str, dtype: str) -> list[str]:
    """The server's options."""
    model = [] if pair == "builtin" else ["--target", SMOLLM2, "--runner", "torch"]
    return [*model, "--dtype", dtype]


def requests(methods: Sequence[str], prompts: Sequence[str], texts: int) -> list[dict[str, Any]]:
    """``texts`` requests of each method, at three temperatures."""
    return [
        {
            "model": "model",
            "prompt": prompts[i],
            "max_tokens": NEW_TOKENS,
            "temperature": (1.0, 0.7, 0.0)[i % 3],
            "seed": 1000 + i,
            "sprinter": {"method": method, "tokens": True},
        }
        for i in range(texts)
        for method in methods
    ]


class Server(Protocol):
    """What serves: a process, or a thread of the tests."""

    def client(self) -> httpx2.AsyncClient:
        """A client without a limit on connections."""
        ...


async def read(http: httpx2.AsyncClient, body: dict[str, Any]) -> StreamTimes:
    """A text, which must end well."""
    found = await stream(http, body)
    if found.ended != "done":
        raise UserError(f"{body['sprinter']['method']}: {found.ended}")
    return found


async def alone(server: Server, asked: Sequence[dict[str, Any]]) -> list[StreamTimes]:
    """One request after another."""
    async with server.client() as http:
        return [await read(http, body) for body in asked]


async def in_crowd(
    server: Server, asked: Sequence[dict[str, Any]], methods: Sequence[str], prompts: Sequence[str]
) -> list[StreamTimes]:
    """Every request while ``OTHERS`` other streams run."""
    found: dict[int, StreamTimes] = {}
    left, read_all = list(range(len(asked))), asyncio.Event()
    random.Random("order").shuffle(left)

    async def client(http: httpx2.AsyncClient, number: int) -> None:
        """Reads requests to compare, if it is one of the first; then, or else, is one of the others."""
        while left and number < AT_ONCE:
            i = left.pop()
            found[i] = await read(http, asked[i])
        if len(found) == len(asked):
            read_all.set()
        chance = random.Random(f"client {number}")
        while True:
            body = {
                "model": "model",
                "prompt": chance.choice(prompts),
                "max_tokens": chance.randint(8, 96),
                "temperature": chance.choice((1.0, 0.7, 0.0)),
                "seed": chance.randrange(2**31),
                "sprinter": {"method": chance.choice(methods), "tokens": True},
            }
            goes = chance.randint(0, 12) if chance.random() < 1 / 6 else None
            one = await stream(http, body, goes)
            if one.ended not in ("done", "left"):
                raise UserError(f"another stream: {one.ended}")

    async with server.client() as http, asyncio.TaskGroup() as crowd:
        tasks = [crowd.create_task(client(http, i)) for i in range(OTHERS + 1)]
        await read_all.wait()
        for task in tasks:
            task.cancel()
    return [found[i] for i in range(len(asked))]


def compare(
    asked: Sequence[dict[str, Any]], first: Sequence[StreamTimes], crowd: Sequence[StreamTimes]
) -> list[dict[str, Any]]:
    """One row a method."""
    rows = []
    for method in dict.fromkeys(body["sprinter"]["method"] for body in asked):
        mine = [i for i, body in enumerate(asked) if body["sprinter"]["method"] == method]
        parted = [at for i in mine if (at := parting(first[i].ids, crowd[i].ids)) is not None]
        rows.append(
            {
                "method": method,
                "texts": len(mine),
                "tokens": sum(len(first[i].ids) for i in mine),
                "same_in_crowd": sum(first[i].ids == crowd[i].ids for i in mine),
                "same_text_in_crowd": sum(first[i].text == crowd[i].text for i in mine),
                "first_parting": min(parted, default=None),
                "median_parting": median(parted) if parted else None,
            }
        )
    return rows


def parting(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; None: they are the same."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for pair, found in results["crowd"].items():
        for dtype, by_method in found.items():
            for row in by_method:
                where = "–"
                if row["first_parting"] is not None:
                    where = f"{row['first_parting']} ({row['median_parting']:g})"
                rows.append(
                    f"{pair} | {dtype} | `{row['method']}` | {row['texts']} "
                    f"| {row['same_in_crowd']} | {where}"
                )
    return "\n".join(
        grid("pair | dtype | method | texts | same in the crowd | first parting (median), tokens", rows)
    )


def main() -> None:
    """A server for each dtype: alone, then in the crowd."""
    parser = option_parser(__doc__)
    parser.add_argument("--pair", choices=[*PAIRS], default="builtin")
    parser.add_argument("--dtypes", nargs="+", default=None, help="default: all that the pair is measured in")
    parser.add_argument("--texts", type=int, default=sized(16, 2), help="of each method")
    args = parser.parse_args()
    methods, dtypes = PAIRS[args.pair]
    dtypes = args.dtypes or sized(dtypes, ["float64"])
    prompts = heldout_prompts(args.data, args.texts + OTHERS)
    mine, theirs = prompts[: args.texts], prompts[args.texts :]
    asked = requests(methods, mine, args.texts)
    results = {"benchmark": NAME}
    for dtype in dtypes:
        began, port = time.time(), free_port()
        line = sprinter_server(
            port, *options_of(args.pair, dtype), "--rows", str(OTHERS + 1), "--max-len", "512",
            "--max-waiting", str(2 * OTHERS),
        )  # fmt: skip
        with started("sprinter", line, port, scratch("crowd") / "log") as server:
            first = asyncio.run(alone(server, asked))
            crowd = asyncio.run(in_crowd(server, asked, methods, theirs))
        rows = compare(asked, first, crowd)
        results.setdefault("crowd", {}).setdefault(args.pair, {})[dtype] = rows
        note_run(results, f"{args.pair}, {dtype}", began)
        write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
