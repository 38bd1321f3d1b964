"""``runner="auto"`` takes what a probe has found for these files on this machine, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama

import sprinter
from sprinter.engine import runners
from sprinter.engine.runners import MIXED, OURS, RIVALS, USUAL, fastest_options, keep_fastest, rival_of
from sprinter.errors import UserError


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two GGUF files and an empty cache directory, on a machine without a GPU."""
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runners, "device_of", lambda name: torch.device("cpu"))
    found = []
    for name in ("target", "draft"):
        found.append(tmp_path / f"{name}.gguf")
        found[-1].write_bytes(b"GGUF" + name.encode())
    return found[0], found[1]


def test_nothing_is_chosen_before_a_probe(files: tuple[Path, Path]) -> None:
    assert fastest_options(*files, {}) == {}


def test_what_was_found_is_taken(files: tuple[Path, Path]) -> None:
    keep_fastest(*files, {}, OURS)
    assert fastest_options(*files, {}) == RIVALS[OURS]
    assert fastest_options(*files, {"dtype": "auto", "device": "auto"}) == RIVALS[OURS]
    assert fastest_options(str(files[0]), str(files[1]), {"trust_remote_code": False}) == RIVALS[OURS]
    keep_fastest(*files, {}, USUAL)
    assert fastest_options(*files, {}) == {}  # as without a probe: the models keep their names and revisions


def test_a_file_on_the_hub_is_found_by_its_name(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINTER_MODELS", str(files[0].parent))
    names = [f"org/repository/{file.name}" for file in files]
    keep_fastest(names[0], names[1], {}, OURS)
    assert fastest_options(names[0], names[1], {}) == RIVALS[OURS] == fastest_options(*files, {})


def test_no_cache_is_no_choice(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a home directory, and a missing file, which loading then reports."""
    keep_fastest(*files, {}, OURS)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    with pytest.raises(UserError, match="does not exist"):
        fastest_options(files[0], files[1].with_name("nowhere.gguf"), {})
    monkeypatch.setattr(runners, "cache_dir", homeless)
    assert fastest_options(*files, {}) == {}
    assert fastest_options(str(files[0].parent), None, {}) == {}


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "int8"}, {"device": "cpu"}, {"device_map": {"": "cpu"}}, {"attn_implementation": "eager"},
        {"draft_vocabulary": 100}, {"draft_dtype": "int8"}, {"compile": True},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_settle_the_runner_are_not_replaced(
    files: tuple[Path, Path], given: dict[str, Any]
) -> None:
    keep_fastest(*files, {}, OURS)
    assert fastest_options(*files, given) == {}


def test_it_is_known_of_these_files_and_this_machine_alone(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = files
    keep_fastest(target, draft, {}, OURS)
    assert fastest_options(target, None, {}) == {} == fastest_options(draft, target, {})
    assert fastest_options("org/model", "org/draft", {}) == {}
    threads = torch.get_num_threads()
    with monkeypatch.context() as other:
        other.setattr(runners.torch, "get_num_threads", lambda: threads + 1)
        assert fastest_options(target, draft, {}) == {}
    with monkeypatch.context() as other:
        other.setattr(runners, "cpu_name", lambda: "another")
        assert fastest_options(target, draft, {}) == {}
    with monkeypatch.context() as other:
        other.setattr(runners, "device_of", lambda name: torch.device("cuda"))
        assert fastest_options(target, draft, {}) == {}
    assert fastest_options(target, draft, {}) == RIVALS[OURS]
    draft.write_bytes(b"GGUF, another model")
    assert fastest_options(target, draft, {}) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"fastest": "vllm"}), json.dumps({"other": 1})])
def test_a_damaged_choice_counts_as_none_and_is_logged(
    files: tuple[Path, Path], tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep_fastest(*files, {}, OURS)
    (kept,) = (tmp_path / "cache" / "runners").glob("*.json")
    kept.write_text(text)
    assert fastest_options(*files, {}) == {}
    assert "cannot be read" in caplog.text and "probe again" in caplog.text


def test_a_choice_that_others_could_have_written_is_not_taken(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    keep_fastest(*files, {}, OURS)
    (kept,) = (tmp_path / "cache" / "runners").glob("*.json")
    kept.chmod(0o666)
    assert fastest_options(*files, {}) == {}


def test_only_pairs_of_files_have_a_choice(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give two as target and draft"):
        keep_fastest(tmp_path, tmp_path, {}, OURS)


def test_a_pair_is_loaded_as_a_probe_has_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runners, "device_of", lambda name: torch.device("cpu"))
    made = []
    for name, seed in (("target", 1), ("draft", 2)):
        saved_llama(tmp_path / name, seed)
        made.append(converted(tmp_path / name))
    monkeypatch.setitem(
        RIVALS, OURS, {"runner": "torch", "dtype": "float32"}
    )  # files of random weights, in float32
    target, draft = made
    keep_fastest(target, draft, {}, OURS)
    pair = sprinter.load_pair(target, draft)
    assert isinstance(pair.models.target.model, torch.nn.Module)
    assert rival_of(pair.models) is None  # not the file's own blocks


def test_a_mixed_pair_is_loaded_as_a_probe_has_found(files: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    made = []
    for name, seed in (("one", 1), ("other", 2)):
        saved_llama(tmp_path / name, seed, intermediate_size=64)
        made.append(converted(tmp_path / name, "q8_0"))
    for name, (own, other, options) in MIXED.items():
        keep_fastest(*made, {}, name)
        assert fastest_options(*made, {}) == options
        pair = sprinter.load_pair(*made)
        assert pair.models.draft is not None and rival_of(pair.models) == name
        ours = [model.quantised == "gguf" for model in (pair.models.target, pair.models.draft)]
        assert ours == [own == OURS, other == OURS]
