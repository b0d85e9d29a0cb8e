"""A team that one agent plays: its prompt, the parts of its reply, and their rewards."""

from __future__ import annotations

from typing import Any

import mrlm_environments
import pytest
from mrlm_environments import (
    Centralized,
    CoordinationGame,
    Halves,
    KuhnPoker,
    LengthRatioGame,
    TicTacToe,
    ToolEnvironment,
)

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Environment, Message, Observations, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.errors import ConfigurationError


def reply(environment: Environment, *texts: str) -> Step:
    """Return the last step of the first task's episode."""
    environment.reset(environment.tasks("train")[0])
    for text in texts:
        step = environment.step({"team": Message("assistant", text)})
    return step


TEAMS = """
    Halves KuhnPoker LengthRatioGame WritingEnvironment DebateEnvironment CollaborativeReasoningEnvironment
    CollaborativeCodingEnvironment ClassCompletionEnvironment
"""


@pytest.mark.parametrize("team", TEAMS.split())
@pytest.mark.long_after(2)
def test_the_contract_is_kept_with_every_team(team: str) -> None:
    check_environment(Centralized(getattr(mrlm_environments, team)())).raise_on_failure()


def test_one_agent_reads_all_messages() -> None:
    team = Halves()
    task = team.tasks("train")[0]
    question = task.data["question"]
    ((agent, (message,)),) = Centralized(team).reset(task).items()
    assert (agent, message.role) == ("team", "user")
    assert message.content == (
        f"<agent_1>\n{question}\n</agent_1>\n<agent_2>\n{question}\n</agent_2>\n"
        "Write all replies: <agent_1>...</agent_1> <agent_2>...</agent_2>"
    )


@pytest.mark.parametrize(
    ("text", "separator", "reward", "found"),
    [
        ("<agent_1>C</agent_1><agent_2>C</agent_2>", None, (1.0 + 1.0) / 2, 2),
        ("Well. <agent_2>A</agent_2>\n<agent_1>C</agent_1>", None, (0.0 + 0.4) / 2, 2),
        ("<agent_1>C<agent_2>C", None, 1.0, 2),  # truncated before a tag closes
        ("<agent_1>A</agent_1>", None, 0.4 / 2, 1),  # the other one's reply is empty
        ("<agent_1>C</agent_1><agent_1>A</agent_1>", None, 0.0, 1),  # the first part counts: C alone
        ("C C", None, 0.0, 0),
        ("<agent_7>C</agent_7>", None, 0.0, 0),
        ("", None, 0.0, 0),
        ("C|C", "|", 1.0, 2),
        ("A | C | C", "|", 0.4 / 2, 2),  # the second part is "C | C": its first letter counts
        ("A", "|", 0.4 / 2, 1),
    ],
)
def test_rewards_are_the_means_over_the_team(text: str, separator: str | None, reward: float, found: int) -> None:
    step = reply(Centralized(CoordinationGame(), separator), text)
    assert step.rewards == {"team": pytest.approx(reward)}
    assert sum(step.components["team"].values()) == pytest.approx(reward)
    assert (step.metrics["split"], step.metrics["split_of"]) == (found, 2)


def test_parts_of_all_rounds_count() -> None:
    # The band is 2 to 3: lengths of 4 and 8 earn 1, one text alone 0.
    step = reply(Centralized(LengthRatioGame(), "|"), "abcd|abcdefgh", "abcd")
    assert step.done
    assert step.rewards["team"] == 0.0
    assert (step.metrics["split"], step.metrics["split_of"]) == (3, 4)


def test_an_agent_alone_needs_no_tags() -> None:
    game = Centralized(KuhnPoker())
    observations: Observations = game.reset(game.tasks("train")[0])
    assert "<agent_" in observations["team"][0].content
    step = game.step({"team": Message("assistant", "B")})
    assert step.metrics["split"] == 1
    step = game.step({"team": Message("assistant", "P")})
    assert step.done  # a pass after a bet folds


@pytest.mark.parametrize(
    ("team", "separator", "replies"),
    [
        (Halves(), None, ["<agent_1>a</agent_1>\n<agent_2>c</agent_2>"]),
        (Halves("sunset"), "|", ["sun|set"]),
        (TicTacToe(), None, [f"<agent_{1 + n % 2}>{cell}</agent_{1 + n % 2}>" for n, cell in enumerate("512837469")]),
    ],
)
def test_gold_replies_hold_those_of_the_agents_that_are_due(team: Any, separator: Any, replies: list[str]) -> None:
    environment = Centralized(team, separator)
    tasks = environment.tasks("train")
    task = next(tasks[n] for n in range(99) if tasks[n].data.get("first", "alpha") == "alpha")
    assert environment.gold(task) == {"team": replies}
    assert environment.bounds(task) == ((0.0, 0.0) if isinstance(team, TicTacToe) else (0.0, 1.0))
    assert Centralized(KuhnPoker()).gold(task) is None


def test_a_copy_continues_by_itself() -> None:
    game = Centralized(LengthRatioGame(), "|")
    game.reset(game.tasks("train")[0])
    game.step({"team": Message("assistant", "abcd|abcdefgh")})
    fork = game.copy()
    assert fork.step({"team": Message("assistant", "abcd|abcdefgh")}).metrics["split"] == 4
    assert game.step({"team": Message("assistant", "x")}).metrics["split"] == 3


class Awaited(Environment):
    name = "awaited"

    def tasks(self, split: str) -> Any: ...

    async def reset(self, task: Task) -> Observations: ...  # type: ignore[override]

    async def step(self, actions: Any) -> Step: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Awaited(),), "environment 'awaited' is async or on a server; let the server play it"),
        ((ToolEnvironment(),), "agent 'agent' of environment 'tools' has tools"),
        ((Halves(), ""), "separator is empty"),
    ],
)
def test_what_cannot_be_split_is_named(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Centralized(*arguments)


def test_one_policy_is_trained_on_joint_replies(quiet_trainer: Any) -> None:
    algorithm = GRPO()
    data = RolloutDataModule(
        Centralized(mrlm_environments.WordEmission(), " "),
        groups=2,
        group_size=8,
        iterations=2,
        sampling=Sampling(max_tokens=16),
    )
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert trainer.callback_metrics["train/grad_norm"] > 0
    assert 0 < trainer.callback_metrics["rollout/word_emission/split"] <= 2
