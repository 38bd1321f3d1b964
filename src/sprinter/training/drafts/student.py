"""The student: a small Llama model with the target's tokenizer, which starts from the target's weights.

Its embeddings are the target's, projected to a smaller width by a truncated singular value decomposition where one is
asked for; at the target's own width it also starts from some of its layers: evenly spaced from the first, or those that
change the states most (block influence: Men et al. 2024, arXiv 2403.03853), see ``distill.fresh_student``.

A start of another vocabulary is given the target's: a token that both know keeps its embedding, any other has the mean
of those of the tokens that its bytes are read as (``models.common_tokens``); one that they cannot spell, or padding,
has the mean of all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sprinter.errors import UserError
from sprinter.files import writing
from sprinter.models.common_tokens import CommonTokens
from sprinter.models.reduced_vocab import CutLlamaConfig, CutLlamaForCausalLM, check_map
from sprinter.training.drafts.settings import StudentSettings
from sprinter.training.shards import save_bytes

__all__ = [
    "FAMILIES", "check_shape", "influential", "layer_config", "make_student", "save_student", "size_of", "spaced",
    "takes_layers", "transplanted",
]  # fmt: skip

FAMILIES = ("llama", "mistral", "qwen2")
"""Model types whose layers a student can start from: a Llama layer holds all of their weights."""
_LONGEST = 8192


def make_student(
    target: PreTrainedModel,
    settings: StudentSettings = StudentSettings(),
    kept: Tensor | None = None,
    taken: Sequence[int] | None = None,
) -> LlamaForCausalLM:
    """A student in float32 on the target's device.

    Args:
        target: model in a floating-point dtype; its weights are copied.
        settings: the student's shape.
        kept: ``[vocabulary]`` token ids of a cut vocabulary, ascending; required if ``settings.vocabulary`` is set.
        taken: the target's layers that it starts from, one for each of its own; None: evenly spaced from the first.

    Raises:
        UserError: a width that the target's embeddings do not reach, a map of another vocabulary.
    """
    table = _embedding_table(target)
    config = _student_config(target, settings, table)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        student = (
            CutLlamaForCausalLM(config) if isinstance(config, CutLlamaConfig) else LlamaForCausalLM(config)
        )
        student.to(torch.float32)  # type: ignore[arg-type]
    embedding = student.model.embed_tokens
    with torch.no_grad():
        rows, turn = _projected(table, config.hidden_size)
        embedding.weight.copy_(rows)
        if turn is None:
            _copy_layers(student, target, taken)
        if kept is not None:
            check_map(kept, config.vocab_size)
            student.lm_head.ids.copy_(kept)
            student.lm_head.words.weight.copy_(_outputs(target, turn)[kept])
        elif not config.tie_word_embeddings:
            student.lm_head.weight.copy_(_outputs(target, turn))
    embedding.padding_idx = None
    student.to(target.device)  # type: ignore[arg-type]
    student.train()
    return student


def save_student(
    student: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path, eos_ids: tuple[int, ...]
) -> None:
    """Write a transformers folder with weights in bfloat16; ``config.json`` comes last, so half a folder never loads.

    Args:
        student: the model.
        tokenizer: the target's.
        out: the folder.
        eos_ids: tokens that end a text.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    with writing(out, "fix that and run the command again"):
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(out)
    tied = student.config.tie_word_embeddings
    state = {
        name: value.detach().bfloat16().contiguous() if value.is_floating_point() else value
        for name, value in student.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_bytes(out / "model.safetensors", to_bytes(state, metadata={"format": "pt"}))
    generation = GenerationConfig(eos_token_id=list(eos_ids))  # type: ignore[no-untyped-call]
    save_bytes(out / "generation_config.json", generation.to_json_string())
    config: dict[str, Any] = student.config.to_dict()
    config |= {"architectures": [type(student).__name__], "eos_token_id": list(eos_ids), "dtype": "bfloat16"}
    save_bytes(out / "config.json", json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")


def size_of(student: LlamaForCausalLM) -> int:
    """Parameters that a step multiplies with: all but an input embedding of its own, which is a lookup."""
    tied = student.config.tie_word_embeddings
    lookup = 0 if tied else student.model.embed_tokens.weight.numel()
    return sum(value.numel() for value in student.parameters()) - int(lookup)


def _embedding_table(target: PreTrainedModel) -> Tensor:
    """The target's input embeddings ``[V, d]`` in float32."""
    weight = getattr(target.get_input_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise UserError(
            "a student takes the target's embeddings, and these are quantised: load it in float32"
        )
    return weight.detach().float().cpu()


def _outputs(target: PreTrainedModel, turn: Tensor | None) -> Tensor:
    """The target's output layer ``[V, width]``, in the student's basis."""
    weight: Tensor = target.get_output_embeddings().weight.detach().float().cpu()  # type: ignore[no-untyped-call]
    return weight if turn is None else weight @ turn


def _projected(table: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """The table in ``width`` dimensions, and the projection ``[d, width]``: the principal directions of its rows."""
    if width == table.shape[1]:
        return table, None
    _, turn = torch.linalg.eigh(table.T.double() @ table.double())
    turn = turn[:, -width:].flip(-1).float()
    largest = turn.abs().argmax(0, keepdim=True)
    turn *= turn.gather(0, largest).sign()  # eigenvectors have no sign of their own
    return table @ turn, turn


def _student_config(target: PreTrainedModel, settings: StudentSettings, table: Tensor) -> LlamaConfig:
    """The shape of a student on a target with these embeddings ``[V, d]``.

    Raises:
        UserError: a width or number of heads that does not fit.
    """
    own: Any = target.config.get_text_config(decoder=True)
    vocab, hidden = table.shape
    width = settings.width or hidden
    if width > hidden:
        raise UserError(
            f"width={width} exceeds {hidden}, that of the embeddings that it takes: give {hidden} or less"
        )
    heads = settings.heads or max(1, width // 64)
    if width % (2 * heads):
        raise UserError(
            f"width={width} cannot be split into {heads} heads of an even size: give a multiple of {2 * heads}"
        )
    shape: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": settings.feed_forward or -(-8 * width // 96) * 32,
    }
    rope = dict(getattr(own, "rope_parameters", None) or {})
    if takes_layers(target, settings):
        shape = {
            "num_attention_heads": own.num_attention_heads,
            "num_key_value_heads": own.num_key_value_heads,
            "head_dim": getattr(own, "head_dim", None) or hidden // own.num_attention_heads,
            "intermediate_size": own.intermediate_size,
            "attention_bias": any(name.endswith("q_proj.bias") for name, _ in target.named_parameters()),
        }
    else:
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    context = min(settings.context or _LONGEST, getattr(own, "max_position_embeddings", None) or _LONGEST)
    common: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": settings.layers,
        "max_position_embeddings": context, "rms_norm_eps": getattr(own, "rms_norm_eps", 1e-5),
        "tie_word_embeddings": settings.vocabulary is None and bool(own.tie_word_embeddings),
        "rope_parameters": rope or None,
        "bos_token_id": own.bos_token_id, "eos_token_id": own.eos_token_id, "pad_token_id": None, **shape,
    }  # fmt: skip
    if settings.vocabulary is None:
        return LlamaConfig(**common)
    return CutLlamaConfig(**common, draft_vocabulary=settings.vocabulary)


def check_shape(target: PreTrainedModel, settings: StudentSettings) -> None:
    """Refuse a student that ``make_student`` cannot make of this target or start.

    Raises:
        UserError: a width or number of heads that does not fit, embeddings that are quantised.
    """
    _student_config(target, settings, _embedding_table(target))


def layer_config(target: PreTrainedModel) -> LlamaConfig:
    """The shape of a single layer beside a target, for heads that draft."""
    return _student_config(target, StudentSettings(layers=1), _embedding_table(target))


def _is_llama_like(target: PreTrainedModel) -> bool:
    """Whether a Llama layer can hold one of the target's: same names, pre-normalised, SiLU."""
    own: Any = target.config.get_text_config(decoder=True)
    return own.model_type in FAMILIES and getattr(own, "hidden_act", "silu") == "silu"


def takes_layers(target: PreTrainedModel, settings: StudentSettings) -> bool:
    """Whether a student of the target's width starts from some of its layers: they have the same shapes."""
    words: Any = target.get_input_embeddings()
    hidden = words.weight.shape[1]
    same = (settings.width or hidden, settings.heads, settings.feed_forward) == (hidden, None, None)
    return same and _is_llama_like(target)


def spaced(target: PreTrainedModel, count: int) -> list[int]:
    """Numbers of ``count`` layers of the target, evenly spaced from the first."""
    most = int(target.config.get_text_config(decoder=True).num_hidden_layers)
    return [i * most // count for i in range(count)]


@torch.no_grad()
def influential(target: PreTrainedModel, count: int, ids: Tensor) -> list[int]:
    """Numbers of the ``count`` layers of the target that turn the states most, on a batch ``[rows, width]`` of texts.

    The influence of a layer is 1 − the mean cosine between the states before and after it; that of the last is taken
    through the last norm.
    """
    states = target.base_model(input_ids=ids.to(target.device), output_hidden_states=True).hidden_states
    turns = [1 - torch.cosine_similarity(a.float(), b.float(), -1).mean() for a, b in pairwise(states)]
    return sorted(torch.stack(turns).topk(min(count, len(turns))).indices.tolist())


@torch.no_grad()
def transplanted(model: PreTrainedModel, tokens: CommonTokens, target: PreTrainedConfig) -> PreTrainedModel:
    """The model with embeddings of a target's vocabulary, without a padding token; changed in place.

    Args:
        model: its input embeddings are its output layer too, or it has one of its own.
        tokens: of the target's tokenizer and its own. target: config of the target.
    """
    ours, own = (one.get_text_config(decoder=True) for one in (model.config, target))
    vocab = int(own.vocab_size)
    read = [[piece for piece in tokens.spelled(token) if piece is not None] for token in range(vocab)]
    unread = torch.tensor([not one for one in read])
    pieces = torch.tensor([piece for one in read for piece in one])
    starts = torch.tensor([0, *accumulate(map(len, read))][:-1])

    def moved(there: Tensor) -> nn.Parameter:
        table = there.cpu()
        rows = nn.functional.embedding_bag(pieces, table, starts, mode="mean")
        rows[unread] = table.mean(0)
        return nn.Parameter(rows.to(there))

    words: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = outputs.weight is words.weight
    words.weight = moved(words.weight)
    outputs.weight = words.weight if tied else moved(outputs.weight)
    ours.vocab_size, ours.bos_token_id, ours.eos_token_id = vocab, own.bos_token_id, own.eos_token_id
    ours.pad_token_id = words.padding_idx = None  # an id of the vocabulary that is gone
    return model


def _copy_layers(student: LlamaForCausalLM, target: PreTrainedModel, taken: Sequence[int] | None) -> None:
    """Start from layers of the target, and its last norm, where the shapes agree."""
    if not _is_llama_like(target):
        return
    there = dict(target.named_parameters())
    taken = spaced(target, student.config.num_hidden_layers) if taken is None else taken
    for name, own in student.named_parameters():
        source = name
        if ".layers." in name:
            before, _, rest = name.partition(".layers.")
            number, _, rest = rest.partition(".")
            source = f"{before}.layers.{taken[int(number)]}.{rest}"
        if name.endswith(("embed_tokens.weight", "words.weight")):
            continue
        if source in there and there[source].shape == own.shape:
            own.copy_(there[source].detach().float())
        elif name.endswith(".bias"):
            own.zero_()
