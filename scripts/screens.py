"""Draw the pictures of the server's page and of ``sprinter chat``: docs/figures/page.png, page-tools.png, chat.svg.

    python scripts/screens.py page     needs playwright and Debian's chromium (the environment of `make test-page`)
    python scripts/screens.py tools    the same, and the Qwen pair in SPRINTER_MODELS
    python scripts/screens.py chat     needs pyte, a terminal in memory, and the Qwen pair

Look at each picture afterwards. Rates depend on the machine.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from sprinter.models.source import models_folder
from sprinter.plots import few_colours

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
SPRINTER = [sys.executable, "-m", "sprinter"]
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "length_km", "sea"],
    "properties": {"name": {"type": "string"}, "length_km": {"type": "integer"}, "sea": {"type": "string"}},
}  # fmt: skip
TOOL = {
    "name": "water_level", "description": "Water level of a river in metres.",
    "parameters": {
        "type": "object", "properties": {"river": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["river", "days"], "additionalProperties": False,
    },
}  # fmt: skip


QWEN = (
    "--target", "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf", "--draft", "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "--dtype", "gguf",
)  # fmt: skip
"""Options of the Qwen pair; commands run in the folder of its files."""


# --- the page ---------------------------------------------------------------------------------------------------------
@contextmanager
def page(*options: str, height: int) -> Iterator[Any]:
    """The page of a server with these options, once it knows the pair."""
    from playwright.sync_api import sync_playwright

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [*SPRINTER, "serve", "--port", str(port), *options]
    server = subprocess.Popen(command, cwd=models_folder(), stderr=subprocess.DEVNULL)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            # Playwright's own functions are evaluated, which the page's policy forbids
            shown = browser.new_page(
                bypass_csp=True, color_scheme="light", viewport={"width": 1160, "height": height}
            )
            shown.set_default_timeout(300_000)
            while True:
                try:
                    shown.goto(f"http://127.0.0.1:{port}")
                    break
                except Exception:
                    assert server.poll() is None, "the server has ended"
                    time.sleep(0.5)
            shown.wait_for_selector('.side[data-side="0"] option', state="attached")
            yield shown
            browser.close()
    finally:
        server.terminate()
        server.wait(60)


def ask(shown: Any, text: str, tokens: int) -> None:
    """Send a text, and wait for its answer."""
    shown.fill("#tokens", str(tokens))
    shown.fill("#seed", "5")
    shown.fill("#prompt", text)
    turns = shown.locator("#turns > li").count()
    shown.press("#prompt", "Enter")
    shown.wait_for_selector(f"#turns > li:nth-child({turns + 1})")
    shown.wait_for_selector("#turns .answer.busy", state="detached")


def draw_page() -> None:
    """Two methods side by side on the built-in pair, one token pointed at."""
    with page(height=1130) as shown:
        shown.select_option('.side[data-side="0"] select', label="sprinter")
        shown.check("#compare")
        shown.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        ask(shown, "Once upon a time, there was a little", 90)
        shown.focus("#turns > li:last-child .text")
        for _ in range(9):
            shown.keyboard.press("ArrowRight")
        (FIGURES / "page.png").write_bytes(few_colours(shown.screenshot()))


def draw_tools() -> None:
    """JSON by a schema, then a call of a tool and what the model makes of its result, on the Qwen pair."""
    with page(*QWEN, height=1000) as shown:
        shown.fill("#temperature", "0")
        shown.select_option("#answer", "json_schema")
        shown.fill("#schema", json.dumps(SCHEMA))
        ask(shown, "The longest river of Europe?", 80)
        shown.select_option("#answer", "text")
        shown.fill("#tools", json.dumps([TOOL], indent=1))
        shown.select_option("#choice", "required")
        ask(shown, "How high is the water of the Volga, for three days?", 120)
        shown.fill(".results textarea", '{"metres": [4.1, 4.3, 4.0]}')
        (FIGURES / "page-tools.png").write_bytes(few_colours(shown.screenshot()))


# --- the terminal -----------------------------------------------------------------------------------------------------
COLUMNS, LINES = 100, 60
TYPED = [
    "Write a Python function that tests whether a word is a palindrome. Only code.", "/method fuzzy",
    "Add type hints and a docstring. Only code.", "/quit",
]  # fmt: skip
STYLE = """text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;
fill:#e6e6e6}.ground,text.back{fill:#17191e}.edge{fill:none;stroke:#3a3f4a}
.c009e73{fill:#009e73}.c56b4e9{fill:#56b4e9}.cd55e00{fill:#d55e00}.ce69f00{fill:#e69f00}
.b{font-weight:bold}.u{text-decoration:underline}
@media (prefers-color-scheme:light){text{fill:#24292f}.ground,text.back{fill:#fbfbfa}.edge{stroke:#d0d3d8}
.c009e73{fill:#006b4d}.c56b4e9{fill:#0b5f96}.cd55e00{fill:#a84300}.ce69f00{fill:#8a5a00}}"""
"""Colours by theme; those of origins are the terminal's, and darker on a light ground."""


def converse() -> Any:
    """The screen after a conversation in a terminal in memory; each text is typed when the one before is answered."""
    import pyte

    screen = pyte.Screen(COLUMNS, LINES)
    screen.write_process_input = lambda answer: os.write(master, answer.encode())  # where the cursor is
    stream = pyte.ByteStream(screen)
    master, terminal = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "SPRINTER_HISTORY": ""}
    subprocess.run(["stty", "rows", str(LINES), "cols", str(COLUMNS)], stdin=terminal, check=True)
    command = [*SPRINTER, "chat", *QWEN, "--temperature", "0"]
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with subprocess.Popen(command, **ends, env=env, cwd=models_folder()):
        os.close(terminal)
        left, quiet = list(TYPED), 0.0
        while True:
            ready, _, _ = select.select([master], [], [], 0.5)
            try:
                if ready:
                    stream.feed(os.read(master, 65536))
                    quiet = 0.0
                    continue
            except OSError:  # the chat has ended
                return screen
            quiet += 0.5
            waits = screen.display[screen.cursor.y][: screen.cursor.x].strip() == ">"
            if left and waits and quiet >= 1:
                os.write(master, (left.pop(0) + "\r").encode())


def draw_chat() -> None:
    """Each row of the screen as runs of one style."""
    screen = converse()
    words = " ".join(["$ sprinter chat", *QWEN, "--temperature 0"])
    rows = [row for row in range(LINES) if screen.display[row].strip()]
    made, wide, high = [], 8.4, 20
    first = words.find("--draft")
    for number, line in enumerate((f"{words[:first]}\\", f"    {words[first:]}")):
        made.append(f'<text x="16" y="{30 + high * number}">{escape(line)}</text>')
    for number, row in enumerate(range(rows[0], rows[-1] + 1), 2):
        y, column = 30 + high * number, 0
        while column < COLUMNS:
            one, begin = screen.buffer[row][column], column
            style = (one.fg, one.bold, one.underscore, one.reverse)
            text = ""
            while column < COLUMNS:
                one = screen.buffer[row][column]
                if (one.fg, one.bold, one.underscore, one.reverse) != style:
                    break
                text, column = text + one.data, column + 1
            if not text.strip() and not style[3]:
                continue
            x, width = 16 + wide * begin, wide * len(text)
            named = [f"c{style[0]}"] * (style[0] in STYLE) + ["b"] * style[1] + ["u"] * style[2]
            if style[3]:
                made.append(
                    f'<rect class="{" ".join(named)}" x="{x:.1f}" y="{y - 15}" width="{width:.1f}" height="{high}"/>'
                )
                named = ["back"]
            made.append(
                f'<text class="{" ".join(named)}" x="{x:.1f}" y="{y}" textLength="{width:.1f}">{escape(text)}</text>'
            )
    width, height = round(32 + wide * COLUMNS), 30 + high * (rows[-1] - rows[0] + 2) + 16
    box = f'width="{width - 1}" height="{height - 1}" rx="8"'
    (FIGURES / "chat.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<title>sprinter chat</title>\n<style>\n{STYLE}\n</style>\n"
        f'<rect class="ground" {box}/><rect class="edge" x=".5" y=".5" {box}/>\n'
        + "\n".join(made)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    {"page": draw_page, "tools": draw_tools, "chat": draw_chat}[sys.argv[1]]()
