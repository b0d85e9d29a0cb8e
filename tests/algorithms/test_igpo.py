"""IGPO's gains, against log-probabilities from the model itself, and in a run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mrlm_environments import Halves, MathEnvironment

from mrlm_pl.algorithms import GRPO, IGPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Task
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from tests.support.models.device_without_float64 import WithoutFloat64
from tests.support.runs.turn_episodes import advantages, episode

REWARDS = ([("s", 0.0), ("t", 0.0), ("u", 1.0)], [("s", 0.0), ("t", 0.5)])


@pytest.fixture
def policies(model_folder: Path) -> dict[str, Policy]:
    return {"main": Policy(str(model_folder))}


@pytest.fixture
def episodes() -> list[Episode]:
    task = Task("t", "train", 0, data={"answer": "42", "label": "7"})
    return [replace(episode(n, "g", {"a": played}), task=task) for n, played in enumerate(REWARDS)]


def mean_logp(policy: Policy, history: list[int], reply: str) -> float:
    """Return the mean log-probability of the reply's tokens and the end of the turn, from the model's own logits."""
    answer = [*policy.tokenizer(reply)["input_ids"], policy.chat.end_id]
    with torch.no_grad():
        logits = policy.model(torch.tensor([history + answer])).logits[0].double()
    found = logits.log_softmax(-1)[torch.arange(len(history), len(history + answer)) - 1, torch.tensor(answer)]
    return float(found.mean())


@pytest.mark.parametrize(
    ("options", "reply", "weight"),
    [({}, "42", 1.0), ({"answer_key": "label", "answer_form": "={answer}.", "gain_weight": 2.0}, "=7.", 2.0)],
)
def test_a_turn_earns_the_gain_in_the_answers_log_probability(
    options: dict[str, Any], reply: str, weight: float, policies: Any, episodes: list[Episode], quiet_trainer: Any
) -> None:
    algorithm = IGPO(policies, normalize=False, **options)
    found = advantages(algorithm, episodes, quiet_trainer())
    # Tokens 8, 9, 10, ...; each turn is one observed token and one sampled one.
    before = [mean_logp(policies["main"], list(range(8, 8 + length)), reply) for length in (1, 3, 5)]
    first, second = (weight * (later - earlier) for earlier, later in itertools.pairwise(before))
    returns = [[first + second + 1, second + 1, 1.0], [first + 0.5, 0.5]]
    assert found[0] == pytest.approx([returns[0][0] - returns[1][0], returns[0][1] - returns[1][1], 1.0], abs=1e-5)
    assert found[1] == pytest.approx([returns[1][0] - returns[0][0], returns[1][1] - returns[0][1]], abs=1e-5)
    gained = algorithm.metrics.take_rollout()["train/information_gain"]
    assert gained == pytest.approx((first + second + first) / weight / 3, abs=1e-5)


def test_episodes_of_one_turn_have_no_gain(policies: Any, episodes: list[Episode], quiet_trainer: Any) -> None:
    algorithm = IGPO(policies, normalize=False)
    played = [replace(episode(n, "g", {"a": [("s", float(n))]}), task=episodes[0].task) for n in range(2)]
    assert advantages(algorithm, played, quiet_trainer()) == [[-1.0], [1.0]]
    assert "train/information_gain" not in algorithm.metrics.take_rollout()


def test_the_first_of_several_accepted_answers_is_scored(
    policies: Any, episodes: list[Episode], quiet_trainer: Any
) -> None:
    several = [replace(one, task=replace(one.task, data={"answer": ["42", "7"]})) for one in episodes]
    expected = advantages(IGPO(policies), episodes, quiet_trainer())
    assert advantages(IGPO(policies), several, quiet_trainer()) == expected


@pytest.mark.parametrize("none", [[], (), "", [""], None])
def test_a_task_without_an_answer_is_named(
    policies: Any, episodes: list[Episode], quiet_trainer: Any, none: Any
) -> None:
    without = [replace(one, task=replace(one.task, data={"answer": none})) for one in episodes]
    with pytest.raises(ConfigurationError, match="has no reference answer in the field 'answer'"):
        advantages(IGPO(policies), without, quiet_trainer())


def test_gains_need_no_float64_of_the_model_s_device(
    policies: Any, episodes: list[Episode], quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = advantages(IGPO(policies), episodes, quiet_trainer())
    forward = Policy.forward
    monkeypatch.setattr(Policy, "forward", lambda *args, **inputs: forward(*args, **inputs).as_subclass(WithoutFloat64))
    assert advantages(IGPO(policies), episodes, quiet_trainer()) == host


def test_without_weight_it_is_grpo_by_turn(policies: Any, episodes: list[Episode], quiet_trainer: Any) -> None:
    alone = advantages(IGPO(policies, gain_weight=0.0, gamma=0.9), episodes, quiet_trainer())
    assert alone == advantages(GRPO(policies, credit="turn", gamma=0.9), episodes, quiet_trainer())


def test_an_answer_beyond_the_context_window_gives_no_gain(
    policies: Any, episodes: list[Episode], quiet_trainer: Any
) -> None:
    algorithm = IGPO(policies, normalize=False)
    for name in algorithm.policies:
        algorithm.policy(name).context_window = 1 + 3 + 2  # "42" and the end have three tokens
    advantages(algorithm, episodes, quiet_trainer())
    before = [mean_logp(policies["main"], list(range(8, 8 + length)), "42") for length in (1, 3)]
    gained = algorithm.metrics.take_rollout()["train/information_gain"]
    assert gained == pytest.approx(2 * (before[1] - before[0]) / 3, abs=1e-5), "the third history does not fit"


def test_groups_with_turns_to_compare_have_a_signal(policies: Any, episodes: list[Episode]) -> None:
    assert not IGPO(policies).lacks_signal([episodes[0], replace(episodes[0], id="again")])
    single = replace(episode(0, "g", {"a": [("s", 1.0)]}), task=episodes[0].task)
    assert IGPO(policies).lacks_signal([single, replace(single, id="again")])


def test_an_environment_without_references_is_refused(quiet_trainer: Any) -> None:
    data = RolloutDataModule(Halves(), groups=1, group_size=2, iterations=1, sampling=Sampling(max_tokens=2))
    with pytest.raises(ConfigurationError, match=r"has no reference answer in the field 'answer' of its data, which"):
        quiet_trainer().fit(IGPO(), data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gain_weight": -1.0}, "gain_weight is -1.0"),
        ({"answer_form": "The answer"}, r"answer_form is 'The answer'; put \{answer\}"),
        ({"gamma": 2.0}, "gamma is 2.0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        IGPO(**options)


def test_a_run_updates_the_weights(quiet_trainer: Any) -> None:
    environment = MathEnvironment(max_attempts=3)
    data = RolloutDataModule(environment, groups=2, group_size=4, iterations=2, sampling=Sampling(max_tokens=12))
    trainer = quiet_trainer()
    trainer.fit(IGPO(), data)
    assert trainer.global_step == 2
    assert trainer.callback_metrics["train/grad_norm"] > 0
    assert trainer.callback_metrics["train/information_gain"] != 0
