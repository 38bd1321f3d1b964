"""Texts behind their prompts: spaces of SentencePiece, characters that a prompt begins; by every way to a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spellings import BYTES, KINDS, ids_of, llama2
from transformers import PreTrainedTokenizerFast

import sprinter
from sprinter.decode.draft import Origin, Token
from sprinter.engine.stream import Spelling, TextWriter, continued_text, prompt_end, special_ids

TOKENIZERS = {name: make() for name, make in KINDS.items()}
LLAMA = TOKENIZERS["llama2"]


def decoded(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def pieces(
    tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], new: Sequence[int], stop: Sequence[str] = ()
) -> list[str]:
    """The text of each new token; the last one has the rest."""
    special = special_ids(tokenizer)
    spelling = Spelling(tokenizer, special, tuple(stop), prompt_end(tokenizer, prompt, special))
    tokens = [Token(id, Origin.TARGET, 1) for id in new]
    TextWriter(spelling).render(tokens, last=True)
    return [token.text for token in tokens]


def drawn(name: str) -> st.SearchStrategy[list[int]]:
    """Tokens of texts: where bytes are tokens, those of whole characters."""
    tokenizer = TOKENIZERS[name]
    words = [[id] for word, id in tokenizer.get_vocab().items() if word not in BYTES and id < 400]
    if name in ("llama2", "byte level"):
        words = [[id] for (id,) in words if "\ufffd" not in decoded(tokenizer, [id])]
        texts = ["字", "é", "🙂", "木"]
        if name == "llama2":
            words += [ids_of(tokenizer, *(BYTES[byte] for byte in text.encode())) for text in texts]
        else:
            words += [list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    return st.lists(st.sampled_from(words), max_size=24).map(
        lambda parts: [id for part in parts for id in part]
    )


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_a_text_is_what_is_decoded_behind_its_prompt(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, new = data.draw(drawn(name)), data.draw(drawn(name))
    made = "".join(pieces(tokenizer, prompt, new))
    assert decoded(tokenizer, prompt) + made == decoded(tokenizer, [*prompt, *new])
    assert continued_text(tokenizer, prompt, new) == made


@given(prompt=st.lists(st.integers(0, 300), max_size=40), new=st.lists(st.integers(0, 300), max_size=40))
def test_with_bytes_as_tokens_it_is_so_whatever_the_bytes(prompt: list[int], new: list[int]) -> None:
    """A character that the prompt begins and the text ends is the text's."""
    tokenizer = TOKENIZERS["byte level"]
    before, whole = decoded(tokenizer, prompt), decoded(tokenizer, [*prompt, *new])
    made = "".join(pieces(tokenizer, prompt, new))
    begun = next(i for i in range(5) if whole.startswith(before[: len(before) - i]))
    assert before[: len(before) - begun] + made == whole


@pytest.mark.parametrize("name", ["llama2", "byte level"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 5, 40, 41, 42, 43])
def test_a_character_that_the_prompt_begins(name: str, count: int, length: int) -> None:
    tokenizer = TOKENIZERS[name]
    spelled = ids_of(tokenizer, *(BYTES[byte] for byte in "🙂".encode())) if name == "llama2" else None
    character = spelled or list(tokenizer("🙂", add_special_tokens=False).input_ids)
    assert len(character) == 4
    prompt, new = [*(character * length), *character[:count]], [*character[count:], *character]
    assert pieces(tokenizer, prompt, new) == [*[""] * (3 - count), "🙂", "", "", "", "🙂"]
    unfinished = new[: 3 - count]
    made = "".join(pieces(tokenizer, prompt, unfinished))
    assert decoded(tokenizer, prompt) + made == decoded(tokenizer, [*prompt, *unfinished])


def test_a_replacement_character_in_the_prompt_is_not_said_again() -> None:
    tokenizer = TOKENIZERS["byte level"]
    prompt = tokenizer("broken \ufffd", add_special_tokens=False).input_ids
    assert pieces(tokenizer, prompt, tokenizer("a字", add_special_tokens=False).input_ids)[0] == "a"


def test_stop_strings_that_begin_with_a_space() -> None:
    prompt, new = ids_of(LLAMA, "<s>", "▁The", "▁answer", "▁is"), ids_of(LLAMA, "▁a", "▁true", "▁b")
    assert pieces(LLAMA, prompt, new) == [" a", " true", " b"]
    assert "".join(pieces(LLAMA, prompt, new, [" true"])) == " a"
    assert "".join(pieces(LLAMA, prompt, new[1:], [" true"])) == ""


def test_the_context_is_short_and_has_no_special_tokens() -> None:
    special = special_ids(LLAMA)
    assert prompt_end(LLAMA, ids_of(LLAMA, "<s>"), special) == ()
    letters = ids_of(LLAMA, *"abcdefghijklmnopqrstuvwxyz" * 4, "</s>")
    assert list(prompt_end(LLAMA, letters, special)) == letters[-17:-1]


# --- through the whole machine ----------------------------------------------------------------------------------------

METHODS = ("autoregressive", "speculative(gamma=4)", "sprinter(tau=0.5)")
WORDS = dict.fromkeys(ids_of(LLAMA, "▁answer", "▁is", "▁true", "▁a", "▁b"), 100.0)


@pytest.fixture(scope="module")
def spaced() -> sprinter.Pair:
    """The built-in models with tokens as Llama 2 spells them."""
    pair = sprinter.load_pair()
    return sprinter.Pair(dataclasses.replace(pair.models, tokenizer=llama2()), pair.gate)


def ways(pair: sprinter.Pair, prompt: Any, **options: Any) -> list[tuple[str, sprinter.Generation]]:
    """The tokens' texts, joined, and the result: of generate, stream, a batch and an engine."""
    whole, stream = pair.generate(prompt, **options), pair.stream(prompt, **options)
    streamed = "".join(token.text for token in stream)
    (batch,) = pair.generate_batch([prompt], **options)
    with sprinter.Engine(pair, rows=2, max_len=96) as engine:
        engine.add(prompt, **options)
        events = [event for _ in iter(lambda: engine.unfinished, 0) for event in engine.step()]
    served = "".join(token.text for event in events for token in event.tokens)
    joined = ["".join(token.text for token in out.tokens) for out in (whole, batch)]
    results = [whole, stream.generation, batch, events[-1].generation]
    return list(zip([joined[0], streamed, joined[1], served], results, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_every_way_to_a_text_has_the_space(spaced: sprinter.Pair, method: str) -> None:
    options: dict[str, Any] = {"method": method, "max_new_tokens": 12, "seed": 3, "logit_bias": WORDS}
    prompt = spaced.tokenizer("The answer is", add_special_tokens=True).input_ids
    for joined, out in ways(spaced, prompt, **options):
        ids = [token.id for token in out.tokens]
        assert joined == out.text
        assert decoded(spaced.tokenizer, prompt) + out.text == decoded(spaced.tokenizer, [*prompt, *ids])
        assert out.text.startswith(" ")
    stop = out.text[: out.text.index(" ", 1)]
    for joined, cut in ways(spaced, prompt, stop=[stop], **options):
        assert (joined, cut.text, cut.finish_reason) == ("", "", "stop")


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)


def test_an_answer_is_a_text_by_itself_and_a_continued_one_is_not(spaced: sprinter.Pair) -> None:
    """After the assistant's header nobody expects the space that begins every SentencePiece text."""
    tokenizer = llama2()
    tokenizer.chat_template = TEMPLATE
    pair = sprinter.Pair(dataclasses.replace(spaced.models, tokenizer=tokenizer), spaced.gate)
    asked = [{"role": "user", "content": "a b"}]
    said = [*asked, {"role": "assistant", "content": "The answer is"}]
    for messages, begins in ((asked, ""), (said, " ")):
        for joined, out in ways(pair, messages, max_new_tokens=12, seed=3, logit_bias=WORDS):
            ids = [token.id for token in out.tokens]
            before = decoded(tokenizer, out.prompt_ids) if begins else ""
            assert joined == out.text
            assert before + out.text == decoded(tokenizer, [*(out.prompt_ids if begins else []), *ids])
            assert out.text.startswith(" ") == bool(begins)
