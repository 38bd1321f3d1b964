"""What forward passes of a pair of GGUF files cost with each runner: for ``sprinter doctor --probe``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sprinter.cli.loading import Loading, load
from sprinter.cli.progress import Progress
from sprinter.errors import SprinterError, UserError

if TYPE_CHECKING:
    from sprinter.engine.pair import Pair
    from sprinter.laws import Sampling
    from sprinter.theory.passes import PassTimes

__all__ = ["MARGIN", "compare_runners"]

MARGIN = 1.05
"""How much faster another runner must be: times vary between two probes."""
_log = logging.getLogger("sprinter")


def compare_runners(
    loading: Loading,
    pair: Pair,
    times: PassTimes,
    token_s: Callable[[PassTimes], float],
    sampling: Sampling,
    progress: Progress,
) -> tuple[dict[str, PassTimes | str], str | None, bool]:
    """Time the passes of the other runners that could serve the pair, and keep the fastest for ``--runner auto``.

    Args:
        loading: of the pair; where it names a runner, a dtype or a device, nothing is compared.
        pair, times: as loaded, and its own times.
        token_s: seconds a token with given times.

    Returns:
        Times by runner, those of mixed pairs put together from them, or why it cannot serve the pair; the fastest one;
        and whether that is kept for later. None of these where there is no choice.
        Our kernels, which run GGUF files otherwise where they can, are left only for a runner that is faster by
        ``MARGIN``.
    """
    from sprinter.engine.runners import MIXED, OURS, RIVALS, USUAL, keep_fastest, rival_of
    from sprinter.theory.passes import PassTimes, measure_passes

    own = rival_of(pair.models)
    names = ("dtype", "draft_dtype", "draft_runner", "device", "device_map", "draft_vocabulary", "compile")
    asked = {getattr(loading, name) for name in names}
    if own is None or loading.target is None or loading.runner != "auto" or asked - {None, "auto", False}:
        return {}, None, False
    found: dict[str, PassTimes | str] = {own: times}
    for name, options in RIVALS.items():
        if name == own:
            continue
        progress(f"loading the models with runner {name}")
        try:
            other = load(replace(loading, **options))
            step = partial(progress, f"timing forward passes with runner {name}")
            found[name] = measure_passes(other, sampling=sampling, progress=step)
        except (SprinterError, MemoryError, RuntimeError) as error:
            found[name] = str(error) or type(error).__name__
    timed: Mapping[str, PassTimes] = {name: one for name, one in found.items() if not isinstance(one, str)}
    for name, (of_target, of_draft, _) in MIXED.items():
        if of_target in timed and of_draft in timed:
            found[name] = PassTimes(timed[of_target].target_s, timed[of_draft].draft_s)
    timed = {name: one for name, one in found.items() if not isinstance(one, str)}
    usual = OURS if OURS in timed else USUAL
    seconds = {name: token_s(one) * (1 if name == usual else MARGIN) for name, one in timed.items()}
    fastest = min(seconds, key=seconds.__getitem__)
    try:
        keep_fastest(loading.target, loading.draft, loading.arguments(), fastest)
    except (UserError, OSError, RuntimeError) as error:
        _log.warning("which runner is fastest cannot be kept for later: %s", error)
        return found, fastest, False
    return found, fastest, True
