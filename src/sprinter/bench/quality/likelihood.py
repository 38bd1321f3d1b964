"""Log-likelihood of texts under the target, in batches and prefill chunks of bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sprinter.engine.pair import Pair
from sprinter.errors import SprinterError, UserError
from sprinter.models.choose import make_runner, runner_kind
from sprinter.models.interface import Runner
from sprinter.models.runners.forward import CHUNK

__all__ = ["log_likelihoods", "perplexity"]

JudgedText = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and those of its continuation."""

_MEMORY_BYTES = 128 * 2**20  # for the logits of a chunk and their copies
_COPIES = 3  # logits, logits in float32, log-probabilities
_LEAST = -1e4  # replaces ln 0, so that sums stay finite
_MOST = 700.0  # e^700 is still a float64


def log_likelihoods(pair: Pair, texts: Sequence[JudgedText], *, batch: int = 8) -> list[Tensor]:
    """ln p(token | prefix) of each new token, under the target's raw law (temperature 1, no truncation).

    Logits are converted to float32. Padding of the vocabulary is dropped, as in decoding. ln 0 is reported as −10,000.

    Args:
        pair: pair with the target.
        texts: prompt (at least one id) and new ids of each text.
        batch: texts per forward pass; 1 for models that decode one row at a time.

    Returns:
        ``[n]`` float64 on the CPU for each text, in the given order.

    Raises:
        UserError: an empty prompt, an id out of range, a text beyond the target's context.
        SprinterError: the target's logits are not finite.
    """
    target = pair.models.target
    for prompt, new in texts:
        _check(pair, prompt, new)
    rows = 1 if runner_kind(target.model)[0] == "crop" else batch
    results = [torch.zeros(0, dtype=torch.float64)] * len(texts)
    # Batch prompts of similar length: no logits are needed before the end of the shortest prompt.
    order = sorted(
        (i for i, text in enumerate(texts) if len(text[1])), key=lambda i: tuple(map(len, texts[i]))
    )
    for at in range(0, len(order), rows):
        part = [texts[i] for i in order[at : at + rows]]
        size = max(len(prompt) + len(new) for prompt, new in part) - 1
        runner = make_runner(target.model, batch=len(part), max_len=size)
        for i, values in zip(
            order[at : at + rows], _score(runner, part, pair.models.vocab_size), strict=True
        ):
            results[i] = values
    return results


def perplexity(log_likelihood: float, tokens: int) -> float:
    """exp(−log-likelihood / tokens), bounded so that it is finite."""
    return math.exp(min(-log_likelihood / tokens, _MOST))


def _check(pair: Pair, prompt: Sequence[int], new: Sequence[int]) -> None:
    context, vocab = pair.models.target.context, pair.models.vocab_size
    if not len(prompt):
        raise UserError("a likelihood needs a prompt: give at least one token before the answer")
    if len(prompt) + len(new) > context:
        raise UserError(
            f"{len(prompt)} prompt tokens and an answer of {len(new)} exceed the target's context, {context} tokens: "
            "ask for fewer new tokens"
        )
    outside = [id for id in (*prompt, *new) if not 0 <= id < vocab]
    if outside:
        raise UserError(f"token id {outside[0]} is out of range: the vocabulary has {vocab} tokens")


@torch.inference_mode()
def _score(runner: Runner, texts: Sequence[JudgedText], vocab: int) -> list[Tensor]:
    """Score a batch of texts, chunk by chunk; the last token of a text is not fed."""
    whole = [[*prompt, *new] for prompt, new in texts]
    fed = [len(ids) - 1 for ids in whole]
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in texts])  # first position whose logits are needed
    width = max(fed)
    ids = torch.tensor([row + [0] * (width + 1 - len(row)) for row in whole])
    ends = torch.tensor(fed)
    parts: list[list[Tensor]] = [[] for _ in texts]
    at = 0
    while at < width:
        silent = int(starts.min()) - at
        n = min(silent, CHUNK) if silent > 0 else min(_positions(runner), CHUNK, width - at)
        counts = (ends - at).clamp(0, n).tolist()
        step = runner.extend(ids[:, at : at + n].to(runner.device), counts, logits=silent <= 0)
        if step.logits is not None:
            places = torch.arange(at, at + n)
            chosen = (places >= starts[:, None]) & (places < ends[:, None])
            values = _chosen(step.logits, chosen, ids[:, at + 1 : at + n + 1], vocab)
            for part, own in zip(parts, torch.split(values, chosen.sum(1).tolist()), strict=True):
                part.append(own)
        at += n
    return [torch.cat(part) for part in parts]


def _positions(runner: Runner) -> int:
    """Number of positions per chunk, limited by the memory for logits."""
    return max(1, _MEMORY_BYTES // (_COPIES * 4 * runner.batch * runner.vocab_size))


def _chosen(logits: Tensor, chosen: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    """ln p of the tokens at the chosen positions, row by row. All arguments are ``[batch, n, ...]``."""
    there = chosen.to(logits.device)
    logs = torch.log_softmax(logits[there][:, :vocab].float(), -1)
    values = logs.gather(-1, tokens[chosen].to(logits.device)[:, None])[:, 0].cpu().double()
    if values.isnan().any():
        raise SprinterError(
            "the target's logits along an answer are not finite: try dtype=float32, and check the weights"
        )
    return values.clamp(min=_LEAST)
