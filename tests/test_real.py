"""Why a test on real models is skipped."""

from pathlib import Path

import pytest
from tests.real import FILES, real_file


def reason(name: str) -> str:
    with pytest.raises(pytest.skip.Exception) as skipped:
        real_file(name)
    return str(skipped.value)


def test_a_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINTER_MODELS", str(tmp_path))
    monkeypatch.setenv("REAL", "smollm2,gemma")
    assert reason("smollm2") == f"there is no {FILES['smollm2']} in SPRINTER_MODELS ({tmp_path})"
    for name in FILES.values():
        (tmp_path / name).touch()
    assert real_file("smollm2") == tmp_path / FILES["smollm2"]
    assert reason("qwen") == f"{FILES['qwen']} is not used with REAL=smollm2,gemma: make test-real REAL=all"
    for everything in ("all", ""):
        monkeypatch.setenv("REAL", everything)
        assert real_file("qwen") == tmp_path / FILES["qwen"]
