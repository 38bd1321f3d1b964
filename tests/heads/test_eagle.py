"""EAGLE's head: chains and trees against a pass without caches, files of its authors and others, what is refused."""

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
from transformers import LlamaConfig

import sprinter
from sprinter.errors import UserError
from sprinter.heads.drafting import save_heads
from sprinter.heads.eagle import EagleHeads
from sprinter.heads.entries import Attended, EntryHeads
from sprinter.heads.load import load_any_head

SIZE = 32


def eagle(seed: int = 0, *, fusion_bias: bool = False, family: str = "llama", **more: object) -> EagleHeads:
    """A random head on a tiny model."""
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=SIZE, num_attention_heads=4, num_key_value_heads=2,
                         intermediate_size=48, num_hidden_layers=1, max_position_embeddings=96)  # fmt: skip
    heads = EagleHeads(config, fusion_bias, **more)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in heads.parameters():
            value.copy_(torch.randn(value.shape, generator=chance) * 0.3)
    heads.join(tiny(family))
    return heads.requires_grad_(False)


def reference(heads: EagleHeads, ids: Sequence[int], states: Tensor, path: Sequence[int]) -> Tensor:
    """Logits after a text and a path, by one pass over all entries for each token, without a cache."""
    features, tokens, block = [*states], [*ids[1:]], heads.blocks[0]
    table = tiny("llama").get_input_embeddings()
    attn, size = block.self_attn, block.self_attn.size
    for token in (*path, None):
        x = torch.cat([table(torch.tensor(tokens)), torch.stack(features)], -1) @ heads.fc.weight.T
        x = x if heads.fc.bias is None else x + heads.fc.bias
        count = len(tokens)
        cos, sin = heads.rotary(x, torch.arange(count)[None])

        def turned(x: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            x = x.reshape(len(x), -1, size).transpose(0, 1)
            left, right = x.chunk(2, -1)
            return x * cos + torch.cat([-right, left], -1) * sin

        query, key = turned(attn.q_proj(x)), turned(attn.k_proj(x))
        value = attn.v_proj(x).reshape(count, -1, size).transpose(0, 1)
        out = torch.zeros(4, count, size)
        for head in range(4):
            scores = query[head] @ key[head // 2].T / math.sqrt(size)
            scores = scores.masked_fill(~torch.ones(count, count).tril().bool(), -math.inf)
            out[head] = scores.softmax(-1) @ value[head // 2]
        after = x + attn.o_proj(out.transpose(0, 1).reshape(count, -1))
        after = after + block.mlp(block.post_attention_layernorm(after))
        if token is not None:
            features.append(after[-1])
            tokens.append(token)
    logits: Tensor = tiny("llama").get_output_embeddings()(after[-1])
    return logits


def check(heads: EagleHeads) -> None:
    """Rounds of a text that grows and goes back: chains, trees, states of new tokens."""
    text = heads.begin()
    whole, states = [5, 9, 2, 40, 7, 7, 31, 8, 1, 12], torch.randn(9, SIZE, generator=torch.manual_seed(3))
    with torch.no_grad():
        for length, levels in (
            (3, [[()], [(4,), (6,)], [(4, 6), (4, 8), (6, 6)]]), (6, [[()], [(0,)], [(0, 2)], [(0, 2, 4)]]),
            (10, [[()], [(2,), (4,), (2,)], [(4, 2)]]), (4, [[()], [(8,)]]),
        ):  # fmt: skip
            text.read(whole[:length], {-1: states[: length - 1]})
            for paths in levels:
                found = text.logits(paths)
                assert found is not None and found.shape == (len(paths), VOCAB)
                for path, own in zip(paths, found, strict=True):
                    wanted = reference(heads, whole[:length], states[: length - 1], path)
                    torch.testing.assert_close(own, wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("fusion_bias", [False, True])
def test_chains_and_trees_are_those_of_a_pass_without_a_cache(fusion_bias: bool) -> None:
    check(eagle(fusion_bias=fusion_bias))


@pytest.mark.parametrize("wrong", ["positions", "order", "features"])
def test_mistakes_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions by slot, the state before the embedding, features one step off."""
    real = EntryHeads.outputs

    def outputs(
        self: EntryHeads, embeds: Tensor, features: Tensor, positions: Tensor, attended: Attended
    ) -> Tensor:
        if wrong == "positions":
            return real(self, embeds, features, int(positions[0]) + torch.arange(len(positions)), attended)
        if wrong == "order":
            return real(self, features, embeds, positions, attended)
        moved = features.roll(1, 0) if len(features) > 1 else features * 0
        return real(self, embeds, moved, positions, attended)

    check(eagle())
    monkeypatch.setattr(EntryHeads, "outputs", outputs)
    with pytest.raises(AssertionError, match="not close"):
        check(eagle())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_greedy_texts_are_those_of_plain_decoding(family: str) -> None:
    pair = sprinter.load_pair(
        tiny(family), tokenizer=word_tokenizer(), heads=[eagle(family=family)], compile=False
    )
    prompts = [[3, 7, 1, 12, 5], [9], [2, 2, 40]]
    plain = pair.generate_batch(prompts, method="autoregressive", temperature=0, max_new_tokens=10)
    for method in ("heads", "eagle(expand=3, depth=3, nodes=6)", "trust=nobody,stop=svip,drafter=heads"):
        outs = pair.generate_batch(prompts, method=method, temperature=0, max_new_tokens=10)
        assert [[t.id for t in out.tokens] for out in outs] == [[t.id for t in out.tokens] for out in plain]
        assert sum(out.stats.drafted for out in outs) > 5


# --- files -----------------------------------------------------------------------------------------------------------
def test_files_are_those_of_the_authors(tmp_path: Path) -> None:
    heads = eagle(target_id="org/target", target_fingerprint="f", accuracies=((0.5, 0.2),))
    save_heads(heads, tmp_path, "card", {"more": 1})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 1 and config["bias"] is False
    assert config["hidden_size"] == SIZE and config["intermediate_size"] == 48 and config["more"] == 1
    names = {"fc.weight", "layers.0.post_attention_layernorm.weight"}
    names |= {f"layers.0.self_attn.{one}_proj.weight" for one in "qkvo"}
    names |= {f"layers.0.mlp.{one}_proj.weight" for one in ("gate", "up", "down")}
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == names and weights["fc.weight"].shape == (SIZE, 2 * SIZE)
    again = load_any_head(tmp_path)
    assert isinstance(again, EagleHeads) and again.accuracies == heads.accuracies
    assert (again.target_id, again.target_fingerprint, again.kind) == ("org/target", "f", "eagle")
    for (name, own), other in zip(heads.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(own.bfloat16().float(), other), name


def published(tmp_path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Config and weights as others publish them: no marks of ours, a bias, an embedding of its own."""
    save_heads(eagle(), tmp_path, "")
    config = json.loads((tmp_path / "config.json").read_text())
    ours = ("sprinter_head", "base_model_name_or_path", "target_fingerprint", "accuracies", "sha256")
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {"fc.bias": torch.ones(SIZE), "embed_tokens.weight": torch.randn(VOCAB, SIZE)}
    return {name: value for name, value in config.items() if name not in ours}, weights


def write(folder: Path, config: dict[str, object], weights: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


def test_published_folders(tmp_path: Path) -> None:
    config, weights = published(tmp_path)
    write(tmp_path, config, weights)
    pair = sprinter.load_pair(tiny("llama"), tokenizer=word_tokenizer(), heads=[tmp_path], compile=False)
    own = pair.drafting
    assert isinstance(own, EagleHeads) and own.layers == (-1,) and own.fc.bias is not None
    torch.testing.assert_close(own.embedded(torch.tensor([7])), weights["embed_tokens.weight"][7:8])
    assert pair.generate([3, 1, 4], max_new_tokens=8).stats.drafted > 0


def test_the_former_type_of_speculators(tmp_path: Path) -> None:
    config, weights = published(tmp_path)
    theirs = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): value
        for name, value in weights.items()
        if name != "embed_tokens.weight"
    }
    around = {
        "speculators_model_type": "eagle", "transformer_layer_config": config, "layernorms": False, "fusion_bias": True,
        "speculators_config": {"verifier": {"name_or_path": "org/target"}},
    }  # fmt: skip
    write(tmp_path, around, theirs)
    own = load_any_head(tmp_path)
    assert isinstance(own, EagleHeads) and own.target_id == "org/target"
    assert torch.equal(own.fc.weight, weights["fc.weight"].float())
    write(tmp_path, {**around, "layernorms": True}, theirs)
    with pytest.raises(UserError, match="has further norms, which is not supported"):
        load_any_head(tmp_path)


def test_what_is_refused(tmp_path: Path) -> None:
    config, weights = published(tmp_path)
    for change, more, message in (
        ({"model_type": "qwen2"}, {}, "a layer of type 'qwen2'"),
        ({"sprinter_head": "eagle", "num_hidden_layers": 2}, {}, "has 2 layers"),
        ({}, {"layers.0.input_layernorm.weight": torch.ones(SIZE)}, "has further norms"),
        ({}, {"fc.weight": torch.ones(SIZE, SIZE)}, r"lacks or misfits 'fc\.weight'"),
        ({}, {"embed_tokens.weight": torch.ones(3, SIZE)}, r"embed_tokens\.weight in .* has shape \[3, 32\]"),
    ):  # fmt: skip
        write(tmp_path, {**config, **change}, {**weights, **more})
        with pytest.raises(UserError, match=message):
            load_any_head(tmp_path)
    write(tmp_path, config, {"model.norm.weight": torch.ones(3)})
    with pytest.raises(UserError, match=r"has no fc\.weight"):
        load_any_head(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="is a pickle"):
        load_any_head(tmp_path)
