"""The metrics of a rollout, on one rank and over all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mrlm_pl.episode import Episode
from mrlm_pl.evaluation.agents import Components, components_by_agent, means_by_agent, stop_reasons, without_sole_owners
from mrlm_pl.evaluation.report import judging_environments
from mrlm_pl.learner.credit.groups import equal_returns
from mrlm_pl.reward_models.scorer import VERIFIER_SCORE
from mrlm_pl.rollout.turn_tree import TREE_STOPS, distinct_turns, path_weights

_OF_TASKS = ("reward", "success")
_Sums = dict[str, tuple[float, float]]
Returns = tuple[tuple[str, float], ...]
"""The return of each agent in an episode, with its name."""


def _added(first: _Sums, second: _Sums) -> _Sums:
    found = dict(first)
    for name, (total, count) in second.items():
        before = found.get(name, (0.0, 0.0))
        found[name] = (before[0] + total, before[1] + count)
    return found


def success_counts(episodes: Sequence[Episode]) -> dict[str, tuple[float, float]]:
    """Return (successes, episodes) of each environment that was played; (0, 0) of one that does not judge.

    Paths of a turn tree count as :func:`mrlm_pl.rollout.turn_tree.path_weights` says; what failed is no outcome.
    """
    played = [episode for episode in episodes if not episode.failed]
    judging = judging_environments(played)
    found: _Sums = {episode.task.environment: (0.0, 0.0) for episode in played}
    for episode, weight in zip(played, path_weights(played), strict=True):
        if episode.task.environment in judging and episode.stop_reason not in TREE_STOPS:
            outcome = {episode.task.environment: (weight * bool(episode.success), weight)}
            found = _added(found, outcome)
    return found


def reward_sums(episodes: Sequence[Episode]) -> tuple[float, float]:
    """Return the sums of the rewards and of the weights of the episodes that did not fail, as in `success_counts`."""
    played = [episode for episode in episodes if not episode.failed]
    weights = path_weights(played)
    rewards = math.fsum(weight * episode.reward for weight, episode in zip(weights, played, strict=True))
    return rewards, math.fsum(weights)


def token_count(episodes: Sequence[Episode]) -> float:
    """Return the number of tokens sampled for these episodes; paths of a turn tree share some."""
    return float(sum(turn.stop - turn.start for turn, _ in distinct_turns(episodes)))


@dataclass
class CollectionSums:
    """Sums behind the numbers that are logged of a collection; see :class:`RolloutDataModule`.

    Attributes:
        means: (sum, count) of the logged means, by name.
        sums: logged sums.
        successes: (successes, episodes) by environment that judges.
        components: reward components and stop reasons, by the prefix of their names.
        played: episodes, decisions and generated tokens, with those that are not trained on.
        returns: each combination of the agents' returns in an episode, once.
    """

    means: dict[str, tuple[float, float]]
    sums: dict[str, float]
    successes: dict[str, tuple[float, float]] = field(default_factory=dict)
    components: dict[str, Components] = field(default_factory=dict)
    played: dict[str, float] = field(default_factory=dict)
    returns: frozenset[Returns] = frozenset()

    @classmethod
    def of(
        cls,
        episodes: Sequence[Episode],
        seconds: float,
        silent: Callable[[Sequence[Episode]], bool] = equal_returns,
        unused: Sequence[Episode] = (),
        by_task: bool = False,
        earlier_tokens: float = 0.0,
    ) -> CollectionSums:
        """Return the sums of the episodes that one rank played.

        Args:
            episodes: those that train.
            seconds: of the collection.
            silent: whether a group carries no learning signal.
            unused: others that were played in that time; they are throughput, and may have failed.
            by_task: whether reward and success are also measured by environment.
            earlier_tokens: that were sampled in these seconds for other collections.
        """
        played = [episode for episode in episodes if not episode.failed]
        turns = distinct_turns(played)
        tokens = token_count(played)
        all_tokens = tokens + token_count(unused) + earlier_tokens
        groups: dict[str, list[Episode]] = {}
        for episode in played:
            groups.setdefault(episode.group, []).append(episode)
        values: dict[str, list[tuple[float, float]]] = {
            "rollout/truncated_turns": [(float(turn.finish_reason == "length"), 1.0) for turn, _ in turns],
            "rollout/zero_variance_groups": [(float(silent(group)), 1.0) for group in groups.values()],
        }
        judging, weights = judging_environments(played), path_weights(played)
        components: dict[str, Components] = {}
        for episode, weight in zip(played, weights, strict=True):
            environment = episode.task.environment
            components.setdefault(f"rollout/{environment}/", Components()).add(episode.components(), weight)
            found = {f"{environment}/{name}": value for name, value in episode.metrics.items()}
            found["reward"] = episode.reward
            if environment in judging and episode.stop_reason not in TREE_STOPS:
                found["success"] = float(bool(episode.success))
                if VERIFIER_SCORE in episode.metrics:
                    found[f"{environment}/accuracy"] = found["success"]
            if by_task:
                found |= {f"{environment}/{name}": found[name] for name in _OF_TASKS if name in found}
            for name, value in found.items():
                values.setdefault(f"rollout/{name}", []).append((value, weight))
        means = {
            name: (math.fsum(value * weight for value, weight in found), math.fsum(weight for _, weight in found))
            for name, found in values.items()
            if found
        }
        means |= {f"rollout/{name}": found for name, found in means_by_agent(played, weights, turns).items()}
        by_agent = components_by_agent(played, weights)
        components |= {f"rollout/agent/{agent}/components/": found for agent, found in by_agent.items()}
        components["rollout/"] = stop_reasons(played, weights)
        # The turns of a stale snapshot do not count in the policy's entropy.
        own = [(turn, row) for turn, row in turns if turn.policy == row.policy]
        if own or not turns:
            surprise = -math.fsum(sum(row.logprobs[turn.start : turn.stop]) for turn, row in own)
            means["rollout/entropy"] = (surprise, max(float(sum(turn.stop - turn.start for turn, _ in own)), 1.0))
        means["rollout/response_tokens"] = (tokens, max(float(len(turns)), 1.0))
        sums = {
            "rollout/tokens_per_second": all_tokens / seconds,
            "rollout/failed_episodes": float(sum(episode.failed for episode in (*episodes, *unused))),
            "rollout/retries": float(sum(episode.attempts - 1 for episode in (*episodes, *unused))),
            "rollout/row_restarts": float(sum(episode.row_restarts for episode in played)),
        }
        everything = [*episodes, *unused]
        counts = {
            "episodes": float(len(everything)),
            "decisions": float(len(distinct_turns(everything))),
            "generated_tokens": token_count(everything),
        }
        returns = frozenset(tuple(sorted(episode.rewards().items())) for episode in played)
        return cls(means, sums, components=components, played=counts, returns=returns)

    def plus(self, other: CollectionSums) -> CollectionSums:
        """Return the sums of both."""
        means, successes = _added(self.means, other.means), _added(self.successes, other.successes)
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in {*self.sums, *other.sums}}
        components = {
            prefix: self.components.get(prefix, Components()).plus(other.components.get(prefix, Components()))
            for prefix in {**self.components, **other.components}
        }
        played = {name: count + other.played.get(name, 0.0) for name, count in self.played.items()}
        return CollectionSums(means, sums, successes, components, played, self.returns | other.returns)

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log."""
        found = {
            prefix + name: mean for prefix, parts in self.components.items() for name, mean in parts.means().items()
        }
        found |= {name: total / count for name, (total, count) in self.means.items() if count}
        return without_sole_owners(found, "rollout/") | self.sums


_COUNTED = ("episodes", "decisions", "generated_tokens")


class RunTotals:
    """Totals of a run over its iterations, continued from a checkpoint.

    Logged as ``progress/iteration``, ``progress/episodes``, ``progress/decisions``, ``progress/generated_tokens`` and
    ``progress/seconds``: what runs are compared at. Episodes that failed or were replaced count, as they were played.
    """

    def __init__(self) -> None:
        self.load(None)

    def start(self) -> None:
        """Start the clock."""
        self._since = time.monotonic()

    def after(self, iteration: int, played: Mapping[str, float]) -> dict[str, float]:
        """Return the totals after an iteration.

        Args:
            iteration: how many are collected.
            played: episodes, decisions and generated tokens of this one.
        """
        for name in _COUNTED:
            self._counts[name] += played[name]
        totals = {"iteration": float(iteration), **self.state()}
        return {f"progress/{name}": total for name, total in totals.items()}

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {**self._counts, "seconds": self._seconds + time.monotonic() - self._since}

    def load(self, state: Mapping[str, float] | None) -> None:
        """Restore the value of :meth:`state`; None is a checkpoint without totals."""
        self._counts = {**dict.fromkeys((*_COUNTED, "seconds"), 0.0), **(state or {})}
        self._seconds, self._since = self._counts.pop("seconds"), time.monotonic()
