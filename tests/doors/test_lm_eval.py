"""lm-evaluation-harness on a pair: its numbers are those of its own model of transformers."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

import sprinter
from sprinter.cli import main
from sprinter.doors.lm_eval import SprinterLM, evaluate, register
from sprinter.errors import UserError

TALE = "the river rises in mountains and a small town where old people tell long stories about water, fish. Birds"
WORDS = TALE.split()


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair()


@pytest.fixture(scope="module")
def plain(pair: sprinter.Pair) -> Any:
    """The harness's own model, of the same target."""
    target = AutoModelForCausalLM.from_pretrained(sprinter.builtin_paths()["target"]).float()
    return HFLM(pretrained=target, tokenizer=pair.tokenizer, batch_size=8, device="cpu")


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=0) for one in arguments]


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def test_log_likelihoods_are_those_of_transformers(pair: sprinter.Pair, plain: Any) -> None:
    draw = random.Random(1)
    items = [(text(draw, draw.randint(1, 30)), " " + text(draw, draw.randint(1, 6))) for _ in range(198)]
    requests = asked("loglikelihood", *items, ("", "The river"), (text(draw, 400), " water"))
    ours, theirs = SprinterLM(pair=pair).loglikelihood(requests), plain.loglikelihood(requests)
    assert len(ours) == 200
    assert max(abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True)) < 1e-3
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert len({round(value, 3) for value, _ in ours}) > 150


def test_whole_texts_are_scored_in_windows(pair: sprinter.Pair, plain: Any) -> None:
    requests = asked("loglikelihood_rolling", (text(random.Random(2), 900),), ("A fish.",))
    ours, theirs = (
        SprinterLM(pair=pair).loglikelihood_rolling(requests),
        plain.loglikelihood_rolling(requests),
    )
    assert len(pair.tokenizer.encode(requests[0].args[0])) > pair.models.context
    assert ours == pytest.approx(theirs, abs=2e-2)  # a sum over a thousand tokens


def test_exact_answers_are_those_of_transformers(pair: sprinter.Pair, plain: Any) -> None:
    draw = random.Random(3)
    settings = {"until": [".", "\n\n"], "max_gen_toks": 16, "do_sample": False}
    requests = asked("generate_until", *((text(draw, draw.randint(1, 12)), settings) for _ in range(12)))
    model = SprinterLM(pair=pair, method="speculative(gamma=4)")
    assert model.generate_until(requests) == plain.generate_until(requests)
    info = model.get_model_info()
    assert info["answers"] == 12 and info["mean_drift"] == 0 and info["drift_coverage"] == 1
    assert 0 < info["target_calls_per_token"] < 1 and info["lossless"]


def test_prompts_beyond_the_context_lose_their_beginning(pair: sprinter.Pair) -> None:
    model = SprinterLM(pair=pair, method="autoregressive", max_length=40)
    long = text(random.Random(4), 200)
    kept = pair.tokenizer.decode(pair.tokenizer.encode(long)[-32:])
    settings = {"until": [], "max_gen_toks": 8, "do_sample": False}
    (answer,) = model.generate_until(asked("generate_until", (long, settings)))
    assert answer == pair.generate(kept, method="autoregressive", max_new_tokens=8, temperature=0).text


def test_settings_that_are_not_honoured_are_refused(pair: sprinter.Pair) -> None:
    with pytest.raises(UserError, match="typical_p"):
        SprinterLM(pair=pair).generate_until(
            asked("generate_until", ("A", {"until": ["."], "typical_p": 0.5}))
        )
    with pytest.raises(UserError, match="batch_size"):
        SprinterLM(pair=pair, batch_size="auto")
    with pytest.raises(UserError, match="did you mean gsm8k"):
        evaluate(pair, ["gsm8"], data=Path("/nothing"))


def test_the_harness_knows_the_model() -> None:
    register()
    assert get_model("sprinter") is SprinterLM


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with questions of GSM8K and of CommonsenseQA."""
    questions = [
        {"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in (2, 3)
    ]
    lines = "".join(json.dumps(one) + "\n" for one in questions)
    (tmp_path / "gsm8k_test.jsonl").write_text(lines)
    (tmp_path / "gsm8k_train.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    choices = [{"label": letter, "text": word} for letter, word in zip("ABCDE", WORDS, strict=False)]
    asked = [{"question": {"stem": f"Which, {n}?", "choices": choices}, "answerKey": "B"} for n in range(4)]
    (tmp_path / "commonsenseqa_dev.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    return tmp_path


def test_a_run_by_several_methods(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = files / "results.json"
    words = [
        "eval",
        "--tasks",
        "gsm8k,commonsenseqa",
        "--data",
        str(files),
        "--num-fewshot",
        "1",
        "--out",
        str(out),
    ]
    assert (
        main([*words, "--method", "speculative(gamma=4)", "--method", "fuzzy(threshold=0.2)", "--json"]) == 0
    )
    runs = json.loads(out.read_text())["runs"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"] == runs
    exact, fuzzy = (one["config"] for one in runs)
    assert exact["method"] == "speculative(gamma=4)" and fuzzy["method"].startswith("fuzzy(")
    assert exact["mean_drift"] == 0 < fuzzy["mean_drift"]
    assert [set(one["results"]) for one in runs] == [{"gsm8k", "commonsenseqa"}] * 2
    scores = [one["results"]["commonsenseqa"]["acc,none"] for one in runs]
    assert scores[0] == scores[1]  # a log-likelihood is the target's


def test_the_command_without_the_harness(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sprinter.cli.eval.find_spec", lambda name: None)
    assert main(["eval", "--tasks", "gsm8k"]) == 2
    assert "is not installed: pip install" in capsys.readouterr().err
    assert "sprinter.cli.eval" in sys.modules
