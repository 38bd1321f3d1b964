"""benchmarks/gpu/run.py: the whole of it on tiny models, its mistakes, its clock."""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")  # which the script measures

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("train", "arms", "real", "latency", "roofline")


@pytest.fixture
def gpu() -> Any:
    """The script as a module."""
    return importlib.import_module("benchmarks.gpu.run")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 kB of paragraphs over 400 words, some far commoner than others."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 6))) for _ in range(400)]
    weights = [1 / (i + 1) for i in range(400)]
    lines = [" ".join(chance.choices(words, weights, k=70)) + ".\n" for _ in range(900)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "cpu"], "add --smoke"),
        (["--smoke", "--device", "cpu", "--stages", "train,speed"], "no stage 'speed'"),
        (["--smoke", "--device", "cpu"], "needs text"),
        (["--smoke", "--device", "cpu", "--text", "nowhere.txt"], "no file 'nowhere.txt'"),
        (["--smoke", "--device", "cpu", "--stages", "real"], "the stage real needs text"),
        (["--smoke", "--device", "cpu", "--stages", "arms", "--pair", "a", "b", "c"], "3 models were given"),
        (["--smoke", "--device", "cpu", "--stages", "arms", "--minutes", "0"], "is no time"),
        (["--smoke", "--device", "cpu", "--stages", "arms"], "run the stage train first"),
        (["--smoke", "--device", "cpu", "--stages", "roofline"], "run the stage train first"),
    ],
)
def test_mistakes_are_told_in_one_line(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert gpu.main(["--out", str(tmp_path), *arguments]) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if not line.startswith("[")]  # progress apart
    assert len(lines) == 1 and lines[0].startswith("error: ") and told in lines[0]
    assert printed.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path), "--stages", "latency"]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err


def test_what_a_stage_leaves_over_the_next_may_use(gpu: Any) -> None:
    began = time.monotonic()
    clock = gpu.Clock(began, 1000, list(STAGES))
    free_s = clock.end - began
    assert 0.98 * 1000 <= free_s < 1000
    first = clock.deadline("train") - time.monotonic()
    assert math.isclose(first, gpu.SHARES["train"] * free_s, abs_tol=1)
    assert math.isclose(sum(gpu.SHARES.values()), 1)
    # Nothing was used up: the last stage may have all that is left, and no stage more.
    assert math.isclose(clock.deadline("roofline"), clock.end, abs_tol=1)
    assert clock.deadline("arms") < clock.end
    late = gpu.Clock(began - 5000, 1000, list(STAGES))
    assert late.deadline("arms") <= time.monotonic()


def test_stories_are_documents_of_their_own_and_lines_of_a_page_are_joined(tmp_path: Path) -> None:
    train = importlib.import_module("benchmarks.gpu.train")
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"Story {n}."}) + "\n" for n in range(6)))
    assert {one.text for one in train.read_documents([file], 1)} == {f"Story {n}." for n in range(6)}
    assert {one.text for one in train.read_documents([file], 12)} == {
        f"Story {n}.\nStory {n + 1}." for n in (0, 2, 4)
    }


def test_bytes_of_a_pass(gpu: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    roofline = importlib.import_module("benchmarks.gpu.roofline")
    sizes = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for tied in (False, True):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))
        layers = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16)
        # the output embedding is read whole, the input embedding by rows
        assert roofline.weight_bytes(model) == 4 * (layers + 16 + 100 * 16)
        assert (
            roofline.cache_bytes(model, 10) == 4 * 2 * 2 * 2 * 4 * 10
        )  # K and V, layers, heads, width, tokens


@pytest.mark.slow
def test_whole_run_on_tiny_models(text: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--device", "cpu", "--smoke", "--minutes", "4",
        "--text", str(text), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == json.loads((tmp_path / "results" / "gpu.json").read_text(encoding="utf-8"))
    assert tuple(told["stages"]) == STAGES and told["smoke"]
    assert all("stage_seconds" in stage and "error" not in stage for stage in told["stages"].values())
    check_training(told["stages"]["train"])
    check_arms(told["stages"]["arms"])
    check_real(told["stages"]["real"])
    check_latency(told["stages"]["latency"])
    check_roofline(told["stages"]["roofline"])
    page = (tmp_path / "results" / "gpu.md").read_text(encoding="utf-8")
    assert all(f"## {name}" in page for name in STAGES)
    assert shlex.split(told["command"])[2:] == command[2:]
    assert "speculative" in page and "synthetic acceptance 0.8" in page


def check_training(stage: dict[str, Any]) -> None:
    assert stage["target"]["parameters"] > 3 * stage["draft"]["parameters"]
    assert stage["target"]["tokens"] == 2048 * stage["target"]["steps"] > 0
    assert stage["heldout"]["target_loss"] < math.log(
        stage["data"]["vocabulary"]
    )  # better than knowing nothing
    assert 0 < stage["heldout"]["overlap"]["mean"] < 1 and 0 < stage["heldout"]["entropy_auc"] < 1
    assert stage["gate"]["taus"] == sorted(stage["gate"]["taus"], reverse=True)
    assert len(stage["gate"]["taus"]) == 3


def check_arms(stage: dict[str, Any]) -> None:
    assert [one["temperature"] for one in stage["temperatures"]] == [1.0, 0.0]
    for one in stage["temperatures"]:
        assert one["gamma"] in (2, 4)
        assert [arm["error"] for arm in one["arms"]] == [None] * len(one["arms"])
        rows = {row["arm"]: row for row in one["summary"]}
        assert len(rows) == len(one["arms"]) == 14
        assert all(row["prompts"] == 2 and row["tokens_per_s"] > 0 for row in rows.values())
        for name in ("autoregressive", "speculative", "svip", "lookup"):
            assert rows[name]["mean_drift"][0] == 0 and rows[name]["drift_coverage"] == 1
        assert rows["autoregressive"]["speed_over"]["autoregressive"] == [1, 1, 1]
        assert rows["draft-only"]["trusted_share"] == 1 and rows["draft-only"]["drift_coverage"] == 1


def check_real(stage: dict[str, Any]) -> None:
    assert stage["pair"] == ["the built-in pair"]
    laws = stage["laws"]["eager bfloat16"]
    assert 0 < laws["kl"] < 0.05 and 0.9 < laws["same_first"] <= 1 and laws["positions"] > 100
    for measured in stage["temperatures"]:
        rows = {row["arm"]: row for row in measured["summary"]}
        assert {"autoregressive", "lookup", "speculative 3", "transformers:assisted"} <= rows.keys()
    assert [one["temperature"] for one in stage["temperatures"]] == [0.0, 1.0]


def check_latency(stage: dict[str, Any]) -> None:
    assert stage["left_out"] == {}
    plain, pair, rounded = stage["cases"]
    assert (
        rounded["eight_bits"]
        and rounded["models"]["target"]["weight_bytes"] < pair["models"]["target"]["weight_bytes"]
    )
    assert not plain["synthetic"] and pair["synthetic"]
    rows = {row["arm"]: row for row in pair["summary"]}
    assert {"synthetic acceptance 0.6", "synthetic trust 0.8", "transformers:assisted"} < rows.keys()
    assert all(row["round_ms"] > 0 for row in rows.values())


def check_roofline(stage: dict[str, Any]) -> None:
    assert stage["copy_gb_per_s"] > 0
    for role in ("target", "draft"):
        facts = stage["models"][role]
        assert [row["tokens"] for row in facts["passes"]] == [1, 2, 4]
        for row in facts["passes"]:
            assert 0 < row["fraction"]["large"] < 1 and row["kernel_ms"] > 0
        assert facts["steps"]["eager"]["step_ms"] > 0
