"""A draft of another vocabulary, read and drafting in four ways: tokens per target call of greedy drafts.

    python benchmarks/real/vocabularies.py --data DIR [--prompts 12] [--gamma 4]

The target writes each text greedily; every way then drafts along it, ``gamma`` of the draft's steps a call, of which
the tokens that the text has are kept, and one more. *Token by token*: what Sprinter does; the draft reads the target's
tokens one by one, and writes common tokens. *Strings*: it writes any of its tokens, and their text is encoded in the
target's. *Re-encoded*: the text before the draft is encoded in the draft's own way, for each call again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

import sprinter
from benchmarks.common import cells, grid, option_parser, save
from benchmarks.real.arms import SMOLLM2, TARGET
from benchmarks.real.weights import prompts_of
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.statistics import ratio_of_ratios
from sprinter.engine.strings import StringDrafter
from sprinter.models.common_tokens import CommonTokens, words_of
from sprinter.models.pair import builtin_paths

NAME = "real/vocabularies"
SUITES = sized(("humaneval", "gsm8k", "vicuna"), ("gsm8k",))
KIND = sized({"runner": "torch", "dtype": "gguf"}, {"dtype": "float32"})
NEW_TOKENS = sized(128, 8)
WAYS = {
    "token by token": (False, False), "token by token, re-encoded": (False, True),
    "strings": (True, False), "strings, re-encoded": (True, True),
}  # fmt: skip
"""Name → whether it writes strings, and whether the text is re-encoded."""


class Drafter(StringDrafter):
    """A draft model beside a target of another vocabulary, in four ways."""

    def __init__(self, target: sprinter.Pair, draft: sprinter.Pair) -> None:
        super().__init__(target, draft)
        assert target.tokenizer is not None and draft.tokenizer is not None
        words, own = words_of(target.tokenizer), words_of(draft.tokenizer)
        assert words is not None and own is not None
        self.tokens = CommonTokens(words, own)
        self.tokens.join_ends(target.models.target.eos_ids, draft.models.target.eos_ids)
        self.common, self.inner = torch.tensor(sorted(self.tokens.ids.items())).unbind(1)

    def drafted(self, ids: Sequence[int], gamma: int, strings: bool, again: bool) -> list[int]:
        """What ``gamma`` steps draft after a text, in the target's tokens."""
        one_by_one = [own for token in ids for own in self.tokens.read_as(token)]
        own, made = self.spelled(ids) if again else one_by_one, list[int]()
        start = len(own)
        while own and len(own) - start < gamma:
            said = self.logits(own)
            if not strings:
                best = int(said[self.inner].argmax())
                made.append(int(self.common[best]))
                own.append(int(self.inner[best]))
                continue
            own.append(int(said.argmax()))
            if self.is_special(own[-1]):
                break
        return self.encoded(ids, own[start:]) if strings else made


def calls(
    drafter: Drafter, prompt: Sequence[int], text: Sequence[int], gamma: int, way: tuple[bool, bool]
) -> int:
    """Target calls that a text takes."""
    at = count = 0
    while at < len(text):
        made = drafter.drafted([*prompt, *text[:at]], gamma, *way)
        kept = 0
        while kept < len(made) and at + kept < len(text) and made[kept] == text[at + kept]:
            kept += 1
        at, count = at + kept + 1, count + 1
    return count


@torch.inference_mode()
def main() -> None:
    """Write the texts, draft along them in each way."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(12, 2), help="number of prompts")
    parser.add_argument("--gamma", type=int, default=4, help="draft steps a call")
    options = parser.parse_args()
    began = time.time()
    pair = sprinter.load_pair(*([builtin_paths()["target"]] if SMOKE else [TARGET]), **KIND)
    draft = sprinter.load_pair(builtin_paths()["draft"] if SMOKE else SMOLLM2, **KIND)
    prompts = prompts_of(pair, options.data, options.prompts, SUITES)
    drafter = Drafter(pair, draft)
    tokens, found = list[int](), {name: list[int]() for name in WAYS}
    for i, prompt in enumerate(prompts):
        out = pair.generate(prompt, method="autoregressive", temperature=0.0, max_new_tokens=NEW_TOKENS)
        text = [token.id for token in out.tokens]
        tokens.append(len(text))
        for name, way in WAYS.items():
            found[name].append(calls(drafter, prompt, text, options.gamma, way))
        print(f"\r{i + 1}/{len(prompts)}", end="", file=sys.stderr)
    written, base = np.array(tokens), np.array(found["token by token"])
    rows, lines = [], list[str]()
    for name, counted in found.items():
        gain = ratio_of_ratios((written, np.array(counted)), (written, base))
        each = sum(tokens) / sum(counted)
        rows.append({"way": name, "tokens_a_call": each, "ratio": list(gain)})
        lines.append(f"{name} | {each:.2f} | {cells(gain)}")
    table = "\n".join(grid("what the draft reads and writes | tokens per target call | ratio", lines))
    facts = {"gamma": options.gamma, "rows": rows, "in_common": len(drafter.tokens.ids)}
    save(NAME, table, began, len(prompts), **{"new_tokens": NEW_TOKENS, **facts})


if __name__ == "__main__":
    main()
