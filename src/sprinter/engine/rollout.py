"""Rollouts for reinforcement learning: samples of the target's raw law, with their log-probabilities under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sprinter.engine.batch import generate_all
from sprinter.engine.generation import Generation
from sprinter.engine.options import GenerationOptions
from sprinter.engine.policy import Policy
from sprinter.engine.prompt import PromptInput
from sprinter.engine.runtime import PairRuntime
from sprinter.errors import SprinterError, UserError
from sprinter.parameters import Sampling
from sprinter.random import drawn_seed, sample_seed

__all__ = ["ROLLOUT_METHOD", "Rollout", "roll_out"]

ROLLOUT_METHOD = "suffix"
"""The method if none is given: texts are those of plain decoding at their seeds, whatever is drafted from."""

_OF_LAW = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_new_tokens",
    "response_format", "grammar", "regex", "choices",
)  # fmt: skip
"""Options beside those of sampling with which tokens are drawn from another law than the raw one."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample of a prompt.

    Attributes:
        prompt_ids: token ids of the prompt.
        token_ids: those of the sample, with the EOS or stop token that ended it.
        logprobs: ln p(token) of each, p being the target's raw law after all tokens before it: the softmax of its
            logits at temperature 1, nothing truncated, penalised or masked. The token was drawn from this law.
        generation: the text, counts, and the request, which repeats it.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    generation: Generation


def roll_out(
    runtime: PairRuntime,
    prompts: Sequence[PromptInput],
    n: int,
    options: GenerationOptions,
    rows: int | None,
    policy: Policy,
    memory_bytes: int | None,
) -> list[Rollout]:
    """See ``Pair.rollout``."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UserError(f"n={n!r} is out of range: give the number of samples of each prompt, at least 1")
    _check_law(options)
    seed = drawn_seed(options.seed)
    shared = options.replace(
        method=ROLLOUT_METHOD if options.method is None else options.method, require_lossless=True,
        logprobs=options.logprobs or 0,
    )  # fmt: skip
    each = [shared.replace(seed=sample_seed(seed, number)) for number in range(len(prompts) * n)]
    repeated = [prompt for prompt in prompts for _ in range(n)]
    return [_rollout(one) for one in generate_all(runtime, repeated, each, rows, policy, memory_bytes)]


def _check_law(options: GenerationOptions) -> None:
    """Refuse what changes the law that tokens are drawn from."""
    plain, default = GenerationOptions(), Sampling()
    pairs = [
        (name, getattr(options.sampling, name), getattr(default, name)) for name in Sampling.model_fields
    ]
    pairs += [(name, getattr(options, name), getattr(plain, name)) for name in _OF_LAW]
    for name, value, wanted in pairs:
        if value != wanted:
            raise UserError(
                f"{name}={value!r} draws tokens from another law than the target's raw one, whose log-probabilities a "
                f"rollout has: leave it out, or use generate(logprobs=0)"
            )


def _rollout(out: Generation) -> Rollout:
    known = [token.logprob for token in out.tokens if token.logprob is not None]
    if len(known) < len(out.tokens):
        raise SprinterError(f"method {out.method} has left tokens unscored: use another one for rollouts")
    return Rollout(out.prompt_ids, [token.id for token in out.tokens], known, out)
