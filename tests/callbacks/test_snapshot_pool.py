from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from mrlm_callbacks.snapshot_pool import SnapshotPool


def pool_of(*numbers: int, size: int = 3, draw: Any = "uniform") -> SnapshotPool:
    pool = SnapshotPool(size, draw)
    for number in numbers:
        pool.add(number, {})
    return pool


def test_the_initial_snapshot_stays_and_the_oldest_of_the_others_leaves() -> None:
    pool = pool_of(0, 10, 20)
    pool.record_score(10, 1.0)
    pool.add(30, {})
    assert sorted(pool.snapshots) == [0, 20, 30]
    assert pool.scores == {}
    again = SnapshotPool(2, "uniform")
    again.load_state_dict(pool.state_dict())
    assert sorted(again.snapshots) == [0, 30], "a smaller pool keeps the newest"


def test_the_draw_is_a_function_of_seed_and_iteration() -> None:
    pool = pool_of(0, 10, 20)
    pool.record_score(0, 1.0)
    drawn = [pool.draw_number(0, iteration) for iteration in range(600)]
    assert drawn == [pool.draw_number(0, iteration) for iteration in range(600)]
    assert drawn != [pool.draw_number(1, iteration) for iteration in range(600)]
    counts = Counter(drawn)
    assert all(150 < counts[number] < 250 for number in (0, 10, 20)), "200 each, 4.3 standard deviations"


def test_the_latest() -> None:
    assert {pool_of(0, 10, 20, draw="latest").draw_number(0, iteration) for iteration in range(50)} == {20}


def test_prioritized_weights() -> None:
    pool = pool_of(0, 10, 20, draw="prioritized")
    pool.record_score(0, 1.0)  # 0.75 * 0.5 + 0.25 = 0.625
    pool.record_score(0, 1.0)  # 0.75 * 0.625 + 0.25 = 0.71875
    pool.record_score(10, 0.0)  # 0.375
    assert [pool.weight(number) for number in (0, 10, 20)] == pytest.approx([0.28125**2, 0.625**2, 0.5**2])
    for _ in range(50):
        pool.record_score(0, 1.0)
    assert pool.weight(0) == pytest.approx(0.01), "a beaten snapshot is still drawn now and then"
    counts = Counter(pool.draw_number(0, iteration) for iteration in range(2000))
    expected = {0: 0.01, 10: 0.390625, 20: 0.25}
    for number, weight in expected.items():
        share = weight / sum(expected.values())
        assert abs(counts[number] / 2000 - share) < 4 * (share * (1 - share) / 2000) ** 0.5
