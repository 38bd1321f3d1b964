"""Damaged files of heads that draft are one line each; what heads may be attached to."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.heads.test_dflash import dflash
from tests.heads.test_eagle import eagle as first_eagle
from tests.heads.test_eagle3 import eagle, parallel
from tests.heads.test_glide import glide
from tests.heads.test_medusa import SIZE, WEIGHTS, medusa
from tests.models.tiny import VOCAB, tiny, word_tokenizer
from torch import Tensor

import sprinter
from sprinter.errors import UserError
from sprinter.heads.drafting import TokenHeads, save_heads
from sprinter.heads.load import load_any_head
from sprinter.heads.medusa import MedusaHeads


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("heads")
    save_heads(medusa(), top / "medusa", "")
    save_heads(first_eagle(), top / "eagle", "")
    save_heads(eagle(), top / "eagle3", "")
    save_heads(parallel(), top / "peagle", "")
    save_heads(glide(), top / "glide", "")
    save_heads(dflash(), top / "dflash", "")
    return {kind: top / kind for kind in ("medusa", "eagle", "eagle3", "peagle", "glide", "dflash")}


def changed(folder: Path, to: Path, inside: str | None = None, **change: Any) -> Path:
    """A copy with other fields of config.json, and without its checksum, as an old one."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["sha256"]
    (config if inside is None else config[inside]).update(change)
    (to / "config.json").write_text(json.dumps(config))
    for file in folder.glob("*.safetensors"):
        (to / file.name).write_bytes(file.read_bytes())
    return to


def refused(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        load_any_head(folder)
    assert "\n" not in str(found.value) and str(folder) in str(found.value)


LAYER: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": -32}, "width -32|hidden_size=-32 in .* must be a whole number"),
    ({"intermediate_size": 1 << 23}, r"lacks or misfits '.*mlp\.gate_proj\.weight'"),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ({"num_attention_heads": "4"}, "num_attention_heads='4'"),
    ({"num_attention_heads": 5, "head_dim": None}, "num_attention_heads=5 .* a divisor of hidden_size=32"),
    ({"num_key_value_heads": 3}, "a divisor of num_attention_heads=4"),
    ({"head_dim": 7}, "head_dim=7 .* must be even"),
    ({"head_dim": 1 << 22}, r"lacks or misfits '.*q_proj\.weight'"),
    ({"head_dim": 2.5}, r"head_dim=2\.5"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps='x'"),
    ({"attention_bias": 1}, "attention_bias=1 .* true or false"),
    ({"hidden_act": "none"}, "lacks or misfits|is not a layer of Llama"),
    ({"rope_scaling": 3}, "lacks or misfits|is not a layer of Llama"),
]


@pytest.mark.parametrize(("change", "message"), LAYER)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "glide", "dflash"])
def test_damaged_layers(
    kind: str, change: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    inside = {"glide": "layer_config"} | dict.fromkeys(("eagle3", "dflash"), "transformer_layer_config")
    refused(changed(folders[kind], tmp_path / "bad", inside.get(kind), **change), message)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        *(("eagle3", {"transformer_layer_config": bad}, "must be an object") for bad in (None, [1], "x")),
        ("glide", {"layer_config": None}, "layer_config=None in .* must be an object"),
        ("eagle3", {"speculators_config": 3}, "speculators_config=3"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 1.5, 2]}, "a list of whole numbers"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": "abc"}, "a list of whole numbers"),
        ("eagle3", {"draft_vocab_size": 1 << 24}, "lacks or misfits 'd2t'"),
        ("eagle3", {"norm_before_residual": "no"}, "true or false"),
        *(("eagle3", {name: True}, f"has {name}, which") for name in ("norm_before_fc", "fc_norm", "norm_output")),
        ("peagle", {"speculators_config": {"proposal_methods": []}}, "must give speculative_tokens in"),
        ("peagle", {"speculators_config": {"proposal_methods": [{"speculative_tokens": 65}]}}, r"in \[1, 64\]"),
        ("peagle", {"mask_token_id": None}, r"mask_token_id=None .* in \[0, "),
        ("medusa", {"medusa_num_heads": float("inf")}, r"medusa_num_heads=inf .* whole number in \[1, 64\]"),
        ("medusa", {"medusa_num_heads": 0}, r"medusa_num_heads=0 .* whole number in \[1, 64\]"),
        ("medusa", {"medusa_num_layers": 65}, r"medusa_num_layers=65 .* must be a whole number in \[1, 64\]"),
        ("medusa", {"base_model_name_or_path": 3}, "a text or null"),
        *(
            (kind, {"accuracies": bad}, r"lists of numbers in \[0, 1\]")
            for kind in ("medusa", "eagle", "eagle3", "glide", "dflash")
            for bad in (3, [0.5], [["x"]], [[2.0]], [[float("nan")]], [[]])
        ),
        ("glide", {"sprinter_head": "other"}, "is not a head that Sprinter reads.*'other'"),
        ("glide", {"sprinter_head": None, "speculators_model_type": "mlp"}, "is not a head that Sprinter reads"),
    ],
)  # fmt: skip
def test_damaged_configs(
    kind: str, change: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    refused(changed(folders[kind], tmp_path / "bad", **change), message)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "peagle", "glide", "dflash"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite(
    kind: str, value: float, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(folders[kind], tmp_path / "bad")
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    name = next(name for name, one in weights.items() if one.is_floating_point())
    weights[name].view(-1)[0] = value
    save_file(weights, file)
    refused(folder, "NaN or infinite")


def test_scalar_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    for kind in folders:
        folder = changed(folders[kind], tmp_path / kind)
        file = next(folder.glob("*.safetensors"))
        save_file({name: torch.tensor(1.0) for name in load_file(file)}, file)
        refused(folder, "misfits? '")


@pytest.mark.parametrize(
    "damage",
    [
        lambda d2t, t2d: (torch.cat([d2t[:1], d2t[1:] - 2]), t2d),  # 0, 0, 2, ...
        lambda d2t, t2d: (d2t, torch.ones_like(t2d)),
        lambda d2t, t2d: (d2t - 1, t2d),
    ],
)
def test_maps_of_the_reduced_vocabulary(
    damage: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(folders["eagle3"], tmp_path / "bad")
    weights = load_file(folder / "model.safetensors")
    weights["d2t"], weights["t2d"] = damage(weights["d2t"], weights["t2d"])
    save_file(weights, folder / "model.safetensors")
    refused(folder, "maps d2t and t2d")


def test_medusas_heads_are_counted_in_the_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    """Published configs say 2 beside five heads."""
    own = load_any_head(changed(folders["medusa"], tmp_path / "fewer", medusa_num_heads=2))
    assert isinstance(own, MedusaHeads) and own.count == 3
    refused(changed(folders["medusa"], tmp_path / "more", medusa_num_heads=4), r"lack or misfit '3\.0\.")
    weights = load_file(folders["medusa"] / WEIGHTS)
    assert torch.equal(own.heads.state_dict()["2.1.weight"], weights["2.1.weight"].float())


def test_a_file_for_other_engines_ties_nothing(tmp_path: Path) -> None:
    heads = eagle()
    heads.layer_config.tie_word_embeddings = True  # as the target's, whose shape it has
    save_heads(heads, tmp_path, "")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["transformer_layer_config"]["tie_word_embeddings"] is False


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"there is no head directory '\./none'"):
        load_any_head("./none")


# --- targets ---------------------------------------------------------------------------------------------------------
def test_the_vocabulary_is_the_targets_own() -> None:
    for own in (VOCAB + 3, VOCAB - 3):
        with pytest.raises(UserError, match=f"for a target of vocabulary {own}"):
            MedusaHeads(SIZE, own).attach(tiny("llama"), "t", SIZE, VOCAB)


@pytest.mark.parametrize("make", [medusa, first_eagle, eagle, parallel, glide, dflash])
def test_heads_draft_for_one_target(make: Callable[[], TokenHeads]) -> None:
    heads = make()
    for _ in range(2):
        heads.attach(tiny("llama"), "t", SIZE, VOCAB)
    with pytest.raises(UserError, match=r"draft for another model already.*reload them for 'other'"):
        heads.attach(tiny("mistral"), "other", SIZE, VOCAB)


@pytest.mark.parametrize(
    "make", [medusa, lambda: medusa(shared=True), first_eagle, eagle, parallel, glide, dflash]
)
def test_costs_beside_a_target_in_half_precision(make: Callable[[], TokenHeads]) -> None:
    target = type(tiny("llama"))(tiny("llama").config).bfloat16().eval()
    pair = sprinter.load_pair(target, tokenizer=word_tokenizer(), heads=[make()], compile=False)
    flat = sprinter.decode.costs.PassCosts(((1, 1.0), (8, 1.0)))
    pair._runtime.pass_costs = flat  # in place of measuring
    assert pair._runtime.head_costs.draft_s(1) > 0
    out = pair.generate([3, 1, 4], max_new_tokens=6, min_new_tokens=6, never_slower=True)
    assert len(out.tokens) == 6


def meaning(folder: Path) -> tuple[Any, ...]:
    """All that a folder of heads says, thresholds and weights above all."""
    heads = load_any_head(folder)
    if isinstance(heads, TokenHeads):
        return heads.fingerprint, heads.accuracies, heads.target_fingerprint, heads.hidden_size, heads.kind
    return heads.fingerprint, heads.config, {**heads.facts}


@pytest.mark.parametrize(
    "kind",
    [
        "gate",
        "specdec",
        "disco",
        "qwen2.5-coder-1.5b-0.5b",
        "medusa",
        "eagle",
        "eagle3",
        "peagle",
        "glide",
        "dflash",
    ],
)
def test_a_byte_that_is_wrong_is_refused_or_changes_nothing(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """60 bytes of weights and config each; a gate loaded in 8 of 54 such cases, with other scores or thresholds."""
    examples = Path(__file__).parents[2] / "examples" / "gates"
    built_in = Path(sprinter.__file__).parent / "models" / "builtin"
    origin = folders.get(kind) or next(one for one in (built_in / kind, examples / kind) if one.is_dir())
    files = [origin / "config.json", next(origin.glob("*.safetensors"))]
    kept, draw = {file.name: file.read_bytes() for file in files}, random.Random(72)
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    whole, refusals = meaning(tmp_path), 0
    for i in range(120):
        name = files[i % 2].name
        content = bytearray(kept[name])
        place = draw.randrange(len(content))
        content[place] = draw.choice([byte for byte in range(256) if byte != content[place]])
        (tmp_path / name).write_bytes(content)
        try:
            assert meaning(tmp_path)[:-1] == whole[:-1], f"byte {place} of {name} is {content[place]}"
        except UserError:
            refusals += 1
        (tmp_path / name).write_bytes(kept[name])
    assert refusals >= 100 and meaning(tmp_path) == whole
