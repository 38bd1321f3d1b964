"""Requests that stop drafting where it does not pay, ``auto``, and the costs by which both decide."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import sprinter
from sprinter.decode import Fixed, Method, Recycle, Suffix
from sprinter.decode.costs import PassCosts
from sprinter.decode.draft import Origin
from sprinter.decode.spec import full_spec, parse_method
from sprinter.decode.switch import Past, RoundCount, Spent, Tracker
from sprinter.engine import costs as costs_module
from sprinter.engine import runtime, stream
from sprinter.errors import UserError
from sprinter.models.pair import LoadedPair

CHEAP = PassCosts(((1, 1.0), (9, 1.05)), ((1, 0.02), (9, 0.02)))
DEAR = PassCosts(((1, 1.0), (9, 9.0)), ((1, 0.9), (9, 4.0)))
LOSES = PassCosts(((1, 1.0), (64, 1.0)), ((1, 0.8), (64, 0.8)))
LITTLE = PassCosts(((1, 1.0), (64, 1.0)), ((1, 0.7), (64, 0.7)))
"""Costs at which a draft pays if nearly all of it is kept."""
PROMPT = [3, 5, 7, 9]
PAYS = runtime._PAYS  # before the settings for all tests replace it


@pytest.fixture
def with_costs(tiny_pair: sprinter.Pair) -> Callable[[PassCosts], sprinter.Pair]:
    """The tiny pair, whose passes cost what the test says."""

    def make(costs: PassCosts) -> sprinter.Pair:
        pair = sprinter.Pair(tiny_pair.models)
        pair._runtime.pass_costs = pair._runtime.shared_costs = costs  # in place of measuring
        return pair

    return make


def ids(generation: sprinter.Generation) -> list[int]:
    return [token.id for token in generation.tokens]


def test_drafting_stops_where_it_costs_more(with_costs: Callable[[PassCosts], sprinter.Pair]) -> None:
    options: dict[str, Any] = {"method": "speculative(gamma=5)", "max_new_tokens": 60, "seed": 1}
    dear, cheap = with_costs(LOSES), with_costs(CHEAP)
    stopped = dear.generate(PROMPT, never_slower=True, **options)
    assert 1 < stopped.stats.switches[0] < 6
    later = [token.origin for token in stopped.tokens[30:50]]
    assert set(later) == {Origin.TARGET}
    assert "drafting stopped in round" in stopped.stats.summary
    assert cheap.generate(PROMPT, never_slower=True, **options).stats.switches == []
    without = dear.generate(PROMPT, **options)
    assert without.stats.switches == [] and without.stats.drafted > stopped.stats.drafted
    hopeless = with_costs(DEAR).generate(PROMPT, never_slower=True, **options)
    assert hopeless.stats.switches == [1] and hopeless.stats.drafted == 0


def test_a_record_writes_the_text_again_where_costs_differ(
    with_costs: Callable[[PassCosts], sprinter.Pair],
) -> None:
    first = with_costs(DEAR).generate(PROMPT, method="auto", max_new_tokens=60, seed=2)
    assert first.stats.switches and first.stats.lossless
    assert first.request is not None and first.request.switches == tuple(first.stats.switches)
    kept = json.loads(json.dumps(first.to_dict()))
    again = with_costs(CHEAP).generate(kept["prompt"]["token_ids"], **kept["request"])
    assert ids(again) == ids(first) and again.stats.switches == first.stats.switches


@pytest.mark.parametrize("rows", [1, 4])
def test_where_a_draft_rests_a_text_that_repeats_itself_is_copied(
    with_costs: Callable[[PassCosts], sprinter.Pair], rows: int
) -> None:
    pair = with_costs(PassCosts(((1, 1.0), (9, 1.05)), ((1, 2.0), (9, 2.0))))  # only its steps are dear
    options: dict[str, Any] = {"max_new_tokens": 80, "temperature": 0.0, "never_slower": True}
    made = pair.generate_batch([PROMPT * 4] * rows, method="speculative(gamma=5)", rows=rows, **options)
    plain = pair.generate(PROMPT * 4, method="autoregressive", max_new_tokens=80, temperature=0.0)
    stats = made[0].stats
    assert stats.switches and stats.copy_switches and stats.lossless
    assert stats.target_calls < 60 and stats.accepted > 20
    assert ", copies instead" in stats.summary
    for one in made:
        assert ids(one) == ids(plain)
        kept = json.loads(json.dumps(one.to_dict()))
        again = with_costs(CHEAP).generate(kept["prompt"]["token_ids"], **kept["request"])
        assert again.accept_lengths == one.accept_lengths
        assert again.stats.copy_switches == one.stats.copy_switches


def test_a_method_that_only_copies_rests_plainly(with_costs: Callable[[PassCosts], sprinter.Pair]) -> None:
    pair = with_costs(DEAR)
    options: dict[str, Any] = {"max_new_tokens": 80, "temperature": 0.0, "never_slower": True}
    made = pair.generate(PROMPT * 4, method="lookup(n=2, gamma=5)", **options)
    assert made.stats.copy_switches == []


@pytest.mark.parametrize("rows", [2, 4])
def test_the_rows_of_a_batch_decide_together_and_replay_alone(
    with_costs: Callable[[PassCosts], sprinter.Pair], rows: int
) -> None:
    pair = with_costs(DEAR)
    options: dict[str, Any] = {"method": "speculative(gamma=4)", "max_new_tokens": 40, "never_slower": True}
    made = pair.generate_batch([PROMPT] * 6, rows=rows, seed=list(range(6)), **options)
    # The rows of the second wave begin after it has stopped.
    assert all(one.stats.switches[:1] == [1] for one in made[rows : 2 * rows])
    for one in made:
        assert ids(pair.generate(PROMPT, one.request)) == ids(one)


def test_a_batch_begins_where_the_one_before_ended(with_costs: Callable[[PassCosts], sprinter.Pair]) -> None:
    """What drafts gain on this pair is known already. Where it would change texts of a seed, it begins anew."""
    pair = with_costs(LITTLE)
    options: dict[str, Any] = {"method": "speculative(gamma=5)", "max_new_tokens": 60, "never_slower": True}
    prompts = [PROMPT, PROMPT[::-1]]
    first, later, *warm = (
        pair.generate_batch(prompts, rows=2, seed=[1, 2], temperature=temperature, **options)
        for temperature in (0.0, 0.0, 1.0, 1.0)
    )
    assert first[0].stats.switches[0] > 1 and later[0].stats.switches[0] == 1
    assert [ids(one) for one in warm[0]] == [ids(one) for one in warm[1]] and warm[1][0].stats.switches[0] > 1
    for prompt, one in zip(prompts, later, strict=True):
        again = pair.generate(prompt, one.request)
        assert ids(again) == ids(one) and again.accept_lengths == one.accept_lengths
    assert [type(kept) for kept in pair._runtime.trackers.values()] == [Past], (
        "an engine that is gone is not held"
    )
    pair.reload()
    assert pair._runtime.trackers == {}, "other weights may draft better"


def test_auto_in_rows_begins_with_what_it_has_learned(
    with_costs: Callable[[PassCosts], sprinter.Pair],
) -> None:
    pair = with_costs(replace(CHEAP, host=(0.0, 0.0, 0.3)))
    options: dict[str, Any] = {"method": "auto", "max_new_tokens": 30, "temperature": 0.0}
    first, later = (pair.generate_batch([PROMPT] * 2, rows=2, **options)[0] for _ in range(2))
    assert first.request is not None and first.request.rules is None and "signal=mean" in first.method
    assert later.request is not None and later.request.rules is not None and first.rules is not None
    overlap = [float(one.stop_state[2]) for one in (later.request.rules, first.rules)]
    assert overlap[0] != 0.7 and float(later.request.rules.stop_state[5]) > 10, "of so many verdicts"
    kept = json.loads(json.dumps(later.to_dict()))
    again = with_costs(DEAR).generate(kept["prompt"]["token_ids"], **kept["request"])
    assert ids(again) == ids(later) and kept["request"]["rules"] is not None
    alone = pair.generate(PROMPT, **options)
    assert alone.request is not None and alone.request.rules is None, "a text alone depends on no other"


def test_what_rules_learn_is_told_to_their_owner_alone(
    with_costs: Callable[[PassCosts], sprinter.Pair],
) -> None:
    pair = with_costs(CHEAP)
    begun = []
    with sprinter.Engine(pair, rows=2) as engine:
        for owner in ("alice", "bob", "bob"):
            options = sprinter.GenerationOptions(method="auto", max_new_tokens=20, temperature=0.0)
            number = engine.put(engine._task(PROMPT, options, 0, owner))
            request = engine.finish()[number].request
            assert request is not None
            begun.append(request.rules is not None)
    assert begun == [False, False, True]


def test_auto_takes_the_costs_that_were_measured(with_costs: Callable[[PassCosts], sprinter.Pair]) -> None:
    pair = with_costs(DEAR)
    one = pair.generate(PROMPT, method="auto", max_new_tokens=4)
    costs = "step=0.9, token=1.0, verify=0.0, signal=entropy, reads=2x4x8x16"
    assert one.method == f"auto({costs})" and one.stats.budget is None
    lossy = pair.generate(PROMPT, method="auto", budget=0.2, max_new_tokens=4)
    assert lossy.method == f"auto(budget=0.2, {costs})" and lossy.stats.budget == 0.2
    assert not lossy.stats.lossless and lossy.request is not None and lossy.request.never_slower
    named = pair.generate(PROMPT, method="stop=optimal(step=measured,token=0.1)", max_new_tokens=4)
    assert "step=0.9" in named.method and "token=0.1" in named.method
    assert named.request is not None and not named.request.never_slower
    off = pair.generate(PROMPT, method="auto", never_slower=False, max_new_tokens=40, seed=2)
    assert off.stats.switches == []


def test_auto_is_a_preset_like_others() -> None:
    method = parse_method("auto(budget=0.1, step=0.3, token=0)")
    assert parse_method(full_spec(method)) == method and not method.lossless()
    assert parse_method("auto").lossless() and parse_method("auto(budget=0)").budget is None


def test_a_method_that_never_calls_the_target_is_left_alone(
    with_costs: Callable[[PassCosts], sprinter.Pair],
) -> None:
    pair = with_costs(DEAR)
    options: dict[str, Any] = {"method": "draft-only", "max_new_tokens": 12, "seed": 1}
    wanted = ids(pair.generate(PROMPT, **options))
    assert ids(pair.generate(PROMPT, switches=[1], **options)) == wanted
    made = pair.generate_batch([PROMPT] * 3, never_slower=True, **options)
    assert all(ids(one) == wanted for one in made)


def spelled(costs: PassCosts) -> str:
    """`auto` with these costs, as records name it."""
    named = {name: float(f"{getattr(costs, name):.2g}") for name in ("step", "token", "verify")}
    words = ", ".join(f"{name}={value}" for name, value in named.items())
    return f"auto({words}, signal={costs.signal}, reads={costs.reads})"


def test_auto_weighs_the_passes_that_its_rows_share(
    with_costs: Callable[[PassCosts], sprinter.Pair],
) -> None:
    """The spec in a record names the costs, so that each text can be written again alone."""
    costs = PassCosts(((1, 1.0), (64, 7.3)), ((1, 0.1), (64, 0.73)), shared=((4, 2.0, 0.4),))
    pair = with_costs(costs)
    made = pair.generate_batch([PROMPT] * 4, method="auto", max_new_tokens=30, seed=[1, 2, 3, 4])
    four = costs.for_rows(4)
    assert four.step == pytest.approx(0.2)
    assert {one.method for one in made} == {spelled(four)}
    assert pair.generate(PROMPT, method="auto", max_new_tokens=8).method == spelled(costs)
    again = with_costs(CHEAP).generate(PROMPT, made[2].request)
    assert ids(again) == ids(made[2])
    queued = pair.generate_batch([PROMPT] * 4, method="auto", max_new_tokens=8, rows=1)
    assert {one.method for one in queued} == {spelled(costs)}
    with sprinter.Engine(pair, rows=2, max_len=64) as engine:
        for seed in range(2):
            engine.add(PROMPT, method="auto", max_new_tokens=8, seed=seed)
        methods = [one.method for _, one in sorted(engine.finish().items())]
    two = costs.for_rows(2)
    assert methods == [
        spelled(costs), spelled(two)
    ]  # fmt: skip


def test_rows_of_an_engine_decide_together(with_costs: Callable[[PassCosts], sprinter.Pair]) -> None:
    """Though ``auto`` has other numbers in each, as more of them share passes."""
    costs = PassCosts(((1, 1.0), (64, 7.3)), ((1, 0.1), (64, 0.73)), shared=((4, 2.0, 0.4),))
    with sprinter.Engine(with_costs(costs), rows=4, max_len=64) as engine:
        for seed in range(4):
            engine.add(PROMPT, method="auto", max_new_tokens=8, seed=seed)
        tasks = list(engine._waiting.values())
        engine.finish()
    assert len({task.method for task in tasks}) == 4
    (tracker,) = {id(task.tracker): task.tracker for task in tasks}.values()
    assert tracker is not None


async def _at_once(pair: sprinter.Pair) -> list[str]:
    async with sprinter.AsyncEngine(pair, rows=3, max_len=64) as engine:
        streams = [engine.stream(PROMPT, method="auto", max_new_tokens=8, seed=seed) for seed in range(4)]
        return [(await stream.finish()).method for stream in streams]


def test_an_engine_forgets_what_was_decoded_longest_ago(
    with_costs: Callable[[PassCosts], sprinter.Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sprinter.engine.request._MOST_TRACKERS", 2)
    with sprinter.Engine(with_costs(CHEAP), rows=2) as engine:
        for temperature in (1.0, 0.9, 1.0, 0.8, 0.7, 0.8):
            engine.add(
                PROMPT, temperature=temperature, max_new_tokens=1, method="speculative", never_slower=True
            )
        kept = [sampling.temperature for _, sampling, _ in engine._trackers]
    assert kept == [0.7, 0.8]


def test_requests_that_wait_count_too(with_costs: Callable[[PassCosts], sprinter.Pair]) -> None:
    costs = PassCosts(((1, 1.0), (64, 7.3)), ((1, 0.1), (64, 0.73)), shared=((4, 2.0, 0.4),))
    methods = asyncio.run(_at_once(with_costs(costs)))
    assert len({*methods[:3]}) == 3 and methods[3] == methods[2]


def test_without_never_slower_auto_depends_on_no_other_row(
    with_costs: Callable[[PassCosts], sprinter.Pair],
) -> None:
    costs = PassCosts(((1, 1.0), (64, 7.3)), ((1, 0.1), (64, 0.73)), shared=((4, 2.0, 0.4),))
    pair = with_costs(costs)
    options: dict[str, Any] = {"method": "auto", "never_slower": False, "max_new_tokens": 30, "seed": 3}
    made = pair.generate_batch([PROMPT] * 4, **options)
    alone = pair.generate(PROMPT, **options)
    assert {one.method for one in made} == {alone.method} and ids(made[3]) == ids(alone)


def test_the_host_counts_more_where_a_rule_learns(with_costs: Callable[[PassCosts], sprinter.Pair]) -> None:
    """``auto`` learns where that costs little."""
    parts = with_costs(replace(CHEAP, host=(0.1, 0.2, 0.3)))._runtime
    names = ("speculative", "auto", "certain", "calibrated")
    found = {name: parts.costs_of(parse_method(name)).host for name in names}
    assert found["speculative"] == found["certain"] == found["auto"] == (0.1, 0.2, 0.0)
    assert found["calibrated"] == pytest.approx((0.1, 0.5, 0.0))
    assert parts.costs_of(parse_method("certain(budget=0.05)")).host == found["calibrated"]
    parts.pass_costs = parts.shared_costs = replace(CHEAP, host=(0.1, 0.2, 0.01))
    assert parts.costs_of(parse_method("auto")).host == pytest.approx((0.1, 0.21, 0.0))
    assert parts.costs_of(parse_method("auto"), 4).host == (0.1, 0.2, 0.0)  # for each row
    assert parts.settle(parse_method("auto"), 4).name.count("signal=mean") == 1


def test_lossless_auto_has_no_budget(with_costs: Callable[[PassCosts], sprinter.Pair]) -> None:
    one = with_costs(CHEAP).generate(
        PROMPT, method="auto(budget=0.1)", require_lossless=True, max_new_tokens=4
    )
    assert one.stats.lossless and one.stats.budget is None


def test_methods_without_a_name_do_not_decide_for_each_other(
    with_costs: Callable[[PassCosts], sprinter.Pair],
) -> None:
    pair = with_costs(PassCosts(((1, 1.0), (40, 1.0)), ((1, 0.4), (40, 0.4))))
    options: dict[str, Any] = {"max_new_tokens": 40, "never_slower": True, "seed": 3}
    methods = [Method(stop=Fixed(12), cap=40), Method(stop=Fixed(1), cap=40)]
    alone = [pair.generate_batch([PROMPT] * 2, rows=2, method=one, **options)[0] for one in methods]
    assert alone[0].stats.switches and not alone[1].stats.switches
    mixed = pair.generate_batch([PROMPT] * 4, rows=4, method=[*methods, *methods], **options)
    assert mixed[0].stats.switches[0] < 4 and mixed[1].stats.switches[:1] != mixed[0].stats.switches[:1]
    # Long after the others it rests too: two rows that draft beside two that do not pay for draft steps of two rows.
    assert mixed[1].stats.switches[0] > 10


def test_rows_that_share_less_than_they_could_are_charged_for_it(
    with_costs: Callable[[PassCosts], sprinter.Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of different lengths: steps that few rows share cost what those of all rows do."""
    pair = with_costs(PassCosts(((1, 1.0), (40, 1.0)), ((1, 0.1), (40, 0.1))))
    options: dict[str, Any] = {"max_new_tokens": 60, "never_slower": True, "seed": [3, 4, 5, 6]}
    told: list[tuple[float, float]] = []
    before = Tracker.count

    def count(self: Tracker, row: Any, drafted: bool, done: RoundCount, spent: Spent | None = None) -> None:
        if drafted:
            assert spent is not None
            alike = 4 * spent.seconds / self.costs.target_s(1), self._time(done, 4)
            told.append(alike)
        before(self, row, drafted, done, spent)

    monkeypatch.setattr(Tracker, "count", count)
    pair.generate_batch([PROMPT] * 4, rows=4, method="speculative(gamma=3)", **options)
    same = [took / as_all for took, as_all in told[: len(told) // 2]]
    assert max(same) == pytest.approx(1.0), "while all rows draft as much, each pays a fourth of each pass"
    told.clear()
    pair.generate_batch([PROMPT] * 4, rows=4, method="svip(h=0.9)", **options)
    apart = [took / as_all for took, as_all in told]
    assert max(apart) > 2 and np.mean(apart) > 1.02


def test_rounds_that_rest_are_charged_for_nothing(
    with_costs: Callable[[PassCosts], sprinter.Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passes cost is not worked out where all rows decode plainly."""
    costs = PassCosts(
        ((1, 1.0), (4, 1.3), (64, 7.3)), ((1, 0.5), (64, 0.5))
    )  # copies cannot pay among four rows
    pair, calls = with_costs(costs), []
    shares = stream.pass_shares
    monkeypatch.setattr(stream, "pass_shares", lambda *given: calls.append(1) or shares(*given))
    options: dict[str, Any] = {"max_new_tokens": 60, "never_slower": True, "seed": [3, 4, 5, 6]}
    made = pair.generate_batch([PROMPT] * 4, rows=4, method="speculative(gamma=3)", **options)
    assert all(one.stats.switches[0] < 5 and len(one.stats.switches) == 1 for one in made)
    assert 0 < len(calls) < 20, "of more than 60 passes"


def test_auto_without_a_draft_looks_up(tiny_pair: sprinter.Pair) -> None:
    alone = sprinter.Pair(LoadedPair(tiny_pair.models.target, None, None))  # type: ignore[arg-type]
    one = alone.generate(PROMPT * 4, method="auto", max_new_tokens=30, temperature=0.0)
    assert one.request is not None and one.method == str(one.request.method.name) and one.stats.lossless
    drafter = one.request.method.drafter
    assert isinstance(drafter, Suffix)
    recycled = Recycle(reads=drafter.reads)
    assert drafter == Suffix(8, factor=64.0, min_prob=0.0, otherwise=recycled, reads=drafter.reads)
    assert drafter.reads.count("x") == 3, "costs that were measured"
    assert one.stats.draft_steps == 0 and one.stats.accepted > 0
    plain = alone.generate(PROMPT * 4, max_new_tokens=30, temperature=0.0)
    assert ids(one) == ids(plain)


@pytest.mark.parametrize(
    ("costs", "method"),
    [
        (CHEAP, "auto"), (DEAR, "autoregressive"),
        (PassCosts(((1, 1.0), (9, 1.4)), ((1, 0.25), (9, 0.3))), "auto"),
        (PassCosts(((1, 1.0), (9, 9.0)), ((1, 0.25), (9, 2.0))), "autoregressive"),  # in proportion to tokens
        (PassCosts(((1, 1.0), (9, 1.0)), ((1, 0.75), (9, 1.0))), "autoregressive"),
        (PassCosts(((1, 1.0), (9, 1.4)), ((1, 0.25), (9, 0.3)), host=(0.1, 0.6, 0.2)), "autoregressive"),
    ],
)  # fmt: skip
def test_the_default_is_exact_and_drafts_where_that_can_pay(
    with_costs: Callable[[PassCosts], sprinter.Pair],
    monkeypatch: pytest.MonkeyPatch,
    costs: PassCosts,
    method: str,
) -> None:
    monkeypatch.setattr(runtime, "_PAYS", PAYS)
    pair = with_costs(costs)
    made = pair.generate(PROMPT, max_new_tokens=40, seed=1)
    assert made.method.partition("(")[0] == method and made.stats.lossless
    assert pair.default_method == "auto" and "measured" not in made.method
    assert made.request is not None and made.request.never_slower and made.request.budget is None
    # As with the method named, and never slower.
    named = pair.generate(PROMPT, method=method, max_new_tokens=40, seed=1)
    assert ids(named) == ids(made) and named.stats.switches == made.stats.switches
    record = made.to_dict()
    assert record["request"]["switches"] == (made.stats.switches if method == "auto" else None)
    again = with_costs(DEAR if costs is CHEAP else CHEAP).generate(
        record["prompt"]["token_ids"], **record["request"]
    )
    assert ids(again) == ids(made)
    with pair.stream(PROMPT, max_new_tokens=40, seed=1) as stream:
        assert [token.id for token in stream] == ids(made)
    with sprinter.Engine(pair, rows=1) as engine:
        number = engine.add(PROMPT, max_new_tokens=40, seed=1)
        assert ids(engine.finish()[number]) == ids(made)


def test_in_one_row_a_seed_has_one_text(with_costs: Callable[[PassCosts], sprinter.Pair]) -> None:
    """What the text before it gained is told to greedy ones alone."""
    pair = with_costs(LOSES)
    options = {"method": "speculative(gamma=5)", "max_new_tokens": 40, "never_slower": True}
    made = pair.generate_batch([PROMPT] * 3, seed=[1, 2, 1], rows=1, **options)
    assert ids(made[0]) == ids(made[2]) == ids(pair.generate(PROMPT, seed=1, **options))
    assert made[0].stats.switches == made[2].stats.switches and made[0].stats.switches


def test_the_default_of_a_batch_is_by_the_costs_of_its_rows(
    with_costs: Callable[[PassCosts], sprinter.Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_PAYS", PAYS)
    alone = PassCosts(((1, 1.0), (4, 1.0), (8, 2.0), (16, 4.0)), ((1, 0.1), (8, 0.2)))
    pair = with_costs(alone)
    one, four = (pair.generate_batch([PROMPT] * rows, max_new_tokens=8, rows=rows) for rows in (1, 4))
    assert one[0].method.startswith("auto(") and {made.method for made in four} == {"autoregressive"}


def test_the_speed_over_plain_is_shown_where_costs_are_known(
    with_costs: Callable[[PassCosts], sprinter.Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = with_costs(CHEAP)  # a token of plain decoding takes a second
    made = pair.generate(PROMPT, max_new_tokens=20)
    stats, ratio = made.stats, made.stats.estimated_speed_up
    assert ratio is not None and ratio == 20 / (stats.wall_s - stats.prefill_s)
    assert f"/s (est. {ratio:.1f}x plain), " in stats.summary
    assert made.to_dict()["stats"]["estimated_speed_up"] == ratio
    plain = pair.generate(PROMPT, method="autoregressive", max_new_tokens=20)
    both = pair.generate_batch([PROMPT, PROMPT], method="speculative", max_new_tokens=20)
    unknown = sprinter.Pair(pair.models).generate(PROMPT, method="speculative", max_new_tokens=20)
    for other in (plain, both[0], unknown):
        assert other.stats.estimated_speed_up is None and "plain" not in other.stats.summary


def test_a_pass_over_one_token_is_timed_after_another_such(tiny_pair: sprinter.Pair) -> None:
    """llama.cpp builds its graph anew for a pass of another length, which plain decoding never does."""
    models = costs_module.borrow(tiny_pair.models, 32)
    known = costs_module.read_prompts(models, 8, 4)
    jobs = {n: costs_module.target_input(known, 8, n) for n in (1, 4)}
    seen: list[int] = []
    run = models.run
    models.run = lambda jobs: seen.append(len(jobs[0].feed.tokens)) or run(jobs)  # type: ignore[method-assign,union-attr,func-returns-value]
    times = costs_module.run_interleaved(models, jobs, 2)
    assert seen == [1, 1, 4] * 3 and {n: len(each) for n, each in times.items()} == {1: 2, 4: 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"never_slower": 1}, "neither True nor False"),
        ({"switches": [0, 2]}, "ascending numbers from 1 on"),
        ({"switches": [3, 3]}, "ascending numbers from 1 on"),
        ({"copy_switches": [4, 2]}, "ascending numbers from 1 on"),
        ({"switches": [-1]}, ">= 0|at least 0|switches"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sprinter.GenerationOptions(**options)
