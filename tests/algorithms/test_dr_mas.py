"""Dr.MAS: statistics over an agent's own steps, and the filter of agents without signal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlm_pl.advantages import group_normalized_advantages, step_normalized_advantages
from mrlm_pl.algorithms import GRPO, DrMAS
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.losses import batch_totals
from mrlm_pl.policy import Policy


def played(agent: str, reward: float, turns: int) -> tuple[Trajectory, ...]:
    """A row of two observed tokens and one sampled token for each turn, with an observed one between turns."""
    acts = [place for turn in range(turns) for place in (True, False)][:-1]
    mask = (False, False, *acts)
    places = [place for place, action in enumerate(mask) if action]
    made = tuple(
        Turn(agent, n, place, place + 1, reward if n == 0 else 0.0, {}, "stop", agent, 0, "e")
        for n, place in enumerate(places)
    )
    ids = tuple(range(8, 8 + len(mask)))
    return (Trajectory(agent, agent, ids, mask, tuple(-1.0 * action for action in mask), made),)


def episode(number: int, group: str, agents: Mapping[str, tuple[float, int]], error: str | None = None) -> Episode:
    rows = {agent: played(agent, reward, turns) for agent, (reward, turns) in agents.items()}
    return Episode(str(number), Task("t", "train", 0), group, 0, 0, {} if error else rows, "end", error=error)


def prepared(cls: Any, model_folder: Path, trainer: Any, episodes: list[Episode], **options: Any) -> Any:
    policies = {"solver": Policy(str(model_folder)), "critic": Policy(str(model_folder))}
    algorithm = cls(policies, **options)
    algorithm.configure_model()
    algorithm.trainer = trainer
    with torch.no_grad():
        return algorithm, algorithm.prepare(episodes, Sampling(max_tokens=8))


def test_a_return_counts_once_for_every_step(model_folder: Path, quiet_trainer: Any) -> None:
    # The solver's steps have the returns 1, 1, 4: mean 2, variance (1 + 1 + 4) / 2 = 3. The critic acts once in each
    # episode, with the returns 0 and 1. The failed episode counts nowhere.
    episodes = [
        episode(0, "g", {"solver": (1.0, 2), "critic": (0.0, 1)}),
        episode(1, "g", {}, error="away"),
        episode(2, "g", {"solver": (4.0, 1), "critic": (1.0, 1)}),
    ]
    _, rows = prepared(DrMAS, model_folder, quiet_trainer(), episodes)
    of_solver, of_critic = rows["solver"].advantages, rows["critic"].advantages
    assert of_solver[:, 2].tolist() == pytest.approx([-1 / 3**0.5, 2 / 3**0.5], abs=1e-5)
    assert of_solver[0].tolist() == pytest.approx([0, 0, -1 / 3**0.5, 0, -1 / 3**0.5], abs=1e-5), "every turn"
    assert of_critic[:, 2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    _, rows = prepared(GRPO, model_folder, quiet_trainer(), episodes)
    assert rows["solver"].advantages[:, 2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)


def test_with_one_step_each_it_is_grpo() -> None:
    rewards, groups = torch.tensor([1.0, 2, 4, 9, 1, 0]), torch.tensor([3, 3, 3, 3, 5, 5])
    expected = group_normalized_advantages(rewards, groups)
    assert torch.equal(step_normalized_advantages(rewards, groups, torch.ones(6, dtype=torch.int64)), expected)


def test_an_episode_without_a_step_of_the_agent_counts_nowhere() -> None:
    rewards, steps = torch.tensor([1.0, 100.0, 0.0]), torch.tensor([3, 0, 1])
    advantages = step_normalized_advantages(rewards, torch.zeros(3, dtype=torch.int64), steps)
    assert advantages.tolist() == pytest.approx([0.5, 0.0, -1.5], abs=1e-5)  # 1, 1, 1, 0


def test_equal_returns_are_exactly_zero_and_one_episode_warns() -> None:
    same = torch.tensor([0.1, 0.1, 0.1])
    assert (
        step_normalized_advantages(same, torch.zeros(3, dtype=torch.int64), torch.tensor([3, 1, 7])).tolist()
        == [0.0] * 3
    )
    with pytest.warns(RuntimeWarning, match="a group of one episode"):
        step_normalized_advantages(torch.tensor([5.0]), torch.tensor([1]), torch.tensor([4]))


def test_an_agent_without_signal_is_left_out_and_counted(model_folder: Path, quiet_trainer: Any) -> None:
    # In group g the critic earns the same everywhere; in h the solver. The solver's middle episode of g lies on the
    # mean, and still counts.
    table = [("g", 0.0, 5.0), ("g", 1.0, 5.0), ("g", 2.0, 5.0), ("h", 3.0, 0.0), ("h", 3.0, 1.0), ("k", 1.0, 0.0)]
    table += [("k", 0.0, 1.0)]
    episodes = [
        episode(n, group, {"solver": (solver, 1), "critic": (critic, 2)})
        for n, (group, solver, critic) in enumerate(table)
    ]
    algorithm, rows = prepared(DrMAS, model_folder, quiet_trainer(), episodes, zero_variance="exclude")
    assert rows["solver"].action_mask.any(-1).tolist() == [True] * 3 + [False] * 2 + [True] * 2
    assert rows["critic"].action_mask.any(-1).tolist() == [False] * 3 + [True] * 4
    assert [batch_totals(rows[name].action_mask).tokens for name in ("solver", "critic")] == [5.0, 8.0]
    assert algorithm.rows_with_gradient(rows["solver"]).tolist() == [0, 2, 5, 6]
    counted = algorithm.metrics.take_rollout()
    assert counted == {"train/solver/filtered_agents": pytest.approx(1 / 3), "train/critic/filtered_agents": 1 / 3}
    algorithm, rows = prepared(DrMAS, model_folder, quiet_trainer(), episodes)
    assert [batch_totals(rows[name].action_mask).tokens for name in ("solver", "critic")] == [7.0, 14.0]
    assert algorithm.metrics.take_rollout() == {}


class Asks(Environment):
    """The solver speaks one to three times, then the critic once; the solver alone earns by its answers."""

    name = "asks"
    agents = ("solver", "critic")

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(8)])

    def reset(self, task: Task) -> Observations:
        self.said: list[str] = []
        return {"solver": [Message("user", f"Say {task.data['n']}")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        if "critic" in actions:
            digits = sum(map(str.isdigit, "".join(self.said)))
            return Step(rewards={"solver": digits / 8, "critic": 0.5}, done=True, stop_reason="end")
        self.said.append(actions["solver"].content)
        more = len(self.said) < 3 and len(self.said[-1]) % 2 == 0
        return Step({"solver" if more else "critic": [Message("user", "And?")]})


def test_a_run_with_turns_of_different_numbers(model_folder: Path, quiet_trainer: Any) -> None:
    policies = {name: Policy(str(model_folder), learning_rate=1e-3) for name in ("solver", "critic")}
    trainer = quiet_trainer()
    data = RolloutDataModule(Asks(), groups=2, group_size=4, iterations=2, sampling=Sampling(max_tokens=6))
    algorithm = DrMAS(policies, zero_variance="exclude")
    trainer.fit(algorithm, data)
    metrics = trainer.callback_metrics
    assert metrics["train/solver/grad_norm"] > 0
    assert metrics["train/solver/filtered_agents"] == 0
    assert metrics["train/critic/filtered_agents"] == 1
    assert "train/critic/grad_norm" not in metrics, "an agent with equal rewards is not updated"
