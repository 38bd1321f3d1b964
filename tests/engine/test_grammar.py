"""Structured output in the public calls: texts follow it, alone and in batches, by every kind of method."""

from __future__ import annotations

import ipaddress
import json
import re
import time
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

import sprinter
from sprinter.engine import grammar_text
from sprinter.engine.grammar import Grammars
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"kind": {"enum": ["river", "mountain"]}, "high": {"type": "boolean"}},
    "required": ["kind", "high"], "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
METHODS = (
    "autoregressive", "speculative(gamma=3)", "svip(h=0.4)", "lookup(n=2)", "tree(expand=2, depth=2, nodes=3)",
    "specinfer(drafts=2, gamma=2)", "sprinter(tau=0.5)", "draft-only",
)  # fmt: skip


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        found = {"type": "array", "items": found}
    return found


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair(compile=False)


@pytest.mark.parametrize("method", METHODS)
def test_json_follows_its_schema(pair: sprinter.Pair, method: str) -> None:
    out = pair.generate("The river", method=method, response_format=FORMAT, max_new_tokens=48, seed=1)
    jsonschema.validate(json.loads(out.text), SCHEMA)
    assert out.finish_reason == "eos"
    if method != "draft-only":
        assert out.stats.worst_drift == 0.0 or not out.stats.lossless


def test_greedy_texts_are_plain_decodings(pair: sprinter.Pair) -> None:
    options: dict[str, Any] = {"response_format": FORMAT, "temperature": 0.0, "max_new_tokens": 48}
    plain = pair.generate("The river", method="autoregressive", **options)
    for method in METHODS[1:6]:
        out = pair.generate("The river", method=method, **options)
        assert [token.id for token in out.tokens] == [token.id for token in plain.tokens]
    assert out.stats.target_calls < plain.stats.target_calls


def test_rows_of_a_batch_have_their_own_grammars(pair: sprinter.Pair) -> None:
    base = GenerationOptions(method="speculative(gamma=3)", max_new_tokens=32)
    each = [
        base.replace(regex="[0-9]{3}-[a-f]{2}"), base, base.replace(choices=["yes", "no"]),
        base.replace(grammar='start: "a" "b"+ "c"', max_new_tokens=8), base.replace(response_format=FORMAT),
    ]  # fmt: skip
    outs = pair.generate(["The river"] * len(each), each)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", outs[0].text)
    assert outs[2].text in ("yes", "no")
    assert re.fullmatch("ab*c?", outs[3].text)
    jsonschema.validate(json.loads(outs[4].text), SCHEMA)
    for out, own in zip(outs, each, strict=True):
        assert out.text == pair.generate("The river", own).text
    assert outs[1].text == pair.generate("The river", base.replace(response_format={"type": "text"})).text


def test_a_model_of_pydantic_is_its_schema(pair: sprinter.Pair) -> None:
    class Place(BaseModel):
        high: bool

    out = pair.generate("The river", response_format=Place, max_new_tokens=32)
    assert Place.model_validate_json(out.text).high in (True, False)
    assert out.request is not None
    assert pair.generate(out.prompt_ids, out.request).text == out.text
    assert GenerationOptions(**out.request.to_dict()).response_format == out.request.response_format


def test_formats_that_json_schema_does_not_define_are_notes(pair: sprinter.Pair) -> None:
    """As validators have it. Those that it defines are followed, or refused."""

    def form(**more: Any) -> dict[str, Any]:
        parts = {
            "at": {"type": "string", "maxLength": 15, **more},
            "format": {"enum": ["path"]},
            "same": {"const": {"format": "path"}},
        }
        schema = {"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False}
        return {"type": "json_schema", "json_schema": {"schema": schema}}

    out = pair.generate("The river", response_format=form(format="path"), max_new_tokens=200, seed=1)
    assert out.text == pair.generate("The river", response_format=form(), max_new_tokens=200, seed=1).text
    assert json.loads(out.text)["same"] == {"format": "path"}
    ip = pair.generate("The river", response_format=form(format="ipv4"), max_new_tokens=200, seed=1)
    assert ipaddress.IPv4Address(json.loads(ip.text)["at"])
    with pytest.raises(UserError, match="response_format cannot be followed: Unknown format: iri"):
        pair.generate("The river", response_format=form(format="iri"))


def test_an_end_is_written_where_the_grammar_may_end(pair: sprinter.Pair) -> None:
    """Not before: whatever the bias; and where nothing else is left, whatever ``min_new_tokens`` says."""
    (eos,) = pair.models.target.eos_ids
    out = pair.generate(
        "The river", regex="ab{4,6}", logit_bias={eos: 100.0}, max_new_tokens=20, min_new_tokens=12
    )
    assert (out.text, out.finish_reason) == ("abbbbbb", "eos")
    assert pair.generate("The river", regex="ab{4,6}", logit_bias={eos: 100.0}).text == "abbbb"


def test_unconstrained_requests_ask_no_grammar(pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grammars, "_compile", lambda *_: pytest.fail("compiled"))
    assert pair.generate("The river", max_new_tokens=4).tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a", "choices": ["b"]}, "both say what the text must be"),
        ({"regex": "(a"}, "regex cannot be followed"),
        ({"grammar": "start: missing"}, "grammar cannot be followed"),
        ({"response_format": {"type": "xml"}}, "give 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "names no schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "none"}}}},
            "response_format cannot be followed",
        ),
        ({"response_format": "json"}, "is not a format"),
        ({"response_format": {"type": "json_schema", "json_schema": deep(5000)}}, "is not a format"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "regex cannot be followed"),
        ({"choices": ["a" * (1 << 20)]}, "give a smaller one"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    pair: sprinter.Pair, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        pair.generate("The river", **options)


def test_a_pair_without_tokenizer_or_eos_is_refused(tiny_pair: sprinter.Pair) -> None:
    with pytest.raises(UserError, match="needs an EOS token"):
        tiny_pair.generate([1, 2], regex="a")
    with pytest.raises(UserError, match="needs a tokenizer"):
        tiny_pair.generate([1, 2], regex="a", stop_token_ids=[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
            "allows no text",
        ),
        ({"grammar": "start: start"}, "allows no text"),
    ],
    ids=["$ref", "rule"],
)
def test_a_grammar_of_no_text_is_refused_before_any_model_runs(
    pair: sprinter.Pair, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        pair.stream("The river", **options)


def test_a_grammar_that_cannot_be_followed_ends_its_own_text_alone(pair: sprinter.Pair) -> None:
    """The mask fails inside a pass that rows share."""
    options: dict[str, Any] = {"method": "autoregressive", "max_new_tokens": 40, "seed": 1}
    with sprinter.Engine(pair, rows=2, max_len=64) as engine:
        good = engine.add("The river", **options)
        bad = engine.add("The", **{**options, "regex": r"(\p{L}{1,500}\p{N}?){100}"})
        with pytest.raises(sprinter.BatchError, match="give a simpler one") as caught:
            engine.finish()
    assert caught.value.errors.keys() == {bad}
    assert caught.value.done[good].text == pair.generate("The river", **options).text


@pytest.mark.parametrize(
    "grammar",
    ['start: "' + "ab " * 20_000 + '" start', 'start: ("x" | "y") more\nmore: "' + "ab" * 9000 + '" more'],
)
def test_what_must_follow_without_end_costs_little(pair: sprinter.Pair, grammar: str) -> None:
    """llguidance alone would spell gigabytes before it answers."""
    began = time.process_time()
    out = pair.generate("The river", grammar=grammar, max_new_tokens=24, method="speculative(gamma=3)")
    assert time.process_time() - began < 10
    assert re.fullmatch("(ab ?)+a?|[xy](ab)+a?", out.text) and out.finish_reason == "length"


def test_short_strings_that_must_follow_have_their_usual_spelling(pair: sprinter.Pair) -> None:
    """And none is lost where a long one comes before: the text is whole."""
    text = "the river " * 20 + "rises"
    out = pair.generate("The river", choices=[text], max_new_tokens=400, method="speculative(gamma=3)")
    assert out.text == text and out.finish_reason == "eos"
    short = pair.generate("The river", choices=["the river rises"], method="speculative(gamma=3)", seed=3)
    assert short.stats.draft_steps == 0 and short.text == "the river rises"
    assert short.stats.target_calls == 1


def test_a_schema_of_many_alternatives_is_followed_to_the_end(pair: sprinter.Pair) -> None:
    """Each of them is an item of the parser's row."""
    fields = {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,9}$"} for i in range(1200)}
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    out = pair.generate("The river", response_format=form, max_new_tokens=60, seed=2)
    assert re.match(r'\{(\}|"p[0-9]{0,4})', out.text)
    if out.finish_reason == "eos":
        jsonschema.validate(json.loads(out.text), schema)


def _chain(count: int) -> dict[str, Any]:
    """Objects each of which has the next one."""
    parts: dict[str, Any] = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["x"]}
        for i in range(count)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{count}": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [{"type": "integer", "multipleOf": 123456789}, _chain(8000)],
    ids=["takes hours to compile", "overflows the stack"],
)
def test_a_grammar_that_would_end_the_process_is_refused(pair: sprinter.Pair, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    with pytest.raises(UserError, match="takes too long, too much memory, or nests too deeply"):
        pair.generate("The river", response_format=form, max_new_tokens=2)


def test_a_schema_may_nest_as_deeply_as_any_that_is_meant(pair: sprinter.Pair) -> None:
    """A thread's usual stack would overflow."""
    form = {"type": "json_schema", "json_schema": {"schema": _chain(1000)}}
    assert pair.generate("The river", response_format=form, max_new_tokens=3).text.startswith('{"x')


def test_a_grammar_that_takes_long_over_a_token_is_refused(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_text, "_SLOWEST_S", 1e-9)
    with pytest.raises(UserError, match="too slow"):
        pair.generate("The river", choices=["abc", "abd"], max_new_tokens=4)
