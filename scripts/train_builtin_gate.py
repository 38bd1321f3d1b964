"""Train the built-in gate: logistic regression of the overlap β on the draft's hidden state.

    python scripts/train_builtin_gate.py --data DIR --pair DIR --out DIR

Label: β = Σ min(p, q) at temperature 1, the chance that exact acceptance keeps a draft token. It is the expectation of
the acceptance over x ~ q, so it carries no sampling noise, unlike the paper's label q(x)/p(x) <= λ for one drawn x.
Texts come in the paper's four prefix classes in equal parts: original, + draft's completion, + target's completion,
draft and target interleaved. Training prompts come from the pair's training documents, the report from its held-out
ones. The loss is convex; L-BFGS on standardised features needs no learning rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

import sprinter
from pair_data import Document, UsageError, missing_files, read_documents
from sprinter.heads.gate import Gate, GateConfig, save_gate, weights_fingerprint
from sprinter.laws import entropy, overlap, raw_law

PREFIX_CLASSES = {
    "original": None,
    "draft": "draft-only",
    "target": "autoregressive",
    "interleaved": "coin(rate=0.5)",
}
SEEN_TOKENS = 128  # of the document, before the completion
NEW_TOKENS = 64
LAMBDAS = (1.0, 1.2, 1.5)


@dataclass(frozen=True)
class Positions:
    """Features and labels at n positions; x ~ q was drawn once a position."""

    hidden: Tensor  # [n, d], the draft's state that produced q
    overlap: Tensor  # [n]
    entropy: Tensor  # [n], of q
    max_prob: Tensor  # [n], of q
    ratio: Tensor  # [n], q(x)/p(x)
    greedy_ratio: Tensor  # [n], the same for x = argmax q
    same_argmax: Tensor  # [n]
    kind: list[str]


def complete(pair: Any, document: Document, kind: str, seed: int) -> list[int]:
    """Token ids of the document's beginning and 64 more, written by whoever the class says."""
    ids = pair.tokenizer(document.text, verbose=False)["input_ids"][: SEEN_TOKENS + NEW_TOKENS]
    method = PREFIX_CLASSES[kind]
    if method is None:
        return list(ids)
    prompt = ids[: max(8, min(SEEN_TOKENS, len(ids) // 3))]
    out = pair.generate(prompt, method=method, max_new_tokens=NEW_TOKENS, seed=seed)
    return [*prompt, *(token.id for token in out.tokens)]


@torch.inference_mode()
def score(pair: Any, ids: list[int], kind: str, chance: torch.Generator) -> Positions:
    """Teacher-forced laws of both models over one text."""
    tokens = torch.tensor([ids])
    target = pair.models.target.model(tokens)
    draft = pair.models.draft.model.base_model(tokens)
    hidden = draft.last_hidden_state[0]
    p = raw_law(target.logits[0])
    q = raw_law(pair.models.draft.model.get_output_embeddings()(hidden))
    x = torch.multinomial(q, 1, generator=chance)
    best = q.argmax(-1, keepdim=True)

    def ratio(tokens: Tensor) -> Tensor:
        return (q.gather(-1, tokens) / p.gather(-1, tokens).clamp(min=1e-30)).squeeze(-1)

    return Positions(
        hidden.float().clone(), overlap(p, q), entropy(q), q.amax(-1), ratio(x), ratio(best),
        best.squeeze(-1) == p.argmax(-1), [kind] * len(ids),
    )  # fmt: skip


def collect(pair: Any, documents: list[Document], seed: int, label: str) -> Positions:
    """All four prefix classes over the documents, in turn."""
    chance = torch.Generator().manual_seed(seed)
    parts: list[Positions] = []
    jobs = [(document, kind) for document in documents for kind in PREFIX_CLASSES]
    for i, (document, kind) in enumerate(track(jobs, description=label, disable=not sys.stderr.isatty())):
        parts.append(score(pair, complete(pair, document, kind, seed + i), kind, chance))
    joined = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in Positions.__dataclass_fields__
        if name != "kind"
    }
    return Positions(**joined, kind=[kind for part in parts for kind in part.kind])


def fit(train: Positions, weight_decay: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Weights ``[1, d]`` and bias ``[1]`` of the logistic regression on soft labels."""
    mean, spread = train.hidden.mean(0), train.hidden.std(0).clamp(min=1e-6)
    features = ((train.hidden - mean) / spread).double()
    labels = train.overlap.double()
    weight = torch.zeros(features.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(features @ weight + bias, labels)
        value = value + weight_decay * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(loss)  # type: ignore[arg-type]
    own = weight.detach() / spread
    return own.float().unsqueeze(0), (bias.detach() - (own * mean).sum()).float().unsqueeze(0)


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve, by ranks (ties get the middle rank)."""
    labels = labels.bool()
    positives, negatives = int(labels.sum()), int((~labels).sum())
    if positives == 0 or negatives == 0:
        return float("nan")
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    rank = (last - (counts.double() - 1) / 2)[places]
    return float((rank[labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def auc_interval(
    scores: Tensor, labels: Tensor, seed: int = 0, repeats: int = 200
) -> tuple[float, float, float]:
    """(AUC, low, high): 95 % bootstrap interval over positions."""
    chance = torch.Generator().manual_seed(seed)
    n = len(scores)
    draws = []
    for _ in range(repeats):
        picks = torch.randint(n, (n,), generator=chance)
        draws.append(auc(scores[picks], labels[picks]))
    ordered = sorted(draws)
    return auc(scores, labels), ordered[int(0.025 * repeats)], ordered[int(0.975 * repeats) - 1]


def judge(gate: Gate, test: Positions) -> dict[str, Any]:
    """AUCs on held-out text of the gate and of the entropy and confidence baselines; R² for β."""
    scores = gate(test.hidden)
    signals = {"gate": scores, "entropy": -test.entropy, "max_prob": test.max_prob}
    labels = {f"ratio(x~q) <= {value}": test.ratio <= value for value in LAMBDAS}
    labels |= {f"ratio(argmax q) <= {value}": test.greedy_ratio <= value for value in LAMBDAS}
    labels["argmax q = argmax p"] = test.same_argmax
    labels["overlap above its median"] = test.overlap > test.overlap.median()
    table = {
        label: {name: auc_interval(values, truth) for name, values in signals.items()}
        for label, truth in labels.items()
    }
    error = (scores - test.overlap).square().mean()
    shares = {}
    for tau in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        trusted = scores >= tau
        shares[str(tau)] = {
            "trusted_share": float(trusted.float().mean()),
            "overlap_if_trusted": float(test.overlap[trusted].mean()) if bool(trusted.any()) else None,
        }
    return {
        "positions": len(scores),
        "r2": float(1 - error / test.overlap.var()),
        "mean_overlap": float(test.overlap.mean()),
        "mean_score": float(scores.mean()),
        "auc": table,
        "tau": shares,
    }


def card(facts: dict[str, Any]) -> str:
    """The model card."""
    test = facts["test"]
    lines = [
        "---", "license: cc-by-sa-3.0", "tags: [speculative-decoding, sprinter, gate]", "---", "",
        "# Built-in gate of Sprinter", "",
        "One linear layer and a sigmoid on the built-in draft's last hidden state (the one that produced q). The score",
        "estimates the overlap β = Σ min(p, q) at temperature 1, the chance that exact acceptance keeps a draft token.",
        "It sees the prefix, not the token.", "",
        f"Made by `{facts['command']}` from {facts['train_positions']:,} positions of the pair's training",
        f"documents, judged on {test['positions']:,} positions of documents that neither pair nor gate was trained on.",
        f"R² for β {test['r2']:.3f}; mean β {test['mean_overlap']:.3f}, mean score {test['mean_score']:.3f}.", "",
        "AU-ROC with 95 % bootstrap intervals, held-out documents, four prefix classes in equal parts:", "",
        "| label | gate | entropy of q | max q |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for label, row in test["auc"].items():
        cells = [
            f"{row[name][0]:.3f} [{row[name][1]:.3f}, {row[name][2]:.3f}]"
            for name in ("gate", "entropy", "max_prob")
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += ["", "| τ | share of positions trusted | mean β where trusted |", "| --- | --- | --- |"]
    for tau, row in test["tau"].items():
        kept = row["overlap_if_trusted"]
        lines.append(f"| {tau} | {row['trusted_share']:.3f} | {'-' if kept is None else f'{kept:.3f}'} |")
    lines += ["", "Data and licences: see the card of the built-in target.", ""]
    return "\n".join(lines)


def pick(documents: list[Document], count: int) -> list[Document]:
    """``count`` documents, sources in proportion, in a stable order."""
    step = max(1, len(documents) // count)
    return [document for document in documents[::step] if len(document.text) > 400][:count]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the text files")
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/ and draft/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the gate")
    parser.add_argument(
        "--documents", type=int, default=300, help="training documents (times four prefix classes)"
    )
    parser.add_argument("--test-documents", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    """Collect, fit, judge, save."""
    args = parse()
    began = time.time()
    pair = sprinter.load_pair(args.pair / "target", draft=args.pair / "draft", dtype="float32")
    if missing := missing_files(args.data):
        raise UsageError(
            f"--data {args.data} lacks {', '.join(missing)}: give the folder with the text files"
        )
    documents = read_documents(args.data)
    seen, unseen = ([d for d in documents if d.held_out is held_out] for held_out in (False, True))
    train = collect(pair, pick(seen, args.documents), args.seed, "training texts")
    test = collect(pair, pick(unseen, args.test_documents), args.seed + 10**6, "held-out texts")
    weight, bias = fit(train)
    draft = pair.models.draft
    config = GateConfig(
        hidden_size=draft.hidden_size, draft_id="sprinter-builtin-draft", target_id="sprinter-builtin-target",
        draft_fingerprint=weights_fingerprint(draft.model), label="overlap",
    )  # fmt: skip
    gate = Gate(config, weight, bias)
    facts = {
        "command": "python scripts/train_builtin_gate.py "
        + f"--documents {args.documents} --seed {args.seed}",
        "train_positions": len(train.overlap),
        "prefix_classes": list(PREFIX_CLASSES),
        "test": judge(gate, test),
        "seconds": round(time.time() - began, 1),
    }
    save_gate(gate, args.out, card(facts), {"training": facts})
    print(json.dumps(facts["test"]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UsageError, sprinter.UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
