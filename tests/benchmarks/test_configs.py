"""benchmarks/configs: files of options that the bench takes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from sprinter.bench.arms import parse_arms
from sprinter.bench.settings import BenchSettings
from sprinter.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "benchmarks" / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_options_exist_and_its_arms_can_be_made(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    options: dict[str, Any] = tomllib.loads(text)
    command: Any = get_command(app).commands["bench"]  # type: ignore[attr-defined]
    assert options.keys() <= {flag.removeprefix("--") for one in command.params for flag in one.opts}
    names = [arm.name for arm in parse_arms(options["arm"])]
    assert set(options["base"]) <= set(names)
    BenchSettings(temperatures=tuple(options["temperature"]))
    assert f"--config benchmarks/configs/{path.name} --data data --out {path.stem}" in text
    if "gate" in options:
        assert (ROOT / options["gate"]).is_dir()
