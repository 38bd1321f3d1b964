"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): a head that a target's own checkpoint holds.

A module joins the normed embedding of a token with the target's normed last state before it by a linear layer. A
decoder layer of the target's own class and a norm turn them into an estimate of the next state, from which the target's
output layer makes the law. It drafts further tokens from its own outputs, as EAGLE's head does (``heads.entries``).

Checkpoints name its tensors in one of a few layouts (``_LAYOUTS``). Of several modules the first drafts all tokens.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from sprinter.errors import UserError
from sprinter.heads.drafting import OutputLayer, TextOfHeads, linear_weights
from sprinter.heads.entries import EntryText, StateHeads
from sprinter.heads.files import fill

__all__ = ["MtpHeads", "load_mtp"]

_CHUNK = 512
"""Entries that are read at a time, so that the memory of attention stays bounded."""


class _Layout(NamedTuple):
    """Names of a module's tensors.

    Attributes:
        prefix: a pattern of what they begin with; ``{layers}``: number of the target's layers.
        token, state: norms of embeddings and of states. fuse: the linear layer over both. norm: the last one.
        block: what precedes the names of the decoder layer's weights.
        state_first: whether the linear layer reads the state before the embedding.
    """

    prefix: str
    token: str
    state: str
    fuse: str
    norm: str
    block: str = ""
    state_first: bool = False


_LAYOUTS = (
    _Layout(r"layers\.{layers}\.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),  # DeepSeek-V3, GLM-4.5
    _Layout(r"mtp\.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),  # Qwen3-Next
    _Layout(
        r"mtp_layers\.0\.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", state_first=True
    ),  # MiMo
)  # fmt: skip
_OTHERS = re.compile(r"(^|\.)(mtp|nextn)")
"""Names of multi-token prediction in any layout."""
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's embedding and output layer; the target's own are used."""


class MtpHeads(StateHeads):
    """One module of multi-token prediction.

    Args:
        block: a decoder layer of the target's class. config: that it was made with.
        vocab_size: rows of the target's output layer.
        layer_type: of the layer, where the target has layers of several types.
        state_first: as in the layout.
    """

    kind = "mtp"

    def __init__(
        self, block: nn.Module, config: PreTrainedConfig, vocab_size: int, layer_type: str | None, state_first: bool
    ) -> None:  # fmt: skip
        super().__init__(config.hidden_size, vocab_size)
        norm = next(type(part) for name, part in block.named_modules() if name.endswith("norm"))
        self.token_norm, self.state_norm, self.norm = (
            norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block, self.state_first, self.layer_type = block, state_first, layer_type
        self._active = int(getattr(config, "num_experts_per_tok", None) or 1)
        self._rotary: list[nn.Module] = []

    def join(self, target: nn.Module) -> None:
        """Take the target's embedding, rotary embedding and output layer, and move beside it."""
        self.move_beside(target)
        assert isinstance(target, PreTrainedModel)
        self._embeds = [target.get_input_embeddings()]
        self._rotary = [target.get_decoder().rotary_emb]  # type: ignore[no-untyped-call]
        self._output = [OutputLayer(target, self.vocab_size)]

    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """The target's states ``[..., d]`` after its final norm."""
        return states[0].to(self.dtype)

    def whole_logits(self, out: Tensor) -> Tensor:
        """Logits ``[..., V]`` of estimated states ``[..., d]``."""
        return self._output[0](out)

    def estimate(
        self, embeds: Tensor, states: Tensor, positions: Tensor, sees: Tensor, kept: object
    ) -> Tensor:
        """Estimated states ``[n, d]`` of entries.

        Args:
            embeds, states: ``[n, d]``. positions: ``[n]``.
            sees: ``[n, k]`` bool, which of the k entries in ``kept`` they attend to, their own included.
        """
        parts = [self.token_norm(embeds), self.state_norm(states)]
        joined = self.fc(torch.cat(parts[::-1] if self.state_first else parts, -1))[None]
        rotary, more = self._rotary[0], {}
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            more["layer_type"] = self.layer_type
        mask = joined.new_zeros(sees.shape).masked_fill_(~sees, torch.finfo(joined.dtype).min)
        own = inspect.signature(self.block.forward).parameters
        out = self.block(
            joined,
            attention_mask=mask[None, None],
            position_ids=positions[None],
            position_embeddings=rotary(joined, positions[None], **more),
            **{"cache" if "cache" in own else "past_key_values": kept},
        )
        estimate: Tensor = self.norm(out if isinstance(out, Tensor) else out[0])
        return estimate[0]

    @property
    def flops(self) -> float:
        """Of one entry, the target's output layer included, without attention itself."""
        experts = [one for one in self.parameters() if one.ndim == 3]
        active = sum(one.numel() // one.shape[0] * min(self._active, one.shape[0]) for one in experts)
        return 2.0 * (linear_weights(self) + active + self.hidden_size * self.drafted)

    def begin(self) -> TextOfHeads:
        """The head in a new text."""
        return _MtpText(self)

    def file_config(self) -> dict[str, Any]:
        """None: it stays in the target's files."""
        raise UserError("heads of multi-token prediction are a part of the target's checkpoint: keep that")


class _Kept:
    """Keys and values of entries, in place of a cache of transformers: those from ``start`` on are replaced."""

    def __init__(self) -> None:
        self.start = 0
        self._held: tuple[Tensor, ...] = ()

    def update(self, *new: Any, **_: Any) -> tuple[Tensor, ...]:
        both: tuple[Tensor, Tensor] = new[:2]  # then the layer's number
        old = self._held or tuple(one[..., :0, :] for one in both)
        self._held = tuple(
            torch.cat([before[..., : self.start, :], one], -2) for before, one in zip(old, both, strict=True)
        )
        return self._held


class _MtpText(EntryText):
    def __init__(self, heads: MtpHeads) -> None:
        super().__init__(heads)
        self._module, self._cache = heads, _Kept()
        self._window: int | None = getattr(getattr(heads.block, "self_attn", None), "sliding_window", None)
        self._places = torch.empty(0, dtype=torch.long, device=heads.device)  # positions of all entries

    def outputs(
        self, embeds: Tensor, features: Tensor, positions: Tensor, start: int, sees: Tensor | None
    ) -> Tensor:
        self._places = torch.cat([self._places[:start], positions])
        seen = torch.ones(len(positions), len(self._places), dtype=torch.bool, device=self._device)
        seen = seen if sees is None else sees
        if self._window is not None:
            seen = seen & (positions[:, None] - self._places[None] < self._window)
        outs = []
        for at in range(0, len(positions), _CHUNK):
            part, self._cache.start = slice(at, at + _CHUNK), start + at
            known = min(start + at + _CHUNK, len(self._places))
            outs.append(
                self._module.estimate(
                    embeds[part], features[part], positions[part], seen[part, :known], self._cache
                )
            )
        return torch.cat(outs)


@torch.inference_mode(False)
def load_mtp(
    target: PreTrainedModel, vocab_size: int, given: Mapping[str, Tensor] | None = None
) -> MtpHeads | None:
    """The head that a target's own files hold; None: they hold none, or the target has no files.

    Args:
        vocab_size: rows of its output layer.
        given: weights of a module that was read from another kind of file, as DeepSeek-V3 names them.

    Raises:
        UserError: they hold one that cannot be run.
    """
    folder = Path(target.name_or_path) if target.name_or_path else None
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    if given and folder is not None:
        return _made(target, config, _LAYOUTS[0], given, vocab_size, folder)
    if folder is None or not folder.is_dir():
        return None
    places: dict[str, Path] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    for layout in _LAYOUTS:
        start = layout.prefix.format(layers=config.num_hidden_layers)
        found = re.compile(rf"(?:.*\.)?{start}(.*)")
        own = {match[1]: name for name in places if (match := found.fullmatch(name)) is not None}
        if f"{layout.fuse}.weight" in own:
            weights = {
                name: _read(places[stored], stored) for name, stored in own.items() if name not in _COPIES
            }
            return _made(target, config, layout, weights, vocab_size, folder)
    if any(_OTHERS.search(name) for name in places):
        name = next(name for name in places if _OTHERS.search(name))
        _refuse(folder, f"their tensors ('{name}') are in a layout that is not known")
    return None


def _refuse(folder: Path, why: str) -> NoReturn:
    raise UserError(
        f"the heads of multi-token prediction in '{folder}' cannot draft: {why}; the target runs without them"
    )


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        values: Tensor = opened.get_tensor(name)
    return values


def _made(
    target: PreTrainedModel, config: Any, layout: _Layout, stored: Mapping[str, Tensor], vocab_size: int, folder: Path
) -> MtpHeads:  # fmt: skip
    names = {layout.token: "token_norm", layout.state: "state_norm", layout.fuse: "fc", layout.norm: "norm"}
    weights: dict[str, Tensor] = {}
    block: dict[str, Tensor] = {}
    try:
        for name, value in _joined_experts(stored).items():
            if (ours := names.get(name.removesuffix(".weight"))) is not None:
                weights[f"{ours}.weight"] = value
            elif name.startswith(layout.block):
                block[name.removeprefix(layout.block)] = value
            elif re.match(r"layers\.[1-9]", name) is None:  # not of a further module
                _refuse(folder, f"'{name}' is a weight that is not known")
        layer, layer_type = _layer_like(target, config, block, folder)
        heads = MtpHeads(layer, config, vocab_size, layer_type, layout.state_first)
        fill(heads, weights | {f"block.{name}": value for name, value in block.items()}, folder)
    except KeyError as error:
        _refuse(folder, f"they lack or misfit {error}")
    return heads


def _layer_like(
    target: PreTrainedModel, config: Any, weights: Mapping[str, Tensor], folder: Path
) -> tuple[nn.Module, str | None]:
    """A new decoder layer of the class, and with the settings, of a target's layer that has such weights; its type."""
    config._attn_implementation = "sdpa" if target._supports_sdpa else "eager"
    layers = target.get_decoder().layers  # type: ignore[no-untyped-call]
    types = getattr(config, "layer_types", None)
    shapes = {name: value.shape for name, value in weights.items()}
    differs = ""
    for i in reversed(range(len(layers))):
        with torch.device("meta"):
            wanted = {name: value.shape for name, value in type(layers[i])(config, i).state_dict().items()}
        if wanted == shapes:
            return type(layers[i])(config, i), None if types is None else types[i]
        differs = differs or min(name for name, _ in shapes.items() ^ wanted.items())
    _refuse(folder, f"no decoder layer of {type(target).__name__} has their weights ('{differs}' differs)")


def _joined_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of experts stacked, as the layers of transformers hold them; files hold them one by one."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, value in weights.items():
        if (match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)) is None:
            found[name] = value
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = value
    for name, each in experts.items():
        count = 1 + max(number for number, _ in each)
        both = [torch.cat([each[i, "gate"], each[i, "up"]]) for i in range(count)]
        found[f"{name}.gate_up_proj"] = torch.stack(both)
        found[f"{name}.down_proj"] = torch.stack([each[i, "down"] for i in range(count)])
    return found
