"""Groups of a checkpoint, divided over the ranks of a run."""

from __future__ import annotations

import logging

import pytest

from mrlm_pl.data.rollout.collectors.asynchronous import groups_ahead
from tests.support.runs.logs import logged_here


def played(iteration: int, number: int) -> list[object]:
    return [iteration, number, ["episode"], [], []]


PARTS = [
    {"published": [[4], [4]], "made_with": {}, "complete": [played(5, 0), played(5, 1)]},
    {"published": [[4], [4]], "made_with": {}, "complete": [played(5, 2), played(5, 3)]},
]


def test_groups_are_shared_out_anew_when_there_are_other_ranks() -> None:
    assert groups_ahead(PARTS, 4, range(1, 2), True) == PARTS[0] | {"complete": [played(5, 1)]}
    whole = PARTS[0] | {"complete": [played(5, number) for number in range(4)]}
    assert groups_ahead(PARTS, 4, range(4), True) == whole


def test_numbers_that_there_are_no_longer_come_along_with_the_last_group() -> None:
    found = groups_ahead(PARTS, 2, range(1, 2), True)
    assert found is not None
    assert found["complete"] == [played(5, 1), played(5, 2), played(5, 3)]


def test_a_run_that_does_not_play_ahead_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert groups_ahead(PARTS, 4, range(4), False) is None
    assert "4 groups of the checkpoint" in caplog.text
    caplog.clear()
    assert groups_ahead([None], 4, range(4), False) is None
    assert not logged_here(caplog)
