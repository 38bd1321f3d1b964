"""Measure the built-in pair on held-out documents and write its evaluation.json and model cards."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

import pair_data
from pair_data import PreparedData
from pair_model import CONTEXT, load_exported
from sprinter.models.cache_name import with_cache
from sprinter.training.metrics import auc

CACHE_TOKENS = 256
TIMED_STEPS = 200


@dataclass(frozen=True)
class Positions:
    """Per-position measurements of some documents, one source."""

    source: str
    target_loss: Tensor
    draft_loss: Tensor
    overlap: Tensor
    target_entropy: Tensor
    draft_entropy: Tensor
    agree: Tensor


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats of each row of log-probabilities."""
    return -(log_probs.exp() * log_probs).sum(-1)


@torch.no_grad()
def measure_document(target: nn.Module, draft: nn.Module, tokens: Tensor, source: str) -> Positions:
    """p and q at temperature 1, in float32, for every position after the first."""
    labels = tokens[0, 1:]
    p = F.log_softmax(target(tokens[:, :-1], use_cache=False).logits[0].float(), dim=-1)
    q = F.log_softmax(draft(tokens[:, :-1], use_cache=False).logits[0].float(), dim=-1)
    return Positions(
        source,
        F.nll_loss(p, labels, reduction="none").cpu(),
        F.nll_loss(q, labels, reduction="none").cpu(),
        torch.minimum(p.exp(), q.exp()).sum(-1).cpu(),
        entropy(p).cpu(),
        entropy(q).cpu(),
        (p.argmax(-1) == q.argmax(-1)).float().cpu(),
    )


def measure(
    target: nn.Module, draft: nn.Module, data: PreparedData, device: torch.device
) -> Iterator[Positions]:
    """Measurements of every held-out document from its real start, truncated to the context's length."""
    for document in data.heldout:
        ids = [*data.tokenizer.encode(document.text).ids, data.eos_id][:CONTEXT]
        yield measure_document(target, draft, torch.tensor([ids], device=device), document.source)


def spread(values: Tensor) -> dict[str, float]:
    """Mean and standard deviation."""
    return {"mean": float(values.mean()), "sd": float(values.std())}


def histogram(values: Tensor, bins: int = 10) -> list[float]:
    """Share of values in each of `bins` equal bins over 0..1."""
    counts = torch.histc(values.clamp(0, 1), bins=bins, min=0, max=1)
    return [float(x) for x in counts / counts.sum()]


def summarise(parts: list[Positions]) -> dict[str, Any]:
    """All numbers that the card and evaluation.json hold about distributions."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts]).double()

    target_loss, draft_loss, overlap = joined("target_loss"), joined("draft_loss"), joined("overlap")
    return {
        "positions": len(overlap),
        "target_loss": float(target_loss.mean()),
        "draft_loss": float(draft_loss.mean()),
        "gap": float((draft_loss - target_loss).mean()),
        "target_perplexity": float(target_loss.mean().exp()),
        "draft_perplexity": float(draft_loss.mean().exp()),
        "overlap": spread(overlap),
        "tv": spread(1 - overlap),
        "overlap_histogram": histogram(overlap),
        "target_entropy": spread(joined("target_entropy")),
        "draft_entropy": spread(joined("draft_entropy")),
        "argmax_agreement": float(joined("agree").mean()),
        "entropy_auc": auc(joined("draft_entropy"), 1 - overlap),  # of the draft's entropy for a rejection
    }


def median_step_ms(models: dict[str, nn.Module], vocab_size: int, device: torch.device) -> dict[str, float]:
    """Median time in ms of one eager forward pass over one new token after a 256-token cache, models interleaved."""
    prompt = torch.randint(1, vocab_size, (1, CACHE_TOKENS), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    token = prompt[:, -1:]
    times: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        caches = {name: DynamicCache() for name in models}
        given = {name: with_cache(model, caches[name]) for name, model in models.items()}
        for name, model in models.items():
            model(prompt, use_cache=True, **given[name])
        for _ in range(TIMED_STEPS + 20):
            for name, model in models.items():
                begin = time.perf_counter()
                model(token, use_cache=True, **given[name]).logits.argmax(-1).item()
                times[name].append(time.perf_counter() - begin)
                caches[name].crop(CACHE_TOKENS - caches[name].get_seq_length())  # negative: tokens to drop
    return {name: 1000 * statistics.median(values[20:]) for name, values in times.items()}


def pass_costs(out: Path, vocab_size: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Cost of a forward pass in ms, in bfloat16 (as stored) and float32."""
    costs = {}
    for dtype in (torch.bfloat16, torch.float32):
        models = {role: load_exported(out / role, device, dtype) for role in ("target", "draft")}
        ms = median_step_ms(models, vocab_size, device)
        costs[str(dtype).removeprefix("torch.")] = {**ms, "ratio": ms["target"] / ms["draft"]}
    return costs


def parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def histogram_text(shares: list[float]) -> str:
    """The overlap histogram as a text table with bars."""
    rows = [
        f"{i / 10:.1f}-{(i + 1) / 10:.1f}  {100 * s:5.1f} %  {'#' * round(100 * s)}".rstrip()
        for i, s in enumerate(shares)
    ]
    return "```text\n" + "\n".join(rows) + "\n```"


def overall_rows(overall: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the card's second table, one per quantity."""
    spreads = {
        "overlap, sum of min(p, q)": overall["overlap"],
        "total variation": overall["tv"],
        "target entropy": overall["target_entropy"],
        "draft entropy": overall["draft_entropy"],
    }
    rows: list[tuple[str, ...]] = [("quantity", "mean", "sd")]
    rows += [(name, f"{value['mean']:.3f}", f"{value['sd']:.3f}") for name, value in spreads.items()]
    rows.append(("draft loss minus target loss", f"{overall['gap']:.3f}", ""))
    rows.append(("target perplexity", f"{overall['target_perplexity']:.1f}", ""))
    rows.append(("draft perplexity", f"{overall['draft_perplexity']:.1f}", ""))
    rows.append(("same most likely token", f"{overall['argmax_agreement']:.3f}", ""))
    return rows


def sessions_text(record: dict[str, Any]) -> str:
    """Every command that trained the model, in order, with the step that it continued from."""
    lines = []
    for session in record["sessions"]:
        note = f" ({session['note']})" if "note" in session else ""
        lines.append(f"- from step {session['from_step']:,}{note}: `{session['command']}`")
    return "\n".join(lines)


def card(role: str, report: dict[str, Any], training: dict[str, Any]) -> str:
    """Model card of one role."""
    record, overall = training[role], report["overall"]
    other = "draft" if role == "target" else "target"
    sources = [("source", "files", "licence and attribution")]
    sources += [(s["name"], ", ".join(s["files"]), s["licence"]) for s in training["data"]["sources"]]
    losses = [("source", "positions", "target loss", "draft loss", "mean overlap")]
    for name, part in {**report["by_source"], "all": overall}.items():
        numbers = (
            f"{part['target_loss']:.3f}",
            f"{part['draft_loss']:.3f}",
            f"{part['overlap']['mean']:.3f}",
        )
        losses.append((name, f"{part['positions']:,}", *numbers))
    shape = record["preset"][role]
    cost = report["pass_cost_ms"]["bfloat16"]
    method = "Muon and AdamW on cross entropy"
    if record.get("distil"):
        method += ", then on KL(target || draft) / 2 + total variation"
    return f"""---
language: en
pipeline_tag: text-generation
library_name: transformers
---
# sprinter-llm built-in pair: {role}

One half of a toy pair for speculative decoding, made by `scripts/train_builtin_pair.py`; the other half is
the {other}. Llama architecture, {shape["layers"]} layer(s), width {shape["width"]}, {shape["heads"]} heads,
feed-forward {shape["feed_forward"]}, {record["parameters"]:,} parameters (embeddings tied), vocabulary
{record["preset"]["vocab_size"]} (byte-level BPE), context {CONTEXT}, bfloat16. No token is put before a
prompt; `{pair_data.EOS}` ends a document.

## Measurements

{overall["positions"]:,} held-out positions, documents from their real start, float32, nats per token,
temperature 1.

{table(losses)}

{table(overall_rows(overall))}

One eager pass over one new token after {CACHE_TOKENS} cached tokens ({report["device"]},
{report["threads"]} threads): target {cost["target"]:.2f} ms, draft {cost["draft"]:.2f} ms,
ratio {cost["ratio"]:.2f}.

Share of positions by overlap:

{histogram_text(overall["overlap_histogram"])}

## Data

{table(sources)}

Wikipedia and Wikinews text is by their contributors; Wikipedia's is share-alike. About 1 % of the documents
(sha256 of the text, modulo {pair_data.MODULUS}) were held out and are what the tables above measure.

## Training

{sessions_text(record)}

{record["tokens_seen"]:,} tokens in {record["steps"]:,} steps, {record["training_seconds"] / 60:.0f} minutes
on {record["device"]}, seed {record["seed"]}, torch {record["versions"]["torch"]}; {method}.

## Limits

A toy model for measuring decoding methods, English only. It knows nothing reliably and makes things up, may
repeat what its training text contains, bias included, and is not meant for any other use.
"""


def evaluate_pair(out: Path, data: PreparedData, device: torch.device) -> None:
    """Write evaluation.json and both model cards, and print the main numbers."""
    target, draft = load_exported(out / "target", device), load_exported(out / "draft", device)
    parts = list(measure(target, draft, data, device))
    by_source = {s.name: [p for p in parts if p.source == s.name] for s in pair_data.SOURCES}
    report = {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "parameters": {"target": parameters(target), "draft": parameters(draft)},
        "overall": summarise(parts),
        "by_source": {name: summarise(chosen) for name, chosen in by_source.items() if chosen},
        "pass_cost_ms": pass_costs(out, data.tokenizer.get_vocab_size(), device),
    }
    (out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    training = json.loads((out / "training.json").read_text())
    for role in ("target", "draft"):
        (out / role / "README.md").write_text(card(role, report, training), encoding="utf-8")
    print(json.dumps({"overall": report["overall"], "pass_cost_ms": report["pass_cost_ms"]}, indent=1))
