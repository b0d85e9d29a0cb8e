"""The metrics of a rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from mrlm_pl.episode import Episode, Trajectory, Turn, by_group, is_tree_path, judging_environments, turns_by_step
from mrlm_pl.evaluation.agents import Components, components_by_agent, means_by_agent, stop_reasons, without_sole_owners
from mrlm_pl.grouping import grouped, summed, summed_pairs
from mrlm_pl.learner.credit.returns import equal_returns
from mrlm_pl.reward_models.scorer import VERIFIER_SCORE
from mrlm_pl.rollout.tree_player import THRESHOLD_STOP, UNEXPANDED_STOP
from mrlm_pl.turn_tree import TurnTree

_OF_TASKS = ("reward", "success")
AgentReturns = tuple[tuple[str, float], ...]
"""The return of each agent in an episode, with its name."""


def distinct_turns(episodes: Sequence[Episode]) -> list[tuple[Turn, Trajectory]]:
    """Return every sampled decision once, with a row that contains it; paths of a turn tree share decisions."""
    plain = [episode for episode in episodes if not is_tree_path(episode)]
    decisions = [(turn, row) for episode in plain for row in episode.rows() for turn in row.turns if not turn.scripted]
    for tree in map(TurnTree.of, by_group(filter(is_tree_path, episodes)).values()):
        decisions += tree.decisions.values()
    return decisions


def path_weights(episodes: Sequence[Episode]) -> list[float]:
    """Return the probability of each episode when joint actions of a state are equally likely; 1 outside turn trees.

    Without these weights, states with more branches would dominate a mean over the paths. Paths that the tree did not
    expand, because another was better, have 0: their outcome is unknown.
    """
    expanded = [episode for episode in episodes if episode.stop_reason != UNEXPANDED_STOP and is_tree_path(episode)]
    weights: dict[tuple[str, str], float] = {}
    for tree in map(TurnTree.of, by_group(expanded).values()):
        children = tree.children()
        for path in tree.paths:
            states = [next(iter(by_agent.values()))[0].node for by_agent in turns_by_step(path).values()]
            weights[path.group, path.id] = math.prod(1 / len(children[node]) for node in states)
    return [
        0.0 if episode.stop_reason == UNEXPANDED_STOP else weights.get((episode.group, episode.id), 1.0)
        for episode in episodes
    ]


def token_count(episodes: Sequence[Episode], turns: Sequence[tuple[Turn, Trajectory]] | None = None) -> float:
    """Return the number of tokens sampled for these episodes, with retries; shared tokens of tree paths count once.

    ``turns`` are their :func:`distinct_turns`; None finds them here.
    """
    retried = sum(episode.retried_tokens for episode in episodes)
    turns = distinct_turns(episodes) if turns is None else turns
    return float(retried + sum(turn.stop - turn.start for turn, _ in turns))


@dataclass
class CollectionSums:
    """Sums behind the logged numbers of a rollout; see :class:`~mrlm_pl.data.rollout.collection.RolloutCollection`.

    Attributes:
        means: (sum, count) of the logged means, by name.
        sums: numbers logged as sums, by name.
        successes: (successes, episodes) by judging environment.
        components: reward components and stop reasons, by the prefix of their names.
        played: numbers of episodes, decisions and generated tokens, including those that are not trained on.
        returns: distinct combinations of the agents' returns in an episode.
    """

    means: dict[str, tuple[float, float]]
    sums: dict[str, float]
    successes: dict[str, tuple[float, float]] = field(default_factory=dict)
    components: dict[str, Components] = field(default_factory=dict)
    played: dict[str, float] = field(default_factory=dict)
    returns: frozenset[AgentReturns] = frozenset()

    @classmethod
    def of(
        cls,
        episodes: Sequence[Episode],
        seconds: float,
        lacks_signal: Callable[[Sequence[Episode]], bool] = equal_returns,
        unused: Sequence[Episode] = (),
        branches: Sequence[Episode] = (),
        by_task: bool = False,
        earlier_tokens: float = 0.0,
        judging: Collection[str] | None = None,
    ) -> CollectionSums:
        """Return the sums of the episodes that one rank played.

        Args:
            episodes: episodes that train.
            seconds: duration of the collection.
            lacks_signal: function that returns whether a group carries no learning signal.
            unused: other episodes that were played in that time; they count in the throughput, and may have failed.
            branches: episodes among ``unused`` that complete the groups of the training ones.
            by_task: whether reward and success are also measured by environment.
            earlier_tokens: number of tokens that were sampled in these seconds for other collections.
            judging: environments that judge, on any rank; None takes those that judged one of ``episodes``.
        """
        played = [episode for episode in episodes if not episode.failed]
        turns, weights = distinct_turns(played), path_weights(played)
        judges = judging_environments(played) if judging is None else judging
        outcomes = outcome_sums(played, weights, judges, by_task)
        by_environment = grouped(
            (episode.task.environment, (episode.components(), weight))
            for episode, weight in zip(played, weights, strict=True)
        )
        groups = by_group(played)
        for branch in branches:
            if branch.group in groups:
                groups[branch.group].append(branch)
        means = {
            "rollout/zero_variance_groups": (float(sum(map(lacks_signal, groups.values()))), len(groups)),
            **outcomes,
        }
        components = {f"rollout/{name}/": Components.of(pairs) for name, pairs in by_environment.items()}
        means |= {f"rollout/{name}": sums for name, sums in means_by_agent(played, weights, turns).items()}
        by_agent = components_by_agent(played, weights)
        components |= {
            f"rollout/agent/{agent}/components/": agent_components for agent, agent_components in by_agent.items()
        }
        components["rollout/"] = stop_reasons(played, weights)
        phases = grouped(phase for episode in played for phase in episode.timings.items())
        means |= {f"rollout/seconds/{phase}": (math.fsum(spent), len(spent)) for phase, spent in phases.items()}
        everything = [*episodes, *unused]
        sampled = turns if len(everything) == len(played) else distinct_turns(everything)
        counts = {
            "episodes": float(len(everything)),
            "failed_episodes": float(sum(episode.failed for episode in everything)),
            "decisions": float(len(sampled) + sum(episode.retried_decisions for episode in everything)),
            "generated_tokens": token_count(everything, sampled),
        }
        sums = {
            "rollout/tokens_per_second": (counts["generated_tokens"] + earlier_tokens) / seconds,
            "rollout/failed_episodes": counts["failed_episodes"],
            "rollout/retries": float(sum(episode.attempts - 1 for episode in everything)),
            "rollout/row_restarts": float(sum(episode.row_restarts for episode in played)),
        }
        returns = frozenset(tuple(sorted(episode.rewards().items())) for episode in played)
        return cls(means, sums, components=components, played=counts, returns=returns)

    def plus(self, other: CollectionSums) -> CollectionSums:
        """Return the sums of both."""
        means = summed_pairs([*self.means.items(), *other.means.items()])
        successes = summed_pairs([*self.successes.items(), *other.successes.items()])
        sums = summed([*self.sums.items(), *other.sums.items()])
        components = {
            prefix: self.components.get(prefix, Components()).plus(other.components.get(prefix, Components()))
            for prefix in {**self.components, **other.components}
        }
        played = summed([*self.played.items(), *other.played.items()])
        return CollectionSums(means, sums, successes, components, played, self.returns | other.returns)

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log."""
        logged = {
            prefix + name: mean
            for prefix, components in self.components.items()
            for name, mean in components.means().items()
        }
        logged |= {name: total / count for name, (total, count) in self.means.items() if count}
        return without_sole_owners(logged, "rollout/") | self.sums


def outcome_sums(
    episodes: Sequence[Episode], weights: Sequence[float], judging: Collection[str], by_task: bool
) -> dict[str, tuple[float, float]]:
    """Return (weighted sum, weight) of each number of episodes whose mean is logged, by name.

    Args:
        episodes: episodes that did not fail.
        weights: weight of each episode; see :func:`path_weights`.
        judging: environments that judge; others have no success.
        by_task: whether reward and success are also measured by environment.
    """
    values: dict[str, list[tuple[float, float]]] = {}
    for episode, weight in zip(episodes, weights, strict=True):
        environment = episode.task.environment
        named_numbers = {f"{environment}/{name}": value for name, value in episode.metrics.items()}
        named_numbers["reward"] = episode.reward
        if environment in judging and episode.stop_reason not in (THRESHOLD_STOP, UNEXPANDED_STOP):
            named_numbers["success"] = float(bool(episode.success))
            if VERIFIER_SCORE in episode.metrics:
                named_numbers[f"{environment}/accuracy"] = named_numbers["success"]
        if by_task:
            named_numbers |= {
                f"{environment}/{name}": named_numbers[name] for name in _OF_TASKS if name in named_numbers
            }
        for name, value in named_numbers.items():
            values.setdefault(f"rollout/{name}", []).append((value * weight, weight))
    return {
        name: (math.fsum(value for value, _ in pairs), math.fsum(weight for _, weight in pairs))
        for name, pairs in values.items()
    }
