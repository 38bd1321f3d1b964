"""``model.generate(custom_generate=...)``: texts and laws of transformers; what is not honoured is refused."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_runner_laws import Draws, Pair
from tests.models.tiny import VOCAB, fresh, tiny
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StopStringCriteria,
    TextStreamer,
    pipeline,
    set_seed,
)

from sprinter.decode.enumerate import joint_law, target_joint_law
from sprinter.decode.spec import parse_method
from sprinter.doors.transformers import SprinterOutput, generate, hub_generate
from sprinter.errors import UserError
from sprinter.models.pair import builtin_paths

ROOT = Path(__file__).parents[2]
FAMILIES = ("llama", "gpt2", "gpt_neox", "qwen2", "opt", "gemma2")
EXACT = ("speculative(gamma=4)", "svip", "block(gamma=3)", "autoregressive")


def prompts(rows: int, longest: int = 12) -> dict[str, Tensor]:
    """Random prompts of different lengths, padded on the left."""
    draw = torch.Generator().manual_seed(rows)
    lengths = torch.randint(2, longest + 1, (rows, 1), generator=draw)
    mask = (torch.arange(longest) >= longest - lengths).long()
    ids = torch.randint(1, VOCAB, (rows, longest), generator=draw) * mask
    return {"input_ids": ids, "attention_mask": mask}


def row(ids: list[int]) -> dict[str, Any]:
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


def draft_of(kind: str) -> Any:
    """Another model of the family, near the first: some of its tokens are accepted, some are not."""
    draft = copy.deepcopy(tiny(kind))
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
    return draft


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_texts_are_those_of_transformers(kind: str) -> None:
    model, inputs = tiny(kind), prompts(100)
    settings: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 8,
        "pad_token_id": 0,
        "repetition_penalty": 1.3,
    }
    wanted = model.generate(**inputs, **settings)
    draft, made = draft_of(kind), []
    for method in EXACT:
        out = model.generate(
            **inputs, **settings, custom_generate=generate, draft_model=draft, method=method,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert out.sequences.tolist() == wanted.tolist()
        made.append(sum(one.stats.target_calls for one in out.generations))
    assert made[0] < made[-1]  # drafts were accepted


@pytest.mark.parametrize(
    "name", ["speculative(gamma=2)", "sprinter(tau=0.5, cap=2)", "fuzzy(threshold=0.02, gamma=2)"]
)
def test_sampled_laws_by_enumeration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every random draw of a text through ``model.generate``."""
    pair, draws, method = Pair(2), Draws(), parse_method(name)
    target, draft = pair.models
    monkeypatch.setattr(draft, "name_or_path", "draft")  # the gate's
    monkeypatch.setattr("sprinter.engine.request.AddressedDraws", lambda seed: draws)
    prompt, length, law = (0, 1, 0, 1, 0), 3, defaultdict[Any, float](float)
    while True:
        out = target.generate(
            **row(list(prompt)), do_sample=True, top_k=0, max_new_tokens=length, custom_generate=generate,
            draft_model=draft, method=name, gate=pair.heads["gate"],
        )  # fmt: skip
        law[tuple(out[0, len(prompt) :].tolist())] += draws.weight
        if not draws.next_path():
            break
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    assert law == pytest.approx(joint_law(method, pair, length, prompt=prompt), abs=1e-9)
    if method.lossless():
        assert law == pytest.approx(target_joint_law(pair, length, prompt=prompt), abs=1e-9)


@pytest.mark.parametrize("options", [
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.02}, {"bad_words_ids": [[5], [6, 7]]},
    {"sequence_bias": [[[3], 4.0]], "repetition_penalty": 1.5}, {"suppress_tokens": [1, 2, 3]},
    {"min_new_tokens": 1, "renormalize_logits": True}, {"min_length": 5},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_processors_say_the_same_law(options: dict[str, Any]) -> None:
    """The law of the first new token, out of the trace of a text, is that of transformers' own processors."""
    model, inputs = tiny("llama"), row([4, 5, 6, 6])
    plain = model.generate(
        **inputs,
        do_sample=True,
        max_new_tokens=1,
        **options,
        output_scores=True,
        return_dict_in_generate=True,
    )
    wanted = torch.softmax(plain.scores[0][0].double(), -1)
    seen = torch.zeros(VOCAB, dtype=torch.double)
    many = {name: value.expand(1500, -1) for name, value in inputs.items()}
    out = model.generate(
        **many, do_sample=True, max_new_tokens=1, **options, custom_generate=generate, seed=1
    )
    seen += torch.bincount(out[:, -1], minlength=VOCAB) / 1500
    assert set(seen.nonzero().flatten().tolist()) <= set(wanted.nonzero().flatten().tolist())
    assert (
        float((seen - wanted).abs().sum()) / 2 < 0.12
    )  # of 1,500 draws of 61 tokens: 0.103 at most in 2,000 trials


class Long(StoppingCriteria):
    """Ends a text of so many tokens, prompt included."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.most)


class Written:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("rows", [1, 3])
def test_criteria_end_a_text_at_their_token(rows: int) -> None:
    model, draft, inputs = tiny("llama"), draft_of("llama"), prompts(rows)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    criteria = [Long(17)]
    wanted = model.generate(**inputs, **settings, stopping_criteria=criteria)
    out = model.generate(
        **inputs, **settings, stopping_criteria=criteria, custom_generate=generate, draft_model=draft,
        method="speculative(gamma=4)", return_dict_in_generate=True,
    )  # fmt: skip
    assert out.sequences.tolist() == wanted.tolist()
    assert isinstance(out, SprinterOutput) and out.generations is not None
    ends = {one.finish_reason: len(one.tokens) for one in out.generations}
    assert ends["stop"] == 5 and set(ends) <= {"stop", "eos"}


def test_models_of_one_row_take_rows_in_turn() -> None:
    inputs, settings = prompts(3), {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    wanted = tiny("gpt_neo").generate(**inputs, **settings)
    out = tiny("gpt_neo").generate(
        **inputs, **settings, custom_generate=generate, draft_model=draft_of("gpt_neo")
    )
    assert out.tolist() == wanted.tolist()


@pytest.fixture(scope="module")
def built_in() -> tuple[Any, Any, Any]:
    """Target, draft and tokenizer of the built-in pair, as transformers loads them."""
    paths = builtin_paths()
    target, draft = (
        AutoModelForCausalLM.from_pretrained(paths[name]).float() for name in ("target", "draft")
    )
    return target, draft, AutoTokenizer.from_pretrained(paths["target"])


def test_greedy_texts_of_the_built_in_pair(built_in: tuple[Any, Any, Any]) -> None:
    model, draft, tokenizer = built_in
    draw = random.Random(1)
    words = ["the", "river", "rises", "in", "mountains", "a", "small", "town", "where", "old", "people"]
    texts = [tokenizer.encode(" ".join(draw.choices(words, k=draw.randint(2, 8)))) for _ in range(100)]
    longest = max(map(len, texts))
    inputs = {
        "input_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in texts]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in texts]),
    }
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    wanted = model.generate(**inputs, **settings).tolist()
    for method in EXACT[:-1]:
        out = model.generate(**inputs, **settings, custom_generate=generate, draft_model=draft, method=method)
        assert out.tolist() == wanted


def test_stop_strings_with_a_draft_model(built_in: tuple[Any, Any, Any]) -> None:
    """transformers refuses them beside an assistant; here they end a text, in the token that completes them."""
    model, draft, tokenizer = built_in
    inputs = tokenizer("The river rises in the mountains and", return_tensors="pt")
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    word = tokenizer.decode(model.generate(**inputs, **settings)[0, -8:-6])[1:]
    wanted = model.generate(**inputs, **settings, stop_strings=[word], tokenizer=tokenizer).tolist()
    assert len(wanted[0]) <= inputs["input_ids"].shape[1] + 14
    out = model.generate(
        **inputs, **settings, custom_generate=generate, draft_model=draft, method="speculative(gamma=5)",
        stopping_criteria=[StopStringCriteria(tokenizer, [word])],
    )  # fmt: skip
    assert out.tolist() == wanted
    given = {"attention_mask": inputs["attention_mask"], "assistant_model": draft, "tokenizer": tokenizer}
    assert (
        hub_generate(model, inputs["input_ids"], **given, **settings, stop_strings=[word]).tolist() == wanted
    )
    config = GenerationConfig(**settings, stop_strings=[word])
    assert hub_generate(model, inputs["input_ids"], **given, generation_config=config).tolist() == wanted
    with pytest.raises(UserError, match="tokenizer"):
        hub_generate(model, inputs["input_ids"], stop_strings=[word])


def test_a_streamer_is_given_prompt_and_tokens() -> None:
    model, written, inputs = tiny("llama"), Written(), row([4, 5, 6])
    out = model.generate(
        **inputs, do_sample=True, max_new_tokens=9, custom_generate=generate, draft_model=draft_of("llama"),
        method="speculative(gamma=4)", token_streamer=written,
    )  # fmt: skip
    assert written.ids == out[0].tolist() and written.ended
    through = Written()
    hub_generate(model, inputs["input_ids"], streamer=through, max_new_tokens=4, do_sample=False)
    assert len(through.ids) == 7 and through.ended


def test_a_streamer_is_for_one_row() -> None:
    settings: dict[str, Any] = {"max_new_tokens": 2, "custom_generate": generate, "pad_token_id": 0}
    with pytest.raises(UserError, match="token_streamer is for one row, and there are 2"):
        tiny("llama").generate(**prompts(2), **settings, token_streamer=Written())


def test_set_seed_reproduces_a_text_and_rows_differ() -> None:
    model, inputs = tiny("llama"), row([4, 5, 6])
    settings: dict[str, Any] = {
        "do_sample": True, "max_new_tokens": 9, "custom_generate": generate, "num_return_sequences": 3,
        "pad_token_id": 0,
    }  # fmt: skip
    texts = []
    for seed in (1, 1, 2):
        set_seed(seed)
        texts.append(model.generate(**inputs, **settings).tolist())
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_changed_weights_are_seen() -> None:
    """The pair is kept in its target from call to call, and copies of the target have none."""
    model, inputs = fresh("llama"), row([4, 5, 6])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "custom_generate": generate}
    model.generate(**inputs, **settings)
    held = vars(model)["_sprinter_pair"].pair
    assert copy.deepcopy(model).generate(**inputs, **settings) is not None
    assert vars(copy.deepcopy(model))["_sprinter_pair"].pair is None
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-0.7)
    after = model.generate(**inputs, **settings)
    assert vars(model)["_sprinter_pair"].pair is held
    assert after.tolist() == model.generate(**inputs, do_sample=False, max_new_tokens=6).tolist()


class Mine(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


@pytest.mark.parametrize(("given", "message"), [
    ({"logits_processor": LogitsProcessorList([Mine()])}, "Mine"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
    ({"num_beams": 2}, "num_beams"),
    ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ({"sequence_bias": [[[1, 2], 1.0]]}, "sequence_bias"),
    ({"typical_p": 0.5, "do_sample": True}, "TypicalLogitsWarper"),
    ({"method": "speculatve"}, "speculative"),
    ({"method": "fuzzy", "require_lossless": True}, "lossless"),
], ids=lambda given: next(iter(given)) if isinstance(given, dict) else "")  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    settings = {"do_sample": False, "max_new_tokens": 3, "draft_model": tiny("llama"), **given}
    with pytest.raises(UserError, match=message) as error:
        tiny("llama").generate(**row([4, 5, 6]), **settings, custom_generate=generate)
    assert "\n" not in str(error.value)


def test_states_of_a_model_that_are_refused() -> None:
    model = fresh("llama")
    right = {"input_ids": torch.tensor([[1, 2, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    with pytest.raises(UserError, match="padding_side"):
        model.generate(**right, max_new_tokens=2, custom_generate=generate)
    cache = model(**row([1, 2]), use_cache=True)["cache"]
    with pytest.raises(UserError, match="cache"):
        model.generate(**row([1, 2, 3]), cache=cache, max_new_tokens=2, custom_generate=generate)
    with pytest.raises(UserError, match="eval"):
        model.train().generate(**row([1, 2]), max_new_tokens=2, custom_generate=generate)


def test_the_built_in_pair_and_its_gate(
    built_in: tuple[Any, Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft, tokenizer = built_in
    inputs = tokenizer("The river rises in the mountains and", return_tensors="pt")
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    settings |= {"custom_generate": generate, "draft_model": draft, "return_dict_in_generate": True}
    exact = target.generate(
        **inputs, **settings, method="speculative(gamma=4)", token_streamer=TextStreamer(tokenizer)
    )
    assert exact.sequences.tolist() == plain.tolist()
    assert "The river rises" in capsys.readouterr().out
    trusting = target.generate(
        **inputs, **settings, method="sprinter", gate=builtin_paths()["gate"], budget=0.1
    )
    (text,) = trusting.generations
    assert text.stats.trusted > 0 and text.stats.mean_drift <= 0.1


def test_a_pipeline(built_in: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = built_in
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    written = pipeline("text-generation", model=target, tokenizer=tokenizer)
    plain = written("The river rises", **settings)
    settings |= {"custom_generate": generate, "draft_model": draft, "method": "speculative(gamma=4)"}
    assert written("The river rises", **settings) == plain


def test_the_folder_for_a_hub_repository(built_in: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = built_in
    inputs, folder = tokenizer("The river rises", return_tensors="pt"), ROOT / "examples/transformers"
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    out = target.generate(
        **inputs, **settings, custom_generate=str(folder), trust_remote_code=True, assistant_model=draft,
        method="speculative(gamma=4)",
    )  # fmt: skip
    assert out.tolist() == target.generate(**inputs, **settings).tolist()


def test_weights_made_in_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        model = copy.deepcopy(tiny("llama"))
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    wanted = model.generate(**row([3, 4, 5]), **settings)
    assert torch.equal(model.generate(**row([3, 4, 5]), **settings, custom_generate=generate), wanted)
