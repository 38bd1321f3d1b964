"""A draft whose output layer knows a part of the vocabulary: its law, the texts of exact methods, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_files import NO_GGUF, byte_tokenizer, converted, saved_llama
from tests.models.refused import refusal

import sprinter
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.pair import load_models
from sprinter.models.reduced_vocab import VOCABULARY_FORMAT, CutHead, kept_tokens
from sprinter.training.drafts.vocabulary import choose_vocabulary

KEPT = 40
TEXT = torch.arange(1, 30)[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that often agrees with it."""
    place = tmp_path_factory.mktemp("pair")
    target = saved_llama(place / "target")
    draft = saved_llama(place / "draft")
    with torch.no_grad():
        chance = torch.Generator().manual_seed(3)
        for weights in draft.parameters():
            weights += 0.05 * weights.std() * torch.randn(weights.shape, generator=chance)
    draft.save_pretrained(place / "draft")
    assert any(not torch.equal(a, b) for a, b in zip(target.parameters(), draft.parameters(), strict=True))
    return place / "target", place / "draft"


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(TEXT % model.config.vocab_size, use_cache=False).logits
    return found


def check_cut(whole: Any, cut: Any, count: int) -> None:
    """The same logits for the tokens that are kept, probability 0 for all others, the same fingerprint."""
    head = cut.model.get_output_embeddings()
    assert isinstance(head, CutHead) and len(head.ids) == count and set(cut.eos_ids) <= set(head.ids.tolist())
    full, found = logits(whole.model), logits(cut.model)
    torch.testing.assert_close(found[..., head.ids], full[..., head.ids], rtol=0, atol=1e-5)
    outside = torch.ones(full.shape[-1], dtype=torch.bool)
    outside[head.ids] = False
    assert outside.any() and (found.softmax(-1)[..., outside] == 0).all()
    assert cut.vocab_size == whole.vocab_size
    assert weights_fingerprint(cut.model) == weights_fingerprint(whole.model), "a gate of the draft fits"
    assert cut.words.startswith(f"{count}:") and whole.words is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_draft_that_is_loaded_with_fewer_tokens(folders: tuple[Path, Path], dtype: str) -> None:
    whole, cut = (load_models(*folders, dtype=dtype, draft_vocabulary=given).draft for given in (None, KEPT))
    check_cut(whole, cut, KEPT)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["gguf", "float32", "int8", "int4"])
def test_a_gguf_file_is_cut_as_it_is_stored(tmp_path: Path, dtype: str, tied: bool) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    saved_llama(tmp_path / "m", tie_word_embeddings=tied, intermediate_size=96)
    file = converted(tmp_path / "m", "q8_0")
    whole, cut = (
        load_models(file, file, dtype=dtype, dequantise=True, draft_vocabulary=given).draft
        for given in (None, KEPT)
    )
    check_cut(whole, cut, KEPT)


def test_exact_methods_write_the_targets_texts(folders: tuple[Path, Path]) -> None:
    pair = sprinter.load_pair(*folders, draft_vocabulary=KEPT)
    plain = pair.generate("the", method="autoregressive", temperature=0.0, max_new_tokens=60)
    head: Any = pair.models.draft.model.get_output_embeddings()  # type: ignore[union-attr,operator]
    ids = [token.id for token in plain.tokens]
    assert not set(ids) <= set(head.ids.tolist()), "the target writes tokens that the draft cannot"
    for method in ("speculative(gamma=4)", "svip", "block(gamma=3)", "tree(expand=3, depth=3, nodes=9)"):
        made = pair.generate("the", method=method, temperature=0.0, max_new_tokens=60)
        assert [token.id for token in made.tokens] == ids, method
        assert made.stats.target_calls < len(ids), f"{method}: nothing was accepted"


def test_tokens_by_number_by_ids_and_from_a_file(tmp_path: Path) -> None:
    assert kept_tokens(5, 100, (90, 91)).tolist() == [0, 1, 2, 90, 91]
    assert kept_tokens([3, 8], 100, (90,)).tolist() == [3, 8]
    file = tmp_path / "ids.json"
    file.write_text(json.dumps({"format": VOCABULARY_FORMAT, "ids": [1, 7, 9]}))
    assert kept_tokens(str(file), 100, ()).tolist() == [1, 7, 9]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "from 2 to"),
        (True, "from 2 to"),
        (10**6, "from 2 to"),
        ([5, 3], "ascending order"),
        ([3, 3], "ascending order"),
        ([3, 10**6], "not all ids from 0 to"),
        ([-1, 3], "not all ids from 0 to"),
        ([1.5, 2.5], "not all ids from 0 to"),
        ([False, True], "not all ids from 0 to"),
        (["1", "2"], "not all ids from 0 to"),
        (32768.0, "from 2 to"),
        (-5, "from 2 to"),
        ("missing.json", "cannot be read"),
        ("other.json", "sprinter draft vocabulary"),
    ],
)
def test_what_is_no_vocabulary(folders: tuple[Path, Path], tmp_path: Path, given: Any, said: str) -> None:
    (tmp_path / "other.json").write_text('{"ids": [1, 2]}')
    given = tmp_path / given if isinstance(given, str) else given
    assert said in refusal(*folders, draft_vocabulary=given)


def test_a_gguf_draft_is_refused_with_the_same_line(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    saved_llama(tmp_path / "m", intermediate_size=96)
    file = converted(tmp_path / "m", "q8_0")
    said = refusal(file, file, dtype="gguf", dequantise=True, draft_vocabulary=tmp_path / "missing.json")
    assert "cannot be read" in said and "llamacpp" not in said


def test_padding_is_never_kept(folders: tuple[Path, Path]) -> None:
    words = len(byte_tokenizer())
    draft = load_models(*folders, draft_vocabulary=words).draft
    assert draft is not None and draft.vocab_size > words
    assert draft.words is not None and draft.words.startswith(f"{words}:")
    assert f"from 2 to {words}" in refusal(*folders, draft_vocabulary=words + 1)


def test_a_draft_that_cannot_be_cut(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    assert "without a draft" in refusal(target, draft_vocabulary=KEPT)
    loaded = load_models(target, draft).draft
    assert loaded is not None
    assert "in memory" in refusal(target, loaded.model, draft_vocabulary=KEPT)
    assert "device_map" in refusal(target, draft, draft_vocabulary=KEPT, device_map="cpu")


def test_the_most_frequent_tokens_of_texts(tmp_path: Path) -> None:
    saved_llama(tmp_path / "m")
    models, words = load_models(tmp_path / "m"), byte_tokenizer()
    records = [{"prompt": "zzzz", "answer": "abab"} for _ in range(30)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    ends = len(models.target.eos_ids)
    facts = choose_vocabulary(models, [str(tmp_path / "data.jsonl")], ends + 2, tmp_path / "ids.json")
    ids = kept_tokens(tmp_path / "ids.json", models.vocab_size, ())
    assert {*words.encode("ab", add_special_tokens=False)} | {*models.target.eos_ids} == {*ids.tolist()}
    assert facts["covered"][str(ends + 2)] == 1.0 and facts["texts"] == 30
    (tmp_path / "few.txt").write_text("one\ntwo\n")
    with pytest.raises(UserError, match="too few"):
        choose_vocabulary(models, [str(tmp_path / "few.txt")], ends + 2, tmp_path / "x.json")
    with pytest.raises(UserError, match="give a number of tokens from"):
        choose_vocabulary(models, [], 0, tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()
