"""What a student starts from: the target, or a smaller model, with its tokenizer or another; what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.gguf_files import saved_llama, tiny_llama
from tests.models.test_translated import byte_level
from tests.models.tiny import save
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from transformers import (
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import sprinter
from sprinter.errors import UserError
from sprinter.models.common_tokens import CommonTokens, words_of
from sprinter.training.drafts.data import Texts, write_texts
from sprinter.training.drafts.distill import distill, fresh_student
from sprinter.training.drafts.settings import StudentSettings, TextSettings
from sprinter.training.drafts.student import influential, make_student, save_student, spaced, transplanted
from sprinter.training.drafts.train import settle_scale

TEXTS = TextSettings(new_tokens=10, prompt_tokens=16, shard=10, held_out=0.2, top=24)


@pytest.fixture(scope="module")
def written(pair: sprinter.Pair, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return write_texts(pair, [data], tmp_path_factory.mktemp("texts"), TEXTS)


@pytest.fixture
def weights(pair: sprinter.Pair) -> PreTrainedModel:
    return pair.models.target.module("a test")


def test_a_student_starts_from_a_smaller_model(
    pair: sprinter.Pair, weights: PreTrainedModel, written: Texts, tmp_path: Path
) -> None:
    smaller = saved_llama(tmp_path / "smaller", 5, num_hidden_layers=3)
    start = StudentSettings(layers=3, start=str(tmp_path / "smaller"))
    ids = torch.arange(20)[None]
    logits = fresh_student(pair, weights, written, start).eval()(ids).logits
    own = smaller.eval()(ids).logits  # that student's are scaled by one number, to suit the texts
    torch.testing.assert_close(logits * (own.norm() / logits.norm()), own, atol=1e-3, rtol=1e-3)


def test_a_student_starts_from_a_model_of_another_vocabulary(
    pair: sprinter.Pair, weights: PreTrainedModel, written: Texts, tmp_path: Path
) -> None:
    assert pair.tokenizer is not None
    foreign = byte_level("in", "ing", "Ġth", "Ġquick", end="<stop>")
    padding = len(foreign) - 1
    assert padding >= pair.models.vocab_size, "an id that the student's table does not have"
    other = tiny_llama(7, vocab_size=len(foreign), pad_token_id=padding)
    save(tmp_path / "other", other, foreign)
    student = fresh_student(
        pair, weights, written, StudentSettings(layers=2, start=str(tmp_path / "other"))
    ).eval()
    assert student.config.bos_token_id == weights.config.bos_token_id
    ours, theirs = words_of(pair.tokenizer), words_of(foreign)
    assert ours is not None and theirs is not None
    tokens, table = CommonTokens(ours, theirs), other.get_input_embeddings().weight
    for token in range(len(ours)):
        mean = table[list(tokens.read_as(token))].mean(0)
        torch.testing.assert_close(student.get_input_embeddings().weight[token], mean)
    text = foreign.encode("the cat", add_special_tokens=False)
    back = {own: one for one, own in tokens.ids.items()}
    assert set(text) <= back.keys(), "the text is of common tokens, so both models read the same states"
    common, own = map(list, zip(*tokens.ids.items(), strict=True))
    said = student(torch.tensor([[back[one] for one in text]])).logits[0][:, common]
    there = other.eval()(torch.tensor([text])).logits[0][:, own]
    torch.testing.assert_close(said * (there.norm() / said.norm()), there, atol=1e-3, rtol=1e-3)


def test_a_token_that_cannot_be_spelled_has_the_mean_of_all() -> None:
    target = {0: (False, b"a"), 1: (False, b"b"), 2: (False, b"ab"), 3: (True, b"<b>")}
    tokens = CommonTokens(target, {0: (False, b"a"), 1: (False, b"c"), 2: (False, b">")})
    assert [tokens.read_as(token) for token in range(5)] == [(0,), (0,), (0, 0), (0, 0, 2), (0,)]
    start = tiny_llama(3, vocab_size=3)
    tables = [one.weight.detach().clone() for one in (start.get_input_embeddings(), start.lm_head)]
    transplanted(start, tokens, LlamaConfig(vocab_size=5))
    for layer, table in zip((start.get_input_embeddings(), start.lm_head), tables, strict=True):
        mean = table.mean(0)
        torch.testing.assert_close(layer.weight, torch.stack([table[0], mean, table[0], table[2], mean]))


def test_a_start_with_fewer_tokens_is_given_the_others(
    pair: sprinter.Pair, weights: PreTrainedModel, written: Texts, tmp_path: Path
) -> None:
    assert pair.tokenizer is not None
    ids = pair.tokenizer.get_vocab()
    last = ids.pop("th")
    assert last == max(ids.values()) + 1
    start = tiny_llama(5, vocab_size=last)
    save(tmp_path / "fewer", start, byte_level_of(ids))
    student = fresh_student(pair, weights, written, StudentSettings(layers=2, start=str(tmp_path / "fewer")))
    table, own = student.get_input_embeddings().weight, start.get_input_embeddings().weight
    torch.testing.assert_close(table[:last], own)
    torch.testing.assert_close(table[last], own[[ids["t"], ids["h"]]].mean(0))


def byte_level_of(ids: dict[str, int]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


# --- what is refused, or said ----------------------------------------------------------------------------------------
WORDS = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))


def test_starts_that_cannot_be_used(
    pair: sprinter.Pair, weights: PreTrainedModel, written: Texts, tmp_path: Path
) -> None:
    def refused(name: str, message: str, pair: sprinter.Pair = pair) -> None:
        with pytest.raises(UserError, match=message):
            fresh_student(pair, weights, written, StudentSettings(start=str(tmp_path / name)))

    save(tmp_path / "near", tiny_llama(5), byte_level("in", end="<stop>"))
    save(tmp_path / "far", tiny_llama(5), byte_level_of({"<end>": 0, "z": 1, "y": 2}))
    save(tmp_path / "words", tiny_llama(5), WORDS)
    saved_llama(tmp_path / "short", 5, vocab_size=200)
    refused("none", "^the start directory .*none does not exist: check the path$")
    refused(
        "short", r"cannot start from '.*short': give another model \(.*, the start only 200 embedding rows"
    )
    refused("far", "whose tokenizer has less than half of a text's tokens in common")
    refused("words", "and it is neither byte-level BPE nor SentencePiece: give")
    other = sprinter.Pair(replace(pair.models, tokenizer=WORDS))
    refused("near", "and the target's is neither byte-level BPE nor SentencePiece: give", other)


def test_a_draft_of_a_reduced_vocabulary_is_no_start(
    pair: sprinter.Pair, weights: PreTrainedModel, written: Texts, tmp_path: Path
) -> None:
    assert pair.tokenizer is not None
    cut = make_student(weights, StudentSettings(layers=1, vocabulary=50), torch.arange(50))
    save_student(cut, pair.tokenizer, tmp_path / "cut", (0,))
    message = "cannot start from '.*', a draft of a reduced vocabulary: give one made without --vocabulary"
    with pytest.raises(UserError, match=message):
        fresh_student(pair, weights, written, StudentSettings(start=str(tmp_path / "cut")))
    with pytest.raises(UserError, match=message):
        fresh_student(pair, cut, written, StudentSettings())


@pytest.mark.parametrize(("wrong", "message"), [
    ({"start": "/no/such/model"}, "the start directory /no/such/model does not exist"), ({"width": 4096}, "width=4096"),
])  # fmt: skip
def test_a_mistake_is_told_before_anything_is_written_or_deleted(
    pair: sprinter.Pair, weights: PreTrainedModel, data: Path, tmp_path: Path,
    wrong: dict[str, object], message: str,
) -> None:  # fmt: skip
    write_texts(pair, [data], tmp_path / "earlier" / "texts", TEXTS)
    kept = sorted((tmp_path / "earlier").rglob("*"))
    for folder, restart in (("new", False), ("earlier", True)):
        with pytest.raises(UserError, match=message):
            distill(
                pair, weights, [data], tmp_path / folder, TEXTS, StudentSettings(**wrong), restart=restart
            )
    assert not (tmp_path / "new").exists() and sorted((tmp_path / "earlier").rglob("*")) == kept


def test_a_student_without_layers_of_its_start_is_told(
    pair: sprinter.Pair, weights: PreTrainedModel, written: Texts, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    assert pair.tokenizer is not None
    shape = {
        "vocab_size": pair.models.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "eos_token_id": 0,
    }
    qwen3 = Qwen3ForCausalLM(
        Qwen3Config(**shape, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    )
    save(tmp_path / "qwen3", qwen3, pair.tokenizer)
    student = fresh_student(pair, weights, written, StudentSettings(start=str(tmp_path / "qwen3")))
    torch.testing.assert_close(student.get_input_embeddings().weight, qwen3.get_input_embeddings().weight)
    saved_llama(tmp_path / "llama", 5)
    for settings in (StudentSettings(width=32), StudentSettings()):
        fresh_student(pair, weights, written, replace(settings, start=str(tmp_path / "llama")))
    said = [one.getMessage() for one in caplog.records if "layers start at random" in one.getMessage()]
    assert len(said) == 2, "that of the start's own width and family has its layers"
    assert "qwen3 (qwen3): layers are taken from models of llama, mistral, qwen2, at" in said[0]
    assert "llama (llama): layers" in said[1]


# --- which layers ----------------------------------------------------------------------------------------------------
def test_the_layers_of_a_student_are_the_nearer_choice(
    pair: sprinter.Pair, weights: PreTrainedModel, written: Texts, tmp_path: Path
) -> None:
    start = tiny_llama(3, vocab_size=pair.models.vocab_size, num_hidden_layers=4)
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):  # layer 2 changes no state
            start.model.layers[2].get_submodule(name).weight.zero_()
    ids = torch.arange(40).reshape(2, 20)
    assert influential(start, 3, ids) == [0, 1, 3] and spaced(start, 3) == [0, 1, 2]
    assert influential(start, 9, ids) == [0, 1, 2, 3]
    save(tmp_path / "start", start, pair.tokenizer)
    settings = StudentSettings(layers=3, start=str(tmp_path / "start"))
    found = [make_student(start, settings, None, taken) for taken in ([0, 1, 2], [0, 1, 3])]
    measured = [settle_scale(one, written.part(False), 2048, 1.0) for one in found]
    nearer = found[measured.index(min(measured))]
    student = fresh_student(pair, weights, written, settings)
    for one, two in zip(student.parameters(), nearer.parameters(), strict=True):
        torch.testing.assert_close(one, two)
