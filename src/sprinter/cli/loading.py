"""The options that name models, the same for every command, and the pair that they load."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from sprinter.cli import options
from sprinter.cli.running import debugging
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.engine.pair import Pair

__all__ = ["Loading", "load", "loads", "quiet_libraries"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Loading:
    """Which models to load and how: one field an option; ``loads`` gives them to a command.

    Raises:
        UserError: options that exclude each other, or a revision of nothing.
    """

    target: options.Target = None
    draft: options.DraftOption = None
    gate: options.GateOption = None
    head: options.Heads = None
    tokenizer: options.Tokenizer = None
    revision: options.Revision = None
    draft_revision: options.DraftRevision = None
    trust_remote_code: options.TrustRemoteCode = False
    device: options.Device = None
    device_map: options.DeviceMap = None
    dtype: options.Dtype = None
    runner: options.RunnerOption = "auto"
    compile: options.Compile = None

    def __post_init__(self) -> None:
        if self.device is not None and self.device_map is not None:
            raise UserError("--device-map takes the place of --device: give one of them")
        if self.trust_remote_code and (self.target, self.draft, self.tokenizer) == (None, None, None):
            raise UserError(
                "trust_remote_code=True is for models that bring code; the built-in pair has none: give --target too"
            )
        for which in ("revision", "draft_revision"):
            model = "draft" if which == "draft_revision" else "target"
            if getattr(self, which) is not None and getattr(self, model) is None:
                raise UserError(
                    f"{which}={getattr(self, which)} is of a {model} on the hub: give --{model} too"
                )

    def given(self) -> dict[str, Any]:
        """The options that are not at their defaults, by name."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def arguments(self) -> dict[str, Any]:
        """For ``load``."""
        given = {"target": None, "draft": None, "gate": None, **self.given()}
        return {"heads": given.pop("head", ()), **given}


def loads(*, without: Collection[str] = ()) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator of a command: its parameter ``loading: Loading`` becomes the options of ``Loading``, in its place.

    Args:
        without: fields that the command cannot use, and so does not offer.
    """
    hints = get_type_hints(Loading, include_extras=True)
    shown = [field for field in fields(Loading) if field.name not in without]

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        def run(**given: Any) -> Result:
            loading = Loading(**{field.name: given.pop(field.name) for field in shown})
            return command(**given, loading=loading)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name != "loading":
                parameters.append(parameter)
                continue
            parameters += [
                inspect.Parameter(
                    field.name, parameter.kind, default=field.default, annotation=hints[field.name]
                )
                for field in shown
            ]
        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def load(
    target: str | None,
    draft: str | None,
    gate: str | None,
    heads: Sequence[str] = (),
    **others: str | bool | None,
) -> Pair:
    """As ``sprinter.load_pair``; options that are None are left to it."""
    quiet_libraries()
    from sprinter import load_pair

    given: dict[str, Any] = {key: value for key, value in others.items() if value is not None}
    return load_pair(target, draft=draft, gate=gate, heads=heads, **given)


def quiet_libraries() -> None:
    """No bars while weights are read, unless debugging; a terminal still shows the progress of a download."""
    if debugging():
        return
    from sprinter.models.bars import set_bars

    set_bars(weights=False, downloads=sys.stderr.isatty())
