"""The spec language and the table of methods.

A spec is a preset, ``name`` or ``name(param=value, ...)``, or a composition such as
``trust=gate(tau=0.5),stop=fixed(gamma=8),accept=exact,cap=20``. Both accept ``cap=`` and the guards
``head=``, ``only=``, ``tail_ratio=`` and ``budget=``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from sprinter.decode.method import Method
from sprinter.decode.presets import preset, spelled
from sprinter.decode.registry import ACCEPT, DRAFTER, METHODS, STOP, TRUST, Registry, did_you_mean
from sprinter.decode.stop import Fixed, Never, Untrusted
from sprinter.decode.trust import FILLED_IN, TrustRule
from sprinter.errors import UserError

__all__ = [
    "ACCEPT", "DRAFTER", "METHODS", "STOP", "TRUST", "Method", "build_rule",
    "full_spec", "is_auto", "method_table", "parse_call", "parse_method", "preset", "with_values",
]  # fmt: skip


VALUES = ("cap", "head", "only", "tail_ratio", "budget")
"""Parts of a method that are numbers or names, not rules."""
_NESTED: Mapping[str, Registry] = {"under": STOP, "grow": DRAFTER}
"""Parameters that are rules themselves."""


def spell(rule: object) -> str:
    """A rule as a spec writes it, without parameters that are None by default: ``gate(tau=0.5)``."""
    for registry in (TRUST, STOP, ACCEPT, DRAFTER):
        for name in registry.names():
            if registry.get(name) is type(rule):
                values = [(f.name, getattr(rule, f.name)) for f in dataclasses.fields(rule)]  # type: ignore[arg-type]
                inside = ", ".join(
                    f"{key}={spell(value) if dataclasses.is_dataclass(value) else value}"
                    for key, value in values
                    if value is not None
                )
                return f"{name}({inside})" if inside else name
    return repr(rule)


def full_spec(method: Method) -> str:
    """A spec that parses to the same rules; the method's repr, which does not parse, if there is no such spec."""
    rules = {part: spell(getattr(method, part)) for part in ("drafter", "trust", "stop", "accept")}
    plain = {name: getattr(method, name) for name in VALUES}
    rules |= {
        name: str(value) for name, value in plain.items() if name == "cap" or value != getattr(Method(), name)
    }
    composed = _joined(rules)
    for spec in (method.name, composed):
        try:
            parsed = parse_method(spec)
        except UserError:
            continue
        if dataclasses.replace(parsed, name=method.name, paper=method.paper) == method:
            return spec
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


def parse_method(spec: str | Method) -> Method:
    """A Method from a spec string (a Method passes through).

    Raises:
        UserError: unknown names (with a did-you-mean), unknown parameters, values out of range, bad syntax.
    """
    if isinstance(spec, Method):
        return spec
    if not isinstance(spec, str):
        raise UserError(f"the method is {spec!r}: give a name such as 'sprinter', a spec, or a Method")
    items = _split(spec.strip())
    if not items or items == [""]:
        raise UserError("the method is empty: give a name such as 'sprinter' or 'speculative(gamma=5)'")
    if len(items) == 1 and _assignment(items[0]) is None:
        return _preset_from(items[0])
    return _composed_from(spec, items)


def _preset_from(text: str) -> Method:
    name, params = parse_call(text)
    known = _parameters(METHODS.get(name))
    values = {key: params.pop(key) for key in VALUES if key in params and key not in known}
    method = _method_of(name, params)
    return with_values(method, values) if values else method


def is_auto(method: Method) -> bool:
    """Whether the method was chosen by the preset ``auto``."""
    return method.name.partition("(")[0] == "auto"


def with_values(method: Method, values: Mapping[str, Any]) -> Method:
    """The method with other values of ``VALUES``, which its name says too.

    Raises:
        UserError: a value is out of range, or does not go with the method.
    """
    name = method.name
    if name == Method().name:  # no spec
        return dataclasses.replace(method, **values)
    own, params = parse_call(name) if _assignment(name) is None else ("", {})
    if own in METHODS.names() and {*values} <= {*_parameters(METHODS.get(own))}:  # the preset's own business
        return _method_of(own, {**params, **values})
    for key in values:
        name = re.sub(rf"^{key}=[^,()]*,|(, ?|(?<=\()){key}=[^,()]*", "", name)
        name = name.replace("(, ", "(").replace("()", "")
    composed = "=" in name.partition("(")[0]
    inside = ("," if composed else ", ").join(f"{key}={value}" for key, value in values.items())
    named = (
        f"{name},{inside}" if composed else f"{name[:-1]}, {inside})" if "(" in name else f"{name}({inside})"
    )
    return dataclasses.replace(method, **values, name=named)


def _method_of(name: str, params: dict[str, Any]) -> Method:
    """Build a method with a registered function; name and paper default to the registered ones."""
    method = build_rule(METHODS, name, params)
    if not isinstance(method, Method):
        raise UserError(f"the function of method '{name}' returned {method!r}: it must return a Method")
    factory = METHODS.get(name)
    unnamed = method.name == Method().name
    return dataclasses.replace(
        method,
        name=spelled(name, factory, params) if unnamed else method.name,
        paper=method.paper or getattr(factory, "paper", ""),
    )


def _composed_from(spec: str, items: list[str]) -> Method:
    parts: dict[str, Any] = {}
    written: dict[str, str] = {}
    registries = {"drafter": DRAFTER, "trust": TRUST, "stop": STOP, "accept": ACCEPT}
    for item in items:
        pair = _assignment(item)
        if pair is None:
            raise UserError(
                f"'{item}' in method '{spec}' is not part=rule: write trust=..., stop=..., accept=..., cap=..., "
                "head=..., only=..., tail_ratio=... or budget=..."
            )
        key, value = pair
        written[key] = value
        if key in parts:
            raise UserError(f"'{key}=' stands twice in method '{spec}'")
        if key in VALUES:
            parts[key] = _value(value)
        elif key in registries:
            name, params = parse_call(value)
            parts[key] = build_rule(registries[key], name, params)
            if any(
                word in (whole := spell(parts[key])) for word in FILLED_IN
            ):  # kept in the name, to be filled in
                written[key] = whole
        else:
            raise did_you_mean("part of a method", key, [*registries, *VALUES])
    trust = parts.get("trust")
    trusts = isinstance(trust, TrustRule) and not trust.never
    defaults = {"stop": Untrusted(), "cap": 20} if trusts else {"stop": Fixed(), "cap": 40}
    if getattr(parts.get("drafter"), "levels", None) is not None:  # its trees end by themselves
        defaults["stop"] = Never()
    return Method(**{**defaults, **parts}, name=_joined(written))


def _joined(written: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in written.items()).replace(" ", "")


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


def _split(text: str) -> list[str]:
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
    for item in _split(inside[:-1].strip()) if inside[:-1].strip() else []:
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
