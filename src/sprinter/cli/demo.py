"""``sprinter demo``: compares plain decoding, an exact method and a lossy one with drift of at most 0.1."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import JsonOption
from sprinter.cli.pages import console, legend, painted, print_json, print_table
from sprinter.cli.signature import option

if TYPE_CHECKING:
    from sprinter.engine.generation import Generation
    from sprinter.engine.pair import Pair

__all__ = ["demo"]

Generate = Callable[..., "Generation"]

METHODS = ("autoregressive", "speculative", "sprinter")
PROMPTS = (
    "Once upon a time, there was a little",
    "Tom and his mom went to the park.",
    "The brave little mouse",
    "In the forest there was an old owl.",
    "One day, Sam lost his ball.",
    "Grandma baked a cake.",
)
_WARM_UP, _LENGTH, _SHORTEST, _SECONDS = 8, 64, 16, 20.0
_MOST_DRIFT = 0.1
_SETTINGS = 9
"""Number of values of τ that are tried, from the gate's own up to 1."""
_TAIL = 2
"""Untrusted tokens that a target call of the lossy method checks: longer tails cost more draft steps than they save."""


@loads("profile", "suffix_cache", "template")
def demo(
    loading: Loading = Loading(),
    max_new_tokens: Annotated[
        int | None,
        option("Maximum tokens per text.", "--max-new-tokens", "-n", default="64, fewer if slow", min=1),
    ] = None,
    seed: Annotated[int, option("The same seed gives the same texts.")] = 0,
    json: JsonOption = False,
) -> None:
    """Compare plain decoding, an exact method and a lossy one with drift of at most 0.1 (well under a minute)."""
    pair = load(loading)
    _warm_up(pair)
    length = max_new_tokens or _length_in_time(pair)
    generate = partial(pair.generate, max_new_tokens=length, seed=seed, meter="complete")
    own = 1.0 if pair.gate is None else pair.gate.config.tau  # without a gate, generating raises the error
    specs = dict(zip(METHODS, (*METHODS[:2], _dialled(generate, own, length)), strict=True))
    results = _measure(generate, specs, show=not json)
    rows = [_row(method, specs[method], results[method]) for method in METHODS]
    if json:
        settings = {"max_new_tokens": length, "temperature": 1.0, "seed": seed, "meter": "complete"}
        settings["max_drift"] = _MOST_DRIFT
        print_json({"prompts": list(PROMPTS), "settings": settings, "rows": rows})
    else:
        _print_table(rows, length)


def _warm_up(pair: Pair) -> float:
    """Generate a few tokens with each method; returns the seconds that it took."""
    began = time.perf_counter()
    for method in METHODS:
        pair.generate(PROMPTS[0], method=method, max_new_tokens=_WARM_UP, meter="complete")
    return time.perf_counter() - began


def _length_in_time(pair: Pair) -> int:
    """Number of tokens per text with which a slow or busy machine finishes in time too."""
    per_token = _warm_up(pair) / _WARM_UP * len(PROMPTS)
    return int(min(_LENGTH, max(_SHORTEST, _SECONDS / per_token)))


def _dialled(generate: Generate, own: float, length: int) -> str:
    """The method with the first τ, from the gate's own upwards, whose texts drift by at most ``_MOST_DRIFT``.

    A draft goes on behind its first untrusted token. Not part of the timing. If even τ = 1 drifts more (scores of
    exactly 1), it is τ = 1.
    """
    taus = [own + (1 - own) * i / (_SETTINGS - 1) for i in range(_SETTINGS)]
    specs = [f"sprinter(tau={round(tau, 4)}, tail={_TAIL})" for tau in taus]
    return next((spec for spec in specs if _keeps(generate, spec, length)), specs[-1])


def _keeps(generate: Generate, spec: str, length: int) -> bool:
    """Whether the texts drift by at most ``_MOST_DRIFT``; stops as soon as they cannot."""
    outs: list[Generation] = []
    for prompt in PROMPTS:
        outs.append(generate(prompt, method=spec))
        if sum(_drifts(outs)) > _MOST_DRIFT * length * len(PROMPTS):
            return False
    return (_mean_drift(outs) or 0.0) <= _MOST_DRIFT


def _drifts(outs: Sequence[Generation]) -> list[float]:
    """Drifts of all scored tokens."""
    return [token.drift for out in outs for token in out.tokens if token.drift is not None]


def _mean_drift(outs: Sequence[Generation]) -> float | None:
    """Mean drift of all scored tokens; None if there are none."""
    drifts = _drifts(outs)
    return sum(drifts) / len(drifts) if drifts else None


def _measure(generate: Generate, specs: Mapping[str, str], *, show: bool) -> dict[str, list[Generation]]:
    """Run every method on every prompt, interleaved prompt by prompt; each prompt starts with another method."""
    results: dict[str, list[Generation]] = {method: [] for method in METHODS}
    for number, prompt in enumerate(PROMPTS):
        first = number % len(METHODS)
        for method in (*METHODS[first:], *METHODS[:first]):
            results[method].append(generate(prompt, method=specs[method]))
        if show and number == 0:
            _print_text(prompt, results["sprinter"][0])
    return results


def _row(method: str, spec: str, outs: Sequence[Generation]) -> dict[str, Any]:
    """One row of the table, over all prompts: tokens/s, target calls per token, mean drift of all scored tokens."""
    tokens = sum(out.stats.new_tokens for out in outs)
    seconds = sum(out.stats.wall_s - out.stats.closing_s for out in outs)
    return {
        "method": outs[0].method,
        "name": method,
        "spec": spec,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "target_calls_per_token": sum(out.stats.target_calls for out in outs) / tokens,
        "mean_drift": _mean_drift(outs),
        "drift_coverage": len(_drifts(outs)) / tokens,
        "lossless": all(out.stats.lossless for out in outs),
    }


def _print_text(prompt: str, out: Generation) -> None:
    page = console()
    page.print(f"A text by {out.method}:")
    if sys.stdout.isatty():
        page.print(legend())
    page.print(painted([(prompt, "prompt"), *((token.text, token.origin.value) for token in out.tokens)]))
    page.print()


def _print_table(rows: Sequence[dict[str, Any]], length: int) -> None:
    cells = (
        (
            row["spec"], f"{row['tokens_per_s']:.1f}", f"{row['target_calls_per_token']:.2f}",
            "-" if row["mean_drift"] is None else f"{row['mean_drift']:.3f}", f"{row['drift_coverage']:.0%}",
            "yes" if row["lossless"] else "no",
        )
        for row in rows
    )  # fmt: skip
    print_table(("method", "tokens/s", "target\ncalls/token", "mean\ndrift", "coverage", "lossless"), cells)
    console().print(
        f"{len(PROMPTS)} prompts, up to {length} tokens each, temperature 1, meter complete. "
        f"sprinter's tau is the first from the gate's own up that drifts at most {_MOST_DRIFT:.2f} on these prompts. "
        "Drift 0.05 reads: 5 tokens in 100 are not those that the target would have drawn."
    )
