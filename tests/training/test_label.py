"""Labelling from files to a data set: what is recorded, resuming after an interruption, and errors."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.tiny import padded_gpt2, tiny, word_tokenizer
from tests.training.labelling import NEW, laws_of, same_records, tiny_pair, words, write_texts

import sprinter
from sprinter.errors import UserError
from sprinter.laws import overlap, raw_law
from sprinter.training import shards
from sprinter.training.label_run import LabelProgress, LabelReport, label
from sprinter.training.label_settings import LabelSettings
from sprinter.training.prefixes import PrefixRow, PrefixWriter, Readings
from sprinter.training.records import INFO, KINDS, Records, read_info, read_records, shard_name

SETTINGS = LabelSettings(new_tokens=NEW, prompt_tokens=16, batch_size=4)
LENGTHS = [30, 8, 60, 12, 3, 45, 20, 33, 0, 70, 25, 14, 40, 9, 55]
"""Words of the texts of the tests; one is too short (3); an empty line is no text."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts.txt", LENGTHS)


def run(data: Path, out: Path, settings: LabelSettings = SETTINGS) -> tuple[LabelReport, Records]:
    report = label(tiny_pair(), [data], out, settings)
    return report, read_records(out)


def test_a_data_set_says_what_it_was_made_from(data: Path, tmp_path: Path) -> None:
    report, records = run(data, tmp_path / "out")
    info = read_info(tmp_path / "out")
    assert info == report.info and info.classes == KINDS
    assert info.skipped == {"too_long": 0, "too_short": 1, "empty": 0}
    assert (info.prompts, info.shards, info.positions) == (13, 4, len(records))
    assert LabelSettings(**info.settings) == SETTINGS
    assert info.data[0]["texts"] == 14 and len(info.data[0]["sha256"]) == 64
    assert info.hidden_size == records.hidden.shape[1] and info.vocab_size == 61
    assert report.tokens_per_s > 0 and report.resumed == 0
    texts = records.prompt.unique().tolist()
    assert texts == [0, 1, 2, 3, *range(5, 14)], (
        "numbers of the texts in the input; the short one is left out"
    )


def test_a_step_that_needs_too_much_memory_runs_in_parts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = run(data, tmp_path / "whole")
    rows: list[int] = []

    class Watched(PrefixWriter):
        def __call__(self, part: Sequence[PrefixRow]) -> Readings:
            rows.append(len(part))
            return super().__call__(part)

    monkeypatch.setattr("sprinter.training.label_step.PrefixWriter", Watched)
    monkeypatch.setattr("sprinter.training.label_step._LOGITS_BYTES", 3 * 2 * 4 * 61 * NEW)
    report, parts = run(data, tmp_path / "parts")
    assert rows == [3, 1, 3, 1, 3, 1, 1] and report.info.shards == 4
    assert same_records(parts, whole, 1e-3)


def test_classes_take_turns(data: Path, tmp_path: Path) -> None:
    _, records = run(data, tmp_path / "one")
    first = {int(prompt): int(kind) for prompt, kind in zip(records.prompt, records.kind, strict=True)}
    assert list(first.values()) == [i % 4 for i in range(13)]
    _, records = run(data, tmp_path / "four", replace(SETTINGS, classes_per_prompt=4))
    pairs = {(int(prompt), int(kind)) for prompt, kind in zip(records.prompt, records.kind, strict=True)}
    assert pairs == {(prompt, kind) for prompt in first for kind in range(4)}
    assert read_info(tmp_path / "four").shards == 13, "four rows a step are one prompt"


def test_records_are_those_of_a_plain_pass_over_each_text(data: Path, tmp_path: Path) -> None:
    """The text can be rebuilt from the file and the records."""
    pair = tiny_pair()
    _, records = run(data, tmp_path / "out")
    lines = [line for line in data.read_text().splitlines() if line]
    for prompt in records.prompt.unique().tolist():
        mine = records.select(records.prompt == prompt)
        start, n = int(mine.position[0]), len(mine)
        assert start == min(16, max(1, int(0.3 * len(lines[prompt].split()))))
        assert mine.position.tolist() == list(range(start, start + n)) and mine.step.tolist() == list(
            range(n)
        )
        ids = word_tokenizer()(lines[prompt])["input_ids"]
        text = [*ids[:start], *mine.token.tolist()]
        if mine.kind[0] == 0:
            assert text == ids[: start + NEW]
        q, p, hidden = laws_of(pair, text)
        before = slice(start - 1, start + n - 1)
        q, p = raw_law(q[before]), raw_law(p[before])
        assert torch.allclose(mine.hidden, hidden[before], atol=1e-4)
        assert torch.allclose(mine.hidden_x, hidden[start:], atol=1e-4)
        at = torch.arange(n)
        for column, law, token in (
            (mine.log_q, q, mine.x),
            (mine.log_p, p, mine.x),
            (mine.log_q_token, q, mine.token),
            (mine.log_p_token, p, mine.token),
        ):
            assert torch.allclose(column.double(), law[at, token.long()].log(), atol=1e-3)
        assert torch.allclose(mine.overlap[:, 0].double(), overlap(p, q), atol=1e-4)
    assert records.kind.unique().tolist() == [0, 1, 2, 3]


def test_the_size_of_a_step_changes_nothing_but_float_noise(data: Path, tmp_path: Path) -> None:
    _, small = run(data, tmp_path / "small", replace(SETTINGS, batch_size=2))
    _, large = run(data, tmp_path / "large", replace(SETTINGS, batch_size=100))
    assert same_records(small, large, 1e-3)
    assert read_info(tmp_path / "small").dataset_hash != read_info(tmp_path / "large").dataset_hash


def test_the_seed_decides(data: Path, tmp_path: Path) -> None:
    hashes = [
        run(data, tmp_path / f"{i}", replace(SETTINGS, seed=seed))[0].info.dataset_hash
        for i, seed in enumerate((0, 0, 1))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_stopped_run_goes_on_and_nothing_is_lost_or_doubled(data: Path, tmp_path: Path) -> None:
    whole, _ = run(data, tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(after: int) -> None:
        shards_seen = []

        def tell(done: LabelProgress) -> None:
            shards_seen.append(done)
            if len(shards_seen) == after:
                raise Stop

        with pytest.raises(Stop):
            label(tiny_pair(), [data], tmp_path / "out", SETTINGS, progress=tell)

    stop(1)
    assert read_info(tmp_path / "out").dataset_hash is None
    stop(2)
    (tmp_path / "out" / shard_name(1)).unlink()
    report, _ = run(data, tmp_path / "out")
    assert report.resumed == 2 and report.info == whole.info
    for path in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    again, _ = run(data, tmp_path / "out")
    assert (again.resumed, again.tokens, again.tokens_per_s) == (4, 0, 0.0)


def test_progress_goes_from_nothing_to_all(data: Path, tmp_path: Path) -> None:
    told: list[LabelProgress] = []
    report = label(tiny_pair(), [data], tmp_path / "out", SETTINGS, progress=told.append)
    shares = [done.share for done in told]
    assert shares == sorted(shares) and 0 < shares[0] < 0.5 and shares[-1] == 1.0
    assert told[-1].positions == report.info.positions and told[-1].tokens == report.tokens
    assert told[-1].prompts == report.info.prompts and told[-1].seconds <= report.seconds


def test_other_settings_are_refused_until_restart(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out")
    other = replace(SETTINGS, temperature=0.5)
    with pytest.raises(UserError, match=r"temperature=1.0 \(now 0.5\): give another --out, or --restart"):
        label(tiny_pair(), [data], tmp_path / "out", other)
    data.write_text(words(50) + "\n" + words(60, 1) + "\n")
    with pytest.raises(UserError, match="other data files"):
        label(tiny_pair(), [data], tmp_path / "out", SETTINGS)
    with pytest.raises(UserError, match="another draft"):
        label(tiny_pair("llama", "qwen2"), [data], tmp_path / "out", SETTINGS)
    report = label(tiny_pair(), [data], tmp_path / "out", other, restart=True)
    assert report.info.prompts == 2 and read_info(tmp_path / "out").temperature == 0.5


def test_a_limit_and_several_files(data: Path, tmp_path: Path) -> None:
    second = tmp_path / "b.jsonl"
    second.write_text("".join(json.dumps({"text": words(40, seed)}) + "\n" for seed in range(5)))
    report = label(tiny_pair(), [data, second], tmp_path / "out", replace(SETTINGS, limit=16))
    assert [source["texts"] for source in report.info.data] == [14, 2] and report.info.prompts == 15


def test_one_line_is_a_data_set(tmp_path: Path) -> None:
    data = tmp_path / "one.txt"
    data.write_text(words(40))
    report, records = run(data, tmp_path / "out")
    assert (report.info.prompts, len(records), report.info.shards) == (1, NEW, 1)
    (note,) = report.notes
    assert note == "1 prompt was labelled: training needs 30 at least, and its evaluation 200"


NOTHING = [
    ([3], {}, "no text of 1 can be labelled (0 too long for the context of 96 tokens, 1 too short, 0 empty"),
    ([3, 4, 310], {"prompt_tokens": 0}, "none of 3 texts can be labelled (1 too long"),
    ([400, 500], {"prompt_tokens": 0}, "give prompt_tokens=90 or less"),
    ([9, 9], {"new_tokens": 40}, "give longer texts, or fewer new_tokens"),
]


@pytest.mark.parametrize(("lengths", "change", "said"), NOTHING)
def test_texts_none_of_which_can_be_used(
    tmp_path: Path, lengths: list[int], change: dict[str, int], said: str
) -> None:
    data = write_texts(tmp_path / "texts.txt", lengths)
    with pytest.raises(UserError) as caught:
        label(tiny_pair(), [data], tmp_path / "out", replace(SETTINGS, **change))  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"prompt_share": 1.5}, "prompt_share=1.5"),
        ({"prompt_tokens": -1}, "prompt_tokens=-1"),
        ({"new_tokens": 0}, "new_tokens=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"classes_per_prompt": 2}, r"classes_per_prompt=2 is out of range: give 1 \(in turn\) or 4"),
        ({"limit": 0}, "limit=0"),
        ({"seed": 0.5}, "seed=0.5"),
    ],
)
def test_settings_out_of_range(change: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        LabelSettings(**change)  # type: ignore[arg-type]


def test_requests_that_cannot_be_met(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="there is no data"):
        label(tiny_pair(), [], out, SETTINGS)
    with pytest.raises(UserError, match=r"new_tokens=96 leaves no room.*give 95 or less"):
        label(tiny_pair(), [data], out, replace(SETTINGS, new_tokens=96))
    with pytest.raises(UserError, match="there is no engine 'spark': use local or ray"):
        label(tiny_pair(), [data], out, SETTINGS, engine="spark")
    with pytest.raises(UserError, match="workers=0"):
        label(tiny_pair(), [data], out, SETTINGS, engine="ray", workers=0)
    alone = sprinter.load_pair(tiny("llama"), tokenizer=word_tokenizer())
    with pytest.raises(UserError, match="labelling needs a draft"):
        label(alone, [data], out, SETTINGS)
    with pytest.raises(UserError, match="the target has 61 token ids and the draft 70"):
        sprinter.load_pair(tiny("llama"), draft=padded_gpt2(70), tokenizer=word_tokenizer())
    bad = tmp_path / "bad.txt"
    bad.write_bytes(words(50).encode() + b"\n\xff\n")
    with pytest.raises(UserError, match="not valid UTF-8"):
        label(tiny_pair(), [data, bad], out, SETTINGS)
    assert not out.exists(), "all of this is refused before anything is written"


def test_a_disk_that_fills_in_the_middle(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run(data, tmp_path / "whole")
    write = shards.write_atomic
    left = [3]  # labels.json and two shards

    def full(path: Path, content: bytes) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_atomic", full)
        with pytest.raises(UserError, match="the disk is full"):
            label(tiny_pair(), [data], tmp_path / "out", SETTINGS)
    with pytest.raises(UserError, match="not finished"):
        read_records(tmp_path / "out")
    report, _ = run(data, tmp_path / "out")
    assert report.info == whole.info and report.resumed == 2
    assert (tmp_path / "out" / INFO).read_bytes() == (tmp_path / "whole" / INFO).read_bytes()


def test_what_is_saved_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flushed = tmp_path / "shard", []

    def fsync(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"{os.fstat(handle).st_size} bytes"
        flushed.append((kind, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    shards.save_bytes(path, b"content")
    assert flushed == [("7 bytes", False), ("folder", True)] and path.read_bytes() == b"content"
