"""Packed weights in a file: the same numbers, written once, and nothing broken by a process that is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.models.gguf_families import written
from tests.models.gguf_files import NO_GGUF

from sprinter.errors import UserError
from sprinter.models.gguf import packed
from sprinter.models.gguf.packed import ASKED, SourceFile, packed_matrices

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")

SIZES = [100, 64, 1]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def state(path: Path) -> SourceFile:
    now = path.stat()
    return SourceFile(path, now.st_size, now.st_mtime_ns)


def fill(i: int, room: torch.Tensor) -> None:
    room.fill_(i + 1)


def never(i: int, room: torch.Tensor) -> None:
    raise AssertionError("packed again")


def files(source: Path) -> list[Path]:
    found = (source.parent / "cache" / "packed").glob("*.weights")
    return sorted(path for path in found if ".part." not in path.name)


def read(source: Path, facts: str = "facts", fill: Callable[..., object] = never) -> list[torch.Tensor]:
    made = packed_matrices(state(source), "gguf", [facts], SIZES, fill)
    assert made is not None
    return made


def test_what_was_packed_is_read_again(source: Path) -> None:
    for made in (read(source, fill=fill), read(source)):
        assert [part.tolist() for part in made] == [[1] * 100, [2] * 64, [3]]
        assert all(part.data_ptr() % 64 == 0 for part in made)
    assert len(files(source)) == 1 and files(source)[0].stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("what", ["size", "time", "facts", "damaged"])
def test_what_has_changed_is_packed_again(source: Path, what: str) -> None:
    read(source, fill=fill)
    if what == "size":
        source.write_bytes(b"other weights")
    elif what == "time":
        os.utime(source, ns=(1, 1))
    elif what == "damaged":
        os.truncate(files(source)[0], 10)
    facts = "others" if what == "facts" else "facts"
    assert read(source, facts, lambda i, room: room.fill_(7))[2].tolist() == [7]
    assert read(source, facts)[0].tolist() == [7] * 100


@pytest.mark.parametrize("name", ["model[v2].gguf", "model.part-1.gguf", "a" * 200 + ".gguf"])
def test_names_of_models_may_be_odd_or_long(source: Path, name: str) -> None:
    model = source.rename(source.with_name(name))
    read(model, fill=fill)
    read(model, "others", fill)  # removes what killed writers left
    assert read(model)[2].tolist() == [3]


def test_a_folder_that_is_read_only_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    read(source, fill=fill)
    monkeypatch.setattr(os, "utime", refuse)
    assert read(source)[2].tolist() == [3]


def test_files_that_nobody_uses_go(source: Path) -> None:
    other = source.with_name("other.gguf")
    other.write_bytes(b"weights")
    read(other, fill=fill)
    os.utime(files(source)[0], (1, 1))
    read(other)  # it is used
    read(source, fill=fill)
    assert len(files(source)) == 2
    for path in files(source):
        os.utime(path, (1, 1))
    read(source, "others", fill)
    assert len(files(source)) == 1


def test_a_source_that_changes_while_it_is_packed_is_refused(source: Path) -> None:
    def change(i: int, room: torch.Tensor) -> None:
        source.write_bytes(b"weights of another")

    with pytest.raises(UserError, match="changed while it was read: load it again"):
        read(source, fill=change)
    assert not files(source)


def test_a_file_that_goes_while_it_is_looked_at_is_packed_again(source: Path) -> None:
    read(source, fill=fill)
    (gone,) = files(source)
    gone.unlink()
    gone.symlink_to(source.with_name("nowhere"))
    assert read(source, fill=fill)[1].tolist() == [2] * 64


def test_two_processes_pack_once(source: Path) -> None:
    """Both want to write; the second waits, and finds what the first has written."""
    order: list[int] = []

    def slow(i: int, room: torch.Tensor) -> None:
        order.append(i)
        time.sleep(0.1)
        room.fill_(i + 1)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: read(source, fill=slow), range(2)))
    assert order == [0, 1, 2]
    assert all(made[2].tolist() == [3] for made in found)


def test_a_folder_that_cannot_be_written_is_said(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    assert packed_matrices(state(source), "gguf", ["facts"], SIZES, never) is None
    assert "No space left on device" in caplog.text
    assert [path.name for path in (source.parent / "cache" / "packed").iterdir()] == ["writing.lock"]


def test_models_of_the_same_name_do_not_share_a_file(source: Path) -> None:
    other = source.parent / "folder" / source.name
    other.parent.mkdir()
    other.write_bytes(b"weights of another")
    read(source, fill=fill)
    read(other, fill=lambda i, room: room.fill_(9))
    assert len(files(source)) == 2
    assert read(source)[2].tolist() == [3] and read(other)[2].tolist() == [9]


def test_a_failure_leaves_no_file(source: Path) -> None:
    with pytest.raises(AssertionError, match="packed again"):
        read(source)
    assert [path.name for path in (source.parent / "cache" / "packed").iterdir()] == ["writing.lock"]


KILLED = """
import os, signal, sys
from pathlib import Path
from sprinter.models.gguf.packed import SourceFile, packed_matrices
def fill(i, room):
    room.fill_(i + 1)
    if i == 1:
        os.kill(os.getpid(), signal.SIGKILL)
path = Path(sys.argv[1])
source = SourceFile(path, path.stat().st_size, path.stat().st_mtime_ns)
packed_matrices(source, "gguf", ["facts"], [100, 64, 1], fill)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals of POSIX")
def test_a_process_that_is_killed_leaves_nothing_that_is_read(source: Path) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(source)], check=False)
    assert done.returncode == -signal.SIGKILL
    folder = source.parent / "cache" / "packed"
    assert not files(source) and len([*folder.glob("*.part.*")]) == 1
    assert read(source, fill=fill)[2].tolist() == [3]
    assert len(files(source)) == 1 and not [*folder.glob("*.part.*")]


def test_a_full_disk_is_said_and_each_process_packs_for_itself(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed, "_SPARE", 1 << 60)
    assert packed_matrices(state(source), "gguf", ["facts"], SIZES, never) is None
    assert "make room, set SPRINTER_CACHE to another folder, or SPRINTER_PACKED=off" in caplog.text
    assert not files(source)


def test_the_environment_switches_it_off(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASKED, "off")
    assert packed_matrices(state(source), "gguf", ["facts"], SIZES, never) is None
    monkeypatch.setenv(ASKED, "maybe")
    with pytest.raises(UserError, match="SPRINTER_PACKED='maybe' is none of its values: use on or off"):
        packed_matrices(state(source), "gguf", ["facts"], SIZES, never)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX only")
def test_a_file_that_others_can_write_is_refused(source: Path) -> None:
    read(source, fill=fill)
    files(source)[0].chmod(0o666)
    with pytest.raises(UserError, match="can be written by other users"):
        read(source)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_model_has_the_same_logits_packed_mapped_and_without_a_file(
    name: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    from sprinter.models.gguf.dequantise import dequantised

    written(name, source, "Q8_0")
    ids = torch.arange(20)[None]

    def logits() -> torch.Tensor:
        model = dequantised(source, torch.float32, quantised="gguf").model
        with torch.inference_mode():
            found: torch.Tensor = model(ids).logits
        return found

    first = logits()
    assert len(files(source)) == 1
    inode = files(source)[0].stat().st_ino
    assert torch.equal(logits(), first) and files(source)[0].stat().st_ino == inode
    monkeypatch.setenv(ASKED, "off")
    assert torch.equal(logits(), first)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_weights_rounded_tensor_by_tensor_are_those_of_the_whole_model(
    name: str, dtype: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    from sprinter.models.gguf.dequantise import dequantised
    from sprinter.models.kernels import quantise

    written(name, source, "Q8_0")
    monkeypatch.setattr("sprinter_kernels.layers._ROWS", 32)
    ids = torch.arange(20)[None]
    whole = dequantised(source, torch.float32).model
    quantise(whole, dtype)
    for _ in range(2):  # packed, and mapped
        parts = dequantised(source, torch.float32, quantised=dtype).model
        with torch.inference_mode():
            assert torch.equal(parts(ids).logits, whole(ids).logits)
    assert len(files(source)) == 1
    dequantised(source, torch.float32, quantised="gguf")
    assert len(files(source)) == 2


def test_another_order_of_rows_is_another_file(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    from sprinter.models.gguf.dequantise import dequantised
    from sprinter.models.gguf.tensors import Places

    written("llama", source, "Q8_0")
    ids = torch.arange(20)[None]
    right = dequantised(source, torch.float32, quantised="gguf").model(ids).logits
    for path in files(source):
        path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Places, "in_order", lambda own, name, rows: rows)  # as an older version might read it
        wrong = dequantised(source, torch.float32, quantised="gguf").model(ids).logits
    assert not torch.equal(wrong, right)
    assert torch.equal(dequantised(source, torch.float32, quantised="gguf").model(ids).logits, right)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    from sprinter.models.gguf import dequantise, tensors

    written("llama", source, "Q8_0")
    other = source.with_name("other.gguf")
    written("qwen2", other, "Q8_0")

    def replaced(*args: object) -> tensors.Tensors:
        made = tensors.Tensors(*args)  # type: ignore[arg-type]
        other.replace(source)
        return made

    monkeypatch.setattr(dequantise, "Tensors", replaced)
    with pytest.raises(UserError, match="changed while it was read: load it again"):
        dequantise.dequantised(source, torch.float32, quantised="gguf")
    assert not files(source)
