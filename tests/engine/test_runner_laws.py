"""Joint laws through the torch runners: every random draw of the real engine on tiny pairs in float64, enumerated.

The reference is the same loop on laws of uncached passes; lossless methods must write the target's own law besides.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.engine.disturbed import runner_maker
from tests.engine.joint_laws import PROMPT, SPECS, WIDTH, LawsOfModels, Text, distance, law_of_texts
from tests.heads.test_eagle3 import eagle
from tests.heads.test_medusa import medusa
from tests.models.tiny import uncached
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sprinter.decode.draft_heads import Blocks
from sprinter.decode.enumerate import EnumeratedDraws, joint_law, target_joint_law
from sprinter.decode.spec import METHODS, Method, parse_method
from sprinter.engine.backends import graph_units
from sprinter.engine.backends.base import DraftRow
from sprinter.engine.executor import Executor
from sprinter.heads.dflash import DFlashHeads
from sprinter.heads.eagle3 import ParallelHeads
from sprinter.heads.head import Head
from sprinter.heads.mtp import MtpHeads
from sprinter.random import AddressedDraws, Purpose

CLOSE = 1e-9
SEVERAL = ("batch", "specinfer", "spectr")
OWN = {
    **SPECS,
    "coin": "coin(rate=0.5, cap=2)",
    "random": "random(rate=0.5, gamma=2)",
    **{name: f"{name}(drafts=2, gamma=1)" for name in SEVERAL},
}
"""Few draws. Several drafts have a second round, so that rows must hold the path that was followed."""


class Draws(EnumeratedDraws, AddressedDraws):
    """Enumerated draws for captured steps too, which take an address and draw by themselves."""

    def address(self, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        return 0

    def race(self, law: Tensor, *_: Any) -> Tensor:
        return torch.tensor([self.token(one, 0, 0, Purpose.DRAFT) for one in law])


class Pair(LawsOfModels):
    """A target and a draft in float64; their laws as a ``MarkovPair`` has them."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.models = [self._model(seed, layers) for seed, layers in ((5, 2), (6, 1))]

    def _model(self, seed: int, layers: int) -> LlamaForCausalLM:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = LlamaConfig(
                vocab_size=self.vocab, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4,
                tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
            )  # fmt: skip
            return LlamaForCausalLM(config).double().eval()

    def _read_once(self, which: int, text: Text) -> tuple[Tensor, Tensor]:
        logits, hidden = uncached(self.models[which], list(text))
        return torch.softmax(logits[-1], -1), hidden[-1]


@pytest.fixture(scope="module")
def pairs() -> Any:
    """By size of the vocabulary."""
    return cache(Pair)


def law_through(
    kind: str, pair: Pair, method: Method, length: int, ahead: int, patch: pytest.MonkeyPatch, **options: Any
) -> dict[Text, float]:
    draws, make = Draws(), runner_maker(kind)
    patch.setattr(graph_units, "race", draws.race)
    runners = [
        make(model, batch=1, max_len=len(PROMPT) + length + 4)  # type: ignore[arg-type]
        for model in pair.models
    ]
    assert {runner.name for runner in runners} == {kind}
    models = Executor(runners[0], runners[1], pair.vocab)
    heads: dict[str, Head] = pair.heads
    return law_of_texts(models, heads, method, length, ahead, draws, **options)


def with_heads(pair: Pair, method: Method) -> tuple[Method, dict[str, Any]]:
    """The method with its tree settled, and random heads on the target: EAGLE-3's for ``eagle``, else Medusa's."""
    if method.drafter.tokens_a_pass > 1:
        return method, {"drafting": Blocks(1, method.drafter.tokens_a_pass)}
    heads: Any = medusa(vocab=pair.vocab, accuracies=((0.6, 0.3), (0.5, 0.3)))
    if method.name.startswith("eagle"):
        heads = eagle(vocab=pair.vocab, kept=None, target=pair.models[0])
    if method.drafter.head_kind is not None:
        heads = random_head(pair, method.drafter.head_kind)
    heads.join(pair.models[0])
    return method.settle({}, None, heads.accuracies), {"drafting": heads}


def random_head(pair: Pair, kind: str) -> MtpHeads | ParallelHeads | DFlashHeads:
    """A random module of multi-token prediction, or head that drafts in one pass."""
    config = pair.models[0].config
    with torch.random.fork_rng():
        torch.manual_seed(7)
        mtp = MtpHeads(LlamaDecoderLayer(config, 0), config, pair.vocab, None, False)
        dflash = DFlashHeads(config, (0, 1), 2, 1)
        parallel = ParallelHeads(config, None, pair.vocab, 2, 1)
        heads = {"mtp": mtp, "peagle": parallel, "dflash": dflash}[kind]
        for value in heads.parameters():
            value.detach().copy_(torch.randn_like(value) * 0.4 + float(value.ndim == 1))
    return heads.requires_grad_(False)


KINDS = {"row": 1, "captured": 3, "crop": 2}  # kind -> tokens drafted ahead; a crop runner reads chains alone


@pytest.mark.parametrize(
    ("kind", "ahead", "name"),
    [
        (kind, ahead, name)
        for kind, ahead in KINDS.items()
        for name in sorted(METHODS.names())
        if kind != "crop" or not parse_method(OWN.get(name, name)).grows
    ],
)
def test_the_joint_law_of_every_method(
    pairs: Any, kind: str, ahead: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = parse_method(OWN.get(name, name))
    pair, options = pairs(2), dict[str, Any]()
    if method.drafter.by_heads:
        method, options = with_heads(pair, method)
    found = law_through(kind, pair, method, 3, ahead, monkeypatch, **options)
    assert sum(found.values()) == pytest.approx(1, abs=CLOSE)
    if not options:  # laws of heads are in no reference
        assert distance(found, joint_law(method, pair, 3, prompt=PROMPT, ahead=ahead)) < CLOSE
    if method.lossless():
        assert distance(found, target_joint_law(pair, 3, prompt=PROMPT)) < CLOSE


@pytest.mark.parametrize(
    "spec",
    ["heads(gamma=2, kind=peagle)", "trust=nobody,stop=svip(h=0.6),drafter=heads(kind=peagle),cap=2",
     "drafter=heads(grow=drawn(widths=2x1),kind=peagle),accept=without",
     "heads(gamma=2, kind=dflash)", "trust=nobody,stop=svip(h=0.6),drafter=heads(kind=dflash),cap=2",
     "drafter=heads(grow=drawn(widths=2x1),kind=dflash),accept=without", "heads(gamma=2, kind=mtp)",
     "trust=nobody,stop=svip(h=0.6),drafter=heads(kind=mtp),cap=2",
     "drafter=heads(grow=dynamic(expand=2,depth=2,nodes=3),kind=mtp),accept=onehot",
     "drafter=parallel(tokens=2),stop=fixed(gamma=2)", "trust=nobody,stop=svip(h=0.6),drafter=parallel(tokens=2),cap=3",
     "drafter=parallel(tokens=2,grow=drawn(widths=2x1)),accept=without"],
)  # fmt: skip
def test_the_joint_law_with_heads_of_a_kind(pairs: Any, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs(2)
    method, options = with_heads(pair, parse_method(spec))
    found = law_through("row", pair, method, 3, 1, monkeypatch, **options)
    assert options["drafting"].kind in spec and sum(found.values()) == pytest.approx(1, abs=CLOSE)
    assert distance(found, target_joint_law(pair, 3, prompt=PROMPT)) < CLOSE


@pytest.mark.parametrize(("kind", "ahead"), [("row", 1), ("captured", 3), ("crop", 2)])
@pytest.mark.parametrize(
    "drafter", ["heads(kind=peagle,otherwise=model)",
                "lookup(n=3,least=3,length=1,otherwise=heads(kind=mtp,sure=0.9,otherwise=model))"]
)  # fmt: skip
@pytest.mark.parametrize("accept", ["exact", "block"])
def test_the_joint_law_of_a_draft_model_behind_heads(
    pairs: Any, drafter: str, accept: str, kind: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads end after two tokens, or where they are unsure: the draft model reads them, and goes on."""
    pair = pairs(2)
    method, options = with_heads(
        pair, parse_method(f"drafter={drafter},stop=svip(h=0.68),accept={accept},cap=3")
    )
    rows: list[DraftRow] = []
    real = Executor.run

    def run(self: Executor, inputs: Any) -> Any:
        rows.extend(one for one in inputs if isinstance(one, DraftRow))
        return real(self, inputs)

    monkeypatch.setattr(Executor, "run", run)
    found = law_through(kind, pair, method, 4, ahead, monkeypatch, **options)
    assert distance(found, target_joint_law(pair, 4, prompt=PROMPT)) < CLOSE
    assert rows, "the draft model drafted"


def test_captured_units_were_enumerated(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft steps and target passes both ran in units, not the eager way round."""
    calls: list[str] = []
    for unit in (graph_units.DraftUnit, graph_units.TargetUnit):
        original = unit.forward

        def forward(self: Any, *args: Any, original: Any = original) -> Any:
            calls.append(self.name)
            return original(self, *args)

        monkeypatch.setattr(unit, "forward", forward)
    law_through("captured", pairs(2), parse_method("sprinter(tau=0.5, cap=2)"), 3, 1, monkeypatch)
    assert set(calls) == {"draft", "target"}


def test_the_laws_would_tell_a_slip(pairs: Any) -> None:
    """Target and draft are far apart, and so are the laws after texts that differ in one token."""
    pair = pairs(2)
    assert float((pair.p(PROMPT) - pair.q(PROMPT)).abs().max()) > 0.03
    for law in (pair.p, pair.q):
        assert float((law(PROMPT) - law((*PROMPT[:-1], 1))).abs().max()) > 0.03
        assert float((law(PROMPT) - law(PROMPT[1:])).abs().max()) > 0.001
