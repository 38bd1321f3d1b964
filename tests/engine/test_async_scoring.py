"""asyncio: scoring of given texts, beside texts that are being generated."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from tests.engine.conftest import double_pair
from tests.engine.test_async import PROMPT, Steps, asked, run, until
from tests.engine.test_batch import facts
from tests.engine.test_failures import hooked, nan_at

import sprinter
from sprinter.errors import SprinterError, UserError


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return double_pair()


def test_scores_are_those_of_the_uncached_target(pair: sprinter.Pair) -> None:
    ids = [(7 * i) % 24 for i in range(60)]
    with torch.inference_mode():
        logits = pair.models.target.model(torch.tensor([ids])).logits[0]  # type: ignore[operator,union-attr]
    law = logits.float().log_softmax(-1)[:-1]

    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=2) as engine:
            engine._scorer._chunk = 7
            texts = [asyncio.create_task(engine.generate(**asked(i, 40))) for i in range(2)]
            whole, short, one = await asyncio.gather(
                engine.score(ids, top=2), engine.score(ids[:5]), engine.score(ids[:1])
            )
            assert one == [] and [token.id for token in whole] == ids[1:]
            own = law[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
            assert [token.logprob for token in whole] == pytest.approx(own.tolist(), abs=1e-5)
            assert [[best.id for best in token.top] for token in whole] == law.topk(2).indices.tolist()
            assert [token.top for token in short] == [[]] * 4
            assert [t.logprob for t in short] == pytest.approx([t.logprob for t in whole[:4]])
            assert [facts(await text) for text in texts] == [
                facts(pair.generate(**asked(i, 40))) for i in range(2)
            ]
            with pytest.raises(UserError, match="at most"):
                await engine.score([1] * 200)
            with pytest.raises(UserError, match="out of range"):
                await engine.score([1, 99])

    run(main())


def test_a_scoring_may_be_cancelled_or_fail(pair: sprinter.Pair) -> None:
    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=1, max_waiting=0) as engine:
            engine._scorer._chunk = 1
            expected = await engine.score(PROMPT)
            steps = Steps(engine, held=True)
            stream = engine.stream(**asked(1))
            await until(lambda: not engine._worker._calls.qsize())
            task = asyncio.create_task(engine.score(PROMPT * 8))
            await until(lambda: engine._worker._calls.qsize() == 1)
            task.cancel()
            steps.free.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            await stream.finish()
            with (
                hooked(pair.models.target.model.lm_head, nan_at(2, 0)),  # type: ignore[union-attr]
                pytest.raises(SprinterError, match="not finite"),
            ):
                await engine.score(PROMPT)
            assert await engine.score(PROMPT) == expected and engine.error is None

    began = time.monotonic()
    run(main())
    assert time.monotonic() - began < 60
