"""What the server's log and its page of documentation say."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import sprinter
from sprinter.engine import costs
from sprinter.serve.logs import logs_to, text_fields
from sprinter.serve.speculation import sprinter_report

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serve.md"


def test_a_refused_request_was_neither_lossless_nor_lossy() -> None:
    assert text_fields([], prompts=False)["lossless"] is None


def test_requests_of_strangers_that_are_no_http_are_a_line_a_second() -> None:
    stream = io.StringIO()
    with logs_to(stream):
        for at in (0.0, 0.1, 0.9, 1.1):
            record = logging.LogRecord("", logging.WARNING, "", 0, "Invalid HTTP request received.", (), None)
            record.name, record.created = "uvicorn.error", 1000 + at
            logging.getLogger("uvicorn.error").handle(record)
        logging.getLogger("uvicorn.error").warning("something else")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("times") for line in lines] == [1, 3, None]


def test_measuring_costs_is_a_line() -> None:
    stream = io.StringIO()
    with logs_to(stream):
        costs._LOG.info("measuring")
    assert json.loads(stream.getvalue())["event"] == "measuring"


def test_the_page_has_every_field_of_a_report(pair: sprinter.Pair) -> None:
    body = PAGE.read_text(encoding="utf-8").partition("interface Report {")[2].partition("\n}")[0]
    named = re.findall(r"(\w+)\??: ", re.sub(r"//.*|\{[^}]*\}", "", body))
    out = pair.generate("The", method="autoregressive", max_new_tokens=1)
    assert sorted(named) == sorted([*sprinter_report(out), "tokens"])
