"""GRPO with TRL, whose completions Sprinter writes: two steps on the built-in pair, on a CPU.

pip install trl, then: python examples/trl/grpo.py. TRL 1.16 calls ``rollout_func(prompts, trainer)`` with each prompt
``num_generations`` times in a row, and takes token ids and log-probabilities from it; it warns that this may change.
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import sprinter

PROMPTS = [
    "Once upon a time, there was a little",
    "The river rises in",
    "One day, a boy found a",
    "The old man said",
]


class Rollouts:
    """A trainer's ``rollout_func``. The pair keeps its draft and what it has seen; its target follows the trainer."""

    def __init__(self, pair: sprinter.Pair, max_new_tokens: int) -> None:
        self.pair, self._new, self._step = pair, max_new_tokens, 0
        self.target_calls, self.largest_difference = list[int](), 0.0

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        step = trainer.state.global_step
        model = trainer.accelerator.unwrap_model(trainer.model)
        if step != self._step:
            self.pair.reload(model.state_dict())
            self._step = step
        made = self.pair.rollout(prompts, 1, max_new_tokens=self._new, seed=step)
        self.target_calls.append(sum(one.generation.stats.target_calls for one in made))
        self.largest_difference = max(self.largest_difference, *(_difference(model, one) for one in made))
        return {
            "prompt_ids": [one.prompt_ids for one in made],
            "completion_ids": [one.token_ids for one in made],
            "logprobs": [one.logprobs for one in made],
        }


@torch.no_grad()
def _difference(model: Any, one: sprinter.Rollout) -> float:
    """How far a sample's log-probabilities are from the trainer's own; a check, which the hook does not need."""
    text = torch.tensor([one.prompt_ids + one.token_ids], device=model.device)
    laws = torch.log_softmax(model(input_ids=text).logits[0].float(), -1)
    own = laws[len(one.prompt_ids) - 1 : -1].gather(-1, text[0, len(one.prompt_ids) :, None])[:, 0]
    return float((own.cpu() - torch.tensor(one.logprobs)).abs().max())


def short_words(completions: list[str], **_: Any) -> list[float]:
    """A reward that is quick to learn: the share of words of at most four letters."""
    words = [text.split() for text in completions]
    return [sum(len(word) <= 4 for word in each) / max(len(each), 1) for each in words]


def main(out: str = "grpo-out", steps: int = 2) -> None:
    """Train, and print what the rollouts took."""
    pair = sprinter.load_pair(dtype="float32")
    policy = AutoModelForCausalLM.from_pretrained(sprinter.builtin_paths()["target"], dtype=torch.float32)
    rollouts = Rollouts(pair, max_new_tokens=32)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=short_words,
        processing_class=pair.tokenizer,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        rollout_func=rollouts,
        args=GRPOConfig(
            output_dir=out, max_steps=steps, per_device_train_batch_size=8, num_generations=4, learning_rate=1e-4,
            max_completion_length=32, bf16=False, use_cpu=True, report_to=[], logging_steps=1, save_strategy="no",
            disable_tqdm=True,
        ),
    )  # fmt: skip
    before = policy.lm_head.weight.detach().clone()
    trainer.train()
    print(f"target calls of each step: {rollouts.target_calls}")
    print(
        f"largest difference of a log-probability from the trainer's own: {rollouts.largest_difference:.1e}"
    )
    print(
        f"weights changed: {not torch.equal(before, policy.lm_head.weight)}; reloaded at step {rollouts._step}"
    )


if __name__ == "__main__":
    main()
