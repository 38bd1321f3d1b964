"""Heads of any sort from a directory or a hub id: heads that score, and heads that draft."""

from __future__ import annotations

import os

from sprinter.errors import UserError
from sprinter.heads.artifact import load_head
from sprinter.heads.drafting import TokenHeads, read_files
from sprinter.heads.eagle import is_eagle, load_eagle
from sprinter.heads.eagle3 import load_eagle3
from sprinter.heads.glide import load_glide
from sprinter.heads.head import Head
from sprinter.heads.medusa import load_medusa

__all__ = ["load_any_head"]

_NAMES = ("sprinter_head", "speculators_model_type", "medusa_num_heads")


def load_any_head(source: str | os.PathLike[str]) -> Head | TokenHeads:
    """Load heads: those that score tokens (``load_head``), or those that draft (Medusa's, EAGLE's, EAGLE-3's, GliDe's).

    Raises:
        UserError: the directory is missing, or what it holds is damaged.
    """
    files = read_files(source)
    if files is None:
        raise UserError(f"'{source}' is not a head: it has no config.json")
    config, speculators = files.config, files.config.get("speculators_model_type")
    if "medusa_num_heads" in config:
        return load_medusa(files)
    if speculators == "eagle3":
        return load_eagle3(files)
    if is_eagle(files):
        return load_eagle(files)
    if config.get("sprinter_head") == "glide":
        return load_glide(files)
    if speculators == "sprinter":
        return load_head(source)
    found = next(
        (f'"{name}": {config[name]!r}' for name in _NAMES if name in config), f"none of {', '.join(_NAMES)}"
    )
    raise UserError(
        f"'{source}' is not a head that Sprinter reads: its config.json has {found}; give one of 'sprinter gate train' "
        "or 'sprinter draft train', Medusa's or EAGLE's as their authors publish them, or EAGLE-3's in the format of "
        "speculators"
    )
