"""IPPO: its additions to PPO for agents that share a policy or a goal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from mrlm_environments.games.coordination import CoordinationGame
from transformers import LlamaForCausalLM

from mrlm_pl.algorithms import IPPO, MAPPO, PPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.credit.team import with_team_rewards
from mrlm_pl.policy import Policy
from mrlm_pl.runs import evaluate
from tests.support.runs.watching import Watch

AGENTS = ("left", "right")


class Unequal(Environment):
    """Left speaks twice, right once, at the second step together with it; left earns ten times as much."""

    name = "unequal"
    agents = AGENTS

    def __init__(self, scale: float = 1.0, offset: float = 0.0) -> None:
        self.scale, self.offset = scale, offset

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(16)])

    def reset(self, task: Task) -> Observations:
        self.first = True
        return {"left": [Message("user", f"Say {task.data['n']}")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        if self.first:
            self.first = False
            return Step(observations={agent: [Message("user", "Now")] for agent in AGENTS})
        digits = {agent: float(sum(map(str.isdigit, message.content))) for agent, message in actions.items()}
        earned = {"left": 10 + 10 * digits["left"], "right": digits["right"]}
        rewards = {agent: self.scale * reward + self.offset for agent, reward in earned.items()}
        return Step(rewards=rewards, done=True, stop_reason="end")


def episode(agent_turns: dict[str, dict[int, float]], paid: list[dict[str, float]]) -> Episode:
    """One in which each agent decides with one token at the given steps and has these rewards booked there."""
    trajectories = {}
    for agent, rewards in agent_turns.items():
        turns = tuple(
            Turn(agent, step, 2 * n + 1, 2 * n + 2, reward, {"r": reward}, "stop", "main", 0, "e")
            for n, (step, reward) in enumerate(rewards.items())
        )
        mask = (False, True) * len(turns)
        trajectories[agent] = (
            Trajectory(agent, "main", tuple(range(8, 8 + len(mask))), mask, (0.0, -1.0) * len(turns), turns),
        )
    return Episode("0", Task("t", "train", 0), "g", 0, 0, trajectories, "end", step_rewards=tuple(paid))


def test_a_team_pays_each_turn_what_is_earned_until_the_agents_next() -> None:
    paid = [{"a": 2.0}, {"b": 6.0}, {"a": 1.0, "b": 1.0}]
    play = episode({"a": {0: 2.0, 2: 1.0}, "b": {1: 7.0}}, paid)
    turns = {agent: rows[0].turns for agent, rows in with_team_rewards(play).trajectories.items()}
    # The steps earn 1, 3 and 1. The first of them is before the first turn of b.
    assert [turn.reward for turn in turns["a"]] == [4.0, 1.0]
    assert [turn.reward for turn in turns["b"]] == [4.0]
    assert turns["b"][0].components == {"team": 4.0}


def algorithm_of(cls: Any, model_folder: Path, trainer: Any, **options: Any) -> Any:
    algorithm = cls({"main": Policy(str(model_folder), learning_rate=1e-3)}, **options)
    algorithm.configure_model()
    algorithm.trainer = trainer
    return algorithm


def prepared(algorithm: Any, episodes: list[Episode]) -> Any:
    with torch.no_grad():
        return algorithm.prepare(episodes, Sampling())


@pytest.mark.parametrize(("reward", "expected"), [("own", [5.0, 1.0, 3.0]), ("team", [4.0, 2.0, 2.0])])
def test_the_returns_are_those_of_the_own_or_of_the_teams_reward(
    reward: Any, expected: list[float], model_folder: Path, quiet_trainer: Any
) -> None:
    algorithm = algorithm_of(IPPO, model_folder, quiet_trainer(), reward=reward, lam=1.0)
    play = episode({"a": {0: 4.0, 1: 1.0}, "b": {1: 3.0}}, [{"a": 4.0}, {"a": 1.0, "b": 3.0}])
    rows = prepared(algorithm, [play])["main"]
    assert rows.returns[rows.action_mask].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("whiten_over", ["agent", "policy"])
def test_the_advantages_of_one_agent_do_not_drown_out_anothers(
    whiten_over: Any, model_folder: Path, quiet_trainer: Any
) -> None:
    algorithm = algorithm_of(IPPO, model_folder, quiet_trainer(), whiten_over=whiten_over)
    plays = [episode({"a": {0: first}, "b": {0: second}}, []) for first, second in ((100.0, 1.0), (300.0, 3.0))]
    rows = prepared(algorithm, plays)["main"]
    together = torch.tensor([100.0, 1.0, 300.0, 3.0])
    # Two numbers x and 3 x have mean 2 x and deviation sqrt(2) x.
    half = 0.5**0.5
    expected = [-half, -half, half, half]
    if whiten_over == "policy":
        expected = ((together - together.mean()) / together.std()).tolist()
    assert rows.advantages[rows.action_mask].tolist() == pytest.approx(expected, abs=1e-5)


def test_with_one_policy_for_each_agent_it_is_ppo(model_folder: Path, quiet_trainer: Any) -> None:
    weights = []
    for cls in (PPO, IPPO):
        policies = {agent: Policy(str(model_folder), learning_rate=1e-3) for agent in AGENTS}
        algorithm = cls(policies, value_learning_rate=0.01)
        data = RolloutDataModule(Unequal(), groups=2, group_size=3, iterations=2, sampling=Sampling(max_tokens=4))
        quiet_trainer().fit(algorithm, data)
        weights.append(algorithm.state_dict())
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


# Critics by agent.


def run(
    model_folder: Path, trainer: Any, resumed: Path | None = None, *, normalize_values: bool = False, **data: Any
) -> IPPO:
    critics = {"left": Policy(str(model_folder), 1e-3), "right": Policy(str(model_folder), 2e-3)}
    algorithm = IPPO(
        {"main": Policy(str(model_folder), 1e-3)},
        agent_critics=critics,
        value_learning_rate=0.05,
        value_clip=None,
        normalize_values=normalize_values,
    )
    algorithm.configure_model()
    for critic in critics.values():
        assert critic.value_head is not None
        torch.nn.init.constant_(critic.value_head.linear.weight, 0.01)
    settings: dict[str, Any] = {"groups": 4, "group_size": 3, "iterations": 2, "sampling": Sampling(max_tokens=4)}
    trainer.fit(algorithm, RolloutDataModule(Unequal(), **{**settings, **data}), ckpt_path=resumed)
    return algorithm


def test_agents_of_one_policy_have_critics_of_their_own(model_folder: Path, quiet_trainer: Any) -> None:
    watch = Watch()
    trainer = quiet_trainer(callbacks=[watch])
    algorithm = run(model_folder, trainer, passes=4)
    rates = {group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups}
    assert rates == {
        "main": 1e-3,
        "left/critic": 1e-3,
        "left/critic/value": 0.05,
        "right/critic": 2e-3,
        "right/critic/value": 0.05,
    }
    first, last = watch.steps[0], watch.steps[-1]
    # Left's values are about its 10 and more, right's about its few digits.
    assert first["train/left/critic/value_loss"] > 20 > first["train/right/critic/value_loss"]
    assert last["train/left/critic/value_loss"] < first["train/left/critic/value_loss"]
    assert first["train/ratio_deviation"] < 1e-4
    assert "train/value_loss" not in last
    assert algorithm.policy("main").value_head is None
    folder = Path(trainer.default_root_dir) / "policies"
    assert sorted(path.name for path in folder.iterdir()) == ["left-critic", "main", "right-critic"]
    report = evaluate(trainer.default_root_dir, Unequal(), num_episodes=2, sampling=Sampling(max_tokens=4))
    assert report.seats == {"left": "main", "right": "main"}, "critics play no agent"
    assert Policy(trainer.default_root_dir).source == str(folder / "main")
    again = Policy(str(folder / "right-critic"))
    again.load_critic("critic")
    for name, weight in algorithm.critic.model("right").state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_agents_critics_estimate_the_same_in_double_precision(model_folder: Path, quiet_trainer: Any) -> None:
    losses = []
    for precision in ("32-true", "64-true"):
        watch = Watch()
        run(model_folder, quiet_trainer(callbacks=[watch], precision=precision), iterations=1)
        losses.append([watch.steps[0][f"train/{agent}/critic/value_loss"] for agent in AGENTS])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.long
def test_the_result_does_not_depend_on_accumulation(model_folder: Path, quiet_trainer: Any) -> None:
    found = []
    for pieces in (1, 4):
        watch = Watch()
        run(model_folder, quiet_trainer(callbacks=[watch], accumulate_grad_batches=pieces), iterations=1)
        found.append(watch.gradients)
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-4, atol=2e-6 * float(gradient.norm() + 1), msg=name
        )
    assert float(found[0]["critic.models.right.model.model.layers.0.mlp.up_proj.weight"].abs().sum()) > 0


@pytest.mark.parametrize("critic", ["head", "agent_critics", "joint"])
def test_normalized_values_learn_the_same_at_any_scale_and_offset_of_the_rewards(
    critic: str, model_folder: Path, quiet_trainer: Any
) -> None:
    def run(scale: float, offset: float, normalize: bool = True) -> tuple[torch.Tensor, list[float]]:
        watch = Watch()
        policies = {"main": Policy(str(model_folder), learning_rate=1e-3)}
        settings: dict[str, Any] = {"value_learning_rate": 0.01, "normalize_values": normalize}
        if critic == "agent_critics":
            settings["agent_critics"] = {agent: Policy(str(model_folder), 1e-3) for agent in AGENTS}
        algorithm = (MAPPO if critic == "joint" else IPPO)(policies, **settings)
        data = RolloutDataModule(
            Unequal(scale, offset), groups=2, group_size=4, iterations=2, passes=2, sampling=Sampling(max_tokens=4)
        )
        quiet_trainer(callbacks=[watch]).fit(algorithm, data)
        weights = torch.cat([weight.detach().flatten() for weight in algorithm.policy("main").model.parameters()])
        names = [name for name in watch.steps[-1] if name.endswith("value_loss")]
        return weights, [step[name] for step in watch.steps for name in names]

    begun = torch.cat([weight.flatten() for weight in LlamaForCausalLM.from_pretrained(model_folder).parameters()])
    (weights, losses), (moved, as_losses), (raw, raw_losses) = (
        run(1.0, 0.0),
        run(8.0, -1024.0),
        run(8.0, -1024.0, False),
    )
    learned = float((weights - begun).norm())
    assert float((moved - weights).norm()) < 0.05 * learned
    assert as_losses == pytest.approx(losses, rel=0.05)
    assert raw_losses[0] > 1e5 > 10 > losses[0]
    assert float((raw - weights).norm()) > 0.2 * learned


@pytest.mark.long
@pytest.mark.parametrize("normalized", [False, True])
def test_a_run_resumed_within_the_passes_equals_an_uninterrupted_one(
    normalized: bool, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"minibatches": 2, "normalize_values": normalized}
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(model_folder, quiet_trainer(enable_checkpointing=True, callbacks=[saver]), **settings)
    again = run(model_folder, quiet_trainer(), tmp_path / "step=3.ckpt", **settings)
    assert any(name.endswith("moments") for name in whole.state_dict()) == normalized
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


@pytest.mark.long
def test_it_learns_to_collaborate(quiet_trainer: Any) -> None:
    watch = Watch()
    algorithm = IPPO({"main": Policy(learning_rate=2e-3)}, reward="team", value_learning_rate=1e-2)
    data = RolloutDataModule(
        CoordinationGame(), groups=4, group_size=16, iterations=8, passes=2, sampling=Sampling(max_tokens=4)
    )
    quiet_trainer(callbacks=[watch], gradient_clip_val=1.0).fit(algorithm, data)
    assert watch.steps[0]["rollout/success"] < 0.5
    assert watch.steps[-1]["rollout/success"] > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "mine"}, "reward is 'mine'"),
        ({"whiten_over": "all"}, "whiten_over is 'all'"),
        ({"gamma": 1.5}, "gamma is 1.5"),
    ],
)
def test_bad_settings_are_refused(model_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        IPPO({"main": Policy(str(model_folder))}, **options)


def test_critics_must_fit_the_agents(model_folder: Path, quiet_trainer: Any) -> None:
    def fit(*names: str, **options: Any) -> None:
        critics = {name: Policy(str(model_folder), **options) for name in names}
        algorithm = IPPO({"main": Policy(str(model_folder))}, agent_critics=critics)
        quiet_trainer().fit(algorithm, RolloutDataModule(Unequal(), groups=2, group_size=2))

    with pytest.raises(ConfigurationError, match="agent_critics: 'right' has no critic, but others have"):
        fit("left")
    with pytest.raises(ConfigurationError, match="agent_critics: 'main' is not an agent that learns"):
        fit("left", "right", "main")
    with pytest.raises(ConfigurationError, match="agent_critics: 'rigth' is not an agent that learns"):
        fit("left", "rigth")
    with pytest.raises(ConfigurationError, match=r"agent_critics\.left has `trained: false`"):
        fit("left", "right", trained=False)


def test_a_critic_reads_the_tokens_of_its_agent(model_folder: Path) -> None:
    critic = Policy(str(model_folder))
    critic.tokenizer.add_tokens(["<more>"])
    algorithm = IPPO({"main": Policy(str(model_folder))}, agent_critics={"a": critic})
    with pytest.raises(ConfigurationError, match=r"agent_critics\.a has another tokenizer than policy 'main'"):
        algorithm.check_agents(["a"])
    with pytest.raises(ConfigurationError, match=r"critics\.main has another tokenizer than policy 'main'"):
        PPO({"main": Policy(str(model_folder))}, critics={"main": critic})
