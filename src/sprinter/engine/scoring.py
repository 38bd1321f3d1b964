"""Log-probabilities of given texts under the target's raw law, in forward passes of bounded memory."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from sprinter.decode.draft import TopToken
from sprinter.decode.sequence import common_prefix
from sprinter.engine.prompt import encode
from sprinter.errors import ContextLengthError, SprinterError, UserError
from sprinter.models.choose import make_runner
from sprinter.models.interface import Runner
from sprinter.models.memory import check_memory
from sprinter.models.pair import LoadedPair
from sprinter.models.runners.forward import CHUNK

_Done = TypeVar("_Done")

__all__ = ["GivenText", "ScoredText", "ScoredToken", "Scorer", "Scoring", "finished", "score_texts"]

GivenText = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, at least one, and those of its continuation, which are scored."""

_MEMORY_BYTES = 128 * 2**20  # for the logits of a chunk and their copies
_COPIES = 3  # logits, logits in float32, log-probabilities
_NOT_FINITE = (
    "the target's logits along a given text are not finite: try dtype=float32, and check the weights"
)
_HELD = 8
_LEAST = -1e4  # replaces ln 0, so that sums stay finite


class ScoredText(NamedTuple):
    """ln p(token | prefix) of n tokens under the target's raw law (temperature 1, no truncation), on the CPU.

    Attributes:
        logprobs: ``[n]`` float64. ln 0 is reported as −10,000.
        top_ids, top_logprobs: the most probable tokens at each position, ``[n, top]``.
    """

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@torch.inference_mode()
def score_texts(
    runner: Runner, texts: Sequence[GivenText], vocab: int, top: int = 0, chunk: int | None = None
) -> Generator[None, None, list[ScoredText]]:
    """Score a batch of texts, one forward pass per step of the generator; the last token of a text is not fed.

    Args:
        runner: empty rows, one for each text.
        vocab: logits beyond it are dropped.
        top: number of most probable tokens to name at each position.
        chunk: maximum number of positions per forward pass; None: as many as a forward pass reads.

    Raises:
        SprinterError: the target's logits are not finite.
    """
    chunk = CHUNK if chunk is None else chunk
    whole = [[*prompt, *new] for prompt, new in texts]
    fed = [len(ids) - 1 for ids in whole]
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in texts])  # first position whose logits are needed
    width = max(fed)
    ids = torch.tensor([row + [0] * (width + 1 - len(row)) for row in whole])
    ends = torch.tensor(fed)
    parts: list[list[ScoredText]] = [[_nothing(top)] for _ in texts]
    at = 0
    while at < width:
        silent = int(starts.min()) - at
        n = min(silent, chunk) if silent > 0 else min(_positions(runner), chunk, width - at)
        counts = (ends - at).clamp(0, n).tolist()
        step = runner.extend(ids[:, at : at + n].to(runner.device), counts, logits=silent <= 0)
        if step.logits is not None:
            places = torch.arange(at, at + n)
            chosen = (places >= starts[:, None]) & (places < ends[:, None])
            scored = _chosen(step.logits, chosen, ids[:, at + 1 : at + n + 1], vocab, top)
            split = zip(*(torch.split(one, chosen.sum(1).tolist()) for one in scored), strict=True)
            for part, own in zip(parts, split, strict=True):
                part.append(ScoredText(*own))
        at += n
        yield
    return [ScoredText(*map(torch.cat, zip(*part, strict=True))) for part in parts]


def finished(steps: Generator[None, None, list[ScoredText]]) -> list[ScoredText]:
    """What ``score_texts`` returns, with all of its passes run."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


def _nothing(top: int) -> ScoredText:
    return ScoredText(
        torch.zeros(0, dtype=torch.float64),
        torch.zeros(0, top, dtype=torch.long),
        torch.zeros(0, top, dtype=torch.float64),
    )


def _positions(runner: Runner) -> int:
    """Number of positions per chunk, limited by the memory for logits."""
    return max(1, _MEMORY_BYTES // (_COPIES * 4 * runner.batch * runner.vocab_size))


def _chosen(logits: Tensor, chosen: Tensor, tokens: Tensor, vocab: int, top: int) -> ScoredText:
    """The tokens at the chosen positions, row by row. All tensors are ``[batch, n, ...]``."""
    there = chosen.to(logits.device)
    logs = torch.log_softmax(logits[there][:, :vocab].float(), -1)
    values = logs.gather(-1, tokens[chosen].to(logits.device)[:, None])[:, 0].cpu().double()
    if values.isnan().any():
        raise SprinterError(_NOT_FINITE)
    best = logs.topk(top, -1)
    return ScoredText(
        values.clamp(min=_LEAST), best.indices.cpu(), best.values.cpu().double().clamp(min=_LEAST)
    )


class ScoredToken(NamedTuple):
    """A token of a given text, its log-probability, and the most probable tokens in its place."""

    id: int
    logprob: float
    top: list[TopToken]


@dataclass(eq=False)
class Scoring(Generic[_Done]):
    """A text that is scored.

    Attributes:
        passes: one step a forward pass.
        owner: whose it is. done: what ``passes`` returns.
    """

    passes: Generator[None, None, _Done]
    owner: str = ""
    done: Future[_Done] = field(default_factory=Future)


@dataclass(slots=True)
class _ScoredRow:
    """A text in a row of its own, which the next one of the same owner may continue."""

    owner: str
    ids: list[int]
    runner: Runner


class Scorer:
    """Scores one text at a time in a row of its own, which is allocated when it is first needed.

    ``laws`` keeps the last texts in rows of theirs, up to ``_HELD``, so that a text that grows is read once.

    Args:
        models: the target is asked. max_len: length of the row in tokens.
        chunk: maximum number of positions per forward pass.
    """

    def __init__(self, models: LoadedPair, max_len: int, chunk: int = 128) -> None:
        self._models, self._chunk = models, chunk
        self._max_len = min(max_len, models.target.context)
        self._runner: Runner | None = None
        self._held: list[_ScoredRow] = []  # the last used one at the end

    def scoring(self, ids: Sequence[int], top: int = 0, owner: str = "") -> Scoring[list[ScoredToken]]:
        """A text to score. A text is finished before the passes of the next one are begun.

        Raises:
            UserError: an empty text, token ids out of range, a text that is too long.
        """
        return Scoring(self._passes(self._checked(ids), min(top, self._models.vocab_size)), owner)

    def laws(self, ids: Sequence[int], start: int, owner: str = "") -> Scoring[Tensor]:
        """A text whose laws behind each token from ``start`` on are asked for, ``[len(ids) - start, V]`` float32.

        Each is the logarithm of the target's raw law. What the text shares with an earlier one of this owner is not
        read again.

        Raises:
            UserError: as ``scoring``; a ``start`` that is not in the text.
        """
        known = self._checked(ids)
        if not 0 <= start < len(known):
            raise UserError(f"start={start} is not a place in a text of {len(known)} tokens")
        return Scoring(self._laws(known, start, owner), owner)

    def unread(self, ids: Sequence[int], start: int, owner: str = "") -> int:
        """Number of tokens that ``laws`` would read now; may be asked in any thread."""
        shared = [common_prefix(one.ids, ids) for one in tuple(self._held) if one.owner == owner]
        return len(ids) - max(min(max(shared, default=0), start), 0)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        known = encode(list(ids), self._models)
        if len(known) > self._max_len:
            raise ContextLengthError(
                f"the text has {len(known)} tokens, and at most {self._max_len} can be scored: shorten it"
            )
        return known

    def _new_runner(self) -> Runner:
        model = self._models.target.model
        check_memory([model], 1, [self._max_len])
        return make_runner(model, batch=1, max_len=self._max_len)

    def _row_for(self, ids: Sequence[int], owner: str) -> _ScoredRow:
        """The row of this owner's text that shares most tokens with this one, or an empty one; no longer held."""

        def shared(one: _ScoredRow) -> int:
            return -1 if one.owner != owner else common_prefix(one.ids, ids)

        best = max(self._held, key=shared, default=None)
        if best is None or shared(best) < 1:
            best = self._held[0] if len(self._held) >= _HELD else _ScoredRow(owner, [], self._new_runner())
            best.owner, best.ids = owner, []
        if best in self._held:
            self._held.remove(best)  # not kept if a pass fails: its row may hold NaN
        return best

    @torch.inference_mode()
    def _laws(self, ids: list[int], start: int, owner: str) -> Generator[None, None, Tensor]:
        row, vocab = self._row_for(ids, owner), self._models.vocab_size
        at = min(common_prefix(row.ids, ids), start)
        row.runner.rewind([at])
        row.ids = ids[:at]
        found = []
        try:
            while at < len(ids):
                wanted = at >= start
                n = min(self._chunk, (len(ids) if wanted else start) - at)
                n = min(n, _positions(row.runner)) if wanted else n
                given = torch.tensor([ids[at : at + n]], device=row.runner.device)
                step = row.runner.extend(given, logits=wanted)
                if step.logits is not None:
                    found.append(torch.log_softmax(step.logits[0, :n, :vocab].float(), -1).cpu())
                    if found[-1].isnan().any():
                        raise SprinterError(_NOT_FINITE)
                at += n
                row.ids = ids[:at]
                yield
        except GeneratorExit:  # cancelled
            self._held.append(row)
            raise
        self._held.append(row)
        return torch.cat(found)

    def _passes(self, ids: list[int], top: int) -> Generator[None, None, list[ScoredToken]]:
        runner, self._runner = (
            self._runner or self._new_runner(),
            None,
        )  # not kept if a pass fails: its row may hold NaN
        runner.rewind([0])
        steps = score_texts(runner, [(ids[:1], ids[1:])], self._models.vocab_size, top, self._chunk)
        try:
            (found,) = yield from steps
        except GeneratorExit:  # cancelled
            self._runner = runner
            raise
        self._runner = runner
        best = zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
        named = [[TopToken(*one) for one in zip(names, values, strict=True)] for names, values in best]
        return [ScoredToken(*one) for one in zip(ids[1:], found.logprobs.tolist(), named, strict=True)]
