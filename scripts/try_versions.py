"""Try the package with other versions of what it depends on: the newest, or the lowest that pyproject.toml states.

torch stays as pinned. Each kind has an environment of its own in SPRINTER_ENVS, made again when what it is made from
has changed; the newest releases are looked up each time. Called by ``make test-newest`` and ``make test-lowest``.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVS = Path(os.environ.get("SPRINTER_ENVS") or Path.home() / ".cache" / "sprinter-envs")
# The demo, and these: what depends on transformers' names and on the kernels, equality of texts, files, the server.
TESTS = (
    "tests/models/test_cache_name.py",
    "tests/models/test_in_place.py::test_laws_are_those_of_the_weights_in_float32",
    "tests/models/test_quantised.py::test_a_token_has_the_same_law_in_every_forward_pass",
    "tests/models/test_straight.py::test_a_straight_pass_has_the_bits_of_the_usual_one",
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
    "pytest", "pytest-timeout", "hypothesis", "httpx2", "jsonschema", "openai", "triton",
)  # fmt: skip
BUILT = "llama-cpp-python"  # from source, some minutes: `make test-gguf` has it
SHOWN = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "typer",
    "gguf",
    "fastapi",
)


def requirements() -> list[str]:
    """Those of the package and of its extras, once each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    return [line for line in dict.fromkeys(found) if not line.startswith((BUILT, "torch>"))]


def lowest(requirement: str) -> str:
    """``name>=1.2,<3`` -> ``name==1.2``."""
    found = re.match(r"([\w.\[\]-]+)>=([\w.]+)", requirement)
    if found is None:
        raise SystemExit(f"{requirement!r} in pyproject.toml states no lowest version: write name>=VERSION")
    return f"{found[1]}=={found[2]}"


def pins() -> dict[str, str]:
    """Name, as pip normalises it -> line of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    named = [(line.partition("==")[0], line) for line in lines if "==" in line]
    return {re.sub(r"[-_.]+", "-", name).lower(): line for name, line in named}


def install(kind: str) -> Path:
    """The environment's interpreter."""
    known, folder = pins(), ENVS / kind
    wanted = [lowest(line) for line in requirements()] if kind == "lowest" else requirements()
    tools = [known[name] for name in TOOLS] if kind == "lowest" else list(TOOLS)
    made_from = "\n".join([sys.version, known["torch"], *wanted, *tools])
    key, stamp = hashlib.sha256(made_from.encode()).hexdigest(), folder / "made-from"
    python = folder / "bin" / "python"
    whole = stamp.is_file() and stamp.read_text() == key
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile"]
    if not whole:
        print(f"== set-up: the {kind} versions, in {folder} (a few minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([*pip, known["torch"]], check=True)
        subprocess.run([*pip, known["hatchling"], "editables"], check=True)
    # torch is named again, so that pip neither replaces it nor looks for a newer one
    newest = ["--upgrade", "--upgrade-strategy", "eager"] if kind == "newest" else []
    if kind == "newest" or not whole:
        subprocess.run([*pip, *newest, known["torch"], *wanted, *tools], check=True)
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", "-e", str(ROOT)], check=True)
    subprocess.run([str(python), str(ROOT / "scripts" / "build_kernels.py")], check=True)
    subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", "check"], check=True)
    stamp.write_text(key)
    return python


def main() -> None:
    """Make the environment, and try the package in it."""
    if sys.argv[1:] not in (["newest"], ["lowest"]):
        raise SystemExit("usage: try_versions.py newest|lowest")
    kind = sys.argv[1]
    python = str(install(kind))
    asked = "from importlib.metadata import version; import sys; " + (
        "print(*(f'{name} {version(name)}' for name in sys.argv[1:]), sep=', ')"
    )
    shown = subprocess.run([python, "-c", asked, *SHOWN], check=True, capture_output=True, text=True).stdout
    said = f"{kind} versions, Python {sys.version.split()[0]}: {shown.strip()}"
    print(f"== {said}", flush=True)
    alone = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    demo = [python, "-W", "error::FutureWarning", "-m", "sprinter", "demo"]
    tests = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not gpu and not real",
        *TESTS,
    ]
    for command in (demo, tests):
        if subprocess.run(command, cwd=ROOT, env=alone).returncode:
            raise SystemExit(f"FAILED with the {said}")
    print(f"== passed with the {said}")


if __name__ == "__main__":
    main()
