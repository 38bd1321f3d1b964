"""How functions become commands: shared options, groups of commands, and help.

The help of a command with many options lists ten of them, and all by group with --help-all.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from sprinter.errors import UserError

__all__ = [
    "CommandGroup", "Decorator", "LaterCommands", "ListedCommand", "group", "in_options", "listed", "option",
    "show_help", "stated_in", "takes",
]  # fmt: skip

_FEW = 14  # options that are always listed
_ALL = "help_all"
_ONCE = "method", "gate", "Models", "How models run"
"""Options that name one thing, by name or panel; of others the last one counts, so that a line can be continued."""
FIRST = {
    "generate": "method target draft max_new_tokens temperature seed budget chat prompts json",
    "chat": "method target draft max_new_tokens temperature seed budget system template json",
    "serve": "method target draft budget host port model_name rows max_len api_keys",
    "bench": "suite arm target draft chat new_tokens temperatures out config json",
    "reproduce": "target draft gate data part out prompts new_tokens restart json",
    "eval": "tasks method target draft data limit num_fewshot chat out json",
    "tune": "data target draft budgets budget_unit quality time_s new_tokens out json",
    "doctor": "target draft gate device dtype runner probe max_drift probe_tokens json",
    "demo": "target draft gate tokenizer device dtype runner max_new_tokens seed json",
    "gate label": "data out target draft chat classes limit new_tokens temperature json",
    "gate mine": "data out target draft compare chat limit new_tokens method json",
    "gate train": "labels out preset label features drift tau epochs force json",
    "draft distill": "data out target layers width chat epochs minutes new_tokens json",
    "draft sizes": "data out target shape steps chat limit new_tokens temperature json",
    "draft train": "data out target kind heads chat epochs minutes new_tokens json",
    "draft vocabulary": "data out target tokenizer size field split limit trust_remote_code json",
    "theory pareto": "target draft gate prompts texts max_new_tokens temperature seed out json",
    "theory flops": "target draft gate method tokens context gamma texts dtype json",
    "theory fleet": "streams rate rows prompt_tokens answer_tokens parameters draft_parameters gpus out json",
    "theory predict": "method target draft gate labels max_drift prompts texts temperature json",
}
"""The options that --help lists, by command."""

_FLAGS = {
    "aliases": "alias",
    "stop_token_ids": "stop-token-id", "bad_words": "bad-word", "allowed_hosts": "allowed-host", "bases": "base",
    "temperatures": "temperature", "budgets": "budget", "new_tokens": "max-new-tokens",
}  # fmt: skip
"""Flags of fields whose names are no flags."""
_MIB = 2**20
"""Unit of fields in bytes, which are typed as --NAME-mib."""
_HUGE = 10**6
"""A bound from which the help leaves it out."""
_SHORT = {"method": "-m", "max-new-tokens": "-n", "temperature": "-t"}
_PARAMS = ContextVar[Sequence[Any]]("_PARAMS", default=())
"""The options of the command that runs."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def option(about: str, *flags: str, default: str | bool = True, panel: str | None = None, **more: Any) -> Any:
    """An option of the command line: ``typer.Option`` with its help first.

    Args:
        flags: in place of the one that the parameter's name gives.
        default: what the help shows as the default; False: nothing.
        panel: group of options in the help.
        more: for ``typer.Option``.
    """
    return typer.Option(*flags, help=about, show_default=default, rich_help_panel=panel, **more)


def takes(
    name: str,
    kind: Any,
    *,
    stated: Any = None,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    panels: Mapping[str, str] | None = None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
    read: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    **defaults: Any,
) -> Decorator:
    """Decorator of a command: replaces its parameter of a settings class by options, the fields of the class.

    The class is a dataclass whose fields are annotated with options, or one of pydantic: then type, default and help
    are those of the field, whose bounds are checked when the settings are made, before the command begins.

    Args:
        name: the parameter of the decorated function.
        stated: the fields by name, if they are not those of the class.
        only, without: fields that the command offers, and does not offer.
        panels: of options, with the names of their fields, separated by spaces; of the others "Options".
        more: arguments for ``option``, by field.
        read: turns the values of the options into those of the fields.
        defaults: the command's own defaults.
    """
    stated = stated_in(kind) if stated is None else stated
    if not stated:
        hints = get_type_hints(kind, include_extras=True)
        every = [
            _parameter(one.name, hints[one.name], defaults.get(one.name, one.default)) for one in fields(kind)
        ]
    else:
        panel = {field: title for title, names in (panels or {}).items() for field in names.split()}
        every = [
            _stated(one, field, defaults, {"panel": panel.get(one), **(more or {}).get(one, {})})
            for one, field in stated.items()
        ]
    shown = [one for one in every if (only is None or one.name in only) and one.name not in without]

    def make(given: dict[str, Any]) -> Any:
        if not stated:
            return kind(**given)
        values = read({one: value for one, value in given.items() if value is not None})
        values |= {one: value * _MIB for one, value in values.items() if one.endswith("_bytes")}
        return kind(**values)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**given: Any) -> Any:
            value = make({one.name: given.pop(one.name) for one in shown})
            return command(**given, **{name: value})

        own = inspect.signature(command, eval_str=True).parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            each for one in own for each in (shown if one.name == name else (one.replace(kind=keyword),))
        ]
        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def stated_in(kind: Any) -> Mapping[str, Any]:
    """The fields of a settings class of pydantic, by name; none of another."""
    return getattr(kind, "__pydantic_fields__", {})


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter that typer reads as an option."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _stated(name: str, field: Any, defaults: Mapping[str, Any], more: dict[str, Any]) -> inspect.Parameter:
    """The option of a field of pydantic: its type, flags, help and default."""
    about, _, rest = (field.description or "").partition(". ")
    flag = _FLAGS.get(name, re.sub("_s$", "", re.sub("_bytes$", "_mib", name)).replace("_", "-"))
    flags = [f"--{flag}", *([_SHORT[flag]] if flag in _SHORT else [])]
    found, own = _type_of(field.annotation, more.pop("kind", None)), field.default
    if isinstance(own, tuple):
        found, own, about = list[found], None, f"{about.rstrip('.')}; may be repeated"  # type: ignore[valid-type]
        more.setdefault("default", False)
    if own is None and rest.startswith("None: "):
        more.setdefault("default", rest.removeprefix("None: ").partition(". ")[0].rstrip("."))
    if found is bool and own is not False:
        flags = [f"--{flag}/--no-{flag}"]
    about = about.rstrip(".") + (_bounds(name, field) if found in (int, float) else "")
    default = defaults.get(name, own // _MIB if own is not None and name.endswith("_bytes") else own)
    if default is None:
        found = found | None
        if own is not None:
            more.setdefault("default", str(own))
    return _parameter(name, Annotated[found, option(f"{about}.", *flags, **more)], default)


def _bounds(name: str, field: Any) -> str:
    """The bounds of a field of one number as its help shows them, in the option's unit: " (>= 1)"."""
    from sprinter.parameters import limits_of, span_of  # imports pydantic

    unit = _MIB if name.endswith("_bytes") else 1
    near = {bound: at if unit == 1 else -(-at // unit) for bound, at in limits_of(field).items()}
    span = span_of({bound: at for bound, at in near.items() if at < _HUGE})
    return f" ({span.strip()})" if span else ""


def _type_of(annotation: Any, chosen: Any) -> Any:
    """The one type in an annotation that an option has: a choice, or the first one that text can be."""
    from sprinter.parameters import types_in  # imports pydantic

    known = types_in(annotation)
    choice = next(
        (one for one in known if get_origin(one) is Literal and str in map(type, get_args(one))), None
    )
    return chosen or choice or next((one for one in (Path, str, bool, int, float) if one in known), str)


def in_options(message: str) -> str:
    """A message with the names of the present command's options as they are typed: top_p=0 -> --top-p 0."""
    options = [one for one in _PARAMS.get() if one.param_type_name == "option"]
    flags = {flag.lstrip("-").replace("-", "_"): one for one in options for flag in (*one.opts, one.name)}

    def typed(match: re.Match[str]) -> str:
        if (found := flags.get(match[1])) is None:
            return str(match[0])
        if match[1].endswith("_bytes") and match[2][-1].isdecimal():
            return f"{max(found.opts, key=len)} {int(match[2]) // _MIB}"
        if found.is_flag and match[2] in ("True", "False"):
            names = found.opts if match[2] == "True" or not found.secondary_opts else found.secondary_opts
            return str(max(names, key=len))
        return f"{max(found.opts, key=len)} {match[2]}"

    return re.sub(r"(?<![\w(.=-])(\w+)=(True\b|False\b|(?<=_bytes=)-?\d+|\S)", typed, message)


def _shown(context: typer.Context, asked: bool) -> None:
    if asked:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


_HelpAll = Annotated[bool, option("Show all options and exit.", "--help-all", is_eager=True, callback=_shown)]


def listed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --help-all if it has many options."""
    signature = inspect.signature(command, eval_str=True)
    if len(signature.parameters) <= _FEW:
        return command

    @wraps(command)
    def run(**given: Any) -> Any:
        return command(**{name: value for name, value in given.items() if name != _ALL})

    parameters = [*signature.parameters.values(), _parameter(_ALL, _HelpAll, False)]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _write_options(command: TyperCommand | TyperGroup, context: Any, formatter: Any) -> None:
    """Write the sections of arguments and options: all, or those of ``FIRST``."""
    path = context.command_path.partition(" ")[2]
    chosen = [] if _ALL in context.meta else FIRST.get(path, "").split()
    sections: dict[str, list[Any]] = {"Arguments": [], "Options": []}
    for one in command.get_params(context):
        record, title = one.get_help_record(context), "Options"
        if one.param_type_name == "argument":
            title = "Arguments"
        elif chosen and one.name not in (*chosen, _ALL, "help"):
            continue
        elif not chosen:
            title = getattr(one, "rich_help_panel", None) or title
        if record is not None:
            sections.setdefault(title, []).append(record)
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def _refuse_repeated(command: TyperCommand | TyperGroup, context: Any, args: Sequence[str]) -> None:
    """Refuse what names one thing and is given twice: the parser would take the last in silence.

    Raises:
        UserError: names the option.
    """
    order = [] if context.resilient_parsing else command.make_parser(context).parse_args(list(args))[2]
    for one in order:
        known = {one.name, getattr(one, "rich_help_panel", None)}.intersection(_ONCE)
        if known and not one.multiple and order.count(one) > 1:
            raise UserError(f"{max(one.opts, key=len)} was given twice: give it once")


class _Listed:
    """What commands and groups of them have in common: their help lists the options that matter most."""

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        """Parse its part of the line."""
        _refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]

    def invoke(self: Any, ctx: Any) -> Any:
        """Run it; messages are then in the words of its options."""
        _PARAMS.set(self.params)
        return super().invoke(ctx)  # type: ignore[misc]

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the sections of arguments, options and commands."""
        _write_options(self, ctx, formatter)


class ListedCommand(_Listed, TyperCommand):
    """A command whose help lists the options that matter most."""


class LaterCommands(Mapping[str, Any]):
    """Commands by name, each made when it is first looked up.

    Args:
        abouts: the help of each in the list of commands. make: function or group of a name.
    """

    def __init__(self, abouts: Mapping[str, str], make: Callable[[str], Any]) -> None:
        self.abouts, self._make, self._made = abouts, make, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self.abouts:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = _command(name, self._make(name))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.abouts)

    def __len__(self) -> int:
        return len(self.abouts)


def _command(name: str, made: Any) -> Any:
    """A function or a group as typer runs it."""
    if not isinstance(made, typer.Typer):
        function, made = made, typer.Typer(add_completion=False, rich_markup_mode=None)
        made.command(name, cls=ListedCommand)(listed(function))
    return get_command(made)


class CommandGroup(_Listed, TyperGroup):
    """A group of commands, which may do something itself."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of arguments, options and commands."""
        super().format_options(ctx, formatter)
        if isinstance(self.commands, LaterCommands):
            rows = [*self.commands.abouts.items()]
        else:
            rows = [(name, one.get_short_help_str(500)) for name, one in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def group(title: str, about: str, commands: Mapping[str, Callable[..., Any]]) -> typer.Typer:
    """A group of commands.

    Args:
        title, about: its name and help.
        commands: by name; "": what it does without one, in place of showing its help.
    """
    found = typer.Typer(name=title, help=about, cls=CommandGroup, add_completion=False, rich_markup_mode=None)
    for name, command in commands.items():
        if name:
            found.command(name, cls=ListedCommand)(listed(command))
    found.callback(invoke_without_command=True)(listed(commands.get("", show_help)))
    return found


def show_help(context: typer.Context) -> None:
    """What a group does without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
