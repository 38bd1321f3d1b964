"""An EAGLE-3 folder of ``sprinter draft train`` in speculators' own model: the same drafts?

    pip install speculators
    python benchmarks/real/elsewhere.py --data DIR --head FOLDER [--prompts 3] [--new-tokens 96]

speculators reads config.json by its schema, builds its own ``Eagle3DraftModel``, and loads the head's weights and, from
a folder, the target's embedding; the states are the target's. Both models draft along the target's greedy answers,
up to three steps ahead of each token, the answer's own tokens in between: how often their first choices are equal, and
how often each is the answer's token. vLLM reads this format too.
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor

import sprinter
from benchmarks.common import command, environment, grid, option_parser, write_results
from benchmarks.real.drafts import TARGET, prompts_of
from benchmarks.real.gate_prompts import LONGEST
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.errors import UserError
from sprinter.heads.eagle3 import Eagle3Heads, save_eagle3
from sprinter.heads.load import load_any_head
from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.data import TargetText
from sprinter.training.drafts.eagle3 import Eagle3Learner, fresh_eagle3
from sprinter.training.drafts.settings import HeadSettings

NAME = "real/elsewhere"
STEPS = 3


def their_model(folder: Path, target: Path) -> Any:
    """speculators' model of a folder, beside a transformers folder of the target; weights must not be missing."""
    try:
        from speculators import SpeculatorModel, SpeculatorModelConfig  # type: ignore[import-not-found]
    except ImportError as error:
        raise UserError(f"this benchmark needs speculators ({error}): pip install speculators") from None
    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(target)
    model = SpeculatorModel.from_pretrained(str(folder), config=config).float().eval()
    # Releases of transformers that are newer than it supports fill the missing embedding with noise, which it keeps.
    model._load_verifier_weights(overwrite_embed_tokens=True)
    wrong = [name for name, value in model.state_dict().items() if bool(value.isnan().any())]
    if wrong:
        raise UserError(f"speculators found no weights for {', '.join(wrong)}")
    return model


@torch.no_grad()
def theirs(model: Any, states: Tensor, ids: Tensor) -> list[Tensor]:
    """First choices ``[n − 1]`` of their model by step, as ids of the target.

    Args:
        states: of three layers, joined ``[n, 3 d]``. ids: ``[n]``.
    """
    drafts = model(
        hidden_states=states[None, :-1],
        input_ids=ids[None, 1:],
        document_ids=torch.zeros(1, len(ids) - 1, dtype=torch.long),
        ttt_steps=STEPS,
    )
    offsets = torch.zeros(model.draft_vocab_size, dtype=torch.long) if model.d2t is None else model.d2t
    return [one[0] + offsets[one[0]] for one in drafts]


@torch.no_grad()
def ours(learner: Eagle3Learner, text: TargetText) -> list[Tensor]:
    """First choices of ours by step: entries from the prompt's end on, as ids of the target."""
    heads = learner.entry
    assert isinstance(heads, Eagle3Heads)
    return [heads.kept[one.logits.argmax(-1)] for one in learner.outputs(collate([text]))]


def compared(learner: Eagle3Learner, model: Any, text: TargetText) -> list[tuple[int, int, int, int]]:
    """By step: drafts, equal first choices, and how many of ours and of theirs are the answer's token."""
    states = torch.cat([one[0] for one in learner.states(collate([text]))], -1)
    found = []
    for step, (own, other) in enumerate(
        zip(ours(learner, text), theirs(model, states, text.ids), strict=True)
    ):
        # The token at place p is drafted by entry p − 2 − step.
        places = torch.arange(max(text.prompt, step + 2), len(text.ids))
        other, true = other[places - 2 - step], text.ids[places]
        found.append(
            (len(places), int((own == other).sum()), int((own == true).sum()), int((other == true).sum()))
        )
    return found


def answers(pair: sprinter.Pair, data: Path, count: int, new_tokens: int) -> list[TargetText]:
    """Greedy answers of the target; no law is needed here."""
    texts = []
    for prompts in prompts_of(data).values():
        for prompt in islice((one for one in prompts if len(one) <= LONGEST), count):
            asked = prompt if SMOKE else [{"role": "user", "content": prompt}]
            out = pair.generate(asked, method="autoregressive", temperature=0.0, max_new_tokens=new_tokens)
            own = [token.id for token in out.tokens]
            ids = torch.tensor([*out.prompt_ids, *own])
            none = torch.zeros(len(own), 1)
            texts.append(TargetText(ids, len(ids) - len(own), none.long(), none, "", True))
    return texts


def table(results: dict[str, Any]) -> str:
    """What was measured, in Markdown."""
    head = "tokens ahead | drafts | same first choice | ours is the answer's token | theirs is"
    rows = [
        f"{number} | {row['drafts']} | {row['same']:.4f} | {row['ours_right']:.4f} | {row['theirs_right']:.4f}"
        for number, row in enumerate(results["steps"], 1)
    ]
    return "\n".join([f"speculators {results['speculators']}.", "", *grid(head, rows)])


def main() -> None:
    """Load both, compare, write."""
    parser = option_parser(__doc__)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--dtype", default="gguf", help="of the target as it answers; states are in float32")
    parser.add_argument("--head", type=Path, required=not SMOKE)
    parser.add_argument("--prompts", type=int, default=sized(3, 1), help="of each task")
    parser.add_argument("--new-tokens", type=int, default=sized(96, 6))
    chosen = parser.parse_args()
    began = time.time()
    if SMOKE:
        pair = writer = sprinter.load_pair()
    else:
        pair = sprinter.load_pair(chosen.target, runner="torch", dtype="float32")
        writer = sprinter.load_pair(chosen.target, dtype=chosen.dtype)
    target = pair.models.target.module("drafting")
    if SMOKE:
        chosen.head = scratch("elsewhere")
        fresh = fresh_eagle3(target, HeadSettings("eagle3"), "", "")  # type: ignore[arg-type]
        save_eagle3(fresh, chosen.head, "")
    heads = load_any_head(chosen.head)
    assert isinstance(heads, Eagle3Heads)
    heads.join(target)
    learner = Eagle3Learner(heads, target, 1.0, 1.0, STEPS)  # type: ignore[arg-type]
    learner.training(False)
    with tempfile.TemporaryDirectory() as folder:
        target.save_pretrained(folder)  # type: ignore[operator]
        model = their_model(chosen.head, Path(folder))
    texts = answers(writer, chosen.data, chosen.prompts, chosen.new_tokens)
    sums = torch.tensor([compared(learner, model, text) for text in texts]).sum(0).tolist()
    results = {
        "benchmark": NAME,
        "command": command(),
        "environment": environment(),
        "speculators": version("speculators"),
        "steps": [
            {"drafts": n, "same": same / n, "ours_right": own / n, "theirs_right": other / n}
            for n, same, own, other in sums
        ],
        "seconds": round(time.time() - began, 1),
    }
    write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
