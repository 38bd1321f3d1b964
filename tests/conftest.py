"""Settings for all tests."""

import os

# Small models gain nothing from threads, and lose much where the cores are busy; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from sprinter.decode.costs import PassCosts
    from sprinter.models.pair import LoadedPair

pytest_plugins = ["tests.skips"]

TESTS = Path(__file__).parent
# Modules that take long, such as those that enumerate laws: measuring coverage makes them much slower, and other tests
# run their lines.
UNMEASURED = {
    "test_house", "test_random",
    "bench/test_arms",
    "decode/test_addresses", "decode/test_budget", "decode/test_budget_worst", "decode/test_calibrated",
    "decode/test_chain_rules",
    "decode/test_check_drafter", "decode/test_conformance", "decode/test_fuzzy_bound", "decode/test_guards",
    "decode/test_head", "decode/test_joint_law", "decode/test_mutants", "decode/test_optimal",
    "decode/test_several", "decode/test_switch", "decode/test_trees",
    "engine/test_adjusted_laws", "engine/test_async", "engine/test_batch", "engine/test_batch_captured",
    "engine/test_budget_option", "engine/test_disturbed", "engine/test_draft_heads", "engine/test_drafters",
    "engine/test_failures", "engine/test_generate", "engine/test_heads", "engine/test_llamacpp",
    "engine/test_llamacpp_laws", "engine/test_logprobs", "engine/test_never_slower", "engine/test_prefix",
    "engine/test_runner_laws", "engine/test_statistical", "engine/test_text",
    "models/test_captured", "models/test_kernel_passes", "models/test_quantised", "models/test_trees",
    "serve/test_completions", "serve/test_crowd", "serve/test_draft_heads",
    "theory/test_chains", "theory/test_pareto", "theory/test_predict", "theory/test_replay",
    "theory/test_sequential", "theory/test_signals", "theory/test_speculation",
    "training/test_label_processes", "training/test_mine",
}  # fmt: skip

ON_GPU = torch.cuda.is_available()
if not ON_GPU:  # kernels for GPUs are interpreted; triton reads this when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples every time: a red test can be run again, and no database is written.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("fixed")


def assumed_costs(pair: "LoadedPair") -> "PassCosts":
    """Costs in place of measured ones, so that the default method writes the same text in each run."""
    from sprinter.engine.costs import PassCosts

    draft = () if pair.draft is None else ((1, 2e-4), (8, 4e-4), (32, 1e-3))
    return PassCosts(((1, 1e-3), (8, 1.2e-3), (64, 3e-3)), draft)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured, see ``assumed_costs``."""
    from sprinter.engine import costs

    monkeypatch.setattr(costs, "_measure", MEASURED["_measure"])
    monkeypatch.setattr(costs, "_measure_shared", MEASURED["_measure_shared"])


MEASURED: dict[str, Any] = {}
"""What measures, by name, while ``assumed_costs`` stands in for it."""


@pytest.fixture(scope="session", autouse=True)
def no_compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test finds compiled or measured must not depend on what was done on this machine before.

    Processes of one run share it."""
    base = tmp_path_factory.getbasetemp()
    (shared := (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled").mkdir(
        exist_ok=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPRINTER_CACHE", str(shared))
        # By name, because what this imports would import triton before the variable above is set.
        patch.setattr("sprinter.engine.costs._LONGEST_S", 0.2)
        patch.setattr("sprinter.engine.costs._HOST_REPEATS", 1)
        patch.setattr("sprinter.engine.costs._LONG", 10.0)  # s; passes may take long here
        patch.setattr("sprinter.engine.runtime._PAYS", 0.0)  # the default drafts, whatever passes cost here
        costs = import_module("sprinter.engine.costs")
        MEASURED.update({name: getattr(costs, name) for name in ("_measure", "_measure_shared")})
        patch.setattr(costs, "_measure", assumed_costs)
        rows = ((4, 1.2e-3, 2.5e-4), (16, 2e-3, 4e-4))
        patch.setattr(costs, "_measure_shared", lambda pair, alone: replace(alone, shared=rows))
        patch.setattr("sprinter.models.devices.busy_cores", lambda: 0.0)  # other tests
        yield


@pytest.fixture(autouse=True)
def seeds_of_the_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that give no seed get those of the test's name, so that a red test can be run again."""
    drawn = SimpleNamespace(randbits=Random(request.node.nodeid).getrandbits)
    monkeypatch.setattr("sprinter.random.secrets", drawn)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none; coverage is not measured everywhere."""
    unmeasured = {TESTS / name for name in UNMEASURED}
    for item in items:
        if item.get_closest_marker("gpu") and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))
        if item.path.with_suffix("") in unmeasured:
            item.add_marker(pytest.mark.no_cover)
