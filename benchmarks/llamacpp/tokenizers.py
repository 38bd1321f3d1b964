"""Tokenizers of GGUF files: ours against llama.cpp's own and transformers', text by text.

The texts: extracts of all files of the data folder, and texts put together from what tokenizers stumble over: runs of
spaces and newlines, digits, other scripts, combining marks, emoji, control characters, code, special tokens. Each
tokenizer reads the whole text, special tokens included, and adds none. A text counts as different if one id differs.
Explained are differences from llama.cpp where the checkpoint's own tokenizer is as ours:

* the checkpoint normalises texts to Unicode's form C, and llama.cpp does not (the ids of the normalised text agree);
* the text contains the written form of an ordinary token that llama.cpp takes for a control token by its name;
* the text contains "▁", which SentencePiece cannot tell from a space.

Run: python benchmarks/llamacpp/tokenizers.py --data DIR [--texts 10000] [--models FILE ...]
     (the files: by default those of SPRINTER_MODELS)
"""

from __future__ import annotations

import ctypes
import gzip
import io
import random
import sys
import tarfile
import time
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import set_verbosity_error

from benchmarks.common import command, grid, option_parser, write_results
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.environment import environment
from sprinter.models.convert import convert_gguf
from sprinter.models.gguf.library import loading
from sprinter.models.gguf.tokenizer import gguf_tokenizer
from sprinter.models.pair import builtin_paths
from sprinter.models.source import models_folder

NAME = "llamacpp/tokenizers"
EDGE_SHARE = 0.25
LONGEST = 600  # characters of an extract
SPACE = "▁"  # how SentencePiece spells a space
EDGES = (
    *(" " * n for n in (1, 2, 3, 4, 7, 8, 16, 31, 32, 40, 64)),
    *("\n" * n for n in (1, 2, 3, 32)),
    "\t", "\t\t\t", "\r\n", "\r", "\n\n  \n", " \n", "\xa0", "\u3000", "\u2028", "\u200b", "\ufeff",
    "\x0b\x0c\x85", "0", "42", "1234567", "3.14159", "1,000,000", "²³", "½", "Ⅳ", "٣٤٥", "१२३", "1e-9",
    "0x1F", "v2.0.1", "don't", "DON'T", "I'll", "we've", "’s", "'S", "it''s", "O'Neil", "'tis", "Hello",
    "hello world", "HELLO", "camelCase", "snake_case", "kebab-case", "ÀÉÎ", "ß", "ﬁ", "ǅ", "naïve",
    "e\u0301", "n\u0303", "こんにちは", "カタカナ", "漢字かな交じり文", "你好\uff0c世界\uff01", "한국어",
    "\u1112\u1161\u11ab", "Привет", "Ελληνικά", "עברית", "العربية", "हिन\u094dदी", "ไทยแลนด\u0e4c", "தமிழ\u0bcd",
    "ქართული", "አማርኛ", "\U0001d4b3\U0001d4ce", "𐍈", "👍", "👩\u200d👩\u200d👧\u200d👦", "🇩🇪", "❤\ufe0f", "⚡\ufe0f",
    "🧑🏽", "def f(x):\n    return x\n", "for (int i = 0; i < n; ++i) {", "a+=b;", "!=", "===", "->", "=>", "//",
    "/*", "<!--", "#!/bin/sh\n", "https://example.org/a?b=c&d=%20", "<b>", "</s>", "<s>", "<|x|>", "[INST]",
    "```python\n", "\\n", "$x^2$", "...", "…", "—", "“quoted”", "«»", "¿?", "!!!", "___", "***", "---",
    "@user", "#tag", "a@b.org", "£€¥", "\x00", "\x7f", "�", "▁", "▁▁", "Ġ", "Ċ", "<0x0A>", "##ing", "</w>",
)  # fmt: skip


def extracts(files: Sequence[str], count: int) -> list[str]:
    """Extracts of the files' texts in turn: random places, lengths from one character to ``LONGEST``."""
    chance = random.Random(0)
    found = []
    for i in range(count):
        text = files[i % len(files)]
        at, length = chance.randrange(len(text)), round(LONGEST ** chance.random())
        found.append(text[at : at + length])
    return found


def contents(path: Path) -> Iterator[str]:
    """The text of a file, or of each file of an archive."""
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as archive:
            whole = b"".join(archive.extractfile(one).read() for one in archive if one.isfile())  # type: ignore[union-attr]
        yield io.BytesIO(whole).read().decode(errors="replace")
    else:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode(errors="replace")
        if text:
            yield text


def edge_texts(special: Sequence[str], count: int) -> list[str]:
    """Texts of one to eight random pieces of ``EDGES`` and special tokens, some of them with spaces between."""
    chance = random.Random(1)
    pieces = [*EDGES, *chance.sample(list(special), min(len(special), len(EDGES) // 4))]
    return [
        chance.choice(("", "", " ")).join(chance.choices(pieces, k=chance.randint(1, 8)))
        for _ in range(count)
    ]


class LlamaTokenizer:
    """llama.cpp's own tokenizer of a file, loaded without the weights.

    Args:
        path: the file.
        pre: a pre-tokenizer to use instead of the file's.
    """

    def __init__(self, path: Path, pre: str = "") -> None:
        with loading(False, False) as params:
            import llama_cpp.llama_cpp as llama

            params.vocab_only = True
            overrides = (llama.llama_model_kv_override * 2)()
            if pre:
                overrides[0].tag, overrides[0].key = llama.LLAMA_KV_OVERRIDE_TYPE_STR, b"tokenizer.ggml.pre"
                overrides[0].value.val_str = pre.encode()
                params.kv_overrides = overrides
            self._llama = llama
            self._model = llama.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read the vocabulary of {path}")
        self._vocab = llama.llama_model_get_vocab(self._model)

    def __call__(self, text: str) -> list[int]:
        """Token ids; special tokens in the text are found, none is added."""
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 8))()
        count = self._llama.llama_tokenize(self._vocab, raw, len(raw), room, len(room), False, True)
        assert count >= 0
        return list(room[:count])

    def named_control(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Tokens that it takes for control tokens and the file does not."""
        is_control, known = self._llama.llama_vocab_is_control, set(tokenizer.added_tokens_decoder)
        return [
            token
            for token, i in tokenizer.get_vocab().items()
            if i not in known and is_control(self._vocab, i)
        ]

    def close(self) -> None:
        """Free it."""
        self._llama.llama_model_free(self._model)


def ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text; none is added."""
    return list(tokenizer(list(texts), add_special_tokens=False).input_ids)


def timed_s(make: Any) -> tuple[Any, float]:
    """What a function returns, and how long it took."""
    began = time.perf_counter()
    return make(), time.perf_counter() - began


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Tokens that are found in a text before anything else."""
    return sorted(token.content for token in tokenizer.added_tokens_decoder.values())


def compare(path: Path, files: Sequence[str], count: int) -> dict[str, Any]:
    """One row of the table."""
    ours, ours_s = timed_s(lambda: gguf_tokenizer(path))
    theirs, theirs_s = timed_s(lambda: AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))
    edges = round(count * EDGE_SHARE)
    texts = [*extracts(files, count - edges), *edge_texts(special_tokens(ours), edges)]
    mine, hf = ids(ours, texts), ids(theirs, texts)
    llama = LlamaTokenizer(path)
    cpp = [llama(text) for text in texts]
    marks = [*llama.named_control(ours), *([] if ours.decode(ids(ours, [SPACE])[0]).strip() else [SPACE])]
    other = [i for i in range(len(texts)) if mine[i] != cpp[i]]
    formed = [i for i in other if mine[i] == llama(unicodedata.normalize("NFC", texts[i]))]
    marked = [i for i in set(other) - set(formed) if any(mark in texts[i] for mark in marks)]
    llama.close()
    left = sorted(set(other) - set(formed) - set(marked))
    apart = [i for i in range(len(texts)) if mine[i] != hf[i]]
    wanted = [{text, unicodedata.normalize("NFC", text)} for text in texts]
    back = [i for i, both in enumerate(wanted) if ours.decode(mine[i]) in both]
    return {
        "file": path.name,
        "tokens": len(ours),
        "texts": len(texts),
        "edge_texts": edges,
        "as_llama_cpp": len(texts) - len(other),
        "explained": {"form C": len(formed), ", ".join(marks) or "marks": len(marked)},
        "unexplained": len(left),
        "as_transformers": len(texts) - len(apart),
        "decoded_back": len(back),
        "read_s": {"ours": ours_s, "transformers": theirs_s},
        "unlike_llama_cpp": [shown(texts[i], mine[i], cpp[i]) for i in left[:20]],
        "unlike_transformers": [shown(texts[i], mine[i], hf[i]) for i in apart[:20]],
    }


def shown(text: str, mine: list[int], theirs: list[int]) -> dict[str, Any]:
    """A text on which two tokenizers part, from the first id that differs."""
    at = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )
    return {"text": text[:80], "from": at, "ours": mine[at : at + 6], "theirs": theirs[at : at + 6]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    head = (
        "file | tokens | texts | as llama.cpp | explained | unexplained | as transformers | decoded back | "
        "read in s: ours, transformers'"
    )
    lines = [
        f"{row['file']} | {row['tokens']:,} | {row['texts']:,} | {row['as_llama_cpp']:,} | "
        f"{', '.join(f'{count} ({why})' for why, count in row['explained'].items() if count) or 0} | "
        f"{row['unexplained']} | {row['as_transformers']:,} | {row['decoded_back']:,} | "
        f"{row['read_s']['ours']:.1f}, {row['read_s']['transformers']:.1f}"
        for row in rows
    ]
    return "\n".join(grid(head, lines))


def real_files() -> list[Path]:
    """The GGUF files of ``SPRINTER_MODELS``; with ``--smoke`` a file of the built-in draft."""
    if SMOKE:
        return [convert_gguf(builtin_paths()["draft"], scratch("models") / "draft.gguf", "f16")]
    return sorted(models_folder().glob("*.gguf"))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--texts", type=int, default=sized(10_000, 60))
    parser.add_argument("--models", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    set_verbosity_error()
    files = [text for path in sorted(args.data.iterdir()) if path.suffix != ".md" for text in contents(path)]
    rows = [compare(path, files, args.texts) for path in args.models or real_files()]
    results = {"benchmark": NAME, "command": command(), "environment": environment(), "rows": rows}
    write_results(NAME, results, table(rows))


if __name__ == "__main__":
    main()
