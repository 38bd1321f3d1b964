"""Heads that draft: joint laws by enumeration for chains and trees, mutants that fail, sparse trees, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sprinter.decode import (
    ACCEPT,
    STOP,
    Block,
    Certain,
    Drawn,
    Dynamic,
    Exact,
    Fixed,
    Gate,
    Heads,
    Heuristic,
    Judge,
    Lookup,
    Mentored,
    Method,
    Model,
    Never,
    OneHot,
    Siblings,
    Sparse,
    SpecInfer,
    Static,
    StopRule,
    Svip,
    Traversal,
    Typical,
    Untrusted,
    Widened,
    Without,
    check_drafter,
    parse_method,
)
from sprinter.decode.draft import Draft
from sprinter.decode.draft_heads import HeadDrafts, HeadText
from sprinter.decode.drafter import Drafter, Proposals
from sprinter.decode.enumerate import (
    ChainDriver,
    MarkovHeads,
    MarkovPair,
    check_same_law,
    joint_law,
    run_chain,
    target_joint_law,
)
from sprinter.decode.loop import Limits
from sprinter.decode.signals import state_signals
from sprinter.decode.sparse import choose_nodes
from sprinter.decode.spec import full_spec
from sprinter.errors import SprinterError, UserError
from sprinter.random import AddressedDraws

NARROW, HOLEY, WIDE = MarkovPair(2, 1), MarkovPair(3, 2, sharp=2.0, zeros=0.3), MarkovPair(4, 3)
PROMPT = (0, 1)
CHAINS: list[tuple[Judge, StopRule]] = [
    (Exact(), Fixed(3)), (Block(), Fixed(3)), (Traversal(), Fixed(2)), (Exact(), Svip(0.6)), (Exact(), Heuristic(2)),
]  # fmt: skip
TREES: list[tuple[Judge, Drafter]] = [
    (OneHot(), Static("2x2x1")), (OneHot(), Dynamic(2, 3, 5)), (OneHot(), Sparse(6, "0x1x00x02x10x000")),
    (Traversal(), Sparse(5, "0x1x00x01x10")), (Without(), Drawn("2x1")), (Traversal(), Drawn("2x1")),
    (Without(), Widened("3x2x2x1")), (SpecInfer(), Model(drafts=2)),
]  # fmt: skip


def check(method: Method, pair: MarkovPair, length: int, heads: MarkovHeads, ahead: int = 1) -> None:
    found = joint_law(method, pair, length, prompt=PROMPT, heads=heads, ahead=ahead)
    check_same_law(found, target_joint_law(pair, length, prompt=PROMPT), f"{method} on {pair}")


# --- joint laws ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("rule", "stop"), CHAINS, ids=str)
def test_joint_law_of_chains(rule: Judge, stop: StopRule) -> None:
    """Heads that reach less far than the run, as far, and further; one token an answer, or the whole run."""
    method = Method(accept=rule, stop=stop, drafter=Heads(), cap=3)
    for pair, reach, ahead, sees_path in ((NARROW, 2, 1, False), (NARROW, 5, 3, True), (HOLEY, 3, 3, False)):
        check(method, pair, 4 if pair is NARROW else 3, MarkovHeads(pair, reach, sees_path), ahead)


@pytest.mark.parametrize(("rule", "grow"), TREES, ids=str)
def test_joint_law_of_trees(rule: Judge, grow: Drafter) -> None:
    method = Method(accept=rule, stop=Fixed(3), drafter=Heads(grow))
    drawn = not isinstance(rule, OneHot)
    for pair, reach, sees_path in ((NARROW, 2, False), (HOLEY, 3, True)):
        check(method, pair, 3 if drawn else 4, MarkovHeads(pair, reach, sees_path))


@pytest.mark.parametrize("name", ACCEPT.names())
def test_every_accept_rule_judges_heads(name: str) -> None:
    """Exact ones keep the target's law; with heads that reach one token less than the run."""
    rule = ACCEPT.get(name)()
    fits = {
        Siblings.ALONE: Heads(),
        Siblings.CHOSEN: Heads(Static("2x1")),
        Siblings.DRAWN: Heads(Drawn("2x1")),
    }
    grow = next((one for kind, one in fits.items() if kind in rule.siblings), Heads(Model(drafts=2)))
    method = Method(accept=rule, stop=Fixed(2), drafter=grow).settle({"judge": 0.5})
    record = run_chain(method, WIDE, PROMPT, Limits(8), AddressedDraws(1), heads=MarkovHeads(WIDE, 2))
    assert len(record.tokens) == 8 and record.stats.drafted > 0
    if method.lossless():
        check(method, NARROW, 3, MarkovHeads(NARROW, 1))


@pytest.mark.parametrize("name", STOP.names())
def test_every_stop_rule_that_reads_no_states_ends_drafts_of_heads(name: str) -> None:
    rule = STOP.get(name)()
    if rule.needs & state_signals():
        with pytest.raises(UserError, match="drafts of heads have none"):
            Method(stop=rule, drafter=Heads(), cap=3)
        return
    check(Method(stop=rule, drafter=Heads(), cap=2), NARROW, 3, MarkovHeads(NARROW, 3, True))


def test_texts_that_end_within_a_tree_and_greedy_chains() -> None:
    def ends(text: Sequence[int]) -> str | None:
        return "eos" if text[-1] == 2 else None

    for method in (
        Method(accept=OneHot(), drafter=Heads(Static("2x2"))),
        Method(drafter=Heads(Model(greedy=True))),
    ):
        found = joint_law(method, HOLEY, 4, prompt=PROMPT, ends=ends)
        check_same_law(found, target_joint_law(HOLEY, 4, prompt=PROMPT, ends=ends), f"{method} with ends")


@pytest.mark.parametrize(
    "drafter",
    [Heads(), Heads(Dynamic(2, 2, 3)), Heads(Sparse(3, "0x1x00")), Heads(otherwise=Model(), sure=0.5)],
    ids=str,
)
def test_heads_pass_the_public_check(drafter: Drafter) -> None:
    check_drafter(drafter)


def test_a_lossy_trust_rule_meters_heads_as_a_draft_model() -> None:
    """Tokens that are trusted are the heads' own steps; when these reach no further, the target is called."""
    method = Method(trust=Certain("entropy", 1.2), stop=Untrusted(), drafter=Heads(), cap=6)
    records = [
        run_chain(
            method, WIDE, PROMPT, Limits(24), AddressedDraws(seed), complete=True, heads=MarkovHeads(WIDE, 2)
        )
        for seed in range(6)
    ]
    assert sum(record.stats.trusted for record in records) > 10
    assert all(record.stats.drift_coverage == 1 for record in records)
    assert max(max(record.accept_lengths) for record in records) <= 3


# --- mutants ---------------------------------------------------------------------------------------------------------
class _NoTail(HeadDrafts):
    """Takes the first head again in the second answer of a run."""

    def read(self, *args: object) -> None:
        super().read(*args)  # type: ignore[arg-type]
        self._tail = ()


def test_a_law_of_another_place_fails(monkeypatch: pytest.MonkeyPatch) -> None:

    class Told(HeadDrafts):
        def draft(self, *args: object) -> object:
            made = super().draft(*args)  # type: ignore[arg-type]
            return type(made)(made.tokens, made.laws.roll(1, 0), made.signals, made.raw)

    monkeypatch.setattr("sprinter.decode.enumerate.HeadDrafts", Told)
    with pytest.raises(AssertionError, match="has chance"):
        check(Method(drafter=Heads(), stop=Fixed(2)), WIDE, 3, MarkovHeads(WIDE), ahead=2)


def test_a_draft_does_not_depend_on_the_number_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Method(drafter=Heads(), stop=Fixed(3))

    def texts(ahead: int) -> list[list[int]]:
        made = [
            run_chain(
                method, WIDE, PROMPT, Limits(16), AddressedDraws(seed), ahead=ahead, heads=MarkovHeads(WIDE)
            )
            for seed in range(4)
        ]
        return [[token.id for token in record.tokens] for record in made]

    assert texts(1) == texts(3)
    monkeypatch.setattr("sprinter.decode.enumerate.HeadDrafts", _NoTail)
    assert texts(1) != texts(3)


# --- the draft model behind the heads --------------------------------------------------------------------------------
HANDING_OVER = (
    "heads(otherwise=model)", "heads(otherwise=model(greedy=true))", "heads(sure=0.55,otherwise=model)",
    "lookup(n=1,least=1,length=2,otherwise=heads(otherwise=model))",
    "suffix(otherwise=lookup(n=1,least=1,length=1,otherwise=heads(sure=0.55,otherwise=model)))",
)  # fmt: skip


@pytest.mark.parametrize("accept", ["match", "exact", "block"])
@pytest.mark.parametrize("drafter", HANDING_OVER)
def test_no_draft_model_behind_heads_changes_a_law(drafter: str, accept: str) -> None:
    """Heads that end in the middle of a run: at their reach, where they are unsure, or where they know no token."""
    for stop, pair, heads, ahead in (
        ("fixed(gamma=3)", NARROW, MarkovHeads(NARROW, 1), 1),
        ("svip(h=0.6)", NARROW, MarkovHeads(NARROW, 2, True), 3),
        ("fixed(gamma=3)", HOLEY, MarkovHeads(HOLEY, 1, True), 2), ("fixed(gamma=3)", NARROW, _DeadEnds(NARROW, 2), 1),
    ):  # fmt: skip
        method = parse_method(f"drafter={drafter},stop={stop},accept={accept},cap=3")
        check(method, pair, 4 if pair is NARROW else 3, heads, ahead)


def _end(*_: object) -> None:
    raise EOFError


def writers(method: Method, heads: MarkovHeads, patch: pytest.MonkeyPatch) -> list[str]:
    """Who wrote the first draft after ``PROMPT``, token by token."""
    wrote: list[str] = []

    def count(owner: type, name: str, who: str) -> None:
        real = getattr(owner, name)

        def draft(*args: Any) -> Draft | None:
            made: Draft | None = real(*args)
            wrote.extend([who] * (0 if made is None else len(made.tokens)))
            return made

        patch.setattr(owner, name, draft)

    count(HeadDrafts, "draft", "heads")
    count(ChainDriver, "_propose", "model")
    count(Proposals, "draft", "copy")
    patch.setattr(ChainDriver, "_score", _end)
    with pytest.raises(EOFError):
        run_chain(method, WIDE, PROMPT, Limits(9), AddressedDraws(1), heads=heads)
    return wrote


@pytest.mark.parametrize(
    ("drafter", "reach", "wanted"),
    [
        ("heads(otherwise=model)", 2, ["heads"] * 2 + ["model"] * 3),
        ("heads(otherwise=model)", 0, ["model"] * 5),
        ("heads(otherwise=model)", 9, ["heads"] * 5),
        ("heads(sure=1.0,otherwise=model)", 9, ["model"] * 5),
        ("heads", 2, ["heads"] * 2),
        ("heads(sure=1.0)", 9, []),
        ("lookup(n=1,least=1,otherwise=heads(otherwise=model))", 2, ["heads"] * 2 + ["model"] * 3),
    ],
)
def test_the_draft_model_goes_on_where_the_heads_end(
    drafter: str, reach: int, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = parse_method(f"drafter={drafter},stop=fixed(gamma=5),accept=exact")
    assert writers(method, MarkovHeads(WIDE, reach), monkeypatch) == wanted


def test_a_copy_comes_before_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round has a copy, or the heads and then the draft model; over a text there are all three."""
    method = parse_method(
        "drafter=lookup(n=1,least=1,length=2,otherwise=heads(otherwise=model)),stop=fixed(gamma=3),accept=exact"
    )
    rounds: dict[int, list[str]] = {}
    real = ChainDriver.answer

    def answer(self: ChainDriver, request: Any) -> Any:
        made = real(self, request)
        if isinstance(made, Draft) and made.tokens:
            by_model = self._heads is not None and self._heads.left_to_model(request.sequence.round)
            who = "copy" if made.proposed else "model" if by_model else "heads"
            rounds.setdefault(request.sequence.round, []).append(who)
        return made

    monkeypatch.setattr(ChainDriver, "answer", answer)
    run_chain(method, WIDE, PROMPT, Limits(40), AddressedDraws(2), heads=MarkovHeads(WIDE, 1))
    kinds = {tuple(each) for each in rounds.values()}
    assert ("heads", "model", "model") in kinds and any(kind[0] == "copy" for kind in kinds)
    assert all(set(kind) == {"copy"} or kind[:2] in {("heads",), ("heads", "model")} for kind in kinds)


def test_who_goes_on_does_not_depend_on_the_number_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a token after which the heads know none the rest is the model's, though they would know more later."""
    method = parse_method("drafter=heads(otherwise=model),stop=fixed(gamma=4),accept=exact")

    def texts(ahead: int) -> list[list[int]]:
        drawn = (
            run_chain(
                method, WIDE, PROMPT, Limits(16), AddressedDraws(seed), ahead=ahead,
                heads=_DeadEnds(WIDE, 4, sees_path=True),
            )
            for seed in range(6)
        )  # fmt: skip
        return [[token.id for token in record.tokens] for record in drawn]

    assert texts(1) == texts(4)

    answer = ChainDriver.answer

    def answer_anew(self: ChainDriver, request: Any) -> Any:
        if self._heads is not None:
            self._heads._ended = 0
        return answer(self, request)

    monkeypatch.setattr(ChainDriver, "answer", answer_anew)
    assert texts(1) != texts(4), "heads that are asked again in the same round"


def test_trusted_tokens_of_both_are_metered() -> None:
    method = parse_method(
        "drafter=heads(otherwise=model),trust=certain(signal=entropy,threshold=1.2),stop=untrusted,cap=6"
    )
    made = [
        run_chain(
            method, WIDE, PROMPT, Limits(24), AddressedDraws(s), complete=True, heads=MarkovHeads(WIDE, 2)
        )
        for s in range(6)
    ]
    assert all(record.stats.drift_coverage == 1 for record in made)
    assert max(max(record.accept_lengths) for record in made) > 3, "further than the heads reach"


# --- sparse trees ----------------------------------------------------------------------------------------------------
def test_medusas_choice_is_the_best_tree() -> None:
    """Among all trees of as many nodes, its sum of products of accuracies is the largest."""
    accuracies = [[0.6, 0.25, 0.1], [0.5, 0.3, 0.05], [0.4, 0.1, 0.2]]
    values = {
        path: _product(accuracies, path)
        for depth in (1, 2, 3)
        for path in map("".join, itertools.product("012", repeat=depth))
    }
    for count in (1, 2, 3, 4):
        best = max(
            sum(values[path] for path in tree)
            for tree in itertools.combinations(values, count)
            if all(len(path) == 1 or path[:-1] in tree for path in tree)
        )
        assert sum(values[path] for path in choose_nodes(accuracies, count)) == pytest.approx(best)
    assert len(choose_nodes(accuracies, 100)) == 39, "no more than there are"


def _product(accuracies: Sequence[Sequence[float]], path: str) -> float:
    value = 1.0
    for depth, rank in enumerate(path):
        value *= accuracies[depth][int(rank)]
    return value


def test_a_recorded_tree_is_filled_in_by_the_heads() -> None:
    method = parse_method("drafter=heads(grow=sparse(nodes=3)),accept=onehot")
    settled = method.settle({}, None, MarkovHeads.accuracies)
    assert settled.drafter == Heads(Sparse(3, "0x1x00"))
    assert "tree=0x1x00" in settled.name and parse_method(full_spec(settled)) == settled
    assert settled.levels == 2 and settled.drafter.slots(1) == 2 and settled.drafter.slots(2) == 3
    assert method.settle({}) == method, "stays open where no heads are known"
    with pytest.raises(UserError, match="here are none: give heads="):
        parse_method("medusa").settle({}, None, ())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sparse(8, "0x00x10"), "node 10 without its parent 1"),
        (lambda: Sparse(8, "0x0"), "names 2 nodes: give different ones"),
        (lambda: Sparse(1, "0x1"), "at most nodes=1"),
        (lambda: Sparse(8, "0,1"), "give nodes by the ranks"),
        (lambda: Sparse(512), "nodes=512 is out of range"),
        (lambda: Heads(Lookup()), "give a drafter that reads a draft model's laws"),
        (lambda: Heads(Heads()), "give a drafter that reads a draft model's laws"),
        (lambda: Heads(otherwise=Lookup()), "give model, or model"),
        (lambda: Heads(otherwise=Model(drafts=2)), "give model, or model"),
        (lambda: Heads(Static("2x2"), otherwise=Model()), "without grow="),
        (lambda: Heads(sure=1.5), "sure=1.5 is out of range"),
        (lambda: Method(drafter=Heads(Drawn("2x1")), accept=OneHot()), "those of .* are drawn"),
        (lambda: Method(drafter=Heads(Static("2x1"))), "accept rule Exact"),
        (lambda: Method(drafter=Heads(), trust=Gate(0.5), stop=Untrusted()), "drafts of heads have none"),
        (
            lambda: Method(drafter=Heads(Sparse()), accept=OneHot(), trust=Certain("entropy", 1.0)),
            "grows trees",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]


def test_presets() -> None:
    assert (
        parse_method("heads").lossless()
        and parse_method("medusa").lossless()
        and parse_method("eagle").lossless()
    )
    assert (
        parse_method("eagle").drafter == Heads(Dynamic(8, 5, 24)) and parse_method("medusa").stop == Never()
    )
    typical = parse_method("drafter=heads(grow=sparse(tree=0x1x00)),accept=typical")
    assert isinstance(typical.accept, Typical) and not typical.lossless()
    assert parse_method("drafter=heads,accept=mentored(kl=0.1)").accept == Mentored(0.1)


# --- heads that can draft no token after some texts -------------------------------------------------------------------
class _DeadEnds(MarkovHeads):
    """After a drafted token 0 all logits are −inf."""

    value = -torch.inf

    def begin(self) -> HeadText:
        text, value = super().begin(), self.value
        real = text.logits

        def logits(paths: Sequence[tuple[int, ...]]) -> Tensor | None:
            found = real(paths)
            if found is not None:
                for i, path in enumerate(paths):
                    if path[-1:] == (0,):
                        found[i] = value
            return found

        text.logits = logits  # type: ignore[method-assign]
        return text


@pytest.mark.parametrize(
    ("rule", "grow"),
    [(Exact(), None), (Block(), None), *TREES, (Traversal(), Model(drafts=2))],
    ids=str,
)
def test_a_draft_ends_where_the_heads_know_no_token(rule: Judge, grow: Drafter | None) -> None:
    method = Method(accept=rule, stop=Fixed(3), drafter=Heads(grow), cap=3)
    check(method, NARROW, 3, _DeadEnds(NARROW, 4, sees_path=True), ahead=3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("grow", [None, Static("2x2")], ids=str)
def test_logits_that_are_not_numbers_are_an_error(value: float, grow: Drafter | None) -> None:
    heads = _DeadEnds(NARROW, 4, sees_path=True)
    heads.value = value
    method = Method(accept=OneHot() if grow else Exact(), stop=Fixed(3), drafter=Heads(grow))
    with pytest.raises(SprinterError, match=r"drafting heads' logits are (NaN|\+inf) at position"):
        check(method, NARROW, 3, heads)
