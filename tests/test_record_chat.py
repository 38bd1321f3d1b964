"""The script that draws a recorded conversation: layout, styles, times, and the terminal that it records."""

from __future__ import annotations

import os
import sys
from xml.etree import ElementTree

import pytest

if os.name != "posix":
    pytest.skip("records terminals of POSIX", allow_module_level=True)

from scripts import record_chat

from sprinter.cli.pages import legend

SVG = "{http://www.w3.org/2000/svg}"
PROGRAM = """
from prompt_toolkit import prompt
print("loading")
while True:
    line = prompt("> ")
    if line == "/quit":
        break
    print(f"\\x1b[1;38;2;0;158;115m{line}\\x1b[0m!")
"""


def test_texts_are_laid_out_in_rows_and_styles() -> None:
    long = "x" * (record_chat.COLUMNS + 3)
    parts = [(0.0, "> a\r\n\x1b[2;38;2;86;180;233mb\x1b[0mc"), (1.5, f"\tTab\r\n{long}\x1b[?2004h")]
    shown = list(record_chat.laid_out(parts))
    assert [(one.row, one.column, one.text) for one in shown] == [
        (0, 0, "> a"), (1, 0, "b"), (1, 1, "c"), (1, 2, "      "), (1, 8, "Tab"), (2, 0, long[:-3]), (3, 0, "xxx"),
    ]  # fmt: skip
    assert shown[1].style == {"d", "56b4e9"} and shown[2].style == frozenset()
    assert [one.at_s for one in shown] == [0, 0, 0, 1.5, 1.5, 1.5, 1.5]


def test_the_drawing_shows_each_text_once_at_its_time() -> None:
    parts = [
        (0.0, "<plain> & "),
        (2.25, "\x1b[7;38;2;213;94;0mred\x1b[0m"),
        (3.0, "\x1b[4;38;2;230;159;0m u\x1b[0m"),
    ]
    root = ElementTree.fromstring(record_chat.drawn(list(record_chat.laid_out(parts)), "A & B"))
    texts = list(root.iter(f"{SVG}text"))
    assert [one.text for one in texts] == ["A & B", "<plain> & ", "red", " u"]
    assert [one.get("style") for one in texts[1:]] == [None, "animation-delay:2.25s", "animation-delay:3.00s"]
    assert texts[2].get("class") == "t back" and texts[3].get("class") == "t ce69f00 u"
    boxes = [one for one in root.iter(f"{SVG}rect") if one.get("class") == "t cd55e00"]
    assert len(boxes) == 1 and boxes[0].get("x") == texts[2].get("x")


def test_every_origin_has_a_colour_on_a_light_ground() -> None:
    colours = {str(span.style).split("#")[1] for span in legend().spans if "#" in str(span.style)}
    assert colours == record_chat.LIGHT.keys()


def test_a_program_is_recorded_from_its_first_prompt() -> None:
    parts = record_chat.record([sys.executable, "-c", PROGRAM], ["hello", "/quit"])
    assert parts[0][0] == 0 and [at for at, _ in parts] == sorted(at for at, _ in parts)
    shown = list(record_chat.laid_out(parts))
    rows = ["".join(one.text for one in shown if one.row == row) for row in range(4)]
    assert rows == ["loading", ">hello", "hello!", ">/quit"]
    assert [(one.column, one.text) for one in shown if one.row == 1][:2] == [(0, ">"), (2, "h")]
    (answer,) = [one for one in shown if one.style]
    assert answer.text == "hello" and answer.style == {"b", "009e73"} and answer.at_s >= record_chat.PAUSE_S
    with pytest.raises(RuntimeError, match="ended with status 3"):
        record_chat.record([sys.executable, "-c", PROGRAM.replace("break", "exit(3)")], ["/quit"])
