"""What heads share with targets of other families and dtypes, and what they are shown of them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_draft_heads import PROMPT, ids
from tests.heads.test_eagle import eagle, published, write
from tests.heads.test_medusa import medusa
from tests.models.tiny import tiny, word_tokenizer
from tests.training.drafting import saved_target, texts, tiny_target
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

import sprinter
from sprinter.bench.environment import pair_facts
from sprinter.errors import UserError
from sprinter.heads import drafting
from sprinter.heads.drafting import OutputLayer, save_heads
from sprinter.heads.eagle import EagleHeads
from sprinter.heads.load import load_any_head
from sprinter.models.kernels import is_quantised, quantise_linears
from sprinter.models.pair import load_models
from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.eagle import EagleLearner, fresh_eagle
from sprinter.training.drafts.eagle3 import Eagle3Learner, fresh_eagle3
from sprinter.training.drafts.folder import training_key
from sprinter.training.drafts.glide import fresh_glide
from sprinter.training.drafts.medusa import fresh_medusa
from sprinter.training.drafts.settings import HeadSettings, TrainingSettings

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "initializer_range": 0.6, "pad_token_id": 0,
}  # fmt: skip
CHANGED = {
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0)),
}


@pytest.mark.parametrize("family", CHANGED)
@torch.no_grad()
def test_logits_of_shared_output_layers_are_the_targets(family: str) -> None:
    torch.manual_seed(0)
    target: Any = CHANGED[family]().eval()
    tokens = torch.randint(1, 61, (1, 9))
    wanted = target(tokens).logits
    states = target.model(tokens).last_hidden_state
    torch.testing.assert_close(OutputLayer(target, 61)(states), wanted)
    assert not torch.allclose(target.get_output_embeddings()(states), wanted, rtol=0.05)
    for shared in (True, False):
        if family == "gemma2" and not shared:
            continue  # layers of their own cannot bound what they make
        heads = fresh_medusa(target, HeadSettings(heads=2, share_output=shared), "t", "f")
        torch.testing.assert_close(heads.head_logits(1, states), wanted)


def test_rotary_frequencies_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "dtype_beside", lambda weight: torch.bfloat16)
    heads = eagle()
    before = heads.rotary.inv_freq.clone()  # type: ignore[operator]
    heads.join(tiny("llama"))
    assert heads.fc.weight.dtype == torch.bfloat16
    assert torch.equal(heads.rotary.inv_freq, before)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method",
    ["trust=coin(rate=1.0),drafter=heads,cap=80", "trust=coin(rate=0.999),stop=never,drafter=heads,cap=none"],
)
def test_the_meter_changes_no_text(method: str) -> None:
    """A closing pass reads trusted tokens before the method would: their states must not reach the heads."""
    heads = eagle()
    with torch.no_grad():
        for value in heads.parameters():
            value.mul_(0.3)  # its outputs must not grow along a run
    pair = sprinter.load_pair(tiny("llama"), tokenizer=word_tokenizer(), heads=[heads], compile=False)
    for seed in range(1, 4):
        running, complete = (
            pair.generate(PROMPT, method=method, max_new_tokens=85, min_new_tokens=85, seed=seed, meter=meter)
            for meter in ("running", "complete")
        )
        assert complete.stats.closing_passes > running.stats.closing_passes
        assert ids(running) == ids(complete)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_texts_shorter_than_the_steps_of_training(kind: str) -> None:
    target, shape = tiny_target(), HeadSettings(kind=kind)  # type: ignore[arg-type]
    learner: Any
    if kind == "eagle":
        learner = EagleLearner(fresh_eagle(target, shape, "t", "f"), target, 0.8, 1.0, 4)
    else:
        learner = Eagle3Learner(fresh_eagle3(target, shape, "t", "f", None), target, 0.8, 1.0, 4)
    whole = texts(target, 1).texts[0]
    laws = {"top_ids": whole.top_ids[:2], "top_probs": whole.top_probs[:2]}
    short = replace(whole, ids=whole.ids[4:7], prompt=1, **laws)
    found = [len(logits) for logits, *_ in learner.outputs(collate([short]))]
    assert found == [1, 0, 0, 0]


def test_glide_begins_as_the_layer_of_the_target_with_its_biases() -> None:
    target: Any = tiny("qwen2")
    target = deepcopy(target)
    own = target.model.layers[-1].self_attn
    torch.nn.init.normal_(own.q_proj.bias)
    heads = fresh_glide(target, HeadSettings(kind="glide"), "t", "f")
    assert torch.equal(heads.cross_attn.q_proj.bias, own.q_proj.bias)
    others = [
        value
        for name, value in heads.named_parameters()
        if name.endswith("bias") and "cross_attn.q_proj" not in name
    ]
    assert others and all(not value.any() for value in others)


def test_threads_checkpoints_and_kept_states_begin_no_other_training() -> None:
    some = texts(tiny_target(), 1)
    key = training_key(some, HeadSettings(), TrainingSettings())
    for shape, training in (
        (HeadSettings(), TrainingSettings(threads=1)),
        (HeadSettings(), TrainingSettings(checkpoint=7)),
        (HeadSettings(keep_states=False), TrainingSettings()),
    ):
        assert training_key(some, shape, training) == key
    assert training_key(some, HeadSettings(), TrainingSettings(lr=2e-3)) != key


def test_the_folder_of_a_training_keeps_the_name_that_earlier_versions_gave_it() -> None:
    shaping = TrainingSettings(loss_temperature=0.5).shaping()
    assert shaping["temperature"] == 0.5
    assert "loss_temperature" not in shaping


def test_eagle_3_of_its_authors_is_named(tmp_path: Path) -> None:
    config, weights = published(tmp_path)
    write(tmp_path, {**config, "draft_vocab_size": 32}, weights)
    with pytest.raises(UserError, match="holds an EAGLE-3 head as its authors publish it: convert it"):
        load_any_head(tmp_path)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "glide", "medusa"])
@torch.no_grad()
def test_heads_beside_a_quantised_target_have_8_bits(kind: str, tmp_path: Path) -> None:
    """Nearly the same laws; the fingerprint and the FLOPs that they had; greedy texts of plain decoding."""
    target = load_models(saved_target(tmp_path / "target"), device="cpu")
    shape = HeadSettings(kind=kind, heads=3)  # type: ignore[arg-type]
    weights: Any = target.target.model
    made: Any = {
        "eagle": lambda: fresh_eagle(weights, shape, "t", None),  # type: ignore[arg-type]
        "eagle3": lambda: fresh_eagle3(weights, shape, "t", None, None),  # type: ignore[arg-type]
        "glide": lambda: fresh_glide(weights, shape, "t", None),  # type: ignore[arg-type]
        "medusa": lambda: fresh_medusa(weights, shape, "t", None),  # type: ignore[arg-type]
    }[kind]()
    save_heads(made, tmp_path / "heads", "card")
    pairs = [
        sprinter.load_pair(
            tmp_path / "target", heads=[tmp_path / "heads"], dtype=dtype, device="cpu", compile=False
        )
        for dtype in ("float32", "int8")
    ]
    plain, quantised = (pair.drafting for pair in pairs)
    assert plain is not None and quantised is not None
    assert not is_quantised(plain) and is_quantised(quantised)
    assert not [part for part in quantised.modules() if type(part) is torch.nn.Linear]
    assert plain.fingerprint == quantised.fingerprint and plain.flops == quantised.flops
    assert pairs[1].generate(PROMPT, max_new_tokens=4).models["heads"][0]["dtype"] == "int8"
    laws = []
    for pair, heads in zip(pairs, (plain, quantised), strict=True):
        model: Any = pair.models.target.model
        ids_ = torch.tensor([PROMPT])
        states = model(ids_, output_hidden_states=True)
        own = model.model(ids_).last_hidden_state[0]
        every = {layer: own if layer == -1 else states.hidden_states[layer + 1][0] for layer in heads.layers}
        text = heads.begin()
        text.read(PROMPT, {layer: one[:-1] for layer, one in every.items()})
        laws.append(torch.cat([text.logits([()]), text.logits([(3,)])]).softmax(-1))  # type: ignore[list-item]
    assert 0 < float((laws[0] - laws[1]).abs().sum(-1).max()) / 2 < 0.05
    for pair in pairs[1:]:
        wanted = pair.generate(PROMPT, method="autoregressive", max_new_tokens=24, temperature=0.0)
        assert ids(pair.generate(PROMPT, method="heads(gamma=2)", max_new_tokens=24, temperature=0.0)) == ids(
            wanted
        )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_vocabulary_of_heads(dtype: str, tmp_path: Path) -> None:
    """They draft its tokens alone, with the logits that they had; exact methods stay exact."""
    saved_target(tmp_path / "target")
    weights: Any = load_models(tmp_path / "target", device="cpu").target.model
    save_heads(fresh_eagle(weights, HeadSettings(kind="eagle"), "t", None), tmp_path / "heads", "card")  # type: ignore[arg-type]

    def load(**more: Any) -> sprinter.Pair:
        heads = [tmp_path / "heads"]
        return sprinter.load_pair(
            tmp_path / "target", heads=heads, dtype=dtype, device="cpu", compile=False, **more
        )

    whole, cut = load(), load(draft_vocabulary=100)
    assert whole.drafting is not None and cut.drafting is not None
    assert whole.drafting.output is not None and cut.drafting.output is not None
    kept = cut.drafting.output.ids
    assert kept is not None and len(kept) == 100
    assert set(cut.models.target.eos_ids) <= set(kept.tolist())
    x = torch.randn(3, whole.drafting.hidden_size, generator=torch.Generator().manual_seed(0))
    every, some = whole.drafting.output(x), cut.drafting.output(x)
    assert some.shape == every.shape and int(torch.isfinite(some).sum()) == 300
    torch.testing.assert_close(
        some[:, kept], every[:, kept], atol=0.02 if dtype == "int8" else 1e-5, rtol=0.02
    )
    assert cut.drafting.flops < whole.drafting.flops
    out = cut.generate(PROMPT, method="heads", max_new_tokens=24, temperature=0.0)
    assert out.models["heads"][0]["draft_vocabulary"].startswith("100:")
    assert ids(out) == ids(
        whole.generate(PROMPT, method="autoregressive", max_new_tokens=24, temperature=0.0)
    )
    with pytest.raises(UserError, match="give a number of tokens from"):
        load(draft_vocabulary=10**6)


def test_vocabularies_that_nothing_can_use_are_refused(tmp_path: Path) -> None:
    for heads, message in (
        ([medusa(3)], "not for these medusa heads, which have an output layer of their own"),
        ([], "draft_vocabulary was given without a draft: give draft="),
    ):
        with pytest.raises(UserError, match=message):
            sprinter.load_pair(
                tiny("llama"), tokenizer=word_tokenizer(), heads=heads, draft_vocabulary=30, compile=False
            )


def test_heads_that_were_changed_for_a_pair_are_not_given_to_another(tmp_path: Path) -> None:
    saved_target(tmp_path / "target")
    models = {
        dtype: load_models(tmp_path / "target", device="cpu", dtype=dtype) for dtype in ("float32", "int8")
    }
    target: Any = models["float32"].target.model

    def fresh() -> EagleHeads:
        return fresh_eagle(target, HeadSettings(kind="eagle"), "t", None)  # type: ignore[arg-type]

    heads = fresh()
    first = sprinter.Pair(models["int8"], heads=[heads])
    sprinter.Pair(models["int8"], heads=[heads])  # the same target
    with pytest.raises(UserError, match="eagle heads draft for another pair, with the whole vocabulary"):
        sprinter.Pair(models["int8"], heads=[heads], draft_vocabulary=30)
    del first
    with pytest.raises(UserError, match="eagle heads have 8 bits, for another pair: reload them"):
        sprinter.Pair(models["float32"], heads=[heads])
    heads = fresh()
    sprinter.Pair(models["float32"], heads=[heads], draft_vocabulary=30)
    with pytest.raises(UserError, match="eagle heads draft a part of the vocabulary, for another pair"):
        sprinter.Pair(models["float32"], heads=[heads])
    facts = pair_facts(sprinter.Pair(models["int8"], heads=[fresh()], draft_vocabulary=40))["eagle"]
    assert facts["dtype"] == "int8" and facts["draft_vocabulary"].startswith("40:")
    assert facts["parameters"] == sum(value.numel() for value in fresh().parameters())


def test_a_rounding_that_fails_changes_nothing() -> None:
    heads = eagle()
    with torch.no_grad():
        heads.blocks[0].self_attn.o_proj.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="layer o_proj of EagleHeads cannot be quantised"):
        quantise_linears(heads)
    assert not is_quantised(heads)
