"""DFlash's model: folders as z-lab and speculators lay them out, against a pass in plain PyTorch; what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import VOCAB, tiny, word_tokenizer
from torch import Tensor
from transformers import LlamaConfig

import sprinter
from sprinter.errors import UserError
from sprinter.heads.dflash import DFlashHeads
from sprinter.heads.drafting import save_heads
from sprinter.heads.load import load_any_head
from sprinter.training.drafts.states import states_of

SIZE, HEADS, KV, HEAD, WIDE, MASK, BLOCK, THETA, LAYERS = 32, 4, 2, 12, 48, 60, 4, 700.0, 2
TEXT = [5, 9, 2, 40, 7, 7, 31, 8, 1, 12]
SIGHTS: tuple[dict[str, Any], ...] = (
    {},
    {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 3},
    {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 2,
     "is_causal": False},
    {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": False, "sliding_window": None},
)  # fmt: skip


def published(ids: Sequence[int] = (0, 1), **change: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A config and weights as z-lab publishes them."""
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": BLOCK, "dtype": "bfloat16",
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(ids)}, "head_dim": HEAD, "hidden_size": SIZE,
        "intermediate_size": WIDE, "max_window_layers": 2, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV, "num_target_layers": 2, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": THETA, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": VOCAB, "max_position_embeddings": 96, **change,
    }  # fmt: skip
    shapes = {"fc.weight": (SIZE, len(ids) * SIZE), "hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,)}
    for layer in range(LAYERS):
        for name, shape in {
            "input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,), "self_attn.q_norm": (HEAD,),
            "self_attn.k_norm": (HEAD,), "self_attn.q_proj": (HEADS * HEAD, SIZE),
            "self_attn.k_proj": (KV * HEAD, SIZE), "self_attn.v_proj": (KV * HEAD, SIZE),
            "self_attn.o_proj": (SIZE, HEADS * HEAD),
            "mlp.gate_proj": (WIDE, SIZE), "mlp.up_proj": (WIDE, SIZE), "mlp.down_proj": (SIZE, WIDE),
        }.items():  # fmt: skip
            shapes[f"layers.{layer}.{name}.weight"] = shape
    chance = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(shape, generator=chance) * 0.3 + float(len(shape) == 1)
        for name, shape in shapes.items()
    }
    return config, weights


def dflash() -> DFlashHeads:
    """A random model on the tiny ones."""
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=SIZE, num_attention_heads=HEADS, num_key_value_heads=KV,
                         intermediate_size=WIDE, num_hidden_layers=LAYERS, max_position_embeddings=96)  # fmt: skip
    heads, (_, weights) = DFlashHeads(config, (0, 1), BLOCK - 1, MASK), published()
    with torch.no_grad():
        for name, value in heads.named_parameters():
            value.copy_(weights[name.replace("blocks.", "layers.")].flatten()[: value.numel()].view_as(value))
    heads.join(tiny("llama"))
    return heads.requires_grad_(False)


def write(folder: Path, config: Mapping[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Pairs (i, i + half) of ``[n, HEAD]`` as complex numbers, turned by their positions."""
    half = HEAD // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) * 2 / HEAD)
    both = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([both.real, both.imag], -1)


def reference(config: Mapping[str, Any], w: Mapping[str, Tensor], target: Any, text: Sequence[int]) -> Tensor:
    """Logits ``[BLOCK − 1, V]`` after a text, by the target's and the draft's weights alone, without a cache."""
    ids = config["dflash_config"]["target_layer_ids"]
    states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    context = normed(
        torch.cat([states[one + 1][0] for one in ids], -1) @ w["fc.weight"].T, w["hidden_norm.weight"]
    )
    x = target.get_input_embeddings().weight[[text[-1]] + [MASK] * (BLOCK - 1)]
    read = len(text) - 1
    where = torch.arange(read + BLOCK)
    for layer in range(LAYERS):
        own = {
            name.removeprefix(f"layers.{layer}."): one
            for name, one in w.items()
            if f"layers.{layer}." in name
        }
        h = normed(x, own["input_layernorm.weight"])
        both, heads = torch.cat([context, h]), []
        gap = where[read:, None] - where
        sees = torch.ones_like(gap, dtype=torch.bool)
        sliding = config.get("layer_types", ["full_attention"] * LAYERS)[layer] == "sliding_attention"
        if config.get("is_causal", sliding):
            sees &= gap >= 0
        if sliding and config["use_sliding_window"]:
            sees &= (gap < config["sliding_window"]) & (-gap < config["sliding_window"])
        for head in range(HEADS):
            q, kv = slice(head * HEAD, (head + 1) * HEAD), slice(head // 2 * HEAD, (head // 2 + 1) * HEAD)
            query = turned(
                normed(h @ own["self_attn.q_proj.weight"][q].T, own["self_attn.q_norm.weight"]), where[read:]
            )
            key = turned(
                normed(both @ own["self_attn.k_proj.weight"][kv].T, own["self_attn.k_norm.weight"]), where
            )
            scores = (query @ key.T / HEAD**0.5).masked_fill(~sees, -torch.inf)
            heads.append(scores.softmax(-1) @ (both @ own["self_attn.v_proj.weight"][kv].T))
        x = x + torch.cat(heads, -1) @ own["self_attn.o_proj.weight"].T
        h = normed(x, own["post_attention_layernorm.weight"])
        gate, up = (h @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    logits: Tensor = normed(x[1:], w["norm.weight"]) @ target.get_output_embeddings().weight.T
    return logits


@torch.no_grad()
def check(heads: DFlashHeads, config: Mapping[str, Any], weights: Mapping[str, Tensor], target: Any) -> None:
    """Laws of a text that grows, goes back and changes, from keys that are kept."""
    text, tokens = heads.begin(), 0
    for ids in (TEXT[:2], TEXT[:5], TEXT, TEXT[:4], [*TEXT[:3], 11, 12]):
        known = states_of(target, heads.layers, torch.tensor([ids[:-1]]))
        text.read(ids, dict(zip(heads.layers, [one[0] for one in known], strict=True)))
        wanted = reference(config, weights, target, ids)
        for depth in range(BLOCK - 1):
            found = text.logits([(1, 2, 3)[:depth], (4, 5, 6)[:depth]])
            assert found is not None and found.shape == (1, VOCAB)
            torch.testing.assert_close(found[0], wanted[depth], atol=2e-4, rtol=1e-3)
        assert text.logits([(1,) * (BLOCK - 1)]) is None
    tokens = (
        1 + 3 + 5 + 1 + 2 + 5 * BLOCK
    )  # states that are new, the last known one made again after a step back
    assert (text.steps, text.tokens) == (5, tokens)


def loaded(folder: Path, target: Any) -> DFlashHeads:
    heads = load_any_head(folder)
    assert isinstance(heads, DFlashHeads)
    heads.attach(target, "t", SIZE, VOCAB)
    return heads


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(("family", "ids"), [("llama", (0, 1)), ("qwen3", (1, 0)), ("llama", (0,))])
def test_the_laws_of_a_published_folder(
    family: str, ids: tuple[int, ...], sight: dict[str, Any], tmp_path: Path
) -> None:
    config, weights = published(ids, **sight)
    target = tiny(family)
    check(loaded(write(tmp_path, config, weights), target), config, weights, target)


@torch.no_grad()
def test_what_a_layer_sees_matters() -> None:
    """The sights of the test before are told apart."""
    target = tiny("llama")
    every = [published(**sight) for sight in SIGHTS]
    found = [reference(config, weights, target, TEXT) for config, weights in every]
    for i, one in enumerate(found):
        assert all(float((one - other).abs().max()) > 1e-2 for other in found[:i])


def test_speculators_folders(tmp_path: Path) -> None:
    """Its layers count from the embeddings; a copy of the target's embedding is left out."""
    config, weights = published(**SIGHTS[1])
    inner = {
        name: value
        for name, value in config.items()
        if name not in ("architectures", "dflash_config", "block_size")
    }
    theirs = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "transformer_layer_config": inner,
        "aux_hidden_state_layer_ids": [1, 2], "block_size": BLOCK, "mask_token_id": MASK, "draft_vocab_size": VOCAB,
        "speculators_config": {"verifier": {"name_or_path": "org/target"}}, "sliding_window_non_causal": False,
    }  # fmt: skip
    more = {"embed_tokens.weight": torch.zeros(VOCAB, SIZE), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    target = tiny("llama")
    heads = loaded(write(tmp_path, theirs, weights | more), target)
    assert heads.target_id == "org/target" and heads.ids == (0, 1)
    check(heads, config, weights, target)
    write(tmp_path, theirs | {"sliding_window_non_causal": True}, weights)
    check(loaded(tmp_path, target), config | {"is_causal": False}, weights, target)
    write(tmp_path, theirs | {"draft_vocab_size": VOCAB - 1}, weights)
    with pytest.raises(UserError, match=rf"draft_vocab_size={VOCAB - 1}, which is not supported"):
        load_any_head(tmp_path)


@pytest.mark.parametrize("sight", SIGHTS)
def test_our_folders_are_those_of_speculators(sight: dict[str, Any], tmp_path: Path) -> None:
    """A folder of the authors that is written again: the fields of speculators 0.9, and the same laws."""
    config, weights = published(**sight)
    heads = loaded(write(tmp_path / "a", config, weights), tiny("llama"))
    save_heads(heads, tmp_path / "b", "")
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    layer = written["transformer_layer_config"]
    same = (
        "hidden_size",
        "head_dim",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
        "model_type",
        *sight,
    )
    assert {name: layer[name] for name in same} == {name: config[name] for name in same}
    assert layer["rope_parameters"]["rope_theta"] == THETA
    assert (written["speculators_model_type"], written["speculators_version"]) == ("dflash", "0.9.0")
    assert written["aux_hidden_state_layer_ids"] == [1, 2], "0: the embeddings"
    assert (written["block_size"], written["mask_token_id"]) == (BLOCK, MASK)
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == BLOCK - 1
    assert written["sliding_window_non_causal"] is (sight != SIGHTS[1] and sight != SIGHTS[3])
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert {name: one.shape for name, one in again.items()} == {
        name: one.shape for name, one in weights.items()
    }
    rounded = {name: one.float() for name, one in again.items()}
    check(loaded(tmp_path / "b", tiny("llama")), config, rounded, tiny("llama"))


def test_it_drafts_for_a_pair(tmp_path: Path) -> None:
    folder = write(tmp_path, *published())
    pair = sprinter.load_pair(tiny("llama"), tokenizer=word_tokenizer(), heads=[folder], compile=False)
    outs = [
        pair.generate([3, 1, 4], method=method, max_new_tokens=12, temperature=0.0)
        for method in (
            "autoregressive",
            "heads(gamma=5, kind=dflash)",
            "trust=nobody,stop=svip,drafter=heads",
        )
    ]
    assert len({one.text for one in outs}) == 1 and outs[1].stats.drafted > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "has DFlash2DraftModel, which is not supported"),
        ({"final_logit_softcapping": 30.0}, "has final_logit_softcapping=30.0"),
        ({"dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": [0, 1]}}, rf"mask_token_id={VOCAB}"),
        ({"dflash_config": {"mask_token_id": 1}}, "lacks or misfits 'target_layer_ids'"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, -1]}}, "misfits 'target_layer_ids'"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0]}}, r"misfits 'fc\.weight'"),
        ({"dflash_config": 3}, "dflash_config=3 .* must be an object"),
        ({"block_size": 1}, "misfits 'block_size=1'"),
        ({"num_hidden_layers": 1 << 20}, "misfits 'layers.1048575"),
        ({"num_hidden_layers": 1}, r"misfits 'blocks\.1"),
        ({"layer_types": ["full_attention"]}, "lacks or misfits|is not a layer of Llama"),
        ({"use_sliding_window": True, "sliding_window": "x"}, "sliding_window='x'"),
        ({"is_causal": 3}, "is_causal=3"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "has a layer of type 'linear_attention'"),
        ({"use_sliding_window": True, "sliding_window": 4}, "has a layer of type 'unknown'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, weights = published()
    with pytest.raises(UserError, match=message) as found:
        load_any_head(write(tmp_path, config | change, weights))
    assert "\n" not in str(found.value)


def test_a_target_without_its_layers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reads layer 2 of its target, which has 2 layers"):
        loaded(write(tmp_path, *published((0, 2))), tiny("llama"))
