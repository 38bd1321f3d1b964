"""Resolve the versions of the development environment again and write constraints.txt.

Makes an empty environment, installs torch at the pinned version (or at --torch), then the package with its dev
extra, and writes down what came. Called by ``make constraints``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "constraints.txt"
HEADER = """\
# Every package of the development environment, pinned. Written by `make constraints`; do not edit by hand.
# Python {major}.{minor}; torch without its local version suffix, so that any build of that version fits.
"""


def pinned_torch() -> str:
    """The version of torch that constraints.txt names now."""
    found = re.search(r"^torch==(\S+)$", FILE.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit("constraints.txt names no torch: give --torch VERSION")
    return found[1]


def resolve(torch: str) -> list[str]:
    """What pip installs in an empty environment, one ``name==version`` a package."""
    with tempfile.TemporaryDirectory(prefix="sprinter-constraints-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(Path(folder, "bin", "python")), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-qq", "--no-compile", f"torch=={torch}"], check=True)
        subprocess.run([*pip, "install", "-qq", "--no-compile", "-e", f"{ROOT}[dev]"], check=True)
        frozen = subprocess.run(
            [*pip, "freeze", "--all", "--exclude-editable"], check=True, capture_output=True, text=True
        )
    lines = [line.partition("+")[0] for line in frozen.stdout.splitlines() if "==" in line]
    # CUDA builds of torch bring platform packages that a CPU build does not have
    platform_bound = ("pip==", "nvidia-", "triton==", "cuda-")
    return sorted((line for line in lines if not line.startswith(platform_bound)), key=str.lower)


def main() -> None:
    """Write constraints.txt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", help="version of torch to pin; as now when left out")
    options = parser.parse_args()
    lines = resolve(options.torch or pinned_torch())
    header = HEADER.format(major=sys.version_info.major, minor=sys.version_info.minor)
    FILE.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{FILE.name}: {len(lines)} packages")


if __name__ == "__main__":
    main()
