"""``sprinter methods``: lists every decoding method with its defaults."""

from __future__ import annotations

from sprinter.cli.options import JsonOption
from sprinter.cli.pages import console, print_json, print_table

__all__ = ["methods"]


def methods(json: JsonOption = False) -> None:
    """List the decoding methods, their rules, and whether they preserve the target distribution."""
    import sprinter
    from sprinter.decode.spec import other_rules

    rows, others = sprinter.methods(), other_rules()
    if json:
        print_json({"methods": rows, "other_rules": others})
        return
    from rich.text import Text

    narrow = console().width < 140  # then the paper is shown below the method
    table = []
    for row in rows:
        # Without the rules' parameters, which follow from the method's own; --json has both.
        rules = ((row[part] or "–").partition("(")[0] for part in ("drafter", "trust", "stop", "accept"))
        name, paper = Text(row["spec"]), Text(row["paper"], "dim")
        if narrow:
            name.append("\n").append_text(paper)
        table.append((name, *rules, "yes" if row["lossless"] else "no", *(() if narrow else (paper,))))
    columns = ("method", "drafter", "trust", "stop", "accept", "lossless", *(() if narrow else ("paper",)))
    print_table(columns, table, left=len(columns))
    console().print(f"Rules of none of these, to compose with: {', '.join(others)}.")
    console().print(
        "A method is used as 'name' or 'name(param=value)', or composed: trust=gate(tau=0.5),stop=fixed(gamma=8). "
        "tau=recorded: the one that the pair's gate records. Without a method decoding is exact: auto, or "
        "autoregressive where no draft can pay."
    )
