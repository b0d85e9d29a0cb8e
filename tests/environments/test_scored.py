"""A reward model instead of an environment's rewards, from joint preferences to a team that learns from its scores."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import CoordinationGame, QuestionEnvironment, ScoredEnvironment

from mrlm_pl.algorithms import GRPO, MADPO, PairwiseRewardModel
from mrlm_pl.data import JointPreferenceDataModule, RolloutDataModule
from mrlm_pl.data.rollout.collection import CollectionObserver
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.credit.team import joint_conversation
from mrlm_pl.policy import Policy
from mrlm_pl.reward_models import RewardModel, TextScore, TextScorer


class Letters(TextScorer):
    """A logit of the letters b in the last message, and the conversations that were scored."""

    def __init__(self) -> None:
        self.seen: list[list[Message]] = []

    def score(self, messages: Any) -> TextScore:
        self.seen.append(list(messages))
        return TextScore(float(messages[-1].content.count("b")))


class Relay(Environment):
    """``second`` speaks, then ``first`` hears it and both speak."""

    name = "relay"
    agents = ("second", "first")
    forks = True

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(4)])

    def reset(self, task: Task) -> Observations:
        self.turn = 0
        return {"second": [Message("system", "Be brief."), Message("user", f"Begin {task.data['n']}")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        self.turn += 1
        if self.turn == 2:
            return Step(rewards={"first": 3.0}, done=True, stop_reason="end", success=True)
        said = actions["second"].content
        return Step(
            {"first": [Message("user", f"It said {said}")], "second": [Message("user", "Go on")]}, {"second": 1}
        )


def test_the_team_earns_the_score_of_its_conversation_at_the_end() -> None:
    scorer = Letters()
    environment = ScoredEnvironment(Relay(), scorer)
    task = environment.tasks("train")[1]
    assert (environment.name, environment.agents) == ("relay", ("second", "first"))
    environment.reset(task)
    first = environment.step({"second": Message("assistant", "x")})
    assert (first.rewards, first.components, scorer.seen) == ({}, {}, [])
    other = environment.copy()
    last = environment.step({"second": Message("assistant", "b"), "first": Message("assistant", "bb")})
    score = 1 / (1 + math.exp(-3))
    assert last.rewards == pytest.approx({"second": score, "first": score})
    assert last.components["first"] == {"reward_model": last.rewards["first"]}
    assert last.metrics == pytest.approx({"verifier_score": score, "task_reward": (1 + 3) / 2})
    assert (last.success, last.stop_reason) == (True, "end")
    assert [(message.role, message.content) for message in scorer.seen[0]] == [
        ("user", "[second] system: Be brief.\n[second] user: Begin 1"),
        ("assistant", "[second] assistant: x"),
        ("user", "[first] user: It said x\n[second] user: Go on"),
        ("assistant", "[first] assistant: bb\n[second] assistant: b"),
    ]
    fork = other.step({"second": Message("assistant", "y"), "first": Message("assistant", "z")})
    assert fork.rewards["first"] == 0.5, "a fork has its own conversation"


def test_a_single_agents_conversation_is_scored_as_its_pairs_are_trained() -> None:
    scorer = Letters()
    environment = ScoredEnvironment(QuestionEnvironment({"train": [{"prompt": "B?"}]}, [lambda reply, row: 0]), scorer)
    environment.reset(environment.tasks("train")[0])
    environment.step({"agent": Message("assistant", "bb")})
    assert scorer.seen == [[Message("user", "B?"), Message("assistant", "bb")]]


def test_async_environments_are_refused() -> None:
    class Slow(Relay):
        name = "slow"

        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            return super().step(actions)

    with pytest.raises(ConfigurationError, match="environment 'slow' has async methods"):
        ScoredEnvironment(Slow(), Letters())


class Episodes(CollectionObserver):
    def __init__(self) -> None:
        self.played: list[Episode] = []

    def on_collection(self, trainer: Any, episodes: Any) -> None:
        self.played += episodes


def test_a_record_is_the_conversation_that_was_scored(model_folder: Path, quiet_trainer: Any) -> None:
    from lightning.pytorch.callbacks import Callback

    class Watch(Episodes, Callback):
        pass

    watch, scorer = Watch(), Letters()
    options: dict[str, Any] = {"groups": 2, "group_size": 2, "iterations": 1, "sampling": Sampling(max_tokens=4)}
    data = RolloutDataModule(ScoredEnvironment(Relay(), scorer), save_episodes=False, **options)
    quiet_trainer(callbacks=[watch]).fit(GRPO({"main": Policy(str(model_folder))}), data)
    assert len(watch.played) == 4
    recorded = [joint_conversation(episode) for episode in watch.played]
    assert all(conversation in scorer.seen for conversation in recorded)
    assert all(len(conversation) == 4 for conversation in recorded)


def row(number: int, chosen: tuple[str, str], rejected: tuple[str, str]) -> dict[str, Any]:
    question = {"role": "user", "content": f"Game {number}: C or A?"}
    agents = {}
    for place, agent in enumerate(("row", "column")):
        answers = ({"role": "assistant", "content": side[place]} for side in (chosen, rejected))
        agents[agent] = dict(zip(("prompt", "chosen", "rejected"), ([question], *([a] for a in answers)), strict=True))
    return {"agents": agents}


@pytest.mark.long
def test_joint_preferences_train_a_reward_model_that_trains_a_team(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    rows = [row(n, ("C", "C"), [("C", "A"), ("A", "C"), ("A", "A")][n % 3]) for n in range(9)]
    rows.append(row(9, ("C", "C"), ("C", "C")))
    source = tmp_path / "joint.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in rows))
    data = JointPreferenceDataModule(str(source), batch_size=9)
    trainer = quiet_trainer(max_epochs=25)
    trainer.fit(PairwiseRewardModel({"main": Policy(str(model_folder), learning_rate=1e-2)}), data)
    assert len(data.examples["train"]) == 9, "a joint action is not compared with itself"
    decode = data.learner()[1].tokenizer.decode
    assert decode(data.examples["train"][1].rejected[0].token_ids) == (
        "<|user|>[column] user: Game 1: C or A?\n[row] user: Game 1: C or A?<|end|>"
        "<|assistant|>[column] assistant: C\n[row] assistant: A<|end|>"
    )
    assert trainer.callback_metrics["train/pair_accuracy"] == 1.0

    model = RewardModel(str(Path(trainer.default_root_dir) / "policies" / "main"))
    game = ScoredEnvironment(CoordinationGame(), model)
    earned = {}
    for replies in (("C", "C"), ("C", "A"), ("A", "A")):
        game.reset(game.tasks("train")[0])
        actions = {agent: Message("assistant", reply) for agent, reply in zip(game.agents, replies, strict=True)}
        earned[replies] = game.step(actions).rewards["row"]
    assert earned["C", "C"] > max(earned["C", "A"], earned["A", "A"])
    policies = {name: Policy(str(model_folder)) for name in ("first", "second")}
    options: dict[str, Any] = {"groups": 2, "group_size": 4, "iterations": 1, "sampling": Sampling(max_tokens=2)}
    trainer = quiet_trainer()
    trainer.fit(MADPO(policies, {"row": "first", "column": "second"}), RolloutDataModule(game, **options))
    assert 0 < float(trainer.callback_metrics["rollout/reward"]) < 1
    assert float(trainer.callback_metrics["rollout/coordination/task_reward"]) >= 0
