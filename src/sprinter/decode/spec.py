"""The spec language and the table of methods.

A spec is a preset, ``name`` or ``name(param=value, ...)``, or a composition such as
``trust=gate(tau=0.5),stop=fixed(gamma=8),accept=exact,cap=20``. Both accept ``cap=`` and the guards
``head=``, ``only=``, ``tail_ratio=`` and ``budget=``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sprinter.decode.method import VALUES, Method, defaults_of, spell
from sprinter.decode.presets import preset
from sprinter.decode.registry import ACCEPT, DRAFTER, METHODS, STOP, TRUST, Registry
from sprinter.errors import UserError, did_you_mean

__all__ = [
    "ACCEPT", "DRAFTER", "METHODS", "STOP", "TRUST", "Method", "build_rule",
    "full_spec", "is_auto", "method_table", "other_rules", "parse_call", "parse_method", "preset", "spell",
    "split_spec",
]  # fmt: skip


_NESTED: Mapping[str, Registry] = {"under": STOP, "grow": DRAFTER, "otherwise": DRAFTER}
"""Parameters that are rules themselves."""
_PARTS: Mapping[str, Registry] = {"drafter": DRAFTER, "trust": TRUST, "stop": STOP, "accept": ACCEPT}
_KINDS = {"drafter": "a drafter", "trust": "a trust rule", "stop": "a stop rule", "accept": "an accept rule"}


def full_spec(method: Method) -> str:
    """Its name, a spec that parses to the same method; its repr, which does not parse, if there is no such spec."""
    try:
        return method.name if parse_method(method.name).is_as(method) else repr(method)
    except UserError:
        return repr(method)


def method_table() -> list[dict[str, Any]]:
    """One row per method at its defaults: name, spec, drafter, trust, stop, accept, lossless, paper.

    Parts that a method never uses are None: plain decoding uses no rule, the draft model alone no accept rule.
    """
    rows = []
    for name in METHODS.names():
        method = _method_of(name, {})
        parts = {part: spell(getattr(method, part)) for part in ("drafter", "trust", "stop", "accept")}
        unused = (
            ("trust", "stop", "accept")
            if not method.drafter.proposes
            else ()
            if method.needs_target
            else ("accept",)
        )
        rows.append(
            {
                "name": name,
                "spec": method.name,
                **parts,
                **dict.fromkeys(unused),
                "lossless": method.lossless(),
            }
            | {"paper": method.paper}
        )
    return rows


def other_rules() -> list[str]:
    """Rules and drafters that no method has at its defaults, as parts of a spec: ``accept=block``."""
    used = {f"{part}={row[part]}".partition("(")[0] for row in method_table() for part in _PARTS}
    found = []
    for part, registry in _PARTS.items():
        for name in registry.names():
            if f"{part}={name}" not in used:
                usual = inspect.signature(registry.get(name)).parameters.values()
                values = ((one.name, one.default) for one in usual if one.default not in (None, one.empty))
                inside = ", ".join(
                    f"{key}={spell(value) if dataclasses.is_dataclass(value) else value}"
                    for key, value in values
                )
                found.append(f"{part}={name}({inside})" if inside else f"{part}={name}")
    return found


def parse_method(spec: str | Method) -> Method:
    """A Method from a spec string (a Method passes through).

    Raises:
        UserError: unknown names (with a did-you-mean), unknown parameters, values out of range, bad syntax.
    """
    if isinstance(spec, Method):
        return spec
    if not isinstance(spec, str):
        raise UserError(f"the method is {spec!r}: give a name such as 'sprinter', a spec, or a Method")
    items = split_spec(spec.strip())
    if not items or items == [""]:
        raise UserError("the method is empty: give a name such as 'sprinter' or 'speculative(gamma=5)'")
    if len(items) == 1 and _assignment(items[0]) is None:
        return _preset_from(items[0])
    return _composed_from(spec, items)


def _preset_from(text: str) -> Method:
    name, params = parse_call(text)
    if name not in METHODS.names() and (part := _part_of(name)) is not None:
        raise UserError(f"'{name}' is {_KINDS[part]}: write {part}={text}")
    known = _parameters(METHODS.get(name))
    values = {key: params.pop(key) for key in VALUES if key in params and key not in known}
    method = _method_of(name, params)
    return method.replace(**values) if values else method


def is_auto(method: Method) -> bool:
    """Whether the method was chosen by the preset ``auto``."""
    return method.preset == "auto"


def _method_of(name: str, params: dict[str, Any]) -> Method:
    """Build a method with a registered function; name and paper default to the registered ones."""
    method = build_rule(METHODS, name, params)
    if not isinstance(method, Method):
        raise UserError(f"the function of method '{name}' returned {method!r}: it must return a Method")
    factory = METHODS.get(name)
    paper = method.paper or getattr(factory, "paper", "")
    return dataclasses.replace(method, preset=method.preset or name, paper=paper)


def _composed_from(spec: str, items: list[str]) -> Method:
    parts: dict[str, Any] = {}
    for item in items:
        pair = _assignment(item)
        if pair is None:
            raise UserError(f"'{item}' in method '{spec}' is not part=rule: write {_instead(item, items)}")
        key, value = pair
        if key in parts:
            raise UserError(f"'{key}=' stands twice in method '{spec}'")
        if key in VALUES:
            parts[key] = _value(value)
        elif key in _PARTS:
            name, params = parse_call(value)
            parts[key] = build_rule(_PARTS[key], name, params)
        else:
            raise did_you_mean("part of a method", key, [*_PARTS, *VALUES])
    return Method(**{**defaults_of(parts), **parts})


def _part_of(name: str) -> str | None:
    """The part of a method that a rule or drafter of this name can be; None: there is none."""
    return next((part for part, registry in _PARTS.items() if name in registry.names()), None)


def _instead(item: str, items: list[str]) -> str:
    """What was meant by an item that is not part=rule: a preset with the other items, a rule, or else any part."""
    name, _, inside = item.partition("(")
    if name in METHODS.names():
        others = [one for one in items if one is not item]
        known = {*VALUES, *_parameters(METHODS.get(name))}
        if all((pair := _assignment(one)) is not None and pair[0] in known for one in others):
            return f"{name}({', '.join([*filter(None, [inside.removesuffix(')')]), *others])})"
    elif (part := _part_of(name)) is not None:
        return f"{part}={item}"
    return "trust=..., stop=..., accept=..., cap=..., head=..., only=..., tail_ratio=... or budget=..."


def build_rule(registry: Registry, name: str, params: dict[str, Any]) -> Any:
    """Build a rule or drafter by name; raises a UserError for an unknown name or parameter."""
    factory = registry.get(name)
    known = _parameters(factory)
    for key, own in _NESTED.items():
        if key in known and isinstance(params.get(key), str):
            params = {**params, key: build_rule(own, *parse_call(params[key]))}
    for key in params:
        if key not in known:
            if not known:
                raise UserError(f"{registry.kind} '{name}' takes no parameters, and got '{key}'")
            raise did_you_mean(f"parameter of {name}", key, list(known))
    return factory(**params)


def _parameters(factory: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(factory).parameters)


def split_spec(text: str) -> list[str]:
    """Split at the commas outside parentheses."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth != 0:
        raise UserError(f"parentheses do not match in method '{text}'")
    return [part.strip() for part in parts]


def _assignment(text: str) -> tuple[str, str] | None:
    """Split ``key=value`` at an equals sign outside parentheses; None if there is none."""
    head, sign, tail = text.partition("=")
    return (head.strip(), tail.strip()) if sign and "(" not in head else None


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``name`` or ``name(key=value, ...)``."""
    name, opened, inside = text.partition("(")
    if opened and not inside.endswith(")"):
        raise UserError(f"'{text}' does not end with its closing parenthesis")
    params: dict[str, Any] = {}
    for item in split_spec(inside[:-1].strip()) if inside[:-1].strip() else []:
        pair = _assignment(item)
        if pair is None or not pair[0]:
            raise UserError(f"'{item}' in '{text}' is not name=value: parameters are given by keyword")
        if pair[0] in params:
            raise UserError(f"'{pair[0]}=' stands twice in '{text}'")
        params[pair[0]] = _value(pair[1])
    return name.strip(), params


def _value(text: str) -> Any:
    """Parse a number or true/false/none; other text stays a string."""
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
