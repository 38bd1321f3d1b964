"""``sprinter chat``: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sprinter.cli.generating import AT_DEFAULTS, checked_options, generates
from sprinter.cli.loading import Loading, check_models, load, loads
from sprinter.cli.pages import print_json
from sprinter.engine.options import GenerationKeywords
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.cli.chat_loop import Lines

__all__ = ["chat"]


@loads()
@generates(defaults={"max_new_tokens": 512})
def chat(
    options: GenerationKeywords = AT_DEFAULTS,
    loading: Loading = Loading(),
    system: Annotated[
        str | None, typer.Option(help="System prompt.", show_default="the template's own")
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(help="File with a chat template (Jinja).", show_default="the tokenizer's own"),
    ] = None,
    prefix_reuse: Annotated[
        Literal["exact", "all"],
        typer.Option(
            help="What a turn reuses of earlier turns. all: everything that was read. exact: what leaves texts the "
            "same to the bit: whole blocks of prompts; on a CPU with --dtype gguf, int8 or int4 all but trees' nodes."
        ),
    ] = "all",
    json: Annotated[
        bool, typer.Option("--json", help="Print the whole chat as one JSON object at the end.")
    ] = False,
) -> int:
    """Talk to a chat model; show the origin of each token, and what each answer cost.

    Reads messages and commands (/help) from the terminal, or from standard input, one on a line.
    """
    if loading.target is None and template is None:
        raise UserError(
            "the built-in models are no chat models: give --target (and --draft) with a chat template, "
            "or --template FILE"
        )
    request, spelled = checked_options(options), None if template is None else _template(template)
    check_models(request, loading)
    from sprinter.cli.chat_files import as_dict
    from sprinter.cli.chat_input import Keyboard, PipedLines
    from sprinter.cli.chat_loop import converse
    from sprinter.cli.chat_screen import Screen
    from sprinter.cli.chat_session import Session

    screen, typed = Screen(json=json), _is_typed()
    if typed:
        screen.note("loading the models ...")
    pair = load(loading, prefix_reuse=prefix_reuse)
    if spelled is not None and pair.tokenizer is not None:
        pair.tokenizer.chat_template = spelled
    talk = Session(pair, request, system)
    with ExitStack() as stack:
        lines: Lines = stack.enter_context(Keyboard(screen.note)) if typed else PipedLines()
        if typed:
            screen.welcome(talk)
        status = converse(talk, lines, screen)
    if json:
        print_json(as_dict(talk))
    return status


def _is_typed() -> bool:
    """Whether a person types the messages."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def _template(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read --template {file} ({error.strerror}): give a file with a Jinja template"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"--template {file} is not valid UTF-8: convert it to UTF-8") from None
