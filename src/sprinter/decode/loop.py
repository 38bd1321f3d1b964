"""The decoding loop: a coroutine that yields requests for one row and holds no model.

    draft run      ask for draft tokens until a rule, the cap or the end of the text stops the run;
                   trusted tokens are final at once, tokens from the first untrusted one on are not
    target call    one forward pass over the tokens that the target has not read: meter trusted tokens (a trust
                   rule may learn), judge untrusted ones, and add one token: a replacement, a bonus, or a plain one

The token that ends a run is checked even if the trust rule trusts it, so that every target call checks a token; a
trusted token that ends the text, or behind which another part of the text begins (``only``), need not be checked. The
guards ``tail_ratio`` and ``budget`` hold trusted tokens back until the target has scored them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from sprinter.decode.accept import TargetCall
from sprinter.decode.draft import AskScore, Origin, Record, Scores, Token, Verdict
from sprinter.decode.review import review
from sprinter.decode.row import (
    METER_CHUNK,
    Answer,
    Asking,
    Limits,
    LoopRequest,
    Row,
    closing_pass,
    copy_run,
    draft_run,
    draft_tree,
)
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import Method
from sprinter.decode.state import RuleState
from sprinter.decode.switch import DraftSwitch
from sprinter.decode.tree import Siblings
from sprinter.random import Draws

__all__ = ["METER_CHUNK", "Limits", "decode"]


def decode(
    prompt: Sequence[int] | TokenSequence,
    method: Method,
    limits: Limits,
    draws: Draws,
    record: Record,
    complete: bool = False,
    rules: RuleState | None = None,
    switch: DraftSwitch | None = None,
) -> Asking:
    """Decode one row. Tokens are added to ``record`` as soon as they are final.

    Args:
        prompt: token ids, at least one; or the sequence that begins with them, for a driver that holds it.
        complete: ask for closing forward passes, so that every trusted token is metered.
        rules: the ``record.rules`` of an earlier text to continue from; None: a fresh state.
        switch: says before each round whether it drafts; None: each does.
    """
    sequence = prompt if isinstance(prompt, TokenSequence) else TokenSequence.begin(prompt)
    row = Row.begin(sequence, method, limits, draws, record, complete, rules, switch)
    while record.finish is None:
        row.begin_round()
        before = len(record.tokens)
        if row.pace.drafts:
            yield from draft_run(row) if method.drafter.siblings is Siblings.ALONE else draft_tree(row)
        elif row.pace.copies:
            copy_run(row)
        record.stats.drafted += len(record.tokens) - before + len(sequence.tree.tokens)
        accepted, tried = 0, len(row.on_trial)
        checked = sequence.tree.depth - tried
        if record.finish is None:
            accepted = max(0, (yield from _target_call(row)) - tried)
        row.end_round(len(record.tokens) - before, checked, accepted)
    if complete and row.meter.waiting:
        yield from closing_pass(row)


def _target_call(row: Row) -> Generator[LoopRequest, Answer, int]:
    """Score the unread tokens in one target forward pass, judge the draft, add a token; returns the number accepted."""
    record, sequence, text = row.record, row.sequence, row.sequence.tokens
    tree, round, start = sequence.tree, sequence.round, sequence.scored
    grown = tree.parents is not None  # the tokens of a chain are in the text already
    scores = yield AskScore(sequence, start, len(text), tree.tokens if grown else (), tree.parents or ())
    assert isinstance(scores, Scores)
    record.stats.target_calls += 1
    row.pace.read = len(text) - start + len(tree.tokens) * grown
    row.score(start, scores)
    row.rules.learn()
    final = sequence.final
    first = final - 1 - start  # the row of the law at the first untrusted position
    raw_p = None if scores.raw is None else scores.raw[first:]
    heads = {kind: values[first:] for kind, values in scores.heads.items() if kind in row.accept.needs}
    verdict = _judge(row, TargetCall(tree, scores.laws[first:], raw_p, row.draws, round, final, heads))
    if grown:
        read = [row.read[node] for node in verdict.path]
        sequence.commit(verdict.path, [node for node in read if node >= 0])
    accepted = 0
    for i, node in enumerate(verdict.path):
        origin = Origin.TRUSTED if any(verdict.trusted[i : i + 1]) else Origin.ACCEPTED
        token = Token(tree.tokens[node], origin, round, verdict.drifts[i], ratio=verdict.ratio(i))
        if row.gate_scores:
            token.gate_score = row.gate_scores[i]
        accepted += 1
        if not row.settle(final + accepted - 1, token):
            break
    refused = not tree.is_leaf(verdict.path[-1] if verdict.path else -1)
    judged, tried = accepted if record.finish else accepted + refused, len(row.on_trial)
    record.stats.checked += judged - sum(verdict.trusted[:judged])
    record.stats.taken_back += max(0, tried - accepted) if refused and not record.finish else 0
    sequence.cut(final + accepted)
    if record.finish is None:
        text.append(verdict.token)
        drift, ratio = verdict.drifts[verdict.accepted], verdict.ratio(verdict.accepted)
        origin = Origin.REPLACEMENT if refused else Origin.BONUS if tree.tokens else Origin.TARGET
        row.settle(len(text) - 1, Token(verdict.token, origin, round, drift, ratio=ratio))
    sequence.final, sequence.scored = len(text), len(text) - 1
    return accepted


def _judge(row: Row, call: TargetCall) -> Verdict:
    """Judge the round's draft."""
    ratio = row.method.tail_ratio
    # Exact rules differ in what becomes of a token: if trust depends on tokens, two of them together are not exact.
    if not row.on_trial or (ratio == 1 and row.accept.lossless):
        return row.accept.judge(call)
    return review(ratio or 0.0, row.on_trial, row.accept, row.meter.rule, call, row.budget)
