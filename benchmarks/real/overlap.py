"""What drafting the next round while the target checks this one could gain on a CPU, before anything of it is built.

    python benchmarks/real/overlap.py [--repeats 15] [--context 256]

PEARL (2408.11850, section 4) drafts the next tokens during the target's pass, and drops them unless all tokens of the
round are accepted. A round then takes O, the time of both together, and D more with the chance 1 - a that the tokens
are dropped, where it took T + D: it pays where a > (O - T) / D. ``one after the other``: the target's pass over
gamma + 1 tokens, then gamma draft steps, each with all threads. ``at the same time``: two threads of Python, which
share the threads of the kernels in each way; the fastest counts. Medians, kinds interleaved. What such an engine would
spend on the host is left out, so that the gain is an upper bound.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import sprinter
from benchmarks.common import grid, kept_results, note_run, option_parser, write_results
from benchmarks.real.arms import DRAFT, TARGET
from benchmarks.smoke import sized
from sprinter.models.choose import make_runner

NAME = "real/overlap"
GAMMAS = sized((1, 3, 5, 8), (2,))
KINDS: dict[str, dict[str, Any]] = sized(
    {"gguf": {"target": TARGET, "draft": DRAFT, "runner": "torch", "dtype": "gguf"}},
    {"built-in": {"compile": False}},
)


def shares(threads: int) -> list[tuple[int, int]]:
    """Numbers of threads of the target and of the draft, at the same time."""
    return [(n, threads - n) for n in range(1, threads)] or [(1, 1)]


def measured(pair: sprinter.Pair, context: int, repeats: int) -> list[dict[str, Any]]:
    """Median seconds of rounds, by number of draft tokens."""
    threads = torch.get_num_threads()
    ids = torch.arange(context)[None] % 500 + 5
    runners = []
    for one in (pair.models.target, pair.models.draft):
        assert one is not None
        runner = make_runner(one.model, max_len=context + max(GAMMAS) + 1, compile=False)
        runner.extend(ids, logits=False)
        runners.append(runner)
    target, draft = runners

    def check(gamma: int, using: int) -> float:
        torch.set_num_threads(using)  # of this thread
        began = time.perf_counter()
        target.extend(torch.arange(gamma + 1)[None] + 5)
        seconds = time.perf_counter() - began
        target.rewind([context])
        return seconds

    def propose(gamma: int, using: int) -> float:
        torch.set_num_threads(using)
        began = time.perf_counter()
        for i in range(gamma):
            draft.extend(torch.tensor([[i + 5]]))
        seconds = time.perf_counter() - began
        draft.rewind([context])
        return seconds

    found: dict[tuple[int, Any], list[float]] = {}
    with ThreadPoolExecutor(1) as other, torch.inference_mode():

        def together(gamma: int, share: tuple[int, int]) -> float:
            began = time.perf_counter()
            waiting = other.submit(torch.inference_mode()(propose), gamma, share[1])
            check(gamma, share[0])
            waiting.result()
            return time.perf_counter() - began

        arms: dict[Any, Callable[[int], float]] = {
            "target": lambda gamma: check(gamma, threads),
            "draft": lambda gamma: propose(gamma, threads),
            **{share: lambda gamma, share=share: together(gamma, share) for share in shares(threads)},
        }  # type: ignore[dict-item]
        for repeat in range(repeats + 1):
            for gamma in GAMMAS:
                for name, run in arms.items():
                    seconds = run(gamma)
                    if repeat:  # the first is a warm-up
                        found.setdefault((gamma, name), []).append(seconds)
    torch.set_num_threads(threads)
    rows = []
    for gamma in GAMMAS:
        checked, proposed = (statistics.median(found[gamma, name]) for name in ("target", "draft"))
        both = {share: statistics.median(found[gamma, share]) for share in shares(threads)}
        best = min(both, key=lambda share: both[share])
        rows.append(
            {
                "gamma": gamma, "target_s": checked, "draft_s": proposed, "together_s": both[best],
                "threads": list(best), "most_gain": (checked + proposed) / both[best],
                "least_acceptance": (both[best] - checked) / proposed,
            }
        )  # fmt: skip
    return rows


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    shown = [
        f"{row['kind']} | {row['gamma']} | {1000 * row['target_s']:.1f} | {1000 * row['draft_s']:.1f} | "
        f"{1000 * row['together_s']:.1f} ({row['threads'][0]} + {row['threads'][1]} threads) | "
        f"{row['most_gain']:.2f} | {row['least_acceptance']:.2f}"
        for row in results["measured"]
    ]
    head = (
        "kind | γ | target's pass, ms | γ draft steps, ms | at the same time, ms | most gain | "
        "least chance that all are accepted"
    )
    return "\n".join(grid(head, shown))


def main() -> None:
    """Time; write."""
    parser = option_parser(__doc__, data=False)
    parser.add_argument("--repeats", type=int, default=sized(15, 1))
    parser.add_argument("--context", type=int, default=sized(256, 16))
    chosen, began = parser.parse_args(), time.time()
    results, rows = kept_results(NAME), []
    for kind, loading in KINDS.items():
        pair = sprinter.load_pair(**loading)
        rows += [{"kind": kind, **row} for row in measured(pair, chosen.context, chosen.repeats)]
    results |= {"benchmark": NAME, "measured": rows}
    note_run(results, NAME, "overlap", began)
    write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
