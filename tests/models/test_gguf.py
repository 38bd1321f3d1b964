"""GGUF files: what is read off them, how they pair, and each refusal with its one line."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import errors
from tests.models.gguf_files import (
    EXTRA,
    NO_GGUF,
    NO_LLAMA,
    byte_tokenizer,
    converted,
    saved_llama,
    tiny_llama,
)
from tests.models.refused import refusal
from tests.models.tiny import padded_gpt2, save, tiny, word_tokenizer

import sprinter
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models import source
from sprinter.models.choose import make_runner
from sprinter.models.convert import convert_gguf
from sprinter.models.flops import forward_flops
from sprinter.models.gguf import header
from sprinter.models.gguf import vocabulary as gguf_vocabulary
from sprinter.models.gguf import write as gguf_write
from sprinter.models.gguf.library import library
from sprinter.models.gguf.load import GgufModel
from sprinter.models.pair import builtin_paths, load_models

gguf = pytest.importorskip("gguf", reason=NO_GGUF)
pytest.importorskip("llama_cpp", reason=NO_LLAMA)

TEXT = " The third thing  thaws:\n\t'tis 1,234 naïve 木 …"
LLAMA3_SPLIT = next(own[0] for own, name in gguf_vocabulary._SPLITS.items() if name == "llama-bpe")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories "target" and "draft", and files of them: "target-f32.gguf", "draft-f16.gguf", ..."""
    root = tmp_path_factory.mktemp("gguf")
    saved_llama(root / "target", 1, num_hidden_layers=3)
    saved_llama(root / "draft", 2, hidden_size=48)
    for name in ("target", "draft"):
        for dtype in ("f32", "f16", "q8_0"):
            converted(root / name, dtype)
    return root


@pytest.fixture(scope="module")
def foreign(files: Path) -> Path:
    """The target's file as another converter would write it: without our keys and without tokenizer.json."""
    path = files / "foreign.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_vocabulary, "JSON_KEY", "other.json")
        patch.setattr(gguf_write, "FINGERPRINT_KEY", "other.fingerprint")
        patch.setattr(gguf_write, "EOS_KEY", "other.eos")
        return convert_gguf(files / "target", path, "f32")


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_a_pair_of_files_is_described_as_its_checkpoint(files: Path, dtype: str) -> None:
    here = load_models(str(files / f"target-{dtype}.gguf"), draft=files / f"draft-{dtype}.gguf")
    there = load_models(files / "target", files / "draft")
    assert here.tokenizer.get_vocab() == there.tokenizer.get_vocab()
    assert here.tokenizer.eos_token == "<end>"
    assert here.tokenizer(TEXT).input_ids == there.tokenizer(TEXT).input_ids
    assert here.draft is not None and there.draft is not None
    for ours, theirs in ((here.target, there.target), (here.draft, there.draft)):
        for name in ("context", "vocab_size", "hidden_size", "eos_ids", "size"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert forward_flops(ours.model.config) == forward_flops(theirs.model.config)
        assert weights_fingerprint(ours.model) == weights_fingerprint(theirs.model)
        assert ours.model.device == torch.device("cpu")
    assert here.target.weights == f"{dtype.upper()} (GGUF)"
    assert there.target.weights == "float32"


def test_each_header_is_read_once(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen = header._GgufReader.head, []

    def counted(self: header._GgufReader, *given: object) -> header.GgufHead:
        seen.append(self)
        return read(self, *given)

    monkeypatch.setattr(header._GgufReader, "head", counted)
    for _ in range(2):  # and again with the next pair: nothing is kept once a pair is loaded
        load_models(files / "target-f32.gguf", files / "draft-f16.gguf")
    assert len(seen) == 4


def test_the_builtin_tokenizer_survives(tmp_path: Path) -> None:
    path = convert_gguf(builtin_paths()["draft"], tmp_path / "draft.gguf", "q8_0")
    here, there = load_models(path), load_models(builtin_paths()["draft"])
    assert here.tokenizer.get_vocab() == there.tokenizer.get_vocab()
    assert here.tokenizer(TEXT).input_ids == there.tokenizer(TEXT).input_ids
    assert here.target.eos_ids == there.target.eos_ids


def test_a_file_and_a_directory_make_a_pair(files: Path) -> None:
    for target, draft in (("target-f16.gguf", "draft"), ("target", "draft-f16.gguf")):
        pair = load_models(files / target, files / draft)
        assert pair.draft is not None
        kinds = [make_runner(model.model, max_len=8).name for model in (pair.target, pair.draft)]
        assert kinds == [("llamacpp" if name.endswith(".gguf") else "row") for name in (target, draft)]


def test_eight_bits_stay_near(files: Path) -> None:
    tokens = torch.arange(1, 30)[None]
    exact, near = (
        make_runner(GgufModel(files / f"target-{dtype}.gguf"), max_len=40).extend(tokens).logits
        for dtype in ("f32", "q8_0")
    )
    assert 0 < (exact - near).std() / exact.std() < 0.1


def test_rows_that_no_block_fits_stay_halves(tmp_path: Path) -> None:
    saved_llama(tmp_path / "model", intermediate_size=80)  # 80 is no multiple of 32
    path = converted(tmp_path / "model", "q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"


def test_files_of_other_converters(files: Path, foreign: Path) -> None:
    here, there = load_models(foreign), load_models(files / "target")
    assert isinstance(here.target.model, GgufModel)
    assert here.tokenizer.get_vocab() == there.tokenizer.get_vocab()
    assert here.tokenizer(TEXT).input_ids == there.tokenizer(TEXT).input_ids
    assert 0 in here.target.eos_ids
    own = weights_fingerprint(here.target.model)
    assert len(own) == 64 and own != weights_fingerprint(there.target.model)
    assert own == weights_fingerprint(GgufModel(foreign))
    load_models(foreign, files / "draft")


def test_a_given_tokenizer_takes_the_place_of_the_files_own(files: Path) -> None:
    given = byte_tokenizer()
    assert load_models(files / "target-f16.gguf", tokenizer=given).tokenizer is given


def test_a_bos_and_a_chat_template_travel(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", bos)]
    )
    tokenizer.chat_template = "{{ messages[0].content }}!"
    save(tmp_path / "model", tiny_llama(), tokenizer)
    path = converted(tmp_path / "model")
    read = load_models(path).tokenizer
    assert read("th").input_ids == tokenizer("th").input_ids == [bos, read.get_vocab()["th"]]
    assert (read.bos_token, read.chat_template) == ("<begin>", tokenizer.chat_template)
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert kinds[bos] == 3 and kinds.count(5) == EXTRA - 1


# --- refusals when loading


def damaged(files: Path, tmp_path: Path, change: object) -> Path:
    path = tmp_path / "bad.gguf"
    path.write_bytes(change((files / "target-f32.gguf").read_bytes()))  # type: ignore[operator]
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b[:2000],
        lambda b: b[:3],
        lambda b: b"not a model",
        lambda b: b"",
    ],
)
def test_damaged_files_are_refused(files: Path, tmp_path: Path, change: object) -> None:
    path = damaged(files, tmp_path, change)
    assert refusal(path) == f"the GGUF file {path} is damaged or cut short: fetch it again"
    assert refusal(path, tokenizer=byte_tokenizer()) == refusal(path)  # before llama.cpp looks


def test_an_unknown_architecture_is_refused(files: Path, tmp_path: Path) -> None:
    length = (5).to_bytes(8, "little")
    path = damaged(files, tmp_path, lambda b: b.replace(length + b"llama", length + b"lemur", 1))
    line = refusal(path, tokenizer=byte_tokenizer())
    assert line == f"llama.cpp cannot load {path}: error loading model: unknown model architecture: 'lemur'"


@pytest.mark.parametrize(
    ("question", "line"),
    [
        ("llama_model_has_encoder", "is an encoder-decoder or embedding model"),
        ("llama_model_is_recurrent", "holds a recurrent state, which cannot be rewound"),
        ("llama_model_is_hybrid", "holds recurrent layers, whose state cannot be rewound"),
        ("llama_model_is_diffusion", "is a diffusion model"),
    ],
)
def test_models_that_cannot_be_rewound_are_refused(
    files: Path, monkeypatch: pytest.MonkeyPatch, question: str, line: str
) -> None:
    monkeypatch.setattr(library(), question, lambda handle: True)
    told = refusal(files / "target-f16.gguf")
    assert told == f"target-f16.gguf {line}: give a decoder with attention in all layers"


def test_missing_files_are_refused(tmp_path: Path) -> None:
    assert "does not exist: check the path" in refusal(tmp_path / "no.gguf")
    assert "does not exist: check the path" in refusal("./no.gguf")


def test_a_draft_with_another_vocabulary_drafts(files: Path, tmp_path: Path) -> None:
    """As llama.cpp runs it too: the token that differs is written when the target draws it."""
    saved_llama(tmp_path / "other", word="an")
    for draft in (converted(tmp_path / "other"), tmp_path / "other"):
        pair = sprinter.load_pair(files / "target-f16.gguf", draft, runner="llamacpp")
        plain, fast = (
            pair.generate("the hat", method=method, temperature=0.0, max_new_tokens=16)
            for method in ("autoregressive", "speculative(gamma=3)")
        )
        assert plain.text == fast.text and fast.stats.drafted > 0


def test_a_gpu_that_is_not_there_is_refused(files: Path) -> None:
    with pytest.raises(UserError, match="use auto, cpu, cuda or mps"):
        GgufModel(files / "draft-f16.gguf", "meta")
    with pytest.raises(UserError, match="this build of llama-cpp-python uses no GPU"):
        GgufModel(files / "draft-f16.gguf", "cuda")


def test_a_file_on_the_hub(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetched(repo: str, name: str, revision: str | None) -> str:
        asked.append((repo, name, revision))
        if "none" in name:
            missing = errors.RemoteEntryNotFoundError
            raise missing.__new__(missing)  # without the response that it wants
        return str(files / "target-f16.gguf")

    monkeypatch.setattr(source, "hf_hub_download", fetched)
    monkeypatch.setattr(source, "snapshot_download", lambda *_, **__: None)
    pair = load_models("org/repo/model.gguf", revision="v1")
    assert asked == [("org/repo", "model.gguf", "v1")]
    assert (pair.target.id, pair.target.revision) == ("org/repo/model.gguf", files.name)
    load_models("org/repo/sub/model.gguf")
    assert asked[-1] == ("org/repo", "sub/model.gguf", None)
    assert "is not in that repository" in refusal("org/repo/none.gguf")


# --- refusals when converting


def convert_refusal(*args: object) -> str:
    with pytest.raises(UserError) as caught:
        convert_gguf(*args)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_converted(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.gguf"
    gpt2 = save(tmp_path / "gpt2", padded_gpt2(64), word_tokenizer())
    assert "its architecture is gpt2" in convert_refusal(gpt2, out)
    words = save(tmp_path / "words", tiny("llama"), word_tokenizer())
    assert "not a byte-level BPE" in convert_refusal(words, out)
    saved_llama(tmp_path / "yarn", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})
    assert "scaled by yarn" in convert_refusal(tmp_path / "yarn", out)
    saved_llama(tmp_path / "gelu", hidden_act="gelu")
    assert "its activation is gelu" in convert_refusal(tmp_path / "gelu", out)
    assert "must end in .gguf" in convert_refusal(files / "target", tmp_path / "new.bin")
    assert "there is no dtype 'q2'" in convert_refusal(files / "target", out, "q2")
    assert "is a GGUF file: give its directory" in convert_refusal(files / "target-f32.gguf", out)
    (tmp_path / "file").write_text("")
    assert "cannot make the folder" in convert_refusal(files / "target", tmp_path / "file" / "new.gguf")
    assert not out.exists() and not list(tmp_path.glob("*.part"))


def test_a_full_disk_leaves_the_old_file(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model.gguf"
    out.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    assert "No space left on device" in convert_refusal(files / "target", out)
    assert out.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_how_text_is_cut_is_named_or_refused(files: Path) -> None:
    model = load_models(files / "target").target

    def pre(cut: object) -> str:
        tokenizer, writer = byte_tokenizer(), gguf.GGUFWriter(None, "llama")
        tokenizer.backend_tokenizer.pre_tokenizer = cut
        gguf_vocabulary.add_vocabulary(writer, tokenizer, model.id, model.vocab_size)
        return writer.kv_data[0]["tokenizer.ggml.pre"].value

    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    plain = ByteLevel(add_prefix_space=False, use_regex=False)
    assert pre(ByteLevel(add_prefix_space=False)) == "gpt-2"
    assert pre(Sequence([Split(Regex(LLAMA3_SPLIT), "isolated"), plain])) == "llama-bpe"
    digits = Split(Regex("\\p{N}"), "isolated")
    assert pre(Sequence([digits, ByteLevel(add_prefix_space=False)])) == "smollm"
    for cut in (
        ByteLevel(add_prefix_space=True),
        plain,
        Sequence([Split(Regex("x+"), "isolated"), plain]),
        Sequence([digits, plain]),
        Sequence([Split(Regex(LLAMA3_SPLIT), "removed"), plain]),
    ):
        with pytest.raises(UserError, match="not a byte-level BPE of a kind"):
            pre(cut)
