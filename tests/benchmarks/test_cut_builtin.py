"""scripts/cut_builtin.py and finish_builtin.py: a vocabulary closed under merges, a cut model that says what the whole
says, openings, texts without unknown words, weights in 8 bits."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.data import TargetText
from sprinter.training.drafts.losses import divergences

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    ("tinystories", "Once upon a time there was a little dog. The little dog had a red ball, and a friend named Tom."),
    ("tinystories", "One day Tom and the little dog went to the park. The park was big. They played with the ball."),
    ("wikipedia", "The lighthouse of the harbour stands at the mouth of the river, where the ships arrive."),
]  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("cut_builtin")


def whole_tokenizer(script: Any) -> Tokenizer:
    """Byte-level BPE that knows all words of ``TEXTS``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=["<|pad|>", script.EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text for _, text in TEXTS], trainer)
    return tokenizer


def test_a_cut_vocabulary_is_closed_under_merges_and_writes_every_text(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "VOCABULARY", 300)
    whole = whole_tokenizer(script)
    cut, ids = script.cut_tokenizer(whole, TEXTS)
    spec = json.loads(cut.to_str())["model"]
    assert len(spec["vocab"]) == len(ids) == 300 and cut.token_to_id(script.EOS) == script.EOS_ID
    assert all(whole.id_to_token(before) == cut.id_to_token(now) for now, before in enumerate(ids.tolist()))
    made = {"".join(pair) for pair in spec["merges"]} | {*pre_tokenizers.ByteLevel.alphabet(), script.EOS}
    assert made == {*spec["vocab"]}
    assert any(len(token) > 3 for token in spec["vocab"] if token != script.EOS)
    for text in ("The little dog, née 1984!\n\n", *(text for _, text in TEXTS)):
        assert cut.decode(cut.encode(text).ids) == text
    long, short = (len(one.encode(TEXTS[0][1]).ids) for one in (cut, whole))
    assert short < long < len(TEXTS[0][1])


def tiny() -> LlamaForCausalLM:
    """Three layers with random weights on 40 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_a_cut_of_all_layers_says_what_the_whole_says_of_its_tokens(script: Any) -> None:
    whole, ids = tiny(), torch.tensor([3, 5, 8, 13, 21, 34, -1])
    cut = script.cut_model(whole, ids, range(3), None).eval()
    given = torch.tensor([[0, 4, 2, 5, 5, 1]])
    expected = whole(ids[given]).logits[..., ids[:-1]]
    assert torch.allclose(cut(given).logits[..., :-1], expected, atol=1e-5)


@torch.no_grad()
def test_neurons_that_say_nothing_are_left_out(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "NEURONS", 16)
    whole, ids = tiny(), torch.arange(40)
    silent = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:32]
    for layer in whole.model.layers:
        layer.mlp.down_proj.weight[:, silent] = 0
    given = torch.arange(20)
    text = TargetText(given, 1, given[1:, None], torch.ones(19, 1), "plain")
    neurons = script.best_neurons(whole, [text])
    assert all({*kept.tolist()}.isdisjoint(silent.tolist()) for kept in neurons.values())
    cut = script.cut_model(whole, ids, (0, 1, 2), neurons).eval()
    assert cut.config.intermediate_size == 16
    assert torch.allclose(cut(given[None]).logits, whole(given[None]).logits, atol=1e-5)


def test_a_text_ends_before_its_first_unknown_word(script: Any) -> None:
    whole = whole_tokenizer(script)
    recipe = object.__new__(script.Recipe)
    recipe.plain, recipe.known = TEXTS, None
    recipe.tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token=script.EOS)

    def text(words: str) -> TargetText:
        ids = torch.tensor([*recipe.tokenizer(words)["input_ids"], whole.token_to_id(script.EOS)])
        return TargetText(ids, 2, ids[2:, None], torch.ones(len(ids) - 2, 1), "written")

    good = text("The little dog played with Tom.")
    assert (
        recipe.up_to_unknown(good) is not good
        and recipe.up_to_unknown(good).ids.tolist() == good.ids.tolist()
    )
    bad = recipe.up_to_unknown(text("The little dog played with Tomolu. The park was big."))
    assert recipe.tokenizer.decode(bad.ids) in ("The little dog played with", "The little dog played with ")
    assert len(bad.top_ids) == len(bad.top_probs) == len(bad.ids) - 2 and bad.top_ids[:, 0].equal(bad.ids[2:])


def test_a_model_in_8_bits_is_loaded_as_any_other(script: Any, tmp_path: Path) -> None:
    finish = importlib.import_module("finish_builtin")
    model = tiny()
    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    spaced = json.dumps({"model": {"vocab": {"a": 0, "é": 1}}}, indent=2)
    (tmp_path / "tokenizer.json").write_text(spaced)
    stored = sum(value.numel() for value in model.state_dict().values()) - model.lm_head.weight.numel()
    assert finish.halve(tmp_path) == stored
    packed = (tmp_path / "tokenizer.json").read_text()
    assert json.loads(packed) == json.loads(spaced) and " " not in packed
    assert (tmp_path / "model.safetensors").stat().st_size < 0.3 * size
    for dtype in (torch.float32, torch.bfloat16):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert loaded.dtype == dtype
        for (name, value), own in zip(loaded.named_parameters(), model.parameters(), strict=True):
            kind = torch.float8_e4m3fn if value.ndim == 2 else torch.bfloat16
            assert value.equal(own.to(kind).to(dtype)), name


def test_openings_have_no_place_left_open_and_differ(script: Any) -> None:
    chance = random.Random(0)
    found = [script.opening(chance, [text for _, text in TEXTS]) for _ in range(200)]
    assert len({*found}) > 80 and not any(set("{}") & {*one} for one in found)


def test_texts_with_and_without_laws_are_learnt_together(script: Any) -> None:
    plain = script.as_drawn(torch.tensor([4, 2, 7, 7, 1]))
    laws = torch.softmax(torch.randn(2, script.TOP, generator=torch.Generator().manual_seed(2)), -1)
    written = TargetText(torch.tensor([3, 5, 6]), 1, torch.arange(script.TOP).expand(2, -1), laws, "written")
    batch = collate([plain, written])
    log_q = torch.log_softmax(torch.randn(6, 40, generator=torch.Generator().manual_seed(3)), -1)
    found = divergences(log_q, batch.laws)
    assert torch.allclose(found["kl"][:4], found["ce"][:4], atol=1e-6)
    assert torch.allclose(found["tv"][:4], 1 - log_q[range(4), [2, 7, 7, 1]].exp(), atol=1e-6)
    assert not torch.allclose(found["kl"][4:], found["ce"][4:], atol=1e-2)
