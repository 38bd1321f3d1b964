"""``pytest --skips gpu,cpu``: only these reasons may skip a test; a skip for another reason fails the run.

So a test that a run is for cannot be left out in silence because something is not installed; ``conftest.py`` loads
this.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ALLOWED = {
    "gpu": r"there is no (GPU|CUDA device)",
    "kernels": r"the kernels are not installed",
    "llama": r"llama-cpp-python is not installed|could not import 'llama_cpp'",
    "peers": r"could not import '(lm_eval|ray.serve|schemathesis|speculators|vllm)'|is not a dependency of the tests",
    "browser": r"could not import 'playwright|there is no Chromium",
    "models": r"\S+\.gguf is not used with REAL=",
    "root": r"needs root",
    "tools": r"there is no (curl|systemd|environment of clients)",
}
"""Name in ``--skips`` → what the reason of a skipped test looks like."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--skips``."""
    parser.addoption("--skips", metavar="NAMES", help=f"reasons that may skip a test: {', '.join(ALLOWED)}")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a name that is not in ``ALLOWED``."""
    if unknown := _names(config) - set(ALLOWED):
        raise pytest.UsageError(f"--skips: {', '.join(sorted(unknown))} is not one of {', '.join(ALLOWED)}")


@contextmanager
def _skipped_without_kernels() -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # also that of a pattern which another line should match
        if "our kernels, which are not installed" in str(error):
            pytest.skip("the kernels are not installed")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A test that asks for the kernels is skipped where there are none."""
    with _skipped_without_kernels():
        return (yield)  # type: ignore[return-value]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """As ``pytest_runtest_call``, for fixtures."""
    with _skipped_without_kernels():
        return (yield)  # type: ignore[return-value]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip for a reason that is not allowed is a failure."""
    if not hasattr(session.config, "workerinput") and _others(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Skipped tests by reason."""
    if config.getoption("skips") is None:
        return
    for name, count in sorted(_counts(config).items()):
        terminalreporter.write_line(f"{count} skipped, allowed: {name}")
    for reason, count in sorted(_others(config).items()):
        terminalreporter.write_line(f"{count} skipped, NOT ALLOWED: {reason}", red=True)


def _names(config: pytest.Config) -> set[str]:
    return {name for name in (config.getoption("skips") or "").split(",") if name}


def _reasons(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    found = reporter.stats.get("skipped", []) if reporter else []
    # an expected failure is reported as skipped, without a reason
    return [one.longrepr[2].removeprefix("Skipped: ") for one in found if isinstance(one.longrepr, tuple)]


def _counts(config: pytest.Config) -> Counter[str]:
    """Skips for each allowed reason."""
    names = _names(config)
    return Counter(name for reason in _reasons(config) for name in names if re.search(ALLOWED[name], reason))


def _others(config: pytest.Config) -> Counter[str]:
    """Skips for all other reasons; none where every reason is allowed."""
    if config.getoption("skips") is None:
        return Counter()
    allowed = [ALLOWED[name] for name in _names(config)]
    return Counter(
        reason for reason in _reasons(config) if not any(re.search(one, reason) for one in allowed)
    )
