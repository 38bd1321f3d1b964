"""Records a conversation of ``sprinter chat`` in a terminal of its own, and draws it as an animated SVG.

    python scripts/record_chat.py docs/figures/chat.svg -- --target TARGET --draft DRAFT --temperature 0

What follows ``--`` are options of ``sprinter chat``. The text, its colours and its pace are what the terminal showed;
only the time of loading is left out, and the messages are typed by this script. Viewers without animations, and readers
who prefer reduced motion, see the end of the recording. Needs a POSIX system; prints rows, seconds and bytes as JSON.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

LINES = (
    "Write a Python function that tests whether a word is a palindrome. Only code.",
    "/method fuzzy",
    "Add type hints and a docstring. Only code.",
    "/quit",
)
COLUMNS, CHAR, ROW, PAD, BAR = 100, 8.4, 20, 16, 34  # characters; pixels
TYPING_S, PAUSE_S, LIMIT_S = 0.03, 0.8, 900.0
SGR = re.compile(
    r"\x1b\[([0-9;]*)m|\x1b\[(\d*)([ACD])|\x1b\[[0-9;?]*[A-Za-z]|([\n\r\t\b])|([^\x1b\n\r\t\b]+)"
)
READY = re.compile(r"\x1b\[\?2004h[^\n]*\x1b\[\?25h$")  # the prompt is there, and the cursor
MOVES = {"A": (-1, 0), "C": (0, 1), "D": (0, -1)}
LIGHT = {"e69f00": "#8a5a00", "56b4e9": "#0b5f96", "d55e00": "#a84300", "009e73": "#006b4d"}
"""The colours of origins on a dark ground -> on a light one."""


class Shown(NamedTuple):
    """Text that appeared in one style at one place: seconds from the start, row, column."""

    at_s: float
    row: int
    column: int
    text: str
    style: frozenset[str]


def record(command: list[str], lines: Iterable[str]) -> list[tuple[float, str]]:
    """Run a chat on a terminal and type these lines; returns what appeared, with seconds since the first prompt."""
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = os.environ | {
        "TERM": "xterm-256color", "COLORTERM": "truecolor", "SPRINTER_HISTORY": "", "PROMPT_TOOLKIT_NO_CPR": "1",
    }  # fmt: skip
    environment.pop("NO_COLOR", None)
    found: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True
    ) as process:
        os.close(end)

        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def take() -> str:
            part = decoder.decode(os.read(main, 4096))
            found.append((time.monotonic(), part))
            return part

        def read_to_prompt() -> None:
            text, until = "", time.monotonic() + LIMIT_S
            while not READY.search(text):
                if not select.select([main], [], [], max(0.0, until - time.monotonic()))[0]:
                    raise TimeoutError(
                        f"no prompt after {LIMIT_S:.0f} s; the last output was {text[-500:]!r}"
                    )
                try:
                    text += take()
                except OSError:  # the chat has ended
                    return

        read_to_prompt()
        began = time.monotonic()
        for line in lines:
            time.sleep(PAUSE_S)
            for key in line:
                os.write(main, key.encode())
                time.sleep(TYPING_S)
                if select.select([main], [], [], 0.0)[0]:
                    take()
            os.write(main, b"\r")
            read_to_prompt()
        os.close(main)
        if status := process.wait(LIMIT_S):
            raise RuntimeError(f"the chat ended with status {status}: {found[-1][1]}")
    return [(max(0.0, at - began), text) for at, text in found]


def laid_out(parts: Iterable[tuple[float, str]]) -> Iterator[Shown]:
    """Where and in which style each text stands, on rows of ``COLUMNS`` characters."""
    row = column = 0
    style: set[str] = set()
    there: dict[tuple[int, int], tuple[str, frozenset[str]]] = {}  # what is typed is drawn again at its end
    for at_s, text in parts:
        for match in SGR.finditer(text):
            codes, count, move, control, word = match.groups()
            if codes is not None:
                style = _styled(style, codes)
            if move is not None:
                down, right = MOVES[move]
                row, column = row + down * int(count or 1), max(0, column + right * int(count or 1))
            if control == "\n":
                row, column = row + 1, 0
            elif control == "\r":
                column = 0
            elif control == "\b":
                column = max(0, column - 1)
            if control == "\t":
                word = " " * (8 - column % 8)
            while word:
                if column == COLUMNS:
                    row, column = row + 1, 0
                part, word = word[: COLUMNS - column], word[COLUMNS - column :]
                cells = {(row, column + i): (char, frozenset(style)) for i, char in enumerate(part)}
                if part.isspace() or any(
                    there.get(at) != cell for at, cell in cells.items() if cell[0] != " "
                ):
                    yield Shown(at_s, row, column, part, frozenset(style))
                there |= cells
                column += len(part)


def _styled(style: set[str], codes: str) -> set[str]:
    """The style after an escape sequence: b(old), d(im), u(nderlined), r(eversed), and a colour as six digits."""
    numbers = [int(code or 0) for code in codes.split(";")]
    if numbers == [0]:
        return set()
    names = {1: "b", 2: "d", 4: "u", 7: "r"}
    if (at := numbers.index(38) if 38 in numbers else None) is not None:
        names[-1] = "".join(f"{value:02x}" for value in numbers[at + 2 : at + 5])
        numbers[at : at + 5] = [-1]
    return style | {names[number] for number in numbers if number in names}


def drawn(shown: list[Shown], title: str) -> str:
    """The SVG."""
    rows = 1 + max(one.row for one in shown)
    width, height = COLUMNS * CHAR + 2 * PAD, BAR + rows * ROW + PAD
    colours = sorted({name for one in shown for name in one.style if len(name) == 6})
    dark = "".join(f".c{name}{{fill:#{name}}}" for name in colours)
    light = "".join(f".c{name}{{fill:{LIGHT.get(name, '#24292f')}}}" for name in colours)
    body = "\n".join(_element(one) for one in shown if one.text.strip() or one.style & {"u", "r"})
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<title>{escape(title)}</title>
<style>
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;fill:#e6e6e6}}
.ground,.back{{fill:#17191e}}.edge{{fill:none;stroke:#3a3f4a}}.dots{{fill:#4a505c}}.title{{fill:#9aa0aa}}
{dark}.b{{font-weight:bold}}.d{{opacity:.75}}.u{{text-decoration:underline}}text.back{{fill:#17191e}}
@media (prefers-color-scheme:light){{text{{fill:#24292f}}.ground,text.back{{fill:#fbfbfa}}.edge{{stroke:#d0d3d8}}
.dots{{fill:#c9ccd1}}.title{{fill:#666c75}}{light}}}
.t{{animation:wait 1ms backwards}}@keyframes wait{{from,to{{visibility:hidden}}}}
@media (prefers-reduced-motion:reduce){{.t{{animation:none}}}}
</style>
<rect class="ground" width="{width:.0f}" height="{height}" rx="8"/>
<rect class="edge" x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1}" rx="8"/>
<g class="dots"><circle cx="20" cy="17" r="5"/><circle cx="38" cy="17" r="5"/><circle cx="56" cy="17" r="5"/></g>
<text class="title" x="{width / 2:.0f}" y="22" text-anchor="middle">{escape(title)}</text>
{body}
</svg>
"""


def _element(one: Shown) -> str:
    """A text, and a filled box behind it if it is reversed."""
    x, y, long = PAD + one.column * CHAR, BAR + one.row * ROW + 15, len(one.text) * CHAR
    delay = f' style="animation-delay:{one.at_s:.2f}s"' if one.at_s > 0 else ""
    colour = "".join(f" c{name}" for name in sorted(one.style) if len(name) == 6)
    marks = "".join(f" {name}" for name in sorted(one.style & {"b", "d", "u"}))
    box = ""
    if "r" in one.style:
        box = (
            f'<rect class="t{colour}"{delay} x="{x:.1f}" y="{y - 15}" width="{long:.1f}" height="{ROW - 1}"/>'
        )
        colour = " back"
    place = f'x="{x:.1f}" y="{y}" textLength="{long:.1f}"'
    return f'{box}<text class="t{colour}{marks}"{delay} {place}>{escape(one.text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="-- ...: options of sprinter chat"
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--line", action="append", help="message or command to type; repeatable")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, options = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    parts = record([sys.executable, "-m", "sprinter", "chat", *options], given.line or LINES)
    command = textwrap.wrap(f"$ sprinter chat {' '.join(options)}", COLUMNS - 2, subsequent_indent="    ")
    shown = list(laid_out([(0.0, " \\\n".join(command) + "\n"), *parts]))
    svg = drawn(shown, "sprinter chat")
    given.out.write_text(svg, encoding="utf-8")
    rows, seconds = 1 + max(one.row for one in shown), max(one.at_s for one in shown)
    print(json.dumps({"rows": rows, "seconds": round(seconds, 1), "bytes": len(svg.encode())}))


if __name__ == "__main__":
    main()
