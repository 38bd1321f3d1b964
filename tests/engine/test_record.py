"""What a result says of itself: enough to make the same tokens again."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import transformers
from tests.engine.conftest import tiny_llama
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import sprinter
from sprinter.decode.spec import Method, parse_method
from sprinter.decode.stop import Svip, Untrusted
from sprinter.decode.trust import Gate
from sprinter.engine import pool
from sprinter.engine.record import models_record
from sprinter.errors import UserError
from sprinter.models import memory
from sprinter.models.pair import LoadedModel, LoadedPair

PROMPT = [3, 7, 1, 12, 5]


def again(record: dict[str, Any], pair: sprinter.Pair) -> dict[str, Any]:
    """The same generation, from its record as JSON alone."""
    read = json.loads(json.dumps(record, allow_nan=False))
    return pair.generate(read["prompt"]["token_ids"], **read["request"]).to_dict()


# The name of a method that was composed in Python is not its spec, which is in the request.
SAME = (
    "text",
    "token_ids",
    "origins",
    "rounds",
    "finish_reason",
    "prompt_tokens",
    "request",
    "models",
    "version",
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "sprinter(tau=0.4)", "temperature": 0.7, "seed": -3, "meter": "complete"},
        {"method": "autoregressive", "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 2**70},
        {"method": "svip(h=0.2, cap=7)", "ahead": "auto", "stop": [" and", "<|x|>"], "stop_token_ids": [12]},
        {"method": Method(trust=Gate(0.3), stop=Untrusted(2), cap=None), "max_new_tokens": 31},
        {"method": Method(stop=Svip(h=0.25, c=0.1)), "temperature": 0},
    ],
)  # fmt: skip
def test_a_result_is_made_again_from_its_own_record(options: dict[str, Any]) -> None:
    first = sprinter.load_pair().generate("The first king of", **{"max_new_tokens": 24, **options}).to_dict()
    models = json.loads(json.dumps(first))["models"]
    pair = sprinter.load_pair(
        models["target"]["id"], models["draft"]["id"], gate=models["gate"]["id"],
        heads=[head["id"] for head in models["heads"]], dtype=models["target"]["dtype"],
        device=models["target"]["device"],
        **{name: models["target"][name] for name in (
            "compile", "attn_implementation", "quantization_config", "trust_remote_code",
        )},
    )  # fmt: skip
    second = again(first, pair)
    assert {key: second[key] for key in SAME} == {key: first[key] for key in SAME}
    assert first["prompt"]["text"] == "The first king of"


def test_rules_that_are_carried_over_are_in_the_record(tiny_pair: sprinter.Pair) -> None:
    warm = tiny_pair.generate(PROMPT, method="heuristic", max_new_tokens=30)
    first = tiny_pair.generate(PROMPT, method="heuristic", rules=warm.rules, max_new_tokens=20).to_dict()
    fresh = tiny_pair.generate(PROMPT, method="heuristic", max_new_tokens=20).to_dict()
    assert first["rounds"] != fresh["rounds"], "the state must matter, or this test shows nothing"
    second = again(first, tiny_pair)
    assert (second["token_ids"], second["rounds"]) == (first["token_ids"], first["rounds"])
    with pytest.raises(UserError, match="not a state of the stop rule"):
        tiny_pair.generate(PROMPT, method="heuristic", rules={"trust": [], "stop": [1, 2, 3]})


def test_the_record_names_models_and_versions(builtin_pair: sprinter.Pair) -> None:
    record = builtin_pair.generate("A", max_new_tokens=2).to_dict()
    paths = sprinter.builtin_paths()
    assert {which: record["models"][which]["id"] for which in paths} == {
        which: str(path) for which, path in paths.items()
    }
    assert record["models"]["draft"] == {
        "id": str(paths["draft"]), "revision": None, "dtype": "float32", "runner": "row", "compile": None,
            "exactness": "to the bit",
        "device": str(builtin_pair.models.target.model.device), "attn_implementation": "sdpa",
        "quantization_config": None, "trust_remote_code": False,
    }  # fmt: skip
    assert record["version"] == {
        "sprinter": sprinter.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip


def test_the_record_tells_what_changes_the_law() -> None:
    def noted(model: LoadedModel) -> dict[str, Any]:
        record = models_record(LoadedPair(model, None, None), {})["target"]
        return dict(json.loads(json.dumps(record)))

    model, eager, quantised, foreign = (tiny_llama(1) for _ in range(4))
    eager.module("").set_attn_implementation("eager")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    quantised.module("").config.quantization_config = settings
    foreign.module("").__class__ = type(
        "Own", (LlamaForCausalLM,), {"__module__": "transformers_modules.own"}
    )
    assert noted(model)["attn_implementation"] == "sdpa" and noted(eager)["attn_implementation"] == "eager"
    assert noted(model)["quantization_config"] is None
    held = noted(quantised)["quantization_config"]
    assert held["load_in_4bit"] and BitsAndBytesConfig.from_dict(held).to_dict() == settings.to_dict()
    assert [noted(one)["trust_remote_code"] for one in (model, foreign)] == [False, True]


@pytest.mark.parametrize("spec", [row["spec"] for row in sprinter.methods()])
def test_every_method_has_a_spec_in_the_record(tiny_pair: sprinter.Pair, spec: str) -> None:
    from sprinter.decode.spec import full_spec

    method = parse_method(spec)
    assert parse_method(full_spec(method)) == method
    bare = Method(**{part: getattr(method, part) for part in ("trust", "stop", "accept", "cap", "drafter")})
    other = parse_method(full_spec(bare))
    assert all(
        getattr(other, part) == getattr(bare, part) for part in ("trust", "stop", "accept", "cap", "drafter")
    )


def test_none_is_to_the_end_of_the_context(tiny_pair: sprinter.Pair) -> None:
    out = tiny_pair.generate(PROMPT, max_new_tokens=None)
    assert len(out.tokens) == 96 - len(PROMPT) == out.to_dict()["request"]["max_new_tokens"]
    (other,) = tiny_pair.generate_batch([PROMPT], max_new_tokens=None)
    assert [token.id for token in other.tokens] == [token.id for token in out.tokens]
    with sprinter.Engine(tiny_pair, rows=1, max_len=40) as engine:
        id = engine.add(PROMPT, max_new_tokens=None)
        served = engine.finish()[id]
    assert len(served.tokens) == 40 - len(PROMPT) == served.to_dict()["request"]["max_new_tokens"]
    with pytest.raises(UserError, match="shorten the prompt"):
        tiny_pair.generate(list(range(1, 20)) * 6, max_new_tokens=None)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([PROMPT, PROMPT, [99]], {}, "prompt 2: token id 99"),
        ([PROMPT, []], {"seed": 3}, "prompt 1: the prompt is empty"),
        ([PROMPT] * 3, {"temperature": [1.0, -1.0, 0.0]}, "prompt 1: temperature=-1.0"),
        ([PROMPT] * 2, {"method": [None, "speculativ"]}, "prompt 1: unknown method"),
        ([PROMPT, PROMPT * 10], {"max_new_tokens": 60}, "prompt 1: 50 prompt tokens and 60"),
        ([PROMPT] * 2, {"method": ["speculative", "sprinter(tau=2)"]}, "prompt 1: tau=2"),
        ([PROMPT] * 2, {"temperature": -1.0}, "temperature=-1.0"),
    ],
)
def test_a_bad_prompt_of_a_batch_is_named(
    tiny_pair: sprinter.Pair, prompts: list[list[int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        tiny_pair.generate_batch(prompts, **{"max_new_tokens": 8, **options})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (None, {}, "prompts=None is not a list of prompts"),
        ([PROMPT], {"policy": None}, "policy=None is not a policy"),
        ([PROMPT], {"memory_bytes": -5}, "memory_bytes=-5 is out of range"),
        ([PROMPT], {"memory_bytes": "1 GB"}, "memory_bytes=1 GB is out of range"),
        ([PROMPT], {"stop": 5}, "stop=5 is not text or a list of texts"),
        ([PROMPT], {"top_k": 2**70}, f"top_k={2**70} is out of range"),
    ],
)
def test_bad_settings_of_a_batch(
    tiny_pair: sprinter.Pair, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        tiny_pair.generate_batch(prompts, **{"max_new_tokens": 2, **options})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize("max_len", ["5", 10.5, True, 0, 97])
def test_bad_lengths_of_rows(tiny_pair: sprinter.Pair, max_len: Any) -> None:
    with pytest.raises(UserError) as caught:
        sprinter.Engine(tiny_pair, max_len=max_len)
    assert str(caught.value).startswith(f"max_len={max_len} is out of range: give ")


def test_prompts_may_come_one_by_one(tiny_pair: sprinter.Pair) -> None:
    made = tiny_pair.generate_batch((prompt for prompt in (PROMPT, [4])), max_new_tokens=2, seed=[1, 2])
    assert [out.prompt_ids for out in made] == [PROMPT, [4]]


@pytest.mark.parametrize("new", [None, 3000])
def test_a_long_row_that_does_not_fit_is_refused(new: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(tiny_llama(1), context=4000)
    pair = sprinter.Pair(LoadedPair(model, None, None))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 16)
    assert len(pair.generate(PROMPT, max_new_tokens=2).tokens) == 2
    with pytest.raises(UserError, match=r"rows of \d+ tokens need .*a smaller max_new_tokens"):
        pair.generate(PROMPT, max_new_tokens=new)


def test_rows_that_are_as_long_as_a_context_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's rows are as long as the larger context: those of the other model end before."""
    made: list[Any] = []
    make = pool.make_runner
    monkeypatch.setattr(
        pool, "make_runner", lambda *args, **kwargs: made.append(make(*args, **kwargs)) or made[-1]
    )
    pair = sprinter.Pair(LoadedPair(tiny_llama(1), dataclasses.replace(tiny_llama(2), context=64), None))
    for _ in range(3):
        with sprinter.Engine(pair, rows=2) as engine:
            engine.add(PROMPT, max_new_tokens=2)
            engine.finish()
    assert len(made) == 2
    assert pair._runtime.drafts is not None and pair._runtime.drafts.holds(96, 2)


@pytest.mark.parametrize(
    "kept", [3, None, [1], {"pass_costs": {}}, {"pass_costs": {"target": [[1, 1], [2, 2]]}}], ids=str
)
def test_damaged_costs_of_a_run_that_is_resumed_are_refused(tiny_pair: sprinter.Pair, kept: Any) -> None:
    with pytest.raises(UserError, match="are damaged"):
        tiny_pair._runtime.use_measured(kept)
