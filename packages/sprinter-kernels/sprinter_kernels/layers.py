"""Matrices as the kernels read them, and layers over them: float32 in, float32 out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sprinter_kernels.layout import Codes, Format, eight_bits, joined
from sprinter_kernels.native import FLOATS, NUMBER, floats, native, pack_codes, packed_size

__all__ = [
    "ROWS", "Matrix", "QuantisedEmbedding", "QuantisedLinear", "RoundedLinear", "parameter_count", "plain_matrix",
    "reads_in_place",
]  # fmt: skip

_MOST_CODE = 127
ROWS = 4096
"""Rows of a matrix that are in float32 at a time, where it is rounded."""
_KEPT = "a quantised model cannot be saved: save the one that it was made from"
_COLUMNS = 16  # of which rows in place are multiples


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
        return cls(pack_codes(codes), codes.form, high, padded, padded if width is None else width)

    def native(
        self, first: int = 0, rows: int = 0, run: int = 0, step: int = 0, bias: Tensor | None = None
    ) -> Any:
        """Some rows for the kernels, valid as long as this lives; all if ``rows`` is 0.

        Args:
            first: the first of them. rows: their number. run, step: they come in runs of so many, which begin so many
                apart; each begins a block of channels. bias: of the whole matrix, float32.
        """
        rows = rows or self.high
        more = 0 if bias is None else bias.data_ptr() + first * bias.element_size()
        at = self.packed.data_ptr() + packed_size(self.form, first, self.padded)
        return native().Matrix(NUMBER[self.form.name], at, rows, self.padded, more, run or rows, step or rows)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows ``ids`` ``[n]`` int64, contiguous, as float32 ``[n, width]``."""
        made = floats(len(ids), self.padded)
        native().rows(self.native(), ids.data_ptr(), len(ids), made.data_ptr())
        return made[:, : self.width]

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[n, width]`` -> ``[n, high]``."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError(
                "quantised layers have no gradients: train on the model that they were made from"
            )
        x = nn.functional.pad(x.float(), (0, self.padded - self.width)).contiguous()
        made = floats(len(x), self.high)
        native().linear(
            self.native(bias=bias), x.data_ptr(), len(x), made.data_ptr(), torch.get_num_threads()
        )
        return made

    def __deepcopy__(self, memo: object) -> Matrix:
        return self  # it never changes

    def __reduce__(self) -> Any:
        raise TypeError(_KEPT)


def plain_matrix(part: nn.Module) -> Tensor | None:
    """The weights ``[out, in]`` of a linear layer, or of transformers' ``Conv1D``; None: it is neither."""
    if type(part) is nn.Linear:
        return part.weight
    return part.weight.t() if type(part) is Conv1D else None


def reads_in_place(part: nn.Module) -> bool:
    """Whether the kernels can read the weights of a layer where they are."""
    weight = plain_matrix(part)
    if weight is None or type(part.weight.data) is not Tensor:
        return False
    fits = weight.dtype in FLOATS and weight.device.type == "cpu" and weight.is_contiguous()
    return fits and weight.shape[1] % _COLUMNS == 0


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
        return own.product(x.reshape(-1, own.width), self.bias).view(*x.shape[:-1], own.high)

    def some_rows(self, ids: Tensor) -> QuantisedLinear:
        """A layer with the outputs ``ids`` ``[k]`` alone, in 8 bits."""
        own, whole = self._matrix, ids.cpu().to(torch.int64).contiguous()
        pad = (0, own.padded - own.width)
        parts = [
            eight_bits(nn.functional.pad(own.rows(some), pad).numpy()) for some in torch.split(whole, ROWS)
        ]
        bias = None if self.bias is None else self.bias[ids]
        return QuantisedLinear(Matrix.of_codes(joined(parts), own.width), bias)


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
        made = own.rows(flat)
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
