"""The files of the page at ``/``. They load nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["PATHS", "TYPES", "read_static"]

_SCRIPTS = ("answer.js", "api.js", "methods.js", "page.js", "picture.js")
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    **dict.fromkeys(_SCRIPTS, "text/javascript; charset=utf-8"),
}
"""Media type of each file."""
PATHS = frozenset({"/", *(f"/static/{name}" for name in TYPES)})
"""Paths of the files on the server."""


def read_static(name: str) -> bytes:
    """A file's contents.

    Raises:
        KeyError: there is no such file.
    """
    if name not in TYPES:
        raise KeyError(name)
    return files("sprinter.serve").joinpath("static", name).read_bytes()
