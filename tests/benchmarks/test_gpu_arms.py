"""What benchmarks/gpu asks of a real pair beside its own stages: a plain loop, many rows, methods by name."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from tests.models.tiny import CONTEXT, VOCAB, tiny

import sprinter

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")  # which the scripts measure

from benchmarks.gpu import loop, real, rows
from benchmarks.gpu.stage import TINY, Clock, Run
from benchmarks.gpu.tables import rows_text

from sprinter.bench.arm import Ask
from sprinter.bench.arms import parse_arm
from sprinter.errors import UserError
from sprinter.laws import Sampling
from sprinter.models.pair import LoadedModel, LoadedPair


def pair_of(kind: str, ends: tuple[int, ...] = ()) -> sprinter.Pair:
    target, draft = (LoadedModel(tiny(one), one, None, CONTEXT, VOCAB, 32, ends) for one in (kind, "llama"))
    return sprinter.Pair(LoadedPair(target, draft, None))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_plain_loop_writes_the_greedy_text(kind: str) -> None:
    ids = (3, 9, 11, 40)
    wanted = pair_of(kind).generate([*ids], method="autoregressive", max_new_tokens=30, temperature=0).tokens
    end = wanted[17].id
    arm = loop.PlainLoop(slots=CONTEXT)
    for ends in ((), (end,)):
        arm.start(pair_of(kind, ends))
        answer = arm.answer(Ask(ids, 30, Sampling(0.0), 1))
        text = [token.id for token in wanted]
        assert answer.ids == (text[: text.index(end) + 1] if ends else text)
        assert len(answer.arrivals_s) == len(answer.ids) and answer.target_calls == len(answer.ids) - 1
    drawn = [arm.answer(Ask(ids, 9, Sampling(1.0), seed)).ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(UserError, match="leave top_k"):
        arm.answer(Ask(ids, 9, Sampling(1.0, top_k=3), 1))
    with pytest.raises(UserError, match="reads models of llama"):
        loop.Decoder(tiny("gpt2"), 8)


def test_rows_of_a_pair(tmp_path: Path) -> None:
    clock = Clock(time.monotonic(), 60, ["real"])
    run = Run(tmp_path, tmp_path, torch.device("cpu"), TINY, True, False, clock, lambda told: "")
    lines: list[dict[str, object]] = []
    run.keep("real", rows=lines)
    pair, specs = sprinter.load_pair(), {"plain": "autoregressive", "exact": "speculative(gamma=3)"}
    rows.measure_rows(run, pair, specs, ["The river rises in"], 1.0, time.monotonic() + 60, lines)
    assert [(line["arm"], line["rows"]) for line in lines] == [
        (arm, count) for count in rows.TINY_ROWS for arm in specs
    ]
    assert json.loads((tmp_path / "gpu.json").read_text())["stages"]["real"]["rows"] == lines
    assert all(line["tokens_per_s"] > 0 and line["ms_per_round"]["target"] > 0 for line in lines)  # type: ignore[operator,index]
    assert rows_text(lines).count("exact") == len(rows.TINY_ROWS)


def test_arms_of_a_real_pair_are_known() -> None:
    specs = real.specs_of(sprinter.load_pair())
    assert {"tree", "certain 0.05", "sprinter 0.1", "transformers:static"} < specs.keys()
    assert set(real.ROW_ARMS) - specs.keys() == {"heads"}
    for spec in specs.values():
        parse_arm(spec)
