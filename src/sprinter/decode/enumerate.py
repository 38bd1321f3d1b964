"""The exact joint law of a method on a small Markov pair, by enumerating every random draw of the real loop.

This finds errors that tests of single positions miss: rows that are off by one, stale caches, misused random numbers.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from sprinter.decode.decoding import Answer, LoopRequest
from sprinter.decode.draft import AskDraft, AskGrammar, AskScore, AskTips, Draft, Record, Scores, Tips
from sprinter.decode.draft_heads import Blocks, BlockText, DraftHeads, HeadDrafts, HeadText
from sprinter.decode.drafter import Context, Drafter, Model, Proposals
from sprinter.decode.grammar import Grammar
from sprinter.decode.grow import ranked
from sprinter.decode.loop import Limits, decode
from sprinter.decode.sequence import paths_of
from sprinter.decode.signals import GIVEN, HEADS, SIGNALS, TARGET_HEADS, read_signals
from sprinter.decode.spec import Method
from sprinter.decode.suffix_index import SuffixIndex
from sprinter.decode.switch import DraftSwitch
from sprinter.laws import Sampling, one_hot
from sprinter.random import Draws, Purpose

__all__ = [
    "JOINT", "ChainDriver", "EnumeratedDraws", "MarkovHeads", "MarkovPair", "check_same_law", "joint_law", "run_chain",
    "states_of", "target_joint_law",
]  # fmt: skip

Text = tuple[int, ...]
JOINT = 1e-9
"""Largest difference of the probabilities of a text under two laws that are called the same."""


@dataclass(frozen=True)
class MarkovPair:
    """A target and a draft whose laws depend on the whole prefix, by a hash of it; float64.

    Args:
        vocab: size of the vocabulary.
        seed: each seed gives a different pair.
        sharp: standard deviation of the normal logits; larger values give sharper laws.
        zeros: share of entries that are 0, drawn separately for p and q, so that their supports differ.
        distance: 0 makes p = q, 1 makes them independent.

    Attributes:
        known_answers: what ``ChainDriver`` has computed: laws and signals of texts.
    """

    vocab: int = 3
    seed: int = 0
    sharp: float = 1.0
    zeros: float = 0.0
    distance: float = 1.0
    _memory: dict[tuple[str, Text], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    known_answers: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def p(self, prefix: Text) -> Tensor:
        """Target's law after ``prefix``, ``[vocab]``."""
        return self._law("p", prefix)

    def q(self, prefix: Text) -> Tensor:
        """Draft's law after ``prefix``, ``[vocab]``."""
        return self._law("q", prefix)

    def score(self, head: str, text: Text) -> float:
        """A head's score in [0, 1] that depends on the text, which for a gate is the prefix alone."""
        return int.from_bytes(hashlib.sha256(f"{head}{self.seed}{text}".encode()).digest()[:6]) / 2**48

    def _law(self, which: str, prefix: Text) -> Tensor:
        known = self._memory.get((which, prefix))
        if known is None:
            own = self._random(which, prefix)
            law = own if which == "p" else self.distance * own + (1 - self.distance) * self.p(prefix)
            known = self._memory[which, prefix] = law
        return known

    def _random(self, which: str, prefix: Text) -> Tensor:
        digest = hashlib.sha256(f"{which}{self.seed}{prefix}".encode()).digest()
        chance = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        logits = self.sharp * torch.randn(self.vocab, generator=chance, dtype=torch.float64)
        gone = torch.rand(self.vocab, generator=chance, dtype=torch.float64) < self.zeros
        if bool(gone.all()):
            gone[0] = False
        return torch.softmax(logits.masked_fill(gone, -torch.inf), -1)


def states_of(pair: MarkovPair, tokens: Sequence[int], text: Sequence[int] = ()) -> Tensor:
    """Stand-in for hidden states of tokens after a text, ``[n, 1]``: a number that depends on the prefix alone."""
    scores = [pair.score("state", (*text, *tokens[:i])) for i in range(len(tokens))]
    return torch.tensor(scores, dtype=torch.float64).unsqueeze(-1)


class ChainDriver:
    """Answers the loop from a MarkovPair.

    Args:
        needs: names of the signals and of the target's heads that the rules read; None: all.
        earlier: texts that a proposer may read.
    """

    def __init__(
        self,
        pair: MarkovPair,
        draws: Draws,
        ahead: int = 1,
        needs_raw: bool = False,
        drafter: Drafter = Model(),
        heads: DraftHeads | None = None,
        needs: Collection[str] | None = None,
        earlier: SuffixIndex | None = None,
    ) -> None:
        self._earlier = earlier
        self._pair, self._draws, self._ahead = pair, draws, ahead
        self._read = [name for name in SIGNALS if needs is None or name in needs]
        self._scored = [head for head in sorted(HEADS | TARGET_HEADS) if needs is None or head in needs]
        self._needs_raw, self._drafter = needs_raw, drafter
        self._proposals = Proposals.of(drafter)
        self._heads: HeadDrafts | None = None
        if drafter.by_heads or drafter.tokens_a_pass > 1:
            blocks = Blocks(pair.vocab, drafter.tokens_a_pass)  # no token of the texts is the mask
            own: DraftHeads = heads or (MarkovHeads(pair) if drafter.by_heads else blocks)
            self._layers, sampling = own.layers, Sampling(temperature=0.0 if drafter.greedy else 1.0)
            names = [name for name in self._read if not SIGNALS[name].reads("state")]
            self._heads = HeadDrafts(
                own.begin(), sampling, draws, names, needs_raw, pair.vocab, drafter=drafter
            )
        self._seen: int | None = None  # tokens whose states heads are shown; None: all that were scored

    def answer(self, request: LoopRequest) -> Answer:
        """Answer one request: a ``Draft``, ``Tips`` or ``Scores``."""
        if isinstance(request, AskGrammar):
            return cast("Sequence[int]", request.found.result())
        if isinstance(request, AskScore):
            return self._score(request)
        if isinstance(request, AskTips):
            return self._tips(request) if self._heads is None else self._by_heads(self._heads, request)
        text, round = request.sequence.tokens, request.sequence.round
        if self._proposals is not None:
            like, read = torch.empty(0, dtype=torch.float64), text[:-1]  # all but what the last call wrote
            states = {layer: states_of(self._pair, read) for layer in self._drafter.target_states}
            most, vocab, successors = request.at_most, self._pair.vocab, request.sequence.successors
            context = Context(text, round, most, vocab, self._draws, like, states, self._earlier, successors)
            draft = self._proposals.draft(context, set(self._read), self._needs_raw)
            if draft is not None:
                return draft
        if self._heads is not None and not self._heads.left_to_model(round):
            answer = self._by_heads(self._heads, request)
            if not self._heads.left_to_model(round):
                return answer
        return self._propose(list(text), round, min(self._ahead, request.at_most))

    def _by_heads(self, heads: HeadDrafts, request: AskDraft | AskTips) -> Draft | Tips:
        if isinstance(request, AskDraft) or not request.nodes:
            sequence, block = request.sequence, heads.heads
            if isinstance(block, BlockText) and not block.answers(request):
                masked = [(*sequence.tokens, *[block.mask] * i) for i in range(block.most)]
                block.take(sequence, torch.stack([self._pair.q(one) for one in masked]).log())
            read = sequence.tokens[: sequence.scored if self._seen is None else self._seen]
            heads.read(sequence.tokens, {layer: states_of(self._pair, read) for layer in self._layers})
        return heads.tips(request) if isinstance(request, AskTips) else heads.draft(request, self._ahead)

    def _tips(self, request: AskTips) -> Tips:
        raw = torch.stack([self._pair.q((*request.sequence.tokens, *path)) for path in request.paths])
        q = one_hot(raw) if self._drafter.greedy else raw
        names = {
            name for name in self._read if not (SIGNALS[name].reads("token") or SIGNALS[name].reads("state"))
        }
        return Tips(
            list(q) if request.laws else (),
            ranked(raw.log(), request.top),
            read_signals(names, q, q),
            list(raw) if self._needs_raw else (),
        )

    def _propose(self, text: list[int], round: int, count: int) -> Draft:
        tokens, laws = [], []
        for _ in range(count):
            law = self._pair.q(tuple(text))
            if self._drafter.greedy:
                law = one_hot(law)
            tokens.append(self._draws.token(law, round, len(text), Purpose.DRAFT))
            text.append(tokens[-1])
            laws.append(law)
        q = torch.stack(laws)
        return Draft(tuple(tokens), q, self._signals(tuple(text), q), q if self._needs_raw else None)

    def _signals(self, text: Text, q: Tensor) -> dict[str, Tensor]:
        """The draft's signals of the last n tokens of ``text``; ``q [n, vocab]``: their laws."""
        pair, start, memory = self._pair, len(text) - len(q), self._pair.known_answers
        names = tuple(self._read)
        key, known = (
            (text, start, self._drafter.greedy, names, *self._scored),
            [SIGNALS[one] for one in names],
        )
        if key not in memory or memory[key][0] != known:  # others may be registered under the same names
            made: dict[str, Tensor] = {}
            for head in HEADS.intersection(self._scored):
                seen = GIVEN[head].sees_token
                scores = [pair.score(head, text[: end + seen]) for end in range(start, len(text))]
                made[head] = torch.tensor(scores, dtype=torch.float64)
            read = any(signal.reads("state") for signal in known)
            states = states_of(pair, text[start:], text[:start]) if read else None
            # The laws of a Markov pair serve as raw and processed laws.
            memory[key] = known, made | read_signals(names, q, q, torch.tensor(text[start:]), states)
        return {**memory[key][1]}

    def _score(self, request: AskScore) -> Scores:
        assert request.tokens, "a target pass over nothing"
        if not request.closing:
            self._seen = None
        elif self._seen is None:  # the states that it reads must change no draft
            self._seen = request.start
        text = request.sequence.tokens
        prefixes = [tuple(text[: end + 1]) for end in range(request.start, request.end)]
        prefixes += [(*text, *path) for path in paths_of(request.nodes, request.parents)]
        kinds = TARGET_HEADS.intersection(self._scored)
        key, memory = (*prefixes, *kinds), self._pair.known_answers
        if key not in memory:
            scores = {kind: [self._pair.score(kind, one) for one in prefixes] for kind in kinds}
            heads = {kind: torch.tensor(values) for kind, values in scores.items()}
            memory[key] = torch.stack([self._pair.p(prefix) for prefix in prefixes]), heads
        p, heads = memory[key]
        return Scores(p, p if self._needs_raw else None, {**heads})


class MarkovHeads:
    """Heads that draft for a ``MarkovPair``: their laws follow from the target's state at the last token that it read.

    Args:
        pair: gives the states, and the laws by a hash.
        reach: number of tokens that they draft at most.
        sees_path: whether a law depends on the tokens since that state, as EAGLE's does, or on their number (Medusa).
    """

    kind = "markov"
    layers: tuple[int, ...] = (0,)
    flops = 1.0
    accuracies: Sequence[Sequence[float]] = ((0.6, 0.2, 0.1), (0.5, 0.2, 0.1), (0.4, 0.2, 0.1))

    def __init__(self, pair: MarkovPair, reach: int = 3, sees_path: bool = False) -> None:
        self.pair, self.reach, self.sees_path = pair, reach, sees_path

    def begin(self) -> HeadText:
        """A new text."""
        return _MarkovHeadText(self)


class _MarkovHeadText:
    def __init__(self, heads: MarkovHeads) -> None:
        self._heads, self.steps, self.tokens = heads, 0, 0
        self._state = (0,)

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        assert len(text) == len(states[0]) + 1, "states of all tokens but the last"
        last = (int(text[-1]),) if self._heads.sees_path else ()
        self._state = (int(states[0][-1] * 2**30), *last)

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        heads, depth = self._heads, len(paths[0])
        assert all(len(path) == depth for path in paths), "nodes of one level"
        if depth >= heads.reach:
            return None
        self.steps += 1
        if not heads.sees_path:
            return heads.pair.q((*self._state, depth)).log()[None]
        return torch.stack([heads.pair.q((*self._state, *path)) for path in paths]).log()


class EnumeratedDraws:
    """Draws that follow one path of choices; ``next_path`` moves to the next path.

    Uniform numbers are enumerated as the midpoints of ``cells`` equal cells: exact for thresholds that are multiples
    of 1/cells.
    """

    def __init__(self, cells: int = 2) -> None:
        self._cells = cells
        self._path: list[
            tuple[list[tuple[int, float]], int]
        ] = []  # options with chances, the chosen one's index
        self._depth = 0
        self.weight = 1.0

    def _choose(self, options: Callable[[], list[tuple[int, float]]]) -> int:
        if self._depth == len(self._path):
            self._path.append((options(), 0))
        known, index = self._path[self._depth]
        self._depth += 1
        value, chance = known[index]
        self.weight *= chance
        return value

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        """Enumerate the tokens with positive probability."""
        return self._choose(lambda: _possible(enumerate(law.tolist())))

    def uniform(self, round: int, position: int, purpose: Purpose, row: int = 0) -> float:
        """Enumerate the midpoints of the cells."""
        cell = self._choose(lambda: [(i, 1 / self._cells) for i in range(self._cells)])
        return (cell + 0.5) / self._cells

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        """Enumerate the decisions up to the first rejection; later ones have no effect."""
        kept: list[bool] = []
        for b in chances:
            if kept and not kept[-1]:
                kept.append(False)
                continue
            kept.append(bool(self._choose(partial(_possible, ((1, b), (0, 1 - b))))))
        return kept

    def next_path(self) -> bool:
        """Move to the next path; False if there is none left."""
        while self._path:
            options, index = self._path[-1]
            if index + 1 < len(options):
                self._path[-1] = (options, index + 1)
                break
            self._path.pop()
        self._depth, self.weight = 0, 1.0
        return bool(self._path)


def _possible(options: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    return [option for option in options if option[1] > 0]


def run_chain(
    method: Method,
    pair: MarkovPair,
    prompt: Text,
    limits: Limits,
    draws: Draws,
    *,
    ahead: int = 1,
    complete: bool = False,
    switch: Callable[[Record], DraftSwitch] | None = None,
    heads: DraftHeads | None = None,
    earlier: SuffixIndex | None = None,
) -> Record:
    """Decode one text with ``method`` on ``pair`` through the real loop.

    Args:
        switch: makes what says whether a round drafts, from the record that is being written.
        heads: of a method whose drafter is ``heads``; None: those of ``MarkovHeads``.
        earlier: texts that a proposer may read.
    """
    record = Record()
    if method.drafter.by_heads:
        heads = MarkovHeads(pair) if heads is None else heads
        method = method.settle({}, None, heads.accuracies)
    needs = method.needs | method.accept.needs
    driver = ChainDriver(pair, draws, ahead, method.accept.needs_raw, method.drafter, heads, needs, earlier)
    loop = decode(prompt, method, limits, draws, record, complete, switch=switch(record) if switch else None)
    request = next(loop, None)
    while request is not None:
        try:
            request = loop.send(driver.answer(request))
        except StopIteration:
            request = None
    record.count()
    return record


def joint_law(
    method: Method,
    pair: MarkovPair,
    length: int,
    *,
    prompt: Text = (0,),
    ahead: int = 1,
    cells: int = 2,
    ends: Callable[[Sequence[int]], str | None] = lambda text: None,
    lossy: Callable[[Sequence[int]], bool] | None = None,
    switch: Callable[[Record], DraftSwitch] | None = None,
    heads: DraftHeads | None = None,
    grammar: Grammar | None = None,
    earlier: SuffixIndex | None = None,
) -> dict[Text, float]:
    """The exact law of the texts (new tokens) that ``method`` writes, by enumerating every random draw.

    ``grammar``: one that the laws of ``pair`` follow. ``earlier``: texts that a proposer may read.
    """
    law: defaultdict[Text, float] = defaultdict(float)
    draws = EnumeratedDraws(cells)
    while True:
        like = None if grammar is None else torch.empty(0, pair.vocab, dtype=torch.float64)
        limits = Limits(length, ends, lossy, grammar=grammar, like=like)
        record = run_chain(
            method, pair, prompt, limits, draws, ahead=ahead, switch=switch, heads=heads, earlier=earlier
        )
        law[tuple(token.id for token in record.tokens)] += draws.weight
        if not draws.next_path():
            return dict(law)


def target_joint_law(
    pair: MarkovPair,
    length: int,
    *,
    prompt: Text = (0,),
    ends: Callable[[Sequence[int]], str | None] = lambda text: None,
) -> dict[Text, float]:
    """The target's own law of texts, as products of its laws at each position."""
    law: dict[Text, float] = {}

    def go_on(text: Text, chance: float) -> None:
        new = text[len(prompt) :]
        if len(new) == length or (new and ends(text) is not None):
            law[new] = chance
            return
        for x, one in enumerate(pair.p(text).tolist()):
            if one > 0:
                go_on((*text, x), chance * one)

    go_on(prompt, 1.0)
    return law


def check_same_law(found: Mapping[Text, float], wanted: Mapping[Text, float], what: str) -> None:
    """Assert that two laws of texts agree to 1e-9 everywhere."""
    for text in found.keys() | wanted.keys():
        own, other = found.get(text, 0.0), wanted.get(text, 0.0)
        assert abs(own - other) <= JOINT, f"{what}: text {text} has chance {own}, not {other}"
