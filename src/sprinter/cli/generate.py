"""``sprinter generate``: one text, each token coloured by its origin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sprinter.cli.loading import load
from sprinter.cli.options import (
    Compile,
    Device,
    Draft,
    Dtype,
    Gate,
    Heads,
    Runner,
    Target,
    Tokenizer,
    TopK,
    TopP,
)
from sprinter.cli.pages import JsonPage, Page, PlainPage, TerminalPage
from sprinter.cli.prompts import read_prompt
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.engine.generation import Request

__all__ = ["generate"]


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT|-", help="Text to go on from; - reads standard input.")
    ],
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="For example sprinter(tau=0.6); see 'sprinter methods'.",
            show_default="exact: speculative, or autoregressive without a draft",
        ),
    ] = None,
    target: Target = None,
    draft: Draft = None,
    gate: Gate = None,
    head: Heads = None,
    tokenizer: Tokenizer = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Exact limit.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest; 0 keeps all.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the text before this string; may be repeated.", show_default=False),
    ] = None,
    meter: Annotated[
        Literal["running", "complete"],
        typer.Option(help="complete scores every trusted token, at some extra passes."),
    ] = "running",
    device: Device = None,
    dtype: Dtype = None,
    runner: Runner = "auto",
    compile: Compile = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> int:
    """Generate a text, and show which model wrote each token and what that cost."""
    text = read_prompt(prompt)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "seed": seed, "stop": tuple(stop or ()), "meter": meter,
    }  # fmt: skip
    request = _checked(method, options)
    if target is not None:
        _check_models(request if method else None, draft, gate)
    pair = load(
        target, draft, gate, head or (), tokenizer=tokenizer, device=device, dtype=dtype, runner=runner, compile=compile
    )  # fmt: skip
    stream = pair.stream(text, method=request.method if method is not None else None, **options)
    page = _page(json, request.stop)
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


def _checked(method: str | None, options: dict[str, Any]) -> Request:
    """The request, checked before any model is loaded."""
    from sprinter.engine.generation import Request

    for word in options["stop"]:
        if not word:
            raise UserError("a stop string is empty: give --stop some text, or leave it out")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError("a stop string is not valid UTF-8: give --stop UTF-8 text") from None
    return Request.make("autoregressive" if method is None else method, ahead=1, **options)


def _check_models(request: Request | None, draft: str | None, gate: str | None) -> None:
    """What the method needs and the command line does not give; said before any model is loaded."""
    if request is None:
        return
    name = request.method.name
    if draft is None and request.method.drafter.uses_model:
        raise UserError(f"method {name} needs a draft model: give --draft too, or --method autoregressive")
    if gate is None and "gate" in request.method.needs:
        raise UserError(f"method {name} needs a gate: give --gate too, or another method such as speculative")


def _page(json: bool, stop: tuple[str, ...]) -> Page:
    if json:
        return JsonPage()
    return TerminalPage(stop) if sys.stdout.isatty() else PlainPage(stop)
