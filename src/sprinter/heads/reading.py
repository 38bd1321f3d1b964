"""Checks of config.json of heads that draft: what its fields may be, with one line for what they are not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import isfinite
from typing import Any, NoReturn

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig

from sprinter.errors import UserError
from sprinter.heads.files import HeadFiles

__all__ = ["HeadFields"]

_LARGEST = 1 << 24
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "num_hidden_layers", "max_position_embeddings",
)  # fmt: skip
_OPTIONAL = ("num_key_value_heads", "head_dim")
_SWITCHES = ("attention_bias", "mlp_bias")
_REFUSALS = (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError)
"""What transformers raises for a config that it does not take."""


class HeadFields:
    """The fields of a config.json, checked as they are read.

    Args:
        files: of the heads. inside: name of a field that holds the fields; None: they are those of the file.

    Raises:
        UserError: ``inside`` is not an object.
    """

    def __init__(self, files: HeadFiles, inside: str | None = None, default: object = None) -> None:
        self._files, self._inside = files, inside
        fields = files.config if inside is None else files.config.get(inside, default)
        if not isinstance(fields, Mapping):
            self._inside = None
            self._refuse(str(inside), fields, "an object")
        self.fields: Mapping[str, Any] = fields

    def _refuse(self, name: str, value: object, wanted: str) -> NoReturn:
        where = name if self._inside is None else f"{self._inside}.{name}"
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
        raise UserError(
            f"{where}={shown} in '{self._files.directory}/config.json' must be {wanted}: copy or make the heads again"
        )

    def _read(self, name: str, fits: Callable[[Any], bool], wanted: str, default: Any = None) -> Any:
        value = self.fields.get(name, default)
        if not fits(value):
            self._refuse(name, value, wanted)
        return value

    def whole(self, name: str, default: int | None = None, most: int = _LARGEST) -> int:
        """A whole number in [1, most]."""
        wanted = f"a whole number in [1, {most}]"
        return int(self._read(name, lambda value: type(value) is int and 1 <= value <= most, wanted, default))

    def token(self, name: str, vocab: int) -> int:
        """A token id."""
        return int(
            self._read(name, lambda value: type(value) is int and 0 <= value < vocab, f"in [0, {vocab})")
        )

    def switch(self, name: str) -> bool:
        """True or false; false if it is not there."""
        return bool(self._read(name, lambda value: isinstance(value, bool), "true or false", False))

    def text(self, name: str) -> str | None:
        """A text; None if it is null or not there."""
        found: str | None = self._read(name, lambda value: isinstance(value, str | None), "a text or null")
        return found

    def numbers(self, name: str) -> list[int] | None:
        """A list of whole numbers; None if it is null or not there."""
        found: list[int] | None = self._read(
            name,
            lambda value: (
                value is None or (isinstance(value, list) and all(type(one) is int for one in value))
            ),
            "a list of whole numbers or null",
        )
        return found

    def verifier(self) -> str | None:
        """The target's name in the format of speculators."""
        found = HeadFields(self._files, "speculators_config", {}).fields.get("verifier")
        return found.get("name_or_path") if isinstance(found, Mapping) else None

    def of_target(self, name: str | None) -> dict[str, Any]:
        """Arguments of ``TokenHeads`` about a target of this name; ``accuracies`` are lists of numbers in [0, 1]."""
        rows = self._read("accuracies", _are_shares, "lists of numbers in [0, 1]") or ()
        fingerprint = self.text("target_fingerprint")
        return {"target_id": str(name or ""), "target_fingerprint": fingerprint, "accuracies": rows}

    def layer(
        self, weights: Mapping[str, Tensor], mlp: str, known: Collection[str] | None = None
    ) -> LlamaConfig:
        """The config of Llama layers, by default one.

        Args:
            mlp: name of the first one's feed-forward weights, which the sizes must fit.
            known: fields that are read; None: all, each of which is the layer's.
        """
        for name in _SIZES:
            if name in self.fields and not (name in _OPTIONAL and self.fields[name] is None):
                self.whole(name)
        for name in _SWITCHES:
            self.switch(name)
        self._read("rms_norm_eps", lambda eps: _is_number(eps) and 0 < eps < 1, "a number in (0, 1)", 1e-6)
        given = {"num_hidden_layers": 1} | {
            key: value
            for key, value in self.fields.items()
            if key not in ("model_type", "architectures") and (known is None or key in known)
        }
        heads, hidden = given.get("num_attention_heads", 32), given.get("hidden_size", 4096)
        if given.get("head_dim") is None and hidden % heads:
            self._refuse("num_attention_heads", heads, f"a divisor of hidden_size={hidden}")
        if heads % (given.get("num_key_value_heads") or heads):
            own = given["num_key_value_heads"]
            self._refuse("num_key_value_heads", own, f"a divisor of num_attention_heads={heads}")
        if (given.get("head_dim") or hidden // heads) % 2:
            self._refuse("head_dim", given.get("head_dim"), "even")
        try:
            config = LlamaConfig(**given)
        except _REFUSALS as error:
            raise UserError(
                f"{self._inside or 'what stands'} in '{self._files.directory}/config.json' is not a layer of Llama "
                f"({' '.join(str(error).split())}): copy or make the heads again"
            ) from None
        size = (given.get("head_dim") or hidden // heads) * heads
        last = mlp.replace(".0.", f".{config.num_hidden_layers - 1}.")
        for part, shape in (
            *(
                (f"{one}.gate_proj.weight", (config.intermediate_size, config.hidden_size))
                for one in (mlp, last)
            ),
            (f"{mlp.replace('mlp', 'self_attn')}.q_proj.weight", (size,)),
        ):  # before memory is taken
            if part not in weights or weights[part].shape[: len(shape)] != shape:
                raise KeyError(part)
        return config


def _are_shares(rows: Any) -> bool:
    return rows is None or (
        isinstance(rows, list)
        and all(
            isinstance(row, list) and row and all(_is_number(x) and 0 <= x <= 1 for x in row) for row in rows
        )
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
