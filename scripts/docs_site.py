"""Hooks of the docs site (mkdocs.yml): pages that are generated, and links that leave docs/.

The index is README; the pages of commands and of methods come from ``sprinter --help`` and ``sprinter methods --json``,
run by the interpreter that SPRINTER_PYTHON names. A link to a file outside docs/ leads to the repository, where its
address is known (``repo_url``), else only its name stays.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("SPRINTER_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$|`[^`\n]*`", re.M | re.S)
COMMAND = re.compile(r"^  (\w[\w-]*)  ", re.M)
METHODS = """# Methods, by kind

Every preset at its defaults. Tick what you can use; words: [glossary](../glossary.md), rules and how to compose them:
[methods](../methods/README.md).

<p id="kinds"></p>

{table}

<script src="methods.js"></script>
"""
SCRIPT = """"use strict";
// Boxes above the table: a row is shown if it is of every kind that is ticked.
(() => {
  const kinds = ["lossless", "lossy", "needs training", "no draft model"];
  const rows = [...document.querySelectorAll("table tbody tr")];
  const boxes = kinds.map((kind) => {
    const label = document.createElement("label"), box = document.createElement("input");
    box.type = "checkbox";
    box.addEventListener("change", () => {
      const wanted = kinds.filter((_, i) => boxes[i].checked);
      for (const row of rows) {
        const own = row.lastElementChild.textContent.split(", ");
        row.hidden = wanted.some((one) => !own.includes(one));
      }
    });
    label.append(box, " " + kind);
    label.style.marginRight = "1.5em";
    document.getElementById("kinds").append(label);
    return box;
  });
})();
"""
TRAINED = ("gate", "specdec++", "disco", "judge", "diversed", "heads")
"""Rules and drafters that read what was trained."""


def asked(*words: str) -> str:
    """What ``sprinter`` prints."""
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": str(ROOT / "src")}
    command = [PYTHON, "-m", "sprinter", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def commands() -> str:
    """The page of commands: the help of each, and of those below it."""
    lines, open_ = ["# Commands and options", "", "As `--help` prints them.", ""], list[tuple[str, ...]]([()])
    while open_:
        words = open_.pop(0)
        told = asked(*words, "--help").rstrip()
        head = " ".join(("sprinter", *words))
        lines += [f"{'#' * (2 + (len(words) > 1))} {head}", "", "```text", told, "```", ""]
        if "\nCommands:" in told:
            below = told.partition("\nCommands:")[2]
            open_[:0] = [(*words, name) for name in COMMAND.findall(below)]
    return "\n".join(lines)


def methods() -> str:
    """The page of methods."""
    rows = ["| method | paper | kind |", "| --- | --- | --- |"]
    for one in json.loads(asked("methods", "--json"))["methods"]:
        rules = [str(one[part] or "").partition("(")[0] for part in ("trust", "stop", "accept")]
        drafter = one["drafter"]
        kinds = ["lossless" if one["lossless"] else "lossy"]
        if any(rule in TRAINED for rule in rules) or "heads" in drafter:
            kinds.append("needs training")
        alone = drafter.startswith(("nothing", "lookup", "suffix", "recycle")) and "model" not in drafter
        if "heads" in drafter or alone:
            kinds.append("no draft model")
        rows.append(f"| `{one['spec']}` | {one['paper']} | {', '.join(kinds)} |")
    return METHODS.format(table="\n".join(rows))


def pages_of(folder: str) -> list[Any]:
    """A folder's pages for the navigation, its README first."""
    found = sorted((ROOT / "docs" / folder).rglob("*.md"), key=lambda path: (path.name != "README.md", path))
    return [path.relative_to(ROOT / "docs").as_posix() for path in found]


def filled(part: Any) -> Any:
    """The navigation with the pages of a folder in place of ``folder/``."""
    if isinstance(part, list):
        return [filled(one) for one in part]
    if isinstance(part, dict):
        return {name: filled(one) for name, one in part.items()}
    return pages_of(part) if part.endswith("/") else part


def on_config(config: Any) -> Any:
    """List the folders of the navigation."""
    config.nav = filled(config.nav)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    made = {"reference/cli.md": commands(), "reference/methods.md": methods(), "reference/methods.js": SCRIPT}
    made["index.md"] = re.sub(r"<!-- results:\w+ -->\n", "", readme)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links out of docs/ to the repository."""
    source, code = page.file.src_uri, [one.span() for one in CODE.finditer(markdown)]
    folder = "" if source == "index.md" else posixpath.join("docs", posixpath.dirname(source))

    def led(found: re.Match[str]) -> str:
        mark, text, link = found.groups()
        if any(a <= found.start() < b for a, b in code) or "://" in link or link.startswith(("#", "mailto:")):
            return found[0]
        path, _, anchor = link.partition("#")
        whole = posixpath.normpath(posixpath.join(folder, path))
        inside = whole.removeprefix("docs/")
        anchor = f"#{anchor}" if anchor else ""
        if whole == "README.md":
            inside = "index.md"
        elif not whole.startswith("docs/") or files.get_file_from_path(inside) is None:
            if not (ROOT / whole).exists():
                return found[0]  # mkdocs reports it
            return (
                f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{whole}{anchor})"
                if config.repo_url
                else text
            )
        return f"{mark}[{text}]({posixpath.relpath(inside, posixpath.dirname(source) or '.')}{anchor})"

    return LINK.sub(led, markdown)
