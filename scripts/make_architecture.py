"""Writes the diagram and the list of imports of docs/architecture.md, from the imports as they are.

    python scripts/make_architecture.py

``tests/test_architecture.py`` fails where the page differs from the imports. Needs grimp and networkx, which come
with import-linter and torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
Imports = Mapping[str, frozenset[str]]
"""Room → the rooms that it imports. A room is a package or a top-level module, "decode/accept" or "errors"; "sprinter"
is the ``__init__`` of the whole package."""
PUBLIC = 5
"""Floor of "sprinter", which is no module of the contract."""


def read_imports() -> dict[str, frozenset[str]]:
    """The imports between rooms, those inside functions and for type checkers too; ``__main__`` is left out."""
    graph = grimp.build_graph("sprinter", cache_dir=None)
    modules = [name for name in graph.modules if not name.endswith("__main__")]
    packages = {name for name in modules if graph.find_children(name)}

    def room(module: str) -> str:
        own = module if module in packages or module.count(".") == 1 else module.rpartition(".")[0]
        return own.partition(".")[2].replace(".", "/") or own

    found: dict[str, set[str]] = {room(name): set() for name in modules}
    for name in modules:
        imported = graph.find_modules_directly_imported_by(name)
        found[room(name)] |= {room(other) for other in imported} - {room(name)}
    return {name: frozenset(others) for name, others in sorted(found.items())}


def floors(imports: Imports) -> dict[str, int]:
    """Top-level room → its floor, from 0: those that import-linter holds the modules to."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    rooms = {top_level(name) for name in imports}
    found = {
        name: floor
        for floor, layer in enumerate(reversed(layers))
        for name in re.findall(r"\w+", layer)
        if name in rooms
    }
    return {**found, "sprinter": PUBLIC}


def top_level(room: str) -> str:
    """The top-level package or module that a room belongs to."""
    return room.partition("/")[0]


def diagram(imports: Imports) -> str:
    """Mermaid: top-level rooms on their floors, with their sub-packages, and arrows to what they import."""
    lines, places = ["flowchart TD"], floors(imports)
    for floor in sorted(set(places.values()), reverse=True):
        lines.append(f'  subgraph floor{floor}["{floor}"]')
        for room in sorted(name for name, own in places.items() if own == floor):
            inside = [name.partition("/")[2] for name in imports if name.startswith(f"{room}/")]
            lines.append(f'    {room}["<b>{room}</b>{"<br>" if inside else ""}{" · ".join(inside)}"]')
        lines.append("  end")
    tops = {(top_level(one), top_level(other)) for one, others in imports.items() for other in others}
    edges = networkx.DiGraph((one, other) for one, other in tops if one != other)
    shown = sorted(networkx.transitive_reduction(edges).edges)  # no arrow where a longer way leads too
    return "\n".join([*lines, *(f"  {one} --> {other}" for one, other in shown)])


def list_imports(imports: Imports) -> str:
    """A line for each room, and what it imports."""
    width = max(map(len, imports))
    lines = [f"{name:{width}}  {' '.join(sorted(others))}".rstrip() for name, others in imports.items()]
    return "\n".join(lines)


def written(page: str, imports: Imports) -> str:
    """The page with this diagram and this list of imports."""
    for name, kind, text in (
        ("diagram", "mermaid", diagram(imports)),
        ("imports", "text", list_imports(imports)),
    ):
        block = f"<!-- {name}:begin -->\n```{kind}\n{text}\n```\n<!-- {name}:end -->"
        page = re.sub(f"<!-- {name}:begin -->.*<!-- {name}:end -->", lambda _, b=block: b, page, flags=re.S)
    return page


def main() -> None:
    imports = read_imports()
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), imports), encoding="utf-8")
    print(f"{len(imports)} rooms, {sum(map(len, imports.values()))} imports between them")


if __name__ == "__main__":
    main()
