"""Medusa's heads (Cai et al. 2024, arXiv 2401.10774): K heads on the target's last hidden state.

Head k, counted from 1, gives the law of the token k + 1 places after the one that the state was computed at, as the
target's output layer does for the next one. Each is residual blocks, h + SiLU(W h + b), and an output layer, its own or
the target's. Files: ``config.json`` and ``medusa_lm_head.safetensors``, with the names that the authors publish
(``0.0.linear.weight``, ``0.1.weight``, ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sprinter.errors import UserError
from sprinter.heads.drafting import OutputLayer, TextOfHeads, TokenHeads
from sprinter.heads.files import HeadFiles, fill, fitting
from sprinter.heads.reading import HeadFields

__all__ = ["MedusaHeads", "load_medusa"]

WEIGHTS = "medusa_lm_head.safetensors"
_PICKLE = "medusa_lm_head.pt"
_MOST = 64
"""Heads, and blocks of a head."""


class _Residual(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)  # SiLU(0) = 0: a new head is the target's own output layer
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = x + nn.functional.silu(self.linear(x))
        return turned


class MedusaHeads(TokenHeads):
    """K heads on the target's state after its final norm.

    Args:
        hidden_size, vocab_size, more: as in ``TokenHeads``.
        count: K. blocks: residual blocks of each head.
        shared: whether all heads end in the target's own output layer, which is not stored.
    """

    kind = "medusa"
    file_name = WEIGHTS

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        count: int = 3,
        blocks: int = 1,
        shared: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(hidden_size, vocab_size, **more)
        for name, value in (("count", count), ("blocks", blocks)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
                raise UserError(
                    f"{name}={value} of Medusa's heads is out of range: give a whole number in [1, {_MOST}]"
                )
        self.count, self.blocks, self.shared = count, blocks, shared
        self.heads = nn.ModuleList(
            nn.ModuleList(
                [_Residual(hidden_size) for _ in range(blocks)]
                + ([] if shared else [nn.Linear(hidden_size, vocab_size, bias=False)])
            )
            for _ in range(count)
        )

    def join(self, target: nn.Module) -> None:
        """Take the target's output layer if it is shared, and move beside the target."""
        self._output = [OutputLayer(target, self.vocab_size)] if self.shared else []
        self.move_beside(target)

    def turned(self, head: int, states: Tensor) -> Tensor:
        """The input of a head's output layer, ``[..., d]``; ``head`` counts from 0."""
        own = self.heads[head]
        assert isinstance(own, nn.ModuleList)
        for block in own[: self.blocks]:
            states = block(states)
        return states

    def head_logits(self, head: int, states: Tensor) -> Tensor:
        """Logits ``[..., V]`` of one head, counted from 0, on states ``[..., d]``."""
        own = self.heads[head]
        assert isinstance(own, nn.ModuleList)
        turned = self.turned(head, states.to(self.dtype))
        logits: Tensor = self._output[0](turned) if self.shared else own[self.blocks](turned)
        return logits

    @property
    def flops(self) -> float:
        """Of one head, its output layer included."""
        return 2.0 * self.hidden_size * (self.blocks * self.hidden_size + self.drafted)

    def begin(self) -> TextOfHeads:
        """The heads in a new text."""
        return _MedusaText(self)

    def file_config(self) -> dict[str, Any]:
        """Fields as the authors name them."""
        return {
            "medusa_num_heads": self.count,
            "medusa_num_layers": self.blocks,
            "base_model_name_or_path": self.target_id,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "shared_output": self.shared,
        }

    def file_weights(self) -> dict[str, Tensor]:
        """Weights under the published names."""
        return self.heads.state_dict()


class _MedusaText(TextOfHeads):
    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self._state: Tensor | None = None

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        self._state = states[-1][-1:]

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        head = len(paths[0])
        if head >= self._heads.count or self._state is None:
            return None
        self.steps, self.tokens = self.steps + 1, self.tokens + 1
        return self._heads.head_logits(head, self._state)


def load_medusa(files: HeadFiles) -> MedusaHeads:
    """Read heads from a folder, as this package or the authors of Medusa lay it out.

    Raises:
        UserError: weights are missing, damaged, or do not fit the config.
    """
    fields, weights = HeadFields(files), files.weights((WEIGHTS, "model.safetensors"), (_PICKLE,))
    weights = {name.removeprefix("medusa_head."): value for name, value in weights.items()}
    blocks, said = fields.whole("medusa_num_layers", 1, _MOST), fields.whole("medusa_num_heads", most=_MOST)
    # Published configs say 2 where the weights have 5 heads.
    stored = next(k for k in range(len(weights) + 1) if f"{k}.0.linear.weight" not in weights)
    shared = fields.switch("shared_output")
    with fitting("Medusa heads", files):
        first = _matrix(weights, "0.0.linear.weight")
        vocab = fields.whole("vocab_size") if shared else len(_matrix(weights, f"0.{blocks}.weight"))
        heads = MedusaHeads(
            first.shape[-1], vocab, max(stored, said), blocks, shared,
            **fields.of_target(fields.text("base_model_name_or_path")),
        )  # fmt: skip
        fill(heads.heads, weights, files.directory)
    return heads


def _matrix(weights: Mapping[str, Tensor], name: str) -> Tensor:
    found = weights[name]
    if found.ndim != 2:
        raise KeyError(name)
    return found
