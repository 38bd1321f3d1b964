"""Pairs whose models differ in runner and dtype: greedy texts are plain decoding's, and what is asked for is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama

import sprinter
from sprinter.cli import main
from sprinter.errors import UserError
from sprinter.models.gguf.load import GgufModel
from sprinter.models.pair import builtin_paths
from sprinter.training.label_run import label
from sprinter.training.label_settings import LabelSettings

PROMPTS = [[3, 7, 1, 12, 5], [9, 9], [2, 2, 40]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft as transformers folders."""
    top = tmp_path_factory.mktemp("mixed")
    saved_llama(top / "target", 5, intermediate_size=64)
    saved_llama(top / "draft", 6, intermediate_size=64)
    return top / "target", top / "draft"


@pytest.fixture(scope="module")
def files(folders: tuple[Path, Path]) -> tuple[Path, Path]:
    """The same as GGUF files."""
    pytest.importorskip("gguf", reason=NO_GGUF)
    return converted(folders[0], "q8_0"), converted(folders[1], "q8_0")


def greedy(pair: sprinter.Pair, method: str) -> list[list[int]]:
    outs = pair.generate_batch(PROMPTS, method=method, temperature=0.0, max_new_tokens=10)
    return [[token.id for token in out.tokens] for out in outs]


def check(pair: sprinter.Pair) -> None:
    """Exact drafts of either model leave the target's text as it is, whatever rounds the draft's laws."""
    plain = greedy(pair, "autoregressive")
    assert all(plain) and greedy(pair, "speculative(gamma=3)") == plain == greedy(pair, "svip")


def test_a_draft_of_fewer_bits(folders: tuple[Path, Path]) -> None:
    pair = sprinter.load_pair(*folders, dtype="float32", draft_dtype="int8", device="cpu")
    target, draft = pair.models.target, pair.models.draft
    assert draft is not None and (target.quantised, draft.quantised) == (None, "int8")
    assert target.weights == "float32" and "int8" in draft.weights
    check(pair)
    same = sprinter.load_pair(*folders, dtype="bfloat16", draft_dtype="float32", device="cpu")
    assert same.models.draft is not None
    assert (same.models.target.model.dtype, same.models.draft.model.dtype) == (torch.bfloat16, torch.float32)


def test_blocks_of_a_file_and_a_draft_of_a_folder(
    files: tuple[Path, Path], folders: tuple[Path, Path]
) -> None:
    """dtype gguf is refused for a folder, but not where the draft has a dtype of its own."""
    with pytest.raises(UserError, match="dtype gguf is for GGUF files"):
        sprinter.load_pair(files[0], folders[1], dtype="gguf", device="cpu")
    pair = sprinter.load_pair(files[0], folders[1], dtype="gguf", draft_dtype="int8", device="cpu")
    assert pair.models.draft is not None
    assert (pair.models.target.quantised, pair.models.draft.quantised) == ("gguf", "int8")
    check(pair)


def test_another_runner_for_a_folder_changes_no_dtype(folders: tuple[Path, Path]) -> None:
    for dtype in ("int8", "float64"):
        pair = sprinter.load_pair(*folders, dtype=dtype, draft_runner="torch", device="cpu")
        assert pair.models.draft is not None and pair.models.draft.weights == pair.models.target.weights


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        ({"draft_dtype": "int8"}, None, "int8"),
        ({"runner": "llamacpp", "draft_runner": "torch"}, None, ""),
        ({"runner": "torch", "dtype": "gguf", "draft_runner": "llamacpp"}, "gguf", None),
        ({"runner": "torch", "dtype": "int8", "draft_runner": "auto"}, "int8", None),
        ({"dtype": "gguf", "draft_runner": "llamacpp"}, "gguf", None),
    ],
    ids=str,
)
def test_one_model_through_llama_cpp(
    options: dict[str, Any], target: str | None, draft: str | None, files: tuple[Path, Path]
) -> None:
    """None: llama.cpp runs it; "": PyTorch, in a dtype of its own."""
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    pair = sprinter.load_pair(*files, device="cpu", **options)
    assert pair.models.draft is not None
    for own, wanted in ((pair.models.target, target), (pair.models.draft, draft)):
        assert isinstance(own.model, GgufModel) == (wanted is None)
        assert (own.quantised or "") == (wanted or "")
    check(pair)


def test_a_folder_is_converted_for_its_own_runner(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path))
    pair = sprinter.load_pair(
        *folders, dtype="float32", draft_runner="llamacpp", draft_dtype="q8_0", device="cpu"
    )
    assert pair.models.draft is not None and pair.models.target.model.dtype == torch.float32
    assert isinstance(pair.models.draft.model, GgufModel) and "Q8_0" in pair.models.draft.weights
    check(pair)


def test_what_is_refused(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        ({"draft_runner": "vllm"}, "there is no runner 'vllm'"),
        ({"draft_dtype": "int9"}, "int9"),
        ({"draft_dtype": "int8", "attn_implementation": "eager"}, "leave attn_implementation out"),
        ({"draft_dtype": "gguf"}, "dtype gguf is for GGUF files, and"),
    ):
        with pytest.raises(UserError, match=message):
            sprinter.load_pair(*folders, device="cpu", **options)
    for options in ({"draft_runner": "torch"}, {"draft_dtype": "int8"}):
        with pytest.raises(UserError, match="was given without a draft"):
            sprinter.load_pair(folders[0], device="cpu", **options)
    asked = ["generate", "x", "--target", str(folders[0]), "--draft-dtype", "int8"]
    assert (
        main(asked) != 0 and "--draft-dtype int8 is of a draft: give --draft too" in capsys.readouterr().err
    )


def test_the_command_line(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
    target, draft = map(str, folders)
    asked = [
        "generate",
        "the",
        "--target",
        target,
        "--draft",
        draft,
        "--dtype",
        "float32",
        "--draft-dtype",
        "int8",
    ]
    assert main([*asked, "--device", "cpu", "--max-new-tokens", "4", "--method", "svip", "--json"]) == 0
    assert '"int8' in capsys.readouterr().out, "the record names the draft's weights"


def test_labels_know_the_drafts_dtype(tmp_path: Path) -> None:
    """A run does not go on from labels of another draft dtype, and Ray's workers cannot load such a pair."""
    paths = builtin_paths()
    both = (paths["target"], paths["draft"])
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"The river {i} rises in the hills and runs to the sea.\n" for i in range(6)))
    settings = LabelSettings(new_tokens=4)
    plain = sprinter.load_pair(*both, device="cpu")
    mixed = sprinter.load_pair(*both, draft_dtype="int8", device="cpu")
    label(plain, [texts], tmp_path / "labels", settings)
    with pytest.raises(UserError, match=r"dtype=float32 \(now float32, draft int8\)"):
        label(mixed, [texts], tmp_path / "labels", settings)
    with pytest.raises(UserError, match="workers of engine=ray load both models in one way"):
        label(mixed, [texts], tmp_path / "other", settings, engine="ray")
