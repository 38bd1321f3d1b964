"""GliDe's layer: chains and trees against a pass without caches, files, what is refused, training as in drafting."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import VOCAB, tiny, word_tokenizer
from tests.training.drafting import texts, tiny_target
from tests.training.test_draft_train import TRAINING, cyclic
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

import sprinter
from sprinter.errors import UserError
from sprinter.heads.drafting import save_heads
from sprinter.heads.glide import GlideHeads
from sprinter.heads.load import load_any_head
from sprinter.models.cache_name import model_cache_name
from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.glide import GlideLearner, fresh_glide
from sprinter.training.drafts.run import run_to_end
from sprinter.training.drafts.settings import HeadSettings

SIZE = 32
SHAPE = HeadSettings(kind="glide")


def glide(family: str = "llama", **more: object) -> GlideHeads:
    """A random layer on a tiny model."""
    own = tiny(family).config
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=SIZE, num_attention_heads=own.num_attention_heads,
                         num_key_value_heads=own.num_key_value_heads, intermediate_size=48, num_hidden_layers=1,
                         attention_bias=family == "qwen2")  # fmt: skip
    heads = GlideHeads(config, **more)
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in heads.parameters():
            value.copy_(torch.randn(value.shape, generator=chance) * 0.3)
    heads.join(tiny(family))
    return heads.requires_grad_(False)


def cached(family: str, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values of the target's last layer, ``[kv_heads, n, size]``, out of its own cache."""
    model, cache = tiny(family), DynamicCache()
    model(torch.tensor([list(ids)]), use_cache=True, **{model_cache_name(type(model).forward): cache})
    layer = cache.layers[-1]
    return layer.keys[0], layer.values[0]


def reference(heads: GlideHeads, family: str, ids: Sequence[int], path: Sequence[int]) -> Tensor:
    """Logits after a text and a path, by one pass over all tokens without a cache, and the target's own cache."""
    whole = torch.tensor([*ids, *path])
    count, attn = len(whole), heads.self_attn
    embeds = tiny(family).get_input_embeddings()(whole)
    cos, sin = tiny(family).base_model.rotary_emb(embeds, torch.arange(count)[None])

    def turned(x: Tensor) -> Tensor:
        x = x.reshape(count, -1, attn.size).transpose(0, 1)
        left, right = x.chunk(2, -1)
        return x * cos[0] + torch.cat([-right, left], -1) * sin[0]

    hidden = heads.input_layernorm(embeds)
    query, key = turned(attn.q_proj(hidden)), turned(attn.k_proj(hidden))
    value = attn.v_proj(hidden).reshape(count, -1, attn.size).transpose(0, 1)
    causal = torch.ones(count, count).tril().bool()
    x = embeds + attn.o_proj(_mixed(query, key, value, causal))
    keys, values = cached(family, ids[:-1])
    seen = torch.ones(count, len(ids) - 1).bool()
    query = turned(heads.cross_attn.q_proj(heads.cross_layernorm(x)))
    x = x + heads.cross_attn.o_proj(_mixed(query, keys, values, seen))
    x = x + heads.mlp(heads.post_attention_layernorm(x))
    logits: Tensor = tiny(family).get_output_embeddings()(heads.norm(x[-1]))
    return logits


def _mixed(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    times, outs = query.shape[0] // key.shape[0], []
    for head in range(query.shape[0]):
        scores = query[head] @ key[head // times].T / math.sqrt(query.shape[-1])
        outs.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ value[head // times])
    return torch.cat(outs, -1)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_chains_and_trees_are_those_of_a_pass_without_a_cache(family: str) -> None:
    """With the keys and values of the target's own cache, for a text that grows, goes back, and grows otherwise."""
    heads, whole = glide(family), [5, 9, 2, 40, 7, 7, 31, 8, 1, 12]
    assert heads.layers == (0,)
    text = heads.begin()
    for ids, levels in (
        (whole[:3], [[()], [(4,), (6,)], [(4, 6), (4, 8), (6, 6)]]), (whole[:6], [[()], [(0,)], [(0, 2)]]),
        (whole, [[()], [(2,), (4,), (2,)], [(4, 2)]]), ([*whole[:4], 3], [[()], [(8,)]]), (whole[:4], [[()]]),
    ):  # fmt: skip
        hidden = tiny(family)(torch.tensor([ids]), output_hidden_states=True).hidden_states[1][0]
        text.read(ids, {0: hidden[: len(ids) - 1]})
        for paths in levels:
            found = text.logits(paths)
            assert found is not None
            for path, own in zip(paths, found, strict=True):
                torch.testing.assert_close(own, reference(heads, family, ids, path), atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_training_sees_of_the_target_what_drafting_sees() -> None:
    """Keys of one token more would show the layer what it is to foresee."""
    target = tiny_target()
    own = GlideLearner(fresh_glide(target, SHAPE, "t", "f"), target, 0.8, 1.0, 3)
    batch = collate(texts(target, 3).texts)
    width, checked = batch.ids.shape[1], 0
    for step, (logits, *_) in enumerate(own.outputs(batch)):
        places = batch.places[batch.places % width >= step + 1]
        for number in range(0, len(places), 4):
            row, place = divmod(int(places[number]), width)
            ids, read = batch.ids[row].tolist(), place - step
            hidden = target(batch.ids[row : row + 1], output_hidden_states=True).hidden_states[2][0]
            text = own.heads.begin()
            text.read(ids[: read + 1], {1: hidden[:read]})
            for end in range(step + 1):
                found = text.logits([tuple(ids[read + 1 : read + 1 + end])])
            assert found is not None
            torch.testing.assert_close(found[0], logits[number], atol=1e-4, rtol=1e-3)
            checked += 1
    assert checked > 15


def test_the_layer_learns(tmp_path: Path) -> None:
    target = tiny_target()
    own, found = GlideLearner(fresh_glide(target, SHAPE, "t", "f"), target, 0.8, 1.0, 3), cyclic()
    before = own.held_out(found.part(True), 128)
    run = run_to_end(own, found, replace(TRAINING, steps=50, checkpoint=50, lr=1e-2), tmp_path)
    after = run.history[-1].held_out
    assert after["ce"] < 0.3 * before["ce"] and all(after[f"head{step}_top1"] > 0.9 for step in (1, 2, 3)), (
        after
    )


def test_files_and_greedy_texts(tmp_path: Path) -> None:
    heads = glide("qwen2", target_id="t", accuracies=((0.5, 0.2), (0.4, 0.1)))
    save_heads(heads, tmp_path, "card")
    again = load_any_head(tmp_path)
    assert isinstance(again, GlideHeads) and again.target_id == "t" and again.accuracies == heads.accuracies
    pair = sprinter.load_pair(tiny("qwen2"), tokenizer=word_tokenizer(), heads=[again], compile=False)
    prompts = [[3, 7, 1, 12, 5], [9], [2, 2, 40]]
    plain = pair.generate_batch(prompts, method="autoregressive", temperature=0, max_new_tokens=10)
    for method in (
        "heads",
        "medusa(nodes=5)",
        "drafter=heads(grow=widened),accept=without,stop=fixed(gamma=3)",
    ):
        outs = pair.generate_batch(prompts, method=method, temperature=0, max_new_tokens=10)
        assert [[token.id for token in out.tokens] for out in outs] == [
            [t.id for t in out.tokens] for out in plain
        ]
        assert sum(out.stats.drafted for out in outs) > 5
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"is damaged: .* \(by their checksum\)"):
        load_any_head(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("sha256") and config["sprinter_head"] == "glide"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"lacks or misfits 'norm\.weight'"):
        load_any_head(tmp_path)


def test_targets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"reads the keys of the target's last layer.*this one is 'gpt2'"):
        glide().join(tiny("gpt2"))
    other = LlamaConfig(vocab_size=VOCAB, hidden_size=SIZE, num_attention_heads=2, intermediate_size=48)
    with pytest.raises(UserError, match="other attention heads"):
        GlideHeads(other).join(tiny("llama"))
