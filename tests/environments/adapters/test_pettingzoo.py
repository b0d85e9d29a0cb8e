"""PettingZoo's environments by text: equal to the library's own loops."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import numpy as np
import pytest
from mrlm_environments import PettingZooEnvironment, TextCodec

from mrlm_pl.environment import Message, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.errors import ConfigurationError

pettingzoo = pytest.importorskip("pettingzoo", reason="pettingzoo is not installed")
pytest.importorskip("pygame", reason="pygame-ce is not installed")

LEAVING = "tests.support.environments.leaving_agents"


def task(seed: int = 0) -> Task:
    return Task("pettingzoo", "train", 0, 0, {"seed": seed})


def act(environment: PettingZooEnvironment, **replies: Any) -> Step:
    return environment.step({agent: Message("assistant", str(reply)) for agent, reply in replies.items()})


def shown(observations: Any) -> dict[str, str]:
    return {agent: messages[-1].content for agent, messages in observations.items()}


@pytest.mark.parametrize("name", ["classic/tictactoe_v3", "classic/connect_four_v3", "classic/rps_v2", LEAVING])
def test_agents_in_turn_earn_what_the_library_gives_them(name: str) -> None:
    environment = PettingZooEnvironment(name)
    for seed in range(4):
        original, rng = environment.make(), Random(seed)
        observations, step = environment.reset(task(seed)), Step()
        original.reset(seed=seed)
        expected: dict[str, float] = defaultdict(float)
        earned: dict[str, float] = defaultdict(float)
        for agent in original.agent_iter():
            observation, reward, terminated, truncated, _ = original.last()
            expected[agent] += reward
            if terminated or truncated:
                original.step(None)
                continue
            assert list(observations) == [agent]
            mask = observation["action_mask"] if isinstance(observation, dict) else None
            legal = range(original.action_space(agent).n) if mask is None else np.flatnonzero(mask)
            if mask is not None:
                assert shown(observations)[agent].endswith(f"Legal actions: {', '.join(map(str, legal))}")
            action = rng.choice([int(action) for action in legal])
            original.step(action)
            step = act(environment, **{agent: action})
            for other, reward in step.rewards.items():
                earned[other] += reward
            observations = step.observations
        assert step.done
        assert dict(earned) == dict(expected)


def test_agents_at_once_earn_what_the_library_gives_them() -> None:
    environment = PettingZooEnvironment("classic/rps_v2", {"max_cycles": 6}, parallel=True)
    original, rng = environment.make(), Random(0)
    original.reset(seed=3)
    observations = environment.reset(task(3))
    while True:
        assert list(observations) == ["player_0", "player_1"]
        actions = {agent: rng.randrange(3) for agent in observations}
        _, rewards, terminated, truncated, _ = original.step(actions)
        step = act(environment, **actions)
        assert step.rewards == {agent: float(reward) for agent, reward in rewards.items()}
        if step.done:
            break
        observations = step.observations
    assert all(truncated.values())
    assert not any(terminated.values())
    assert (step.truncated, step.stop_reason) == (True, "truncated")


def test_a_board_is_shown_from_the_side_of_the_agent_that_moves() -> None:
    environment = PettingZooEnvironment("classic/tictactoe_v3")
    first = shown(environment.reset(task()))
    actions = ", ".join(map(str, range(9)))
    assert first == {
        "player_1": f"classic/tictactoe_v3. You are player_1. Reply with one of the actions {actions}.\n"
        f"0 0 0\n0 0 0\n0 0 0\nLegal actions: {actions}"
    }
    second = shown(act(environment, player_1=0).observations)["player_2"].splitlines()
    assert second[1:] == ["2 0 0", "0 0 0", "0 0 0", "Legal actions: 1, 2, 3, 4, 5, 6, 7, 8"]
    third = shown(act(environment, player_2=4).observations)["player_1"].splitlines()
    assert third[:3] == ["1 0 0", "0 2 0", "0 0 0"]
    for agent, cell in (("player_1", 1), ("player_2", 8)):
        act(environment, **{agent: cell})
    step = act(environment, player_1=2)
    assert (step.done, step.stop_reason, step.truncated) == (True, "terminated", False)
    assert step.rewards == {"player_1": 1.0, "player_2": -1.0}


@pytest.mark.parametrize("parallel", [False, True])
def test_agents_leave_one_by_one(parallel: bool) -> None:
    environment = PettingZooEnvironment(LEAVING, parallel=parallel)
    rounds = [{"a": 0, "b": 1, "c": 0}, {"a": 0, "c": 0}, {"a": 0, "c": 1}]
    due = list(environment.reset(task()))
    earned: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    for actions in rounds:
        for group in [actions] if parallel else [{agent: action} for agent, action in actions.items()]:
            assert due == list(group)
            step = act(environment, **group)
            due = list(step.observations)
            for agent, reward in step.rewards.items():
                earned[agent] += [reward] if reward else []
    assert earned == {"a": [0.5, 0.5, 0.5], "b": [1.0], "c": [0.5, 0.5, 3.0]}
    assert (step.done, step.truncated) == (True, True), "the last one was still there after the last round"


def test_the_end_is_no_limit_where_the_last_agent_leaves_by_itself() -> None:
    environment = PettingZooEnvironment(LEAVING, parallel=True, success_at=0.9)
    environment.reset(task())
    step = act(environment, a=1, b=1, c=1)
    assert (step.done, step.truncated, step.stop_reason, step.success) == (True, False, "terminated", True)


def test_only_agents_without_a_legal_action_are_asked_again() -> None:
    environment = PettingZooEnvironment(LEAVING, parallel=True, retries=1)
    environment.reset(task())
    step = act(environment, a=0, b="?", c=1)
    assert shown(step.observations) == {"b": "Your reply names no action. Reply with one of the actions 0, 1."}
    step = act(environment, b=0)
    assert step.rewards == {"a": 0.5, "b": 0.5, "c": 1.0}
    act(environment, a=0, b="?")
    step = act(environment, b="?")
    assert (step.done, step.stop_reason, step.rewards) == (True, "illegal_action", {"b": -1.0})


def test_a_reward_before_the_first_decision_is_counted_with_it() -> None:
    environment = PettingZooEnvironment("classic/rps_v2")
    environment.reset(task())
    assert environment._pay_out({"player_0": 1.0, "player_1": 2.0}) == {}
    assert act(environment, player_0=0).rewards == {"player_0": 1.0}
    assert act(environment, player_1=1).rewards == {"player_0": -1.0, "player_1": 3.0}


class Screen(TextCodec):
    """A coarse grid of the screen's brightness."""

    def observation(self, value: Any, agent: str) -> str:
        return super().observation(value.max(-1)[::40, ::40], agent)


@pytest.mark.parametrize(
    "settings",
    [
        {"id": "classic/tictactoe_v3"},
        {"id": "classic/connect_four_v3", "retries": 0},
        {"id": "classic/rps_v2", "settings": {"max_cycles": 4}, "codec": TextCodec(["rock", "paper", "scissors"])},
        {"id": "classic/rps_v2", "settings": {"max_cycles": 4}, "parallel": True},
        {"id": "butterfly/knights_archers_zombies_v11", "settings": {"max_cycles": 5}, "parallel": True},
        {"id": "butterfly/cooperative_pong_v6", "settings": {"max_cycles": 4}, "parallel": True, "codec": Screen()},
        {"id": LEAVING},
    ],
    ids=lambda settings: settings["id"],
)
def test_it_keeps_the_contract(settings: dict[str, Any]) -> None:
    check_environment(PettingZooEnvironment(**settings), tasks_per_split=2).raise_on_failure()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "classic/tictactoe_v9"}, "v3"),
        ({"id": "classic/tictactoe_v3", "parallel": True}, "tictactoe"),
        ({"id": "no_such_module"}, "no_such_module"),
        ({"id": "pettingzoo.test.example_envs.generated_agents_env_v0"}, "possible_agents"),
    ],
    ids=str,
)
def test_a_mistake_is_named_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PettingZooEnvironment(**settings)
