"""Gates trained on one kind of text, used on another (SPRINTER, Table 4, in kind).

    python benchmarks/gate/transfer.py --data DIR --work FOLDER

Wikipedia, Wikinews, LM1B and GSM8K: a gate is trained on each and tested on each. AU-ROC (95 % intervals over prompts)
on texts that neither pair nor gate was trained on (of LM1B and GSM8K the pair saw nothing at all), and, of SPRINTER,
drift and target calls a token there, at τ = 0.5 and where the drift is 0.10. Temperature 1, meter complete.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

import sprinter
from benchmarks.common import command, environment, option_parser, write_results
from benchmarks.gate.study import SEED, labelled, points, taus, trace
from benchmarks.smoke import SMOKE, scratch, sized
from pair_data import read_documents
from sprinter.heads.head import Head
from sprinter.training.dataset import read_positions
from sprinter.training.roc import judge
from sprinter.training.settings import TrainSettings
from sprinter.training.train import train

GATES = {
    "paper": {"label": "ratio(lambda=1.2)"},
    "default": {"label": "overlap", "features": "hidden, entropy, max_q, top_q(k=10)"},
}
TRUTHS = {"paper": "ratio(lambda=1.2, at=drawn)", "default": "overlap above its median"}
CORPORA = sized(("wikipedia", "wikinews", "lm1b", "gsm8k"), ("lm1b", "gsm8k"))
DRIFT, NEW_TOKENS = 0.10, sized(20, 4)


def corpora(data: Path, count: int, held_out: int) -> dict[str, tuple[list[str], list[str]]]:
    """Name -> (training texts, held-out texts)."""
    texts: dict[str, tuple[list[str], list[str]]] = {}
    documents = read_documents(data)
    for source in ("wikipedia", "wikinews"):
        parts = []
        for unseen, most in ((False, count), (True, held_out)):
            chosen = [d for d in documents if d.source == source and d.held_out is unseen]
            columns = [[p for p in d.text.split("\n") if len(p.split()) >= 40] for d in chosen]
            rows = (c[i] for i in range(max(map(len, columns))) for c in columns if i < len(c))
            parts.append([text for text, _ in zip(rows, range(most), strict=False)])
        texts[source] = (parts[0], parts[1])
    with gzip.open(data / "lm1b_sample_dev.txt.gz", "rt", encoding="utf-8") as lines:
        sentences = [line.strip() for line in lines if len(line.split()) >= 25]
    texts["lm1b"] = (sentences[:count], sentences[-held_out:])
    questions: list[list[str]] = []
    for name, opened in (("gsm8k_train.jsonl.gz", gzip.open), ("gsm8k_test.jsonl", open)):
        with opened(data / name, "rt", encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
        questions.append([f"{r['question']} {r['answer']}".replace("\n", " ") for r in records])
    texts["gsm8k"] = (questions[0][:count], questions[1][:held_out])
    return {name: texts[name] for name in CORPORA}


def prompts_of(texts: Sequence[str], count: int) -> list[str]:
    """The first 30 % of the words, the prompt rule of the paper."""
    return [" ".join(text.split()[: max(4, int(0.3 * len(text.split())))]) for text in texts[:count]]


def cell(report: Any, truth: str, runs: Any) -> dict[str, Any]:
    """AU-ROC with interval; drift and calls at τ = 0.5; calls where the drift is ``DRIFT``."""
    area = report.summary()["truths"][truth]["auc"]
    drifts, calls = np.array(points(runs)).T
    order = np.argsort(drifts[:-1])
    return {
        "auc": area["gate"],
        "entropy": area["entropy"],
        "confidence": area["max q"],
        "at_tau_0.5": {"drift": drifts[-1], "calls_per_token": calls[-1]},
        f"calls_at_drift_{DRIFT:.2f}": float(np.interp(DRIFT, drifts[:-1][order], calls[:-1][order])),
    }


def table(results: dict[str, Any]) -> str:
    """Markdown: one 4 x 4 matrix a gate; a cell is AUC [interval] · drift/calls at τ = 0.5 · calls at drift 0.10."""
    lines = []
    for name, rows in results["cells"].items():
        lines += [
            f"Gate `{name}` ({TRUTHS[name]}):",
            "",
            f"| trained on | {' | '.join(CORPORA)} |",
            "| --- " * 5 + "|",
        ]
        for source, cells in rows.items():
            shown = [
                f"{c['auc'][0]:.2f} [{c['auc'][1]:.2f}, {c['auc'][2]:.2f}] · {c['at_tau_0.5']['drift']:.3f} / "
                f"{c['at_tau_0.5']['calls_per_token']:.2f} · {c[f'calls_at_drift_{DRIFT:.2f}']:.3f}"
                for c in (cells[target] for target in CORPORA)
            ]
            lines.append(f"| {source} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> None:
    """Label, train, test, write."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        required=not SMOKE,
        default=scratch("work") if SMOKE else None,
        help="folder for labels",
    )
    parser.add_argument("--texts", type=int, default=sized(2000, 40), help="training texts of each corpus")
    parser.add_argument("--held-out", type=int, default=sized(400, 12))
    parser.add_argument("--prompts", type=int, default=sized(20, 2))
    args = parser.parse_args()
    began, pair = time.time(), sprinter.load_pair(compile=False)
    args.work.mkdir(parents=True, exist_ok=True)
    texts = corpora(args.data, args.texts, args.held_out)
    sources, tests = (
        {
            name: labelled(
                pair, both[part], args.work, f"{name}-{('train', 'test')[part]}", new_tokens=NEW_TOKENS
            )
            for name, both in texts.items()
        }
        for part in (0, 1)
    )
    cells: dict[str, dict[str, Any]] = {}
    for gate, settings in GATES.items():
        chosen = TrainSettings(seed=SEED, head="linear", **settings)
        held = {name: read_positions([folder], chosen.inputs) for name, folder in tests.items()}
        cells[gate] = {}
        for source, folder in sources.items():
            positions = read_positions([folder], chosen.inputs)
            with torch.inference_mode(False):
                head: Head = train(positions, chosen).head
            gated, grid = sprinter.Pair(pair.models, head), [1.0, *taus(head, positions), 0.5]
            cells[gate][source] = {}
            for name in CORPORA:
                runs = trace(
                    gated, [f"sprinter(tau={tau})" for tau in grid], prompts_of(texts[name][1], args.prompts), 1.0,
                    f"{gate}, {source} on {name}",
                )  # fmt: skip
                report = judge(head, held[name], repeats=200)
                cells[gate][source][name] = cell(report, TRUTHS[gate], runs)
    results = {
        "benchmark": "gate/transfer",
        "command": command(),
        "environment": environment(),
        "prompts": args.prompts,
        "new_tokens": NEW_TOKENS,
        "gates": GATES,
        "cells": cells,
        "seconds": round(time.time() - began, 1),
    }
    write_results("gate/transfer", results, table(results))


if __name__ == "__main__":
    main()
