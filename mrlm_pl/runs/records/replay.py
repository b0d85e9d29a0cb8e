"""Recorded episodes, played again without a model: as a check of the record, and under other rewards."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mrlm_pl.engines import InProcessEngine
from mrlm_pl.engines.base import Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import episode_files, not_kept, read_episodes
from mrlm_pl.errors import ConfigurationError, DataError, nearest
from mrlm_pl.evaluation.intervals import mean_interval
from mrlm_pl.rollout.replay import NOT_RECORDED, RecordPlayer, differences
from mrlm_pl.runs.collection import TEMPERATURE
from mrlm_pl.runs.records.run import recorded_iterations
from mrlm_pl.runs.seated_model import SeatedModel

CHUNK = 256
"""Number of episodes that are played together."""

NEAREST = 20_000
"""Last ids among which the one that is meant is sought."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ReplayReport:
    """The result of a replay.

    Args:
        equal: number of episodes that equal their record, byte by byte.
        changed: differences of each other episode, by its id, as ``place: recorded, replayed``.
        failed: number of recorded failures, which are not played.
    """

    equal: int
    changed: dict[str, list[str]]
    failed: int


@dataclass(frozen=True)
class RescoreReport:
    """Recorded episodes under other rewards.

    Args:
        episodes: number of episodes.
        cut: number of episodes that ended because the environment asked for a decision that the record lacks.
        failed: number of recorded failures, which are not played.
        old: mean recorded reward.
        new: mean reward in the replay.
        ci95: paired 95 % interval of ``new - old``; episodes of one task are a cluster.
        gained: ids of episodes that succeed now and did not before.
        lost: ids of episodes that succeeded before and do not now.
        rewards: recorded and new reward of each episode, by id.
    """

    episodes: int
    cut: int
    failed: int
    old: float
    new: float
    ci95: tuple[float, float]
    gained: tuple[str, ...]
    lost: tuple[str, ...]
    rewards: dict[str, tuple[float, float]]


def replay(
    run: str | Path,
    environment: str | type[Environment] | Environment | None = None,
    *,
    episodes: str | Path | None = None,
    iteration: int | None = None,
    episode: str | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> ReplayReport:
    """Play recorded episodes again in a fresh environment, and compare every observation, reward and component.

    No model is read: the decisions are those of the record. Equal episodes prove that the environment is deterministic,
    that the record is whole, and that rewards are computed as they were. The temperature that a collection noted among
    the metrics is not compared: no environment computed it.

    Args:
        run: run folder; its policies need not be exported.
        environment: environment to play; see :func:`mrlm_pl.runs.evaluate`. The run's other environments are left out.
        episodes: file of episodes, or folder of files; None is ``RUN/episodes``.
        iteration: iteration whose episodes are played; None plays all.
        episode: id of the only episode to play; None plays all.
        name: name of the environment in the run, if an instance has another one.
        progress: function that is called with the numbers of played and of all episodes, first with 0; it causes them
            to be counted.

    Raises:
        ConfigurationError: as :func:`mrlm_pl.runs.evaluate`, or there is no such episode.
        DataError: the episodes cannot be read.
    """
    equal, failed, changed = 0, 0, dict[str, list[str]]()
    for recorded, again in _pairs(run, environment, episodes, iteration, episode, name, progress):
        if again is None:
            failed += 1
        elif places := differences(_as_played(recorded, again), again):
            changed[recorded.id] = places
        else:
            equal += 1
    return ReplayReport(equal, changed, failed)


def rescore(
    run: str | Path,
    environment: str | type[Environment] | Environment | None = None,
    *,
    episodes: str | Path | None = None,
    iteration: int | None = None,
    episode: str | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> RescoreReport:
    """Play recorded episodes again in an environment with other rewards, and compare the rewards.

    No model is read. If the environment asks for a decision that the record does not have, the episode ends there.
    Branches of other episodes, which an algorithm such as C3 plays, and greedy baselines are left out.

    Args:
        run: run folder; for it and the other arguments see :func:`replay`. ``environment`` has the new settings.
        environment: environment with other rewards, another judge or another verifier.
        episodes, iteration, episode, name, progress: see :func:`replay`.

    Raises:
        ConfigurationError: as :func:`replay`.
        DataError: the episodes cannot be read.
        RolloutError: an episode fails in the environment.
    """
    rewards: dict[str, tuple[float, float]] = {}
    by_task: dict[str, list[float]] = defaultdict(list)
    gained, lost = [], []
    cut = failed = 0
    for recorded, again in _pairs(run, environment, episodes, iteration, episode, name, progress):
        if again is None:
            failed += 1
        if again is None or recorded.origin is not None or recorded.excluded == "greedy":
            continue
        if again.error is not None:
            raise DataError(f"episode {recorded.id!r} cannot be played again: {again.error}")
        cut += again.stop_reason == NOT_RECORDED
        rewards[recorded.id] = recorded.reward, again.reward
        by_task[recorded.task.key].append(again.reward - recorded.reward)
        if again.success and not recorded.success:
            gained.append(recorded.id)
        if recorded.success and not again.success:
            lost.append(recorded.id)
    if not rewards:
        raise DataError(f"all episodes of {str(run)!r} that were chosen failed when they were played; there is none")
    old, new = (math.fsum(pair[side] for pair in rewards.values()) / len(rewards) for side in (0, 1))
    ci95 = mean_interval(list(by_task.values()))
    return RescoreReport(len(rewards), cut, failed, old, new, ci95, tuple(gained), tuple(lost), rewards)


def chosen_episodes(
    run: str | Path, source: str | Path | None, environment: str, iteration: int | None, id: str | None
) -> Iterator[Episode]:
    """Yield the recorded episodes of an environment.

    Args:
        run: run folder.
        source: file of episodes, or folder of files; None is ``RUN/episodes``.
        environment: name of the environment in the run.
        iteration: iteration whose episodes are chosen; None chooses all.
        id: id of the only episode to choose; None chooses all.

    Raises:
        DataError: the episodes cannot be read.
        ConfigurationError: there is no such episode.
    """
    source = Path(run) / "episodes" if source is None else Path(source)
    other_environments: Counter[str] = Counter()
    count, ids = 0, list[str]()
    for episode in read_episodes(source):
        if iteration is not None and episode.iteration != iteration:
            continue
        if id is not None and episode.id != id:
            ids.append(episode.id)
            continue
        if episode.task.environment == environment:
            count += 1
            yield episode
        else:
            other_environments[episode.task.environment] += 1
    if not count:
        criteria = f" with id {id!r}" * (id is not None) + f" of iteration {iteration}" * (iteration is not None)
        similar = nearest(id, ids[-NEAREST:]) if id is not None else None
        hint = f"; did you mean {similar!r}?" if similar else ""
        hint += f"; there are {dict(other_environments)} of other environments" if other_environments else ""
        hint += f"; {gone}" if (gone := not_kept(episode_files(source), recorded_iterations(source.parent))) else ""
        raise ConfigurationError(f"{str(source)!r} has no episode{criteria} of {environment!r}{hint}")


def _as_played(recorded: Episode, replayed: Episode) -> Episode:
    """Return the record without the temperature that a collection noted; one that the environment computes stays."""
    if TEMPERATURE in replayed.metrics or TEMPERATURE not in recorded.metrics:
        return recorded
    metrics = {name: value for name, value in recorded.metrics.items() if name != TEMPERATURE}
    return dataclasses.replace(recorded, metrics=metrics)


def _pairs(
    run: str | Path,
    environment: str | type[Environment] | Environment | None,
    source: str | Path | None,
    iteration: int | None,
    id: str | None,
    name: str | None,
    progress: Progress | None,
) -> Iterator[tuple[Episode, Episode | None]]:
    """Yield each chosen episode with its replay; None for those that failed when they were played."""
    seated = SeatedModel(run, environment, None, name, weights=False)
    # Seats have a chat format and no weights.
    seats, played = seated.seats(seated.policies(), Sampling()), {seated.name: seated.environment}
    with (
        closing(seated.environment),
        closing(InProcessEngine()) as engine,
        closing(RecordPlayer(played, seats, engine)) as player,
    ):
        chosen = chosen_episodes(run, source, seated.name, iteration, id)
        done = total = 0
        if progress is not None:
            total = sum(1 for _ in chosen_episodes(run, source, seated.name, iteration, id))
            progress(done, total)
        while chunk := list(itertools.islice(chosen, CHUNK)):
            again = iter(player.play_again([episode for episode in chunk if not episode.failed]))
            for episode in chunk:
                yield episode, None if episode.failed else next(again)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
