"""A whole tuning: probe, replay, race, profile; resumable."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sprinter.bench.environment import pair_facts
from sprinter.bench.journal import Journal
from sprinter.bench.sample import Suite
from sprinter.engine.pair import Pair
from sprinter.engine.profile import SCHEMA, machine_facts, pair_identity
from sprinter.errors import UserError
from sprinter.files import write_atomic, writing
from sprinter.theory.recording import Recording
from sprinter.tuning.candidates import Candidate, candidates
from sprinter.tuning.judge import check_goals, choose, front_of, graded, settings_of
from sprinter.tuning.probe import prompt_facts, run_probe, usable_prompts
from sprinter.tuning.prune import Predicted, faster_half, prune, replay_all
from sprinter.tuning.race import Race
from sprinter.tuning.settings import TuneSettings
from sprinter.version import __version__

__all__ = ["tune", "work_folder"]

_REPLAYED = "replayed.json"
_TEXTS = 0.15  # share of the time after which the probe writes no further text
_REPLAYS = 0.4  # share of the time after which no candidate is replayed
_USUAL_TOKENS = 128  # new tokens if the suite has no limit

TuneProgress = Callable[[int, int, str], None]
"""(steps done, steps in total, stage)."""


def work_folder(out: Path) -> Path:
    """The folder beside a profile that holds what a tuning has measured so far."""
    return out.with_name(f"{out.stem}.work")


def tune(
    pair: Pair,
    suite: Suite,
    out: Path,
    settings: TuneSettings = TuneSettings(),
    *,
    restart: bool = False,
    progress: TuneProgress = lambda done, wanted, stage: None,
) -> dict[str, Any]:
    """Find the fastest settings of a pair on these prompts, and write them as a profile.

    A tuning that was interrupted, or ended by its time, continues where it was when it is called again with the same
    arguments; ``time_s`` counts anew.

    Args:
        suite: the prompts, with right answers if ``settings`` has goals of quality.
        out: the profile; what was measured is kept in ``work_folder(out)``.
        restart: forget earlier measurements.

    Returns:
        The profile; see ``sprinter.engine.profile``.

    Raises:
        UserError: no draft, prompts that are too long, a goal that the prompts cannot show, a folder that holds another
            tuning, ...
    """
    began = time.monotonic()
    until = math.inf if settings.time_s is None else began + settings.time_s
    if out.is_dir() or not out.suffix:
        raise UserError(f"out={str(out)!r} is not a file name: give one such as profile.json")
    if pair.models.draft is None:
        raise UserError(
            "the tuner compares ways to use a draft model, and this pair has none: give draft=..."
        )
    settings = replace(settings, new_tokens=_new_tokens(pair, suite, settings))
    assert settings.new_tokens is not None
    prompts = usable_prompts(pair, suite, settings.new_tokens)
    suite = _fitting(pair, suite, settings.new_tokens)
    check_goals(suite, settings)
    machine, folder = machine_facts(pair.models), work_folder(out)
    run = {
        "pair": pair_facts(pair), "suites": [suite.facts()], "settings": settings.facts(), "machine": machine,
    }  # fmt: skip
    with Journal(folder, run, restart=restart) as journal:
        if restart:
            (folder / _REPLAYED).unlink(missing_ok=True)
        known = _read(folder / _REPLAYED) or _probe(pair, prompts, settings, folder, began, progress)
        predicted = [Predicted(**one) for one in known["predicted"]]
        most_kl = max(settings.budgets) if settings.budget_unit == "kl" and settings.budgets else None
        race = Race(pair, suite, settings, journal, until, bool(settings.quality), progress)
        race.run(prune(predicted, settings.keep, most_kl))
        specs = ["autoregressive", *(spec for specs in race.classes.values() for spec in specs)]
        rows = graded(pair, suite, journal.rows, specs, settings, folder, progress)
        entries = settings_of(rows, race.classes, {one.spec: one for one in predicted}, settings)
        profile = {
            "schema": SCHEMA,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "sprinter": __version__,
            "pair": pair_identity(pair.models, pair.heads),
            "machine": machine,
            "sampling": {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p")},
            "new_tokens": settings.new_tokens,
            "goal": {
                "budget_unit": settings.budget_unit, "budgets": list(settings.budgets),
                "quality": [str(goal) for goal in settings.quality],
            },
            "prompts": {
                "name": suite.name, "sources": list(suite.sources), "count": len(suite.samples), **known["prompts"],
            },
            "costs": known["costs"],
            "settings": entries,
            "chosen": choose(entries, settings),
            "front": front_of(predicted, journal.rows, settings),
            "race": {
                "candidates": known["candidates"], "rounds": race.rounds, "decided": race.decided,
                "failed": race.failed,
            },
        }  # fmt: skip
    profile["seconds"] = round(time.monotonic() - began, 1)
    return _write(out, profile)


def _new_tokens(pair: Pair, suite: Suite, settings: TuneSettings) -> int:
    wanted = settings.new_tokens or suite.new_tokens or _USUAL_TOKENS
    return wanted if settings.new_tokens else max(1, min(wanted, pair.models.context // 2))


def _fitting(pair: Pair, suite: Suite, new_tokens: int) -> Suite:
    """The samples whose first turn fits; conversations are reduced to it."""
    kept = tuple(
        replace(sample, turns=sample.turns[:1], references=sample.references[:1])
        for sample in suite.samples
        if usable_prompts(pair, replace(suite, samples=(sample,)), new_tokens)
    )
    if not kept:
        raise UserError("no prompt fits the pair's context: give others, or a smaller --max-new-tokens")
    return replace(suite, samples=kept)


def _probe(
    pair: Pair, prompts: Any, settings: TuneSettings, folder: Path, began: float, progress: TuneProgress
) -> dict[str, Any]:
    """Probe the pair and replay candidates; kept on disk for a later call."""
    assert settings.new_tokens is not None

    prompts = prompts[: settings.probe_texts]
    time_s = math.inf if settings.time_s is None else settings.time_s
    probe = run_probe(
        pair, prompts, settings.sampling, settings.new_tokens, settings.seed,
        lambda stage, done, wanted: progress(done, wanted, stage), began + _TEXTS * time_s,
    )  # fmt: skip
    costs = probe.costs
    optimal, auto = f"optimal({costs.named})", f"{costs.named}, reads={costs.reads}"
    tried = candidates(probe.recording, optimal, settings.levels(probe.mean_tokens), auto)

    def replayed(recording: Recording, some: Sequence[Candidate], stage: str) -> list[Predicted]:
        return replay_all(
            recording, costs, some, seed=settings.seed, until=began + _REPLAYS * time_s,
            progress=lambda done, wanted: progress(done, wanted, stage),
        )  # fmt: skip

    first = replayed(probe.some, tried, "replaying methods")
    again = replayed(probe.recording, faster_half(first), "replaying the faster half")
    better = {one.spec: one for one in again}
    known = {
        "predicted": [better.get(one.spec, one).to_dict() for one in first],
        "candidates": len(tried),
        "prompts": prompt_facts(probe.recording, prompts),
        "costs": {"target_s": {str(n): s for n, s in costs.target}, "draft_s": costs.draft_s(1)},
    }
    return _write(folder / _REPLAYED, known)


def _read(path: Path) -> dict[str, Any] | None:
    """What an earlier call kept; None: nothing."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        raise UserError(f"'{path}' is damaged: give --restart to start over") from None


def _write(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    with writing(path, "free it or give another --out"):
        write_atomic(path, json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    return value
