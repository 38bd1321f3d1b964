"""Options of commands that compute on a Ray cluster if asked."""

from __future__ import annotations

from typing import Annotated

import typer

from sprinter.cli.loading import Loading
from sprinter.errors import UserError

__all__ = ["RayAddressOption", "WorkersOption", "check_ray"]

WorkersOption = Annotated[int | None, typer.Option(help="Workers of the ray engine.", show_default="2")]
RayAddressOption = Annotated[
    str | None, typer.Option(help="Address of a Ray cluster.", show_default="one on this machine")
]
_ALONE = {"trust_remote_code", "device_map", "draft_dtype", "draft_runner"}
"""Options without which the workers of Ray load models."""


def check_ray(engine: str, loading: Loading) -> None:
    """Refuse options that workers would not know.

    Raises:
        UserError: there is one.
    """
    if engine == "ray" and (given := loading.given().keys() & _ALONE):
        option = sorted(given)[0].replace("_", "-")
        raise UserError(f"the workers of --engine ray load models without --{option}: use --engine local")
