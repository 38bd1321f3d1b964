"""docs/methods: one page a rule, whose tables, specs and figures say what the code says."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from sprinter.decode.registry import ACCEPT, DRAFTER, STOP, TRUST
from sprinter.decode.spec import METHODS, Method, method_table, parse_method, spell
from sprinter.errors import UserError

PAGES = Path(__file__).resolve().parent.parent / "docs" / "methods"
REGISTRIES = {"trust": TRUST, "stop": STOP, "accept": ACCEPT, "drafter": DRAFTER}
RULES = [
    (part, name)
    for part, registry in REGISTRIES.items()
    for name in registry.names()
    if registry.get(name).__module__.startswith("sprinter.")
]
WRITTEN = [(part, name) for part, name in RULES if (PAGES / part / f"{name}.md").exists()]
"""Those with a page: a missing page is one failure."""
DOCUMENTS = sorted(PAGES.rglob("*.md"))
HEADINGS = ["Rule", "Law", "Parameters", "Use", "What it trades", "Source", "Errata"]
MAX_LINES, MAX_FIGURE_BYTES = 80, 60 * 1024


def value_of(text: str) -> Any:
    """What a default or a bound means, written as in a spec."""
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text in words:
        return words[text]
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+\.\d+|-?\d+e\d+", text) else text


def read(part: str, name: str) -> str:
    return (PAGES / part / f"{name}.md").read_text(encoding="utf-8")


def sections(page: str) -> dict[str, str]:
    """Heading -> text below it."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameter_table(page: str) -> dict[str, tuple[Any, str]]:
    """Parameter -> (default, range as written)."""
    rows = re.findall(
        r"^\| `(\w+)` \| `([^`]+)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", sections(page)["Parameters"], re.M
    )
    return {name: (value_of(default), allowed.strip()) for name, default, allowed in rows}


def specs(document: Path, kind: str) -> list[str]:
    blocks = re.findall(rf"^```{kind}\n(.*?)^```$", document.read_text(encoding="utf-8"), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def defaults(part: str, name: str) -> dict[str, Any]:
    """Parameter -> default, a rule by its name."""
    known = {field.name: field.default for field in dataclasses.fields(REGISTRIES[part].get(name))}
    return {key: spell(one) if dataclasses.is_dataclass(one) else one for key, one in known.items()}


@pytest.mark.parametrize(("part", "name"), RULES)
def test_every_rule_has_a_page(part: str, name: str) -> None:
    assert (part, name) in WRITTEN, f"write docs/methods/{part}/{name}.md: step 3 of docs/adding-a-rule.md"


def test_every_page_has_a_rule() -> None:
    assert {(path.parent.name, path.stem) for path in DOCUMENTS if path.parent != PAGES} <= set(RULES)


@pytest.mark.parametrize(("part", "name"), WRITTEN)
def test_pages_have_all_their_parts_and_are_short(part: str, name: str) -> None:
    page = read(part, name)
    assert page.startswith(f"# `{part}={name}`: ")
    assert list(sections(page)) == HEADINGS
    assert len(page.splitlines()) <= MAX_LINES
    assert f"]({part}/{name}.md)" in (PAGES / "README.md").read_text(encoding="utf-8"), "not in the index"


@pytest.mark.parametrize(("part", "name"), WRITTEN)
def test_parameter_tables_are_the_dataclass(part: str, name: str) -> None:
    page, known = read(part, name), defaults(part, name)
    table = parameter_table(page)
    assert {key: default for key, (default, _) in table.items()} == known
    assert list(table) == list(known)
    types = {key: type(default) for key, (default, _) in table.items()}
    assert types == {key: type(default) for key, default in known.items()}, "5 is not 5.0, nor is 0 false"
    if not known:
        assert sections(page)["Parameters"].strip() == "None."


def bounds(allowed: str, own: dict[str, Any]) -> tuple[float, float] | None:
    """[low, high] of a range as the pages write it; a bound may be another parameter. None: not a range."""
    match = re.fullmatch(r"\[([^,\]]+), ([^,\]]+)\]", allowed) or re.fullmatch(r"≥ (\w+)()", allowed)
    if match is None:
        return None
    low, high = (
        own[text] if text in own else math.inf if text in ("∞", "") else value_of(text)
        for text in match.groups()
    )
    return low, high


@pytest.mark.parametrize(
    ("part", "name", "key"), [(part, name, key) for part, name in WRITTEN for key in defaults(part, name)]
)
def test_ranges_are_those_that_the_rule_checks(part: str, name: str, key: str) -> None:
    rule, own = REGISTRIES[part].get(name), defaults(part, name)
    default, allowed = parameter_table(read(part, name))[key]
    span = bounds(allowed, own)
    if span is not None:
        whole = isinstance(default, int)
        inside = [bound for bound in span if not (whole and bound == math.inf)]
        outside = [bound + step for bound, step in zip(span, (-1, 1), strict=True) if bound != math.inf]
    elif "`" in allowed:
        inside, outside = [value_of(word) for word in re.findall(r"`([^`]+)`", allowed)], ["neither"]
        assert default in inside
    elif key == "grow":
        inside, outside = (
            [DRAFTER.get("static")(), DRAFTER.get("model")()],
            [DRAFTER.get("lookup")(), "static"],
        )
    elif key == "otherwise":
        inside, outside = (
            [DRAFTER.get(one)() for one in ("model", "heads", "lookup") if name != "heads" or one == "model"],
            [DRAFTER.get("static")(), "model"],
        )
    else:
        assert (name, key) == ("untrusted", "under"), f"the range '{allowed}' is in no form that is tested"
        inside, outside = [STOP.get("svip")()], [STOP.get("fallback")(), "svip"]
    for value in inside:
        assert getattr(rule(**{key: value}), key) == value
    for value in outside:
        with pytest.raises(UserError, match=key):
            rule(**{key: value})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(PAGES).as_posix())
def test_spec_examples_parse(document: Path) -> None:
    examples = specs(document, "text")
    assert len(examples) >= 2
    parsed = [parse_method(spec) for spec in examples]
    if document.parent != PAGES:
        part, rule = document.parent.name, REGISTRIES[document.parent.name].get(document.stem)
        assert any(uses(method, part, rule) for method in parsed), "no example uses the rule"


def uses(method: Method, part: str, rule: Any) -> bool:
    return type(getattr(method, part)) is rule


def test_refused_examples_are_refused() -> None:
    refused = specs(PAGES / "README.md", "refused")
    assert len(refused) >= 3
    for spec in refused:
        with pytest.raises(UserError):
            parse_method(spec)


def test_every_preset_stands_in_the_index_and_on_the_pages_of_its_rules() -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|.*\| (yes|no) \|$", index, re.M)
    own = [row for row in method_table() if METHODS.get(row["name"]).__module__.startswith("sprinter.")]
    assert dict(rows) == {row["spec"]: "yes" if row["lossless"] else "no" for row in own}
    pages = "\n".join(read(part, name) for part, name in WRITTEN)
    assert [row["spec"] for row in own if f"`{row['spec']}`" not in pages] == []


@pytest.mark.parametrize(("part", "name"), WRITTEN)
def test_presets_named_on_a_page_use_its_rule(part: str, name: str) -> None:
    named = re.search(r"^Presets?: (.+)\.$", sections(read(part, name))["Use"], re.M)
    for spec in re.findall(r"`([^`]+)`", named[1]) if named else []:
        assert uses(parse_method(spec), part, REGISTRIES[part].get(name)), spec


@pytest.mark.parametrize(("part", "name"), WRITTEN)
def test_each_page_shows_its_own_figure(part: str, name: str) -> None:
    (shown,) = re.findall(r"^!\[([^\]]{20,})\]\(([^)]+)\)$", read(part, name), re.M)
    figure = (PAGES / part / shown[1]).resolve()
    assert figure == PAGES / "figures" / f"{name}.png"
    assert figure.exists(), f"no figure: .venv/bin/python scripts/figures.py --only {name}"
    assert 0 < figure.stat().st_size < MAX_FIGURE_BYTES


def test_no_figure_is_left_over() -> None:
    assert {path.stem for path in (PAGES / "figures").iterdir()} <= {name for _, name in RULES}


@pytest.mark.parametrize(
    ("spec", "signal", "level"),
    [
        ("certain(signal=margin, threshold=0.8)", "margin", 0.8), ("certain(threshold=0.6)", "entropy", 0.6),
        ("certain(signal=max_prob, threshold=0.7)", "max_prob", 0.7), ("sprinter(tau=0.7)", "gate", 0.7),
        ("coin(rate=0.7, cap=20)", "uniform", 0.7),
    ],
)  # fmt: skip
def test_a_figure_fills_the_dots_of_a_signal_that_its_rule_trusts(
    spec: str, signal: str, level: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PAGES.parents[1] / "scripts"))
    figures = importlib.import_module("figures")
    axes = Figure().subplots(3)
    figures.strip(axes, spec, signal, level, 20)
    rule, dots = parse_method(spec).trust, [line for line in axes[0].lines if line.get_marker() == "o"]
    assert [line.get_fillstyle() for line in dots] == ["full", "none"]
    for line, trusted in zip(dots, (True, False), strict=True):
        decided, _ = rule.trust({signal: torch.tensor(line.get_ydata())}, rule.start())
        assert decided.tolist() == [trusted] * len(line.get_ydata())
