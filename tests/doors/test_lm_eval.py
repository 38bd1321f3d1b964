"""lm-evaluation-harness on a pair: its numbers are those of its own model of transformers."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tests.blocks import run_here
from transformers import AutoModelForCausalLM

import sprinter
from sprinter.bench.journal import replies
from sprinter.cli import main
from sprinter.doors.lm_eval import SprinterLM, find_tasks, register
from sprinter.engine.engine import Engine
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
    items = [(text(draw, draw.randint(1, 30)), " " + text(draw, draw.randint(1, 6))) for _ in range(158)]
    choices = [
        (question, f" {letter}") for question in (text(draw, 12) for _ in range(10)) for letter in "ABCD"
    ]
    requests = asked("loglikelihood", *items, *choices, ("", "The river"), (text(draw, 400), " water"))
    ours, theirs = SprinterLM(pair=pair).loglikelihood(requests), plain.loglikelihood(requests)
    assert len(ours) == 200
    largest = max(abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True))
    print(f"largest difference of 200 log-likelihoods: {largest:.1e} nats")
    assert largest < 1e-3
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert len({round(value, 3) for value, _ in ours}) > 180


def test_choices_of_one_token_share_a_pass_and_methods_share_log_likelihoods(
    pair: sprinter.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    score = sprinter.doors.lm_eval.score_texts
    monkeypatch.setattr(
        "sprinter.doors.lm_eval.score_texts",
        lambda runner, texts, *more, **named: read.append(len(texts)) or score(runner, texts, *more, **named),
    )
    requests = asked(
        "loglikelihood", *((question, f" {one}") for question in ("A fish", "Birds") for one in "ABCD")
    )
    with replies(tmp_path / "kept.jsonl") as kept:
        first = SprinterLM(pair=pair, method="speculative(gamma=4)", kept=kept).loglikelihood(requests)
    assert read == [2] and len(set(first)) == 8
    with replies(tmp_path / "kept.jsonl") as kept:
        assert SprinterLM(pair=pair, method="autoregressive", kept=kept).loglikelihood(requests) == first
    assert read == [2]


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


def test_what_is_not_honoured_is_refused_before_anything_is_decoded(
    pair: sprinter.Pair, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "step", lambda self: pytest.fail("something was decoded"))
    model, good = SprinterLM(pair=pair), ("A", {"until": ["."]})
    for settings, message in (
        ({"typical_p": 0.5}, "typical_p"), ({"num_beams": 4}, "num_beams"),
        ({"max_gen_toks": pair.models.context}, "no room for a prompt"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            model.generate_until(asked("generate_until", good, ("A", {"until": ["."], **settings})))
    with pytest.raises(UserError, match="batch_size"):
        SprinterLM(pair=pair, batch_size="auto")
    with pytest.raises(UserError, match="did you mean gsm8k"):
        find_tasks(["gsm8"], files)
    (files / "humaneval.jsonl").write_text('{"prompt": "", "canonical_solution": ""}\n')
    with pytest.raises(UserError, match="--run-code"):
        find_tasks(["humaneval"], files)
    with pytest.raises(UserError, match=r"mmlu_dev.tar.gz"):
        find_tasks(["mmlu"], files)


def test_a_tokenizer_without_a_chat_template(pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="no chat template"):
        SprinterLM(pair=pair).apply_chat_template([{"role": "user", "content": "A"}])


def test_repeats_of_a_sampled_request_differ_and_can_be_had_again(pair: sprinter.Pair) -> None:
    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    requests = asked("generate_until", *[("The river", settings)] * 4, ("A town", settings))
    first = SprinterLM(pair=pair, method="speculative(gamma=4)", seed=1).generate_until(requests)
    assert len(set(first)) == 5
    again = SprinterLM(pair=pair, method="speculative(gamma=4)", seed=1).generate_until(requests[::-1])
    assert again[0] == first[4] and again[1:] == first[:4]
    assert SprinterLM(pair=pair, method="speculative(gamma=4)", seed=2).generate_until(requests) != first


def test_an_interrupted_run_goes_on(
    pair: sprinter.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"until": [], "max_gen_toks": 6, "do_sample": False}
    requests = asked("generate_until", *((text(random.Random(n), n), settings) for n in range(1, 7)))
    whole = SprinterLM(pair=pair, method="speculative(gamma=4)")
    wanted, step, ended = whole.generate_until(requests), Engine.step, 0

    def two(self: Engine) -> Any:
        nonlocal ended
        if ended >= 2:
            raise KeyboardInterrupt
        events = step(self)
        ended += len([one for one in events if one.generation is not None])
        return events

    monkeypatch.setattr(Engine, "step", two)
    with pytest.raises(KeyboardInterrupt), replies(tmp_path / "kept.jsonl") as kept:
        SprinterLM(pair=pair, method="speculative(gamma=4)", batch_size=2, kept=kept).generate_until(requests)
    monkeypatch.setattr(Engine, "step", step)
    with replies(tmp_path / "kept.jsonl") as kept:
        assert len(kept.rows) == ended >= 2
        model = SprinterLM(pair=pair, method="speculative(gamma=4)", batch_size=2, kept=kept)
        assert model.generate_until(requests) == wanted
        other = SprinterLM(pair=pair, method="fuzzy(threshold=0.2)", kept=kept)
        other.generate_until(requests)
    info, before = model.get_model_info(), whole.get_model_info()
    assert (info["known_answers"], before["known_answers"]) == (ended, 0)
    assert info["target_calls_per_token"] == before["target_calls_per_token"]
    assert other.get_model_info()["known_answers"] == 0


def test_the_harness_knows_the_model() -> None:
    (block,) = run_here("docs/lm-eval.md", __file__)
    exec(block, {})  # it registers the model
    register()  # a second time is no mistake
    assert get_model("sprinter") is SprinterLM
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (named,) = project["entry-points"]["lm_eval.models"].items()
    assert EntryPoint(*named, "lm_eval.models").load() is SprinterLM and named[0] == "sprinter"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with questions of GSM8K and of CommonsenseQA, and a task of one's own."""
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
    methods = ["--method", "speculative(gamma=4)", "--method", "fuzzy(threshold=0.7)"]
    assert main([*words, *methods[:2]]) == 0  # as if the second one had been interrupted
    assert "results.json" in capsys.readouterr().out
    assert main([*words, *methods, "--json"]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"] == runs
    exact, fuzzy = (one["config"] for one in runs)
    assert exact["method"] == "speculative(gamma=4)" and fuzzy["method"].startswith("fuzzy(")
    assert (exact["known_answers"], fuzzy["known_answers"]) == (2, 0)
    assert exact["mean_drift"] == 0 < fuzzy["mean_drift"]
    assert set(exact["tasks"]) == {"gsm8k"} and exact["tasks"]["gsm8k"]["questions"] == 2
    low, high = exact["intervals"]["target_calls_per_token"]
    assert low <= exact["target_calls_per_token"] <= high
    assert [set(one["results"]) for one in runs] == [{"gsm8k", "commonsenseqa"}] * 2
    scores = [one["results"]["commonsenseqa"]["acc,none"] for one in runs]
    assert scores[0] == scores[1]  # a log-likelihood is the target's
    assert sum("logprob" in line for line in (files / "results.answers.jsonl").open()) == 20


def test_a_method_that_lacks_a_model_is_refused_early(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "--tasks", "gsm8k", "--data", str(files), "--target", "/nowhere", "--draft", "/nowhere"]
    assert main([*words, "--method", "sprinter"]) == 2
    assert "needs a gate: give --gate" in capsys.readouterr().err


def test_the_command_without_the_harness(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sprinter.cli.eval.find_spec", lambda name: None)
    assert main(["eval", "--tasks", "gsm8k"]) == 2
    assert "is not installed: pip install" in capsys.readouterr().err
    assert "sprinter.cli.eval" in sys.modules


def test_the_script_of_the_gallery_draws_its_picture(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "gallery" / "lm_eval_harness.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=300)
    assert (tmp_path / "lm_eval_harness.svg").stat().st_size > 1000
