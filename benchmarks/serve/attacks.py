"""A server under attack: how long ``/health`` takes meanwhile, and the memory that an attack costs.

    python benchmarks/serve/attacks.py [--only NAME ...]

Starts ``sprinter serve`` with the built-in pair and two keys on loopback, and runs one attack after the other while
``/health`` is asked every 20 ms by a process of its own, each time by a new connection. The last line of standard
output is one JSON object: by attack, the times of ``/health`` in ms (p50, p99, p100), the longest time that a short
text of the other key took in seconds, the growth of the peak resident memory in MB, and the statuses of the answers.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx2
import numpy as np

from benchmarks.common import command, environment, grid, option_parser, write_results
from benchmarks.serve.servers import ServerProcess, free_port, rss_mib, sprinter_server, started
from benchmarks.smoke import sized

KEYS = {"attacker": "attacker-secret-key-1", "other": "other-secret-key-22222"}
TEXT = "/v1/completions"
WATCH = "--watch"  # the command of the watching process
HEALTH_EVERY_S = 0.02
SIZE = 3_900_000  # bytes of a large body
HOT = {"temperature": 100, "max_tokens": 900, "prompt": "a b c d " * 10}  # no draft is kept
CRUMBS = (
    f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    f"authorization: Bearer {KEYS['attacker']}\r\ntransfer-encoding: chunked\r\n\r\n"
).encode() + b"1\r\n \r\n" * 5000
Ask = Callable[[httpx2.AsyncClient], Awaitable[list[int]]]


def _filled(before: bytes, item: bytes, after: bytes) -> bytes:
    """A body of nearly the largest size: one item many times."""
    return before + b",".join([item] * (SIZE // (len(item) + 1))) + after


def _numbered(before: bytes, after: bytes) -> bytes:
    return before + b",".join(b'"%d":1' % i for i in range(SIZE // 11)) + after


def _bodies(*bodies: bytes, times: int = 4, path: str = TEXT) -> Ask:
    """All bodies at once, each several times; 0: the server has closed the connection."""

    async def ask(client: httpx2.AsyncClient) -> list[int]:
        headers = {"content-type": "application/json"}
        asked = [client.post(path, content=body, headers=headers) for body in bodies for _ in range(times)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [0 if isinstance(answer, BaseException) else answer.status_code for answer in answers]

    return ask


def _requests(*fields: dict[str, Any], times: int = 1) -> Ask:
    usual = {"prompt": "The river", "max_tokens": 16}
    bodies = [json.dumps({**usual, **one}).encode() for one in fields]
    return _bodies(*bodies, times=times)


async def _wrong_keys(client: httpx2.AsyncClient) -> list[int]:
    asked = [
        client.get("/v1/models", headers={"authorization": f"Bearer guess-number-{i:08}"}) for i in range(500)
    ]
    return [answer.status_code for answer in await asyncio.gather(*asked)]


async def _full_queue(client: httpx2.AsyncClient) -> list[int]:
    """One key asks for as many texts as it can, and another for one."""
    body = json.dumps({"prompt": "The river", "max_tokens": 200}).encode()
    flood = asyncio.create_task(_bodies(body, times=100)(client))
    await asyncio.sleep(0.5)
    headers = {"authorization": f"Bearer {KEYS['other']}"}
    other = await client.post(TEXT, json={"prompt": "The", "max_tokens": 4}, headers=headers)
    return [*await flood, other.status_code]


async def _connections(client: httpx2.AsyncClient) -> list[int]:
    """Connections that send nothing, and one request; 0 if it is not answered."""
    idle = await asyncio.gather(
        *(asyncio.open_connection(client.base_url.host, client.base_url.port) for _ in range(800)),
        return_exceptions=True,
    )
    await asyncio.sleep(1)
    answer = await client.get("/v1/models")
    for one in idle:
        if not isinstance(one, BaseException):
            one[1].transport.abort()
    return [answer.status_code]


def _raw(more: str, body: bytes, times: int, seconds: float) -> Ask:
    """Requests of which no answer is read, held for some seconds or until the server closes them; 0 for each."""
    head = (
        f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {KEYS['attacker']}\r\n{more}\r\n\r\n"
    )

    async def ask(client: httpx2.AsyncClient) -> list[int]:
        found = []
        for _ in range(times):
            _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port, limit=1024)
            writer.write(head.encode() + body)
            found.append(writer)
        await asyncio.sleep(seconds)
        for writer in found:
            writer.transport.abort()
        return [0] * times

    return ask


def _again(connections: int, data: bytes, host: str = "127.0.0.1") -> Ask:
    """For eight seconds connections from an address send, read to the end, and begin anew; statuses, 0: cut."""

    async def one(client: httpx2.AsyncClient, end: float) -> list[int]:
        found = []
        while time.monotonic() < end:
            try:
                reader, writer = await asyncio.open_connection(
                    client.base_url.host, client.base_url.port, local_addr=(host, 0)
                )
                writer.write(data)
                answer = await reader.read()
                writer.transport.abort()
                found.append(int(answer.split(b" ", 2)[1]) if answer else 0)
            except OSError:
                found.append(0)
        return found

    async def ask(client: httpx2.AsyncClient) -> list[int]:
        end = time.monotonic() + 8
        lists = await asyncio.gather(*(one(client, end) for _ in range(connections)))
        return [status for found in lists for status in found]

    return ask


def _unread(times: int, seconds: float, **fields: Any) -> Ask:
    body = json.dumps({"prompt": "The", "max_tokens": 900, **fields}).encode()
    return _raw(f"content-length: {len(body)}", body, times, seconds)


ATTACKS: dict[str, Ask] = {
    "nothing": _requests({}),
    "gamma": _requests(*({"sprinter": {"method": f"{name}=1000000000)"}} for name in (
        "speculative(gamma", "speculative(cap", "heuristic(start", "batch(gamma", "fly(window", "lookup(n",
        "sprinter(tail",
    ))),
    "longest gamma": _requests(
        {"sprinter": {"method": "speculative(gamma=1024)"}}, {"sprinter": {"method": "sprinter(tail=1024)"}}, times=4
    ),
    "objects": _bodies(_filled(b'{"prompt": [', b"{}", b"]}")),
    "lists": _bodies(_filled(b'{"prompt": [', b"[]", b"]}"), b'{"prompt": ' + b"[" * SIZE),
    "texts": _bodies(_filled(b'{"prompt": [', b'"a"', b"]}")),
    "ids": _bodies(_filled(b'{"prompt": [', b"1", b"]}"), b'{"prompt": [' + b",".join([b"1"] * 131_000) + b"]}"),
    "one long text": _bodies(b'{"prompt": "' + b"word " * (SIZE // 5) + b'"}',
        b'{"prompt": "' + b'\\"' * (SIZE // 2) + b'"}'),
    "unknown fields": _bodies(_numbered(b'{"prompt": "x",', b"}")),
    "logit_bias": _bodies(_numbered(b'{"prompt": "x", "logit_bias": {', b"}}")),
    "stop": _bodies(_filled(b'{"prompt": "x", "stop": [', b"{}", b"]}")),
    "odd logit_bias": _requests({"logit_bias": {"\ud800": 1}}, {"logit_bias": {"9" * 5000: 1}}),
    "many log-probabilities": _requests({"n": 40, "max_tokens": 900, "logprobs": 20}, times=4),
    "largest answer": _requests({"n": 13, "max_tokens": 900, "logprobs": 20, "top_k": 0}),
    "full queue": _full_queue,
    "wrong keys": _wrong_keys,
    "connections": _connections,
    "no reader": _unread(8, 8, stream=True, sprinter={"tokens": True}),
    "unread answers": _unread(4, 30, n=13, logprobs=20),
    "chunks of a byte": _raw("transfer-encoding: chunked", b"1\r\n \r\n" * 200_000, 8, 8),
    "hot drafts": _requests({"sprinter": {"method": "speculative(gamma=1000)"}, **HOT},
        {"sprinter": {"method": "speculative(gamma=64)"}, **HOT}, {"sprinter": {"method": "lookup"}, **HOT}, times=3),
    "scored prompts": _requests({"prompt": [[*range(1, 901)]] * 40, "max_tokens": 0, "echo": True, "logprobs": 0},
        times=40),
    "tokenize": _bodies(json.dumps({"prompt": "word " * 900}).encode(), times=400, path="/tokenize"),
    "kept bodies": _bodies(b'{"prompt": "The", "max_tokens": 200' + b" " * SIZE + b"}", times=150),
    "many ids": _bodies(b'{"prompt": [' + b",".join([b"1"] * 131_000) + b"]}", times=120),
    "no bodies": _raw("content-length: 1000", b"", 560, 8),
    "no HTTP": _again(250, b"\x16\x03\x01 no HTTP\r\n\r\n"),
    "chunks again": _again(100, CRUMBS),
    "health": _again(200, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", "127.0.0.2"),
}  # fmt: skip


class Watch:
    """Asks for ``/health`` and looks at the server's memory, in a process of its own, until it is told to stop."""

    def __init__(self, server: ServerProcess) -> None:
        self._before = server.rss_mib()
        # Spawned: what the attacker's threads and loop hold must not slow it down.
        words = [sys.executable, str(Path(__file__).resolve()), WATCH, server.url, str(server.process.pid)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has asked once

    def stop(self) -> dict[str, float]:
        """What was seen."""
        out, _ = self._process.communicate(b"\n")
        if self._process.returncode:
            sys.exit("error: /health was not answered during an attack")
        seen = json.loads(out)
        times_ms = seen["times_ms"]
        found = {f"health_p{at}_ms": float(np.percentile(times_ms, at)) for at in (50, 99, 100)}
        found["memory_mb"] = (max(seen["sizes_mib"]) - self._before) * 1.048576
        return {"asked": len(times_ms), **{name: round(value, 1) for name, value in found.items()}}


def _watch(url: str, pid: int) -> None:
    """The watching process: ends when its standard input does, and prints what it saw."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(1), over.set()), daemon=True).start()
    times_ms, sizes_mib = [], []
    _ask_health(url)
    print("ready", flush=True)
    while not over.wait(HEALTH_EVERY_S):
        began = time.perf_counter()
        _ask_health(url)
        times_ms.append(1e3 * (time.perf_counter() - began))
        sizes_mib.append(rss_mib(pid))
    print(json.dumps({"times_ms": times_ms, "sizes_mib": sizes_mib}))


def _ask_health(url: str) -> None:
    """Ask by a new connection, which waits behind those of the attack."""
    client = HTTPConnection(url.partition("//")[2], timeout=600)
    client.request("GET", "/health")
    if client.getresponse().status != 200:
        sys.exit("error: /health is not 200")
    client.close()


async def _attacked(server: ServerProcess, ask: Ask) -> dict[str, Any]:
    async with server.client(KEYS["attacker"]) as client:
        watch = await asyncio.to_thread(Watch, server)
        await asyncio.sleep(0.5)
        attack = asyncio.create_task(ask(client))
        seconds = await _others_wait(server, attack)
        await asyncio.sleep(0.3)
        seen = await asyncio.to_thread(watch.stop)
    counts = Counter(map(str, await attack))
    return {**seen, "other_s": seconds, "statuses": dict(sorted(counts.items()))}


async def _others_wait(server: ServerProcess, attack: asyncio.Task[list[int]]) -> float:
    """The longest time of a short text of the other key during the attack, in seconds; infinite if one is refused."""
    longest = 0.0
    async with server.client(KEYS["other"]) as client:
        while not attack.done():
            await asyncio.wait([attack], timeout=0.3)
            began = time.perf_counter()
            answer = await client.post(TEXT, json={"prompt": "The", "max_tokens": 4})
            took = time.perf_counter() - began if answer.status_code == 200 else float("inf")
            longest = max(longest, took)
    return round(longest, 2)


def _table(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        f"{name} | {one['health_p50_ms']} | {one['health_p99_ms']} | {one['health_p100_ms']} | {one['other_s']} | "
        f"{one['memory_mb']}"
        for name, one in results.items()
    ]
    return "\n".join(
        grid("attack | /health p50, ms | p99 | longest | another key, s | more memory, MB", rows)
    )


def main() -> None:
    parser = option_parser(__doc__, data=False)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, help="names of attacks")
    names = parser.parse_args().only or sized([*ATTACKS], ["nothing", "gamma", "odd logit_bias"])
    began = time.time()
    with TemporaryDirectory() as folder:
        keys, port = Path(folder) / "keys", free_port()
        keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        keys.chmod(0o600)
        words = sprinter_server(port, "--max-len", "1024", "--api-keys", str(keys), "--request-timeout", "60")
        results = {}
        with started("sprinter", words, port, Path(folder) / "log", seconds=600) as server:
            _warm(server)
            for name in names:
                results[name] = asyncio.run(_attacked(server, ATTACKS[name]))
                print(f"{name}: {results[name]}", file=sys.stderr)
    facts = {
        "benchmark": "serve/attacks",
        "command": command(),
        "environment": environment(),
        "attacks": results,
        "seconds": round(time.time() - began, 1),
    }
    write_results("serve/attacks", facts, _table(results))


def _warm(server: ServerProcess) -> None:
    """Wait until it is loaded, and have it write a text."""
    headers = {"authorization": f"Bearer {KEYS['other']}"}
    with httpx2.Client(base_url=server.url, timeout=600, trust_env=False, headers=headers) as client:
        client.post(TEXT, json={"prompt": "The", "max_tokens": 64}).raise_for_status()


if __name__ == "__main__":
    if sys.argv[1:2] == [WATCH]:
        _watch(sys.argv[2], int(sys.argv[3]))
    else:
        main()
