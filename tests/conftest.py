"""Settings for all tests."""

import os

# Small models gain nothing from threads, and lose much where the cores are busy; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Modules that take long, and whose lines others run: measuring coverage would add nearly half to their time. Modules
# that enumerate laws say so themselves.
UNMEASURED = {
    "bench": {"arms"},
    "decode": {"addresses", "budget", "calibrated", "check_drafter", "mutants", "switch", "trees"},
    "engine": {
        "adjusted_laws", "async", "batch", "batch_captured", "budget_option", "disturbed", "draft_heads", "drafters",
        "failures", "generate", "heads", "llamacpp", "logprobs", "never_slower", "prefix", "statistical", "text",
    },
    "models": {"captured", "in_place", "quantised", "trees"},
    "serve": {"completions", "crowd", "draft_heads"},
    "tests": {"house", "random"},
    "theory": {"pareto", "signals", "speculation"},
    "training": {"label_processes", "mine"},
}  # fmt: skip

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
        # Costs need not be exact here, and beside other tests they would hardly ever stand still. By name, because what
        # this imports would import triton before the variable above is set.
        patch.setattr("sprinter.engine.costs._LONGEST_S", 0.2)
        patch.setattr("sprinter.engine.costs._HOST_REPEATS", 1)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none; coverage is not measured everywhere."""
    for item in items:
        if item.get_closest_marker("gpu") and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))
        if item.path.stem.removeprefix("test_") in UNMEASURED.get(item.path.parent.name, ()):
            item.add_marker(pytest.mark.no_cover)
