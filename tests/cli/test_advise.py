"""``sprinter advise``: each rule is reached, names a command that exists, and is on the page as it is in the code."""

from __future__ import annotations

import json
import re
import shlex
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from tests.cli.tiny import Run
from tests.test_pages import check_options

from sprinter.cli.advise import DEAR, RULES, Case, Where, advice
from sprinter.decode.spec import parse_method
from sprinter.theory.regions import place

DOCS = Path(__file__).resolve().parents[2] / "docs"
ASKED = [Case(*one) for one in product((0.0, 0.01, 0.1), (None, 0.05, 0.12, 0.3, 1.6), get_args(Where))]


def test_each_rule_is_reached() -> None:
    assert {advice(one).when for one in ASKED} == {one.when for one in RULES}


def test_lossy_methods_are_named_only_where_drift_is_allowed_and_none_without_a_draft() -> None:
    for one in ASKED:
        command = advice(one).command
        (lossy,) = re.findall(r'--method "(.+)" --budget DRIFT', command) or [None]
        assert lossy is None or (one.drift > 0.01 and not parse_method(lossy).lossless())
        assert ("--draft" in command) <= (one.cost is not None)


def test_a_draft_that_is_left_out_gains_too_little() -> None:
    assert place(0.8, DEAR, kept=0).exact > 1.1 > place(0.8, DEAR + 0.05, kept=0).exact


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.when)
def test_commands_and_pages_exist(rule: object) -> None:
    one = next(each for each in RULES if each is rule)
    assert check_options(shlex.split(one.command.replace("DRIFT", "0.05"))[1:])
    file, _, anchor = one.page.partition("#")
    text = (DOCS / file).read_text(encoding="utf-8")
    headings = [re.sub(r"[^\w -]", "", one.lower()) for one in re.findall(r"^#+ (.+)$", text, re.M)]
    anchors = {*(one.replace(" ", "-") for one in headings), *re.findall(r'<a id="([^"]+)">', text)}
    assert not anchor or anchor in anchors


def test_the_page_has_these_rules() -> None:
    rows = ["| case | command | why |", "| --- | --- | --- |"]
    rows += [f"| {one.when} | `{one.command}` | {one.why} [Source]({one.page}) |" for one in RULES]
    page = (DOCS / "which-method.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- rules:begin -->\n(.*?)<!-- rules:end -->", page, re.S)
    assert shown.strip() == "\n".join(rows), "the table of docs/which-method.md must be:\n" + "\n".join(rows)


def test_one_command_and_one_sentence(run: Run) -> None:
    status, out, err = run("advise", "--drift", "0.05", "--cost", "0.05", "--where", "alone")
    assert (status, err) == (0, "")
    command, why = out.splitlines()
    assert command.endswith('--method "certain(threshold=1.0, tail=8)" --budget 0.05')
    assert why.endswith("See docs/studies/when-it-pays.md#what-was-found.")
    status, out, _ = run("advise", "--drift", "0", "--cost", "none", "--where", "alone", "--json")
    assert status == 0 and json.loads(out)["command"] == "sprinter generate PROMPT --target TARGET"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nobody to ask: give --drift, --cost and --where"),
        (("--drift", "0", "--cost", "cheap", "--where", "alone"), "--cost cheap is not a cost"),
        (("--drift", "0", "--cost", "-1", "--where", "alone"), "--cost -1 is not a cost"),
        (("--drift", "0", "--cost", "none", "--where", "moon"), "moon"),
    ],
)
def test_mistakes_are_one_line(run: Run, words: tuple[str, ...], said: str) -> None:
    status, out, err = run("advise", *words)
    assert (status, out, err.count("\n")) == (2, "", 1) and said in err


def test_it_asks_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([0.0, "0.3", "alone"])
    monkeypatch.setattr("sprinter.cli.advise._asks", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    status, out, _ = run("advise")
    assert status == 0 and out.startswith("sprinter generate PROMPT --target TARGET --draft DRAFT\n")
