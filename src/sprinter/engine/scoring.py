"""Log-probabilities of given texts under the target's raw law, in forward passes of bounded memory."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.decode.draft import TopToken
from sprinter.engine.prompt import encode
from sprinter.errors import ContextLengthError, SprinterError
from sprinter.models.choose import make_runner
from sprinter.models.interface import Runner
from sprinter.models.memory import check_memory
from sprinter.models.pair import LoadedPair
from sprinter.models.runners.forward import CHUNK

__all__ = ["GivenText", "ScoredText", "ScoredToken", "Scorer", "Scoring", "finished", "score_texts"]

GivenText = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, at least one, and those of its continuation, which are scored."""

_MEMORY_BYTES = 128 * 2**20  # for the logits of a chunk and their copies
_COPIES = 3  # logits, logits in float32, log-probabilities
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
        raise SprinterError(
            "the target's logits along a given text are not finite: try dtype=float32, and check the weights"
        )
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
class Scoring:
    """A text that is scored.

    Attributes:
        passes: one step a forward pass; it returns one ``ScoredToken`` for each token of the text but the first.
        owner: whose it is. done: what ``passes`` returns.
    """

    passes: Generator[None, None, list[ScoredToken]]
    owner: str = ""
    done: Future[list[ScoredToken]] = field(default_factory=Future)


class Scorer:
    """Scores one text at a time in a row of its own, which is allocated when it is first needed.

    Args:
        models: the target is asked. max_len: length of the row in tokens.
        chunk: maximum number of positions per forward pass.
    """

    def __init__(self, models: LoadedPair, max_len: int, chunk: int = 128) -> None:
        self._models, self._chunk = models, chunk
        self._max_len = min(max_len, models.target.context)
        self._runner: Runner | None = None

    def scoring(self, ids: Sequence[int], top: int = 0, owner: str = "") -> Scoring:
        """A text to score. A text is finished before the passes of the next one are begun.

        Raises:
            UserError: an empty text, token ids out of range, a text that is too long.
        """
        known = encode(list(ids), self._models)
        if len(known) > self._max_len:
            raise ContextLengthError(
                f"the text has {len(known)} tokens, and at most {self._max_len} can be scored: shorten it"
            )
        return Scoring(self._passes(known, min(top, self._models.vocab_size)), owner)

    def _passes(self, ids: list[int], top: int) -> Generator[None, None, list[ScoredToken]]:
        model = self._models.target.model
        if self._runner is None:
            check_memory([model], 1, [self._max_len])
            self._runner = make_runner(model, batch=1, max_len=self._max_len)
        runner, self._runner = self._runner, None  # not kept if a pass fails: its row may hold NaN
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
