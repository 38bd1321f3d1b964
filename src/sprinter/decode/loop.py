"""The one loop. Decoding one row is a coroutine that asks and does not call: it holds no model.

    draft run      ask for draft tokens until a rule, the cap or the end of the text stops the run;
                   trusted tokens are final at once, from the first untrusted one on they wait
    target call    one pass over all that the target has not read: it meters what was trusted, judges
                   what was not, and adds one token: a replacement, a bonus, or a plain one

The token that ends a run is checked even if the trust rule likes it, so no call is without use; a trusted token that
ends the text is not checked.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from sprinter.decode.draft import AskDraft, AskScore, Chain, Origin, Record, Scores, Token
from sprinter.decode.judge import judge
from sprinter.decode.row import (
    METER_CHUNK,
    Answer,
    Asking,
    Limits,
    Row,
    closing_pass,
    draft_run,
    draft_several,
)
from sprinter.decode.spec import Method
from sprinter.decode.state import RuleState
from sprinter.random import Draws

__all__ = ["METER_CHUNK", "Limits", "decode"]


def decode(
    prompt: Sequence[int],
    method: Method,
    limits: Limits,
    draws: Draws,
    record: Record,
    complete: bool = False,
    rules: RuleState | None = None,
) -> Asking:
    """Decode one row. Final tokens appear in ``record`` as soon as they are settled.

    Args:
        prompt: token ids, at least one.
        complete: ask for closing passes, so that every trusted token is metered.
        rules: what an earlier text left in ``record.rules``, to go on from; None begins anew.
    """
    row = Row.begin(prompt, method, limits, draws, record, complete, rules)
    while record.finish is None:
        record.stats.rounds += 1
        before, row.drafted, row.chains = len(record.tokens), 0, []
        row.stop_state = method.stop.begin_round(row.stop_state)
        if row.proposes:
            yield from draft_run(row) if method.drafter.drafts == 1 else draft_several(row)
        accepted, checked = 0, len(row.chains[0].tokens) if row.chains else 0
        if record.finish is None:
            accepted = yield from _target_call(row)
        row.stop_state = method.stop.end_round(row.stop_state, row.drafted, checked, accepted)
        record.rules = RuleState(method.trust, method.stop, row.trust_state, row.stop_state)
        record.accept_lengths.append(len(record.tokens) - before)
    if complete and row.meter.waiting:
        yield from closing_pass(row)


def _target_call(row: Row) -> Generator[AskDraft | AskScore, Answer, int]:
    """One pass of the target over all that it has not read, and what follows from it. Returns the tokens accepted."""
    record, method, text, round = row.record, row.method, row.text, row.record.stats.rounds
    several = len(row.chains) > 1
    chains = row.chains or [Chain((), ())]
    asked = tuple(tuple(chain.tokens) for chain in chains) if several else ()
    scores = yield AskScore(row.scored, tuple(text[row.scored :]), round, chains=asked, row=row.follows)
    assert isinstance(scores, Scores)
    record.stats.target_calls += 1
    row.meter.score(row.scored, scores)
    first = row.final - 1 - row.scored  # holds the law at the first untrusted position
    p = scores.laws[..., first:, :]
    raw_p = None if scores.raw is None else scores.raw[..., first:, :]
    verdict = judge(method.accept, chains, p, raw_p, row.draws, round, row.final)
    tokens, accepted = chains[verdict.row].tokens, 0
    text[row.final :] = tokens
    for x, drift in zip(tokens[: verdict.accepted], verdict.drifts, strict=False):
        accepted += 1
        if not row.settle(row.final + accepted - 1, Token(x, Origin.ACCEPTED, round, drift)):
            break
    record.stats.checked += accepted if record.finish else min(accepted + 1, len(tokens))
    row.known = row.final + accepted if several else min(row.known, row.final + accepted)
    row.follows = verdict.row
    text[row.final + accepted :] = []
    if record.finish is None:
        text.append(verdict.token)
        refused, drift = accepted < len(tokens), verdict.drifts[verdict.accepted]
        origin = Origin.REPLACEMENT if refused else Origin.BONUS if tokens else Origin.TARGET
        row.settle(len(text) - 1, Token(verdict.token, origin, round, drift))
    row.final, row.scored = len(text), len(text) - 1
    return accepted
