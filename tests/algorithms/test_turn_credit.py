"""Credit of turns in GRPO and GiGPO, and of reward components in GDPO, against hand arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.advantages import leave_one_out_advantages
from mrlm_pl.algorithms import GDPO, GRPO, GiGPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment, TaskSource
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.policy import Policy
from tests.support.runs.turn_episodes import advantages, episode


@pytest.fixture
def policies(model_folder: Path) -> dict[str, Policy]:
    return {"main": Policy(str(model_folder))}


EPISODES = [
    episode(0, "g", {"a": [("s", 1.0), ("t", 2.0)], "b": [("s", 0.0)]}),
    episode(1, "g", {"a": [("s", 0.0)], "b": [("s", 4.0)]}),
    episode(2, "g", {"a": [("s", 2.0), ("u", 0.0), ("t", 6.0)], "b": [("s", 2.0)]}),
]
"""Returns to go of ``a``: 3, 2 | 0 | 8, 6, 6."""


def test_a_turn_is_compared_with_the_same_turn_of_the_others(policies: Any, quiet_trainer: Any) -> None:
    algorithm = GRPO(policies, credit="turn", advantage="group_centered")
    found = advantages(algorithm, EPISODES, quiet_trainer())
    assert found == [
        pytest.approx([3 - (0 + 8) / 2, 2 - (0 + 6) / 2]),
        pytest.approx([0 - (4 + 2) / 2]),  # b
        pytest.approx([0 - (3 + 8) / 2]),
        pytest.approx([4 - (0 + 2) / 2]),
        pytest.approx([8 - (3 + 0) / 2, 6 - (2 + 0) / 2, 6 - 0]),
        pytest.approx([2 - (0 + 4) / 2]),
    ]


class Doubled(GRPO):
    def advantages(self, returns: Any) -> Any:
        return 2 * super().advantages(returns)


def test_a_rule_of_ones_own_has_the_advantages_of_turns(policies: Any, quiet_trainer: Any) -> None:
    algorithm = Doubled(policies, credit="turn", advantage="group_centered")
    assert advantages(algorithm, EPISODES, quiet_trainer())[1] == pytest.approx([2 * (0 - (4 + 2) / 2)])
    recorded, _ = algorithm._with_advantages(algorithm.returns(EPISODES, None, ()))
    assert recorded.baseline is None, "not that of GRPO"


def test_the_default_divides_by_the_spread_of_whole_returns(policies: Any, quiet_trainer: Any) -> None:
    found = advantages(GRPO(policies, credit="turn", gamma=0.5), EPISODES, quiet_trainer())
    # Returns of a with gamma 0.5: 2, 2 | 0 | 3.5, 3, 6; whole ones 2, 0, 3.5: mean 11/6, squares 111/18.
    spread = (111 / 18 / 2) ** 0.5
    assert found[0] == pytest.approx([(2 - 3.5 / 2) / spread, (2 - 3 / 2) / spread], abs=1e-5)
    assert found[4] == pytest.approx([(3.5 - 1) / spread, (3 - 1) / spread, 6 / spread], abs=1e-5)


def test_turn_baseline_paper_is_the_mean_over_all_turns_of_an_agent(policies: Any, quiet_trainer: Any) -> None:
    algorithm = GRPO(policies, credit="turn", advantage="group_centered", turn_baseline="paper")
    mean = (1 + 2 + 0 + 2 + 0 + 6) / 6  # of all turns of a
    assert advantages(algorithm, EPISODES, quiet_trainer())[::2] == [
        pytest.approx([3 - 2 * mean, 2 - mean]),
        pytest.approx([0 - mean]),
        pytest.approx([8 - 3 * mean, 6 - 2 * mean, 6 - mean]),
    ]


def test_states_are_compared_by_agent_and_task(policies: Any, quiet_trainer: Any) -> None:
    algorithm = GiGPO(policies, gamma=1.0, normalize=False, state_weight=2.0)
    found = advantages(algorithm, EPISODES, quiet_trainer())
    mean = 11 / 3
    assert found[0] == pytest.approx([3 - mean + 2 * (3 - 4), 3 - mean + 2 * (2 - 6)])
    assert found[4] == pytest.approx([8 - mean + 2 * (8 - 1.5), 8 - mean, 8 - mean + 2 * (6 - 2)]), "u is met once"
    assert found[1] == pytest.approx([0 - 2 + 2 * (0 - 3)]), "b's s is another state than a's"


def test_the_paper_divides_by_both_deviations(policies: Any, quiet_trainer: Any) -> None:
    found = advantages(GiGPO(policies, gamma=1.0, turn_baseline="paper"), EPISODES, quiet_trainer())
    # a: returns 3, 0, 8 have mean 11/3 and variance 49/3; state t has 2 and 6: mean 4, standard deviation 8 ** 0.5.
    deviation = (49 / 3) ** 0.5
    assert found[0] == pytest.approx([2 * (3 - 11 / 3) / deviation, (3 - 11 / 3) / deviation - 2 / 8**0.5], abs=1e-5)


def test_states_may_have_a_key(policies: Any, quiet_trainer: Any) -> None:
    one = GiGPO(policies, gamma=1.0, normalize=False, state_key=lambda text: "same")
    found = advantages(one, EPISODES, quiet_trainer())
    others = (0 + 8 + 6 + 6) / 4  # the turns of the other episodes
    assert found[0] == pytest.approx([3 - 11 / 3 + 3 - others, 3 - 11 / 3 + 2 - others])


def test_records_without_messages_have_no_states(policies: Any, quiet_trainer: Any) -> None:
    silent = [played.with_rows(lambda row: replace(row, messages=())) for played in EPISODES]
    with pytest.raises(DataError, match=r"agent 'a' of episode '.*' has turns, but no messages"):
        advantages(GiGPO(policies), silent, quiet_trainer())
    advantages(GRPO(policies, credit="turn"), silent, quiet_trainer())


def test_components_are_normalized_one_by_one(policies: Any, quiet_trainer: Any) -> None:
    parts: list[dict[str, float]] = [{"right": 1.0, "form": 0.0}, {"right": 0.0}, {"right": 0.5, "form": 30.0}]
    episodes = [episode(k, "g", {"a": [("s", part)]}) for k, part in enumerate(parts)]
    found = advantages(GDPO(policies, weights={"form": 0.5}), episodes, quiet_trainer())
    # right: mean 0.5, deviation 0.5: 1, -1, 0; form: mean 10, deviation 300 ** 0.5.
    wide = 10 / 300**0.5
    z = [1 - 0.5 * wide, -1 - 0.5 * wide, 0.5 * 2 * wide]
    deviation = (sum(x**2 for x in z) / 2) ** 0.5  # their mean is 0
    assert [row[0] for row in found] == pytest.approx([x / deviation for x in z], abs=1e-4)


def test_the_length_penalty_is_a_component(policies: Any, quiet_trainer: Any) -> None:
    """Turns of one token cost 1/8 each; all episodes earn 1."""
    episodes = [episode(0, "g", {"a": [("s", 1.0)]}), episode(1, "g", {"a": [("s", 1.0), ("t", 0.0)]})]
    found = advantages(GDPO(policies, overlong_buffer=8), episodes, quiet_trainer())
    # The tokens have a, -a, -a: mean -a / 3, variance a^2 (16 + 4 + 4) / 9 / 2.
    scale = (4 / 3) ** 0.5
    assert found[0] == pytest.approx([4 / 3 / scale], abs=1e-4)
    assert found[1] == pytest.approx([-2 / 3 / scale] * 2, abs=1e-4)
    without = GDPO(policies, overlong_buffer=8, weights={"overlong_penalty": 0.0})
    assert advantages(without, episodes, quiet_trainer()) == [[0.0], [0.0, 0.0]]


def test_a_weight_of_no_component_causes_a_warning(policies: Any, quiet_trainer: Any, caplog: Any) -> None:
    episodes = [episode(k, "g", {"a": [("s", {"right": k, "form": 0.0})]}) for k in (0, 1)]
    advantages(GDPO(policies, weights={"right": 2.0, "form": 1.0}), episodes, quiet_trainer())
    assert "weighs" not in caplog.text
    algorithm = GDPO(policies, weights={"rihgt": 2.0})
    for _ in range(2):
        advantages(algorithm, episodes, quiet_trainer())
    assert (
        caplog.text.count("model.weights weighs rihgt, but the reward components of this rollout are form, right") == 1
    )


def test_equal_returns_with_other_turns_have_a_signal(policies: Any) -> None:
    group = [episode(0, "g", {"a": [("s", 1.0), ("t", 0.0)]}), episode(1, "g", {"a": [("s", 0.0), ("t", 1.0)]})]
    assert GRPO(policies).lacks_signal(group)
    assert not GRPO(policies, credit="turn").lacks_signal(group)
    assert GRPO(policies, credit="turn").lacks_signal([group[0], group[0]])


def test_equal_returns_of_other_components_have_a_signal(policies: Any) -> None:
    parts: list[dict[str, float]] = [{"right": 1.0}, {"form": 1.0}]
    group = [episode(k, "g", {"a": [("s", part)]}) for k, part in enumerate(parts)]
    assert GRPO(policies).lacks_signal(group)
    unequal = GDPO(policies, weights={"form": 0.5})
    assert not unequal.lacks_signal(group)
    assert unequal.lacks_signal([group[0], group[0]])
    assert GDPO(policies).lacks_signal(group), "1 - 1 and -1 + 1, over the deviation"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turn_baseline": "paper"}, "turn_baseline and gamma belong to credit 'turn'"),
        ({"credit": "turn", "advantage": "leave_one_out"}, "advantage is 'leave_one_out' with credit 'turn'"),
        ({"credit": "turn", "advantage": leave_one_out_advantages}, "advantage is 'leave_one_out_advantages' with"),
        ({"credit": "turns"}, r"credit is 'turns'; did you mean 'turn'\? Choose from episode, turn"),
        ({"credit": "turn", "turn_baseline": "mean"}, "turn_baseline is 'mean'; choose from unbiased, paper"),
        ({"credit": "turn", "gamma": 1.5}, "gamma is 1.5; it must be from 0 to 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPO(**options)


class Steps(SingleAgentEnvironment):
    """Three turns, each with its own reward."""

    name = "steps"

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"start": n} for n in range(4)])

    def begin(self, task: Task) -> str:
        self.turn = 0
        return f"Start {task.data['start']}"

    def reply(self, message: Message) -> Outcome:
        self.turn += 1
        parts = {"length": len(message.content) / 10, "digits": float(sum(map(str.isdigit, message.content)))}
        return Outcome(parts, observation="Next" if self.turn < 3 else None, stop_reason="end")


@pytest.mark.parametrize("make", [lambda: GRPO(credit="turn"), GiGPO, GDPO])
def test_a_run_updates_the_weights(make: Any, quiet_trainer: Any) -> None:
    algorithm = make()
    data = RolloutDataModule(Steps(), groups=2, group_size=3, iterations=2, sampling=Sampling(max_tokens=6))
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert trainer.global_step == 2
    assert trainer.callback_metrics["train/grad_norm"] > 0
