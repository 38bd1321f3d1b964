"""The decoding loop: a coroutine that yields requests for one text and holds no model.

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

from sprinter.decode.accept import TargetCall, Verdict
from sprinter.decode.decoding import (
    METER_CHUNK,
    Answer,
    Asking,
    Decoding,
    Limits,
    LoopRequest,
    closing_pass,
    draft_run,
    draft_tree,
)  # fmt: skip
from sprinter.decode.draft import AskScore, Origin, Record, Scores, Token
from sprinter.decode.resting import copy_run
from sprinter.decode.sequence import Siblings, TokenSequence
from sprinter.decode.spec import Method
from sprinter.decode.state import RuleState
from sprinter.decode.switch import DraftSwitch
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
    """Decode one text. Tokens are added to ``record`` as soon as they are final.

    Args:
        prompt: token ids, at least one; or the sequence that begins with them, for a driver that holds it.
        complete: ask for closing forward passes, so that every trusted token is metered.
        rules: the ``record.rules`` of an earlier text to continue from; None: a fresh state.
        switch: says before each round whether it drafts; None: each does.
    """
    sequence = prompt if isinstance(prompt, TokenSequence) else TokenSequence.begin(prompt)
    decoding = Decoding.begin(sequence, method, limits, draws, record, complete, rules, switch)
    drafting = draft_run if method.drafter.siblings is Siblings.ALONE else draft_tree
    apart = drafting is draft_tree or method.drafter.by_heads  # no forced tokens stand among their drafts
    forces = limits.grammar is not None
    while record.finish is None:
        decoding.begin_round()
        before = len(record.tokens)
        pace = decoding.pace
        may_copy = (apart or not pace.drafts) and (forces or pace.copies)
        copied = may_copy and (yield from copy_run(decoding, pace.copies))
        if pace.drafts and not copied:
            yield from drafting(decoding)
        record.stats.drafted += len(record.tokens) - before + len(sequence.tree.tokens)
        read = accepted = checked = 0
        if record.finish is None:
            read, accepted = yield from _target_call(decoding)
            accepted = max(0, accepted - len(decoding.on_trial))
        if sequence.tree.tokens:
            checked = sequence.tree.depth - len(decoding.on_trial)
        decoding.end_round(len(record.tokens) - before, read, checked, accepted)
    if complete and decoding.meter.waiting:
        yield from closing_pass(decoding)


def _target_call(decoding: Decoding) -> Generator[LoopRequest, Answer, tuple[int, int]]:
    """Score the unread tokens in one target forward pass, judge the draft, add a token.

    Returns:
        The number of tokens that the target read, and of draft tokens that stay.
    """
    record, sequence, text = decoding.record, decoding.sequence, decoding.sequence.tokens
    tree, round, start, final = sequence.tree, sequence.round, sequence.scored, sequence.final
    grown = tree.parents is not None  # the tokens of a chain are in the text already
    nodes = (tree.tokens, tree.parents or ()) if grown else ((), ())
    scores = yield AskScore(sequence, start, len(text), *nodes)
    assert isinstance(scores, Scores)
    if tree.tokens and scores.accepted is None:
        decoding.shorten(start + scores.laws.shape[0] - len(nodes[0]))
    record.stats.target_calls += 1
    read, tree = len(text) - start + len(nodes[0]), sequence.tree
    decoding.score(start, scores)
    if sequence.successors is not None:
        sequence.successors.note(text[start:] + [*tree.tokens] * grown, scores.likeliest)
    if decoding.asks:
        decoding.rules.learn()
    if scores.token is not None and scores.accepted is None:  # nothing was drafted
        text.append(scores.token)
        decoding.settle(final, Token(scores.token, Origin.TARGET, round, 0.0, ratio=1.0))
        sequence.final, sequence.scored = final + 1, final
        return read, 0
    first = final - 1 - start  # the row of the law at the first untrusted position
    raw_p = None if scores.raw is None else scores.raw[first:]
    heads = {kind: values[first:] for kind, values in scores.heads.items() if kind in decoding.accept.needs}
    if scores.accepted is not None and scores.token is not None:  # judged by the driver
        verdict = Verdict(range(scores.accepted), scores.token, [0.0] * (scores.accepted + 1))
    else:
        verdict = decoding.judge(
            TargetCall(tree, scores.laws[first:], raw_p, decoding.draws, round, final, heads)
        )
    path, accepted = verdict.path, 0
    if grown:
        drafted = [decoding.draft_nodes[node] for node in path]
        sequence.commit(path, [node for node in drafted if node >= 0])
    for i, node in enumerate(path):
        origin = Origin.TRUSTED if any(verdict.trusted[i : i + 1]) else Origin.ACCEPTED
        token = Token(tree.tokens[node], origin, round, verdict.drifts[i], ratio=verdict.ratio(i))
        if decoding.gate_scores:
            token.gate_score = decoding.gate_scores[i]
        accepted += 1
        if not decoding.settle(final + accepted - 1, token):
            break
    refused = len(tree.tokens) > 0 and not tree.is_leaf(path[-1] if path else -1)
    if path or refused:
        judged, tried = accepted if record.finish else accepted + refused, len(decoding.on_trial)
        record.stats.checked += judged - sum(verdict.trusted[:judged])
        record.stats.taken_back += max(0, tried - accepted) if refused and not record.finish else 0
        sequence.cut(final + accepted)
    if record.finish is None:
        text.append(verdict.token)
        drift, ratio = verdict.drifts[len(path)], verdict.ratio(len(path))
        origin = Origin.REPLACEMENT if refused else Origin.BONUS if tree.tokens else Origin.TARGET
        decoding.settle(len(text) - 1, Token(verdict.token, origin, round, drift, ratio=ratio))
    sequence.final, sequence.scored = len(text), len(text) - 1
    return read, accepted
