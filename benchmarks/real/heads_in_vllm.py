"""An EAGLE-3 folder of ``sprinter draft train`` in vLLM: does it load, and are as many drafts accepted as here?

    python benchmarks/real/heads_in_vllm.py --data DIR --head FOLDER [--prompts 6] [--new-tokens 64] [--tokens 3]

SmolLM2's weights as a transformers model in float32, greedy, chains of as many tokens; both engines answer the same
questions of GSM8K, HumanEval and MT-bench. vLLM runs in a process of its own, by the interpreter that
SPRINTER_VLLM_PYTHON names. The first round of each text is left out: vLLM's has no draft. Texts are compared too, with
those of both engines' plain decoding beside: greedy texts of two engines part where two tokens are nearly tied.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

import sprinter
from benchmarks.common import cells, grid, interval, note_run, option_parser, write_results
from benchmarks.real.arms import SMOLLM2, dequantised
from benchmarks.real.weights import prompts_of
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.arm import Ask
from sprinter.bench.arms.peer_vllm import VllmHeads, VllmPlain
from sprinter.fingerprint import weights_fingerprint
from sprinter.heads.eagle3 import save_eagle3
from sprinter.laws import Sampling
from sprinter.training.drafts.eagle3 import fresh_eagle3
from sprinter.training.drafts.settings import HeadSettings

NAME = "real/heads_in_vllm"
SUITES = sized(("gsm8k", "humaneval", "mt-bench"), ("gsm8k",))
KIND: dict[str, Any] = {"runner": "torch", "dtype": "float32", "compile": False}


class Told(NamedTuple):
    """What one engine wrote on all prompts: ids of each text, and the tokens that each of its rounds added."""

    texts: list[list[int]]
    rounds: list[list[int]]

    @property
    def tokens(self) -> list[int]:
        """New tokens of each text after its first round: vLLM's adds a token without a draft, at the end of prefill."""
        return [sum(rounds[1:]) for rounds in self.rounds]

    @property
    def calls(self) -> list[int]:
        """Target calls of each text after its first round."""
        return [len(rounds) - 1 for rounds in self.rounds]


def ours(pair: sprinter.Pair, prompts: Sequence[list[int]], method: str, new: int) -> Told:
    """Answers of this engine."""
    made = [pair.generate(ids, method=method, temperature=0.0, max_new_tokens=new) for ids in prompts]
    return Told([[token.id for token in one.tokens] for one in made], [one.accept_lengths for one in made])


def theirs(arm: VllmPlain, pair: sprinter.Pair, prompts: Sequence[list[int]], new: int) -> Told:
    """Answers of vLLM."""
    with closing(arm):
        arm.start(pair)
        asks = [Ask(tuple(ids), new, Sampling(temperature=0.0), 0) for ids in prompts]
        made = [arm.answer(ask) for ask in asks]
    return Told([one.ids for one in made], [one.accept_lengths for one in made])


def compared(told: dict[str, Told], base: str) -> list[dict[str, Any]]:
    """One row an engine: tokens a target call, over those of the base, and texts that are the base's."""
    rows = []
    for name, one in told.items():
        pairs = zip(one.texts, told[base].texts, strict=True)
        same = [a == b for a, b in pairs]
        rows.append(
            {
                "engine": name, "texts": len(same), "same_texts": sum(same),
                "tokens_per_call": interval(np.array(one.tokens), np.array(one.calls)),
                "on_same_texts": _per_call(one, same),
                "of_base_on_same_texts": _per_call(told[base], same),
            }
        )  # fmt: skip
    return rows


def _per_call(told: Told, chosen: Sequence[bool]) -> float | None:
    calls = sum(calls for calls, one in zip(told.calls, chosen, strict=True) if one)
    tokens = sum(tokens for tokens, one in zip(told.tokens, chosen, strict=True) if one)
    return tokens / calls if calls else None


def table(results: dict[str, Any]) -> str:
    """What was measured, in Markdown."""
    head = "engine | tokens/target call | texts that are ours | tokens/target call on these | ours on these"
    rows = [
        f"{row['engine']} | {cells(row['tokens_per_call'])} | {row['same_texts']} of {row['texts']} | "
        + " | ".join(
            "–" if row[name] is None else f"{row[name]:.3f}"
            for name in ("on_same_texts", "of_base_on_same_texts")
        )
        for row in results["rows"]
    ]
    return "\n".join(
        [f"Chains of {results['tokens']} tokens, greedy. {results['peer']}", "", *grid(head, rows)]
    )


def main() -> None:
    """Load; answer; write."""
    parser = option_parser(__doc__)
    parser.add_argument("--head", type=Path, required=not SMOKE)
    parser.add_argument("--prompts", type=int, default=sized(6, 1), help="of each suite")
    parser.add_argument("--new-tokens", type=int, default=sized(64, 6))
    parser.add_argument("--tokens", type=int, default=3, help="of each draft")
    chosen = parser.parse_args()
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        if SMOKE:
            chosen.head = scratch("heads")
            module: Any = sprinter.load_pair().models.target.module("drafting")
            settings, own = HeadSettings("eagle3"), weights_fingerprint(module)
            save_eagle3(fresh_eagle3(module, settings, "", own), chosen.head, "")
        file: dict[str, Any] = {} if SMOKE else {"target": SMOLLM2}
        pair = sprinter.load_pair(**file, **KIND, heads=[chosen.head])
        prompts = prompts_of(pair, chosen.data, chosen.prompts * len(SUITES), SUITES)
        told = {"Sprinter": ours(pair, prompts, f"heads(gamma={chosen.tokens})", chosen.new_tokens)}
        told["Sprinter, plain"] = ours(pair, prompts, "autoregressive", chosen.new_tokens)
        peer = "vLLM was left out."
        if not SMOKE:
            exported = sprinter.load_pair(
                str(dequantised(Path(folder) / "target", "float32", SMOLLM2)), **KIND
            )
            arm = VllmHeads(head=str(chosen.head), tokens=chosen.tokens)
            told["vLLM"] = theirs(arm, exported, prompts, chosen.new_tokens)
            told["vLLM, plain"] = theirs(VllmPlain(), exported, prompts, chosen.new_tokens)
            peer = f"vLLM {arm.versions()['vllm']}."
    results = {"benchmark": NAME}
    results |= {"rows": compared(told, "Sprinter"), "tokens": chosen.tokens, "peer": peer}
    note_run(results, "heads", began)
    write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
