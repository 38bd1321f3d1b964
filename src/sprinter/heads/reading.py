"""Checks of files of heads that draft: what config.json and weights may be, with one line for what they are not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from typing import Any, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import LlamaConfig

from sprinter.errors import UserError
from sprinter.heads.drafting import HeadFiles

__all__ = ["HeadFields", "fill", "fitting"]

_LARGEST = 1 << 24
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "num_hidden_layers", "max_position_embeddings",
)  # fmt: skip
_OPTIONAL = ("num_key_value_heads", "head_dim")
_SWITCHES = ("attention_bias", "mlp_bias")
_REQUIRED = object()


class HeadFields:
    """The fields of a config.json, checked as they are read.

    Args:
        files: of the heads. inside: name of a field that holds the fields; None: they are those of the file.

    Raises:
        UserError: ``inside`` is no object.
    """

    def __init__(self, files: HeadFiles, inside: str | None = None, default: object = _REQUIRED) -> None:
        self._files, self._inside = files, inside
        fields = files.config if inside is None else files.config.get(inside, default)
        if fields is _REQUIRED:
            fields = None
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

    def whole(self, name: str, default: Any = _REQUIRED, most: int = _LARGEST) -> int:
        """A whole number in [1, most]."""
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            self._refuse(name, None if value is _REQUIRED else value, f"a whole number in [1, {most}]")
        return value

    def switch(self, name: str) -> bool:
        """True or false; false if it is not there."""
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            self._refuse(name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A text; None if it is null or not there."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, str):
            self._refuse(name, value, "a text or null")
        return value

    def numbers(self, name: str) -> list[int] | None:
        """A list of whole numbers; None if it is null or not there."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            self._refuse(name, value, "a list of whole numbers or null")
        return value

    def accuracies(self) -> tuple[tuple[float, ...], ...]:
        """``accuracies``: lists of numbers in [0, 1]; () if they are not there."""
        value = self.fields.get("accuracies")
        rows = () if value is None else value
        if not isinstance(rows, list | tuple) or not all(
            isinstance(row, list) and row and all(_is_number(one) and 0 <= one <= 1 for one in row)
            for row in rows
        ):
            self._refuse("accuracies", value, "lists of numbers in [0, 1]")
        return tuple(tuple(float(one) for one in row) for row in rows)

    def layer(
        self, weights: Mapping[str, Tensor], mlp: str, known: Collection[str] | None = None
    ) -> LlamaConfig:
        """The config of a Llama layer.

        Args:
            mlp: name of its feed-forward weights, which the sizes must fit.
            known: fields that are read; None: all, each of which is the layer's.
        """
        for name in _SIZES:
            if name in self.fields and not (name in _OPTIONAL and self.fields[name] is None):
                self.whole(name)
        for name in _SWITCHES:
            self.switch(name)
        eps = self.fields.get("rms_norm_eps", 1e-6)
        if not (_is_number(eps) and 0 < eps < 1):
            self._refuse("rms_norm_eps", eps, "a number in (0, 1)")
        given = {
            key: value
            for key, value in self.fields.items()
            if key not in ("model_type", "architectures") and (known is None or key in known)
        }
        heads, hidden = given.get("num_attention_heads", 32), given.get("hidden_size", 4096)
        if given.get("head_dim") is None and hidden % heads:
            self._refuse("num_attention_heads", heads, f"a divisor of hidden_size={hidden}")
        if heads % (given.get("num_key_value_heads") or heads):
            self._refuse(
                "num_key_value_heads",
                given["num_key_value_heads"],
                f"a divisor of num_attention_heads={heads}",
            )
        if (given.get("head_dim") or hidden // heads) % 2:
            self._refuse("head_dim", given.get("head_dim"), "even")
        try:
            config = LlamaConfig(**given)
        except (
            StrictDataclassError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ZeroDivisionError,
        ) as error:
            raise UserError(
                f"{self._inside or 'what stands'} in '{self._files.directory}/config.json' is not a layer of Llama "
                f"({' '.join(str(error).split())}): copy or make the heads again"
            ) from None
        size = (given.get("head_dim") or hidden // heads) * heads
        for part, shape in (
            (f"{mlp}.gate_proj.weight", (config.intermediate_size, config.hidden_size)),
            (f"{mlp.replace('mlp', 'self_attn')}.q_proj.weight", (size,)),
        ):  # before memory is taken
            if part not in weights or weights[part].shape[: len(shape)] != shape:
                raise KeyError(part)
        return config


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


@contextmanager
def fitting(what: str, files: HeadFiles) -> Iterator[None]:
    """Turn what weights raise that do not fit their config into one line.

    Args:
        what: the heads, for the message.

    Raises:
        UserError: in place of a KeyError, TypeError, ValueError or AttributeError; a UserError stays.
    """
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        lack = "lack or misfit" if what.endswith("s") else "lacks or misfits"
        raise UserError(
            f"the {what} in '{files.directory}' {lack} {error}: config.json and the weights do not belong together, "
            "copy or make them again"
        ) from None


def fill(module: nn.Module, weights: Mapping[str, Tensor], directory: object) -> None:
    """Load weights into heads, in float32.

    Raises:
        KeyError: the name of the first weight that is missing, unknown or of another shape.
        UserError: a weight is NaN or infinite.
    """
    wanted = module.state_dict()
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in wanted or name not in weights or wanted[name].shape != weights[name].shape:
            raise KeyError(name)
        if not bool(torch.isfinite(weights[name].float()).all()):
            raise UserError(
                f"the weight '{name}' of the heads in '{directory}' has values that are NaN or infinite: copy or make "
                "them again"
            )
    module.load_state_dict(
        {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}
    )
