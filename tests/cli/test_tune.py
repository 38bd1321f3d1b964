"""``sprinter tune`` and ``--profile``: what they print and write, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.tiny import Places, Run

from sprinter.cli.tune import _seconds
from sprinter.errors import UserError
from sprinter.tuning import run as run_module
from sprinter.tuning.candidates import candidates


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first candidates alone: replaying all takes seconds."""
    monkeypatch.setattr(run_module, "candidates", lambda *given: candidates(*given)[:8])


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "prompts.txt").write_text("The river rises\nIn the hills\n\nOf the north\n")
    return str(tmp_path / "prompts.txt")


@pytest.mark.usefixtures("few")
def test_a_profile_is_made_and_used(run: Run, places: Places, data: str, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    asked = ["--data", data, "--budget", "0.1", "--out", str(out), "-n", "6", "--time", "none"]
    done, shown, err = run("tune", *places.pair, *asked)
    assert done == 0, err
    assert "drift<=0.1: " in shown and "speed relative to plain decoding" in shown and "round 1" in err
    assert out.with_suffix(".png").stat().st_size > 2000
    done, shown, err = run("tune", *places.pair, *asked, "--json", "--no-figures")  # again: nothing is asked
    assert done == 0 and "round 1" not in err, err
    made = json.loads(shown)
    assert made["prompts"]["count"] == 3 and made["picture"] is None
    assert made["settings"] == json.loads(out.read_text())["settings"]
    # used by the other commands
    use = [*places.pair, "--profile", str(out), "-n", "4", "--json"]
    done, shown, err = run("generate", "The river", *use, "--method", "auto", "--budget", "0.1")
    assert done == 0 and "warning" not in err, err
    assert json.loads(shown)["method"].partition("(")[0] in {
        one["spec"].partition("(")[0] for one in made["settings"]
    }
    done, _, err = run("generate", "The river", *use, "--temperature", "0")
    assert done == 0 and err.startswith("sprinter: warning: texts differ") and err.count("\n") == 1
    done, shown, err = run(
        "bench", *places.pair, "--profile", str(out), "--suite", data, "--rule", "whole", "--arm", "auto(budget=0.1)",
        "-n", "4", "--out", str(tmp_path / "bench"), "--no-quality", "--no-analysis", "--json",
    )  # fmt: skip
    assert done == 0, err
    (arm,) = json.loads(shown)["arms"]
    assert arm["name"] == "auto(budget=0.1)" and arm["status"] == "ok" and not arm["spec"].startswith("auto(")
    other = ["--target", str(places.draft), "--draft", str(places.draft)]
    done, _, err = run("generate", "The river", *other, "--profile", str(out))
    assert done == 2 and err.count("\n") == 1 and "is of another target" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--budget", "2"], "budget"),
        (["--time", "soon"], "--time 'soon' is not a duration: give 90s, 10m, 1h or none"),
        (["--quality", "much"], "quality 'much' is not NAME>=RATIO"),
        (["--quality", "exact_match>=0.98"], "needs right answers"),
        (["--quality", "pass_at_1>=0.98"], "--run-code"),
        (["--out", "nowhere/p.json"], "there is no directory 'nowhere'"),
        (["--temperature", "-1"], "--temperature -1"),
    ],
)
def test_one_line_for_each_mistake(
    run: Run,
    places: Places,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done, shown, err = run("tune", *places.pair, "--data", data, "-n", "4", *args)
    assert (done, shown, err.count("\n")) == (2, "", 1) and message in err


def test_profiles_that_are_not_there_and_auto_without_one(
    run: Run, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done, _, err = run("generate", "The river", *places.pair, "--method", "auto", "-n", "4")
    assert done == 0, err
    done, _, err = run("generate", "The river", *places.pair, "--profile", str(tmp_path / "none.json"))
    assert done == 2 and "cannot read the profile" in err
    done, _, err = run("tune", "--target", str(places.target), "--data", str(places.root / "texts.txt"))
    assert done == 2 and "give --draft" in err


def test_durations() -> None:
    found = [_seconds(text) for text in ("90", "90s", "1.5m", "2h", "none")]
    assert found == [90.0, 90.0, 90.0, 7200.0, None]
    with pytest.raises(UserError, match="not a duration"):
        _seconds("-3s")
