"""Role-conditioned advantage estimation: the baselines of the roles, their order over ranks, and a resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.advantages import role_baselines
from mrlm_pl.algorithms import RAE, rae
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError, NonFiniteError
from mrlm_pl.policy import Policy


def episode(number: int, game: str, rewards: dict[str, float], error: str | None = None) -> Episode:
    def row(agent: str, reward: float) -> Trajectory:
        turn = Turn(agent, 0, 2, 4, reward, {"r": reward}, "stop", "main", 0, "e")
        ids = (8, 9, 10, 11 + number)
        return Trajectory(agent, "main", ids, (False,) * 2 + (True,) * 2, (0.0,) * 2 + (-1.0,) * 2, (turn,))

    rows = {} if error else {agent: (row(agent, reward),) for agent, reward in rewards.items()}
    return Episode(str(number), Task(game, "train", 0), "g", 0, 0, rows, "end", error=error)


def ready(model_folder: Path, trainer: Any, **options: Any) -> RAE:
    algorithm = RAE({"main": Policy(str(model_folder))}, **options)
    algorithm.configure_model()
    algorithm.trainer = trainer
    return algorithm


def advantages(algorithm: RAE, episodes: list[Episode]) -> list[float]:
    with torch.no_grad():
        return algorithm.prepare(episodes, Sampling(max_tokens=8))["main"].advantages[:, 2].tolist()


def test_an_advantage_is_measured_from_the_baseline_before_it(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm = ready(model_folder, quiet_trainer(), baseline_decay=0.75)
    episodes = [
        episode(0, "poker", {"first": 1.0, "second": -1.0}),
        episode(1, "poker", {}, error="away"),
        episode(2, "poker", {"first": 1.0, "second": -1.0}),
        episode(3, "chess", {"first": 2.0}),
    ]
    # first: b is 0, 0.25, 0.4375; second the negative; chess has its own baseline.
    assert advantages(algorithm, episodes) == [1.0, -1.0, 0.75, -0.75, 2.0]
    after = {"poker/first": 0.4375, "poker/second": -0.4375, "chess/first": 0.5}
    assert algorithm.progress()["role_baselines"] == after
    assert algorithm.metrics.take_rollout() == {f"train/baseline/{role}": level for role, level in after.items()}
    assert advantages(algorithm, [episode(4, "chess", {"first": 2.0})]) == [1.5]


def test_the_papers_decay_is_the_default() -> None:
    found, after = role_baselines(torch.tensor([1.0, 0.0]), ["g/a"] * 2, {"g/b": 7.0}, decay=0.95)
    assert found.tolist() == pytest.approx([0.0, 0.05])
    assert after == {"g/b": 7.0, "g/a": pytest.approx(0.95 * 0.05)}
    assert RAE().baseline_decay == 0.95


def test_a_reward_that_is_no_number_stops_the_run() -> None:
    with pytest.raises(NonFiniteError, match="row 1 is nan"):
        role_baselines(torch.tensor([1.0, float("nan")]), ["g/a"] * 2, {}, decay=0.5)


def test_ranks_have_the_baselines_of_one_process(
    model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second of two ranks: its first episode is the third of all.
    other = [("g/a", 4.0), ("g/a", 4.0)]
    monkeypatch.setattr(rae, "gather_ranks", lambda trainer, own: [other, own])
    monkeypatch.setattr(rae, "data_parallel_rank", lambda trainer: (1, 2))
    algorithm = ready(model_folder, quiet_trainer(), baseline_decay=0.5)
    assert advantages(algorithm, [episode(2, "g", {"a": 4.0}), episode(3, "g", {"a": 0.0})]) == [1.0, -3.5]
    assert algorithm.progress()["role_baselines"] == {"g/a": 1.75}


class Higher(Environment):
    """Both name a digit at once; the higher takes 1 from the other."""

    name = "higher"
    agents = ("first", "second")

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(8)])

    def reset(self, task: Task) -> Observations:
        return {agent: [Message("user", f"{agent} {task.data['n']}")] for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        first, second = (sum(map(ord, actions[agent].content)) for agent in self.agents)
        paid = float((first > second) - (first < second))
        return Step(rewards={"first": paid, "second": -paid}, done=True, stop_reason="end")


def fit(model_folder: Path, trainer: Any, ckpt: Any = None) -> RAE:
    algorithm = RAE({"main": Policy(str(model_folder), learning_rate=1e-3)})
    data = RolloutDataModule(Higher(), groups=2, group_size=2, iterations=4, sampling=Sampling(max_tokens=4))
    trainer.fit(algorithm, data, ckpt_path=ckpt)
    return algorithm


@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_baselines(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    trainer = quiet_trainer()
    whole = fit(model_folder, trainer)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(model_folder, quiet_trainer(enable_checkpointing=True, callbacks=[saver]))
    again = fit(model_folder, quiet_trainer(), ckpt=tmp_path / "step=2.ckpt")
    baselines = whole.progress()["role_baselines"]
    assert set(baselines) == {"higher/first", "higher/second"}
    assert baselines["higher/first"] == -baselines["higher/second"] != 0, "zero-sum"
    assert again.progress() == whole.progress()
    assert float(trainer.callback_metrics["train/baseline/higher/first"]) == pytest.approx(baselines["higher/first"])
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_a_bad_decay_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"baseline_decay is 1\.0"):
        RAE(baseline_decay=1.0)
