"""Gates for a real instruct pair against the draft's own certainty: AU-ROC, and target calls at equal drift.

    python benchmarks/real/gates.py --data DIR --prompts-file FILE --labels LABELS --out GATES

FILE comes from ``gate_prompts.py``, LABELS from ``sprinter gate label FILE --chat --classes target,draft`` on the pair.
Each gate is trained ``--folds`` times with other prompts held out, and every position is judged by a gate that has not
seen its prompt. The dial is replayed on the labelled laws (``sprinter.theory.replay``), temperature 1: SPRINTER with
each gate, ``certain`` with each signal, ``online``, a coin. The gates of the first fold stay in GATES.
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
from torch import Tensor

import sprinter
from benchmarks.common import cells, command, environment, grid, option_parser, read_off, write_results
from benchmarks.gate.study import facts as study_facts
from benchmarks.gate.study import labelled
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.agreement import SIGNS
from sprinter.bench.statistics import BootstrapInterval
from sprinter.decode.regression import Regression
from sprinter.decode.spec import parse_method
from sprinter.heads.head import Head
from sprinter.theory.from_labels import from_labels
from sprinter.theory.recording import Recording
from sprinter.theory.replay import replay
from sprinter.training.card import save_trained
from sprinter.training.dataset import read_positions
from sprinter.training.metrics import Bootstrap, curves
from sprinter.training.records import Records, read_info, read_records
from sprinter.training.roc import judge
from sprinter.training.settings import TrainSettings
from sprinter.training.train import train

LAW = "hidden, entropy, max_q, top_q(k=10)"
GATES: dict[str, dict[str, Any]] = {
    "paper: linear, λ=1.2, greedy": {"label": "ratio(lambda=1.2, at=greedy)"},
    "linear": {"label": "overlap", "features": LAW},
    "mlp": {"label": "overlap", "features": LAW, "head": "mlp", "width": 128},
}
SHARES = sized((0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97), (0.35, 0.9))
"""Shares of positions that are trusted: the thresholds of gates and of ``certain`` are these quantiles."""
DRIFTS = (0.02, 0.05, 0.10)
ROUND = 5
"""Draft tokens that the target judges at once: the online logistic learns of them together."""
ALL = "all"
NOTHING = "nothing trusted"
"""Where all dials begin."""
EXACT = {
    "speculative(gamma=3)": "exact, γ = 3",
    "speculative(gamma=5)": "exact, γ = 5",
    "svip": "exact, svip",
}
"""Lossless methods on the same laws: what a dial must beat."""


@dataclass
class Data:
    """Labels in memory: records, a kind for each prompt's number, and the names by which prompts are split."""

    records: Records
    kinds: Mapping[int, str]
    new_tokens: int


def truths(records: Records) -> dict[str, Tensor]:
    """What a gate may be asked for, ``[n]`` float64 of 0 and 1."""
    beta = records.overlap[:, 0]
    return {
        "overlap above median": (beta > beta.median()).double(),
        "agreement": records.overlap[:, 2].double(),
        "ratio(lambda=1.2, at=greedy)": (records.greedy_ratio <= 1.2).double(),
    }


def signals(records: Records) -> dict[str, Tensor]:
    """The draft's certainty by signal, larger where it is more certain, ``[n]``."""
    top = records.top_q.topk(2, -1).values.double().clamp(min=1e-38).log()
    return {"entropy": -records.entropy, "max_prob": records.max_q, "margin": top[:, 0] - top[:, 1]}


def online(data: Data, *, anew: bool) -> Tensor:
    """Acceptance that a logistic on the margin expects before each position, ``[n]``, untrained at the first one.

    It learns from the target's verdicts on the tokens x ~ q, kept or not by exact acceptance, five positions at a
    time. ``anew``: it begins again with each text; otherwise it goes on through all texts, as a server would.
    """
    records, regression = data.records, Regression("margin", memory=500 if anew else 5000)
    margin, scores = signals(records)["margin"], torch.full((len(records),), torch.nan)
    uniforms = torch.rand(len(records), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    verdicts = (uniforms.log() < (records.log_p - records.log_q).double()).double()
    order = np.lexsort((records.step, records.kind, records.prompt))
    key = torch.stack([records.prompt, records.kind.long()], -1)[order]
    fit = regression.start()
    for text in np.split(order, 1 + np.flatnonzero((key[1:] != key[:-1]).any(-1).numpy())):
        fit = regression.start() if anew else fit
        for round_ in (text[at : at + ROUND] for at in range(0, len(text), ROUND)):
            read = {"margin": margin[round_]}
            scores[round_] = regression.predict(read, fit).float()
            fit = regression.learn(read, verdicts[round_], fit)
    return scores


def out_of_fold(
    name: str, labels: Path, data: Data, folds: int, out: Path
) -> tuple[Tensor, dict[int, Head], dict[str, Any]]:
    """Scores ``[n]`` by gates that have not seen the prompt (NaN where all have); head of each prompt; facts."""
    settings = TrainSettings(seed=0, **{"head": "linear", **GATES[name]})
    positions = read_positions([labels], settings.inputs)
    assert torch.equal(positions.columns["prompt"], data.records.prompt), "the positions are the records"
    scores, heads, facts = torch.full((len(positions),), torch.nan), {}, {}
    for seed in range(folds):
        began = time.time()
        trained = train(positions, TrainSettings(seed=seed, **{"head": "linear", **GATES[name]}))
        spent = time.time() - began
        test = positions.parts(seed) == 2
        new = test & scores.isnan()
        with torch.inference_mode():
            head = trained.head
            scores[new] = head.calibration(head.network(positions.inputs[new])).float()
        heads |= {int(number): head for number in positions.columns["prompt"][new].unique()}
        if seed == 0:
            report = judge(head, positions.select(test), repeats=200)
            save_trained(
                trained, report, positions, out / name.replace(":", "").replace(" ", "-").replace(",", "")
            )
            facts = {"train_s": round(spent, 1), "tau": head.config.tau, **study_facts(report)}
    return scores, heads, facts


def areas(scores: Mapping[str, Tensor], data: Data, rows: Tensor) -> dict[str, Any]:
    """By truth and score: AU-ROC with its 95 % interval over prompts."""
    bootstrap = Bootstrap.make(data.records.prompt[rows], repeats=sized(300, 20))
    return {
        what: {
            name: curves(score[rows], label[rows], bootstrap).auc.to_list() for name, score in scores.items()
        }
        for what, label in truths(data.records).items()
    }


def recordings(data: Data, rows: Tensor, heads: Mapping[str, Head]) -> list[Recording]:
    """The texts of these records, those of the target and those of the draft."""
    columns = {name: column[rows] for name, column in data.records.columns().items()}
    writers = [
        writer for writer, kind in (("target", 2), ("draft", 1)) if bool((columns["kind"] == kind).any())
    ]
    return [
        from_labels(columns, writer, new_tokens=data.new_tokens, heads=heads)  # type: ignore[arg-type]
        for writer in writers
    ]


def run(found: Sequence[Recording], spec: str) -> np.ndarray:
    """Tokens, target calls, drift and draft steps of each text, ``[texts, 4]``."""
    return np.vstack([replay(one, parse_method(spec)).by_text.numpy() for one in found])


def dials(
    data: Data, rows: Tensor, scores: Mapping[str, Tensor], heads: Mapping[str, Mapping[int, Head]]
) -> dict[str, list[np.ndarray]]:
    """By dial, the replayed texts of each setting, ``[texts, 4]``, texts in the order of their prompts' numbers."""
    quantiles = [
        lambda values, share=share: float(values[rows].double().quantile(1 - share)) for share in SHARES
    ]
    specs = {
        f"certain, {signal}": [
            f"certain(signal={signal}, threshold={sign * quantile(values):.6f})" for quantile in quantiles
        ]
        for (signal, sign), values in zip(SIGNS.items(), signals(data.records).values(), strict=True)
    }
    specs["online"] = [f"online(tau={tau})" for tau in sized((0.3, 0.5, 0.6, 0.7, 0.8, 0.9), (0.6, 0.8))]
    specs[NOTHING] = ["coin(rate=0)"]
    specs |= {name: [spec] for spec, name in EXACT.items()}
    specs["coin"] = [f"coin(rate={rate})" for rate in sized((0.2, 0.4, 0.6, 0.8), (0.4, 0.8))]
    found: dict[str, list[np.ndarray]] = {name: [] for name in (*scores, *specs)}
    numbers = data.records.prompt[rows].unique().tolist()
    for number in numbers:
        here = rows & (data.records.prompt == number)
        for name in scores:
            texts = recordings(data, here, {"gate": heads[name][number]})
            taus = [quantile(scores[name]) for quantile in quantiles]
            found[name].append(np.stack([run(texts, f"sprinter(tau={tau:.6f})") for tau in taus]))
        texts = recordings(data, here, {})
        for name, some in specs.items():
            found[name].append(np.stack([run(texts, spec) for spec in some]))
        print(f"\rreplayed {len(found['coin'])}/{len(numbers)} prompts", end="", file=sys.stderr)
    print(file=sys.stderr)
    return {name: [*np.concatenate(parts, 1)] for name, parts in found.items()}


def calls_at(
    settings: Sequence[np.ndarray], texts: np.ndarray, drift: float, repeats: int = sized(500, 20)
) -> BootstrapInterval | None:
    """Target calls a token at this mean drift, with the 95 % interval over texts; None: the dial does not reach it."""
    table = np.stack(settings)[:, texts]
    # The first setting is the dial's beginning, where nothing is trusted.
    draws = np.random.default_rng(0).integers(len(texts), size=(repeats, len(texts)))
    values = []
    for rows in (np.arange(len(texts)), *draws):
        tokens, calls, drifts, _ = table[:, rows].sum(1).T
        reached = drifts / tokens
        if not values and reached.max() < drift:
            return None
        values.append(read_off(drift, reached, calls / tokens))
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return values[0], float(low), float(high)


def main() -> None:
    """Train, judge, replay, write."""
    parser = option_parser(__doc__)
    parser.add_argument("--labels", type=Path, required=not SMOKE)
    parser.add_argument("--prompts-file", type=Path, help="the labelled records, with a kind each")
    parser.add_argument("--folds", type=int, default=sized(6, 2))
    parser.add_argument("--out", type=Path, required=not SMOKE, default=scratch("gates") if SMOKE else None)
    chosen = parser.parse_args()
    if SMOKE:
        words = " ".join(f"word {i} of a text" for i in range(12))
        texts = [f"{words} number {i}" for i in range(40)]
        chosen.labels = labelled(sprinter.load_pair(), texts, scratch("labels"), "labels", new_tokens=6)
    began, info = time.time(), read_info(chosen.labels)
    lines = chosen.prompts_file.read_text(encoding="utf-8").splitlines() if chosen.prompts_file else ()
    kinds = {number: json.loads(line)["kind"] for number, line in enumerate(lines)}
    records = read_records(chosen.labels)
    data = Data(records, kinds, int(info.settings["new_tokens"]))
    scores, heads, facts = {}, {}, {}
    for name in GATES:
        scores[name], heads[name], facts[name] = out_of_fold(
            name, chosen.labels, data, chosen.folds, chosen.out
        )
        print(f"{name}: {facts[name]['train_s']} s", file=sys.stderr)
    written = (records.kind == 1) | (records.kind == 2)
    rows = ~next(iter(scores.values())).isnan() & written
    learned = {
        "online logistic on the margin": online(data, anew=False),
        "online logistic on the margin, anew with each text": online(data, anew=True),
    }
    found = dials(data, rows, scores, heads)
    names = [data.kinds.get(number, ALL) for number in records.prompt[rows].unique().tolist()]
    groups = {ALL: np.arange(len(names))}
    groups |= {kind: np.flatnonzero([name == kind for name in names]) for kind in sorted({*names} - {ALL})}
    results = {
        "benchmark": "real/gates",
        "command": command(),
        "environment": environment(),
        "target": info.target_id,
        "draft": info.draft_id,
        "labels": {"prompts": len(records.prompt.unique()), "positions": len(records)},
        "judged": {"prompts": len(names), "positions": int(rows.sum())},
        "gates": facts,
        "auc": areas({**scores, **signals(records), **learned}, data, rows),
        "curves": {
            kind: {name: [_point(one[texts]) for one in settings] for name, settings in found.items()}
            for kind, texts in groups.items()
        },
        "calls_at": {
            kind: {
                name: {f"{drift:g}": calls_at([*found[NOTHING], *settings], texts, drift) for drift in DRIFTS}
                for name, settings in found.items()
                if name not in (NOTHING, *EXACT.values())
            }
            for kind, texts in groups.items()
        },
        "texts": {kind: len(texts) for kind, texts in groups.items()},
        "seconds": round(time.time() - began, 1),
    }  # fmt: skip
    write_results(
        "real/gates",
        results,
        "\n".join([*auc_table(results), "", *exact_table(results), "", *calls_table(results)]),
    )


def _point(texts: np.ndarray) -> dict[str, float]:
    """Of the replayed texts of one setting: target calls, drift and draft steps a token."""
    tokens, calls, drift, steps = texts.sum(0).tolist()
    return {"calls": calls / tokens, "drift": drift / tokens, "draft_steps": steps / tokens}


def auc_table(results: Mapping[str, Any]) -> list[str]:
    """AU-ROC of gates and signals, a column a truth."""
    columns = [*results["auc"]]
    lines = [
        " | ".join([name, *(cells(results["auc"][what][name], 3) for what in columns)])
        for name in results["auc"][columns[0]]
    ]
    return grid(" | ".join(["AU-ROC", *columns]), lines)


def exact_table(results: Mapping[str, Any]) -> list[str]:
    """Target calls and draft steps a token of lossless methods, and where no draft token is trusted."""
    lines = []
    for kind, dials_of in results["curves"].items():
        shown = (dials_of[name][0] for name in (NOTHING, *EXACT.values()))
        lines.append(" | ".join([kind, *(f"{one['calls']:.3f}, {one['draft_steps']:.2f}" for one in shown)]))
    return grid(" | ".join(["prompts", NOTHING, *EXACT.values()]), lines)


def calls_table(results: Mapping[str, Any]) -> list[str]:
    """Target calls a token at equal drift, by kind of prompt."""
    lines = []
    for kind, dials_of in results["calls_at"].items():
        for name, values in dials_of.items():
            shown = ("–" if value is None else cells(value, 3) for value in values.values())
            lines.append(" | ".join([f"{kind} ({results['texts'][kind]} texts)", name, *shown]))
    return grid(
        " | ".join(["prompts", "dial", *(f"calls/token at drift {drift:g}" for drift in DRIFTS)]), lines
    )


if __name__ == "__main__":
    main()
