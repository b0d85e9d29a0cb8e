"""Pairs of joint actions, of all agents together, from files or made of played episodes by their rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from mrlm_pl.algorithms import MADPO
from mrlm_pl.data.files.chat_rows import played_rows, read_examples
from mrlm_pl.data.files.preferences import PreferenceDataModule, RowPair, pair_fault, pair_rows, with_prompt
from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.errors import DataError
from mrlm_pl.learner.algorithm import Algorithm


class JointPair(NamedTuple):
    """The best and the worst episode of a group."""

    chosen: Episode
    rejected: Episode


class JointPreferenceDataModule(PreferenceDataModule):
    """Pairs of joint actions for the same task, shuffled anew in each epoch.

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

    Args:
        train, validation, test, reward_gap, seed: see :class:`PreferenceDataModule`.
        batch_size: pairs of joint actions in a batch, on each rank.
        max_tokens: pairs with a longer row are left out and counted; None is the context window of the row's policy.

    Raises:
        DataError: a file is missing, a row lacks its fields, or episodes give no pair.
    """

    algorithm_classes: ClassVar[tuple[type[Algorithm], ...]] = (MADPO,)

    def read_pairs(self, source: str, split: str) -> list[Any]:
        rows, episodes = read_examples(source, split)
        if episodes:
            pairs = joint_pairs(episodes, self.reward_gap)
            if not pairs:
                raise DataError(
                    f"{source}: no two episodes of a group differ by more than {self.reward_gap} in the agents' mean "
                    "return; collect several of each task with `mrlm collect --samples-per-task 8`, or lower "
                    "data.reward_gap"
                )
            return list(pairs)
        return [_parts(row, f"{source}, row {number}") for number, row in rows]

    def row_pair(self, example: Any, where: str) -> RowPair:
        chosen: list[Trajectory] = []
        rejected: list[Trajectory] = []
        sides = [episode.trajectories for episode in example] if isinstance(example, JointPair) else [example]
        for agent in dict.fromkeys(agent for side in sides for agent in side):
            better, worse = self._rows_of_agent(example, agent, where)
            if _tokens(better) != _tokens(worse):
                chosen += better
                rejected += worse
        return RowPair(tuple(chosen), tuple(rejected))

    def _rows_of_agent(self, example: Any, agent: str, where: str) -> tuple[Sequence[Trajectory], Sequence[Trajectory]]:
        name = self.algorithm().seat(agent)
        policy = self.algorithm().policy(name)
        if not policy.trained:
            return (), ()
        if isinstance(example, JointPair):
            sides = [
                [made for row in episode.trajectories.get(agent, ()) for made in played_rows(row, policy.chat, name)]
                for episode in example
            ]
        else:
            sides = [[row] for row in pair_rows(example[agent], policy.chat, name, f"{where}, agent {agent!r}")]
        better, worse = ([dataclasses.replace(row, agent=agent) for row in rows if row.num_actions] for rows in sides)
        return better, worse

    def _learnable(self, pairs: Sequence[RowPair], source: str) -> list[RowPair]:
        different = [pair for pair in pairs if pair.rows()]
        if not different:
            raise DataError(
                f"{source}: in no pair does an agent whose policy is trained act differently in the two joint actions"
            )
        return super()._learnable(different, source)

    def uses_reference(self) -> bool:
        return True


def joint_pairs(episodes: Sequence[Episode], reward_gap: float = 0.0) -> list[JointPair]:
    """The best against the worst episode of each group, by the mean return of the agents.

    Of equal returns the first counts. Left out are failed episodes, and groups that differ by ``reward_gap`` or less.

    Args:
        episodes: of any number of groups.
        reward_gap: least difference of the mean returns, exclusive.
    """
    groups: dict[tuple[str, str], list[Episode]] = {}
    for episode in episodes:
        if not episode.failed:
            groups.setdefault((episode.task.key, episode.group), []).append(episode)
    pairs = []
    for members in groups.values():
        best = max(members, key=lambda episode: episode.reward)
        worst = min(members, key=lambda episode: episode.reward)
        if best.reward - worst.reward > reward_gap:
            pairs.append(JointPair(best, worst))
    return pairs


def _tokens(rows: Sequence[Trajectory]) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    return [(row.token_ids, row.action_mask) for row in rows]


def _parts(row: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """What a data row tells of each agent, by agent."""
    agents = row.get("agents")
    if not isinstance(agents, dict):
        raise DataError(
            f"{where}: it lacks the field 'agents'; a row is {{agents: {{AGENT: {{prompt, chosen, rejected}}, ...}}}}, "
            f"and this one has the fields {sorted(row)}"
        )
    parts = {agent: part for agent, part in agents.items() if part is not None}  # parquet fills in None
    if not parts:
        raise DataError(f"{where}: its field 'agents' names no agent")
    for agent, part in parts.items():
        fault = pair_fault(part) if isinstance(part, dict) else f"{part!r:.80} is no object"
        if fault:
            raise DataError(f"{where}, agent {agent!r}: {fault}; an agent's part is {{prompt, chosen, rejected}}")
    return {agent: with_prompt(part) for agent, part in parts.items()}
