"""Our rules in an engine that others keep: it runs the target and schedules, our loop decides what stays of a draft.

Trust is unconditional acceptance at verification. A draft run is the trusted tokens, the first untrusted one and a
tail. The target's pass scores all of them, the trusted ones stay, the rest is judged, and the last token is drawn. That
is the loop with ``tail_ratio=0``: no token is final before the target has scored it. So the engine's scheduler, prefix
cache and preemption see nothing but ordinary speculation, and every drift is known.

This module needs torch alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from sprinter.decode.draft import AskDraft, AskScore, Draft, Record, Scores
from sprinter.decode.loop import Limits, decode
from sprinter.decode.method import Method
from sprinter.decode.sequence import Siblings, TokenSequence
from sprinter.decode.spec import parse_method
from sprinter.errors import UserError
from sprinter.random import Draws

__all__ = ["OPTIONS", "HostedRequest", "check_method", "method_of"]

OPTIONS = ("method", "budget", "require_lossless")
"""What a request may say."""


def method_of(given: Any, default: str, greedy: bool = False) -> Method:
    """The method of a request.

    Args:
        given: what the request says: None, a method's spec, an object with some of ``OPTIONS``, or its JSON, because
            HTTP's ``vllm_xargs`` holds no objects.
        default: the method if the request names none.
        greedy: whether the request's temperature is 0.

    Raises:
        UserError: says what is wrong with the request, and how to fix it.
    """
    values = given
    if isinstance(given, str):
        values = _read_json(given) if given.lstrip().startswith("{") else {"method": given}
    if values is None:
        values = {}
    if not isinstance(values, Mapping) or (unknown := sorted(map(str, values.keys() - {*OPTIONS}))):
        what = "an object" if not isinstance(values, Mapping) else f"without {unknown[0]}"
        raise UserError(f"sprinter={given!r} is not {what}: give a method, or some of {', '.join(OPTIONS)}")
    method = parse_method(values.get("method") or default)
    if (budget := values.get("budget")) is not None:
        if isinstance(budget, bool) or not isinstance(budget, int | float):
            raise UserError(f"budget={budget!r} is not a number: give a mean drift a token, from 0 to 1")
        method = method.replace(budget=float(budget))
    if not isinstance(needed := values.get("require_lossless", False), bool | int):
        raise UserError(f"require_lossless={needed!r} is not true or false")
    check_method(method)
    if needed and not method.lossless(greedy):
        raise UserError(f"require_lossless was given, and {method.name} is lossy: give a lossless method")
    return method


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(
            f"sprinter={text!r} is not JSON ({error}): give a method's spec or an object"
        ) from error


def check_method(method: Method) -> None:
    """Refuse methods that another engine's passes cannot answer.

    Raises:
        UserError: it drafts trees or with heads, follows spans of the text, or never calls the target.
    """
    drafter = method.drafter
    why = None
    if drafter.siblings is not Siblings.ALONE or drafter.drafts > 1:
        why = "it drafts trees, and the engine verifies chains"
    elif drafter.by_heads or drafter.target_states or method.accept.needs:
        why = "it reads the target's hidden states, which the engine does not hand out"
    elif drafter.tokens_a_pass > 1:
        why = "its draft model drafts several tokens in one pass, for which the engine has its own option"
    elif method.only is not None:
        why = "only= follows spans of the text, which the engine does not show"
    elif method.trusts_all:
        why = "it never calls the target"
    elif method.measures:
        why = "a cost in it is measured, and the engine's passes are not: give it as a number"
    if why is not None:
        raise UserError(
            f"method {method.name} does not run here: {why}: give another, such as speculative or sprinter"
        )


class HostedRequest:
    """One request of another engine.

    Between two of the engine's steps it asks for draft tokens (``wants``), then offers them (``draft``); in the step it
    is given the target's laws (``score``).

    Args:
        prompt: token ids, at least one.
        method: see ``check_method``.
        max_new_tokens: where the engine ends the text.
        ends: ids of the tokens that end it.
        draws: its random numbers.
        longest: maximum number of tokens in a draft.
        least: number of new tokens before which none of ``ends`` ends the text.

    Attributes:
        method: as it was given. record: tokens so far, with origins and drifts, and counts.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        method: Method,
        max_new_tokens: int,
        ends: Collection[int],
        draws: Draws,
        longest: int,
        least: int = 0,
    ) -> None:
        self.method, self.draws, self.record = method, draws, Record()
        self.sequence = TokenSequence.begin(prompt)
        endings, first = frozenset(ends), len(prompt) + least

        def ended(text: Sequence[int]) -> str | None:
            return "eos" if text[-1] in endings and len(text) >= first else None

        limits = Limits(max_new_tokens, ended)
        cap = longest if method.cap is None else min(method.cap, longest)
        held = method.replace(cap=cap)
        if not method.trust.never and method.tail_ratio is None:
            held = held.replace(tail_ratio=0.0)  # trusted tokens are final when the target has scored them
        self.record.stats.lossless = method.lossless()
        self._loop = decode(self.sequence, held, limits, draws, self.record)
        self._ask: Any = next(self._loop)

    @property
    def wants(self) -> AskDraft | None:
        """The draft tokens that it asks for; None: the draft is ready, or the text has ended."""
        return self._ask if isinstance(self._ask, AskDraft) else None

    @property
    def draft(self) -> list[int]:
        """The tokens for the target to verify: those behind the text's last final one."""
        return self.sequence.tokens[self.sequence.scored + 1 :] if isinstance(self._ask, AskScore) else []

    @property
    def over(self) -> bool:
        """Whether the text has ended."""
        return self._ask is None

    def answer(self, draft: Draft) -> None:
        """Take draft tokens; none ends the draft."""
        self._send(draft)

    def score(self, laws: Tensor, raw: Tensor | None = None) -> list[int]:
        """Take the target's laws after the last final token and after each of the first n draft tokens; returns the
        tokens that are final now, at least one. If n is less than the draft has, the rest is forgotten.

        Args:
            laws: ``[n + 1, V]``. raw: temperature-1 laws of the same shape, if the accept rule ``needs_raw``.
        """
        if self.over:
            raise UserError("the text has ended, and the engine goes on with it")
        while self.wants is not None:
            self.answer(Draft((), laws[:0], {}, None if raw is None else raw[:0]))
        n, before = len(self.draft), len(self.record.tokens)
        self._send(Scores(laws[: n + 1], None if raw is None else raw[: n + 1]))
        return [token.id for token in self.record.tokens[before:]]

    def report(self) -> dict[str, Any]:
        """What is told of the request: JSON values, the counts named as in ``generate``."""
        stats = self.record.count()
        return {
            "method": self.method.name,
            "lossless": stats.lossless,
            "origins": [token.origin.value for token in self.record.tokens],
            "new_tokens": stats.new_tokens,
            "target_calls": stats.target_calls,
            "draft_steps": stats.draft_steps,
            "trusted": stats.trusted,
            "accepted": stats.accepted,
            "mean_drift": stats.mean_drift,
            "drift_sum": stats.drift_sum,
            "drift_coverage": stats.drift_coverage,
            "tokens_per_target_call": stats.tokens_per_target_call,
        }

    def _send(self, answer: Draft | Scores) -> None:
        try:
            self._ask = self._loop.send(answer)
        except StopIteration:
            self._ask = None
