"""Bring large files to a machine that takes them in parts: cut them here, join them there as the parts arrive.

    python scripts/parts.py cut FOLDER FILE ... [--mib 60]
    python scripts/parts.py join FOLDER OUT

``cut`` writes parts of at most 60 MiB, and ``parts.json`` with the SHA-256 of each part and of each file. ``join`` adds
to the files in OUT every part that has arrived and is the next one, checks its hash, and removes it, so that disks hold
no file twice; it may be called after each part, and goes on where it was. It prints what is missing, and exits with 0
when all files are there and their hashes are right, with 3 while parts are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

LIST = "parts.json"
MISSING = 3
_CHUNK = 1 << 20


def cut(folder: Path, files: list[Path], size: int) -> None:
    """Write files as parts of at most ``size`` bytes, and the list of them."""
    folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {}
    for file in files:
        whole, parts = hashlib.sha256(), list[dict[str, Any]]()
        with file.open("rb") as given:
            while data := given.read(size):
                whole.update(data)
                name = f"{file.name}.{len(parts):03}"
                (folder / name).write_bytes(data)
                parts.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        told[file.name] = {"bytes": file.stat().st_size, "sha256": whole.hexdigest(), "parts": parts}
        print(f"{file.name}: {len(parts)} parts", flush=True)
    (folder / LIST).write_text(json.dumps(told, indent=1) + "\n")


def join(folder: Path, out: Path) -> list[str]:
    """Add the parts that have arrived to the files in ``out``; returns the names of those that are missing.

    Raises:
        SystemExit: the list is missing, a part or a whole file is not what was cut; what was joined before stays.
    """
    try:
        told = json.loads((folder / LIST).read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"error: '{folder / LIST}' cannot be read ({error}): bring it over first")
    out.mkdir(parents=True, exist_ok=True)
    missing: list[str] = []
    for name, facts in told.items():
        file, at = out / name, 0
        have = file.stat().st_size if file.exists() else 0
        have *= have <= facts["bytes"]  # a longer one is another file
        with file.open("ab") as made:
            for part in facts["parts"]:
                own, at = folder / part["name"], at + part["bytes"]
                if have >= at:  # joined before
                    own.unlink(missing_ok=True)
                    continue
                made.truncate(have := at - part["bytes"])  # what an interruption has left
                if not own.exists():
                    missing += [one["name"] for one in facts["parts"][facts["parts"].index(part) :]]
                    break
                data = own.read_bytes()
                if hashlib.sha256(data).hexdigest() != part["sha256"]:
                    sys.exit(f"error: '{own}' is not the part that was cut: bring it over again")
                made.write(data)
                made.flush()
                have = at
                own.unlink()
        if have == facts["bytes"] and _digest(file) != facts["sha256"]:
            file.unlink()
            sys.exit(
                f"error: '{file}' is not the file that was cut: it is removed, bring all its parts over again"
            )
    return missing


def _digest(file: Path) -> str:
    whole = hashlib.sha256()
    with file.open("rb") as given:
        while data := given.read(_CHUNK):
            whole.update(data)
    return whole.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    cutter, joiner = verbs.add_parser("cut"), verbs.add_parser("join")
    for one in (cutter, joiner):
        one.add_argument("folder", type=Path, help="of the parts")
    cutter.add_argument("files", type=Path, nargs="+")
    cutter.add_argument("--mib", type=float, default=60.0, help="largest part")
    joiner.add_argument("out", type=Path, help="folder of the files")
    options = parser.parse_args()
    if options.verb == "cut":
        cut(options.folder, options.files, int(options.mib * (1 << 20)))
    elif missing := join(options.folder, options.out):
        print(f"{len(missing)} parts are missing: {', '.join(missing[:9])}", flush=True)
        sys.exit(MISSING)
    else:
        print("all files are there", flush=True)


if __name__ == "__main__":
    main()
