"""What a prompt and a notebook show of results and pairs."""

from __future__ import annotations

import re
from html import unescape

import pytest

import sprinter
from sprinter.decode.draft import Origin, Token


def test_what_is_shown_at_a_prompt_is_a_line(builtin_pair: sprinter.Pair) -> None:
    stream = builtin_pair.stream("A small town in", method="sprinter", max_new_tokens=48)
    shown = {repr(stream): "0 tokens, unfinished"}
    out = stream.finish()
    shown |= {
        repr(stream): "48 tokens, length",
        repr(out): "Generation(' ",
        repr(out.stats): "48 tokens, ",
        repr(builtin_pair): f"draft='{sprinter.builtin_paths()['draft']}', heads=gate",
        repr(builtin_pair.models): "context=1024",
        repr(sprinter.Pair(builtin_pair.models)): "heads=None, float32 on ",
    }
    with sprinter.Engine(builtin_pair, rows=2, max_len=64) as engine:
        engine.add("A", max_new_tokens=None)
        shown[repr(engine)] = "Engine(2 rows of 64 tokens, 1 requests unfinished)"
    for line, part in shown.items():
        assert part in line
        assert len(line) < 600 and "\n" not in line


def test_a_notebook_shows_tokens_by_origin(builtin_pair: sprinter.Pair) -> None:
    out = builtin_pair.generate("One <b>", method="sprinter(tau=0.4)", max_new_tokens=40, seed=2)
    page = out._repr_html_()
    body = page[page.index("<pre") : page.index("</pre>")]
    spans = re.findall(r'title="([^"]*)">([^<]*)</span>', body)
    assert "".join(unescape(text) for _, text in spans) == out.text
    said = [title.split(", ")[1].split()[0] for title, _ in spans]
    assert said == [token.origin.value for token in out.tokens if token.text]
    assert len(set(said)) > 1
    assert "<i>One &lt;b&gt;</i>" in body
    for fact in (out.stats.summary, f"{out.stats.target_calls} target calls", "trusted (unchecked)"):
        assert fact in unescape(page)


def test_what_a_model_writes_is_no_markup(tiny_pair: sprinter.Pair) -> None:
    out = tiny_pair.generate([1, 2], max_new_tokens=3)
    assert re.findall(r">(\d+) <", out._repr_html_()) == [str(token.id) for token in out.tokens]
    out.tokens[:] = [Token(1, Origin.TARGET, 1, None, "</pre><script>'\"&")]
    assert "<script" not in out._repr_html_() and "&lt;/pre&gt;&lt;script&gt;" in out._repr_html_()


@pytest.mark.parametrize("method", ["autoregressive", "draft-only"])
def test_a_result_without_drift_or_tokens_is_shown_too(tiny_pair: sprinter.Pair, method: str) -> None:
    stream = tiny_pair.stream([1, 2], method=method, max_new_tokens=3)
    assert "0 tokens" in stream.generation._repr_html_()
    assert method in stream.finish()._repr_html_()
