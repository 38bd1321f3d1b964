"""Heads from a directory or a hub id: gates, and heads of any sort that score or that draft."""

from __future__ import annotations

import logging
import os

from sprinter.errors import UserError
from sprinter.heads.artifact import load_head, read_head
from sprinter.heads.dflash import is_dflash, load_dflash
from sprinter.heads.drafting import TokenHeads
from sprinter.heads.eagle import is_eagle, load_eagle
from sprinter.heads.eagle3 import load_eagle3
from sprinter.heads.files import read_files
from sprinter.heads.glide import load_glide
from sprinter.heads.head import Head
from sprinter.heads.medusa import load_medusa

__all__ = ["extreme", "load_any_head", "load_gate"]

_NAMES = ("sprinter_head", "speculators_model_type", "medusa_num_heads")
_log = logging.getLogger("sprinter")


def load_any_head(source: str | os.PathLike[str]) -> Head | TokenHeads:
    """Load heads: those that score tokens (``load_head``), or those that draft (Medusa's, EAGLE's, EAGLE-3's, GliDe's,
    DFlash's).

    Raises:
        UserError: the directory is missing, or what it holds is damaged.
    """
    files = read_files(source)
    config, speculators = files.config, files.config.get("speculators_model_type")
    if speculators == "sprinter":
        return read_head(files)
    if "medusa_num_heads" in config:
        heads: TokenHeads = load_medusa(files)
    elif speculators in ("eagle3", "peagle"):
        heads = load_eagle3(files)
    elif is_dflash(files):
        heads = load_dflash(files)
    elif is_eagle(files):
        heads = load_eagle(files)
    elif config.get("sprinter_head") == "glide":
        heads = load_glide(files)
    else:
        found = next(
            (f'"{name}": {config[name]!r}' for name in _NAMES if name in config),
            f"none of {', '.join(_NAMES)}",
        )
        raise UserError(
            f"'{source}' is not a head that Sprinter reads: its config.json has {found}; give one of 'sprinter gate "
            "train' or 'sprinter draft train', Medusa's, EAGLE's or DFlash's as their authors publish them, or one of "
            "EAGLE-3 or P-EAGLE in the format of speculators"
        )
    heads.id, heads.revision = files.id, files.revision
    return heads


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
