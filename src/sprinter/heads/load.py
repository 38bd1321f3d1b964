"""Heads of any sort from a directory or a hub id: heads that score, and heads that draft."""

from __future__ import annotations

import os

from sprinter.heads.artifact import load_head
from sprinter.heads.drafting import TokenHeads, read_files
from sprinter.heads.eagle3 import load_eagle3
from sprinter.heads.glide import load_glide
from sprinter.heads.head import Head
from sprinter.heads.medusa import load_medusa

__all__ = ["load_any_head"]


def load_any_head(source: str | os.PathLike[str]) -> Head | TokenHeads:
    """Load heads: those that score tokens (``load_head``), or those that draft (Medusa's, EAGLE-3's, GliDe's).

    Raises:
        UserError: the directory is missing, or what it holds is damaged.
    """
    files = read_files(source)
    if files is not None and "medusa_num_heads" in files.config:
        return load_medusa(files)
    if files is not None and files.config.get("speculators_model_type") == "eagle3":
        return load_eagle3(files)
    if files is not None and files.config.get("sprinter_head") == "glide":
        return load_glide(files)
    return load_head(source)
