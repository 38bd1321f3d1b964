"""The gate's artifact and its checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.heads.artifact import save_head
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.load import load_gate
from sprinter.heads.networks import Linear


def make_gate(hidden_size: int = 6, **fields: object) -> Head:
    config = HeadConfig(hidden_size=hidden_size, draft_id="org/draft", target_id="org/target", **fields)  # type: ignore[arg-type]
    chance = torch.Generator().manual_seed(0)
    network = Linear.of(torch.randn(1, hidden_size, generator=chance), torch.tensor([0.3]))
    return Head(config, network)


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(6, 4)


def test_score_is_the_papers_one_layer() -> None:
    gate = make_gate()
    hidden = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    weight, bias = gate.network.state_dict().values()
    expected = 1 / (1 + torch.exp(-(hidden @ weight[0] + bias)))
    torch.testing.assert_close(gate(hidden), expected)
    assert gate.flops == 12


def test_half_precision_states_are_read_in_float32() -> None:
    assert make_gate()(torch.randn(6).to(torch.bfloat16)).dtype == torch.float32


def test_saved_and_loaded_gate_is_the_same(tmp_path: Path) -> None:
    gate = make_gate(label="overlap", tau=0.7, draft_revision="abc")
    save_head(gate, tmp_path / "g", "# card\n", {"note": 1})
    loaded = load_gate(tmp_path / "g")
    assert loaded.config == gate.config
    torch.testing.assert_close(loaded.state_dict(), gate.state_dict(), rtol=0, atol=0)
    assert json.loads((tmp_path / "g" / "config.json").read_text())["speculators_model_type"] == "sprinter"
    assert sorted(p.name for p in (tmp_path / "g").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


def test_fingerprint_follows_the_weights_not_their_dtype() -> None:
    model = small_model()
    # a bfloat16 checkpoint loaded as float32 keeps its fingerprint
    half = small_model().to(torch.bfloat16)
    assert weights_fingerprint(half) == weights_fingerprint(model)
    assert weights_fingerprint(small_model(1)) != weights_fingerprint(model)


def test_a_fingerprint_copies_no_weights() -> None:
    """Those of a layer that is read from a file later take no memory, and would fill any."""
    made = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    for value, model in enumerate(made):
        whole = torch.tensor(float(value)).expand(1 << 21, 1 << 21)
        model.weight = torch.nn.Parameter(whole, requires_grad=False)
    assert weights_fingerprint(made[0]) != weights_fingerprint(made[1])


def check(
    gate: Head, *, id: str = "org/draft", revision: str | None = None, size: int = 6, seed: int = 0
) -> None:
    gate.check_model(id=id, revision=revision, hidden_size=size, model=small_model(seed))


def test_made_for_this_draft_passes() -> None:
    check(make_gate())
    check(make_gate(draft_revision="abc"), revision="abc")
    check(make_gate(draft_revision="abc"))  # a revision that is not known cannot be wrong
    check(make_gate(draft_fingerprint=weights_fingerprint(small_model())), id="/moved/elsewhere")


@pytest.mark.parametrize(
    ("gate_fields", "asked", "message"),
    [
        ({}, {"size": 8}, "hidden states of size 6, draft 'org/draft' has size 8"),
        ({}, {"id": "org/other"}, "made for draft 'org/draft'"),
        ({"draft_revision": "abc"}, {"revision": "def"}, "revision abc"),
        ({"draft_fingerprint": "0" * 64}, {}, "other weights of draft 'org/draft'"),
    ],
)
def test_made_for_another_draft_is_refused(gate_fields: dict, asked: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(make_gate(**gate_fields), **asked)


def damage_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)


def without_checksum(folder: Path) -> None:
    """As gates of old versions are."""
    config = json.loads((folder / "config.json").read_text())
    del config["sha256"]
    damage_config(folder, json.dumps(config))


def test_a_gate_without_a_checksum_loads(tmp_path: Path) -> None:
    save_head(make_gate(tau=0.7), tmp_path, "card")
    without_checksum(tmp_path)
    assert load_gate(tmp_path).config.tau == 0.7


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: damage_config(f, "{"), "not valid JSON"),
        (lambda f: damage_config(f, "[]"), "not valid JSON"),
        (lambda f: damage_config(f, '{"model_type": "llama"}'), "is not a gate"),
        (lambda f: damage_config(f, '{"speculators_model_type": "sprinter"}'), "lacks or misfits"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}"),
            "is damaged: config.json and",
        ),
        (lambda f: (without_checksum(f), (f / "model.safetensors").write_bytes(b"\x08\0\0")), "cannot read"),
    ],
)
def test_damaged_artifacts_are_one_clear_line(tmp_path: Path, damage, message: str) -> None:
    save_head(make_gate(), tmp_path, "card")
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_gate(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_directory_is_a_clear_line() -> None:
    with pytest.raises(UserError, match="no gate directory"):
        load_gate("/nowhere/gate")


def test_weights_of_another_size_are_refused() -> None:
    config = HeadConfig(hidden_size=3, draft_id="d", target_id="t")
    with pytest.raises(UserError, match="damaged"):
        Head(config, Linear(4))
    with pytest.raises(UserError, match="hidden_size=0"):
        HeadConfig(hidden_size=0, draft_id="d", target_id="t")
