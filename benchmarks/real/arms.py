"""The arms of the tables on real models, in parts that can be run one after another.

Each part holds the bases, so that its speeds are ratios of answers that were interleaved with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sprinter
from benchmarks.smoke import sized

TARGET = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
DRAFT = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf"
MARKS = ("pass_at_1", "exact_match")
"""Measures that say whether an answer is right."""

PLAIN, EXACT, BEST, HYBRID = "autoregressive", "speculative(gamma=5)", "svip", "hybrid"
BASES = (PLAIN, EXACT)
PARTS: dict[str, tuple[str, ...]] = {
    "named": (
        *BASES, BEST, "certain(threshold=0.3)", "sprinter", "fuzzy",
    ),
    "lossless": (
        *BASES, *(f"speculative(gamma={gamma})" for gamma in (3, 8)), "svip(h=0.2)", BEST, "svip(h=0.5)", "adaedl",
        "confidence", "confidence(c=0.8)", "heuristic", "lookup", HYBRID,
    ),
    "dial": (
        *BASES, "draft-only", *(f"certain(threshold={entropy})" for entropy in (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)),
        "certain(threshold=0.5, head=16)", "draft-only(head=16)", "coin(rate=0.3)", "coin(rate=0.6)",
        "allocation(share=0.5)",
    ),
    "gate": (
        *BASES, "sprinter", *(f"sprinter(tau={tau})" for tau in (0.95, 0.9, 0.8, 0.7, 0.5)), "specdec++", "disco",
    ),
    "lossy": (
        *BASES, *(f"fuzzy(threshold={threshold})" for threshold in (0.1, 0.2, 0.4, 0.6)), "opt(epsilon=0.1)",
        "mentored", "lenient", "typical", "bild", "relaxed", "relaxed(delta=0.1)", "margin", "cascade",
        "cascade(alpha=0.1)", "fly", "cactus",
    ),
    "judges": (*BASES, "judge", "diversed"),
    "lengths": (
        *BASES, *(f"speculative(gamma={gamma})" for gamma in (2, 3, 8)), BEST, "adaedl", "calibrated",
        "optimal(step=measured, token=measured)", "auto", HYBRID,
    ),
    "block": (
        *BASES, *(f"{rule}(gamma={gamma})" for gamma in (3, 5, 8) for rule in ("speculative", "block")
                  if (rule, gamma) != ("speculative", 5)),
    ),
    "several": (
        *BASES, "speculative(gamma=3)", *(f"{rule}(drafts=2, gamma=3)" for rule in ("batch", "specinfer", "spectr")),
        "tree", "cape", "traversal", "lookup", "certain(threshold=0.3)", "certain(threshold=0.3, tail=3)",
    ),
    "cut": (
        *BASES, BEST, "speculative(gamma=3)", "cut:speculative(gamma=3)", "cut:speculative(gamma=5)",
        "cut:speculative(gamma=8)", "cut:svip", HYBRID, "cut:hybrid",
    ),
}  # fmt: skip
SERVERS = ("llama-server:plain", "llama-server:draft", "llama-server:ngram")
PEERS = {
    "peers": (
        *BASES, "speculative(gamma=3)", BEST, "certain(threshold=0.1)", "certain(threshold=0.3)", "sprinter", "fuzzy",
        "lookup", HYBRID, "auto", *SERVERS,
        "transformers:plain", "transformers:assisted", "transformers:lookup",
    ),
    "answers": (*BASES, "speculative(gamma=3)", BEST, "lookup", HYBRID, *SERVERS),
}  # fmt: skip
"""Parts with other engines, beside some arms of this one; ``answers`` is for texts of the length that answers have."""
TRAINED = ("specdec++", "disco", "judge", "diversed")
"""Arms that read heads of their own."""
SMOKE_ARMS = sized((), ("autoregressive", "speculative(gamma=5)", "fuzzy"))
EVERY = tuple(
    dict.fromkeys(arm for part in ("named", "dial", "lossy", "lossless", "gate") for arm in PARTS[part])
)
"""All arms of this package's engine, the most telling ones first."""


def right(quality: dict[str, Any]) -> float | None:
    """Whether an answer is right, as far as its suite can say."""
    return next((float(quality[name]) for name in MARKS if name in quality), None)


def runnable(arms: Iterable[str], gate: str | None, heads: Sequence[str]) -> list[str]:
    """Those of the arms whose gate and heads were given."""
    lacking = {*(() if gate else PARTS["gate"]), *(() if heads else TRAINED)} - {*BASES}
    return [arm for arm in arms if arm not in lacking]


def dequantised(folder: Path, dtype: str, model: str) -> Path:
    """The weights of a GGUF file as a transformers model, for engines that read no GGUF files."""
    if not (folder / "config.json").is_file():
        pair = sprinter.load_pair(model, runner="torch", dtype=dtype, compile=False)
        pair.models.target.model.save_pretrained(folder)  # type: ignore[operator,union-attr]
        assert pair.tokenizer is not None
        pair.tokenizer.save_pretrained(folder)
    return folder
