"""Run every `pip install` line of README.md, docs, the examples' READMEs and the Dockerfile as it is printed.

Each page has an environment of its own, which sees the core's dependencies in one that is kept. pip keeps the
wheel of llama.cpp, which takes minutes to build, in its cache. Called by ``make test-install``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVS = Path(os.environ.get("SPRINTER_ENVS") or Path.home() / ".cache" / "sprinter-envs")
WORK = ENVS / "install"
DOCKERFILE = ROOT / "examples" / "serve" / "Dockerfile"
IMPORTS = {
    "gguf": "gguf, llama_cpp",
    "kernels": "sprinter_kernels",
    "serve": "fastapi, uvicorn, prometheus_client",
    "bench": "rouge_score.rouge_scorer",
    "plots": "matplotlib",
}
"""Extra -> what it brings."""
_LINE = re.compile(r"(?:[\w/.]*/)?pip install (?:-\S+ )*(?:'[^']+'|[^\s`#)';]+)")


def pages() -> list[Path]:
    """The pages for users; decisions are history."""
    found = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    return [page for page in sorted(found) if "decisions" not in page.parts]


def lines(page: Path) -> list[str]:
    """Its install commands, in order, once each."""
    return list(dict.fromkeys(_LINE.findall(page.read_text(encoding="utf-8"))))


def docker_steps(text: str) -> Iterator[tuple[int, str]]:
    """Number of the stage, from 1, and each command of its RUN lines."""
    stage = 0
    for line in text.replace("\\\n", " ").splitlines():
        stage += line.startswith("FROM ")
        if line.startswith("RUN "):
            yield from ((stage, step.strip()) for step in line.removeprefix("RUN ").split("&&"))


def base() -> Path:
    """Packages of an environment with torch, as pinned, and what else the core needs; made again where that changes."""
    held = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = next(line for line in held if line.startswith("torch=="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [torch, *(line for line in project["dependencies"] if not line.startswith("torch"))]
    folder, made_from = WORK / "base", "\n".join([sys.version, *wanted])
    if not (folder / "made-from").exists() or (folder / "made-from").read_text() != made_from:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-qq", "--no-compile"]
        subprocess.run([*pip, torch], check=True)
        subprocess.run([*pip, *wanted], check=True)
        (folder / "made-from").write_text(made_from)
    return packages_of(folder)


def packages_of(folder: Path) -> Path:
    """Where an environment has its packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


def fresh(name: str) -> Path:
    """The ``bin`` of an empty environment that sees those packages."""
    folder = WORK / name
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    (packages_of(folder) / "base.pth").write_text(f"{base()}\n")
    return folder / "bin"


def run(command: str, bin_folder: Path) -> str:
    """Run a line of a shell with an environment's commands first; the working directory is the clone."""
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env={**alone, "PATH": path}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"failed with exit status {done.returncode}: {command}")
    return done.stdout


def try_page(name: str, commands: list[str]) -> None:
    """Run the commands in an environment of their own, and see that what they install is there."""
    place = fresh(name)
    for command in commands:
        print(f"   {command}", flush=True)
        run(command.replace("pip install", "pip install -qq --disable-pip-version-check", 1), place)
        for extra in re.findall(r"[\w-]+", (re.findall(r"\[([\w,-]+)\]", command) or [""])[0]):
            run(f"python -c 'import {IMPORTS[extra]}'", place)
    json.loads(run("sprinter methods --json", place))
    shutil.rmtree(place.parent)


def main() -> None:
    """Try all pages and the Dockerfile."""
    count = 0
    for page in pages():
        if found := lines(page):
            print(f"== {page.relative_to(ROOT)}", flush=True)
            # an install line of an example comes after the package
            # /opt/sprinter is the user's: here the environment stands for it
            given = [re.sub(r"^\S*pip", "pip", line) for line in found]
            try_page("page", given if page.parent in (ROOT, ROOT / "docs") else ["pip install .", *given])
            count += len(found)
    print(f"== {DOCKERFILE.relative_to(ROOT)}", flush=True)
    steps = [
        step for _, step in docker_steps(DOCKERFILE.read_text(encoding="utf-8")) if "pip install" in step
    ]
    # torch is there, from where this machine has it
    given = [
        step.replace("/opt/sprinter/bin/pip", "pip").replace("/src", ".").replace("--no-cache-dir ", "")
        for step in steps
        if "TORCH_INDEX" not in step
    ]
    try_page("docker", given)
    print(f"install lines: {count} on pages and {len(given)} of the Dockerfile, all run")


if __name__ == "__main__":
    main()
