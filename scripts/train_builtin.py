"""Make the built-in pair: a small Llama target, and a one-layer draft distilled from it.

    python scripts/train_builtin.py target --data DATA --out OUT --minutes 70 --threads 2
    python scripts/train_builtin.py draft --data DATA --out OUT --minutes 38 --threads 2
    python scripts/train_builtin.py evaluate --data DATA --out OUT       the numbers of the models' cards

DATA is the folder with the text files; about one document in a hundred is held out by a hash of its own text. With
--tokens the learning rate follows tokens seen, so that a run can be repeated exactly; with --minutes it follows the
clock. OUT/gate-training.jsonl and OUT/gate-heldout.jsonl are texts for the built-in gate, which is made as a user
makes one:

    sprinter gate label --data OUT/gate-training.jsonl --target OUT/target --draft OUT/draft --dtype float32 \\
        --max-new-tokens 48 --out LABELS
    sprinter gate train --labels LABELS --preset mlp --label 'overlap(temperature=own)' \\
        --features 'hidden, entropy, max_q, top_q(k=10), temperature' --out OUT/gate

``benchmarks/gpu`` makes pairs of the same parts.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from sprinter.bench.suites import heldout
from sprinter.errors import UserError
from sprinter.files import write_atomic
from sprinter.laws import entropy, overlap
from sprinter.training.metrics import auc
from sprinter.training.sources import read_records

EOS, CONTEXT = "<|endoftext|>", 1024
DISTIL_FROM, DECAY_FROM = 0.2, 0.68  # of the training; plain text first: it costs half as much a token
LONG_WINDOWS_FROM = 0.80  # the last fifth is trained at full context, so that late rotary positions are seen
SAID_S = 20.0
GATE_TEXTS = {"gate-training": 350, "gate-heldout": 100}


# --- texts ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Document:
    """One document after light cleanup."""

    source: str
    id: str
    text: str


def problems(path: str, keep: Callable[[str], bool]) -> heldout.SuiteRows:
    """GSM8K's questions and answers, without its calculator annotations."""
    for number, (where, record) in enumerate(read_records(path)):
        answer = re.sub("<<.*?>>", "", record["answer"]).strip()
        text = f"Question: {record['question'].strip()}\nAnswer: {answer}"
        if keep(text):
            yield where, {"id": f"gsm8k/{number}", "text": text}


@dataclass(frozen=True)
class Source:
    """A family of files that share a format, and how often its documents are seen an epoch."""

    name: str
    read: Callable[[str, Callable[[str], bool]], heldout.SuiteRows]
    files: tuple[str, ...]
    repeat: int = 1


SOURCES = (  # licences and attribution: the models' cards
    Source("wikipedia", heldout.wikipedia, tuple(f"wikipedia_en_2015_{i:02d}.txt.gz" for i in range(6))),
    Source("wikinews", heldout.wikinews, ("wikinews_en_2022_00.jsonl.gz", "wikinews_en_2022_01.jsonl.gz")),
    Source("gsm8k", problems, ("gsm8k_train.jsonl.gz",), 2),
    Source("tinystories", heldout.stories, ("tinystories_sample.txt.gz",), 2),
)


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
            for _, record in source.read(str(data / name), lambda text: True):
                found.setdefault(record["text"], Document(source.name, record["id"], record["text"]))
    return list(found.values())


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """Write documents as JSON lines, for ``read_heldout`` and the commands of ``sprinter gate``."""
    write_atomic(path, "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in documents))


def read_heldout(path: Path) -> tuple[Document, ...]:
    """The held-out documents that an earlier run wrote."""
    return tuple(Document(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE whose only special token is the end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True)
class PreparedData:
    """Training data: a stream of tokens, held-out documents, and facts about both."""

    tokens: npt.NDArray[np.uint16]
    heldout: tuple[Document, ...]
    tokenizer: Tokenizer
    manifest: dict[str, Any]

    @property
    def eos_id(self) -> int:
        """Identifier of the end-of-text token."""
        return int(self.tokenizer.token_to_id(EOS))

    def ids(self, document: Document) -> list[int]:
        """A document from its real start, truncated to the context's length."""
        return [*self.tokenizer.encode(document.text).ids, self.eos_id][:CONTEXT]


def prepare(data: Path, out: Path, vocab_size: int, seed: int) -> PreparedData:
    """Tokenise once for each vocabulary and seed; what is kept in ``out``/cache marks itself whole by its manifest."""
    cache = out / "cache" / f"{vocab_size}-{seed}"
    if not (cache / "manifest.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        documents = read_documents(data)
        training, held = (
            [d for d in documents if heldout.held_out(d.text) is wanted] for wanted in (False, True)
        )
        tokenizer = train_tokenizer((d.text for d in training[::2]), vocab_size)
        eos, repeats = tokenizer.token_to_id(EOS), {source.name: source.repeat for source in SOURCES}
        order = np.repeat(np.arange(len(training)), [repeats[d.source] for d in training])
        np.random.default_rng(seed).shuffle(order)
        found = tokenizer.encode_batch_fast([d.text for d in training])
        encoded = [np.array([*one.ids, eos], np.uint16) for one in found]
        stream = np.concatenate([encoded[index] for index in order])
        write_documents(out / "heldout.jsonl", held)
        for (name, count), own in zip(GATE_TEXTS.items(), (training, held), strict=True):
            chosen = [d for d in own[:: max(1, len(own) // count)] if len(d.text) > 400][:count]
            write_documents(out / f"{name}.jsonl", chosen)
        write_atomic(cache / "tokenizer.json", tokenizer.to_str(pretty=False))
        write_atomic(cache / "tokens.u16", stream.tobytes())
        facts = {
            "training_documents": len(training),
            "heldout_documents": len(held),
            "training_tokens": len(stream),
        }
        write_atomic(
            cache / "manifest.json", json.dumps({**facts, "vocabulary": vocab_size, "repeats": repeats})
        )
    tokenizer = Tokenizer.from_file(str(cache / "tokenizer.json"))
    kept = np.memmap(cache / "tokens.u16", dtype=np.uint16, mode="r")
    facts = json.loads((cache / "manifest.json").read_text())
    return PreparedData(kept, read_heldout(out / "heldout.jsonl"), tokenizer, facts)


@dataclass(frozen=True)
class Windows:
    """Token windows as a pure function of tokens already seen."""

    tokens: npt.NDArray[np.uint16]
    seed: int

    def batch(self, tokens_seen: int, rows: int, length: int) -> npt.NDArray[np.int64]:
        """`rows` windows of `length + 1` tokens, without replacement within an epoch."""
        count = (len(self.tokens) - 1) // length
        if count < 1:
            raise UserError(f"{len(self.tokens)} tokens are too few for windows of {length}: give more text")
        starts = []
        for index in range(tokens_seen // length, tokens_seen // length + rows):
            epoch, position = divmod(index, count)
            starts.append(int(_permutation(self.seed, length, epoch, count)[position]) * length)
        return np.stack([self.tokens[start : start + length + 1] for start in starts]).astype(np.int64)


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, length: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, length, epoch]).permutation(count)


# --- models -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shape:
    """Size of one model."""

    layers: int
    width: int
    heads: int
    feed_forward: int


@dataclass(frozen=True)
class Preset:
    """Sizes, batch and learning rates that go together; the vocabulary is at most 65,535 (a stream of uint16)."""

    vocab_size: int
    target: Shape
    draft: Shape
    batch_tokens: int
    matrix_lr: float
    vector_lr: float

    def shape(self, role: str) -> Shape:
        """Of the target or the draft."""
        return self.target if role == "target" else self.draft

    def rows(self, role: str, length: int) -> int:
        """Windows a step. A draft sees fewer tokens in total and learns better in more steps."""
        return self.batch_tokens // (1 if role == "target" else 2) // length


PRESETS = {
    # Many narrow layers: a decoding step on a CPU costs per layer, so depth makes the target's pass dear while training
    # stays cheap.
    "cpu-3m": Preset(3072, Shape(12, 128, 2, 384), Shape(1, 192, 3, 768), 4096, 0.02, 0.004),
    "tiny": Preset(512, Shape(3, 32, 2, 64), Shape(1, 32, 2, 64), 2048, 0.02, 0.004),
}


def build_model(shape: Shape, vocab_size: int, eos_id: int, seed: int) -> Any:
    """A fresh float32 Llama with tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=shape.width, intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None, eos_token_id=eos_id,
        pad_token_id=eos_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # padding shares the end-of-text row, which transformers zeroes
        nn.init.normal_(model.get_input_embeddings().weight, std=0.02)
    model.get_input_embeddings().padding_idx = None
    return model


@torch.no_grad()
def inherit_embedding(draft: Any, target: Any) -> None:
    """Start a draft from the target's token embedding, as far as both widths reach: it learns sooner."""
    own, learnt = (model.get_input_embeddings().weight for model in (draft, target))
    width = min(own.shape[1], learnt.shape[1])
    own[:, :width] = learnt[:, :width]


def make_optimizers(model: nn.Module, preset: Preset) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the tied embedding and the norms."""
    inside = {name: p.ndim == 2 and ".layers." in name for name, p in model.named_parameters()}
    matrices, others = (
        [p for name, p in model.named_parameters() if inside[name] is on] for on in (True, False)
    )
    muon = torch.optim.Muon(matrices, lr=preset.matrix_lr, weight_decay=0.0, adjust_lr_fn="original")
    return muon, torch.optim.AdamW(others, lr=preset.vector_lr, betas=(0.9, 0.95), weight_decay=0.0)


Step = Callable[[Tensor], Tensor]


def loss_function(model: nn.Module, teacher: nn.Module | None) -> Step:
    """Cross entropy; with a teacher, KL(teacher || model) / 2 plus their total variation.

    KL alone leaves a small student too broad. Total variation is what speculative decoding pays for, but teaches
    nothing where the two laws do not meet yet, so both are needed.
    """

    def compute(windows: Tensor) -> Tensor:
        inputs, labels = windows[:, :-1], windows[:, 1:].reshape(-1)
        logits = model(inputs, use_cache=False).logits.float().flatten(0, 1)
        if teacher is None:
            return F.cross_entropy(logits, labels)
        with torch.no_grad():
            wanted = F.log_softmax(teacher(inputs, use_cache=False).logits.float().flatten(0, 1), dim=-1)
        offered = F.log_softmax(logits, dim=-1)
        divergence = F.kl_div(offered, wanted, reduction="batchmean", log_target=True)
        variation = 1 - torch.minimum(offered.exp(), wanted.exp()).sum(-1).mean()
        return 0.5 * divergence + variation

    return compute


def train_step(
    model: nn.Module, loss_of: Step, optimizers: Sequence[torch.optim.Optimizer], preset: Preset, batch: Tensor,
    progress: float,
) -> float:  # fmt: skip
    """One optimizer step at a share of the training; returns the loss."""
    # a CPU without AMX is much slower in bfloat16 than in float32
    quick = batch.is_cuda or bool(torch.cpu.get_capabilities().get("amx_bf16"))
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=quick):
        loss = loss_of(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # short warm-up, plateau, linear decay to zero
    factor = min(1.0, 0.02 + progress / 0.01) * min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))
    for optimizer, rate in zip(optimizers, (preset.matrix_lr, preset.vector_lr), strict=True):
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())  # waits for the device, so that a clock is true


def export(model: Any, data: PreparedData, folder: Path) -> None:
    """Write a bfloat16 copy that AutoModelForCausalLM loads."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.bfloat16().save_pretrained(folder)
    GenerationConfig(eos_token_id=data.eos_id, pad_token_id=data.eos_id).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=data.tokenizer, eos_token=EOS, pad_token=EOS, model_max_length=CONTEXT
    ).save_pretrained(folder)
    write_atomic(folder / "tokenizer.json", data.tokenizer.to_str(pretty=False))
    for item in folder.iterdir():
        item.chmod(0o644)  # safetensors writes weights that only their owner may read


def load_exported(folder: Path, device: torch.device | str) -> Any:
    """An exported model in float32, ready to be a teacher or to be measured."""
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"no exported model in {folder}: train it first")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def train_model(args: argparse.Namespace, data: PreparedData) -> None:
    """Train the target or the draft until its budget is spent; write its folder and OUT/training.json."""
    role, preset, device = args.stage, PRESETS[args.preset], args.device
    model = build_model(preset.shape(role), preset.vocab_size, data.eos_id, args.seed).to(device)
    teacher = load_exported(args.out / "target", device) if role == "draft" else None
    if teacher is not None:
        inherit_embedding(model, teacher)
    compiles = device == "cuda" or bool(shutil.which("g++") or shutil.which("clang++"))
    losses = [loss_function(model, None), loss_function(model, teacher)]
    losses = [torch.compile(one, dynamic=False) if compiles else one for one in losses]
    windows, optimizers = Windows(data.tokens, args.seed), make_optimizers(model, preset)
    began = said = time.monotonic()
    tokens, steps, smooth, progress = 0, 0, float("nan"), 0.0
    while progress < 1:
        length = CONTEXT if progress >= LONG_WINDOWS_FROM else 256
        rows = preset.rows(role, length)
        batch = torch.from_numpy(windows.batch(tokens, rows, length)).to(device)
        distils = teacher is not None and progress >= DISTIL_FROM
        loss = train_step(model, losses[distils], optimizers, preset, batch, progress)
        smooth = loss if steps == 0 else 0.98 * smooth + 0.02 * loss
        tokens, steps, now = tokens + rows * length, steps + 1, time.monotonic()
        progress = tokens / args.tokens if args.tokens else (now - began) / (60 * args.minutes)
        if now - said > SAID_S:
            said = now
            print(
                f"{role}: {100 * progress:.1f} %, step {steps}, loss {smooth:.3f}",
                file=sys.stderr,
                flush=True,
            )
    export(model, data, args.out / role)
    path = args.out / "training.json"
    whole: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    named = {"--data": "DATA", "--out": "OUT"}  # instead of this machine's folders
    words = [named.get(before, word) for before, word in zip(sys.argv, sys.argv[1:], strict=False)]
    whole["data"], whole[role] = data.manifest, {
        "command": f"python scripts/train_builtin.py {shlex.join(words)}", "preset": asdict(preset), "device": device,
        "compile": compiles, "parameters": parameters(model), "steps": steps, "tokens_seen": tokens,
        "seconds": round(time.monotonic() - began, 1), "loss": smooth, "torch": torch.__version__,
    }  # fmt: skip
    write_atomic(path, json.dumps(whole, indent=1))


# --- measurements -----------------------------------------------------------------------------------------------------
MEASURED = ("target_loss", "draft_loss", "overlap", "target_entropy", "draft_entropy", "agree")
Positions = tuple[str, dict[str, Tensor]]
"""Source of a document, and what is measured at each position."""


@torch.no_grad()
def measure(
    target: nn.Module, draft: nn.Module, data: PreparedData, device: torch.device | str
) -> Iterator[Positions]:
    """p and q at temperature 1, in float32, at every position after the first of every held-out document."""
    for document in data.heldout:
        tokens = torch.tensor([data.ids(document)], device=device)
        given, labels = tokens[:, :-1], tokens[0, 1:, None]
        logs = [F.log_softmax(one(given, use_cache=False).logits[0].float(), -1) for one in (target, draft)]
        (p, q), losses = (one.exp() for one in logs), [-one.gather(-1, labels).squeeze(-1) for one in logs]
        agree = p.argmax(-1) == q.argmax(-1)
        values = (*losses, overlap(p, q), entropy(p), entropy(q), agree)
        yield document.source, dict(zip(MEASURED, (value.cpu().double() for value in values), strict=True))


def summarise(parts: Sequence[Positions]) -> dict[str, Any]:
    """All numbers that evaluation.json holds about distributions."""
    of = {name: torch.cat([part[name] for _, part in parts]) for name in MEASURED}
    shares = torch.histc(of["overlap"].clamp(0, 1), bins=10, min=0, max=1) / len(of["overlap"])
    spreads = {name: of[name] for name in ("overlap", "target_entropy", "draft_entropy")}
    return {
        "positions": len(of["overlap"]),
        **{name: float(of[name].mean()) for name in ("target_loss", "draft_loss")},
        "target_perplexity": float(of["target_loss"].mean().exp()),
        "draft_perplexity": float(of["draft_loss"].mean().exp()),
        **{name: {"mean": float(each.mean()), "sd": float(each.std())} for name, each in spreads.items()},
        "overlap_histogram": shares.tolist(),
        "argmax_agreement": float(of["agree"].mean()),
        "entropy_auc": auc(of["draft_entropy"], 1 - of["overlap"]),  # of the draft's entropy for a rejection
    }


def evaluate(args: argparse.Namespace, data: PreparedData) -> None:
    """Measure the pair on the held-out documents, as a whole and by source: OUT/evaluation.json."""
    target, draft = (load_exported(args.out / role, args.device) for role in ("target", "draft"))
    found = list(measure(target, draft, data, args.device))
    by_source = {one.name: [part for part in found if part[0] == one.name] for one in SOURCES}
    report = {"all": found, **{name: some for name, some in by_source.items() if some}}
    text = json.dumps({name: summarise(some) for name, some in report.items()}, indent=1)
    write_atomic(args.out / "evaluation.json", text + "\n")
    print(text)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stage", choices=("target", "draft", "evaluate"))
    add("--data", type=Path, required=True, help="folder with the source text files")
    add("--out", type=Path, required=True, help="folder for models, texts and records")
    add("--tokens", type=int, help="train for this many tokens (exactly repeatable)")
    add("--minutes", type=float, help="train for this much time")
    add("--preset", choices=sorted(PRESETS), default="cpu-3m")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    args = parser.parse_args()
    if args.stage != "evaluate" and (args.tokens is None) == (args.minutes is None):
        parser.error("give one of --tokens and --minutes")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        data = prepare(args.data, args.out, PRESETS[args.preset].vocab_size, args.seed)
        (evaluate if args.stage == "evaluate" else train_model)(args, data)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
