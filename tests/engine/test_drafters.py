"""Drafters on real models: several drafts, prompt lookup, greedy drafts."""

import dataclasses
import random
from collections import Counter

import pytest
import torch

import sprinter
from sprinter.decode.draft import Origin
from sprinter.decode.drafter import Context, Model, Proposals
from sprinter.decode.lookup import Endings, Lookup, _copy, _find
from sprinter.decode.spec import Method, parse_method
from sprinter.decode.stop import Fixed
from sprinter.decode.trust import Gate
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

PROMPT = [3, 7, 1, 12, 5]
SEVERAL = ("batch", "specinfer", "spectr")
LOSSLESS = (
    *(f"{name}(drafts={drafts}, gamma={gamma})" for name in SEVERAL for drafts, gamma in ((1, 3), (3, 4), (8, 1))),
    "lookup(n=3, gamma=5)", "lookup(n=1, gamma=2)", "drafter=lookup(n=2,least=1,otherwise=model),stop=fixed(gamma=3)",
    "hybrid", "hybrid(n=1, least=1, copies=2)",
    "drafter=model(greedy=true),stop=fixed(gamma=3)", "heuristic", "confidence(c=0.5)", "svip(h=0.4)", "adaedl",
)  # fmt: skip


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


@pytest.mark.parametrize("method", LOSSLESS)
def test_greedy_text_is_the_targets_own(tiny_pair: sprinter.Pair, method: str) -> None:
    plain = tiny_pair.generate(PROMPT, method="autoregressive", temperature=0, max_new_tokens=30)
    for prompt, length in ((PROMPT, 30), ([2], 7)):
        plain = tiny_pair.generate(prompt, method="autoregressive", temperature=0, max_new_tokens=length)
        out = tiny_pair.generate(prompt, method=method, temperature=0, max_new_tokens=length)
        assert ids(out) == ids(plain)
        assert out.stats.lossless and out.stats.mean_drift == 0


@pytest.mark.parametrize("name", SEVERAL)
def test_several_drafts_keep_a_text_that_ends_early(tiny_pair: sprinter.Pair, name: str) -> None:
    plain = ids(tiny_pair.generate(PROMPT, method="autoregressive", temperature=0, max_new_tokens=16))
    for end in [i for i, x in enumerate(plain) if x not in plain[:i]]:
        target = dataclasses.replace(tiny_pair.models.target, eos_ids=(plain[end],))
        pair = sprinter.Pair(dataclasses.replace(tiny_pair.models, target=target))
        out = pair.generate(PROMPT, method=f"{name}(drafts=3, gamma=4)", temperature=0, max_new_tokens=16)
        assert ids(out) == plain[: end + 1] and out.finish_reason == "eos"


def test_the_first_draft_of_several_is_the_single_draft(tiny_pair: sprinter.Pair) -> None:
    """With one draft all rules are exact speculative decoding, draw for draw."""
    single = ids(tiny_pair.generate(PROMPT, method="speculative(gamma=4)", seed=3, max_new_tokens=30))
    for name in SEVERAL:
        assert (
            ids(tiny_pair.generate(PROMPT, method=f"{name}(drafts=1, gamma=4)", seed=3, max_new_tokens=30))
            == single
        )


def test_more_drafts_need_fewer_calls(tiny_pair: sprinter.Pair) -> None:
    def calls(drafts: int) -> int:
        method = f"specinfer(drafts={drafts}, gamma=3)"
        return sum(
            tiny_pair.generate(PROMPT, method=method, seed=s, max_new_tokens=40).stats.target_calls
            for s in range(8)
        )

    assert calls(8) < 0.95 * calls(1)


def test_several_drafts_share_what_they_have_in_common(tiny_pair: sprinter.Pair) -> None:
    """The text is read once, not once a draft; where drafts are all alike (temperature 0) so are they."""
    stats = tiny_pair.generate(PROMPT, method="batch(drafts=3, gamma=2)", max_new_tokens=20, seed=1).stats
    assert stats.draft_steps < stats.draft_tokens < 3 * stats.draft_steps
    assert 2 * stats.target_calls < stats.target_tokens < 7 * stats.target_calls
    greedy = {"max_new_tokens": 20, "seed": 1, "temperature": 0.0}
    three = tiny_pair.generate(PROMPT, method="batch(drafts=3, gamma=2)", **greedy).stats
    one = tiny_pair.generate(PROMPT, method="batch(drafts=1, gamma=2)", **greedy).stats
    assert (three.draft_tokens, three.target_tokens) == (one.draft_tokens, one.target_tokens)


@pytest.mark.parametrize(
    ("text", "n", "least", "at_most", "found"),
    [
        ([1, 2, 3, 4, 1, 2], 2, 1, 2, [3, 4]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, 1, 1, [4]),  # the latest occurrence
        ([9, 1, 2, 3, 8, 2, 5, 1, 2], 2, 1, 1, [3]),  # the longer ending first
        ([9, 1, 2, 3, 8, 2, 5, 7, 2], 2, 1, 1, [5]),  # then the shorter one
        ([9, 1, 2, 3, 8, 2, 5, 7, 2], 2, 2, 1, []),
        ([1, 2, 1, 2], 2, 1, 5, [1, 2, 1, 2, 1]),  # the copy runs into itself
        ([4, 4], 3, 1, 3, [4, 4, 4]),
        ([1, 2, 3], 3, 1, 3, []),
        ([1], 3, 1, 3, []),
    ],
)
def test_look_up(text: list[int], n: int, least: int, at_most: int, found: list[int]) -> None:
    assert Endings(n, least, 99).look_up(text, at_most) == found


@pytest.mark.parametrize("seed", range(20))
def test_endings_of_a_growing_text_are_those_of_the_whole(seed: int) -> None:
    pick = random.Random(seed)
    text = [pick.randrange(3) for _ in range(pick.randrange(1, 30))]
    endings = Endings(4, 2, 99)
    for _ in range(60):
        whole = _find(text, 4, 2)
        assert endings.look_up(text, 5) == ([] if whole is None else _copy(text, whole.source, 5))
        text += [pick.randrange(3) for _ in range(pick.randrange(1, 4))]


def test_endings_read_the_last_tokens_of_a_long_prompt() -> None:
    assert Endings(2, 1, 4).look_up([1, 2, 3, 4, 5, 1], 2) == []
    assert Endings(2, 1, 6).look_up([1, 2, 3, 4, 5, 1], 2) == [2, 3]


def test_lookup_runs_no_draft_model(tiny_pair: sprinter.Pair) -> None:
    alone = sprinter.Pair(dataclasses.replace(tiny_pair.models, draft=None))
    cycle = [1, 2, 3] * 4
    out = alone.generate(cycle, method="lookup(n=3, gamma=4)", max_new_tokens=12, seed=1)
    assert out.stats.draft_steps == 0 and out.stats.checked > 0
    origins = {token.origin for token in out.tokens}
    assert origins <= {Origin.ACCEPTED, Origin.REPLACEMENT, Origin.BONUS, Origin.TARGET}


def test_a_copy_is_bounded_in_each_round(tiny_pair: sprinter.Pair) -> None:
    """When its tokens are used up the target is called, and the next round may copy again."""
    cycle = [1, 2, 3] * 4
    for length in (1, 2, 4):
        method = f"drafter=lookup(length={length}),stop=never,cap=none"
        out = tiny_pair.generate(cycle, method=method, max_new_tokens=30, temperature=0)
        assert max(Counter(token.round for token in out.tokens).values()) == length + 1
        assert ids(out) == ids(
            tiny_pair.generate(cycle, method="autoregressive", max_new_tokens=30, temperature=0)
        )
    texts = (cycle, [*cycle, 1, 2, 3, 1, 2], cycle)
    asked = [
        Context(text, round, 9, 20, AddressedDraws(0), torch.ones(1))
        for text, round in zip(texts, (1, 1, 2), strict=True)
    ]
    for drafter in (Lookup(length=5), Lookup(length=5, otherwise=Model())):
        proposals = Proposals(drafter)
        assert [len(proposals.ask(one).tokens) for one in asked] == [5, 0, 5]  # type: ignore[union-attr]


def test_lookup_needs_fewer_calls_on_text_that_repeats(builtin_pair: sprinter.Pair) -> None:
    def calls(method: str) -> int:
        return builtin_pair.generate(
            "a b c a b c a b c a b c", method=method, temperature=0
        ).stats.target_calls

    assert calls("lookup") < 0.8 * calls("autoregressive")


@pytest.mark.parametrize("ahead", [1, 4, 16])
@pytest.mark.parametrize("rest", ["accept=random(rate=0.5)", "stop=fallback(f=0.3)", "stop=fixed(gamma=2)"])
def test_lookup_with_a_model_behind_it(tiny_pair: sprinter.Pair, rest: str, ahead: int) -> None:
    """The model reads on from what was looked up and refused, also where the same token comes back."""
    method = f"drafter=lookup(least=1,otherwise=model),{rest}"
    for temperature in (0.0, 0.7):
        texts = [
            ids(
                tiny_pair.generate(
                    PROMPT, method=method, temperature=temperature, seed=1, max_new_tokens=40, ahead=k
                )
            )
            for k in (1, ahead)
        ]
        assert texts[0] == texts[1] and len(texts[0]) == 40


def test_trusting_all_that_is_looked_up_still_needs_the_target(tiny_pair: sprinter.Pair) -> None:
    method = parse_method("drafter=lookup,trust=everyone,stop=never,cap=none")
    assert method.needs_target
    assert len(tiny_pair.generate(PROMPT, method=method, max_new_tokens=12).tokens) == 12


def test_a_gate_has_nothing_to_read_in_a_looked_up_token() -> None:
    with pytest.raises(UserError, match="looked-up tokens have none"):
        Method(trust=Gate(), drafter=Lookup())


def test_nested_and_composed_specs() -> None:
    method = parse_method(
        "trust=gate(tau=0.4), stop=untrusted(tail=2, under=svip(h=0.2)), accept=exact, cap=9"
    )
    assert method.stop.under.h == 0.2 and method.cap == 9  # type: ignore[attr-defined]
    assert parse_method("drafter=lookup(n=4)").drafter == Lookup(4)
    assert parse_method("batch(drafts=3)").length == 5
    assert parse_method("trust=nobody,stop=fixed(gamma=9),cap=4").length == 4
    assert parse_method("svip").length is None
    assert parse_method("svip").cap == 40
    assert parse_method("svip(cap=none)").cap is None
    assert parse_method("svip(cap=7)").cap == 7
    assert Fixed(5) == parse_method("opt").stop
    for bad, message in (
        ("drafter=lookup(n=0)", "n=0"),
        ("drafter=lookup(n=1,least=2)", "least=2"),
        ("drafter=lookup(length=0)", "length=0"),
        ("drafter=lookup(otherwise=models)", "did you mean 'model'"),
        ("drafter=model(drafts=2)", "judges one draft"),
        ("batch(drafts=9)", "drafts=9"),
        ("stop=untrusted(tail=1,under=svipp(h=1))", "did you mean 'svip'"),
    ):
        with pytest.raises(UserError, match=message):
            parse_method(bad)
