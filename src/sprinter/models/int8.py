"""Eight-bit weights on CPUs: ``dtype="int8"``.

A weight matrix is stored as integers with a scale per output channel. Activations are rounded per token to 16 bits, not
to eight, which would change the law by far more than the weights do: a 16-bit integer is 256·hi + lo with two 8-bit
integers, and both are rows of one integer product (oneDNN: AMX, VNNI, AVX2). Such a product reads the weights once
and takes as long for sixteen rows as for one, so that the second row costs little. Its sums are exact, so that the
result of a token does not depend on the other tokens of the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.fingerprint import count_as, weights_fingerprint

__all__ = ["INT8", "Int8Embedding", "Int8Linear", "check_products", "has_int8", "quantise"]

INT8 = "int8"
"""Name of the dtype."""
_STEPS = 127 * 256 + 127
"""Largest 16-bit integer of an activation: its two halves are in [-127, 127] and [-128, 127]."""
_TINY = 1e-30  # in place of a largest value of 0
_LEAST_SHARE = 0.5  # of the parameters in linear layers and the input embedding
_LEAST_ROWS = 4
"""oneDNN multiplies fewer rows with narrow matrices in its reference code, a hundred times slower."""


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights: float32 in, float32 out.

    Args:
        weight: ``[out, in]``. bias: ``[out]`` or None.
    """

    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        codes, scale = _codes(weight)
        self._packed = torch.ops.onednn.qlinear_prepack(codes, None)  # in the order that the processor reads
        self._zeros = torch.zeros(len(scale), dtype=torch.int32)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        rows = x.reshape(-1, self.in_features)
        halves, step = _halves(rows)
        sums = _product(halves, self._packed, self.scale, self._zeros)
        n = len(rows)
        made = torch.add(sums[n : 2 * n], sums[:n], alpha=256).mul_(step)
        if self.bias is not None:
            made += self.bias
        return made.view(*x.shape[:-1], self.out_features)


class Int8Embedding(nn.Module):
    """An embedding in bfloat16 that returns float32: rows are copied, not multiplied."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        # A buffer: a model's dtype is that of its first parameter.
        self.register_buffer("weight", weight.detach().bfloat16(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """``[...]`` -> ``[..., d]``."""
        return nn.functional.embedding(ids, self.weight).float()


def _product(rows: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """8-bit rows ``[n, in]`` times packed 8-bit weights, times the scales ``[out]``: exact sums, ``[n, out]`` float32.

    ``zeros``: the weights' zero points ``[out]``, int32.
    """
    call = torch.ops.onednn.qlinear_pointwise
    made: Tensor = call(rows, 1.0, 0, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return made


def _codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as 8-bit integers, and their scale ``[out]``; a chunk of rows at a time, to save memory."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(weight.shape[0])
    for start in range(0, len(weight), 4096):
        rows = slice(start, start + 4096)
        part = weight.detach()[rows].float()
        largest = part.abs().amax(1).clamp(min=_TINY)
        scale[rows] = largest / 127
        codes[rows] = (part * (127 / largest)[:, None]).round_().to(torch.int8)
    return codes, scale


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The high halves of all rows, then the low ones, ``[at least 2 n, in]`` int8; and the step ``[n, 1]``."""
    least, most = torch.aminmax(rows, dim=-1, keepdim=True)
    largest = torch.maximum(most, -least).clamp_(min=_TINY)
    n, whole = len(rows), (rows * (_STEPS / largest)).round_().to(torch.int16)
    halves = torch.zeros(max(_LEAST_ROWS, 2 * n), rows.shape[1], dtype=torch.int8)
    halves[:n] = (whole + 128) >> 8
    halves[n : 2 * n] = whole  # conversion keeps the low byte, in [-128, 127]
    return halves, largest / _STEPS


def has_int8(model: nn.Module) -> bool:
    """Whether a model has been quantised."""
    return any(isinstance(part, Int8Linear) for part in model.modules())


def quantise(model: PreTrainedModel) -> int:
    """Replace the linear layers and the input embedding of a model on a CPU, in place; what is left is in float32.

    The model keeps its fingerprint, so that gates and heads for it load. The weights that it had are freed one by one.

    Returns:
        The number of parameters that it had.

    Raises:
        UserError: the processor's integer products are wrong, the model is not on the CPU, its weights are mostly not
            in linear layers, or it does not run with them replaced.
    """
    name = model.name_or_path or type(model).__name__
    if model.device.type != "cpu":
        raise UserError(f"dtype int8 is for CPUs, and {name} is on {model.device}: use bfloat16")
    check_products()
    fingerprint, size = weights_fingerprint(model), sum(weights.numel() for weights in model.parameters())
    embedding = model.get_input_embeddings()
    layers = [part for part in model.modules() if type(part) is nn.Linear or part is embedding]
    ours: dict[int, nn.Parameter] = {id(layer.weight): layer.weight for layer in layers}  # type: ignore[misc]
    share = sum(weight.numel() for weight in ours.values()) / size
    del layers, ours
    if share < _LEAST_SHARE:
        raise UserError(
            f"dtype int8 is for models whose weights are in linear layers, and {share:.0%} of those of {name} are: use "
            "bfloat16"
        )
    model.float()  # type: ignore[no-untyped-call]
    made: dict[nn.Module, Int8Linear] = {}  # a layer that stands in two places stays one
    for parent in [part for part in model.modules() if any(map(_replaced, part.children()))]:
        for child, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                if layer not in made:
                    made[layer] = Int8Linear(layer.weight, layer.bias)
                    layer.weight = layer.bias = None  # type: ignore[assignment]
                setattr(parent, child, made[layer])
            elif type(layer) is nn.Embedding and layer is embedding:
                setattr(parent, child, Int8Embedding(layer.weight))
    try:
        with torch.inference_mode():
            model(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    except Exception as error:  # models' own code may read the weights that are gone
        raise UserError(
            f"{name} does not run with 8-bit layers ({type(error).__name__}: {error}): use bfloat16"
        ) from error
    count_as(model, fingerprint)
    return size


def _replaced(layer: nn.Module) -> bool:
    return type(layer) in (nn.Linear, nn.Embedding)


_checked: list[bool] = []


def check_products() -> None:
    """Compare an integer product of this processor with exact sums, once.

    Raises:
        UserError: they differ, as on processors whose 8-bit products saturate.
    """
    if _checked:
        return
    try:
        exact = _exact_products()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"this build of PyTorch has no 8-bit products ({error}): use dtype=bfloat16 or float32"
        ) from error
    if not exact:
        raise UserError("the 8-bit products of this processor are not exact: use dtype=bfloat16 or float32")
    _checked.append(True)


def _exact_products() -> bool:
    """Whether products of few and of many rows are those of 64-bit integers."""
    chance = torch.Generator().manual_seed(0)
    for wide, high in ((256, 40), (96, 257)):
        weight = torch.randint(-127, 128, (high, wide), generator=chance, dtype=torch.int8)
        weight[0] = 127  # with rows[0] a sum that would saturate
        packed = torch.ops.onednn.qlinear_prepack(weight, None), torch.ones(high), torch.zeros(high).int()
        for n in (_LEAST_ROWS, 33):
            rows = torch.randint(-128, 128, (n, wide), generator=chance, dtype=torch.int8)
            rows[0] = 127
            if not torch.equal(_product(rows, *packed).long(), rows.long() @ weight.long().T):
                return False
    return True
