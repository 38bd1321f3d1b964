"""The networks of the heads: features ``[..., n]`` -> logit ``[...]``.

============  ====================================================================================================
linear        w · x + b: the gate of the SPRINTER paper, n + 1 parameters
mlp           ``layers`` hidden layers (linear, SiLU) of ``width`` units, then linear
ffn           the same with ReLU: DISCO's feed-forward net (Mamou et al. 2024), two linear layers
resnet        ``layers`` blocks x + SiLU(W x + b), each with its own weights, then two logits (SpecDec++, Huang et
              al. 2024; its code repeats one block, so that all share their weights)
============  ====================================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from sprinter.errors import UserError, did_you_mean

__all__ = ["ARCHITECTURES", "Linear", "Network", "Perceptron", "ResNet", "build_network"]


class Network(nn.Module, ABC):
    """A network with one output, a logit. ``inputs``: number of inputs n."""

    inputs: int

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """``[..., n]`` float32 -> logits ``[...]``."""

    @abstractmethod
    def fold(self, mean: Tensor, spread: Tensor) -> None:
        """Fold the standardisation ``(x - mean) / spread`` used in training into the weights, so that it reads raw x.

        Args:
            mean, spread: ``[n]``.
        """

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(weights.numel() for weights in self.parameters())

    @property
    def flops(self) -> float:
        """FLOPs of one score: one multiplication and one addition per weight of every linear layer."""
        return 2.0 * sum(weights.numel() for weights in self.parameters() if weights.dim() == 2)


def _absorb(weight: Tensor, bias: Tensor, mean: Tensor, spread: Tensor) -> None:
    with torch.no_grad():
        weight /= spread
        bias -= weight @ mean


class Linear(Network):
    """w · x + b, with ``weight [1, n]`` and ``bias [1]``, initialised to zero: logistic regression is convex."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.weight = nn.Parameter(torch.zeros(1, inputs))
        self.bias = nn.Parameter(torch.zeros(1))

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> Linear:
        """The network with these weights ``[1, n]`` and ``[1]``."""
        made = cls(weight.shape[1])
        made.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
        return made

    def forward(self, x: Tensor) -> Tensor:
        """``[..., n]`` float32 -> logits ``[...]``."""
        return x @ self.weight[0] + self.bias[0]

    def fold(self, mean: Tensor, spread: Tensor) -> None:
        """Fold into the only layer, exactly."""
        _absorb(self.weight, self.bias, mean, spread)


class Perceptron(Network):
    """Multi-layer perceptron with one output.

    Args:
        inputs: number of inputs n.
        width: units of each hidden layer.
        layers: number of hidden layers, at least one.
        activation: activation of the hidden layers.
    """

    def __init__(self, inputs: int, width: int, layers: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        sizes = [inputs, *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(width, 1)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """``[..., n]`` float32 -> logits ``[...]``."""
        for layer in self.layers:
            x = self._activation(layer(x))
        logit: Tensor = self.out(x)
        return logit.squeeze(-1)

    def fold(self, mean: Tensor, spread: Tensor) -> None:
        """Fold into the first layer, exactly."""
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        _absorb(first.weight, first.bias, mean, spread)


class ResNet(Network):
    """Residual blocks of the input's size.

    The skip connection carries x itself, so the standardisation cannot be folded into weights: it is the first step.

    Args:
        inputs: number of inputs n.
        layers: number of residual blocks.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, inputs: int, layers: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.blocks = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(layers))
        self.out = nn.Linear(inputs, 2)
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("spread", torch.ones(inputs))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., n]`` float32 -> logits ``[...]``: softmax over (rejected, kept) is a sigmoid of the difference."""
        x = (x - self.mean) / self.spread
        for block in self.blocks:
            x = x + nn.functional.silu(block(x))
        both: Tensor = self.out(x)
        return both[..., 1] - both[..., 0]

    def fold(self, mean: Tensor, spread: Tensor) -> None:
        """Store mean and spread; ``forward`` standardises with them."""
        self.mean.copy_(mean)
        self.spread.copy_(spread)


ARCHITECTURES = ("linear", "mlp", "ffn", "resnet")


def build_network(architecture: str, inputs: int, width: int = 64, layers: int = 1) -> Network:
    """Build a network with initial weights.

    Raises:
        UserError: unknown architecture, or width or layers out of range.
    """
    if architecture not in ARCHITECTURES:
        raise did_you_mean("architecture", architecture, ARCHITECTURES)
    for name, value in (("width", width), ("layers", layers)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
            raise UserError(f"{name}={value} is out of range: give a whole number in [1, 65536]")
    if architecture == "linear":
        return Linear(inputs)
    if architecture == "resnet":
        return ResNet(inputs, layers)
    return Perceptron(inputs, width, layers, torch.relu if architecture == "ffn" else nn.functional.silu)
