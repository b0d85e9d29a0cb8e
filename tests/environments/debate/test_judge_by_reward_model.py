from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from mrlm_environments.debate.environment import DebateEnvironment
from mrlm_environments.debate.judge import Argument, Debate
from mrlm_environments.debate.judge_by_reward_model import RewardModelJudge, side_conversation

from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError, NonFiniteError
from mrlm_pl.reward_models import RewardModel, TextScore, TextScorer
from tests.support.models.verifier_models import Lengths, tiny

DEBATE = Debate(
    "Ban cars.",
    (Argument("PRO", "Yes."), Argument("CON", "No."), Argument("PRO", "Still yes."), Argument("CON", "Still no.")),
)
QUESTION = Message("user", "Debate: Ban cars.\nArgue for this.")


def test_each_side_is_scored_by_itself() -> None:
    question, reply = side_conversation(DEBATE, "PRO")
    assert (question, reply.content) == (QUESTION, "Yes.\n\nStill yes.")
    found = RewardModelJudge(Lengths(), scale=10.0).judge(DEBATE)
    # 16 and 14 characters
    assert found.score("PRO") == pytest.approx(1 / (1 + math.exp(-1.6)))
    assert found.score("CON") == pytest.approx(1 / (1 + math.exp(-1.4)))
    assert found.metrics == {"judge_truncated": 0.5}


@pytest.mark.parametrize("kind", ["classifier", "value"])
def test_a_debate_is_judged_and_swapping_sides_changes_the_scores(kind: str, tmp_path: Path) -> None:
    tiny(tmp_path, kind)
    environment = pickle.loads(
        pickle.dumps(DebateEnvironment(RewardModelJudge(RewardModel(str(tmp_path))), max_turns=1))
    )
    observations = environment.reset(Task("debate", "train", 0, 3, {"topic": "Ban cars."}))
    while observations:
        ((agent, _),) = observations.items()
        step = environment.step({agent: Message("assistant", f"I am {agent}. 漢\ud800")})
        observations = step.observations
    assert step.rewards["pro"] == -step.rewards["con"] != 0
    assert 0 < step.metrics["pro_score"] < 1
    assert step.metrics["judge_truncated"] == 0.0


class Chances(TextScorer):
    """A probability for each side."""

    def __init__(self, pro: float = 0.75) -> None:
        self.pro = pro

    @property
    def probability(self) -> bool:
        return True

    def score(self, messages: Sequence[Message]) -> TextScore:
        return TextScore(self.pro if messages == side_conversation(DEBATE, "PRO") else 0.5)


def test_probabilities_are_the_scores() -> None:
    found = RewardModelJudge(Chances()).judge(DEBATE)
    assert (found.score("PRO"), found.score("CON")) == (0.75, 0.5)
    with pytest.raises(NonFiniteError, match="nan"):
        RewardModelJudge(Chances(math.nan)).judge(DEBATE)
    with pytest.raises(ConfigurationError, match="scores of Chances are probabilities"):
        RewardModelJudge(Chances(), scale=2.0)


def test_a_scale_that_is_none() -> None:
    with pytest.raises(ConfigurationError, match="scale is 0"):
        RewardModelJudge(Lengths(), scale=0)
