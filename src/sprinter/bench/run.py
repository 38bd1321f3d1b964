"""A whole run: ask, grade, analyse the laws, write results and report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sprinter.bench.analysis import analyse
from sprinter.bench.arm import Arm
from sprinter.bench.arms.engine import EngineArm
from sprinter.bench.environment import environment, load_average, pair_facts
from sprinter.bench.grading import Grading, JudgeSettings
from sprinter.bench.harness import Harness, OnBenchProgress
from sprinter.bench.journal import QUALITY, Journal, hash_of, recorded_costs, replies
from sprinter.bench.quality.measure import QualitySettings
from sprinter.bench.report import write_report
from sprinter.bench.results import SCHEMA, write_results, write_spec_bench
from sprinter.bench.sample import Suite
from sprinter.bench.settings import BenchSettings
from sprinter.bench.suites import turn_ids
from sprinter.bench.summary import summarise
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.files import writing

__all__ = ["Extras", "run_bench"]

_ANALYSED = 40  # number of prompts for the analysis of the laws
_MAY_CHANGE = ("bases", "warmup", "temperatures", "repeats")
"""Settings that an answer does not depend on, or that its row records."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Optional parts of a run besides timing.

    Attributes:
        quality: what to measure of the answers; None: nothing, and no judge.
        judge: settings of the judge that compares arms.
        analysis: analyse both models' laws along texts, for figures of the report.
        command: command line, stored in the results.
    """

    quality: QualitySettings | None = QualitySettings()
    judge: JudgeSettings = JudgeSettings()
    analysis: bool = True
    command: str = ""


def run_bench(
    pair: Pair,
    arms: Sequence[Arm],
    suites: Sequence[Suite],
    settings: BenchSettings = BenchSettings(),
    out: Path = Path("bench-results"),
    extras: Extras = Extras(),
    *,
    restart: bool = False,
    progress: OnBenchProgress = lambda done, wanted, note: None,
) -> dict[str, Any]:
    """Run arms on suites and write ``results.json``, ``report.html`` and Spec-Bench's files into ``out``.

    A run in ``out`` is resumed, also with other arms, temperatures or repeats: questions that have an answer are not
    asked again. Other suites, models or settings are an error.

    Returns:
        The content of ``results.json``; see ``sprinter.bench.results``.

    Raises:
        UserError: nothing to ask, every arm failed, ``out`` holds another run or cannot be written, ...
    """
    began, facts = time.perf_counter(), pair_facts(pair)
    grading = Grading(pair, suites, extras.quality, extras.judge) if extras.quality else None
    asked = {key: value for key, value in settings.facts().items() if key not in _MAY_CHANGE}
    where = environment()
    machine = {key: where[key] for key in ("cpu", "isa", "gpu", "threads")}
    machine["device"] = pair.models.target.model.device.type
    run = {"pair": facts, "suites": [one.facts() for one in suites], "settings": asked, "machine": machine}
    if not restart:
        pair._runtime.use_measured(recorded_costs(out, run))
    for arm in arms:
        if isinstance(arm, EngineArm):
            arm.fit(pair)
    specs = {arm.name: arm.spec for arm in arms}
    session = {"command": extras.command, "environment": where, "began": _now()}
    costs = pair._runtime.measured
    with Journal(out, run, arms=specs, costs=costs, session=session, restart=restart) as journal:
        harness = Harness(pair, arms, suites, settings, journal, progress)
        try:
            harness.run()
            arm_facts = [_arm_facts(arm, harness.failed) for arm in arms]
        finally:
            harness.close()
            journal.end_session({"ended": _now(), "load_at_end": load_average()})
    rows = [row for row in journal.rows if row["model_id"] in specs]
    rows = [r for r in rows if r["temperature"] in settings.temperatures and r["repeat"] < settings.repeats]
    if not rows:
        raise UserError("every arm failed: " + "; ".join(f"{n}: {e}" for n, e in harness.failed.items()))
    judged = grading.grade(rows, settings.bases, out, progress) if grading else None
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "run": journal.run_id,
        "sessions": journal.sessions,
        "created": _now(),
        "command": extras.command,
        "environment": where,
        "pair": facts,
        "settings": settings.facts() | {"quality": grading.facts if grading else None},
        "suites": [
            one.facts() | {"asked": harness.asked[one.name], "left_out": harness.skipped[one.name]}
            for one in suites
        ],
        "arms": arm_facts,
        "summary": summarise(rows, {arm.name: arm.engine for arm in arms}, settings.bases),
        "judge": judged,
        "analysis": None,
        "seconds": 0.0,
        "rows": rows,
    }
    write_results(out, results)  # before the report, so that the numbers are stored even if drawing fails
    if extras.analysis:
        results["analysis"] = _analysis(pair, suites, settings, out, progress)
    results["seconds"] = round(time.perf_counter() - began, 1)
    write_results(out, results)
    write_spec_bench(out / "spec-bench", results)
    with writing(out / "report.html"):
        write_report(results, out / "report.html")
    return results


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _arm_facts(arm: Arm, failed: dict[str, str]) -> dict[str, Any]:
    error = failed.get(arm.name)
    status = "failed" if error else "ok"
    versions: dict[str, str] = {}
    with suppress(Exception):  # another engine may raise; the run is complete
        versions = {} if error else arm.versions()
    return {"name": arm.name, "spec": arm.spec, "engine": arm.engine, "versions": versions, "status": status,
            "error": error}  # fmt: skip


def _analysis(
    pair: Pair, suites: Sequence[Suite], settings: BenchSettings, out: Path, progress: OnBenchProgress
) -> dict[str, Any] | None:
    """Analyse texts that continue the suites' first prompts, evenly from all suites; once, as it is kept."""
    if pair.models.draft is None:
        return None
    share, new = max(1, _ANALYSED // len(suites)), 64
    prompts = []
    for suite in suites:
        found = (turn_ids(pair, sample, 0, [], chat=suite.chat) for sample in suite.samples)
        prompts += [ids for ids in found if 0 < len(ids) <= pair.models.context - new][:share]
    if not prompts:
        return None
    sampling = settings.sampling(settings.temperatures[0])

    def shown(done: int, wanted: int) -> None:
        progress(done, wanted, "laws along texts")

    key = hash_of(["laws along texts", prompts, sampling.model_dump(), new])
    with replies(out / QUALITY) as kept:
        if (record := kept.get(key)) is None:
            record = {"key": key, "analysis": analyse(pair, prompts, sampling, new, shown)}
            kept.add(record)
    return dict(record["analysis"])
