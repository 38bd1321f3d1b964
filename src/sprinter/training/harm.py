"""Fit heads of accept rules on mined tokens: logistic regression on the target's state (AutoJudge, arXiv 2504.20039).

``judge`` reads the state after the draft's token, ``diversed`` the state before it. The strength of the penalty is
chosen, and the head evaluated, by cross-validation over prompts; a judge's threshold keeps a given share of the harmful
tokens below it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sprinter.decode.checks import between
from sprinter.errors import UserError
from sprinter.heads.artifact import save_head
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.networks import Linear
from sprinter.kinds import HEAD_KINDS
from sprinter.training.card import card_text
from sprinter.training.metrics import Bootstrap, Interval, curves
from sprinter.training.mine import Mined, read_mined

__all__ = ["Harm", "fit_harm", "save_harm"]

_FOLDS = 5
_PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Of the squared weights, per standardised feature."""
_FEWEST = 20
_STEPS = 200


@dataclass(frozen=True, slots=True)
class Harm:
    """A fitted head and what cross-validation says of it.

    Attributes:
        head: fitted on all tokens.
        scores: ``[n]``, of each token by a head that has not seen its prompt.
        auc, baseline: AU-ROC of these scores, and of the token's ln p, for "the answer stays the same".
        penalty: the chosen one.
        recall: share of the harmful tokens that score below the threshold.
        harmless: share of the harmless tokens that reach it.
    """

    head: Head
    scores: Tensor
    auc: Interval
    baseline: Interval
    penalty: float
    recall: float
    harmless: float

    def summary(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "auc": self.auc.to_list(), "auc_of_log_p": self.baseline.to_list(), "penalty": self.penalty,
            "harmful_below_threshold": self.recall, "harmless_at_threshold": self.harmless,
        }  # fmt: skip


def fit_harm(
    directories: Sequence[str | Path], kind: str, *, recall: float = 0.9, seed: int = 0, repeats: int = 500
) -> tuple[Harm, Mined]:
    """Fit a head of kind ``judge`` or ``diversed``.

    Args:
        directories: made by ``mine``, of one pair.
        recall: share of the harmful tokens that the threshold must keep out.
        seed: of the folds and the bootstrap. repeats: bootstrap draws.

    Raises:
        UserError: too few tokens or prompts, or tokens of one class only; data of different pairs.
    """
    if kind not in ("judge", "diversed"):
        raise UserError(f"a {kind} head is not made of mined tokens: give judge or diversed")
    between("recall", recall, 0.5, 1.0)
    mined = _joined([read_mined(directory) for directory in directories])
    labels, prompts = mined.same.double(), torch.unique(mined.prompt)
    least = int(min(labels.sum(), (1 - labels).sum()))
    of_class = min(len(torch.unique(mined.prompt[labels == one])) for one in (0, 1))
    if least < _FEWEST or of_class < _FOLDS:
        raise UserError(
            f"{len(labels)} mined tokens of {len(prompts)} prompts, {least} of the rarer class in {of_class} prompts: "
            f"mine more prompts, {_FEWEST} tokens of each class in {_FOLDS} prompts at least"
        )
    states = (mined.after if kind == "judge" else mined.before).double()
    if not bool(states.isfinite().all()):
        raise UserError("a mined state is not finite: mine with dtype=float32, and check the weights")
    fold = _folds(mined.prompt, seed)
    tried = {penalty: _crossed(states, labels, fold, penalty) for penalty in _PENALTIES}
    losses = {penalty: float(_entropy(scores, labels)) for penalty, scores in tried.items()}
    penalty = min(losses, key=lambda one: losses[one])
    scores, bootstrap = tried[penalty].sigmoid(), Bootstrap.make(mined.prompt, repeats, seed)
    harmful = scores[labels == 0].sort().values
    tau = float(harmful[math.ceil(recall * len(harmful)) - 1])
    tau = min(1.0, torch.nextafter(torch.tensor(tau, dtype=torch.float32), torch.tensor(2.0)).item())
    weight, bias = _fit(states, labels, penalty)
    info = mined.info
    config = HeadConfig(
        hidden_size=info["hidden_size"], draft_id=info["draft_id"], target_id=info["target_id"],
        draft_revision=info["draft_revision"], draft_fingerprint=info["draft_fingerprint"],
        target_revision=info["target_revision"], target_fingerprint=info["target_fingerprint"],
        label="same answer", tau=tau, kind=kind,
    )  # fmt: skip
    network = Linear.of(weight[None], bias[None])
    truth = labels.float()
    return Harm(
        Head(config, network), scores.float(),
        curves(scores.float(), truth, bootstrap).auc, curves(mined.log_p.float(), truth, bootstrap).auc,
        penalty, float((harmful < tau).double().mean()), float((scores[labels == 1] >= tau).double().mean()),
    ), mined  # fmt: skip


def save_harm(harm: Harm, mined: Mined, directory: Path) -> dict[str, Any]:
    """Write the head with its card; returns the facts in its config.json."""
    counts = {
        "tokens": len(mined.same),
        "prompts": len(torch.unique(mined.prompt)),
        "answered": mined.info["answered"],
        "of": mined.info["prompts"],
        "harmless": float(mined.same.double().mean()),
    }
    facts = {
        "data_hash": mined.info["prompts_sha256"],
        "settings": mined.info["settings"],
        "mined": counts,
        "cross_validation": harm.summary(),
    }
    save_head(harm.head, directory, _card(harm, counts, facts), facts)
    return facts


def _card(harm: Harm, counts: dict[str, Any], facts: dict[str, Any]) -> str:
    config, settings = harm.head.config, facts["settings"]
    name = Path(config.target_id).name or config.target_id
    rows = [
        ("target", f"{name}, weights {str(config.target_fingerprint)[:12]}"),
        ("tokens of", Path(config.draft_id).name or config.draft_id),
        ("mined", f"{counts['tokens']:,} tokens of {counts['prompts']:,} prompts ({counts['answered']:,} of "
         f"{counts['of']:,} had an answer), {counts['harmless']:.1%} harmless"),
        ("answers", f"compared by {settings['compare']}; prompts {facts['data_hash'][:12]}"),
        ("network", f"linear, {harm.head.size:,} parameters, penalty {harm.penalty:g}"),
    ]  # fmt: skip
    if config.kind == "judge":  # the score of the other kind is a weight
        kept = f"{harm.harmless:.1%} of the harmless ones reach it"
        below = f"{harm.recall:.1%} of the harmful tokens score below it"
        rows.append(("threshold", f"{config.tau:.4f}: {below}, {kept}"))
    rows.append(("AU-ROC", f"{harm.auc}; of the token's ln p: {harm.baseline}"))
    rest = ["Scores by cross-validation over prompts; the threshold was chosen on them.", ""]
    return card_text(f"{name}-{config.kind}.sprinter", "sprinter", HEAD_KINDS[config.kind].about, rows, rest)


def _joined(parts: Sequence[Mined]) -> Mined:
    first, offset, prompts = parts[0], 0, []
    if len({one.info["prompts_sha256"] for one in parts}) < len(parts):
        raise UserError(
            "the same prompts were given twice: give each directory once, mined from other prompts"
        )
    for one in parts:
        for key in ("target_fingerprint", "draft_fingerprint"):
            if one.info[key] != first.info[key]:
                raise UserError("the mined tokens are of different pairs: give those of one pair")
        if one.info["settings"]["compare"] != first.info["settings"]["compare"]:
            raise UserError("answers were compared in different ways: give mined tokens of one kind of task")
        prompts.append(one.prompt + offset)
        offset += int(one.prompt.max()) + 1 if len(one.prompt) else 0
    names = [name for name in Mined.__dataclass_fields__ if name not in ("prompt", "info")]
    columns = {name: torch.cat([getattr(one, name) for one in parts]) for name in names}
    digests = "".join(one.info["prompts_sha256"] for one in parts)
    digest = digests if len(parts) == 1 else hashlib.sha256(digests.encode()).hexdigest()
    return Mined(prompt=torch.cat(prompts), **columns, info={**first.info, "prompts_sha256": digest})


def _folds(prompt: Tensor, seed: int) -> Tensor:
    """A fold for each token, the same for all tokens of a prompt."""
    found, inverse = torch.unique(prompt, return_inverse=True)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    folds = torch.empty(len(found), dtype=torch.int64)
    folds[order] = torch.arange(len(found)) % _FOLDS
    return folds[inverse]


def _crossed(states: Tensor, labels: Tensor, fold: Tensor, penalty: float) -> Tensor:
    """Logits of each token by the fit without its fold."""
    logits = torch.empty(len(labels), dtype=torch.float64)
    for number in range(_FOLDS):
        held = fold == number
        weight, bias = _fit(states[~held], labels[~held], penalty)
        logits[held] = states[held] @ weight + bias
    return logits


def _fit(states: Tensor, labels: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Weights ``[d]`` and bias ``[]`` on the states as they are; the penalty is on standardised ones."""
    mean, spread = states.mean(0), states.std(0, correction=0)
    spread = torch.where(spread > 1e-6, spread, torch.ones_like(spread))
    x = (states - mean) / spread
    values = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([values], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        total = _entropy(x @ values[1:] + values[0], labels) * len(labels)
        total = (total + penalty / 2 * values[1:].square().sum()) / len(labels)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    weight = values.detach()[1:] / spread
    return weight, values.detach()[0] - weight @ mean


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, nats."""
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
