"""The state of a chat: answers, options, turns, the context. No terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.cli.chats import TEMPLATE, chat_pair, new_chat, nothing
from tests.cli.tiny import Places

from sprinter import load_pair
from sprinter.decode.draft import Token
from sprinter.engine.pair import Pair
from sprinter.engine.stream import Stream
from sprinter.errors import SprinterError, UserError


@pytest.fixture(scope="module")
def pair(places: Places) -> Pair:
    return chat_pair(places)


def test_an_answer_follows_from_all_messages_before_it(pair: Pair) -> None:
    chat, shown = new_chat(pair, "Be brief"), list[Token]()
    first = chat.ask("One", shown.append)
    second = chat.ask("Two", shown.append)
    assert "".join(token.text for token in shown) == first.text + second.text != ""
    assert second.prompt == f"[system]Be brief\n[user]One\n[assistant]{first.text}\n[user]Two\n[assistant]"
    assert chat.to_dict()["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": second.text},
    ]
    assert pair.generate(chat.to_dict()["messages"][:-1], chat.options).text == second.text
    meter = chat.turns[1].meter
    assert meter.startswith("8 tokens, ") and "lossless" in meter
    assert f"prompt {second.prompt_tokens} tokens (0 reused), prefill " in meter
    assert chat.turns[1].facts["stats"]["target_calls"] == second.stats.target_calls


def test_a_long_conversation_reuses_what_was_read(pair: Pair) -> None:
    chat = new_chat(pair)
    chat.ask("A long message. " * 20, nothing)
    out = chat.ask("And then?", nothing)
    assert 0 < out.stats.cached_tokens < out.prompt_tokens
    assert f"({out.stats.cached_tokens} reused)" in chat.turns[1].meter
    pair.clear_prefix_cache()
    assert pair.generate(chat.to_dict()["messages"][:-1], chat.options).text == out.text


def test_ctrl_c_keeps_the_text_so_far(pair: Pair) -> None:
    chat, shown = new_chat(pair, max_new_tokens=200), list[Token]()

    def show(token: Token) -> None:
        shown.append(token)
        if len(shown) == 3:
            raise KeyboardInterrupt

    out = chat.ask("Hello", show)
    assert out.finish_reason == "cancelled" and 3 <= len(out.tokens) < 200
    assert chat.turns[0].answer == out.text
    again = chat.ask("And then?", nothing)
    assert again.prompt is not None and f"[assistant]{out.text}\n[user]And then?" in again.prompt


def test_ctrl_c_before_the_first_token_drops_the_message(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(stream: Stream) -> Token:
        raise KeyboardInterrupt

    chat = new_chat(pair)
    monkeypatch.setattr(Stream, "__next__", interrupted)
    out = chat.ask("Hello", nothing)
    assert (out.finish_reason, out.tokens, chat.turns) == ("cancelled", [], ())


def test_retry_takes_the_next_seed_unless_other_options_changed(pair: Pair) -> None:
    chat = new_chat(pair, seed=4)
    with pytest.raises(UserError, match="no turns yet: write a message first"):
        chat.retry(nothing)
    chat.ask("One", nothing)
    first = chat.ask("Two", nothing)
    seeds, texts = [], {first.text}
    for _ in range(2):
        out = chat.retry(nothing)
        assert out.request is not None and out.prompt == first.prompt
        seeds.append(out.request.seed)
        texts.add(out.text)
    assert seeds == [5, 6] and len(texts) == 3 and len(chat.turns) == 2 and chat.options.seed == 4
    chat.change(method="speculative(gamma=2)")
    out = chat.retry(nothing)
    assert out.request is not None and out.request.seed == 4 and out.method.startswith("speculative(gamma=2")
    chat.change(temperature=0)
    chat.retry(nothing)
    before = chat.turns
    with pytest.raises(UserError, match="temperature 0 gives the same answer again: /set temperature"):
        chat.retry(nothing)
    assert chat.turns is before


def test_turns_are_removed_from_either_end(pair: Pair) -> None:
    chat = new_chat(pair, "Be brief")
    for text in "abcd":
        chat.ask(text, nothing)
    chat.drop(1, newest=True)
    chat.drop(2)
    assert [turn.user for turn in chat.turns] == ["c"]
    for count, said in ((2, "cannot drop 2 turns: the conversation has 1"), (0, "cannot drop 0 turns")):
        with pytest.raises(UserError, match=said):
            chat.drop(count)
    chat.turns = ()
    assert chat.turns == () and chat.system == "Be brief"
    with pytest.raises(UserError, match="no turns yet"):
        chat.drop(1, newest=True)


@pytest.mark.parametrize(("options", "said"), [
    ({"method": "sprinter"}, "needs a gate"),
    ({"method": "sprintr"}, "did you mean 'sprinter'"),
    ({"temperature": -1}, "0 is greedy"),
    ({"stop_token_ids": [10**6]}, "out of range"),
    ({"tempo": 1}, "unknown option 'tempo'"),
    ({"chat_template_kwargs": {"nonsense": 1}}, "does not read"),
])  # fmt: skip
def test_options_that_the_pair_cannot_run_change_nothing(
    places: Places, options: dict[str, object], said: str
) -> None:
    chat = new_chat(chat_pair(places, gate=False), method="svip")
    before = chat.options
    with pytest.raises(UserError, match=said):
        chat.change(**options)
    assert chat.options is before and chat.method.name.startswith("svip")


def test_a_system_prompt_that_the_template_refuses_changes_nothing(pair: Pair) -> None:
    chat = new_chat(pair, "Be brief")
    with pytest.raises(UserError, match="this is forbidden"):
        chat.restore("forbidden", (), chat.options)
    assert chat.system == "Be brief"
    chat.restore(None, (), chat.options)
    assert chat.to_dict()["messages"] == []
    with pytest.raises(UserError, match="this is forbidden"):
        new_chat(pair, "forbidden")


def test_a_full_context_offers_ways_out_that_work(places: Places) -> None:
    pair = chat_pair(places)
    small = replace(pair.models, target=replace(pair.models.target, context=150))
    chat = new_chat(Pair(small), max_new_tokens=20)
    for text in ("a" * 20, "b" * 20):
        chat.ask(text, nothing)
    before = chat.turns
    with pytest.raises(UserError) as caught:
        chat.ask("c" * 20, nothing)
    said = str(caught.value)
    assert "the conversation is full: " in said and "exceed the context of 150" in said
    assert "/drop 1 removes the oldest turn, /reset all turns" in said and said.endswith(
        "(the message was not sent)"
    )
    assert chat.turns is before and "\n" not in said
    chat.drop(1)
    assert chat.ask("c" * 20, nothing).finish_reason == "length"
    with pytest.raises(UserError, match="/drop 2 removes the 2 oldest turns, /reset all turns"):
        chat.ask("d" * 105, nothing)
    chat.turns = ()
    with pytest.raises(UserError, match=r"/set max_new_tokens (\d+) shortens") as caught:
        chat.ask("d" * 120, nothing)
    assert "/drop" not in str(caught.value)
    chat.change(max_new_tokens=int(str(caught.value).split("/set max_new_tokens ")[1].split()[0]))
    assert chat.ask("d" * 120, nothing).tokens
    with pytest.raises(UserError, match="shorten the message"):
        chat.ask("e" * 200, nothing)


def test_an_answer_that_fails_leaves_the_conversation(places: Places) -> None:
    pair = load_pair(places.root / "nan")
    assert pair.tokenizer is not None
    pair.tokenizer.chat_template = TEMPLATE
    chat = new_chat(pair)
    with pytest.raises(SprinterError, match="logits are NaN"):
        chat.ask("Hello", nothing)
    assert chat.turns == ()


def test_what_cannot_be_a_chat_is_one_line(places: Places, pair: Pair) -> None:
    with pytest.raises(UserError, match="has no chat template: give --template FILE"):
        new_chat(load_pair(places.target))
    with pytest.raises(UserError, match="a message is not valid UTF-8"):
        new_chat(pair).ask("\udc80", nothing)
