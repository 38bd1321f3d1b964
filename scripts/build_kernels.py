"""Build packages/sprinter-kernels into the environment that runs this, unless it is there as it stands in the clone.

Without a C++ compiler or Python's headers a line says so, and everything goes on without. Called by ``make``.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "sprinter-kernels"
STAMP = Path(sys.prefix) / ".sprinter-kernels"


def compiler() -> str | None:
    """The C++ compiler that CMake would take: ``CXX``, or one by its usual name."""
    names = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def sources() -> str:
    """Digest of the package's files, but for its page."""
    found = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = sorted(path for path in found if path.suffix != ".md")
    parts = [part for path in files for part in (str(path.relative_to(PACKAGE)).encode(), path.read_bytes())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def main() -> None:
    """Build, and note what was built."""
    wanted = sources()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return
    lacking = None if compiler() else "C++ compiler (install g++ or clang++, or set CXX)"
    if lacking is None and not Path(sysconfig.get_path("include"), "Python.h").is_file():
        lacking = "Python.h (on Debian: install python3-dev)"
    if lacking is not None:
        print(
            f"   there is no {lacking}: the kernels are left out, everything runs, some of it slower",
            flush=True,
        )
        return
    print("   the kernels (C++) ...", flush=True)
    began = time.monotonic()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--force-reinstall", str(PACKAGE)], check=True)
    STAMP.write_text(wanted)
    print(f"   the kernels (C++): {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
