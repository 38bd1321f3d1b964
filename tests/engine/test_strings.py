"""Drafts that are written as text: what they become in the target's tokens, and exact texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.test_translated import byte_level, folders
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers import models as models_
from transformers import PreTrainedTokenizerFast

import sprinter
from sprinter.decode import Method
from sprinter.decode.stop import Fixed
from sprinter.engine.strings import StringDrafter
from sprinter.errors import UserError
from sprinter.models.common_tokens import added_first, words_of

__all__ = ["folders"]


@pytest.fixture(scope="module")
def models(folders: tuple[Path, Path]) -> tuple[sprinter.Pair, sprinter.Pair]:
    target, draft = (sprinter.load_pair(one, device="cpu", dtype="float32") for one in folders)
    return target, draft


def test_what_it_writes_is_encoded_in_the_targets_tokens(
    models: tuple[sprinter.Pair, sprinter.Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = byte_level("Ġthe", "Ġlong"), byte_level("ing", "Ġth", "at", end="<stop>")
    drafter = StringDrafter(*models, steps=3)
    read: list[str] = []

    def writes(*tokens: str) -> list[int]:
        left = list(tokens)

        def logits(ids: list[int]) -> torch.Tensor:
            read.append(theirs.decode(ids))
            return torch.arange(len(theirs)) == theirs.convert_tokens_to_ids(left.pop(0))

        monkeypatch.setattr(drafter, "logits", lambda ids: logits(ids).int())
        return drafter.draft(ours.encode("a long"))

    assert ours.convert_ids_to_tokens(writes("Ġth", "e", "ing")) == ["Ġthe", "i", "n", "g"]
    assert read == ["a long", "a long th", "a long the"]
    assert writes("Ġth", "<stop>") == [*ours.encode(" th"), ours.eos_token_id], (
        "the draft's end is the target's"
    )
    assert ours.convert_ids_to_tokens(writes("Ã", "Ġ", "a")) == ["Ġ", "a"], "half a character is left out"


def sentencepiece(*words: str) -> PreTrainedTokenizerFast:
    """Single letters and words of them; puts a space before a text, and <s> where asked for special tokens."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghilnorstu", *words]
    merges = [(word[: stop - 1], word[stop - 1]) for word in words for stop in range(2, len(word) + 1)]
    merges = [pair for pair in merges if "".join(pair) in pieces]
    made = Tokenizer(
        models_.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")


def drafter_of(ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast) -> StringDrafter:
    """A drafter of tokenizers alone."""
    made = StringDrafter.__new__(StringDrafter)
    made._ours, made._theirs, made._words = ours, theirs, words_of(theirs) or {}
    made._first, made._their_first, made._ends = added_first(ours), added_first(theirs), ((9,), (0,))
    return made


@pytest.mark.parametrize("text", ["the a", "a ", "the th", "é"])
def test_a_text_goes_on_without_a_space_of_the_tokenizers_own(text: str) -> None:
    ours, theirs = sentencepiece("▁t", "▁th", "▁the"), byte_level("ing", "Ġth", end="<stop>")
    drafter, ids = drafter_of(ours, theirs), ours.encode(text)
    said = "ese é and"
    made = drafter.encoded(ids, theirs.encode(said))
    assert ours.decode([*ids, *made], skip_special_tokens=True) == text + said


def test_the_draft_reads_its_own_beginning_of_a_text_once() -> None:
    ours, theirs = byte_level("Ġthe"), sentencepiece("▁t", "▁th", "▁the")
    assert drafter_of(ours, theirs).spelled(ours.encode("a the")) == theirs.encode("a the")
    both = drafter_of(theirs, theirs)
    assert both.spelled(theirs.encode("a the")) == theirs.encode("a the")  # and not the target's as well
    assert drafter_of(theirs, ours).spelled(theirs.encode("a the")) == ours.encode("a the")


def test_nothing_is_drafted_within_a_character(models: tuple[sprinter.Pair, sprinter.Pair]) -> None:
    drafter = StringDrafter(*models)
    ids = models[0].tokenizer.encode("an é")  # type: ignore[union-attr]
    assert drafter.draft(ids) != [] and drafter.draft(ids[:-1]) == []


def test_a_long_text_gets_a_longer_row(
    models: tuple[sprinter.Pair, sprinter.Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = StringDrafter(*models)
    monkeypatch.setattr("sprinter.engine.strings._SHORT", 4)
    short = StringDrafter(*models)
    for text in ([5, 6], [5, 6, 7], [5] * 20, [5] * 9 + [6] * 30, [5] * 9):
        assert torch.allclose(short.logits(text), whole.logits(text), atol=1e-5)
    assert short._runner.max_len == 40 < whole._runner.max_len


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_texts_are_plain_decodings(
    models: tuple[sprinter.Pair, sprinter.Pair], temperature: float
) -> None:
    target, draft = models
    method = Method(stop=Fixed(6), drafter=StringDrafter(target, draft))
    prompts = [f"the thing that is {number} long" for number in range(4)]
    made = target.generate_batch(prompts, method=method, temperature=temperature, seed=3, max_new_tokens=24)
    assert sum(one.stats.drafted for one in made) > 0
    plain = target.generate_batch(prompts, method="autoregressive", temperature=0.0, max_new_tokens=24)
    assert ([one.text for one in made] == [one.text for one in plain]) is (temperature == 0)


def test_a_text_beyond_the_drafts_context_is_the_targets(models: tuple[sprinter.Pair, sprinter.Pair]) -> None:
    drafter = StringDrafter(*models)
    assert drafter.draft([5] * 200) == []
    with pytest.raises(UserError, match="steps=0 is out of range"):
        StringDrafter(*models, steps=0)
