"""Laws along given texts, in chunks and on fewer outcomes; seconds of forward passes and the speed they stand for."""

from __future__ import annotations

import pytest
import torch
from tests.cli.tiny import save_tiny

import sprinter
from sprinter.decode.costs import PassCosts
from sprinter.decode.spec import parse_method
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.laws import Sampling, one_hot, overlap, process, tv_distance
from sprinter.theory import recording as recording_module
from sprinter.theory.outcomes import condense_laws
from sprinter.theory.passes import measure_passes
from sprinter.theory.recording import Passage, Recording, first_choices, read_passages
from sprinter.theory.replay import Replay, replay

PASSAGES = [Passage((65, 66, 67), tuple(range(70, 100))), Passage((65,), (80, 81))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("given")
    for which, seed in (("target", 1), ("draft", 2)):
        save_tiny(root / which, seed)
    return sprinter.load_pair(root / "target", root / "draft")


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_laws_are_those_of_one_pass_over_the_text(
    pair: Pair, chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_module, "CHUNK", chunk)
    recording = read_passages(pair, PASSAGES, sampling=Sampling(temperature))
    assert recording.lengths == (30, 2)
    assert recording.ids.tolist() == [*range(70, 100), 80, 81]
    assert pair.models.draft is not None
    for model, laws, raws in (
        (pair.models.target, recording.p, recording.raw_p),
        (pair.models.draft, recording.q, recording.raw_q),
    ):
        wanted = []
        for prompt, ids in PASSAGES:
            with torch.inference_mode():
                wanted.append(model.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1])
        logits = torch.cat(wanted)
        torch.testing.assert_close(raws, torch.softmax(logits, -1), atol=1e-5, rtol=0)
        torch.testing.assert_close(laws, process(logits, Sampling(temperature)), atol=1e-5, rtol=0)
    same = recording.raw_p.argmax(-1) == recording.raw_q.argmax(-1)
    assert first_choices(recording).tolist() == same.tolist()


def test_a_replay_of_a_given_text_accepts_as_often_as_the_laws_overlap(pair: Pair) -> None:
    passages = [Passage((65, 66), tuple((7 * i + k) % 200 for i in range(200))) for k in range(3)]
    recording = read_passages(pair, passages)
    run = replay(recording, parse_method("speculative(gamma=1)"), repeats=4)
    beta = float(overlap(recording.p, recording.q).mean())
    drafted = run.draft_steps
    assert run.accepted / drafted == pytest.approx(beta, abs=3.3 * (beta * (1 - beta) / drafted) ** 0.5)


def test_condensed_laws_keep_distance_and_single_tokens() -> None:
    numbers = torch.Generator().manual_seed(0)
    p, q = torch.softmax(3 * torch.randn(2, 5, 400, generator=numbers, dtype=torch.float64), -1)
    tokens = torch.tensor([int(p[0].argmax()), 1, 2, 3, int(q[4].argmin())])
    (on_p, on_q), outcome, ids = condense_laws((p, q), tokens, kept=20)
    assert on_p.shape == on_q.shape == ids.shape == (5, 22)
    for law in (on_p, on_q):
        assert law.sum(-1).tolist() == pytest.approx([1.0] * 5, abs=1e-12)
    assert tv_distance(on_p, on_q).tolist() == pytest.approx(tv_distance(p, q).tolist(), abs=1e-12)
    for row, (token, place) in enumerate(zip(tokens.tolist(), outcome.tolist(), strict=True)):
        if place < 20:
            assert ids[row, place] == token
            assert on_p[row, place] == p[row, token]
        else:
            assert token not in ids[row]
            assert place == 20 + int(p[row, token] >= q[row, token])
    assert outcome[0] < 20 <= outcome[4]


def test_a_pair_without_draft_and_no_passages_are_refused(pair: Pair) -> None:
    with pytest.raises(UserError, match="at least one text"):
        read_passages(pair, [])
    alone = sprinter.load_pair(pair.models.target.model, tokenizer=pair.tokenizer)
    for call in (lambda: read_passages(alone, PASSAGES), lambda: measure_passes(alone)):
        with pytest.raises(UserError, match="this pair has no draft"):
            call()


def test_pass_times_of_each_length(pair: Pair) -> None:
    costs = measure_passes(pair, context=8, repeats=1)
    assert [tokens for tokens, _ in costs.target] == [*range(1, 10)]
    assert costs.draft_s(1) == costs.draft_s(2) > 0


def test_speed_from_counts_by_hand() -> None:
    times = PassCosts(((1, 1.0), (2, 1.2), (3, 1.6)), ((1, 0.25), (2, 0.25)))
    assert times.target_s(1) == 1.0
    assert times.target_s(1.5) == pytest.approx(1.1)
    assert times.target_s(5) == pytest.approx(2.4), "along the last slope"
    counts = dict.fromkeys(
        ("trusted", "accepted", "checked", "rounds", "drift", "scored", "parted", "kl"), 0.0
    )
    run = Replay(tokens=10, target_calls=4, draft_steps=8, read=12, by_text=torch.empty(0), **counts)
    assert run.token_s(times) == pytest.approx((4 * 1.6 + 8 * 0.25) / 10)
    assert run.speed_up(times) == pytest.approx(10 / 8.4)


def test_first_choices_are_those_of_the_whole_laws() -> None:
    numbers = torch.Generator().manual_seed(2)
    raw_p = torch.softmax(
        torch.randn(40, 400, generator=numbers, dtype=torch.float64), -1
    )  # groups outweigh tokens
    raw_q = torch.softmax(
        raw_p.log() + 0.3 * torch.randn(40, 400, generator=numbers, dtype=torch.float64), -1
    )
    same = (raw_p.argmax(-1) == raw_q.argmax(-1)).tolist()
    assert 0 < sum(same) < 40
    tokens = torch.zeros(40, dtype=torch.long)
    for p, q in ((raw_p, raw_q), (one_hot(raw_p), one_hot(raw_q))):
        on, taken, outcomes = condense_laws((p, q, raw_p, raw_q), tokens, kept=20)
        recording = Recording(
            *on, taken, tokens, {}, (40,), ((0,),), new_tokens=40, writer="given", outcomes=outcomes
        )
        assert first_choices(recording).tolist() == same
