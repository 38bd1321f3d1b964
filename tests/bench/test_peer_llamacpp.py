"""llama-cpp-python's own loop as arms: the same greedy texts as ours, and what it refuses."""

from pathlib import Path

import pytest
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama

import sprinter
from sprinter.bench.arm import Arm, Ask
from sprinter.bench.arms.parse import parse_arm
from sprinter.errors import SprinterError, UserError
from sprinter.laws import Sampling
from sprinter.models.gguf.repack import Repacking

SPECS = ["llamacpp:plain", "llamacpp:lookup(tokens=4)"]
IDS = tuple(range(5, 25)) * 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> sprinter.Pair:
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    directory = tmp_path_factory.mktemp("arms") / "target"
    saved_llama(directory, 3)
    return sprinter.load_pair(converted(directory))


@pytest.mark.parametrize("spec", SPECS)
def test_greedy_texts_are_ours(pair: sprinter.Pair, spec: str) -> None:
    arm = parse_arm(spec)
    assert isinstance(arm, Arm) and arm.engine == "llama.cpp"
    arm.start(pair)
    wanted = pair.generate(IDS, method="autoregressive", temperature=0.0, max_new_tokens=40)
    for seed in range(2):
        answer = arm.answer(Ask(IDS, 40, Sampling(temperature=0.0), seed))
        assert answer.ids == [token.id for token in wanted.tokens]
        assert len(answer.arrivals_s) == len(answer.ids) == sum(answer.accept_lengths)
        assert answer.target_calls == len(answer.accept_lengths) <= 40
        assert 0 < answer.arrivals_s[-1] <= answer.wall_s
    drawn = [arm.answer(Ask(IDS, 12, Sampling(), seed)).ids for seed in (1, 2, 1)]
    assert drawn[0] != drawn[1] and drawn[0] == drawn[2]
    arm.close()
    arm.close()
    with pytest.raises(SprinterError, match="was not started"):
        arm.answer(Ask(IDS, 4, Sampling(), 0))


@pytest.mark.parametrize("spec", SPECS)
def test_weights_are_repacked_where_ours_are(
    pair: sprinter.Pair, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for on in (False, True):
        monkeypatch.setattr(pair.models.target.model, "repacking", Repacking(on, "so"))
        arm = parse_arm(spec)
        arm.start(pair)
        assert arm._llama.model_params.use_extra_bufts is on  # type: ignore[attr-defined]
        arm.close()


@pytest.mark.parametrize("spec", SPECS)
def test_other_models_are_refused(spec: str) -> None:
    with pytest.raises(UserError, match=r"runs GGUF files, and the target .* is none"):
        parse_arm(spec).start(sprinter.load_pair())
    with pytest.raises(UserError):
        parse_arm("llamacpp:lookup(tokens=0)")


def test_transformers_arms_refuse_a_file(pair: sprinter.Pair) -> None:
    with pytest.raises(
        UserError, match=r"transformers:plain needs transformers models, and .* is a GGUF file"
    ):
        parse_arm("transformers:plain").start(pair)


def test_provenance_names_the_file(pair: sprinter.Pair, tmp_path: Path) -> None:
    from sprinter.bench.environment import pair_facts

    facts = pair_facts(pair)["target"]
    assert facts["name"] == "target-f32.gguf" and facts["dtype"] == "F32 (GGUF)"
    assert facts["parameters"] == pair.models.target.size
    assert len(facts["sha256"]) == 64


def test_truncated_laws_are_not_called_equal(pair: sprinter.Pair) -> None:
    arm = parse_arm(SPECS[0])
    assert arm.lossless(Sampling()) is True
    assert arm.lossless(Sampling(temperature=0.0, top_k=3)) is True
    assert arm.lossless(Sampling(temperature=0.7, top_k=3)) is None
