"""Parameters that are checked when they are made: pydantic models, one line of ours for a bad value."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from sprinter.errors import OptionError, UserError, refuse_long

__all__ = [
    "LISTED",
    "PLAIN",
    "Checked",
    "Expected",
    "Natural",
    "Positive",
    "RealNumber",
    "Sampling",
    "WholeNumber",
    "checked",
    "complaint",
    "like",
    "limits_of",
    "span_of",
    "stated",
    "types_in",
]

Kind = TypeVar("Kind")


class Expected(NamedTuple):
    """What a field's message says of a bad value, in place of the bounds of a number.

    Attributes:
        what: the predicate, "is not ...". give: what to give instead.
    """

    what: str
    give: str


def _plain(value: Any) -> Any:
    """A number of any library as one of Python's; anything else as it is."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral) and abs(int(value)) > sys.float_info.max:
        raise ValueError("Python neither prints it nor makes a float of it")
    return int(value) if isinstance(value, Integral) else float(value)


PLAIN = BeforeValidator(_plain)
WholeNumber = Annotated[int, PLAIN]
RealNumber = Annotated[float, PLAIN]
LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Of a tuple that may be given as a list."""
Positive = Annotated[WholeNumber, Field(ge=1)]
Natural = Annotated[WholeNumber, Field(ge=0)]


_EXACT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, defer_build=True
)


class Checked(BaseModel):
    """Base of frozen parameters of exact types; numbers may also be those of numpy and torch.

    Raises:
        UserError: a value out of range or of another type.
    """

    model_config = ConfigDict(frozen=True, **_EXACT)

    __iter__ = None  # type: ignore[assignment]  # no list of values

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _told(type(self), values, error) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise UserError(f"{name} cannot be changed: make another {type(self).__name__}")


def stated(default: Any, about: str, **limits: Any) -> Any:
    """A field of settings with its description, of which the command line makes an option.

    Args:
        default: None: no value, and what that means stands in the description, as in "Longest text. None: the row."
        about: its first sentence is the help.
        limits: of the value, and the like, as of pydantic's ``Field``.
    """
    return Field(default, description=about, **limits)


def like(field: Any, **more: Any) -> Any:
    """A field with the default, limits and description of another (its ``FieldInfo``), but ``more``."""
    return Field(**{"default": field.default, "description": field.description, **limits_of(field), **more})


@dataclass_transform(frozen_default=True)
def checked(kind: type[Kind]) -> type[Kind]:
    """Make a frozen dataclass whose values are checked as those of ``Checked``, before ``__post_init__``."""
    made: Any = dataclass(kind, frozen=True, config=_EXACT)
    unchecked = made.__init__

    def init(self: Any, *values: Any, **named: Any) -> None:
        try:
            unchecked(self, *values, **named)
        except ValidationError as error:
            raise _told(
                made, {**dict(zip(made.__pydantic_fields__, values, strict=False)), **named}, error
            ) from None
        finally:
            made.__init__ = init  # pydantic sets its own when it builds the schema, at the first call

    made.__init__ = init
    if made.__doc__:  # python -OO drops docstrings
        about = "".join(
            f"\n        {name}: {one.description}" for name, one in made.__pydantic_fields__.items()
        )
        made.__doc__ += f"\n    Attributes:{about}\n    "
    return made  # type: ignore[no-any-return]


def _told(kind: Any, values: Mapping[str, Any], error: ValidationError) -> UserError:
    """The first mistake in values, as one line."""
    errors = error.errors(include_url=False)
    first = errors[0]
    if isinstance(own := first.get("ctx", {}).get("error"), UserError):
        return own
    name = str(first["loc"][0])
    fields = kind.model_fields if issubclass(kind, BaseModel) else kind.__pydantic_fields__
    if (field := fields.get(name)) is None:
        return OptionError(f"unknown parameter '{name}': known are {', '.join(fields)}")
    for one in errors:
        refuse_long(name, one["input"])
    for expected in field.metadata:
        if isinstance(expected, Expected):
            whole, part = _shown(values[name]), _shown(first["input"])
            wrong = f", not {part}" if len(first["loc"]) > 1 and part != whole else ""
            return UserError(f"{name}={whole} {expected.what}: give {expected.give}{wrong}")
    said = complaint(first, field) or f"is wrong ({first['msg']})"
    return UserError(f"{name}={_shown(first['input'])} {said}")


def _shown(value: Any) -> str:
    return " ".join(reprlib.repr(value).split())


def complaint(first: Mapping[str, Any], field: Any) -> str | None:
    """What is wrong with a number, a flag or a choice, and how to fix it; None: it is none of these.

    Args:
        first: an error of pydantic. field: the field's ``FieldInfo``, whose description may say what the neutral value
            is, behind a semicolon.
    """
    kind, limits = first["type"], limits_of(field)
    if kind in ("bool_type", "bool_parsing"):
        return "is neither True nor False: give one of them"
    if kind == "literal_error":
        return f"is unknown: give {first['ctx']['expected']}"
    whole = int in types_in(field.annotation)
    if kind in ("int_type", "float_type", "int_from_float"):
        wrong = f"is not a {'whole ' * whole}number"
    elif kind == "finite_number" or kind.startswith(("greater_than", "less_than")):
        wrong = "is out of range"
    else:
        return None
    neutral = (field.description or "").partition(". ")[0].partition("; ")[2].rstrip(".")
    number = "one" if wrong.endswith("number") else f"a {'whole ' * whole}number"
    return f"{wrong}: give {number}{span_of(limits)}" + (f" ({neutral})" if neutral else "")


def span_of(limits: Mapping[str, float]) -> str:
    """Bounds as they are written behind "a number": " >= 1", " in [0, 1)"; nothing without a lower one."""
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    if low is None:
        return ""
    if high is None:
        return f" {'>=' if 'ge' in limits else '>'} {low}"
    return f" in {'[' if 'ge' in limits else '('}{low}, {high}{']' if 'le' in limits else ')'}"


def limits_of(of: Any) -> dict[str, float]:
    """The bounds in an annotation or in a field, by pydantic's names."""
    found = {
        name: limit for name in ("ge", "gt", "le", "lt") if (limit := getattr(of, name, None)) is not None
    }
    parts = (getattr(of, "annotation", None), *get_args(of), *getattr(of, "metadata", ()))
    for part in parts:
        found |= limits_of(part) if part is not None and not isinstance(part, type) else {}
    return found


def types_in(of: Any) -> set[Any]:
    """An annotation and all types in it."""
    return {of}.union(*map(types_in, get_args(of))) if not isinstance(of, BeforeValidator) else set()


def _divisor(temperature: float) -> float:
    if 0.0 < temperature < 1e-30:
        raise UserError(f"temperature={temperature} is too small to divide by: give 0 (greedy)")
    return temperature


class Sampling(Checked):
    """Sampling parameters: how logits become the law that tokens are drawn from, for target and draft alike.

    Order, as in transformers: temperature, top-k, top-p, min-p, then renormalise. What depends on the text (penalties,
    forbidden tokens) comes before: ``sprinter.decode.adjust``.

    Ties: tokens are ranked by falling logit, equal logits (+0 and −0 are equal) by rising id, and top-k and top-p keep
    the first tokens of this ranking. A set reaches ``top_p`` if its probability does up to a rounding error of 1e-6
    (1e-9 in float64): a top_p of 0.6 keeps six of ten equal tokens. Sums are exact, so the result depends neither on
    their order nor on whether a step is eager or captured.
    """

    temperature: Annotated[RealNumber, AfterValidator(_divisor)] = Field(
        1.0, ge=0, le=1e30, description="Divides the logits of target and draft; 0 is greedy."
    )
    top_k: WholeNumber = Field(
        0, ge=0, le=2**31 - 1, description="Keep the k likeliest tokens; 0 keeps all tokens."
    )
    top_p: RealNumber = Field(
        1.0, gt=0, le=1, description="Keep the likeliest tokens up to this probability; 1 keeps all tokens."
    )
    min_p: RealNumber = Field(
        0.0, ge=0, le=1,
        description="Drop tokens below this share of the largest probability; 0 keeps all tokens.",
    )  # fmt: skip

    def __init__(self, *values: Any, **named: Any) -> None:
        names = [*type(self).model_fields]
        if len(values) > len(names):
            raise TypeError(f"Sampling takes {', '.join(names)}: got {len(values)} values")
        super().__init__(**dict(zip(names, values, strict=False)), **named)

    @property
    def greedy(self) -> bool:
        """Whether the processed laws are one-hot."""
        return self.temperature == 0.0
