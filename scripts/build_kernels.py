"""Build packages/sprinter-kernels into the environment that runs this, unless it is there as it stands in the clone.

A wheel is kept in SPRINTER_ENVS by what it was made from, so that several environments and clones build it once.
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
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "sprinter-kernels"
STAMP = Path(sys.prefix) / ".sprinter-kernels"
ENVS = Path(os.environ.get("SPRINTER_ENVS") or Path.home() / ".cache" / "sprinter-envs")
TOOLS = ("cmake", "nanobind", "ninja", "scikit-build-core")


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


def wheel(built_from: str, pip: list[str]) -> Path:
    """The wheel of these sources by this interpreter, compiler and tools; built where there is none."""
    asked = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout
    flags = [os.environ.get(name, "") for name in ("CXXFLAGS", "LDFLAGS", "CMAKE_ARGS")]
    made_by = [built_from, sys.version, sysconfig.get_platform(), asked, *flags, *map(version, TOOLS)]
    folder = ENVS / "kernels" / hashlib.sha256("\0".join(made_by).encode()).hexdigest()[:16]
    if not any(folder.glob("*.whl")):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as away:
            subprocess.run(
                [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", away, str(PACKAGE)], check=True
            )
            (made,) = Path(away).glob("*.whl")
            made.replace(folder / made.name)  # whole or not at all: others may look for it
    return next(folder.glob("*.whl"))


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
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
    subprocess.run([*pip, "install", "--no-deps", "--force-reinstall", str(wheel(wanted, pip))], check=True)
    STAMP.write_text(wanted)
    print(f"   the kernels (C++): {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
