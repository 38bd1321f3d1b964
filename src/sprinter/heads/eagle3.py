"""EAGLE-3's head (Li et al. 2025, arXiv 2503.01840): one decoder layer over the target's features, then over its own.

Entry i of its sequence joins the embedding of token i + 1 with a feature of token i: the target's, three of its layers
fused by a linear layer, where the target has read token i, and beyond that the head's own output one step earlier. The
output gives the law of token i + 2, on a reduced vocabulary.

Files are those of speculators: ``config.json`` with ``speculators_model_type: eagle3``, and ``model.safetensors``.
The embedding is the target's where the file has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from sprinter.errors import UserError
from sprinter.heads.attention import HeadAttention, known_prefix, seen_by_nodes
from sprinter.heads.drafting import HeadFiles, TextOfHeads, TokenHeads, dtype_beside, write_files
from sprinter.heads.reading import HeadFields, fill, fitting

__all__ = ["Eagle3Heads", "aux_layers", "load_eagle3", "save_eagle3"]

WEIGHTS = "model.safetensors"
_PICKLE = "pytorch_model.bin"
_VERSION = "0.3.0"
"""The version of speculators whose format this is."""
_FEW = 8


def aux_layers(count: int) -> tuple[int, ...]:
    """Indices of ``hidden_states`` of a target of ``count`` layers that are fused: 2, L/2 and L − 3 (section 3.1); of a
    shallow target the first, middle and last before the end."""
    return (2, count // 2, count - 3) if count >= _FEW else (1, max(1, count // 2), max(1, count - 1))


class _EagleLayer(nn.Module):
    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.self_attn = HeadAttention(config, 2 * size)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]


class Eagle3Heads(TokenHeads):
    """EAGLE-3's layer, its fusion of features, and its output layer.

    Args:
        config: of the layer; ``hidden_size`` d and ``vocab_size`` are the target's.
        aux: indices of the target's ``hidden_states`` that are fused, from 1: the output of decoder layer 0. None:
            those of ``aux_layers``.
        draft_vocab: number of tokens that it can draft.
        norm_before_residual: whether the residual stream begins with the normalised feature.
        fusion_bias: whether the fusing layer has a bias.
        more: as in ``TokenHeads``.

    Attributes:
        d2t: ``[draft_vocab]``: the id of draft token i is i + d2t[i]. t2d: ``[vocab]`` bool: which ids it can draft.
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
        super().__init__(config.hidden_size, config.vocab_size, **more)
        self.layer_config = config
        self._fuse(aux or ())
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=fusion_bias)
        self.block = _EagleLayer(config, norm_before_residual)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < draft_vocab)
        self.embed: nn.Embedding | None = None  # its own; None: the target's
        self._embeds: list[nn.Module] = []

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
        """Take the target's embedding, and move to its device; the dtype is that of ``dtype_beside``."""
        config: Any = target.config
        count = int(config.get_text_config(decoder=True).num_hidden_layers)
        self._fuse(self.aux or aux_layers(count))
        if max(self.layers) >= count:
            raise UserError(
                f"this EAGLE-3 head reads layer {max(self.layers)} of its target, which has {count} layers"
            )
        table = target.get_input_embeddings()  # type: ignore[operator]
        sample = next(iter(target.parameters()), torch.empty(0))
        self.to(sample.device, dtype_beside(sample))
        self._embeds = [table if self.embed is None else self.embed]

    def embedded(self, ids: Tensor) -> Tensor:
        """Embeddings ``[..., d]`` of token ids."""
        rows: Tensor = self._embeds[0](ids)
        return rows.to(self.fc.weight.dtype)

    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """The target's features ``[..., d]``, given states ``[..., d]`` of each of ``layers``."""
        joined: Tensor = self.fc(torch.cat(list(states), -1).to(self.fc.weight.dtype))
        return joined

    def entries(
        self, embeds: Tensor, features: Tensor, positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The residual stream, and queries, keys and values ``[..., heads, n, size]``, of entries.

        Args:
            embeds, features: ``[..., n, d]``. positions: ``[n]`` or ``[..., n]``.
        """
        block = self.block
        hidden = block.hidden_norm(features)
        residual = hidden if block.norm_before_residual else features
        both = torch.cat([block.input_layernorm(embeds), hidden], -1)
        flat = positions if positions.ndim == 2 else positions[None]
        cos, sin = self.rotary(embeds, flat)
        if positions.ndim == 1 and embeds.ndim == 2:
            cos, sin = cos[0], sin[0]
        return residual, block.self_attn.split(both, (cos, sin))

    def finish(self, residual: Tensor, values: Tensor) -> Tensor:
        """The output ``[..., n, d]`` of entries, given the mean values ``[..., heads, n, size]`` of their attention."""
        hidden = residual + self.block.self_attn.join(values)
        out: Tensor = hidden + self.block.mlp(self.block.post_attention_layernorm(hidden))
        return out

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

    @property
    def flops(self) -> float:
        """Of one entry, without attention itself."""
        layers = [one for one in self.modules() if isinstance(one, nn.Linear)]
        return 2.0 * sum(one.weight.numel() for one in layers)

    def begin(self) -> TextOfHeads:
        """The head in a new text."""
        return _Eagle3Text(self)


class _Eagle3Text(TextOfHeads):
    """Keys and values of the entries of the text, and of the nodes that follow it."""

    def __init__(self, heads: Eagle3Heads) -> None:
        self._heads = heads
        self._text: list[int] = []  # whose entries, one fewer than tokens, are cached
        self._keys: Tensor | None = None  # [heads, n, size]
        self._values: Tensor | None = None
        self._forget()

    def _forget(self) -> None:
        self._nodes: dict[tuple[int, ...], int] = {}  # path -> number among the nodes' entries
        self._outs: dict[tuple[int, ...], Tensor] = {}  # path -> output [d]; (): of the text's last entry
        self._node_keys: list[Tensor] = []
        self._node_values: list[Tensor] = []

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        ids = list(text)
        if ids == self._text:
            return
        known = known_prefix(ids, self._text)
        # Entry i holds token i + 1; the last one is made again if it is known, for its output.
        first = min(max(0, known - 1), len(ids) - 2)
        heads, self._text = self._heads, ids
        self._forget()
        self.steps, self.tokens = self.steps + 1, self.tokens + len(ids) - 1 - first
        device = heads.fc.weight.device
        embeds = heads.embedded(torch.tensor(ids[first + 1 :], device=device))
        features = heads.fused([states[layer][first:] for layer in heads.layers])
        positions = torch.arange(first, len(ids) - 1, device=device)
        residual, (query, key, value) = heads.entries(embeds, features, positions)
        if self._keys is not None and self._values is not None:
            key = torch.cat([self._keys[:, :first], key], 1)
            value = torch.cat([self._values[:, :first], value], 1)
        self._keys, self._values = key, value
        sees = torch.arange(key.shape[1], device=device)[None] <= positions[:, None]
        attended = nn.functional.scaled_dot_product_attention(query, key, value, sees)
        self._outs[()] = heads.finish(residual, attended)[-1]

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        new = [path for path in dict.fromkeys(paths) if path not in self._outs]
        if new:
            self._grow(new)
        return self._heads.whole_logits(torch.stack([self._outs[path] for path in paths]))

    def _grow(self, paths: Sequence[tuple[int, ...]]) -> None:
        """Add the entries of nodes: each sees the text, its ancestors and itself."""
        assert self._keys is not None
        assert self._values is not None
        heads, device = self._heads, self._keys.device
        self.steps, self.tokens = self.steps + 1, self.tokens + len(paths)
        base, before = len(self._text) - 1, len(self._nodes)
        embeds = heads.embedded(torch.tensor([path[-1] for path in paths], device=device))
        features = torch.stack([self._outs[path[:-1]] for path in paths])
        positions = torch.tensor([base + len(path) - 1 for path in paths], device=device)
        residual, (query, key, value) = heads.entries(embeds, features, positions)
        self._nodes |= {path: before + i for i, path in enumerate(paths)}
        self._node_keys.append(key)
        self._node_values.append(value)
        attended = nn.functional.scaled_dot_product_attention(
            query, torch.cat([self._keys, *self._node_keys], 1), torch.cat([self._values, *self._node_values], 1),
            seen_by_nodes(paths, self._nodes, base, device),
        )  # fmt: skip
        self._outs |= dict(zip(paths, heads.finish(residual, attended), strict=True))


def save_eagle3(
    heads: Eagle3Heads, directory: Path, card: str, facts: Mapping[str, Any] | None = None
) -> None:
    """Write the head as speculators does; weights in bfloat16.

    Args:
        facts: further fields of config.json; "verifier": {"name_or_path", "architectures"} of the target.

    Raises:
        UserError: the directory cannot be written.
    """
    more = dict(facts or {})
    verifier = more.pop("verifier", {"name_or_path": heads.target_id, "architectures": []})
    proposal = {"proposal_type": "greedy", "speculative_tokens": max(3, len(heads.accuracies)), "verifier_accept_k": 1,
                "accept_tolerance": 0.0}  # fmt: skip
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "draft_vocab_size": len(heads.d2t),
        "target_hidden_size": heads.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(heads.aux),
        "norm_before_residual": heads.block.norm_before_residual,
        "transformer_layer_config": {
            **heads.layer_config.to_diff_dict(),
            "model_type": "llama",
            "tie_word_embeddings": False,  # its output layer is its own
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "target_fingerprint": heads.target_fingerprint,
        "accuracies": [[round(value, 4) for value in row] for row in heads.accuracies],
        **more,
    }
    weights = {
        name.replace("block.", "layers.0.").replace("embed.", "embed_tokens."): value.bfloat16()
        if value.is_floating_point()
        else value
        for name, value in heads.state_dict().items()
    }
    write_files(directory, WEIGHTS, weights, config, card)


def load_eagle3(files: HeadFiles) -> Eagle3Heads:
    """Read a head from a folder of speculators' format.

    Raises:
        UserError: a variant that is not supported, or weights that are missing, damaged, or do not fit the config.
    """
    fields, inner = HeadFields(files), HeadFields(files, "transformer_layer_config")
    _check_variant(files, inner.fields)
    weights = files.weights((WEIGHTS,), (_PICKLE,))
    weights = {name.replace("layers.0.", "block."): value for name, value in weights.items()}
    table = weights.pop("embed_tokens.weight", None)
    for name in [name for name in weights if name.startswith(("verifier_", "rotary"))]:
        del weights[name]  # copies of the target's
    verifier = HeadFields(files, "speculators_config", {}).fields.get("verifier")
    verified = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    few = fields.whole("draft_vocab_size")
    with fitting("EAGLE-3 head", files):
        listed = "d2t" if "d2t" in weights else "lm_head.weight"
        if weights[listed].shape[:1] != (few,):  # before memory is taken
            raise KeyError(listed)
        heads = Eagle3Heads(
            inner.layer(weights, "block.mlp"), fields.numbers("eagle_aux_hidden_state_layer_ids"),
            few, fields.switch("norm_before_residual"), "fc.bias" in weights,
            target_id=str(verified or ""), target_fingerprint=fields.text("target_fingerprint"),
            accuracies=fields.accuracies(),
        )  # fmt: skip
        if "d2t" not in weights and heads.vocab_size == len(heads.d2t):
            weights |= {"d2t": heads.d2t, "t2d": heads.t2d}  # the whole vocabulary
        weights["d2t"], weights["t2d"] = weights["d2t"].long(), weights["t2d"].bool()
        fill(heads, weights, files.directory)
    kept = heads.kept
    inside = int(kept.min()) >= 0 and int(kept.max()) < heads.vocab_size
    if (
        not inside
        or len(torch.unique(kept)) < len(kept)
        or not torch.equal(heads.t2d.nonzero()[:, 0], kept.sort().values)
    ):
        raise UserError(
            f"the maps d2t and t2d in '{files.directory}' contradict each other, name a token twice or leave the "
            "vocabulary: copy the files again"
        )
    if table is not None:
        if table.shape != (heads.vocab_size, heads.hidden_size) or not bool(
            torch.isfinite(table.float()).all()
        ):
            raise UserError(
                f"embed_tokens.weight in '{files.directory}' has shape {list(table.shape)} for a target of "
                f"{heads.vocab_size} tokens and width {heads.hidden_size}, or values that are not finite: copy it again"
            )
        heads.embed = nn.Embedding(*table.shape, _weight=table.float())
    heads.id, heads.revision = files.id, files.revision
    return heads


def _check_variant(files: HeadFiles, inner: Mapping[str, Any]) -> None:
    """Refuse what this module would read wrongly."""
    fields = files.config
    own, target = inner.get("hidden_size", LlamaConfig().hidden_size), files.config.get("target_hidden_size")
    for what, wrong in (
        (f"a layer of type '{inner.get('model_type')}'", inner.get("model_type", "llama") != "llama"),
        (f"{inner.get('num_hidden_layers')} layers", inner.get("num_hidden_layers", 1) != 1),
        ("norm_before_fc", bool(fields.get("norm_before_fc"))),
        (f"features of width {target} for a layer of width {own}", target not in (None, own)),
    ):
        if wrong:
            raise UserError(
                f"the EAGLE-3 head in '{files.directory}' has {what}, which is not supported: give one with a single "
                "layer of type 'llama', as wide as its target"
            )
