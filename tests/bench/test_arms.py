"""Arms: specs and names, the engine's arm, transformers."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

import sprinter
from sprinter.bench.arm import Arm, ArmAnswer, Ask
from sprinter.bench.arms import ARMS, arm_names, parse_arm, parse_arms
from sprinter.bench.arms.engine import EngineArm
from sprinter.decode import registry
from sprinter.errors import SprinterError, UserError
from sprinter.laws import Sampling
from sprinter.models.pair import LoadedPair

PROMPTS = (
    "The river rises in the mountains and",
    "In 1998 the city council",
    "Scientists have found that the",
)
GREEDY, DRAWN = Sampling(0.0), Sampling(0.8, top_k=50, top_p=0.95)


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair()


def ids_of(pair: sprinter.Pair, text: str) -> tuple[int, ...]:
    return tuple(pair.tokenizer(text)["input_ids"])


def ask(pair: sprinter.Pair, text: str = PROMPTS[0], sampling: Sampling = GREEDY, **options: Any) -> Ask:
    return Ask(ids_of(pair, text), **{"new_tokens": 24, "sampling": sampling, "seed": 3} | options)


def started(spec: str, pair: sprinter.Pair) -> Arm:
    arm = parse_arm(spec)
    arm.start(pair)
    return arm


def check_times(answer: ArmAnswer) -> None:
    assert len(answer.arrivals_s) == len(answer.ids)
    assert answer.arrivals_s[0] > 0 and answer.arrivals_s == sorted(answer.arrivals_s)
    assert answer.arrivals_s[-1] <= answer.wall_s


@pytest.mark.parametrize("spec", ["autoregressive", "speculative(gamma=3)", "transformers:plain"])
def test_a_text_ends_at_the_stop_tokens_of_a_request(pair: sprinter.Pair, spec: str) -> None:
    arm = started(spec, pair)
    free = arm.answer(ask(pair)).ids
    stop = free[6]
    assert arm.answer(ask(pair, stop_token_ids=(stop,))).ids == free[: free.index(stop) + 1]


# --- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "spec", "engine"),
    [
        ("sprinter(tau=0.6)", "sprinter(tau=0.6)", "sprinter(tau=0.6, cap=20, tail=0)", "sprinter"),
        ("  opt(epsilon=0.1)   as  slack ", "slack", "opt(epsilon=0.1, gamma=5)", "sprinter"),
        (
            "trust=gate(tau=0.5),stop=svip,accept=exact", None,
            "trust=gate(tau=0.5),stop=svip(h=0.3,c=0.15,law=raw)", "sprinter",
        ),
        ("transformers:plain", "transformers:plain", "transformers:plain", "transformers"),
        (
            "transformers:assisted(tokens=3)", "transformers:assisted(tokens=3)",
            "transformers:assisted(tokens=3, schedule=constant)", "transformers",
        ),
        ("vllm:plain as n", "n", "vllm:plain(cache_gib=1.0, eager=False)", "vllm"),
    ],
)  # fmt: skip
def test_a_spec_gives_an_arm_that_can_be_made_again(
    text: str, name: str | None, spec: str, engine: str
) -> None:
    arm = parse_arm(text)
    assert isinstance(arm, Arm)
    assert (arm.name, arm.spec, arm.engine) == (name or text, spec, engine)
    assert parse_arm(arm.spec).spec == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("transfomers:plain", "unknown arm 'transfomers:plain': did you mean 'transformers:plain'?"),
        ("speculativ", "unknown arm 'speculativ': did you mean 'speculative'?"),
        ("transformers:plain(tokens=1)", "unknown parameter of transformers:plain 'tokens': known: dtype"),
        ("transformers:lookup(token=1)", "did you mean 'tokens'?"),
        ("transformers:lookup(tokens=0)", "tokens=0 is out of range: give a whole number >= 1"),
        ("transformers:assisted(schedule=heuristics)", "did you mean 'heuristic'?"),
        ("vllm:ngram(lookup_min=4, lookup_max=2)", "lookup_max=2 is out of range: give a whole number >= 4"),
        ("vllm:plain(dtype=float8)", "unknown dtype 'float8'"),
        ("vllm:plain(cache_gib=0)", "cache_gib=0 is out of range"),
        ("vllm:plain(eager=2)", "eager=2 is neither true nor false"),
        ("vllm:draft_model(draft_sampling=greed)", "did you mean 'greedy'?"),
        ("vllm:heads(head=mine, kind=medua)", "did you mean 'medusa'?"),
        ("vllm:heads(head=7)", "head=7 names no folder"),
        (
            "vllm:heads(head=mine, kind=medusa, draft_sampling=probabilistic)",
            "drafts greedily with Medusa's heads",
        ),
        ("vllm:heads(head=mine, tokens=0)", "tokens=0 is out of range"),
        ("peers", "'peers' is a set of arms, and one is wanted here"),
        ("transformers:lookup(tokens=1", "does not end with its closing parenthesis"),
        ("as mine", "unknown arm 'as mine'"),
        ("svip as", "is not SPEC or SPEC as NAME"),
        ("", "is not SPEC or SPEC as NAME"),
    ],
)
def test_mistakes_are_reported(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_arm(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sets_expand() -> None:
    own = {"judge", "diversed", "heads", "medusa", "eagle"}
    methods = [row["name"] for row in sprinter.methods() if row["name"] not in own]
    assert [
        arm.name for arm in parse_arms(["methods"])
    ] == methods  # without those that need a head of the user's
    peers = [arm.name for arm in parse_arms(["peers"])]
    assert peers[:2] == ["transformers:plain", "transformers:assisted"] and len(peers) == 5
    everything = [arm.name for arm in parse_arms(["all"])]
    assert everything[: len(methods)] == methods and {*peers, *ARMS.names()} - set(everything) == {
        "vllm:heads"
    }, "it needs a folder"
    vllm = [arm.name for arm in parse_arms(["vllm:ngram", "vllm", "vllm:plain"])]
    assert vllm[:2] == ["vllm:ngram", "vllm:plain"] and len(vllm) == len(set(vllm)) == 4


@pytest.mark.parametrize(
    "texts", [["svip", "svip"], ["svip", "opt as svip"], ["methods", "transformers:plain as opt"]]
)
def test_two_arms_of_one_name_are_refused(texts: list[str]) -> None:
    with pytest.raises(UserError, match="two arms are called"):
        parse_arms(texts)


def test_the_same_arm_twice_needs_but_another_name() -> None:
    assert [arm.spec for arm in parse_arms(["svip", "svip as again"])] == ["svip(h=0.3, c=0.15)"] * 2


def test_every_name_in_the_table_is_an_arm() -> None:
    for row in arm_names():
        arm = parse_arm(row["name"])
        assert (arm.spec, arm.engine) == (row["spec"], row["engine"])
        assert len(row["what"]) > 10, row


# --- plug-ins --------------------------------------------------------------------------------------------------------


class Echo:
    """Says the prompt again."""

    engine = "echo"

    def __init__(self, *, times: int = 1) -> None:
        self.name = self.spec = ""
        self.times = times

    def start(self, pair: sprinter.Pair) -> None: ...

    def lossless(self, sampling: Sampling) -> bool | None:
        return None

    def versions(self) -> dict[str, str]:
        return {}

    def answer(self, ask: Ask) -> ArmAnswer:
        return ArmAnswer(list(ask.ids) * self.times, 0.0)

    def close(self) -> None: ...


def no_arm() -> object:
    """Makes something else."""

    class Nothing:
        pass

    return Nothing()


def test_other_packages_add_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.bench.test_arms"
    points = [EntryPoint("echo:twice", f"{here}:Echo", "sprinter.bench_arms")]
    points.append(EntryPoint("nothing", f"{here}:no_arm", "sprinter.bench_arms"))
    monkeypatch.setattr(
        registry, "entry_points", lambda group: points if group == "sprinter.bench_arms" else []
    )
    monkeypatch.setattr(ARMS, "_loaded", False)
    monkeypatch.setattr(ARMS, "_items", dict(ARMS._items))
    arm = parse_arm("echo:twice(times=2) as twice")
    assert (arm.name, arm.spec, arm.engine) == ("twice", "echo:twice(times=2)", "echo")
    assert arm.answer(Ask((1, 2), 4, GREEDY, 0)).ids == [1, 2, 1, 2]
    row = next(row for row in arm_names() if row["name"] == "echo:twice")
    assert (row["spec"], row["engine"], row["what"]) == (
        "echo:twice(times=1)",
        "echo",
        "Says the prompt again.",
    )
    assert "echo:twice" in [arm.name for arm in parse_arms(["methods", "echo:twice"])]
    with pytest.raises(SprinterError, match="'nothing' makes is not an arm"):
        parse_arm("nothing")


# --- answers ---------------------------------------------------------------------------------------------------------


def test_greedy_texts_of_exact_arms_are_equal(pair: sprinter.Pair) -> None:
    specs = [
        "autoregressive",
        "speculative",
        "transformers:plain",
        "transformers:assisted",
        "transformers:lookup",
    ]
    arms = [started(spec, pair) for spec in [*specs, "transformers:assisted(tokens=20, schedule=dynamic)"]]
    for text in PROMPTS:
        first, *others = (arm.answer(ask(pair, text)).ids for arm in arms)
        assert 16 < len(first) <= 24
        for arm, ids in zip(arms[1:], others, strict=True):
            assert ids == first, arm.name


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "spec", ["plain", "static", "assisted", "assisted(tokens=3, schedule=heuristic)", "lookup"]
)
def test_counts_of_transformers_fit_together(pair: sprinter.Pair, spec: str, sampling: Sampling) -> None:
    arm = started(f"transformers:{spec}", pair)
    one = arm.answer(ask(pair, sampling=sampling))
    check_times(one)
    assert sum(one.accept_lengths) == len(one.ids) == 24
    assert one.target_calls == len(one.accept_lengths)  # passes heard by a hook, rounds by the streamer
    assert len(set(one.arrivals_s)) == len(one.accept_lengths)
    drafts = spec.startswith("assisted")
    assert drafts is (one.draft_steps != 0) and (spec != "plain" or one.target_calls == 24)
    assert one.drifts is None and one.origins == {} and arm.lossless(sampling) is True
    if drafts:  # every draft token but those that were refused
        assert one.draft_steps is not None and one.draft_steps >= len(one.ids) - one.target_calls
    if spec != "assisted(tokens=3, schedule=heuristic)":  # which goes on from text to text
        assert arm.answer(ask(pair, sampling=sampling)).ids == one.ids, "the same seed gives the same text"


def test_transformers_draws_by_the_seed(pair: sprinter.Pair) -> None:
    arm = started("transformers:plain", pair)
    texts = {tuple(arm.answer(ask(pair, sampling=Sampling(1.0), seed=seed)).ids) for seed in range(3)}
    assert len(texts) == 3


def test_transformers_leaves_the_models_as_they_were(pair: sprinter.Pair) -> None:
    models = [pair.models.target.model, pair.models.draft.model]  # type: ignore[union-attr]
    configs = [model.generation_config for model in models]
    before = [config.to_dict() for config in configs]
    started("transformers:assisted(schedule=heuristic)", pair).answer(ask(pair))
    assert all(model.generation_config is config for model, config in zip(models, configs, strict=True))
    assert [config.to_dict() for config in configs] == before
    assert not any(model._forward_hooks for model in models)


def test_transformers_loads_the_files_in_another_type(pair: sprinter.Pair) -> None:
    arm: Any = started("transformers:assisted(dtype=bfloat16)", pair)
    kept, own = arm._pair.models, pair.models
    assert str(kept.target.model.dtype) == str(kept.draft.model.dtype) == "torch.bfloat16"
    assert str(own.target.model.dtype) == "torch.float32"
    assert len(arm.answer(ask(pair, new_tokens=4)).ids) == 4


def test_a_checkpoint_s_own_generation_settings_change_nothing(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = started("transformers:plain", pair)
    wanted = arm.answer(ask(pair)).ids
    config = pair.models.target.model.generation_config
    monkeypatch.setattr(config, "repetition_penalty", 5.0, raising=False)
    monkeypatch.setattr(config, "do_sample", True, raising=False)
    assert arm.answer(ask(pair)).ids == wanted


def test_a_text_ends_at_eos_for_all(pair: sprinter.Pair) -> None:
    eos = pair.models.target.eos_ids[0]
    first = started("autoregressive", pair).answer(ask(pair)).ids
    models = LoadedPair(_with_eos(pair, first[5]), pair.models.draft, pair.tokenizer)
    other = sprinter.Pair(models)
    assert eos != first[5]
    for spec in (
        "autoregressive",
        "speculative",
        "transformers:plain",
        "transformers:assisted",
        "transformers:lookup",
    ):
        answer = started(spec, other).answer(ask(other))
        assert answer.ids == first[: first.index(first[5]) + 1], spec
        assert sum(answer.accept_lengths) == len(answer.ids)


def _with_eos(pair: sprinter.Pair, token: int) -> Any:
    import dataclasses

    return dataclasses.replace(pair.models.target, eos_ids=(token,))


@pytest.mark.parametrize("spec", ["autoregressive", "speculative", "sprinter", "lookup", "draft-only"])
def test_the_engine_s_answer_is_its_generation(pair: sprinter.Pair, spec: str) -> None:
    arm = started(spec, pair)
    answer = arm.answer(ask(pair, sampling=DRAWN))
    made = pair.generate(
        list(ids_of(pair, PROMPTS[0])),
        method=spec,
        meter="complete",
        max_new_tokens=24,
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        seed=3,
    )
    check_times(answer)
    assert answer.ids == [token.id for token in made.tokens]
    assert answer.accept_lengths == made.accept_lengths and sum(answer.accept_lengths) == len(answer.ids)
    assert (answer.target_calls, answer.draft_steps) == (made.stats.target_calls, made.stats.draft_steps)
    assert sum(answer.origins.values()) == len(answer.ids)
    assert answer.drifts == [token.drift for token in made.tokens if token.drift is not None]
    assert answer.extra["stats"]["checked"] == made.stats.checked
    assert arm.lossless(DRAWN) is made.stats.lossless


def test_closing_passes_are_not_timed(pair: sprinter.Pair) -> None:
    arm = started("draft-only", pair)
    answer = arm.answer(ask(pair, sampling=DRAWN))
    assert answer.drifts is not None and len(answer.drifts) == len(answer.ids) == 24
    times = answer.extra["stats"]["times"]
    assert times["closing_s"] > 0
    assert abs(answer.wall_s - (answer.extra["stats"]["wall_s"] - times["closing_s"])) < 0.5 * answer.wall_s
    check_times(answer)


def test_no_text_is_made_on_the_arm_s_time(pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sprinter.engine.stream.Detokenizer.push", lambda self, id: 1 / 0)
    arm = parse_arm("speculative")
    arm.start(pair)
    assert len(arm.answer(Ask((5, 9, 7), 6, Sampling(), 1)).ids) == 6


def test_the_pair_keeps_its_tokenizer(pair: sprinter.Pair) -> None:
    started("sprinter", pair).answer(ask(pair))
    assert pair.tokenizer is not None


@pytest.mark.parametrize("spec", ["speculative", "transformers:assisted", "vllm:draft_model"])
def test_an_arm_that_drafts_needs_a_draft(pair: sprinter.Pair, spec: str) -> None:
    alone = sprinter.Pair(LoadedPair(pair.models.target, None, pair.tokenizer))
    with pytest.raises(UserError, match="needs a draft model"):
        parse_arm(spec).start(alone)


def test_a_method_that_reads_a_head_needs_it(pair: sprinter.Pair) -> None:
    with pytest.raises(UserError, match="needs a gate"):
        EngineArm(parse_arm("sprinter").method).start(sprinter.Pair(pair.models))  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", ["autoregressive", "transformers:plain", "vllm:plain"])
def test_an_arm_answers_only_between_start_and_close(pair: sprinter.Pair, spec: str) -> None:
    arm = parse_arm(spec)
    with pytest.raises(SprinterError, match="was not started"):
        arm.answer(ask(pair))
    if spec != "vllm:plain":
        arm.start(pair)
        arm.answer(ask(pair, new_tokens=1))
    arm.close()
    arm.close()
    with pytest.raises(SprinterError, match="was not started"):
        arm.answer(ask(pair))


def test_versions_are_reported(pair: sprinter.Pair) -> None:
    assert set(started("transformers:plain", pair).versions()) == {"transformers", "torch"}
    assert "scikit-learn" in started("transformers:assisted(schedule=dynamic)", pair).versions()
