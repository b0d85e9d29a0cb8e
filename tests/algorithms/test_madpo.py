"""Multi-agent DPO: the joint margin by hand, one denominator, several policies, and that one agent is DPO."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import DPO, MADPO
from mrlm_pl.data import JointPreferenceDataModule, PreferenceDataModule, RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import Batch, collate_rows
from mrlm_pl.learner.contract import RolloutFacts
from mrlm_pl.losses import BatchTotals, batch_totals
from mrlm_pl.policy import Policy
from tests.support.runs.watching import Watch

SEATS = {"solver": "left", "critic": "right"}


def part(agent: str, number: int) -> dict[str, str]:
    # Alone, each agent's words teach nothing of the other's.
    said = {"solver": (f"{2 * number} it is", f"{3 * number + 1} or so"), "critic": ("right", f"no, {number}")}[agent]
    return {"prompt": f"{agent} {number}? ", "chosen": said[0], "rejected": said[1]}


def joint_file(folder: Path, agents: tuple[str, ...] = ("solver", "critic"), count: int = 8) -> str:
    """Every third pair is without the last agent."""
    rows = [
        {"agents": {agent: part(agent, n) for agent in (agents[:-1] if len(agents) > 1 and n % 3 == 2 else agents)}}
        for n in range(count)
    ]
    path = folder / "joint.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def policies(model_folder: Path, **right: Any) -> dict[str, Policy]:
    return {
        "left": Policy(str(model_folder), learning_rate=3e-3),
        "right": Policy(str(model_folder), learning_rate=3e-3, random_init_seed=5, **right),
    }


def fit(algorithm: MADPO, data: Any, trainer: Any, ckpt: Any = None) -> MADPO:
    trainer.fit(algorithm, data, ckpt_path=ckpt)
    return algorithm


def with_numbers(model_folder: Path, sums: dict[str, list[float]], references: dict[str, list[float]], **options: Any):
    """Two policies whose answers are one token each; the left one has a part in two pairs, the right in the second."""
    algorithm = MADPO(policies(model_folder), SEATS, **options)
    algorithm.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    tables = {}
    for name, numbers in (("left", [0, 1, 2, 3]), ("right", [3, 2])):  # the right one's rejected row comes first
        row = Trajectory("a", name, (8, 9), (False, True), (0.0, 0.0), ())
        pairs = [number // 2 for number in numbers]
        table = collate_rows([row] * len(numbers), pairs, pairs, numbers)
        table.joint_actions = torch.tensor(numbers)
        table.reference_sums = torch.tensor(references[name])
        logp = torch.tensor([[0.0, value] for value in sums[name]], requires_grad=True)
        algorithm.policies[name].forward = lambda _, logp=logp: logp
        tables[name] = (table, logp)
    batch = Batch(
        {name: table for name, (table, _) in tables.items()},
        {name: BatchTotals(1.0, 1.0, 2.0) for name in tables},  # four pairs in the update, two of them here
    )
    parts = {name: algorithm.policy_loss(name, table, batch) for name, (table, _) in tables.items()}
    loss = algorithm.combined(parts, batch)
    loss.backward()
    noted = algorithm.metrics.take_update()
    return loss.item(), {name: logp.grad[:, 1].tolist() for name, (_, logp) in tables.items()}, noted


def test_the_joint_margin_by_hand(model_folder: Path) -> None:
    # Pair 0, the left policy alone: (-1 + 2) - (-3 + 2.5) = 1.5. Pair 1: left (-4 + 4.5) - (-5 + 7) = -1.5,
    # right (-2 + 3) - (-6 + 2) = 5, together 3.5.
    sums = {"left": [-1.0, -3.0, -4.0, -5.0], "right": [-6.0, -2.0]}
    references = {"left": [-2.0, -2.5, -4.5, -7.0], "right": [-2.0, -3.0]}
    loss, gradients, noted = with_numbers(model_folder, sums, references, beta=0.2)
    z = [0.2 * 1.5, 0.2 * 3.5]
    assert loss == pytest.approx(sum(math.log1p(math.exp(-value)) for value in z) / 4, abs=1e-6)
    # d/dz of -log sigmoid(z) is -sigmoid(-z): both policies get that of the joint margin.
    first, second = [0.2 / (1 + math.exp(value)) / 4 for value in z]
    assert gradients["left"] == pytest.approx([-first, first, -second, second], abs=1e-6)
    assert gradients["right"] == pytest.approx([second, -second], abs=1e-6)
    assert noted["train/rewards_chosen"] == pytest.approx(0.2 * (1.0 + (0.5 + 1.0)) / 2)
    assert noted["train/rewards_rejected"] == pytest.approx(0.2 * (-0.5 + (2.0 - 4.0)) / 2)
    assert noted["train/reward_margin"] == pytest.approx(0.2 * (1.5 + 3.5) / 2)
    assert noted["train/left/reward_margin"] == pytest.approx(0.2 * (1.5 - 1.5) / 2)
    assert noted["train/right/reward_margin"] == pytest.approx(0.2 * (0.0 + 5.0) / 2)
    assert noted["train/preference_accuracy"] == 1.0
    loss, _, _ = with_numbers(model_folder, sums, references, loss="ipo")
    assert loss == pytest.approx(((1.5 - 5.0) ** 2 + (3.5 - 5.0) ** 2) / 4, abs=1e-5)


def test_two_policies_learn_a_joint_preference(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    watch, source = Watch(), joint_file(tmp_path)
    trainer = quiet_trainer(max_epochs=20, callbacks=[watch], limit_val_batches=1.0)
    data = JointPreferenceDataModule(source, source, batch_size=8)
    fit(MADPO(policies(model_folder), SEATS), data, trainer)
    assert watch.steps[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert watch.steps[0]["train/reward_margin"] == pytest.approx(0.0, abs=1e-5)
    last = watch.steps[-1]
    assert last["train/preference_accuracy"] == 1.0
    assert last["train/loss"] < 0.3
    assert min(last["train/left/reward_margin"], last["train/right/reward_margin"]) > 0.1
    assert last["train/left/reward_margin"] + last["train/right/reward_margin"] == pytest.approx(
        last["train/reward_margin"], abs=1e-5
    )
    assert trainer.callback_metrics["val/preference_accuracy"] == 1.0
    assert trainer.callback_metrics["val/loss"] < 0.3
    folder = Path(trainer.default_root_dir) / "policies"
    assert sorted(path.name for path in folder.iterdir()) == ["left", "right"]


def test_one_agent_is_dpo(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    joint = joint_file(tmp_path, ("solver",))
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps(part("solver", n)) + "\n" for n in range(8)))
    watches = [Watch(), Watch()]
    options: dict[str, Any] = {"max_epochs": 3, "limit_val_batches": 1.0}
    runs: list[Any] = []
    for cls, data, watch in (
        (DPO, PreferenceDataModule(str(plain), str(plain), batch_size=4), watches[0]),
        (MADPO, JointPreferenceDataModule(joint, joint, batch_size=4), watches[1]),
    ):
        algorithm: Any = cls({"main": Policy(str(model_folder), learning_rate=3e-3)}, label_smoothing=0.1, margin=0.5)
        quiet_trainer(callbacks=[watch], **options).fit(algorithm, data)
        runs.append(algorithm)
    assert watches[0].steps == watches[1].steps
    assert {"train/reward_margin", "val/loss"} <= set(watches[0].steps[-1])
    for name, weight in runs[0].state_dict().items():
        assert torch.equal(weight, runs[1].state_dict()[name]), name


@pytest.mark.long
def test_accumulation_does_not_change_the_gradient(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    found = []
    for size, pieces in ((8, 1), (2, 4), (1, 8)):
        seen = Watch()
        data = JointPreferenceDataModule(joint_file(tmp_path), batch_size=size)
        trainer = quiet_trainer(accumulate_grad_batches=pieces, callbacks=[seen])
        fit(MADPO(policies(model_folder), SEATS), data, trainer)
        found.append(seen.gradients)
    assert {name.split(".")[1] for name in found[0]} == {"left", "right"}
    for others in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_margin_of_one_policy_moves_the_gradient_of_the_other(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    """With the right policy frozen the left one learns alone, and the loss falls less."""
    losses = []
    for trained in (True, False):
        watch = Watch()
        data = JointPreferenceDataModule(joint_file(tmp_path), batch_size=8)
        trainer = quiet_trainer(max_epochs=6, callbacks=[watch])
        algorithm = fit(MADPO(policies(model_folder, trained=trained), SEATS), data, trainer)
        losses.append(watch.steps[-1]["train/loss"])
        assert ("train/right/grad_norm" in watch.steps[-1]) == trained
        assert ("train/right/reward_margin" in watch.steps[-1]) == trained
        assert {row.policy for pair in data.examples["train"] for row in pair.rows} == (
            {"left", "right"} if trained else {"left"}
        )
        assert algorithm.trainer.global_step == 6
    assert losses[0] < losses[1] < math.log(2)


def test_agents_of_one_policy_add_up_in_its_gradient(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    watch = Watch()
    data = JointPreferenceDataModule(joint_file(tmp_path), batch_size=8)
    trainer = quiet_trainer(max_epochs=15, callbacks=[watch])
    fit(MADPO({"main": Policy(str(model_folder), learning_rate=3e-3)}), data, trainer)
    assert watch.steps[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert watch.steps[-1]["train/preference_accuracy"] == 1.0
    assert set(data.totals("train", [0, 2])) == {"main"}
    assert data.totals("train", [0, 2])["main"].sequences == 4 + 2
    assert data.totals("train", [0, 2])["main"].episodes == pytest.approx(2), "pairs"


@pytest.mark.long
def test_a_resumed_run_keeps_the_references(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    source = joint_file(tmp_path)

    def run(trainer: Any, ckpt: Any = None, seats: dict[str, str] = SEATS) -> MADPO:
        return fit(MADPO(policies(model_folder), seats), JointPreferenceDataModule(source, batch_size=2), trainer, ckpt)

    whole = run(quiet_trainer(max_epochs=2))
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    run(quiet_trainer(max_epochs=2, enable_checkpointing=True, callbacks=[saver]))
    again = run(quiet_trainer(max_epochs=2), tmp_path / "step=3.ckpt")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    with pytest.raises(
        ConfigurationError, match=r"differs from the examples the run started with, .* resume the run with its files"
    ):
        run(quiet_trainer(max_epochs=2), tmp_path / "step=3.ckpt", {"solver": "right", "critic": "left"})


def prepared(model_folder: Path, trainer: Any, episodes: list[Episode]) -> tuple[MADPO, dict[str, Any]]:
    algorithm = MADPO(policies(model_folder), SEATS)
    algorithm.check_rollouts(RolloutFacts(list(SEATS), ["t"]))
    algorithm.configure_model()
    algorithm.trainer = trainer
    with torch.no_grad():
        return algorithm, algorithm.prepare(episodes, Sampling(temperature=0.5))


def played(number: int, group: str, rewards: dict[str, float], error: str | None = None) -> Episode:
    rows = {}
    for agent, reward in rewards.items():
        ids, turn = (8, 9, 10 + number), Turn(agent, 0, 2, 3, reward, {}, "stop", SEATS[agent], 0, "e")
        mask, logp = (False, False, True), (0.0, 0.0, -1.0)
        rows[agent] = (Trajectory(agent, SEATS[agent], ids, mask, logp, (turn,)),)
    return Episode(str(number), Task("t", "train", 0), group, 0, 0, {} if error else rows, "end", error=error)


def test_the_best_and_the_worst_episode_of_a_rollouts_group_are_a_pair(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [
        played(0, "even", {"solver": 1.0, "critic": 0.0}),  # equal means: no pair
        played(1, "even", {"solver": 0.0, "critic": 1.0}),
        played(2, "three", {"solver": 1.0, "critic": 0.5}),
        played(3, "three", {"solver": 2.0, "critic": 1.0}),
        played(4, "three", {"solver": 0.0, "critic": 0.0}),
        played(5, "one", {"solver": 3.0, "critic": 0.0}),
        played(6, "one", {}, error="away"),
        played(7, "both", {"solver": 0.0, "critic": 0.0}),
        played(8, "both", {"solver": 0.0, "critic": 1.0}),
    ]
    algorithm, tables = prepared(model_folder, quiet_trainer(), episodes)
    for name in ("left", "right"):
        assert tables[name].token_ids[:, 2].tolist() == [13, 14, 18, 17], "the chosen one first"
        assert tables[name].groups.tolist() == [1, 1, 3, 3], "the numbers of the groups in the rollout"
        assert tables[name].temperature.tolist() == [0.5] * 4
        policy = algorithm.policy(name)
        # pi(token) at half the temperature is the softmax of twice the logits.
        logits = policy.model(input_ids=torch.tensor([[8, 9]])).logits[0, -1].detach()
        expected = (2 * logits).log_softmax(-1)[[13, 14, 18, 17]]
        torch.testing.assert_close(tables[name].reference_sums, expected, rtol=1e-4, atol=1e-4)
    assert algorithm.lacks_signal(episodes[:2])
    assert not algorithm.lacks_signal(episodes[-2:])
    totals = {name: batch_totals(rows.action_mask, rows.episode_tokens) for name, rows in tables.items()}
    assert {name: size.episodes for name, size in totals.items()} == {"left": 1.0, "right": 1.0}, "half of each pair"
    batch = Batch({name: rows.select(torch.tensor([2, 3])) for name, rows in tables.items()}, totals)
    losses = {name: algorithm.policy_loss(name, rows, batch) for name, rows in batch.policies.items()}
    assert algorithm.combined(losses, batch).item() == pytest.approx(math.log(2) / 2, abs=1e-6), "one of two pairs"


def test_pairs_of_different_policies_have_one_denominator(model_folder: Path, quiet_trainer: Any) -> None:
    """At a gap of 0 each of the two pairs has a loss of log 2, and so has their mean."""
    episodes = [played(2 * n + k, agent, {agent: 1.0 - k}) for n, agent in enumerate(SEATS) for k in (0, 1)]
    algorithm, tables = prepared(model_folder, quiet_trainer(), episodes)
    rows = {name: table.select(torch.arange(len(table))) for name, table in tables.items()}
    totals = {name: batch_totals(table.action_mask, table.episode_tokens) for name, table in tables.items()}
    batch = Batch(rows, totals)
    losses = {name: algorithm.policy_loss(name, table, batch) for name, table in rows.items()}
    assert algorithm.combined(losses, batch).item() == pytest.approx(math.log(2), abs=1e-6)


class Both(Environment):
    """The team earns the share of digits in what both say."""

    name = "both"
    agents = ("solver", "critic")

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": f"{split[0]}{n}"} for n in range(16)])

    def reset(self, task: Task) -> Observations:
        return {agent: [Message("user", f"Say {task.data['n']}")] for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        said = "".join(action.content for action in actions.values())
        reward = sum(map(str.isdigit, said)) / max(len(said), 1)
        return Step(rewards=dict.fromkeys(self.agents, reward), done=True, stop_reason="said")


@pytest.mark.long
def test_an_iterative_run_learns_and_continues_bit_for_bit(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    def fit(ckpt: Any = None, **options: Any) -> tuple[MADPO, Any]:
        learners = policies(model_folder)
        for policy in learners.values():
            policy.learning_rate = 1e-2
        algorithm, sampling = MADPO(learners, SEATS), Sampling(max_tokens=4)
        sizes = {"groups": 8, "group_size": 8, "minibatches": 2, "passes": 2, "iterations": 4}
        data = RolloutDataModule(Both(), sampling=sampling, save_episodes=False, validation_episodes=8, **sizes)
        trainer = quiet_trainer(limit_val_batches=1.0, **options)
        trainer.fit(algorithm, data, ckpt_path=ckpt)
        return algorithm, trainer

    watch = Watch()
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=10, save_top_k=-1)
    whole, trainer = fit(enable_checkpointing=True, callbacks=[watch, saver])
    assert watch.steps[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert watch.steps[-1]["train/reward_margin"] > 0.1, "the reference stays"
    assert watch.steps[-1]["rollout/reward"] > 1.2 * watch.steps[0]["rollout/reward"]
    assert 0 <= trainer.callback_metrics["val/reward"] <= 1
    again, _ = fit(ckpt=tmp_path / "step=10.ckpt")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_a_rollout_gives_several_episodes_of_a_task(model_folder: Path, quiet_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.group_size is 1, but MADPO compares at least 2 episodes"):
        quiet_trainer().fit(MADPO(policies(model_folder), SEATS), RolloutDataModule(Both(), group_size=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, r"beta is 0\.0"),
        ({"loss": "kto"}, "loss is 'kto'"),
        ({"seats": {"solver": "middle"}}, "names policy 'middle'"),
    ],
)
def test_bad_settings_are_refused(model_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MADPO({"main": Policy(str(model_folder))}, **options)
