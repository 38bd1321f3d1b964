"""GGUF files that PyTorch runs: the model that was stored, its tokens and its fingerprint; refusals in one line."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.models.gguf_families import FAMILIES, written
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama
from tests.models.refused import refusal
from tests.models.told import Told

import sprinter
from sprinter.cli import main
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.choose import make_runner, runner_kind
from sprinter.models.gguf.dequantise import dequantised
from sprinter.models.gguf.load import GgufModel
from sprinter.models.pair import load_models

gguf = pytest.importorskip("gguf", reason=NO_GGUF)

TEXT = torch.arange(1, 60)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(TEXT, use_cache=False).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_read_as_it_was_stored(name: str, tmp_path: Path) -> None:
    stored = written(name, tmp_path / "m.gguf")
    read = dequantised(tmp_path / "m.gguf", torch.float32)
    assert type(read.model) is type(stored)
    assert read.stored == "F32" and read.eos_ids == (0,)
    # norms of Gemma are stored plus one, which rounds them
    tolerance = 1e-5 if "gemma" in name else 0
    torch.testing.assert_close(logits(read.model), logits(stored), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_reads_the_same_files_alike(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    written(name, tmp_path / "m.gguf")
    pair = load_models(tmp_path / "m.gguf")
    ours = load_models(tmp_path / "m.gguf", dequantise=True)
    there = make_runner(pair.target.model, max_len=64).extend(TEXT)
    here = make_runner(ours.target.model, max_len=64).extend(TEXT)
    layers = pair.target.model.config.num_hidden_layers
    assert isinstance(pair.target.model, GgufModel) and pair.target.model.nextn == (name == "glm4moe")
    assert layers == 3 == ours.target.model.config.num_hidden_layers, "without those that predict more tokens"
    assert there.logits is not None and here.logits is not None
    spread, states = here.logits.std(), here.hidden.std()
    tolerance = 5e-3 if "gemma" in name else 1e-4  # llama.cpp looks GELU up in a table of float16
    torch.testing.assert_close(here.logits / spread, there.logits / spread, rtol=0, atol=tolerance)
    torch.testing.assert_close(here.hidden / states, there.hidden / states, rtol=0, atol=2 * tolerance)


def test_loading_in_inference_mode_gives_weights_that_can_be_trained(tmp_path: Path) -> None:
    written("qwen2", tmp_path / "m.gguf")
    with torch.inference_mode():
        loaded = load_models(tmp_path / "m.gguf", dequantise=True)
    weights = list(loaded.target.module("a test").parameters())
    assert weights and not any(weight.is_inference() for weight in weights)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_1", "F16", "BF16"])
def test_quantised_weights_are_the_numbers_of_the_file(kind: str, tmp_path: Path) -> None:
    written("qwen2", tmp_path / "m.gguf", kind)
    read = dequantised(tmp_path / "m.gguf", torch.float32).model
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for stored, ours in (
        ("token_embd.weight", read.model.embed_tokens),
        ("blk.2.ffn_down.weight", read.model.layers[2].mlp.down_proj),
    ):
        tensor = tensors[stored]
        wanted = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(ours.weight, wanted.float())
    halves = dequantised(tmp_path / "m.gguf", torch.bfloat16).model
    assert torch.equal(halves.lm_head.weight, read.lm_head.weight.bfloat16())


def test_a_part_that_ends_within_a_row_of_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("qwen2", tmp_path / "m.gguf", "Q8_0")
    whole = dequantised(tmp_path / "m.gguf", torch.float32).model
    monkeypatch.setattr("sprinter.models.gguf.tensors._PART", 96)
    monkeypatch.setattr("sprinter.models.gguf.tensors._WIDTH", 64)
    parts = dequantised(tmp_path / "m.gguf", torch.float32).model
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "bfloat16"), ("Q8_0", "bfloat16")])
def test_auto_is_float32_for_float32_alone(kind: str, dtype: str, tmp_path: Path) -> None:
    written("qwen2", tmp_path / "m.gguf", kind)
    assert dequantised(tmp_path / "m.gguf", "auto").model.dtype == getattr(torch, dtype)


def test_on_a_cpu_auto_is_float32_as_for_directories(tmp_path: Path) -> None:
    written("qwen2", tmp_path / "m.gguf", "Q8_0")
    target = load_models(tmp_path / "m.gguf", device="cpu", dequantise=True).target
    assert target.weights == "float32 (from Q8_0)"
    assert target.load_s is not None and target.load_s > 0


@pytest.mark.parametrize("name", ["llama-tied", "gemma3"])
def test_the_row_runner_serves_it(name: str, tmp_path: Path) -> None:
    written(name, tmp_path / "m.gguf", "Q8_0")
    model = load_models(tmp_path / "m.gguf", dequantise=True).target.module("a test")
    assert runner_kind(model)[0] == "row"
    told = Told(make_runner(model, batch=2, max_len=60), model, tolerance=1e-4)
    for _ in range(12):
        told.anything()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories "target" and "draft" of small models, and their files in two types."""
    root = tmp_path_factory.mktemp("files")
    saved_llama(root / "target", 1, num_hidden_layers=3)
    saved_llama(root / "draft", 2, hidden_size=48)
    for name in ("target", "draft"):
        converted(root / name)
        converted(root / name, "f16")
    return root


def test_a_pair_generates_the_text_of_its_checkpoints(files: Path) -> None:
    there = sprinter.load_pair(files / "target", files / "draft", compile=False)
    here = sprinter.load_pair(
        files / "target-f32.gguf", files / "draft-f32.gguf", runner="torch", compile=False
    )
    mixed = sprinter.load_pair(files / "target-f32.gguf", files / "draft", runner="torch", compile=False)
    for method in ("autoregressive", "speculative", "lookup"):
        texts = [
            pair.generate("the third thing", method=method, seed=3, max_new_tokens=30)
            for pair in (there, here, mixed)
        ]
        ids = [[token.id for token in text.tokens] for text in texts]
        assert ids[0] == ids[1] == ids[2]
        assert len(ids[0]) > 0


def test_its_fingerprint_is_that_of_the_file(files: Path, tmp_path: Path) -> None:
    original = weights_fingerprint(load_models(files / "draft").target.model)
    for stored in ("f32", "f16"):
        for dtype in ("float32", "bfloat16"):
            read = load_models(files / f"draft-{stored}.gguf", dtype=dtype, dequantise=True)
            assert weights_fingerprint(read.target.model) == original
    written("qwen2", tmp_path / "one.gguf", "Q8_0")
    written("qwen2", tmp_path / "two.gguf", "F32")
    one, two = (
        weights_fingerprint(dequantised(tmp_path / name, torch.float32).model)
        for name in ("one.gguf", "two.gguf")
    )
    assert one != two


def test_changed_weights_have_a_fingerprint_of_their_own(files: Path) -> None:
    model = load_models(files / "draft-f16.gguf", dequantise=True).target.module("a test")
    before = weights_fingerprint(model)
    with torch.no_grad():
        model.model.norm.weight += 0.5
    changed = weights_fingerprint(model)
    with torch.no_grad():
        model.model.norm.weight -= 0.5
    assert changed != before == weights_fingerprint(model)


def test_fingerprints_and_ends_are_those_that_llama_cpp_has(tmp_path: Path, files: Path) -> None:
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    written("gemma3", tmp_path / "m.gguf", "Q8_0")
    for path in (tmp_path / "m.gguf", files / "target-f16.gguf"):
        here, there = load_models(path, dequantise=True), load_models(path)
        assert weights_fingerprint(here.target.model) == weights_fingerprint(there.target.model)
        for name in ("eos_ids", "context", "vocab_size", "hidden_size", "size"):
            assert getattr(here.target, name) == getattr(there.target, name), name
        assert here.tokenizer.get_vocab() == there.tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embedding_length": None}, "its metadata lacks qwen2.embedding_length"),
        ({"rope__scaling__type": "longrope"}, "its positions are scaled by longrope"),
        ({"rope__scaling__attn_factor": 1.5}, "it scales its attention"),
        ({"rope__dimension_count": 8}, "its rope.dimension_count is 8, and keys have length 16"),
        ({"expert_count": 4}, "qwen2.expert_count is not known here"),
        ({"nextn_predict_layers": 1}, "qwen2.nextn_predict_layers is not known here"),
        ({"vocab_size": 5}, "it has 262 embedding rows and names 5 tokens"),
        ({"feed_forward_length": 64}, "has shape [96, 64], wanted [64, 64]"),
        ({"block_count": 2}, "its tensor blk.2."),
        ({"block_count": 4}, "it lacks the tensor blk.3."),
        ({"context_length": "long"}, "transformers refuses its sizes"),
    ],
)
def test_what_a_config_cannot_express_is_refused(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    written("qwen2", tmp_path / "m.gguf", **changes)
    line = refusal(tmp_path / "m.gguf", dequantise=True)
    assert words in line
    assert "use runner auto or llamacpp" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_gating_func": 1}, "its experts are not weighted by a sigmoid"),
        ({"expert_group_count": 2}, "its experts are in groups"),
        ({"expert_used_count": None}, "its metadata lacks glm4moe.expert_used_count"),
        ({"rope__dimension_sections": 2}, "glm4moe.rope.dimension_sections is not known here"),
        ({"nextn_predict_layers": None}, "its tensor blk.3.nextn."),
        ({"block_count": 3}, "its tensor blk.3."),
    ],
)
def test_what_is_said_of_experts_is_believed_or_refused(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    written("glm4moe", tmp_path / "m.gguf", **changes)
    assert words in refusal(tmp_path / "m.gguf", dequantise=True)


def test_keys_that_switch_something_off_do_no_harm(tmp_path: Path) -> None:
    written("qwen2", tmp_path / "m.gguf", expert_count=0, rope__scaling__type="none")
    assert (
        dequantised(tmp_path / "m.gguf", torch.float32).model.config.rope_parameters["rope_type"] == "default"
    )


def test_unknown_architectures_and_frequencies_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("llama-biases", tmp_path / "scaled.gguf")
    monkeypatch.setattr("sprinter.models.gguf.config._LLAMA3", {
        "low_freq_factor": 1.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 64,
    })  # fmt: skip
    line = refusal(tmp_path / "scaled.gguf", dequantise=True)
    assert "its rotation frequencies are scaled in a way other than Llama 3's" in line
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = "its architecture is mamba, and only gemma2, gemma3, glm4moe, llama, qwen2, qwen3 are known here"
    with pytest.raises(UserError, match=words):
        dequantised(tmp_path / "other.gguf", torch.float32)


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    written("qwen2", tmp_path / "m.gguf")
    path = tmp_path / "m.gguf"
    eager = load_models(path, dequantise=True, attn_implementation="eager").target.module("a test")
    assert eager.config._attn_implementation == "eager"
    for name, value in (("quantization_config", object()), ("device_map", "auto")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sprinter.models.options.find_spec", lambda _: True)
            line = refusal(path, dequantise=True, **{name: value})
        assert f"{name}= is for models that transformers loads" in line


def test_a_file_that_is_cut_off_is_refused_in_one_line(tmp_path: Path) -> None:
    written("qwen2", tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[: len(data) // 2])
    assert "is damaged or cut short" in refusal(tmp_path / "m.gguf", dequantise=True)


def test_doctor_says_how_the_file_is_run(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--target", str(files / "target-f16.gguf"), "--runner", "torch", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["target"]["status"] == "ok"
    assert "LlamaForCausalLM: row runner" in checks["target"]["detail"]
    assert "a GGUF file, F16, dequantised to float32 in " in checks["target"]["detail"]
    assert "llama.cpp" not in checks


def test_without_the_package_one_line_says_what_to_install(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # type: ignore[arg-type]
    line = refusal(files / "target-f16.gguf", dequantise=True)
    assert "GGUF files need the package gguf" in line and "pip install 'gguf>=" in line
