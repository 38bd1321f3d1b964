"""The card of a distilled draft: README.md, draft.json and the loss curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprinter.plots import COLOURS, canvas, no_plots, png
from sprinter.training.drafts.data import save_bytes
from sprinter.training.drafts.run import LossPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["model_card", "save_losses"]

_COLOURS = {"ce": "orange", "kl": "green", "reverse-kl": "purple", "tv": "blue"}


def model_card(facts: Mapping[str, Any]) -> str:
    """Text of README.md from the facts of draft.json."""
    texts, student, training = facts["texts"], facts["student"], facts["training"]
    shape = (
        f"{student['layers']} layers, width {student['width']}, {student['parameters']:,} parameters a step"
    )
    cut, made = student["vocabulary"], _made_from(facts)
    lines = [
        "---", "tags: [speculative-decoding, draft, sprinter]", "library_name: transformers", "---", "",
        f"# Draft model for {texts['target']}", "",
        "A Llama model that drafts for speculative decoding, distilled from texts that the target wrote. Made with "
        "`sprinter draft distill`.", "",
        "| | |", "| --- | --- |",
        made[0],
        f"| draft | {shape} |",
        f"| vocabulary | {'whole' if cut is None else f'{cut:,} tokens; for Sprinter alone'} |",
        *made[1:],
        f"| loss | {training['loss']} at temperature {training['temperature']:g}, after {training['warm_up']:.0%} "
        "of the steps with ce+kl |",
        *_trained(training),
        "", f"Held-out prompts; β = Σ min(p, q), tokens a target call with `{facts['method']}`:", "",
        *_table(facts["tasks"]), "",
        *(["![Losses by step](losses.png)", ""] if facts["picture"] else []),
    ]  # fmt: skip
    return "\n".join(lines)


def _table(tasks: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = [*dict.fromkeys(name for row in tasks.values() for name in row)]
    lines = [f"| task | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for task, row in tasks.items():
        cells = ["–" if name not in row else _cell(row[name]) for name in names]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return lines


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


_NAMES = {
    "medusa": "Medusa's heads (arXiv 2401.10774)",
    "eagle": "EAGLE's head, as of EAGLE-2 (arXiv 2401.15077, 2406.16858)",
    "eagle3": "EAGLE-3's head (arXiv 2503.01840)",
    "glide": "GliDe's layer (arXiv 2402.02082)",
}


def heads_card(facts: Mapping[str, Any]) -> str:
    """Text of README.md of heads that draft, from the facts of draft.json."""
    heads, training = facts["heads"], facts["training"]
    medusa = heads["kind"] == "medusa"
    shared = "the target's own output layer" if heads["share_output"] else "an output layer each"
    made_of = f"{heads['heads']}, {heads['blocks']} residual block{'s' * (heads['blocks'] > 1)} and {shared}"
    if not medusa:
        vocabulary = (
            "the whole vocabulary" if heads["vocabulary"] is None else f"{heads['vocabulary']:,} tokens"
        )
        made_of = f"one layer over three of the target's, on {vocabulary}; {heads['heads']} steps of training-time test"
    if heads["kind"] == "eagle":
        own = (
            "training on the target's states alone"
            if heads["heads"] == 1
            else f"{heads['heads']} steps of training"
        )
        made_of = f"one layer over embeddings and the target's last states; {own}, regression × {heads['regression']:g}"
    if heads["kind"] == "glide":
        made_of = f"one layer that attends to the target's last; trained {heads['heads']} tokens ahead"
    name = _NAMES[heads["kind"]]
    lines = [
        "---", f"tags: [speculative-decoding, {heads['kind']}, sprinter]", "library_name: sprinter", "---", "",
        f"# Heads that draft for {facts['texts']['target']}", "",
        f"{name}, trained on texts that the target wrote, the target frozen. Made with "
        "`sprinter draft train`.", "",
        "| | |", "| --- | --- |",
        f"| heads | {made_of}; {heads['parameters']:,} parameters |",
        *_made_from(facts),
        f"| loss | {training['loss']} at temperature {training['temperature']:g}, each further "
        f"{'head' if medusa else 'step'} × "
        f"{heads['discount']:g} |",
        *_trained(training), "",
        f"How often the target's token has this rank in a head's law, on {heads['accuracies_on']} texts:", "",
        "| tokens ahead | 1st | 2nd | 3rd | 4th | 5th |", "| --- |" + " --- |" * 5,
        *(
            f"| {number} | {' | '.join(f'{value:.3f}' for value in row[:5])} |"
            for number, row in enumerate(heads["accuracies"], 1)
        ), "",
        *(
            [
                "Held-out prompts; tokens a target call of `heads` (chain) and "
                f"`{'medusa' if medusa else 'eagle'}` (tree), and the share of drafted tokens that stay:", "",
                *_table(facts["tasks"]), "",
            ]
            if facts["tasks"]
            else ["No prompts were held out.", ""]
        ),
        *(["![Losses by step](losses.png)", ""] if facts["picture"] else []),
    ]  # fmt: skip
    return "\n".join(lines)


def _made_from(facts: Mapping[str, Any]) -> list[str]:
    """Rows of the target, the data and the texts."""
    texts = facts["texts"]
    return [
        f"| target | {texts['target']}, {texts['weights']}, weights {texts['target_fingerprint'][:12]} |",
        f"| data | {', '.join(source['name'] for source in texts['data'])} "
        f"(sha256 {', '.join(source['sha256'][:12] for source in texts['data'])}) |",
        f"| texts | {texts['train_texts']:,} answers of the target, {texts['train_tokens']:,} tokens, "
        f"{texts['held_out_texts']:,} more held out; temperature {texts['settings']['temperature']:g} "
        f"(hash {texts['hash'][:12]}) |",
    ]


def _trained(training: Mapping[str, Any]) -> list[str]:
    """The row of the training."""
    return [
        f"| training | {training['steps']:,} steps, {training['tokens']:,} positions, {training['seconds']:.0f} s; "
        f"seed {training['seed']} |",
    ]
