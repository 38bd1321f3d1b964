"""The head of a GGUF file, byte by byte; what the package ``gguf`` reads of it is the same."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.models.gguf_files import NO_GGUF, converted, saved_llama

from sprinter.errors import UserError
from sprinter.models.gguf import header as module
from sprinter.models.gguf.header import gguf_head


class Kind(int):
    """A type, as in ``gguf.GGMLQuantizationType``."""

    name = "F32"


@pytest.fixture(autouse=True)
def no_package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Type 0 is known; the test "of the package" has the real one."""
    if "package" not in request.node.name:
        fake = SimpleNamespace(GGMLQuantizationType=[Kind(0)], GGML_QUANT_SIZES={0: (1, 4)})
        monkeypatch.setattr(module, "gguf_package", lambda: fake)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def whole(version: int = 3) -> bytes:
    """Values and arrays, a matrix, a vector, a matrix of an unknown type, and their data."""
    keys = [
        ARCHITECTURE,
        text("name") + struct.pack("<I", 8) + text("Zoë"),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("flag") + struct.pack("<I?", 7, True),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text(""),
        text("numbers") + struct.pack("<IIQ2h", 9, 3, 2, -1, 5),
        text("words") + struct.pack("<IIQ", 9, 8, 1) + text("b"),
    ]
    tensors = [
        text("matrix") + struct.pack("<I2QIQ", 2, 3, 2, 0, 0),
        text("vector") + struct.pack("<IQIQ", 1, 4, 1, 64),
        text("strange") + struct.pack("<I2QIQ", 2, 9, 9, 77, 128),
    ]
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)
    return head.ljust(-(-len(head) // 64) * 64, b"\0") + bytes(24)


@pytest.mark.parametrize("version", [2, 3])
def test_all_kinds_of_values(tmp_path: Path, version: int) -> None:
    (tmp_path / "a.gguf").write_bytes(whole(version))
    head = gguf_head(tmp_path / "a.gguf")
    assert head.metadata == {
        "general.architecture": "llama", "name": "Zoë", "general.alignment": 64, "flag": True,
        "tokenizer.ggml.tokens": ["a", ""], "numbers": [-1, 5], "words": 1,
    }  # fmt: skip
    assert head.types == {"F32", "77"}  # a vector's does not count
    assert gguf_head(tmp_path / "a.gguf") is head
    module.forget_heads()
    assert gguf_head(tmp_path / "a.gguf") is not head


def test_every_cut_is_refused(tmp_path: Path) -> None:
    path, data = tmp_path / "a.gguf", whole()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"a\.gguf is damaged or cut short: fetch it again"):
            gguf_head(path)


@pytest.mark.parametrize(
    "change", [(0, b"GGML"), (4, b"\1"), (8, b"\xff" * 8), (16, b"\xff" * 8), (24, b"\xff" * 8)]
)
def test_nonsense_is_refused(tmp_path: Path, change: tuple[int, bytes]) -> None:
    at, new = change
    data = bytearray(whole())
    data[at : at + len(new)] = new
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(UserError, match="is damaged or cut short"):
        gguf_head(tmp_path / "a.gguf")


def test_it_reads_what_the_package_reads(tmp_path: Path) -> None:
    gguf: Any = pytest.importorskip("gguf", reason=NO_GGUF)
    saved_llama(tmp_path / "model")
    path = converted(tmp_path / "model", "q8_0")
    reader, head = gguf.GGUFReader(path), gguf_head(path)
    own = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    assert head.metadata == {k: field.contents() for k, field in reader.fields.items() if k not in own}
    assert head.types == {one.tensor_type.name for one in reader.tensors if len(one.shape) > 1}


STRING, SHORT = 8, 2  # types of values


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("general.type", struct.pack("<I", STRING) + text("adapter"), "llama-export-lora"),
        ("general.type", struct.pack("<I", STRING) + text("mmproj"), "a file of type mmproj"),
        ("split.count", struct.pack("<IH", SHORT, 3), "is one of 3 parts of a model: join them with llama"),
    ],
)
def test_files_that_hold_no_model_are_refused(tmp_path: Path, key: str, value: bytes, line: str) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + ARCHITECTURE
    (tmp_path / "a.gguf").write_bytes(head + text(key) + value)
    with pytest.raises(UserError, match=line):
        gguf_head(tmp_path / "a.gguf")
