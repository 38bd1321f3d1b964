"""Our attention against the library's: the operator itself, and the compiler's kernel for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sprinter.models.capture.attention import _lower, attention, own_attention_kernel

SIZES = [(1, 1), (1, 37), (3, 16), (5, 130), (9, 300)]
"""Queries and keys."""
BATCH = 2


def _case(shape: tuple[int, int, int, int], n: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys, values and what is seen; every query sees the first key."""
    heads, groups, d, d_v = shape
    sizes = ((heads, n, d), (groups, keys, d), (groups, keys, d_v))
    query, key, value = (torch.randn(BATCH, *size).to(dtype) for size in sizes)
    mask = torch.rand(BATCH, n, keys) < 0.7
    mask[..., 0] = True
    return query, key, value, mask


def _library(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(repeats, 1) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key, value, mask[:, None], scale=0.3
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize(("n", "keys"), SIZES)
def test_the_operator_is_the_librarys_attention(n: int, keys: int) -> None:
    case = _case((6, 2, 10, 14), n, keys, torch.float32)
    torch.testing.assert_close(attention(*case, 0.3), _library(*case), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the compiler's own, since it does not know when our kernel is another one."""
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on import
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(6, 2, 10, 14), (2, 2, 64, 64), (4, 1, 32, 80)])
def test_the_compiled_kernel_is_the_librarys_attention(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    compiler_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiler_cache))
    lowered = []

    def lower(*args: Any) -> Any:
        lowered.append(args)
        return _lower(*args)

    monkeypatch.setattr("sprinter.models.capture.attention._lower", lower)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *case: attention(*case, 0.3))
    close = 1e-5 if dtype == torch.float32 else 2e-2
    with own_attention_kernel(), torch.no_grad():
        for n, keys in reversed(SIZES):
            case = _case(shape, n, keys, dtype)
            if n > 1:
                for x, axes in zip(case, ((2,), (2,), (2,), (1, 2)), strict=True):
                    for axis in axes:
                        torch._dynamo.mark_dynamic(x, axis)
            torch.testing.assert_close(compiled(*case).float(), _library(*case), rtol=close, atol=close)
        for wrong in (torch.nan, torch.inf):
            case = _case(shape, n, keys, dtype)
            case[0][0, 0, 0, 0] = wrong
            assert not compiled(*case)[0, 0, 0].isfinite().any(), "what is no number became one"
            assert compiled(*case)[1].isfinite().all(), "another row took it over"
    assert lowered, "the operator was called, and not our kernel"
