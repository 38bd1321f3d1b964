"""A target whose passes cost several times as much, with the same laws: how speeds change with the ratio of costs.

    python benchmarks/real/padded.py --data DIR [--factors 1 4 8] [--prompts 6]

Layers that add nothing would cost what real ones do if they read weights of their own. A padded model runs its whole
pass ``factor`` times and forgets all but the last: no memory more, laws to the bit, and weights that are read from
memory again each time. Milliseconds of a pass over 1 and 5 tokens and of a draft step, medians, all factors in turn;
then greedy texts of each factor, methods interleaved, with SmolLM2-135M-Instruct as the draft.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import sprinter
from benchmarks.common import cells, grid, interleave, method_arm, option_parser, save, speed_ratio
from benchmarks.real.arms import SMOLLM2, TARGET
from benchmarks.real.weights import prompts_of
from benchmarks.smoke import SMOKE, sized
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.choose import exactness, make_runner, reads_trees, runner_kind, tree_leaves
from sprinter.models.interface import ModelOutput, Runner, ServedModel
from sprinter.models.memory import token_bytes
from sprinter.models.pair import LoadedModel, builtin_paths

NAME = "real/padded"
KIND = sized({"runner": "torch", "dtype": "gguf"}, {"dtype": "float32"})
METHODS = sized(("speculative(gamma=4)", "speculative(gamma=10)", "certain(tail=3, budget=0.05)"), ("svip",))
SUITES = sized(("humaneval", "gsm8k", "vicuna"), ("gsm8k",))
NEW_TOKENS = sized(32, 8)
CONTEXT, REPEATS = sized((256, 9), (8, 2))


class PaddedModel(ServedModel):
    """A loaded model whose passes are run several times; FLOPs are counted as those of the model.

    Args:
        loaded: the model. factor: number of times, at least 1.
    """

    runner = "padded"

    def __init__(self, loaded: LoadedModel, factor: int) -> None:
        model = loaded.model
        self.inner, self.factor, self._compile = model, factor, loaded.compile
        self.name, self.weights, self.size = loaded.id, loaded.weights, loaded.size
        self.vocab_size, self.hidden_size = loaded.vocab_size, loaded.hidden_size
        self.context, self.eos_ids = loaded.context, loaded.eos_ids
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.on_gpu = model.on_gpu if isinstance(model, ServedModel) else model.device.type == "cuda"
        self.exactness, self.fingerprint = exactness(model), weights_fingerprint(model)
        self.token_bytes = token_bytes(model)
        self.reason = f"each pass {factor} times; {runner_kind(model)[1]}"

    def most_leaves(self, rows: int) -> int | None:
        """As the model's runner."""
        return tree_leaves(self.inner, rows) if reads_trees(self.inner) else 1

    def make_runner(self, batch: int, max_len: int, leaves: int) -> Runner:
        """See ``ServedModel``."""
        inner = make_runner(self.inner, batch=batch, max_len=max_len, compile=self._compile, leaves=leaves)
        return PaddedRunner(inner, self.factor)


class PaddedRunner(Runner):
    """A runner whose passes are run several times; all but the last are rewound."""

    name = "padded"

    def __init__(self, inner: Runner, factor: int) -> None:
        self.inner, self.factor = inner, factor
        self.batch, self.max_len, self.device = inner.batch, inner.max_len, inner.device
        self.vocab_size, self.hidden_size = inner.vocab_size, inner.hidden_size
        self.branches, self.leaves, self.may_hold_nan = inner.branches, inner.leaves, inner.may_hold_nan

    @property
    def lengths(self) -> list[int]:
        """See ``Runner``."""
        return self.inner.lengths

    @property
    def cache_bytes(self) -> int:
        """See ``Runner``."""
        return self.inner.cache_bytes

    def extend(
        self, tokens: torch.Tensor, counts: Sequence[int] | None = None, **options: Any
    ) -> ModelOutput:
        """See ``Runner``."""
        before = self.inner.lengths
        for _ in range(self.factor - 1):
            self.inner.extend(tokens, counts, **options)
            self.inner.rewind(before)
        return self.inner.extend(tokens, counts, **options)

    def commit_path(self, row: int, path: Sequence[int]) -> None:
        """See ``Runner``."""
        self.inner.commit_path(row, path)

    def rewind(self, lengths: Sequence[int]) -> None:
        """See ``Runner``."""
        self.inner.rewind(lengths)

    def copy(self, from_row: int, to_rows: Sequence[int], length: int | None = None) -> None:
        """See ``Runner``."""
        self.inner.copy(from_row, to_rows, length)

    def adopt(self, other: Runner, length: int) -> bool:
        """See ``Runner``."""
        return isinstance(other, PaddedRunner) and self.inner.adopt(other.inner, length)

    def wipe(self, row: int) -> None:
        """See ``Runner``."""
        self.inner.wipe(row)


def padded(pair: sprinter.Pair, draft: Any, factor: int, **options: Any) -> sprinter.Pair:
    """A pair with the target of ``pair``, padded. draft, options: as for ``load_pair``."""
    target = PaddedModel(pair.models.target, factor)
    return sprinter.load_pair(target, draft, tokenizer=pair.tokenizer, prefix_cache_bytes=0, **options)


@torch.inference_mode()
def passes(pairs: dict[int, sprinter.Pair]) -> dict[int, dict[str, float]]:
    """Median seconds of a target's pass over 1 and 5 tokens, and of a draft step, by factor."""
    jobs: dict[tuple[int, str], tuple[Runner, int]] = {}
    for factor, pair in pairs.items():
        draft = pair.models.draft
        assert draft is not None
        target = make_runner(pair.models.target.model, max_len=CONTEXT + 8)
        jobs |= {(factor, "1"): (target, 1), (factor, "5"): (target, 5)}
        jobs[factor, "draft"] = make_runner(draft.model, max_len=CONTEXT + 8), 1
    text, found = torch.arange(10, 10 + CONTEXT)[None], {job: list[float]() for job in jobs}
    for runner in {id(runner): runner for runner, _ in jobs.values()}.values():
        runner.extend(text, logits=False)
    for _ in range(REPEATS):
        for job, (runner, n) in jobs.items():
            begun = time.perf_counter()
            runner.extend(text[:, :n])
            found[job].append(time.perf_counter() - begun)
            runner.rewind([CONTEXT])
    return {
        factor: {name: statistics.median(found[factor, name]) for name in ("1", "5", "draft")}
        for factor in pairs
    }


def main() -> None:
    """Time passes, then texts."""
    parser = option_parser(__doc__)
    parser.add_argument("--factors", type=int, nargs="+", default=sized([1, 4, 8], [1, 2]))
    parser.add_argument("--prompts", type=int, default=sized(6, 2), help="number of prompts")
    options = parser.parse_args()
    began = time.time()
    alone = sprinter.load_pair(builtin_paths()["target"] if SMOKE else TARGET, **KIND)
    draft = builtin_paths()["draft"] if SMOKE else SMOLLM2
    pairs = {factor: padded(alone, draft, factor, **KIND) for factor in options.factors}
    seconds = passes(pairs)
    first = seconds[options.factors[0]]["1"]
    heads, rows, texts = ["factor", "pass over 1, ms", "over 5", "draft step", "ratio of passes", "c"], [], []
    prompts = prompts_of(alone, options.data, options.prompts, SUITES)
    for factor, pair in pairs.items():
        arms = [method_arm(pair, name, 0.0, new_tokens=NEW_TOKENS) for name in ("autoregressive", *METHODS)]
        interleave(arms, prompts, note=f"factor {factor}")
        plain, *others = arms
        texts.append([[[token.id for token in out.tokens] for out in one.outs] for one in arms])
        assert texts[-1][0] == texts[0][0], "a padded target wrote other texts"
        one = seconds[factor]
        ratios = {arm.name: list(speed_ratio(arm, plain)) for arm in others}
        same = {arm.name: sum(a == b for a, b in zip(made, texts[-1][0], strict=True))
                for arm, made in zip(others, texts[-1][1:], strict=True)}  # fmt: skip
        rows.append({"factor": factor, "seconds": one, "speed_up": ratios, "same_text": same})
    lines = [
        " | ".join(
            [str(row["factor"]), *(f"{1e3 * row['seconds'][name]:.1f}" for name in ("1", "5", "draft")),
             f"{row['seconds']['1'] / first:.2f}", f"{row['seconds']['draft'] / row['seconds']['1']:.3f}",
             *(cells(tuple(row["speed_up"][name])) for name in METHODS)]
        )
        for row in rows
    ]  # fmt: skip
    table = "\n".join(grid(" | ".join([*heads, *(f"`{name}`, speed" for name in METHODS)]), lines))
    save(NAME, table, began, len(prompts), new_tokens=NEW_TOKENS, rows=rows)


if __name__ == "__main__":
    main()
