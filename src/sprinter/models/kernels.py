"""Our kernels, the package ``sprinter-kernels``, which may be missing: the only module that knows it.

It runs whole passes of known families on a CPU, over weights of 4 to 8 bits or as they are, and layers inside of CUDA
graphs. What it refuses becomes a ``UserError`` here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.errors import UserError, first_line
from sprinter.fingerprint import count_as, weights_fingerprint
from sprinter.models.reduced_vocab import CutHead
from sprinter.models.runners.forward import StraightPass
from sprinter.models.runners.rope import find_switch
from sprinter.models.runners.row import RowCache

__all__ = [
    "BITS", "CACHES", "GGUF", "cache_dtype_of", "cache_token_bytes", "compile_layers", "is_quantised", "keep_cache_in",
    "keep_rows_in", "kernels", "knows", "name_of", "packed_weights", "parameter_count", "passes_of", "quantise",
    "quantise_linears", "renew", "round_linears", "rows_dtype_of", "runs", "why_none", "why_not_fused",
]  # fmt: skip

BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Names of dtypes -> bits of a weight."""
GGUF = "gguf"
"""The dtype of the weights of a GGUF file as they are stored."""

CACHES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3": torch.float8_e4m3fn,
}  # fmt: skip
"""Names of dtypes of keys and values; the last two are for GPUs."""

OWN = "the model's own"
"""In place of such a name: that of the weights."""

_log = logging.getLogger("sprinter")
_packed: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Models that the kernels run -> what runs them."""
_cached: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Models whose keys and values are kept in a dtype of ``CACHES`` that was asked for."""
_asked: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Models whose passes were given to the kernels, with weights as they are; since a reload, some may run without."""


def kernels(part: str = "") -> Any:
    """The package, or a module of it.

    Raises:
        UserError: it is not installed, or has nothing for this processor.
    """
    try:
        module = import_module("sprinter_kernels" + (part and f".{part}"))
        import_module("sprinter_kernels.native").instruction_set()
    except (ImportError, OSError, ValueError) as error:
        if getattr(error, "name", None) != "sprinter_kernels":
            raise UserError(f"our kernels cannot be loaded: {first_line(error)}") from error
        raise UserError(
            "weights of 4 and 8 bits, and compile=True, need our kernels, which are not installed: "
            "pip install ./packages/sprinter-kernels in a clone, which takes a C++ compiler, or use "
            "dtype=bfloat16 or float32 with compile=False"
        ) from error
    return module


def why_none() -> str | None:
    """Why there are no kernels for this CPU, and how to get them; None: there are."""
    try:
        kernels()
    except UserError as error:
        return str(error)
    return None


def name_of() -> str | None:
    """What tells the kernels in use from others, their version and instruction set; None: there are none."""
    if why_none() is not None:
        return None
    return f"sprinter-kernels {version('sprinter-kernels')}, {kernels('native').instruction_set()}"


def knows(model_type: str) -> bool:
    """Whether there are kernels for models of this type, as configs name them."""
    return why_none() is None and model_type in kernels("families").TYPES


@contextmanager
def _refused(before: str = "", after: str = "") -> Iterator[None]:
    """What the package refuses, as a line of ours."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{before}{error}{after}") from error


def is_quantised(model: nn.Module) -> bool:
    """Whether a module has layers of 4 to 8 bits for a CPU."""
    return any(type(part).__name__ == "QuantisedLinear" for part in model.modules())


def packed_weights(model: nn.Module) -> list[Tensor]:
    """The memory of layers of 4 to 8 bits, which is no parameter."""
    found: list[Any] = [getattr(part, "_matrix", None) for part in model.modules()]
    return [matrix.packed for matrix in found if matrix is not None]


def parameter_count(model: nn.Module) -> int:
    """Number of parameters; quantised ones count as what they were."""
    if why_none() is not None:
        return sum(weights.numel() for weights in model.parameters())
    count: int = kernels("layers").parameter_count(model)
    return count


def runs(model: object) -> bool:
    """Whether the kernels run a model's passes. Then a token is the same, to the bit, in each over a chain."""
    return isinstance(model, nn.Module) and model in _packed


def quantise(
    model: PreTrainedModel, dtype: str, sources: Mapping[str, Any] | None = None, keep: Any = None
) -> None:
    """Quantise a model on a CPU in place, and have the kernels run it if they know it, else its linear layers.

    It keeps its fingerprint, so that gates and heads for it load.

    Args:
        sources, keep: of weights that lie in a file, and where their packed form is kept; see the package.

    Raises:
        UserError: there are no kernels, its weights cannot be rounded, or it does not run with them replaced.
    """
    package, fingerprint = kernels(), weights_fingerprint(model)
    with _refused():
        package.quantise(model, dtype, sources, keep)
    _run_quantised(model)
    count_as(model, fingerprint)


def _run_quantised(model: PreTrainedModel) -> None:
    _try_layers(model, "quantised layers")
    why = kernels().supports(model)
    if why is None:
        with _refused(after=": use bfloat16"):
            _packed[model] = kernels().pack(model, find_switch(model))
    elif knows(model.config.get_text_config(decoder=True).model_type):
        _log.warning("the kernels run the linear layers of %s alone, which is slower: %s", _name(model), why)


def _name(model: PreTrainedModel) -> str:
    return model.name_or_path or type(model).__name__


def _try_layers(model: PreTrainedModel, what: str) -> Tensor:
    """Logits of a few tokens through the layers that a model has now."""
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config(decoder=True).vocab_size
    try:
        with torch.inference_mode():
            made: Tensor = model(ids).logits
    except Exception as error:  # models' own code may read the weights that are gone
        raise UserError(
            f"{_name(model)} does not run with {what} ({type(error).__name__}: {first_line(error)}): use bfloat16"
        ) from error
    return made


def quantise_linears(module: nn.Module) -> None:
    """Replace the linear layers of a module on a CPU by ones of 8 bits, in place; it need not be a model.

    Raises:
        UserError: weights that are not finite, or no kernels.
    """
    rounding = kernels("quantise")
    with _refused():
        rounding.quantise_linears(module)


def round_linears(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model on a GPU by ones of 8 bits, in place. It keeps its fingerprint.

    Raises:
        UserError: weights that are not finite, a model that does not run with such layers, or no kernels.
    """
    rounding, fingerprint = kernels("quantise"), weights_fingerprint(model)
    with _refused():
        rounding.round_linears(model)
    if not bool(torch.isfinite(_try_layers(model, "layers of 8 bits")).all()):
        raise UserError(f"{_name(model)} gives no numbers with layers of 8 bits: use bfloat16")
    count_as(model, fingerprint)


def compile_layers(model: PreTrainedModel) -> str | None:
    """Have the kernels run a model's passes over its weights where they are; why they cannot, in words, or None.

    Raises:
        UserError: there are no kernels, or the model computes something else with them.
    """
    if (why := kernels().supports(model)) is not None:
        return str(why)
    with _refused(after=": use compile=False"):
        _packed[model] = kernels().pack(model, find_switch(model))
    _asked[model] = True
    return None


def renew(model: PreTrainedModel) -> None:
    """After a change of a model, see anew whether the kernels can run it; a warning says that they no longer can.

    Raises:
        UserError: as ``compile_layers``.
    """
    _packed.pop(model, None)
    if is_quantised(model):
        _run_quantised(model)
    elif model in _asked and (why := compile_layers(model)) is not None:
        _log.warning("our kernels no longer run %s, which is slower: %s", type(model).__name__, why)


def keep_cache_in(model: object, dtype: str | None, name: str) -> None:
    """Have the kernels keep the keys and values of a model that was just loaded in "float32", also None, or "bfloat16".

    Raises:
        UserError: the kernels do not run its passes, or are older; another pair has the model with another dtype.
    """
    if not isinstance(model, nn.Module) or model not in _packed:
        if dtype is None:
            return
        raise UserError(
            f"cache_dtype={dtype} is for models whose passes our kernels run on a CPU, and {name} is not one: give "
            "compile=True or dtype=int8 (a GGUF file: runner=torch, dtype=gguf), or leave cache_dtype out"
        )
    wanted = dtype or "float32"
    if wanted not in ("float32", "bfloat16"):
        raise UserError(
            f"cache_dtype={dtype} is for GPUs, and {name} is on a CPU: give bfloat16, or leave it out"
        )
    if (before := _cached.get(model, wanted)) != wanted:
        raise UserError(
            f"{name} was loaded with cache_dtype={before}, and {wanted} is asked for now: give the same, or another "
            "copy of the model"
        )
    if wanted == "bfloat16" and "half" not in kernels().Slots._fields:
        raise UserError(
            f"cache_dtype={dtype} needs sprinter-kernels 0.5, and {version('sprinter-kernels')} is installed: install "
            "them again (in a clone: pip install ./packages/sprinter-kernels), or leave cache_dtype out"
        )
    set_cache_dtype(model, wanted)


def keep_rows_in(model: PreTrainedModel, dtype: str | None, name: str) -> None:
    """The same on a GPU, in rows that transformers or graphs fill: no wider than the weights. None: as these.

    Raises:
        UserError: it is wider; another pair has the model with another dtype.
    """
    if dtype is not None and CACHES[dtype].itemsize > model.dtype.itemsize:
        own = str(model.dtype).removeprefix("torch.")
        raise UserError(
            f"cache_dtype={dtype} is wider than {name}, in {own}, whose keys and values gain nothing: leave it out"
        )
    wanted = OWN if dtype is None or CACHES[dtype] == model.dtype else dtype
    if (before := _cached.get(model, wanted)) != wanted:
        raise UserError(
            f"{name} was loaded with {before} keys and values, and {wanted} ones are asked for now: give the same "
            "cache_dtype"
        )
    set_cache_dtype(model, wanted)


def rows_dtype_of(model: nn.Module) -> torch.dtype | None:
    """Of the keys and values of a model that the kernels do not run; None: its own."""
    return None if runs(model) else CACHES.get(_cached.get(model, ""))


def set_cache_dtype(model: nn.Module, dtype: str) -> None:
    """Keep keys and values of a model in this dtype, in runners made from then on."""
    _cached[model] = dtype


def cache_dtype_of(model: object) -> str | None:
    """Of the keys and values of a model, where the kernels run it or another dtype was asked for; None: its own."""
    own = getattr(model, "inner", model)  # of a draft of another vocabulary
    found = _cached.get(own, "float32" if runs(own) else None) if isinstance(own, nn.Module) else None
    return None if found == OWN else found


def cache_token_bytes(model: nn.Module) -> int | None:
    """Bytes of a token's keys and values in all layers; None: the kernels do not run the model."""
    packed = _packed.get(model)
    return (
        None
        if packed is None
        else 2 * packed.depth * packed.kv * packed.d * (2 if cache_dtype_of(model) == "bfloat16" else 4)
    )


def passes_of(model: PreTrainedModel) -> StraightPass | None:
    """What runs a model's passes over a ``RowCache``, for runners; None: transformers does."""
    packed, head = _packed.get(model), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return None if packed is None else _Passes(packed, head, cache_dtype_of(model) == "bfloat16")


class _Passes:
    """Passes of one model with this output layer, with a cache in bfloat16 or float32. A call is a ``StraightPass``."""

    def __init__(self, packed: Any, head: nn.Module, half: bool) -> None:
        self._packed, self._slots, self._writers = packed, kernels().Slots, kernels().Writers
        self._cut = head if isinstance(head, CutHead) else None
        # Older kernels cannot draft with an output layer for some tokens.
        self.drafts, self.size = self._cut is None or "ids" in self._writers._fields, packed.size
        self._known: tuple[int, dict[str, Any]] = -1, {}
        self._dtype = torch.bfloat16 if half else torch.float32
        self._half = {"half": True} if half else {}  # older kernels do not know the argument

    def __call__(
        self,
        tokens: Tensor,
        logits: bool,
        position_ids: Tensor,
        attention_mask: Tensor | Mapping[str, Tensor | None] | None,
        cache: RowCache,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor | None, Tensor, tuple[Tensor, ...]]:
        packed, span, (batch, n) = self._packed, cache.span, tokens.shape
        held = cache.reserve(packed.numbers, packed.kv, packed.d, self._dtype)
        buffers, slots = [one.data_ptr() for one in held], held[0].shape[2]
        if span.index is None or span.rows is None:
            where = self._slots(buffers, slots, span.keys, span.start, **self._half)
        else:
            row, slot = span.rows.expand_as(span.index).reshape(-1).contiguous(), span.index.reshape(-1)
            position = position_ids.expand(batch, n).reshape(-1)
            seen = span.rows.flatten() if span.some else None
            where = self._slots(buffers, slots, span.keys, 0, position, row, slot, seen, **self._half)
        if span.flat:  # each token attends in a row of its own
            tokens, attention_mask = tokens.transpose(0, 1), _turned(attention_mask)
        said, states, taken = packed.forward(tokens, where, attention_mask, layers, logits)
        if span.flat:
            said = None if said is None else said.transpose(0, 1)
            states, taken = states.transpose(0, 1), tuple(one.transpose(0, 1) for one in taken)
        if said is not None and self._cut is not None:
            said = self._cut.spread(said)
        return said, states, taken

    def draft(
        self, first: Tensor, states: Tensor, cache: RowCache, **who: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See ``RowRunner.draft``."""
        packed = self._packed
        held = cache.reserve(packed.numbers, packed.kv, packed.d, self._dtype)
        where, vocab = ([one.data_ptr() for one in held], held[0].shape[2]), first.shape[-1]
        if self._cut is None:
            made: tuple[Tensor, Tensor, Tensor, Tensor] = packed.draft(
                first, states, self._writers(**who), *where, vocab, **self._half
            )
            return made
        if self._known[0] != vocab:
            ids = self._cut.ids.numpy()
            if not len(ids := np.ascontiguousarray(ids[ids < vocab])):
                raise UserError(
                    "the draft knows no token of the pair's vocabulary: give another draft_vocabulary"
                )
            places = np.pad(ids, (0, -len(ids) % 64))
            self._known = vocab, {"ids": ids, "words": tuple(one[places] for one in who["words"])}
        ids = self._known[1]["ids"]
        known, writers = torch.from_numpy(ids), self._writers(**who | self._known[1])
        said, seen, few, tokens = packed.draft(
            first[:, known], states, writers, *where, len(ids), **self._half
        )
        laws = few.new_zeros(*few.shape[:2], vocab)
        laws[..., known] = few
        return self._cut.spread(said[..., : len(self._cut.ids)]), seen, laws, tokens


def _turned(mask: Any) -> Any:
    if isinstance(mask, Mapping):
        return {kind: _turned(one) for kind, one in mask.items()}
    return None if mask is None else mask.transpose(0, 2)


def why_not_fused(model: PreTrainedModel) -> str | None:
    """Why the kernels for GPUs do not run a model's layers inside of CUDA graphs; None: they do."""
    try:
        fused = import_module("sprinter_kernels.fused")
    except ImportError as error:
        return f"the package sprinter-kernels cannot be imported: {first_line(error)}"
    why: str | None = fused.why_not_fused(model)
    return why
