"""GGUF files that are named by hub id and found in the directory SPRINTER_MODELS."""

from pathlib import Path

import pytest

from sprinter.errors import UserError
from sprinter.models import source
from sprinter.models.source import find, models_folder

HUB = "Org/Little-Coder-1.5B-GGUF/little-coder-1.5b-q4_k_m.gguf"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder; the hub answers that it is not there."""

    def no_hub(*_: object, **__: object) -> str:
        raise OSError("no hub")

    monkeypatch.setattr(
        source, "hf_hub_download", lambda *_, **__: pytest.fail("a download retries for 23 s")
    )
    monkeypatch.setattr(source, "snapshot_download", no_hub)
    monkeypatch.setenv("SPRINTER_MODELS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["little-coder-1.5b-q4_k_m.gguf", "Little-Coder-1.5B.Q4_K_M.gguf", "Little_Coder-1.5b-q4-k-m.gguf"],
)
def test_a_file_is_found_however_its_name_is_written(folder: Path, name: str) -> None:
    (folder / name).touch()
    (folder / "little-coder-1.5b-q8_0.gguf").touch()
    found = find(HUB, "target")
    assert (found.at, found.name, found.revision) == (folder / name, HUB, None)


def test_the_exact_name_comes_first(folder: Path) -> None:
    for name in ("Little-Coder-1.5B.Q4_K_M.gguf", "little-coder-1.5b-q4_k_m.gguf"):
        (folder / name).touch()
    assert find(HUB, "target").at == folder / "little-coder-1.5b-q4_k_m.gguf"


def test_what_is_not_there_is_looked_for_on_the_hub(folder: Path) -> None:
    (folder / "little-coder-0.5b-q4_k_m.gguf").touch()
    with pytest.raises(UserError, match="no hub"):
        find(HUB, "target")
    (folder / "little-coder-1.5b-q4_k_m.gguf").touch()
    with pytest.raises(UserError, match="no hub"):  # a revision is one of the hub's
        find(HUB, "target", "main")


def test_a_path_is_not_looked_for(folder: Path) -> None:
    (folder / "a.gguf").touch()
    with pytest.raises(UserError, match="does not exist"):
        find("a.gguf", "target")


def test_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models_folder() == folder
    monkeypatch.setenv("SPRINTER_MODELS", "")
    assert models_folder() == Path.home() / ".cache" / "sprinter-models"


def test_it_says_which_file_stands_for_a_hub_id(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "Little-Coder-1.5B.Q4_K_M.gguf").touch()
    for _ in range(2):
        find(HUB, "target")
    assert caplog.messages == [f"{HUB}: using {folder / 'Little-Coder-1.5B.Q4_K_M.gguf'}"]


def test_a_name_that_any_model_may_have_is_not_taken_for_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "model-q4_k_m.gguf").touch()
    asked = "Org/Little-Coder-1.5B-GGUF/model-q4_k_m.gguf"
    with pytest.raises(UserError, match="no hub"):
        find(asked, "target")
    (line,) = caplog.messages
    assert line.startswith(f"{asked}: not using {folder / 'model-q4_k_m.gguf'}") and "give its path" in line


def test_a_file_in_the_folder_of_its_repository_comes_first(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = folder / HUB
    own.parent.mkdir(parents=True)
    for file in (own, folder / own.name):
        file.touch()
    assert find(HUB, "target").at == own
    assert caplog.messages == []
