"""``sprinter methods``: every decoding method at its defaults."""

from __future__ import annotations

from typing import Annotated

import typer

from sprinter.cli.pages import console, print_json

__all__ = ["methods"]


def methods(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the decoding methods: which rules each is made of, and whether it keeps the target's law."""
    import sprinter

    rows = sprinter.methods()
    if json:
        print_json({"methods": rows})
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("method", "trust", "stop", "accept", "lossless", "paper"):
        table.add_column(name, overflow="fold")
    for row in rows:
        kept = "yes" if row["lossless"] else "no"
        table.add_row(
            *(
                Text(str(cell))
                for cell in (row["spec"], row["trust"], row["stop"], row["accept"], kept, row["paper"])
            )
        )
    out = console()
    out.print(table)
    out.print(
        "A method is used as 'name' or 'name(param=value)', or composed: trust=gate(tau=0.5),stop=fixed(gamma=8)"
    )
