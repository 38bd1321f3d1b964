"""What users are told to install: names that exist, and an image that has the kernels."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import sprinter
from sprinter.errors import install_line

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import environments  # noqa: E402

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
DOCKERFILE = environments.DOCKERFILE.read_text(encoding="utf-8")


def test_install_lines_of_pages_name_the_clone_and_extras_that_there_are() -> None:
    """No index has the distribution, so that its name alone installs nothing."""
    found = {page.relative_to(ROOT).as_posix(): environments.lines(page) for page in environments.pages()}
    extras = ("gguf",)
    assert sorted(found["README.md"]) == sorted(
        [
            "pip install .",
            "pip install ./packages/sprinter-kernels",
            *(f"pip install '.[{one}]'" for one in extras),
        ]
    )
    assert found["examples/plugin/README.md"] == ["pip install ./examples/plugin"]
    assert found["examples/serve/README.md"] == ["/opt/sprinter/bin/pip install '.[serve]'"]
    every = [line for page in found.values() for line in page]
    for line in every:
        assert "sprinter-llm" not in line
        for extra in re.findall(r"\.\[([\w-]+)\]", line):
            assert extra in EXTRAS and extra in environments.IMPORTS


def test_no_message_installs_the_distribution_by_name() -> None:
    for path in [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "examples").rglob("*.*"),
        *(ROOT / "docs").glob("*.md"),
    ]:
        if path.is_file() and path.suffix in (".py", ".md", ".yaml", ".sh", ".service"):
            assert "'sprinter-llm[" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev"}))
def test_an_extra_is_installed_from_a_clone_or_by_its_packages(extra: str) -> None:
    packages = " ".join(f"'{package}'" for package in sorted(EXTRAS[extra]))
    assert (
        install_line(extra) == f"pip install '.[{extra}]' in a clone of Sprinter, or pip install {packages}"
    )


def test_from_its_source_alone_the_clone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda _: None)
    assert install_line("gguf") == "pip install '.[gguf]' in a clone of Sprinter"


def test_the_image_has_the_kernels_and_what_gguf_files_need() -> None:
    steps = list(environments.docker_steps(DOCKERFILE))
    built, run = ((stage, step.split()) for stage, step in steps if "apt-get install" in step)
    assert built[0] == 1 and "g++" in built[1] and run[0] == 2 and "g++" not in run[1]
    assert "libgomp1" in run[1]  # llama.cpp is linked to it, and is tried in a process without torch
    (install,) = (step for _, step in steps if "/src[" in step)
    assert set(re.findall(r"/src\[([\w,]+)\]", install)[0].split(",")) == {"serve", "gguf"}
    assert "/src/packages/sprinter-kernels" in install.split()
    (venv,) = (step.split()[-1] for _, step in steps if "-m venv" in step)
    assert f"COPY --from=build {venv} {venv}" in DOCKERFILE and f"PATH={venv}/bin:$PATH" in DOCKERFILE
    # built on one machine, run on another
    assert DOCKERFILE.index("GGML_NATIVE=OFF") < DOCKERFILE.index("/src[")


def test_lowest_versions_are_those_of_pyproject() -> None:
    stated = environments.requirements()
    assert environments.lowest("name[part]>=1.2,<3") == "name[part]==1.2"
    assert any(line.startswith("transformers==5.") for line in map(environments.lowest, stated))
    assert not any(line.startswith(("torch", "llama-cpp-python")) for line in stated)
    with pytest.raises(SystemExit, match="states no lowest version"):
        environments.lowest("name<3")


def test_what_is_tried_with_other_versions_exists() -> None:
    for test in environments.TESTS:
        file, _, name = test.partition("::")
        assert (
            f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") if name else (ROOT / file).is_file()
        )
    assert set(environments.TOOLS) <= environments.pins().keys()


def test_the_page_installs_the_vllm_that_the_doors_are_tested_with() -> None:
    assert f"pip install {environments.VLLM} " in (ROOT / "docs/vllm.md").read_text(encoding="utf-8")


def test_a_release_tries_the_pinned_torch_and_a_newer_one() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"]
    tried = jobs["try"]["strategy"]["matrix"]
    pin = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert pin is not None and tried["torch"][0] == pin.group(1)
    assert [int(part) for part in tried["torch"][-1].split(".")] > [
        int(part) for part in pin.group(1).split(".")
    ]
    assert "try" in jobs["publish"]["needs"]


def test_the_versions_of_python_that_are_stated_are_tried_and_have_wheels() -> None:
    stated = [line.rpartition(" ")[2] for line in environments.PROJECT["classifiers"] if ":: 3." in line]
    assert environments.PROJECT["requires-python"] == f">={stated[0]}" and len(stated) > 1
    for workflow, job in (("ci", "test"), ("release", "try")):
        text = (ROOT / f".github/workflows/{workflow}.yml").read_text(encoding="utf-8")
        assert yaml.safe_load(text)["jobs"][job]["strategy"]["matrix"]["python"] == stated
    kernels = tomllib.loads((ROOT / "packages/sprinter-kernels/pyproject.toml").read_text(encoding="utf-8"))
    wheels = kernels["tool"]["cibuildwheel"]["build"].split()
    assert wheels == [f"cp{version.replace('.', '')}-*" for version in stated]


def test_the_recipe_for_conda_needs_what_the_package_needs() -> None:
    recipe = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text(encoding="utf-8"))
    names = {"torch": "pytorch", "huggingface-hub": "huggingface_hub"}
    wanted = [
        re.sub(r"^[\w-]+", lambda m: names.get(m[0], m[0]) + " ", line)
        for line in environments.PROJECT["dependencies"]
    ]
    assert recipe["requirements"]["run"] == ["python " + environments.PROJECT["requires-python"], *wanted]
    assert recipe["context"]["version"] == sprinter.__version__
