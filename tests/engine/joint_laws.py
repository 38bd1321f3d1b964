"""Joint laws through the engine: every random draw enumerated, over any runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sprinter.decode.draft import Record
from sprinter.decode.enumerate import EnumeratedDraws
from sprinter.decode.loop import Limits, decode
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import Method
from sprinter.engine.executor import Executor, RequestRun
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.networks import Linear
from sprinter.kinds import HEAD_KINDS
from sprinter.laws import Sampling

Text = tuple[int, ...]
WIDTH = 32
PROMPT = (0, 1, 0, 1, 0)  # prompt lookup finds something in it
FEATURES = dict.fromkeys(HEAD_KINDS, "hidden") | {"specdec++": "hidden_x"}
SPECS = {
    "sprinter": "sprinter(tau=0.5, cap=2)",
    "certain": "certain(threshold=1, cap=2)",
    "online": "online(tau=0.3, after=1)",
    "heuristic": "heuristic(start=2)",
    "fuzzy": "fuzzy(threshold=0.02, gamma=2)",
    "opt": "opt(epsilon=0.1, gamma=2)",
    "uno": "uno(epsilon=0.1, gamma=2)",
    **{name: f"{name}(drafts=2, gamma=2)" for name in ("batch", "specinfer", "spectr")},
    "tree": "tree(expand=2, depth=2, nodes=3)",
    "static-tree": "static-tree(widths=2x1)",
    "cape": "cape(counts=2x2x2x1, gamma=2)",
    "traversal": "traversal(widths=2x1)",
    "heads": "heads(gamma=2)",
    "medusa": "medusa(nodes=4)",
    "eagle": "eagle(expand=2, depth=2, nodes=3)",
}
"""Settings at which short texts show what a method does; other methods at their defaults."""


def head(kind: str) -> Head:
    """A linear head with different scores for different prefixes."""
    network = Linear(WIDTH)
    with torch.no_grad():
        network.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(len(kind)))
    return Head(HeadConfig(WIDTH, "draft", "target", kind=kind, features=(FEATURES[kind],)), network)


class LawsOfModels(ABC):
    """Base of pairs with the interface of ``MarkovPair``: laws and head scores from uncached forward passes."""

    def __init__(self, vocab: int) -> None:
        self.vocab, self.heads = vocab, {kind: head(kind) for kind in FEATURES}
        self._read = cache(self._read_once)
        self.known_answers: dict[Any, Any] = {}

    def p(self, prefix: Text) -> Tensor:
        """The target's law, ``[V]`` float64."""
        return self._read(0, prefix)[0]

    def q(self, prefix: Text) -> Tensor:
        """The draft's law, ``[V]`` float64."""
        return self._read(1, prefix)[0]

    def score(self, kind: str, text: Text) -> float:
        """A head's score from its model's hidden state after the text."""
        with torch.inference_mode():
            return float(self.heads[kind](self._read(int(HEAD_KINDS[kind].model == "draft"), text)[1]))

    @abstractmethod
    def _read_once(self, which: int, text: Text) -> tuple[Tensor, Tensor]:
        """Law ``[V]`` and hidden state ``[d]`` after the text, of the target (0) or the draft (1)."""


def law_of_texts(
    models: Executor,
    heads: dict[str, Head],
    method: Method,
    length: int,
    ahead: int,
    draws: EnumeratedDraws,
    **options: Any,
) -> dict[Text, float]:
    """The law of the new tokens: the engine's run of a request on the rows of ``models``, once for each path of draws.

    ``options``: of the run; a grammar among the adjustments is the loop's too.
    """
    grammar = options["adjustments"].grammar if "adjustments" in options else None
    like = None if grammar is None else models.like.new_empty(0, models.vocab)
    law: defaultdict[Text, float] = defaultdict(float)
    while True:
        record = Record()
        sequence = TokenSequence.begin(PROMPT)
        loop = decode(sequence, method, Limits(length, grammar=grammar, like=like), draws, record)
        run = RequestRun(
            models, 0, sequence, loop, method, Sampling(), draws, record, heads=heads, ahead=ahead, **options
        )  # fmt: skip
        run_all(models, run)
        law[tuple(token.id for token in record.tokens)] += draws.weight
        if not draws.next_path():
            return dict(law)


def run_all(models: Executor, run: RequestRun) -> None:
    """The whole text; raises what ends it early."""
    run.begin()
    while run.input is not None:
        run.take(*models.run([run.input]))
    if run.error is not None:
        raise run.error


def distance(found: dict[Text, float], wanted: dict[Text, float]) -> float:
    return max(abs(found.get(text, 0.0) - wanted.get(text, 0.0)) for text in found.keys() | wanted.keys())
