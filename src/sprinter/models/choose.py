"""Chooses the runner for a model, and says why.

The model's config and signature decide what is possible (layer types, recurrent state, the arguments that it accepts).
A model of a type that the tests do not cover is then tried once: a few tokens, compared with its own uncached forward
pass.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.models import kernels
from sprinter.models.capture.graphs import GraphUnits
from sprinter.models.capture.runner import CapturedRunner
from sprinter.models.checks import check_config, distance, rounding_bound
from sprinter.models.fused_trial import forget_trial, fused
from sprinter.models.interface import Runner, ServedModel
from sprinter.models.runners.crop import CropRunner
from sprinter.models.runners.forward import ModelRunner
from sprinter.models.runners.onednn import copied_weights, forget_copies
from sprinter.models.runners.rope import find_switch
from sprinter.models.runners.row import BOOLEAN, RowRunner, Windows

__all__ = [
    "capture_kind",
    "compile_model",
    "exactness",
    "holds_leaves",
    "keep_cache_in",
    "longest_text",
    "make_runner",
    "pads_rows",
    "reads_trees",
    "renew",
    "runner_kind",
    "tree_leaves",
]

_log = logging.getLogger("sprinter")

_TESTED = frozenset({"gpt2", "llama", "qwen2", "gpt_neox", "gemma2", "gemma3_text", "mistral"})
"""Model types for which the tests compare the row runner with the uncached forward pass; others are tried on use."""

_ONE_WINDOW = frozenset({"mistral", "mixtral", "ministral3", "phi3", "phimoe", "starcoder2"})
"""Model types with a sliding window in every layer, which only ``sliding_window`` shows; they accept its mask."""

_OWN_MASKS = {
    "gpt_neo": "its local layers build their own mask",
    "bloom": "it makes its position biases (ALiBi) from a mask of its own",
    "mpt": "it makes its position biases (ALiBi) from a mask of its own",
}
"""Model types that do not accept a mask, and the reason."""

_KNOWN = "compile=True has our kernels run its layers"

_ATTENTION = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class _RunnerChoice:
    """The runner for a model.

    Attributes:
        kind: "row" or "crop".
        reason: why, in words.
        windows: the row runner's masks.
        switch: maximum length of a text, beyond which its rotary embedding changes; None: it does not.
    """

    kind: str
    reason: str
    windows: Windows
    switch: int | None


_choices: WeakKeyDictionary[PreTrainedModel, _RunnerChoice] = WeakKeyDictionary()


def runner_kind(model: PreTrainedModel | ServedModel) -> tuple[str, str]:
    """The kind of runner for a model ("row", "crop" or "llamacpp") and the reason in words.

    "crop" holds one row, the others any number.

    Raises:
        UserError: no runner can serve the model; says why.
    """
    if isinstance(model, ServedModel):
        return model.runner, model.reason
    choice = _choose(model)
    if choice.switch is None:
        return choice.kind, choice.reason
    ends = f"its context ends at {choice.switch:,} tokens, where its rotary embedding changes"
    return choice.kind, f"{choice.reason}; {ends}"


def exactness(model: PreTrainedModel | ServedModel) -> str:
    """How far exact methods keep the target's law: "to the bit", or "up to rounding" where a pass over more tokens or
    rows rounds otherwise, so that a greedy text may differ from plain decoding's in a near tie.

    "to the bit": our kernels give a token the same law in every pass. Passes of transformers in float32 and float64 are
    called so too, and may differ by their last bits, which keys and values of fewer bits can round apart.
    """
    if isinstance(model, ServedModel):
        return model.exactness
    plain = model.dtype in (torch.float32, torch.float64) and not kernels.is_quantised(model)
    plain = plain and kernels.rows_dtype_of(model) is None
    exact = kernels.runs(model) or plain
    return "to the bit" if exact else "up to rounding"


def longest_text(model: PreTrainedModel | ServedModel) -> int | None:
    """Maximum text length at which the model's runner gives the right laws; None: only the context limits it.

    Raises:
        UserError: no runner can serve the model.
    """
    return None if isinstance(model, ServedModel) else _choose(model).switch


def pads_rows(model: PreTrainedModel | ServedModel) -> bool:
    """Whether a forward pass over rows of different lengths costs what the longest one does in each row."""
    return isinstance(model, PreTrainedModel) and not kernels.runs(model)


def reads_trees(model: PreTrainedModel | ServedModel) -> bool:
    """Whether the model's runner reads trees that branch."""
    return model.most_leaves(1) != 1 if isinstance(model, ServedModel) else _choose(model).kind == "row"


def tree_leaves(model: PreTrainedModel | ServedModel, rows: int) -> int | None:
    """Largest number of leaves of a tree in each of so many rows; None: any number. Here a chain has one."""
    return model.most_leaves(rows) if isinstance(model, ServedModel) else None


def holds_leaves(runner: Runner, leaves: int) -> bool:
    """Whether a runner takes trees of so many leaves in each row."""
    return runner.leaves is None or runner.leaves >= leaves


def capture_kind(model: PreTrainedModel | ServedModel) -> tuple[str, str]:
    """How this model's short forward passes are made fast, and the reason in words.

    "kernels" or "graphs"; "none": nothing does.

    Raises:
        UserError: no runner can serve the model.
    """
    if isinstance(model, ServedModel):
        return "none", f"{model.runner} runs it"
    choice = _choose(model)
    if choice.kind != "row":
        return "none", f"the crop runner serves it: {choice.reason}"
    if kernels.runs(model):
        return "kernels", "our kernels run its layers"
    quantised = getattr(model, "hf_quantizer", None) is not None or kernels.is_quantised(model)
    if quantised or any(map(_is_special, model.parameters())):
        return "none", "its weights are quantised"
    devices = {weights.device for weights in model.parameters()}
    if len(devices) > 1:
        return "none", "it lies on several devices"
    kind = devices.pop().type
    if kind == "cuda":
        return "graphs", "CUDA graphs"
    if kind != "cpu":
        return "none", f"there is no capture on {kind}"
    family = model.config.get_text_config(decoder=True).model_type
    if (why := kernels.why_none()) is not None:
        return "none", why
    return "none", _KNOWN if kernels.knows(family) else f"our kernels do not know {family}"


def compile_model(model: PreTrainedModel | ServedModel) -> None:
    """Do what ``compile=True`` asks for: on a CPU our kernels run the model's layers from then on; graphs are captured
    when they are first used.

    Raises:
        UserError: nothing makes its passes fast, and why; as ``compile_layers``.
    """
    kind, reason = capture_kind(model)
    why = reason if kind == "none" else None
    if why == _KNOWN:
        assert isinstance(model, PreTrainedModel)
        why = kernels.compile_layers(model)
    if why is not None:
        raise UserError(f"{_name(model)} cannot be compiled: {why}; use compile=False")


def keep_cache_in(model: PreTrainedModel | ServedModel, dtype: str | None, name: str) -> None:
    """Have runners of a model that was just loaded keep keys and values in this dtype; None: as is usual.

    Raises:
        UserError: they cannot.
    """
    if isinstance(model, ServedModel) or model.device.type == "cpu":
        kernels.keep_cache_in(model, dtype, name)
        return
    if dtype is not None and (model.device.type != "cuda" or runner_kind(model)[0] != "row"):
        why = f"is on {model.device}" if model.device.type != "cuda" else runner_kind(model)[1]
        raise UserError(f"cache_dtype={dtype} does not go with {name} ({why}): leave cache_dtype out")
    kernels.keep_rows_in(model, dtype, name)


def renew(model: PreTrainedModel | ServedModel) -> None:
    """Take a model as it is now, after a change: forget what was found out about it and captured of it, and have our
    kernels run the layers that they know.

    Raises:
        UserError: no runner can serve it any more.
    """
    if isinstance(model, ServedModel):
        return
    _choices.pop(model, None)
    forget_trial(model)
    forget_copies(model)
    kernels.renew(model)
    _choose(model)


def make_runner(
    model: PreTrainedModel | ServedModel,
    *,
    batch: int = 1,
    max_len: int,
    compile: bool | None = False,
    leaves: int = 1,
) -> Runner:
    """A runner for the model.

    Args:
        model: a causal language model.
        batch: number of rows; more than one needs the row runner.
        max_len: maximum number of tokens in a row.
        compile: None: short forward passes are captured as CUDA graphs on NVIDIA; True: and where one cannot be, that
            is an error; False: no capture. Whether our kernels run a model's layers is the model's matter.
        leaves: largest number of leaves of a tree in a row; llama.cpp's runner must know it before.

    Raises:
        UserError: the model cannot be served, or not as asked.
    """
    if isinstance(model, ServedModel):
        return model.make_runner(batch, max_len, leaves)
    choice = _choose(model)
    text = max_len - leaves + 1  # the slots of further leaves are no deeper
    if choice.switch is not None and text > choice.switch:
        raise UserError(
            f"{_name(model)} holds texts of up to {choice.switch} tokens, not {text}: its rotary embedding changes "
            f"there: use max_len={choice.switch} or less"
        )
    if choice.kind == "row":
        return _rows(model, batch, max_len, choice.windows, compile)
    if batch > 1:
        raise UserError(f"{_name(model)} decodes one row at a time ({choice.reason}): use batch=1")
    return CropRunner(model, max_len)


def _rows(
    model: PreTrainedModel, batch: int, max_len: int, windows: Windows, compile: bool | None
) -> RowRunner:
    kind, dtype = capture_kind(model)[0], kernels.rows_dtype_of(model)
    if kind == "graphs" and compile is not False:
        units = GraphUnits(model, windows, bool(compile), fused)
        return CapturedRunner(model, batch, max_len, windows, units, dtype)
    if kind == "kernels":
        made = RowRunner(model, batch, max_len, windows, flat=True)
        made.straight = kernels.passes_of(model)
        return made
    copies = copied_weights(model.train(False))
    made = RowRunner(model if copies is None else copies.model, batch, max_len, windows, dtype=dtype)
    made.copies = copies
    return made


def _is_special(weights: Tensor) -> bool:
    """Whether a parameter is more than a plain array of numbers, as quantised weights are."""
    return type(weights.data) is not Tensor or not weights.is_floating_point()


def _choose(model: PreTrainedModel) -> _RunnerChoice:
    if model not in _choices:
        _choices[model] = _decide(model)
    return _choices[model]


def _decide(model: PreTrainedModel) -> _RunnerChoice:
    config = model.config.get_text_config(decoder=True)
    check_config(model.config, _name(model), type(model))
    switch = find_switch(model)
    if why := _why_not_row(model, config):
        return _tried_crop(model, why, switch)
    windows = _windows(config)
    slides = any(window is not None for window in windows.values())
    reason = "attention over a sliding window" if slides else "attention over the whole past"
    if config.model_type not in _TESTED:
        if why := _why_wrong(lambda: RowRunner(model, 2, 16, windows), model):
            choice = _tried_crop(model, f"tried on a few tokens, the row runner {why}", switch)
            _log.warning(
                "%s runs one row at a time, uncaptured, which is slower: %s", _name(model), choice.reason
            )
            return choice
        reason = f"{reason}; tried on a few tokens"
    return _RunnerChoice("row", reason, windows, switch)


def _tried_crop(model: PreTrainedModel, reason: str, switch: int | None) -> _RunnerChoice:
    if why := _why_wrong(lambda: CropRunner(model, 16), model):
        raise UserError(f"{_name(model)} cannot be served: {reason}; the crop runner {why}: choose another")
    return _RunnerChoice("crop", reason, {}, switch)


def _why_not_row(model: PreTrainedModel, config: Any) -> str | None:
    """Why this model does not accept positions and masks from the row runner; None: it does."""
    kind, attention = config.model_type, getattr(model.config, "_attn_implementation", None)
    if kind in _OWN_MASKS:
        return _OWN_MASKS[kind]
    if getattr(config, "alibi", False):
        return "it makes its position biases (ALiBi) from a mask of its own"
    if not {"position_ids", "attention_mask"} <= inspect.signature(model.forward).parameters.keys():
        return "it takes no position_ids"
    if attention not in (*BOOLEAN, "eager"):
        return f"its attention implementation, {attention}, takes no mask"
    types = set(getattr(config, "layer_types", None) or ())
    if not types <= _ATTENTION or getattr(config, "attention_chunk_size", None):
        return "it attends in chunks"
    if not types and getattr(config, "sliding_window", None) and kind not in _ONE_WINDOW:
        return "it does not say which of its layers slide"
    return None


def _windows(config: Any) -> Windows:
    types = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" not in types:
        return {"": None if types else getattr(config, "sliding_window", None)}
    return {kind: config.sliding_window if kind == "sliding_attention" else None for kind in sorted(types)}


def _why_wrong(make: Any, model: PreTrainedModel) -> str | None:
    """Try a runner: feed a few tokens, rewind, feed more, compare with the uncached forward pass.

    Args:
        make: makes the runner.
        model: the model that it runs.

    Returns:
        What went wrong; None if the outputs agree.
    """
    try:
        runner: ModelRunner = make()
        vocab = runner.vocab_size
        text = [(7 * i + 3) % vocab for i in range(8)]
        wrong = [(5 * i + 1) % vocab for i in range(3)]
        first = [5] if runner.batch == 1 else [5, 2]
        feed = torch.tensor([text[:5]] * runner.batch, device=runner.device)
        runner.extend(feed, first)
        runner.extend(torch.tensor([wrong] * runner.batch, device=runner.device))
        runner.rewind(first)
        rest = torch.tensor([(text[at:] + [0] * 8)[:6] for at in first], device=runner.device)
        last = runner.extend(rest, [len(text) - at for at in first]).logits
        assert last is not None
        with torch.inference_mode():
            ids = torch.tensor([text], device=runner.device)
            expected = model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1]
        off = max(distance(last[row, len(text) - at - 1], expected) for row, at in enumerate(first))
    except Exception as error:  # a model may raise anything when given a cache that it does not know
        return f"fails ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
    return (
        None
        if off <= rounding_bound(expected)
        else f"differs from the uncached pass (by {off:.2g} of the logits' spread)"
    )


def _name(model: PreTrainedModel | ServedModel) -> str:
    return model.name if isinstance(model, ServedModel) else type(model).__name__
