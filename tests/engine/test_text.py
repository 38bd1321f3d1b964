"""The text of a generation: what the tokens' texts join to, where stop strings end it, and what a token costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import sprinter
from sprinter.engine.stream import Detokenizer, Ending, Spelling, TextWriter, cut_at_stop, special_ids
from sprinter.errors import UserError

PROMPT = "The first king of"
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "seed": 5, "temperature": 0.7, "never_slower": False}
METHODS = ("autoregressive", "speculative(gamma=4)", "sprinter(tau=0.5)")

# --- a byte-level tokenizer with a few longer tokens, tokens within characters and special tokens ---------------------

SPECIAL = ("<|im_end|>", "<|x|>")
LONGER = ("ab", "abc", " the", "stop", "é", "字b")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [level.pre_tokenize_str(word)[0][0] for word in LONGER]
    words.append(level.pre_tokenize_str("s漢")[0][0][:-1])  # ends inside a character
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = level, decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZER = byte_tokenizer()
SILENT = special_ids(TOKENIZER)
IDS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=60)


def bytes_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def pieces(ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], TextWriter]:
    writer = TextWriter(Spelling(TOKENIZER, SILENT, tuple(stop)))
    return [writer.push(id) for id in ids], writer


@given(IDS)
def test_pieces_join_to_what_the_tokenizer_makes_of_all_tokens(ids: list[int]) -> None:
    """Any tokens: broken characters, characters over several tokens, special tokens inside of them."""
    given_out, writer = pieces(ids)
    assert "".join(given_out) + writer.finish() == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.lists(st.sampled_from(["字", "é", "🙂", "a", *SPECIAL]), max_size=30))
def test_whole_characters_are_never_shown_broken(parts: list[str]) -> None:
    given_out, writer = pieces([id for part in parts for id in bytes_of(part)])
    assert not any("\ufffd" in piece for piece in given_out)
    assert writer.finish() == ""


LETTERS = st.sampled_from(["a", "b", "c", "ab", "字", "é", " the", "stop", *SPECIAL])


@given(
    st.lists(LETTERS, max_size=25),
    st.lists(st.lists(LETTERS, min_size=1, max_size=3).map("".join), max_size=3),
)
def test_text_is_cut_before_the_first_stop_string_and_no_piece_shows_it(
    parts: list[str], stop: list[str]
) -> None:
    """Against the plain way: after each token search the whole text, with and without special tokens."""
    ids = [id for part in parts for id in bytes_of(part)]
    expected, ended = "".join(part for part in parts if part not in SPECIAL), None
    for count in range(1, len(ids) + 1):
        shown = TOKENIZER.decode(ids[:count], skip_special_tokens=True)
        full = TOKENIZER.decode(ids[:count])
        cuts = [shown.find(word) for word in stop if word in shown]
        for word in stop:
            if word in full:
                before = full[: full.find(word)]
                for special in SPECIAL:
                    before = before.replace(special, "")
                cuts.append(len(before))
        if cuts:
            expected, ended = shown[: min(cuts)], count
            break
    ending = Ending(0, Spelling(TOKENIZER, SILENT, tuple(stop)))
    reasons = [ending(ids[:count]) for count in range(1, (ended or len(ids)) + 1)]
    assert reasons == [None] * (len(reasons) - bool(ended)) + ["stop"] * bool(ended)
    given_out, writer = pieces(ids[:ended], stop)
    so_far = ""
    for piece in given_out:
        so_far += piece
        assert expected.startswith(so_far)
    assert so_far + writer.finish() == expected
    assert writer.found == (ended is not None)


@pytest.mark.parametrize("stop", [(), ("ab",), ("abc", "b"), ("aab", "x")])
def test_no_piece_shows_a_stop_string(stop: tuple[str, ...]) -> None:
    text = "aaxaabcabcb"
    text = text[
        : next((end for end in range(len(text)) if any(word in text[:end] for word in stop)), len(text))
    ]
    whole, shown = cut_at_stop(text, stop), ""
    given_out, writer = pieces(TOKENIZER.convert_tokens_to_ids(list(text)), stop)
    for piece in given_out:
        shown += piece
        assert whole.startswith(shown)
    assert shown + writer.finish() == whole


def test_characters_of_single_byte_tokens_join_too() -> None:
    """As sentencepiece spells rare characters: bytes in a row are text only if all of them together are."""
    text = "é字🙂字" * 6 + " a字"
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"▁a": 256, "<unk>": 257}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = [*text[:-3].encode(), 256, *text[-1].encode()]
    detokenizer = Detokenizer(tokenizer)
    given_out = [detokenizer.push(id) for id in ids]
    assert not any("\ufffd" in piece for piece in given_out)
    assert "".join(given_out) + detokenizer.flush() == text == tokenizer.decode(ids)


@given(IDS, st.lists(st.integers(0, 5), max_size=30), st.text("ab字s", min_size=1, max_size=3))
def test_an_ending_does_not_mind_what_was_given_up(ids: list[int], back: list[int], word: str) -> None:
    """Drafts that are refused, at any depth: the reason is that of the text alone."""
    spelling = Spelling(TOKENIZER, SILENT, (word,))
    ending, text, left = Ending(0, spelling), [], list(back)
    for id in ids:
        text.append(id)
        fresh = Ending(0, spelling)
        assert ending(text) == fresh(text)
        if left:
            del text[max(1, len(text) - left.pop()) :]


@pytest.mark.parametrize(
    "name", ["special tokens", "broken characters", "letters", "begins of a stop string"]
)
def test_a_token_costs_the_same_wherever_it_stands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ids = {
        "special tokens": [*bytes_of("s"), *[min(SILENT)] * 500],
        "broken characters": [TOKENIZER.convert_tokens_to_ids("Ã")] * 500,
        "letters": bytes_of("x") * 500,
        "begins of a stop string": bytes_of("st") * 250,
    }[name]
    read: list[int] = []
    decode = TOKENIZER.decode
    monkeypatch.setattr(
        TOKENIZER, "decode", lambda ids, **options: (read.append(len(ids)), decode(ids, **options))[1]
    )
    ending = Ending(0, Spelling(TOKENIZER, SILENT, ("stop", SPECIAL[0] + "s")))
    text: list[int] = []
    for id in ids:
        text.append(id)
        read.clear()
        assert ending(text) is None
        assert sum(read) <= 64
    assert max(len(writer._kept) + len(writer._full) for writer in ending._writers) <= 32


def test_an_unfinished_character_before_a_stop_string_stays() -> None:
    broken = bytes_of("字")[:2]
    given_out, writer = pieces([*bytes_of("a"), *broken, min(SILENT)], [SPECIAL[0]])
    assert "".join(given_out) + writer.finish() == "a\ufffd"


def test_a_detokenizer_knows_the_special_tokens_by_itself() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(id) for id in (*bytes_of("a"), *SILENT, *bytes_of("b"))] == ["a", "", "", "b"]


# --- through the whole machine ----------------------------------------------------------------------------------------


def with_special(pair: sprinter.Pair, *ids: int) -> sprinter.Pair:
    """The pair, but with some of its tokens flagged as special."""
    tokenizer = sprinter.load_pair().tokenizer
    assert tokenizer is not None
    tokens = [
        AddedToken(token, special=True, normalized=False) for token in tokenizer.convert_ids_to_tokens(ids)
    ]
    tokenizer.add_tokens(tokens, special_tokens=True)
    assert {*ids} <= special_ids(tokenizer)
    return sprinter.Pair(dataclasses.replace(pair.models, tokenizer=tokenizer), pair.gate)


def with_eos(pair: sprinter.Pair, *ids: int) -> sprinter.Pair:
    target = dataclasses.replace(pair.models.target, eos_ids=ids)
    return sprinter.Pair(dataclasses.replace(pair.models, target=target), pair.gate)


def texts_of(pair: sprinter.Pair, **options: Any) -> list[tuple[str, sprinter.Generation]]:
    """The tokens' texts, joined, and the result: of generate, stream, a batch and the engine."""
    whole = pair.generate(PROMPT, **options)
    stream = pair.stream(PROMPT, **options)
    streamed = "".join(token.text for token in stream)
    (batch,) = pair.generate_batch([PROMPT], **options)
    with sprinter.Engine(pair, rows=2, max_len=96) as engine:
        engine.add(PROMPT, **options)
        events = [event for _ in iter(lambda: engine.unfinished, 0) for event in engine.step()]
    served = "".join(token.text for event in events for token in event.tokens)
    results = [whole, stream.generation, batch, events[-1].generation]
    shown = ["".join(token.text for token in out.tokens) for out in (whole, batch)]
    return list(zip([shown[0], streamed, shown[1], served], results, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_pieces_join_to_the_text_before_a_stop_string(builtin_pair: sprinter.Pair, method: str) -> None:
    text = builtin_pair.generate(PROMPT, method=method, **OPTIONS).text
    for stop in (text[9:14], text[11:30], text[20:26] + "#", text[-1] + "#"):
        for joined, out in texts_of(builtin_pair, method=method, stop=[stop], **OPTIONS):
            assert joined == out.text == text.split(stop)[0]
            assert out.finish_reason == ("stop" if stop in text else "length")


@pytest.mark.parametrize("method", METHODS)
def test_a_special_token_is_a_stop_string(builtin_pair: sprinter.Pair, method: str) -> None:
    plain = builtin_pair.generate(PROMPT, method=method, **OPTIONS)
    ids = [token.id for token in plain.tokens]
    end = next(i for i in range(6, len(ids)) if ids[i] not in ids[:i])
    pair = with_special(builtin_pair, ids[end])
    word = pair.tokenizer.decode([ids[end]])
    assert word and word not in pair.tokenizer.decode(ids[:end])
    for joined, out in texts_of(pair, method=method, stop=[word], **OPTIONS):
        assert out.finish_reason == "stop"
        assert [token.id for token in out.tokens] == ids[: end + 1]
        assert joined == out.text == pair.tokenizer.decode(ids[:end])


def test_a_stop_string_is_spread_over_skipped_tokens(builtin_pair: sprinter.Pair) -> None:
    ids = [token.id for token in builtin_pair.generate(PROMPT, **OPTIONS).tokens]
    words = [builtin_pair.tokenizer.decode(own).strip() for own in ids]
    place = next(i for i in range(4, 30) if words[i] not in PROMPT and ids.count(ids[i]) == 1)
    pair = with_special(builtin_pair, ids[place])
    before, after = pair.tokenizer.decode(ids[:place]), pair.tokenizer.decode(ids[place + 1 :])
    stop = before[-2:] + after[:2]
    assert stop not in before + after[:1]
    for joined, out in texts_of(pair, stop=[stop], **OPTIONS):
        assert (joined, out.text, out.finish_reason) == (before[:-2], before[:-2], "stop")


@pytest.mark.parametrize("method", METHODS)
def test_eos_is_no_part_of_the_text_even_if_it_is_not_flagged(
    builtin_pair: sprinter.Pair, method: str
) -> None:
    ids = [token.id for token in builtin_pair.generate(PROMPT, method=method, **OPTIONS).tokens]
    end = next(i for i in range(6, len(ids)) if ids[i] not in ids[:i])
    for joined, out in texts_of(with_eos(builtin_pair, 0, ids[end]), method=method, **OPTIONS):
        assert out.finish_reason == "eos"
        assert [token.id for token in out.tokens] == ids[: end + 1]
        assert joined == out.text == builtin_pair.tokenizer.decode(ids[:end])


@pytest.mark.parametrize("method", METHODS)
def test_stop_tokens_end_a_text_and_are_no_part_of_it(builtin_pair: sprinter.Pair, method: str) -> None:
    ids = [token.id for token in builtin_pair.generate(PROMPT, method=method, **OPTIONS).tokens]
    end = next(i for i in range(6, len(ids)) if ids[i] not in ids[:i])
    for stops in ([ids[end]], (1, ids[end]), ids[end]):
        out = builtin_pair.generate(PROMPT, method=method, stop_token_ids=stops, **OPTIONS)
        assert (out.finish_reason, len(out.tokens)) == ("stop", end + 1)
    for joined, out in texts_of(builtin_pair, method=method, stop_token_ids=[ids[end]], **OPTIONS):
        assert out.finish_reason == "stop"
        assert joined == out.text == builtin_pair.tokenizer.decode(ids[:end])


def test_stop_tokens_need_no_tokenizer_and_one_list_a_prompt_will_do(tiny_pair: sprinter.Pair) -> None:
    prompt = [3, 7, 1, 12, 5]
    options: dict[str, Any] = {"method": "speculative", "max_new_tokens": 20}
    ids = [token.id for token in tiny_pair.generate(prompt, **options).tokens]
    outs = tiny_pair.generate_batch([prompt] * 3, stop_token_ids=[[ids[4]], [], [ids[9], ids[11]]], **options)
    ends = [ids.index(ids[4]) + 1, 20, min(ids.index(ids[9]), ids.index(ids[11])) + 1]
    assert [len(out.tokens) for out in outs] == ends


@pytest.mark.parametrize(
    ("stops", "message"),
    [([24], "stop token id 24"), ([-1], "stop_token_ids=-1 is out of range"), (["a"], "stop_token_ids")],
)
def test_bad_stop_tokens(tiny_pair: sprinter.Pair, stops: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_pair.generate([1, 2], stop_token_ids=stops)
