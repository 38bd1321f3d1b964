"""``sprinter advise``: from three answers to one command line. docs/which-method.md holds the same rules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, cast, get_args

import typer

from sprinter.cli.options import JsonOption
from sprinter.cli.pages import console, print_json
from sprinter.cli.signature import option
from sprinter.errors import UserError

__all__ = ["RULES", "Advice", "Case", "advice", "advise"]

Where = Literal["alone", "server", "remote"]

NOTHING, CHEAP, SLOW, DEAR = 0.01, 0.1, 0.13, 0.6
"""A drift that buys no speed; costs of a draft step up to which trust was seen to gain, without and with slow calls;
the cost from which no draft gains 10 % where 80 % of its tokens are kept: (1 + 0.8) / (1 + 0.6) is 1.13."""


class Case(NamedTuple):
    """What is asked: the mean drift that a text may have, the cost of a draft step (None: no draft), and where."""

    drift: float
    cost: float | None
    where: Where


@dataclass(frozen=True, slots=True)
class Advice:
    """A rule.

    Attributes:
        when: in words. fits: the same of answers.
        command: with TARGET, DRAFT, PROMPT and DRIFT to fill in.
        why: one sentence. page: where it was measured or decided, below docs/.
    """

    when: str
    fits: Callable[[float, float, Where], bool]
    command: str
    why: str
    page: str


_LOSSY = '--method "certain(threshold=1.0, tail=8)" --budget DRIFT'
_ALONE, _URL = (
    "sprinter generate PROMPT --target TARGET",
    "sprinter generate PROMPT --target https://HOST:8000/v1#NAME",
)
_NONE = float("inf")
RULES = (
    Advice(
        "many texts at once, no draft model",
        lambda drift, cost, where: where == "server" and cost == _NONE,
        "sprinter serve --target TARGET --rows 16",
        "Copies help one stream but cost throughput with several; the default stops them while they lose time.",
        "results/serve.md",
    ),
    Advice(
        "many texts at once",
        lambda drift, cost, where: where == "server",
        "sprinter serve --target TARGET --draft DRAFT --rows 16",
        "Rows share forward passes, so drafts gain less; the default is exact and stops drafting if that loses time.",
        "decisions/0046-never-slower.md",
    ),
    Advice(
        "no draft model",
        lambda drift, cost, where: cost == _NONE,
        _ALONE,
        "Without a draft the default copies what the text repeats, exactly, as long as that gives a speedup.",
        "methods/README.md#auto",
    ),
    Advice(
        f"the target behind a network; drift up to {NOTHING:g}, or a draft step over {SLOW:g} of a target pass",
        lambda drift, cost, where: where == "remote" and (drift <= NOTHING or cost > SLOW),
        f"{_URL} --draft DRAFT",
        "With delays of 20 and 100 ms the exact default was as fast as trust within a budget of 0.05.",
        "results/serve.md#a-target-on-a-server-delays-of-0-20-and-100-ms-qwen25-coder-15b-and-05b",
    ),
    Advice(
        "the target behind a network, more drift and a cheaper draft",
        lambda drift, cost, where: where == "remote",
        f"{_URL} --draft DRAFT {_LOSSY}",
        "Slow calls and a cheap draft leave room for trust; measure its gain on your own answers.",
        "studies/when-it-pays.md#what-was-found",
    ),
    Advice(
        f"a draft step over {DEAR:g} of a target pass",
        lambda drift, cost, where: cost > DEAR,
        _ALONE,
        "A draft this expensive gains less than 10 %, even if the target keeps 80 % of its tokens: leave it out.",
        "decisions/0066-defaults.md",
    ),
    Advice(
        f"drift up to {NOTHING:g}",
        lambda drift, cost, where: drift <= NOTHING,
        f"{_ALONE} --draft DRAFT",
        "At this drift no lossy method was over 1.05 times as fast as the best exact one; the default is exact.",
        "studies/when-it-pays.md#what-was-found",
    ),
    Advice(
        f"more drift, a draft step over {CHEAP:g} of a target pass",
        lambda drift, cost, where: cost > CHEAP,
        f"{_ALONE} --draft DRAFT",
        "Trust gains much only with drafts of at most a tenth of the target's cost: stay exact.",
        "studies/when-it-pays.md#what-follows",
    ),
    Advice(
        "more drift and a cheaper draft",
        lambda drift, cost, where: True,
        f"{_ALONE} --draft DRAFT {_LOSSY}",
        "A draft this cheap leaves room for trust; measure its gain on your own answers, or train a gate on harm.",
        "studies/when-it-pays.md#what-was-found",
    ),
)
"""The first that fits counts."""


def advice(answers: Case) -> Advice:
    """The rule for these answers."""
    cost = _NONE if answers.cost is None else answers.cost
    return next(one for one in RULES if one.fits(answers.drift, cost, answers.where))


def advise(
    drift: Annotated[
        float | None,
        option(
            "Mean drift that a text may have; 0: the target's own distribution.",
            min=0,
            max=1,
            default="asked",
        ),
    ] = None,
    cost: Annotated[
        str | None,
        option(
            "Time of a draft step over that of a target pass, about the ratio of their sizes; none: no draft.",
            default="asked",
        ),
    ] = None,
    where: Annotated[
        Where | None,
        option(
            "alone: one text at a time. server: many. remote: the target behind a network.", default="asked"
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Ask three questions, then print the command line for your case, and the reason for it."""
    if None in (drift, cost, where) and not _asks():
        raise UserError("there is nobody to ask: give --drift, --cost and --where")
    if drift is None:
        drift = typer.prompt(
            "Mean drift that a text may have (0: the target's own distribution)", 0.0, type=float
        )
    if cost is None:
        cost = typer.prompt("Time of a draft step over that of a target pass (none: no draft)", "none")
    if where is None:
        where = typer.prompt("Where it runs: alone, server or remote", "alone")
    found = advice(_case(drift, cost, where))
    command = found.command.replace("DRIFT", f"{drift:g}")
    if json:
        print_json({"command": command, "why": found.why, "page": f"docs/{found.page}"})
        return
    page = console()
    page.print(command, markup=False, soft_wrap=True, highlight=False)
    page.print(f"{found.why} See docs/{found.page}.", markup=False, soft_wrap=True, highlight=False)


def _asks() -> bool:
    """Whether somebody sits at a terminal."""
    return sys.stdin.isatty()


def _case(drift: float, cost: str, where: str) -> Case:
    """The answers, checked."""
    try:
        number = None if cost == "none" else float(cost)
    except ValueError:
        number = -1.0
    if number is not None and not 0 < number < _NONE:
        raise UserError(f"--cost {cost} is not a cost: give a number above 0, such as 0.3, or none")
    if not 0 <= drift <= 1:
        raise UserError(f"--drift {drift:g} is not a mean drift: give a number in [0, 1]")
    if where not in get_args(Where):
        raise UserError(f"--where {where} is unknown: give alone, server or remote")
    return Case(drift, number, cast(Where, where))
