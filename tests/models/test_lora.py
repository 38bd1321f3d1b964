"""LoRA adapters of a target: laws are those of the weights with the product added, and the draft stays."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.engine.conftest import double, double_pair, tiny_llama
from tests.models.tiny import fresh
from transformers.pytorch_utils import Conv1D

import sprinter
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.kernels import runs
from sprinter.models.lora import LoraLinear
from sprinter.models.pair import LoadedPair

TEXT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 6,
    "bias": "none",
    "target_modules": ["q_proj"],
}
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")


def write(
    folder: Path, model: Any, layers: tuple[str, ...] = LAYERS, rank: int = 2, **config: Any
) -> dict[str, Any]:
    """A folder as PEFT writes it; its matrices ``(A, B)``, by layer."""
    folder.mkdir()
    chance, found, tensors = torch.Generator().manual_seed(7), {}, {}
    for path in layers:
        layer = model.get_submodule(path)
        high, width = (
            layer.weight.T.shape if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
        )
        found[path] = [torch.randn(*shape, generator=chance) / 4 for shape in ((rank, width), (high, rank))]
        for name, tensor in zip("AB", found[path], strict=True):
            tensors[f"base_model.model.{path}.lora_{name}.weight"] = tensor
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": rank} | config))
    return found


def llama_pair() -> sprinter.Pair:
    return sprinter.Pair(LoadedPair(double(tiny_llama(1, layers=2)), double(tiny_llama(2)), None))


def logits(model: Any, text: torch.Tensor = TEXT) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(text).logits
    return found


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 6 / 2),
        ({"use_rslora": True}, 6 / math.sqrt(2)),
        ({"alpha_pattern": {"lm_head": 1}}, None),
        (
            {
                "use_dora": False,
                "modules_to_save": None,
                "loftq_config": {},
                "megatron_core": "megatron.core",
            },
            6 / 2,
        ),
    ],
    ids=str,
)
def test_laws_are_those_of_the_sums(tmp_path: Path, config: dict[str, Any], scale: float | None) -> None:
    pair = llama_pair()
    before, print_before = logits(pair.models.target.model), weights_fingerprint(pair.models.target.model)
    wanted: Any = copy.deepcopy(pair.models.target.model)
    for path, (a, b) in write(tmp_path / "x", wanted, **config).items():
        factor = scale or (1 / 2 if path == "lm_head" else 6 / 2)
        wanted.get_submodule(path).weight.data += factor * (b.double() @ a.double())
    adapted = pair.with_lora(tmp_path / "x")
    found = logits(adapted.models.target.model)
    assert float((found - before).abs().max()) > 0.1
    assert float((found.softmax(-1) - logits(wanted).softmax(-1)).abs().max()) < 1e-9
    assert torch.equal(logits(pair.models.target.model), before)
    merged = sprinter.Pair(
        LoadedPair(dataclasses.replace(pair.models.target, model=wanted), pair.models.draft, None)
    )
    for method in ("speculative(gamma=3)", "autoregressive"):
        texts = [
            one.generate([1, 2, 3], max_new_tokens=30, seed=4, method=method) for one in (adapted, merged)
        ]
        assert [token.id for token in texts[0].tokens] == [token.id for token in texts[1].tokens]
    assert adapted.models.draft is pair.models.draft
    assert weights_fingerprint(adapted.models.target.model) != print_before
    assert texts[0].request is not None and adapted._runtime.described["target"]["adapter"] == str(
        tmp_path / "x"
    )


def test_all_other_weights_are_shared(tmp_path: Path) -> None:
    pair = llama_pair()
    write(tmp_path / "x", pair.models.target.model)
    own = dict(pair.with_lora(tmp_path / "x").models.target.model.named_parameters())  # type: ignore[union-attr]
    base = dict(pair.models.target.model.named_parameters())  # type: ignore[union-attr]
    assert own.keys() == base.keys()
    changed = {name for name in own if own[name].data_ptr() != base[name].data_ptr()}
    assert changed == {f"{path}.weight" for path in LAYERS}


def test_a_transposed_layer(tmp_path: Path) -> None:
    """GPT-2's, whose adapters say ``fan_in_fan_out``."""
    model: Any = fresh("gpt2").double().eval()
    layer = "transformer.h.0.mlp.c_fc"
    ((a, b),) = write(tmp_path / "x", model, (layer,), fan_in_fan_out=True).values()
    target = dataclasses.replace(double(tiny_llama(1)), model=model, vocab_size=model.config.vocab_size)
    found = sprinter.Pair(LoadedPair(target, None, None)).with_lora(tmp_path / "x").models.target.model
    wanted = copy.deepcopy(model)
    wanted.get_submodule(layer).weight.data += 3 * (b.double() @ a.double()).T
    assert (
        float((logits(found) - logits(wanted)).abs().max())
        < 1e-9
        < float((logits(found) - logits(model)).abs().max())
    )


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"compile": True, "dtype": "float32"}], ids=str)
def test_with_our_kernels(options: dict[str, Any], tmp_path: Path) -> None:
    """8 bits stay, and the product is computed beside them; weights as they are have it in them, and stay compiled."""
    pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
    pair = sprinter.load_pair(**options)
    base: Any = sprinter.load_pair(dtype="float32").models.target.model
    for path, (a, b) in write(tmp_path / "x", base).items():
        layer = base.get_submodule(
            path
        )  # the output layer shares its weights with the embedding, which stays
        layer.weight = torch.nn.Parameter(layer.weight.data + 3 * (b @ a))
    adapted = pair.with_lora(tmp_path / "x").models.target
    model: Any = adapted.model
    assert isinstance(model.lm_head, LoraLinear) == ("int8" in options.values()) and runs(model) == (
        "compile" in options
    )
    found, wanted = logits(model), logits(base)
    assert torch.linalg.norm(found - wanted) <= 0.08 * torch.linalg.norm(wanted)
    plain, again = logits(pair.models.target.model), logits(sprinter.load_pair(**options).models.target.model)
    assert torch.equal(plain, again) and torch.linalg.norm(plain - wanted) > 0.1 * torch.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=True, which is not supported: merge it"),
        ({"bias": "all"}, "bias='all', which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"layer_replication": [[0, 1]]}, "layer_replication="),
        ({"something_new": 3}, "something_new=3"),
        ({"peft_type": "IA3"}, "of type IA3: only LORA"),
    ],
    ids=str,
)
def test_more_than_two_matrices_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    pair = llama_pair()
    write(tmp_path / "x", pair.models.target.model, **config)
    with pytest.raises(UserError) as refused:
        pair.with_lora(tmp_path / "x")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    pair = llama_pair()
    write(tmp_path / "larger", double(tiny_llama(1, layers=3)).model, ("model.layers.2.mlp.up_proj",))
    with pytest.raises(
        UserError, match=r"changes model\.layers\.2\.mlp\.up_proj, which tiny-1 does not have"
    ):
        pair.with_lora(tmp_path / "larger")
    write(tmp_path / "other", fresh("gpt2"), ("transformer.h.0.mlp.c_fc",))
    stored = tmp_path / "other" / "adapter_model.safetensors"
    save_file({f"base_model.model.lm_head.lora_{name}.weight": torch.ones(2, 2) for name in "AB"}, stored)
    with pytest.raises(UserError, match="lm_head, which has 24 × 16 weights, not 2 × 2: check its base"):
        pair.with_lora(tmp_path / "other")
    key = "base_model.model.model.embed_tokens.lora_"
    save_file({f"{key}A.weight": torch.ones(2, 24), f"{key}B.weight": torch.ones(16, 2)}, stored)
    with pytest.raises(
        UserError, match="embed_tokens, which is of class Embedding: adapters of linear layers"
    ):
        pair.with_lora(tmp_path / "other")
    key, weight = "base_model.model.lm_head.", pair.models.target.model.lm_head.weight  # type: ignore[union-attr]
    product = {f"{key}lora_A.weight": torch.ones(2, 16), f"{key}lora_B.weight": torch.ones(24, 2)}
    save_file({**product, f"{key}base_layer.weight": weight.data.float()}, stored)
    assert pair.with_lora(tmp_path / "other").models.target.adapter is not None
    save_file({**product, f"{key}base_layer.weight": weight.data.float() + 1}, stored)
    with pytest.raises(UserError, match="had other weights when it was trained"):
        pair.with_lora(tmp_path / "other")
    save_file({"base_model.model.lm_head.lora_magnitude_vector": torch.ones(2)}, stored)
    with pytest.raises(UserError, match="which is not a matrix of LoRA"):
        pair.with_lora(tmp_path / "other")
    stored.unlink()
    with pytest.raises(
        UserError, match=r"is not a folder of PEFT with adapter_config.json and adapter_model"
    ):
        pair.with_lora(tmp_path / "other")
    write(tmp_path / "x", pair.models.target.model)
    judged = double_pair()
    assert judged.heads["judge"].config.model == "target"
    with pytest.raises(UserError, match="heads on the target were not trained with the adapter"):
        judged.with_lora(tmp_path / "x")
