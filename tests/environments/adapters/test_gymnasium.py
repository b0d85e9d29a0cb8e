"""Gymnasium's environments by text: equal to the library's own loop."""

from __future__ import annotations

import subprocess
import sys
from random import Random
from typing import Any

import numpy as np
import pytest
from mrlm_environments import GymnasiumEnvironment, TextCodec

from mrlm_pl.environment import Message, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.errors import ConfigurationError

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")


def task(seed: int) -> Task:
    return Task("gymnasium", "train", 0, 0, {"seed": seed})


def act(environment: GymnasiumEnvironment, reply: Any) -> Step:
    return environment.step({"agent": Message("assistant", str(reply))})


def shown(observations: Any) -> str:
    ((message,),) = observations.values()
    return message.content


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1", "CartPole-v1"])
def test_an_episode_is_that_of_the_library(name: str) -> None:
    settings = {"max_episode_steps": 30}
    environment, original = GymnasiumEnvironment(name, settings), gymnasium.make(name, **settings)
    codec = TextCodec()
    for seed in range(3):
        seen, info = original.reset(seed=seed)
        lines = shown(environment.reset(task(seed))).splitlines()
        actions = range(original.action_space.n)
        instructions = f"{name}. Reply with one of the actions {', '.join(map(str, actions))}."
        assert lines[:2] == [instructions, codec.observation(seen, "agent")]
        rng, ended = Random(seed), False
        while not ended:
            mask = info.get("action_mask")
            action = rng.choice([action for action in actions if mask is None or mask[action]])
            seen, reward, terminated, truncated, info = original.step(action)
            step, ended = act(environment, f"I choose {action}."), terminated or truncated
            assert (step.rewards, step.done) == ({"agent": float(reward)}, ended)
            if not ended:
                assert shown(step.observations).splitlines()[0] == codec.observation(seen, "agent")
        assert step.stop_reason == ("terminated" if terminated else "truncated")
        assert step.truncated == (truncated and not terminated)
    original.close()
    environment.close()


@pytest.mark.parametrize(
    "environment",
    [
        {"id": "FrozenLake-v1", "settings": {"max_episode_steps": 20}},
        {"id": "Taxi-v4", "settings": {"max_episode_steps": 10}, "render": True, "retries": 0},
        {"id": "Blackjack-v1", "codec": TextCodec(["stick", "hit"])},
    ],
    ids=lambda settings: settings["id"],
)
def test_it_keeps_the_contract(environment: dict[str, Any]) -> None:
    check_environment(GymnasiumEnvironment(**environment), tasks_per_split=2).raise_on_failure()


def test_an_illegal_action_is_explained_once_and_then_ends_the_episode() -> None:
    environment = GymnasiumEnvironment("Taxi-v4", retries=1, penalty=-3.0)
    legal = shown(environment.reset(task(4))).splitlines()[-1]
    assert legal.startswith("Legal actions: ")
    closed = next(action for action in range(6) if str(action) not in legal)
    step = act(environment, closed)
    assert shown(step.observations) == f"{closed} is not legal. {legal}"
    assert (step.rewards, step.metrics) == ({}, {"illegal": 1.0, "illegal_of": 1.0})
    step = act(environment, legal.rpartition(" ")[2])
    assert (step.rewards, step.done) == ({"agent": -1.0}, False)
    assert step.metrics == {"illegal": 1.0, "illegal_of": 2.0}, "counts of the episode"
    for _ in range(2):  # attempts are counted for each observation
        step = act(environment, "no idea")
    assert (step.done, step.stop_reason, step.truncated) == (True, "illegal_action", False)
    assert step.metrics == {"illegal": 3.0, "illegal_of": 4.0}
    assert (step.rewards, step.components) == ({"agent": -3.0}, {"agent": {"penalty": -3.0}})


def test_a_refused_reply_leaves_the_environment_as_it_was() -> None:
    endings = []
    for replies in ((2, 2, 1), (2, "x", 2, "y", 1)):
        environment = GymnasiumEnvironment("FrozenLake-v1")  # slippery: it draws in each step
        environment.reset(task(11))
        for reply in replies:
            step = act(environment, reply)
        endings.append((step.done, step.rewards, step.observations))
    assert endings[0] == endings[1]


def test_names_render_and_success_of_frozen_lake() -> None:
    environment = GymnasiumEnvironment(
        "FrozenLake-v1",
        {"desc": ["SF", "HG"], "is_slippery": False},
        TextCodec(["left", "down", "right", "up"]),
        prompt="Cross the lake as {agent}.",
        render=True,
        success_at=1.0,
    )
    assert shown(environment.reset(task(0))) == "Cross the lake as agent.\n[S]F\nHG"
    assert shown(act(environment, "right").observations) == "  (Right)\nS[F]\nHG"
    step = act(environment, "DOWN")
    assert (step.rewards, step.success, step.stop_reason) == ({"agent": 1.0}, True, "terminated")
    environment.reset(task(0))
    assert act(environment, "down").success is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "FrozenLakes-v1"}, "FrozenLakes"),
        ({"id": "FrozenLake-v1", "settings": {"slippery": True}}, "slippery"),
        ({"id": "FrozenLake-v1", "prompt": "{what}"}, "what"),
        ({"id": "FrozenLake-v1", "codec": TextCodec(["a"])}, "has 1 names; give 4"),
        ({"id": "FrozenLake-v1", "retries": -1}, "retries is -1"),
    ],
)
def test_a_mistake_is_named_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GymnasiumEnvironment(**settings)


class Masked(gymnasium.Env):  # type: ignore[type-arg]
    """Earns its action's first number; the info has a mask."""

    observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self, action_space: Any, mask: Any) -> None:
        self.action_space, self.mask = action_space, mask

    def reset(self, **settings: Any) -> tuple[int, dict[str, Any]]:
        return 0, {"action_mask": self.mask}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 1, float(action[0]), True, False, {}


def test_a_mask_without_a_text_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gymnasium.registry, "Masked-v0", gymnasium.envs.registration.EnvSpec("Masked-v0", Masked))
    with pytest.raises(ConfigurationError, match="has no text form"):
        GymnasiumEnvironment(
            "Masked-v0", {"action_space": gymnasium.spaces.MultiBinary(3), "mask": np.ones(3, np.int8)}
        )


def test_a_missing_library_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['gymnasium'] = sys.modules['pettingzoo'] = sys.modules['textarena'] = None\n"
        "import mrlm_environments as m\n"
        "for cls in (m.GymnasiumEnvironment, m.PettingZooEnvironment, m.TextArenaEnvironment):\n"
        "    try: cls('a')\n"
        "    except Exception as error: print(type(error).__name__, error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == [
        f"ConfigurationError {name} is not installed; pip install 'mrlm[{name}]'"
        for name in ("gymnasium", "pettingzoo", "textarena")
    ]
