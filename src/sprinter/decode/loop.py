"""The one loop. Decoding one row is a coroutine that asks and does not call: it holds no model.

    draft run      ask for draft tokens until a rule, the cap or the end of the text stops the run;
                   trusted tokens are final at once, from the first untrusted one on they wait
    target call    one pass over all that the target has not read: it meters what was trusted, judges
                   what was not, and adds one token: a replacement, a bonus, or a plain one

The token that ends a run is checked even if the trust rule likes it, so no call is without use; a trusted token that
ends the text is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.decode.draft import AskDraft, AskScore, Draft, Origin, Record, Scores, Token
from sprinter.decode.judge import Chain, judge
from sprinter.decode.meter import Meter
from sprinter.decode.methods import Method
from sprinter.random import Draws, Purpose

__all__ = ["METER_CHUNK", "Limits", "decode"]

METER_CHUNK = 64  # a complete meter asks for a pass of its own after so many unscored tokens
Loop = Generator[AskDraft | AskScore, Draft | Scores, None]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a text ends: at exactly ``max_new_tokens``, or where ``ends(text so far, prompt first)`` gives a reason."""

    max_new_tokens: int
    ends: Callable[[Sequence[int]], str | None] = lambda text: None


def decode(
    prompt: Sequence[int],
    method: Method,
    limits: Limits,
    draws: Draws,
    record: Record,
    complete: bool = False,
) -> Loop:
    """Decode one row. Final tokens appear in ``record`` as soon as they are settled.

    Args:
        prompt: token ids, at least one.
        complete: ask for closing passes, so that every trusted token is metered.
    """
    stats, meter = record.stats, Meter()
    text = list(prompt)  # the prompt, final tokens, and the untrusted draft under way
    final = len(text)  # text[:final] is settled
    known = final  # the drafter has text[:known]
    scored = final - 1  # the target has read text[:scored], always at least one token short of the text
    end = final + limits.max_new_tokens
    trust_state, stop_state = method.trust.start(), method.stop.start()

    def settle(position: int, token: Token) -> bool:
        record.tokens.append(token)
        record.finish = limits.ends(text[: position + 1]) or ("length" if position + 1 == end else None)
        return record.finish is None

    while record.finish is None:
        stats.rounds += 1
        round, before = stats.rounds, len(record.tokens)
        drafted, stopped = 0, method.drafter == "none"
        laws: list[Tensor] = []  # of the untrusted tokens text[final:]
        raws: list[Tensor] = []
        stop_state = method.stop.begin_round(stop_state)
        while not stopped:
            # Where nothing can be trusted the last place is left to the call, which draws a token anyway.
            room = end - len(text) - int(method.trust.never)
            at_most = room if method.cap is None else min(room, method.cap - drafted)
            if at_most < 1:
                break
            answer = yield AskDraft(known, tuple(text[known:]), round, at_most)
            assert isinstance(answer, Draft)
            for i, x in enumerate(answer.tokens):
                position, drafted = len(text), drafted + 1
                signals = {name: values[i] for name, values in answer.signals.items()}
                signals["drafted"] = torch.tensor(drafted)
                if "uniform" in method.needs:
                    number = draws.uniform(round, position, Purpose.TRUST)
                    signals["uniform"] = torch.tensor(number, dtype=torch.float64)
                trusted, trust_state = method.trust.trust(signals, trust_state)
                stop, stop_state = method.stop.stop({**signals, "trusted": trusted}, stop_state)
                stopped = bool(stop)
                if stopped and method.stop.discards:
                    break
                text.append(x)
                ended = len(text) == end or limits.ends(text) is not None
                forced = stopped or drafted == method.cap  # checked even if trusted, unless it ends the text
                stopped = forced or ended
                if final == position and bool(trusted) and (ended or not forced):
                    final += 1
                    token = Token(x, Origin.TRUSTED, round)
                    if complete or method.needs_target:
                        spared = forced and len(text) < end  # by being a token that ends the text
                        meter.wait(position, token, answer.laws[i], saw_token=method.sees_token or spared)
                    settle(position, token)
                else:
                    laws.append(answer.laws[i])
                    raws += [] if answer.raw is None else [answer.raw[i]]
                if stopped:
                    break
            known = len(text)
            if complete and meter.waiting >= METER_CHUNK:
                scored = yield from _closing_pass(text[:final], scored, round, record, meter)
        accepted = 0
        if record.finish is None:
            scores = yield AskScore(scored, tuple(text[scored:]), round)
            assert isinstance(scores, Scores)
            stats.target_calls += 1
            meter.score(scored, scores)
            row = final - 1 - scored  # holds the law at the first untrusted position
            raw_p = None if scores.raw is None else scores.raw[row:]
            chain = Chain(text[final:], laws, raws)
            verdict = judge(method.accept, chain, scores.laws[row:], raw_p, draws, round, final)
            for x, drift in zip(chain.tokens[: verdict.accepted], verdict.drifts, strict=False):
                accepted += 1
                if not settle(final + accepted - 1, Token(x, Origin.ACCEPTED, round, drift)):
                    break
            known = min(known, final + accepted)
            text[final + accepted :] = []
            if record.finish is None:
                text.append(verdict.token)
                refused, drift = accepted < len(laws), verdict.drifts[verdict.accepted]
                origin = Origin.REPLACEMENT if refused else Origin.BONUS if laws else Origin.TARGET
                settle(len(text) - 1, Token(verdict.token, origin, round, drift))
            final, scored = len(text), len(text) - 1
            stats.checked += min(verdict.accepted + 1, len(laws))
        stop_state = method.stop.end_round(stop_state, drafted, len(laws), accepted)
        record.accept_lengths.append(len(record.tokens) - before)
    if complete and meter.waiting:
        yield from _closing_pass(text, scored, stats.rounds, record, meter)


def _closing_pass(
    text: Sequence[int], scored: int, round: int, record: Record, meter: Meter
) -> Generator[AskScore, Draft | Scores, int]:
    """A target pass for the meter alone. Returns how far the target has read then."""
    scores = yield AskScore(scored, tuple(text[scored:-1]), round, closing=True)
    assert isinstance(scores, Scores)
    record.stats.closing_passes += 1
    meter.score(scored, scores)
    return len(text) - 1
