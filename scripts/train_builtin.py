"""Make the built-in pair and its heads: a small Llama target, a one-layer draft distilled from it, gates.

    python scripts/train_builtin.py target --data DATA --out OUT --minutes 70 --threads 2
    python scripts/train_builtin.py draft --data DATA --out OUT --minutes 38 --threads 2
    python scripts/train_builtin.py evaluate --data DATA --out OUT
    python scripts/train_builtin.py gate --data DATA --out OUT --documents 350 --new-tokens 48 --head mlp \\
        --label 'overlap(temperature=own)' --features 'hidden, entropy, max_q, top_q(k=10), temperature'

DATA is the folder with the text files; about one document in a hundred is held out by a hash of its own text. An
interrupted training goes on from its last checkpoint. With --tokens the learning rate follows tokens seen, so that a
run that goes on repeats one without a break; with --minutes it follows training time spent. "gate" labels, trains,
judges and saves a head with ``sprinter.training``, by the steps that a user takes: texts in the four prefix classes in
equal parts, judged on documents that neither pair nor gate was trained on.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer

import builtin_pair as recipe
import sprinter
from builtin_pair import CONTEXT, EOS, Document, PreparedData, Preset, Shape
from sprinter.bench.suites.heldout import MODULUS
from sprinter.errors import UserError
from sprinter.files import write_atomic
from sprinter.training.card import CardWords, save_trained
from sprinter.training.dataset import read_positions
from sprinter.training.label_run import LabelSettings, label
from sprinter.training.roc import judge_directory
from sprinter.training.settings import TrainSettings
from sprinter.training.train import train

LONG_WINDOWS_FROM = 0.80  # the last fifth is trained at full context, so that late rotary positions are seen
CHECKPOINT_S, SAID_S = 240.0, 20.0


@dataclass(frozen=True)
class Source:
    """A family of files that share a format, and how often its documents are seen an epoch."""

    name: str
    files: tuple[str, ...]
    repeat: int
    licence: str


SOURCES = (
    Source("wikipedia", tuple(f"wikipedia_en_2015_{i:02d}.txt.gz" for i in range(6)), 1,
           "CC BY-SA 3.0; English Wikipedia contributors, 2015 dump (via jason-feng/wikiVisual)"),
    Source("wikinews", ("wikinews_en_2022_00.jsonl.gz", "wikinews_en_2022_01.jsonl.gz"), 1,
           "CC BY 2.5; English Wikinews contributors, 2022 dump (via jshepp27/countaBot)"),
    Source("gsm8k", ("gsm8k_train.jsonl.gz",), 2, "MIT; OpenAI, grade-school-math (training set)"),
    Source("tinystories", ("tinystories_sample.txt.gz",), 2,
           "CDLA-Sharing-1.0; TinyStories, R. Eldan and Y. Li (via gusjengis/toy-RNN)"),
)  # fmt: skip
PRESETS = {
    # Many narrow layers: a decoding step on a CPU costs per layer, so depth makes the target's pass dear while training
    # stays cheap.
    "cpu-3m": Preset(3072, Shape(12, 128, 2, 384), Shape(1, 192, 3, 768), 4096, 0.02, 0.004),
    "cpu-2m": Preset(2048, Shape(6, 128, 2, 384), Shape(1, 96, 2, 256), 4096, 0.02, 0.004),
    "tiny": Preset(512, Shape(3, 32, 2, 64), Shape(1, 32, 2, 64), 2048, 0.02, 0.004),
}


# --- texts ------------------------------------------------------------------------------------------------------------
def read_documents(data: Path) -> list[Document]:
    """All documents of all sources in file order, exact duplicates dropped.

    Raises:
        UserError: a file is missing.
    """
    if missing := [name for one in SOURCES for name in one.files if not (data / name).is_file()]:
        raise UserError(f"--data {data} lacks {', '.join(missing)}: give the folder with the text files")
    found: dict[str, Document] = {}
    for source in SOURCES:
        for name in source.files:
            for document in recipe.documents_of(source.name, data / name):
                if document.text:
                    found.setdefault(document.text, document)
    return list(found.values())


def prepare(data: Path, cache: Path, vocab_size: int, seed: int) -> PreparedData:
    """Tokenise once; what is in ``cache`` is used while source files, vocabulary and seed stay the same."""
    names = [name for source in SOURCES for name in source.files if (data / name).is_file()]
    key = {
        "version": 1, "vocab_size": vocab_size, "seed": seed, "repeats": {one.name: one.repeat for one in SOURCES},
        "files": {name: recipe.file_sha256(data / name) for name in names},
    }  # fmt: skip
    manifest = cache / "manifest.json"
    if not manifest.is_file() or json.loads(manifest.read_text())["key"] != key:
        manifest.unlink(missing_ok=True)
        cache.mkdir(parents=True, exist_ok=True)
        tokenise(read_documents(data), cache, key)
    tokenizer = Tokenizer.from_file(str(cache / "tokenizer.json"))
    stream = np.memmap(cache / "tokens.u16", dtype=np.uint16, mode="r")
    heldout = recipe.read_heldout(cache / "heldout.jsonl")
    return PreparedData(stream, heldout, tokenizer, json.loads(manifest.read_text()))


def tokenise(documents: Sequence[Document], cache: Path, key: dict[str, Any]) -> None:
    """Tokenizer, stream of training tokens and held-out documents; the manifest, which comes last, marks it whole."""
    training, held = ([d for d in documents if d.held_out is wanted] for wanted in (False, True))
    tokenizer = recipe.train_tokenizer((d.text for d in training[::2]), key["vocab_size"])
    eos = tokenizer.token_to_id(EOS)
    order = np.repeat(np.arange(len(training)), [key["repeats"][d.source] for d in training])
    np.random.default_rng(key["seed"]).shuffle(order)
    encoded = [
        np.array([*e.ids, eos], np.uint16) for e in tokenizer.encode_batch_fast([d.text for d in training])
    ]
    stream = np.concatenate([encoded[index] for index in order])
    write_atomic(cache / "heldout.jsonl", recipe.heldout_lines(held))
    write_atomic(cache / "tokenizer.json", tokenizer.to_str(pretty=False))
    write_atomic(cache / "tokens.u16", stream.tobytes())
    facts = {
        source.name: {
            "train": sum(d.source == source.name for d in training),
            "heldout": sum(d.source == source.name for d in held),
            "train_tokens_per_epoch": sum(
                len(encoded[i]) for i in order if training[i].source == source.name
            ),
            "repeat": source.repeat,
        }
        for source in SOURCES
    }
    size = sum(len(d.text.encode()) for d in training) / sum(map(len, encoded))
    manifest = {"key": key, "documents": facts, "tokens": len(stream), "bytes_per_token": size}
    write_atomic(cache / "manifest.json", json.dumps(manifest, indent=1))


# --- training ---------------------------------------------------------------------------------------------------------
class Trainer:
    """One model's training run."""

    def __init__(self, args: argparse.Namespace, data: PreparedData) -> None:
        self.args, self.data, self.preset, self.role = args, data, PRESETS[args.preset], args.stage
        self.checkpoint = args.out / "checkpoints" / f"{self.role}.pt"
        self.checkpoint.parent.mkdir(exist_ok=True)
        self.windows = recipe.Windows(data.tokens, args.seed)
        self.compiles = args.device == "cuda" or bool(shutil.which("g++") or shutil.which("clang++"))
        shape = self.preset.shape(self.role)
        self.model = recipe.build_model(shape, self.preset.vocab_size, data.eos_id, args.seed).to(args.device)
        self.optimizers = recipe.make_optimizers(self.model, self.preset)
        self.done: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "curve": [], "sessions": []}
        if self.checkpoint.is_file():
            self.resume()
        elif self.role == "draft":
            recipe.inherit_embedding(self.model, self.teacher())
        self.done["sessions"].append({"from_step": self.done["step"], "command": recorded_command()})

    def teacher(self) -> Any:
        return recipe.load_exported(self.args.out / "target", torch.device(self.args.device))

    def resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.done = state["counters"]

    @property
    def progress(self) -> float:
        """Share of the budget that is spent."""
        if self.args.tokens:
            return self.done["tokens"] / self.args.tokens
        return self.done["seconds"] / (60 * self.args.minutes)

    def loss(self, teacher: Any) -> recipe.Step:
        function = recipe.loss_function(self.model, teacher)
        return torch.compile(function, dynamic=False) if self.compiles else function

    def run(self) -> None:
        """Train until the budget is spent."""
        plain, distilling, done = self.loss(None), None, self.done
        saved = said = time.monotonic()
        smooth = float("nan")
        while (progress := self.progress) < 1:
            began = time.monotonic()
            if self.role == "draft" and progress >= recipe.DISTIL_FROM:
                distilling = distilling or self.loss(self.teacher())
            length = CONTEXT if progress >= LONG_WINDOWS_FROM else 256
            rows = self.preset.rows(self.role, length)
            batch = torch.from_numpy(self.windows.batch(done["tokens"], rows, length)).to(self.args.device)
            loss = recipe.train_step(
                self.model, distilling or plain, self.optimizers, self.preset, batch, progress
            )
            smooth = loss if smooth != smooth else 0.98 * smooth + 0.02 * loss
            done["tokens"], done["step"] = done["tokens"] + rows * length, done["step"] + 1
            done["seconds"] += time.monotonic() - began
            if done["step"] % 20 == 0:
                done["curve"].append(
                    {"step": done["step"], "tokens": done["tokens"], "loss": round(smooth, 4)}
                )
            if time.monotonic() - said > SAID_S:
                said = time.monotonic()
                told = f"step {done['step']} loss {smooth:.3f} tokens {done['tokens']:,}"
                print(f"{self.role}: {100 * progress:.1f} %, {told}", flush=True)
            if time.monotonic() - saved > CHECKPOINT_S:
                self.save(per_source=6)
                saved = time.monotonic()
        self.save(per_source=1000)

    def save(self, per_source: int) -> None:
        """Checkpoint, export and record."""
        state = {
            "model": self.model.state_dict(), "optimizers": [one.state_dict() for one in self.optimizers],
            "counters": self.done,
        }  # fmt: skip
        temporary = self.checkpoint.with_suffix(".part")
        torch.save(state, temporary)
        temporary.replace(self.checkpoint)
        recipe.export(self.model, self.data, self.args.out / self.role)
        losses = self.validation(per_source)
        path = self.args.out / "training.json"
        whole: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        modules = {"torch": torch, "transformers": transformers, "tokenizers": tokenizers, "numpy": np}
        versions = {"python": platform.python_version(), **{k: m.__version__ for k, m in modules.items()}}
        whole["data"] = {**self.data.manifest, "sources": [asdict(source) for source in SOURCES]}
        whole[self.role] = {
            "command": recorded_command(), "seed": self.args.seed, "device": self.args.device,
            "compile": self.compiles, "distil": self.role == "draft", "preset": asdict(self.preset),
            "budget": {"tokens": self.args.tokens, "minutes": self.args.minutes},
            "parameters": recipe.parameters(self.model), "versions": versions, "finished": self.progress >= 1,
            "steps": self.done["step"], "tokens_seen": self.done["tokens"],
            "training_seconds": round(self.done["seconds"], 1), "validation_loss": losses,
            "sessions": self.done["sessions"], "loss_curve": self.done["curve"],
        }  # fmt: skip
        write_atomic(path, json.dumps(whole, indent=1))
        print(f"validation {losses}", flush=True)

    @torch.no_grad()
    def validation(self, per_source: int) -> dict[str, float]:
        """Mean loss a token by source, on the first `per_source` held-out documents of each."""
        self.model.eval()
        losses = {}
        for source in SOURCES:
            total, count = 0.0, 0
            for document in [d for d in self.data.heldout if d.source == source.name][:per_source]:
                tokens = torch.tensor([self.data.ids(document)], device=self.args.device)
                logits = self.model(tokens[:, :-1], use_cache=False).logits.float()
                total += float(F.cross_entropy(logits[0], tokens[0, 1:], reduction="sum"))
                count += tokens.shape[1] - 1
            losses[source.name] = total / max(count, 1)
        self.model.train()
        return losses


def recorded_command() -> str:
    """The command for the records, with the machine's own folders replaced by DATA and OUT."""
    named, words = {"--data": "DATA", "--out": "OUT"}, sys.argv[1:]
    shown = [named.get(words[i - 1], word) if i else word for i, word in enumerate(words)]
    return "python scripts/train_builtin.py " + shlex.join(shown)


# --- evaluation -------------------------------------------------------------------------------------------------------
def pass_costs(out: Path) -> dict[str, dict[str, float]]:
    """Ms of an eager pass over one token, in bfloat16 (as stored) and float32."""
    costs = {}
    for dtype in ("bfloat16", "float32"):
        found = sprinter.load_pair(out / "target", draft=out / "draft", dtype=dtype, compile=False).pass_costs
        ms = {"target": 1000 * found.target[0][1], "draft": 1000 * found.draft[0][1]}
        costs[dtype] = {**ms, "ratio": ms["target"] / ms["draft"]}
    return costs


def table(*rows: Sequence[str]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


CARD = """---
language: en
pipeline_tag: text-generation
library_name: transformers
---
# sprinter-llm built-in pair: {role}

One half of a toy pair for speculative decoding, made by `scripts/train_builtin.py`; the other half is the {other}.
Llama architecture, {layers} layer(s), width {width}, {heads} heads, feed-forward {feed_forward}, {parameters:,}
parameters (embeddings tied), vocabulary {vocab_size} (byte-level BPE), context {context}, bfloat16. No token is put
before a prompt; `{eos}` ends a document.

## Measurements

{positions:,} held-out positions, documents from their real start, float32, nats per token, temperature 1.

{losses}

{quantities}

One eager pass over one token ({threads} threads): target {target:.2f} ms, draft {draft:.2f} ms, ratio {ratio:.2f}.

Share of positions by overlap:

```text
{bars}
```

## Data

{sources}

Wikipedia and Wikinews text is by their contributors; Wikipedia's is share-alike. About 1 % of the documents
(sha256 of the text, modulo {modulus}) were held out and are what the tables above measure.

## Training

{sessions}

{tokens_seen:,} tokens in {steps:,} steps, {minutes:.0f} minutes on {device}, seed {seed}, torch {torch}; {method}.

## Limits

A toy model for measuring decoding methods, English only. It knows nothing reliably and makes things up, may
repeat what its training text contains, bias included, and is not meant for any other use.
"""


def card(role: str, report: dict[str, Any], training: dict[str, Any]) -> str:
    """Model card of one role."""
    record, overall = training[role], report["overall"]
    spreads = {
        "overlap, sum of min(p, q)": "overlap", "total variation": "tv", "target entropy": "target_entropy",
        "draft entropy": "draft_entropy",
    }  # fmt: skip
    means = {"draft loss minus target loss": (3, "gap"), "target perplexity": (1, "target_perplexity")}
    means |= {"draft perplexity": (1, "draft_perplexity"), "same most likely token": (3, "argmax_agreement")}
    losses = [
        (name, f"{one['positions']:,}", f"{one['target_loss']:.3f}", f"{one['draft_loss']:.3f}",
         f"{one['overlap']['mean']:.3f}")
        for name, one in {**report["by_source"], "all": overall}.items()
    ]  # fmt: skip
    quantities = [
        (name, *(f"{value:.3f}" for value in overall[key].values())) for name, key in spreads.items()
    ]
    quantities += [(name, f"{overall[key]:.{digits}f}", "") for name, (digits, key) in means.items()]
    bars = [(i / 10, 100 * share) for i, share in enumerate(overall["overlap_histogram"])]
    sources = [(s["name"], ", ".join(s["files"]), s["licence"]) for s in training["data"]["sources"]]
    method = "Muon and AdamW on cross entropy"
    method += ", then on KL(target || draft) / 2 + total variation" if record["distil"] else ""
    return CARD.format(
        **record["preset"][role], **report["pass_cost_ms"]["bfloat16"], role=role, method=method, eos=EOS,
        other="draft" if role == "target" else "target", vocab_size=record["preset"]["vocab_size"], context=CONTEXT,
        losses=table(("source", "positions", "target loss", "draft loss", "mean overlap"), *losses),
        quantities=table(("quantity", "mean", "sd"), *quantities), modulus=MODULUS, threads=report["threads"],
        bars="\n".join(f"{x:.1f}-{x + 0.1:.1f}  {s:5.1f} %  {'#' * round(s)}".rstrip() for x, s in bars),
        sources=table(("source", "files", "licence and attribution"), *sources), positions=overall["positions"],
        sessions="\n".join(f"- from step {one['from_step']:,}: `{one['command']}`" for one in record["sessions"]),
        minutes=record["training_seconds"] / 60, torch=record["versions"]["torch"],
        **{name: record[name] for name in ("parameters", "tokens_seen", "steps", "device", "seed")},
    )  # fmt: skip


def evaluate(out: Path, data: PreparedData, device: str) -> None:
    """Write evaluation.json and both model cards, and print the main numbers."""
    target, draft = (recipe.load_exported(out / role, torch.device(device)) for role in ("target", "draft"))
    found = list(recipe.measure(target, draft, data, torch.device(device)))
    by_source = {one.name: [part for part in found if part[0] == one.name] for one in SOURCES}
    report = {
        "device": device,
        "threads": torch.get_num_threads(),
        "parameters": {"target": recipe.parameters(target), "draft": recipe.parameters(draft)},
        "overall": recipe.summarise(found),
        "by_source": {name: recipe.summarise(some) for name, some in by_source.items() if some},
        "pass_cost_ms": pass_costs(out),
    }
    write_atomic(out / "evaluation.json", json.dumps(report, indent=1) + "\n")
    training = json.loads((out / "training.json").read_text())
    for role in ("target", "draft"):
        write_atomic(out / role / "README.md", card(role, report, training))
    print(json.dumps({"overall": report["overall"], "pass_cost_ms": report["pass_cost_ms"]}, indent=1))


# --- gates ------------------------------------------------------------------------------------------------------------
def gate(args: argparse.Namespace, work: Path) -> None:
    """Label, train, judge, save."""
    settings = TrainSettings(args.head, args.label, args.features, args.seed, drift=args.drift)
    pair = sprinter.load_pair(args.out / "target", draft=args.out / "draft", dtype="float32")
    how = LabelSettings(seed=args.seed, new_tokens=args.new_tokens, classes_per_prompt=4)
    labels, documents = [], read_documents(args.data)
    for name, held_out, count in (
        ("training-documents", False, args.documents), ("held-out-documents", True, args.test_documents)
    ):  # fmt: skip
        own = [document for document in documents if document.held_out is held_out]
        chosen = [d.text for d in own[:: max(1, len(own) // count)] if len(d.text) > 400][:count]
        labels.append(label_texts(pair, chosen, work, name, how))
    positions = read_positions(labels[:1], settings.inputs)
    trained = train(positions, settings, lambda epoch: print(epoch, file=sys.stderr))
    report = judge_directory(trained.head, labels[1:])
    names = {"draft_id": "sprinter-builtin-draft", "target_id": "sprinter-builtin-target"}
    trained.head.config = replace(trained.head.config, **names)
    words = CardWords(
        title="Built-in gate of Sprinter",
        licence="cc-by-sa-3.0",
        made=f"Made by `{recorded_command()}` from the pair's training documents. Licences of the data: see the "
        "built-in target.",
        judged="documents that neither pair nor gate was trained on",
    )
    save_trained(trained, report, positions, args.out / args.name, words)
    print(json.dumps(report.summary()))


def label_texts(
    pair: sprinter.Pair, texts: Sequence[str], work: Path, name: str, settings: LabelSettings
) -> Path:
    """Directory of the labels of these texts."""
    file, out = work / f"{name}.jsonl", work / name
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    label(pair, [file], out, settings)
    return out


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stage", choices=("target", "draft", "evaluate", "gate"))
    add("--data", type=Path, required=True, help="folder with the source text files")
    add("--out", type=Path, required=True, help="folder for target, draft, heads, checkpoints and records")
    add("--tokens", type=int, help="train for this many tokens (exactly repeatable)")
    add("--minutes", type=float, help="train for this much time")
    add("--preset", choices=sorted(PRESETS), default="cpu-3m")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    add("--name", default="gate", help="gate: its folder in --out")
    add("--work", type=Path, help="gate: folder for the labels, kept; a temporary one if left out")
    add("--documents", type=int, default=300, help="gate: training documents, each in four classes")
    add("--test-documents", type=int, default=100)
    add("--new-tokens", type=int, default=64, help="gate: labelled positions a text")
    add("--head", default="linear")
    add("--label", default="overlap")
    add("--features", default="hidden")
    add("--drift", type=float, default=0.1, help="gate: that its τ is chosen for")
    args = parser.parse_args()
    if args.stage in ("target", "draft") and (args.tokens is None) == (args.minutes is None):
        parser.error("give one of --tokens and --minutes")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if args.stage == "gate":
            with tempfile.TemporaryDirectory() as folder:
                work = args.work or Path(folder)
                work.mkdir(parents=True, exist_ok=True)
                gate(args, work)
            return 0
        data = prepare(args.data, args.out / "cache", PRESETS[args.preset].vocab_size, args.seed)
        shutil.copyfile(args.out / "cache" / "heldout.jsonl", args.out / "heldout.jsonl")
        if args.stage == "evaluate":
            evaluate(args.out, data, args.device)
        else:
            Trainer(args, data).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
