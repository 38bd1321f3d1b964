"""``sprinter theory flops``: counts forward FLOPs of models and methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import JsonOption, complete_method, refuse_unused
from sprinter.cli.pages import print_json, print_table
from sprinter.cli.progress import Progress
from sprinter.cli.signature import option
from sprinter.cli.theory_common import read_prompts, record
from sprinter.errors import UserError

__all__ = ["command"]


@loads("profile")
def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Architecture such as gpt2-xl, directory, hub id or GGUF file.",
            show_default="the paper's",
        ),
    ] = None,
    tokens: Annotated[int, option("Tokens to count.", min=1)] = 20,
    context: Annotated[
        int | None, option("Number of tokens attended to.", default="the model's full context", min=1)
    ] = None,
    loading: Loading = Loading(),
    gamma: Annotated[int, option("Draft tokens per round.", min=1)] = 5,
    method: Annotated[
        list[str] | None,
        option(
            "Count this method both ways, by a short probe; may be repeated.",
            "--method",
            "-m",
            autocompletion=complete_method,
        ),
    ] = None,
    texts: Annotated[int, option("Texts of the probe.", min=2)] = 12,
    json: JsonOption = False,
) -> None:
    """Count forward FLOPs of models, of a round or of methods, as Hoffmann et al. (2022, Appendix F).

    For a round give --target and --draft, by architecture, directory or hub id. --method counts methods on a loaded
    pair.
    """
    target, draft = loading.target, loading.draft
    if not method and (others := [name for name in loading.given() if name not in ("target", "draft")]):
        raise UserError(f"--{others[0].replace('_', '-')} is for models that are loaded: give --method too")
    if method:
        unused = {"models": models, "tokens": tokens, "context": context, "gamma": gamma}
        refuse_unused(command, unused, "with --method, which counts by a probe of its own: leave it out")
        value = _methods(method, loading, texts)
    elif target is not None or draft is not None:
        if target is None or draft is None:
            raise UserError("a round needs both models: give --target and --draft")
        unused = {"models": models, "tokens": tokens, "texts": texts}
        refuse_unused(command, unused, "on a round, which --target and --draft ask for: leave it out")
        value = _round(target, draft, gamma, context)
    else:
        refuse_unused(command, {"gamma": gamma}, "on single models: give --target and --draft")
        refuse_unused(command, {"texts": texts}, "without a probe: give --method")
        value = {"models": _models(models, tokens, context), "tokens": tokens}
    if json:
        print_json(value)
        return
    for rows in value.values():
        if isinstance(rows, list):
            columns = [key.replace("_", " ") for key in rows[0]]
            print_table(columns, ([_cell(value) for value in row.values()] for row in rows))


def _models(models: Sequence[str] | None, tokens: int, context: int | None) -> list[dict[str, Any]]:
    from sprinter.models.flops import forward_flops, full_context
    from sprinter.theory.flops import PAPER_TABLE, config_of

    rows = []
    for name in models or PAPER_TABLE:
        config = config_of(name)
        each = forward_flops(config, context)
        printed = PAPER_TABLE.get(name.lower()) if tokens == 20 and context is None else None
        rows.append({
            "model": name, "context": context or full_context(config), "flops_per_token": each,
            "billions": tokens * each / 1e9, "paper_billions": printed,
        })  # fmt: skip
    return rows


def _round(target: str, draft: str, gamma: int, context: int | None) -> dict[str, Any]:
    """FLOPs of a round by equations 5 and 6, and by tokens, which equation 6 does not count."""
    from sprinter.models.flops import forward_flops
    from sprinter.theory.flops import config_of
    from sprinter.theory.sequential import sequential_flops, speculative_flops

    t, d = (config_of(name) for name in (target, draft))
    big, small = forward_flops(t, context), forward_flops(d, context)
    gate = 2.0 * int(d.get_text_config(decoder=True).hidden_size)
    exact = float(speculative_flops(gamma, small, big))
    rows = [
        {"round": f"speculative, {gamma} draft tokens (equation 5)", "billions": exact / 1e9},
        {"round": f"sprinter, {gamma} draft tokens, by passes (equation 6)",
         "billions": float(sequential_flops(gamma, small, gate, big)) / 1e9},
        {"round": "the same by tokens: the target's cache needs them all", "billions": (exact + gamma * gate) / 1e9},
    ]  # fmt: skip
    return {"target": target, "draft": draft, "gamma": gamma, "rounds": rows}


def _methods(specs: Sequence[str], loading: Loading, texts: int) -> dict[str, Any]:
    from sprinter.decode.spec import parse_method
    from sprinter.laws import Sampling
    from sprinter.models.flops import forward_flops
    from sprinter.theory.flops import method_flops
    from sprinter.theory.predict import predict
    from sprinter.theory.replay import check_replayable

    methods = [parse_method(spec) for spec in specs]
    pair = load(loading)
    for method in methods:
        check_replayable(method, pair.heads)
    with Progress() as progress:
        recordings = record(pair, read_prompts(None, texts), 64, Sampling(), 0, progress)
    assert pair.models.draft is not None
    big, small = (forward_flops(model.model.config) for model in (pair.models.target, pair.models.draft))
    rows = []
    for method in methods:
        found = predict(recordings, method)
        head = pair.heads["gate"].flops if "gate" in method.needs else 0.0
        count = method_flops(
            found.calls, found.tokens_read, found.draft_steps, found.gate_scores, big, small, head
        )
        rows.append({
            "method": found.method, "millions_by_passes": count.passes / 1e6, "millions_by_tokens": count.tokens / 1e6,
            "passes_over_plain": count.passes_ratio, "tokens_over_plain": count.tokens_ratio,
        })  # fmt: skip
    return {"methods": rows}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3e}" if value >= 1e6 else f"{value:.2f}"
    return str(value)
