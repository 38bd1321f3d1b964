"""Random requests under random disturbances, and the check that whoever survives wrote what it writes alone.

Disturbances: NaN in logits, states, keys and values of either model, for one row of one pass; ``KeyboardInterrupt`` in
a pass, behind it and in a rule; no memory for a pass; a rule that raises; requests that are cancelled.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from tests.models.eager_units import EagerUnits
from transformers import PreTrainedModel

import sprinter
from sprinter.decode import decoding as decoding_module
from sprinter.decode.accept import AcceptRule
from sprinter.engine import pool
from sprinter.engine.engine import Engine
from sprinter.engine.executor import Executor
from sprinter.engine.policy import Policy
from sprinter.errors import BatchError
from sprinter.models.capture.runner import CapturedRunner
from sprinter.models.choose import make_runner
from sprinter.models.interface import Runner
from sprinter.models.runners.crop import CropRunner

KINDS = ("row", "captured", "crop")
SINGLE = (
    "autoregressive", "draft-only", "speculative(gamma=3)", "sprinter(tau=0.5)", "coin(rate=0.5)", "svip(h=0.4)",
    "lookup(n=2, gamma=4)", "drafter=lookup(least=1,otherwise=model),stop=fixed(gamma=2)", "specdec++", "disco",
    "typical(gamma=3)", "fuzzy(gamma=2)", "allocation(share=0.5)", "drafter=model(greedy=true),stop=fixed(gamma=3)",
    "adaedl", "heuristic(start=3)", "confidence", "opt(gamma=3)", "uno(gamma=3)", "mentored(gamma=3)",
    "lenient(gamma=3)", "bild", "random(gamma=3)",
)  # fmt: skip
SEVERAL = ("batch(drafts=2, gamma=3)", "specinfer(drafts=3, gamma=2)", "spectr(drafts=2, gamma=3)")


class RuleError(Exception):
    """What a rule raises."""


@dataclass
class Disturber:
    """What goes wrong, and when: every chance is drawn from one seeded source.

    Attributes:
        often: a factor on every chance.
        calm: nothing goes wrong while this is set.
        seen: how often each disturbance happened.
    """

    chance: random.Random
    often: float = 1.0
    calm: bool = True
    seen: Counter[str] = field(default_factory=Counter)

    def now(self, what: str, rate: float) -> bool:
        if self.calm or self.chance.random() >= self.often * rate:
            return False
        self.seen[what] += 1
        return True

    def poison(self, what: str, rate: float) -> Callable[..., torch.Tensor | None]:
        """A forward hook: NaN in one row, at one position, padding perhaps."""

        def hook(module: object, args: object, output: torch.Tensor) -> torch.Tensor | None:
            if not self.now(what, rate):
                return None
            spoilt = output.clone()
            spoilt[self.chance.randrange(output.shape[0]), self.chance.randrange(output.shape[1])] = torch.nan
            return spoilt

        return hook

    @contextmanager
    def at_work(self, pair: sprinter.Pair) -> Iterator[None]:
        """While this lasts, the pair's passes and rules fail now and then."""
        handles = []
        assert pair.models.draft is not None
        for which, loaded in (("target", pair.models.target), ("draft", pair.models.draft)):
            model: Any = loaded.model
            layer = model.model.layers[-1].self_attn
            for part, module in (
                ("logits", model.lm_head), ("states", model.model.norm),
                ("keys", layer.k_proj), ("values", layer.v_proj),
            ):  # fmt: skip
                handles.append(
                    module.register_forward_hook(self.poison(f"NaN in the {which}'s {part}", 2e-3))
                )
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        passes, ask, judge = Executor.run, decoding_module._ask_rules, AcceptRule.judge

        def run(models: Executor, inputs: Any) -> Any:
            if self.now("no memory for a pass", 4e-3):
                raise torch.OutOfMemoryError
            done = passes(models, inputs)
            if self.now("interrupt between read and answer", 8e-3):
                raise KeyboardInterrupt
            return done

        def rule(original: Callable[..., Any]) -> Callable[..., Any]:
            def asked(*args: Any) -> Any:
                if self.now("error in a rule", 1e-3):
                    raise RuleError("the rule is broken")
                if self.now("interrupt in a rule", 4e-3):
                    raise KeyboardInterrupt
                return original(*args)

            return asked

        patch.setattr(Executor, "run", run)
        patch.setattr(decoding_module, "_ask_rules", rule(ask))
        patch.setattr(AcceptRule, "judge", rule(judge))

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Interrupts of what is done here end here."""
        self.calm = False
        try:
            yield
        except KeyboardInterrupt:
            self.seen["KeyboardInterrupt"] += 1
        finally:
            self.calm = True


def runner_maker(kind: str) -> Callable[..., Runner]:
    """Replacement of ``make_runner``."""
    units: dict[int, EagerUnits] = {}

    def make(model: PreTrainedModel, *, batch: int = 1, max_len: int, **_: object) -> Runner:
        if kind == "captured":
            own = units.setdefault(id(model), EagerUnits(model))
            return CapturedRunner(model, batch, max_len, own.windows, own)
        if kind == "crop":
            assert batch == 1
            return CropRunner(model, max_len)
        return make_runner(model, batch=batch, max_len=max_len)

    return make


def random_request(
    chance: random.Random, methods: tuple[str, ...], seed: int, longest: int
) -> dict[str, Any]:
    return {
        "prompt": [chance.randrange(24) for _ in range(chance.choice((1, 2, 5, 9, 30)))],
        "method": chance.choice(methods),
        "max_new_tokens": chance.randint(1, longest),
        "temperature": chance.choice((1.0, 0.75, 0.5, 0.0)),
        "top_k": chance.choice((0, 0, 5)),
        "top_p": chance.choice((1.0, 1.0, 0.9)),
        "seed": seed,
        "meter": chance.choice(("running", "complete")),
        "ahead": chance.choice((1, 1, 2, 4)),
    }


Fact = tuple[int, Any, int]


def text(out: sprinter.Generation) -> list[Fact]:
    return [(token.id, token.origin, token.round) for token in out.tokens]


def facts(out: sprinter.Generation, kind: str = "") -> tuple[Any, ...]:
    """What must be the same as alone, the counts too; drifts to the last bits.

    Captured steps may go on behind a draft's end, by which rows draft together.
    """
    stats, drifts = out.stats, [None if t.drift is None else round(t.drift, 9) for t in out.tokens]
    steps = None if kind == "captured" else stats.draft_steps
    counts = (stats.rounds, stats.target_calls, steps, stats.target_tokens, stats.checked)
    return text(out), drifts, counts, out.accept_lengths, out.finish_reason


@dataclass
class Trial:
    """Requests in one engine (or one stream after the other), disturbed; their twins alone, undisturbed.

    Args:
        pair: disturbed, its caches are of this kind of runners alone. twin: the same, with caches of its own.
        kind: of the runners. longest: most new tokens of a request.
    """

    pair: sprinter.Pair
    twin: sprinter.Pair
    kind: str
    chance: random.Random
    disturber: Disturber
    counts: Counter[str]
    longest: int

    def run(self, count: int, first_seed: int, streams: bool) -> None:
        methods = SINGLE if self.kind == "crop" else SINGLE + 4 * SEVERAL
        asked = [self._request(methods, first_seed + i) for i in range(count)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "make_runner", runner_maker(self.kind))
            alone = [self.twin.generate(**one) for one in asked]
            with self.disturber.at_work(self.pair):
                (self._in_streams if streams else self._in_engine)(asked, alone)
        self.counts["requests"] += count
        self.counts[f"{self.kind}, {'streams' if streams else 'engine'}"] += count

    def _request(self, methods: tuple[str, ...], seed: int) -> dict[str, Any]:
        """A random request, of a method that has been asked for least now and then, so that none is left out."""

        def label(method: str) -> str:
            return f"{self.kind} × {method.partition('(')[0]}"

        request = random_request(self.chance, methods, seed, self.longest)
        if self.chance.random() < 0.3:
            request["method"] = min(methods, key=lambda one: self.counts[label(one)])
        self.counts[label(request["method"])] += 1
        return request

    def _check(self, out: sprinter.Generation, alone: sprinter.Generation, error: Exception | None) -> None:
        if error is None and out.finish_reason not in ("cancelled", "interrupted"):
            assert facts(out, self.kind) == facts(alone, self.kind)
            self.counts["survived"] += 1
            return
        assert text(out) == text(alone)[: len(out.tokens)]
        self.counts["failed" if error is not None else out.finish_reason] += 1
        if error is not None:
            assert out.finish_reason == "error"
            assert "logits are NaN" in str(error) or isinstance(error, RuleError | torch.OutOfMemoryError)

    def _in_engine(self, asked: list[dict[str, Any]], alone: list[sprinter.Generation]) -> None:
        rows = 1 if self.kind == "crop" else self.chance.randint(3, 6)
        policy = Policy(
            self.chance.choice((0.0, 0.5, 1.0)), self.chance.choice((2, 16)), self.chance.choice((3, 128))
        )
        ended: dict[int, tuple[sprinter.Generation, Exception | None]] = {}
        tokens: defaultdict[int, list[int]] = defaultdict(list)
        whole: dict[int, sprinter.Generation] = {}
        unheard = set[int]()  # under way when ``finish`` took events
        with Engine(self.pair, rows=rows, policy=policy) as engine:
            assert engine._models.target is not None and engine._models.target.runner.name == self.kind
            numbers = {engine.add(**one): i for i, one in enumerate(asked)}
            for _ in range(100_000):
                if not engine.unfinished and not engine.events:
                    break
                left = [number for number in numbers if number not in ended]
                if self.chance.random() < 0.01 and len(left) > 1:
                    number = self.chance.choice(left)
                    if number in engine._waiting or number in engine._live:
                        ended[number] = engine.cancel(number), None
                if self.chance.random() < 0.02:
                    unheard |= engine._waiting.keys() | engine._live.keys()
                    self._finish(engine, ended)
                with self.disturber.interrupting():
                    engine.advance()
                for event in engine.events:
                    assert event.id not in whole, "the end of a request is reported twice"
                    tokens[event.id] += [token.id for token in event.tokens]
                    if event.generation is not None:
                        whole[event.id] = event.generation
                        ended[event.id] = event.generation, event.error
                engine.events.clear()
            else:
                raise AssertionError("the engine stalls")
            while not self._finish(engine, ended):
                pass
            for side in (engine._models.target, engine._models.draft):
                assert side is not None
                reusable = [text.usable("exact") for text in side.held.texts]  # 0 for prompts below a block
                assert side.runner.lengths == reusable
        for number, generation in whole.items():
            if number not in unheard:
                assert tokens[number] == [token.id for token in generation.tokens]
        for number, i in numbers.items():
            self._check(ended[number][0], alone[i], ended[number][1])

    def _finish(self, engine: Engine, ended: dict[int, Any]) -> bool:
        """What ``finish`` gives; False if it was interrupted and must be called again."""
        with self.disturber.interrupting():
            try:
                ended |= {id: (out, None) for id, out in engine.finish().items()}
            except BatchError as error:
                ended |= {id: (out, None) for id, out in error.done.items()}
                ended |= {id: (out, error.errors[id]) for id, out in error.partial.items()}
            return True
        return False

    def _in_streams(self, asked: list[dict[str, Any]], alone: list[sprinter.Generation]) -> None:
        for one, twin in zip(asked, alone, strict=True):
            with self.pair.stream(**one) as stream:
                done: list[Exception | None] = []
                tokens: list[int] = []
                for _ in range(1000):
                    with self.disturber.interrupting():
                        try:
                            if self.chance.random() < 0.5:
                                # One line, so that no interrupt falls between the token and the list.
                                tokens += [token.id for token in islice(stream, 1)]
                            else:
                                stream.finish()
                                done = [None]
                        except (sprinter.SprinterError, RuleError, torch.OutOfMemoryError) as error:
                            done = [error]
                    if done:
                        break
                    if self.chance.random() < 0.03:
                        stream.close()
                        done = [None]
                        break
                else:
                    raise AssertionError("the stream stalls")
                tokens += [token.id for token in stream]  # what ``finish`` left
                generation = stream.generation
                assert tokens == [token.id for token in generation.tokens]
                self._check(generation, twin, done[0])
