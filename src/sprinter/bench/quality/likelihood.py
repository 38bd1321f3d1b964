"""Log-likelihood of texts under the target, in batches and prefill chunks of bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sprinter.engine.pair import Pair
from sprinter.engine.scoring import GivenText, finished, score_texts
from sprinter.errors import UserError
from sprinter.models.choose import make_runner, runner_kind

__all__ = ["log_likelihoods", "perplexity"]

_MOST = 700.0  # e^700 is still a float64


def log_likelihoods(pair: Pair, texts: Sequence[GivenText], *, batch: int = 8) -> list[Tensor]:
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
        (i for i, (_, new) in enumerate(texts) if len(new)), key=lambda i: tuple(map(len, texts[i]))
    )
    for at in range(0, len(order), rows):
        part = [texts[i] for i in order[at : at + rows]]
        size = max(len(prompt) + len(new) for prompt, new in part) - 1
        runner = make_runner(target.model, batch=len(part), max_len=size)
        scored = finished(score_texts(runner, part, pair.models.vocab_size))
        for i, one in zip(order[at : at + rows], scored, strict=True):
            results[i] = one.logprobs
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
