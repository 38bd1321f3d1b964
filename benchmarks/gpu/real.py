"""A real pair: how far the laws of captured passes are from those of float32, our arms on it beside transformers' and a
plain loop, and many rows.

The laws are those after each token of held-out texts, read eight tokens a pass, as a check reads a draft. KL divergence
is from the law in float32, read in one eager pass; "eager bfloat16" shows what PyTorch's own rounding comes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import sprinter
from benchmarks.gpu.arms import PEERS, PLAIN, make_arms, measure, text_suite
from benchmarks.gpu.loop import KINDS, PlainLoop
from benchmarks.gpu.roofline import load_captured
from benchmarks.gpu.rows import measure_rows
from benchmarks.gpu.stage import Run, check_time, free
from benchmarks.gpu.train import read_documents
from sprinter.bench.settings import BenchSettings
from sprinter.engine.pair import Pair
from sprinter.models.choose import make_runner

STATIC = "transformers:static"
TOKENS = 128  # of a text
A_PASS = 8
TEMPERATURES = (0.0, 1.0)
DRIFTS = (0.02, 0.05, 0.1)
"""Budgets of methods that trust."""
ROW_ARMS = (PLAIN, "speculative 3", "speculative 5", "svip", "certain 0.05", "sprinter 0.05", "heads")
ROWS_SHARE = 0.3  # of the time of a temperature


def load(run: Run, sources: Sequence[str], **options: Any) -> Pair:
    """The pair from one or two sources (built in: none), run by PyTorch."""
    target, draft = (*sources, None, None)[:2]
    more = {"runner": "torch"} if target and target.endswith(".gguf") else {}
    return sprinter.load_pair(target, draft=draft, device=str(run.device), **more, **run.more, **options)


@torch.inference_mode()
def laws(model: PreTrainedModel, texts: Sequence[Tensor], a_pass: int, captured: bool) -> list[Tensor]:
    """Log-probabilities ``[n, V]`` after each token of each text, float32."""
    runner, made = make_runner(model, max_len=TOKENS, compile=captured), []
    for ids in texts:
        runner.rewind([0])
        parts = [runner.extend(part).logits for part in torch.split(ids, a_pass, 1)]
        logits = torch.cat([part[0] for part in parts if part is not None])
        made.append(torch.log_softmax(logits.float(), -1))
    return made


def distance(reference: Sequence[Tensor], other: Sequence[Tensor]) -> dict[str, float]:
    """Mean KL divergence from the first, in nats, and the share of positions whose most likely token is the same.

    Args:
        reference, other: log-probabilities ``[n, V]`` of each text.
    """
    pairs = list(zip(reference, other, strict=True))
    divergence = torch.cat([(law.exp() * (law - near)).sum(-1) for law, near in pairs])
    same = torch.cat([law.argmax(-1) == near.argmax(-1) for law, near in pairs])
    return {"kl": float(divergence.mean()), "same_first": float(same.float().mean()), "positions": len(same)}


def compare_laws(run: Run, sources: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    """``distance`` of each kind of pass from the target's laws in float32."""
    on_gpu, found = run.device.type == "cuda", {}
    kinds = (("eager bfloat16", "bfloat16", False), ("captured bfloat16", "bfloat16", on_gpu))
    kinds += (("captured int8", "int8", True),) if on_gpu else ()
    exact = load(run, sources, dtype="float32", compile=False)
    assert exact.tokenizer is not None
    ids = [
        torch.tensor([exact.tokenizer(text)["input_ids"][:TOKENS]], device=run.device) for text in texts
    ]  # of all models
    reference = laws(exact.models.target.model, ids, TOKENS, False)
    del exact
    for name, dtype, captured in kinds:
        pair = load(run, sources, dtype=dtype, compile=captured)
        found[name] = distance(reference, laws(pair.models.target.model, ids, A_PASS, captured))
        del pair
        free(run.device)
    return found


def specs_of(pair: Pair) -> dict[str, str]:
    """Name -> spec."""
    ours = {PLAIN: "autoregressive", "lookup": "lookup"}
    peers: tuple[str, ...] = (PEERS[0], PEERS[2])
    if pair.models.draft is not None:
        ours |= {f"speculative {gamma}": f"speculative(gamma={gamma})" for gamma in (3, 5, 8)}
        ours |= {
            "svip": "svip",
            "fuzzy": "fuzzy(threshold=0.1,gamma=5)",
            "tree": "tree",
            "static-tree": "static-tree",
        }
        rules = ("certain", "sprinter") if "gate" in pair.heads else ("certain",)
        ours |= {f"{rule} {drift:g}": f"{rule}(budget={drift})" for rule in rules for drift in DRIFTS}
        peers = PEERS
    if pair.drafting is not None:
        kind = pair.drafting.kind
        ours |= {
            "heads": {"medusa": "medusa", "eagle": "eagle", "eagle3": "eagle"}.get(
                kind, f"heads(kind={kind})"
            )
        }
    return ours | {peer: peer for peer in (*peers, STATIC)}


def run_stage(run: Run, sources: Sequence[str], files: Sequence[Path], deadline: float) -> None:
    """Laws, then arms at both temperatures."""
    documents = read_documents(files, run.sizes.document_chars)
    texts = [document.text for document in documents[: 2 * run.sizes.prompts]]
    names = [Path(one).name for one in sources] or ["the built-in pair"]
    measured: list[dict[str, Any]] = []
    run.keep("real", pair=names, laws=compare_laws(run, sources, texts[:16]), temperatures=measured)
    suite = text_suite(documents, run.sizes.prompts, run.sizes.new_tokens)
    dtypes = ("bfloat16", "int8") if run.device.type == "cuda" else ("float32",)
    for i, (dtype, temperature) in enumerate((d, t) for d in dtypes for t in TEMPERATURES):
        check_time(deadline)
        pair = load(run, sources, dtype=dtype, compile=False)
        models = pair.models
        again = partial(
            sprinter.load_pair, models.target.model, tokenizer=pair.tokenizer,
            draft=None if models.draft is None else models.draft.model, **run.more,
            **({} if "gate" in run.more else {"gate": pair.gate}),
        )  # fmt: skip
        captured, _ = load_captured(run, again)
        rounded = dtype == "int8"  # for which transformers has no fast layers
        specs = {name: spec for name, spec in specs_of(pair).items() if not rounded or ":" not in name}
        settings = BenchSettings(
            (temperature,), new_tokens=run.sizes.new_tokens, bases=(PEERS[0], f"captured {PLAIN}")
        )
        left = (deadline - run.clock.now()) / (len(dtypes) * len(TEMPERATURES) - i)
        arms, began = make_arms(specs, captured), run.clock.now()
        arms += [] if rounded or models.target.model.config.model_type not in KINDS else [PlainLoop()]
        found = measure(
            run,
            f"real-{dtype}-T{temperature:g}",
            pair,
            arms,
            suite,
            settings,
            began + (1 - ROWS_SHARE) * left,
        )
        measured.append({"dtype": dtype, **found, "rows": []})
        run.keep("real")
        some = {name: spec for name, spec in specs.items() if name in ROW_ARMS}
        prompts = [sample.turns[0] for sample in suite.samples]
        lines = measured[-1]["rows"]
        measure_rows(run, captured or pair, some, prompts, temperature, began + left, lines)
        del pair, captured, models, again
        free(run.device)
