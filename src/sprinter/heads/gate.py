"""Public names for gates. A gate is a head of kind ``gate``.

The paper's gate (SPRINTER, section 3) is one linear layer and a sigmoid on the hidden state that produced q: d + 1
parameters for hidden size d. It reads the prefix, not the token that it judges. Other gates read more features or have
other networks.
"""

from __future__ import annotations

import logging
import os

from sprinter.errors import UserError
from sprinter.heads.artifact import load_head, save_head
from sprinter.heads.head import GateHead, Head, HeadConfig

__all__ = ["GateConfig", "GateHead", "extreme", "load_gate", "save_gate"]

_log = logging.getLogger("sprinter")

GateConfig = HeadConfig
"""Configuration of a gate."""
save_gate = save_head
"""Write a gate's artifact; see ``save_head``."""


def load_gate(source: str | os.PathLike[str]) -> Head:
    """Load a gate, linear or not, from a directory or a hub id.

    Raises:
        UserError: as ``load_head``, or the head is of another kind.
    """
    head = load_head(source)
    if head.config.kind != "gate":
        raise UserError(
            f"'{source}' is a {head.config.kind} head, not a gate: give it as a head, and a gate as the gate"
        )
    if (line := extreme(head.config.tau, head.config.trusted)) is not None:
        _log.warning("the gate in '%s' %s", source, line)
    return head


def extreme(tau: float, trusted: float | None) -> str | None:
    """Warning about a gate whose threshold trusts every token or none; None for any other gate.

    Args:
        tau: the threshold.
        trusted: share of draft tokens that score at least ``tau``; None: not measured.
    """
    if trusted == 0:
        return f"trusts no token at its tau={tau:g}: every token is checked; lower it with sprinter(tau=...)"
    if trusted == 1:
        return f"trusts every token at its tau={tau:g}: the text is nearly the draft's; raise it with sprinter(tau=...)"
    return None
