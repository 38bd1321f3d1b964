"""The networks of the heads: features ``[..., n]`` -> logit ``[...]``.

============  ====================================================================================================
linear        w · x + b: the gate of the SPRINTER paper, n + 1 parameters
mlp           ``layers`` times (linear, SiLU) of ``width``, then linear
ffn           the same with ReLU: DISCO's feed-forward net (Mamou et al. 2024), two linear layers
resnet        ``layers`` times x + SiLU(W x + b), each with weights of its own, then two logits (SpecDec++, Huang et
              al. 2024; its code repeats one block, so that all share their weights)
============  ====================================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from sprinter.errors import UserError
from sprinter.heads.features import unknown

__all__ = ["ARCHITECTURES", "Linear", "Network", "Perceptron", "ResNet", "build_network"]


class Network(nn.Module, ABC):
    """A network with one logit. ``inputs``: n, the numbers that it reads."""

    inputs: int

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """``[..., n]`` float32 -> logits ``[...]``."""

    @abstractmethod
    def fold(self, mean: Tensor, spread: Tensor) -> None:
        """Take in the standardisation ``(x - mean) / spread`` that it was trained behind, so that it reads raw x."""

    @property
    def size(self) -> int:
        """Parameters."""
        return sum(weights.numel() for weights in self.parameters())

    @property
    def flops(self) -> float:
        """FLOPs of one score: a multiplication and an addition a weight of every linear layer."""
        return 2.0 * sum(weights.numel() for weights in self.parameters() if weights.dim() == 2)


def _absorb(weight: Tensor, bias: Tensor, mean: Tensor, spread: Tensor) -> None:
    with torch.no_grad():
        weight /= spread
        bias -= weight @ mean


class Linear(Network):
    """w · x + b, with ``weight [1, n]`` and ``bias [1]``. It starts at zero: logistic regression is convex."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.weight = nn.Parameter(torch.zeros(1, inputs))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """As above."""
        return x @ self.weight[0] + self.bias[0]

    def fold(self, mean: Tensor, spread: Tensor) -> None:
        """Exact: into the one layer."""
        _absorb(self.weight, self.bias, mean, spread)


class Perceptron(Network):
    """Hidden layers and one output.

    Args:
        inputs: n. width: of each hidden layer. layers: hidden layers, at least one.
        activation: between them.
    """

    def __init__(self, inputs: int, width: int, layers: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        sizes = [inputs, *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(width, 1)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """As above."""
        for layer in self.layers:
            x = self._activation(layer(x))
        logit: Tensor = self.out(x)
        return logit.squeeze(-1)

    def fold(self, mean: Tensor, spread: Tensor) -> None:
        """Exact: into the first layer."""
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        _absorb(first.weight, first.bias, mean, spread)


class ResNet(Network):
    """Residual blocks of the input's own size. The skip carries x itself, so the standardisation stays a first step.

    Args:
        inputs: n. layers: residual blocks.
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
        """softmax over (refused, kept) is a sigmoid of the difference."""
        x = (x - self.mean) / self.spread
        for block in self.blocks:
            x = x + nn.functional.silu(block(x))
        both: Tensor = self.out(x)
        return both[..., 1] - both[..., 0]

    def fold(self, mean: Tensor, spread: Tensor) -> None:
        """Kept as the first step."""
        self.mean.copy_(mean)
        self.spread.copy_(spread)


ARCHITECTURES = ("linear", "mlp", "ffn", "resnet")


def build_network(architecture: str, inputs: int, width: int = 64, layers: int = 1) -> Network:
    """A fresh network.

    Raises:
        UserError: unknown architecture; width or layers out of range.
    """
    if architecture not in ARCHITECTURES:
        raise unknown("architecture", architecture, ARCHITECTURES)
    for name, value in (("width", width), ("layers", layers)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
            raise UserError(f"{name}={value} is out of range: give a whole number in [1, 65536]")
    if architecture == "linear":
        return Linear(inputs)
    if architecture == "resnet":
        return ResNet(inputs, layers)
    return Perceptron(inputs, width, layers, torch.relu if architecture == "ffn" else nn.functional.silu)
