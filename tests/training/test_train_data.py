"""What training reads: features of records, the split by prompt, labels that do not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.training.synthetic import HIDDEN, make_records, write_labels

from sprinter.errors import UserError
from sprinter.heads.features import DraftStep, feature_width, read_features, stack_features
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.networks import Linear
from sprinter.training.dataset import PARTS, check_head, part_of, read_positions, record_features
from sprinter.training.records import KINDS, Records

ALL = ("hidden", "entropy", "max_q", "top_q(k=4)", "position", "hidden_x", "log_q")


@pytest.fixture(scope="module")
def records() -> Records:
    return make_records(40, 6)


def test_features_of_records_are_those_of_a_driver(records: Records) -> None:
    """The laws of the invented pair fit into the records whole, so the draft step can be rebuilt."""
    step = DraftStep(
        records.hidden, records.top_q, records.step + 1, records.token.long(), records.hidden_x
    )  # fmt: skip
    for name in ALL:
        if name == "entropy":
            continue  # of a law with padding the same, up to rounding
        theirs = stack_features((name,), read_features((name,), step))
        torch.testing.assert_close(record_features(records, (name,)), theirs, rtol=1e-4, atol=1e-5)
    width = sum(feature_width(name, HIDDEN) for name in ALL)
    assert record_features(records, ALL).shape == (len(records), width)


def test_positions_hold_all_records_of_all_shards(records: Records, tmp_path: Path) -> None:
    positions = read_positions([write_labels(tmp_path, records, shards=3)], ("hidden",))
    assert positions.inputs.equal(records.hidden)
    assert positions.columns["entropy"].equal(records.entropy)
    assert positions.group.equal(records.prompt)
    assert int(positions.of_kinds(["draft", "target"]).sum()) == len(records) // 2


def test_no_prompt_lies_in_two_parts(records: Records, tmp_path: Path) -> None:
    positions = read_positions([write_labels(tmp_path, records)], ("entropy",))
    for seed in range(5):
        parts = positions.parts(seed)
        seen = [set(records.prompt[parts == number].tolist()) for number in range(len(PARTS))]
        assert sum(map(len, seen)) == len(set.union(*seen)) == 40
        assert len(set(parts.tolist())) == 3


def test_the_same_file_labelled_twice_is_split_alike(records: Records, tmp_path: Path) -> None:
    """Another seed or temperature of completions must not bring a training prompt into the test part."""
    again = make_records(40, 6, seed=9)
    one, two = write_labels(tmp_path / "a", records), write_labels(tmp_path / "b", again)
    both = read_positions([one, two], ("entropy",))
    assert len(both.prompts) == 40
    assert both.parts(0)[: len(records)].equal(both.parts(0)[len(records) :])
    other = write_labels(tmp_path / "c", again, data=({"name": "o.txt", "sha256": "b" * 64, "texts": 40},))
    assert len(read_positions([one, other], ("entropy",)).prompts) == 80


def test_a_prompt_is_known_by_its_place_in_its_file(records: Records, tmp_path: Path) -> None:
    """Two files labelled together, and the second alone: its prompts fall into the same parts."""
    sources = [{"name": f"{i}.txt", "sha256": str(i) * 64, "texts": 20} for i in range(2)]
    together = read_positions([write_labels(tmp_path / "a", records, data=tuple(sources))], ("entropy",))
    second = records.select(records.prompt >= 20)
    moved = Records(**{**second.columns(), "prompt": second.prompt - 20})
    apart = read_positions([write_labels(tmp_path / "b", moved, data=(sources[1],))], ("entropy",))
    assert together.parts(3)[records.prompt >= 20].equal(apart.parts(3))
    assert set(apart.prompts) < set(together.prompts)


@pytest.mark.statistical
def test_parts_have_their_shares() -> None:
    """20,000 names; 5 standard deviations: false alarm 1e-6 each."""
    parts = torch.tensor([part_of(f"x:{i}", 0) for i in range(20_000)])
    for number, share in enumerate((0.8, 0.1, 0.1)):
        found = int((parts == number).sum())
        assert abs(found - 20_000 * share) < 5 * (20_000 * share * (1 - share)) ** 0.5


def test_labels_that_are_none_are_one_line(records: Records, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(UserError, match="holds no labels"):
            read_positions([directory], ("hidden",))
    with pytest.raises(UserError, match="no labels were given"):
        read_positions([], ("hidden",))
    with pytest.raises(UserError, match="not finished"):
        read_positions([write_labels(tmp_path / "half", records, dataset_hash=None)], ("hidden",))
    nothing = write_labels(tmp_path / "nothing", records.select(records.prompt < 0), shards=1)
    with pytest.raises(UserError, match="hold no position"):
        read_positions([nothing], ("hidden",))


@pytest.mark.parametrize("which", ["draft", "target"])
def test_labels_of_two_pairs_are_refused(records: Records, tmp_path: Path, which: str) -> None:
    one = write_labels(tmp_path / "a", records)
    other = write_labels(
        tmp_path / "b", records, **{f"{which}_fingerprint": "x" * 64, f"{which}_id": "org/other"}
    )
    with pytest.raises(UserError, match=f"{which} 'org/other', those in .* of 'org/{which}'"):
        read_positions([one, other], ("hidden",))


def test_labels_of_another_draft_are_refused(records: Records, tmp_path: Path) -> None:
    def gate(**fields: object) -> Head:
        config = HeadConfig(**{"hidden_size": HIDDEN, "draft_id": "org/draft", "target_id": "t", **fields})  # type: ignore[arg-type]
        return Head(config, Linear(config.hidden_size))

    infos = read_positions([write_labels(tmp_path, records)], ("entropy",)).infos
    check_head(gate(), infos)  # no fingerprint: the id decides
    check_head(gate(draft_id="moved", draft_fingerprint="d" * 64), infos)
    for wrong in ({"draft_id": "x"}, {"draft_fingerprint": "e" * 64}, {"hidden_size": HIDDEN + 1}):
        with pytest.raises(UserError, match="the labels are of draft 'org/draft'"):
            check_head(gate(**wrong), infos)


def test_kinds_of_the_invented_pair_are_all_there(records: Records) -> None:
    assert sorted(set(records.kind.tolist())) == list(range(len(KINDS)))
