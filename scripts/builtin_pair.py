"""Parts that ``train_builtin.py`` and ``benchmarks/gpu`` make small pairs of: texts, windows, models, measurements."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from sprinter.bench.suites.heldout import clean_wiki, held_out
from sprinter.errors import UserError
from sprinter.laws import entropy, overlap
from sprinter.training.metrics import auc
from sprinter.training.sources import read_lines, read_records

EOS, CONTEXT = "<|endoftext|>", 1024
_CALCULATOR = re.compile(r"<<.*?>>")
DISTIL_FROM, DECAY_FROM = 0.2, 0.68  # of the training; plain text first: it costs half as much a token


# --- texts ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Document:
    """One document after light cleanup; its digest, the sha256 of its text, decides whether it is held out."""

    source: str
    id: str
    text: str

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def held_out(self) -> bool:
        """True for the stable ~1 % that no model of the pair is trained on."""
        return held_out(self.text)


def read_heldout(path: Path) -> tuple[Document, ...]:
    """The held-out documents that an earlier run wrote."""
    return tuple(Document(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


def heldout_lines(documents: Iterable[Document]) -> str:
    """What ``read_heldout`` reads."""
    records = ({"source": d.source, "id": d.id, "text": d.text} for d in documents)
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def documents_of(source: str, path: Path) -> Iterator[Document]:
    """The documents of a file; some may be empty.

    Args:
        source: "wikipedia", "wikinews", "gsm8k" or "tinystories", which decides how the file is read.
    """
    if source == "tinystories":  # the sample is a byte range: its first and last story may be incomplete
        stories = "\n".join(line for _, line in read_lines(str(path))).split(EOS)[1:-1]
        yield from (Document(source, str(number), story.strip()) for number, story in enumerate(stories, 1))
        return
    for number, (_, record) in enumerate(read_records(str(path))):
        if source == "gsm8k":
            question, answer = record["question"].strip(), _CALCULATOR.sub("", record["answer"]).strip()
            yield Document(source, str(number), f"Question: {question}\nAnswer: {answer}")
        elif record["text"].strip():  # about half the records of Wikinews are redirects
            whole = f"{record['title']}\n\n{record['text']}" if source == "wikinews" else record["text"]
            yield Document(source, record["id"], clean_wiki(whole))


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


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


@dataclass(frozen=True)
class Windows:
    """Token windows as a pure function of tokens already seen, so that a resumed run reads the same data."""

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


def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate orthogonal factor of a stack of matrices (Muon's quintic iteration)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    flip = x.size(-2) > x.size(-1)
    x = x.mT if flip else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if flip else x


class StackedMuon(torch.optim.Optimizer):
    """Muon over stacks of equal shapes, in the weights' own precision.

    torch.optim.Muon iterates one matrix at a time in bfloat16, which a CPU without AMX runs several times slower.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix; `closure` is not used."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                directions = torch.stack([self._nesterov(p, group["momentum"]) for p in parameters])
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, direction in zip(parameters, newton_schulz(directions), strict=True):
                    parameter.add_(direction, alpha=-scale)

    def _nesterov(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(gradient))
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def build_model(shape: Shape, vocab_size: int, eos_id: int, seed: int) -> Any:
    """A fresh float32 Llama with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

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
    named = {name: (p.ndim == 2 and ".layers." in name, p) for name, p in model.named_parameters()}
    matrices, others = (
        [p for is_matrix, p in named.values() if is_matrix is wanted] for wanted in (True, False)
    )
    adam = torch.optim.AdamW(others, lr=preset.vector_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return StackedMuon(matrices, lr=preset.matrix_lr), adam


def autocast_for(device: torch.device) -> Any:
    """Autocast to bfloat16 if that is fast; a CPU without AMX is much slower in bfloat16 than in float32."""
    quick = device.type == "cuda" or bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return torch.autocast(device.type, torch.bfloat16, enabled=quick)


def schedule(progress: float) -> float:
    """Learning-rate factor: short warm-up, plateau, linear decay to zero."""
    warmup = min(1.0, 0.02 + progress / 0.01)
    return warmup * min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))


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
    """One optimizer step; returns the loss."""
    with autocast_for(batch.device):
        loss = loss_of(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, rate in zip(optimizers, (preset.matrix_lr, preset.vector_lr), strict=True):
        optimizer.param_groups[0]["lr"] = rate * schedule(progress)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())  # waits for the device, so that a clock is true


def export(model: Any, data: PreparedData, folder: Path) -> None:
    """Write a bfloat16 copy that AutoModelForCausalLM loads; files appear whole or not at all."""
    from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.bfloat16().save_pretrained(partial)
    GenerationConfig(eos_token_id=data.eos_id, pad_token_id=data.eos_id).save_pretrained(partial)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=data.tokenizer, eos_token=EOS, pad_token=EOS, model_max_length=CONTEXT
    )
    tokenizer.save_pretrained(partial)
    (partial / "tokenizer.json").write_text(data.tokenizer.to_str(pretty=False), encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for item in partial.iterdir():
        item.chmod(0o644)  # safetensors writes weights that only their owner may read
        item.replace(folder / item.name)
    partial.rmdir()


def load_exported(folder: Path, device: torch.device) -> Any:
    """An exported model in float32, ready to be a teacher or to be measured."""
    from transformers import AutoModelForCausalLM

    if not (folder / "model.safetensors").is_file():
        raise UserError(f"no exported model in {folder}: train it first")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


# --- measurements -----------------------------------------------------------------------------------------------------
MEASURED = ("target_loss", "draft_loss", "overlap", "target_entropy", "draft_entropy", "agree")
Positions = tuple[str, dict[str, Tensor]]
"""Source of a document, and what is measured at each position."""


@torch.no_grad()
def measure(
    target: nn.Module, draft: nn.Module, data: PreparedData, device: torch.device
) -> Iterator[Positions]:
    """p and q at temperature 1, in float32, at every position after the first of every held-out document."""
    for document in data.heldout:
        tokens = torch.tensor([data.ids(document)], device=device)
        given, labels = tokens[:, :-1], tokens[0, 1:, None]
        logs = [F.log_softmax(one(given, use_cache=False).logits[0].float(), -1) for one in (target, draft)]
        (p, q), losses = (one.exp() for one in logs), [-one.gather(-1, labels).squeeze(-1) for one in logs]
        agree, (x_loss, y_loss) = p.argmax(-1) == q.argmax(-1), losses
        values = (x_loss, y_loss, overlap(p, q), entropy(p), entropy(q), agree)
        yield document.source, dict(zip(MEASURED, (value.cpu().double() for value in values), strict=True))


def spread(values: Tensor) -> dict[str, float]:
    """Mean and standard deviation."""
    return {"mean": float(values.mean()), "sd": float(values.std())}


def summarise(parts: Sequence[Positions]) -> dict[str, Any]:
    """All numbers that the card and evaluation.json hold about distributions."""
    of = {name: torch.cat([part[name] for _, part in parts]) for name in MEASURED}
    shares = torch.histc(of["overlap"].clamp(0, 1), bins=10, min=0, max=1) / len(of["overlap"])
    return {
        "positions": len(of["overlap"]),
        "target_loss": float(of["target_loss"].mean()),
        "draft_loss": float(of["draft_loss"].mean()),
        "gap": float((of["draft_loss"] - of["target_loss"]).mean()),
        "target_perplexity": float(of["target_loss"].mean().exp()),
        "draft_perplexity": float(of["draft_loss"].mean().exp()),
        "overlap": spread(of["overlap"]),
        "tv": spread(1 - of["overlap"]),
        "overlap_histogram": shares.tolist(),
        "target_entropy": spread(of["target_entropy"]),
        "draft_entropy": spread(of["draft_entropy"]),
        "argmax_agreement": float(of["agree"].mean()),
        "entropy_auc": auc(of["draft_entropy"], 1 - of["overlap"]),  # of the draft's entropy for a rejection
    }


def parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())
