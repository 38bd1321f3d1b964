"""Shards: written atomically, of one data set only, and verified when they are read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sprinter.errors import UserError
from sprinter.training.records import (
    FIELDS,
    INFO,
    LabelInfo,
    Records,
    dataset_hash,
    read_info,
    read_records,
    shard_metadata,
    shard_name,
)
from sprinter.training.shards import ShardStore, shard_bytes

INFO_OF_TEST = LabelInfo(
    "target", None, "aa", "draft", None, "bb", 3, 5, "float32", ({"name": "x", "sha256": "c", "texts": 9},),
    {"seed": 0, "temperature": 1.0}, "h" * 64,
)  # fmt: skip


def some_records(n: int, seed: int = 0) -> Records:
    chance = torch.Generator().manual_seed(seed)
    columns = {}
    for name, (dtype, tail) in FIELDS.items():
        shape = [n, *(3 if size == "d" else int(size) for size in tail)]
        drawn = torch.rand(*shape, generator=chance)
        columns[name] = drawn if dtype == torch.float32 else (100 * drawn).to(dtype)
    return Records(**columns)


def shard(step: int, n: int = 4, settings: str = INFO_OF_TEST.settings_hash) -> bytes:
    return shard_bytes(some_records(n, step), settings, step, {"prompts": 2, "tokens": 30})


def finished(directory: Path, steps: int = 3) -> LabelInfo:
    """A whole data set in the directory."""
    shelf = ShardStore(directory, INFO_OF_TEST)
    for step in range(steps):
        shelf.add(step, shard(step))
    info = replace(
        INFO_OF_TEST,
        shards=steps,
        positions=shelf.total("positions"),
        dataset_hash=dataset_hash(shelf.content_hashes()),
    )
    shelf.write_info(info)
    return info


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_are_a_table_of_columns() -> None:
    one, two = some_records(3, 1), some_records(2, 2)
    both = Records.concat([one, some_records(0), two])
    assert len(both) == 5 and list(both.columns()) == list(FIELDS)
    assert both.select(torch.tensor([3, 4])).content_hash() == two.content_hash() != one.content_hash()
    with pytest.raises(TypeError, match="columns that do not fit: tv"):
        Records(**{name: column for name, column in one.columns().items() if name != "tv"})


@pytest.mark.parametrize(
    ("name", "column"),
    [("x", torch.zeros(3)), ("x", torch.zeros(2, dtype=torch.int32)), ("overlap", torch.zeros(3))],
)
def test_columns_of_wrong_type_or_shape_are_refused(name: str, column: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"column {name} is"):
        Records(**some_records(3).columns() | {name: column})


def test_a_finished_data_set_is_read_back(tmp_path: Path) -> None:
    info = finished(tmp_path)
    assert read_info(tmp_path) == info and info.temperature == 1.0
    wanted = Records.concat([some_records(4, step) for step in range(3)])
    assert read_records(tmp_path).content_hash() == wanted.content_hash()
    told = shard_metadata(tmp_path / shard_name(1))
    assert {name: told[name] for name in ("step", "positions", "prompts", "tokens")} == {
        "step": "1", "positions": "4", "prompts": "2", "tokens": "30",
    }  # fmt: skip


def test_what_is_not_whole_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no labels"):
        read_records(tmp_path)
    info = finished(tmp_path / "good")

    def spoilt(name: str) -> Path:
        return Path(shutil.copytree(tmp_path / "good", tmp_path / name))

    place = spoilt("unfinished")
    (place / INFO).write_text(replace(info, dataset_hash=None).to_json())
    with pytest.raises(UserError, match=r"not finished \(3 shards so far\): run the same"):
        read_records(place)
    place = spoilt("lost")
    (place / shard_name(1)).unlink()
    with pytest.raises(UserError, match=f"3 shards, and {shard_name(1)} does not fit"):
        read_records(place)
    place = spoilt("more")
    (place / shard_name(3)).write_bytes(shard(3))
    with pytest.raises(UserError, match=f"{shard_name(3)} does not fit"):
        read_records(place)
    place = spoilt("cut")
    os.truncate(place / shard_name(2), (place / shard_name(2)).stat().st_size - 1)
    with pytest.raises(UserError, match="is damaged"):
        read_records(place)
    place = spoilt("flipped")
    data = bytearray((place / shard_name(2)).read_bytes())
    data[-3] ^= 1
    (place / shard_name(2)).write_bytes(data)
    with pytest.raises(UserError, match="is not what labelling wrote"):
        read_records(place)
    place = spoilt("other settings")
    (place / shard_name(0)).write_bytes(shard(0, settings="i" * 64))
    with pytest.raises(UserError, match="is not what labelling wrote"):
        read_records(place)
    place = spoilt("swapped")
    (place / shard_name(0)).write_bytes(shard(1))
    with pytest.raises(UserError, match="are not those of its"):
        read_records(place)
    place = spoilt("info")
    (place / INFO).write_text('{"target_id": 1}')
    with pytest.raises(UserError, match="is damaged"):
        read_records(place)
    assert len(read_records(tmp_path / "good")) == 12


# --- shelf -----------------------------------------------------------------------------------------------------------


def test_a_shelf_goes_on_where_it_stopped(tmp_path: Path) -> None:
    shelf = ShardStore(tmp_path / "new" / "labels", INFO_OF_TEST)
    shelf.add(0, shard(0))
    shelf.add(2, shard(2))
    (tmp_path / "new" / "labels" / (shard_name(1) + ".part")).write_bytes(shard(1)[:1000])
    again = ShardStore(tmp_path / "new" / "labels", INFO_OF_TEST)
    assert [step in again for step in range(4)] == [True, False, True, False] and len(again) == 2
    assert (again.total("positions"), again.total("prompts"), again.total("tokens")) == (8, 4, 60)
    assert sorted(path.name for path in (tmp_path / "new" / "labels").iterdir()) == [
        INFO, shard_name(0), shard_name(2),
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["cut", "empty", "other settings"])
def test_a_shard_that_is_not_whole_is_made_again(tmp_path: Path, damage: str) -> None:
    ShardStore(tmp_path, INFO_OF_TEST).add(0, shard(0))
    data = {"cut": shard(0)[:-1], "empty": b"", "other settings": shard(0, settings="i" * 64)}[damage]
    (tmp_path / shard_name(0)).write_bytes(data)
    shelf = ShardStore(tmp_path, INFO_OF_TEST)
    assert 0 not in shelf and len(shelf) == 0
    shelf.add(0, shard(0))
    assert 0 in ShardStore(tmp_path, INFO_OF_TEST)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": {"seed": 1, "temperature": 1.0}}, r"seed=0 \(now 1\)"),
        ({"settings": {"seed": 0, "temperature": 0.5}}, r"temperature=1.0 \(now 0.5\)"),
        ({"draft_fingerprint": "zz"}, "another draft"),
        ({"target_fingerprint": "zz"}, "another target"),
        ({"dtype": "bfloat16"}, "dtype=float32"),
        ({"data": ({"name": "x", "sha256": "d", "texts": 9},)}, "other data files"),
        ({}, "another version"),
    ],
)
def test_labels_of_other_settings_are_refused_and_left_alone(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    finished(tmp_path)
    other = replace(INFO_OF_TEST, settings_hash="i" * 64, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{said}.*give another --out, or --restart") as caught:
        ShardStore(tmp_path, other)
    assert "\n" not in str(caught.value)
    assert len(read_records(tmp_path)) == 12


def test_restart_deletes_labels_and_nothing_else(tmp_path: Path) -> None:
    finished(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    shelf = ShardStore(tmp_path, replace(INFO_OF_TEST, settings_hash="i" * 64), restart=True)
    assert len(shelf) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [INFO, "notes.txt"]


def test_shards_of_unknown_origin_are_refused(tmp_path: Path) -> None:
    (tmp_path / shard_name(0)).write_bytes(shard(0))
    with pytest.raises(UserError, match=f"holds 1 shards and no {INFO}"):
        ShardStore(tmp_path, INFO_OF_TEST)


def test_places_that_cannot_be_directories(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file: give a directory"):
        ShardStore(tmp_path / "file", INFO_OF_TEST)
    with pytest.raises(UserError, match=r"cannot write .*: give another directory"):
        ShardStore(tmp_path / "file" / "below", INFO_OF_TEST)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    shelf = ShardStore(tmp_path, INFO_OF_TEST)
    shelf.add(0, shard(0))

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UserError, match=r"run the same command again \(1 shards are kept\)") as caught:
            shelf.add(1, shard(1))
    assert ("the disk is full" in str(caught.value)) == (code == errno.ENOSPC)
    assert sorted(path.name for path in tmp_path.iterdir()) == [INFO, shard_name(0)]
    assert 1 not in ShardStore(tmp_path, INFO_OF_TEST)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a tmpfs here (needs root)")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills(small_disk: Path) -> None:
    shelf = ShardStore(small_disk / "labels", INFO_OF_TEST)
    full = "the disk is full: free some space and run the same command again"
    with pytest.raises(UserError, match=full) as caught:
        deque((shelf.add(step, shard(step, n=50)) for step in range(100)), maxlen=0)
    kept = len(shelf)
    assert 0 < kept < 100 and f"({kept} shards are kept)" in str(caught.value)
    there = ShardStore(small_disk / "labels", INFO_OF_TEST)
    assert len(there) == kept
    assert not list((small_disk / "labels").glob("*.part"))
    with pytest.raises(UserError, match="not finished"):
        read_records(small_disk / "labels")


def test_labels_json_is_plain_json(tmp_path: Path) -> None:
    finished(tmp_path)
    raw = json.loads((tmp_path / INFO).read_text())
    assert (
        raw["classes"] == ["original", "draft", "target", "interleaved"] and raw["data"][0]["sha256"] == "c"
    )
