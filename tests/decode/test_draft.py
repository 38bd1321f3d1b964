"""What a decoding leaves behind."""

from __future__ import annotations

import pytest

from sprinter.decode.draft import Origin, Record, Stats, Token


def test_tokens_per_target_call_needs_a_call() -> None:
    assert Stats(new_tokens=7).tokens_per_target_call is None
    assert Stats(new_tokens=7, target_calls=2).tokens_per_target_call == 3.5


def test_tokens_per_second_leaves_out_closing_passes() -> None:
    assert Stats(new_tokens=12, wall_s=5.0, closing_s=2.0).tokens_per_s == 4.0
    assert Stats().tokens_per_s == 0.0
    assert Stats(new_tokens=3, wall_s=1.0, closing_s=1.0).tokens_per_s == 0.0


def test_other_time_is_what_no_part_claims() -> None:
    stats = Stats(wall_s=10.0, prefill_s=1.0, draft_s=2.0, gate_s=0.5, target_s=3.0, closing_s=1.5)
    assert stats.other_s == pytest.approx(2.0)
    assert Stats(wall_s=1.0, draft_s=1.0 + 1e-9).other_s == 0.0


def test_counts_follow_from_the_tokens() -> None:
    record = Record()
    origins = [Origin.TRUSTED, Origin.TRUSTED, Origin.ACCEPTED, Origin.BONUS, Origin.TRUSTED]
    for origin, drift in zip(origins, [0.2, 0.4, 0.0, 0.0, None], strict=True):
        record.tokens.append(Token(1, origin, 1, drift))
    stats = record.count()
    assert stats is record.stats
    assert (stats.new_tokens, stats.trusted, stats.accepted) == (5, 3, 1)
    assert stats.mean_drift == pytest.approx(0.15)
    assert stats.drift_coverage == 0.8
    assert stats.worst_drift == 0.4 and stats.drift_sum == pytest.approx(0.6)
    record.tokens[-1].drift = 1.0
    assert record.count().mean_drift == pytest.approx(0.32)
    assert stats.drift_coverage == 1.0
    assert stats.worst_drift == 1.0 and stats.drift_sum == pytest.approx(1.6)


def test_an_empty_record() -> None:
    stats = Record().count()
    assert (stats.new_tokens, stats.mean_drift, stats.drift_coverage) == (0, None, 0.0)
    assert stats.worst_drift is None and stats.drift_sum is None


def test_origins_are_their_names() -> None:
    assert [str(origin) for origin in Origin] == ["trusted", "accepted", "replacement", "bonus", "target"]


def test_records_share_nothing() -> None:
    one, other = Record(), Record()
    one.tokens.append(Token(0, Origin.TARGET, 1))
    one.stats.rounds = 3
    one.accept_lengths.append(1)
    assert other.tokens == [] and other.accept_lengths == [] and other.stats == Stats()
