"""Two hostile keys and one polite one: how long the polite one waits for its first text under each attack.

    python benchmarks/serve/fair.py [--only NAME ...]

Starts ``sprinter serve`` with the built-in pair and three keys on loopback. Two of them do one attack after the other,
each over and over in several connections of a process of its own at the lowest priority, as it would run on another
machine; the third asks for one short streamed text at a time, in two rounds over all attacks and, before each attack,
alone. The last line of standard output is one JSON object: by attack, the milliseconds to the first text (median, 95th
percentile), the ratio of the latter to that of the polite key alone, and the number of answers of the hostile keys by
status.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx2
import numpy as np

from benchmarks.common import command, environment, grid, option_parser, write_results
from benchmarks.serve.clients import stream
from benchmarks.serve.servers import ServerProcess, free_port, sprinter_server, started
from benchmarks.smoke import sized

KEYS = {"first": "first-hostile-key-1", "second": "second-hostile-key-2", "polite": "polite-secret-key-3"}
TEXT = "/v1/completions"
ATTACK = "--attack"  # the command of an attacking process
ROUNDS = sized(2, 1)
ASKED, LEAST, SECONDS = sized((30, 15, 5.0), (3, 2, 1.0))
"""Requests of the polite key in a round under each attack: fewer, at least LEAST, after SECONDS."""
ALONE = sized(10, 2)
"""Requests without an attack before each of them."""
SETTLED = sized(1.0, 0.1)
"""Seconds from the end of an attack to these, so that nothing of it is left."""
CONNECTIONS = 12
UNDER_WAY = 6
"""Seconds after which an attack is under way if it has got no answer."""
POLITE = {"prompt": "The river rises in", "max_tokens": 12}
JSON = "alone, JSON"
ASKS_JSON = ("multipleOf, JSON asked", "many schemas, JSON asked")
"""Attacks under which the polite key asks for JSON too, each time by a new schema."""
_OPEN = {"type": "object", "additionalProperties": False}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _fields(count: int) -> dict[str, Any]:
    """A new large schema each time: none is compiled already."""
    own = f"{time.time_ns():x}"
    return {
        **_OPEN,
        "properties": {f"{own}{i}": {"type": "string", "pattern": "^[a-z]{1,9}$"} for i in range(count)},
    }


def _chain(count: int) -> dict[str, Any]:
    """Objects each of which has the next one: reading the schema recurses as deeply."""
    parts = {
        f"a{i}": {**_OPEN, "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["x"]}
        for i in range(count)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{count}": {"type": "null"}}}


def _number() -> int:
    """Another one each time."""
    return 10**8 + time.time_ns() % 10**6


def _ambiguous(count: int) -> str:
    """A grammar of rules that all go on at each token."""
    rules = (f"r{i}: /[a-z ]*/ r{(7 * i + 1) % count} | /x{i}/" for i in range(count))
    return "\n".join(["start: " + "|".join(f"r{i}" for i in range(count)), *rules])


def _alike(count: int) -> dict[str, Any]:
    """Objects that begin alike, of which the text may be any."""
    return {
        "anyOf": [
            {"type": "object", "properties": {"k": {"type": "string"}, f"v{i}": {}}} for i in range(count)
        ]
    }


def attacks() -> dict[str, tuple[str, Any]]:
    """Path and body by name, or what makes a body; one that is a text is sent as it is."""
    text = {"prompt": "The river", "max_tokens": 200}
    return {
        "many streams": (TEXT, {**text, "stream": True, "max_tokens": 900}),
        "n=40": (TEXT, {**text, "n": 40, "stream": True}),
        "long prompts": (TEXT, {"prompt": [time.time_ns() % 2000 + 1, *range(1, 950)], "max_tokens": 4}),
        "logprobs, echo, n": (TEXT, {**text, "n": 8, "logprobs": 20, "echo": True}),
        "scored prompts": (TEXT, {"prompt": [[*range(1, 901)]] * 8, "max_tokens": 0, "echo": True, "logprobs": 0}),
        "large schemas": (TEXT, lambda: {**text, **_schema(_fields(2000))}),
        "large schemas, n=30": (TEXT, lambda: {**text, **_schema(_fields(300)), "n": 30}),
        "endless grammar": (TEXT, {**text, "structured_outputs": {"grammar": 'start: "' + "ab " * 9000 + '" start'}}),
        "hard expression": (TEXT, {**text, "structured_outputs": {"regex": r"(\p{L}{1,500}\p{N}?){100}"}}),
        "long drafts": (TEXT, {**text, "temperature": 100, "sprinter": {"method": "speculative(gamma=40)"}}),
        "left": (TEXT, {**text, "stream": True, "left": True}),
        "unread": (TEXT, {**text, "stream": True, "max_tokens": 900, "unread": True}),
        "tokenize": ("/tokenize", {"prompt": "word " * 900}),
        "laws": ("/v1/score", {"texts": [{"ids": [*range(1, 1001)], "start": 0}] * 2}),
        "deep schema": (TEXT, lambda: {**text, **_schema(_chain(1000))}),
        "many rules at once": (TEXT, lambda: {**text, "structured_outputs": {"grammar": _ambiguous(1000)}}),
        "alternatives that begin alike": (TEXT, lambda: {**text, **_schema(_alike(700))}),
        "multipleOf, JSON asked": (TEXT, {**text, **_schema({"type": "integer", "multipleOf": _number()})}),
        "many schemas, JSON asked": (TEXT, lambda: {**text, "max_tokens": 2, **_schema(_fields(300))}),
        "wrong bodies": (TEXT, lambda: '{"prompt": [' + ",".join(["{}"] * 300_000) + "]}"),
    }  # fmt: skip


async def _attack(url: str, key: str, name: str) -> None:
    """Do an attack until the standard input ends, and print the statuses."""
    counts: Counter[str] = Counter()
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with httpx2.AsyncClient(
        base_url=url, timeout=600, trust_env=False, limits=limits, headers=headers
    ) as client:

        async def one() -> None:
            while True:
                path, body = attacks()[name]
                body = body() if callable(body) else body
                given = body if isinstance(body, dict) else {}
                left, unread = given.pop("left", False), given.pop("unread", False)
                data = body if isinstance(body, str) else json.dumps(given)
                try:
                    async with client.stream("POST", path, content=data) as answer:
                        counts[str(answer.status_code)] += 1
                        if unread:
                            await asyncio.sleep(5)
                        elif not left:
                            async for _ in answer.aiter_raw():
                                pass
                        else:
                            await asyncio.sleep(0.05)
                    if answer.status_code >= 429:
                        await asyncio.sleep(0.05)
                except httpx2.HTTPError as error:
                    counts[type(error).__name__] += 1

        _tasks = [asyncio.create_task(one()) for _ in range(CONNECTIONS)]
        for _ in range(UNDER_WAY):  # what the attack before has left may hold it up
            await asyncio.sleep(1.0)
            if counts:
                break
        print("under way", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(json.dumps(counts), flush=True)
        os._exit(0)  # at the lowest priority closing all connections takes long


async def _ask(server: ServerProcess, name: str = "") -> tuple[list[float], Counter[str]]:
    """Seconds to the first text of the polite key, request by request, beside an attack, if one is named; infinite if
    it gets none."""
    words = [sys.executable, str(Path(__file__).resolve()), ATTACK, server.url, name]
    hostile = [
        subprocess.Popen([*words, KEYS[who]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=_yielding)
        for who in ("first", "second") if name not in ("", JSON)
    ]  # fmt: skip
    firsts, counts = [], Counter[str]()
    try:
        for one in hostile:
            assert one.stdout is not None
            await asyncio.to_thread(one.stdout.readline)
        if not hostile:
            await asyncio.sleep(SETTLED)
        async with server.client(KEYS["polite"]) as client:
            began = time.monotonic()
            for i in range(ASKED if hostile else ALONE):
                if i >= LEAST and time.monotonic() - began > SECONDS:
                    break
                new = {**_OPEN, "properties": {f"x{_number()}": {"type": "integer"}}, "minProperties": 1}
                more = _schema(new) if name in ASKS_JSON or name == JSON else {}
                found = await stream(client, {**POLITE, "seed": i, **more})
                firsts.append(found.events[0] if found.events else float("inf"))
                if not found.events:
                    print(f"{name}: {found.ended}", file=sys.stderr)
    finally:
        for one in hostile:
            out, _ = one.communicate()
            counts.update(json.loads(out))
    return firsts, counts


def _yielding() -> None:
    os.nice(19)


def main() -> None:
    parser = option_parser(__doc__, data=False)
    parser.add_argument("--only", nargs="+", choices=attacks(), help="names of attacks")
    names = parser.parse_args().only or sized([*attacks()], ["many streams", "hard expression"])
    began = time.time()
    alone = {name: JSON if name in ASKS_JSON else "" for name in names}
    firsts: dict[str, list[float]] = {
        name or "alone": [] for name in (*dict.fromkeys(alone.values()), *names)
    }
    counts: dict[str, Counter[str]] = {name: Counter() for name in firsts}
    with TemporaryDirectory() as folder:
        keys, port = Path(folder) / "keys", free_port()
        keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        keys.chmod(0o600)
        words = sprinter_server(port, "--max-len", "1024", "--api-keys", str(keys), "--request-timeout", "60")
        with started("sprinter", words, port, Path(folder) / "log", seconds=600) as server:
            asyncio.run(_ask(server))  # warm
            for turn in range(ROUNDS):
                for name in names:
                    firsts[alone[name] or "alone"] += asyncio.run(_ask(server, alone[name]))[0]
                    found, statuses = asyncio.run(_ask(server, name))
                    firsts[name] += found
                    counts[name] += statuses
                    print(
                        f"{turn} {name}: {np.percentile(found, [50, 95])} s, {dict(statuses)}",
                        file=sys.stderr,
                    )
    results: dict[str, Any] = {}
    for name, found in firsts.items():
        middle, high = np.percentile(found, [50, 95])
        usual = np.percentile(firsts[alone.get(name, name) or "alone"], 95)
        results[name] = {
            "asked": len(found),
            "first_p50_ms": round(1e3 * float(middle), 1),
            "first_p95_ms": round(1e3 * float(high), 1),
            "times_alone": round(float(high / usual), 2),
            "statuses": counts[name],
        }
    rows = [
        f"{name} | {one['first_p50_ms']} | {one['first_p95_ms']} | {one['times_alone']}"
        for name, one in results.items()
    ]
    facts = {
        "benchmark": "serve/fair", "command": command(), "environment": environment(), "attacks": results,
        "seconds": round(time.time() - began, 1),
    }  # fmt: skip
    table = "\n".join(grid("two hostile keys | first text, ms (median) | (95 %) | over alone (95 %)", rows))
    write_results("serve/fair", facts, table)


if __name__ == "__main__":
    if sys.argv[1:2] == [ATTACK]:
        asyncio.run(_attack(sys.argv[2], sys.argv[4], sys.argv[3]))
    else:
        main()
