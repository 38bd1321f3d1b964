"""Which signal is worth learning: gates of many labels, features and networks, judged by the curves that they trace.

    python benchmarks/gate/study.py --data DIR --work FOLDER [--target DIR --draft DIR --name other]

1. Texts: paragraphs that the built-in pair was trained on, so that no gate has seen a text of step 4.
2. Labels: `sprinter.training.label_run` (kept in FOLDER; an interrupted run goes on).
3. Gates: `sprinter.training.train`; AU-ROC on the test prompts of the training data, with intervals over prompts.
4. Curves: SPRINTER runs on held-out paragraphs with the meter complete, at temperatures 1, 0.7 and 0, τ at quantiles of
   each gate's scores; target calls a token read off at drift 0.05, 0.10 and 0.15, 95 % bootstrap intervals over
   prompts, gain over the paper's gate prompt by prompt.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

import sprinter
from benchmarks.common import (
    RESULTS,
    TEMPERATURES,
    command,
    environment,
    heldout_prompts,
    option_parser,
    write_results,
)  # fmt: skip
from benchmarks.smoke import SMOKE, scratch, sized
from pair_data import read_documents
from sprinter.heads.gate import load_gate
from sprinter.heads.head import Head
from sprinter.training.card import save_trained
from sprinter.training.dataset import Positions, read_positions
from sprinter.training.label_run import LabelSettings, label
from sprinter.training.roc import Report, judge
from sprinter.training.settings import TrainSettings
from sprinter.training.train import train

PAPER = "paper, λ=1.2"
ALL = "hidden, entropy, max_q, top_q(k=10)"
TOLD = ALL + ", temperature"
CANDIDATES: dict[str, dict[str, Any]] = {  # name -> settings
    "paper, λ=1": {"label": "ratio(lambda=1.0)"},
    PAPER: {"label": "ratio(lambda=1.2)"},
    "paper, λ=1.5": {"label": "ratio(lambda=1.5)"},
    "paper, λ=1.2, greedy x": {"label": "ratio(lambda=1.2, at=greedy)"},
    "expected ratio, λ=1.2": {"label": "expected-ratio(lambda=1.2)"},
    "accept": {"label": "accept"},
    "fuzzy, tv < 0.3": {"label": "fuzzy(divergence=tv, threshold=0.3)"},
    "overlap": {"label": "overlap"},
    "overlap at 0.7": {"label": "overlap(temperature=0.7)"},
    "agreement": {"label": "agreement"},
    "overlap, entropy only": {"label": "overlap", "features": "entropy"},
    "overlap, law only": {"label": "overlap", "features": "entropy, max_q, top_q(k=10)"},
    "overlap, hidden and law": {"label": "overlap", "features": ALL},
    "overlap, mlp": {"label": "overlap", "head": "mlp", "width": 128},
    "overlap, mlp, hidden and law": {"label": "overlap", "features": ALL, "head": "mlp", "width": 128},
    "overlap at 0.7, mlp, hidden and law": {
        "label": "overlap(temperature=0.7)", "features": ALL, "head": "mlp", "width": 128
    },
    "agreement, mlp, hidden and law": {"label": "agreement", "features": ALL, "head": "mlp", "width": 128},
    "own overlap, linear, hidden, law and T": {"label": "overlap(temperature=own)", "features": TOLD},
    "own overlap, mlp, hidden, law and T": {
        "label": "overlap(temperature=own)", "features": TOLD, "head": "mlp", "width": 128
    },
    "overlap, resnet": {"label": "overlap", "head": "resnet"},
}  # fmt: skip
SHARES = sized((0.15, 0.35, 0.55, 0.75, 0.9), (0.35, 0.9))  # of positions that score at least τ
RATES = sized((0.15, 0.35, 0.55, 0.75, 0.9), (0.35, 0.9))  # of the coin
DRIFTS = (0.05, 0.10, 0.15)
NEW_TOKENS, LABEL_TOKENS, SEED = sized(48, 6), sized(32, 4), 0
LAST = 1.0  # temperature 1 is where the labels were drawn


def paragraphs(data: Path, count: int) -> list[str]:
    """Paragraphs of 40 words and more from training documents, one document after another."""
    documents = [d for d in read_documents(data) if not d.held_out and d.source in ("wikipedia", "wikinews")]
    chosen = []
    for place in range(60):
        for document in documents:
            blocks = [block for block in document.text.split("\n") if len(block.split()) >= 40]
            if place < len(blocks):
                chosen.append(blocks[place])
            if len(chosen) == count:
                return chosen
    return chosen


def labelled(pair: sprinter.Pair, texts: Sequence[str], folder: Path, name: str, **settings: Any) -> Path:
    """A finished data set of the texts."""
    source, out = folder / f"{name}.txt", folder / name
    if not source.is_file():
        source.write_text("\n".join(text.replace("\n", " ") for text in texts) + "\n", encoding="utf-8")

    def show(progress: Any) -> None:
        print(f"\r{name}: {progress.share:.0%} labelled", end="", file=sys.stderr)

    label(pair, [source], out, LabelSettings(**settings), progress=show)
    print(file=sys.stderr)
    return out


@dataclass
class Trace:
    """Runs of one dial: ``[settings, prompts]`` each."""

    calls: np.ndarray
    drift: np.ndarray  # sums over tokens
    tokens: np.ndarray

    def at(self, drift: float, rows: np.ndarray) -> np.ndarray:
        """Target calls a token where the curve of ``rows [..., prompts]`` has this mean drift, interpolated."""
        tokens = self.tokens[:, rows].sum(-1)
        xs, ys = self.drift[:, rows].sum(-1) / tokens, self.calls[:, rows].sum(-1) / tokens
        xs, ys = xs.reshape(len(xs), -1), ys.reshape(len(ys), -1)
        found = []
        for x, y in zip(xs.T, ys.T, strict=True):
            order = np.argsort(x)
            found.append(np.interp(drift, x[order], y[order]))
        return np.array(found).reshape(rows.shape[:-1])


def trace(
    pair: sprinter.Pair, specs: Sequence[str], prompts: Sequence[str], temperature: float, note: str
) -> Trace:
    """Run every setting on every prompt, meter complete."""
    rows = []
    for n, spec in enumerate(specs):
        outs = [
            pair.generate(
                prompt,
                method=spec,
                max_new_tokens=NEW_TOKENS,
                temperature=temperature,
                seed=i,
                meter="complete",
            ).stats
            for i, prompt in enumerate(prompts)
        ]
        rows.append([[s.target_calls, (s.mean_drift or 0.0) * s.new_tokens, s.new_tokens] for s in outs])
        print(f"\rT={temperature} {note} {n + 1}/{len(specs)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return Trace(*np.moveaxis(np.array(rows, dtype=float), -1, 0))


def taus(head: Head, positions: Positions, temperature: float = 1.0) -> list[float]:
    """Thresholds that the wanted shares of the test part's positions reach."""
    test = positions.inputs[(positions.parts(SEED) == 2) & positions.at_temperature(temperature)]
    scores = head.calibration(head.network(test))
    return [round(float(scores.quantile(1 - share)), 6) for share in SHARES]


Gates = dict[str, tuple[Head, dict[float, list[float]], dict[str, Any]]]  # head, thresholds, evaluation


def train_all(names: Sequence[str], sources: Sequence[Path], out: Path) -> Gates:
    """Every candidate: the gate, its thresholds, its evaluation on the test prompts."""
    gates, cache = {}, {}
    for name in names:
        settings = TrainSettings(seed=SEED, **{"head": "linear", **CANDIDATES[name]})
        if settings.inputs not in cache:
            cache = {settings.inputs: read_positions(sources, settings.inputs)}
        positions = cache[settings.inputs]
        folder, began = out / name.replace(" ", "-").replace(",", "").replace("<", "under"), time.time()
        with torch.inference_mode(False):
            trained = train(positions, settings)
        report = judge(trained.head, positions.select(positions.parts(SEED) == 2), repeats=200)
        save_trained(trained, report, positions, folder)
        head = load_gate(folder)
        gates[name] = (head, {t: taus(head, positions, t) for t in TEMPERATURES}, facts(report))
        print(f"{name}: {time.time() - began:.0f} s, {gates[name][2]['auc']}", file=sys.stderr)
    return gates


def make_gates(pair: sprinter.Pair, data: Path, names: Sequence[str], texts: int, folder: Path) -> Gates:
    """Labels of so many paragraphs, and a gate of each kind learned from them; both stay in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    source = labelled(pair, paragraphs(data, texts), folder, "labels", new_tokens=LABEL_TOKENS)
    return train_all(names, [source], folder)


def facts(report: Report) -> dict[str, Any]:
    """AU-ROC of the gate, of entropy and of confidence for every truth, with 95 % intervals; R² for its own label."""
    summary = report.summary()
    areas = {name: truth["auc"] for name, truth in summary["truths"].items()}
    return {
        "auc": areas,
        "r2": summary["r2"],
        "positions": summary["positions"],
        "prompts": summary["prompts"],
    }


def read_off(
    traces: Mapping[str, Trace], plain: Trace, repeats: int = sized(1000, 20)
) -> dict[str, dict[str, Any]]:
    """Arm -> drift -> calls a token with its interval, and the gain over the paper's gate with its interval."""
    prompts = plain.tokens.shape[1]
    rows = np.vstack(
        [np.arange(prompts), np.random.default_rng(0).integers(prompts, size=(repeats, prompts))]
    )
    ended = {  # every curve begins where nothing is trusted
        name: Trace(
            *(np.vstack([getattr(plain, part), getattr(one, part)]) for part in ("calls", "drift", "tokens"))
        )
        for name, one in traces.items()
    }
    calls = {name: {drift: one.at(drift, rows) for drift in DRIFTS} for name, one in ended.items()}

    def interval(values: np.ndarray) -> list[float]:
        low, high = np.quantile(values[1:], [0.025, 0.975])
        return [float(values[0]), float(low), float(high)]

    return {
        name: {
            f"{drift:.2f}": {
                "calls_per_token": interval(values),
                "gain_over_paper": interval(1 - values / calls[PAPER][drift]),
            }
            for drift, values in found.items()
        }
        for name, found in calls.items()
    }


def points(one: Trace) -> list[list[float]]:
    """(drift, calls a token) of each setting."""
    tokens = one.tokens.sum(1)
    return [
        [float(x), float(y)]
        for x, y in zip(one.drift.sum(1) / tokens, one.calls.sum(1) / tokens, strict=True)
    ]


def table(results: dict[str, Any]) -> str:
    """Markdown: calls a token at each drift and temperature, gain over the paper's gate."""
    heads = [f"T={t}, drift {d:.2f}" for t in TEMPERATURES for d in DRIFTS]
    lines = [f"| gate | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for name in results["curves"][str(LAST)]["read_off"]:
        cells = []
        for t in TEMPERATURES:
            found = results["curves"].get(str(t), {}).get("read_off", {}).get(name)
            for d in DRIFTS:
                if found is None:
                    cells.append("–")
                    continue
                one = found[f"{d:.2f}"]
                gain, low, high = (100 * v for v in one["gain_over_paper"])
                shown = "" if name == PAPER else f" ({gain:+.0f} % [{low:+.0f}, {high:+.0f}])"
                cells.append(f"{one['calls_per_token'][0]:.3f}{shown}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Label, train, trace, write."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        required=not SMOKE,
        default=scratch("work") if SMOKE else None,
        help="folder for labels and gates",
    )
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--name", default="builtin", help="of the pair, in the result's name")
    parser.add_argument("--texts", type=int, default=sized(6000, 40))
    parser.add_argument("--prompts", type=int, default=sized(30, 2))
    parser.add_argument(
        "--only",
        nargs="*",
        default=sized(list(CANDIDATES), ["overlap"]),
        choices=list(CANDIDATES),
        metavar="GATE",
    )
    parser.add_argument("--add", action="store_true", help="keep what the last results hold of other gates")
    args = parser.parse_args()
    began, names = time.time(), list(dict.fromkeys([PAPER, *args.only]))
    pair = (
        sprinter.load_pair(args.target, draft=args.draft)
        if args.target
        else sprinter.load_pair(compile=False)
    )
    gates = make_gates(pair, args.data, names, args.texts, args.work / args.name)
    prompts = heldout_prompts(args.data, args.prompts, skip=sized(100, 2))
    results: dict[str, Any] = {
        "benchmark": f"gate/study_{args.name}",
        "command": command(),
        "environment": environment(),
        "prompts": len(prompts),
        "new_tokens": NEW_TOKENS,
        "gates": {
            name: {"settings": CANDIDATES[name], "parameters": head.size, "taus": values, **found}
            for name, (head, values, found) in gates.items()
        },
        "curves": {},
    }
    earlier = RESULTS / f"gate/study_{args.name}.json"
    if args.add and earlier.is_file():
        known = json.loads(earlier.read_text(encoding="utf-8"))
        results |= {"gates": known["gates"] | results["gates"], "curves": known["curves"]}
        results["added"] = [*known.get("added", []), {"gates": names, "command": known["command"]}]
    for temperature in TEMPERATURES:
        plain = trace(
            sprinter.Pair(pair.models, gates[PAPER][0]),
            ["sprinter(tau=1.0)"],
            prompts,
            temperature,
            "no trust",
        )
        coins = [f"coin(rate={rate})" for rate in RATES]
        traces = {"coin": trace(pair, coins, prompts, temperature, "coin")}
        for name, (head, values, _) in gates.items():
            gated = sprinter.Pair(pair.models, head)
            specs = [f"sprinter(tau={min(1.0, max(0.0, tau))})" for tau in values[temperature]]
            traces[name] = trace(gated, specs, prompts, temperature, name)
        old = results["curves"].get(str(temperature), {"points": {}, "read_off": {}})
        results["curves"][str(temperature)] = {
            "plain": points(plain)[0],
            "points": old["points"] | {name: points(one) for name, one in traces.items()},
            "read_off": old["read_off"] | read_off(traces, plain),
        }
        results["seconds"] = round(time.time() - began, 1)
        write_results(f"gate/study_{args.name}", results, table(results))


if __name__ == "__main__":
    main()
