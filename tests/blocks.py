"""Blocks of Python and shell of README, CONTRIBUTING, docs and examples, and the list of what is not run.

``tests/test_pages.py`` runs them. A comment before a block leaves it out: ``<!-- run by FILE -->``, a test that runs it
in another environment or with other files, or ``<!-- not run: REASON -->``, which ``NOT_RUN`` repeats.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = {
    "CI does these steps": "CONTRIBUTING.md",
    "hours, and real models": "CONTRIBUTING.md",
    "needs a cluster": "docs/deploy.md",
    "the weights are 200 GB": "docs/drafts.md",
    "from PyTorch's index": "README.md, docs/tutorial.md",
    "from PyTorch's index; make test-doors installs this release from PyPI": "docs/vllm.md",
}
"""Reason of a block that nothing runs → its pages. The options of its ``sprinter`` commands are checked."""
LINES = {
    r"pip install|\S+ -m venv": "make test-install",
    r".* --runner llamacpp": "make test-gguf: tests/engine/test_llamacpp.py, tests/bench/test_peer_llamacpp.py",
    r"sprinter reproduce": "minutes, even with small counts, with which tests/reproduce/test_papers.py runs each paper",
    r".* --device cuda": "needs a GPU",
    r"sprinter draft sizes .*--shape": "shapes of a large model: tests/training/test_drafts_made.py",
    r".* --dtype gguf": "needs files with blocks: tests/models/test_draft_vocabulary.py",
    r"sprinter --install-completion": "changes the start files of a shell",
    r"docker ": "needs a container engine",
}
"""What a line of a shell block begins with, and where such lines are run, or why they are not."""
BLOCK = re.compile(
    r"^ *<!-- (not run: .+?|run by .+?) -->|^( *)```(python|py|sh|bash|console)\n(.*?)^ *```$", re.M | re.S
)


class Block(NamedTuple):
    """A block of a page: the line before it, its language, its text, and why it is not run here ("": it is)."""

    line: int
    kind: str
    code: str
    reason: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text, found, reason = page.read_text(encoding="utf-8"), [], ""
    for one in BLOCK.finditer(text):
        if one[1]:
            assert not reason, f"{page}: two reasons for one block"
            reason = " ".join(one[1].split())
            continue
        code = re.sub(rf"^{one[2]}", "", one[4], flags=re.M)
        kind = "python" if "py" in one[3] else "shell"
        found.append(Block(text.count("\n", 0, one.start(4)), kind, code, reason))
        reason = ""
    assert not reason, f"{page}: a reason without a block"
    return found


def run_here(page: str, test: str) -> list[str]:
    """The blocks of a page that say that this test runs them.

    Args:
        page: its path in the repository.
        test: ``__file__`` of the test.
    """
    name = Path(test).resolve().relative_to(ROOT).as_posix()
    found = [one.code for one in blocks(ROOT / page) if one.reason == f"run by {name}"]
    assert found, f"{page} has no block that {name} runs"
    return found


def commands(code: str) -> Iterator[str]:
    """The commands of a block: lines that a backslash or an open quote continues are one."""
    open_ = ""
    for line in code.splitlines():
        open_ += line
        if open_.endswith("\\"):
            open_ = open_[:-1]
            continue
        try:
            words = shlex.split(open_, comments=True)
        except ValueError:
            open_ += "\n"
            continue
        if words:
            yield open_
        open_ = ""
    assert not open_, f"an open quote: {open_}"


PAGES = {
    page.relative_to(ROOT).as_posix(): found
    for page in [
        ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")),
        *sorted(ROOT.glob("examples/*/README.md")), *sorted(ROOT.glob("packages/*/README.md")),
    ]
    if (found := blocks(page))
}  # fmt: skip
"""Page → its blocks."""
