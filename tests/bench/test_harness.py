from __future__ import annotations

import gc
import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.bench.arms import FakeArm

import sprinter
from sprinter.bench.arm import Arm, ArmAnswer, Ask
from sprinter.bench.arms.engine import AutoArm, EngineArm
from sprinter.bench.harness import Harness
from sprinter.bench.journal import ROWS, Journal, recorded_costs
from sprinter.bench.run import Extras, run_bench
from sprinter.bench.sample import Sample, Suite
from sprinter.bench.settings import BenchSettings
from sprinter.bench.summary import summarise
from sprinter.decode.costs import PassCosts
from sprinter.decode.spec import parse_method
from sprinter.errors import UserError

RUN = {"pair": "p", "settings": {"seed": 0}}


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair()


def suite(count: int = 4, turns: int = 1, name: str = "toy") -> Suite:
    samples = (Sample(f"q{i}", "c", tuple(f"The river {i} {t}" for t in range(turns))) for i in range(count))
    return Suite(name, tuple(samples), 5)


Run = Callable[..., Harness]


@pytest.fixture
def harness(pair: sprinter.Pair, tmp_path: Path) -> Run:
    def make(
        arms: Sequence[Arm], suites: list[Suite] | None = None, run: dict[str, Any] = RUN, **settings: Any
    ) -> Harness:
        with Journal(tmp_path, run) as journal:
            made = Harness(pair, arms, suites or [suite()], BenchSettings(**settings), journal)
            made.run()
            made.close()
            return made

    return make


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / ROWS).read_text().splitlines()]


def test_arms_take_turns_and_see_the_same_requests(harness: Run, tmp_path: Path) -> None:
    arms = [FakeArm("a"), FakeArm("b"), FakeArm("c")]
    harness(arms, temperatures=(1.0, 0.0), repeats=2, warmup=1)
    rows = rows_in(tmp_path)
    assert len(rows) == 3 * 4 * 2 * 2
    orders = ["".join(row["model_id"] for row in rows[i : i + 3]) for i in range(0, len(rows), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) >= 4  # of 16 draws of 6 orders, the same in every run
    assert arms[0].asks == arms[1].asks == arms[2].asks
    seeds = {(row["question_id"], row["repeat"]): row["seed"] for row in rows}
    assert len(set(seeds.values())) == 8  # each prompt and repeat its own
    assert len(arms[0].asks) == 4 * 2 * 2 + 2  # one warm-up at each temperature, kept out of the rows


@pytest.mark.skipif(not hasattr(signal, "SIGCONT"), reason="Windows stops no process")
def test_a_question_during_which_the_process_was_stopped_is_asked_again(harness: Run, tmp_path: Path) -> None:
    class Stopped(FakeArm):
        def answer(self, ask: Any) -> Any:
            if len(self.asks) == 1:
                os.kill(os.getpid(), signal.SIGCONT)  # what ends a stop
            return super().answer(ask)

    before, arm = signal.getsignal(signal.SIGCONT), Stopped("a")
    harness([arm], warmup=0)
    assert [ask.seed for ask in arm.asks] == [0, 1, 1, 2, 3] and len(rows_in(tmp_path)) == 4
    assert signal.getsignal(signal.SIGCONT) is before


def test_the_garbage_collector_rests_while_an_arm_works(harness: Run) -> None:
    class Watching(FakeArm):
        def answer(self, ask: Any) -> Any:
            assert not gc.isenabled()
            return super().answer(ask)

    assert not harness([Watching("a")]).failed
    assert gc.isenabled()


def test_a_talk_of_two_turns_carries_the_answer_on(harness: Run, tmp_path: Path) -> None:
    arm = FakeArm("a")
    harness([arm], [suite(1, turns=2)], warmup=0)
    first, second = arm.asks
    assert second.ids[: len(first.ids)] == first.ids
    assert len(second.ids) > len(first.ids) + 5
    (row,) = rows_in(tmp_path)
    assert row["choices"][0]["new_tokens"] == [5, 5]
    assert len(row["choices"][0]["accept_lengths"]) == 10


def test_every_arm_reads_the_prompt_itself(harness: Run) -> None:
    reused: list[int] = []

    class Counting(EngineArm):
        def answer(self, ask: Ask) -> ArmAnswer:
            made = super().answer(ask)
            reused.append(made.extra["stats"]["cached_tokens"])
            return made

    long = Sample("q", "c", ("The river rises in the mountains. " * 40, "And then"))
    arms = [Counting(parse_method(spec)) for spec in ("autoregressive", "speculative")]
    assert not harness(arms, [Suite("toy", (long,), 2)], warmup=1).failed
    assert reused[0::2] == [0] * 4  # first turns
    assert all(reused[1::2])  # second turns go on from the first


def test_a_run_goes_on_where_it_was_killed(harness: Run, tmp_path: Path) -> None:
    harness([FakeArm("a"), FakeArm("b")])
    whole = rows_in(tmp_path)
    text = (tmp_path / ROWS).read_text()
    (tmp_path / ROWS).write_text(text[: len(text) // 2])  # in the middle of a line
    again = [FakeArm("a"), FakeArm("b")]
    harness(again, warmup=0)
    assert {key(row) for row in rows_in(tmp_path)} == {key(row) for row in whole}
    assert 0 < sum(len(arm.asks) for arm in again) < 8
    idle = FakeArm("a")
    harness([idle], warmup=0)
    assert idle.log == ["close"]  # nothing left to ask: not even started


def test_an_arm_that_is_added_later_leaves_the_others_as_they_are(harness: Run, tmp_path: Path) -> None:
    harness([FakeArm("a"), FakeArm("b")], temperatures=(1.0, 0.0))
    idle, added = FakeArm("a"), FakeArm("c")
    assert not harness([idle, FakeArm("b"), added], temperatures=(1.0, 0.0)).failed
    assert idle.asks == [] and idle.log == ["close"]
    assert len(added.asks) == 2 * 4 + 2  # its own warm-ups


def key(row: dict[str, Any]) -> tuple[str, str]:
    return row["model_id"], row["question_id"]


def test_another_run_in_the_same_directory_is_refused(harness: Run, tmp_path: Path) -> None:
    harness([FakeArm("a")])
    with pytest.raises(UserError, match="another settings"):
        harness([FakeArm("a")], run={"pair": "p", "settings": {"seed": 1}})
    (tmp_path / ROWS).write_text("not json\n")
    with pytest.raises(UserError, match="damaged"):
        harness([FakeArm("a")])


@pytest.mark.parametrize(
    "content", ["null", "[]", '"x"', "[1]", '{"arms": 3}', json.dumps({**RUN, "costs": 3}), "{", ""]
)
def test_a_damaged_description_of_a_run_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"damaged|another pair"):
        Journal(tmp_path, RUN)


@pytest.mark.parametrize("line", ["1", "{}", "[]", "null"])
def test_lines_that_are_no_rows_are_one_line(tmp_path: Path, line: str) -> None:
    Journal(tmp_path, RUN).close()
    (tmp_path / ROWS).write_text(line + "\n")
    with pytest.raises(UserError, match="damaged"):
        Journal(tmp_path, RUN)


def test_one_name_does_not_stand_for_two_specs(tmp_path: Path) -> None:
    Journal(tmp_path, RUN, arms={"mine": "opt(epsilon=0.1)"}).close()
    Journal(tmp_path, RUN, arms={"other": "svip"}).close()
    with pytest.raises(UserError, match=r"another arm called 'mine' \(opt\(epsilon=0.1\)"):
        Journal(tmp_path, RUN, arms={"mine": "opt(epsilon=0.2)"})
    Journal(tmp_path, RUN, arms={"mine": "opt(epsilon=0.2)"}, restart=True).close()


def test_an_arm_that_breaks_is_marked_and_the_others_go_on(harness: Run, tmp_path: Path) -> None:
    arms = [FakeArm("good"), FakeArm("breaks", breaks_at=2), FakeArm("absent", starts=False)]
    done = harness(arms, warmup=0)
    assert done.failed == {"breaks": "RuntimeError: out of luck", "absent": "ImportError: no such engine"}
    assert [row["model_id"] for row in rows_in(tmp_path)].count("good") == 4
    assert [row["model_id"] for row in rows_in(tmp_path)].count("breaks") == 2
    summaries = {s["arm"]: s for s in summarise(rows_in(tmp_path), {})}
    assert summaries["good"]["prompts"] == 4


def test_an_arm_whose_numbers_are_impossible_is_marked(harness: Run, tmp_path: Path) -> None:
    class Odd(FakeArm):
        def __init__(self, name: str, **changed: Any) -> None:
            super().__init__(name)
            self.changed = changed

        def answer(self, ask: Ask) -> ArmAnswer:
            return replace(super().answer(ask), **self.changed)

    arms = [
        FakeArm("good"),
        Odd("nan", wall_s=math.nan),
        Odd("zero", wall_s=0.0),
        Odd("long", ids=[1] * 6),
        Odd("drift", drifts=[math.nan]),
        Odd("none", ids=[], arrivals_s=[], accept_lengths=[], drifts=[]),
    ]
    done = harness(arms, warmup=0)
    assert set(done.failed) == {"nan", "zero", "long", "drift"}
    assert "6 tokens, asked for 5" in done.failed["long"]
    assert {row["model_id"] for row in rows_in(tmp_path)} == {"good", "none"}


def test_an_arm_that_fails_outside_of_its_answers_stops_nobody(harness: Run, tmp_path: Path) -> None:
    class Unsure(FakeArm):
        def lossless(self, sampling: Any) -> bool | None:
            raise RuntimeError("who knows")

        def close(self) -> None:
            raise RuntimeError("never")

    done = harness([FakeArm("good"), Unsure("unsure")], warmup=0)
    assert done.failed == {"unsure": "RuntimeError: who knows"}
    assert [row["model_id"] for row in rows_in(tmp_path)] == ["good"] * 4


def test_prompts_beyond_the_context_are_skipped_and_counted(harness: Run, pair: sprinter.Pair) -> None:
    long = Sample("long", "c", ("river " * 2 * pair.models.context,))
    mixed = Suite("toy", (*suite(2).samples, long), 5)
    arm = FakeArm("a")
    assert harness([arm], [mixed], warmup=0).skipped == {"toy": {"prompt too long": 1}}
    assert len(arm.asks) == 2
    with pytest.raises(UserError, match="no prompt"):
        harness([FakeArm("a")], [Suite("toy", (long,), 5)])


def test_later_turns_beyond_the_context_are_counted_once_a_row(
    harness: Run, pair: sprinter.Pair, tmp_path: Path
) -> None:
    """Two arms, one prompt of two turns: two turns missing, however often the run is resumed."""
    talk = Sample("talk", "c", ("The river", "river " * 2 * pair.models.context))
    for _ in range(2):
        done = harness([FakeArm("a"), FakeArm("b")], [Suite("toy", (talk,), 5)])
        assert done.skipped == {"toy": {"turn too long": 2}} and done.asked == {"toy": 1}
    assert [len(row["token_ids"]) for row in rows_in(tmp_path)] == [1, 1]


def test_new_tokens_up_to_the_context_limit(harness: Run, pair: sprinter.Pair) -> None:
    arm = FakeArm("a")
    harness([arm], [suite(1)], new_tokens=0, warmup=0)
    assert len(arm.asks[0].ids) + arm.asks[0].new_tokens == pair.models.context


def test_two_of_one_name_are_refused(harness: Run) -> None:
    with pytest.raises(UserError, match="two of the arms"):
        harness([FakeArm("a"), FakeArm("a")])
    with pytest.raises(UserError, match="two of the suites"):
        harness([FakeArm("a")], [suite(), suite()])
    with pytest.raises(UserError, match="no arm"):
        harness([])


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"repeats": 0}, {"new_tokens": -1}, {"temperatures": ()}, {"temperatures": (1.0, 1.0)},
                  {"temperatures": (-1.0,)}, {"warmup": -1}):  # fmt: skip
        with pytest.raises(ValueError, match="="):
            BenchSettings(**wrong)


def test_what_is_recorded_is_not_computed_again(
    pair: sprinter.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the measures of answers nor the laws along texts, and the offline judge has nothing to show."""
    monkeypatch.setattr("sprinter.bench.run.write_report", lambda *_: None)
    monkeypatch.setattr("sprinter.bench.run.analyse", lambda *given: given[-1](1, 1) or {"texts": 1})
    told: list[list[str]] = []
    for _ in range(2):
        told.append([])
        found = run_bench(
            pair, [FakeArm("autoregressive"), FakeArm("a")], [suite(1)], out=tmp_path,
            progress=lambda done, wanted, note: told[-1].append(note),
        )  # fmt: skip
        assert found["judge"]["duels"] == 1 and found["analysis"] == {"texts": 1}
    assert told[0][-2:] == ["measuring answers", "laws along texts"] and not told[1]


def test_auto_goes_on_with_the_costs_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that are not kept in the cache directory are measured anew, and never the same."""
    specs = []
    for cost in (0.1, 0.2):
        costs = PassCosts(((1, 1.0), (9, 1.0)), ((1, cost), (9, cost)))
        monkeypatch.setattr("sprinter.engine.runtime.pass_costs", lambda *_, costs=costs: costs)
        pair, extras = sprinter.load_pair(), Extras(quality=None, analysis=False)
        found = run_bench(pair, [AutoArm()], [suite(1)], out=tmp_path, extras=extras)
        specs.append(found["arms"][0]["spec"])
    assert specs[0] == specs[1] and "step=0.1," in specs[0]
    assert recorded_costs(tmp_path, {"pair": "another"}) == {}
