"""EAGLE-3's head: chains and trees against a pass without caches, speculators' files, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import VOCAB, tiny, word_tokenizer
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

import sprinter
from sprinter.errors import UserError
from sprinter.heads.drafting import save_heads
from sprinter.heads.eagle3 import Eagle3Heads, ParallelHeads, aux_layers
from sprinter.heads.entries import Attended
from sprinter.heads.load import load_any_head

SIZE = 32
KEPT = torch.arange(0, VOCAB, 2)


def eagle(
    seed: int = 0,
    *,
    layers: int = 1,
    vocab: int = VOCAB,
    norm_before_residual: bool = False,
    kept: Tensor | None = KEPT,
    target: PreTrainedModel | None = None,
    **more: object,
) -> Eagle3Heads:
    """A random head on the tiny models, or on another target as wide."""
    config = LlamaConfig(vocab_size=vocab, hidden_size=SIZE, num_attention_heads=4, num_key_value_heads=2,
                         intermediate_size=48, num_hidden_layers=layers, max_position_embeddings=96)  # fmt: skip
    ids = torch.arange(vocab) if kept is None else kept
    heads = Eagle3Heads(config, None, len(ids), norm_before_residual, **more)  # type: ignore[arg-type]
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in heads.parameters():
            value.copy_(torch.randn(value.shape, generator=chance) * 0.3)
    heads.keep(ids)
    heads.join(tiny("llama") if target is None else target)
    return heads.requires_grad_(False)


def parallel(seed: int = 0, count: int = 3, layers: int = 1) -> ParallelHeads:
    """A random head that drafts in one pass."""
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=SIZE, num_attention_heads=4, num_key_value_heads=2,
                         intermediate_size=48, num_hidden_layers=layers, max_position_embeddings=96)  # fmt: skip
    heads, chance = (
        ParallelHeads(config, None, len(KEPT), count, mask=60),
        torch.Generator().manual_seed(seed),
    )
    with torch.no_grad():
        for value in heads.parameters():
            value.copy_(torch.randn(value.shape, generator=chance) * 0.3)
    heads.keep(KEPT)
    heads.join(tiny("llama"))
    return heads.requires_grad_(False)


def states_of(count: int, seed: int = 3) -> dict[int, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {layer: torch.randn(count, SIZE, generator=chance) for layer in (0,)}


def reference(
    heads: Eagle3Heads, ids: Sequence[int], states: dict[int, Tensor], path: Sequence[int], masks: int = 0
) -> Tensor:
    """Logits of draft tokens after a text and a path, by one pass over all entries for each token, without a cache; of
    the last of a number of masks."""
    features = [*heads.fused([states[layer] for layer in heads.layers])]
    tokens = [*ids[1:]]
    if isinstance(heads, ParallelHeads):
        tokens += [heads.mask] * masks
        features += [heads.fc(heads.mask_hidden.view(-1))] * masks
    for token in (*path, None):
        embeds, first = heads.embedded(torch.tensor(tokens)), heads.blocks[0]
        rows = torch.stack(features)
        hidden = first.hidden_norm(rows)
        both = torch.cat([first.input_layernorm(embeds), hidden], -1)
        count, size = len(tokens), first.self_attn.size
        cos, sin = heads.rotary(embeds, torch.arange(count)[None])

        def turned(x: Tensor, cos: Tensor = cos, sin: Tensor = sin, size: int = size) -> Tensor:
            x = x.reshape(len(x), -1, size).transpose(0, 1)
            left, right = x.chunk(2, -1)
            return x * cos + torch.cat([-right, left], -1) * sin

        after = hidden if first.norm_before_residual else rows
        for number, block in enumerate(heads.blocks):
            attn, read = block.self_attn, block.input_layernorm(after) if number else both
            query, key = turned(attn.q_proj(read)), turned(attn.k_proj(read))
            value = attn.v_proj(read).reshape(count, -1, size).transpose(0, 1)
            out = torch.zeros(4, count, size)
            for head in range(4):
                scores = query[head] @ key[head // 2].T / math.sqrt(size)
                scores = scores.masked_fill(~torch.ones(count, count).tril().bool(), -math.inf)
                out[head] = scores.softmax(-1) @ value[head // 2]
            after = after + attn.o_proj(out.transpose(0, 1).reshape(count, -1))
            after = after + block.mlp(block.post_attention_layernorm(after))
        if token is not None:
            features.append(after[-1])
            tokens.append(token)
    logits: Tensor = heads.lm_head(heads.norm(after[-1]))
    return logits


def check(heads: Eagle3Heads) -> None:
    """Rounds of a text that grows: chains, trees, a text that goes back, states of new tokens."""
    text = heads.begin()
    whole, states = [5, 9, 2, 40, 7, 7, 31, 8, 1, 12], states_of(9)
    with torch.no_grad():
        for length, levels in (
            (3, [[()], [(4,), (6,)], [(4, 6), (4, 8), (6, 6)]]), (3, [[()], [(4,)]]),
            (6, [[()], [(0,)], [(0, 2)], [(0, 2, 4)]]), (10, [[()], [(2,), (4,), (2,)], [(4, 2)]]), (4, [[()], [(8,)]]),
        ):  # fmt: skip
            known = {layer: each[: length - 1] for layer, each in states.items()}
            text.read(whole[:length], known)
            for paths in levels:
                found = text.logits(paths)
                assert found is not None and found.shape == (len(paths), VOCAB)
                for path, own in zip(paths, found, strict=True):
                    wanted = reference(heads, whole[:length], known, path)
                    torch.testing.assert_close(own[heads.kept], wanted, atol=2e-4, rtol=1e-3)
                    assert bool(torch.isneginf(own[~heads.t2d]).all())
    assert (text.steps, text.tokens) == (12, 22), "nothing is read twice that was known"


@pytest.mark.parametrize(("norm_before_residual", "layers"), [(False, 1), (True, 1), (False, 3)])
def test_chains_and_trees_are_those_of_a_pass_without_a_cache(
    norm_before_residual: bool, layers: int
) -> None:
    check(eagle(norm_before_residual=norm_before_residual, layers=layers))


@pytest.mark.parametrize("layers", [1, 4])
@torch.no_grad()
def test_tokens_of_one_pass_are_those_of_masks(layers: int) -> None:
    """Texts that grow, go back and change: the law of each depth, whatever was drafted."""
    heads, whole, states = parallel(layers=layers), [5, 9, 2, 40, 7, 7, 31, 8, 1, 12], states_of(9)
    text = heads.begin()
    for length in (3, 6, 10, 4):
        known = {layer: each[: length - 1] for layer, each in states.items()}
        text.read(whole[:length], known)
        for depth in range(3):
            found = text.logits([(4, 6, 8)[:depth]])
            assert found is not None
            wanted = reference(heads, whole[:length], known, (), depth)
            torch.testing.assert_close(found[0][heads.kept], wanted, atol=2e-4, rtol=1e-3)
        assert text.logits([(4, 6, 8)]) is None


def test_positions_by_slot_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Eagle3Heads.outputs

    def by_slot(
        self: Eagle3Heads, embeds: Tensor, features: Tensor, positions: Tensor, attended: Attended
    ) -> Tensor:
        return real(self, embeds, features, int(positions[0]) + torch.arange(len(positions)), attended)

    check(eagle())
    monkeypatch.setattr(Eagle3Heads, "outputs", by_slot)
    with pytest.raises(AssertionError, match="not close"):
        check(eagle())


@torch.no_grad()
def test_features_one_step_off_are_noticed() -> None:
    heads = eagle()
    text, ids, states = heads.begin(), [5, 9, 2, 40], states_of(4)
    text.read(ids, {0: states[0][1:]})
    found = text.logits([()])
    assert found is not None
    wanted = reference(heads, ids, {0: states[0][:3]}, ())
    assert float((found[0][heads.kept] - wanted).abs().max()) > 0.1


def test_layers_that_are_fused() -> None:
    assert aux_layers(32) == (2, 16, 29), "indices of hidden_states, as in the paper's code"
    assert aux_layers(2) == (1, 1, 1) and aux_layers(4) == (1, 2, 3)
    assert eagle().layers == (0, 0, 0), "hidden_states[1] is the output of layer 0"


# --- files -----------------------------------------------------------------------------------------------------------
def test_files_are_those_of_speculators(tmp_path: Path) -> None:
    heads = eagle(target_id="org/target", target_fingerprint="f", accuracies=((0.5, 0.2),))
    heads.architectures = ["LlamaForCausalLM"]  # as of the target that they were joined with
    save_heads(heads, tmp_path, "card")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["architectures"] == ["Eagle3Speculator"]
    assert config["draft_vocab_size"] == len(KEPT) and config["eagle_aux_hidden_state_layer_ids"] == [1, 1, 1]
    assert (
        config["transformer_layer_config"]["model_type"] == "llama"
        and config["norm_before_residual"] is False
    )
    inner = config["speculators_config"]
    verifier = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    assert inner["algorithm"] == "eagle3" and inner["verifier"] == verifier
    assert inner["proposal_methods"][0]["proposal_type"] == inner["default_proposal_method"] == "greedy"
    names = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    names |= {
        f"layers.0.{one}.weight" for one in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    names |= {f"layers.0.self_attn.{one}_proj.weight" for one in "qkvo"}
    names |= {f"layers.0.mlp.{one}_proj.weight" for one in ("gate", "up", "down")}
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == names and weights["fc.weight"].shape == (SIZE, 3 * SIZE)
    assert weights["layers.0.self_attn.q_proj.weight"].shape == (SIZE, 2 * SIZE)
    assert torch.equal(torch.arange(len(KEPT)) + weights["d2t"], KEPT) and weights["t2d"].dtype == torch.bool
    again = load_any_head(tmp_path)
    assert isinstance(again, Eagle3Heads) and again.accuracies == heads.accuracies and again.aux == (1, 1, 1)
    assert (again.target_id, again.target_fingerprint) == ("org/target", "f")
    for (name, own), other in zip(heads.state_dict().items(), again.state_dict().values(), strict=True):
        assert (
            torch.equal(own.bfloat16().float(), other) if own.is_floating_point() else torch.equal(own, other)
        ), name


def test_the_version_and_the_fields_of_speculators(tmp_path: Path) -> None:
    """Those of its classes in 0.9.0, which tests/doors/test_speculators.py loads; a layer's fields in full."""
    for heads in (eagle(target_id="org/target"), parallel(layers=2)):
        save_heads(heads, tmp_path / heads.kind, "card")
        config = json.loads((tmp_path / heads.kind / "config.json").read_text())
        assert config["speculators_version"] == "0.9.0" and config["speculators_model_type"] == heads.kind
        assert not any(config[name] for name in ("norm_before_fc", "fc_norm", "norm_output"))
        layer = config["transformer_layer_config"]
        assert layer["rms_norm_eps"] == LlamaConfig().rms_norm_eps, "equal to Llama's default, and written"
        assert layer["hidden_size"] == SIZE and layer["head_dim"] == SIZE // 4
    assert (config["architectures"], config["mask_token_id"]) == (["PEagleSpeculator"], 60)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    weights = load_file(tmp_path / "peagle" / "model.safetensors")
    assert weights["mask_hidden"].shape == (1, 1, 3 * SIZE)
    again = load_any_head(tmp_path / "peagle")
    assert isinstance(again, ParallelHeads) and (again.count, again.mask) == (3, 60)
    assert torch.equal(again.mask_hidden, heads.mask_hidden.bfloat16().float())  # type: ignore[arg-type]
    assert len(again.blocks) == 2 and weights["layers.1.self_attn.q_proj.weight"].shape == (SIZE, SIZE)


def test_published_variants(tmp_path: Path) -> None:
    """A bias of the fusion, an embedding of its own, no map for a whole vocabulary, no layer ids."""
    heads = eagle(kept=None)
    save_heads(heads, tmp_path, "")
    weights = load_file(tmp_path / "model.safetensors")
    assert "d2t" not in weights and "t2d" not in weights
    weights |= {"fc.bias": torch.ones(SIZE), "embed_tokens.weight": torch.randn(VOCAB, SIZE)}
    weights |= {"verifier_norm.weight": torch.ones(SIZE)}
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = None
    del config["accuracies"], config["target_fingerprint"], config["sha256"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    pair = sprinter.load_pair(tiny("llama"), tokenizer=word_tokenizer(), heads=[tmp_path], compile=False)
    own = pair.drafting
    assert isinstance(own, Eagle3Heads) and own.layers == (0, 0, 0) and own.fc.bias is not None
    torch.testing.assert_close(own.embedded(torch.tensor([7])), weights["embed_tokens.weight"][7:8])
    out = pair.generate([3, 1, 4], max_new_tokens=8)
    assert out.stats.drafted > 0 and out.method == "heads(gamma=4)"


def test_what_is_refused(tmp_path: Path) -> None:
    save_heads(eagle(), tmp_path, "")
    good = json.loads((tmp_path / "config.json").read_text())
    del good["sha256"]
    for change, message in (
        ({"norm_before_fc": True}, "norm_before_fc, which is not supported"),
        ({"target_hidden_size": 64}, "features of width 64"),
        (
            {"transformer_layer_config": {**good["transformer_layer_config"], "model_type": "qwen3"}},
            "type 'qwen3'",
        ),
        (
            {"transformer_layer_config": {**good["transformer_layer_config"], "num_hidden_layers": 2}},
            r"lacks or misfits 'layers\.1\.",
        ),
        ({"draft_vocab_size": 7}, "lacks or misfits 'd2t'"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "give three layers of the target, from 1"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(UserError, match=message):
            load_any_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(good))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "d2t": weights["d2t"] + 5}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"maps d2t and t2d .* contradict"):
        load_any_head(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="is a pickle"):
        load_any_head(tmp_path)
    deep = eagle()
    deep._fuse((1, 1, 9))
    with pytest.raises(UserError, match="reads layer 8 of its target, which has 2 layers"):
        deep.join(tiny("llama"))
