"""The vLLM arm and its worker, with a fake vllm package, and with the real one if it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.fake_vllm import install

import sprinter
from sprinter.bench.arm import Ask
from sprinter.bench.arms import parse_arm, vllm_worker
from sprinter.bench.arms.peer_vllm import VllmPlain
from sprinter.bench.arms.process import JsonProcess
from sprinter.errors import SprinterError, UserError
from sprinter.laws import Sampling, process
from sprinter.models.pair import LoadedModel, LoadedPair

GREEDY = Sampling(0.0)
REAL = os.environ.get("SPRINTER_VLLM_PYTHON")


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker finds the fake package."""
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path)))
    monkeypatch.delenv("SPRINTER_VLLM_PYTHON", raising=False)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def running(pid: int) -> bool:
    """Alive and no zombie that waits for a parent to ask for it."""
    try:
        return alive(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def worker_of(arm: object) -> JsonProcess:
    assert isinstance(arm, VllmPlain) and arm._worker is not None
    return arm._worker


def test_the_worker_answers(pair: sprinter.Pair, fake: None) -> None:
    arm = parse_arm("vllm:plain")
    arm.start(pair)
    assert arm.versions() == {"vllm": "0.0.fake", "torch": "1.fake", "transformers": "2.fake"}
    for _ in range(2):
        answer = arm.answer(Ask((5, 6, 7), 5, GREEDY, 0))
        assert answer.ids == [5, 6, 7, 5, 6] and answer.accept_lengths == [2, 2, 1]
        assert answer.target_calls == 3 and answer.draft_steps == 0 and answer.extra == {}
        assert (
            len(answer.arrivals_s) == 5
            and 0 < answer.arrivals_s[0] == answer.arrivals_s[1] < answer.arrivals_s[2]
        )
        assert answer.arrivals_s[-1] <= answer.wall_s
    eos = pair.models.target.eos_ids[0]
    assert arm.answer(Ask((5, eos, 7), 5, GREEDY, 0)).ids == [5, eos]
    assert arm.answer(Ask((5, 6, 7), 5, GREEDY, 0, stop_token_ids=(6,))).ids == [5, 6]
    pid = worker_of(arm)._child.pid
    arm.close()
    assert not alive(pid)
    arm.close()


def test_drafts_that_vllm_would_run_otherwise_are_refused(pair: sprinter.Pair, fake: None) -> None:
    models = pair.models
    assert models.draft is not None
    rounded = sprinter.load_pair(dtype="float32", draft_dtype="int8", device="cpu")
    other = sprinter.load_pair(dtype="float32", draft_dtype="float64", device="cpu")
    for wrong, message in (
        (rounded, "the pair's weights are in int8"),
        (other, "the draft is in float64 and the target in"),
    ):
        with pytest.raises(UserError, match=message):
            parse_arm("vllm:draft_model").start(wrong)


def test_requests_together(pair: sprinter.Pair, fake: None) -> None:
    arm = parse_arm("vllm:plain")
    arm.start(pair)
    assert isinstance(arm, VllmPlain)
    short, long = arm.answer_all([Ask((5, 6), 1, GREEDY, 0), Ask((7, 8, 9), 6, GREEDY, 1)])
    arm.close()
    assert short.ids == [5] and long.ids == [7, 8, 9] * 2
    assert short.accept_lengths == [1] and long.accept_lengths == [2, 2, 2]
    assert 0 < short.wall_s == short.arrivals_s[-1] == long.arrivals_s[0] < long.wall_s == long.arrivals_s[-1]


@pytest.mark.parametrize(
    ("spec", "config", "error"),
    [
        ("vllm:draft_model(tokens=3, draft_sampling=probabilistic, dtype=bfloat16)",
         {"method": "draft_model", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}, 0.0),
        ("vllm:ngram(dtype=bfloat16)",
         {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}, 0.5),
        ("vllm:heads(head=HEADS, tokens=4, dtype=bfloat16)",
         {"method": "eagle3", "num_speculative_tokens": 4, "draft_sample_method": "greedy"}, 0.0),
    ],
)  # fmt: skip
def test_speculation_is_set_up_fixed_and_reported(
    pair: sprinter.Pair, tmp_path: Path, fake: None, spec: str, config: dict[str, Any], error: float
) -> None:
    (tmp_path / "torch.py").unlink()
    install(tmp_path, error)
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "config.json").write_text("{}")
    arm = parse_arm(spec.replace("HEADS", str(tmp_path / "heads")))
    arm.start(pair)
    assert ("mended in vllm" in arm.versions()) is (error != 0)
    answer = arm.answer(Ask((5, 6), 4, GREEDY, 0))
    arm.close()
    told = answer.extra["speculation"]
    assert told["dtype"] == "bfloat16" and config.items() <= told["config"].items()
    assert answer.draft_steps == (0 if config["method"] == "ngram" else 7)


def test_heads_must_be_a_folder(pair: sprinter.Pair, fake: None) -> None:
    with pytest.raises(UserError, match=r"head='/none' is not a folder with a config.json: give head=FOLDER"):
        parse_arm("vllm:heads(head=/none)").start(pair)


def test_the_fixed_sampler_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = types.ModuleType("sampler")
    sampler.expand_batch_to_tokens = lambda x, *_: x.new_zeros(5)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.rejection_sampler", sampler)
    assert vllm_worker._fix_draft_sampling()
    given, ends = torch.tensor([0.7, 0.0, 0.3]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert sampler.expand_batch_to_tokens(given, ends, 5, 0, 1).tolist() == given[[0, 0, 2, 2, 2]].tolist()
    given[0] = 0.0
    assert sampler.expand_batch_to_tokens(given, ends, 5, 0, 1)[:2].tolist() == [1.0, 1.0]
    assert vllm_worker._fix_draft_sampling() == {}, "what is right is left alone"


def test_trouble_with_one_request_leaves_the_worker_alive(pair: sprinter.Pair, fake: None) -> None:
    arm = parse_arm("vllm:plain")
    arm.start(pair)
    with pytest.raises(SprinterError, match=r"vllm:plain\): ValueError: thirteen new tokens$"):
        arm.answer(Ask((5,), 13, GREEDY, 0))
    assert arm.answer(Ask((5,), 2, GREEDY, 0)).ids == [5, 5]
    arm.close()


def test_a_worker_that_dies_leaves_its_last_words(pair: sprinter.Pair, fake: None) -> None:
    arm = parse_arm("vllm:plain")
    arm.start(pair)
    for _ in range(2):
        with pytest.raises(SprinterError, match="ended with status 3: the engine burst"):
            arm.answer(Ask((5,), 14, GREEDY, 0))
    arm.close()
    arm.start(pair)  # a new one
    assert arm.answer(Ask((5,), 1, GREEDY, 0)).ids == [5]
    arm.close()


def test_an_engine_that_rejects_the_pair_is_reported(pair: sprinter.Pair, fake: None) -> None:
    models = pair.models
    short = LoadedModel(models.target.model, models.target.id, None, 13, models.vocab_size, 128, (0,))
    arm = parse_arm("vllm:plain")
    with pytest.raises(SprinterError, match=r"ValueError: thirteen is unlucky$"):
        arm.start(sprinter.Pair(LoadedPair(short, models.draft, None)))


def test_models_must_be_on_disk(pair: sprinter.Pair, fake: None) -> None:
    models = pair.models
    memory = LoadedModel(models.target.model, "LlamaForCausalLM", None, 99, models.vocab_size, 128, (0,))
    with pytest.raises(
        UserError, match="reads models from disk, and the target LlamaForCausalLM is in memory"
    ):
        parse_arm("vllm:plain").start(sprinter.Pair(LoadedPair(memory, models.draft, None)))


def test_an_interpreter_without_vllm_is_reported(
    pair: sprinter.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINTER_VLLM_PYTHON", str(tmp_path / "python"))
    with pytest.raises(
        UserError, match=r"cannot be started \(.*python: No such file or directory\): check the path"
    ):
        parse_arm("vllm:plain").start(pair)
    bare = tmp_path / "bare"  # as -S: no site-packages, so no vllm even where this environment has it
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UserError, match=r"bare has no vllm: install it there, or give python=PATH") as caught:
        parse_arm(f"vllm:plain(python={bare})").start(pair)
    assert "\n" not in str(caught.value)


def test_a_worker_ends_with_its_input(tmp_path: Path) -> None:
    child = JsonProcess([sys.executable, "-c", "import sys; sys.stdin.read()"], os.environ, "a child")
    pid = child._child.pid
    child.close()
    assert not alive(pid)
    with pytest.raises(SprinterError, match="a child was closed"):
        child.ask({})


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sprinter.bench.arms.process._PATIENCE_S", 0.2)
    child = JsonProcess([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, "a child")
    pid, began = child._child.pid, time.monotonic()
    child.close()
    assert not alive(pid) and time.monotonic() - began < 10


def test_a_worker_ends_even_while_its_engine_starts(tmp_path: Path) -> None:
    install(tmp_path)
    platforms = tmp_path / "vllm" / "platforms.py"
    platforms.write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    command = [sys.executable, vllm_worker.__file__]
    child = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert child.stdin is not None
    child.stdin.write(b'{"engine": {"model": "m"}, "python": "p"}\n')
    child.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    child.stdin.close()
    assert child.wait(10) == 0


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(note)!r}, 'w').write(str(child.pid)); print('{{}}', flush=True); sys.stdin.read()"
    )
    process = JsonProcess([sys.executable, "-c", script], os.environ, "a child")
    process.ask({})
    process.close()
    pid, until = int(note.read_text()), time.monotonic() + 10
    while running(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not running(pid)


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="SPRINTER_VLLM_PYTHON names no interpreter that has vllm")
@pytest.mark.parametrize(
    "way", ["plain", "draft_model", "draft_model(draft_sampling=probabilistic)", "ngram"]
)
@pytest.mark.timeout(900)
def test_vllm_s_texts_are_the_target_s(pair: sprinter.Pair, way: str) -> None:
    """Greedy texts are ours; drawn ones follow the target's law at their second token, the first of a draft.

    Chi-square of 6 cells over 400 texts, p < 0.001: a false alarm in 1 of 1000 runs.
    """
    spec = way.replace(")", ", eager=true)") if "(" in way else f"{way}(eager=true)"
    arm, ours = parse_arm(f"vllm:{spec}"), parse_arm("autoregressive")
    ours.start(pair)
    arm.start(pair)
    try:
        for text in ("The river rises in the mountains and", "In 1998 the city council"):
            ask = Ask(tuple(pair.tokenizer(text)["input_ids"]), 32, GREEDY, 0)
            answer = arm.answer(ask)
            assert answer.ids == ours.answer(ask).ids
            assert sum(answer.accept_lengths) == len(answer.ids) == len(answer.arrivals_s)
        drawn = [arm.answer(Ask(ask.ids, 3, Sampling(0.8, top_p=0.95), seed)).ids for seed in range(400)]
    finally:
        arm.close()
    law = second_law(pair, ask.ids, Sampling(0.8, top_p=0.95))
    best = law.topk(5).indices.tolist()
    seen = torch.tensor([sum(ids[1:2] == [token] for ids in drawn) for token in best], dtype=torch.float64)
    wanted = law[best].double() * len(drawn)
    cells = [(seen, wanted), (len(drawn) - seen.sum(), len(drawn) - wanted.sum())]
    assert sum(float(((a - b) ** 2 / b).sum()) for a, b in cells) < 20.5  # 5 degrees of freedom


def second_law(pair: sprinter.Pair, ids: tuple[int, ...], sampling: Sampling) -> torch.Tensor:
    """The target's law of the second new token, over all first ones."""

    def law(texts: list[list[int]]) -> torch.Tensor:
        with torch.inference_mode():
            return process(pair.models.target.model(torch.tensor(texts)).logits[:, -1], sampling)

    first = law([list(ids)])[0]
    firsts = first.nonzero().flatten()
    return first[firsts] @ law([[*ids, token] for token in firsts.tolist()])


def test_eight_bit_weights_are_not_run_as_others_in_silence(fake: None) -> None:
    eight = sprinter.load_pair(dtype="int8")
    with pytest.raises(
        UserError, match=r"weights are in int8, which vLLM would not run: give vllm:\.\.\.\(dtype=bfloat16\)"
    ):
        parse_arm("vllm:plain").start(eight)
    arm = parse_arm("vllm:plain(dtype=bfloat16)")
    arm.start(eight)
    arm.close()
