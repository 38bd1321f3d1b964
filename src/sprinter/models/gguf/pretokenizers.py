"""Pre-tokenizers of byte-level BPE under the names that llama.cpp gives them.

A GGUF file holds a name; expressions and flags are those of the checkpoints' own ``tokenizer.json``. llama.cpp knows
more names. Those are missing here whose checkpoints differ from each other, or from what llama.cpp does. transformers
reads GGUF files too, without the flags and without the names that split at digits, so that its tokens differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as _SPLITS

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What happens to a text before BPE merges its bytes.

    Attributes:
        patterns: expressions that split the text, each the parts that the last one left.
        gpt2: whether GPT-2's own expression comes last.
        nfc: whether the text is first normalised to Unicode's form C. llama.cpp does not do that.
        whole: whether a part that is a token is taken without merging (``ignore_merges`` of BPE).
        bos: whether texts begin with a BOS if a file does not say so.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        """Its normalizer, if it has one."""
        return normalizers.NFC() if self.nfc else None

    @property
    def splitter(self) -> Sequence:
        """Its pre-tokenizer."""
        splits = [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])


_DEEPSEEK_CODER = ("[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", "[一-龥ࠀ-一가-퟿]+", "\\p{N}")
_DEEPSEEK_V3 = (
    "\\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
)

_gpt2, _digits = PreTokenizer(gpt2=True), PreTokenizer(("\\p{N}",), gpt2=True)
_llama3 = PreTokenizer((_SPLITS["llama3"],), whole=True, bos=True)

PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "codeshell": _digits,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": PreTokenizer((_SPLITS["qwen2"],), nfc=True),
    "qwen35": PreTokenizer((_SPLITS["qwen35"],), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_SPLITS["qwen2"],)),
    "tekken": PreTokenizer((_SPLITS["tekken"],), whole=True, bos=True),
    "gpt-4o": PreTokenizer((_SPLITS["gpt-4o"],)),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
}
"""llama.cpp's name → pre-tokenizer."""
