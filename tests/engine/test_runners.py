"""``runner="auto"`` takes what a probe has found for these files on this machine, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama

import sprinter
from sprinter.engine import runners
from sprinter.engine.runners import MIXED, OURS, RIVALS, USUAL, choose_runner, keep_fastest, rival_of
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
    assert choose_runner(*files, {}).options == {}


def test_what_was_found_is_taken(files: tuple[Path, Path]) -> None:
    keep_fastest(*files, {}, OURS)
    assert choose_runner(*files, {}).options == RIVALS[OURS]
    assert choose_runner(*files, {"dtype": "auto", "device": "auto"}).options == RIVALS[OURS]
    assert choose_runner(str(files[0]), str(files[1]), {"trust_remote_code": False}).options == RIVALS[OURS]
    keep_fastest(*files, {}, USUAL)
    assert (
        choose_runner(*files, {}).options == {}
    )  # as without a probe: the models keep their names and revisions


def test_a_file_on_the_hub_is_found_by_its_name(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINTER_MODELS", str(files[0].parent))
    names = [f"org/{file.stem}/{file.name}" for file in files]
    keep_fastest(names[0], names[1], {}, OURS)
    assert choose_runner(names[0], names[1], {}).options == RIVALS[OURS] == choose_runner(*files, {}).options


def test_no_cache_is_no_choice(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a home directory, and a missing file, which loading then reports."""
    keep_fastest(*files, {}, OURS)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    with pytest.raises(UserError, match="does not exist"):
        choose_runner(files[0], files[1].with_name("nowhere.gguf"), {})
    monkeypatch.setattr(runners, "cache_dir", homeless)
    assert choose_runner(*files, {}).options == {}
    assert choose_runner(str(files[0].parent), None, {}).options == {}


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "float32"}, {"device_map": {"": "cpu"}}, {"attn_implementation": "eager"},
        {"draft_vocabulary": 100}, {"draft_dtype": "float32"}, {"compile": True},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_settle_the_runner_are_not_replaced(
    files: tuple[Path, Path], given: dict[str, Any]
) -> None:
    keep_fastest(*files, {}, OURS)
    options, reason = choose_runner(*files, given)
    assert (
        options == {}
        and reason == f"llama.cpp: {next(iter(given))} was given without runner=torch (--runner torch)"
    )


def test_a_dtype_of_our_kernels_is_said_to_choose_them(files: tuple[Path, Path]) -> None:
    """As ``load_models`` does, for each model by its own dtype."""
    (target, draft), mixed = files, " for the draft: it is a GGUF file, and the target is not"
    for dtype in ("gguf", "int8", "int4"):
        ours = ({}, "our kernels: dtype was given")
        assert choose_runner(target, draft, {"dtype": dtype}) == ours
        assert choose_runner(target, None, {"dtype": dtype}) == ours
        assert choose_runner(target.parent, draft, {"dtype": dtype}).reason == "our kernels" + mixed
        by_dtypes = "llama.cpp for the target, our kernels for the draft: as their dtypes say"
        assert choose_runner(target, draft, {"draft_dtype": dtype}).reason == by_dtypes
        given = {"dtype": dtype, "draft_dtype": "auto"}
        by_dtypes = "our kernels for the target, llama.cpp for the draft: as their dtypes say"
        assert choose_runner(target, draft, given).reason == by_dtypes
    assert choose_runner(target.parent, draft, {}).reason == "llama.cpp" + mixed


def test_the_cpu_by_its_name_is_the_cpu_by_default(files: tuple[Path, Path]) -> None:
    keep_fastest(*files, {}, OURS)
    assert choose_runner(*files, {"device": "cpu"}) == choose_runner(*files, {})


def test_it_is_known_of_these_files_and_this_machine_alone(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = files
    keep_fastest(target, draft, {}, OURS)
    assert choose_runner(target, None, {}).options == {} == choose_runner(draft, target, {}).options
    assert choose_runner("org/model", "org/draft", {}).options == {}
    threads = torch.get_num_threads()
    with monkeypatch.context() as other:
        other.setattr(runners.torch, "get_num_threads", lambda: threads + 1)
        assert choose_runner(target, draft, {}).options == {}
    for name in ("cpu_name", "name_of"):  # other kernels, or none
        with monkeypatch.context() as other:
            other.setattr(runners, name, lambda: "another")
            assert choose_runner(target, draft, {}).options == {}
    with monkeypatch.context() as other:
        other.setattr(runners, "device_of", lambda name: torch.device("cuda"))
        assert choose_runner(target, draft, {}).options == {}
    assert choose_runner(target, draft, {}).options == RIVALS[OURS]
    draft.write_bytes(b"GGUF, another model")
    assert choose_runner(target, draft, {}).options == {}


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"fastest": "vllm"}), json.dumps({"other": 1})])
def test_a_damaged_choice_counts_as_none_and_is_logged(
    files: tuple[Path, Path], tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep_fastest(*files, {}, OURS)
    (kept,) = (tmp_path / "cache" / "runners").glob("*.json")
    kept.write_text(text)
    assert choose_runner(*files, {}).options == {}
    assert "cannot be read" in caplog.text and "probe again" in caplog.text


def test_a_choice_that_others_could_have_written_is_not_taken(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    keep_fastest(*files, {}, OURS)
    (kept,) = (tmp_path / "cache" / "runners").glob("*.json")
    kept.chmod(0o666)
    assert choose_runner(*files, {}).options == {}


def test_only_pairs_of_files_have_a_choice(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give two as target and draft"):
        keep_fastest(tmp_path, tmp_path, {}, OURS)


@pytest.fixture
def quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose blocks our kernels read, on a machine without a GPU; its cache directory is empty."""
    pytest.importorskip("gguf", reason=NO_GGUF)
    monkeypatch.setattr(runners, "device_of", lambda name: torch.device("cpu"))
    saved_llama(tmp_path / "one", 1, intermediate_size=64)
    made = converted(tmp_path / "one", "q8_0")
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    return made


def test_without_a_probe_our_kernels_run_what_they_can_read(quantised: Path, tmp_path: Path) -> None:
    pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
    for draft in (None, quantised):
        chosen = choose_runner(quantised, draft, {})
        assert chosen.options == RIVALS[OURS] and chosen.reason is not None and "our kernels" in chosen.reason
    chosen = choose_runner(converted(tmp_path / "one", "f16"), None, {})
    assert chosen.options == {} and "llama.cpp: one-f16.gguf holds matrices in F16" in str(chosen.reason)
    assert choose_runner(quantised, None, {"dtype": "float32"}).options == {}  # chosen already
    assert choose_runner(quantised, tmp_path / "one", {}).reason == "llama.cpp: the draft is not a GGUF file"
    keep_fastest(quantised, None, {}, USUAL)
    assert choose_runner(quantised, None, {}).options == {}  # measured


def test_where_our_kernels_are_not_installed_llama_cpp_runs_the_file_and_that_is_said(
    quantised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "sprinter_kernels", None)
        chosen = choose_runner(quantised, None, {})
        assert chosen.options == {}, chosen
        assert str(chosen.reason).startswith("llama.cpp without our kernels, which are often faster")
    assert choose_runner(quantised, None, {}).options == RIVALS[OURS]


def test_an_architecture_that_our_kernels_do_not_know_is_left_to_llama_cpp(
    quantised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sprinter.models.gguf import config

    monkeypatch.setattr(config, "FAMILIES", {})
    chosen = choose_runner(quantised, None, {})
    assert chosen.options == {} and "its architecture is llama" in str(chosen.reason)


def test_our_kernels_need_no_llama_cpp(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
    import sys

    from sprinter.models.gguf import dequantise
    from sprinter.models.gguf.load import EOS_KEY

    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # cannot be imported
    pair = sprinter.load_pair(quantised)
    assert pair.models.target.quantised == "gguf" and "our kernels" in str(pair.runner_reason)
    assert len(pair.generate([1, 2], max_new_tokens=4).tokens) == 4
    head = dequantise.gguf_head(quantised)
    words = ["a", "<|im_end|>", "<|file_sep|>", "<PAD>", "b"]
    monkeypatch.setitem(head.metadata, "tokenizer.ggml.tokens", words)
    for key in (EOS_KEY, "tokenizer.ggml.eos_token_id"):
        monkeypatch.delitem(head.metadata, key, raising=False)
    assert dequantise._eos_ids(head) == (1, 2, 3)
    monkeypatch.setitem(head.metadata, "tokenizer.ggml.eos_token_id", 4)
    monkeypatch.setitem(head.metadata, "tokenizer.ggml.fim_pad_token_id", 2**32 - 1)  # none
    assert dequantise._eos_ids(head) == (1, 2, 3, 4)


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
        assert choose_runner(*made, {}).options == options
        pair = sprinter.load_pair(*made)
        assert pair.models.draft is not None and rival_of(pair.models) == name
        ours = [model.quantised == "gguf" for model in (pair.models.target, pair.models.draft)]
        assert ours == [own == OURS, other == OURS]
