"""Draft runs that are one launch: texts, laws and counts of single steps; launches and synchronisations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.models.fake_cuda import Counted, fake_cuda
from tests.models.test_graphs import runner_of
from tests.models.tiny import CONTEXT, VOCAB, fresh, tiny
from transformers import PreTrainedModel

import sprinter
from sprinter.decode.accept import Exact, Match, TargetCall
from sprinter.decode.accept.rows import judge_exact, judge_match
from sprinter.decode.costs import PassCosts
from sprinter.decode.sequence import Tree
from sprinter.decode.switch import AdaptiveSwitch
from sprinter.engine import runtime
from sprinter.engine.backends.base import Drafted, DraftPlan, DraftRow
from sprinter.engine.backends.cuda_graph import GraphBackend
from sprinter.engine.backends.graph_units import LONGEST
from sprinter.engine.engine import Engine
from sprinter.errors import RowsError
from sprinter.heads.head import Head, HeadConfig
from sprinter.laws import Sampling, process
from sprinter.models import choose, memory
from sprinter.models.capture.graphs import GraphUnits
from sprinter.models.capture.runner import CapturedRunner, PreparedPass
from sprinter.models.pair import LoadedModel, LoadedPair
from sprinter.random import AddressedDraws, Purpose, race, race_words

PROMPTS = [[3, 9, 11], [7, 5, 20, 31, 8], [40, 2]]


def gate() -> Head:
    config = HeadConfig(32, "qwen2", "llama", architecture="linear")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        head = Head(config, config.network())
        for weight in head.parameters():
            weight.detach().normal_(0, 0.2)
    return head


@cache
def draft() -> PreTrainedModel:
    """Like the target, with some noise: drafts are accepted and rejected."""
    model = fresh("llama")
    model.load_state_dict(tiny("llama").state_dict())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return model


def pair_of(compile: bool, ends: tuple[int, ...] = ()) -> sprinter.Pair:
    target, small = (
        LoadedModel(model, name, None, CONTEXT, VOCAB, 32, ends, compile=compile)
        for model, name in ((tiny("llama"), "llama"), (draft(), "qwen2"))
    )
    return sprinter.Pair(LoadedPair(target, small, None), gate())


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> sprinter.Pair:
    """A pair whose passes are graphs, without kernels of their own."""
    fake_cuda(monkeypatch)
    monkeypatch.setattr(choose, "capture_kind", lambda model: ("graphs", "CUDA graphs"))
    monkeypatch.setattr(
        choose, "GraphUnits", lambda model, windows, must, _: GraphUnits(model, windows, must)
    )
    return pair_of(True)


def assert_same(one: sprinter.Generation, other: sprinter.Generation) -> None:
    """What must not depend on how passes run."""
    assert [(x.id, x.origin, x.round) for x in one.tokens] == [
        (x.id, x.origin, x.round) for x in other.tokens
    ]
    for name in ("drift", "ratio", "gate_score", "logprob", "draft_logprob"):
        found, wanted = (
            [-1.0 if (value := getattr(x, name)) is None else value for x in each.tokens]
            for each in (one, other)
        )
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert (one.accept_lengths, one.finish_reason) == (other.accept_lengths, other.finish_reason)
    names = ["target_calls", "drafted", "accepted", "checked", "target_tokens"]
    # Behind the end of a text the device drafts on.
    names += [] if one.finish_reason == "eos" else ["draft_steps", "draft_tokens"]
    for name in names:
        assert getattr(one.stats, name) == getattr(other.stats, name), name


METHODS = {
    "speculative(gamma=4)": {},
    "speculative(gamma=3)": {"temperature": 0.0},
    "svip(h=0.5)": {"ahead": 5},
    "accept=match,stop=fixed(gamma=3)": {"logprobs": 2},
    "trust=nobody,stop=fallback(f=0.3),cap=4": {"ahead": 4},
    "adaedl": {"ahead": 3, "top_k": 20, "top_p": 0.9},
    "sprinter(tau=0.5, cap=6)": {"ahead": 4},
    "trust=gate(tau=0.5),stop=untrusted(tail=1),cap=7": {"ahead": 7, "temperature": 0.7},
}


@pytest.mark.parametrize("method", METHODS)
def test_texts_of_ragged_rows_are_those_of_single_steps(method: str, graphed: sprinter.Pair) -> None:
    """Also the counts: no step is counted behind a token at which the device has ended the run."""
    options: dict[str, Any] = {
        "method": method,
        "max_new_tokens": 14,
        "never_slower": False,
        **METHODS[method],
    }
    plain = pair_of(False)
    engine = Engine(graphed, rows=3, max_len=CONTEXT)
    ids = [engine.add(prompt, seed=i, **options) for i, prompt in enumerate(PROMPTS)]
    found = engine.finish()
    options["ahead"] = 1
    assert {one.finish_reason for one in found.values()} <= {"length", "eos"}
    for i, (id, prompt) in enumerate(zip(ids, PROMPTS, strict=True)):
        assert_same(found[id], plain.generate(prompt, seed=i, **options))


def test_a_run_is_one_launch_and_one_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    rows = GraphBackend(runner_of("llama", 3, CONTEXT), VOCAB, "draft")
    rows.runner.extend(torch.tensor([[3, 9, 11, 4]] * 3), logits=False)
    plan = DraftPlan(Sampling(0.8, 9), ("entropy",), {"gate": gate()}, raw=True)
    asked = [DraftRow(i, [5], 5, 1, AddressedDraws(i), plan, count=n) for i, n in enumerate((2, 5, 4))]
    rows.draft(asked)
    rows.runner.rewind([4] * 3)
    with Counted() as count:
        made = rows.draft(asked)
    assert [len(one.tokens) for one in made if isinstance(one, Drafted)] == [2, 5, 4]
    assert rows.runner.lengths == [6, 9, 8]
    assert (count.launches, count.waits) == (1, 1)
    graphs = len(rows._captured._units._graphs)
    rows.draft([replace(row, tokens=[5, 6], position=6) for row in asked])
    assert len(rows._captured._units._graphs) == graphs, "runs behind one token and two share graphs"


@pytest.mark.parametrize(
    "method", ["speculative(gamma=4)", "accept=match,stop=fixed(gamma=3)", "svip(h=0.5, cap=4)"]
)
def test_an_exact_round_is_two_launches_and_one_synchronisation(method: str, graphed: sprinter.Pair) -> None:
    for _ in range(2):  # the first text captures
        with Counted() as count:
            out = graphed.generate(PROMPTS[0], method=method, max_new_tokens=24, seed=1, ahead=4)
    plain = sum(token.origin == "target" for token in out.tokens)  # rounds without room for a draft
    assert out.stats.rounds > 10 and max(out.accept_lengths) > 1 and plain <= 1
    prompts = 2  # one of each model, with a look at whether its states are finite
    assert count.launches == prompts + 2 * (out.stats.rounds - plain) + plain
    assert count.waits == prompts + out.stats.rounds


@pytest.mark.parametrize(
    ("method", "ahead", "waits_a_round"),
    [
        ("sprinter(tau=0.5, cap=4)", 4, 1),
        ("trust=gate(tau=0.5),stop=untrusted(tail=1),cap=6", 6, 1),
        ("sprinter(tau=0.5, cap=4)", None, 1),  # a run of four costs less than two questions
        ("sprinter(tau=0.5)", 4, 2),  # its runs may be longer than a launch
        ("speculative(gamma=10)", None, 3),  # two launches draft a run
    ],
)
def test_a_round_with_trust_waits_as_an_exact_one(
    method: str, ahead: int | None, waits_a_round: int, graphed: sprinter.Pair
) -> None:
    """The verdict and the drifts of trusted tokens come in the copy of the target's pass, that of the run if known."""
    options: dict[str, Any] = {"method": method, "max_new_tokens": 24, "seed": 1, "ahead": ahead}
    for _ in range(2):
        with Counted() as count:
            out = graphed.generate(PROMPTS[0], **options)
    stats = out.stats
    assert (stats.trusted > 5) == ("gate" in method or "sprinter" in method) and stats.drift_coverage > 0.8
    prompts, longer = 2, 2  # rounds whose run takes two launches, and the last one, which may end the text
    assert count.waits <= prompts + waits_a_round * stats.rounds + longer
    assert count.launches <= prompts + max(2, waits_a_round) * stats.rounds + longer
    assert_same(out, pair_of(False).generate(PROMPTS[0], **options | {"ahead": 1}))


def test_plain_rows_share_the_targets_pass_behind_drafts(
    graphed: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a mixed batch has one pass of the target; its texts are those of each alone."""
    methods = ["speculative(gamma=3)", "autoregressive", "sprinter(tau=0.5, cap=3)", "autoregressive"]
    each: list[dict[str, Any]] = [
        {"method": one, "max_new_tokens": 12, "seed": i, "never_slower": False, "ahead": 3, "logprobs": 1}
        for i, one in enumerate(methods)
    ]
    prompts = [*PROMPTS, [9, 9, 4]]
    passes: list[tuple[int, int]] = []  # in which step, of how many rows
    engine = Engine(graphed, rows=4, max_len=CONTEXT)
    launch = CapturedRunner.launch

    def launched(self: CapturedRunner, prepared: PreparedPass, extras: Sequence[torch.Tensor] = ()) -> Any:
        if prepared.unit.name == "target":
            passes.append((engine._steps, len(prepared.asked.rows)))
        return launch(self, prepared, extras)

    monkeypatch.setattr(CapturedRunner, "launch", launched)
    ids = [engine.add(prompt, **options) for prompt, options in zip(prompts, each, strict=True)]
    found = engine.finish()
    usual = [rows for _, rows in passes if rows == 3]
    assert len(usual) > 5, "the exact row with both plain ones"
    steps = Counter(step for step, _ in passes)
    assert max(steps.values()) == 2, "rows with trust have a pass of their own"
    plain = pair_of(False)
    for id, prompt, options in zip(ids, prompts, each, strict=True):
        wanted = plain.generate(prompt, **options | {"ahead": 1})
        assert_same(found[id], wanted)


def test_nothing_is_copied_between_the_launches_of_ragged_rows(graphed: sprinter.Pair) -> None:
    """A copy from the host would wait for the draft run."""
    options: dict[str, Any] = {"method": "speculative(gamma=3)", "max_new_tokens": 9, "never_slower": False}
    for _ in range(2):
        with Counted() as count:
            graphed.generate_batch(PROMPTS, seed=[1, 2, 3], rows=3, **options)
    told = " ".join(count.events)
    assert told.count("launch launch wait") >= 3


@pytest.mark.parametrize("refused", [False, True])
def test_a_target_pass_is_charged_once(
    refused: bool, graphed: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the pass behind a draft is not captured, the loop asks for it: only that one is charged."""
    costs = PassCosts(((1, 1.0), (9, 1.05)), ((1, 0.02), (9, 0.02)))
    graphed._runtime.pass_costs = graphed._runtime.shared_costs = costs
    told: list[bool] = []
    charge = AdaptiveSwitch.charge
    monkeypatch.setattr(
        AdaptiveSwitch, "charge", lambda self, one: (told.append(one.target), charge(self, one))
    )
    if refused:
        monkeypatch.setattr(GraphBackend, "launch_chains", lambda *_: None)
    options: dict[str, Any] = {"method": "speculative(gamma=3)", "max_new_tokens": 20, "never_slower": True}
    made = [one.stats for one in graphed.generate_batch(PROMPTS, rows=3, **options)]
    assert all(one.switches == [] and one.drafted > 20 for one in made)
    assert told.count(True) == sum(one.target_calls for one in made)


@pytest.mark.parametrize("gamma", [3, 10])  # ``10``: longer than a run that goes on to its verdict
def test_each_row_is_judged_by_its_own_rule(graphed: sprinter.Pair, gamma: int) -> None:
    """A text in a batch is that of a row alone; with ``match`` it is plain decoding's of its seed."""
    methods = [f"speculative(gamma={gamma})", f"accept=match,stop=fixed(gamma={gamma})"]
    options: dict[str, Any] = {"max_new_tokens": 20, "never_slower": False}
    plain, refused = pair_of(False), 0
    for order in (methods, methods[::-1]):
        for seed in range(4):
            made = graphed.generate_batch(PROMPTS[:2], method=order, seed=seed, rows=2, **options)
            for prompt, method, one in zip(PROMPTS[:2], order, made, strict=True):
                alone = plain.generate(prompt, method=method, seed=seed, **options)
                assert [token.id for token in one.tokens] == [token.id for token in alone.tokens]
                refused += one.stats.checked > one.stats.accepted
    assert refused > 8, "the rules differ where a token is refused"


def test_memory_counts_the_laws_of_runs(graphed: sprinter.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the longest runs, whose laws the graphs of all shapes write to the same memory."""
    monkeypatch.setattr(runtime, "capture_kind", choose.capture_kind)
    engine, shapes = Engine(graphed, rows=3, max_len=CONTEXT), 0
    for gamma in (2, 5, 8, 3):  # graphs over memory that was too small later are dropped
        for prompt in PROMPTS:
            engine.add(prompt, method=f"speculative(gamma={gamma})", max_new_tokens=20, never_slower=False)
        engine.finish()
    beside = 0
    for rows, name in ((engine._models.target, "target"), (engine._models.draft, "draft")):
        assert isinstance(rows, GraphBackend) and isinstance(rows._captured._units, GraphUnits)
        units, graphs = rows._captured._units, rows._captured._units._graphs.values()
        held = {x.untyped_storage().data_ptr(): x for graph in graphs for x in (*graph._made, *graph._rows)}
        parts = [x.untyped_storage().nbytes() // 4 for x in held.values()]
        (laws, *read) = sorted([size for size in parts if size >= 3 * VOCAB * LONGEST], reverse=True)
        assert len(read) == (name == "target") and len(held) == len(units._shared), "all graphs share them"
        shapes += len(graphs)
        used = 4 * (2 * laws + sum(read)) / 3  # with a copy
        pool = graphed._runtime.targets if name == "target" else graphed._runtime.drafts
        assert pool is not None
        counted = graphed._runtime._beside(pool, rows.runner.max_len)
        assert used <= counted <= 1.1 * used
        beside += counted
    assert shapes > 8
    engine.close()
    graphed.clear_prefix_cache()
    size = rows.runner.max_len
    row = beside + sum(memory.cache_bytes(model, size) for model in (tiny("llama"), draft()))
    monkeypatch.setattr(memory, "free_bytes", lambda _: int(3 * row / memory._SHARE) + 10)
    Engine(graphed, rows=3, max_len=CONTEXT).close()
    graphed.clear_prefix_cache()
    with pytest.raises(RowsError, match="a batch of 3 or less"):
        Engine(graphed, rows=4, max_len=CONTEXT)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_rounds_on_a_gpu_write_what_single_steps_write(method: str) -> None:
    """Near ties apart, float32 on one device gives the same texts."""
    texts = []
    for compile in (True, False):
        models = [
            LoadedModel(
                deepcopy(model).to("cuda"),
                name,
                None,
                CONTEXT,
                VOCAB,
                32,
                (),
                compile=compile,  # type: ignore[arg-type]
            )
            for model, name in ((tiny("llama"), "llama"), (draft(), "qwen2"))
        ]
        pair = sprinter.Pair(LoadedPair(models[0], models[1], None), gate())
        options: dict[str, Any] = {
            "method": method,
            "max_new_tokens": 14,
            "never_slower": False,
            **METHODS[method],
        }
        texts.append(pair.generate_batch(PROMPTS, seed=[1, 2, 3], rows=3, **options))
    for one, other in zip(*texts, strict=True):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]


@pytest.mark.usefixtures("graphed")
def test_a_text_that_ends_within_a_draft() -> None:
    options: dict[str, Any] = {"method": "speculative(gamma=4)", "max_new_tokens": 14, "seed": 0}
    found, wanted = (pair_of(compile, (50,)).generate(PROMPTS[0], **options) for compile in (True, False))
    assert found.finish_reason == "eos" and found.tokens[-1].origin == "accepted"
    assert_same(found, wanted)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_verdicts_are_those_of_the_rules(heat: float) -> None:
    vocab, n, rows = 11, 4, 60
    torch.manual_seed(3)
    logits = torch.randn(rows, n + 1, vocab) * 2
    p = process(logits, Sampling(heat))
    q = process(logits[:, :n] + torch.randn(rows, n, vocab), Sampling(heat))
    tokens, counts = torch.multinomial(q.flatten(0, 1), 1).view(rows, n), torch.arange(rows) % n + 1
    draws = [AddressedDraws(seed) for seed in range(rows)]
    keys = torch.tensor(
        [[one.address(2, 7 + i, Purpose.TARGET) & 2**63 - 1 for i in range(n + 1)] for one in draws]
    )
    high = torch.tensor(
        [[one.address(2, 7 + i, Purpose.TARGET) >> 32 for i in range(n + 1)] for one in draws]
    )
    numbers = torch.tensor([[one.uniform(2, 7 + i, Purpose.ACCEPT) for i in range(n)] for one in draws])
    words = race_words(vocab, torch.device("cpu"))

    def draw(law: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return race(law, keys.flatten()[at] & 0xFFFFFFFF, high.flatten()[at], words)

    first = torch.arange(rows) % counts  # of a chain, trusted
    for rule, trusted, made in (
        (Exact(), None, judge_exact(p, q, tokens, counts, numbers.double(), draw)),
        (Match(), None, judge_match(p, tokens, counts, draw)),
        (Exact(), first, judge_exact(p, q, tokens, counts, numbers.double(), draw, first)),
        (Match(), first, judge_match(p, tokens, counts, draw, first)),
    ):
        lengths = set()
        for i, (accepted, token) in enumerate(zip(*made, strict=True)):
            m, at = int(counts[i]), 0 if trusted is None else int(trusted[i])
            tree = Tree(tokens[i, at:m].tolist(), list(q[i, at:m]))
            verdict = rule.judge(TargetCall(tree, p[i, at : m + 1], None, draws[i], 2, 7 + at))
            assert (at + verdict.accepted, verdict.token) == (int(accepted), int(token))
            lengths.add(verdict.accepted)
        assert lengths >= {0, 1, 2}
