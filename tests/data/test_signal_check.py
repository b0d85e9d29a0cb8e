from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from mrlm_pl.data.signal_check import SignalCheck
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Task, Trajectory, Turn


def episode(reward: float) -> Episode:
    turn = Turn("x", 0, 1, 2, reward, {"r": reward}, "stop", "main", 0, "e")
    row = Trajectory("x", "main", (1, 2), (False, True), (0.0, -0.5), (turn,))
    return Episode("0", Task("e", "train", 0), "g", 0, 0, {"x": (row,)}, "end")


FLAT = {"rollout/zero_variance_groups": 1.0, "rollout/truncated_turns": 0.0}


@pytest.mark.parametrize(
    ("sampling", "metrics", "reward", "cause"),
    [
        (Sampling(temperature=0.0), FLAT, 0.0, "temperature is 0"),
        (Sampling(max_tokens=7), {**FLAT, "rollout/truncated_turns": 1.0}, 0.0, "max_tokens 7"),
        (Sampling(), {**FLAT, "rollout/success": 1.0}, 1.0, "harder tasks"),
        (Sampling(), {**FLAT, "rollout/success": 0.0}, 0.1, "no episode earns anything"),
        (Sampling(), FLAT, 0.0, "no episode earns anything"),
        (Sampling(), FLAT, 0.5, "does not depend on the reply"),
    ],
)
def test_the_third_iteration_without_a_signal_warns_of_the_cause(
    sampling: Sampling, metrics: Mapping[str, float], reward: float, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    check = SignalCheck(sampling, compares=True)
    with caplog.at_level(logging.WARNING):
        for iteration in range(10):
            check.see(metrics, [episode(reward)])
            assert len(caplog.records) == (iteration >= 2), "once, after three iterations in a row"
    assert cause in caplog.text


def test_one_iteration_with_a_signal_starts_the_count_again(caplog: pytest.LogCaptureFixture) -> None:
    check = SignalCheck(Sampling(), compares=True)
    with caplog.at_level(logging.WARNING):
        for flat in (1.0, 1.0, 0.9, 1.0, 1.0):
            check.see({"rollout/zero_variance_groups": flat}, [episode(0.0)])
    assert not caplog.records


def test_an_algorithm_that_does_not_compare_needs_rewards_that_differ(caplog: pytest.LogCaptureFixture) -> None:
    check = SignalCheck(Sampling(), compares=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check.see(FLAT, [episode(0.0), episode(1.0)])
        assert not caplog.records, "groups of one always have equal returns"
        for _ in range(3):
            check.see(FLAT, [episode(1.0), episode(1.0)])
    assert "all rewards are equal" in caplog.text


def test_turns_that_are_all_truncated_are_named_although_rewards_differ(caplog: pytest.LogCaptureFixture) -> None:
    check = SignalCheck(Sampling(max_tokens=5), compares=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            check.see({"rollout/zero_variance_groups": 0.0, "rollout/truncated_turns": 1.0}, [episode(0.0)])
    assert len(caplog.records) == 1
    assert "max_tokens 5" in caplog.text
