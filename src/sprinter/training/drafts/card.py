"""The card of a distilled draft, or of heads that draft, and its loss curve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprinter.plots import COLOURS, canvas, no_plots, png
from sprinter.training.card import card_text, table
from sprinter.training.drafts.run import LossPoint
from sprinter.training.shards import save_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draft_card", "save_losses"]

_COLOURS = {"ce": "orange", "kl": "green", "reverse-kl": "purple", "tv": "blue"}
_NAMES = {
    "medusa": "Medusa's heads (arXiv 2401.10774)",
    "eagle": "EAGLE's head, as of EAGLE-2 (arXiv 2401.15077, 2406.16858)",
    "eagle3": "EAGLE-3's head (arXiv 2503.01840)",
    "peagle": "P-EAGLE's head (arXiv 2602.01469): EAGLE-3's, all tokens in one pass",
    "dflash": "DFlash's block-diffusion model (arXiv 2602.06036)",
    "glide": "GliDe's layer (arXiv 2402.02082)",
}


def draft_card(facts: Mapping[str, Any]) -> str:
    """Text of README.md from the facts of draft.json."""
    return _card_of_heads(facts) if "heads" in facts else _card_of_draft(facts)


def _card_of_draft(facts: Mapping[str, Any]) -> str:
    student, cut = facts["student"], facts["student"]["vocabulary"]
    shape = (
        f"{student['layers']} layers, width {student['width']}, {student['parameters']:,} parameters a step"
    )
    own = [
        ("draft", shape),
        *([("start", f"layers and embeddings of {Path(student['start']).name}")] if student["start"] else []),
        ("vocabulary", "whole" if cut is None else f"{cut:,} tokens; for Sprinter alone"),
    ]
    about = (
        "A Llama model that drafts for speculative decoding, distilled from texts that the target wrote. Made with "
        "`sprinter draft distill`."
    )
    rest = [f"Held-out prompts; β = Σ min(p, q), tokens a target call with `{facts['method']}`:", "",
            *_by_task(facts["tasks"]), "", *_picture(facts)]  # fmt: skip
    rows = _rows(facts, own, f"after {facts['training']['warm_up']:.0%} of the steps with ce+kl")
    return card_text(
        f"Draft model for {facts['texts']['target']}", "draft, sprinter", about, rows, rest, "transformers"
    )


def _card_of_heads(facts: Mapping[str, Any]) -> str:
    heads, kind = facts["heads"], facts["heads"]["kind"]
    step, tree = ("head", "medusa") if kind == "medusa" else ("step", "eagle")
    ranks = (
        [number, *(f"{one:.3f}" for one in row[:5])] for number, row in enumerate(heads["accuracies"], 1)
    )
    rest = [
        f"How often the target's token has this rank in a head's law, on {heads['accuracies_on']} texts:", "",
        *table(("tokens ahead", "1st", "2nd", "3rd", "4th", "5th"), ranks), "",
    ]  # fmt: skip
    if facts["tasks"]:
        rest += [
            f"Held-out prompts; tokens a target call of `heads` (chain) and `{tree}` (tree), and the share of drafted "
            "tokens that stay:", "", *_by_task(facts["tasks"]), "",
        ]  # fmt: skip
    else:
        rest += ["No prompts were held out.", ""]
    about = (
        f"{_NAMES[kind]}, trained on texts that the target wrote, the target frozen. "
        "Made with `sprinter draft train`."
    )
    own = [("heads", f"{_made_of(heads)}; {heads['parameters']:,} parameters")]
    rows = _rows(facts, own, f"each further {step} × {heads['discount']:g}")
    title = f"Heads that draft for {facts['texts']['target']}"
    return card_text(title, f"{kind}, sprinter", about, rows, [*rest, *_picture(facts)])


def _rows(facts: Mapping[str, Any], own: list[tuple[str, str]], loss: str) -> list[tuple[str, str]]:
    """Rows of the target, what is its own, the texts, and the training with how its losses are weighed."""
    texts, training = facts["texts"], facts["training"]
    return [
        ("target", f"{texts['target']}, {texts['weights']}, weights {texts['target_fingerprint'][:12]}"),
        *own,
        ("data", f"{', '.join(source['name'] for source in texts['data'])} "
         f"(sha256 {', '.join(source['sha256'][:12] for source in texts['data'])})"),
        ("texts", f"{texts['train_texts']:,} answers of the target, {texts['train_tokens']:,} tokens, "
         f"{texts['held_out_texts']:,} more held out; temperature {texts['settings']['temperature']:g} "
         f"(hash {texts['hash'][:12]})"),
        ("loss", f"{training['loss']} at temperature {training['temperature']:g}, {loss}"),
        ("training", f"{training['steps']:,} steps, {training['tokens']:,} positions, {training['seconds']:.0f} s; "
         f"seed {training['seed']}"),
    ]  # fmt: skip


def _picture(facts: Mapping[str, Any]) -> list[str]:
    return ["![Losses by step](losses.png)", ""] if facts["picture"] else []


def _made_of(heads: Mapping[str, Any]) -> str:
    count, tokens = heads["heads"], heads["vocabulary"]
    if heads["kind"] == "medusa":
        shared = "the target's own output layer" if heads["share_output"] else "an output layer each"
        return f"{count}, {heads['blocks']} residual block{'s' * (heads['blocks'] > 1)} and {shared}"
    if heads["kind"] == "glide":
        return f"one layer that attends to the target's last; trained {count} tokens ahead"
    if heads["kind"] == "dflash":
        return (
            f"{heads['blocks']} layers over a block and three of the target's states; {count} tokens a pass"
        )
    if heads["kind"] == "eagle":
        own = "training on the target's states alone" if count == 1 else f"{count} steps of training"
        return f"one layer over embeddings and the target's last states; {own}, regression × {heads['regression']:g}"
    vocabulary = "the whole vocabulary" if tokens is None else f"{tokens:,} tokens"
    layers = "one layer" if heads["blocks"] == 1 else f"{heads['blocks']} layers"
    if heads["kind"] == "peagle":
        return (
            f"{layers} over three of the target's, on {vocabulary}, and masks for {count - 1} further tokens"
        )
    return f"{layers} over three of the target's, on {vocabulary}; {count} steps of training-time test"


def _by_task(tasks: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = [*dict.fromkeys(name for row in tasks.values() for name in row)]
    rows: Iterable[list[str]] = (
        [task, *("–" if name not in row else _cell(row[name]) for name in names)]
        for task, row in tasks.items()
    )
    return table(("task", *names), rows)


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def save_losses(history: Sequence[LossPoint], path: Path) -> bool:
    """Draw the losses by step as a PNG file; False without matplotlib (extra ``plots``), and then there is no file."""
    if no_plots():
        return False
    save_bytes(path, png(lambda: _losses(history), 150))
    return True


def _losses(history: Sequence[LossPoint]) -> Figure:
    figure, (left, right) = canvas(9, 3.2, 1, 2)
    steps = [point.step for point in history]
    for name, colour in _COLOURS.items():
        panel, code = right if name == "tv" else left, COLOURS[colour]
        panel.plot(
            steps, [point.train[name] for point in history], "--", color=code, label=f"{name}, training"
        )
        if all(point.held_out for point in history):
            held = [point.held_out[name] for point in history]
            panel.plot(steps, held, "-o", markersize=3, color=code, label=f"{name}, held out")
    for panel, title in ((left, "nats"), (right, "1 − acceptance")):
        panel.set(xlabel="step", title=title)
        panel.legend()
    return figure
