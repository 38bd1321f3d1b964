"""Mined tokens against the algorithm written out over uncached passes; heads fitted on them; the command line."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.blocks import commands, run_here
from tests.models.tiny import fresh, save, word_tokenizer

import sprinter
from sprinter.cli import main
from sprinter.decode.draft import Origin
from sprinter.engine.pair import Pair
from sprinter.engine.prompt import encode_prompt
from sprinter.errors import UserError
from sprinter.heads.artifact import load_head
from sprinter.training.examples import Example
from sprinter.training.harm import fit_harm
from sprinter.training.mine import MineSettings, mine, read_mined

PROMPTS = [f"w{i} w{i + 7} w{(3 * i) % 50}" for i in range(1, 13)]
SETTINGS = MineSettings(new_tokens=24, rows=5)


def answer(text: str) -> Hashable | None:
    """The class of the last word."""
    return int(text.split()[-1].strip("w") or 0) % 3 if text.split() else None


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = fresh("llama")
    with torch.no_grad():
        made.get_output_embeddings().weight[0] *= 2.0  # texts end now and then
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mine")
    target = model(1)
    draft = model(1)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(5)
        for weight in draft.parameters():
            weight += 0.08 * torch.randn(weight.shape, generator=noise)
    save(root / "target", target, word_tokenizer())
    save(root / "draft", draft, word_tokenizer())
    return root


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return sprinter.load_pair(folder / "target", folder / "draft", compile=False)


@pytest.fixture(scope="module")
def mined(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mined") / "labels"
    mine(pair, [Example(text, None, "") for text in PROMPTS], answer, out, SETTINGS)
    return out


def greedy(module: torch.nn.Module, ids: list[int], room: int) -> list[int]:
    ids = list(ids)
    for _ in range(room):
        if ids[-1] == 0:
            break
        ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


@torch.inference_mode()
def by_hand(
    pair: Pair, prompt: list[int]
) -> list[tuple[int, int, int, bool, torch.Tensor, torch.Tensor, float]]:
    """AutoJudge's Algorithm 1 for one prompt."""
    assert pair.models.draft is not None and pair.tokenizer is not None
    target, draft = pair.models.target.module("a test"), pair.models.draft.module("a test")
    n, room = len(prompt), SETTINGS.new_tokens

    def said(ids: list[int]) -> Hashable | None:
        return answer(str(pair.tokenizer.decode(ids[n:], skip_special_tokens=True)))

    text = greedy(target, prompt, room)
    wanted, found, at = said(text), [], n
    if text[-1] != 0 or wanted is None:
        return []
    while at < len(text):
        first = int(draft(torch.tensor([text[:at]])).logits[0, -1].argmax())
        if first != text[at]:
            other = greedy(target, [*text[:at], first], room - (at + 1 - n))
            if other[-1] != 0:  # it had no room to end
                at += 1
                continue
            same = said(other) == wanted
            states = target.model(torch.tensor([[*text[:at], first]])).last_hidden_state[0]
            law = torch.log_softmax(target.lm_head(states[-2]), -1)
            found.append((at - n, text[at], first, same, states[-2], states[-1], float(law[first])))
            text = other if same else text
        at += 1
    return found


def test_it_is_the_algorithm(pair: Pair, mined: Path) -> None:
    assert pair.tokenizer is not None
    found, rows = read_mined(mined), 0
    for number, prompt in enumerate(PROMPTS):
        mask = found.prompt == number
        wanted = by_hand(pair, pair.tokenizer(prompt)["input_ids"])
        numbers = [found.position, found.token, found.instead, found.same]
        assert list(zip(*(one[mask].tolist() for one in numbers), strict=True)) == [one[:4] for one in wanted]
        for row, one in zip(mask.nonzero().flatten().tolist(), wanted, strict=True):
            torch.testing.assert_close(found.before[row], one[4], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.after[row], one[5], atol=1e-4, rtol=1e-4)
            assert float(found.log_p[row]) == pytest.approx(one[6], abs=1e-4)
        rows += len(wanted)
    assert rows == len(found.same) > 20 and 0 < int(found.same.sum()) < rows


def test_a_group_that_is_lost_is_mined_again(pair: Pair, mined: Path) -> None:
    before = read_mined(mined)
    (mined / "part-00001.safetensors").unlink()
    assert "interrupted (1 of 3 parts are missing or damaged)" in refusal(lambda: read_mined(mined))
    part = mined / "part-00001.safetensors"
    part.write_bytes((mined / "part-00002.safetensors").read_bytes()[:400])
    assert "damaged" in refusal(lambda: read_mined(mined))
    part.unlink()
    times = {path: path.stat().st_mtime_ns for path in mined.glob("part-*")}
    mine(pair, [Example(text, None, "") for text in PROMPTS], answer, mined, SETTINGS)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert torch.equal(read_mined(mined).before, before.before)
    other = replace(SETTINGS, share=0.5)
    message = refusal(lambda: mine(pair, [Example(PROMPTS[0], None, "")], answer, mined, other))
    assert "mined with another prompts" in message


def test_answers_in_the_data_are_not_part_of_the_prompt(pair: Pair, mined: Path, tmp_path: Path) -> None:
    examples = [Example(text, "w3 w4 w5 w6", "") for text in PROMPTS]
    mine(pair, examples, answer, tmp_path / "answers", SETTINGS)
    assert torch.equal(read_mined(tmp_path / "answers").after, read_mined(mined).after)


def test_what_does_not_fit_is_counted(pair: Pair, tmp_path: Path) -> None:
    examples = [Example(text, None, "") for text in (*PROMPTS[:3], "", "w1 " * 200)]
    info = mine(pair, examples, answer, tmp_path / "few", SETTINGS)
    assert info["skipped"] == {"empty": 1, "too_long": 1} and info["prompts"] == 3
    assert 0 <= read_mined(tmp_path / "few").info["answered"] <= 3


def test_a_share_of_the_tokens(pair: Pair, mined: Path, tmp_path: Path) -> None:
    examples = [Example(text, None, "") for text in PROMPTS]
    mine(pair, examples, answer, tmp_path, replace(SETTINGS, share=0.4))
    assert 0 < len(read_mined(tmp_path).same) < len(read_mined(mined).same)


def test_refusals(pair: Pair, folder: Path, tmp_path: Path) -> None:
    alone = sprinter.load_pair(folder / "target", compile=False)
    one = [Example("w1", None, "")]
    assert "this pair has none: give draft" in refusal(lambda: mine(alone, one, answer, tmp_path, SETTINGS))
    for method, said in (("lenient", "is lossy, and answers must be the target's"), ("nope", "nope")):
        wrong = replace(SETTINGS, method=method)
        assert said in refusal(lambda wrong=wrong: mine(pair, one, answer, tmp_path / "a", wrong))
    assert not (tmp_path / "a").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    assert "holds something else" in refusal(lambda: mine(pair, one, answer, tmp_path / "full", SETTINGS))
    for content in ("[]", "{}", "no json"):
        (tmp_path / "full" / "mined.json").write_text(content)
        assert "cannot read" in refusal(lambda: read_mined(tmp_path / "full"))
    assert "holds no mined tokens" in refusal(lambda: read_mined(tmp_path / "none"))
    assert "none of 1 prompts fits" in refusal(
        lambda: mine(pair, [Example("", None, "")], answer, tmp_path / "b", SETTINGS)
    )


# --- heads -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def learnable(mined: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mined tokens with labels that the states tell: 40 prompts, noise in one of ten."""
    out = tmp_path_factory.mktemp("learnable")
    info = json.loads((mined / "mined.json").read_text()) | {"prompts": 5}
    (out / "mined.json").write_text(json.dumps(info))
    parts = load_file(mined / "part-00000.safetensors")
    chance = torch.Generator().manual_seed(1)
    n, size = 400, parts["after"].shape[1]
    states = torch.randn(2, n, size, generator=chance)
    same = (states[1, :, 3] + 0.5 * states[1, :, 5] + 0.3 * torch.randn(n, generator=chance)) > 0
    columns = {name: torch.zeros(n, dtype=torch.int64) for name in ("position", "token", "instead")}
    columns |= {"prompt": torch.arange(n) % 40, "same": same, "log_p": torch.randn(n, generator=chance)}
    columns |= {"before": states[0], "after": states[1], "answered": torch.tensor([40])}
    save_file({name: column.contiguous() for name, column in columns.items()}, out / "part-00000.safetensors")
    return out


def test_a_judge_is_fitted_and_evaluated_on_other_prompts(learnable: Path) -> None:
    harm, mined = fit_harm([learnable], "judge")
    assert harm.auc.low > 0.93 and harm.baseline.low < 0.5 < harm.baseline.high
    assert 0.88 <= harm.recall <= 0.93 and harm.harmless > 0.6
    assert harm.head.config.tau == pytest.approx(
        float(torch.quantile(harm.scores[~mined.same], harm.recall)), abs=0.02
    )
    weight = harm.head.network.weight[0]
    assert {int(i) for i in weight.abs().topk(2).indices} == {3, 5}
    blind, _ = fit_harm([learnable], "diversed")  # the states before the token know nothing here
    assert 0.35 < blind.auc.value < 0.65


def test_the_command_line_makes_a_head_that_decodes(
    folder: Path, learnable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for head in ("judge", "diversed"):
        out = tmp_path / head
        assert (
            main(["gate", "train", "--labels", str(learnable), "--preset", head, "--out", str(out), "--json"])
            == 0
        )
        facts = json.loads(capsys.readouterr().out)
        assert facts["mined"]["tokens"] == 400 and facts["preset"] == head
        assert "400 tokens of 40 prompts" in (out / "README.md").read_text()
    heads = [load_head(tmp_path / name) for name in ("judge", "diversed")]
    pair = sprinter.load_pair(folder / "target", folder / "draft", heads=heads, compile=False)
    plain = pair.generate([5, 6, 7], method="autoregressive", max_new_tokens=40, temperature=0)
    for never in ("judge(threshold=1.0)", "diversed(scale=0)"):
        out = pair.generate([5, 6, 7], method=never, max_new_tokens=40, temperature=0)
        assert [token.id for token in out.tokens] == [token.id for token in plain.tokens]
    always = pair.generate([5, 6, 7], method="judge(threshold=0)", max_new_tokens=24, temperature=0, seed=1)
    assert {token.origin for token in always.tokens} <= {Origin.ACCEPTED, Origin.BONUS, Origin.TARGET}
    assert "recorded" not in pair.generate([5], method="judge", max_new_tokens=2).method


def test_the_blocks_of_the_pages(
    folder: Path, learnable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random models answer no question: what the page trains on is ``learnable`` in place of its own mined tokens."""
    monkeypatch.chdir(tmp_path)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    for name, model in (("T", "target"), ("D", "draft")):
        shutil.copytree(folder / model, name)
        tokenizer.save_pretrained(name)
    Path("questions.jsonl").write_text(json.dumps({"question": "w3 w4"}) + "\n")
    mined, train, generate = commands(*run_here("docs/methods/accept/judge.md", __file__))
    assert main([*shlex.split(mined)[1:], "--max-new-tokens", "4"]) == 0
    assert json.loads(Path("mined/mined.json").read_text())["prompts"] == 1
    shutil.rmtree("mined")
    shutil.copytree(learnable, "mined")
    (weight,) = commands(*run_here("docs/methods/accept/diversed.md", __file__))
    for line in (train, f"{generate} -n 8", weight):
        assert main(shlex.split(line)[1:]) == 0, line
    assert load_head(Path("my-judge")).config.tau > 0 and load_head(Path("my-weight"))


def test_bad_input_at_the_command_line(
    learnable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*more: str) -> str:
        code = main(["gate", "train", "--labels", str(learnable), "--out", str(tmp_path / "head"), *more])
        assert code == 2
        return capsys.readouterr().err

    assert "--width is not for a judge head" in said("--preset", "judge", "--width", "8")
    assert "--epochs is not for a judge head" in said("--preset", "judge", "--epochs", "3")
    assert "--recall is not for a diversed head" in said("--preset", "diversed", "--recall", "0.8")
    assert "--recall is for a judge head" in said("--recall", "0.8")
    assert "did you mean 'diversed'" in said("--preset", "diverse")
    assert "the same prompts were given twice" in said("--preset", "judge", "--labels", str(learnable))
    assert "recall" in said("--preset", "judge", "--recall", "0.2")


def test_a_head_of_another_target_is_refused(folder: Path, learnable: Path) -> None:
    harm, _ = fit_harm([learnable], "judge")
    message = refusal(
        lambda: sprinter.load_pair(folder / "draft", folder / "target", heads=[harm.head], compile=False)
    )
    assert "was made for other weights of target" in message


def test_states_that_are_not_finite_are_refused(learnable: Path, tmp_path: Path) -> None:
    columns = load_file(learnable / "part-00000.safetensors")
    columns["after"][7, 2] = torch.inf
    save_file(columns, tmp_path / "part-00000.safetensors")
    (tmp_path / "mined.json").write_text((learnable / "mined.json").read_text())
    assert "not finite" in refusal(lambda: fit_harm([tmp_path], "judge"))
    columns["after"][7, 2] = 0.0
    columns["same"] = columns["prompt"] > 2  # all harmful tokens in three prompts
    save_file(columns, tmp_path / "part-00000.safetensors")
    assert "in 3 prompts" in refusal(lambda: fit_harm([tmp_path], "judge"))


def test_chat_turns_end_at_the_template_s_own_token(folder: Path, tmp_path: Path) -> None:
    """A turn that ends with a token which the checkpoint does not name as EOS."""
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["w9"]})
    turn = "{% if m['role'] == 'assistant' %}w9 {% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} " + turn + "{% endfor %}"
    pair = sprinter.load_pair(folder / "target", folder / "draft", tokenizer=tokenizer, compile=False)
    # w1, the unknown word, is special too, and is found in w10.
    texts = [f"w{i} w{i + 4} w{i + 2}" for i in range(20, 50, 2)]
    talks = [[{"role": "user", "content": text}] for text in texts]
    ends = encode_prompt(talks[0], pair.models).ends
    settings = replace(SETTINGS, rows=12)
    mine(pair, [Example(talk, None, "a") for talk in talks], answer, tmp_path / "chat", settings)
    answered = 0
    for talk in talks:
        out = pair.generate(talk, method="autoregressive", temperature=0, max_new_tokens=SETTINGS.new_tokens)
        answered += out.finish_reason != "length" and answer(out.text) is not None
    assert read_mined(tmp_path / "chat").info["answered"] == answered
    assert ends == (9,)
