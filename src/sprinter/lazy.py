"""Lazy imports: public names of a package are imported at first use, so that importing the package stays cheap."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Its names are listed once, as imports for type checkers: ``from home import Name as Name`` in its own source, below
    ``if TYPE_CHECKING:``.

    Args:
        package: the package's ``__name__``.
    """
    own = sys.modules[package]
    source = own.__spec__.loader.get_source(package)  # type: ignore[union-attr]
    if source is None:  # byte code alone
        raise ImportError(
            f"{package} reads its names from its source, which is not installed: install it with pip"
        )
    blocks = [block for block in ast.parse(source).body if isinstance(block, ast.If)]
    imports = [one for block in blocks for one in block.body if isinstance(one, ast.ImportFrom)]
    home = {str(name.asname): (str(one.module), name.name) for one in imports for name in one.names}

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module, inside = home[name]
        value = getattr(import_module(module), inside)
        setattr(own, name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(own), *home})

    order = sorted(home, key=lambda name: (not name.isupper(), name[0].islower(), name))
    return __getattr__, __dir__, order
