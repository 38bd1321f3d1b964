"""Heads of ours in speculators' own models, and theirs in our engine: configurations, tensors, laws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

pytest.importorskip("speculators", exc_type=ImportError)
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core as dflash_core
from speculators.models.peagle import core as peagle_core

from sprinter.errors import UserError
from sprinter.heads.dflash import DFlashHeads
from sprinter.heads.drafting import TokenHeads, save_heads
from sprinter.heads.eagle3 import Eagle3Heads, ParallelHeads
from sprinter.heads.load import load_any_head
from sprinter.training.drafts.states import states_of
from sprinter.training.drafts.student import layer_config

VOCAB, SIZE, MASK, COUNT = 24, 32, 23, 3
KEPT = torch.arange(0, VOCAB, 2)
TEXT = torch.tensor([5, 9, 2, 20, 7, 7, 11, 8, 1, 12, 3, 4])
KINDS = ("eagle3", 1), ("peagle", 1), ("peagle", 3), ("dflash", 2)
"""Kinds of heads, and numbers of their layers."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    """A random model, saved."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


def ours(kind: str, layers: int, target: LlamaForCausalLM, kept: Tensor = KEPT) -> TokenHeads:
    """A random head on the target."""
    config, about = layer_config(target), {"target_id": target.config._name_or_path}
    config.num_hidden_layers = layers
    if kind == "dflash":
        made: Any = DFlashHeads(config, (0, 2), COUNT, MASK, **about)
    elif kind == "peagle":
        made = ParallelHeads(config, None, len(kept), COUNT, MASK, **about)
    else:
        made = Eagle3Heads(config, None, len(kept), **about)
    chance = torch.Generator().manual_seed(1)
    for value in made.parameters():
        drawn = torch.randn(value.shape, generator=chance) * 0.3 + float(value.ndim == 1)
        value.data = drawn.bfloat16().float()  # as files have them
    if kind != "dflash":
        made.keep(kept)
    made.join(target)
    return made.requires_grad_(False)  # type: ignore[no-any-return]


def theirs(folder: Path) -> Any:
    """Speculators' model of a folder, with attention that needs no compiler."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    # It loads the target's embedding where its own is NaN, which later releases of transformers do not keep.
    model._load_verifier_weights(overwrite_embed_tokens=True)
    return model


def drafted(heads: TokenHeads, target: LlamaForCausalLM, length: int, depth: int) -> Tensor:
    """Our logits of the token at a depth after a text."""
    states = states_of(target, heads.layers, TEXT[None, : length - 1])
    text = heads.begin()
    text.read(TEXT[:length].tolist(), dict(zip(heads.layers, [one[0] for one in states], strict=True)))
    found = text.logits([(1, 2, 3)[:depth]])
    assert found is not None
    return found[0]


@torch.no_grad()
def laws_of(
    kind: str, model: Any, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> dict[Any, Tensor]:
    """(length of the text, depth) -> their logits, by the pass that trains their model."""
    hidden = target(TEXT[None], output_hidden_states=True).hidden_states
    joined = torch.cat([hidden[layer] for layer in model.target_layer_ids], -1)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: seen.append(out[0]))
    asked: dict[str, Any] = {"document_ids": torch.zeros(1, len(TEXT) - 1, dtype=torch.long)}
    if kind == "eagle3":
        model(joined[:, :-1], TEXT[None, 1:], ttt_steps=1, **asked)
        return {(entry + 2, 0): logits for entry, logits in enumerate(seen[0])}
    more = {"verifier_last_hidden_states": hidden[-1][:, :-1], "loss_config": None, **asked}
    at: list[tuple[Tensor, Tensor]] = []

    def kept(module: Any, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **named: at.append(real(*given, **named)) or at[-1])

    monkeypatch.setattr(peagle_core, "compute_metrics", lambda **given: (None, None))
    monkeypatch.setattr(dflash_core, "compute_metrics", lambda *given, **named: (None, None))
    if kind == "peagle":
        kept(peagle_core, "generate_cod_sample_indices")
        every = {"num_depths": COUNT, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
        model(joined[:, :-1], TEXT[None, 1:], **more, **every)
        places = zip(*(one.tolist() for one in at[0]), strict=True)
        return {(anchor + 2, depth): out for (anchor, depth), out in zip(places, seen[0], strict=True)}
    kept(dflash_core, "select_anchors")
    asked["document_ids"] = torch.zeros(1, len(TEXT), dtype=torch.long)
    model(joined, TEXT[None], torch.ones(1, len(TEXT)), hidden[-1], asked["document_ids"], max_anchors=6)
    anchors, valid = at[0]
    blocks = seen[0].unflatten(0, (-1, COUNT + 1))
    return {
        (anchor + 1, depth): blocks[n, depth + 1]
        for n, anchor in enumerate(anchors.tolist()) if valid[n] and anchor
        for depth in range(COUNT)
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "layers"), KINDS)
def test_the_laws_of_our_files_in_their_models(
    kind: str, layers: int, target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = ours(kind, layers, target)
    save_heads(heads, tmp_path, "card")
    model = theirs(tmp_path)
    found = laws_of(kind, model, target, monkeypatch)
    assert {depth for _, depth in found} == set(range(1 if kind == "eagle3" else COUNT)) and len(found) > 5
    for (length, depth), logits in found.items():
        if length < 2 or length + depth > len(TEXT):
            continue  # not in the text
        wanted = drafted(heads, target, length, depth)
        wanted = wanted if kind == "dflash" else wanted[KEPT]
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("kind", "layers"), KINDS)
def test_what_their_classes_write_is_read(
    kind: str, layers: int, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    """The same head after their round trip; their configuration has no field that ours lacks."""
    heads = ours(kind, layers, target)
    save_heads(heads, tmp_path / "ours", "card")
    config = SpeculatorModelConfig.from_pretrained(tmp_path / "ours")
    own = type(config).model_fields.keys() - PreTrainedConfig.__annotations__.keys()
    assert own <= json.loads((tmp_path / "ours" / "config.json").read_text()).keys()
    theirs(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert written["speculators_version"] == "0.9.0" and written["speculators_model_type"] == kind
    with pytest.raises(UserError, match='remove "sha256" from'):
        load_any_head(tmp_path / "theirs")  # they keep the checksum of our file
    del written["sha256"]
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(written))
    again = load_any_head(tmp_path / "theirs")
    assert type(again) is type(heads)
    again.join(target)
    for length in (3, 7):
        for depth in range(1 if kind == "eagle3" else COUNT):
            own, other = (drafted(one, target, length, depth) for one in (heads, again))
            torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-3)
