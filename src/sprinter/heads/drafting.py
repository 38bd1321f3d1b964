"""Heads on the target that draft: what all kinds share.

They have no score in [0, 1] and are no ``Head``: they give laws of the next tokens. ``sprinter.decode.draft_heads``
says what drivers ask of them.
"""

from __future__ import annotations

import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.heads.files import WEIGHTS, write_files

__all__ = ["OutputLayer", "TextOfHeads", "TokenHeads", "linear_weights", "save_heads"]


class TextOfHeads(ABC):
    """Heads in one text, see ``sprinter.decode.draft_heads.HeadText``.

    Attributes:
        steps: forward passes so far. tokens: that they read.
    """

    steps: int = 0
    tokens: int = 0

    @abstractmethod
    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Go to a text of n tokens, given states ``[n − 1, d]`` of all but the last one, by layer."""

    @abstractmethod
    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        """Logits ``[m, V]``, or ``[1, V]`` for all, after the text and each path; None: beyond their reach."""


class TokenHeads(nn.Module, ABC):
    """Heads on a target that give laws of tokens to come.

    Args:
        hidden_size: of the target. vocab_size: rows of its output layer.
        target_id: name of the target that they were trained on.
        target_fingerprint: of its weights (``weights_fingerprint``); None: the files do not record it.
        accuracies: by number of tokens ahead, the share of positions (held out, if any are) at which the target's
            token had rank 0, 1, ... in the heads' law; (): not measured.

    Attributes:
        kind: one of ``DRAFTING_KINDS``.
        layers: decoder layers of the target whose states they read, from 0; -1: after the final norm.
        file_name: of their weights.
        id, revision: directory or hub id that they were loaded from, and the commit.
        device, dtype: of what they compute, set beside a target.
    """

    kind: str = ""
    layers: tuple[int, ...] = (-1,)
    file_name: str = WEIGHTS

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        target_id: str = "",
        target_fingerprint: str | None = None,
        accuracies: Sequence[Sequence[float]] = (),
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.target_id, self.target_fingerprint = target_id, target_fingerprint
        self.accuracies: Sequence[Sequence[float]] = tuple(tuple(row) for row in accuracies)
        self.id: str | None = None
        self.revision: str | None = None
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self._fingerprint: str | None = None  # of weights that were rounded since
        self._attached: weakref.ref[nn.Module] | None = None
        self._output: list[OutputLayer] = []  # the target's; in a list, as it is no part of this module

    @property
    def output(self) -> OutputLayer | None:
        """The target's output layer; None: they have their own, or are not joined with a target."""
        return self._output[0] if self._output else None

    @property
    def drafted(self) -> int:
        """Number of tokens that the output layer knows."""
        output = self.output
        return self.vocab_size if output is None or output.ids is None else len(output.ids)

    @property
    @abstractmethod
    def flops(self) -> float:
        """FLOPs of a step over one token: two for each weight of its linear layers."""

    @abstractmethod
    def begin(self) -> TextOfHeads:
        """The heads in a new text."""

    @abstractmethod
    def join(self, target: nn.Module) -> None:
        """Take what they share with the target's weights, and ``move_beside`` it.

        Raises:
            UserError: the target has no such weights.
        """

    @abstractmethod
    def file_config(self) -> dict[str, Any]:
        """Fields of config.json, beside those of ``save_heads``."""

    def file_weights(self) -> dict[str, Tensor]:
        """Weights by the names that files have."""
        return self.state_dict()

    def move_beside(self, target: nn.Module) -> None:
        """Move to the target's device; the dtype is that of ``dtype_beside``."""
        sample = next(iter(target.parameters()), torch.empty(0))
        self.device, self.dtype = sample.device, dtype_beside(sample)
        self.to(self.device, self.dtype)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all own weights; of those that were rounded since, as they were before."""
        if self._fingerprint is not None:
            return self._fingerprint
        digest = hashlib.sha256(self.kind.encode())
        for name, values in sorted(self.state_dict().items()):
            digest.update(f"{name}{tuple(values.shape)}{values.dtype}".encode())
            digest.update(values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def is_attached(self) -> bool:
        """Whether they draft for a model that is still there."""
        return self._attached is not None and self._attached() is not None

    def keep_fingerprint(self) -> None:
        """Have the fingerprint of now from now on: the weights are about to be rounded."""
        self._fingerprint = self.fingerprint

    def attach(self, target: nn.Module, id: str, hidden_size: int, vocab_size: int) -> None:
        """Make ready to draft for a target.

        Args:
            target: its model. id: its name, for messages. hidden_size: of its states.
            vocab_size: rows of its output layer, padded ones included.

        Raises:
            UserError: they were made for another target, or draft for another model already.
        """
        for name, own, there in (
            ("hidden size", self.hidden_size, hidden_size),
            ("vocabulary", self.vocab_size, vocab_size),
        ):
            if own != there:
                raise UserError(
                    f"these {self.kind} heads are for a target of {name} {own} ('{self.target_id}'), and that of "
                    f"'{id}' is {there}: give the heads of this target"
                )
        if self.target_fingerprint is not None and self.target_fingerprint != weights_fingerprint(target):
            raise UserError(
                f"these {self.kind} heads were trained on another target ('{self.target_id}') than '{id}': give the "
                "heads of this target, or train some with 'sprinter draft train'"
            )
        if self._attached is not None and self._attached() not in (None, target):
            raise UserError(
                f"these {self.kind} heads draft for another model already, whose layers they share: reload them for "
                f"'{id}'"
            )
        self.join(target)
        self._attached = weakref.ref(target)
        self.requires_grad_(False)
        self.train(False)


def save_heads(heads: TokenHeads, directory: Path, card: str, facts: Mapping[str, Any] | None = None) -> None:
    """Write heads as their authors lay them out; weights in bfloat16.

    Args:
        facts: further fields of config.json.

    Raises:
        UserError: the directory cannot be written.
    """
    config = {
        **heads.file_config(),
        "target_fingerprint": heads.target_fingerprint,
        "accuracies": [[round(value, 4) for value in row] for row in heads.accuracies],
        **(facts or {}),
    }
    weights = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in heads.file_weights().items()
    }
    write_files(directory, weights, config, card, heads.file_name)


def dtype_beside(weight: Tensor) -> torch.dtype:
    """The dtype of heads beside a target with such weights: theirs, but float32 for half precision on a CPU."""
    half = weight.device.type == "cpu" and weight.dtype != torch.float64
    return weight.dtype if weight.is_floating_point() and not half else torch.float32


def linear_weights(module: nn.Module) -> int:
    """Number of weights in the linear layers of a module, quantised ones included."""
    parts: list[Any] = [one for one in module.modules() if hasattr(one, "in_features")]
    return sum(one.in_features * one.out_features for one in parts)


class OutputLayer:
    """The output layer of a target, and what the target does to its logits: those of Granite and Cohere are scaled,
    those of Gemma 2 are bounded.

    Args:
        target: a causal language model of transformers. size: number of its logits, V.

    Attributes:
        layer: its module. scale: what its outputs are multiplied by. bound: of logits, in absolute value; None: none.
        ids: ``[k]`` the tokens that the layer knows, if these are not all.

    Raises:
        UserError: the model has no output layer.
    """

    def __init__(self, target: nn.Module, size: int) -> None:
        get = getattr(target, "get_output_embeddings", None)
        layer = None if get is None else get()
        if not isinstance(layer, nn.Module):
            raise UserError(
                "this target gives no access to its output layer, which the heads share: use heads with their own"
            )
        whole: Any = getattr(target, "config", None)
        config = whole.get_text_config(decoder=True) if hasattr(whole, "get_text_config") else whole
        self.layer, self.size = layer, size
        self.scale = float(
            (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        )
        self.bound: float | None = getattr(config, "final_logit_softcapping", None)
        self.ids: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Logits ``[..., V]`` of states ``[..., d]`` in the dtype of heads; −inf for tokens that it does not know."""
        weight = getattr(self.layer, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            x = x.to(weight.dtype)
        logits: Tensor = self.layer(x)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.bound is not None:
            logits = self.bound * torch.tanh(logits / self.bound)
        if self.ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        whole[..., self.ids] = logits
        return whole

    def keep(self, ids: Tensor, layer: nn.Module) -> None:
        """Know some tokens alone: ``layer`` gives the logits of ``ids`` ``[k]``, and those of all others are −inf."""
        self.ids, self.layer = ids, layer
