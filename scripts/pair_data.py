"""Text, tokenizer and token windows for the built-in pair.

Documents come from the project's data folder; about one in a hundred is held out by a hash of its own text,
so the split is the same on every machine and survives reordering of the files.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sprinter.bench.suites.heldout import MODULUS, clean_wiki, held_out

__all__ = ["MODULUS"]

EOS = "<|endoftext|>"
CACHE_VERSION = 1


class UsageError(ValueError):
    """A mistake of the user, reported in one line."""


@dataclass(frozen=True)
class SourceSpec:
    """One family of files that share a format, and how often its documents are seen per epoch."""

    name: str
    files: tuple[str, ...]
    repeat: int
    licence: str

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError(f"source {self.name!r} names no file")
        if self.repeat < 1:
            raise ValueError(f"source {self.name!r}: repeat must be at least 1, got {self.repeat}")


SOURCES: tuple[SourceSpec, ...] = (
    SourceSpec(
        "wikipedia",
        tuple(f"wikipedia_en_2015_{i:02d}.txt.gz" for i in range(6)),
        1,
        "CC BY-SA 3.0; English Wikipedia contributors, 2015 dump (via jason-feng/wikiVisual)",
    ),
    SourceSpec(
        "wikinews",
        ("wikinews_en_2022_00.jsonl.gz", "wikinews_en_2022_01.jsonl.gz"),
        1,
        "CC BY 2.5; English Wikinews contributors, 2022 dump (via jshepp27/countaBot)",
    ),
    SourceSpec("gsm8k", ("gsm8k_train.jsonl.gz",), 2, "MIT; OpenAI, grade-school-math (training set)"),
    SourceSpec(
        "tinystories",
        ("tinystories_sample.txt.gz",),
        2,
        "CDLA-Sharing-1.0; TinyStories, R. Eldan and Y. Li (via gusjengis/toy-RNN)",
    ),
)


@dataclass(frozen=True)
class Document:
    """One document after light cleanup; `digest` is the sha256 of its text."""

    source: str
    id: str
    text: str
    digest: str = field(repr=False)

    @property
    def held_out(self) -> bool:
        """True for the stable ~1 % that no model of the pair is trained on."""
        return held_out(self.text)


def make_document(source: str, doc_id: str, text: str) -> Document:
    """Build a document, hashing its final text."""
    return Document(source, doc_id, text, hashlib.sha256(text.encode()).hexdigest())


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


_WIKI_DOC = re.compile(r'<doc id="([^"]*)"[^>]*>\n(.*?)\n?</doc>', re.DOTALL)
_GSM_CALCULATOR = re.compile(r"<<.*?>>")


def _read_text(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as handle:
        return handle.read()


def _parse_wikipedia(raw: str) -> Iterator[tuple[str, str]]:
    for match in _WIKI_DOC.finditer(raw):
        yield match.group(1), clean_wiki(match.group(2))


def _parse_wikinews(raw: str) -> Iterator[tuple[str, str]]:
    for line in raw.splitlines():
        record = json.loads(line)
        if record["text"].strip():  # about half the records are redirects
            yield record["id"], clean_wiki(f"{record['title']}\n\n{record['text']}")


def _parse_gsm8k(raw: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(raw.splitlines()):
        record = json.loads(line)
        answer = _GSM_CALCULATOR.sub("", record["answer"])
        yield str(number), f"Question: {record['question'].strip()}\nAnswer: {answer.strip()}"


def _parse_tinystories(raw: str) -> Iterator[tuple[str, str]]:
    stories = raw.split(EOS)[1:-1]  # the sample is a byte range: its first and last story may be incomplete
    for number, story in enumerate(stories, start=1):
        if story.strip():
            yield str(number), story.strip()


_PARSERS = {
    "wikipedia": _parse_wikipedia,
    "wikinews": _parse_wikinews,
    "gsm8k": _parse_gsm8k,
    "tinystories": _parse_tinystories,
}


def missing_files(data: Path) -> list[str]:
    """Names of the needed files that `data` lacks."""
    return [name for spec in SOURCES for name in spec.files if not (data / name).is_file()]


def read_documents(data: Path) -> list[Document]:
    """All documents of all sources in file order, exact duplicates dropped."""
    seen: set[str] = set()
    documents: list[Document] = []
    for spec in SOURCES:
        for name in spec.files:
            for doc_id, text in _PARSERS[spec.name](_read_text(data / name)):
                document = make_document(spec.name, doc_id, text)
                if document.digest not in seen and text:
                    seen.add(document.digest)
                    documents.append(document)
    return documents


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE whose only special token is the end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True)
class PreparedData:
    """Training data: a memory-mapped token stream, held-out documents, and their sources."""

    tokens: npt.NDArray[np.uint16]
    heldout: tuple[Document, ...]
    tokenizer: Tokenizer
    manifest: dict[str, Any]

    @property
    def eos_id(self) -> int:
        """Identifier of the end-of-text token."""
        token = self.tokenizer.token_to_id(EOS)
        if token is None:
            raise ValueError(f"the tokenizer has no {EOS} token")
        return int(token)


def _write_atomic(path: Path, content: str | bytes) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)


def _cache_key(data: Path, vocab_size: int, seed: int) -> dict[str, Any]:
    return {
        "version": CACHE_VERSION,
        "vocab_size": vocab_size,
        "seed": seed,
        "repeats": {spec.name: spec.repeat for spec in SOURCES},
        "files": {name: file_sha256(data / name) for spec in SOURCES for name in spec.files},
    }


def _build_cache(documents: list[Document], cache: Path, key: dict[str, Any]) -> None:
    train = [document for document in documents if not document.held_out]
    heldout = [document for document in documents if document.held_out]
    tokenizer = train_tokenizer((d.text for d in train[::2]), key["vocab_size"])
    eos = tokenizer.token_to_id(EOS)
    repeats = {spec.name: spec.repeat for spec in SOURCES}
    order = np.repeat(np.arange(len(train)), [repeats[d.source] for d in train])
    np.random.default_rng(key["seed"]).shuffle(order)
    encoded = [
        np.array([*e.ids, eos], np.uint16) for e in tokenizer.encode_batch_fast([d.text for d in train])
    ]
    counts: dict[str, int] = {}
    for index in order:
        counts[train[index].source] = counts.get(train[index].source, 0) + len(encoded[index])
    stream = np.concatenate([encoded[index] for index in order])
    lines = ({"source": d.source, "id": d.id, "text": d.text} for d in heldout)
    _write_atomic(cache / "heldout.jsonl", "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines))
    _write_atomic(cache / "tokenizer.json", tokenizer.to_str(pretty=False))
    _write_atomic(cache / "tokens.u16", stream.tobytes())
    manifest = {
        "key": key,
        "documents": {
            spec.name: {
                "train": sum(d.source == spec.name for d in train),
                "heldout": sum(d.source == spec.name for d in heldout),
                "train_tokens_per_epoch": counts[spec.name],
                "repeat": spec.repeat,
            }
            for spec in SOURCES
        },
        "tokens": len(stream),
        "bytes_per_token": sum(len(d.text.encode()) for d in train) / sum(len(e) for e in encoded),
    }
    _write_atomic(
        cache / "manifest.json", json.dumps(manifest, indent=1)
    )  # last, because it marks the cache as complete


def read_heldout(path: Path) -> tuple[Document, ...]:
    """The held-out documents written by an earlier run."""
    with path.open(encoding="utf-8") as handle:
        records = [json.loads(line) for line in handle]
    return tuple(make_document(r["source"], r["id"], r["text"]) for r in records)


def prepare(data: Path, cache: Path, vocab_size: int, seed: int) -> PreparedData:
    """Tokenise once; reuse the cache while source files, vocabulary and seed stay the same."""
    cache.mkdir(parents=True, exist_ok=True)
    key = _cache_key(data, vocab_size, seed)
    manifest_path = cache / "manifest.json"
    if not manifest_path.is_file() or json.loads(manifest_path.read_text())["key"] != key:
        manifest_path.unlink(missing_ok=True)
        _build_cache(read_documents(data), cache, key)
    return PreparedData(
        tokens=np.memmap(cache / "tokens.u16", dtype=np.uint16, mode="r"),
        heldout=read_heldout(cache / "heldout.jsonl"),
        tokenizer=Tokenizer.from_file(str(cache / "tokenizer.json")),
        manifest=json.loads(manifest_path.read_text()),
    )


@dataclass(frozen=True)
class Windows:
    """Token windows as a pure function of tokens already seen, so that a resumed run reads the same data."""

    tokens: npt.NDArray[np.uint16]
    seed: int

    def batch(self, tokens_seen: int, rows: int, length: int) -> npt.NDArray[np.int64]:
        """`rows` windows of `length + 1` tokens, without replacement within an epoch."""
        count = (len(self.tokens) - 1) // length
        if count < 1:
            raise ValueError(f"{len(self.tokens)} tokens are too few for windows of {length}")
        first = tokens_seen // length
        picked = [self._window(first + row, count, length) for row in range(rows)]
        return np.stack(picked).astype(np.int64)

    def _window(self, index: int, count: int, length: int) -> npt.NDArray[np.uint16]:
        epoch, position = divmod(index, count)
        start = int(_permutation(self.seed, length, epoch, count)[position]) * length
        return self.tokens[start : start + length + 1]


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, length: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, length, epoch]).permutation(count)


def source_table() -> list[dict[str, Any]]:
    """The sources as plain records, for reports."""
    return [asdict(spec) for spec in SOURCES]
