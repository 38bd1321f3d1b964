"""Loading a pair: from directories and memory, what is read off it, and each refusal with its one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from tests.models.refused import refusal
from tests.models.tiny import CONTEXT, VOCAB, fresh, padded_gpt2, save, tiny, word_tokenizer

from sprinter.errors import UserError
from sprinter.models import options as options_module
from sprinter.models import pair as pair_module
from sprinter.models import source
from sprinter.models.devices import dtype_of
from sprinter.models.eos import eos_ids_of
from sprinter.models.pair import LoadedPair, builtin_paths, check_request, load_models


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories "target" (Llama) and "draft" (GPT-2), each with the tokenizer."""
    root = tmp_path_factory.mktemp("pair")
    save(root / "target", fresh("llama"), word_tokenizer())
    save(root / "draft", padded_gpt2(64), word_tokenizer())
    return root


@pytest.fixture
def broken(saved: Path, tmp_path: Path) -> Path:
    """A copy of the target's directory, to be damaged."""
    return Path(shutil.copytree(saved / "target", tmp_path / "model"))


def test_a_pair_from_directories(saved: Path) -> None:
    loaded = load_models(str(saved / "target"), saved / "draft")
    assert loaded.draft is not None
    assert (loaded.target.vocab_size, loaded.draft.vocab_size, loaded.vocab_size) == (VOCAB, 64, VOCAB)
    assert (loaded.target.context, loaded.context) == (CONTEXT, CONTEXT)
    assert (loaded.target.hidden_size, loaded.target.eos_ids) == (32, (0,))
    assert (loaded.target.id, loaded.target.revision) == (str(saved / "target"), None)
    assert loaded.target.model.dtype == torch.float32
    assert not loaded.target.model.training
    assert loaded.tokenizer("w3 w7").input_ids == [3, 7]


def test_a_target_alone(saved: Path) -> None:
    loaded = load_models(saved / "target")
    assert loaded.draft is None
    assert loaded.vocab_size == VOCAB


def test_models_in_memory(saved: Path) -> None:
    model = fresh("gpt2")
    loaded = load_models(model, model, tokenizer=word_tokenizer())
    assert loaded.target.model is model
    assert loaded.target.id == "GPT2LMHeadModel"
    assert "give one as tokenizer=" in refusal(model)
    assert load_models(model, tokenizer=saved / "target").tokenizer("w3").input_ids == [3]


def test_dtypes(saved: Path) -> None:
    for name in ("float32", "bfloat16", "float16", "float64"):
        assert load_models(saved / "target", dtype=name).target.model.dtype == getattr(torch, name)
    assert refusal(saved / "target", dtype="int7").startswith("there is no dtype 'int7': use auto, float32,")


def test_auto_dtype_keeps_the_checkpoints_dtype_off_the_cpu() -> None:
    assert dtype_of("auto", torch.device("cuda")) == "auto"
    assert dtype_of("auto", torch.device("cpu")) == torch.float32


def test_devices_that_are_not_here(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert "there is no device 'gpu': use auto" in refusal(saved / "target", device="gpu")
    assert "device 'cuda' is not available here" in refusal(saved / "target", device="cuda")
    assert "device 'mps' is not available here" in refusal(saved / "target", device="mps")


def test_device_map_needs_accelerate(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "find_spec", lambda name: None)
    assert "pip install accelerate" in refusal(saved / "target", device_map="auto")


def test_end_tokens_come_from_the_generation_config_first(saved: Path) -> None:
    model, tokenizer = fresh("gpt2"), word_tokenizer()
    assert eos_ids_of(model, tokenizer) == (0,)
    model.generation_config.eos_token_id = [3, 5]
    assert eos_ids_of(model, tokenizer) == (3, 5)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = 7
    assert eos_ids_of(model, tokenizer) == (7, 0)
    model.config.eos_token_id = None
    assert eos_ids_of(model, tokenizer) == (0,)
    tokenizer.eos_token = None
    assert eos_ids_of(model, tokenizer) == ()


# --- where it comes from ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "bf16"])
def test_a_dtype_may_be_given_as_torch_has_it(saved: Path, dtype: torch.dtype | str) -> None:
    assert load_models(saved / "target", dtype=dtype).target.weights == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.int16, "int7", "torch.float99"])
def test_other_dtypes_are_refused(saved: Path, dtype: torch.dtype | str) -> None:
    assert "use auto, float32, bfloat16" in refusal(saved / "target", dtype=dtype)


def test_attention_is_chosen_by_option(saved: Path) -> None:
    models = load_models(saved / "target", saved / "draft", attn_implementation="eager")
    assert models.draft is not None
    for model in (models.target.model, models.draft.model):
        assert model.config._attn_implementation == "eager"
    assert "cannot be loaded" in refusal(saved / "target", attn_implementation="nonsense")


def test_quantisation_is_given_to_transformers(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are put in their place while they are read: quantised ones cannot be moved."""
    given: dict[str, object] = {}
    load = pair_module.AutoModelForCausalLM.from_pretrained

    def note(directory: Path, **options: object) -> object:
        given.update(options)
        return load(
            directory, **{key: options[key] for key in ("dtype", "use_safetensors", "output_loading_info")}
        )

    config = object()
    monkeypatch.setattr(options_module, "find_spec", lambda name: None)
    assert "quantization_config needs the accelerate package" in refusal(
        saved / "target", quantization_config=config
    )
    monkeypatch.setattr(options_module, "find_spec", lambda name: object())
    monkeypatch.setattr(pair_module.AutoModelForCausalLM, "from_pretrained", note)
    load_models(saved / "target", device="cpu", quantization_config=config)
    assert given["quantization_config"] is config
    assert given["device_map"] == {"": torch.device("cpu")}


@pytest.mark.parametrize("option", ["attn_implementation", "quantization_config"])
def test_options_of_a_loading_that_does_not_happen_are_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options_module, "find_spec", lambda name: object())
    file = tmp_path / "model.gguf"
    file.touch()
    assert f"{option}= is for models that transformers loads, and {file} is a GGUF file" in refusal(
        file, **{option: "eager"}
    )
    assert "is in memory already" in refusal(fresh("gpt2"), tokenizer=word_tokenizer(), **{option: "eager"})


def test_a_model_that_torch_compiled_is_refused() -> None:
    assert "give the model itself, and compile=True" in refusal(torch.compile(fresh("gpt2"), backend="eager"))
    assert "the draft is a model that torch.compile made" in refusal(
        fresh("gpt2"), torch.compile(fresh("gpt2"), backend="eager")
    )
    assert "the target (int) is not a model" in refusal(5)


def test_no_bars_where_nobody_watches(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.utils.logging._tqdm_active", True
    )  # the command line may have been here
    load_models(saved / "target")
    assert capsys.readouterr().err == ""
    pair_module.AutoModelForCausalLM.from_pretrained(saved / "target")
    assert "Loading weights" in capsys.readouterr().err, "the user's own loading is left alone"


@pytest.mark.parametrize(("listed", "expected"), [(None, (7, 0)), (7, (7,)), ([7, 9], (7, 9)), ([9], (9,))])
def test_every_eos_of_a_directory(
    broken: Path, listed: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    """A generation config rules; without one the config's (end of a document) and the tokenizer's (end of a turn)."""
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    (broken / "generation_config.json").unlink(missing_ok=True)
    if listed is not None:
        (broken / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert load_models(broken).target.eos_ids == expected


def test_missing_and_wrong_directories(saved: Path, tmp_path: Path) -> None:
    assert "target directory /no/such/dir does not exist" in refusal("/no/such/dir")
    assert "draft directory ./x does not exist" in refusal(saved / "target", "./x")
    assert "target directory relative does not exist" in refusal(Path("relative"))
    assert "has no config.json" in refusal(tmp_path)
    assert "is a file" in refusal(saved / "target" / "config.json")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "a config.json that is not a JSON object:"),
        ("[]", "a config.json that is not a JSON object"),
        ('{"speculators_model_type": "sprinter"}', "is a gate, not a language model"),
        ('{"model_type": "t5", "is_encoder_decoder": true}', "is an encoder-decoder model"),
        ('{"model_type": "vit"}', "cannot be loaded: Unrecognized configuration class"),
        (
            '{"model_type": "new_thing"}',
            "cannot be loaded: The checkpoint you are trying to load has model type",
        ),
    ],
)
def test_configs_of_no_decoder_model(broken: Path, text: str, line: str) -> None:
    (broken / "config.json").write_text(text)
    assert line in refusal(broken)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"hello"]
)
def test_corrupt_and_truncated_weights(broken: Path, damage: Callable[[bytes], bytes]) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert (
        refusal(broken) == f"the target {broken} has a corrupt or truncated safetensors file: fetch it again"
    )


def test_weights_that_lack_a_tensor_are_not_made_up(broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of its weights (model.layers.1.mlp.up_proj.weight" in refusal(broken)


def test_weights_of_another_shape(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    assert "weights whose shapes do not fit its config.json" in refusal(broken)


def test_pickled_weights_are_refused_unread(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "has no *.safetensors" in refusal(broken)
    (broken / "pytorch_model.bin").write_bytes(b"would be dangerous to read")
    line = refusal(broken)
    assert "pickled weights only, which are never loaded" in line
    assert "save_pretrained(new_dir)" in line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            errors.LocalEntryNotFoundError("no net\nsecond line"),
            "the hub cannot be reached: check the name and",
        ),
        (errors.HFValidationError("bad"), "neither a directory here nor a hub id"),
        (RuntimeError("odd\nsecond line"), "cannot be loaded: odd"),
    ],
)
def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, error: Exception, line: str) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(source, "snapshot_download", fail)
    told = refusal("some-org/some-model")
    assert told.startswith("the target some-org/some-model ")
    assert line in told


@pytest.mark.parametrize("kind", ["GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError"])
def test_every_kind_of_hub_error_has_its_advice(kind: str) -> None:
    error = type(kind, (Exception,), {})("long\nexplanation")
    assert str(source.load_error(error, "org/x", "draft")) == f"the draft org/x {source._ADVICE[kind]}"
    assert hasattr(errors, kind)


def test_a_model_from_the_hub_is_its_snapshot(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Path(shutil.copytree(saved / "target", tmp_path / "0123abc"))
    asked: list[tuple[str, str | None]] = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str], **_: object) -> str:
        assert not any(pattern.endswith((".bin", ".pt")) for pattern in allow_patterns)
        asked.append((name, revision))
        return str(snapshot)

    monkeypatch.setattr(source, "snapshot_download", fetch)
    loaded = load_models("org/model", revision="v1")
    assert (loaded.target.id, loaded.target.revision) == ("org/model", "0123abc")
    assert set(asked) == {("org/model", "v1")}


# --- vocabularies ----------------------------------------------------------------------------------------------------


def test_vocabularies_that_differ_are_named(saved: Path, tmp_path: Path) -> None:
    other = word_tokenizer(VOCAB - 2)
    draft = save(tmp_path / "short", fresh("gpt2"), other)
    line = refusal(saved / "target", draft)
    assert f"the target has {VOCAB} tokens and the draft {VOCAB - 2}" in line
    assert f"token {VOCAB - 2} is 'w{VOCAB - 2}' in the target and absent in the draft" in line
    draft = save(tmp_path / "renamed", fresh("gpt2"), word_tokenizer(first="end"))
    assert "token 0 is 'w0' in the target and 'end' in the draft" in refusal(saved / "target", draft)


def test_padding_rows_are_cut_where_the_tokenizers_agree(tmp_path: Path, saved: Path) -> None:
    loaded = load_models(save(tmp_path / "padded", padded_gpt2(72), word_tokenizer()), saved / "draft")
    assert loaded.vocab_size == 64


def test_a_draft_without_a_tokenizer_needs_the_same_size(saved: Path, tmp_path: Path) -> None:
    same = save(tmp_path / "same", fresh("gpt2"), None)
    assert load_models(saved / "target", same).vocab_size == VOCAB
    other = save(tmp_path / "other", padded_gpt2(64), None)
    assert "comes without a tokenizer that would show" in refusal(saved / "target", other)


@pytest.fixture
def added(saved: Path, tmp_path: Path) -> Path:
    """A model like the target with one token more."""
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    return save(tmp_path / "added", padded_gpt2(64), tokenizer)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_token_that_one_model_lacks_is_named_and_mended(which: str, saved: Path, added: Path) -> None:
    pair = (added, saved / "target") if which == "target" else (saved / "target", added)
    line = refusal(*pair)
    assert f"token {VOCAB} is " in line and "'<tool>'" in line
    assert f"give tokenizer={saved / 'target'} (--tokenizer)" in line
    loaded = load_models(*pair, tokenizer=saved / "target")
    assert loaded.vocab_size == VOCAB
    assert loaded.tokenizer is not None and len(loaded.tokenizer) == VOCAB


def test_a_token_that_one_model_lacks_is_never_written(saved: Path, added: Path, tmp_path: Path) -> None:
    """Rows of padding beside it do not bring it back, whoever's tokenizer is given."""
    padded = save(tmp_path / "padded", padded_gpt2(64), word_tokenizer())
    for tokenizer in (added, padded):
        assert load_models(added, padded, tokenizer=tokenizer).vocab_size == VOCAB
    assert load_models(padded, padded, tokenizer=added).vocab_size == VOCAB
    assert load_models(padded, padded, tokenizer=padded).vocab_size == 64
    assert load_models(added, tokenizer=padded).vocab_size == VOCAB


def test_an_end_of_text_that_the_common_vocabulary_lacks(saved: Path, added: Path) -> None:
    model = fresh("gpt2")
    model.config.eos_token_id = model.generation_config.eos_token_id = VOCAB - 1
    model.generation_config._from_model_config = False  # else the tokenizer's own is one too
    line = refusal(model, saved / "target", tokenizer=word_tokenizer(VOCAB - 1))
    assert (
        f"the target ends texts with token {VOCAB - 1}, and the models have only the first {VOCAB - 1}"
        in line
    )


def test_ends_of_text_that_are_lost_are_named(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = fresh("gpt2")
    model.config.eos_token_id = model.generation_config.eos_token_id = [VOCAB - 1, 0]
    load_models(model, saved / "target", tokenizer=word_tokenizer())
    assert not caplog.records
    loaded = load_models(model, saved / "target", tokenizer=word_tokenizer(VOCAB - 1))
    assert loaded.vocab_size == VOCAB - 1
    (line,) = caplog.messages
    assert f"also ends texts with token {VOCAB - 1}, which is never written" in line


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tokenizer": 5}, "tokenizer=5 is none"),
        ({"compile": "yes"}, "compile='yes' is unknown: give True, False or None"),
        ({"draft_revision": "abc"}, "draft_revision was given without a draft"),
    ],
)
def test_options_that_mean_nothing(saved: Path, options: dict[str, Any], line: str) -> None:
    assert refusal(saved / "target", **options).startswith(line)


def test_a_given_tokenizer_is_held_against_both_models(saved: Path, tmp_path: Path) -> None:
    foreign = save(tmp_path / "foreign", padded_gpt2(64), word_tokenizer(first="end"))
    for pair, which in (((saved / "target", foreign), "target"), ((foreign, saved / "target"), "draft")):
        line = refusal(*pair, tokenizer=foreign)
        assert f"token 0 is 'end' in the tokenizer that was given and 'w0' in the {which}'s own" in line
    assert "'w0' in the target's own" in refusal(saved / "target", tokenizer=foreign)


def test_the_builtin_target_does_not_speak_a_foreign_tokenizer(saved: Path) -> None:
    line = refusal(builtin_paths()["target"], saved / "draft", tokenizer=saved / "draft")
    assert "in the tokenizer that was given" in line and "in the target's own" in line


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(saved: Path) -> None:
    line = refusal(saved / "target", tokenizer=word_tokenizer(VOCAB + 9))
    assert f"token ids up to {VOCAB + 8}, the target only {VOCAB} embedding rows" in line


def test_a_broken_tokenizer(broken: Path) -> None:
    (broken / "tokenizer.json").write_text("{")
    assert refusal(broken).startswith(f"the tokenizer {broken} cannot be loaded: ")


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.fixture
def uneven(saved: Path) -> LoadedPair:
    """A pair whose draft holds 40 tokens only."""
    model = fresh("gpt2")
    model.config.n_positions = 40
    return load_models(saved / "target", model)


def test_requests_that_fit(uneven: LoadedPair) -> None:
    assert uneven.context == 40
    check_request(uneven, 30, 10)


def test_requests_beyond_a_context(uneven: LoadedPair) -> None:
    with pytest.raises(
        UserError, match=r"the context of the draft GPT2LMHeadModel, 40 tokens: use max_new_tokens=10"
    ):
        check_request(uneven, 30, 11)
    with pytest.raises(
        UserError, match=rf"the context of the target .*, {CONTEXT} tokens: use max_new_tokens=10"
    ):
        check_request(uneven, 30, 1000)
    with pytest.raises(UserError, match=r"40 tokens: shorten the prompt"):
        check_request(uneven, 40, 1)


def test_models_that_name_no_context(saved: Path) -> None:
    assert pair_module._context(tiny("mamba").config) == pair_module._NO_LIMIT


def test_builtin_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pair_module, "_BUILTIN", tmp_path / "builtin")
    with pytest.raises(
        UserError, match=r"the built-in target is not in this installation .*reinstall sprinter-llm"
    ):
        builtin_paths()
    for name in ("target", "draft", "gate"):
        (tmp_path / "builtin" / name).mkdir(parents=True)
        (tmp_path / "builtin" / name / "config.json").write_text("{}")
    assert builtin_paths() == {name: tmp_path / "builtin" / name for name in ("target", "draft", "gate")}
