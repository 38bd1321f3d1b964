"""Drafts that are written as text: what they become in the target's tokens, and exact texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.test_translated import byte_level, folders

import sprinter
from sprinter.decode import Method
from sprinter.decode.stop import Fixed
from sprinter.engine.strings import StringDrafter
from sprinter.errors import UserError

__all__ = ["folders"]


@pytest.fixture(scope="module")
def models(folders: tuple[Path, Path]) -> tuple[sprinter.Pair, sprinter.Pair]:
    target, draft = (sprinter.load_pair(one, device="cpu", dtype="float32") for one in folders)
    return target, draft


def test_what_it_writes_is_encoded_in_the_targets_tokens(
    models: tuple[sprinter.Pair, sprinter.Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = byte_level("Ġthe", "Ġlong"), byte_level("ing", "Ġth", "at", end="<stop>")
    drafter = StringDrafter(*models, steps=3)
    read: list[str] = []

    def writes(*tokens: str) -> list[int]:
        left = list(tokens)

        def next_token(ids: list[int]) -> int:
            read.append(theirs.decode(ids))
            return int(theirs.convert_tokens_to_ids(left.pop(0)))  # type: ignore[arg-type]

        monkeypatch.setattr(drafter, "_next", next_token)
        return drafter.draft(ours.encode("a long"))

    assert ours.convert_ids_to_tokens(writes("Ġth", "e", "ing")) == ["Ġthe", "i", "n", "g"]
    assert read == ["a long", "a long th", "a long the"]
    assert writes("Ġth", "<stop>") == [*ours.encode(" th"), ours.eos_token_id], (
        "the draft's end is the target's"
    )
    assert ours.convert_ids_to_tokens(writes("Ã", "Ġ", "a")) == ["Ġ", "a"], "half a character is left out"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_texts_are_plain_decodings(
    models: tuple[sprinter.Pair, sprinter.Pair], temperature: float
) -> None:
    target, draft = models
    method = Method(stop=Fixed(6), drafter=StringDrafter(target, draft))
    prompts = [f"the thing that is {number} long" for number in range(4)]
    made = target.generate_batch(prompts, method=method, temperature=temperature, seed=3, max_new_tokens=24)
    assert sum(one.stats.drafted for one in made) > 0
    plain = target.generate_batch(prompts, method="autoregressive", temperature=0.0, max_new_tokens=24)
    assert ([one.text for one in made] == [one.text for one in plain]) is (temperature == 0)


def test_a_text_beyond_the_drafts_context_is_the_targets(models: tuple[sprinter.Pair, sprinter.Pair]) -> None:
    drafter = StringDrafter(*models)
    assert drafter.draft([5] * 200) == []
    with pytest.raises(UserError, match="steps=0 is out of range"):
        StringDrafter(*models, steps=0)
