"""Settings for all tests."""

import os

# Small models gain nothing from threads, and lose much where the cores are busy; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

ON_GPU = torch.cuda.is_available()
if not ON_GPU:  # kernels for GPUs are interpreted; triton reads this when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples every time: a red test can be run again, and no database is written.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("fixed")


@pytest.fixture(scope="session", autouse=True)
def no_compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test finds compiled must not depend on what was done on this machine before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPRINTER_CACHE", str(tmp_path_factory.mktemp("compiled")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none."""
    if not ON_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))
