"""Pairs by name, as `serve` and `doctor` take them: ``--pair NAME=OPTION=VALUE,...``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

from sprinter.cli.loading import Loading
from sprinter.errors import UserError
from sprinter.parameters import types_in

__all__ = ["named_pairs", "split_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_OF_ALL = {"device", "device_map", "dtype", "cache_dtype", "runner", "compile"}
"""Options of loading that may be given once for all pairs."""


def named_pairs(given: Sequence[str], loading: Loading) -> list[tuple[str, Loading]]:
    """Name and options of each pair, those of ``loading`` where it does not say otherwise.

    Raises:
        UserError: no such option; one that is of one pair is in ``loading``.
    """
    if own := sorted(loading.given().keys() - _OF_ALL):
        raise UserError(
            f"{own[0]}={loading.given()[own[0]]} is of one pair: write it into --pair NAME={own[0]}=..."
        )
    found = []
    for one in given:
        name, options = split_name(one, "--pair", "NAME=target=...")
        found.append((name, replace(loading, **_options(options, name))))
    return found


def split_name(given: str, flag: str, form: str) -> tuple[str, str]:
    """The name and the rest of an option."""
    name, equals, rest = given.partition("=")
    if not equals or not _NAME.fullmatch(name.replace("@", "-")):
        raise UserError(f"{flag} {given} is not {form}: write {flag} {form}")
    return name, rest


def _options(given: str, name: str) -> Mapping[str, Any]:
    """Options of loading in text; a comma that no option follows belongs to a value, as between servers of a target."""
    names, kinds = {one.name for one in fields(Loading)}, get_type_hints(Loading)
    found: dict[str, Any] = {}
    for part in re.split(r",(?=[a-z_-]+=)", given) if given else ():
        option, equals, value = part.partition("=")
        option = option.strip().replace("-", "_")
        if option not in names or not equals or not value:
            raise UserError(
                f"--pair {name}: {part!r} is no option of loading: give {', '.join(sorted(names))}"
            )
        if option == "head":
            found[option] = [*found.get(option, ()), value]
        elif option in found:
            raise UserError(f"--pair {name}: {option} was given twice: give it once")
        elif bool in (known := types_in(kinds[option])):
            if value not in ("true", "false"):
                raise UserError(f"--pair {name}={part} is unknown: give true or false")
            found[option] = value == "true"
        elif (choices := [each for each in known if isinstance(each, str)]) and value not in choices:
            raise UserError(f"--pair {name}={part} is unknown: give {' or '.join(sorted(choices))}")
        else:
            found[option] = value
    return found
