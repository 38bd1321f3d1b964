"""Profiles: what ``sprinter tune`` measured of a pair, and which setting ``method="auto"`` takes from it.

A profile is one JSON object:

    schema     "sprinter-profile/1"; ``created``, ``sprinter``: UTC time and version; ``seconds``: of tuning
    pair       {"target" | "draft" | other heads' kinds: {"name", "sha256", ...}}
    machine    {"cpu", "gpu", "threads", "device"}
    sampling   {"temperature", "top_k", "top_p", "min_p"}; ``new_tokens``: limit of the texts
    goal       {"budget_unit", "budgets", "quality": ["exact_match>=0.98"]}: what was asked
    prompts    {"name", "sources", "count", "prompt_tokens", "entropy", "overlap"}: the last three are [mean, standard
               deviation] over prompts, of the prompt's length, and of the means along a text of the draft's entropy
               (nats) and of β = Σ min(p, q)
    costs      {"target_s": {tokens: seconds}, "draft_s"}: of forward passes
    settings   finalists, measured live; intervals are [value, low, high] of 95 % over prompts, low and high null for a
               single prompt: {"spec", "lossless", "allowed": whether it meets the goals of quality, "level": its drift
               budget or null, "tokens_per_s", "speed_up": interval, relative to plain decoding, "drift": interval,
               "changed": expected changed tokens a text, "kl": KL(p‖π) a token in nats or null, "calls": [mean,
               standard deviation] over prompts of target calls per token, "prompts", "quality": {goal: interval,
               relative to the target's own}}
    chosen     {"goal", "budget", "level", "spec"} of the fastest lossless setting ("goal": "exact"), then of the
               fastest within each budget, or that meets the goals of quality
    front      all candidates: {"spec", "level", "lossless", "predicted": {"speed_up", "drift", "kl"}, "measured":
               {"speed_up", "drift", "prompts"} or null, "on_front": {"predicted", "measured"}}
    race       {"candidates": number that was to be replayed ("front" has those that were), "rounds": [{"prompts",
               "repeats", "arms"}], "decided": whether time sufficed, "failed": {spec: error}}
"""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, Self

import torch

from sprinter.decode.method import Method
from sprinter.decode.spec import parse_method
from sprinter.engine.options import GenerationOptions
from sprinter.engine.record import cpu_name, model_facts
from sprinter.errors import ProfileWarning, UserError
from sprinter.heads.head import Head
from sprinter.models.pair import LoadedPair

__all__ = [
    "SCHEMA",
    "Profile",
    "PromptWatch",
    "TunedSetting",
    "machine_facts",
    "pair_identity",
    "read_profile",
]

SCHEMA = "sprinter-profile/1"
_HOW = "make one with 'sprinter tune'"
_ENOUGH = 8  # texts before prompts are compared
_RECENT = 256  # texts
_LEAST_TOKENS = 16  # new tokens of a text whose target calls are compared
_FACTOR = 2.0  # between mean prompt lengths
_SHARE = 0.15  # between means of target calls per token


@dataclass(frozen=True, slots=True)
class TunedSetting:
    """One finalist of a profile.

    Attributes:
        spec, method: its method. allowed: whether it meets the goals of quality that were asked for.
        speed_up: speed relative to plain decoding. drift: mean TV(π, p) a token.
        calls: mean and standard deviation over prompts of target calls per token. prompts: number of them.
    """

    spec: str
    method: Method
    allowed: bool
    speed_up: float
    drift: float
    calls: tuple[float, float]
    prompts: int

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Self:
        """From an entry of a profile's "settings"."""
        mean, deviation = entry["calls"]
        return cls(
            str(entry["spec"]), parse_method(entry["spec"]), bool(entry["allowed"]), float(entry["speed_up"][0]),
            float(entry["drift"][0]), (float(mean), float(deviation)), int(entry["prompts"]),
        )  # fmt: skip

    def within(self, budget: float | None, greedy: bool = False) -> Method:
        """Its method; a lossy one is held to ``budget`` if that is less than it was tuned with."""
        method = self.method
        if (
            method.lossless(greedy)
            or budget is None
            or (method.budget is not None and method.budget <= budget)
        ):
            return method
        return method.replace(budget=budget)


@dataclass(frozen=True)
class Profile:
    """A profile that was read.

    Attributes:
        path: where it was read. content: the JSON object. settings: its finalists.
    """

    path: str
    content: Mapping[str, Any] = field(repr=False)
    settings: tuple[TunedSetting, ...]

    def check(self, models: LoadedPair, heads: Mapping[str, Head]) -> None:
        """Refuse a profile of another pair; warn if it was made on another machine.

        Raises:
            UserError: another target, draft or head than the one that was tuned.
        """
        own, made = pair_identity(models, heads), self.content["pair"]
        needed = {kind for one in self.settings for kind in one.method.heads}
        for part in ("target", "draft", *sorted(needed)):
            tuned, here = made.get(part), own.get(part)
            if (tuned and tuned["sha256"]) != (here and here["sha256"]):
                raise UserError(
                    f"the profile '{self.path}' is of another {part}, {_name(tuned)}, and this pair has {_name(here)}: "
                    "tune this pair with 'sprinter tune', or load that one"
                )
        machine, there = machine_facts(models), self.content["machine"]
        differs = [
            f"{key} {there.get(key)}, here {machine[key]}"
            for key in machine
            if there.get(key) != machine[key]
        ]
        for part in ("target", "draft"):
            tuned, here = made.get(part) or {}, own.get(part) or {}
            differs += [
                f"{part} {key} {tuned.get(key)}, here {here.get(key)}"
                for key in ("dtype", "runner") if tuned.get(key) != here.get(key)
            ]  # fmt: skip
        if differs:
            _warn(
                f"the profile '{self.path}' was tuned elsewhere ({'; '.join(differs)}): its speeds may not hold here"
            )

    def fastest(self, budget: float | None, greedy: bool = False) -> TunedSetting:
        """The fastest setting whose measured drift is at most ``budget``; 0 or None: the fastest lossless one.

        Args:
            greedy: whether texts are decoded at temperature 0.
        """
        lossless = [one for one in self.settings if one.method.lossless(greedy)]
        within = [one for one in self.settings if budget and one.allowed and one.drift <= budget]
        return max([*lossless, *within], key=lambda one: one.speed_up)


def read_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        UserError: the file is missing, damaged, or of another schema.
    """
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the profile '{path}' ({error.strerror}): {_HOW}") from None
    except ValueError:
        raise UserError(f"the profile '{path}' is not JSON: {_HOW}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise UserError(f"the profile '{path}' has schema {schema!r}, this version reads {SCHEMA!r}: {_HOW}")
    try:
        settings = tuple(TunedSetting.of(entry) for entry in content["settings"])
        _ = (
            content["pair"]["target"],
            content["machine"],
            content["sampling"],
            content["prompts"]["prompt_tokens"],
        )
        usable = any(one.method.lossless() for one in settings)
    except UserError as error:
        raise UserError(
            f"the profile '{path}' names a method that is unknown here ({error}): {_HOW}"
        ) from None
    except (LookupError, TypeError, ValueError):
        raise UserError(f"the profile '{path}' is damaged: {_HOW}") from None
    if not usable:
        raise UserError(f"the profile '{path}' has no lossless setting: {_HOW}")
    return Profile(str(path), content, settings)


def pair_identity(models: LoadedPair, heads: Mapping[str, Head]) -> dict[str, Any]:
    """``model_facts`` of a pair's models, and names and fingerprints of its heads."""
    draft = models.draft and model_facts(models.draft)
    found: dict[str, Any] = {"target": model_facts(models.target), "draft": draft}
    return found | {
        kind: {"name": head.id and Path(head.id).name, "sha256": head.fingerprint}
        for kind, head in heads.items()
    }


def machine_facts(models: LoadedPair) -> dict[str, Any]:
    """Processor, GPU, threads, and the kind of device that runs the target."""
    return {
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "device": models.target.model.device.type,
    }


class PromptWatch:
    """Compares the texts that use a profile with those that it was tuned on; warns once of each difference.

    Compared are the sampling options, mean prompt length, and target calls per token of the setting, which follow how
    well the draft predicts the target.

    Args:
        profile: the profile. warn: called with each warning; None: a ``ProfileWarning``.
    """

    def __init__(self, profile: Profile, warn: Callable[[str], None] | None = None) -> None:
        self._profile, self._warn = profile, warn or _warn
        self._lock = Lock()
        self._said: set[str] = set()
        self._lengths: deque[int] = deque(maxlen=_RECENT)
        self._calls: dict[str, deque[float]] = {}

    def add(
        self, setting: TunedSetting, request: GenerationOptions, prompt: int, new: int, calls: int
    ) -> None:
        """Count one finished text, by its numbers of prompt tokens, new tokens and target calls."""
        with self._lock:
            self._lengths.append(prompt)
            rates = self._calls.setdefault(setting.spec, deque(maxlen=_RECENT))
            if new >= _LEAST_TOKENS:
                rates.append(calls / new)
            self._check_sampling(request)
            self._check_lengths()
            self._check_calls(setting, rates)

    def _check_sampling(self, request: GenerationOptions) -> None:
        tuned = self._profile.content["sampling"]
        for name, value in tuned.items():
            if getattr(request, name) != value:
                self._say(name, f"{name} is {getattr(request, name):g} here and was {value:g}")

    def _check_lengths(self) -> None:
        mean, deviation = self._profile.content["prompts"]["prompt_tokens"]
        count, here = len(self._lengths), fmean(self._lengths or [0])
        error = 3 * deviation / sqrt(max(1, count))
        if count >= _ENOUGH and not mean / _FACTOR - error <= here <= mean * _FACTOR + error:
            self._say("prompt_tokens", f"prompts have {here:.0f} tokens here and had {mean:.0f}")

    def _check_calls(self, setting: TunedSetting, calls: Collection[float]) -> None:
        mean, deviation = setting.calls
        if len(calls) < _ENOUGH:
            return
        here, error = fmean(calls), 3 * deviation * sqrt(1 / len(calls) + 1 / max(1, setting.prompts))
        if abs(here - mean) > error + _SHARE * mean:
            self._say(
                "calls", f"{setting.spec} needs {here:.2f} target calls per token here and needed {mean:.2f}"
            )

    def _say(self, what: str, difference: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._warn(
                f"texts differ from those of the profile '{self._profile.path}': {difference}; tune it on texts like "
                "these"
            )


def _warn(message: str) -> None:
    warnings.warn(message, ProfileWarning, stacklevel=2)


def _name(facts: Mapping[str, Any] | None) -> str:
    if facts is None:
        return "none"
    return f"{facts.get('name') or 'without a name'} ({facts['sha256'][:8]})"
