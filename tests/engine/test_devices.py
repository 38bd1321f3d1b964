"""Models that answer on two devices: their laws meet on one, the target's."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.joint_laws import run_all
from torch import Tensor

import sprinter
from sprinter.decode.draft import AskDraft, Draft, Record
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import parse_method
from sprinter.engine.backends.base import Drafted, DraftRow
from sprinter.engine.backends.eager import EagerBackend
from sprinter.engine.executor import Executor, RequestRun
from sprinter.errors import UserError
from sprinter.laws import Sampling
from sprinter.models import memory
from sprinter.models.choose import make_runner
from sprinter.random import AddressedDraws

PROMPT = [3, 7, 1, 12, 5]
METHODS = (
    "speculative(gamma=3)", "sprinter(tau=0.3)", "coin(rate=0.5)", "mentored(kl=0.1, gamma=3)",
    "fuzzy(threshold=0.2, gamma=3)", "specinfer(drafts=2, gamma=2)", "lookup(n=2, gamma=3)",
)  # fmt: skip


class Elsewhere(Tensor):
    """A tensor on another device: nothing combines it with one that lies here, and ``to`` fetches it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            return args[0].as_subclass(Tensor)
        given = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
        if any(type(one) is Tensor and one.dim() for one in given):
            raise RuntimeError(f"Expected all tensors to be on the same device ({func})")
        return super().__torch_function__(func, types, args, kwargs)


def elsewhere(drafted: Drafted) -> Drafted:
    raws = None if drafted.raws is None else drafted.raws.as_subclass(Elsewhere)
    return replace(drafted, laws=drafted.laws.as_subclass(Elsewhere), raws=raws)


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_on_another_device_writes_the_same_text(
    tiny_pair: sprinter.Pair, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome() -> list[tuple[int, str, float | None]]:
        out = tiny_pair.generate(PROMPT, method=method, seed=5, max_new_tokens=24, meter="complete")
        return [(token.id, token.origin, token.drift) for token in out.tokens]

    here, draft = outcome(), EagerBackend.draft

    def drafted(rows: EagerBackend, asked: Sequence[DraftRow]) -> list[Any]:
        return [elsewhere(one) if isinstance(one, Drafted) else one for one in draft(rows, asked)]

    monkeypatch.setattr(EagerBackend, "draft", drafted)
    assert outcome() == here


@pytest.mark.parametrize("method", ["speculative(gamma=2)", "fuzzy(gamma=2)", "lookup(n=2)"])
def test_a_drafts_laws_go_to_the_targets_device(tiny_pair: sprinter.Pair, method: str) -> None:
    assert tiny_pair.models.draft is not None
    draft = make_runner(tiny_pair.models.draft.model, max_len=32)
    target = copy.copy(make_runner(tiny_pair.models.target.model, max_len=32))
    target.device = torch.device("meta")
    models, answers = Executor(target, draft, tiny_pair.models.vocab_size), list[Draft]()
    sequence = TokenSequence.begin([2, 2, 2])

    def loop() -> Generator[AskDraft, Draft, None]:
        answers.append((yield AskDraft(sequence, 2)))

    parsed, draws = parse_method(method), AddressedDraws(1)
    run_all(models, RequestRun(models, 0, sequence, loop(), parsed, Sampling(), draws, Record(), heads={}))  # type: ignore[arg-type]
    (answer,) = answers
    assert isinstance(answer, Draft) and len(answer.tokens) == 2
    assert answer.laws.device.type == "meta"
    assert (answer.raw is not None) == ("fuzzy" in method)
    assert answer.raw is None or answer.raw.device.type == "meta"


def test_caches_must_fit_on_the_device_of_each_model(
    tiny_pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny_pair.models.draft is not None
    here: Any = tiny_pair.models.draft.model
    there = copy.deepcopy(here).to("meta")
    row = memory.cache_bytes(here, 10)
    monkeypatch.setattr(
        memory, "cache_bytes", lambda model, max_len: row
    )  # "meta" runs no pass to measure it by
    for full in ("cpu", "meta"):
        rooms = {"cpu": 100 * row, "meta": 100 * row, full: 4 * row}
        monkeypatch.setattr(memory, "free_bytes", lambda device, rooms=rooms: rooms[device.type])
        memory.check_memory([here, there], 3, [10, 10])
        with pytest.raises(UserError, match="use a batch of 3 or less"):
            memory.check_memory([here, there], 4, [10, 10])


@pytest.mark.gpu
@pytest.mark.parametrize("target_on_gpu", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_pair_on_two_real_devices(tiny_pair: sprinter.Pair, method: str, target_on_gpu: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    loaded, moved = tiny_pair.models, "target" if target_on_gpu else "draft"
    one = getattr(loaded, moved)
    there = replace(one, model=copy.deepcopy(one.model).to("cuda"))
    pair = sprinter.Pair(replace(loaded, **{moved: there}), copy.deepcopy(tiny_pair.gate))
    wanted = tiny_pair.generate(PROMPT, method=method, temperature=0.0, max_new_tokens=16)
    out = pair.generate(PROMPT, method=method, temperature=0.0, max_new_tokens=16)
    assert [token.id for token in out.tokens] == [token.id for token in wanted.tokens]
