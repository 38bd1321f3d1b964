"""Save a trained head with its model card and its training facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sprinter.errors import UserError
from sprinter.heads.artifact import save_head
from sprinter.kinds import HEAD_KINDS
from sprinter.training.dataset import PARTS, Positions
from sprinter.training.roc import Report
from sprinter.training.threshold import TauSetting
from sprinter.training.train import Trained

__all__ = ["card_text", "facts_of", "save_trained", "table"]


def save_trained(trained: Trained, report: Report, positions: Positions, directory: Path) -> dict[str, Any]:
    """Write the artifact.

    Args:
        trained: the head and its training history.
        report: evaluation on the test part, or on other texts that were not used for training.
        positions: all positions, for the data's hash and the pair's ids.
        directory: where the artifact goes.

    Returns:
        The training facts as they are stored in config.json.

    Raises:
        UserError: the τ that was chosen for a gate's drift trusts every held-out token, or none.
    """
    if trained.settings.drift is not None and report.setting is not None:
        _check_default(trained.settings.drift, report.setting)
    facts = facts_of(trained, report, positions)
    if report.setting is not None:
        expected = report.setting
        trained.head.config = replace(trained.head.config, drift=expected.drift, trusted=expected.trusted)
    save_head(trained.head, directory, _model_card(trained, report, facts), {"training": facts})
    return facts


def _check_default(drift: float, found: TauSetting) -> None:
    """Refuse a chosen τ at which the gate decides nothing: as a default it would be the draft's text, or no speed."""
    if found.tau == 0 or found.trusted == 1:
        raise UserError(
            f"no gate was saved: the τ of {found.tau:g}, chosen for a drift of {drift:g}, trusts every token of the "
            f"held-out prompts (expected drift {found.drift:.3f}); ask for less (--drift), or give the tau itself "
            "(--tau)"
        )
    if found.trusted == 0:
        raise UserError(
            f"no gate was saved: the τ of {found.tau:g}, chosen for a drift of {drift:g}, trusts no token of the "
            "held-out prompts; ask for more (--drift), label more prompts, or give the tau itself (--tau)"
        )


def facts_of(trained: Trained, report: Report, positions: Positions) -> dict[str, Any]:
    """Training data, settings and evaluation of a head, without local paths."""
    info = positions.infos[0]
    sources = [source for each in positions.infos for source in each.data]
    return {
        "data_hash": positions.data_hash,
        "data": [
            {"name": _base(str(source.get("name", ""))), **{key: source.get(key) for key in ("texts", "sha256")}}
            for source in sources
        ],
        "sources": sorted({str(source.get("sha256", "")) for source in sources}),
        "seed": trained.settings.seed,
        "target_fingerprint": info.target_fingerprint,
        "target_revision": info.target_revision,
        "dtype": info.dtype,
        "split": trained.split,
        "settings": {**asdict(trained.settings), "features": list(trained.settings.inputs)},
        "weight_on_rejections": trained.weight,
        "epochs": len(trained.history),
        "best_epoch": max(epoch.number for epoch in trained.history if epoch.best),
        "validation_loss": min(epoch.validation_loss for epoch in trained.history),
        "test": report.summary(),
    }  # fmt: skip


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def card_text(
    title: str,
    tags: str,
    about: str,
    rows: Iterable[tuple[str, str]],
    rest: Sequence[str],
    library: str = "sprinter",
) -> str:
    """Text of a model card: what it is, a table of facts, and further lines."""
    return "\n".join([
        "---", f"tags: [speculative-decoding, {tags}]",
        f"library_name: {library}", "---", "", f"# {title}", "", about, "", *table(("", ""), rows), "", *rest,
    ])  # fmt: skip


def _model_card(trained: Trained, report: Report, facts: Mapping[str, Any]) -> str:
    """Text of the artifact's README.md."""
    config, head = trained.head.config, trained.head
    rows = [
        ("target", _base(config.target_id)),
        ("draft", f"{_base(config.draft_id)}, weights {str(config.draft_fingerprint)[:12]}"),
        ("reads", ", ".join(config.features)),
        ("network", f"{config.architecture}, {head.size:,} parameters, {head.flops:,.0f} FLOPs a score"),
        ("estimates", config.label),
        ("calibration", f"{head.calibration.kind}, expected error {report.calibration_error:.3f}"),
        *_threshold(trained, report),
        ("data", f"{', '.join(source['name'] for source in facts['data'])} (hash {facts['data_hash'][:12]})"),
    ]
    for name in PARTS:
        part = facts["split"][name]
        rows.append((name, f"{part['positions']:,} positions of {part['prompts']:,} prompts"))
    trainings = (
        f"{facts['epochs']} epochs, the best was {facts['best_epoch']}; rejections weigh {trained.weight:g}"
    )
    rows.append(("training", f"{trainings}; seed {trained.settings.seed}"))
    caveat = "" if report.caveat is None else f"{report.caveat}. "
    rest = [
        f"Judged on {report.positions:,} positions of {report.prompts:,} prompts that were not trained on. {caveat}"
        f"Mean label {report.mean_label:.3f}, mean score {report.mean_score:.3f}, R² {report.r2:.3f}.", "",
        *_dial(report), *_areas(report), "", *_rates(report), "", *_table(report), "",
    ]  # fmt: skip
    title = f"{_base(config.target_id)}-speculator.sprinter"
    about = f"{HEAD_KINDS[config.kind].about} Made with `sprinter gate train`."
    return card_text(title, "sprinter, gate", about, rows, rest)


def _base(name: str) -> str:
    """Last component of a hub id or of a directory, so that no local path is published."""
    return Path(name).name or name


def _threshold(trained: Trained, report: Report) -> list[tuple[str, str]]:
    """Table row about a gate's τ: what it was chosen for, and the expected drift and cost."""
    if report.setting is None:
        return []
    wanted = "given" if trained.settings.drift is None else f"chosen for drift {trained.settings.drift:g}"
    cost = f"{report.setting.calls_per_token:.3f} target calls a token, {report.setting.trusted:.1%} trusted"
    return [("τ", f"{report.tau:g}, {wanted}; expected drift {report.drift}, {cost}")]


def _dial(report: Report) -> list[str]:
    if not report.dial:
        return []
    rows = (
        (f"{place.tau:g}", *(f"{value:.3f}" for value in (place.drift, place.calls_per_token, place.trusted)))
        for place in report.dial
    )
    heads = ("τ", "drift", "target calls a token", "trusted")
    return ["What decoding at τ is expected to cost, at temperature 1:", "", *table(heads, rows), ""]


def _areas(report: Report) -> list[str]:
    rows = (
        (label, f"{truth.share:.3f}", *(curves.auc for curves in truth.signals.values()))
        for label, truth in report.truths.items()
    )
    return [
        "AU-ROC with 95 % intervals (bootstrap over prompts), beside baselines that need no training:", "",
        *table(("label", "share", *report.signals), rows),
    ]  # fmt: skip


def _rates(report: Report) -> list[str]:
    rows = ((label, *truth.at_tau) for label, truth in report.truths.items())
    return [
        f"Shares that score at least τ = {report.tau:g}, of the positions where the label holds (η_TP) and where it "
        "does not (η_FP):", "", *table(("label", "η_TP", "η_FP"), rows),
    ]  # fmt: skip


def _table(report: Report) -> list[str]:
    rows = (
        (row["tau"], *(
            f"{share:.3f} / {'–' if overlap is None else f'{overlap:.3f}'}"
            for share, overlap in zip(row["share"].values(), row["overlap"].values(), strict=True)
        ))
        for row in report.table
    )  # fmt: skip
    heads = ("τ", *(f"temperature {name}" for name in report.table[0]["overlap"]))
    return ["Share of positions that score at least τ, and the mean β there:", "", *table(heads, rows)]
