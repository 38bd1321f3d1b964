"""Heads that a checkpoint holds: laws against plain references, layouts, greedy texts, joint laws, what is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.gguf_families import store
from tests.models.test_lora import write as write_adapter
from tests.models.tiny import VOCAB, word_tokenizer
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import sprinter
from sprinter.decode import parse_method
from sprinter.engine.drafting import native_heads
from sprinter.errors import UserError
from sprinter.heads.mtp import MtpHeads, load_mtp
from sprinter.models.gguf.load import GgufModel
from sprinter.models.pair import LoadedModel

SIZE = 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": SIZE, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 96, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}


def deepseek() -> PreTrainedModel:
    return DeepseekV3ForCausalLM(DeepseekV3Config(
        **(COMMON | {"num_key_value_heads": 4}), **ROUTED, n_group=2, topk_group=1, q_lora_rank=12, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6,
    ))  # fmt: skip


def glm() -> PreTrainedModel:
    return Glm4MoeForCausalLM(Glm4MoeConfig(**COMMON, **ROUTED, head_dim=8, use_qk_norm=True))


def qwen3_next() -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(
        **COMMON, **EXPERTS, head_dim=8, num_experts=4, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8,
    ))  # fmt: skip


def mimo() -> PreTrainedModel:
    """MiMo is Qwen2 with other heads."""
    return Qwen2ForCausalLM(Qwen2Config(**COMMON))


NEXTN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm", "block": ""}
LAYOUTS: dict[str, tuple[Callable[[], PreTrainedModel], str, dict[str, str]]] = {
    "deepseek": (deepseek, "model.layers.2.", NEXTN),
    "glm": (glm, "model.layers.2.", NEXTN),
    "qwen3_next": (qwen3_next, "mtp.", {
        "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm",
        "block": "layers.0.",
    }),
    "mimo": (mimo, "model.mtp_layers.0.", {
        "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm",
        "block": "",
    }),
}  # fmt: skip
SERVED = ("deepseek", "glm", "mimo")
"""Those whose targets can be rewound."""


def checkpoint(
    folder: Path, layout: str, change: Callable[[dict[str, Tensor]], None] | None = None
) -> PreTrainedModel:
    """Write a tiny random target with a module of multi-token prediction; returns it, as it was loaded."""
    make, prefix, names = LAYOUTS[layout]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        target = make()
        target.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        last, more = "model.layers.1.", dict[str, Tensor]()
        for name, value in weights.items():
            if name.startswith(last):
                own = torch.randn_like(value) * 0.4
                more[f"{prefix}{names['block']}{name.removeprefix(last)}"] = (
                    1 + own if "norm" in name else own
                )
        for name in ("enorm", "hnorm", "norm"):
            more[f"{prefix}{names[name]}.weight"] = 1 + torch.randn(SIZE) * 0.3
        more[f"{prefix}{names['eh_proj']}.weight"] = torch.randn(SIZE, 2 * SIZE) * 0.4
    if change is not None:
        change(more)
    save_file({**weights, **more}, folder / "model.safetensors", {"format": "pt"})
    return type(target).from_pretrained(folder, attn_implementation="eager").eval()


def load(folder: Path, **options: Any) -> sprinter.Pair:
    return sprinter.load_pair(folder, **{"tokenizer": word_tokenizer(), "compile": False, **options})


def joined(target: PreTrainedModel) -> MtpHeads:
    heads = load_mtp(target, VOCAB)
    assert heads is not None
    heads.attach(target, "target", SIZE, VOCAB)
    return heads


def normed(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """RMSNorm; Qwen3-Next's weights are distances from one."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset)


def reference(
    target: PreTrainedModel, layout: str, weights: dict[str, Tensor], ids: Sequence[int], states: Tensor,
    path: Sequence[int],
) -> Tensor:  # fmt: skip
    """Logits after a text and a path: arithmetic on the file's tensors, around the decoder layer that transformers
    runs in one pass over all entries, without a cache."""
    _, prefix, names = LAYOUTS[layout]
    offset = 1.0 if layout == "qwen3_next" else 0.0
    decoder, table = target.get_decoder(), target.get_input_embeddings().weight  # type: ignore[union-attr]
    config = decoder.config
    layer = type(decoder.layers[1])(config, 1).eval()
    filled = {
        name.removeprefix(prefix + names["block"]): value
        for name, value in weights.items()
        if name.startswith(prefix + names["block"])
    }
    experts = {name for name in filled if ".experts." in name}
    for name in layer.state_dict():
        if name.endswith("experts.gate_up_proj"):
            filled[name] = torch.stack([torch.cat([filled[f"mlp.experts.{i}.{part}_proj.weight"]
                                                   for part in ("gate", "up")]) for i in range(4)])  # fmt: skip
        if name.endswith("experts.down_proj"):
            filled[name] = torch.stack([filled[f"mlp.experts.{i}.down_proj.weight"] for i in range(4)])
    assert not layer.load_state_dict(
        {k: v for k, v in filled.items() if k not in experts}, strict=False
    ).missing_keys
    own = {name: weights[f"{prefix}{names[name]}.weight"] for name in ("enorm", "hnorm", "norm", "eh_proj")}
    features, tokens = [*states], [*ids[1:]]
    for token in (*path, None):
        embeds = normed(table[torch.tensor(tokens)], own["enorm"], offset, config.rms_norm_eps)
        before = normed(torch.stack(features), own["hnorm"], offset, config.rms_norm_eps)
        parts = [before, embeds] if layout == "mimo" else [embeds, before]
        count = len(tokens)
        places = torch.arange(1, count + 1)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        x = (torch.cat(parts, -1) @ own["eh_proj"].T)[None]
        out = layer(
            x, attention_mask=mask, position_ids=places, position_embeddings=decoder.rotary_emb(x, places)
        )
        out = out if isinstance(out, Tensor) else out[0]
        after = normed(out[0], own["norm"], offset, config.rms_norm_eps)
        if token is not None:
            features.append(after[-1])
            tokens.append(token)
    logits: Tensor = after[-1] @ target.get_output_embeddings().weight.T  # type: ignore[union-attr]
    return logits


ROUNDS: list[tuple[int, list[list[tuple[int, ...]]]]] = [
    (3, [[()], [(4,), (6,)], [(4, 6), (4, 8), (6, 6)]]), (6, [[()], [(0,)], [(0, 2)], [(0, 2, 4)]]),
    (10, [[()], [(2,), (4,), (2,)], [(4, 2)]]), (4, [[()], [(8,)]]),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_laws_are_those_of_a_plain_reference(layout: str, tmp_path: Path) -> None:
    """A text that grows and goes back: chains, trees, states of new tokens."""
    target = checkpoint(tmp_path, layout)
    heads, weights = joined(target), load_file(tmp_path / "model.safetensors")
    whole, states = [5, 9, 2, 40, 7, 7, 31, 8, 1, 12], torch.randn(9, SIZE, generator=torch.manual_seed(3))
    text = heads.begin()
    with torch.inference_mode():
        for length, levels in ROUNDS:
            text.read(whole[:length], {-1: states[: length - 1]})
            for paths in levels:
                found = text.logits(paths)
                assert found is not None and found.shape == (len(paths), VOCAB)
                for path, own in zip(paths, found, strict=True):
                    wanted = reference(target, layout, weights, whole[:length], states[: length - 1], path)
                    torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("wrong", ["order", "norms", "tree", "forgotten"])
def test_mistakes_are_noticed(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state before the embedding, exchanged norms, a tree read as a chain, keys that are not replaced."""
    target, real = checkpoint(tmp_path, "deepseek"), MtpHeads.estimate
    heads, weights = joined(target), load_file(tmp_path / "model.safetensors")
    if wrong == "order":
        heads.state_first = True
    if wrong == "norms":
        heads.token_norm, heads.state_norm = heads.state_norm, heads.token_norm

    def estimate(
        self: MtpHeads, embeds: Tensor, states: Tensor, positions: Tensor, sees: Tensor, kept: Any
    ) -> Tensor:
        if wrong == "forgotten" and len(positions) == 1:
            kept.start = 0
            sees = sees[:, -1:]
        whole = torch.ones_like(sees) if wrong == "tree" and len({*positions.tolist()}) == 1 else sees
        return real(self, embeds, states, positions, whole, kept)

    monkeypatch.setattr(MtpHeads, "estimate", estimate)
    text, ids, states = heads.begin(), [5, 9, 2, 40], torch.randn(3, SIZE, generator=torch.manual_seed(3))
    with torch.inference_mode():
        text.read(ids, {-1: states})
        worst = 0.0
        for paths in ([()], [(4,), (6,)], [(4, 6)]):
            found = text.logits(paths)
            assert found is not None
            for path, own in zip(paths, found, strict=True):
                worst = max(
                    worst,
                    float((own - reference(target, "deepseek", weights, ids, states, path)).abs().max()),
                )
    assert worst > 0.01


@pytest.mark.parametrize("layout", ["deepseek", "glm"])
def test_the_law_is_that_of_transformers_own_module(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    target = checkpoint(tmp_path, layout)
    # transformers knows the layer by the number that published checkpoints have.
    monkeypatch.setattr(target, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    theirs = MtpModel.from_pretrained(target).eval()
    ids = torch.tensor([[5, 9, 2, 40, 7, 7, 31]])
    with torch.inference_mode():
        states = target(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        places = torch.arange(1, ids.shape[1])[None]
        cache = MtpCache(config=target.config.get_mtp_config())
        drafted, logits, _ = theirs(ids[:, 1:], states, None, places, cache)
        text = joined(target).begin()
        text.read(ids[0].tolist(), {-1: states[0]})
        own = text.logits([()])
    assert own is not None and int(own.argmax()) == int(drafted[0, 0])
    torch.testing.assert_close(own[0], logits[0, 0], atol=1e-4, rtol=1e-4)


# --- pairs -----------------------------------------------------------------------------------------------------------
def ids_of(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


@pytest.mark.parametrize("layout", SERVED)
def test_greedy_texts_are_those_of_plain_decoding(layout: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, layout)
    pair = load(tmp_path)
    assert pair.drafting is not None and pair.drafting.kind == "mtp" and pair.default_method == "heads"
    prompts = [[3, 7, 1, 12, 5], [9], [2, 2, 40]]
    plain = pair.generate_batch(prompts, method="autoregressive", temperature=0, max_new_tokens=10)
    for method in ("heads(kind=mtp)", "drafter=heads(grow=dynamic(expand=3,depth=3,nodes=6),kind=mtp),accept=onehot",
                   "trust=nobody,stop=svip,drafter=heads"):  # fmt: skip
        outs = pair.generate_batch(prompts, method=method, temperature=0, max_new_tokens=10)
        assert [ids_of(out) for out in outs] == [ids_of(out) for out in plain]
        assert sum(out.stats.drafted for out in outs) > 5
    assert outs[0].models["heads"] == [{"kind": "mtp", "id": str(tmp_path), "revision": None}]
    again = load(tmp_path, heads=[outs[0].models["heads"][0]["id"]])
    assert again.drafting is not None and again.drafting.fingerprint == pair.drafting.fingerprint


def test_a_text_is_the_same_alone_and_in_a_batch_and_8_bits_draft(tmp_path: Path) -> None:
    checkpoint(tmp_path, "mimo")
    pair = load(tmp_path)
    prompts = [[3, 7, 1, 12, 5], [9], [2, 2, 40]]
    options: Any = {"method": "heads(gamma=3)", "max_new_tokens": 12, "seed": 4}
    alone = [ids_of(pair.generate(prompt, **options)) for prompt in prompts]
    assert [ids_of(out) for out in pair.generate_batch(prompts, **options)] == alone
    small = load(tmp_path, dtype="int8", compile=None)
    out, plain = (
        small.generate(prompts[0], method=method, temperature=0, max_new_tokens=12)
        for method in ("heads", "autoregressive")
    )
    assert (
        ids_of(out) == ids_of(plain) and out.stats.drafted > 0 and out.models["heads"][0]["dtype"] == "int8"
    )


def test_heads_that_are_given_come_first(tmp_path: Path) -> None:
    checkpoint(tmp_path, "glm")
    given = joined(checkpoint(tmp_path, "glm"))
    given._attached = None
    pair = load(tmp_path, heads=[given])
    assert pair.drafting is given
    with pytest.raises(UserError, match="drafts with eagle heads, and those of this pair are of kind mtp"):
        pair.generate([3, 4], method="heads(kind=eagle)", max_new_tokens=2)
    with pytest.raises(UserError, match="did you mean 'mtp'"):
        parse_method("heads(kind=mpt)")
    assert parse_method("heads(kind=mtp)").name == "heads(gamma=4, kind=mtp)"
    with pytest.raises(UserError, match="a part of the target's checkpoint"):
        given.file_config()


# --- GGUF files ------------------------------------------------------------------------------------------------------
def stored(folder: Path, path: Path, kind: str = "F32", **more: Any) -> PreTrainedModel:
    """The checkpoint of ``glm`` as a GGUF file as llama.cpp's converter lays it out, and the target of the folder."""
    target = checkpoint(folder, "glm")
    store(path, "glm4moe", target.config, load_file(folder / "model.safetensors"), kind, **more)
    return target


def test_the_head_of_a_gguf_file_has_the_law_of_that_of_the_checkpoint(tmp_path: Path) -> None:
    target = stored(tmp_path / "folder", tmp_path / "m.gguf")
    pair = load(tmp_path / "m.gguf", runner="torch")
    model, heads = pair.models.target.module("a test"), pair.drafting
    assert isinstance(heads, MtpHeads) and pair.default_method == "heads"
    assert model.config.num_hidden_layers == 2 == len(model.get_decoder().layers)
    with torch.inference_mode():
        ids = torch.tensor([[5, 9, 2, 40, 7, 7, 31, 8]])
        torch.testing.assert_close(model(ids).logits, target(ids).logits, rtol=1e-4, atol=1e-4)
        states = torch.randn(7, SIZE, generator=torch.manual_seed(3))
        for paths in ([()], [(4,), (6,)], [(4, 6), (4, 8), (6, 6)]):
            found = []
            for own in (heads, joined(target)):
                text = own.begin()
                text.read(ids[0].tolist(), {-1: states})
                if len(paths[0]):
                    text.logits([()])
                if len(paths[0]) == 2:
                    text.logits([(4,), (6,)])
                found.append(text.logits(paths))
            assert found[0] is not None and torch.equal(found[0], found[1])


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float32"), ("F32", "int8")])
def test_greedy_texts_of_gguf_files(kind: str, dtype: str, tmp_path: Path) -> None:
    stored(tmp_path / "folder", tmp_path / "m.gguf", kind)
    pair = load(tmp_path / "m.gguf", runner="torch", dtype=dtype)
    texts = [
        pair.generate([3, 7, 1, 12, 5], method=method, temperature=0, max_new_tokens=10)
        for method in ("autoregressive", "heads(kind=mtp)")
    ]
    assert ids_of(texts[0]) == ids_of(texts[1]) and texts[1].stats.drafted > 3
    assert texts[1].models["heads"][0]["id"] == str(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("left_out", "extra", "why"),
    [
        ("blk.2.nextn.hnorm.weight", None, r"it lacks the tensor blk\.2\.nextn\.hnorm\.weight"),
        ("blk.2.attn_q.weight", None, r"it lacks the tensor blk\.2\.attn_q\.weight"),
        (None, "blk.2.attn_q.bias", r"its tensor blk\.2\.attn_q\.bias is not known"),
    ],
)
def test_a_gguf_target_runs_without_heads_that_cannot_draft(
    left_out: str | None, extra: str | None, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import gguf

    add = gguf.GGUFWriter.add_tensor

    def changed(self: Any, name: str, *args: Any, **more: Any) -> None:
        if name != left_out:
            add(self, name, *args, **more)
        if extra and name == "output_norm.weight":
            add(self, extra, *args, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", changed)
    stored(tmp_path / "folder", tmp_path / "m.gguf")
    with caplog.at_level(logging.WARNING, logger="sprinter"):
        pair = load(tmp_path / "m.gguf", runner="torch")
    assert pair.drafting is None and pair.default_method == "autoregressive"
    (line,) = [one.getMessage() for one in caplog.records if "multi-token prediction" in one.getMessage()]
    assert re.search(why, line) and "the target runs without them" in line and "\n" not in line
    assert len(pair.generate([3, 1], max_new_tokens=3).tokens) == 3


def test_llama_cpp_leaves_them_out(caplog: pytest.LogCaptureFixture) -> None:
    """One line says so, and names the other runner where that runs the file."""
    for architecture, nextn, runs in (("glm4moe", 1, True), ("exaone-moe", 1, False), ("glm4moe", 0, False)):
        caplog.clear()
        file = object.__new__(GgufModel)
        file.architecture, file.nextn = architecture, nextn
        assert native_heads(LoadedModel(file, "some.gguf", None, 64, VOCAB, SIZE, ())) == []
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == nextn and ("--runner torch" in "".join(lines)) == runs


def test_an_adapter_leaves_them_behind(tmp_path: Path) -> None:
    """They were trained with the target as it is; a pair that has none of its user's can take an adapter."""
    checkpoint(tmp_path, "mimo")
    pair = load(tmp_path)
    write_adapter(tmp_path / "lora", pair.models.target.model, ("model.layers.0.self_attn.q_proj",))
    adapted = pair.with_lora(tmp_path / "lora")
    assert (
        pair.drafting is not None and adapted.drafting is None and adapted.default_method == "autoregressive"
    )
    assert len(adapted.generate([3, 4], max_new_tokens=3).tokens) == 3


# --- what cannot draft -----------------------------------------------------------------------------------------------
def unknown(weights: dict[str, Tensor]) -> None:
    for name in list(weights):
        weights["model.mtp.layers.0." + name.rpartition("layers.2.")[2]] = weights.pop(name)


def scaled(weights: dict[str, Tensor]) -> None:
    weights["model.layers.2.self_attn.o_proj.weight_scale_inv"] = torch.ones(1)


def lacking(weights: dict[str, Tensor]) -> None:
    del weights["model.layers.2.shared_head.norm.weight"]


def expertless(weights: dict[str, Tensor]) -> None:
    del weights["model.layers.2.mlp.experts.1.up_proj.weight"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (unknown, r"their tensors \('model.mtp.layers.0.*'\) are in a layout that is not known"),
        (scaled, "no decoder layer of DeepseekV3ForCausalLM has their weights .*weight_scale_inv"),
        (lacking, r"they lack or misfit 'norm\.weight'"),
        (expertless, r"they lack or misfit \(1, 'up'\)"),
    ],
)
def test_a_target_runs_without_heads_that_cannot_draft(
    change: Callable[[dict[str, Tensor]], None], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path, "deepseek", change)
    with caplog.at_level(logging.WARNING, logger="sprinter"):
        pair = load(tmp_path)
    assert pair.drafting is None and pair.default_method == "autoregressive"
    lines = [record.getMessage() for record in caplog.records if record.name == "sprinter"]
    (line,) = [one for one in lines if "multi-token prediction" in one]
    assert re.search(why, line) and "the target runs without them" in line and "\n" not in line
    assert len(pair.generate([3, 1], max_new_tokens=3).tokens) == 3
    with pytest.raises(UserError, match="drafts with heads on the target, and this pair has none"):
        pair.generate([3, 1], method="heads(kind=mtp)", max_new_tokens=3)


def test_a_target_whose_state_cannot_be_rewound_is_refused_as_ever(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3_next")
    with pytest.raises(UserError, match="a recurrent state, which cannot be rewound"):
        load(tmp_path)
