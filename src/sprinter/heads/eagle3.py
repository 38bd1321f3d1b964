"""EAGLE-3's head (Li et al. 2025, arXiv 2503.01840): decoder layers over the target's features, then over its own.

Its entries (``heads.entries``) join embeddings with three of the target's layers, fused by a linear layer, and its laws
are on a reduced vocabulary.

P-EAGLE (arXiv 2602.01469) drafts several tokens in one pass, by up to four layers: behind the text stand entries of a
mask token and of learned states, one for each further token, and no law sees a drafted token.

Files are those of speculators: ``config.json`` with ``speculators_model_type: eagle3`` or ``peagle``, and
``model.safetensors``. The embedding is the target's where the file has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sprinter.errors import UserError
from sprinter.heads.attention import KeptKeys
from sprinter.heads.drafting import TextOfHeads
from sprinter.heads.entries import PICKLE, EntryHeads, EntryLayer, OnePassText, check_layer, kept_attention
from sprinter.heads.files import WEIGHTS, HeadFiles, fitting
from sprinter.heads.reading import HeadFields
from sprinter.heads.speculators import speculators_fields

__all__ = ["Eagle3Heads", "ParallelHeads", "aux_layers", "load_eagle3"]

_FEW = 8
_MOST = 64
"""Tokens of a pass."""
_DEEPEST = 16
"""Layers."""
_VARIANTS = "norm_before_fc", "fc_norm", "norm_output"


def aux_layers(count: int) -> tuple[int, ...]:
    """Indices of ``hidden_states`` of a target of ``count`` layers that are fused: 2, L/2 and L − 3 (section 3.1); of a
    shallow target the first, middle and last before the end."""
    return (2, count // 2, count - 3) if count >= _FEW else (1, max(1, count // 2), max(1, count - 1))


class _Layer3(EntryLayer):
    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Heads(EntryHeads):
    """EAGLE-3's layer, its fusion of features, and its output layer; further layers are Llama's.

    Args:
        config: of the layers; ``hidden_size`` d and ``vocab_size`` are the target's.
        aux: indices of the target's ``hidden_states`` that are fused, from 1: the output of decoder layer 0. None:
            those of ``aux_layers``.
        draft_vocab: number of tokens that it can draft.
        norm_before_residual: whether the residual stream begins with the normalised feature.
        fusion_bias: whether the fusing layer has a bias.
        more: as in ``TokenHeads``.

    Attributes:
        d2t: ``[draft_vocab]``: the id of draft token i is i + d2t[i]. t2d: ``[vocab]`` bool: which ids it can draft.
        architectures: class of the target that it was joined with.
    """

    kind = "eagle3"
    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        config: LlamaConfig,
        aux: Sequence[int] | None,
        draft_vocab: int,
        norm_before_residual: bool = False,
        fusion_bias: bool = False,
        **more: Any,
    ) -> None:
        layer = _Layer3(config, norm_before_residual)
        super().__init__(config, layer, 3 * config.hidden_size, fusion_bias, **more)
        self._fuse(aux or ())
        self.architectures: list[str] = []
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < draft_vocab)

    def _fuse(self, aux: Sequence[int]) -> None:
        if aux and (len(aux) != 3 or min(aux) < 1):
            raise UserError(
                f"features {list(aux)} of an EAGLE-3 head: give three layers of the target, from 1"
            )
        self.aux = tuple(aux)
        self.layers = tuple(one - 1 for one in aux)

    @property
    def kept(self) -> Tensor:
        """Token ids ``[draft_vocab]`` that it can draft."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def keep(self, ids: Tensor) -> None:
        """Set the reduced vocabulary: ``ids [draft_vocab]``, ascending."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.fill_(False)
        self.t2d[ids] = True

    def join(self, target: nn.Module) -> None:
        """Take the target's embedding, and move beside it."""
        config: Any = target.config
        count = int(config.get_text_config(decoder=True).num_hidden_layers)
        self._fuse(self.aux or aux_layers(count))
        if max(self.layers) >= count:
            raise UserError(
                f"this EAGLE-3 head reads layer {max(self.layers)} of its target, which has {count} layers"
            )
        self.architectures = [type(target).__name__]
        super().join(target)

    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """The target's features ``[..., d]``, given states ``[..., d]`` of each of ``layers``."""
        joined: Tensor = self.fc(torch.cat(list(states), -1).to(self.dtype))
        return joined

    def inputs(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and the normalised embeddings beside the normalised features."""
        block = self.blocks[0]
        assert isinstance(block, _Layer3)
        hidden = block.hidden_norm(features)
        residual = hidden if block.norm_before_residual else features
        return residual, torch.cat([block.input_layernorm(embeds), hidden], -1)

    def draft_logits(self, out: Tensor) -> Tensor:
        """Logits ``[..., draft_vocab]`` of the tokens that it can draft."""
        logits: Tensor = self.lm_head(self.norm(out))
        return logits

    def whole_logits(self, out: Tensor) -> Tensor:
        """Logits ``[..., V]``; −inf for tokens that it cannot draft."""
        some = self.draft_logits(out)
        whole = some.new_full((*some.shape[:-1], self.vocab_size), -torch.inf)
        whole[..., self.kept] = some
        return whole

    def file_config(self) -> dict[str, Any]:
        """Fields as speculators names them."""
        return {
            **speculators_fields(
                self.kind, self.layer_config, "llama", self._tokens, self.target_id, self.architectures
            ),
            "draft_vocab_size": len(self.d2t),
            "eagle_aux_hidden_state_layer_ids": list(self.aux),
            "norm_before_residual": self.blocks[0].norm_before_residual,
            **dict.fromkeys(_VARIANTS, False),
            "embed_requires_grad": False,
        }

    @property
    def _tokens(self) -> int:
        """Number of tokens to draft at once."""
        return max(3, len(self.accuracies))

    def file_weights(self) -> dict[str, Tensor]:
        """As in ``EntryHeads``, without the maps of a whole vocabulary, as speculators does."""
        weights = super().file_weights()
        if len(self.d2t) == self.vocab_size:
            del weights["d2t"], weights["t2d"]
        return weights


class ParallelHeads(Eagle3Heads):
    """EAGLE-3's layers that draft ``count`` tokens in one pass.

    Args:
        count: tokens of a pass. mask: the token that stands for those to come.
        others: as in ``Eagle3Heads``.

    Attributes:
        mask_hidden: ``[1, 1, 3d]``, what stands for the target's states of a token that is not known.
    """

    kind = "peagle"

    def __init__(
        self,
        config: LlamaConfig,
        aux: Sequence[int] | None,
        draft_vocab: int,
        count: int,
        mask: int,
        norm_before_residual: bool = False,
        fusion_bias: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(config, aux, draft_vocab, norm_before_residual, fusion_bias, **more)
        self.count, self.mask = count, mask
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, 3 * config.hidden_size))

    def masked(self) -> tuple[Tensor, Tensor]:
        """Embedding and feature ``[d]`` of an entry whose token is not known."""
        feature: Tensor = self.fc(self.mask_hidden[0, 0])
        return self.embedded(torch.tensor(self.mask, device=self.device)), feature

    def begin(self) -> TextOfHeads:
        """The head in a new text."""
        return _ParallelText(self)

    @property
    def _tokens(self) -> int:
        return self.count

    def file_config(self) -> dict[str, Any]:
        """As for EAGLE-3, and the mask."""
        return {**super().file_config(), "mask_token_id": self.mask}


class _ParallelText(OnePassText):
    def __init__(self, heads: ParallelHeads) -> None:
        super().__init__(heads)
        self._own, self._keys = heads, [KeptKeys() for _ in heads.blocks]

    def draft(self, ids: list[int], first: int, features: Tensor) -> Tensor:
        heads, masks = self._own, self._own.count - 1
        end = len(ids) - 1 + masks
        embeds = heads.embedded(torch.tensor(ids[first + 1 :], device=heads.device))
        embeds, features = (
            torch.cat([one, mask.expand(masks, -1)])
            for one, mask in zip((embeds, features), heads.masked(), strict=True)
        )
        positions = torch.arange(first, end, device=heads.device)
        sees = torch.arange(end, device=heads.device)[None] <= positions[:, None]
        self.tokens += end - first
        return heads.outputs(embeds, features, positions, kept_attention(self._keys, first, sees))[
            -heads.count :
        ]


def _tokens_of(files: HeadFiles) -> int:
    """Tokens of a pass of P-EAGLE.

    Raises:
        UserError: the file does not say.
    """
    methods = HeadFields(files, "speculators_config").fields.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    if type(count) is not int or not 1 <= count <= _MOST:
        raise UserError(
            f"speculators_config.proposal_methods in '{files.directory}/config.json' must give speculative_tokens in "
            f"[1, {_MOST}]: copy or make the heads again"
        )
    return count


def load_eagle3(files: HeadFiles) -> Eagle3Heads:
    """Read a head from a folder of speculators' format.

    Raises:
        UserError: a variant that is not supported, or weights that are missing, damaged, or do not fit the config.
    """
    fields, inner = HeadFields(files), HeadFields(files, "transformer_layer_config")
    own, target = (
        inner.fields.get("hidden_size", LlamaConfig().hidden_size),
        files.config.get("target_hidden_size"),
    )
    check_layer(
        "EAGLE-3", files, inner.fields, _DEEPEST, "as wide as its target",
        *((name, bool(files.config.get(name))) for name in _VARIANTS),
        (f"features of width {target} for a layer of width {own}", target not in (None, own)),
    )  # fmt: skip
    copies = ("verifier_", "rotary")  # of the target's
    stored = files.weights((WEIGHTS,), (PICKLE,))
    weights = {name: value for name, value in stored.items() if not name.startswith(copies)}
    few = fields.whole("draft_vocab_size")
    with fitting("EAGLE-3 head", files):
        listed = "d2t" if "d2t" in weights else "lm_head.weight"
        if weights[listed].shape[:1] != (few,):  # before memory is taken
            raise KeyError(listed)
        layer, aux = inner.layer(weights, "layers.0.mlp"), fields.numbers("eagle_aux_hidden_state_layer_ids")
        more = fields.switch("norm_before_residual"), "fc.bias" in weights
        about = fields.of_target(fields.verifier())
        if files.config["speculators_model_type"] == "peagle":
            mask = fields.token("mask_token_id", layer.vocab_size)
            heads: Eagle3Heads = ParallelHeads(layer, aux, few, _tokens_of(files), mask, *more, **about)
        else:
            heads = Eagle3Heads(layer, aux, few, *more, **about)
        if "d2t" not in weights and heads.vocab_size == len(heads.d2t):
            weights |= {"d2t": heads.d2t, "t2d": heads.t2d}  # the whole vocabulary
        weights["d2t"], weights["t2d"] = weights["d2t"].long(), weights["t2d"].bool()
        heads.fill(weights, files.directory)
    kept = heads.kept.sort().values
    inside = int(kept[0]) >= 0 and int(kept[-1]) < heads.vocab_size and bool((kept.diff() > 0).all())
    if not inside or not torch.equal(heads.t2d.nonzero()[:, 0], kept):
        raise UserError(
            f"the maps d2t and t2d in '{files.directory}' contradict each other, name a token twice or leave the "
            "vocabulary: copy the files again"
        )
    return heads
