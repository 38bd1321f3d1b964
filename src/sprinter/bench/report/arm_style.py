"""Colour, marker and short name of each arm, the same in every picture.

The colour shows the kind of method, the marker the method. Arms of one method that differ in its dial share both; their
labels distinguish them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sprinter.decode.spec import parse_call, parse_method
from sprinter.errors import SprinterError

__all__ = ["KINDS", "MARKERS", "ArmStyle", "arm_styles", "read_spec"]

KINDS: Mapping[str, tuple[str, str]] = {
    "target": ("ink", "the target alone"),
    "exact": ("blue", "exact, one draft"),
    "several": ("sky", "exact, several drafts, trees or look-up"),
    "gate": ("orange", "gate (SPRINTER)"),
    "slack": ("green", "lossy, token by token"),
    "position": ("red", "lossy, by position"),
    "baseline": ("grey", "baselines"),
    "peer": ("purple", "other engines"),
}
"""Kind of an arm -> (name of a colour in ``sprinter.plots``, text of the legend)."""

MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "X": "✖", "P": "✚", "*": "★"}
"""matplotlib's name of each marker, and the letter that stands for it in tables."""

_KNOWN = {
    "autoregressive": "target",
    "sprinter": "gate",
    **dict.fromkeys(("batch", "specinfer", "spectr", "lookup", "hybrid"), "several"),
    **dict.fromkeys(("tree", "static-tree", "cape", "traversal"), "several"),
    **dict.fromkeys(("opt", "uno", "mentored", "lenient", "cactus"), "slack"),
    **dict.fromkeys(("fuzzy", "typical", "bild", "cascade", "relaxed"), "position"),
    **dict.fromkeys(("margin", "threshold", "fly", "asd"), "position"),
    **dict.fromkeys(("draft-only", "allocation", "coin", "random"), "baseline"),
}  # fmt: skip
_LABEL_LENGTH = 26


@dataclass(frozen=True, slots=True)
class ArmStyle:
    """Visual style of an arm.

    Attributes:
        index: index in the run, which the arm's marks carry.
        name: full name.
        label: short name, unique in the run.
        method: name of the method without parameters.
        parameters: parameters of the spec, if it is a preset of this package.
        kind: key of ``KINDS``.
        colour: name of a colour.
        marker: key of ``MARKERS``.
    """

    index: int
    name: str
    label: str
    method: str
    parameters: Mapping[str, str]
    kind: str
    colour: str
    marker: str

    @property
    def glyph(self) -> str:
        """The letter that stands for the marker."""
        return MARKERS[self.marker]


def arm_styles(arms: Sequence[Mapping[str, Any]], lossless: Mapping[str, bool | None]) -> dict[str, ArmStyle]:
    """Style of each arm by name.

    Args:
        arms: "arms" of a results file.
        lossless: whether each arm is lossless, if known.
    """
    specs = [_spec_of(arm) for arm in arms]
    labels = _labels([str(arm["name"]) for arm in arms], specs)
    methods: dict[str, list[str]] = {}
    found = {}
    for i, (arm, (method, parameters)) in enumerate(zip(arms, specs, strict=True)):
        name = str(arm["name"])
        kind = _kind(arm, method, lossless.get(name))
        seen = methods.setdefault(kind, [])
        if method not in seen:
            seen.append(method)
        marker = [*MARKERS][seen.index(method) % len(MARKERS)]
        found[name] = ArmStyle(i, name, labels[i], method, parameters, kind, KINDS[kind][0], marker)
    return found


def read_spec(spec: str) -> tuple[str, dict[str, str]]:
    """("fuzzy", {"threshold": "0.3", ...}) for a preset's spec, with defaults; (spec, {}) for any other text."""
    try:
        name, parameters = parse_call(parse_method(spec).name)
    except SprinterError:
        return spec, {}
    return (spec, {}) if "=" in name else (name, {key: str(each) for key, each in parameters.items()})


def _spec_of(arm: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    if arm.get("engine") == "sprinter":
        return read_spec(str(arm.get("spec") or arm["name"]))
    return str(arm["name"]), {}


def _kind(arm: Mapping[str, Any], method: str, lossless: bool | None) -> str:
    if arm.get("engine") != "sprinter":
        return "peer"
    if method in _KNOWN:
        return _KNOWN[method]
    if "trust=gate" in method:
        return "gate"
    return "slack" if lossless is False else "exact"


def _labels(names: Sequence[str], specs: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    """A method's name with the parameters in which its arms differ; the arm's name if that is not unique."""
    labels = []
    for name, (method, parameters) in zip(names, specs, strict=True):
        alike = [other for other_method, other in specs if other_method == method]
        varied = [f"{key}={each}" for key, each in parameters.items() if len({o.get(key) for o in alike}) > 1]
        own_name = not parameters or not name.startswith(method)
        labels.append(_cut(name if own_name else " ".join([method, *varied])))
    return [
        label if labels.count(label) == 1 else f"{_cut(names[i], _LABEL_LENGTH - 4)} #{i + 1}"
        for i, label in enumerate(labels)
    ]


def _cut(text: str, most: int = _LABEL_LENGTH) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
