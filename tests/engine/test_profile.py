"""Profiles: which setting ``method="auto"`` takes, what is refused, and when texts differ from those of the tuning."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import sprinter
from sprinter.decode.spec import parse_method
from sprinter.engine.profile import SCHEMA, Profile, PromptWatch, machine_facts, pair_identity, read_profile
from sprinter.errors import ProfileWarning, UserError
from sprinter.models.pair import load_models

PROMPT = "The river rises in"
LOSSY = "stop=fixed(gamma=5),accept=fuzzy(threshold=0.3),budget=0.1"


def entry(spec: str, speed: float, drift: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "spec": spec, "lossless": drift == 0, "allowed": True, "level": None, "tokens_per_s": 100 * speed,
        "speed_up": [speed, speed, speed], "drift": [drift, drift, drift], "changed": 1.0, "kl": 0.1,
        "calls": [0.5, 0.1], "prompts": 10, "quality": {}, **more,
    }  # fmt: skip


def content(pair: sprinter.Pair, *settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "pair": pair_identity(pair.models, pair.heads),
        "machine": machine_facts(pair.models),
        "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        "prompts": {"prompt_tokens": [6.0, 1.0]},
        "settings": list(settings)
        or [
            entry("autoregressive", 1.0),
            entry("speculative(gamma=2)", 1.3),
            entry("block(gamma=4)", 1.4),
            entry("certain(budget=0.02)", 1.6, 0.015),
            entry(LOSSY, 2.0, 0.08),
            entry("certain(budget=0.2)", 3.0, 0.04, allowed=False),
        ],
    }


@pytest.fixture
def path(tmp_path: Path, builtin_pair: sprinter.Pair) -> Path:
    return write(tmp_path / "profile.json", content(builtin_pair))


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def tuned(pair: sprinter.Pair, path: Path) -> sprinter.Pair:
    return sprinter.Pair(pair.models, pair.gate, profile=read_profile(path))


# --- which setting ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({}, "block(gamma=4)"),
        ({"method": "auto"}, "block(gamma=4)"),
        ({"method": "auto", "budget": 0}, "block(gamma=4)"),
        ({"method": "auto", "budget": 0.01}, "block(gamma=4)"),
        ({"method": "auto", "budget": 0.02}, "certain(budget=0.02)"),
        ({"budget": 0.2}, LOSSY),
        ({"method": "auto", "budget": 0.09}, LOSSY.replace("0.1", "0.09")),
        ({"method": "auto", "budget": 0.2, "require_lossless": True}, "block(gamma=4)"),
        ({"method": "speculative(gamma=3)"}, "speculative(gamma=3)"),
    ],
)  # fmt: skip
def test_the_fastest_setting_within_the_budget(
    builtin_pair: sprinter.Pair, path: Path, options: dict[str, Any], spec: str
) -> None:
    pair = tuned(builtin_pair, path)
    found = pair.method_for(**options)
    expected = parse_method(spec).settle(pair._runtime.taus)
    assert found.is_as(expected)
    assert pair.default_method == "block(gamma=4)"


def test_texts_are_those_of_the_setting(builtin_pair: sprinter.Pair, path: Path) -> None:
    pair, given = tuned(builtin_pair, path), {"max_new_tokens": 24, "seed": 3, "never_slower": False}
    auto = pair.generate(PROMPT, method="auto", budget=0.1, **given)
    named = builtin_pair.generate(PROMPT, method=LOSSY, **given)
    assert [token.id for token in auto.tokens] == [token.id for token in named.tokens]
    assert auto.method == parse_method(LOSSY).name and not auto.stats.lossless
    batch = pair.generate([PROMPT, PROMPT], method="auto", budget=0.1, **given)
    assert [token.id for token in batch[0].tokens] == [token.id for token in named.tokens]
    assert pair.generate(PROMPT, **given).stats.lossless
    again = builtin_pair.generate(
        auto.prompt_ids, **auto.to_dict()["request"]
    )  # the request names the method
    assert [token.id for token in again.tokens] == [token.id for token in named.tokens]


def test_a_setting_that_is_exact_when_greedy_alone(builtin_pair: sprinter.Pair, path: Path) -> None:
    own = content(builtin_pair, entry("speculative", 1.2), entry("typical", 2.0, 0.0))
    pair = tuned(builtin_pair, write(path, own))
    lossless = parse_method("typical").lossless(greedy=True)
    assert pair.method_for(temperature=1.0).name.startswith("speculative")
    assert pair.method_for(temperature=0.0).name.startswith("typical" if lossless else "speculative")


def test_without_a_profile(builtin_pair: sprinter.Pair) -> None:
    assert builtin_pair.method_for(method="auto").name.startswith("auto(step=")
    assert builtin_pair.profile is None and builtin_pair.method_for().name.startswith("auto(")
    open_spec = sprinter.GenerationOptions(method="auto").to_dict()["method"]
    assert open_spec == (
        "auto(step=measured, token=measured, verify=measured, signal=measured, reads=measured)"
    )


def test_a_profile_answers_every_auto_that_leaves_costs_open(builtin_pair: sprinter.Pair, path: Path) -> None:
    pair = tuned(builtin_pair, path)
    assert (
        pair.method_for(method="auto(budget=0.02)").name == pair.method_for(method="auto", budget=0.02).name
    )
    costs = "step=0.3, token=0.1, verify=0.2, signal=entropy, reads=1x1x1.2x2"
    assert pair.method_for(method=f"auto({costs})").name == f"auto({costs})"


# --- what is refused --------------------------------------------------------------------------------------------------
def test_a_profile_of_another_pair_is_refused(builtin_pair: sprinter.Pair, path: Path) -> None:
    own = content(builtin_pair)
    own["pair"]["draft"]["sha256"] = "0" * 64
    with pytest.raises(UserError, match=r"is of another draft, .*00000000.*sprinter tune"):
        tuned(builtin_pair, write(path, own))
    with pytest.raises(UserError, match="another draft"):
        sprinter.Pair(load_models(sprinter.builtin_paths()["target"]), profile=read_profile(path))


def test_a_gate_is_compared_if_a_setting_needs_it(builtin_pair: sprinter.Pair, path: Path) -> None:
    ungated = sprinter.Pair(builtin_pair.models)
    assert tuned(ungated, path).profile is not None
    gated = content(builtin_pair, entry("speculative", 1.2), entry("sprinter(budget=0.05)", 2.0, 0.04))
    with pytest.raises(UserError, match=r"another gate.* this pair has none"):
        tuned(ungated, write(path, gated))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the profile"),
        ("{", "is not JSON"),
        ("[]", "schema None"),
        ('{"schema": "sprinter-profile/9"}', "this version reads 'sprinter-profile/1'"),
        (f'{{"schema": "{SCHEMA}", "settings": [{{"spec": "speculative"}}]}}', "is damaged"),
        (f'{{"schema": "{SCHEMA}", "settings": 3}}', "is damaged"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "p.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        sprinter.load_pair(profile=file)
    assert "sprinter tune" in str(caught.value) and "\n" not in str(caught.value)


def test_methods_that_are_unknown_or_all_lossy(builtin_pair: sprinter.Pair, path: Path) -> None:
    with pytest.raises(UserError, match="unknown here"):
        read_profile(write(path, content(builtin_pair, entry("speculativ", 2.0))))
    with pytest.raises(UserError, match="no lossless setting"):
        read_profile(write(path, content(builtin_pair, entry(LOSSY, 2.0, 0.1))))


# --- warnings ---------------------------------------------------------------------------------------------------------
def test_another_machine_is_a_warning(builtin_pair: sprinter.Pair, path: Path) -> None:
    own = content(builtin_pair)
    own["machine"]["cpu"] = "an abacus"
    with pytest.warns(ProfileWarning, match="tuned elsewhere .cpu an abacus"):
        tuned(builtin_pair, write(path, own))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned(builtin_pair, write(path, content(builtin_pair)))


def said(profile: Profile, *texts: tuple[int, int, int], **options: Any) -> list[str]:
    """Warnings after texts of (prompt tokens, new tokens, target calls)."""
    found: list[str] = []
    watch, setting = PromptWatch(profile, found.append), profile.fastest(None)
    for prompt, new, calls in texts:
        watch.add(setting, sprinter.GenerationOptions(**options), prompt, new, calls)
    return found


def test_texts_like_those_of_the_tuning_are_fine(path: Path) -> None:
    assert said(read_profile(path), *[(5, 40, 21), (9, 40, 19)] * 8) == []


def test_other_texts_are_a_warning_said_once(path: Path) -> None:
    profile = read_profile(path)
    assert said(profile, *[(40, 40, 20)] * 7) == []  # too few
    (long,) = said(profile, *[(40, 40, 20)] * 30)
    assert "prompts have 40 tokens here and had 6" in long and "tune it on texts like these" in long
    (calls,) = said(profile, *[(6, 40, 36)] * 30)
    assert "0.90 target calls per token here and needed 0.50" in calls
    assert said(profile, *[(6, 4, 4)] * 30) == []  # texts too short to tell
    (hot,) = said(profile, (6, 40, 20), (6, 40, 20), temperature=0.5)
    assert "temperature is 0.5 here and was 1" in hot


def test_generated_texts_are_watched(builtin_pair: sprinter.Pair, path: Path) -> None:
    pair = tuned(builtin_pair, path)
    with pytest.warns(ProfileWarning, match="temperature is 0 here"):
        pair.generate(PROMPT, max_new_tokens=4, temperature=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.generate(PROMPT, method="svip", max_new_tokens=4, temperature=0.7)  # not from the profile
