"""Build sdist and wheel, check their files, install the wheel in an empty environment and run it outside the source.

The wheel is built from the sdist, so that an sdist without a needed file fails here. Called by ``make package``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
MAX_BYTES = 40 * 2**20

IN_WHEEL = ("sprinter/__init__.py", "sprinter/py.typed", "sprinter/cli/demo.py")
IN_SDIST = (
    "pyproject.toml",
    "Makefile",
    "constraints.txt",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    ".ci/run",
    "docs/decisions/README.md",
    "scripts/check_package.py",
    "tests/test_house.py",
    "src/sprinter/py.typed",
)


def run(*command: str | Path, cwd: Path, show: bool = False) -> str:
    """Run a command and return its output; on failure print the output and exit."""
    # no modules from the working tree or from a user's site directory
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, "PYTHONNOUSERSITE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=None if show else subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        sys.stderr.write((done.stdout or "") + (done.stderr or ""))
        sys.exit(f"failed with exit status {done.returncode}: {' '.join(str(part) for part in command)}")
    return done.stdout or ""


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; returns both paths."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT, cwd=ROOT)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def builtin_files() -> list[str]:
    """The built-in pair's files, as paths below ``src``."""
    folder = ROOT / "src" / "sprinter" / "models" / "builtin"
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [path.relative_to(ROOT / "src").as_posix() for path in files]


def look_inside(sdist: Path, wheel: Path) -> None:
    """Fail on a file that is missing, one that should not be there, or too many bytes."""
    pair = builtin_files()
    for wanted in (".safetensors", "/config.json", "/README.md"):
        if not any(name.endswith(wanted) for name in pair):
            sys.exit(f"the built-in pair is not whole: no *{wanted} under src/sprinter/models/builtin")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        same = [
            name
            for name in pair
            if name in names and archive.read(name) == (ROOT / "src" / name).read_bytes()
        ]
    lacking = sorted({*IN_WHEEL, *pair} - names) + sorted(set(pair) - set(same))
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        lacking.append("LICENSE")
    strangers = [name for name in names if not name.startswith("sprinter/") and ".dist-info/" not in name]
    if lacking or strangers:
        sys.exit(f"{wheel.name}: lacks {lacking}, should not have {strangers}")
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    if lacking := sorted({*IN_SDIST, *(f"src/{name}" for name in pair)} - members):
        sys.exit(f"{sdist.name}: lacks {lacking}")
    for path in (sdist, wheel):
        if path.stat().st_size > MAX_BYTES:
            sys.exit(f"{path.name}: {path.stat().st_size} bytes are more than {MAX_BYTES}")


def try_wheel(wheel: Path) -> None:
    """Install in an empty environment, away from the source, and run what the README promises."""
    with tempfile.TemporaryDirectory(prefix="sprinter-wheel-") as folder:
        away = Path(folder, "elsewhere")
        away.mkdir()
        run(sys.executable, "-m", "venv", Path(folder, "env"), cwd=away)
        python, command = Path(folder, "env", "bin", "python"), Path(folder, "env", "bin", "sprinter")
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile")
        limits = ("-c", ROOT / "constraints.txt")
        torch = next(
            line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
        )
        run(*pip, *limits, torch, cwd=away)
        run(*pip, *limits, wheel, cwd=away)
        place = run(python, "-c", "import sprinter; print(sprinter.__file__)", cwd=away).strip()
        if not Path(place).resolve().is_relative_to(Path(folder).resolve()):
            sys.exit(f"sprinter was imported from {place}, not from the wheel")
        listed = run(command, "methods", "--json", cwd=away)
        json.loads(listed)
        if listed.count("\n") != 1:
            sys.exit("`sprinter methods --json` printed more than one line")
        run(python, "-m", "sprinter", "demo", cwd=away, show=True)


def main() -> None:
    """Build, check and try the package; returns the exit status."""
    sdist, wheel = build()
    look_inside(sdist, wheel)
    sizes = ", ".join(f"{path.name} {path.stat().st_size / 2**20:.1f} MiB" for path in (sdist, wheel))
    print(f"built {sizes}; trying the wheel in an empty environment", flush=True)
    try_wheel(wheel)
    print("package: wheel and sdist are fit to use")


if __name__ == "__main__":
    main()
