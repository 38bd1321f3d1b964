"""Output layers that know a part of the vocabulary, for drafts of targets with large vocabularies.

The input embedding has a row for every token of the target, since the text before a draft may hold any of them; a
lookup costs the same for any number of rows. The output layer has rows for the ``draft_vocabulary`` tokens of a map.
All other tokens have a logit of −1e4, so their probability is exactly 0: exact methods stay exact, and a token outside
the map is written when the target draws it. A distilled draft may have such a layer from the start; its model type is
our own, so that an engine that does not know the map refuses the folder instead of reading it wrongly. Any other draft
can be given one when it is loaded (``draft_vocabulary``), as in FR-Spec (Zhao et al. 2025, arXiv 2502.14856), and so
can heads that draft with the target's output layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sprinter.errors import UserError, refuse_long
from sprinter.fingerprint import count_as, ids_name, weights_fingerprint

__all__ = [
    "CUT_TYPE", "VOCABULARY_FORMAT", "CutHead", "CutLlamaConfig", "CutLlamaForCausalLM", "check_cut", "check_map",
    "cut_output", "frequent_tokens", "keeping", "kept_tokens", "known_words", "some_rows",
]  # fmt: skip

CUT_TYPE = "sprinter_cut_llama"
"""Model type in ``config.json``."""
VOCABULARY_FORMAT = "sprinter-draft-vocabulary"
"""``format`` of the file that ``sprinter draft vocabulary`` writes."""
_OUTSIDE = -1e4
"""Logit of tokens outside the map; exp of its distance from any other logit is 0, and float16 can hold it."""


class CutHead(nn.Module):
    """Output layer for some tokens of a vocabulary.

    Args:
        hidden: size of its inputs.
        vocab: number of logits.
        kept: number of tokens that it knows.
        bias: whether there is one.

    Attributes:
        in_features, out_features: as those of the linear layer in its place.
        words: linear layer with one output per known token.
        ids: ``[kept]`` int64, the known tokens in ascending order.
    """

    ids: Tensor

    def __init__(self, hidden: int, vocab: int, kept: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = hidden, vocab
        self.words = nn.Linear(hidden, kept, bias=bias)
        self.register_buffer("ids", torch.arange(kept))

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` of hidden states ``[..., hidden]``."""
        return self.spread(self.words(hidden))

    def spread(self, known: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` of those of the known tokens, ``[..., kept]``."""
        logits = known.new_full((*known.shape[:-1], self.out_features), _OUTSIDE)
        logits[..., self.ids] = known
        return logits


class CutLlamaConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """Configuration of a Llama model with a ``CutHead``; ``draft_vocabulary`` is the number of tokens that it knows."""

    model_type = CUT_TYPE
    draft_vocabulary: int = 0


class CutLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A Llama model with a ``CutHead``."""

    config_class = CutLlamaConfig
    _tied_weights_keys: ClassVar[Any] = {}  # type: ignore[misc]

    def __init__(self, config: CutLlamaConfig) -> None:
        super().__init__(config)
        kept = config.draft_vocabulary
        if not 0 < kept <= config.vocab_size:
            raise UserError(
                f"draft_vocabulary={kept} in config.json is none of 1 to {config.vocab_size}: distil the draft again"
            )
        self.lm_head = CutHead(config.hidden_size, config.vocab_size, kept)
        self.post_init()  # type: ignore[no-untyped-call]


def frequent_tokens(texts: Iterable[Tensor], count: int, vocab: int, always: Iterable[int] = ()) -> Tensor:
    """The most frequent tokens of texts, ascending; tokens that do not occur follow by id, as common words come first.

    Args:
        texts: token ids of each text.
        count: number of tokens.
        vocab: size of the vocabulary.
        always: tokens that are kept in any case, such as those that end a text.

    Raises:
        UserError: more tokens than the vocabulary has.
    """
    if count > vocab:
        raise UserError(f"vocabulary={count} exceeds the target's {vocab} tokens: give less, or leave it out")
    counts = torch.zeros(vocab, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text, minlength=vocab)[:vocab]
    counts[[token for token in always if token < vocab]] = 1 << 60
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def kept_tokens(given: int | str | Path | Sequence[int], vocab: int, always: Sequence[int]) -> Tensor:
    """The token ids that a draft keeps, ascending.

    Args:
        given: their number (those with the least ids: tokenizers number tokens in the order in which they learned them,
            frequent ones first), their ids, or the file of ``sprinter draft vocabulary``.
        vocab: size of the draft's vocabulary.
        always: tokens that end a text, kept in any case if a number is given.

    Raises:
        UserError: a number out of range, no such file, ids of another vocabulary.
    """
    if isinstance(given, str | Path):
        given = _read_vocabulary(Path(given))
    if isinstance(given, int) and not isinstance(given, bool) and len(always) < given <= vocab:
        return frequent_tokens((), given, vocab, always)
    if not isinstance(given, Sequence):
        refuse_long("draft_vocabulary", given)
        raise UserError(
            f"draft_vocabulary={given}: give a number of tokens from {len(always) + 1} to {vocab}"
        )
    ids: list[Any] = list(given)
    if not ids or not all(type(one) is int and 0 <= one < vocab for one in ids):
        raise UserError(
            f"the tokens of draft_vocabulary are not all ids from 0 to {vocab - 1}: choose them for this target"
        )
    if any(first >= second for first, second in pairwise(ids)):
        raise UserError("the tokens of draft_vocabulary are not in ascending order: sort them, each once")
    return torch.tensor(ids)


def keeping(
    given: int | str | Path | Sequence[int], words: Mapping[str, int]
) -> Callable[[int, Sequence[int]], Tensor]:
    """``kept_tokens`` for a number of logits and the tokens that end a text; logits of padding are never kept."""
    known = max(words.values(), default=-1) + 1
    return lambda logits, ends: kept_tokens(given, min(logits, known), ends)


def _read_vocabulary(path: Path) -> list[int]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        ids = found["ids"] if found["format"] == VOCABULARY_FORMAT else None
    except OSError as error:
        raise UserError(
            f"the draft's vocabulary {path} cannot be read ({error.strerror}): check the path"
        ) from error
    except (ValueError, KeyError, TypeError):
        ids = None
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise UserError(f"{path} is not a vocabulary of a draft: make one with 'sprinter draft vocabulary'")
    return ids


def cut_output(model: PreTrainedModel, ids: Tensor) -> str:
    """Let a model's output layer know these tokens alone, in place, and return the path of what is left of it.

    The model keeps its fingerprint: a gate reads hidden states, which stay what they are.

    Raises:
        UserError: its output layer is no linear layer, or is cut already.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None):
        raise UserError("the draft bounds its logits, so no token can have none: leave draft_vocabulary out")
    if type(head) is not nn.Linear or not head.weight.is_floating_point() or head.weight.is_meta:
        raise UserError(
            f"the draft's output layer is a {type(head).__name__}, which cannot be cut: leave draft_vocabulary out"
        )
    fingerprint = weights_fingerprint(model)
    path = next(name for name, part in model.named_modules() if part is head)
    cut = CutHead(head.in_features, head.out_features, len(ids), bias=head.bias is not None)
    cut.ids = ids.to(head.weight.device)
    cut.words = _rows(head, cut.ids)
    model.set_submodule(path, cut)
    count_as(model, fingerprint)
    return f"{path}.words"


def check_cut(options: Mapping[str, Any]) -> None:
    """Refuse options of loading that do not go with a cut output layer.

    Raises:
        UserError: one was given.
    """
    if options.get("device_map") is not None or options.get("quantization_config") is not None:
        raise UserError(
            "draft_vocabulary does not go with device_map or quantization_config: leave one of them out"
        )


def some_rows(layer: nn.Module, ids: Tensor) -> tuple[Tensor, nn.Module]:
    """A linear layer with the outputs ``ids`` ``[k]`` of another alone, of a quantised one in 8 bits; and the ids, on
    its device.

    Raises:
        UserError: the layer is neither.
    """
    some: Any = getattr(layer, "some_rows", None)  # of our kernels' layers
    if some is not None:
        codes = getattr(layer, "codes", None)  # of one on a GPU
        ids = ids if codes is None else ids.to(codes.device)
        return ids, some(ids)
    if type(layer) is not nn.Linear or type(layer.weight.data) is not Tensor or layer.weight.is_meta:
        raise UserError(
            f"the target's output layer is a {type(layer).__name__}, which cannot be cut: leave draft_vocabulary out"
        )
    ids = ids.to(layer.weight.device)
    return ids, _rows(layer, ids)


def _rows(layer: nn.Linear, ids: Tensor) -> nn.Linear:
    made = nn.Linear(layer.in_features, len(ids), layer.bias is not None).requires_grad_(False)
    made.to(layer.weight.device, layer.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(layer.weight[ids])
        if layer.bias is not None:
            made.bias.copy_(layer.bias[ids])
    return made


def known_words(model: PreTrainedModel) -> str | None:
    """``ids_name`` of the tokens of a ``CutHead``, for records; None if the model has none."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return ids_name(head.ids) if isinstance(head, CutHead) else None


def check_map(ids: Tensor | Sequence[int], vocab: int) -> None:
    """Refuse a map that is not of a vocabulary of this size.

    Raises:
        UserError: ids that are negative, too large, repeated or out of order.
    """
    known = torch.as_tensor(ids)
    if len(known) and int(known[0]) >= 0 and int(known[-1]) < vocab and bool((known.diff() > 0).all()):
        return
    raise UserError(
        f"the draft's vocabulary map is not of the target's vocabulary ({len(known)} tokens up to "
        f"{int(known.max()) if len(known) else -1}, {vocab} token ids): make it for this target"
    )


AutoConfig.register(CUT_TYPE, CutLlamaConfig)
AutoModelForCausalLM.register(CutLlamaConfig, CutLlamaForCausalLM)
