"""Pairs of joint actions, of all agents together, from files or made of played episodes by their rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.algorithms import MADPO, PairwiseRewardModel
from mrlm_pl.data.files.chat_rows import record_rows, scored_row
from mrlm_pl.data.files.preferences import AnswerPair, PreferenceDataModule, pair_of, pair_rows, split_prompt
from mrlm_pl.episode import Episode, Message, Trajectory
from mrlm_pl.learner.credit.pairs import JointPair, RowPair, joint_pairs
from mrlm_pl.learner.credit.team import joint_conversation
from mrlm_pl.policy import ChatFormat
from mrlm_pl.reward_models.scorer import team_message


class JointPreferenceDataModule(PreferenceDataModule):
    """Pairs of joint actions for the same task, shuffled in each epoch.

    A data row is one of

    - ``{"agents": {AGENT: {"prompt": ..., "chosen": ..., "rejected": ...}, ...}}``: what each agent saw and said in the
      better and in the worse joint action. Every agent's part is a row of :class:`PreferenceDataModule`, plain text or
      messages; an agent that had no part in a pair is left out of it;
    - an episode, as ``mrlm collect --samples-per-task N`` and runs write them: of the episodes of a group, the best and
      the worst by the mean return of the agents are a pair when these differ by more than ``reward_gap``. All that an
      agent said in an episode counts, in whatever it had to answer; the sampled tokens are compared as they are when
      the agent's policy has the tokenizer and the chat template of the model that played.

    Each agent's rows are of the policy in its seat. Frozen policies, which are their own reference, and agents that act
    alike in both joint actions add nothing to the comparison and have no rows; pairs without any row are left out and
    counted. All rows of a pair are in one batch on one rank.

    ``PairwiseRewardModel`` is shown each joint action as the end of one conversation of the team, as
    ``ScoredEnvironment`` scores it: the observations of a step are one user's message, the joint action one reply.

    Args:
        train, validation, test, reward_gap, seed: see :class:`PreferenceDataModule`.
        batch_size: number of pairs of joint actions in a batch, on each rank.
        max_tokens: longest row in tokens; pairs with a longer one are left out and counted. None is the context window
            of the row's policy.

    Raises:
        DataError: a file is missing, a row lacks its fields, or episodes give no pair.
    """

    algorithms = (MADPO, PairwiseRewardModel)
    unit = "pair in which an agent whose policy is trained acts differently"
    compared = "the agents' mean return"
    form = "{agents: {AGENT: {prompt, chosen, rejected}, ...}}"

    def of_row(self, row: Mapping[str, Any]) -> dict[str, AnswerPair]:
        if not isinstance(row.get("agents"), dict):
            raise ValueError("it lacks the field 'agents'")
        pairs = {}
        for agent, answers in row["agents"].items():
            if answers is None:  # a table that was written as JSON fills it in
                continue
            try:
                if not isinstance(answers, dict):
                    raise ValueError(f"{answers!r:.80} is not an object")
                pairs[agent] = pair_of(answers)
            except ValueError as fault:
                raise ValueError(f"agent {agent!r}: {fault}") from fault
        if not pairs:
            raise ValueError("its field 'agents' names no agent")
        return pairs

    def pairs_of(self, episodes: Sequence[Episode]) -> list[Any]:
        return list(joint_pairs(episodes, self.reward_gap))

    def tokenized(self, example: Any) -> list[RowPair]:
        if isinstance(self.algorithm(), PairwiseRewardModel):
            name, policy = self.learner()
            prompt, *answers = team_parts(example, policy.chat)
            best, worst = (scored_row(prompt, answer, policy.chat, name) for answer in answers)
            return [] if best == worst else [RowPair((best,), (worst,))]
        chosen: list[Trajectory] = []
        rejected: list[Trajectory] = []
        sides = [episode.trajectories for episode in example] if isinstance(example, JointPair) else [example]
        for agent in dict.fromkeys(agent for side in sides for agent in side):
            better, worse = self._rows_of_agent(example, agent)
            if _tokens(better) != _tokens(worse):
                chosen += better
                rejected += worse
        return [RowPair(tuple(chosen), tuple(rejected))]

    def _rows_of_agent(self, example: Any, agent: str) -> tuple[Sequence[Trajectory], Sequence[Trajectory]]:
        name = self.algorithm().seat(agent)
        policy = self.algorithm().policy(name)
        if not policy.trained:
            return (), ()
        if isinstance(example, JointPair):
            sides = [record_rows(episode.trajectories.get(agent, ()), policy.chat, name) for episode in example]
        else:
            sides = [[row] for row in pair_rows(example[agent], policy.chat, name)]
        better, worse = ([dataclasses.replace(row, agent=agent) for row in rows if row.num_actions] for rows in sides)
        return better, worse


def team_parts(
    example: JointPair | Mapping[str, AnswerPair], chat: ChatFormat
) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message]]:
    """Return the prompt and the messages of both joint actions of a pair, in which the team is one assistant."""
    if isinstance(example, JointPair):
        return split_prompt(*map(joint_conversation, example))
    agents = {agent: pair.parts(chat) for agent, pair in example.items()}
    prompt, chosen, rejected = ({agent: parts[index] for agent, parts in agents.items()} for index in range(3))
    return [team_message("user", prompt)], [team_message("assistant", chosen)], [team_message("assistant", rejected)]


def _tokens(rows: Sequence[Trajectory]) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    return [(row.token_ids, row.action_mask) for row in rows]
