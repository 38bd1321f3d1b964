"""Options of generation, which every public call accepts as one object or as keywords.

A new option is one line in ``GenerationKeywords`` (its type) and one line in ``GenerationOptions`` (its default, check
and description). The public calls, the JSON record and the command line are derived from these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from sprinter.decode.checks import at_least, between, whole
from sprinter.decode.registry import did_you_mean
from sprinter.engine.lookahead import AUTO
from sprinter.errors import OptionError, UserError, refuse_long

if TYPE_CHECKING:  # the command line reads this list before it imports torch
    from sprinter.decode.method import Method
    from sprinter.decode.state import RuleState
    from sprinter.laws import Sampling

__all__ = ["GenerationKeywords", "GenerationOptions", "default_of", "item_of"]

_BYTES = (bytes, bytearray, memoryview)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


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
    ahead: int | Literal["auto"]
    rules: RuleState | Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    sampling: Sampling | None


def _method(name: str, value: Any) -> Method | None:
    from sprinter.decode.spec import parse_method

    return None if value is None else parse_method(value)


def _budget(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"{name}={value!r} is not a mean drift: give a number from 0 to 1")
    return float(value)


def _limit(name: str, value: Any) -> int | None:
    return None if value is None else _positive(name, value)


def _positive(name: str, value: Any) -> int:
    number = whole(name, value)
    at_least(name, number, 1)
    return number


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | None) and (isinstance(value, _BYTES) or not _is_several(value)):
        raise UserError(f"{name}={value!r} is neither text nor a list of texts: give {name}=['...']")
    texts = (value,) if isinstance(value, str) else () if value is None else tuple(value)
    if any(not isinstance(text, str) or not text for text in texts):
        raise UserError(f"a {name} string is empty or not text: give non-empty strings")
    return texts


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, _BYTES):
        raise UserError(f"{name}={value!r} is bytes: give token ids, {name}=[...]")
    ids = () if value is None else value
    return tuple(_id(name, id) for id in (ids if _is_several(ids) else (ids,)))


def _id(name: str, value: Any) -> int:
    number = whole(name, value.item() if getattr(value, "ndim", None) == 0 else value)  # torch's numbers too
    at_least(name, number, 0)
    return number


def _is_several(value: Any) -> bool:
    """Whether the value is a list of some kind: no mapping, and no array without dimensions."""
    return isinstance(value, Iterable) and not isinstance(value, Mapping) and getattr(value, "ndim", 1) > 0


def _one_of(choices: tuple[str, ...], name: str, value: Any) -> str:
    if value not in choices:
        raise UserError(f"{name}='{value}' is unknown: give {' or '.join(map(repr, choices))}")
    return str(value)


def _steps(name: str, value: Any) -> int | str:
    if isinstance(value, str) and value != AUTO:
        raise UserError(f"{name}={value!r} is unknown: give a whole number >= 1, or {AUTO!r}")
    return AUTO if isinstance(value, str) else _positive(name, value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r} is neither True nor False: give one of them")
    return value


def _maybe(name: str, value: Any) -> bool | None:
    return None if value is None else _flag(name, value)


def _rounds(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    rounds = _ids(name, value)
    if any(a >= b for a, b in pairwise((0, *rounds))):
        raise UserError(f"{name}={value!r} is not a list of rounds: give ascending numbers from 1 on")
    return rounds


def _rules(name: str, value: Any) -> RuleState | Mapping[str, Any] | None:
    """Check the type, and copy a mapping; ``RuleState.begin`` checks whether the method can have this state."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return deepcopy(dict(value))
    from sprinter.decode.state import RuleState

    if not isinstance(value, RuleState):
        raise UserError(f"{name}={value!r} is not a state of rules: give the .rules of an earlier generation")
    return value


def _mapping(name: str, value: Any) -> dict[str, Any] | None:
    """A copy of a mapping with text keys; an empty one is None."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise UserError(f"{name}={value!r} is not a mapping of names: give {name}={{'name': value}}")
    return deepcopy(dict(value)) if value else None


def _penalty(name: str, value: Any) -> float:
    between(name, value, -2.0, 2.0)
    return float(value)


def _factor(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.01 <= float(value) <= 100.0:
        raise UserError(
            f"{name}={value!r} is out of range: give a number from 0.01 to 100 (1 changes nothing)"
        )
    return float(value)


def _natural(name: str, value: Any) -> int:
    number = whole(name, value)
    at_least(name, number, 0)
    return number


def _count(name: str, value: Any) -> int | None:
    return None if value is None else _natural(name, value)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs in the order of their ids. JSON's keys are texts, so an id may be one."""
    try:
        pairs = dict(() if value is None else value)
    except (TypeError, ValueError):
        raise UserError(f"{name}={value!r} is not a mapping: give {name}={{token id: bias}}") from None
    found: dict[int, float] = {}
    for id, bias in pairs.items():
        short = isinstance(id, str) and id.isdecimal() and len(id) < 20  # Python refuses to read long numbers
        number = _id(f"a token id of {name}", int(id) if short else id)
        between(f"{name} of token {number}", bias, -100.0, 100.0)
        found[number] = float(bias)
    return tuple(sorted(found.items()))


def _words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Texts, and sequences of token ids."""
    words = (value,) if isinstance(value, str) else () if value is None else value
    if isinstance(words, _BYTES) or not _is_several(words):
        raise UserError(
            f"{name}={value!r} is not a list: give texts and lists of token ids, {name}=['...', [5, 6]]"
        )
    found = tuple(word if isinstance(word, str) else _word(name, word) for word in words)
    if not all(found):
        raise UserError(f"one of {name} is empty: give texts and lists of token ids that are not")
    return found


def _word(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, _BYTES) or not _is_several(value):
        raise UserError(
            f"{value!r} in {name} is neither text nor a list of token ids: give {name}=['...', [5, 6]]"
        )
    return _ids(name, value)


def _as_given(name: str, value: Any) -> Any:
    """No check here: ``Sampling`` checks the sampling options."""
    return value


def _option(
    default: Any, check: Callable[[str, Any], Any], about: str, *, help: str | None = None,
    choices: tuple[str, ...] = (), hash: bool | None = None, item: Callable[[Any], bool] | None = None,
) -> Any:  # fmt: skip
    """A field of ``GenerationOptions``.

    Args:
        check: (name, given value) -> stored value; raises UserError.
        about: description for the docstring.
        help: short description for the command line; None: not an option of the command line.
        choices: the valid values, if there are few.
        hash: False: the value may be unhashable, and is left out of the options' hash.
        item: for an option that is a list, whether a value can be an item of it; see ``item_of``.
    """
    metadata = {"check": check, "about": about, "help": help, "choices": choices, "item": item}
    return field(default=default, hash=hash, metadata=metadata)


def _is_single(value: Any) -> bool:
    return not isinstance(value, list | tuple | None)


def _is_word(value: Any) -> bool:
    return _is_single(value) or (value is not None and all(isinstance(id, Integral) for id in value))


def _is_bias(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, str | Real)


_METERS = ("running", "complete")


@dataclass(frozen=True, init=False)
class GenerationOptions:
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

    method: Method | None = _option(
        None, _method, "a spec such as \"sprinter(tau=0.6)\" or a Method; None: the pair's ``default_method``, exact "
        "and never slower than plain decoding, or what its profile has within ``budget``.",
        help="For example auto or sprinter(tau=0.6): see 'methods'.",
    )  # fmt: skip
    max_new_tokens: int | None = _option(
        64, _limit, "exact limit of new tokens; None: to the end of the models' context, or of the engine's row.",
        help="Exact limit.",
    )  # fmt: skip
    temperature: float = _option(
        1.0, _as_given, "divides the logits of target and draft; 0 is greedy.", help="0 is greedy."
    )
    top_k: int = _option(
        0,
        whole,
        "keep the k likeliest tokens; 0 keeps all.",
        help="Keep the k likeliest tokens; 0 keeps all.",
    )
    top_p: float = _option(
        1.0, _as_given, "keep the likeliest tokens up to this probability; 1 keeps all.",
        help="Keep the likeliest tokens up to this share; 1 keeps all.",
    )  # fmt: skip
    min_p: float = _option(
        0.0, _as_given, "drop tokens below this share of the largest probability; 0 keeps all.",
        help="Drop tokens below this share of the likeliest; 0 keeps all.",
    )  # fmt: skip
    repetition_penalty: float = _option(
        1.0, _factor, "divides the positive logits of tokens in prompt and text, and multiplies the negative ones; 1 "
        "changes nothing.", help="Above 1: tokens in prompt and text are less likely; 1 changes nothing.",
    )  # fmt: skip
    presence_penalty: float = _option(
        0.0, _penalty, "subtracted from the logits of tokens in the text (not the prompt); -2 to 2.",
        help="Above 0: tokens in the text are less likely; -2 to 2.",
    )  # fmt: skip
    frequency_penalty: float = _option(
        0.0, _penalty, "subtracted from logits once per occurrence of the token in the text (not the prompt); -2 to 2.",
        help="Above 0: tokens are less likely with each occurrence in the text; -2 to 2.",
    )  # fmt: skip
    logit_bias: tuple[tuple[int, float], ...] = _option(
        (), _biases, "added to logits: {token id: number in [-100, 100]}; kept as pairs.",
        help="ID=NUMBER: add the number, -100 to 100, to the logit of this token; may be repeated.", item=_is_bias,
    )  # fmt: skip
    bad_words: tuple[str | tuple[int, ...], ...] = _option(
        (), _words, "texts, or sequences of token ids, that are not written; see docs/sampling.md for texts.",
        help="A text that is not written, in the tokenizer's spelling; may be repeated.", item=_is_word,
    )  # fmt: skip
    min_new_tokens: int = _option(
        0, _natural, "EOS and stop tokens are forbidden before this number of new tokens.",
        help="No EOS or stop token before this number of tokens.",
    )  # fmt: skip
    seed: int = _option(
        0, whole, "the same seed gives the same text; -1: another one each time, which the record holds.",
        help="The same seed gives the same text; -1: another one each time.",
    )  # fmt: skip
    stop: tuple[str, ...] = _option(
        (), _texts, 'stop strings: the text ends before the first; also written special tokens ("<|im_end|>").',
        help="End the text before this string; may be repeated.", item=_is_single,
    )  # fmt: skip
    stop_token_ids: tuple[int, ...] = _option(
        (), _ids, "stop tokens, which end the text like EOS: they are among the tokens, without text.",
        help="End the text at this token, as at EOS; may be repeated.", item=_is_single,
    )  # fmt: skip
    logprobs: int | None = _option(
        None, _count, "number of most probable tokens to name for each token, with the log-probabilities of it and "
        "them under the models' raw laws; 0: of it alone; None: no log-probabilities.",
        help="With --json: log-probabilities of each token, and of this number of likeliest ones.",
    )  # fmt: skip
    meter: Literal["running", "complete"] = _option(
        "running", partial(_one_of, _METERS), '"complete": closing forward passes score every trusted token.',
        help="complete scores every trusted token, in some extra forward passes.", choices=_METERS,
    )  # fmt: skip
    require_lossless: bool = _option(
        False, _flag, "refuse a method whose text does not have the target's own law.",
        help="Refuse a lossy method.",
    )  # fmt: skip
    budget: float | None = _option(
        None, _budget, "the drifts of the first n tokens sum to at most the budget times n, for every n, as with the "
        "method's part ``budget=``; 0: the text is decoded exactly; None: the method's. Needs a method or a profile.",
        help="With a method or a profile: maximum mean drift a token, of the text and of each beginning of it.",
    )  # fmt: skip
    never_slower: bool | None = _option(
        None, _maybe, "stop drafting while the method costs more time than plain decoding would; "
        'None: only where the method is "auto" or none is named. Which rounds draft, and how long the drafts of "auto" '
        "are, then depends on what passes cost on this machine, and on how many rows share them.",
        help="Stop drafting while the method is slower than plain decoding.",
    )  # fmt: skip
    switches: tuple[int, ...] | None = _option(
        None, _rounds, "the rounds from which on the text is written without drafting, with it again, and so on: "
        "``stats.switches`` of an earlier generation, in place of ``never_slower``; None: not given.", item=_is_single,
    )  # fmt: skip
    copy_switches: tuple[int, ...] | None = _option(
        None, _rounds, "with ``switches``, the rounds from which on tokens are copied from the text where none are "
        "drafted, no longer are, and so on: ``stats.copy_switches``; None: they never are.", item=_is_single,
    )  # fmt: skip
    ahead: int | Literal["auto"] = _option(
        1, _steps, 'draft steps per host synchronisation; "auto": by measured times. The text does not depend on it.',
    )  # fmt: skip
    rules: RuleState | Mapping[str, Any] | None = _option(
        None, _rules, "state of the rules (AdaEDL's λ, the heuristic's γ) to continue from: ``rules`` of an earlier "
        "generation by the same method, or its ``to_dict()``; None: a fresh state.", hash=False,
    )  # fmt: skip
    chat_template_kwargs: Mapping[str, Any] | None = _option(
        None, _mapping, "further arguments of the chat template, for a prompt of messages: what it reads, such as "
        '``{"enable_thinking": False}``, ``tools`` or ``documents``.',
        help="Further arguments of the chat template, a JSON object.", hash=False,
    )  # fmt: skip

    def __init__(self, **options: Unpack[GenerationKeywords]) -> None:
        given = _expanded(options)
        for one in fields(self):
            refuse_long(one.name, value := given.get(one.name, one.default))
            object.__setattr__(self, one.name, one.metadata["check"](one.name, value))
        for name in _SAMPLING:
            value = getattr(self.sampling, name)
            object.__setattr__(self, name, value if name == "top_k" else float(value))

    @cached_property
    def sampling(self) -> Sampling:
        """Temperature and truncation, which both models' laws are processed with, as one object."""
        from sprinter.laws import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

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
        given, own = _expanded(keywords), {one.name: getattr(self, one.name) for one in fields(self)}
        return self if all(own[name] is given[name] for name in given) else type(self)(**{**own, **given})

    def to_dict(self) -> dict[str, Any]:
        """The keywords as JSON values: ``GenerationOptions(**options.to_dict())`` generates the same tokens.

        The method is written as a spec, so its rules must be registered where it is read.
        """
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}


_DEFAULTS = {one.name: one.default for one in fields(GenerationOptions)} | {"sampling": None}
_ABOUT = "".join(f"\n        {one.name}: {one.metadata['about']}" for one in fields(GenerationOptions))
if GenerationOptions.__doc__:  # python -OO drops docstrings
    GenerationOptions.__doc__ += f"\n    Attributes:{_ABOUT}\n    "


def default_of(name: str) -> Any:
    """The default value of a keyword.

    Raises:
        OptionError: no option has this name; the message suggests the nearest one.
    """
    if name not in _DEFAULTS:
        raise OptionError(str(did_you_mean("option", name, list(_DEFAULTS))))
    return _DEFAULTS[name]


def item_of(name: str) -> Callable[[Any], bool] | None:
    """Whether a value can be an item of an option that is a list; None for other options.

    Raises:
        OptionError: as ``default_of``.
    """
    default_of(name)
    found: dict[str, Any] = {one.name: one.metadata["item"] for one in fields(GenerationOptions)}
    return found.get(name)


def _expanded(keywords: Mapping[str, Any] | GenerationKeywords) -> dict[str, Any]:
    """Check the names, and expand ``sampling`` into the four options that it replaces."""
    given: dict[str, Any] = dict(keywords)
    sampling = given.pop("sampling", None)
    for name in given:
        default_of(name)
    if sampling is None:
        return given
    from sprinter.laws import Sampling

    if not isinstance(sampling, Sampling):
        raise UserError(
            f"sampling={sampling!r} is not a sprinter.Sampling: give sampling=sprinter.Sampling(...)"
        )
    if both := next((name for name in _SAMPLING if name in given), None):
        raise UserError(f"sampling= and {both}= say the same thing: give one of them")
    return {**given, **{name: getattr(sampling, name) for name in _SAMPLING}}


def _plain(value: Any) -> Any:
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
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
