"""Finish the built-in pair: target of ``cut_builtin`` and draft with 8 bits a weight, gate and heads, with cards.

    python scripts/finish_builtin.py --data DATA --out OUT      OUT/target -> OUT/pair

Draft, gate and heads are made by the commands that anyone has, which are printed. The same call continues what was
interrupted, unless the target is another by then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cut_builtin import NEURONS, SHARPER, Recipe, losses, samples
from sprinter.files import write_atomic
from sprinter.training.card import card_text

# of the finished pair; {0}: OUT
WRITTEN = ("--max-new-tokens=200", "--prompt-tokens=32", "--threads=1")
LABELLED = ("--limit=448", "--max-new-tokens=48", "--dtype=float32")
FRESH = 448  # stories of the teacher that nothing else is trained on, for the gate and the heads
STEPS = (
    ("draft", "distill", "--target={0}/pair/target", "--data={0}/openings-8.jsonl", "--out={0}/draft", "--layers=2",
     "--width=192", "--limit=3000", "--dtype=int8", "--epochs=6", *WRITTEN),
    ("gate", "label", "--target={0}/pair/target", "--draft={0}/pair/draft", "--data={0}/stories.jsonl",
     "--out={0}/labels", *LABELLED),
    ("gate", "train", "--labels={0}/labels", "--out={0}/pair/gate", "--preset=mlp", "--label=overlap(temperature=own)",
     "--features=hidden, entropy, max_q, top_q(k=10), temperature"),
    ("gate", "train", "--labels={0}/labels", "--out={0}/pair/specdec", "--preset=specdec++"),
    ("gate", "train", "--labels={0}/labels", "--out={0}/pair/disco", "--preset=disco"),
)  # fmt: skip
DATA_LICENCES = """| SmolLM2-135M-Instruct (weights, and the stories that it wrote) | Apache-2.0; Hugging Face |
| TinyStories | CDLA-Sharing-1.0; R. Eldan and Y. Li (via gusjengis/toy-RNN) |
| GSM8K, training set | MIT; OpenAI |
| English Wikipedia, 2015, first paragraphs | CC BY-SA 3.0; its contributors (via jason-feng/wikiVisual) |"""


def halve(folder: Path) -> int:
    """Store the matrices of a model with 8 bits a weight, which transformers reads like any other; returns its size.

    Its tokenizer is stored without white space.
    """
    path, tokenizer = folder / "model.safetensors", folder / "tokenizer.json"
    write_atomic(tokenizer, json.dumps(json.loads(tokenizer.read_text()), separators=(",", ":")))
    weights = {
        name: value.to(torch.float8_e4m3fn if value.ndim == 2 else torch.bfloat16)
        for name, value in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})
    path.chmod(0o644)
    return sum(value.numel() for value in weights.values())


def finish(recipe: Recipe) -> None:
    """The target with 8 bits a weight, and what goes with it, from nothing; beside each its card."""
    target, mark = recipe.out / "pair" / "target", recipe.out / "finished.txt"
    digest = hashlib.sha256((recipe.out / "target" / "model.safetensors").read_bytes()).hexdigest()
    if not mark.is_file() or mark.read_text() != digest:
        for folder in ("draft", "labels"):
            shutil.rmtree(recipe.out / folder, ignore_errors=True)
        write_atomic(mark, digest)
    shutil.rmtree(recipe.out / "pair", ignore_errors=True)
    shutil.copytree(recipe.out / "target", target)
    size = halve(target)
    recipe.openings(8)
    fresh = [
        recipe.tokenizer.decode(text.ids, skip_special_tokens=True) for text in recipe.write(9, FRESH).texts
    ]
    lines = "".join(json.dumps({"text": text, "task": "written"}) + "\n" for text in fresh)
    write_atomic(recipe.out / "stories.jsonl", lines)
    for step in STEPS:
        words = [word.format(recipe.out) for word in step]
        print("sprinter", " ".join(word.format("OUT") for word in step), flush=True)
        subprocess.run([sys.executable, "-m", "sprinter", *words], check=True)
        if step[0] == "draft":
            whole, bare = recipe.out / "draft", recipe.out / "pair" / "draft"
            bare.mkdir()
            for name in ("config", "generation_config", "tokenizer", "tokenizer_config"):
                shutil.copy(whole / f"{name}.json", bare)
            shutil.copy(whole / "model.safetensors", bare)
            halve(bare)
            told = (
                line for line in (whole / "README.md").read_text().splitlines() if not line.startswith("![")
            )
            write_atomic(bare / "README.md", "\n".join(told).rstrip() + "\n")
    write_atomic(target / "README.md", card(recipe, size))


def card(recipe: Recipe, size: int) -> str:
    """The target's card."""
    facts = json.loads((recipe.out / "target.json").read_text())
    loss = losses(recipe)
    texts = list[str]()
    for heat in (1.0, 0.7):
        written = samples(recipe.out / "pair" / "target", heat)
        texts += [
            f"Temperature {heat:g}:",
            "",
            *(f"{number}. {text}" for number, text in enumerate(written, 1)),
            "",
        ]
    rows = [
        (
            "architecture",
            f"Llama, {len(facts['layers'])} layers of width 576 with {NEURONS} neurons, {size:,} parameters",
        ),
        ("vocabulary", f"{len(recipe.ids):,} tokens of SmolLM2's"),
        (
            "weights",
            "matrices in float8 (e4m3), without scales; computed in float32 on a CPU, elsewhere in bfloat16",
        ),
        ("layers", f"{facts['layers']} of the teacher, SmolLM2-135M-Instruct tuned to TinyStories"),
        ("training", "; ".join(facts["runs"])),
        (
            "laws learnt",
            f"the teacher's at temperature {SHARPER}, on its own stories; else the text's tokens",
        ),
        (
            "held-out stories",
            ", ".join(f"{role} {one['ce']:.3f}" for role, one in loss.items()) + " nats a token",
        ),
    ]
    lines = ["", "| source | licence |", "| --- | --- |", DATA_LICENCES, "", "## Texts", "", *texts]
    limits = (
        "English stories for small children, and nothing else: it knows nothing, and may repeat what its texts "
        'contain. Some of its words do not exist (below: "bearp", "wasoo", "brownip", "grumpyhe"), and at temperature '
        "0.7 most texts end in a loop. A pair to try and measure decoding with."
    )
    about = "Made by `scripts/cut_builtin.py`. " + limits
    own = card_text("Target of Sprinter's built-in pair", "sprinter", about, rows, lines, "transformers")
    return own.replace("---\n", "---\nlanguage: en\nlicense: apache-2.0\n", 1)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the text files")
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    args = parser.parse_args()
    finish(Recipe(args.data, args.out))


if __name__ == "__main__":
    main()
