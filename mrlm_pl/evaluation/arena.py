"""Cross-play: models in every seating of an environment, compared by their returns in the same episodes."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from mrlm_pl.episode import Episode
from mrlm_pl.evaluation.elo import GameTable, Rating, elo_ratings
from mrlm_pl.evaluation.intervals import mean_interval, share_interval
from mrlm_pl.evaluation.summary import Bounds, problem_of, within_bounds
from mrlm_pl.grouping import grouped


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % interval; tasks that pose the same problem are one cluster."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Seating:
    """The results of one seating.

    Args:
        players: player of each agent.
        episodes: number of episodes that were played to their end.
        failed: number of episodes that the environment failed.
        rewards: mean return of each agent.
    """

    players: Mapping[str, str]
    episodes: int
    failed: int
    rewards: Mapping[str, Mean]


@dataclass(frozen=True)
class Score:
    """A player's score against another: a game counts 1, .5 or 0 for a higher, an equal or a lower mean return."""

    player: str
    other: str
    games: int
    score: Mean


@dataclass(frozen=True)
class Difference:
    """The paired difference of two players' mean returns, in episodes in which each plays all agents."""

    player: str
    other: str
    episodes: int
    difference: Mean


@dataclass(frozen=True)
class ArenaReport:
    """Results of cross-play.

    Agents that earn the same in every episode are a team: no player wins against another of its members.

    Args:
        environment: name of the environment.
        split: split of the tasks.
        seed: seed of the tasks and the sampling.
        seatings: every way to seat the players.
        scores: score of each player against each other one, over the seatings in which both play; empty for a team.
        differences: differences of the returns of each pair of players, if there is one agent or a team; else empty.
        ratings: Elo ratings, 0 for the first player; empty for a team, and without games between all players. The
            bounds are infinite where a task has several samples: the intervals of ratings take games as independent.
    """

    environment: str
    split: str
    seed: int
    seatings: Sequence[Seating]
    scores: Sequence[Score]
    differences: Sequence[Difference]
    ratings: Mapping[str, Rating]


def arena_report(
    players: Sequence[str],
    played: Sequence[tuple[Mapping[str, str], Sequence[Episode]]],
    *,
    environment: str,
    split: str,
    seed: int,
    bounds: Bounds | None = None,
) -> ArenaReport:
    """Return the report on episodes of cross-play.

    Args:
        players: names of the players.
        played: player of each agent, and the episodes, of each seating.
        environment: name of the environment.
        split: split of the tasks.
        seed: seed of the tasks and the sampling.
        bounds: function that returns the declared returns of a task, summed over the agents; None declares none.
    """
    games = defaultdict[tuple[str, str], dict[str, list[float]]](lambda: defaultdict(list))
    seatings = []
    unequal = False
    several = any(len(seated) > 1 for seated, _ in played)
    for seated, episodes in played:
        complete = [episode for episode in episodes if not episode.failed]
        returns: dict[str, dict[str, list[float]]] = {agent: defaultdict(list) for agent in seated}
        for episode in complete:
            rewards = {agent: episode.rewards().get(agent, 0.0) for agent in seated}
            unequal = unequal or len({*rewards.values()}) > 1
            for agent, reward in rewards.items():
                returns[agent][problem_of(episode.task)].append(reward)
            means = {
                player: fmean(rewards[agent] for agent, seated_player in seated.items() if seated_player == player)
                for player in dict.fromkeys(seated.values())
            }
            for player, other in itertools.permutations(means, 2):
                score = 0.5 if means[player] == means[other] else float(means[player] > means[other])
                games[player, other][problem_of(episode.task)].append(score)
        mean_returns = {agent: _mean(list(groups.values())) for agent, groups in returns.items() if groups}
        seatings.append(Seating(dict(seated), len(complete), len(episodes) - len(complete), mean_returns))
    if not unequal:  # the bounds are of all agents, and hold for each where all earn the same
        seatings = [
            _limit_intervals(seating, episodes, bounds) for seating, (_, episodes) in zip(seatings, played, strict=True)
        ]
    team = several and not unequal
    if team:
        games.clear()
    scores = []
    table = GameTable()
    for (player, other), groups in sorted(games.items(), key=lambda item: [players.index(name) for name in item[0]]):
        sums = [(math.fsum(group), float(len(group))) for group in groups.values()]
        count = int(sum(size for _, size in sums))
        won = math.fsum(value for value, _ in sums)
        scores.append(Score(player, other, count, Mean(won / count, *share_interval(sums))))
        if player < other:
            table.add(player, other, won, count)
    ratings = {}
    if len(games) == len(players) * (len(players) - 1) > 0:
        all_ratings = elo_ratings(table, zero=players[0])
        sampled = any(len({episode.task.key for episode in episodes}) < len(episodes) for _, episodes in played)
        for player in sorted(players, key=lambda name: -round(all_ratings[name].elo, 6)):
            elo = all_ratings[player].elo
            ratings[player] = Rating(elo, -math.inf, math.inf) if sampled else all_ratings[player]
    differences = [] if several and not team else _differences(played)
    return ArenaReport(environment, split, seed, seatings, scores, differences, ratings)


def _limit_intervals(seating: Seating, episodes: Sequence[Episode], bounds: Bounds | None) -> Seating:
    """Return a seating whose intervals end at the declared bounds."""
    by_problem = grouped((problem_of(episode.task), episode) for episode in episodes if not episode.failed)
    rewards = {
        agent: Mean(mean.value, *within_bounds((mean.low, mean.high), by_problem, bounds))
        for agent, mean in seating.rewards.items()
    }
    return replace(seating, rewards=rewards)


def _differences(played: Sequence[tuple[Mapping[str, str], Sequence[Episode]]]) -> list[Difference]:
    """Return the differences of players who play all agents, each pair in the order of ``played``."""
    played_alone = {
        player: {episode.id: episode for episode in episodes if not episode.failed}
        for seated, episodes in played
        for player in set(seated.values())
        if len(set(seated.values())) == 1
    }
    differences = []
    for player, other in itertools.combinations(played_alone, 2):
        groups = defaultdict[str, list[float]](list)
        for name, episode in played_alone[player].items():
            if name in played_alone[other]:
                groups[problem_of(episode.task)].append(episode.reward - played_alone[other][name].reward)
        if groups:
            differences.append(Difference(player, other, sum(map(len, groups.values())), _mean(list(groups.values()))))
    return differences


def _mean(groups: Sequence[Sequence[float]]) -> Mean:
    return Mean(fmean(itertools.chain.from_iterable(groups)), *mean_interval(groups))
