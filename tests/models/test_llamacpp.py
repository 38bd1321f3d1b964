"""The llama.cpp runner: whatever is fed, forgotten and copied, its results are those of transformers' uncached pass."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama
from tests.models.tiny import uncached
from tests.models.told import Told
from transformers import PreTrainedModel

from sprinter.errors import SprinterError, UserError
from sprinter.models.choose import make_runner, runner_kind
from sprinter.models.convert import convert_gguf
from sprinter.models.gguf import runner as llamacpp
from sprinter.models.gguf.load import GgufModel
from sprinter.models.gguf.runner import LlamaCppRunner
from sprinter.models.interface import Runner
from sprinter.models.pair import builtin_paths, load_models
from sprinter.models.runners import forward

pytest.importorskip("gguf", reason=NO_GGUF)
pytest.importorskip("llama_cpp", reason=NO_LLAMA)

TOLERANCE = {"f32": 1e-4, "f16": 3e-2}  # of the largest state
VARIANTS = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }
    },
}  # fmt: skip

Builtin = Callable[[str, str], tuple[PreTrainedModel, GgufModel]]


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Builtin:
    """The built-in target or draft: transformers' and the converted one."""
    root = tmp_path_factory.mktemp("builtin")

    def get(which: str, dtype: str) -> tuple[PreTrainedModel, GgufModel]:
        source, path = builtin_paths()[which], root / f"{which}-{dtype}.gguf"
        if not path.exists():
            convert_gguf(source, path, dtype)
        return load_models(source, dtype="float32", device="cpu").target.module("a test"), GgufModel(path)

    return get


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, GgufModel]:
    """A small model in full precision."""
    directory = tmp_path_factory.mktemp("tiny") / "model"
    return saved_llama(directory), GgufModel(converted(directory))


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_builtin_models_equal_the_uncached_pass(
    builtin: Builtin, which: str, dtype: str, batch: int
) -> None:
    reference, model = builtin(which, dtype)
    runner = make_runner(model, batch=batch, max_len=40)
    assert runner.name == "llamacpp"
    told = Told(runner, reference, seed=batch, tolerance=TOLERANCE[dtype])
    for _ in range(20):
        told.anything()


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_llama_equal_the_uncached_pass(variant: str, tmp_path: Path) -> None:
    reference = saved_llama(tmp_path / "model", **VARIANTS[variant])
    told = Told(
        make_runner(GgufModel(converted(tmp_path / "model")), batch=2, max_len=100),
        reference,
        tolerance=1e-4,
    )
    told.extend([70, 41])
    for _ in range(16):
        told.anything()
    assert told.compared > 70 + 41


def test_ragged_rows_with_idle_rows_and_copies(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    told = Told(make_runner(tiny[1], batch=3, max_len=30), tiny[0], tolerance=1e-4)
    told.ragged()
    told.extend([0, 3, 2], 5)
    told.copy(0, [1, 2])
    told.rewind([29, 30, 1])
    told.extend([1, 0, 29])
    assert told.compared == 70 + 5 + 30


def test_some_rows_alone(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    told = Told(make_runner(tiny[1], batch=4, max_len=30), tiny[0], tolerance=1e-4)
    told.extend([9, 4, 0, 7])
    for rows, counts in (([2], [3]), ([3, 0], [2, 5]), ([1, 2, 0], [0, 3, 1]), ([1], [0])):
        tokens = torch.arange(1, 1 + 5 * len(rows)).reshape(len(rows), 5)
        step = told.runner.extend(tokens, counts, rows=rows)
        assert step.logits is not None and step.logits.shape[:2] == (len(rows), 5)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            told.rows[row] += tokens[i, :count].tolist()
            if count:
                wanted = uncached(told.model, told.rows[row])[0][-count:]
                torch.testing.assert_close(step.logits[i, :count], wanted, rtol=0, atol=1e-4 * 20)
        assert told.runner.lengths == [len(row) for row in told.rows]
    told.extend([1, 2, 3, 4])


def test_all_rows_full_after_copies_still_fit(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    told = Told(make_runner(tiny[1], batch=4, max_len=64), tiny[0], tolerance=1e-4)
    for _ in range(3):
        told.extend([64, 0, 0, 0])
        told.copy(0, [1, 2, 3])
        told.rewind([5, 5, 5, 5])
        told.extend([59, 59, 59, 59])
        told.rewind([0, 0, 0, 0])
    assert told.compared == 3 * (64 + 4 * 59)


def test_long_inputs_go_in_chunks(
    tiny: tuple[PreTrainedModel, GgufModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (forward, llamacpp):
        monkeypatch.setattr(module, "CHUNK", 5)
    told = Told(make_runner(tiny[1], max_len=90), tiny[0], tolerance=1e-4)
    told.extend([23])
    told.extend([11], logits=False)
    told.extend([7], 16)
    assert told.compared == 23 + 7
    told = Told(make_runner(tiny[1], batch=3, max_len=90), tiny[0], tolerance=1e-4)
    told.extend([23, 4, 0])
    told.extend([3, 12, 17])
    assert told.compared == 27 + 32


def test_an_interrupted_pass_leaves_the_rows_as_they_were(
    tiny: tuple[PreTrainedModel, GgufModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(make_runner(tiny[1], batch=2, max_len=30), tiny[0], tolerance=1e-4)
    told.extend([6, 3])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(told.runner._llama, "llama_get_embeddings", interrupt)
        with pytest.raises(KeyboardInterrupt):
            told.runner.extend(torch.ones(2, 4, dtype=torch.long))
    assert told.runner.lengths == [6, 3]
    told.extend([5, 5])


def test_a_token_that_does_not_exist_is_refused_and_changes_nothing(
    tiny: tuple[PreTrainedModel, GgufModel],
) -> None:
    told = Told(make_runner(tiny[1], max_len=30), tiny[0], tolerance=1e-4)
    told.extend([6])
    with pytest.raises(SprinterError, match=r"failed on 3 tokens of .*invalid token"):
        told.runner.extend(torch.full((1, 3), 10**6))
    told.extend([5])


def test_misuse_is_refused_and_changes_nothing(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    runner = make_runner(tiny[1], batch=2, max_len=8)
    tokens = torch.ones(2, 5, dtype=torch.long)
    runner.extend(tokens)
    with pytest.raises(ValueError, match="would hold 10 tokens"):
        runner.extend(tokens)
    with pytest.raises(ValueError, match="from 0 to 5"):
        runner.extend(tokens, [6, 6])
    with pytest.raises(ValueError, match="row 0 holds 5 tokens and cannot be rewound to 6"):
        runner.rewind([6, 6])
    with pytest.raises(ValueError, match="does not exist"):
        runner.copy(0, [2])
    assert runner.lengths == [5, 5]
    with pytest.raises(ValueError, match="at least 1"):
        make_runner(tiny[1], max_len=0)
    with pytest.raises(UserError, match="at most 256 rows"):
        make_runner(tiny[1], batch=257, max_len=8)


def test_chains_with_parents_are_plain_text(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    reference, runner = tiny[0], make_runner(tiny[1], batch=2, max_len=20)
    runner.extend(torch.tensor([[5, 6], [7, 8]]))
    runner.extend(torch.tensor([[9, 10, 11]]), rows=[0], parents=[[1, 2, 3]])
    runner.copy(0, [1])
    runner.commit_path(0, [2])
    runner.commit_path(1, [2, 3, 4])
    assert runner.lengths == [3, 5]
    logits = runner.extend(torch.tensor([[12], [12]])).logits
    assert logits is not None
    for row, text in enumerate(([5, 6, 9, 12], [5, 6, 9, 10, 11, 12])):
        torch.testing.assert_close(logits[row], uncached(reference, text)[0][-1:], rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="states of layers"):
        runner.extend(torch.ones(2, 1, dtype=torch.long), hidden_layers=[0])
    assert runner.lengths == [4, 6]


def test_it_fits_the_interface_and_shares_its_model(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    reference, model = tiny
    runner = make_runner(model, max_len=20)
    assert isinstance(runner, Runner) and isinstance(runner, LlamaCppRunner)
    assert (runner.batch, runner.max_len, runner.hidden_size) == (1, 20, 64)
    assert runner.vocab_size == reference.config.vocab_size
    assert runner_kind(model) == ("llamacpp", "a GGUF file, F32, which llama.cpp runs on the CPU")
    told, other = (Told(make_runner(model, max_len=20), reference, seed, tolerance=1e-4) for seed in (1, 2))
    for count in (4, 1, 6):
        told.extend([count])
        other.extend([count + 1])


def test_the_model_outlives_its_name(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    told = Told(make_runner(GgufModel(tiny[1].path), max_len=20), tiny[0], tolerance=1e-4)
    gc.collect()
    told.extend([5])
    assert told.runner.lengths == [5]


@pytest.mark.slow
def test_ten_thousand_rounds_without_growth(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    """Two rows drafted into, copied and rewound: the memory of the process stays, and so do the results."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        pytest.skip("the memory of the process cannot be read here")
    told = Told(make_runner(tiny[1], batch=2, max_len=60), tiny[0], tolerance=1e-4)
    runner, tokens = told.runner, torch.arange(10).reshape(2, 5)
    told.extend([20, 20])
    sizes = []
    for i in range(10_000):
        runner.extend(tokens, [5, i % 6])
        runner.copy(i % 2, [1 - i % 2])
        runner.rewind([20, 20])
        if i % 1000 == 999:
            sizes.append(int(statm.read_text().split()[1]) * 4096)
    assert max(sizes[1:]) - sizes[0] < 2**20
    told.rows[1] = list(told.rows[0])  # the first copy
    told.extend([5, 3])
