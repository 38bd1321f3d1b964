"""Accept rules on a device without float64, as Apple's: tried without one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sprinter.decode.accept.mentored import Mentored
from sprinter.decode.accept.several import SpecTr


class OnMps(Tensor):
    """A tensor that says that it lies on Apple's GPU, refuses float64 there, and meets no float64 of the CPU's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("mps")
        if func is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        if func is Tensor.to and not isinstance(args[0], OnMps):
            return args[0].to(args[1].as_subclass(Tensor)).as_subclass(OnMps)
        everything = (*args, *(kwargs or {}).values())
        assert not any(type(one) is Tensor and one.dim() for one in everything), "tensors on two devices"
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, OnMps) and made.as_subclass(Tensor).dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return made


def laws() -> tuple[Tensor, Tensor]:
    p, q = torch.randn(2, 17, generator=torch.Generator().manual_seed(5)).softmax(-1)
    return p, q


@pytest.mark.parametrize("kl", [0.02, 0.4])
def test_mentored(kl: float) -> None:
    p, q = laws()
    rule = Mentored(kl=kl)
    for expected, given in zip(
        rule.both(p, q), rule.both(*(x.as_subclass(OnMps) for x in (p, q))), strict=True
    ):
        assert type(given) is OnMps
        assert torch.equal(expected, given.as_subclass(Tensor))


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_k_seq(kept: int) -> None:
    p, q = laws()
    made = [
        SpecTr().pick(*(x.as_subclass(kind) for x in (p, q)), [3, 8], lambda index, chance: index == kept)
        for kind in (Tensor, OnMps)
    ]
    assert made[0][0] == made[1][0]
    assert type(made[1][1]) is OnMps
    assert torch.equal(made[0][1], made[1][1].as_subclass(Tensor))
