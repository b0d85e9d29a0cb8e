"""Several environments in a run, each with its own group size, turn limit, reward scale and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import GRPO, MAGRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.tasks import RunTasks, TaskSettings
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Task, Trajectory, Turn, by_group
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from tests.conftest import EchoEnvironment
from tests.support.runs.short_fits import fingerprint
from tests.support.runs.watching import Watch

SETTINGS = {"short": {"group_size": 2}, "long": TaskSettings(group_size=5, max_turns=2, reward_scale=10.0)}


def two(model_folder: Path, algorithm: type = GRPO, model: dict[str, Any] | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "names": ["short", "long"],
        "task_settings": SETTINGS,
        "groups": 4,
        "group_size": 3,
        "iterations": 2,
        "sampling": Sampling(max_tokens=4),
    }
    data = RolloutDataModule([EchoEnvironment(), EchoEnvironment(turns=3)], **{**settings, **options})
    return algorithm({"main": Policy(str(model_folder), learning_rate=1e-3)}, **(model or {})), data


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_environment_has_its_group_size_and_turn_limit(mode: str, model_folder: Path, quiet_trainer: Any) -> None:
    algorithm, data = two(model_folder, mode=mode, weights=[3.0, 1.0])
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    trainer.fit(algorithm, data)
    groups = by_group(list(read_episodes(Path(trainer.default_root_dir) / "episodes")))
    sizes = [(found[0].task.environment, len(found)) for found in groups.values()]
    assert sorted(sizes) == [("long", 5)] * 2 + [("short", 2)] * 6
    for found in groups.values():
        turns = {len(episode.rows()[0].turns) for episode in found}
        assert turns == ({2} if found[0].task.environment == "long" else {1})
        if found[0].task.environment == "long":
            assert {episode.stop_reason for episode in found} == {"turn_limit"}, "a third is beyond the limit"
    for seen in metrics.steps:
        assert (seen["rollout/short/groups"], seen["rollout/long/groups"]) == (3, 1)


def test_turn_trees_have_as_many_branches_as_their_environment_says(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm, data = two(model_folder, MAGRPO, iterations=1)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    groups = by_group(list(read_episodes(Path(trainer.default_root_dir) / "episodes")))
    # A tree of one agent with B decisions in each state and D turns has B to the power of D paths.
    assert sorted(len(found) for found in groups.values()) == [2, 2, 25, 25]


def test_the_reward_scale_is_in_what_is_learnt_and_not_in_what_is_told(
    model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Episode] = []
    credit = GRPO.credit

    def noting(self: GRPO, episodes: Any, *arguments: Any) -> Any:
        given.extend(episodes)
        return credit(self, episodes, *arguments)

    monkeypatch.setattr(GRPO, "credit", noting)
    algorithm, data = two(model_folder, iterations=1)
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    trainer.fit(algorithm, data)
    recorded = {episode.id: episode for episode in read_episodes(Path(trainer.default_root_dir) / "episodes")}
    assert len(given) == len(recorded) == 14
    for episode in given:
        scale = 10.0 if episode.task.environment == "long" else 1.0
        assert episode.reward == pytest.approx(scale * recorded[episode.id].reward)
    for name in ("short", "long"):
        rewards = [episode.reward for episode in recorded.values() if episode.task.environment == name]
        assert any(rewards)
        assert metrics.steps[0][f"rollout/{name}/reward"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-5)
        wins = [bool(e.success) for e in recorded.values() if e.task.environment == name and e.success is not None]
        if wins:
            assert f"rollout/{name}/success" in metrics.steps[0]


@pytest.mark.parametrize(("algorithm", "changes"), [("group_centered", True), ("group_normalized", False)])
def test_a_scale_matters_where_the_spread_is_not_divided_out(
    algorithm: str, changes: bool, model_folder: Path, quiet_trainer: Any
) -> None:
    """With one environment, so that nothing else brings the advantages to one scale."""
    prints = []
    for scale in (1.0, 4.0):
        data = RolloutDataModule(
            EchoEnvironment(),
            task_settings={"echo": TaskSettings(reward_scale=scale)},
            groups=2,
            group_size=3,
            iterations=1,
            sampling=Sampling(max_tokens=4),
        )
        model = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)}, advantage=algorithm)
        trainer = quiet_trainer()
        trainer.fit(model, data)
        moments = [state["exp_avg"].norm() for state in trainer.optimizers[0].state_dict()["state"].values()]
        prints.append(float(sum(moments)))
    assert prints[1] / prints[0] == pytest.approx(4.0 if changes else 1.0, rel=1e-3)


def test_a_scaled_record_keeps_all_but_the_rewards() -> None:
    turn = Turn("x", 0, 1, 2, 3.0, {"r": 2.0, "s": 1.0}, "stop", "main", 0, "e")
    row = Trajectory("x", "main", (1, 2), (False, True), (0.0, -0.5), (turn,))
    episode = Episode("0", Task("echo", "train", 0), "g", 0, 0, {"x": (row,)}, "end", step_rewards=({"x": 3.0},))

    def worth(item: Episode, scale: float, name: str = "echo") -> Episode:
        echo = EchoEnvironment()
        settings = {name: TaskSettings(reward_scale=scale)}
        (found,) = RunTasks([echo, echo], ["echo", "b"], settings, None, None, seed=0).with_reward_scale([item])
        return found

    scaled = worth(episode, 0.5)
    assert (scaled.reward, scaled.components(), scaled.step_rewards) == (1.5, {"r": 1.0, "s": 0.5}, ({"x": 1.5},))
    assert worth(scaled, 2.0) == episode
    assert worth(episode, 2.0, "b") is episode


def test_the_validation_loop_tells_of_each_environment(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm, data = two(model_folder, validation_episodes=6)
    trainer = quiet_trainer(limit_val_batches=1.0)
    (numbers,) = trainer.validate(algorithm, data, verbose=False)
    assert {"val/reward", "val/short/reward", "val/long/reward", "val/short/accuracy"} <= set(numbers)
    mean = (numbers["val/short/reward"] + numbers["val/long/reward"]) / 2
    assert numbers["val/reward"] == pytest.approx(mean, abs=1e-6)
    assert numbers["val/failed_episodes"] == 0


def test_a_run_of_two_environments_is_resumed_as_it_was(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = two(model_folder, minibatches=2)
    quiet_trainer(callbacks=[keep], enable_checkpointing=True).fit(algorithm, data)
    whole = fingerprint(algorithm)
    algorithm, data = two(model_folder, minibatches=2)
    quiet_trainer().fit(algorithm, data, ckpt_path=tmp_path / "step=1.ckpt")
    assert fingerprint(algorithm) == whole
    algorithm, data = two(model_folder, minibatches=2, task_settings={"long": TaskSettings(group_size=4)})
    with pytest.raises(ConfigurationError, match=r"data\.group_size is .*middle of a rollout.*data\.iterations 1$"):
        quiet_trainer().fit(algorithm, data, ckpt_path=tmp_path / "step=1.ckpt")


# Refused options.


def test_an_unknown_environment_gets_the_nearest_name(echo: Any) -> None:
    unknown = {f"other{number:02}": TaskSettings() for number in range(20)}
    with pytest.raises(ConfigurationError, match="task_settings: environment is 'other00'; choose from echo"):
        RolloutDataModule(echo(), task_settings=unknown)
    with pytest.raises(ConfigurationError, match="task_settings: environment is 'ecko'; did you mean 'echo'"):
        RolloutDataModule(echo(), task_settings={"ecko": TaskSettings(group_size=2)})
    with pytest.raises(ConfigurationError, match=r"task_settings\['echo'\]\.grup_size: .*did you mean 'group_size'"):
        RolloutDataModule(echo(), task_settings={"echo": {"grup_size": 2}})


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a"], "give one for each"), (["a", "a"], "share a name"), (["a", "b/c"], "cannot be a name"), (None, "share")],
)
def test_names_must_tell_the_environments_apart(names: list[str] | None, message: str, echo: Any) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RolloutDataModule([echo(), echo()], names=names)


@pytest.mark.parametrize("value", [{"group_size": 0}, {"max_turns": 0}, {"reward_scale": 0.0}, {"reward_scale": -1.0}])
def test_settings_out_of_range_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(value))):
        TaskSettings(**value)


def test_a_group_of_one_is_refused_by_the_name_of_its_setting(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm, data = two(model_folder, task_settings={"long": TaskSettings(group_size=1)})
    with pytest.raises(ConfigurationError, match=r"data\.task_settings\.long\.group_size is 1"):
        quiet_trainer().fit(algorithm, data)
