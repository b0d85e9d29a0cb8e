from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from mrlm_pl.algorithms import OnPolicyDistillation
from mrlm_pl.data.rollout.history import SignalCheck
from mrlm_pl.data.rollout.metrics import AgentReturns, CollectionSums
from mrlm_pl.engines import Sampling
from mrlm_pl.engines.base import PolicySampling
from mrlm_pl.episode import Episode, Task, Trajectory, Turn
from tests.support.runs.logs import logged_here


def returns(reward: float) -> frozenset[AgentReturns]:
    return frozenset({(("x", reward),)})


def episode(**rewards: float) -> Episode:
    rows = {}
    for agent, reward in rewards.items():
        turn = Turn(agent, 0, 1, 2, reward, {"r": reward}, "stop", "main", 0, "e")
        rows[agent] = (Trajectory(agent, "main", (1, 2), (False, True), (0.0, -0.5), (turn,)),)
    return Episode("0", Task("e", "train", 0), "g", 0, 0, rows, "end")


FLAT = {"rollout/zero_variance_groups": 1.0, "rollout/truncated_turns": 0.0}


@pytest.mark.parametrize(
    ("sampling", "metrics", "reward", "cause"),
    [
        (Sampling(temperature=0.0), FLAT, 0.0, "temperature is 0"),
        (Sampling(max_tokens=7), {**FLAT, "rollout/truncated_turns": 1.0}, 0.0, "max_tokens 7, "),
        (
            Sampling(max_tokens=70, max_context=90),
            {**FLAT, "rollout/truncated_turns": 1.0},
            0.0,
            "data.sampling.max_tokens 70 or max_context 90, before",
        ),
        (Sampling(), {**FLAT, "rollout/success": 1.0}, 1.0, "harder tasks"),
        (Sampling(), {**FLAT, "rollout/success": 0.0}, 0.0, "no episode earns anything: the tasks are too hard"),
        (
            Sampling(),
            {**FLAT, "rollout/success": 0.0},
            0.1,
            "no episode succeeds, and all of a group earn the same, 0.1: the tasks are too hard",
        ),
        (Sampling(), FLAT, 0.0, "no episode earns anything"),
        (Sampling(), {**FLAT, "rollout/stop/turn_limit": 1.0}, 0.0, "every episode is truncated at data.max_turns"),
        (Sampling(), FLAT, 0.5, "the rewards are 0.5: the policy solves or fails each task in every reply, or"),
        (Sampling(), {**FLAT, "rollout/entropy": 0.04}, 0.5, "nearly deterministic"),
        (Sampling(), {**FLAT, "rollout/entropy": 0.06}, 0.5, "does not depend on the reply"),
        (Sampling(), {**FLAT, "rollout/entropy": 0.04, "rollout/success": 1.0}, 1.0, "harder tasks"),
        (Sampling(max_tokens=1), {**FLAT, "rollout/truncated_turns": 1.0}, 0.5, "does not depend on the reply"),
    ],
)
def test_the_third_iteration_without_a_signal_warns_of_the_cause(
    sampling: Sampling, metrics: Mapping[str, float], reward: float, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    check = SignalCheck(sampling, compares=True)
    with caplog.at_level(logging.WARNING):
        for iteration in range(10):
            check.add(metrics, returns(reward))
            assert len(logged_here(caplog)) == (iteration >= 2), "once, after three iterations in a row"
    assert cause in caplog.text


@pytest.mark.parametrize(("success", "cause"), [({}, "`success_at`"), ({"rollout/success": 0.0}, "too hard")])
def test_a_distillation_without_successes_is_not_explained_by_returns(
    success: Mapping[str, float], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    check = SignalCheck(Sampling(), True, OnPolicyDistillation.no_signal_reason)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check.add({**FLAT, **success}, returns(0.5))
    assert "no episode counts as solved" in caplog.text
    assert cause in caplog.text
    assert "returns" not in caplog.text


@pytest.mark.parametrize(("rewards", "said"), [((1.0,), "now 1"), ((0.25, 1.0), "now 0.25 to 1")])
def test_rewards_that_differed_before_depend_on_the_reply(
    rewards: tuple[float, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    check = SignalCheck(Sampling(), compares=True)
    with caplog.at_level(logging.WARNING):
        for flat in (0.5, 1.0, 1.0, 1.0):
            found = frozenset().union(*map(returns, rewards))
            check.add({"rollout/zero_variance_groups": flat, "rollout/entropy": 0.3}, found)
    assert f"has converged: rewards differed before and are {said}; use harder tasks" in caplog.text
    assert "does not depend" not in caplog.text


def test_one_iteration_with_a_signal_starts_the_count_again(caplog: pytest.LogCaptureFixture) -> None:
    check = SignalCheck(Sampling(), compares=True)
    with caplog.at_level(logging.WARNING):
        for flat in (1.0, 1.0, 0.9, 1.0, 1.0):
            check.add({"rollout/zero_variance_groups": flat}, returns(0.0))
    assert not logged_here(caplog)


def test_an_algorithm_that_does_not_compare_needs_rewards_that_differ(caplog: pytest.LogCaptureFixture) -> None:
    check = SignalCheck(Sampling(), compares=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check.add(FLAT, returns(0.0) | returns(1.0))
        assert not logged_here(caplog), "groups of one always have equal returns"
        for _ in range(3):
            check.add(FLAT, returns(1.0))
    assert "the rewards of each agent are equal" in caplog.text


def test_episodes_that_wait_longer_for_a_thread_than_for_their_environment_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = SignalCheck(Sampling(), compares=True)
    with caplog.at_level(logging.WARNING):
        for queue, environment in ((2.3, 0.1), (3.0, 3.5)):  # it waits for the cores; less than half of the time
            check.add({"rollout/seconds/queue": queue, "rollout/seconds/environment": environment}, returns(0.0))
        assert not logged_here(caplog)
        for queue in (3.0, 4.0):
            check.add({"rollout/seconds/queue": queue, "rollout/seconds/environment": 0.9}, returns(0.0))
    assert len(logged_here(caplog)) == 1
    assert "waits 3.0 s for a thread and 0.9 s for its environment; raise data.workers" in caplog.text


def test_turns_that_are_all_truncated_are_named_although_rewards_differ(caplog: pytest.LogCaptureFixture) -> None:
    check = SignalCheck(Sampling(max_tokens=5), compares=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            check.add({"rollout/zero_variance_groups": 0.0, "rollout/truncated_turns": 1.0}, returns(0.0))
    assert len(logged_here(caplog)) == 1
    assert "max_tokens 5" in caplog.text


@pytest.mark.parametrize(
    ("sampling", "warnings"),
    [
        (Sampling(max_tokens=5), 1),
        (Sampling(max_tokens=1), 0),
        (Sampling(max_tokens=1, policies={"writer": PolicySampling(max_tokens=5)}), 1),
    ],
)
def test_truncation_is_named_once_in_a_run_and_not_where_every_turn_is_one_token(
    sampling: Sampling, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    check = SignalCheck(sampling, compares=True)
    with caplog.at_level(logging.WARNING):
        for truncated in (1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0):
            check.add({"rollout/zero_variance_groups": 0.0, "rollout/truncated_turns": truncated}, returns(0.0))
    assert len(logged_here(caplog)) == warnings


def test_one_episode_an_iteration_whose_reward_changes_is_a_signal(caplog: pytest.LogCaptureFixture) -> None:
    check = SignalCheck(Sampling(), compares=False)
    with caplog.at_level(logging.WARNING):
        for reward in (0.0, 1.0, 0.0, 0.0, 1.0, 1.0):
            check.add(FLAT, returns(reward))
        assert not logged_here(caplog)
        check.add(FLAT, returns(1.0))
    assert "the rewards of each agent are equal" in caplog.text, "the third in a row"


def test_an_episode_of_each_rank_counts(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [CollectionSums.of([episode(x=reward)], 1.0) for reward in (0.0, 1.0)]
    check = SignalCheck(Sampling(), compares=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check.add(FLAT, ranks[0].plus(ranks[1]).returns)
    assert not logged_here(caplog)


def test_a_zero_sum_game_has_a_signal_although_the_mean_over_the_agents_is_always_0(
    caplog: pytest.LogCaptureFixture,
) -> None:
    won, lost = CollectionSums.of([episode(x=1.0, y=-1.0), episode(x=-1.0, y=1.0)], 1.0), [episode(x=-1.0, y=1.0)]
    check = SignalCheck(Sampling(), compares=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            check.add(FLAT, won.returns)
        assert not logged_here(caplog)
        for _ in range(3):
            check.add(FLAT, CollectionSums.of(lost, 1.0).returns)
    assert "rewards differed before and are now -1 to 1" in caplog.text
