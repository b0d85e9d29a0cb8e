from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Message, Task, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.policy import Policy
from tests.support.runs.logs import logged_here


class Pair(Environment):
    """Both speak at once; each earns the share of digits in its own reply."""

    name = "pair"
    agents = ("left", "right")

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(8)])

    def reset(self, task: Task) -> Observations:
        return {agent: [Message("user", f"{agent} {task.data['n']}")] for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        paid = {agent: sum(map(str.isdigit, message.content)) / 8 for agent, message in actions.items()}
        return Step(rewards=paid, done=True, stop_reason="end")


def fit(one: Path, two: Path, quiet_trainer: Any, rates: tuple[float, float], **options: Any) -> GRPO:
    policies = {
        "one": Policy(str(one), learning_rate=rates[0], trained=rates[0] > 0),
        "two": Policy(str(two), learning_rate=rates[1], trained=rates[1] > 0, random_init_seed=5),
    }
    algorithm = GRPO(policies, {"left": "one", "right": "two"})
    data = RolloutDataModule(Pair(), groups=4, group_size=4, iterations=2, sampling=Sampling(max_tokens=6))
    quiet_trainer(**options).fit(algorithm, data)
    return algorithm


class Noting(GRPO):
    """GRPO that keeps the rows of its last rollout, with the learner's log-probabilities."""

    def prepare(self, *given: Any) -> dict[str, PolicyBatch]:
        tables = super().prepare(*given)
        self.noted = {name: (rows, self.policy(name)(rows.inputs())) for name, rows in tables.items()}
        return tables


def test_each_policy_samples_and_learns_at_its_own_temperature(model_folder: Path, quiet_trainer: Any) -> None:
    own = {"one": {"temperature": 0.5, "max_tokens": 3}, "two": {"temperature": 1.5}}
    policies = {name: Policy(str(model_folder), learning_rate=0.0) for name in own}
    algorithm = Noting(policies, {"left": "one", "right": "two"}, overlong_buffer=2)
    sampling = Sampling(max_tokens=6, policies=own)
    data = RolloutDataModule(Pair(), groups=4, group_size=4, iterations=1, sampling=sampling)
    quiet_trainer().fit(algorithm, data)
    for name, longest in (("one", 3), ("two", 6)):
        rows, learner = algorithm.noted[name]
        torch.testing.assert_close(learner[rows.action_mask], rows.behavior_logp[rows.action_mask], atol=1e-4, rtol=0)
        at_one = algorithm.policy(name)(rows.inputs()._replace(temperature=torch.ones(len(rows))))
        assert (at_one - learner).abs().max() > 0.01, "the temperature counts"
        assert rows.action_mask.sum(-1).max() == longest
    # Random models seldom end a turn: overlong replies lose a reward of 1 at their own limits, 3 and 6.
    bonus = algorithm.turn_bonus(sampling)
    assert bonus is not None
    for policy, tokens, penalty in (("one", 3, -1.0), ("two", 5, -0.5), ("one@7", 3, -1.0), ("two", 3, 0.0)):
        assert bonus(Turn("left", 0, 0, tokens, 0.0, {}, "length", policy, 0, "in_process")) == penalty


def test_sampling_settings_of_an_unknown_policy_are_refused_before_the_models_load(
    model_folder: Path, quiet_trainer: Any
) -> None:
    algorithm = GRPO({"one": Policy(str(model_folder))})
    for option in ("sampling", "validation_sampling"):
        settings = {option: {"policies": {"onne": {"temperature": 0.5}}}}
        with pytest.raises(ConfigurationError, match=f"^data.{option}.policies: .*'onne'; did you mean 'one'"):
            quiet_trainer().fit(algorithm, RolloutDataModule(Pair(), groups=2, group_size=2, **settings))
        assert algorithm.policy("one").model is None


def changed(algorithm: GRPO, name: str) -> bool:
    fresh = Policy(algorithm.policy(name).name_or_path, random_init_seed=algorithm.policy(name).random_init_seed)
    fresh.load()
    pairs = zip(fresh.model.parameters(), algorithm.policy(name).model.parameters(), strict=True)
    return any(not torch.equal(before, after) for before, after in pairs)


def test_two_policies_learn_in_one_run_and_are_exported_apart(
    model_folder: Path, gpt2_folder: Path, quiet_trainer: Any
) -> None:
    algorithm = fit(model_folder, gpt2_folder, quiet_trainer, (1e-3, 1e-3), gradient_clip_val=0.1)
    assert changed(algorithm, "one")
    assert changed(algorithm, "two")
    folder = Path(algorithm.trainer.default_root_dir) / "policies"
    kinds = {path.name: json.loads((path / "config.json").read_text())["model_type"] for path in folder.iterdir()}
    assert kinds == {"one": "llama", "two": "gpt2"}
    assert {"train/one/grad_norm", "train/two/grad_norm"} <= set(algorithm.trainer.callback_metrics)


def test_a_frozen_partner_stays_as_it_was(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm = fit(model_folder, model_folder, quiet_trainer, (1e-3, 0.0))
    assert changed(algorithm, "one")
    assert not changed(algorithm, "two")


def test_each_policy_is_clipped_by_its_own_norm(model_folder: Path) -> None:
    algorithm = GRPO({"one": Policy(str(model_folder)), "two": Policy(str(model_folder))})
    algorithm.configure_model()
    optimizer = algorithm.configure_optimizers()
    for scale, group in zip((100.0, 0.001), optimizer.param_groups, strict=True):
        for weight in group["params"]:
            weight.grad = torch.full_like(weight, scale)
    algorithm.configure_gradient_clipping(optimizer, 1.0, "norm")
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group["params"]]) for group in optimizer.param_groups]
    assert norms[0].item() == pytest.approx(1.0, rel=1e-3)
    size = sum(weight.numel() for weight in optimizer.param_groups[1]["params"])
    assert norms[1].item() == pytest.approx(0.001 * size**0.5, rel=1e-3), "the quiet policy keeps its gradient"


def test_an_agent_without_a_seat_is_named_before_the_models_load(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm = GRPO({"one": Policy(str(model_folder)), "two": Policy(str(model_folder))}, {"left": "one"})
    with pytest.raises(ConfigurationError, match="agent 'right' has no seat"):
        quiet_trainer().fit(algorithm, RolloutDataModule(Pair(), groups=2, group_size=2))
    assert algorithm.policy("one").model is None


def test_a_seat_of_no_agent_is_named_with_the_agent_that_was_meant(model_folder: Path) -> None:
    policies = {"one": Policy(str(model_folder)), "two": Policy(str(model_folder))}
    algorithm = GRPO(policies, {"left": "one", "rihgt": "two"})
    message = r"seats: 'rihgt' is not an agent of this run; did you mean 'right'\? The agents are \['left', 'right'\]"
    with pytest.raises(ConfigurationError, match=message + "; `--model.seats '{}'` drops all seats"):
        algorithm.check_agents(Pair.agents)


def test_a_frozen_policy_that_decides_for_nobody_is_a_warning(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policies = {"one": Policy(str(model_folder)), "two": Policy(str(model_folder), trained=False)}
    GRPO(policies, {"left": "one", "right": "two"}).check_agents(Pair.agents)
    assert not logged_here(caplog)
    GRPO(policies, {"left": "one", "right": "one"}).check_agents(Pair.agents)
    assert [record.getMessage() for record in logged_here(caplog)] == [
        "policy 'two' decides for no agent; name it in `seats`, or leave it out"
    ]


def test_a_trained_policy_that_decides_for_nobody_is_an_error_with_the_policy_that_was_meant(
    model_folder: Path, quiet_trainer: Any
) -> None:
    policies = {name: Policy(str(model_folder)) for name in ("left", "right", "rihgt")}
    algorithm = GRPO(policies)
    with pytest.raises(ConfigurationError, match=r"'rihgt' decides for no agent.*did you mean 'right'\?"):
        quiet_trainer().fit(algorithm, RolloutDataModule(Pair(), groups=2, group_size=2))
    assert algorithm.policy("left").model is None


def test_a_seat_of_an_unknown_policy_is_named_with_the_policy_that_was_meant(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"seat 'left' names policy 'mian'.*did you mean 'main'\?"):
        GRPO({"main": Policy(str(model_folder))}, {"left": "mian"})


def test_two_policies_of_almost_one_name_are_named_together(model_folder: Path) -> None:
    algorithm = GRPO({"main": Policy(str(model_folder)), "mian": Policy(str(model_folder))})
    with pytest.raises(ConfigurationError, match="'main' and 'mian' may be one name, misspelled"):
        algorithm.check_agents(["agent"])


def test_the_learning_rate_of_each_policy_is_logged(model_folder: Path, quiet_trainer: Any) -> None:
    policies = {name: Policy(str(model_folder), learning_rate=rate) for name, rate in (("left", 1e-3), ("right", 4e-3))}
    algorithm = GRPO(policies, optimization={"schedule": "linear"})
    trainer = quiet_trainer()
    trainer.fit(algorithm, RolloutDataModule(Pair(), groups=2, group_size=2, iterations=2))
    # Linear to 0 over two updates: the second is made at half the rate.
    assert trainer.callback_metrics["train/left/learning_rate"] == pytest.approx(5e-4)
    assert trainer.callback_metrics["train/right/learning_rate"] == pytest.approx(2e-3)
