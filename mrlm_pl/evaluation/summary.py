"""The tasks of an evaluation, and the summary of its episodes: mean reward with its interval, accuracy, pass@k."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode, Task
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.evaluation.agents import Components, parts_by_agent, parts_by_policy, seats_of
from mrlm_pl.evaluation.intervals import mean_interval, pass_at_k, ratio_interval, share_interval
from mrlm_pl.evaluation.report import EvaluationReport, Measured
from mrlm_pl.grouping import grouped
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.seeding import derive_seed, keyed_random
from mrlm_pl.settings import at_least

T = TypeVar("T")
logger = logging.getLogger(__name__)

Majority = Callable[[Task, Sequence[str]], "bool | None"]
"""Function that tells whether a majority is right; see :meth:`mrlm_pl.environment.Environment.majority`."""

MOST_EPISODES = 1_000_000
"""Maximum number of episodes of an evaluation or a collection, all of whose tasks are in memory."""

Bounds = Callable[[Task], "tuple[float, float] | None"]
"""Function that returns the bounds of a task's return; see :meth:`mrlm_pl.environment.Environment.bounds`."""


def evaluation_specs(
    environment: Environment,
    num_episodes: int,
    split: str,
    seed: int,
    samples_per_task: int = 1,
    name: str | None = None,
) -> list[EpisodeSpec]:
    """Return the episodes of an evaluation; see :func:`mrlm_pl.runs.evaluate`.

    Raises:
        ConfigurationError: a number is below 1, ``num_episodes`` is not a multiple of ``samples_per_task``, or they are
            more than :data:`MOST_EPISODES`.
    """
    name = environment.name if name is None else name
    check_samples(num_episodes, samples_per_task)
    source = environment.tasks(split)
    count = num_episodes // samples_per_task
    count = count if source.size is None else min(count, source.size)
    if count * samples_per_task > MOST_EPISODES:
        raise ConfigurationError(f"num_episodes is {num_episodes}; it must be {MOST_EPISODES} or below")
    if source.size is None:
        tasks = [source[index] for index in range(count)]
    else:
        order = list(range(source.size))
        keyed_random("evaluation", seed, name, split).shuffle(order)
        tasks = [source[index] for index in sorted(order[:count])]
    tasks = [task if task.environment == name else replace(task, environment=name) for task in tasks]
    return [
        EpisodeSpec(
            id=f"evaluation/{task.key}/{sample}",
            task=task,
            group=task.key,
            seed=derive_seed("evaluation", seed, task.key, sample),
        )
        for task in tasks
        for sample in range(samples_per_task)
    ]


def check_samples(num_episodes: int, samples_per_task: int) -> None:
    """Validate the total number of episodes and the number of each task.

    Raises:
        ConfigurationError: a number is below 1, or ``num_episodes`` is not a multiple of ``samples_per_task``.
    """
    at_least(1).check(num_episodes=num_episodes, samples_per_task=samples_per_task)
    if num_episodes % samples_per_task:
        raise ConfigurationError(
            f"num_episodes {num_episodes} must be a multiple of samples_per_task {samples_per_task}"
        )


def summarize(
    episodes: Sequence[Episode],
    *,
    environment: str,
    requested: int | None = None,
    majority: Majority | None = None,
    bounds: Bounds | None = None,
    **about: Any,
) -> EvaluationReport:
    """Return the report of episodes that were played.

    Args:
        episodes: episodes that were played, those of a task one after another.
        environment: name of the environment.
        requested: number of requested episodes; None is the number of episodes.
        majority: function that tells whether the majority of replies to a task is right, if one agent replies.
        bounds: function that returns the declared returns of a task, summed over the agents; None declares none.
        about: fields of the report that do not follow from the episodes, such as ``model``, ``split`` and ``seed``.
    """
    majority = majority and tolerate_errors(majority)
    played = [episode for episode in episodes if not episode.failed]
    about |= {"environment": environment, "requested": len(episodes) if requested is None else requested}
    failures = [episode.error for episode in episodes if episode.failed]
    if failures:
        remedy = "check the environment with `mrlm check-env`, a run's with `--model RUN`"
        text = f"%d of %d episodes of %r failed and are left out; the first: %s; {remedy}"
        logger.warning(text, len(failures), len(episodes), environment, failures[0])
    if not played:
        transcripts = [_transcript(episode) for episode in episodes]
        return EvaluationReport(episodes=0, failed=len(episodes), transcripts=transcripts, **about)
    rewards = [episode.reward for episode in played]
    by_task = grouped((episode.task.key, episode) for episode in played)
    by_problem = grouped((problem_of(episode.task), episode) for episode in played)
    judged = any(episode.success is not None for episode in played)
    # A task whose other samples failed is still voted on: its one reply is the majority.
    has_votes = max(map(len, by_task.values())) > 1
    successes = [[bool(episode.success) for episode in group] for group in by_problem.values()]
    spread = mean_interval([[episode.reward for episode in group] for group in by_problem.values()])
    components = Components.of((episode.components(), 1.0) for episode in played)
    return EvaluationReport(
        **about,
        episodes=len(played),
        failed=len(failures),
        mean_reward=math.fsum(rewards) / len(rewards),
        ci95=within_bounds(spread, by_task, bounds),
        accuracy=sum(map(sum, successes)) / len(played) if judged else None,
        accuracy_ci95=share_interval([(sum(group), len(group)) for group in successes]) if judged else None,
        pass_at_k=_pass_at_k(by_task) if judged else {},
        components=dict(sorted(components.means().items())),
        metrics=measured_metrics(list(by_problem.values())),
        majority_at_k=_majority_at_k(by_task, majority) if majority else {},
        truncated=sum(episode.truncated for episode in played) / len(played),
        stop_reasons=dict(Counter(episode.stop_reason for episode in played)),
        seats=seats_of(played),
        agents=parts_by_agent(by_problem),
        policies=parts_by_policy(by_problem),
        decisions_per_task=sum(len(episode.turns()) for episode in played) / len(by_task),
        tasks=[_task_result(group, majority if has_votes else None) for group in by_task.values()],
        transcripts=[_transcript(episode) for episode in episodes],
    )


def problem_of(task: Task) -> str:
    """Return text that is equal for tasks that pose the same problem: a generator may draw one several times."""
    return f"{task.environment} {json.dumps(task.data, sort_keys=True, default=repr)}" if task.data else task.key


def task_identity(task: Task) -> tuple[str, str]:
    """Return the key of a task and a digest of the problem that it poses, which identify it in reports."""
    return task.key, f"{derive_seed('problem', problem_of(task)):016x}"


def measured_metrics(groups: Sequence[Sequence[Episode]]) -> dict[str, Measured]:
    """Return the metrics of episodes, given in groups of one problem each."""
    names = dict.fromkeys(name for group in groups for episode in group for name in episode.metrics)
    return {
        name: _measure_metric(groups, name, f"{name}_of" if f"{name}_of" in names else None)
        for name in names
        if not (name.endswith("_of") and name.removesuffix("_of") in names)
    }


def _measure_metric(groups: Sequence[Sequence[Episode]], name: str, cases: str | None) -> Measured:
    group_metrics = [[episode.metrics for episode in group if name in episode.metrics] for group in groups]
    sums = [
        (
            math.fsum(metrics[name] for metrics in group),
            math.fsum(metrics[cases] if cases else 1.0 for metrics in group),
        )
        for group in group_metrics
        if group
    ]
    total = math.fsum(count for _, count in sums)
    if not total:
        return Measured(None, None, 0)
    values = [metrics[name] for group in group_metrics for metrics in group]
    if all(value in (0, 1) for value in values) if cases is None else all(0 <= value <= count for value, count in sums):
        interval = share_interval(sums)
    elif cases is None and all(0 <= value <= 1 for value in values):
        interval = ratio_interval(sums, 0.0, 1.0)
    else:
        interval = ratio_interval(sums)
    return Measured(math.fsum(value for value, _ in sums) / total, interval, round(total))


def tolerate_errors(method: Callable[..., T | None]) -> Callable[..., T | None]:
    """Return an environment's method that warns of its first error, and then returns None: episodes that were played
    keep their report.
    """
    failed = False

    def answer(*arguments: Any) -> T | None:
        nonlocal failed
        if failed:
            return None
        try:
            return method(*arguments)
        except Exception as error:  # an environment may raise anything
            failed = True
            name = getattr(method, "__qualname__", method)
            logger.warning("%s: %s: %s; the report is made without it", name, type(error).__name__, error)
            return None

    return answer


def within_bounds(
    interval: tuple[float, float], by_task: Mapping[str, Sequence[Episode]], bounds: Bounds | None
) -> tuple[float, float]:
    """Return the interval of a mean reward up to the declared bounds that no episode exceeds.

    A declared minimum is what worthless replies earn, and worse ones may earn less. An interval without known spread
    stays infinite.
    """
    if bounds is None or not all(map(math.isfinite, interval)):
        return interval
    bounds = tolerate_errors(bounds)
    declared = [(bounds(group[0].task), group[0].team_size) for group in by_task.values()]
    team_bounds = [
        (task_bounds[0] / size, task_bounds[1] / size) for task_bounds, size in declared if task_bounds is not None
    ]
    if len(team_bounds) < len(declared):
        return interval
    rewards = [episode.reward for group in by_task.values() for episode in group]
    low, high = min(lowest for lowest, _ in team_bounds), max(highest for _, highest in team_bounds)
    return (
        max(interval[0], low) if min(rewards) >= low else interval[0],
        min(interval[1], high) if max(rewards) <= high else interval[1],
    )


def _pass_at_k(by_task: Mapping[str, Sequence[Episode]]) -> dict[str, float]:
    counts = [(sum(bool(episode.success) for episode in group), len(group)) for group in by_task.values()]
    return {
        str(k): math.fsum(pass_at_k(wins, total, k) for wins, total in counts) / len(counts) for k in _sizes(by_task)
    }


def _sizes(by_task: Mapping[str, Sequence[Episode]]) -> list[int]:
    """Return the powers of 2, from 1, up to the smallest number of samples of a task, and that number."""
    smallest = min(len(group) for group in by_task.values())
    return sorted({2**exponent for exponent in range(smallest.bit_length())} | {smallest})


def _majority_at_k(by_task: Mapping[str, Sequence[Episode]], majority: Majority) -> dict[str, float]:
    """Return the mean over tasks of the share of right majorities, for each number of samples."""
    shares: dict[str, float] = {}
    for k in _sizes(by_task)[1:]:
        votes = []
        for group in by_task.values():
            replies = [_reply(episode) for episode in group]
            blocks = [replies[start : start + k] for start in range(0, len(replies) - k + 1, k)]
            votes.append([majority(group[0].task, block) for block in blocks])
        if any(vote is None for task_votes in votes for vote in task_votes):
            return {}
        shares[str(k)] = math.fsum(sum(map(bool, task_votes)) / len(task_votes) for task_votes in votes) / len(votes)
    return shares


def _task_result(group: Sequence[Episode], majority: Majority | None) -> dict[str, Any]:
    task = group[0].task
    key, problem = task_identity(task)
    judged = [bool(episode.success) for episode in group if episode.success is not None]
    voted = majority(task, [_reply(episode) for episode in group]) if majority else None
    return {
        "task": key,
        "problem": problem,
        "episodes": len(group),
        "reward": math.fsum(episode.reward for episode in group) / len(group),
        "accuracy": sum(judged) / len(group) if judged else None,
        "majority": voted,
    }


def _reply(episode: Episode) -> str:
    """Return the last reply of the only agent of an episode; empty without one."""
    replies = [message.content for row in episode.rows() for message in row.messages if message.role == "assistant"]
    return replies[-1] if replies else ""


def _transcript(episode: Episode) -> dict[str, Any]:
    return {
        "task": episode.task.key,
        "reward": episode.reward,
        "success": episode.success,
        "stop_reason": episode.stop_reason,
        "error": episode.error,
        "messages": {
            row.agent: [{"role": message.role, "content": message.content} for message in row.messages]
            for row in episode.rows()
        },
    }
