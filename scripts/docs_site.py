"""Hooks of the docs site (mkdocs.yml): pages that are generated, and links that leave docs/.

The index is README; tables of results that are CSV files come from benchmarks/results; the pages of commands and of
methods come from ``sprinter --help`` and ``sprinter methods --json``, run by the interpreter that SPRINTER_PYTHON
names. A link to a file outside docs/ leads to the repository, where its address is known (``repo_url``), else only its
name stays.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("SPRINTER_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
RESULTS, DATA = ROOT / "benchmarks" / "results", "results/data"
"""Tables as CSV, and where the site has them."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
INTERVAL = re.compile(r"(?<=[\d%]) \[([-+\d.]+), ([-+\d.]+)\](?!\()")
"""The interval of a value in a table: not broken into lines."""
CODE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$|`[^`\n]*`", re.M | re.S)
PERCENT = re.compile(r"(?<=\d) %")
"""Not parted from its number."""
INLINE = re.compile(r"<code>([^<\n]+)</code>")
HYPHENS = re.compile(r"(?<!\S)(?=\S{1,24}(?!\S))\S*-\S*")
"""Short words of code with hyphens, such as options: not broken into lines."""
CELL = re.compile(r"<td>(?=(?:[^<]|<(?!/td>)){60})")
"""A cell with much text: wide enough to be read on a phone."""
MATH = re.compile(r"^```math\n(.*?)^```$", re.M | re.S)
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^  (\w[\w-]*)  ", re.M)
METHODS = """# Methods, by kind

Every preset at its defaults. Tick kinds or drafters to see only their methods. Words: [glossary](../glossary.md); rules
and how to compose them: [methods](../methods/README.md).

<p id="kinds"></p>

<p id="drafters">Drafter: </p>

{table}

<script src="methods.js"></script>
"""
SCRIPT = """"use strict";
// Boxes above the table: a row is shown if its cell of a column has all that is ticked for that column.
(() => {
  const rows = [...document.querySelectorAll("table tbody tr")];
  const columns = [
    ["kinds", 3, ["lossless", "lossy", "no training", "needs training", "no draft model"]],
    ["drafters", 2, ["draft model", "several drafts", "tree", "heads", "copies", "none"]],
  ];
  const boxes = [];
  const show = () => {
    for (const row of rows)
      row.hidden = boxes.some(([box, column, kind]) =>
        box.checked && !row.cells[column].textContent.split(", ").includes(kind));
  };
  for (const [id, column, kinds] of columns)
    for (const kind of kinds) {
      const label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      box.addEventListener("change", show);
      boxes.push([box, column, kind]);
      label.append(box, " " + kind);
      label.style.cssText = "margin-right: 1.5em; white-space: nowrap";
      document.getElementById(id).append(label);
    }
})();
"""
TRAINED = ("gate", "specdec++", "disco", "judge", "diversed", "heads")
"""Rules and drafters that read what was trained."""
TREES, COPIES = ("static", "dynamic", "sparse", "drawn", "widened"), ("lookup", "suffix", "recycle")


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


def drafters(spec: str) -> list[str]:
    """Who drafts, by kind."""
    names = re.findall(r"\w+", re.sub(r"otherwise=nothing|drawn=\w+", "", spec))
    found = {"tree": TREES, "heads": ("heads",), "copies": COPIES, "none": ("nothing",)}
    kinds = [kind for kind, own in found.items() if any(name in own for name in names)]
    drafts = re.search(r"drafts=(\d+)", spec)
    several = ["several drafts"] if drafts and int(drafts[1]) > 1 else []
    model = {"model", "allocated"} & {*names} or ("tree" in kinds and "heads" not in kinds)
    return ["draft model"] * bool(model) + several + kinds


def methods() -> str:
    """The page of methods."""
    rows = ["| method | paper | drafter | kind |", "| --- | --- | --- | --- |"]
    for one in json.loads(asked("methods", "--json"))["methods"]:
        rules = [str(one[part] or "").partition("(")[0] for part in ("trust", "stop", "accept")]
        drafter = one["drafter"]
        kinds = ["lossless" if one["lossless"] else "lossy"]
        trained = any(rule in TRAINED for rule in rules) or "heads" in drafter
        kinds.append("needs training" if trained else "no training")
        if "draft model" not in (own := drafters(drafter)):
            kinds.append("no draft model")
        rows.append(f"| `{one['spec']}` | {one['paper']} | {', '.join(own)} | {', '.join(kinds)} |")
    return METHODS.format(table="\n".join(rows))


def title(page: Path, folder: str) -> str | None:
    """What the navigation calls a page of a folder of many; None: its heading."""
    heading = page.read_text(encoding="utf-8").split("\n")[0].removeprefix("# ")
    if folder == "methods/" and (rule := re.match("`([^`]+)`", heading)):
        return rule[1]
    if folder == "decisions/" and page.name != "README.md":
        return f"{page.name[:4]} {heading.lstrip('0123456789.· ')}"
    return (
        heading.removeprefix("Results: ").removesuffix(", measured again") if folder != "methods/" else None
    )


def pages_of(folder: str) -> list[Any]:
    """A folder's pages for the navigation, its README first."""
    found = sorted((ROOT / "docs" / folder).rglob("*.md"), key=lambda path: (path.name != "README.md", path))
    names = [(title(path, folder), path.relative_to(ROOT / "docs").as_posix()) for path in found]
    return [{own: name} if own and not name.endswith("README.md") else name for own, name in names]


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
    for path in sorted(RESULTS.rglob("*.csv")):
        name = f"{DATA}/{path.relative_to(RESULTS).as_posix()}"
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def formula(tex: str, display: str = "inline") -> str:
    """MathML of a formula."""
    return str(convert(" ".join(tex.split()).replace(r"\arg", r"\operatorname{arg}"), display=display))


def drawn(markdown: str) -> str:
    """Formulas as MathML and the diagram of floors as boxes, neither of which needs a script from elsewhere."""

    def floors(found: re.Match[str]) -> str:
        rows = re.findall(r'subgraph \w+\["(\d+)"\]\n(.*?)\n  end', found[1], re.S)
        boxes = ("".join(f"<span>{one}</span>" for one in re.findall(r'\["(.*?)"\]', row)) for _, row in rows)
        return "".join(["<div class='floors'>", *(f"<div>{one}</div>" for one in boxes), "</div>"])

    def display(found: re.Match[str]) -> str:
        return f"<div class='formula'>{formula(found[1], 'block')}</div>"

    markdown = MATH.sub(display, MERMAID.sub(floors, markdown))
    parts, at = list[str](), 0
    markdown = re.sub(r"\$`([^`\n]+)`\$", r"$\1$", markdown)
    for code in [*CODE.finditer(markdown), None]:
        end = code.start() if code else len(markdown)
        parts.append(
            re.sub(
                r"\$([^$\s][^$\n]*)\$",
                lambda one: f"<span>{formula(one[1])}</span>",
                PERCENT.sub("&nbsp;%", markdown[at:end]),
            )
        )
        parts.append(code[0] if code else "")
        at = code.end() if code else end
    return "".join(parts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links out of docs/ to the repository; a page without pages beside it needs no list of them."""
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    markdown = INTERVAL.sub(r"&nbsp;[\1,&nbsp;\2]", drawn(markdown))
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
        elif whole.startswith("benchmarks/results/") and whole.endswith(".csv"):
            inside = whole.replace("benchmarks/results", DATA, 1)
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


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Keep options whole, and long cells wide."""

    def whole(found: re.Match[str]) -> str:
        return "<code>" + HYPHENS.sub(r'<span class="whole">\g<0></span>', found[1]) + "</code>"

    return CELL.sub('<td class="long">', INLINE.sub(whole, html))
