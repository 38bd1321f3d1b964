"""Generation on real models: equality with the target, provenance, limits, endings, streams."""

from __future__ import annotations

import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import sprinter
from sprinter.decode.draft import Origin
from sprinter.engine.executor import RequestRun
from sprinter.engine.stream import Detokenizer, cut_at_stop
from sprinter.errors import SprinterError, UserError
from sprinter.laws import Sampling, process, tv_distance
from sprinter.random import AddressedDraws, Purpose

PROMPT = [3, 7, 1, 12, 5]
METHODS = ("autoregressive", "draft-only", "speculative(gamma=3)", "sprinter(tau=0.5)", "coin(rate=0.5)")


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


def target_greedy(pair: sprinter.Pair, prompt: list[int], length: int) -> list[int]:
    """The target's own greedy text, uncached."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            text.append(int(pair.models.target.model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


def with_eos(pair: sprinter.Pair, eos: int) -> sprinter.Pair:
    target = dataclasses.replace(pair.models.target, eos_ids=(eos,))
    return sprinter.Pair(dataclasses.replace(pair.models, target=target), pair.gate)


@pytest.mark.parametrize("gamma", range(1, 9))
def test_greedy_speculation_is_the_targets_own_text(tiny_pair: sprinter.Pair, gamma: int) -> None:
    expected = target_greedy(tiny_pair, PROMPT, 24)
    out = tiny_pair.generate(PROMPT, method=f"speculative(gamma={gamma})", temperature=0, max_new_tokens=24)
    assert ids(out) == expected
    assert out.stats.lossless and out.stats.mean_drift == 0


@pytest.mark.parametrize("gamma", range(1, 9))
def test_greedy_text_ends_at_every_eos_position(tiny_pair: sprinter.Pair, gamma: int) -> None:
    expected = target_greedy(tiny_pair, PROMPT, 16)
    ends = [i for i, x in enumerate(expected) if x not in expected[:i]]
    assert len(ends) >= 4, "the text must hold several distinct tokens, or this test shows nothing"
    for end in ends:
        pair = with_eos(tiny_pair, expected[end])
        out = pair.generate(PROMPT, method=f"speculative(gamma={gamma})", temperature=0, max_new_tokens=16)
        assert ids(out) == expected[: end + 1]
        assert out.finish_reason == "eos"


def test_a_gate_that_never_trusts_gives_the_greedy_target(tiny_pair: sprinter.Pair) -> None:
    out = tiny_pair.generate(PROMPT, method="sprinter(tau=1.0)", temperature=0, max_new_tokens=20)
    assert ids(out) == target_greedy(tiny_pair, PROMPT, 20)
    assert out.stats.trusted == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drafting_ahead_does_not_change_the_text(
    tiny_pair: sprinter.Pair, method: str, temperature: float
) -> None:
    for seed in range(3):
        texts = [
            ids(
                tiny_pair.generate(
                    PROMPT, method=method, temperature=temperature, seed=seed, max_new_tokens=16, ahead=k
                )
            )
            for k in (1, 4, 16)
        ]
        assert texts[0] == texts[1] == texts[2]


def test_another_seed_gives_another_text(tiny_pair: sprinter.Pair) -> None:
    assert len({tuple(ids(tiny_pair.generate(PROMPT, seed=seed))) for seed in range(5)}) == 5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_token_limit_is_exact(tiny_pair: sprinter.Pair, method: str, limit: int) -> None:
    out = tiny_pair.generate(PROMPT, method=method, max_new_tokens=limit, meter="complete")
    assert len(out.tokens) == limit == out.stats.new_tokens == sum(out.accept_lengths)
    assert out.finish_reason == "length"
    assert out.stats.drift_coverage == 1


def test_one_token_prompt_and_full_context(tiny_pair: sprinter.Pair) -> None:
    for method in METHODS:
        out = tiny_pair.generate([4], method=method, max_new_tokens=95)
        assert len(out.tokens) == 95
    with pytest.raises(UserError, match="exceed the context"):
        tiny_pair.generate([4], method="speculative", max_new_tokens=96)


@pytest.mark.parametrize(
    "method", ["sprinter(tau=0.5)", "coin(rate=0.6)", "draft-only", "speculative(gamma=4)"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_metered_drift_is_recomputed_from_the_models(
    tiny_pair: sprinter.Pair, method: str, temperature: float
) -> None:
    """Every token's drift against laws computed afresh, uncached, from the finished text."""
    sampling = Sampling(temperature)
    out = tiny_pair.generate(
        PROMPT, method=method, temperature=temperature, max_new_tokens=40, meter="complete", seed=4
    )
    text = torch.tensor([PROMPT + ids(out)])
    with torch.inference_mode():
        p = process(tiny_pair.models.target.model(text).logits[0], sampling)
        q = process(tiny_pair.models.draft.model(text).logits[0], sampling)
    for i, token in enumerate(out.tokens):
        row = len(PROMPT) + i - 1
        expected = float(tv_distance(p[row], q[row])) if token.origin is Origin.TRUSTED else 0.0
        assert token.drift == pytest.approx(expected, abs=2e-5), (i, token)
    drifts = [token.drift for token in out.tokens]
    assert out.stats.mean_drift == pytest.approx(sum(drifts) / len(drifts))


def test_running_meter_scores_one_round_late(tiny_pair: sprinter.Pair) -> None:
    out = tiny_pair.generate(PROMPT, method="sprinter(tau=0.3)", max_new_tokens=40, seed=2)
    unscored = [i for i, token in enumerate(out.tokens) if token.drift is None]
    assert out.stats.closing_passes == 0
    assert out.stats.drift_coverage == pytest.approx(1 - len(unscored) / 40)
    last_call = max((i for i, t in enumerate(out.tokens) if t.origin is not Origin.TRUSTED), default=-1)
    assert all(i > last_call for i in unscored)


def test_draft_only_without_a_call_has_null_numbers(tiny_pair: sprinter.Pair) -> None:
    stats = tiny_pair.generate(PROMPT, method="draft-only", max_new_tokens=10).to_dict()["stats"]
    assert stats["target_calls"] == 0
    assert stats["tokens_per_target_call"] is None
    assert stats["mean_drift"] is None and stats["drift_coverage"] == 0


def test_counts_and_flops_agree_with_the_record(tiny_pair: sprinter.Pair) -> None:
    out = tiny_pair.generate(PROMPT, method="sprinter(tau=0.5)", max_new_tokens=40, seed=1)
    stats, costs = out.stats, tiny_pair._runtime.costs
    origins = [token.origin for token in out.tokens]
    assert stats.trusted == origins.count(Origin.TRUSTED)
    assert stats.accepted == origins.count(Origin.ACCEPTED)
    assert stats.target_calls == stats.rounds or stats.target_calls == stats.rounds - 1
    assert stats.draft_steps == stats.trusted + stats.checked
    # the paper counts one F_t a call; really every pending token goes through the target
    assert tiny_pair.gate is not None
    paper = stats.draft_steps * (costs.draft + tiny_pair.gate.flops) + stats.target_calls * costs.target
    assert stats.flops_passes == pytest.approx(paper)
    assert stats.target_tokens >= stats.target_calls
    assert stats.flops_tokens > stats.flops_passes
    times = out.to_dict()["stats"]["times"]
    assert sum(times.values()) == pytest.approx(stats.wall_s, rel=1e-6)
    assert min(times.values()) >= 0


@pytest.mark.parametrize("method", METHODS)
def test_stream_equals_generate(builtin_pair: sprinter.Pair, method: str) -> None:
    whole = builtin_pair.generate(
        "A small town in", method=method, max_new_tokens=24, seed=3, meter="complete"
    )
    stream = builtin_pair.stream(
        "A small town in", method=method, max_new_tokens=24, seed=3, meter="complete"
    )
    pieces = [token.text for token in stream]
    assert "".join(pieces) == whole.text
    assert ids(stream.generation) == ids(whole)
    assert stream.generation.stats.drift_coverage == whole.stats.drift_coverage == 1
    assert stream.generation.finish_reason == whole.finish_reason


def test_abandoned_stream_leaves_nothing_behind(tiny_pair: sprinter.Pair) -> None:
    expected = ids(tiny_pair.generate(PROMPT, method="speculative", seed=8, max_new_tokens=30))
    for stop_after in (1, 2, 5):
        stream = tiny_pair.stream(PROMPT, method="sprinter(tau=0.4)", max_new_tokens=60, seed=stop_after)
        for _ in range(stop_after):
            next(stream)
        stream.close()
        assert stream.generation.finish_reason == "cancelled"
        assert len(stream.generation.tokens) >= stop_after
        assert ids(tiny_pair.generate(PROMPT, method="speculative", seed=8, max_new_tokens=30)) == expected
    dropped = tiny_pair.stream(PROMPT, max_new_tokens=60)
    next(dropped)
    del dropped
    gc.collect()
    assert ids(tiny_pair.generate(PROMPT, method="speculative", seed=8, max_new_tokens=30)) == expected


def test_streams_side_by_side_do_not_disturb_each_other(tiny_pair: sprinter.Pair) -> None:
    alone = [ids(tiny_pair.generate(PROMPT, method="coin", seed=s, max_new_tokens=20)) for s in (1, 2, 3)]
    streams = [tiny_pair.stream(PROMPT, method="coin", seed=s, max_new_tokens=20) for s in (1, 2, 3)]
    together: list[list[int]] = [[], [], []]
    for _ in range(20):
        for row, stream in zip(together, streams, strict=True):
            row.append(next(stream).id)
    assert together == alone


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_string_anywhere_in_a_draft(builtin_pair: sprinter.Pair, method: str, length: int) -> None:
    options: dict[str, Any] = {"method": method, "max_new_tokens": 40, "seed": 5, "temperature": 0.7}
    text = builtin_pair.generate("The first king of", **options).text
    for place in (4, 9, 17):
        word = text[place : place + length]
        out = builtin_pair.generate("The first king of", stop=[word], **options)
        assert out.text == text[: text.find(word)]
        assert out.finish_reason == "stop"


def test_stop_may_be_one_string_and_must_not_be_empty(builtin_pair: sprinter.Pair) -> None:
    assert builtin_pair.generate("One", stop="the", max_new_tokens=4).finish_reason in (
        "length",
        "stop",
        "eos",
    )
    with pytest.raises(UserError, match="is not text or a list of texts, none of them empty"):
        builtin_pair.generate("One", stop=["a", ""])


def test_cut_at_stop_takes_the_first() -> None:
    assert cut_at_stop("one two three", ["three", "two"]) == "one "
    assert cut_at_stop("one", ["x"]) == "one"


def test_pieces_of_broken_characters_join_to_the_whole(builtin_pair: sprinter.Pair) -> None:
    tokenizer = builtin_pair.tokenizer
    text = "naïve 漢字 🙂 café — Ω, " * 8  # longer than the context that is decoded again
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(x) for x in tokenizer(text)["input_ids"]]
    assert "".join(pieces) + detokenizer.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_name_model_and_position(which: str, value: float, tiny_pair: sprinter.Pair) -> None:
    model = getattr(tiny_pair.models, which).model

    def spoil(module: object, args: object, output: torch.Tensor) -> torch.Tensor:
        output[..., 3] = value
        return output

    handle = model.lm_head.register_forward_hook(spoil)
    try:
        with pytest.raises(SprinterError, match=rf"{which} model's logits .* at position 4"):
            tiny_pair.generate(PROMPT, method="speculative", max_new_tokens=8, temperature=0)
    finally:
        handle.remove()
    tiny_pair.generate(PROMPT, method="speculative", max_new_tokens=8)  # and the pair still works


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ([99], {}, "token id 99"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens=0"),
        (PROMPT, {"temperature": -1.0}, "temperature=-1.0"),
        (PROMPT, {"temperature": float("nan")}, "temperature=nan"),
        (PROMPT, {"top_p": 0.0}, "top_p=0.0"),
        (PROMPT, {"top_k": -1}, "top_k=-1"),
        (PROMPT, {"min_p": 1.5}, "min_p=1.5"),
        (PROMPT, {"seed": 1.5}, "seed=1.5"),
        (b"bytes", {}, "prompt is bytes"),
        ([3.7], {}, "neither text nor a flat sequence"),
        (None, {}, "neither text nor a flat sequence"),
        (PROMPT, {"temperature": "1"}, "temperature='1' is not a number"),
        (PROMPT, {"method": ""}, "the method is empty"),
        (PROMPT, {"method": 5}, "the method is 5"),
        (PROMPT, {"meter": "some"}, "meter='some'"),
        (PROMPT, {"ahead": 0}, "ahead=0"),
        (PROMPT, {"stop": ["x"]}, "stop strings need a tokenizer"),
        (PROMPT, {"method": "speculativ"}, "did you mean 'speculative'"),
        (PROMPT, {"max_new_tokens": 10**6}, "exceed the context"),
    ],
)
def test_bad_requests(tiny_pair: sprinter.Pair, prompt: Any, options: dict[str, Any], message: str) -> None:
    for call in (tiny_pair.generate, tiny_pair.stream):
        with pytest.raises(UserError, match=message) as caught:
            call(prompt, **options)
        assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers(tiny_pair: sprinter.Pair) -> None:
    plain = tiny_pair.generate(PROMPT, seed=3, max_new_tokens=5, top_k=4)
    other = tiny_pair.generate(
        np.asarray(PROMPT),
        seed=np.int64(3),
        max_new_tokens=np.int32(5),
        top_k=np.int64(4),
        temperature=np.float32(1),
    )
    assert ids(other) == ids(plain)


def test_every_seed_is_its_own() -> None:
    seeds = (0, 1, -1, 2**63, 2**64 - 1, 2**64, 2**70, -(2**70))
    numbers = {AddressedDraws(seed).uniform(1, 1, Purpose.DRAFT) for seed in seeds}
    assert len(numbers) == len(seeds)


@pytest.mark.parametrize("method", ["sprinter(tau=0.5)", "speculative(gamma=3)"])
def test_threads_on_one_pair_do_not_disturb_each_other(tiny_pair: sprinter.Pair, method: str) -> None:
    def text(seed: int) -> list[int]:
        return ids(tiny_pair.generate(PROMPT * 8, method=method, seed=seed, max_new_tokens=30))

    alone = [text(seed) for seed in range(6)]
    for _ in range(3):
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(text, range(6))) == alone


def test_a_stream_tells_how_far_it_is(tiny_pair: sprinter.Pair) -> None:
    stream = tiny_pair.stream(PROMPT, method="sprinter(tau=0.5)", max_new_tokens=30, seed=2)
    for _ in range(7):
        next(stream)
    now = stream.generation
    count = len(now.tokens)
    assert now.stats.new_tokens == count >= 7 and now.finish_reason == "cancelled"
    list(stream)
    assert len(now.tokens) == now.stats.new_tokens == count, "an earlier result must not change"
    assert stream.generation.stats.new_tokens == 30


def test_methods_need_their_parts(tiny_pair: sprinter.Pair) -> None:
    no_gate = sprinter.Pair(tiny_pair.models)
    alone = sprinter.Pair(dataclasses.replace(tiny_pair.models, draft=None))
    assert [pair.default_method for pair in (tiny_pair, no_gate, alone)] == [
        "auto",
        "auto",
        "autoregressive",
    ]
    with pytest.raises(UserError, match="needs a gate"):
        no_gate.generate(PROMPT, method="sprinter")
    with pytest.raises(UserError, match="needs a draft"):
        alone.generate(PROMPT, method="speculative")
    with pytest.raises(UserError, match="has no draft"):
        sprinter.Pair(alone.models, tiny_pair.gate)
    assert len(alone.generate(PROMPT, max_new_tokens=5).tokens) == 5


def test_a_draft_is_the_second_argument() -> None:
    paths = sprinter.builtin_paths()
    pair = sprinter.load_pair(paths["target"], paths["draft"], gate=paths["gate"])
    assert pair.models.draft is not None and pair.gate is not None
    with pytest.raises(UserError, match="without a target"):
        sprinter.load_pair(None, paths["draft"])


def test_other_attention_gives_the_same_text(builtin_pair: sprinter.Pair) -> None:
    paths = sprinter.builtin_paths()
    eager = sprinter.load_pair(paths["target"], paths["draft"], attn_implementation="eager")
    texts = [
        pair.generate("A small town in", method="speculative", temperature=0, max_new_tokens=16).text
        for pair in (builtin_pair, eager)
    ]
    assert texts[0] == texts[1]


def test_a_target_that_only_meters_costs_no_time(tiny_pair: sprinter.Pair) -> None:
    """The prompt's own pass through a target that is never called belongs to the closing passes."""
    out = tiny_pair.generate(list(range(1, 20)), method="draft-only", max_new_tokens=8, meter="complete")
    free = tiny_pair.generate(list(range(1, 20)), method="draft-only", max_new_tokens=8)
    assert out.stats.target_calls == 0 and out.stats.closing_s > 0
    assert free.stats.closing_s == 0
    spent = []
    original = RequestRun._count_prefill

    def noted(self: RequestRun, view: Any, reused: int, seconds: float) -> None:
        before = self._stats.prefill_s
        original(self, view, reused, seconds)
        spent.append((view is self.sequence.target, self._stats.prefill_s - before))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestRun, "_count_prefill", noted)
        tiny_pair.generate(list(range(1, 20)), method="draft-only", max_new_tokens=8, meter="complete")
    assert all(seconds == 0 for closing, seconds in spent if closing)
    assert any(closing for closing, _ in spent)
