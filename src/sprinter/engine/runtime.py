"""The parts of a pair that its requests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from sprinter.decode.costs import STEP, PassCosts
from sprinter.decode.method import Method
from sprinter.decode.recycle import Recycle
from sprinter.decode.spec import is_auto, parse_method
from sprinter.decode.stop import Never
from sprinter.decode.switch import Past
from sprinter.engine.backends.graph_units import LAWS
from sprinter.engine.costs import head_costs, kept_costs, pass_costs, shared_costs
from sprinter.engine.executor import Executor
from sprinter.engine.grammar import Grammars
from sprinter.engine.options import GenerationOptions
from sprinter.engine.pool import IdleRunners, RunnerPool
from sprinter.engine.prefix import DEFAULT, PrefixCache
from sprinter.engine.profile import Profile, PromptWatch, TunedSetting
from sprinter.engine.record import models_record
from sprinter.engine.stream import special_ids
from sprinter.engine.suffixes import SuffixCache
from sprinter.errors import UserError
from sprinter.heads.drafting import TokenHeads
from sprinter.heads.head import Head
from sprinter.models.choose import capture_kind
from sprinter.models.flops import ForwardCosts, forward_flops
from sprinter.models.interface import ServedModel
from sprinter.models.kernels import rows_dtype_of
from sprinter.models.memory import cache_bytes, check_memory
from sprinter.models.pair import LoadedPair

__all__ = ["PairRuntime", "check_budget", "drafts_by_default"]

# A draft is used by default if it would pay so much where the target keeps so many of its tokens: what it gains there
# must outweigh what is lost in texts on which the two models agree less.
_KEPT, _PAYS = 0.8, 1.1

_COSTS = ("pass_costs", "shared_costs", "head_costs", "shared_head_costs")
"""Attributes that hold measured costs."""


def drafts_by_default(costs: PassCosts) -> bool:
    """Whether a text whose request names no method is drafted: else no draft would pay, and it is decoded plainly."""
    return costs.speed_up(_KEPT) >= _PAYS


class PairRuntime:
    """The parts of a pair that requests share: two models, a tokenizer, heads, and pools of caches.

    Attributes:
        heads: by kind, trained for the draft of ``models``.
        drafting: heads on the target that draft; None: there are none.
        profile: of this pair; None: none. watch: compares texts with those that it was tuned on.
        special: ids of special tokens. grammars: of requests for structured output.
        suffixes: earlier texts, for drafters that read them.

    Args:
        cache: what is reused of earlier texts.
    """

    def __init__(
        self,
        models: LoadedPair,
        heads: Mapping[str, Head],
        cache: PrefixCache = DEFAULT,
        profile: Profile | None = None,
        drafting: TokenHeads | None = None,
        suffixes: SuffixCache | None = None,
    ) -> None:
        self.models, self.heads, self.profile, self.drafting = models, heads, profile, drafting
        self.watch = None if profile is None else PromptWatch(profile)
        self.special = frozenset[int]() if models.tokenizer is None else special_ids(models.tokenizer)
        self.grammars = Grammars(models.tokenizer, models.vocab_size)
        self.suffixes = SuffixCache() if suffixes is None else suffixes
        self.trackers: dict[Any, Past] = {}  # the last ones of rows that share passes, by method and rows
        self._reloaded = False
        idle = IdleRunners(cache.max_bytes)
        self.targets = RunnerPool(models.target, cache, idle)
        self.drafts = RunnerPool(models.draft, cache, idle) if models.draft else None
        self.costs = ForwardCosts(
            forward_flops(models.target.model.config),
            forward_flops(models.draft.model.config) if models.draft else 0.0,
        )

    @property
    def default_method(self) -> str:
        """The method if none is given, lossless: the profile's fastest, else ``auto`` with a draft, ``heads`` with
        heads that draft, else ``autoregressive``. The last two draft only while that pays."""
        if self.profile is not None:
            return self.profile.fastest(None).spec
        if self.models.draft is not None:
            return "auto"
        return "autoregressive" if self.drafting is None else "heads"

    def _default(self, rows: int) -> Method:
        """``default_method``, and plain decoding where by the costs of passes no draft could pay.

        Args:
            rows: that share passes.
        """
        method = parse_method(self.default_method)
        if is_auto(method) and not drafts_by_default(self.costs_of(method, rows).for_rows(rows)):
            return parse_method("autoregressive")
        return method

    def tuned_for(self, options: GenerationOptions) -> TunedSetting | None:
        """The profile's setting that a request takes; None: its method does not come from a profile."""
        if self.profile is None or not (options.method is None or _is_open(options.method)):
            return None
        return self.profile.fastest(_budget_of(options), options.sampling.greedy)

    def method_for(self, options: GenerationOptions, rows: int = 1) -> Method:
        """The method of a request: the given one or, from the profile, the fastest within the budget; with the pair's
        numbers in place of "recorded" and "measured".

        Args:
            rows: that share passes when it begins, for ``auto``, unless ``never_slower=False`` keeps a text independent
                of other rows.
        """
        tuned = self.tuned_for(options)
        if tuned is not None:
            return self.settle(tuned.within(_budget_of(options), options.sampling.greedy))
        if options.method is None:
            check_budget(options)
            shared = 1 if options.never_slower is False else rows
            return self.settle(self._default(shared), shared, options.sampling.greedy)
        asked = options.method
        budget = _budget_of(options) if is_auto(asked) else options.budget
        shares = is_auto(asked) and options.never_slower is not False
        if is_auto(asked) and self.models.draft is None:
            asked = _alone(asked)
        elif budget is not None and budget != asked.budget:
            asked = asked.replace(budget=budget)
        return self.settle(asked, rows if shares else 1, options.sampling.greedy)

    @cached_property
    def described(self) -> dict[str, Any]:
        """The record of models and heads that is part of each result."""
        return models_record(self.models, self.heads, self.drafting)

    @property
    def taus(self) -> dict[str, float]:
        """The thresholds that heads record, by kind."""
        return {kind: head.config.tau for kind, head in self.heads.items()}

    @property
    def _as_loaded(self) -> dict[str, Any] | None:
        """``described``, under which costs are kept; None since a ``reload``: models may be others than their files."""
        return None if self._reloaded else self.described

    @cached_property
    def pass_costs(self) -> PassCosts:
        """What forward passes of the pair cost on this machine, see ``engine.costs``."""
        return pass_costs(self.models, self._as_loaded)

    @property
    def plain_token_s(self) -> float | None:
        """Seconds of a token of plain decoding; None: they have not been measured."""
        costs = self.__dict__.get("pass_costs") or self._kept_costs
        return None if costs is None else costs.target_s(1) + costs.host[0]

    @cached_property
    def _kept_costs(self) -> PassCosts | None:
        return kept_costs(self.models, self._as_loaded)

    @cached_property
    def shared_costs(self) -> PassCosts:
        """``pass_costs`` with those of passes that several rows share."""
        return shared_costs(self.models, self._as_loaded, self.pass_costs)

    @cached_property
    def head_costs(self) -> PassCosts:
        """``pass_costs`` with steps of the heads that draft in place of those of the draft model."""
        return self._with_heads(self.pass_costs)

    @cached_property
    def shared_head_costs(self) -> PassCosts:
        """``head_costs`` of passes that several rows share."""
        return self._with_heads(self.shared_costs)

    def _with_heads(self, costs: PassCosts) -> PassCosts:
        if self.drafting is None:
            return costs
        return head_costs(self.drafting, costs, self.models.target.module("heads that draft").dtype)

    def costs_of(self, method: Method, rows: int = 1, greedy: bool = False) -> PassCosts:
        """The costs that a method has on this machine, in engines of so many rows; ``greedy``: without draws.

        Where the draft model goes on after heads, their steps are charged at the price of its own.
        """
        if method.drafter.by_heads and not method.drafter.uses_model:
            costs = self.shared_head_costs if rows > 1 else self.head_costs
        else:
            costs = self.shared_costs if rows > 1 else self.pass_costs
        some = rows if method.learns_if_it_pays else None
        return costs.of_rules(method.learned_from is not None, some, greedy)

    @property
    def measured(self) -> dict[str, Any]:
        """The costs that were needed so far, as JSON values for ``use_measured``."""
        return {name: asdict(self.__dict__[name]) for name in _COSTS if name in self.__dict__}

    def use_measured(self, kept: Mapping[str, Any]) -> None:
        """Take costs as they are in a record, so that a run that is resumed decides as it began.

        Raises:
            UserError: they are damaged.
        """
        try:
            known = dict(kept)
            found = {name: PassCosts.from_json(known[name]) for name in _COSTS if name in known}
        except (LookupError, TypeError, ValueError):
            raise UserError(
                "the costs of passes in the record of this run are damaged: start it anew"
            ) from None
        self.__dict__.update(found)

    def settle(self, method: Method, rows: int = 1, greedy: bool = False) -> Method:
        """The method with the pair's numbers in place of "recorded" and "measured"; ``rows``: that share passes;
        ``greedy``: as in ``costs_of``."""
        accuracies = () if self.drafting is None else self.drafting.accuracies
        costs = self.costs_of(method, rows, greedy) if method.measures else None
        given = method, costs, rows, tuple(self.taus.items()), tuple(map(tuple, accuracies))
        try:
            found = _settled(*given)
        except TypeError:  # a rule of the user's that cannot be hashed
            found = _settled.__wrapped__(*given)
        return method if found == method else found  # the one that was given, not its equal

    def without_text(self) -> PairRuntime:
        """The same models, heads and caches without a tokenizer: results have token ids but no text."""
        quiet = copy(self)
        quiet.models = replace(self.models, tokenizer=None)
        return quiet

    def _pools(self) -> list[RunnerPool]:
        return [self.targets] if self.drafts is None else [self.targets, self.drafts]

    def forget_texts(self) -> None:
        """Reuse nothing of earlier texts."""
        for pool in self._pools():
            pool.forget()
        self.suffixes.clear()

    def reload(self) -> None:
        """See ``Pair.reload``."""
        for pool in self._pools():
            pool.reload()
        for head in self.heads.values():
            model = self.models.draft if head.config.model == "draft" else self.models.target
            assert model is not None
            head.to(model.model.device)
        if self.drafting is not None:
            self.drafting.move_beside(self.models.target.module("heads that draft"))
        self._reloaded = True
        self.trackers.clear()
        for name in ("described", "_kept_costs", *_COSTS):
            self.__dict__.pop(name, None)  # made again when needed

    def take(
        self,
        max_len: int,
        rows: int,
        needs_target: bool,
        needs_draft: bool,
        spare: int = 0,
        prompt: Sequence[int] = (),
    ) -> Executor:
        """Borrow rows of ``max_len`` tokens of text and ``spare`` slots for a tree, in the models that are used.

        ``prompt``: token ids of the text that one row will read.
        """
        target = self.targets.take(max_len, rows, spare, prompt) if needs_target else None
        draft = self.drafts.take(max_len, rows, spare, prompt) if self.drafts and needs_draft else None
        held = (
            None if target is None else self.targets.held(target),
            None if draft is None or self.drafts is None else self.drafts.held(draft),
        )
        return Executor(target, draft, self.models.vocab_size, held)

    def check_memory(
        self,
        max_len: int,
        rows: int,
        needs_target: bool,
        needs_draft: bool,
        memory_bytes: int | None,
        spare: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        """Check that the rows' caches fit into ``memory_bytes``; None: into the free memory, idle caches included.

        Idle caches are reused, or dropped if they do not fit the request and their memory is needed.

        Raises:
            UserError: they do not fit; the message names the largest number of rows that does.
        """
        needed = [(self.targets, needs_target), (self.drafts, needs_draft)]
        pools = [pool for pool, needs in needed if pool is not None and needs]

        def check(new: Sequence[RunnerPool]) -> None:
            if new:
                models = [pool.model.model for pool in new]
                sizes = [pool.size(max_len, spare) for pool in new]
                beside = [self._beside(pool, size) for pool, size in zip(new, sizes, strict=True)]
                check_memory(models, rows, sizes, memory_bytes, beside if memory_bytes is None else None)

        if memory_bytes is not None:
            return check(pools)
        try:
            check([pool for pool in pools if not pool.holds(max_len, rows, spare, prompt)])
        except UserError:
            for pool in (self.targets, self.drafts):
                if pool is not None:
                    pool.clear()
            check(pools)

    def _beside(self, pool: RunnerPool, length: int) -> int:
        """Bytes that a row of so many tokens needs in a model beside its cache: laws of captured rounds, and a layer's
        keys and values of fewer bits in those of the model."""
        model = getattr(pool.model.model, "inner", pool.model.model)  # of a draft of another vocabulary
        if isinstance(model, ServedModel):
            return 0
        captured = pool.model.compile is not False and capture_kind(model)[0] == "graphs"
        laws = LAWS["target" if pool is self.targets else "draft"] * captured
        config = model.config.get_text_config()
        narrow, layers = rows_dtype_of(model), int(config.num_hidden_layers)
        wide = 0 if narrow is None else cache_bytes(model, length) * model.dtype.itemsize // narrow.itemsize
        return laws * int(config.vocab_size) * torch.float32.itemsize + wide // max(1, layers)

    def give_back(self, models: Executor) -> None:
        """Return borrowed rows in any state; what later texts may reuse stays in them."""
        for rows, pool in ((models.target, self.targets), (models.draft, self.drafts)):
            if rows is not None and pool is not None:
                rows.end_all()
                pool.give_back(rows.runner)


def _alone(auto: Method) -> Method:
    """``auto`` without a draft model: its copies, and plain decoding between them."""
    recycled = Recycle(reads=auto.drafter.reads)  # type: ignore[attr-defined]
    copies = replace(auto.drafter, otherwise=recycled, step=STEP)  # type: ignore[type-var]
    return Method(drafter=copies, stop=Never(), cap=auto.cap)


@lru_cache(maxsize=128)
def _settled(
    method: Method,
    costs: PassCosts | None,
    rows: int,
    taus: tuple[tuple[str, float], ...],
    accuracies: tuple[tuple[float, ...], ...],
) -> Method:
    """``Method.settle``, once for many requests."""
    return method.settle(dict(taus), costs and costs.for_rows(rows), accuracies)


def _is_open(method: Method) -> bool:
    """Whether it is ``auto``, with costs that are to be measured: a profile has measured more."""
    return is_auto(method) and method.stop.measures


def check_budget(options: GenerationOptions) -> None:
    """Raise a UserError for a budget without a method, which only a profile can name then."""
    if options.budget and options.method is None:
        raise UserError(
            f"budget={options.budget:g} needs a lossy method: the default, auto, stays exact unless it is named. "
            "Name one, such as method 'auto' or 'certain', or leave the budget out"
        )


def _budget_of(options: GenerationOptions) -> float | None:
    """The budget of a request whose method is chosen here: an exact one is found where that is required."""
    if options.require_lossless:
        return 0.0
    asked = options.method
    return asked.budget if options.budget is None and asked is not None else options.budget
