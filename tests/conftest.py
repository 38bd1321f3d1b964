"""Settings for all tests."""

import os

# Small models gain nothing from threads, and lose much where the cores are busy; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples every time: a red test can be run again, and no database is written.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("fixed")


@pytest.fixture(scope="session", autouse=True)
def no_compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test finds compiled must not depend on what was done on this machine before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPRINTER_CACHE", str(tmp_path_factory.mktemp("compiled")))
        yield
