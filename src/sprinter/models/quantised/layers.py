"""Layers with quantised weights: float32 in, float32 out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sprinter.models.quantised.layout import Codes, Format, eight_bits, joined
from sprinter.models.quantised.library import NUMBER, MatrixFacts, kernel

__all__ = [
    "ROWS",
    "Matrix",
    "QuantisedEmbedding",
    "QuantisedLinear",
    "RoundedLinear",
    "is_quantised",
    "parameter_count",
    "plain_matrix",
    "without_gradient",
]

_MOST_CODE = 127
ROWS = 4096
"""Rows of a matrix that are in float32 at a time, where it is rounded."""
_KEPT = "a quantised model cannot be saved: save the one that it was made from"


class Matrix:
    """A packed matrix. An input embedding and an output layer that are tied share one.

    Attributes:
        packed: as the kernel reads it. form: its kind.
        high: number of rows. padded: of columns. width: of those that are not padding.
    """

    def __init__(self, packed: Tensor, form: Format, high: int, padded: int, width: int) -> None:
        self.packed, self.form = packed, form
        self.high, self.padded, self.width = high, padded, width

    @classmethod
    def of_codes(cls, codes: Codes, width: int | None = None) -> Self:
        """A matrix of codes ``[out, in]``; ``width`` None: no column is padding."""
        high, padded = codes.codes.shape
        return cls(kernel().pack(codes), codes.form, high, padded, padded if width is None else width)

    def __deepcopy__(self, memo: object) -> Matrix:
        return self  # it never changes

    def __reduce__(self) -> Any:
        raise TypeError(_KEPT)


def without_gradient(x: Tensor) -> Tensor:
    """The same activations in float32.

    Raises:
        RuntimeError: a gradient is wanted, which the kernels do not make.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            "quantised and compiled layers have no gradients: train on the model that they were made from, or load it "
            "with compile=False"
        )
    return x.float()


def plain_matrix(part: nn.Module) -> Tensor | None:
    """The weights ``[out, in]`` of a linear layer, or of transformers' ``Conv1D``; None: it is neither."""
    if type(part) is nn.Linear:
        return part.weight
    return part.weight.t() if type(part) is Conv1D else None


class _Quantised(nn.Module):
    """A layer over a matrix, which stays where and what it is."""

    _matrix: Matrix

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self  # .to(bfloat16) and the like are for the other layers

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise TypeError(_KEPT)


class QuantisedLinear(_Quantised):
    """A linear layer. A token's result does not depend on the other tokens of a forward pass, to the bit.

    Args:
        matrix: the weights ``[out, in]``. bias: ``[out]`` or None.
    """

    bias: Tensor | None

    def __init__(self, matrix: Matrix, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.high, matrix.width
        self._matrix = matrix
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        own = self._matrix
        rows = without_gradient(x).reshape(-1, own.width)
        if own.padded != own.width:
            rows = nn.functional.pad(rows, (0, own.padded - own.width))
        made = kernel().product(own.packed, own.form, own.high, rows.contiguous(), self.bias)
        return made.view(*x.shape[:-1], own.high)

    def some_rows(self, ids: Tensor) -> QuantisedLinear:
        """A layer with the outputs ``ids`` ``[k]`` alone, in 8 bits."""
        own, whole = self._matrix, ids.cpu().to(torch.int64).contiguous()
        parts = [
            eight_bits(kernel().rows(own.packed, own.form, own.padded, some).numpy())
            for some in torch.split(whole, ROWS)
        ]
        bias = None if self.bias is None else self.bias[ids]
        return QuantisedLinear(Matrix.of_codes(joined(parts), own.width), bias)

    def facts(self, first: int, rows: int, run: int, step: int) -> MatrixFacts:
        """Where the numbers of some rows are, for the kernels; valid as long as it lives.

        Args:
            first: the first of them. rows: their number. run, step: they come in runs of so many, which begin so many
                apart; each begins a block (``CHANNELS``).
        """
        own, bias = self._matrix, None
        if self.bias is not None:
            bias = self.bias.data_ptr() + first * self.bias.element_size()
        at = own.packed.data_ptr() + kernel().size(own.form, first, own.padded)
        return MatrixFacts(NUMBER[own.form.name], at, rows, own.padded, bias, run, step)


class QuantisedEmbedding(_Quantised):
    """An embedding.

    Args:
        matrix: the weights ``[words, d]``. scale: factor of all rows.
    """

    def __init__(self, matrix: Matrix, scale: float = 1.0) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = matrix.high, matrix.width
        self._matrix, self._scale = matrix, scale

    def forward(self, ids: Tensor) -> Tensor:
        """``[...]`` -> ``[..., d]``.

        Raises:
            IndexError: an id has no row.
        """
        own, flat = self._matrix, ids.reshape(-1).to(torch.int64).contiguous()
        if len(flat):
            least, most = torch.aminmax(flat)
            if int(least) < 0 or int(most) >= own.high:
                raise IndexError(
                    f"token ids go from {int(least)} to {int(most)}, and there are {own.high} rows"
                )
        made = kernel().rows(own.packed, own.form, own.padded, flat)[:, : own.width]
        if self._scale != 1.0:
            made = made * self._scale
        return made.reshape(*ids.shape, own.width)


class RoundedLinear(nn.Module):
    """A linear layer of 8 bits on a GPU.

    Args:
        codes: ``[out, in]``, int8. scale: ``[out]``, float32: a weight is its code times its row's scale.
        bias: ``[out]`` or None.
    """

    codes: Tensor
    scale: Tensor

    def __init__(self, codes: Tensor, scale: Tensor, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.bias = bias

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, bias: nn.Parameter | None = None) -> Self:
        """Of weights ``[out, in]``, rounded.

        Raises:
            ValueError: a weight is not finite.
        """
        rows = weight.detach().float()
        scale = (rows.abs().amax(1) / _MOST_CODE).clamp(min=torch.finfo(torch.float32).tiny)
        if not bool(torch.isfinite(scale).all()):
            raise ValueError("a weight is not finite")
        return cls((rows / scale[:, None]).round_().to(torch.int8), scale, bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        scale = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scale = scale.to(self.scale.device)  # stays in float32
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise TypeError(_KEPT)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        made = nn.functional.linear(x, self.codes.to(x.dtype)).float() * self.scale
        return (made if self.bias is None else made + self.bias.float()).to(x.dtype)

    def some_rows(self, ids: Tensor) -> RoundedLinear:
        """A layer with the outputs ``ids`` ``[k]`` alone."""
        bias = None if self.bias is None else nn.Parameter(self.bias.detach()[ids], requires_grad=False)
        return RoundedLinear(self.codes[ids], self.scale[ids], bias)


def is_quantised(model: nn.Module) -> bool:
    """Whether a model has such layers."""
    return any(isinstance(part, QuantisedLinear) for part in model.modules())


def parameter_count(model: nn.Module) -> int:
    """Number of parameters; quantised ones count as what they were."""
    parts = [part for part in model.modules() if isinstance(part, QuantisedLinear | QuantisedEmbedding)]
    matrices = {id(part._matrix): part._matrix.high * part._matrix.width for part in parts}
    rounded = [part.codes.numel() for part in model.modules() if isinstance(part, RoundedLinear)]
    biases = [
        part.bias.numel() for part in parts if isinstance(part, QuantisedLinear) and part.bias is not None
    ]
    plain = [weights.numel() for weights in model.parameters()]
    return sum([*plain, *rounded, *matrices.values(), *biases])
