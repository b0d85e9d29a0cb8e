"""Cross-play: models in every seating of an environment, compared by their returns in the same episodes."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from mrlm_pl.episode import Episode
from mrlm_pl.evaluation.elo import GameTable, Rating, elo_ratings, game_score
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
    """A player's score against another: a game counts 1, 0.5 or 0 for a higher, an equal or a lower mean return."""

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

    Agents that earn the same in every episode in which they act are a team: no player wins against another.

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
    unequal = rivals = False
    for seated, episodes in played:
        sides = grouped((player, agent) for agent, player in seated.items())
        for episode in _complete(episodes):
            acting = [*episode.rewards().values()]
            unequal = unequal or len({*acting, *[0.0] * (len(seated) - len(acting))}) > 1
            # An absent teammate has no part in the team's reward; an opponent that is not asked earns 0, more than a
            # player who has lost before. One who earns more than 0 alone has solved a task for one agent.
            rivals = rivals or len({*acting}) > 1 or (len(acting) == 1 < len(seated) and acting[0] < 0)
            for player, other in itertools.permutations(sides, 2):
                games[player, other][problem_of(episode.task)].append(game_score(episode, sides[player], sides[other]))
    # The bounds are of all agents, and hold for each where all earn the same.
    seatings = [_seating(seated, episodes, None if unequal else bounds) for seated, episodes in played]
    if not rivals:
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
        unknown = {"low": -math.inf, "high": math.inf} if sampled else {}
        order = sorted(players, key=lambda name: -round(all_ratings[name].elo, 6))
        ratings = {player: replace(all_ratings[player], **unknown) for player in order}
    return ArenaReport(environment, split, seed, seatings, scores, [] if rivals else _differences(played), ratings)


def _complete(episodes: Sequence[Episode]) -> list[Episode]:
    return [episode for episode in episodes if not episode.failed]


def _seating(players: Mapping[str, str], episodes: Sequence[Episode], bounds: Bounds | None) -> Seating:
    """Return the results of one seating, with intervals that end at the declared bounds."""
    complete = _complete(episodes)
    by_problem = grouped((problem_of(episode.task), episode) for episode in complete)
    rewards = {}
    for agent in players if complete else ():
        mean = _mean([[episode.rewards().get(agent, 0.0) for episode in group] for group in by_problem.values()])
        rewards[agent] = Mean(mean.value, *within_bounds((mean.low, mean.high), by_problem, bounds))
    return Seating(dict(players), len(complete), len(episodes) - len(complete), rewards)


def _differences(played: Sequence[tuple[Mapping[str, str], Sequence[Episode]]]) -> list[Difference]:
    """Return the differences of players who play all agents, each pair in the order of ``played``."""
    played_alone = {
        player: {episode.id: episode for episode in _complete(episodes)}
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
