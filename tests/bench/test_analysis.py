"""Statistics of a pair's laws, against sums by hand on recorded laws."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sprinter
from sprinter.bench import analysis
from sprinter.bench.analysis import acceptance_by_position, analyse
from sprinter.errors import UserError
from sprinter.laws import Sampling, entropy, kl_divergence, overlap
from sprinter.theory.recording import Recording

V = 6


def recording_of(p: Tensor, q: Tensor, tokens: Tensor) -> Recording:
    """A text along laws that are given, at temperature 1."""
    return Recording(
        p, q, p, q, tokens=tokens, ids=tokens, signals={"entropy": entropy(q)}, lengths=(len(tokens),), prompts=((0,),),
        new_tokens=len(tokens), writer="target",
    )  # fmt: skip


def random_recording(n: int, seed: int = 0) -> Recording:
    chance = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(n, V, generator=chance, dtype=torch.float64).mul(1.5).softmax(-1) for _ in range(2))
    q = (p + q) / 2
    return recording_of(p, q, torch.multinomial(p, 1, generator=chance).squeeze(-1))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Recording], dict[str, Any]]:
    """Three recorded texts and what becomes of them."""
    recordings = [random_recording(40, seed) for seed in range(3)]
    left = iter(recordings)
    monkeypatch.setattr(analysis, "probe", lambda *args, **options: next(left))
    return recordings, analyse(None, [[1], [2], [3]], new_tokens=40)  # type: ignore[arg-type]


def test_means_by_entropy_are_those_of_the_positions(told: tuple[list[Recording], dict[str, Any]]) -> None:
    recordings, found = told
    h = torch.cat([entropy(each.q) for each in recordings])
    beta = torch.cat([overlap(each.p, each.q) for each in recordings])
    bins = found["entropy"]
    assert found["positions"] == sum(bins["count"]) == 120 and found["texts"] == 3
    assert found["overlap"] == pytest.approx(float(beta.mean()))
    assert found["entropy_overlap_correlation"] == pytest.approx(
        float(torch.corrcoef(torch.stack([h, beta]))[0, 1])
    )
    for i, mean in enumerate(bins["overlap"]["mean"]):
        here = (h >= bins["edges"][i]) & (h < bins["edges"][i + 1])
        assert bins["count"][i] == int(here.sum())
        if bins["count"][i]:
            assert mean == pytest.approx(float(beta[here].mean()))
            assert bins["overlap"]["p10"][i] <= bins["overlap"]["p50"][i] <= bins["overlap"]["p90"][i]
        else:
            assert mean is None


def test_the_ratio_is_cross_entropy_over_entropy(told: tuple[list[Recording], dict[str, Any]]) -> None:
    recordings, found = told
    ratio = torch.cat([1 + kl_divergence(each.q, each.p) / entropy(each.q) for each in recordings])
    bins = found["ratio"]
    assert sum(bins["count"]) + bins["above"] + bins["left_out"] == 120
    for i in (0, 3, 7):
        here = (ratio >= bins["edges"][i]) & (ratio < bins["edges"][i + 1])
        assert bins["count"][i] == int(here.sum())
    assert bins["p50"] == pytest.approx(float(ratio.quantile(0.5)))
    assert bins["share_to_1_3"] == pytest.approx(float((ratio <= 1.3).double().mean()))


def test_bounds_are_below_the_truth_and_in_its_order(told: tuple[list[Recording], dict[str, Any]]) -> None:
    recordings, found = told
    bounds = found["bounds"]
    assert bounds["truth"] == sorted(bounds["truth"]) and len(bounds["share"]) == 100
    for name in ("pinsker", "bretagnolle_huber"):
        assert bounds["violations"][name] == 0.0
        assert all(bound <= truth + 1e-9 for bound, truth in zip(bounds[name], bounds["truth"], strict=True))
    beta = torch.cat([overlap(each.p, each.q) for each in recordings])
    h = torch.cat([entropy(each.q) for each in recordings])
    assert bounds["violations"]["entropy"] == pytest.approx(
        float((1 - (0.15 * h).sqrt() > beta).double().mean())
    )


def test_accepted_runs_are_products_of_chances_along_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.tensor([[0.5, 0.5], [0.8, 0.2], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.75], [0.2, 0.8], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    monkeypatch.setattr(analysis, "probe", lambda *a, **o: recording_of(p, q, torch.tensor([0, 1, 1, 0])))
    found = analyse(None, [[1]], new_tokens=4)  # type: ignore[arg-type]
    # kept: 0.25/0.5, min(1, 0.8/0.2), 0.5/0.5, 0.5/1; runs of two from places 1, 2 and 3
    assert found["cap"] == 2
    assert found["position"]["kept"] == pytest.approx([2.5 / 3, (0.5 + 1 + 0.5) / 2.5])
    assert found["position"]["reached"] == pytest.approx([1, 2.5 / 3])
    # their expected lengths: 0.5 + 0.5, 1 + 1, 1 + 0.5; H(q) is between 0.5 and 0.75 everywhere
    assert found["entropy"]["length"]["mean"] == [None, None, pytest.approx(1.5)]


@pytest.mark.statistical
def test_what_is_kept_along_a_target_text_is_the_overlap_on_average() -> None:
    """E over x ~ p of min(1, q/p) is β. 4,000 places, 5 standard errors: false alarm 6e-7."""
    recording = random_recording(4000, seed=7)
    read = analysis._read(recording)
    error = float(read["kept"].std()) / math.sqrt(4000)
    assert float(read["kept"].mean()) == pytest.approx(float(read["overlap"].mean()), abs=5 * error)


def test_texts_that_end_early_and_sure_laws_make_no_numbers_up(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    monkeypatch.setattr(analysis, "probe", lambda *a, **o: recording_of(one, one, torch.tensor([0])))
    found = analyse(None, [[1]], Sampling(temperature=0.0), new_tokens=20)  # type: ignore[arg-type]
    assert found["position"] == {"reached": [], "kept": []}
    assert found["entropy"]["length"]["mean"] == [None] and found["entropy"]["overlap"]["mean"] == [1.0]
    assert found["ratio"]["left_out"] == 1 and found["ratio"]["p50"] is None
    assert found["entropy_overlap_correlation"] is None
    json.dumps(found, allow_nan=False)


def test_measured_acceptance_by_position() -> None:
    # 10 rounds of 1 token, 20 of 2, 30 of 3
    found = acceptance_by_position([0, 10, 20, 30])
    assert found["reached"] == [60, 50] and found["kept"] == pytest.approx([50 / 60, 30 / 50])
    assert acceptance_by_position([0, 5]) == acceptance_by_position([]) == {"reached": [], "kept": []}
    assert acceptance_by_position([0, 0, 0, 4])["kept"] == [1.0, 1.0]


def test_a_pair_is_read_and_progress_is_reported() -> None:
    pair = sprinter.load_pair()
    prompts = [pair.tokenizer.encode(text) for text in ("The river rose and", "In 1912 the company")]
    seen: list[tuple[int, int]] = []
    found = analyse(pair, prompts, Sampling(), 8, lambda done, wanted: seen.append((done, wanted)))
    assert seen == [(1, 2), (2, 2)] and found["texts"] == 2 and 2 <= found["positions"] <= 16
    assert 0.2 < found["overlap"] < 1 and found["bounds"]["violations"]["pinsker"] == 0
    assert found == analyse(pair, prompts, Sampling(), 8), "the same seed gives the same numbers"
    json.dumps(found, allow_nan=False)
    with pytest.raises(UserError, match="at least one prompt"):
        analyse(pair, [])
