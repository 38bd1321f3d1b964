"""Parse specs of arms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from sprinter.bench.arm import Arm
from sprinter.bench.arms.engine import AutoArm, EngineArm
from sprinter.bench.arms.peer_llamacpp import LlamaLookup, LlamaPlain
from sprinter.bench.arms.peer_transformers import (
    Assisted,
    TransformersLookup,
    TransformersPlain,
    TransformersStatic,
)
from sprinter.bench.arms.peer_vllm import VllmDraft, VllmHeads, VllmNgram, VllmPlain
from sprinter.decode.registry import Registry, did_you_mean
from sprinter.decode.spec import METHODS, build_rule, method_table, parse_call, parse_method
from sprinter.engine.lookahead import AUTO
from sprinter.errors import SprinterError, UserError

__all__ = ["ARMS", "arm_names", "parse_arm", "parse_arms"]

ARMS = Registry("arm", "sprinter.bench_arms")
"""Name ("transformers:assisted") → class or function with keyword parameters, all with defaults, that gives an ``Arm``.

Other packages add arms through entry points of the group ``sprinter.bench_arms``. Constructing an arm must be cheap;
slow work belongs in its ``start``.
"""
for _name, _make_arm in (
    ("transformers:plain", TransformersPlain), ("transformers:assisted", Assisted),
    ("transformers:lookup", TransformersLookup), ("transformers:static", TransformersStatic),
    ("llamacpp:plain", LlamaPlain), ("llamacpp:lookup", LlamaLookup),
    ("vllm:plain", VllmPlain), ("vllm:draft_model", VllmDraft), ("vllm:heads", VllmHeads), ("vllm:ngram", VllmNgram),
):  # fmt: skip
    ARMS.add(_name, _make_arm)

_PEERS = (
    "transformers:plain", "transformers:assisted", "transformers:assisted(schedule=heuristic)",
    "transformers:assisted(tokens=20, schedule=dynamic)", "transformers:lookup",
)  # fmt: skip
_VLLM = ("vllm:plain", "vllm:draft_model", "vllm:draft_model(draft_sampling=probabilistic)", "vllm:ngram")


def _methods() -> list[str]:
    """All methods but those that read heads on the target, which come with no pair."""
    methods = ((name, parse_method(name)) for name in METHODS.names())
    return [name for name, method in methods if not (method.accept.needs or method.drafter.by_heads)]


def _all() -> list[str]:
    """Methods and every arm, without those that need a folder of the user's."""
    return [n for n in dict.fromkeys([*_methods(), *_PEERS, *_VLLM, *ARMS.names()]) if n != "vllm:heads"]


_SETS: dict[str, Callable[[], Sequence[str]]] = {
    "methods": _methods, "peers": lambda: _PEERS, "vllm": lambda: _VLLM, "all": _all,
}  # fmt: skip


def parse_arm(text: str) -> Arm:
    """Make an arm from a spec: "svip", "transformers:assisted(tokens=5, schedule=heuristic)", "opt as slack".

    Its ``name`` is the given text, or what follows "as"; its ``spec`` contains all parameters.

    Raises:
        UserError: an unknown name (with a did-you-mean), unknown parameters, values out of range, bad syntax.
        SprinterError: a plug-in cannot be loaded or does not return an arm.
    """
    words = " ".join(text.split())
    spec, named, name = words.rpartition(" as ")
    if not named:
        spec = name = words
    if not spec or not name or name.endswith(" as"):
        raise UserError(
            f"the arm '{text}' is not SPEC or SPEC as NAME: give for example 'opt(epsilon=0.1) as slack'"
        )
    arm = _make(spec)
    arm.name = name
    if not isinstance(arm, Arm):
        raise SprinterError(
            f"what the plug-in of '{spec}' makes is not an arm: it lacks methods of bench.arm.Arm"
        )
    return arm


def parse_arms(texts: Sequence[str]) -> list[Arm]:
    """Make arms from specs and names of sets, in order.

    Sets: "methods" (every method with its defaults, without those that need a head on the target), "peers"
    (transformers), "vllm" (vLLM), "all" (these methods and every arm, including those of plug-ins). An arm in several
    sets is made once.

    Raises:
        UserError: as ``parse_arm``; two arms of one name.
    """
    shared = {spec for text in texts if text in _SETS for spec in _SETS[text]()}
    specs: list[str] = []
    for text in texts:
        named = _SETS[text]() if text in _SETS else [text]
        specs += [spec for spec in named if spec not in specs or spec not in shared]
    arms = [parse_arm(spec) for spec in specs]
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two arms are called '{name}': rename one of them, 'SPEC as NAME'")
    return arms


def arm_names() -> list[dict[str, str]]:
    """One row per name that ``parse_arm`` knows, methods first: name, spec (with defaults), engine, what (it is)."""
    rows = [
        {
            "name": row["name"],
            "spec": row["spec"],
            "engine": EngineArm.engine,
            "what": _what(METHODS.get(row["name"])),
        }
        for row in method_table()
    ]
    for name in ARMS.names():
        factory = ARMS.get(name)
        engine = getattr(factory, "engine", name.partition(":")[0])
        rows.append({"name": name, "spec": _spell(name, {}), "engine": engine, "what": _what(factory)})
    return rows


def _make(spec: str) -> Any:
    if "=" in spec.partition("(")[0]:  # trust=..., stop=...
        return EngineArm(parse_method(spec))
    name, params = parse_call(spec)
    if name == AUTO and {*params} <= {"budget"}:
        return AutoArm(**params)
    if name in METHODS.names():
        return EngineArm(parse_method(spec))
    if name in _SETS:
        raise UserError(
            f"'{name}' is a set of arms, and one is wanted here: give one of {', '.join(_SETS[name]())}"
        )
    if name not in ARMS.names():
        raise did_you_mean("arm", name, [*METHODS.names(), *ARMS.names(), *_SETS])
    arm = build_rule(ARMS, name, params)
    arm.spec = _spell(name, params)
    return arm


def _spell(name: str, params: dict[str, Any]) -> str:
    """Spec with all parameters that are not None."""
    defaults = {key: p.default for key, p in inspect.signature(ARMS.get(name)).parameters.items()}
    inside = ", ".join(f"{key}={value}" for key, value in (defaults | params).items() if value is not None)
    return f"{name}({inside})" if inside else name


def _what(factory: Callable[..., Any]) -> str:
    """First line of a factory's docstring."""
    return (inspect.getdoc(factory) or "").partition("\n")[0]
