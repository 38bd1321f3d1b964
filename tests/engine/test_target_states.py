"""What a drafter may read of the target: hidden states of the text's tokens, from the prompt on, after any round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from tests.models.tiny import tiny, word_tokenizer
from torch import Tensor

import sprinter
from sprinter.decode import Context, Drafter, Fixed, Method, Proposal, Proposer

PROMPT = [3, 1, 4, 1, 5]
LAYERS = (-1, 0, 1)


@dataclass(frozen=True)
class Watcher(Drafter):
    """Proposes the last token twice, and notes what it was shown."""

    seen: list[tuple[list[int], dict[int, Tensor]]] = field(default_factory=list)
    target_states: Sequence[int] = LAYERS

    @property
    def uses_model(self) -> bool:
        return False

    @property
    def needs_target(self) -> bool:
        return True

    @property
    def proposer(self) -> Callable[[], Proposer]:
        seen = self.seen

        class Watching(Proposer):
            def propose(self, context: Context) -> Proposal:
                seen.append((list(context.text), dict(context.states)))
                return context.certain([context.text[-1]] * min(2, context.at_most))

        return Watching


@pytest.mark.parametrize("chunk", [None, 2])
def test_states_are_those_of_the_text_whatever_was_refused(chunk: int | None) -> None:
    model = tiny("llama")
    pair = sprinter.load_pair(model, tokenizer=word_tokenizer(), compile=False)
    drafter = Watcher()
    method = Method(drafter=drafter, stop=Fixed(2))
    options = {"method": method, "max_new_tokens": 12, "seed": 4}
    if chunk is None:
        out = pair.generate(PROMPT, **options)  # type: ignore[arg-type]
    else:
        with sprinter.Engine(pair, rows=2, policy=sprinter.Policy(prompt_piece=chunk)) as engine:
            number = engine.add(PROMPT, **options)  # type: ignore[arg-type]
            engine.add([2, 2, 2, 2, 2, 2, 2], max_new_tokens=9, method="autoregressive")
            out = engine.finish()[number]
    assert out.stats.checked > out.stats.accepted, "something was refused"
    assert len(drafter.seen) >= 3
    whole = torch.tensor([[*PROMPT, *(token.id for token in out.tokens)]])
    with torch.inference_mode():
        made = model(whole, output_hidden_states=True).hidden_states
    for text, states in drafter.seen:
        assert text == whole[0, : len(text)].tolist(), "a proposer sees the text, not what was refused"
        read = len(text) - 1  # all but what the last call wrote
        assert {layer: len(each) for layer, each in states.items()} == dict.fromkeys(LAYERS, read)
        assert torch.allclose(states[0], made[1][0, :read], atol=1e-5)
        assert torch.allclose(states[-1], made[-1][0, :read], atol=1e-5)


def test_a_drafter_that_asks_for_nothing_gets_nothing() -> None:
    drafter = Watcher(target_states=())
    pair = sprinter.load_pair(tiny("llama"), tokenizer=word_tokenizer(), compile=False)
    pair.generate(PROMPT, method=Method(drafter=drafter, stop=Fixed(2)), max_new_tokens=4)
    assert drafter.seen and all(states == {} for _, states in drafter.seen)
