"""Speed of every method and of other engines on a real instruct pair, in chat, one text at a time.

    python benchmarks/real/speed.py --data DIR --part named [--prompts 3] [--new-tokens 96] [--temperatures 0]

What ``quality.py`` measures in batches is timed here: the arms of a part take turns, prompt by prompt, on the GGUF
files' own blocks. Each part holds the bases, and speeds are ratios to them on the same prompts. Part ``several``:
several drafts, trees, and a tail of tokens that are checked after a refusal. Part ``peers``:
llama.cpp's server on the same files (plain, with the draft, with n-grams; the program that SPRINTER_LLAMA_SERVER
names), and transformers on their weights in bfloat16 (plain, assisted, prompt lookup). Part ``cut``: the draft with a
part of its vocabulary. Part ``answers``: the quick ones of these engines alone, for answers of their own length. Part
``judges``: accept rules that read heads (--heads). Parts ``lengths`` and ``block``: stop rules on several kinds of
text, and block verification (where it differs from ``exact``: at temperatures above 0). Of several suites there are
also rows of all of them together. Times include the prompt, which every arm reads anew; parts can be measured one after
another.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx2
import numpy as np
import torch

import sprinter
from benchmarks.common import cells, grid, in_turn, kept_results, note_run, option_parser, write_results
from benchmarks.real.arms import BASES, DRAFT, PARTS, PEERS, SMOKE_ARMS, TARGET, runnable
from benchmarks.serve.servers import free_port, llama_server, started
from benchmarks.smoke import sized
from sprinter.bench.arm import Arm, Ask
from sprinter.bench.arms import parse_arm
from sprinter.bench.statistics import BootstrapInterval, ratio_of_ratios
from sprinter.bench.suites import load_suite, turn_prompt
from sprinter.laws import Sampling
from sprinter.models.source import find

NAME = "real/speed"
OWN: Mapping[str, Any] = {"prefix_cache_bytes": 0, **sized({"runner": "torch", "dtype": "gguf"}, {})}
LIBRARY: Mapping[str, Mapping[str, Any]] = {
    "transformers": {"runner": "torch", "dtype": "bfloat16", "compile": False},
}
"""Engines that run in this process -> how the pair is loaded for them."""
TOGETHER = "together"
"""Name of the rows of all suites of a run."""
CUT = "cut"
"""Prefix of arms whose draft has the tokens of --draft-vocabulary alone."""
SERVED: Mapping[str, Sequence[str]] = {
    "llama-server:plain": (),
    "llama-server:draft": ("--spec-type", "draft-simple", "--spec-draft-n-max", "5"),
    "llama-server:ngram": ("--spec-type", "ngram-simple"),
}
"""Arm -> options of llama.cpp's server."""


@dataclass
class Timed:
    """What an arm gave, one entry a prompt."""

    arm: str
    suite: str
    temperature: float
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    calls: list[int | None] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def over(self, base: Timed) -> BootstrapInterval:
        """Speed over that of another arm on the same prompts."""
        mine, theirs = ((np.array(one.tokens, dtype=float), np.array(one.seconds)) for one in (self, base))
        return ratio_of_ratios(mine, theirs)


def together(parts: Sequence[Timed], suite: str) -> Timed:
    """One arm's measures on several suites, as of one."""
    whole = Timed(parts[0].arm, suite, parts[0].temperature)
    for part in parts:
        for name in ("tokens", "seconds", "calls", "texts"):
            getattr(whole, name).extend(getattr(part, name))
    return whole


class Served:
    """llama.cpp's server as an arm: one request after the other, nothing kept between them."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._http = httpx2.Client(base_url=url, timeout=600, trust_env=False)

    def answer(self, ask: Ask) -> tuple[list[int], float]:
        """Token ids and seconds."""
        began = time.perf_counter()
        said = self._http.post(
            "/completion",
            json={
                "prompt": list(ask.ids), "n_predict": ask.new_tokens, "temperature": ask.sampling.temperature,
                "seed": ask.seed, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False, "return_tokens": True,
            },
        )  # fmt: skip
        seconds = time.perf_counter() - began
        return [int(token) for token in said.raise_for_status().json()["tokens"]], seconds


@contextmanager
def served(name: str, chosen: Any, folder: Path) -> Iterator[Served]:
    """A server with the pair's files."""
    files = [find(getattr(chosen, which), which).gguf for which in ("target", "draft")]
    if None in files:
        sys.exit("error: llama.cpp's server reads GGUF files: give two as --target and --draft")
    port, threads = free_port(), torch.get_num_threads()
    line = llama_server(port, Path(str(files[0])), rows=1, max_len=2048, threads=threads)
    if name.endswith(":draft"):
        line += ["--spec-draft-model", str(files[1]), "--spec-draft-threads", str(threads)]
    log = folder / f"{name.partition(':')[2]}.log"
    with started(name, [*line, *SERVED[name]], port, log, OMP_NUM_THREADS=str(threads)) as server:
        yield Served(name, server.url)


def open_arms(
    names: Sequence[str], chosen: Any, stack: ExitStack
) -> tuple[sprinter.Pair, dict[str, Arm | Served]]:
    """Our own pair, and the arms, each with the pair that its engine reads."""
    pairs: dict[str, sprinter.Pair] = {}

    def pair_of(engine: str) -> sprinter.Pair:
        options = LIBRARY.get(engine, OWN)
        if engine not in pairs:
            more = {"gate": chosen.gate, "heads": chosen.heads} if engine not in LIBRARY else {}
            more |= {"draft_vocabulary": chosen.draft_vocabulary} if engine == CUT else {}
            pairs[engine] = sprinter.load_pair(chosen.target, chosen.draft, **options, **more)
        return pairs[engine]

    found: dict[str, Arm | Served] = {}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name in names:
        engine = name.partition(":")[0] if ":" in name else "own"
        if name in SERVED:
            found[name] = stack.enter_context(served(name, chosen, folder))
        else:
            arm = parse_arm(name.removeprefix(f"{CUT}:"))
            arm.start(pair_of(engine))
            found[name] = arm
    return pair_of("own"), found


def measure(chosen: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row an arm, suite and temperature."""
    with ExitStack() as stack:
        pair, arms = open_arms(names, chosen, stack)
        timed: dict[float, list[dict[str, Timed]]] = {}  # by temperature: of each suite, by arm
        for name in chosen.suites:
            chat = bool(pair.tokenizer is not None and pair.tokenizer.chat_template)
            suite = load_suite(
                name, chosen.data, limit=chosen.prompts, new_tokens=chosen.new_tokens, chat=chat
            )
            prompts = [turn_prompt(pair, sample, 0, [], chat=suite.chat) for sample in suite.samples]
            for temperature in chosen.temperatures:
                found = turns(arms, name, prompts, temperature, chosen.new_tokens)
                timed.setdefault(temperature, []).append(found)
    for suites in timed.values():
        if len(suites) > 1:
            suites.append({arm: together([one[arm] for one in suites], TOGETHER) for arm in names})
    return [
        row(one, found[BASES[0]], found[BASES[1]])
        for suites in timed.values()
        for found in suites
        for one in found.values()
    ]


def turns(
    arms: Mapping[str, Arm | Served],
    suite: str,
    prompts: Sequence[tuple[Sequence[int], Sequence[int]]],
    temperature: float,
    new_tokens: int,
) -> dict[str, Timed]:
    """The arms in turn, prompt by prompt, after a warm-up each."""
    timed = {name: Timed(name, suite, temperature) for name in arms}

    def ask(name: str, i: int, limit: int) -> tuple[list[int], float, int | None]:
        ids, ends = prompts[i]
        asked = Ask(tuple(ids), limit, Sampling(temperature=temperature), seed=i, stop_token_ids=tuple(ends))
        arm = arms[name]
        if isinstance(arm, Served):
            return *arm.answer(asked), None
        made = arm.answer(asked)
        return made.ids, made.wall_s, made.target_calls

    for name in arms:
        ask(name, 0, sized(8, 2))
    for i, name in in_turn([*arms], len(prompts), f"{suite} T={temperature:g}"):
        ids, seconds, calls = ask(name, i, new_tokens)
        one = timed[name]
        one.tokens.append(len(ids))
        one.seconds.append(seconds)
        one.calls.append(calls)
        one.texts.append(list(ids))
    return timed


def row(one: Timed, plain: Timed, exact: Timed) -> dict[str, Any]:
    """Speeds of an arm, and whether its texts are the plain ones."""
    tokens, calls = sum(one.tokens), [count for count in one.calls if count is not None]
    return {
        "arm": one.arm, "suite": one.suite, "temperature": one.temperature, "prompts": len(one.tokens),
        "tokens": tokens, "tokens_per_s": tokens / sum(one.seconds), "over_plain": one.over(plain),
        "over_exact": one.over(exact),
        "target_calls_per_token": sum(calls) / tokens if len(calls) == len(one.calls) else None,
        "same_as_plain": sum(mine == theirs for mine, theirs in zip(one.texts, plain.texts, strict=True)),
    }  # fmt: skip


def table(parts: Mapping[str, list[dict[str, Any]]]) -> str:
    """Markdown: a table for each part, suite and temperature, fastest arm first."""
    lines: list[str] = []
    for part, rows in parts.items():
        for suite, temperature in dict.fromkeys((one["suite"], one["temperature"]) for one in rows):
            block = [one for one in rows if (one["suite"], one["temperature"]) == (suite, temperature)]
            shown = [
                f"`{one['arm']}` | {one['tokens_per_s']:.1f} | {cells(one['over_plain'])} | "
                f"{cells(one['over_exact'])} | "
                + ("–" if one["target_calls_per_token"] is None else f"{one['target_calls_per_token']:.3f}")
                + f" | {one['same_as_plain']} of {one['prompts']}"
                for one in sorted(block, key=lambda one: -one["tokens_per_s"])
            ]
            head = f"arm | tokens/s | ÷ `{BASES[0]}` | ÷ `{BASES[1]}` | target calls/token | text as plain"
            lines += ["", f"**{part}: {suite}, temperature {temperature:g}**", "", *grid(head, shown)]
    return "\n".join(lines).strip()


def main() -> None:
    """Measure the parts; write after each."""
    parser = option_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=[*PARTS, *PEERS], default=["named"], dest="parts")
    parser.add_argument("--suites", nargs="+", default=sized(["humaneval", "gsm8k"], ["gsm8k"]))
    parser.add_argument("--prompts", type=int, default=sized(3, 1), help="of each suite")
    parser.add_argument("--new-tokens", type=int, default=sized(96, 4))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--target", default=sized(TARGET, None))
    parser.add_argument("--draft", default=sized(DRAFT, None))
    parser.add_argument("--draft-vocabulary", help="file of 'sprinter draft vocabulary', for part cut")
    parser.add_argument("--gate", help="directory of a gate for the draft")
    parser.add_argument("--heads", nargs="+", default=(), help="directories of other heads for the draft")
    chosen = parser.parse_args()
    if "cut" in chosen.parts and chosen.draft_vocabulary is None:
        parser.error("part cut needs --draft-vocabulary")
    if {*PEERS} & {*chosen.parts} and "SPRINTER_LLAMA_SERVER" not in os.environ:
        sys.exit("error: llama-server is not at hand: set SPRINTER_LLAMA_SERVER to the program")
    results = kept_results(NAME)
    for part in chosen.parts:
        began = time.time()
        wanted = runnable(SMOKE_ARMS or {**PARTS, **PEERS}[part], chosen.gate, chosen.heads)
        rows = measure(chosen, wanted)
        again = {(name, row["temperature"]) for row in rows for name in (row["suite"], TOGETHER)}
        kept = results.setdefault("parts", {}).get(part, [])
        results["parts"][part] = [
            row for row in kept if (row["suite"], row["temperature"]) not in again
        ] + rows
        for temperature in chosen.temperatures:
            note_run(results, NAME, f"{part}, temperature {temperature:g}", began)
        write_results(NAME, results, table(results["parts"]))


if __name__ == "__main__":
    main()
