"""Many rows of a real pair: tokens a second of all of them, and where the milliseconds of a round go.

A group of rows is one batch of the engine, with captured passes. Prompts are repeated where there are fewer than rows;
each row has a seed of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.stage import Run, first_line, free, synchronise
from sprinter.engine.pair import Pair
from sprinter.errors import SprinterError

ROWS = (1, 8, 64, 256)
TINY_ROWS = (1, 3)
PASSES = ("draft", "gate", "target")


def measure_rows(
    run: Run, pair: Pair, specs: dict[str, str], prompts: Sequence[str], temperature: float, deadline: float,
    lines: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Add a line for each method and number of rows, until the time is up; a failure is a line too."""
    for rows in TINY_ROWS if run.smoke else ROWS:
        asked = [prompts[i % len(prompts)] for i in range(rows)]
        for name, spec in specs.items():
            if time.monotonic() >= deadline:
                return
            line: dict[str, Any] = {"arm": name, "spec": spec, "rows": rows, "temperature": temperature}
            lines.append(line)
            try:
                line.update(_timed(run, pair, spec, asked, temperature))
            except (SprinterError, RuntimeError) as error:  # memory, above all
                if run.smoke:
                    raise
                line["error"] = first_line(error)
            run.keep("real")
            free(run.device)


def _timed(run: Run, pair: Pair, spec: str, asked: Sequence[str], temperature: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "method": spec, "temperature": temperature, "rows": len(asked), "never_slower": False,
        "max_new_tokens": run.sizes.new_tokens,
    }  # fmt: skip
    seeds = list(range(len(asked)))
    pair.generate_batch(asked, seed=seeds, **options)  # captures its graphs
    synchronise(run.device)
    began = time.perf_counter()
    found = pair.generate_batch(asked, seed=seeds, **options)
    seconds = time.perf_counter() - began
    stats = [one.stats for one in found]
    rounds, tokens = sum(one.rounds for one in stats), sum(one.new_tokens for one in stats)
    drifts = [one.drift_sum for one in stats if one.drift_sum is not None]
    # A row's share of a pass times the rows is what a round of all takes; its wall time is that of all.
    a_round = {
        what: 1e3 * len(asked) * sum(getattr(one, f"{what}_s") for one in stats) / rounds for what in PASSES
    }
    outside = len(asked) * sum(one.prefill_s + one.closing_s for one in stats)
    whole = 1e3 * (sum(one.wall_s for one in stats) - outside) / rounds
    a_round["other"] = max(0.0, whole - sum(a_round.values()))
    return {
        "tokens_per_s": tokens / seconds, "tokens_per_round": tokens / rounds, "ms_per_round": a_round,
        "drift": sum(drifts) / tokens if drifts else None,
    }  # fmt: skip
