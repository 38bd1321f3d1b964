"""Replays: draws keep their laws, exact methods are replayed without error, lossy ones nearly so."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from tests.theory.oracles import sequential_counts
from tests.theory.tools import INSTANCES, chains, check_family, laws, record_chain
from tests.tools import FALSE_ALARM, chi_square_p

from sprinter.decode.accept import Exact, Fuzzy, Lenient, Opt, RandomAccept, Typical, Uno
from sprinter.decode.budget import DriftAccount
from sprinter.decode.draft import Record
from sprinter.decode.loop import Limits, decode
from sprinter.decode.spec import Method, parse_method
from sprinter.decode.stop import Fixed
from sprinter.errors import UserError
from sprinter.laws import overlap, tv_distance
from sprinter.theory.chains import MarkovChain, speculative_counts
from sprinter.theory.montecarlo import answer_all, estimate, simulate
from sprinter.theory.outcomes import group_laws, grouping, split_rest
from sprinter.theory.replay import CoupledDraws, ReplayDriver, replay

P, Q = (law[2] for law in laws(4, 6, seed=8))
RULES = [
    Exact(),
    Opt(0.1),
    Uno(0.1),
    RandomAccept(0.6),
    Typical(),
    Fuzzy("tv", 0.1),
    Fuzzy("tv", 0.9),
    Lenient(0.4),
]


def one_position(writer: str) -> MarkovChain:
    """A text of one token, whose laws are P and Q whatever the prompt."""
    start = torch.full((6,), 1 / 6, dtype=torch.float64)
    return MarkovChain(P.expand(1, 6, 6), Q.expand(1, 6, 6), start)


# --- draws -----------------------------------------------------------------------------------------------------------
@pytest.mark.statistical
@pytest.mark.parametrize("writer", ["target", "draft"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_emits_its_own_law(rule: Opt, writer: str) -> None:
    """1,200 replays of one-token texts, on either writer's text; false-alarm rate 1e-4 each."""
    recording = record_chain(one_position(writer), 1200, writer, seed=3)  # type: ignore[arg-type]
    method, numbers = Method(stop=Fixed(1), accept=rule, to_horizon=True), np.random.default_rng(0)
    counts: Counter[int] = Counter()
    for k in range(1200):
        record = Record()
        draws = CoupledDraws(recording, rule, k, k, numbers)
        driver = ReplayDriver(recording, method, k, draws, record.stats)
        answer_all(decode((0,), method, Limits(1), draws, record, True), driver.answer)
        counts[record.tokens[0].id] += 1
    law = rule.law(P, Q)
    assert chi_square_p([counts[x] for x in range(6)], law.tolist()) > FALSE_ALARM


@pytest.mark.parametrize("rule", [Opt(0.1), Uno(0.1), RandomAccept(0.6), Lenient(0.4)], ids=str)
def test_the_text_stays_near_the_record(rule: Opt) -> None:
    """It parts from a text of the target about as often as TV(π, p) makes it."""
    recording = record_chain(one_position("target"), 1200, "target", seed=4)
    found = replay(recording, Method(stop=Fixed(1), accept=rule, to_horizon=True))
    must = float(tv_distance(rule.law(P, Q), P))
    share = found.parted / found.tokens
    assert must - 0.05 <= share <= must + 0.05
    loose = replay(recording, Method(stop=Fixed(1), accept=rule, to_horizon=True), coupled=False)
    assert loose.parted > found.parted


# --- exact methods ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "spec",
    [
        "speculative(gamma=3)",
        "svip(h=0.4)",
        "heuristic",
        "adaedl",
        "lookup",
        "hybrid(n=1, least=1)",
        "autoregressive",
    ],
)
def test_an_exact_method_writes_the_recorded_text(spec: str) -> None:
    recording = record_chain(MarkovChain.random(5, 10, seed=1), 30, "target")
    found = replay(recording, parse_method(spec))
    assert found.parted == 0 and found.tokens == 300 and found.drift == 0 and found.scored == 300


def test_a_copys_signals_are_its_own() -> None:
    """The draft is unsure everywhere, so its entropy would end every copy; a copied token's law has none."""
    cycle = torch.roll(torch.eye(5, dtype=torch.float64), 1, dims=1) * 0.98 + 0.004
    unsure = torch.full((5, 5), 0.2, dtype=torch.float64)
    start = torch.full((5,), 0.2, dtype=torch.float64)
    chain = MarkovChain(cycle.expand(40, 5, 5), unsure.expand(40, 5, 5), start)
    recording = record_chain(chain, 10, "target")
    drafter = "drafter=lookup(n=2,least=2,otherwise=model,length=6)"
    fixed, copied, alone = (
        replay(recording, parse_method(spec))
        for spec in (f"{drafter},stop=fixed(gamma=6)", "hybrid(n=2, least=2, copies=6, h=0.3)", "svip(h=0.3)")
    )
    assert copied.parted == 0 and copied.target_calls < 0.6 * alone.target_calls
    assert copied.draft_steps < 0.5 * fixed.draft_steps
    assert copied.target_calls == pytest.approx(fixed.target_calls, rel=0.35)


@pytest.mark.parametrize(
    "spec",
    ["opt(epsilon=0.2, {})", "lenient(w=0.3, {})", "typical({})", "sprinter(tau=0.4, {})", "draft-only({})"],
)
def test_a_head_is_replayed_with_the_exact_rule(spec: str) -> None:
    """As long as the text: the recorded text; shorter: less drift than without it, from the rest alone."""
    recording = record_chain(MarkovChain.random(5, 10, seed=1), 30, "target", gate=True)
    whole = replay(recording, parse_method(spec.format("head=10")))
    assert whole.parted == whole.drift == whole.trusted == 0 and whole.tokens == 300
    part, none = (replay(recording, parse_method(spec.format(f"head={n}"))) for n in (6, 0))
    assert 0 < part.drift < 0.7 * none.drift


@pytest.mark.statistical
def test_exact_methods_have_their_exact_counts() -> None:
    """20 chains, 100 recorded texts each, drafts of 1 to 5 tokens: target calls; false-alarm rate 0.1 %."""
    found, truths = [], []
    for i, chain in enumerate(chains(INSTANCES, 3, 8, seed=5)):
        gamma = 1 + i % 5
        recording = record_chain(chain, 100, "target", seed=i)
        found.append(estimate(replay(recording, Method(stop=Fixed(gamma)), seed=i).by_text[:, 1]))
        truths.append(speculative_counts(chain, gamma).target_calls)
    check_family(found, truths)


def test_the_draft_alone_writes_the_drafts_text() -> None:
    recording = record_chain(MarkovChain.random(4, 10, seed=2), 40, "draft")
    found = replay(recording, parse_method("draft-only"))
    assert found.parted == 0 and found.target_calls == 0 and found.tokens_per_call is None
    assert found.mean_drift == pytest.approx(float(tv_distance(recording.p, recording.q).mean()))


# --- lossy methods ---------------------------------------------------------------------------------------------------
def test_tokens_that_a_budget_has_judged_exactly_have_no_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record_chain(MarkovChain.random(4, 10, seed=2), 40, "target")
    monkeypatch.setattr(DriftAccount, "allows", lambda self, signals, position, wanted: True)
    tight, loose = (replay(recording, parse_method(f"draft-only(budget={limit})")) for limit in (1e-9, 1.0))
    assert tight.accepted > 0 == tight.trusted == tight.drift == tight.kl
    assert loose.kl > 0.01 * loose.tokens


def test_a_gate_at_either_end() -> None:
    """τ above every score: every token is checked, one by one; τ = 0: none but the text's end."""
    recording = record_chain(MarkovChain.random(4, 10, seed=2), 40, "target", gate=True)
    none = replay(recording, parse_method("sprinter(tau=1.0, cap=10)"))
    assert none.trusted == none.drift == none.parted == 0
    every = replay(recording, parse_method("trust=gate(tau=0.0),stop=untrusted,cap=11"))
    assert every.trusted == 400 and every.target_calls == 0
    assert every.mean_drift == pytest.approx(float(tv_distance(recording.p, recording.q).mean()))


@pytest.mark.statistical
def test_coins_on_both_texts_near_the_real_loop() -> None:
    """A coin ignores the token, so Theorem 3.1 holds with equal rates; 400 texts against the exact counts.

    The remaining noise (five standard errors of means over 400 texts) is below 6 %.
    """
    chain = MarkovChain.random(4, 10, seed=3)
    exact = sequential_counts(chain, 0.5, 0.5)
    for writer in ("target", "draft"):
        found = replay(
            record_chain(chain, 400, writer), parse_method("trust=coin(rate=0.5),stop=untrusted,cap=100")
        )
        assert found.target_calls / 400 == pytest.approx(exact.target_calls, rel=0.06)
        assert found.drift / 400 == pytest.approx(exact.drift, rel=0.06)


@pytest.mark.statistical
@pytest.mark.slow  # half a minute
def test_several_drafts_near_the_real_loop() -> None:
    """Batches on a chain: replayed and real target calls, 300 texts each; five standard errors are below 6 %."""
    chain = MarkovChain.random(5, 10, seed=6)
    for spec in ("batch(drafts=3, gamma=3)", "specinfer(drafts=2, gamma=3)", "spectr(drafts=2, gamma=3)"):
        method = parse_method(spec)
        real = float(simulate(chain, method, 300).target_calls.mean())
        assert replay(record_chain(chain, 300, "target"), method).target_calls / 300 == pytest.approx(
            real, rel=0.06
        )


def test_counts_add_up_and_repeat() -> None:
    recording = record_chain(MarkovChain.random(4, 9, seed=7), 20, "target", gate=True)
    method = parse_method("sprinter(tau=0.6, tail=2)")
    found, again = replay(recording, method, repeats=3, seed=5), replay(recording, method, repeats=3, seed=5)
    assert dataclasses.replace(found, by_text=None) == dataclasses.replace(again, by_text=None)  # type: ignore[arg-type]
    assert found.by_text.sum(0).tolist() == pytest.approx(
        [found.tokens, found.target_calls, found.drift, found.draft_steps]
    )
    assert found.tokens == 20 * 9 * 3 and found.read >= found.target_calls
    assert found.checked >= found.accepted and found.trusted + found.accepted <= found.draft_steps


def test_texts_that_ended_early_end_the_replay() -> None:
    chain = MarkovChain.random(3, 8, seed=4)
    whole = record_chain(chain, 10, "target")
    short = dataclasses.replace(
        whole, lengths=(5, 3) * 10, prompts=((0,),) * 20
    )  # the same positions as twenty shorter texts
    assert replay(short, parse_method("speculative(gamma=4)")).tokens == 80


def test_what_was_not_recorded_is_named() -> None:
    recording = record_chain(MarkovChain.random(3, 5), 4, "target")
    with pytest.raises(UserError, match="needs a gate"):
        replay(recording, parse_method("sprinter"))
    with pytest.raises(UserError, match=r"specdec\+\+"):
        replay(recording, parse_method("specdec++"))
    with pytest.raises(UserError, match="repeats=0"):
        replay(recording, parse_method("speculative"), repeats=0)


# --- large vocabularies ----------------------------------------------------------------------------------------------
def test_groups_keep_the_overlap() -> None:
    for p, q in zip(*laws(12, 400, seed=1, sharp=2.0), strict=True):
        outcome, alone = grouping(p, q, kept=50, groups=8)
        assert sorted(outcome[alone].tolist()) == list(range(50))
        assert float(torch.maximum(p, q)[alone].min()) >= float(torch.maximum(p, q)[outcome >= 50].max())
        on_p, on_q = (torch.zeros(58, dtype=torch.float64).scatter_add_(0, outcome, law) for law in (p, q))
        assert float(on_p.sum()) == pytest.approx(1) and float(on_q.sum()) == pytest.approx(1)
        assert float(overlap(on_p, on_q)) == pytest.approx(float(overlap(p, q)), abs=1e-12)
        assert bool((outcome < 58).all())


def test_grouped_laws_of_several_positions() -> None:
    p, q = laws(5, 300, seed=2)
    tokens = torch.tensor([0, 10, 299, 7, 150])
    (on_p, on_q), places, ids = group_laws((p, q), tokens, kept=40, groups=6)
    assert on_p.shape == on_q.shape == ids.shape == (5, 46)
    for n, x in enumerate(tokens.tolist()):
        assert int(ids[n, places[n]]) in (x, -1)
        if int(ids[n, places[n]]) == x:
            assert float(on_p[n, places[n]]) == pytest.approx(float(p[n, x]))
    assert (ids[:, 40:] == -1).all()


def test_sums_of_the_rest_are_kept() -> None:
    rest_p, rest_q, common = (
        torch.tensor([0.3, 0.1, 0.0]),
        torch.tensor([0.2, 0.25, 0.1]),
        torch.tensor([0.15, 0.1, 0.0]),
    )
    p, q = split_rest(rest_p, rest_q, common, groups=10)
    assert p.shape == (3, 10) and bool((p >= 0).all()) and bool((q >= 0).all())
    assert p.sum(-1).tolist() == pytest.approx(rest_p.tolist()) and q.sum(-1).tolist() == pytest.approx(
        rest_q.tolist()
    )
    assert torch.minimum(p, q).sum(-1).tolist() == pytest.approx(common.tolist(), abs=1e-7)
