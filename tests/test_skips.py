"""The option ``--skips``."""

import pytest

pytest_plugins = ["pytester"]

FILE = """
import pytest

def test_runs():
    assert True

def test_needs_a_gpu():
    pytest.skip("there is no GPU")

@pytest.mark.xfail(reason="expected")
def test_expected():
    assert False

@pytest.mark.skip(reason="something is not installed")
def test_left_out():
    pass
"""


@pytest.mark.parametrize(
    ("given", "status", "line"),
    [
        ([], 0, ""),
        (["--skips", "gpu"], 1, "1 skipped, NOT ALLOWED: something is not installed"),
        (["--skips", ""], 1, "1 skipped, NOT ALLOWED: there is no GPU"),
        (["--skips", "gpu", "-k", "not left"], 0, "1 skipped, allowed: gpu"),
        (["--skips", "gpu", "-n", "1"], 1, "1 skipped, NOT ALLOWED: something is not installed"),
        (["--skips", "gpus"], 4, "gpus is not one of gpu,"),
    ],
)
def test_only_named_reasons_may_skip(
    pytester: pytest.Pytester, given: list[str], status: int, line: str
) -> None:
    pytester.makepyfile(FILE)
    ran = pytester.runpytest_inprocess("-p", "tests.skips", "-p", "no:cacheprovider", *given)
    assert ran.ret == status
    assert line in ran.stdout.str() + ran.stderr.str()
