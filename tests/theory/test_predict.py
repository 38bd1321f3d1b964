"""Predictions: mixtures of two texts near the real loop, costs, the best parameters, recordings of a real pair."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.cli.tiny import HIDDEN, save_tiny
from tests.theory.oracles import sequential_counts
from tests.theory.tools import record_chain

from sprinter.decode.signals import MARGIN_CAP, SIGNALS, prefix_signals
from sprinter.decode.spec import Method, parse_method
from sprinter.decode.stop import Untrusted
from sprinter.decode.trust import State, TrustRule
from sprinter.engine.pair import Pair, load_pair
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.heads.artifact import save_head
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.networks import Linear
from sprinter.laws import Sampling, overlap, tv_distance
from sprinter.theory.chains import MarkovChain, speculative_counts
from sprinter.theory.from_labels import from_labels
from sprinter.theory.montecarlo import simulate
from sprinter.theory.outcomes import group_laws
from sprinter.theory.predict import CostRatio, best, measure_costs, predict
from sprinter.theory.recording import Recording, probe
from sprinter.theory.replay import check_replayable

CHAIN = MarkovChain.random(4, 10, seed=3)


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return [record_chain(CHAIN, 200, writer, gate=True) for writer in ("target", "draft")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    save_tiny(root / "target", seed=1)
    draft = save_tiny(root / "draft", seed=2, layers=1)
    config = HeadConfig(HIDDEN, "draft", "target", None, weights_fingerprint(draft))
    save_head(
        Head(config, Linear.of(torch.randn(1, HIDDEN), torch.zeros(1))), root / "gate", "# A random gate\n"
    )
    return load_pair(root / "target", draft=root / "draft", gate=root / "gate", device="cpu")


# --- against the real loop on a chain --------------------------------------------------------------------------------
@pytest.mark.statistical
@pytest.mark.parametrize("spec", [
    "speculative(gamma=3)", "opt(epsilon=0.1, gamma=3)", "uno(epsilon=0.1, gamma=3)", "lenient(w=0.5, gamma=3)",
    "random(rate=0.5, gamma=3)", "trust=coin(rate=0.7),stop=untrusted,cap=6", "svip(h=0.4)",
])  # fmt: skip
def test_predictions_near_the_real_loop(recordings: list[Recording], spec: str) -> None:
    """200 real texts, 200 recorded ones of each writer: four standard errors of their difference are about 7 %."""
    found, real = predict(recordings, spec), simulate(CHAIN, parse_method(spec), 200, seed=9)
    assert found.tokens_per_call == pytest.approx(10 / float(real.target_calls.mean()), rel=0.07)
    assert found.mean_drift == pytest.approx(float(real.drift.mean()) / 10, rel=0.07)


def test_each_method_is_weighed_by_its_own_kind_of_text(recordings: list[Recording]) -> None:
    exact, draft = predict(recordings, "speculative(gamma=3)"), predict(recordings, "draft-only")
    assert exact.weight == 1.0 and exact.lossless and exact.mean_drift == 0.0
    assert draft.weight == 0.0 and draft.tokens_per_call is None and draft.calls == 0
    between = predict(recordings, "random(rate=0.5, gamma=3)")
    assert 0.2 < between.weight < 0.8 and not between.lossless


def test_the_interval_covers_the_truth_and_the_value(recordings: list[Recording]) -> None:
    found = predict(recordings, "speculative(gamma=3)")
    low, high = found.tokens_per_call_interval or (math.nan, math.nan)
    assert low < (found.tokens_per_call or 0) < high
    assert low - 0.1 < 10 / speculative_counts(CHAIN, 3).target_calls < high + 0.1
    low, high = predict(recordings, "coin(rate=0.5)").mean_drift_interval
    assert low < sequential_counts(CHAIN, 0.5, 0.5).drift / 10 < high


def test_one_recording_is_enough_and_two_alike_are_not(recordings: list[Recording]) -> None:
    alone = predict(recordings[:1], "opt(epsilon=0.1, gamma=3)")
    assert alone.weight == 1.0 and alone.parted[1] is None
    for wrong in ([recordings[1]], [recordings[0]] * 2, []):
        with pytest.raises(UserError, match="texts of the target"):
            predict(wrong, "speculative")


# --- cost ------------------------------------------------------------------------------------------------------------
def test_speed_up_by_hand(recordings: list[Recording]) -> None:
    cost = CostRatio(draft=0.2, gate=0.01, token=0.05)
    found = predict(recordings, "sprinter(tau=0.7, cap=5)", cost=cost)
    further = found.tokens_read - found.calls
    busy = found.calls + 0.05 * further + 0.2 * found.draft_steps + 0.01 * found.gate_scores
    assert found.speed_up == pytest.approx(1 / busy)
    plain = predict(recordings, "autoregressive", cost=cost)
    assert plain.speed_up == pytest.approx(1.0) and plain.tokens_per_call == pytest.approx(1.0)
    assert predict(recordings, "speculative").speed_up is None


def test_cheaper_drafts_make_longer_ones_best() -> None:
    gammas = {"gamma": ("speculative(gamma={:.0f})", (1, 3, 9))}
    few = [record_chain(CHAIN, 60, "target")]
    chosen = [best(few, CostRatio(c), families=gammas)["gamma"] for c in (0.7, 0.001)]
    names = [one.method for one in chosen if one is not None]
    assert names[0] == "speculative(gamma=1)" and names[-1] == "speculative(gamma=9)"


def test_the_best_keep_to_the_drift() -> None:
    said: list[str] = []
    dials = {"tau": ("sprinter(tau={:g})", (0.2, 0.6, 0.8)), "random": ("random(rate={:g})", (0.8, 0.9))}
    few = [record_chain(CHAIN, 60, writer, gate=True) for writer in ("target", "draft")]
    found = best(few, CostRatio(0.1), max_drift=0.05, families=dials, progress=said.append)
    assert found["random"] is None and len(said) == 5
    chosen = found["tau"]
    assert chosen is not None and chosen.mean_drift <= 0.05
    without = [record_chain(CHAIN, 5, "target")]
    assert best(without, CostRatio(0.1), families=dials).keys() == {"random"}


@pytest.mark.parametrize("call", [
    lambda: CostRatio(-0.1), lambda: CostRatio(0.1, gate=math.inf), lambda: best([], CostRatio(0.1), max_drift=1.5),
])  # fmt: skip
def test_bad_numbers_are_named(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="give a number"):
        call()


# --- a real pair -----------------------------------------------------------------------------------------------------
def test_a_probe_holds_what_the_models_say(pair: Pair) -> None:
    prompts = ["ab cd", "xyz"]
    one = probe(pair, prompts, new_tokens=6, seed=3)
    assert one.lengths == (6, 6) and one.starts == [0, 6] and one.writer == "target" and one.new_tokens == 6
    out = pair.generate("xyz", method="autoregressive", max_new_tokens=6, seed=4)
    assert one.ids[6:].tolist() == one.tokens[6:].tolist() == [token.id for token in out.tokens]
    assert one.prompts[1] == tuple(pair.tokenizer("xyz")["input_ids"])  # type: ignore[misc]
    # the engine's own drift of the draft's text, and its gate, are the same laws
    drafted = probe(pair, prompts, writer="draft", new_tokens=6, seed=3)
    alone = pair.generate("ab cd", method="draft-only", max_new_tokens=6, seed=3, meter="complete")
    assert float(tv_distance(drafted.p[:6], drafted.q[:6]).mean()) == pytest.approx(
        alone.stats.mean_drift, abs=1e-5
    )
    assert one.signals["gate"].shape == (12,) and bool(
        ((one.signals["gate"] >= 0) & (one.signals["gate"] <= 1)).all()
    )
    assert float(one.signals["entropy"].min()) >= 0 and one.heads == {}
    assert one.signals.keys() == prefix_signals() | {"gate"}
    for name in prefix_signals():
        assert one.signals[name].tolist() == SIGNALS[name](one.q, one.raw_q).double().tolist()


def test_exact_predictions_repeat_the_engine(pair: Pair) -> None:
    """At temperature 0 nothing is left to chance: the replay counts what the engine counts."""
    prompts, sampling = ["ab cd", "xyz", "hello there"], Sampling(temperature=0.0)
    one = probe(pair, prompts, new_tokens=12, sampling=sampling)
    for spec in ("speculative(gamma=3)", "svip(h=0.5)", "heuristic"):
        outs = [pair.generate(prompt, method=spec, max_new_tokens=12, temperature=0.0) for prompt in prompts]
        found = predict([one], spec)
        assert found.calls == pytest.approx(sum(out.stats.target_calls for out in outs) / 36)
        assert found.lossless


@pytest.mark.parametrize(("kind", "features"), [
    ("specdec++", ("hidden_x",)), ("disco", ("top_q(k=5)", "entropy", "position")),
    ("specdec++", ("log_q", "temperature")),
])  # fmt: skip
def test_heads_on_the_run_or_the_token_are_replayed(pair: Pair, kind: str, features: tuple[str, ...]) -> None:
    """At temperature 0 such a head stops the replay's runs where it stops the engine's."""
    torch.manual_seed(3)
    assert pair.models.draft is not None
    config = HeadConfig(HIDDEN, pair.models.draft.id, "target", kind=kind, features=features)
    network = config.network()
    network.load_state_dict({name: torch.randn_like(values) for name, values in network.state_dict().items()})
    headed = Pair(pair.models, heads=[Head(config, network)])
    prompts, sampling = ["ab cd", "xyz", "hello there"], Sampling(temperature=0.0)
    one = probe(headed, prompts, new_tokens=12, sampling=sampling)
    method = f"{kind}({'h' if kind == 'specdec++' else 'threshold'}=0.6)"
    outs = [headed.generate(prompt, method=method, max_new_tokens=12, temperature=0.0) for prompt in prompts]
    assert predict([one], method).calls == pytest.approx(sum(out.stats.target_calls for out in outs) / 36)


def test_large_vocabularies_are_grouped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, own = ["ab cd", "xyz"], "sprinter.theory.recording"
    whole = probe(pair, prompts, new_tokens=8)
    monkeypatch.setattr(f"{own}.FULL", 100)
    monkeypatch.setattr(f"{own}.group_laws", lambda laws, tokens: group_laws(laws, tokens, 32, 8))
    few = probe(pair, prompts, new_tokens=8)
    assert few.p.shape == (16, 40) and few.outcomes is not None
    assert overlap(few.p, few.q).tolist() == pytest.approx(overlap(whole.p, whole.q).tolist(), abs=1e-5)
    assert few.ids.tolist() == whole.ids.tolist()
    assert few.outcome(0, int(few.outcomes[0, 3])) == 3
    assert few.outcome(0, 100_000) >= 32
    for spec in ("speculative(gamma=3)", "lookup", "sprinter(tau=0.5)"):
        assert predict([few], spec).tokens_per_call is not None


def test_costs_are_measured(pair: Pair) -> None:
    cost = measure_costs(pair, repeats=3)
    assert cost.draft > 0 and cost.gate >= 0 and cost.token >= 0


def test_the_cost_of_a_gate_is_what_a_step_with_it_takes_longer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {0: 2.0, -1: 3.0, 1: 2.0, 2: 2.5}  # a run of two steps, the same with a gate, target passes
    monkeypatch.setattr(
        "sprinter.theory.passes.run_interleaved", lambda models, jobs, *_: {n: [seconds[n]] for n in jobs}
    )
    assert measure_costs(pair, context=8, tokens=2, repeats=1) == CostRatio(draft=0.5, gate=0.25, token=0.25)


def test_probes_that_cannot_be_are_refused(pair: Pair) -> None:
    with pytest.raises(UserError, match="at least one prompt"):
        probe(pair, [])
    with pytest.raises(UserError, match="new_tokens=0"):
        probe(pair, ["a"], new_tokens=0)
    alone = Pair(dataclasses.replace(pair.models, draft=None))
    with pytest.raises(UserError, match="no draft"):
        probe(alone, ["a"])
    with pytest.raises(UserError, match="no draft"):
        measure_costs(alone)


# --- labels ----------------------------------------------------------------------------------------------------------
def columns(whole: Recording, kind: int, texts: int = 2) -> dict[str, torch.Tensor]:
    """A recording as columns of labels from ``sprinter.training`` (its raw laws, the union of both top 64)."""
    rows: dict[str, list[torch.Tensor]] = {"top_ids": [], "top_p": [], "top_q": []}
    for p, q in zip(whole.raw_p, whole.raw_q, strict=True):
        union = torch.cat([p.topk(64).indices, q.topk(64).indices]).unique()
        ids = torch.full((128,), -1)
        ids[: len(union)] = union
        rows["top_ids"].append(ids)
        for name, law in (("top_p", p), ("top_q", q)):
            rows[name].append(torch.where(ids >= 0, law[ids.clamp(min=0)], torch.zeros(())))
    n, each = len(whole.ids), len(whole.ids) // texts
    at = torch.arange(n), whole.ids
    return {name: torch.stack(values) for name, values in rows.items()} | {
        "prompt": torch.arange(n) // each, "step": torch.arange(n) % each, "kind": torch.full((n,), kind),
        "token": whole.ids, "tv": tv_distance(whole.raw_p, whole.raw_q), "entropy": whole.signals["entropy"].float(),
        "max_q": whole.signals["max_prob"].float(),
        "hidden": torch.zeros(n, HIDDEN), "hidden_x": torch.zeros(n, HIDDEN),
        "log_p_token": whole.raw_p[at].log(), "log_q_token": whole.raw_q[at].log(),
    }  # fmt: skip


def test_labels_keep_the_overlap_and_the_signals(pair: Pair) -> None:
    whole = probe(pair, ["ab cd", "xyz"], new_tokens=8)
    held = columns(whole, kind=2)
    shuffled = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    found = from_labels({name: values[shuffled] for name, values in held.items()}, "target", heads=pair.heads)
    assert found.lengths == (8, 8) and found.ids.tolist() == whole.ids.tolist() and found.new_tokens == 8
    assert found.p.sum(-1).tolist() == pytest.approx([1.0] * 16, abs=1e-5)
    assert overlap(found.p, found.q).tolist() == pytest.approx(overlap(whole.p, whole.q).tolist(), abs=1e-4)
    assert found.signals["entropy"].tolist() == pytest.approx(whole.signals["entropy"].tolist(), abs=1e-5)
    assert found.signals.keys() == prefix_signals() | {"gate"} == whole.signals.keys()
    for name in prefix_signals():
        assert found.signals[name].tolist() == pytest.approx(whole.signals[name].tolist(), abs=1e-4)
    near, exact = predict([found], "speculative(gamma=3)"), predict([whole], "speculative(gamma=3)")
    assert near.tokens_per_call == pytest.approx(exact.tokens_per_call, rel=0.15)


def test_labels_that_tell_too_little_are_refused(pair: Pair) -> None:
    held = columns(probe(pair, ["ab cd", "xyz"], new_tokens=8), kind=2)
    with pytest.raises(UserError, match="no text by the draft"):
        from_labels(held, "draft")
    with pytest.raises(UserError, match="temperature"):
        from_labels(held, "target", temperature=0.7)
    with pytest.raises(UserError, match="lack positions"):
        from_labels({name: values[1:] for name, values in held.items()}, "target")
    greedy = from_labels(held, "target", temperature=0.0)
    assert float(greedy.p.amax(-1).min()) == 1.0
    assert (
        set(greedy.signals["entropy_processed"].tolist()) == {0.0}
        and float(greedy.signals["entropy"].min()) > 0
    )
    assert set(greedy.signals["margin_processed"].tolist()) == {MARGIN_CAP}


def test_a_results_folder_is_not_needed(tmp_path: Path, pair: Pair) -> None:
    """Recordings live in memory: a prediction writes nothing."""
    predict([probe(pair, ["ab"], new_tokens=3)], "speculative")
    assert list(tmp_path.iterdir()) == []


# --- heads that read more than the hidden state ----------------------------------------------------------------------
RECIPE = ("hidden", "entropy", "max_q", "top_q(k=10)", "temperature")  # the README's, and the built-in gate's


@pytest.mark.parametrize("features", [RECIPE, ("position",), ("top_q(k=10)", "position"), ("hidden",)])
def test_costs_of_a_gate_that_reads_more_than_the_hidden_state(pair: Pair, features: tuple[str, ...]) -> None:
    config = HeadConfig(HIDDEN, "draft", "target", features=features)
    draft = pair.models.draft
    assert draft is not None
    config = dataclasses.replace(config, draft_fingerprint=weights_fingerprint(draft.model))
    wide = Pair(pair.models, Head(config, config.network()))
    assert 0 <= measure_costs(wide, context=8, tokens=2, repeats=3).gate < 10
    recorded = [probe(wide, ["ab"], writer=writer, new_tokens=6) for writer in ("target", "draft")]
    found = predict(recorded, "sprinter(tau=0.5)")
    assert found.gate_scores == found.draft_steps > 0


@pytest.mark.parametrize("accept", ["specinfer", "batch", "spectr"])
def test_a_rule_for_several_drafts_is_replayed_with_one(recordings: list[Recording], accept: str) -> None:
    found = predict(recordings, f"accept={accept},stop=fixed(gamma=3)")
    exact = predict(recordings, "speculative(gamma=3)")
    assert found.lossless and found.mean_drift == 0.0
    assert found.tokens_per_call == pytest.approx(exact.tokens_per_call, rel=0.15)


@dataclasses.dataclass(frozen=True)
class Oracle(TrustRule):
    """A rule that asks for what no probe records."""

    needs = frozenset({"acceptable"})

    def trust(self, signals: Mapping[str, torch.Tensor], state: State) -> tuple[torch.Tensor, State]:
        return signals["acceptable"], state


def test_what_a_pair_cannot_tell_is_known_before_anything_is_recorded(pair: Pair) -> None:
    check_replayable(parse_method("sprinter(tau=0.5)"), pair.heads)
    check_replayable(parse_method("stop=confidence(c=0.2),trust=coin"), {})
    for method, word in (
        (parse_method("sprinter"), "needs a gate"),
        (parse_method("specdec++"), "needs the signal specdec"),
        (
            Method(trust=Oracle(), stop=Untrusted()),
            r"method trust=.*Oracle.* needs the signal acceptable",
        ),
    ):
        with pytest.raises(UserError, match=word.replace("+", r"\+")):
            check_replayable(method, {})
