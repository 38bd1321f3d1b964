"""Large files go to another machine in parts that may arrive in any order, and are joined as they come."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from scripts.parts import LIST, cut, join


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files, of which one ends with a part, cut into parts of 1,000 bytes."""
    pick = random.Random(3)
    made = [tmp_path / "target.gguf", tmp_path / "draft.gguf"]
    for file, size in zip(made, (5432, 3000), strict=True):
        file.write_bytes(pick.randbytes(size))
    cut(tmp_path / "parts", made, 1000)
    return made


def there(files: list[Path], out: Path) -> bool:
    return all((out / file.name).read_bytes() == file.read_bytes() for file in files)


def test_parts_arrive_one_by_one_in_any_order(files: list[Path], tmp_path: Path) -> None:
    parts, arrived, out = tmp_path / "parts", tmp_path / "arrived", tmp_path / "out"
    arrived.mkdir()
    (parts / LIST).rename(arrived / LIST)
    names = sorted(one.name for one in parts.iterdir())
    assert len(names) == 9 and all((parts / name).stat().st_size <= 1000 for name in names)
    random.Random(1).shuffle(names)
    for name in names:
        assert join(arrived, out), "some are missing"
        (parts / name).rename(arrived / name)
    assert join(arrived, out) == [] == join(arrived, out)
    assert there(files, out) and [one.name for one in arrived.iterdir()] == [LIST], "no file is held twice"


def test_what_an_interruption_has_left_is_written_anew(files: list[Path], tmp_path: Path) -> None:
    parts, out = tmp_path / "parts", tmp_path / "out"
    out.mkdir()
    (out / "target.gguf").write_bytes(files[0].read_bytes()[:1500])  # half of the second part
    (parts / "target.gguf.000").unlink()
    assert join(parts, out) == [] and there(files, out)


def test_a_damaged_part_is_refused_and_brought_again(files: list[Path], tmp_path: Path) -> None:
    parts, out = tmp_path / "parts", tmp_path / "out"
    one = parts / "target.gguf.002"
    good = one.read_bytes()
    one.write_bytes(b"x" + good[1:])
    with pytest.raises(SystemExit, match=r"target\.gguf\.002' is not the part that was cut"):
        join(parts, out)
    one.write_bytes(good)
    assert join(parts, out) == [] and there(files, out)


def test_a_longer_file_of_the_same_name_is_written_anew(files: list[Path], tmp_path: Path) -> None:
    parts, out = tmp_path / "parts", tmp_path / "out"
    out.mkdir()
    (out / "draft.gguf").write_bytes(b"\0" * 3001)
    assert join(parts, out) == [] and there(files, out)


def test_a_file_that_was_damaged_there_is_removed(files: list[Path], tmp_path: Path) -> None:
    parts, out = tmp_path / "parts", tmp_path / "out"
    out.mkdir()
    (out / "draft.gguf").write_bytes(b"\0" * 3000)
    with pytest.raises(SystemExit, match=r"draft\.gguf' is not the file that was cut: it is removed"):
        join(parts, out)
    assert not (out / "draft.gguf").exists()


def test_without_the_list_nothing_is_joined(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"parts\.json' cannot be read"):
        join(tmp_path, tmp_path / "out")
