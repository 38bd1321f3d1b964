"""Speculative sampling against transformers' assisted decoding on the built-in pair: the same counts, the same texts.

    python benchmarks/methods/crosscheck.py --data DIR

Both sides draft 5 tokens a round (fewer at the end: one place is left to the target's own token), keep them with
min(1, p/q), and stop at 64 new tokens or EOS; temperature 1, the whole vocabulary, float32, the same prompts. Listeners
around transformers' ``_speculative_sampling`` and our ``judge`` note what each round drafted and accepted, before a
text is cut. ``lenient(w)`` is checked likewise against ``assistant_ensemble_weight``, and a comparison that must fail
(exact against lenient) shows that the check can.

Rounds of one text are correlated, so texts are the unit. Intervals: 99 %, bootstrap over texts, both sides of a text
together. Test: chi-square of the rounds with 0 to 5 accepted, its law found by exchanging the two sides text by text,
which changes nothing if they agree. Two sides agree if the interval of the difference in accepted tokens a full round
holds 0, the test's p is at least 0.01 (together a false alarm in at most 2 % of runs), and every round drafted
min(5, remaining − 1) tokens or up to EOS.

Temperature 0: our speculative and plain texts and transformers' assisted and plain ones, token for token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

import sprinter
from benchmarks.common import NEW_TOKENS, command, environment, heldout_prompts, option_parser, write_results
from benchmarks.smoke import sized
from sprinter.decode import AcceptRule

GAMMA, WEIGHT = 5, 0.8
LEVEL, REPEATS = 0.99, sized(10_000, 200)
MAIN = "accepted tokens a full round"
Round = tuple[list[int], int]  # the draft, tokens of it that were accepted
Side = Callable[
    [list[int], int], np.ndarray
]  # prompt ids, seed -> rounds with 0..GAMMA accepted, tokens, calls, steps


@contextmanager
def listening(owner: Any, name: str, hear: Callable[[tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Call ``hear(arguments, result)`` after each call of ``owner.name``, and change nothing."""
    original = getattr(owner, name)

    def heard(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        hear(args, result)
        return result

    setattr(owner, name, heard)
    try:
        yield
    finally:
        setattr(owner, name, original)


def counts(rounds: list[Round], eos: int, tokens: int, calls: int, steps: int) -> np.ndarray:
    """One text: full rounds (γ drafted) with 0..γ accepted, new tokens, target calls, draft steps, odd rounds.

    Odd is a round that did not draft min(γ, remaining − 1) tokens, nor fewer because the last of them is EOS.
    """
    full = [accepted for draft, accepted in rounds if len(draft) == GAMMA]
    before = np.cumsum([0, *(accepted + 1 for _, accepted in rounds)])
    odd = 0
    for (draft, _), done in zip(rounds, before, strict=False):
        limit = min(GAMMA, NEW_TOKENS - done - 1)
        odd += len(draft) != limit and not (len(draft) < limit and draft[-1:] == [eos])
    return np.array([*np.bincount(full, minlength=GAMMA + 1), tokens, calls, steps, odd], dtype=float)


def ours(pair: sprinter.Pair, method: str) -> Side:
    """Our side: the loop's own verdicts."""

    def run(ids: list[int], seed: int) -> np.ndarray:
        rounds: list[Round] = []
        hear = lambda args, verdict: rounds.append((list(args[1].tree.tokens), verdict.accepted))  # noqa: E731
        with listening(AcceptRule, "judge", hear):
            stats = pair.generate(
                ids, method=method, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=seed
            ).stats
        return counts(
            rounds, pair.tokenizer.eos_token_id, stats.new_tokens, stats.target_calls, stats.draft_steps
        )

    return run


class Transformers:
    """The built-in pair as transformers loads it, in float32, with its forward passes counted."""

    def __init__(self) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        paths = sprinter.builtin_paths()
        self.target, self.draft = (
            AutoModelForCausalLM.from_pretrained(paths[name], dtype=torch.float32)
            for name in ("target", "draft")
        )
        self.passes = {"target": 0, "draft": 0}
        for name, model in (("target", self.target), ("draft", self.draft)):
            model.register_forward_hook(lambda *_, name=name: self._count(name))
        # These three are read from the assistant's own configuration, not from the call's.
        self.settings = {
            "num_assistant_tokens": GAMMA,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        self.draft.generation_config.update(**self.settings)

    def _count(self, name: str) -> None:
        self.passes[name] += 1

    def generate(self, ids: list[int], **options: Any) -> list[int]:
        """New token ids."""
        prompt = torch.tensor([ids])
        out = self.target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, **options
        )
        return out[0, len(ids) :].tolist()

    def side(self, **options: Any) -> Side:
        """Sampling with the draft as assistant."""

        def run(ids: list[int], seed: int) -> np.ndarray:
            rounds: list[Round] = []
            hear = lambda args, result: rounds.append((args[0][0, -args[2] :].tolist(), int(result[1])))  # noqa: E731
            self.passes.update(target=0, draft=0)
            torch.manual_seed(seed)
            with listening(transformers.generation.utils, "_speculative_sampling", hear):
                new = self.generate(
                    ids, assistant_model=self.draft, do_sample=True, temperature=1.0, top_k=0, **options
                )
            return counts(
                rounds, self.target.config.eos_token_id, len(new), self.passes["target"], self.passes["draft"]
            )

        return run


def quantities(sums: np.ndarray) -> dict[str, np.ndarray]:
    """What is compared, from sums of ``counts`` over texts, ``[..., γ + 5]``."""
    rounds, (tokens, calls, steps, _) = sums[..., : GAMMA + 1], np.moveaxis(sums[..., GAMMA + 1 :], -1, 0)
    at_least = rounds[..., ::-1].cumsum(-1)[..., ::-1]  # rounds with at least k accepted
    places = range(1, GAMMA + 1)
    return {
        MAIN: at_least[..., 1:].sum(-1) / at_least[..., 0],
        **{f"acceptance at position {i}": at_least[..., i] / at_least[..., i - 1] for i in places},
        **{f"share of rounds with {k} accepted": rounds[..., k] / at_least[..., 0] for k in (0, *places)},
        "new tokens a target call": tokens / calls,
        "draft steps a new token": steps / tokens,
    }


def compare(names: tuple[str, str], a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Two sides on the same texts, each ``[texts, γ + 5]``: differences with intervals, and the exchange test."""
    chance, texts = np.random.default_rng(0), len(a)
    times = chance.multinomial(
        texts, np.full(texts, 1 / texts), size=REPEATS
    )  # a text's weight in a resample
    one, other = quantities(a.sum(0)), quantities(b.sum(0))
    spread_one, spread_other = quantities(times @ a), quantities(times @ b)
    rows = {}
    for name in one:
        ends = np.quantile(spread_one[name] - spread_other[name], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        rows[name] = {
            "ours": float(one[name]),
            "transformers": float(other[name]),
            "difference": [float(one[name] - other[name]), *map(float, ends)],
        }
    chi2, p = exchange_test(a[:, : GAMMA + 1], b[:, : GAMMA + 1])
    _, low, high = rows[MAIN]["difference"]
    return {
        "ours": names[0],
        "transformers": names[1],
        "texts": texts,
        "full_rounds": [int(side[:, : GAMMA + 1].sum()) for side in (a, b)],
        "target_calls": [int(side[:, GAMMA + 2].sum()) for side in (a, b)],
        "odd_rounds": [int(side[:, -1].sum()) for side in (a, b)],
        "quantities": rows,
        "chi_square": chi2,
        "p": p,
        "agree": low <= 0 <= high and p >= 1 - LEVEL and not (a[:, -1].any() or b[:, -1].any()),
    }


def exchange_test(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Chi-square of homogeneity of two count tables ``[texts, cells]``, and its p with sides exchanged at random."""
    both, gap = (a + b).sum(0), a - b

    def statistic(gaps: np.ndarray) -> np.ndarray:
        sides = np.stack([both + gaps, both - gaps], -2) / 2  # [..., 2, cells]
        wanted = sides.sum(-1, keepdims=True) * both / both.sum()
        return ((sides - wanted) ** 2 / wanted).sum((-1, -2))

    signs = np.random.default_rng(1).choice([-1.0, 1.0], size=(REPEATS, len(a)))
    found, exchanged = float(statistic(gap.sum(0))), statistic(signs @ gap)
    return found, float((1 + (exchanged >= found - 1e-9).sum()) / (REPEATS + 1))


def greedy(pair: sprinter.Pair, peer: Transformers, prompts: list[list[int]]) -> dict[str, Any]:
    """Texts at temperature 0: how many of three others equal our speculative ones, token for token."""

    def own(method: str) -> Callable[[list[int]], list[int]]:
        return lambda ids: [
            token.id
            for token in pair.generate(ids, method=method, max_new_tokens=NEW_TOKENS, temperature=0.0).tokens
        ]

    base = list(map(own(f"speculative(gamma={GAMMA})"), prompts))
    others = {
        "autoregressive": own("autoregressive"),
        "transformers assisted": lambda ids: peer.generate(ids, assistant_model=peer.draft, do_sample=False),
        "transformers plain": lambda ids: peer.generate(ids, do_sample=False),
    }
    equal = {
        name: sum(run(ids) == text for ids, text in zip(prompts, base, strict=True))
        for name, run in others.items()
    }
    return {"texts": len(base), "tokens": sum(map(len, base)), "equal": equal}


def table(rows: list[dict[str, Any]], same: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = []
    for row in rows:
        verdict = ("agree" if row["agree"] else "differ") + (", as they must" if row["must_differ"] else "")
        (full, full_other), (odd, odd_other) = row["full_rounds"], row["odd_rounds"]
        lines += [
            f"`{row['ours']}` against transformers `{row['transformers']}`: **{verdict}**. {row['texts']} texts, "
            f"{full} and {full_other} rounds of {GAMMA} drafts, {odd} and {odd_other} with another number than "
            f"min({GAMMA}, remaining − 1) or up to EOS; chi-square {row['chi_square']:.1f}, p = {row['p']:.4f}.",
            "",
            "| quantity | ours | transformers | difference, 99 % interval |",
            "| --- " * 4 + "|",
        ]
        for name, cell in row["quantities"].items():
            value, low, high = cell["difference"]
            lines.append(
                f"| {name} | {cell['ours']:.4f} | {cell['transformers']:.4f} | {value:+.4f} [{low:+.4f}, {high:+.4f}] |"
            )
        lines.append("")
    equal = ", ".join(f"{name} {count}" for name, count in same["equal"].items())
    lines.append(
        f"Temperature 0: of {same['texts']} texts ({same['tokens']} tokens) by `speculative(gamma={GAMMA})`, equal "
        f"token for token: {equal}."
    )
    return "\n".join(lines)


def main() -> None:
    """Generate on both sides, compare, write."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(600, 3))
    parser.add_argument("--greedy-prompts", type=int, default=sized(50, 2))
    args = parser.parse_args()
    began = time.time()
    pair, peer = sprinter.load_pair(compile=False), Transformers()
    texts = heldout_prompts(args.data, max(args.prompts, args.greedy_prompts))
    prompts = [pair.tokenizer(text)["input_ids"] for text in texts]
    exact, lenient = f"speculative(gamma={GAMMA})", f"lenient(w={WEIGHT}, gamma={GAMMA})"
    assisted, ensemble = "assistant_model", f"assistant_model, assistant_ensemble_weight={WEIGHT}"
    sides = {
        exact: ours(pair, exact),
        assisted: peer.side(),
        lenient: ours(pair, lenient),
        ensemble: peer.side(assistant_ensemble_weight=WEIGHT),
    }
    found: dict[str, list[np.ndarray]] = {name: [] for name in sides}
    for seed, ids in enumerate(prompts[: args.prompts]):
        for name, run in sides.items():
            found[name].append(run(ids, seed))
        print(f"\r{seed + 1}/{args.prompts}", end="", file=sys.stderr)
    print(file=sys.stderr)
    compared = ((exact, assisted, False), (lenient, ensemble, False), (exact, ensemble, True))
    rows = [
        {**compare((a, b), np.stack(found[a]), np.stack(found[b])), "must_differ": differ}
        for a, b, differ in compared
    ]
    same = greedy(pair, peer, prompts[: args.greedy_prompts])
    results = {
        "benchmark": "methods/crosscheck",
        "command": command(),
        "environment": environment(),
        "settings": {**peer.settings, "do_sample": True, "temperature": 1.0, "top_k": 0, "dtype": "float32"},
        "new_tokens": NEW_TOKENS,
        "level": LEVEL,
        "rows": rows,
        "greedy": same,
        "seconds": round(time.time() - began, 1),
    }
    write_results("methods/crosscheck", results, table(rows, same))


if __name__ == "__main__":
    main()
