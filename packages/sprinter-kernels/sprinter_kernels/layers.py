"""Matrices as the kernels read them, and layers over them: float32 in, float32 out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sprinter_kernels.layout import FORMATS, GROUP, Blocks, Format, eight_bits, four_bits
from sprinter_kernels.native import FLOATS, NUMBER, floats, native, pack, packed_size, room

__all__ = [
    "Matrix", "QuantisedEmbedding", "QuantisedLinear", "RoundedLinear", "Source", "parameter_count", "plain_matrix",
    "reads_in_place",
]  # fmt: skip

_MOST_CODE = 127
_ROUNDED = {8: (FORMATS["Q8_0"], eight_bits), 4: (FORMATS["Q4_1"], four_bits)}
"""Bits of a weight -> the kind that it is rounded to, and how."""
_ROWS, _THREADS = 1024, 4  # rows that are in float32 at a time, and threads that round at once
_KEPT = "a quantised model cannot be saved: save the one that it was made from"
_COLUMNS = 16  # of which rows in place are multiples


class Source(NamedTuple):
    """A matrix ``[high, width]`` before it is packed.

    Attributes:
        key: what tells it from others, and from other versions of itself.
        rows: some of its rows, in any dtype.
        kind: of the blocks that it is stored in, as GGUF names it; "": in none.
        blocks: rows of blocks, and the numbers of those that are its rows.
    """

    key: str
    high: int
    width: int
    rows: Callable[[slice], Tensor]
    kind: str = ""
    blocks: Callable[[], tuple[Blocks, NDArray[np.int64]]] | None = None


class Matrix:
    """A packed matrix. An input embedding and an output layer that are tied share one.

    Args:
        source: where it comes from. bits: of a rounded weight, 8 or 4; None: it stays as it is stored.

    Attributes:
        packed: as the kernel reads it. form: its kind.
        high: number of rows. padded: of columns. width: of those that are not padding.
    """

    packed: Tensor

    def __init__(self, source: Source, bits: int | None) -> None:
        self._source: Source | None = source
        self._round = None if bits is None else _ROUNDED[bits][1]
        self.form: Format = FORMATS[source.kind] if bits is None else _ROUNDED[bits][0]
        self.high, self.width = source.high, source.width
        self.padded = source.width + -source.width % GROUP
        self.size = packed_size(self.form, self.high, self.padded)
        self.facts = f"{source.key} {self.form.name} {self.high} {self.width}"

    def pack(self, made: Tensor | None = None) -> Tensor:
        """What is to be kept: in memory of ``size`` bytes, in ``made`` if it is given.

        Raises:
            ValueError: it cannot be rounded.
        """
        own: Any = self._source
        made = room(self.size) if made is None else made
        if self._round is None:
            blocks, order = own.blocks()
            return pack(blocks, self.form, order, made)

        def part(start: int) -> None:
            rows = own.rows(slice(start, start + _ROWS)).detach().float()
            blocks = self._round(nn.functional.pad(rows, (0, self.padded - self.width)).numpy())  # type: ignore[misc]
            begin = packed_size(self.form, start, self.padded)
            end = begin + packed_size(self.form, len(blocks), self.padded)
            pack(blocks, self.form, None, made[begin:end], threads=1)

        with ThreadPoolExecutor(
            min(_THREADS, torch.get_num_threads())
        ) as pool:  # NumPy works without the lock
            list(pool.map(part, range(0, self.high, _ROWS)))
        return made

    def keep(self, packed: Tensor | None = None) -> Self:
        """Take packed memory, or pack it now, and let go of the source."""
        self.packed, self._source = self.pack() if packed is None else packed, None
        return self

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
        some = Source("", len(whole), own.width, lambda part: own.rows(whole[part]))
        return QuantisedLinear(Matrix(some, 8).keep(), None if self.bias is None else self.bias[ids])


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
