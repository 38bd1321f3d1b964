"""A gate on your text: label, train, and what it asks the target beside a coin. Another text: own_gate.py OUT FILE."""

import sys
import tempfile
from pathlib import Path

import draw

import sprinter
from sprinter.cli import main

pair = sprinter.load_pair()
folder = Path(tempfile.mkdtemp())
if len(sys.argv) > 2:
    file = Path(sys.argv[2])
else:  # stories of the target stand for your text, a line each
    names = ["boy", "girl", "cat", "dog", "bird", "fish", "bear", "frog", "duck", "mouse"]
    prompts = [
        f"Once upon a time, there was a {kind} {name}"
        for kind in ("little", "big", "red", "sad", "old", "brown", "kind", "tiny")
        for name in names
    ]
    outs = pair.generate(prompts, method="autoregressive", max_new_tokens=48, seed=1)
    file = folder / "texts.txt"
    file.write_text(
        "".join(" ".join(f"{p}{out.text}".split()) + "\n" for p, out in zip(prompts, outs, strict=True))
    )
labels, gate = str(folder / "labels"), str(folder / "gate")
assert main(["gate", "label", "--data", str(file), "--out", labels, "-n", "24"]) == 0
assert main(["gate", "train", "--labels", labels, "--out", gate, "--tau", "0.7", "--repeats", "50"]) == 0

own = sprinter.load_pair(gate=gate)
asked = [
    "One day, a little girl", "The big dog was", "A bird sat in", "Tom and Anna", "The old mill stood by",
    "One morning a small bird", "It was raining", "Mother said",
]  # fmt: skip
lines: dict[str, list[tuple[float, float]]] = {"your gate": [], "a coin": []}
for title, specs in (
    ("your gate", [f"sprinter(tau={tau})" for tau in (0.5, 0.6, 0.7, 0.8, 0.9)]),
    ("a coin", [f"coin(rate={rate})" for rate in (0.8, 0.6, 0.4, 0.2, 0.1)]),
):
    for spec in specs:
        outs = own.generate(asked, method=spec, max_new_tokens=96, seed=1)
        count = sum(len(out.tokens) for out in outs)
        drift = sum((out.stats.mean_drift or 0.0) * len(out.tokens) for out in outs) / count
        lines[title].append((drift, sum(out.stats.target_calls for out in outs) / count))
draw.chart("own_gate", lines, "mean drift", "target calls a token")
