"""Options for loading models, the same for every command; loads the pair that they name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from sprinter.cli import options
from sprinter.cli.debug import debugging
from sprinter.cli.signature import Result, in_place_of, option
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.engine.options import GenerationOptions
    from sprinter.engine.pair import Pair

__all__ = ["Loading", "check_models", "load", "loads", "quiet_libraries"]


@dataclass(frozen=True, slots=True)
class Loading:
    """Which models to load, and how. Each field is an option; ``loads`` adds them to a command.

    Raises:
        UserError: options exclude each other, or a revision was given without its model.
    """

    target: options.TargetOption = None
    draft: options.DraftOption = None
    gate: options.GateOption = None
    head: options.HeadsOption = None
    tokenizer: options.TokenizerOption = None
    revision: options.RevisionOption = None
    draft_revision: options.DraftRevisionOption = None
    draft_vocabulary: options.DraftVocabularyOption = None
    trust_remote_code: options.TrustRemoteCodeOption = False
    device: options.DeviceOption = None
    device_map: options.DeviceMapOption = None
    dtype: options.DtypeOption = None
    draft_dtype: options.DraftDtypeOption = None
    runner: options.RunnerOption = "auto"
    draft_runner: options.DraftRunnerOption = None
    compile: options.CompileOption = None
    profile: options.ProfileOption = None

    def __post_init__(self) -> None:
        if self.device is not None and self.device_map is not None:
            raise UserError("--device-map takes the place of --device: give one of them")
        if self.trust_remote_code and (self.target, self.draft, self.tokenizer) == (None, None, None):
            raise UserError(
                "trust_remote_code=True is for models that bring code; the built-in pair has none: give --target too"
            )
        for which in ("draft_dtype", "draft_runner"):
            if getattr(self, which) is not None and self.draft is None:
                raise UserError(f"{which}={getattr(self, which)} is of a draft: give --draft too")
        for which in ("revision", "draft_revision"):
            model = "draft" if which == "draft_revision" else "target"
            if getattr(self, which) is not None and getattr(self, model) is None:
                raise UserError(
                    f"{which}={getattr(self, which)} is of a {model} on the hub: give --{model} too"
                )

    def given(self) -> dict[str, Any]:
        """Options with values other than their defaults, by name."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def arguments(self) -> dict[str, Any]:
        """Arguments for ``load_pair``: the options that were given."""
        given = {"target": None, "draft": None, "gate": None, **self.given()}
        if (kept := self.draft_vocabulary) is not None and kept.isdecimal():
            given["draft_vocabulary"] = int(kept[:400])  # as long as Python reads it: it is refused
        return {"heads": given.pop("head", ()), **given}


def loads(*, without: Collection[str] = ()) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator of a command: replaces its parameter ``loading: Loading`` by the options of ``Loading``.

    Args:
        without: fields that the command does not offer, because they have no effect on it.
    """
    hints = get_type_hints(Loading, include_extras=True)
    shown = [
        option(one.name, hints[one.name], one.default) for one in fields(Loading) if one.name not in without
    ]
    return in_place_of("loading", shown, lambda given: Loading(**given))


def load(loading: Loading, **defaults: Any) -> Pair:
    """Call ``sprinter.load_pair`` with these options.

    Args:
        defaults: arguments of ``load_pair`` for options that were not given.
    """
    quiet_libraries()
    from sprinter import load_pair

    pair = load_pair(**{**defaults, **loading.arguments()})
    if pair.runner_reason is not None:
        logging.getLogger("sprinter").warning("runner: %s", pair.runner_reason)
    return pair


def check_models(options: GenerationOptions, loading: Loading) -> None:
    """Refuse a method that needs a model that was not given, or a budget of none, before any model is loaded.

    Raises:
        UserError: which model it needs.
    """
    from sprinter.engine.parts import check_budget

    if loading.profile is None:
        check_budget(options)
    method = options.method
    if loading.target is None or method is None:
        return
    if loading.draft is None and method.drafter.uses_model:
        raise UserError(
            f"method {method.name} needs a draft model: give --draft too, or --method autoregressive"
        )
    if loading.gate is None and "gate" in method.needs:
        raise UserError(
            f"method {method.name} needs a gate: give --gate too, or another method such as speculative"
        )


def quiet_libraries() -> None:
    """Hide progress bars of loading unless debugging; downloads still show theirs on a terminal."""
    if debugging():
        return
    from sprinter.models.bars import set_bars

    set_bars(weights=False, downloads=sys.stderr.isatty())
