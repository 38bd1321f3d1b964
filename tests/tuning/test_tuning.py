"""The tuner: candidates, replay, the race, goals, the profile, resumption, and one line for each mistake."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.bench.arms import FakeArm
from tests.theory.tools import chains, record_chain

import sprinter
from sprinter.bench.arm import ArmAnswer, Ask
from sprinter.bench.journal import ROWS, Memory
from sprinter.bench.sample import Sample, SampleCheck, Suite
from sprinter.decode.costs import PassCosts
from sprinter.decode.spec import parse_method
from sprinter.engine.profile import read_profile
from sprinter.errors import UserError
from sprinter.laws import kl_divergence
from sprinter.plots import png
from sprinter.theory.replay import replay
from sprinter.tuning import Goal, TuneSettings, tune
from sprinter.tuning import race as race_module
from sprinter.tuning import run as run_module
from sprinter.tuning.candidates import PLAIN, candidates, family
from sprinter.tuning.judge import _undominated, check_goals, choose, settings_of
from sprinter.tuning.picture import draw_tuning, plot_text
from sprinter.tuning.probe import _rising
from sprinter.tuning.prune import Predicted, faster_half, prune, replay_all
from sprinter.tuning.race import Race

TIMES = PassCosts(((1, 1.0), (5, 1.2), (9, 1.4)), ((1, 0.1), (2, 0.1)))
TINY = TuneSettings(budgets=(0.1,), time_s=None, new_tokens=6, probe_texts=1, keep=1, first=1, finalists=1)


def suite(count: int = 2, **check: Any) -> Suite:
    samples = (
        Sample(f"q{i}", "c", (f"The river {i} rises in",), check=SampleCheck(**check) if check else None)
        for i in range(count)
    )
    return Suite("toy", tuple(samples), 6)


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair(compile=False)


# --- settings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"budgets": (1.5,)}, "budget=1.5 is out of range: give 0 to 1"),
        ({"budgets": (float("nan"),)}, "budgets=nan is out of range"),
        ({"budgets": (0.1, 0.1)}, "twice"),
        ({"budget_unit": "euro"}, "budget_unit='euro' is unknown: give 'drift', 'changed' or 'kl'"),
        ({"time_s": 0.0}, "time_s=0.0 is out of range"),
        ({"keep": 0}, "keep"),
        ({"temperature": -1.0}, "temperature"),
        ({"quality": (Goal("pass_at_1", 0.9),)}, "--run-code"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TuneSettings(**values)


def test_goals_are_parsed() -> None:
    assert Goal.parse(" exact_match >= 0.98") == Goal("exact_match", 0.98)
    assert str(Goal("rougeL", 0.9)) == "rougeL>=0.9"
    for text in ("exact_match", "exact_match>0.9", "exact_match>=much", "", ">=1"):
        with pytest.raises(UserError, match="NAME>=RATIO"):
            Goal.parse(text)
    with pytest.raises(UserError, match="did you mean 'exact_match'"):
        Goal.parse("exact_mach>=0.9")
    with pytest.raises(UserError, match="known: "):
        Goal.parse("perplexity>=0.9")  # less is better
    with pytest.raises(UserError, match="out of range"):
        Goal.parse("exact_match>=7")


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        ({"budgets": (0.1, 0.05, 0.0)}, (0.05, 0.1)),
        ({"budgets": (0,)}, ()),
        ({"budgets": (2.0,), "budget_unit": "changed"}, (0.04,)),
        ({"budgets": (0.3,), "budget_unit": "kl"}, (0.01, 0.02, 0.05, 0.1, 0.2)),
        ({"budgets": (), "quality": (Goal("exact_match", 0.98),)}, (0.01, 0.02, 0.05, 0.1, 0.2)),
        ({"budgets": ()}, ()),
    ],
)
def test_budgets_become_drifts(values: dict[str, Any], levels: tuple[float, ...]) -> None:
    assert TuneSettings(**values).levels(mean_tokens=50.0) == levels


# --- candidates and replay --------------------------------------------------------------------------------------------
def test_candidates_are_exact_or_carry_a_budget() -> None:
    (chain,) = chains(1, 5, 8)
    without = candidates(record_chain(chain, 2, "target"), "optimal(step=0.1, token=0.02)", (0.05, 0.1))
    gated = candidates(record_chain(chain, 2, "target", gate=True), "optimal(step=0.1, token=0.02)", (0.05,))
    costs = "step=0.1, token=0.02, reads=1x1.1x1.2x1.5"
    copying = candidates(record_chain(chain, 2, "target"), "optimal(step=0.1, token=0.02)", (0.05,), costs)
    assert [one.spec for one in copying[1:3]] == [f"auto(budget=0.05, {costs})", f"auto({costs})"]
    for one in [*without, *gated, *copying]:
        method = parse_method(one.spec)
        assert method.lossless() is (one.level is None) and method.budget == one.level
    specs = [one.spec for one in without]
    assert specs[0] == PLAIN and len(specs) == len(set(specs)) > 60
    kinds = {
        (m.trust.__class__, m.stop.__class__, m.accept.__class__, m.drafter.__class__)
        for m in map(parse_method, specs)
    }
    assert len(kinds) >= 20 and any("lookup" in spec for spec in specs)
    assert not any("gate" in spec for spec in specs) and any("trust=gate" in one.spec for one in gated)
    assert {one.level for one in without[:3]} == {
        None,
        0.05,
        0.1,
    }  # in turn: a replay that is cut off has some of each


def test_families() -> None:
    assert family("svip(h=0.3)") == "svip" and family(PLAIN) == PLAIN
    one, two = (f"stop=fixed(gamma={n}),accept=opt(epsilon=0.01),budget=0.1" for n in (3, 5))
    assert family(one) == family(two) == "fixed+opt"


def test_replay_measures_kl() -> None:
    """Along the target's texts: of the draft alone KL(p‖q), of a rule KL(p‖π), and 0 where texts are exact."""
    recording = record_chain(chains(1, 5, 8)[0], 40, "target", seed=1)
    p, q = recording.p.double(), recording.q.double()
    alone = replay(recording, parse_method("draft-only"))
    assert alone.mean_kl == pytest.approx(float(kl_divergence(p, q).mean()), rel=1e-5)
    assert replay(recording, parse_method("speculative(gamma=3)")).kl == 0
    method = parse_method(
        "stop=fixed(gamma=1),accept=lenient(w=0)"
    )  # keeps every draft token: π = q where one is judged
    some = replay(recording, method)
    assert 0 < some.kl < alone.kl
    assert (
        replay(recording, parse_method("lenient(w=0.5,budget=0.02)")).kl
        < replay(recording, parse_method("lenient(w=0.5)")).kl
    )
    assert (
        math.isnan(replay(recording, parse_method("fly")).kl)
        or replay(recording, parse_method("fly")).kl == 0
    )


def test_predictions_follow_the_costs() -> None:
    recording = record_chain(chains(1, 5, 8)[0], 12, "target", seed=1)
    tried = candidates(recording, "optimal(step=0.1, token=0.05)", (0.05,))[:6]
    seen: list[tuple[int, int]] = []
    cheap = replay_all(recording, TIMES, tried, seed=0, progress=lambda *at: seen.append(at))
    dear = replay_all(recording, replace(TIMES, draft=((1, 1.0), (2, 1.0))), tried, seed=0)
    assert cheap[0].spec == PLAIN and cheap[0].speed_up == 1.0 and cheap[0].drift == 0
    assert all(one.speed_up > two.speed_up for one, two in zip(cheap[1:], dear[1:], strict=True))
    assert seen[-1] == (6, 6)
    many = candidates(recording, "optimal(step=0.1, token=0.05)", (0.05,))
    assert len(replay_all(recording, TIMES, many, seed=0, until=time.monotonic())) == 12


def test_the_first_texts_of_a_recording() -> None:
    recording = record_chain(chains(1, 5, 8)[0], 6, "target", seed=1, gate=True)
    some = recording.first_texts(2)
    assert some.lengths == (8, 8) and len(some.p) == len(some.ids) == len(some.signals["gate"]) == 16
    method = parse_method("speculative(gamma=3)")
    assert replay(some, method).by_text.tolist() == replay(recording, method).by_text[:2].tolist()


def test_times_are_made_to_rise() -> None:
    assert _rising([(1, 1.0), (2, 3.0), (3, 2.0), (4, 4.0)]) == ((1, 1.0), (2, 2.5), (3, 2.5), (4, 4.0))
    assert _rising([(1, 3.0), (2, 2.0), (3, 1.0)]) == ((1, 2.0), (2, 2.0), (3, 2.0))


def test_pruning_keeps_some_of_each_class() -> None:
    def at(
        spec: str, speed: float, level: float | None = None, drift: float = 0.0, kl: float = 0.0
    ) -> Predicted:
        return Predicted(spec, level, speed, drift, kl)

    found = [at(PLAIN, 9.0), *(at(f"speculative(gamma={n})", 3 + n / 10) for n in range(5)), at("svip", 1.0)]
    lossy = [at("certain(budget=0.1)", 2.0, 0.1, 0.09, 0.5), at("online(budget=0.1)", 3.0, 0.1, 0.2, 0.1)]
    kept = prune([*found, *lossy], keep=4)
    assert kept == {
        "exact": [*(f"speculative(gamma={n})" for n in (4, 3, 2)), "svip"],  # three of a family
        "0.1": ["certain(budget=0.1)"],  # the other one is expected to exceed its budget
    }
    assert prune([*found, *lossy], keep=1, most_kl=0.3) == {"exact": ["speculative(gamma=4)"]}


def test_half_of_each_class_is_replayed_again() -> None:
    found = [Predicted(PLAIN, None, 0.5, 0.0, 0.0)]
    found += [Predicted(f"e{n}", None, float(n), 0.0, 0.0) for n in range(5)]
    found += [Predicted(f"b{n}", 0.1, 1.0 / (n + 1), 0.1, 0.0) for n in range(3)]
    assert [one.spec for one in faster_half(found)] == [PLAIN, "e2", "e3", "e4", "b0", "b1"]


# --- the race ---------------------------------------------------------------------------------------------------------
Raced = Callable[..., tuple[Race, dict[str, FakeArm]]]


class UnevenArm(FakeArm):
    """Takes 0.1 s or 0.9 s a token, in turn."""

    def answer(self, ask: Ask) -> ArmAnswer:
        self._pace_s = 0.1 if ask.seed % 2 else 0.9
        return super().answer(ask)


@pytest.fixture
def raced(pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch) -> Raced:
    """Run a race among fake arms with given seconds a token; plain decoding takes 1."""

    def run(
        paces: dict[str, list[str]], pace: dict[str, float], prompts: int = 8, **more: Any
    ) -> tuple[Race, dict[str, FakeArm]]:
        made: dict[str, FakeArm] = {}

        def arm(spec: str) -> FakeArm:
            kind = UnevenArm if spec == "uneven" else FakeArm
            return made.setdefault(spec, kind(spec, pace.get(spec, 1.0), starts=spec != "broken"))

        monkeypatch.setattr(race_module, "parse_arm", arm)
        race = Race(
            pair, suite(prompts), replace(TINY, first=2, finalists=2), more.pop("journal", Memory()), **more
        )
        race.run(paces)
        return race, made

    return run


def test_the_slower_half_leaves_after_each_round(raced: Raced) -> None:
    names = [f"m{i}" for i in range(8)]
    race, made = raced({"exact": names}, {name: 0.3 + 0.1 * i for i, name in enumerate(names)})
    assert race.classes == {"exact": ["m0", "m1"]} and race.decided
    assert [one["arms"] for one in race.rounds] == [9, 5, 3]
    assert [one["prompts"] for one in race.rounds] == [2, 4, 8]
    asked = {name: sum(ask.new_tokens == 6 for ask in arm.asks) for name, arm in made.items()}
    assert asked == {PLAIN: 8, "m0": 8, "m1": 8, "m2": 4, "m3": 4, **{f"m{i}": 2 for i in range(4, 8)}}


def test_it_ends_early_where_the_finalists_are_far_apart(raced: Raced) -> None:
    paces = {"a": 0.3, "b": 0.9, "c": 0.2}
    race, _ = raced({"exact": ["b", "a"], "0.1": ["c"]}, paces, prompts=16)
    assert race.decided and race.rounds[-1]["prompts"] == 4
    assert race.classes == {"exact": ["a", "b"], "0.1": ["c"]}
    race, _ = raced({"exact": ["b", "a"]}, paces, prompts=16, thorough=True)
    assert race.rounds[-1]["prompts"] == 16


def test_prompts_are_repeated_if_they_do_not_tell_finalists_apart(raced: Raced) -> None:
    """Each is the faster one on every other prompt: all are asked twice, the second time with other seeds."""
    race, made = raced({"exact": ["a", "uneven"]}, {"a": 0.5}, prompts=4)
    rounds = [(one["prompts"], one["repeats"]) for one in race.rounds]
    assert rounds == [(2, 1), (4, 1), (4, 2)] and race.decided
    assert [ask.seed for ask in made["uneven"].asks if ask.new_tokens == 6][-8:] == [*range(8)]


def test_an_arm_that_fails_leaves(raced: Raced) -> None:
    race, _ = raced({"exact": ["broken", "a"], "0.1": ["broken"]}, {"a": 0.5})
    assert race.classes == {"exact": ["a"]} and "no such engine" in race.failed["broken"]


def test_time_ends_a_race(raced: Raced) -> None:
    with pytest.raises(UserError, match="time was up before"):
        raced({"exact": ["a"]}, {}, until=time.monotonic())
    journal = Memory()
    raced({"exact": ["a", "b", "c"]}, {"a": 0.5, "b": 0.6, "c": 0.7}, journal=journal)
    rows = len(journal.rows)
    race, _ = raced({"exact": ["a", "b", "c"]}, {}, journal=journal, until=time.monotonic())
    assert not race.decided and len(journal.rows) == rows  # what was known decides
    assert race.classes == {"exact": ["a", "b"]}


def test_known_answers_are_not_asked_again(raced: Raced) -> None:
    journal = Memory()
    raced({"exact": ["a", "b"]}, {"a": 0.5}, journal=journal)
    _, made = raced({"exact": ["a", "b"]}, {"a": 0.5}, journal=journal)
    assert all(ask.new_tokens != 6 or len(arm.asks) <= 1 for arm in made.values() for ask in arm.asks)


# --- entries and choice -----------------------------------------------------------------------------------------------
def row(spec: str, prompt: int, seconds: float, drift: float = 0.0, **quality: float) -> dict[str, Any]:
    return {
        "question_id": str(prompt), "model_id": spec, "suite": "toy", "temperature": 1.0, "repeat": 0,
        "choices": [{"new_tokens": [10], "wall_time": [seconds]}], "target_calls": [4], "drift_sum": 10 * drift,
        "drift_tokens": 10, "quality": quality,
    }  # fmt: skip


LOSSY = "certain(budget=0.1)"


def test_entries_have_every_budget_unit() -> None:
    rows = [row(PLAIN, n, 1.0) for n in range(6)] + [row(LOSSY, n, 0.5, 0.05) for n in range(6)]
    expected = {LOSSY: Predicted(LOSSY, 0.1, 2.0, 0.05, 0.02)}
    best, plain = settings_of(rows, {"0.1": [LOSSY]}, expected, TuneSettings(budgets=(0.1,)))
    assert best["spec"] == LOSSY and best["speed_up"] == pytest.approx([2.0, 2.0, 2.0])
    assert (
        best["drift"][0] == pytest.approx(0.05)
        and best["changed"] == pytest.approx(0.5)
        and best["kl"] == 0.02
    )
    assert (
        not best["lossless"]
        and best["allowed"]
        and best["calls"] == pytest.approx([0.4, 0.0])
        and best["prompts"] == 6
    )
    assert plain["spec"] == PLAIN and plain["lossless"] and plain["changed"] == plain["kl"] == 0.0


@pytest.mark.parametrize(
    ("unit", "budget", "spec"),
    [
        ("drift", 0.05, LOSSY), ("drift", 0.04, "svip"), ("changed", 0.6, LOSSY), ("changed", 0.4, "svip"),
        ("kl", 0.02, LOSSY), ("kl", 0.01, "svip"), ("drift", 0.0, "svip"),
    ],
)  # fmt: skip
def test_the_choice_in_each_budget_unit(unit: Any, budget: float, spec: str) -> None:
    common = {"allowed": True, "level": None}
    entries = [
        {
            "spec": LOSSY,
            "lossless": False,
            "speed_up": [2.0],
            "drift": [0.05],
            "changed": 0.5,
            "kl": 0.02,
            **common,
        },
        {
            "spec": "svip",
            "lossless": True,
            "speed_up": [1.5],
            "drift": [0.0],
            "changed": 0.0,
            "kl": 0.0,
            **common,
        },
        {
            "spec": "online",
            "lossless": False,
            "speed_up": [3.0],
            "drift": [0.9],
            "changed": 9.0,
            "kl": None,
            **common,
        },
    ]
    exact, chosen = choose(entries, TuneSettings(budgets=(budget,), budget_unit=unit))
    assert exact["spec"] == "svip" and (chosen["spec"], chosen["budget"]) == (spec, budget)


def test_a_goal_needs_its_lower_bound_above_the_ratio() -> None:
    """Half as fast and as right: allowed. Right in 6 of 40 where the target is in 40: not."""
    goal = TuneSettings(budgets=(), quality=(Goal("exact_match", 0.98),))
    rows = [row(PLAIN, n, 1.0, exact_match=1.0) for n in range(40)]
    rows += [row(LOSSY, n, 0.5, 0.05, exact_match=1.0) for n in range(40)]
    rows += [row("online(budget=0.1)", n, 0.2, 0.05, exact_match=float(n < 6)) for n in range(40)]
    entries = settings_of(rows, {"0.1": [LOSSY, "online(budget=0.1)"]}, {}, goal)
    by_spec = {one["spec"]: one for one in entries}
    assert by_spec[LOSSY]["allowed"] and by_spec[LOSSY]["quality"]["exact_match>=0.98"] == [1.0, 1.0, 1.0]
    assert not by_spec["online(budget=0.1)"]["allowed"]
    exact, kept = choose(entries, goal)
    assert exact["spec"] == PLAIN and kept["spec"] == LOSSY and kept["goal"] == "exact_match>=0.98"
    rows = [
        {**one, "quality": {"exact_match": 0.0}} for one in rows
    ]  # a target that is never right shows nothing
    assert not any(
        one["allowed"] for one in settings_of(rows, {"0.1": [LOSSY]}, {}, goal) if one["spec"] != PLAIN
    )


def test_goals_that_the_prompts_cannot_show() -> None:
    goal = TuneSettings(budgets=(), quality=(Goal("exact_match", 0.98),))
    with pytest.raises(UserError, match=r"exact_match>=0.98 needs right answers"):
        check_goals(suite(), goal)
    check_goals(suite(kind="number", answer="4"), goal)
    with pytest.raises(UserError, match="reference answers"):
        check_goals(suite(), replace(goal, quality=(Goal("rouge1", 0.9),)))


def test_the_front_has_what_nothing_beats() -> None:
    def at(speed: float, drift: float) -> dict[str, float]:
        return {"speed_up": speed, "drift": drift}

    assert _undominated([at(1.0, 0.0), at(2.0, 0.0), None, at(2.0, 0.1), at(3.0, 0.1)]) == [
        False,
        True,
        False,
        False,
        True,
    ]


# --- the whole --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tuned(pair: sprinter.Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("tuned") / "profile.json"
    return out, tune(pair, suite(), out, TINY)


def test_a_profile_is_written_and_can_be_used(
    pair: sprinter.Pair, tuned: tuple[Path, dict[str, Any]]
) -> None:
    out, made = tuned
    assert json.loads(out.read_text()) == made
    specs = [one["spec"] for one in made["settings"]]
    assert PLAIN in specs and {one["spec"] for one in made["chosen"]} <= set(specs)
    assert [one["goal"] for one in made["chosen"]] == ["exact", "drift<=0.1"]
    assert parse_method(made["chosen"][0]["spec"]).lossless()
    for one in made["settings"]:
        assert one["lossless"] or one["drift"][0] > 0 or one["level"] == 0.1
    assert len(made["front"]) > 60 and sum(one["measured"] is not None for one in made["front"]) == len(specs)
    assert made["prompts"]["prompt_tokens"][0] > 3 and made["prompts"]["count"] == 2
    assert list(made["costs"]["target_s"]) == [str(n) for n in range(1, 10)]
    mine = sprinter.Pair(pair.models, pair.gate, profile=read_profile(out))
    assert mine.generate("The river", method="auto", budget=0.1, max_new_tokens=4).stats.new_tokens == 4


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first candidates alone: replaying all takes seconds."""
    monkeypatch.setattr(run_module, "candidates", lambda *given: candidates(*given)[:8])


@pytest.mark.usefixtures("few")
def test_it_goes_on_where_it_was_interrupted(pair: sprinter.Pair, tmp_path: Path) -> None:
    out, seen = tmp_path / "profile.json", list[str]()

    def stop_in_the_race(done: int, wanted: int, stage: str) -> None:
        if stage.startswith("round 1") and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(pair, suite(), out, TINY, progress=stop_in_the_race)
    rows = tmp_path / "profile.work" / ROWS
    first = rows.read_text()
    assert not out.exists() and first.count("\n") == 2
    made = tune(pair, suite(), out, TINY, progress=lambda done, wanted, stage: seen.append(stage))
    assert rows.read_text().startswith(first) and not any("replaying" in stage for stage in seen)
    again = tune(pair, suite(), out, TINY)
    assert again["settings"] == made["settings"] and again["chosen"] == made["chosen"]
    with pytest.raises(UserError, match=r"another settings.*--restart"):
        tune(pair, suite(), out, replace(TINY, temperature=0.5))
    with pytest.raises(UserError, match="another suites"):
        tune(pair, replace(suite(), sources=({"name": "x", "sha256": "0"},)), out, TINY)
    (tmp_path / "profile.work" / "replayed.json").write_text("{")
    with pytest.raises(UserError, match=r"replayed.json' is damaged: give --restart"):
        tune(pair, suite(), out, TINY)


def test_the_picture_and_the_plot_show_what_was_chosen(
    tuned: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    made = tuned[1]
    text = plot_text(made)
    assert "*" in text.splitlines()[0] and sum("*" in line for line in text.splitlines()[1:17]) >= 1
    assert all(len(line) <= 72 for line in text.splitlines()[1:17])
    pytest.importorskip("matplotlib")
    assert png(lambda: draw_tuning(made)).startswith(b"\x89PNG")


def test_mistakes_are_told_before_any_work(pair: sprinter.Pair, tmp_path: Path) -> None:
    plain = sprinter.Pair(replace(pair.models, draft=None))
    with pytest.raises(UserError, match=r"this pair has none: give draft="):
        tune(plain, suite(), tmp_path / "a.json", TINY)
    with pytest.raises(UserError, match="no prompt fits"):
        tune(pair, suite(), tmp_path / "b.json", replace(TINY, new_tokens=10**6))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="is not a file name"):
        tune(pair, suite(), tmp_path, TINY)
    with pytest.raises(UserError, match="needs right answers"):
        tune(pair, suite(), tmp_path / "c.json", replace(TINY, quality=(Goal("exact_match", 0.98),)))


@pytest.mark.usefixtures("few")
def test_quality_is_measured_on_the_finalists(pair: sprinter.Pair, tmp_path: Path) -> None:
    asked = replace(TINY, quality=(Goal("exact_match", 0.9),))
    made = tune(pair, suite(kind="text", answer="nothing says this"), tmp_path / "q.json", asked)
    lossy = [one for one in made["settings"] if not one["lossless"]]
    assert lossy and not any(one["allowed"] for one in lossy)  # the target is never right: nothing is shown
    assert made["chosen"][1]["goal"] == "drift<=0.1" and parse_method(made["chosen"][1]["spec"]).lossless()
