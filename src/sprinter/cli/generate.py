"""``sprinter generate``: generates one text, coloured by origin, or the texts of a file of prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sprinter.cli.generate_many import ROWS, ResultsFile, generate_many, read_prompts, settings_of
from sprinter.cli.generating import AT_DEFAULTS, generates
from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.pages import JsonPage, Page, PlainPage, TerminalPage
from sprinter.cli.prompts import read_prompt
from sprinter.engine.options import GenerationKeywords, GenerationOptions
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.decode.method import Method

__all__ = ["generate"]

_MANY = "Many prompts"  # panel on the help page


@loads()
@generates()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT|-", help="Text to continue; - reads standard input.", show_default=False
        ),
    ] = None,
    options: GenerationKeywords = AT_DEFAULTS,
    loading: Loading = Loading(),
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts: .txt, one per line, or .jsonl. Prints one JSON object per line.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            help="Field of a .jsonl file that holds the prompt.",
            show_default="text, prompt, question, turns or content",
            rich_help_panel=_MANY,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Append the lines to this file; the same command again continues an interrupted run.",
            show_default="standard output",
            rich_help_panel=_MANY,
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Texts generated at the same time.", show_default=str(ROWS), rich_help_panel=_MANY
        ),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete the contents of --out first.", rich_help_panel=_MANY)
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> int:
    """Generate a text; show the origin of each token and the statistics.

    With --prompts: one text per prompt, with seeds from --seed on; exit status 1 if a prompt has no text.
    """
    many = {"--field": field, "--out": out, "--rows": rows, "--restart": restart or None}
    if prompts is None and (useless := [option for option, value in many.items() if value is not None]):
        raise UserError(f"{useless[0]} goes with --prompts: give it too, or leave {useless[0]} out")
    if prompt is None and prompts is None:
        raise UserError(
            "missing argument 'PROMPT|-': give a prompt, - for standard input, or a file of them as --prompts "
            "(see 'sprinter generate --help')"
        )
    if prompt is not None and prompts is not None:
        raise UserError("a prompt and --prompts exclude each other: give one of them")
    if prompts is not None and out is None and (json or restart):
        raise UserError("--json and --restart go with --out: without it the lines of --prompts are printed")
    if options["logprobs"] is not None and prompts is None and not json:
        raise UserError("--logprobs goes with --json or --prompts, whose objects hold them: give one of them")
    text = "" if prompt is None else read_prompt(prompt)
    wanted = read_prompts(prompts, field) if prompts is not None else []
    request = _checked(options)
    if loading.target is not None:
        _check_models(request.method, loading)
    results = None
    if prompts is not None and out is not None:
        asked = settings_of(prompts, field, options, loading.given())
        results = ResultsFile(out, asked, restart=restart)
    pair = load(loading)
    if prompts is not None:
        return generate_many(pair, wanted, request, rows=rows or ROWS, results=results, json=json)
    stream = pair.stream(text, request)
    page = _page(json)
    status = 0
    try:
        page.begin(text)
        for token in stream:
            page.add(token)
    except KeyboardInterrupt:
        status = 130
    finally:
        stream.close()
    page.end(stream.generation)
    return status


def _checked(options: GenerationKeywords) -> GenerationOptions:
    """The options, checked before any model is loaded."""
    texts = (("a stop string", "--stop", options["stop"]), ("a bad word", "--bad-word", options["bad_words"]))
    for what, flag, words in texts:
        for word in words or ():
            if not word:
                raise UserError(f"{what} is empty: give {flag} some text, or leave it out")
            try:
                str(word).encode()
            except UnicodeEncodeError:
                raise UserError(f"{what} is not valid UTF-8: give {flag} UTF-8 text") from None
    return GenerationOptions(**options)


def _check_models(method: Method | None, loading: Loading) -> None:
    """Refuse a method that needs a model that was not given, before any model is loaded."""
    if method is None:
        return
    if loading.draft is None and method.drafter.uses_model:
        raise UserError(
            f"method {method.name} needs a draft model: give --draft too, or --method autoregressive"
        )
    if loading.gate is None and "gate" in method.needs:
        raise UserError(
            f"method {method.name} needs a gate: give --gate too, or another method such as speculative"
        )


def _page(json: bool) -> Page:
    if json:
        return JsonPage()
    return TerminalPage() if sys.stdout.isatty() else PlainPage()
