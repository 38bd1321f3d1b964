"""Heads at work in the driver: what they are given, and that reading the state at x changes no text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.engine.conftest import tiny_llama

import sprinter
from sprinter.decode.draft import Origin
from sprinter.errors import UserError
from sprinter.heads.features import FEATURES, DraftStep
from sprinter.heads.head import Head, HeadConfig
from sprinter.models.pair import LoadedPair

PROMPT = [3, 7, 11, 2, 9]


class Constant(torch.nn.Module):
    """A network that records its input and returns a given output."""

    flops, size = 10.0, 5

    def __init__(self, inputs: int, says: float) -> None:
        super().__init__()
        self.inputs, self.says = inputs, says
        self.read: list[torch.Tensor] = []

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.read += features.reshape(-1, self.inputs).clone()
        return torch.full(features.shape[:-1], self.says)


def head(kind: str, features: tuple[str, ...], says: float = 5.0) -> Head:
    config = HeadConfig(16, "tiny-2", "tiny-1", kind=kind, architecture="ffn", features=features)
    return Head(config, Constant(config.inputs, says))  # type: ignore[arg-type]


def pair_with(*heads: Head) -> sprinter.Pair:
    return sprinter.Pair(LoadedPair(tiny_llama(1, layers=2), tiny_llama(2), None), None, heads)  # type: ignore[arg-type]


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


def uncached(pair: sprinter.Pair, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden state and raw law after the text, in one pass without a cache."""
    assert pair.models.draft is not None
    with torch.inference_mode():
        out = pair.models.draft.model.base_model(torch.tensor([text]))
        hidden = out.last_hidden_state[0, -1]
        return hidden, torch.softmax(pair.models.draft.model.get_output_embeddings()(hidden), -1)


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_head_reads_what_it_was_trained_on(ahead: int) -> None:
    """All features at each token of a run, against passes without a cache."""
    features = ("hidden", "entropy", "max_q", "top_q(k=4)", "position", "hidden_x", "log_q")
    scorer = head("specdec++", features)
    pair = pair_with(scorer)
    method = "trust=everyone,stop=specdec++(h=1.0),cap=64"  # one run, all of it trusted
    out = pair.generate(PROMPT, method=method, max_new_tokens=9, seed=4, ahead=ahead)
    text = list(PROMPT)
    assert [token.origin for token in out.tokens] == [Origin.TRUSTED] * 9
    for place, (token, read) in enumerate(zip(out.tokens, scorer.network.read, strict=True), start=1):
        hidden, law = uncached(pair, text)
        text.append(token.id)
        step = DraftStep(hidden, law, torch.tensor(place), torch.tensor(token.id), uncached(pair, text)[0])
        wanted = [FEATURES[name.partition("(")[0]](step, 4).flatten() for name in features]
        torch.testing.assert_close(read, torch.cat(wanted).float(), atol=2e-5, rtol=1e-4)


def test_reading_the_state_at_x_changes_no_text_and_wastes_one_pass_a_run() -> None:
    """A head that never stops leaves exactly the text of a fixed length; each run costs one draft pass more."""
    pair = pair_with(head("specdec++", ("hidden_x",), says=50.0))
    for temperature in (0.0, 1.0):
        for seed in range(4):
            kept = {"max_new_tokens": 40, "temperature": temperature, "seed": seed}
            plain = pair.generate(PROMPT, method="speculative(gamma=4)", **kept)  # type: ignore[arg-type]
            method = replace(sprinter.decode.spec.parse_method("specdec++"), cap=4)
            read = pair.generate(PROMPT, method=method, **kept)  # type: ignore[arg-type]
            assert ids(plain) == ids(read)
            assert plain.stats.target_calls == read.stats.target_calls
            runs = sum(token.origin is not Origin.TARGET for token in read.tokens) > 0 and read.stats.rounds
            assert plain.stats.draft_steps < read.stats.draft_steps <= plain.stats.draft_steps + runs


def test_a_head_that_always_stops_leaves_the_shortest_runs() -> None:
    pair = pair_with(head("specdec++", ("hidden_x",), says=-50.0), head("disco", ("entropy",), says=-50.0))
    for method, gamma in (("specdec++", 2), ("disco", 1)):
        plain = pair.generate(PROMPT, method=f"speculative(gamma={gamma})", max_new_tokens=30, seed=1)
        stopped = pair.generate(PROMPT, method=method, max_new_tokens=30, seed=1)
        assert ids(plain) == ids(stopped)
        assert stopped.stats.gate_s > 0


def test_what_a_pair_may_not_have() -> None:
    with pytest.raises(UserError, match="two heads of kind 'disco'"):
        pair_with(head("disco", ("entropy",)), head("disco", ("max_q",)))
    for kind in ("gate", "disco"):
        with pytest.raises(UserError, match=f"this {kind} head .* looks at the token"):
            pair_with(head(kind, ("hidden", "log_q")))
    with pytest.raises(UserError, match="is one head: give a list"):
        sprinter.load_pair(heads="some-directory")
    with pytest.raises(UserError, match="is not a head"):
        pair_with(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"needs a specdec\+\+ head, and this pair has none: give heads=\["):
        pair_with(head("disco", ("entropy",))).generate(PROMPT, method="specdec++")
    with pytest.raises(UserError, match="this pair has no draft"):
        sprinter.Pair(LoadedPair(tiny_llama(1), None, None), None, [head("disco", ("entropy",))])  # type: ignore[arg-type]


def test_a_gate_may_read_several_features() -> None:
    gate = head("gate", ("hidden", "entropy", "position"), says=-50.0)
    pair = pair_with(gate)
    out = pair.generate(PROMPT, method="sprinter", max_new_tokens=12)
    assert pair.gate is gate
    assert out.stats.trusted <= 1  # a trusted token may end the text
    assert {len(row) for row in gate.network.read} == {16 + 2}
