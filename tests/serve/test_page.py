"""The page at /: its files, what it is told of the pair, and the page itself in Chromium where there is one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serve.server import TEMPLATE, Running, scope_of, serving

import sprinter
from sprinter.serve.guard import RequestGuard
from sprinter.serve.page import page_files, page_methods, without_json, without_tools
from sprinter.serve.service import Service
from sprinter.serve.settings import ServeSettings

METHODS = '.side[data-side="0"] option'  # there once the page knows the pair
TOOLS = TEMPLATE + "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{# 'tool' tool_calls #}"
STATIC = Path(sprinter.__file__).parent / "serve" / "static"


def test_the_files_of_the_page(server: Running) -> None:
    with server.http() as client:
        index = client.get("/")
        assert index.status_code == 200 and index.headers["content-type"] == "text/html; charset=utf-8"
        kinds = {".html": "html", ".css": "css", ".js": "javascript"}
        for file in STATIC.iterdir():
            found = client.get(f"/static/{file.name}")
            assert (found.status_code, found.content) == (200, file.read_bytes())
            assert found.headers["content-type"] == f"text/{kinds[file.suffix]}; charset=utf-8"
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert found.headers["x-content-type-options"] == "nosniff"
        for name in ("../service.py", "../page.py", "..%2fpage.py", "%2e%2e/page.py", "nothing.js"):
            assert client.get(f"/static/{name}").status_code == 404


def test_the_page_loads_nothing_from_elsewhere() -> None:
    used = set()
    for name, file in page_files().items():
        text = bytes(file.body).decode()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert "innerHTML" not in re.sub(r"innerHTML =\s*\'<[^$`]*\';", "", text), (
            "only fixed markup is set as HTML"
        )
        used |= set(re.findall(r'(?:src|href|from)(?:=| )"(?:static/|\./)([\w.]+)"', text))
    assert used | {"index.html"} == page_files().keys() == {path.name for path in STATIC.iterdir()}


def test_files_of_any_name_stand_in_one_line(pair: sprinter.Pair) -> None:
    async def nothing(*_: Any) -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def main() -> None:
        guard = RequestGuard(nothing, Service(ServeSettings(port=0), lambda: pair))
        headers, paths = [(b"host", b"localhost")], ["/", "/health", *(f"/static/{n}" for n in range(20))]
        scopes = [{**scope_of(path), "method": "GET", "headers": headers} for path in paths]
        asked = [asyncio.create_task(guard(scope, nothing, nothing)) for scope in scopes]
        await asyncio.sleep(0)
        assert sorted(guard._lines) == ["a /", "a /health", "a /static/"]
        await asyncio.gather(*asked)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_what_the_page_knows_of_the_pair(server: Running) -> None:
    with server.http() as client:
        found = client.get("/page/pair").json()
    assert (found["model"], found["draft"], found["chat"]) == ("builtin", "draft", True)
    methods = {one["name"]: one for one in found["methods"]}
    assert methods["sprinter"]["spec"].startswith("sprinter(tau=0.") and not methods["sprinter"]["lossless"]
    assert methods["certain"]["spec"].startswith("certain(signal=entropy, threshold=0.3")
    assert "/" not in found["draft"]
    assert found["no_json"] is None and "does not read tools" in found["no_tools"]


def test_what_a_pair_lacks_is_said(
    pair: sprinter.Pair, template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert without_json(pair) is None
    template(TOOLS)
    assert without_tools(pair) is None
    template(TEMPLATE + "{{ tools }}")
    assert "how this model writes tool calls is not known" in str(without_tools(pair))
    template(None)
    assert "no chat template" in str(without_tools(pair))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "needs llguidance" in str(without_json(pair))


def test_the_page_of_another_name_of_the_model(pair: sprinter.Pair) -> None:
    with serving(pair, aliases=("other",)) as server, server.http() as client:
        assert client.get("/page/pair", params={"model": "other"}).json()["model"] == "other"
        assert client.get("/page/pair", params={"model": "third"}).status_code == 404


def test_methods_that_the_pair_cannot_run_are_not_offered(pair: sprinter.Pair) -> None:
    alone = sprinter.load_pair(sprinter.builtin_paths()["target"])
    names = {one["name"] for one in page_methods(alone)}
    assert {"autoregressive", "lookup"} <= names and not {"speculative", "sprinter", "certain"} & names
    lossless = page_methods(pair, lossless=True)
    assert all(one["lossless"] for one in lossless) and {"speculative", "svip"} <= {
        one["name"] for one in lossless
    }


# --- in a browser -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def page(chromium: Any, server: Running) -> Any:
    return opened(chromium, server)


def opened(chromium: Any, server: Running) -> Any:
    """The page, loaded; it fails on a script error and on a request to elsewhere."""
    # Playwright's own functions are evaluated, which the page's policy forbids.
    page = chromium.new_page(bypass_csp=True)
    page.on("pageerror", lambda error: pytest.fail(str(error)))
    page.on("request", lambda asked: asked.url.startswith(server.url) or pytest.fail(asked.url))
    page.goto(server.url)
    page.wait_for_selector(METHODS, state="attached")
    return page


def ask(page: Any, text: str, method: str, tokens: int, seed: int = 3) -> None:
    page.select_option('.side[data-side="0"] select', label=method)
    page.fill("#tokens", str(tokens))
    page.fill("#seed", str(seed))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def last(page: Any) -> Any:
    return page.locator("#turns > li").last


def test_an_answer_is_streamed_by_origin(page: Any, pair: sprinter.Pair) -> None:
    page.check('input[value="text"]')
    ask(page, "The history of", "sprinter", 24)
    page.wait_for_selector(".answer:not(.busy)")
    out = pair.generate("The history of", method="sprinter", max_new_tokens=24, seed=3)
    spans = last(page).locator(".text span")
    assert [spans.nth(i).get_attribute("class") for i in range(spans.count())] == [
        t.origin.value for t in out.tokens
    ]
    assert last(page).locator(".text").text_content() == out.text
    assert last(page).locator('[data-gauge="drift"]').text_content() == f"{out.stats.mean_drift:.3f}"
    page.focus("#turns > li:last-child .text")
    page.keyboard.press("ArrowRight")
    facts = last(page).locator(".facts").text_content()
    assert out.tokens[0].origin.value in facts and re.search(
        r"p 0\.\d+ · q (0\.\d+|–) · drift 0\.\d+( · gate 0\.\d+)?", facts
    )
    assert page.locator("#picture .point").count() == 2 and page.locator("#runs tbody tr").count() == 1


def test_two_methods_side_by_side_on_one_seed(page: Any, pair: sprinter.Pair) -> None:
    page.check("#compare")
    ask(page, "A king", "speculative (lossless)", 16)
    page.wait_for_selector("#turns > li:last-child .answer:not(.busy) >> nth=1")
    texts = [last(page).locator(".text").nth(i).text_content() for i in (0, 1)]
    assert texts == [
        pair.generate("A king", method=method, max_new_tokens=16, seed=3).text
        for method in ("speculative", "autoregressive")
    ]
    page.uncheck("#compare")


def test_a_dial_is_turned_while_it_writes(page: Any) -> None:
    ask(page, "Once", "sprinter", 200)
    page.wait_for_function("document.querySelectorAll('#turns > li:last-child .text span').length > 3")
    page.evaluate(
        "const dial = document.getElementById('dial-0-tau'); dial.value = 0.2; dial.dispatchEvent(new Event('input'))"
    )
    page.wait_for_selector("#turns > li:last-child .mark")
    assert "tau=0.2" in last(page).locator("h3").text_content()
    before = last(page).locator(".text span").count()
    page.wait_for_function(
        f"document.querySelectorAll('#turns > li:last-child .text span').length > {before}"
    )
    page.keyboard.press("Escape")
    page.wait_for_selector("#turns > li:last-child .answer[data-ended]")


def test_errors_are_shown_and_the_page_goes_on(page: Any) -> None:
    ask(page, "Once " * 5000, "sprinter", 4)
    page.wait_for_selector("#error:not([hidden])")
    assert "maximum context length" in page.inner_text("#error")
    ask(page, "Once", "sprinter", 4)
    page.wait_for_selector("#turns > li:last-child .answer:not(.busy)")
    assert page.is_hidden("#error") and last(page).locator(".text span").count() == 4


def test_a_chat_goes_on_after_an_answer(page: Any, server: Running) -> None:
    page.click("#clear")
    page.check('input[value="chat"]')
    for text in ("Hello", "And then"):
        ask(page, text, "speculative (lossless)", 6)
        page.wait_for_selector("#turns > li:last-child .answer[data-ended=stop]")
    assert page.locator("#turns > li").count() == 2


SCHEMA = '{"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"], \
"additionalProperties": false}'
WEATHER = '[{"name": "weather", "parameters": {"type": "object", "properties": {"days": {"enum": [2, 3]}}, \
"required": ["days"], "additionalProperties": false}}]'


def test_json_by_a_schema(page: Any) -> None:
    page.click("#clear")
    page.check('input[value="text"]')
    assert page.is_hidden("#schema") and page.is_hidden("#tools")
    page.select_option("#answer", "json_schema")
    for wrong, line in (
        ("", "Paste a JSON schema"),
        ("{type", "This is not JSON"),
        ("[]", "A schema is a JSON object"),
    ):
        page.fill("#schema", wrong)
        ask(page, "A river:", "speculative (lossless)", 40)
        assert line in page.inner_text("#error") and page.evaluate("document.activeElement.id") == "schema"
        assert page.locator("#turns > li").count() == 0
        assert page.get_attribute("#schema", "aria-invalid") == ("true" if wrong else "false")
        assert line in page.inner_text("#schema-note") or not wrong
    page.fill("#schema", SCHEMA)
    assert page.get_attribute("#schema", "aria-invalid") == "false" and not page.inner_text("#schema-note")
    for tokens, badge in ((40, "JSON"), (2, "JSON that is not whole")):
        ask(page, "A river:", "speculative (lossless)", tokens)
        page.wait_for_selector("#turns > li:last-child .answer[data-ended]")
        assert last(page).locator(".badge").all_inner_texts() == ["lossless", badge]
    assert json.loads(page.locator(".text").first.text_content()).keys() == {"deep"}
    page.select_option("#answer", "text")


def test_tools_are_called_and_get_their_results(chromium: Any, pair: sprinter.Pair, template: Any) -> None:
    template(TOOLS)
    with serving(pair, aliases=("other",)) as server:
        page = opened(chromium, server)
        sent: list[Any] = []
        page.on("request", lambda asked: asked.method == "POST" and sent.append(asked.post_data_json))
        page.wait_for_selector("#models-field:not([hidden])")
        page.select_option("#models", "other")
        page.wait_for_function("document.getElementById('model').textContent.startsWith('other')")
        page.fill("#tools", "[{}]")
        assert "Function 1 has no name" in page.inner_text("#tools-note")
        page.fill("#tools", WEATHER)
        assert page.inner_text("#tools-note") == "Functions: weather"
        page.select_option("#choice", "required")
        ask(page, "Will it rain?", "speculative (lossless)", 60)
        page.wait_for_selector(".results textarea")
        call = page.locator(".call")
        assert call.locator("h4").inner_text() == "weather" and json.loads(call.locator("pre").inner_text())[
            "days"
        ] in (2, 3)
        assert page.evaluate("document.activeElement.closest('form').className") == "results"
        page.select_option("#choice", "auto")
        page.keyboard.type("sunny")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("#turns > li:nth-child(2) .answer[data-ended=stop]")
        first, second = sent
        assert (first["model"], first["tool_choice"], second["tool_choice"]) == ("other", "required", "auto")
        (made,) = second["messages"][1]["tool_calls"]
        assert made["function"]["name"] == "weather" and second["messages"][2] == {
            "role": "tool", "tool_call_id": made["id"], "content": "sunny"
        }  # fmt: skip
        assert page.locator(".results").count() == page.locator("#turns > li:nth-child(2) .call").count()
        page.close()


def test_what_a_pair_lacks_is_disabled(chromium: Any, pair: sprinter.Pair, template: Any) -> None:
    template(None)
    with serving(pair) as server:
        page = opened(chromium, server)
        assert page.is_disabled('input[value="chat"]') and "no chat template" in page.inner_text("#chat-note")
        assert page.is_hidden("#tools") and page.is_enabled("#answer") and page.is_hidden("#models")
        page.close()
    template(TEMPLATE)
    with serving(pair) as server:
        page = opened(chromium, server)
        assert page.is_disabled("#tools") and "does not read tools" in page.inner_text("#tools-note")
        page.close()


def test_a_dial_waits_for_the_end_of_json(page: Any) -> None:
    page.select_option("#answer", "json_object")
    ask(page, "Once", "sprinter", 150)
    page.wait_for_function("document.querySelectorAll('#turns > li:last-child .text span').length > 3")
    page.evaluate(
        "const one = document.getElementById('dial-0-tau'); one.value = 0.3; one.dispatchEvent(new Event('input'))"
    )
    page.wait_for_function("document.getElementById('status').textContent.includes('next answer')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#turns > li:last-child .answer[data-ended]")
    assert last(page).locator(".mark").count() == 0
    page.select_option("#answer", "text")


def test_a_phone(page: Any, server: Running) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.set_viewport_size({"width": 1280, "height": 800})


def test_a_key_is_asked_for(chromium: Any, pair: sprinter.Pair, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-secret-secret-secret\n")
    with serving(pair, api_keys=keys) as server:
        view = chromium.new_page(bypass_csp=True)
        view.goto(server.url)
        view.wait_for_selector("#key-dialog[open]")
        view.fill("#key", "secret-secret-secret-secret")
        view.click("#key-dialog button")
        view.wait_for_selector(METHODS, state="attached")
