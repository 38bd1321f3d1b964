"""Models that are refused when they are loaded, before weights are read where a config or a tokenizer shows it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.refused import refusal
from tests.models.tiny import VOCAB, fresh, padded_gpt2, save, word_tokenizer
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

import sprinter
from sprinter.models import convert, source
from sprinter.models import pair as pair_module
from sprinter.models.pair import load_models

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 96, "pad_token_id": 0,
}  # fmt: skip


def _rwkv() -> PreTrainedModel:
    return RwkvForCausalLM(RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)).eval()


def _bert(**more: Any) -> PreTrainedModel:
    return BertLMHeadModel(BertConfig(**_SIZES, **more)).eval()


def _roberta() -> PreTrainedModel:
    return RobertaForCausalLM(RobertaConfig(**_SIZES)).eval()


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading any weights fails."""

    def read(*_: object, **__: object) -> object:
        raise AssertionError("weights were read")

    monkeypatch.setattr(pair_module, "_load", read)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save(tmp_path / "target", fresh("llama"), word_tokenizer())


# --- families that cannot be served -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: fresh("mamba"), "it holds a recurrent state"),
        (_rwkv, "it holds a recurrent state"),
        (_bert, "its tokens attend to later ones, as in an encoder (is_decoder is not set in its config)"),
        (_roberta, "its tokens attend to later ones"),
    ],
)
def test_families_that_cannot_be_served_are_refused_before_their_weights_are_read(
    make: Callable[[], PreTrainedModel], why: str, tmp_path: Path, no_weights: None
) -> None:
    model = make()
    directory = save(tmp_path / "model", model, word_tokenizer())
    for origin in (model, directory):
        line = refusal(origin, tokenizer=word_tokenizer())
        assert f" cannot be served: {why}" in line and "give a decoder with attention in all layers" in line
    assert "the draft BertLMHeadModel cannot be served" in refusal(
        fresh("gpt2"), _bert(), tokenizer=word_tokenizer()
    )


def test_a_bert_that_is_a_decoder_is_served() -> None:
    pair = sprinter.load_pair(_bert(is_decoder=True), tokenizer=word_tokenizer())
    assert pair.generate([3, 4], max_new_tokens=3, temperature=0).stats.new_tokens == 3


def test_a_model_of_unknown_make_that_looks_ahead_is_refused_when_it_is_loaded() -> None:
    """Its config looks like a decoder's: a forward pass over a few tokens shows it."""
    model = fresh("opt")
    decoder = model.model.decoder
    forward = decoder.forward

    def looks_ahead(*args: Any, **given: Any) -> Any:
        out = forward(*args, **given)
        if out.last_hidden_state.shape[1] > 1:
            out.last_hidden_state = out.last_hidden_state + 0.5 * out.last_hidden_state.mean(1, keepdim=True)
        return out

    decoder.forward = looks_ahead
    line = refusal(model, tokenizer=word_tokenizer())
    assert line.startswith("OPTForCausalLM cannot be served: tried on a few tokens, the row runner differs")


def test_a_model_that_no_runner_serves_is_refused_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sprinter.models.choose._why_wrong", lambda *_: "gives nonsense")
    assert "the crop runner gives nonsense" in refusal(fresh("opt"), tokenizer=word_tokenizer())


# --- adapters ---------------------------------------------------------------------------------------------------------


class _Lora(nn.Linear):
    """A layer of PEFT's: what it adds to a linear layer is active."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class _Wrapped(nn.Module):
    """A ``PeftModel`` around a model."""

    def __init__(self, model: PreTrainedModel, is_prompt_learning: bool) -> None:
        super().__init__()
        self.model, self.active_peft_config = model, SimpleNamespace(is_prompt_learning=is_prompt_learning)

    def get_base_model(self) -> PreTrainedModel:
        return self.model


for _kind, _module in ((_Lora, "peft.tuners.lora.layer"), (_Wrapped, "peft.peft_model")):
    _kind.__module__ = _module


def _adapted() -> PreTrainedModel:
    model = fresh("llama")
    layer = _Lora(32, 48, bias=False)
    layer.weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj = layer
    return model


def test_active_adapters_are_decoded_with() -> None:
    model = _adapted()
    ids = torch.tensor([[3, 4, 5]])
    given = {"do_sample": False, "max_new_tokens": 8, "attention_mask": torch.ones_like(ids)}
    wanted = model.generate(ids, **given)[0, 3:].tolist()
    assert wanted != fresh("llama").generate(ids, **given)[0, 3:].tolist()
    for target in (model, _Wrapped(model, False)):
        pair = sprinter.load_pair(target, fresh("llama"), tokenizer=word_tokenizer())
        out = pair.generate([3, 4, 5], method="speculative(gamma=3)", max_new_tokens=8, temperature=0)
        assert [token.id for token in out.tokens] == wanted


def test_weights_elsewhere_are_refused() -> None:
    assert "has weights that are not in memory" in refusal(
        fresh("llama").to("meta"), tokenizer=word_tokenizer()
    )


def test_learned_prompts_are_refused() -> None:
    line = refusal(_Wrapped(fresh("llama"), True), tokenizer=word_tokenizer())
    assert line.startswith("the target (_Wrapped) puts learned vectors before each prompt")


@pytest.mark.parametrize("base", [True, False])
def test_folders_of_adapters_are_refused(base: bool, target: Path, tmp_path: Path) -> None:
    folder = target if base else tmp_path / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    line = refusal(folder)
    assert line.startswith(f"the target {folder} is a PEFT adapter (adapter_config.json)")
    assert "give its base, and the folder to pair.with_lora" in line and "merge_and_unload()" in line


def test_an_adapter_on_the_hub_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    fetched: list[list[str]] = []

    def fetch(name: str, *, allow_patterns: list[str], **_: object) -> str:
        fetched.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(source, "snapshot_download", fetch)
    assert "is a PEFT adapter" in refusal("org/adapter")
    assert fetched == [["config.json", "adapter_config.json"]]


# --- options that do not apply to a model in memory -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"dtype": "bfloat16"}, "dtype=bfloat16 is for models that are loaded, and GPT2LMHeadModel is in memory, in "
         "float32: call model.to(torch.bfloat16) before"),
        ({"dtype": torch.float16}, "call model.to(torch.float16) before"),
        ({"dtype": "int8"}, "dtype=int8 is for models that are loaded, and GPT2LMHeadModel is in memory, in float32: "
         "save it and give its directory"),
        ({"device_map": "auto"}, "device_map is for models that are loaded"),
    ],
)  # fmt: skip
def test_options_that_a_model_in_memory_would_ignore_are_refused(
    options: dict[str, Any], line: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sprinter.models.options.find_spec", lambda name: object())
    assert line in refusal(fresh("gpt2"), tokenizer=word_tokenizer(), **options)
    assert line in refusal(target, fresh("gpt2"), **options)


def test_a_device_that_a_model_in_memory_is_not_on_is_refused() -> None:
    model = fresh("gpt2").to("meta")
    line = refusal(model, tokenizer=word_tokenizer(), device="cpu")
    assert "device=cpu is for models that are loaded, and GPT2LMHeadModel is in memory, on meta: " in line


def test_a_model_in_memory_may_be_named_as_it_is(target: Path) -> None:
    model = fresh("gpt2").to(torch.bfloat16)
    loaded = load_models(model, tokenizer=word_tokenizer(), dtype="bf16", device="cpu")
    assert loaded.target.weights == "bfloat16"
    mixed = load_models(target, model, dtype="float64", draft_dtype="auto")
    assert mixed.draft is not None
    assert (mixed.target.weights, mixed.draft.weights) == ("float64", "bfloat16")


# --- vocabularies -----------------------------------------------------------------------------------------------------


def test_different_vocabularies_are_refused_before_weights_are_read(
    target: Path, tmp_path: Path, no_weights: None
) -> None:
    foreign = save(tmp_path / "foreign", fresh("gpt2"), word_tokenizer(first="end"))
    line = refusal(target, foreign)
    assert "the two vocabularies differ" in line
    assert "make one (`sprinter draft distill`), or give no draft (method=lookup drafts without one)" in line
    assert "in the tokenizer that was given" in refusal(target, foreign, tokenizer=target)
    unnamed = save(tmp_path / "unnamed", padded_gpt2(VOCAB + 3), None)
    assert f"the target has {VOCAB} token ids and the draft {VOCAB + 3}" in refusal(target, unnamed)
    long = word_tokenizer(VOCAB + 9)
    assert f"the target only {VOCAB} embedding rows" in refusal(target, tokenizer=long)


def test_different_vocabularies_are_refused_before_a_model_is_converted(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = save(tmp_path / "foreign", fresh("gpt2"), word_tokenizer(first="end"))
    monkeypatch.setattr(convert, "installed", lambda: None)
    monkeypatch.setattr(convert, "_converted", None)
    for ways in (("llamacpp", None), ("torch", "llamacpp")):
        with pytest.raises(sprinter.UserError, match="the two vocabularies differ"):
            convert.for_runner(ways[0], target, foreign, {}, ways[1])


def test_a_gate_that_is_not_there_is_refused_before_weights_are_read(target: Path, no_weights: None) -> None:
    with pytest.raises(sprinter.UserError, match="no-gate"):
        sprinter.load_pair(target, target, gate="./no-gate")


def test_a_draft_in_memory_is_compared_by_the_tokenizer_that_it_was_loaded_with(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its ``name_or_path`` is a directory, or a hub id whose files are in the hub's cache."""
    foreign = save(tmp_path / "foreign", fresh("gpt2"), word_tokenizer(first="end"))
    draft = fresh("gpt2")
    draft.name_or_path = str(foreign)
    assert "the two vocabularies differ" in refusal(target, draft)

    def cached(repository: str, file: str, revision: str | None) -> str | None:
        return str(foreign / file) if (repository, file) == ("org/foreign", "tokenizer.json") else None

    monkeypatch.setattr(source, "try_to_load_from_cache", cached)
    draft.name_or_path = "org/foreign"
    assert "the two vocabularies differ" in refusal(target, draft)
    assert load_models(draft).tokenizer.convert_ids_to_tokens(0) == "end"
    assert not caplog.records
    draft.name_or_path = ""
    load_models(target, draft)
    (line,) = caplog.messages
    assert line.startswith("the draft GPT2LMHeadModel comes without a tokenizer")
