"""Prompts on which a gate for an instruct pair is trained: users' questions, none of them a benchmark's test prompt.

    python benchmarks/real/gate_prompts.py --data DIR --out prompts.jsonl
    python benchmarks/real/gate_prompts.py --data DIR --out questions.jsonl --kinds gsm8k --first --each 32
    python benchmarks/real/gate_prompts.py --data DIR --out many.jsonl --each 6000 --mixed --packages torch numpy

Word problems of GSM8K's training set; functions of Python's standard library to be completed from signature and
docstring, in the words of HumanEval's chat form, and of other ``--packages``; every second prompt of Spec-Bench (the
others are for tests); short Wikinews articles to be summarised. The records hold ``messages``, for ``sprinter gate
label`` and ``sprinter draft distill``.
"""

from __future__ import annotations

import ast
import gzip
import importlib
import importlib.util
import inspect
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import option_parser, print_written
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.suites.chat import ask_for_code, ask_for_number
from sprinter.files import write_atomic

MODULES = (
    "statistics", "textwrap", "heapq", "bisect", "fractions", "calendar", "colorsys", "difflib", "fnmatch",
    "posixpath", "random", "shlex", "html", "base64", "ast", "functools", "glob", "inspect", "keyword", "locale",
    "mimetypes", "operator", "os", "pprint", "quopri", "re", "shutil", "socket", "string", "struct", "tempfile",
    "timeit", "tokenize", "traceback", "types", "urllib.parse", "warnings", "zipfile", "contextlib", "copy", "csv",
    "dataclasses", "decimal", "email.utils", "enum", "filecmp", "gettext", "gzip", "hashlib", "json",
    "linecache", "logging", "ntpath", "numbers", "pickle", "pkgutil", "platform", "reprlib", "sched", "secrets",
    "stat", "symtable", "sysconfig", "tarfile", "threading", "unittest.util", "uuid", "wave", "webbrowser",
)  # fmt: skip
KINDS = ("gsm8k", "code", "spec-bench", "wikinews")
LONGEST = 900
"""Characters of a prompt: long prompts cost as much as long answers, and give no labels."""


def problems(data: Path) -> Iterator[str]:
    """Questions of GSM8K's training set."""
    for record in records(data / "gsm8k_train.jsonl.gz"):
        yield ask_for_number(record["question"])


def functions() -> Iterator[str]:
    """Functions of the standard library as HumanEval would ask for them, one of each module in turn."""
    seen: set[str] = set()
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # modules differ between versions of Python
            continue
        for member, function in inspect.getmembers(module, inspect.isfunction):
            text = inspect.getdoc(function) or ""
            if not member.startswith("_") and member not in seen and len(text) > 60:
                seen.add(member)
                body = text.replace("\n", "\n    ")
                try:
                    yield ask_for_code(f'def {member}{inspect.signature(function)}:\n    """{body}\n    """')
                except ValueError:  # no signature
                    continue


def package_functions(packages: Sequence[str]) -> Iterator[str]:
    """Public functions with a docstring in these packages' sources, which are read and not imported."""
    seen: set[str] = set()
    for package in packages:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise SystemExit(f"--packages: {package} is not an installed package")
        for place in found.submodule_search_locations:
            for file in sorted(Path(place).rglob("*.py")):
                try:
                    nodes = ast.parse(file.read_text(encoding="utf-8")).body
                except (SyntaxError, ValueError):  # of a newer Python, or made to be wrong
                    continue
                for node in nodes:
                    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                        continue
                    text = ast.get_docstring(node) or ""
                    if len(text) > 60 and node.name not in seen:
                        seen.add(node.name)
                        body, given = text.replace("\n", "\n    "), ast.unparse(node.args)
                        yield ask_for_code(f'def {node.name}({given}):\n    """{body}\n    """')


def questions(data: Path) -> Iterator[str]:
    """First turns of every second prompt of Spec-Bench."""
    return (record["turns"][0] for record in islice(records(data / "specbench_question.jsonl"), 0, None, 2))


def news(data: Path) -> Iterator[str]:
    """Articles of Wikinews to be summarised."""
    for record in records(data / "wikinews_en_2022_00.jsonl.gz"):
        if len(record["text"]) > 400:
            yield f"Summarise this article in three sentences.\n\n{record['title']}\n\n{record['text']}"


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a JSON lines file, which may be gzipped."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    yield from (json.loads(line) for line in text.split("\n") if line)


def main() -> None:
    """Write the prompts and print how many of each kind there are."""
    parser = option_parser(__doc__)
    out = scratch("prompts") / "prompts.jsonl" if SMOKE else None
    parser.add_argument("--out", type=Path, required=not SMOKE, default=out)
    parser.add_argument("--each", type=int, default=sized(120, 3), help="prompts of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--first", action="store_true", help="the first ones of each kind, in their order")
    parser.add_argument("--mixed", action="store_true", help="all kinds in one random order, not by length")
    parser.add_argument("--packages", nargs="+", default=(), help="Python packages with more functions")
    chosen = parser.parse_args()
    kinds = {
        "gsm8k": problems(chosen.data),
        "code": chain(functions(), package_functions(chosen.packages)),
        "spec-bench": questions(chosen.data),
        "wikinews": news(chosen.data),
    }
    found: list[dict[str, Any]] = []
    for kind in chosen.kinds:
        some = [*islice((text for text in kinds[kind] if len(text) <= LONGEST), 4 * chosen.each)]
        if not chosen.first:
            random.Random(0).shuffle(some)
        found += [
            {"id": f"{kind}-{i}", "kind": kind, "messages": [{"role": "user", "content": text}]}
            for i, text in enumerate(some[: chosen.each])
        ]
        print(f"{kind}: {min(len(some), chosen.each)} prompts")
    if chosen.mixed:
        random.Random(0).shuffle(found)
    elif not chosen.first:  # by length: labelling pads the prompts of a step to the longest one
        found.sort(key=lambda record: len(record["messages"][0]["content"]))
    write_atomic(chosen.out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in found))
    print_written("real/gate_prompts", chosen.out)


if __name__ == "__main__":
    main()
