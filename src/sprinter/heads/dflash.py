"""DFlash (arXiv 2602.06036): a small block-diffusion model that drafts all tokens of a block in one pass.

The block is the text's last token and a mask token for each token to come, all of which see one another. Every layer
also attends to the tokens before: their keys and values are projections of the target's states of several layers, which
one linear layer and a norm fuse. Embedding and output layer are the target's. The output at a mask gives the law of the
token in its place.

Files are those of speculators' type ``dflash`` with the whole vocabulary: a config of Qwen3 in ``config.json``, and
``fc``, ``hidden_norm``, ``layers.N`` and ``norm`` in ``model.safetensors``. Those of the authors, with
``dflash_config``, are read too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from sprinter.errors import UserError
from sprinter.heads.attention import HeadAttention, KeptKeys, attend, rope_of
from sprinter.heads.drafting import OutputLayer, TextOfHeads, linear_weights
from sprinter.heads.entries import PICKLE, Attended, NormedLayer, OnePassText, StateHeads
from sprinter.heads.files import WEIGHTS, HeadFiles, fill, fitting
from sprinter.heads.reading import HeadFields
from sprinter.heads.speculators import speculators_fields

__all__ = ["DFlashHeads", "is_dflash", "load_dflash"]

_MOST = 65
"""Tokens of a block."""
_SIGHT = {"layer_types", "sliding_window", "use_sliding_window", "is_causal"}
"""Fields that say what a layer sees."""
_OTHERS = {
    "input_embedding_scale": (None, 1.0), "output_multiplier": (None, 1.0), "final_logit_softcapping": (None, 0),
    "projector_type": (None, "dflash"), "sample_from_anchor": (None, False), "shift_label": (None, False),
}  # fmt: skip
"""Fields of variants, and the values with which they change nothing."""


class _NormedAttention(HeadAttention):
    """Qwen3's projections: queries and keys of each head are normed before they are turned."""

    def __init__(self, config: LlamaConfig, inputs: int) -> None:
        super().__init__(config, inputs)
        self.q_norm, self.k_norm = (LlamaRMSNorm(self.size, config.rms_norm_eps) for _ in range(2))

    def query(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return self.turned(self._normed(self.q_norm, self.q_proj(x)), rope)

    def repeated(self, keys: Tensor, values: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().repeated(self._normed(self.k_norm, keys), values, rope)

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x.reshape(*x.shape[:-1], -1, self.size)).reshape(x.shape)  # type: ignore[no-any-return]


class _Layer(NormedLayer):
    """A decoder layer. ``causal``: no token sees those behind it. ``window``: how far they see; None: to the start."""

    def __init__(self, config: LlamaConfig, sliding: bool) -> None:
        super().__init__(config, _NormedAttention)
        self.sliding = sliding
        causal: bool | None = getattr(config, "is_causal", None)
        self.causal = sliding if causal is None else causal
        windowed = sliding and getattr(config, "use_sliding_window", False)
        self.window: int | None = config.sliding_window if windowed else None

    def sees(self, positions: Tensor) -> Tensor | None:
        """What a block at the last of all positions sees of them ``[n, k]``; None: all."""
        if not self.causal and self.window is None:
            return None
        gap = positions[:, None] - torch.arange(int(positions[-1]) + 1, device=positions.device)
        sees = gap >= 0 if self.causal else torch.ones_like(gap, dtype=torch.bool)
        return sees if self.window is None else sees & (gap.abs() < self.window)


class DFlashHeads(StateHeads):
    """A block-diffusion model that drafts ``count`` tokens in one pass.

    Args:
        config: of its layers, in Llama's fields; ``hidden_size`` d and ``vocab_size`` are the target's.
        ids: decoder layers of the target that are fused, from 0. count: tokens of a pass, the block without its first.
        mask: the token that stands for those to come.
        more: as in ``TokenHeads``.
    """

    kind = "dflash"

    def __init__(self, config: LlamaConfig, ids: Sequence[int], count: int, mask: int, **more: Any) -> None:
        super().__init__(config.hidden_size, config.vocab_size, **more)
        size, eps, number = config.hidden_size, config.rms_norm_eps, config.num_hidden_layers
        self.layer_config, self.ids, self.layers = config, tuple(ids), tuple(ids)
        self.count, self.mask = count, mask
        self.architectures: list[str] = []
        self.fc = nn.Linear(len(self.ids) * size, size, bias=False)
        self.hidden_norm, self.norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        types = getattr(config, "layer_types", None) or ["full_attention"] * number
        self.blocks = nn.ModuleList(_Layer(config, one == "sliding_attention") for one in types)
        self.rotary = LlamaRotaryEmbedding(config)

    def join(self, target: nn.Module) -> None:
        """Take the target's embedding and output layer, and move beside it."""
        config: Any = target.config
        count = int(config.get_text_config(decoder=True).num_hidden_layers)
        if max(self.ids) >= count:
            raise UserError(
                f"this DFlash head reads layer {max(self.ids)} of its target, which has {count} layers"
            )
        # In transformers the last of a model's hidden states is that after its final norm.
        self.layers = tuple(-1 if one == count - 1 else one for one in self.ids)
        self.architectures = [type(target).__name__]
        self.move_beside(target)
        # Its frequencies stay in float32.
        self.rotary = LlamaRotaryEmbedding(self.layer_config).to(self.device)
        self._embeds = [target.get_input_embeddings()]  # type: ignore[operator]
        self._output = [OutputLayer(target, self.vocab_size)]

    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """Features ``[..., d]``, normed."""
        joined: Tensor = self.hidden_norm(self.fc(torch.cat(list(states), -1).to(self.dtype)))
        return joined

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """By layer, keys and values ``[..., heads, n, size]`` of tokens that the target has read, from their features
        ``[..., n, d]``."""
        rope = rope_of(self.rotary, features, positions)
        attentions: list[Any] = [block.self_attn for block in self.blocks]
        return [one.repeated(one.k_proj(features), one.v_proj(features), rope) for one in attentions]

    def outputs(self, ids: Tensor, positions: Tensor, attended: Attended) -> Tensor:
        """Outputs ``[..., n, d]`` of the tokens ``[..., n]`` of blocks."""
        x = self.embedded(ids)
        rope = rope_of(self.rotary, x, positions)
        for number, block in enumerate(self.blocks):
            assert isinstance(block, _Layer)
            split = block.self_attn.split(block.input_layernorm(x), rope)
            x = block.finish(x, attended(number, *split))
        return x

    def whole_logits(self, out: Tensor) -> Tensor:
        """Logits ``[..., V]``."""
        return self._output[0](self.norm(out))

    @property
    def flops(self) -> float:
        """Of one token of a block, the target's output layer included, without attention itself; tokens before it
        need less."""
        return 2.0 * (linear_weights(self) + self.hidden_size * self.drafted)

    def begin(self) -> TextOfHeads:
        """The head in a new text."""
        return _DFlashText(self)

    def file_config(self) -> dict[str, Any]:
        """Fields as speculators names them."""
        sliding = any(one.sliding for one in self.blocks)
        return {
            **speculators_fields(
                self.kind, self.layer_config, "qwen3", self.count, self.target_id, self.architectures
            ),
            "draft_vocab_size": self.vocab_size,
            "block_size": self.count + 1,
            "mask_token_id": self.mask,
            "aux_hidden_state_layer_ids": [
                one + 1 for one in self.ids
            ],  # the first hidden states are the embeddings
            # It is said of sliding layers; vLLM would make the others causal too.
            "sliding_window_non_causal": not sliding
            or getattr(self.layer_config, "is_causal", None) is False,
            "sample_from_anchor": False,
        }

    def file_weights(self) -> dict[str, Tensor]:
        """Weights by the names that the authors' files have."""
        return {name.replace("blocks.", "layers."): value for name, value in self.state_dict().items()}


class _DFlashText(OnePassText):
    def __init__(self, heads: DFlashHeads) -> None:
        super().__init__(heads)
        self._own, self._kept = heads, [KeptKeys() for _ in heads.blocks]

    def draft(self, ids: list[int], first: int, features: Tensor) -> Tensor:
        heads, end = self._own, len(ids) - 1
        places = torch.arange(first, end + 1 + heads.count, device=heads.device)
        context, positions = heads.context(features, places[: end - first]), places[end - first :]
        sees = [block.sees(positions) for block in heads.blocks]  # type: ignore[operator]

        def attended(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = (torch.cat(both, -2) for both in zip(context[number], (key, value), strict=True))
            return attend(query, *self._kept[number].put(first, keys, values), sees[number])

        block = torch.tensor([ids[-1], *[heads.mask] * heads.count], device=heads.device)
        self.tokens += len(places)
        return heads.outputs(block, positions, attended)[1:]


def is_dflash(files: HeadFiles) -> bool:
    """Whether a folder is of such a head, in the format of its authors or of speculators."""
    return "dflash_config" in files.config or files.config.get("speculators_model_type") == "dflash"


def load_dflash(files: HeadFiles) -> DFlashHeads:
    """Read a head from a folder.

    Raises:
        UserError: a variant that is not supported, or weights that are missing, damaged, or do not fit the config.
    """
    top, stored = HeadFields(files), files.weights((WEIGHTS,), (PICKLE,))
    if "dflash_config" in files.config:
        inner, layer, name = HeadFields(files, "dflash_config"), top, top.text("base_model_name_or_path")
        offset = 0
    else:
        inner, layer, name = top, HeadFields(files, "transformer_layer_config"), top.verifier()
        offset = 1  # it counts hidden states, of which the first are the embeddings
    known = LlamaConfig().to_dict().keys() | {"rope_theta", "rope_scaling"} | _SIGHT
    copies = (
        "embed_tokens.",
        "lm_head.",
        "verifier_",
        "rotary",
        "d2t",
        "t2d",
    )  # the target's; maps of all tokens
    weights = {one: value for one, value in stored.items() if not one.startswith(copies)}
    with fitting("DFlash head", files):
        _check_variant(files, {**top.fields, **inner.fields}, layer)
        config = layer.layer(weights, "layers.0.mlp", known)
        if inner.switch("sliding_window_non_causal"):
            config.is_causal = False
        ids = inner.numbers("aux_hidden_state_layer_ids" if offset else "target_layer_ids") or [-1]
        if min(ids) < offset:
            raise KeyError("target_layer_ids" if offset == 0 else "aux_hidden_state_layer_ids")
        if weights["fc.weight"].shape[1:] != (len(ids) * config.hidden_size,):
            raise KeyError("fc.weight")  # before memory is taken
        if (block := _of(inner, top, "block_size").whole("block_size", most=_MOST)) < 2:
            raise KeyError("block_size=1")
        heads = DFlashHeads(
            config, [one - offset for one in ids], block - 1,
            _of(inner, top, "mask_token_id").token("mask_token_id", config.vocab_size), **top.of_target(name),
        )  # fmt: skip
        own = {one.replace("layers.", "blocks.", 1): value for one, value in weights.items()}
        fill(heads, own, files.directory)
    return heads


def _of(inner: HeadFields, top: HeadFields, name: str) -> HeadFields:
    """The fields that hold a name: those inside come first."""
    return inner if name in inner.fields else top


def _check_variant(files: HeadFiles, fields: Mapping[str, Any], layer: HeadFields) -> None:
    """Refuse what would be read wrongly.

    Raises:
        UserError: a variant that is not supported, or fields of what a layer sees that are damaged.
    """
    types = layer.fields.get("layer_types")
    if layer.switch("use_sliding_window"):
        layer.whole("sliding_window")
        types = types or ["unknown"]
    if layer.fields.get("is_causal") is not None:
        layer.switch("is_causal")
    found = [f"{name}={fields[name]!r}" for name, plain in _OTHERS.items() if fields.get(name) not in plain]
    found += [
        f"a layer of type '{one}'"
        for one in types or ()
        if one not in ("full_attention", "sliding_attention")
    ]
    found += [
        one
        for one in fields.get("architectures") or ()
        if one not in ("DFlashDraftModel", "DFlashSpeculator")
    ]
    few, whole = fields.get("draft_vocab_size"), layer.fields.get("vocab_size")
    if few not in (None, whole):
        found.append(f"draft_vocab_size={few}")
    if found:
        raise UserError(
            f"the DFlash head in '{files.directory}' has {found[0]}, which is not supported: give one that drafts all "
            "tokens of its target, with the target's own embedding and output layer"
        )
