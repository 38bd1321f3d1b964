"""Features, networks, calibrations, and saving and loading every head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sprinter.errors import UserError
from sprinter.heads.artifact import load_head, save_head
from sprinter.heads.calibration import Calibration, Isotonic, Temperature
from sprinter.heads.features import (
    DraftStep,
    feature_width,
    parse_features,
    read_features,
    sees_token,
    stack_features,
)
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.load import load_gate
from sprinter.heads.networks import Linear, ResNet, build_network
from sprinter.models.pair import builtin_paths

D, V = 5, 20
ALL = ("hidden", "entropy", "max_q", "top_q(k=3)", "position", "hidden_x", "log_q")


def draft_step(*lead: int, seed: int = 0) -> DraftStep:
    chance = torch.Generator().manual_seed(seed)
    return DraftStep(
        hidden=torch.randn(*lead, D, generator=chance),
        law=torch.softmax(torch.randn(*lead, V, generator=chance), -1),
        position=torch.randint(1, 9, lead, generator=chance),
        token=torch.randint(V, lead, generator=chance),
        hidden_x=torch.randn(*lead, D, generator=chance),
    )


def make_head(
    architecture: str = "mlp",
    features: tuple[str, ...] = ALL,
    kind: str = "gate",
    calibration: Calibration | None = None,
    seed: int = 0,
) -> Head:
    config = HeadConfig(
        D, "org/draft", "org/target", kind=kind, architecture=architecture, features=features, width=7, layers=2
    )  # fmt: skip
    torch.manual_seed(seed)
    network = config.network()
    with torch.no_grad():
        for weights in network.parameters():
            weights.normal_()
    return Head(config, network, calibration)


# --- features ---------------------------------------------------------------------------------------------------------
def test_every_feature_by_hand() -> None:
    law = torch.tensor([0.5, 0.3, 0.2])
    step = DraftStep(torch.ones(2), law, torch.tensor(4), torch.tensor(1), torch.zeros(2))
    found = read_features(("hidden", "entropy", "max_q", "top_q(k=2)", "position", "hidden_x", "log_q"), step)
    assert found["hidden"].tolist() == [1, 1] and found["hidden_x"].tolist() == [0, 0]
    assert float(found["entropy"]) == pytest.approx(
        -sum(v * torch.tensor(v).log().item() for v in (0.5, 0.3, 0.2))
    )
    assert float(found["max_q"]) == pytest.approx(0.5)
    assert found["top_q(k=2)"].tolist() == pytest.approx([0.5, 0.3])
    assert float(found["position"]) == 4
    assert float(found["log_q"]) == pytest.approx(torch.tensor(0.3).log().item())


def test_top_q_of_a_small_vocabulary_is_filled_with_zeros() -> None:
    found = read_features(("top_q(k=5)",), DraftStep(law=torch.tensor([0.4, 0.6])))
    assert found["top_q(k=5)"].tolist() == pytest.approx([0.6, 0.4, 0, 0, 0])


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
def test_any_leading_shape(lead: tuple[int, ...]) -> None:
    values = read_features(ALL, draft_step(*lead))
    assert stack_features(ALL, values).shape == (*lead, sum(feature_width(name, D) for name in ALL))
    assert make_head()(values).shape == lead


def test_names_have_one_spelling() -> None:
    assert parse_features("hidden, top_q,entropy") == ("hidden", "top_q(k=10)", "entropy")
    assert parse_features(["top_q( k = 4 )"]) == ("top_q(k=4)",)
    assert not sees_token(("hidden", "top_q(k=4)")) and sees_token(("hidden", "log_q"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hiden", "did you mean 'hidden'"),
        ("", "no features"),
        ("hidden,hidden", "stands twice"),
        ("top_q,top_q(k=3)", "stands twice"),
        ("top_q(k=0)", "k=0"),
        ("top_q(k=65)", "from 1 to 64"),
        ("entropy(k=3)", "only top_q takes a parameter"),
        ("top_q(n=3)", "only top_q takes a parameter"),
    ],
)
def test_wrong_features_are_one_line(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        parse_features(spec)


def test_a_step_that_lacks_something_is_a_clear_line() -> None:
    with pytest.raises(UserError, match="reads 'hidden_x'"):
        read_features(("hidden_x",), DraftStep(hidden=torch.zeros(D)))
    with pytest.raises(UserError, match="reads 'entropy', and got hidden"):
        make_head("linear", ("hidden", "entropy"))({"hidden": torch.zeros(D)})
    with pytest.raises(UserError, match="by its name"):
        make_head("linear", ("hidden", "entropy"))(torch.zeros(D))


# --- networks ---------------------------------------------------------------------------------------------------------
def test_resnet_is_specdec_with_own_weights_per_block() -> None:
    network = build_network("resnet", 3, layers=2)
    assert isinstance(network, ResNet)
    x = torch.randn(4, 3)
    expected = x
    for block in network.blocks:
        expected = expected + torch.nn.functional.silu(expected @ block.weight.T + block.bias)
    both = torch.softmax(expected @ network.out.weight.T + network.out.bias, -1)
    torch.testing.assert_close(torch.sigmoid(network(x)), both[:, 1])
    assert not network.blocks[0].weight.equal(network.blocks[1].weight)
    assert network.size == 2 * (9 + 3) + 2 * 3 + 2 and network.flops == 2 * (9 + 9 + 6)


def test_disco_is_two_linear_layers_with_relu() -> None:
    network = build_network("ffn", 3, width=4)
    first, last = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
    x = torch.randn(6, 3)
    hidden = torch.relu(x @ first.weight.T + first.bias)
    torch.testing.assert_close(network(x), (hidden @ last.weight.T + last.bias).squeeze(1))


@pytest.mark.parametrize("architecture", ["linear", "mlp", "ffn", "resnet"])
def test_folded_standardisation_changes_nothing(architecture: str) -> None:
    torch.manual_seed(1)
    network = build_network(architecture, 6, width=8, layers=2)
    with torch.no_grad():
        for weights in network.parameters():
            weights.normal_()
    x, mean, spread = torch.randn(9, 6) * 3 + 5, torch.randn(6) + 5, torch.rand(6) + 2
    behind = network((x - mean) / spread).detach()
    network.fold(mean, spread)
    torch.testing.assert_close(network(x).detach(), behind, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_network("resnt", 3), "did you mean 'resnet'"),
        (lambda: build_network("mlp", 3, width=0), "width=0"),
        (lambda: build_network("mlp", 3, layers=1.5), "layers=1.5"),  # type: ignore[arg-type]
        (lambda: HeadConfig(D, "d", "t", kind="disko"), "did you mean 'disco'"),
        (lambda: HeadConfig(D, "d", "t", architecture="lstm"), "unknown architecture"),
        (lambda: HeadConfig(D, "d", "t", tau=1.5), "tau=1.5"),
        (lambda: Head(HeadConfig(D, "d", "t"), build_network("linear", D + 1)), "damaged"),
    ],
)  # fmt: skip
def test_wrong_configs_are_one_line(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


# --- calibration ------------------------------------------------------------------------------------------------------
def test_temperature_is_a_line_in_the_logit() -> None:
    logits = torch.tensor([-2.0, 0.0, 3.0])
    torch.testing.assert_close(Temperature(2.0, 0.5)(logits), torch.sigmoid(logits / 2 + 0.5))


def test_isotonic_goes_through_its_knots_and_is_level_outside() -> None:
    curve = Isotonic(torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([0.1, 0.5, 0.7]))
    found = curve(torch.tensor([-9.0, -1.0, -0.5, 0.0, 1.0, 2.0, 9.0]))
    torch.testing.assert_close(found, torch.tensor([0.1, 0.1, 0.3, 0.5, 0.6, 0.7, 0.7]))


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=20), st.integers(0, 5))
def test_isotonic_never_falls(values: list[float], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    knots = torch.rand(8, generator=chance).cumsum(0) * 10 - 20
    curve = Isotonic(knots, torch.rand(8, generator=chance).sort().values)
    scores = curve(torch.tensor(sorted(values)))
    assert (scores.diff() >= -1e-6).all() and (scores >= 0).all() and (scores <= 1).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Temperature(0.0),
        lambda: Temperature(1.0, float("nan")),
        lambda: Isotonic(torch.tensor([1.0]), torch.tensor([0.5])),
        lambda: Isotonic(torch.tensor([1.0, 1.0]), torch.tensor([0.2, 0.5])),
        lambda: Isotonic(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.2])),
        lambda: Isotonic(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.2])),
        lambda: Isotonic(torch.tensor([-torch.inf, 0.0, 1.0]), torch.tensor([0.1, 0.5, 0.9])),
        lambda: Isotonic(torch.tensor([0.0, 1e300], dtype=torch.float64), torch.tensor([0.5, 0.9])),
        lambda: Isotonic(torch.tensor([1.0, 1 + 1e-12], dtype=torch.float64), torch.tensor([0.5, 0.9])),
    ],
)
def test_curves_that_are_none_are_refused(make) -> None:
    with pytest.raises(UserError, match="make the gate again"):
        make()


# --- the artifact -----------------------------------------------------------------------------------------------------
CURVES: dict[str, Calibration] = {
    "none": Calibration(),
    "temperature": Temperature(1.7, -0.3),
    "isotonic": Isotonic(torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([0.1, 0.5, 0.7])),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("architecture", ["linear", "mlp", "ffn", "resnet"])
def test_saved_and_loaded_head_is_the_same(tmp_path: Path, architecture: str, curve: str) -> None:
    head = make_head(architecture, calibration=CURVES[curve])
    save_head(head, tmp_path, "# card\n", {"training": {"seed": 3}})
    loaded = load_head(tmp_path)
    assert loaded.config == head.config and loaded.features == ALL and loaded.sees_token
    assert loaded.facts == {"training": {"seed": 3}}
    values = read_features(ALL, draft_step(8))
    torch.testing.assert_close(loaded(values), head(values), rtol=0, atol=0)
    assert (loaded.size, loaded.flops) == (head.size, head.flops)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("kind", ["gate", "specdec++", "disco"])
def test_kinds_share_the_artifact_and_load_gate_takes_gates_alone(tmp_path: Path, kind: str) -> None:
    save_head(make_head("resnet", ("hidden_x",), kind), tmp_path, "card")
    assert json.loads((tmp_path / "config.json").read_text())["speculators_model_type"] == "sprinter"
    assert load_head(tmp_path).config.kind == kind
    if kind == "gate":
        assert load_gate(tmp_path).config.kind == "gate"
    else:
        with pytest.raises(UserError, match="not a gate"):
            load_gate(tmp_path)


def test_plain_gate_is_a_gate_with_its_calibration(tmp_path: Path) -> None:
    network = Linear.of(torch.randn(1, D), torch.randn(1))
    gate = Head(HeadConfig(D, "d", "t"), network, Temperature(2.0, 1.0))
    save_head(gate, tmp_path, "card")
    loaded, hidden = load_gate(tmp_path), torch.randn(3, D)
    assert isinstance(loaded.network, Linear)
    expected = torch.sigmoid((hidden @ network.weight[0] + network.bias) / 2 + 1)
    torch.testing.assert_close(loaded(hidden), expected)
    torch.testing.assert_close(loaded({"hidden": hidden}), expected)


def test_the_built_in_gate_loads_and_says_what_it_is() -> None:
    gate = load_gate(builtin_paths()["gate"])
    assert gate.config.kind == "gate" and not gate.sees_token
    law, told = torch.softmax(torch.randn(4, 50), -1), torch.tensor([0.0, 0.5, 0.7, 1.0])
    step = DraftStep(torch.randn(4, gate.config.hidden_size), law, torch.arange(4), temperature=told)
    scores = gate(read_features(gate.features, step))
    assert scores.shape == (4,) and ((scores >= 0) & (scores <= 1)).all()


def change(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["sha256"]  # as old ones are; with it any change is refused
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "resnett"}, "did you mean 'resnet'"),
        ({"features": ["hiden"]}, "did you mean 'hidden'"),
        ({"calibration": {"kind": "platt"}}, "unknown calibration"),
        ({"calibration": {"kind": "temperature"}}, "lacks or misfits"),
        ({"calibration": "none"}, "lacks or misfits"),
        ({"layers": 3}, "lacks or misfits"),
        ({"width": 3}, "lacks or misfits"),
        ({"hidden_size": "192"}, "hidden_size=192 is out of range"),
        ({"features": 3}, "lacks or misfits"),
    ],
)
def test_configs_that_do_not_fit_are_one_clear_line(tmp_path: Path, fields: dict, message: str) -> None:
    save_head(make_head("mlp"), tmp_path, "card")
    change(tmp_path, **fields)
    with pytest.raises(UserError, match=message) as caught:
        load_head(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_that_cannot_be_written_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .* or give another folder"):
        save_head(make_head(), tmp_path / "file" / "gate", "card")
    (tmp_path / "out" / "README.md").mkdir(parents=True)  # the card cannot take this place
    with pytest.raises(UserError, match=r"cannot write .* or give another folder"):
        save_head(make_head(), tmp_path / "out", "card")
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix == ".part"]
    with pytest.raises(UserError, match="has no config"):
        load_head(tmp_path / "out")


def test_check_names_the_kind(tmp_path: Path) -> None:
    head = make_head(kind="disco")
    with pytest.raises(UserError, match="the disco head reads hidden states of size 5"):
        head.check_model(id="x", revision=None, hidden_size=6, model=torch.nn.Linear(1, 1))


def test_scores_need_no_gradient() -> None:
    values: dict[str, Tensor] = read_features(ALL, draft_step(2))
    assert not make_head()(values).requires_grad
