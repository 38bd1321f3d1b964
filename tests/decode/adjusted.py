"""A second definition of the logits processors, written for one position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sprinter.decode.adjust import Adjustments


def adjusted(settings: Adjustments, prompt: Sequence[int], new: Sequence[int], logits: Tensor) -> Tensor:
    """Logits ``[V]`` after a prompt and new tokens, one number at a time."""
    found, text = logits.tolist(), [*prompt, *new]
    for id, bias in settings.logit_bias:
        found[id] += bias
    for id in range(len(found)):
        if id in text:
            penalty = settings.repetition_penalty
            found[id] = found[id] * penalty if found[id] < 0 else found[id] / penalty
        times = list(new).count(id)
        found[id] -= settings.frequency_penalty * times + settings.presence_penalty * (times > 0)
    ends = settings.ends if len(new) < settings.min_new_tokens else ()
    words = [w for w in settings.bad_words if len(w) == 1 or text[1 - len(w) :] == list(w[:-1])]
    for id in (*ends, *(word[-1] for word in words)):
        found[id] = -torch.inf
    return torch.tensor(found, dtype=logits.dtype)
