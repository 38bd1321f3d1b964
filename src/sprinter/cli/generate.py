"""``sprinter generate``: generates one text, coloured by origin, or the texts of a file of prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sprinter.cli.generate_many import ROWS, ResultsFile, generate_many, read_prompts, settings_of
from sprinter.cli.generating import AT_DEFAULTS, generates
from sprinter.cli.loading import Loading, check_models, load, loads
from sprinter.cli.options import FieldOption, JsonOption, RestartOption, SystemOption
from sprinter.cli.pages import JsonPage, Page, TerminalPage
from sprinter.cli.prompts import read_messages, read_prompt
from sprinter.cli.signature import option
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError

__all__ = ["generate"]


@loads()
@generates()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT|-", help="Text to continue; - reads standard input.", show_default=False
        ),
    ] = None,
    options: GenerationOptions = AT_DEFAULTS,
    loading: Loading = Loading(),
    chat: Annotated[
        bool,
        option("The prompt is a message of a user; the chat template is applied.", "--chat", panel="Texts"),
    ] = False,
    system: SystemOption = None,
    messages: Annotated[
        Path | None,
        option(
            'JSON file with a conversation, [{"role": ..., "content": ...}, ...], as the prompt.',
            default=False,
            panel="Texts",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        option(
            "File of prompts: .txt, one per line, or .jsonl (also with messages). "
            "Prints one JSON object per line.",
            panel="Texts",
        ),
    ] = None,
    field: FieldOption = None,
    out: Annotated[
        Path | None,
        option(
            "Append the lines to this file; the same command again continues an interrupted run.",
            default="standard output",
        ),
    ] = None,
    rows: Annotated[int | None, option("Texts generated at the same time.", default=str(ROWS), min=1)] = None,
    restart: RestartOption = False,
    json: JsonOption = False,
) -> int:
    """Generate a text; show the origin of each token and the statistics.

    With --prompts: one text per prompt, with seeds from --seed on; exit status 1 if a prompt has no text.
    """
    many = {"--field": field, "--out": out, "--rows": rows, "--restart": restart or None}
    if prompts is None and (useless := [option for option, value in many.items() if value is not None]):
        raise UserError(f"{useless[0]} goes with --prompts: give it too, or leave {useless[0]} out")
    if prompt is None and prompts is None and messages is None:
        raise UserError(
            "missing argument 'PROMPT|-': give a prompt, - for standard input, or a file of them as --prompts "
            "(see 'sprinter generate --help')"
        )
    if prompt is not None and prompts is not None:
        raise UserError("a prompt and --prompts exclude each other: give one of them")
    if messages is not None and (prompt is not None or prompts is not None):
        other = "a prompt" if prompts is None else "--prompts"
        raise UserError(f"--messages and {other} exclude each other: give one of them")
    if system is not None and not (chat or messages is not None):
        raise UserError(
            "--system goes with --chat or --messages: give one of them too, or leave --system out"
        )
    if prompts is not None and out is None and (json or restart):
        raise UserError("--json and --restart go with --out: without it the lines of --prompts are printed")
    if options.logprobs is not None and prompts is None and not json:
        raise UserError("--logprobs goes with --json or --prompts, whose objects hold them: give one of them")
    given: str | list[Any] = ""
    if messages is not None:
        given = read_messages(messages)
    elif prompt is not None:
        given = read_prompt(prompt)
    wanted = read_prompts(prompts, field, chat=chat, system=system) if prompts is not None else []
    check_models(options, loading)
    results = None
    if prompts is not None and out is not None:
        shape = {"field": field, "chat": chat or None, "system": system}
        asked = settings_of(prompts, options, loading.given(), **shape)
        results = ResultsFile(out, asked, restart=restart)
    pair = load(loading)
    if prompts is not None:
        return generate_many(pair, wanted, options, rows=rows or ROWS, results=results, json=json)
    last = given if isinstance(given, str) else given[-1].get("content")
    if chat or messages is not None:
        from sprinter.engine.chat import conversation

        given = [*conversation(given, system)]
    stream = pair.stream(given, options)
    page = JsonPage() if json else TerminalPage() if sys.stdout.isatty() else Page()
    status = 0
    try:
        page.begin(last if isinstance(last, str) else "")
        for token in stream:
            page.add(token)
    except KeyboardInterrupt:
        status = 130
    finally:
        stream.close()
    page.end(stream.generation)
    return status
