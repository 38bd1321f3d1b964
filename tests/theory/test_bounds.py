"""Bounds hold, on random laws and on the exact divergences of whole texts."""

from __future__ import annotations

import pytest
import torch
from tests.theory.oracles import rule_on_chain
from tests.theory.tools import INSTANCES, chains, check_family, laws

from sprinter.decode.accept import Fuzzy
from sprinter.decode.conformance import law_pairs
from sprinter.errors import UserError
from sprinter.laws import kl_divergence, overlap
from sprinter.theory.bounds import (
    bretagnolle_huber,
    entropy_bound,
    fuzzy_bound,
    pinsker,
)
from sprinter.theory.montecarlo import estimate


def test_acceptance_is_above_both_bounds() -> None:
    """10,000 random pairs and the edge cases."""
    edge = [torch.stack(side) for side in zip(*law_pairs(100), strict=True)]
    for p, q in ((edge[0], edge[1]), laws(10_000, 8)):
        beta = overlap(p, q)
        assert bool((beta >= pinsker(p, q) - 1e-12).all()) and bool(
            (beta >= bretagnolle_huber(p, q) - 1e-12).all()
        )
        assert bool((bretagnolle_huber(p, q) >= 0).all())
    assert float(pinsker(p[6], p[6])) == 1.0 and float(bretagnolle_huber(p[6], p[6])) == 1.0


def test_pinsker_reads_as_in_equation_5() -> None:
    p, q = laws(200, 6, seed=1)
    inside = torch.isfinite(kl_divergence(q, p))
    p, q = p[inside], q[inside]
    from sprinter.laws import entropy

    other = 1 - ((-(q * p.log()).nan_to_num(posinf=0).sum(-1) - entropy(q)) / 2).sqrt()
    assert other.tolist() == pytest.approx(pinsker(p, q).tolist(), abs=1e-10)
    assert float(entropy_bound(0.6, 0.15)) == pytest.approx(1 - 0.3)


@pytest.mark.statistical
def test_bounds_hold_for_measured_acceptance() -> None:
    """20 pairs of laws, 20,000 tokens x ~ q each: min(1, p/q) averages to β (0.1 % false alarms), above the bounds."""
    numbers = torch.Generator().manual_seed(0)
    p, q = laws(INSTANCES, 6, seed=3)
    found = []
    for one, other in zip(p, q, strict=True):
        x = torch.multinomial(other, 20_000, replacement=True, generator=numbers)
        found.append(estimate((one[x] / other[x]).clamp(max=1)))
    check_family(found, overlap(p, q).tolist())
    assert all(one.high >= float(bound) for one, bound in zip(found, pinsker(p, q), strict=True))


@pytest.mark.parametrize("divergence", ["kl", "kl_reversed", "tv"])
def test_fuzzy_bound_holds_for_whole_texts(divergence: str) -> None:
    """Exact divergences of texts of 6 tokens on 24 random chains; shares counted in the text that matters."""
    for i, chain in enumerate(chains(24, 4, 6, seed=7)):
        threshold = (0.05, 0.2, 0.5, 1.0)[i % 4]
        on = rule_on_chain(chain, Fuzzy(divergence, threshold))
        share = on.kept_by_target if divergence == "kl" else on.kept
        bound = float(fuzzy_bound(divergence, 6, threshold, share))
        exact = {"kl": on.kl, "kl_reversed": on.kl_reversed, "tv": min(1.0, on.drift)}[divergence]
        assert exact <= bound + 1e-12
    assert float(fuzzy_bound("js", 6, 0.1, 0.5, 0.25)) == pytest.approx(6 * 0.1 * 0.75)


@pytest.mark.parametrize("call", [
    lambda: fuzzy_bound("js_reference", 5, 0.3, 0.5), lambda: fuzzy_bound("js", 5, 0.3, 0.5),
    lambda: fuzzy_bound("kl", 5, -0.3, 0.5), lambda: fuzzy_bound("kl", 5, 0.3, 1.5),
])  # fmt: skip
def test_bad_arguments_are_named(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="give"):
        call()
