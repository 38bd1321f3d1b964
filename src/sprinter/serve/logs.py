"""Structured logs: one JSON object a line. Texts of prompts and answers are in them only if that is asked for."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from sprinter.engine.generation import Generation
from sprinter.serve.completion_streams import AnswerChoice

__all__ = ["JsonLines", "error_fields", "logs_to", "text_fields"]


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, event, and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **fields,
        }
        return json.dumps(line, default=str)


class _Seldom(logging.Filter):
    """Lets a warning that strangers cause through once a second, with how often it came since the last time."""

    _next, _times = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != "uvicorn.error" or record.msg != "Invalid HTTP request received.":
            return True
        self._times += 1
        if record.created < self._next:
            return False
        record.fields, self._next, self._times = {"times": self._times}, record.created + 1, 0
        return True


@contextmanager
def logs_to(stream: TextIO | None = None) -> Iterator[None]:
    """Write the server's logs, and uvicorn's warnings, to a stream (None: standard error)."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines())
    handler.addFilter(_Seldom())
    levels = {
        "sprinter": logging.WARNING,
        "sprinter.serve": logging.INFO,
        "sprinter.engine.costs": logging.INFO,  # measuring takes seconds, in which nothing else is said
        "uvicorn.error": logging.WARNING,
        "py.warnings": logging.WARNING,
    }
    logs = [logging.getLogger(name) for name in levels]
    before = [(log.handlers, log.propagate, log.level) for log in logs]
    for log, level in zip(logs, levels.values(), strict=True):
        log.handlers, log.propagate = [handler], False
        log.setLevel(level)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for log, (handlers, propagate, level) in zip(logs, before, strict=True):
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)


def error_fields(error: BaseException) -> dict[str, Any]:
    """Where an exception was raised; not its text, which may hold a prompt."""
    trace, frames = error.__traceback__, []
    while trace is not None:
        frames.append(f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}")
        trace = trace.tb_next
    return {"error": type(error).__name__, "trace": frames[-8:]}


def text_fields(choices: list[AnswerChoice], *, prompts: bool) -> dict[str, Any]:
    """What a log says about the texts of a request. ``prompts``: with their text."""
    outs: list[Generation] = [choice.out for choice in choices if choice.out is not None]
    known = [out for out in outs if out.stats.mean_drift is not None]
    fields: dict[str, Any] = {
        "texts": len(choices),
        "method": outs[0].method if outs else None,
        "lossless": all(out.stats.lossless for out in outs) if outs else None,  # refused: nothing was written
        "finish_reasons": [out.finish_reason for out in outs],
        "prompt_tokens": sum(len(choice.prompt.ids) for choice in choices),
        "new_tokens": sum(out.stats.new_tokens for out in outs),
        "target_calls": sum(out.stats.target_calls for out in outs),
        "draft_steps": sum(out.stats.draft_steps for out in outs),
        "mean_drift": sum(out.stats.mean_drift or 0.0 for out in known) / len(known) if known else None,
    }
    if prompts:
        fields["prompts"] = [choice.prompt.text or choice.prompt.ids for choice in choices]
        fields["answers"] = [out.text for out in outs]
    return fields
