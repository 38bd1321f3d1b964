"""Logits that are no law are refused with the model's name and the position."""

import pytest
import torch

from sprinter.errors import SprinterError
from sprinter.models.checks import check_finite

INF = float("inf")


def test_finite_logits_pass_and_so_do_masked_tokens() -> None:
    logits = torch.tensor([[0.0, -INF, 3.0], [1.0, 2.0, -INF]])
    check_finite(logits, "target", 0)
    check_finite(logits.bfloat16(), "draft", 0)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ([0.0, float("nan"), 9.0], "NaN"),
        ([float("nan"), INF, 9.0], "NaN"),
        ([0.0, INF, 1.0], r"\+inf"),
        ([-INF, -INF, -INF], "-inf for every token"),
    ],
)
@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("at", [0, 2])
def test_the_message_names_model_position_and_kind(row: list[float], what: str, which: str, at: int) -> None:
    logits = torch.zeros(3, 3)
    logits[at] = torch.tensor(row)
    with pytest.raises(SprinterError, match=rf"the {which} model's logits are {what} at position {11 + at}:"):
        check_finite(logits, which, 11)
    with pytest.raises(SprinterError, match=f"position {11 + at}:"):
        check_finite(torch.stack([torch.zeros(3, 3), logits]), which, 11)
