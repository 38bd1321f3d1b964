"""``sprinter bench list``: names of suites and arms."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sprinter.cli.pages import console, print_json

__all__ = ["command"]


def command(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """List the names of the suites and arms."""
    from sprinter.bench.arms import arm_names
    from sprinter.bench.suites import suite_names

    suites: dict[str, str] = suite_names()
    arms: list[dict[str, Any]] = arm_names()
    if json:
        print_json({"suites": suites, "arms": arms})
        return
    from rich import box
    from rich.table import Table

    table = Table(title="suites", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("name", "what it is"):
        table.add_column(head)
    for name, what in suites.items():
        table.add_row(name, what)
    console().print(table)
    table = Table(title="arms", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("name", "spec", "engine"):
        table.add_column(head)
    for arm in arms:
        table.add_row(arm["name"], arm["spec"], arm["engine"])
    console().print(table)
