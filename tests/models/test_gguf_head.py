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


def text(value: str, order: str = "<") -> bytes:
    data = value.encode()
    return struct.pack(f"{order}Q", len(data)) + data


def whole(order: str = "<", version: int = 3, beyond: int = 0) -> bytes:
    """Two values, an array of each kind, a matrix, a vector, a matrix of an unknown type, and their data."""
    keys = [
        text("name", order) + struct.pack(f"{order}I", 8) + text("Zoë", order),
        text("general.alignment", order) + struct.pack(f"{order}II", 4, 64),
        text("flag", order) + struct.pack(f"{order}I?", 7, True),
        text("words", order) + struct.pack(f"{order}IIQ", 9, 8, 2) + text("a", order) + text("", order),
        text("deep", order) + struct.pack(f"{order}IIQ", 9, 9, 1) + struct.pack(f"{order}IQ2h", 3, 2, -1, 5),
    ]
    tensors = [
        text("matrix", order) + struct.pack(f"{order}I2QIQ", 2, 3, 2, 0, 0),
        text("vector", order) + struct.pack(f"{order}IQIQ", 1, 4, 1, 64),
        text("strange", order) + struct.pack(f"{order}I2QIQ", 2, 9, 9, 77, 128 + beyond),
    ]
    head = b"GGUF" + struct.pack(f"{order}IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)
    return head.ljust(-(-len(head) // 64) * 64, b"\0") + bytes(24)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [2, 3])
def test_all_kinds_of_values(tmp_path: Path, order: str, version: int) -> None:
    (tmp_path / "a.gguf").write_bytes(whole(order, version))
    head = gguf_head(tmp_path / "a.gguf")
    assert head.metadata == {
        "name": "Zoë", "general.alignment": 64, "flag": True, "words": ["a", ""], "deep": [[-1, 5]],
    }  # fmt: skip
    assert head.types == {"F32", "77"}  # a vector's does not count


def test_long_arrays_are_shared_if_they_are_equal(tmp_path: Path) -> None:
    def file(name: str, words: list[str]) -> Path:
        array = text("words") + struct.pack("<IIQ", 9, 8, len(words)) + b"".join(map(text, words))
        (tmp_path / name).write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array)
        return tmp_path / name

    words = [f"wörd {i}" for i in range(1200)]
    heads = [
        gguf_head(file("a", words)),
        gguf_head(file("b", words)),
        gguf_head(file("c", [*words[:-1], "another"])),
        gguf_head(file("d", words[:-1])),
    ]
    a, b, c, d = (head.metadata["words"] for head in heads)
    assert a == words and b is a
    assert c == [*words[:-1], "another"] and d == words[:-1]
    assert gguf_head(tmp_path / "d") is heads[3]
    module.forget_heads()
    again = gguf_head(tmp_path / "a").metadata["words"]
    assert again == a and again is not a
    module.forget_heads()


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
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(key) + value)
    with pytest.raises(UserError, match=line):
        gguf_head(tmp_path / "a.gguf")
