"""Options of generation, which every public call accepts as one object or as keywords.

A new option is one field of ``GenerationOptions`` (its type, bounds, default and description) and its type in
``GenerationKeywords``. The public calls, the JSON record, the command line and the server's requests are derived from
these. The first sentence of a description is the help on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, InstanceOf
from pydantic.fields import FieldInfo

from sprinter.decode.registry import did_you_mean
from sprinter.engine.lookahead import AUTO
from sprinter.errors import OptionError, UserError
from sprinter.parameters import PLAIN, Checked, Expected, RealNumber, Sampling, WholeNumber

if TYPE_CHECKING:  # the command line reads this list before it imports torch
    from sprinter.decode.method import Method
    from sprinter.decode.state import RuleState
else:
    Method = RuleState = Any

__all__ = ["OPTIONS", "GenerationKeywords", "GenerationOptions", "check_name", "item_of"]


class GenerationKeywords(TypedDict, total=False):
    """Types of the keywords of the public calls; ``GenerationOptions`` describes them.

    ``sampling`` replaces temperature, top_k, top_p and min_p.
    """

    method: str | Method | None
    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None
    bad_words: str | Sequence[str | Sequence[int]] | None
    min_new_tokens: int
    ignore_eos: bool
    seed: int
    stop: str | Sequence[str] | None
    stop_token_ids: int | Sequence[int] | None
    logprobs: int | None
    meter: Literal["running", "complete"]
    require_lossless: bool
    budget: float | None
    never_slower: bool | None
    switches: Sequence[int] | None
    copy_switches: Sequence[int] | None
    ahead: int | Literal["auto"] | None
    rules: RuleState | Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    response_format: Mapping[str, Any] | type[BaseModel] | None
    grammar: str | None
    regex: str | None
    choices: Sequence[str] | None
    sampling: Sampling | None


def _method(value: Any) -> Method | None:
    if value is None:
        return None
    from sprinter.decode.spec import parse_method

    return parse_method(value)


def _several(value: Any) -> Any:
    """A list of any kind as a tuple, a single value as a tuple of it; None is none."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        return () if value is None else (value,)
    return tuple(value)


def _words(value: Any) -> Any:
    words = _several(value)
    return tuple(
        word if isinstance(word, str) or not isinstance(word, Iterable) else _several(word) for word in words
    )


def _biases(value: Any) -> Any:
    """Pairs in the order of their ids. JSON's keys are texts, so an id may be one."""
    try:
        pairs = dict(() if value is None else value)
    except TypeError as error:
        raise ValueError(str(error)) from None
    short = {
        id for id in pairs if isinstance(id, str) and id.isdecimal() and len(id) < 20
    }  # Python reads no long ones
    return tuple({int(id) if id in short else id: bias for id, bias in pairs.items()}.items())


def _ascending(rounds: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if rounds is not None and any(a >= b for a, b in pairwise((0, *rounds))):
        raise ValueError("not ascending")
    return rounds


def _rules(value: Any) -> RuleState | Mapping[str, Any] | None:
    """A state, or a copy of a mapping; ``RuleState.begin`` checks whether the method can have it."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return deepcopy(dict(value))
    from sprinter.decode.state import RuleState

    if not isinstance(value, RuleState):
        raise ValueError("not a state")
    return value


def _named(value: Any) -> dict[str, Any] | None:
    """A copy of a mapping with text keys; an empty one is None."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise ValueError("not a mapping")
    try:
        return deepcopy(dict(value)) if value else None
    except RecursionError:
        raise ValueError("too deep") from None


def _format(value: Any) -> Any:
    """A pydantic model as the format of its JSON schema, without further fields."""
    if isinstance(value, type) and issubclass(value, BaseModel):
        schema = {"name": value.__name__, "schema": _closed(value.model_json_schema())}
        return {"type": "json_schema", "json_schema": schema}
    return _named(value)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return more | {name: _closed(one) for name, one in schema.items()}


NonEmpty = Annotated[str, Field(min_length=1)]
Id = Annotated[WholeNumber, Field(ge=0)]
Penalty = Annotated[RealNumber, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100), PLAIN]  # in this order JSON schemas have the bounds
Ids = Annotated[tuple[Id, ...], BeforeValidator(_several)]
Rounds = Annotated[
    tuple[WholeNumber, ...] | None, AfterValidator(_ascending),
    BeforeValidator(lambda value: None if value is None else _several(value)),
    Expected("is not a list of rounds", "ascending numbers from 1 on"),
]  # fmt: skip


_MAPPINGS = ("rules", "chat_template_kwargs", "response_format")


class GenerationOptions(Checked):
    """How to generate a text; immutable, and checked on creation.

    Every call that generates accepts it as an object, ``generate(prompt, options)``, as keywords, ``generate(prompt,
    seed=1)``, or both; keywords then replace the values of ``options``.

        >>> import sprinter
        >>> options = sprinter.GenerationOptions(method="speculative(gamma=3)", temperature=0.7, stop="\\n")
        >>> options.stop, options.replace(seed=2).to_dict()["seed"]
        (('\\n',), 2)
        >>> sprinter.GenerationOptions(sampling=sprinter.Sampling(temperature=0.7)).temperature
        0.7

    Raises:
        OptionError: an unknown keyword.
        UserError: an invalid value, or ``sampling`` together with one of the four options that it replaces.
    """

    method: Annotated[Method | None, BeforeValidator(_method)] = Field(None, description=(
        "For example auto or sprinter(tau=0.6): see 'methods'. A spec or a Method; None: the pair's "
        "``default_method``, exact and never slower than plain decoding, or what its profile has within ``budget``."
    ))  # fmt: skip
    max_new_tokens: Annotated[WholeNumber, Field(ge=1)] | None = Field(64, description=(
        "Exact limit of new tokens. None: to the end of the models' context, or of the engine's row."
    ))  # fmt: skip
    sampling: Annotated[
        InstanceOf[Sampling], Expected("is not a sprinter.Sampling", "sampling=sprinter.Sampling(...)")
    ] = Field(default_factory=Sampling)
    repetition_penalty: RealNumber = Field(1.0, ge=0.01, le=100, description=(
        "Above 1: tokens in prompt and text are less likely; 1 changes nothing. It divides their positive logits, and "
        "multiplies the negative ones."
    ))  # fmt: skip
    presence_penalty: Penalty = Field(0.0, description=(
        "Above 0: tokens in the text (not the prompt) are less likely. Subtracted from their logits."
    ))  # fmt: skip
    frequency_penalty: Penalty = Field(0.0, description=(
        "Above 0: tokens are less likely with each occurrence in the text (not the prompt). Subtracted from logits "
        "once per occurrence."
    ))  # fmt: skip
    logit_bias: Annotated[
        tuple[tuple[Id, Bias], ...], BeforeValidator(_biases), AfterValidator(lambda pairs: tuple(sorted(pairs))),
        Expected("is not a mapping of token ids to numbers in [-100, 100]", "one"),
    ] = Field((), description=(
        "ID=NUMBER: add the number, -100 to 100, to the logit of this token. {token id: number}; kept as pairs."
    ))  # fmt: skip
    bad_words: Annotated[
        tuple[NonEmpty | Annotated[tuple[Id, ...], Field(min_length=1)], ...], BeforeValidator(_words),
        Expected("is not a list of texts and lists of token ids, none of them empty", "one"),
    ] = Field((), description=(
        "A text that must not be written, in the tokenizer's spelling. Texts, or sequences of token ids; see "
        "docs/sampling.md."
    ))  # fmt: skip
    min_new_tokens: WholeNumber = Field(
        0, ge=0, description="No EOS or stop token before this number of new tokens."
    )
    ignore_eos: bool = Field(False, description=(
        "EOS and the end of a turn do not end the text; they have no text. Stop strings and stop tokens still end it."
    ))  # fmt: skip
    seed: WholeNumber = Field(0, description=(
        "The same seed gives the same text; -1: another one each time. The record holds that one."
    ))  # fmt: skip
    stop: Annotated[
        tuple[NonEmpty, ...], BeforeValidator(_several),
        Expected("is not text or a list of texts, none of them empty", "some text"),
    ] = Field((), description=(
        'End the text before this string. Of several the first one counts; also written special tokens ("<|im_end|>").'
    ))  # fmt: skip
    stop_token_ids: Ids = Field((), description=(
        "End the text at this token, as at EOS. They are among the tokens, without text."
    ))  # fmt: skip
    logprobs: Annotated[WholeNumber, Field(ge=0)] | None = Field(None, description=(
        "Log-probabilities of each token, and of this number of likeliest ones. Under the models' raw laws; 0: of the "
        "token alone; None: no log-probabilities."
    ))  # fmt: skip
    meter: Literal["running", "complete"] = Field("running", description=(
        "complete scores every trusted token, in some extra forward passes."
    ))  # fmt: skip
    require_lossless: bool = Field(False, description=(
        "Refuse a method whose text does not have the target's own law."
    ))  # fmt: skip
    budget: Annotated[RealNumber, Field(ge=0, le=1)] | None = Field(None, description=(
        "With a method or a profile: maximum mean drift per token, in the text and in each prefix of it. As the "
        "method's part ``budget=``; 0: the text is decoded exactly; None: the method's."
    ))  # fmt: skip
    never_slower: bool | None = Field(None, description=(
        "Stop drafting while the method costs more time than plain decoding. None: only where the method is \"auto\" "
        "or none is named. Which rounds draft, and how long the drafts of \"auto\" are, then depends on what passes "
        "cost on this machine, and on how many rows share them."
    ))  # fmt: skip
    switches: Rounds = Field(None, description=(
        "The rounds from which on the text is written without drafting, with it again, and so on. ``stats.switches`` "
        "of an earlier generation, in place of ``never_slower``; None: not given."
    ))  # fmt: skip
    copy_switches: Rounds = Field(None, description=(
        "With ``switches``, the rounds from which on tokens are copied from the text where none are drafted, no longer "
        "are, and so on. ``stats.copy_switches``; None: they never are."
    ))  # fmt: skip
    ahead: Annotated[
        Annotated[WholeNumber, Field(ge=1)] | Literal["auto"] | None,
        Expected("is unknown", f"a whole number >= 1, or {AUTO!r}"),
    ] = Field(None, description=(
        'Draft steps per host synchronisation; "auto": by measured times; None: 1, or a few on NVIDIA and '
        "where our kernels run a small draft model. The text does not depend on it."
    ))  # fmt: skip
    rules: Annotated[
        RuleState | Mapping[str, Any] | None, BeforeValidator(_rules),
        Expected("is not a state of rules", "the .rules of an earlier generation"),
    ] = Field(None, description=(
        "State of the rules (AdaEDL's λ, the heuristic's γ) to continue from. ``rules`` of an earlier generation by "
        "the same method, or its ``to_dict()``; None: a fresh state."
    ))  # fmt: skip
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None, BeforeValidator(_named), Expected("is not a mapping of names", "{'name': value}")
    ] = Field(None, description=(
        "Further arguments of the chat template, a JSON object. For a prompt of messages: what the template reads, "
        "such as ``{\"enable_thinking\": False}``, ``tools`` or ``documents``."
    ))  # fmt: skip
    response_format: Annotated[
        Mapping[str, Any] | None, BeforeValidator(_format),
        Expected("is not a format", "{'type': 'json_object'}, {'type': 'json_schema', ...} or a pydantic model"),
    ] = Field(None, description=(
        "The text is JSON: any object, or by a schema. OpenAI's ``{\"type\": \"json_object\"}`` or ``{\"type\": "
        "\"json_schema\", \"json_schema\": {\"schema\": {...}}}``, or a pydantic model; see docs/structured-output.md."
    ))  # fmt: skip
    grammar: NonEmpty | None = Field(None, description=(
        "The text follows a grammar, in Lark's or llama.cpp's (GBNF) notation."
    ))  # fmt: skip
    regex: NonEmpty | None = Field(None, description="The whole text matches a regular expression.")
    choices: Annotated[
        tuple[NonEmpty, ...],
        BeforeValidator(_several),
        Expected("is not a list of texts, none of them empty", "some text"),
    ] = Field((), description="The text is one of these.")

    def __init__(self, **options: Unpack[GenerationKeywords]) -> None:
        super().__init__(**_gathered(options, None))

    def __hash__(self) -> int:
        return hash(tuple(value for name, value in vars(self).items() if name not in _MAPPINGS))

    @property
    def temperature(self) -> float:
        """That of ``sampling``."""
        return self.sampling.temperature

    @property
    def top_k(self) -> int:
        """That of ``sampling``."""
        return self.sampling.top_k

    @property
    def top_p(self) -> float:
        """That of ``sampling``."""
        return self.sampling.top_p

    @property
    def min_p(self) -> float:
        """That of ``sampling``."""
        return self.sampling.min_p

    @classmethod
    def of(
        cls, options: GenerationOptions | None, keywords: Mapping[str, Any] | GenerationKeywords
    ) -> GenerationOptions:
        """The options of a call; ``options`` itself if no keyword changes it."""
        if options is None:
            return cls(**keywords)
        if not isinstance(options, GenerationOptions):
            raise UserError(
                f"options={options!r} is not a sprinter.GenerationOptions: give one, or keywords such as seed=1"
            )
        return options._replaced(keywords)

    def replace(self, **keywords: Unpack[GenerationKeywords]) -> GenerationOptions:
        """A copy with these values replaced; the object itself if nothing changes."""
        return self._replaced(keywords)

    def _replaced(self, keywords: Mapping[str, Any] | GenerationKeywords) -> GenerationOptions:
        given, own = _gathered(keywords, self.sampling), vars(self)
        if all(own[name] is given[name] for name in given):
            return self
        kept = {name: own[name] for name in _MAPPINGS if given.get(name, own[name]) is own[name]}
        made = type(self)(**{**own, **given, **dict.fromkeys(kept)})
        return made.model_copy(update=kept)  # they are its own already: a schema is not copied for each text

    def to_dict(self) -> dict[str, Any]:
        """The keywords as JSON values: ``GenerationOptions(**options.to_dict())`` generates the same tokens.

        The method is written as a spec, so its rules must be registered where it is read.
        """
        return {name: _json(getattr(self, name)) for name in OPTIONS}


OPTIONS: Mapping[str, FieldInfo] = {
    name: field
    for one, whole in GenerationOptions.model_fields.items()
    for name, field in (Sampling.model_fields.items() if one == "sampling" else [(one, whole)])
}
"""Every option by its name: type, bounds, default and description."""

if GenerationOptions.__doc__:  # python -OO drops docstrings
    _about = "".join(f"\n        {name}: {field.description}" for name, field in OPTIONS.items())
    GenerationOptions.__doc__ += f"\n    Attributes:{_about}\n    "


def check_name(name: str) -> None:
    """Raise an OptionError if no option has this name; the message suggests the nearest one."""
    if name not in OPTIONS and name != "sampling":
        raise OptionError(str(did_you_mean("option", name, [*OPTIONS, "sampling"])))


def _is_single(value: Any) -> bool:
    return not isinstance(value, list | tuple | None)


def _is_word(value: Any) -> bool:
    return _is_single(value) or (value is not None and all(isinstance(id, Integral) for id in value))


def _is_bias(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(one, str | Real) for one in value)
    )


_ITEMS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("stop", "choices", "stop_token_ids", "switches", "copy_switches"), _is_single),
    "bad_words": _is_word, "logit_bias": _is_bias,
}  # fmt: skip


def item_of(name: str) -> Callable[[Any], bool] | None:
    """Whether a value can be an item of an option that is a list; None for other options.

    Raises:
        OptionError: as ``check_name``.
    """
    check_name(name)
    return _ITEMS.get(name)


def _gathered(keywords: Mapping[str, Any] | GenerationKeywords, own: Sampling | None) -> dict[str, Any]:
    """Check the names, and put the sampling options together; ``own``: those that are not given."""
    given: dict[str, Any] = dict(keywords)
    for name in given:
        check_name(name)
    alone = {name: given.pop(name) for name in Sampling.model_fields if name in given}
    sampling = given.pop("sampling", None)
    if sampling is not None and alone:
        raise UserError(f"sampling= and {next(iter(alone))}= say the same thing: give one of them")
    if alone:
        sampling = Sampling(**(alone if own is None else {**vars(own), **alone}))
        sampling = own if sampling == own else sampling
    return given if sampling is None else {**given, "sampling": sampling}


def _json(value: Any) -> Any:
    """Convert the value of an option to a JSON value."""
    from sprinter.decode.method import Method
    from sprinter.decode.spec import full_spec
    from sprinter.decode.state import RuleState

    if isinstance(value, Method):
        return full_spec(value)
    if isinstance(value, RuleState):
        return value.to_dict()
    if isinstance(value, Mapping):
        return deepcopy(dict(value))
    return [_json(one) for one in value] if isinstance(value, tuple) else value
