"""Score policies on an environment: mean reward with its confidence interval, accuracy, pass@k, transcripts."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode, Task
from mrlm_pl.errors import ConfigurationError, RolloutError
from mrlm_pl.play import EpisodeSpec
from mrlm_pl.rollout import EpisodePlayer
from mrlm_pl.seeding import derive_seed, keyed_random

Z95 = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


@dataclass(frozen=True)
class EvaluationReport:
    """Result of an evaluation.

    Args:
        environment: name of the environment.
        model: what was evaluated.
        split: split of the tasks.
        seed: of the tasks' order and of the sampling.
        episodes: episodes that ended without an infrastructure error; all numbers are over these.
        failed: episodes that did not.
        mean_reward: mean over episodes of the mean over agents of their returns.
        ci95: 95 % interval of ``mean_reward``, normal, with tasks (not their repeated samples) as the unit.
        accuracy: share of episodes that the environment called a success, or None if it says nothing of success. An
            episode that a limit cut short before it was judged is none.
        accuracy_ci95: its 95 % Wilson interval, for as many independent episodes as these are worth when those of equal
            problems depend on each other; None likewise.
        pass_at_k: for each k up to the samples per task, the chance that one of k samples succeeds (unbiased,
            arXiv 2107.03374); empty likewise.
        components: mean of each reward component.
        transcripts: what was said, episode after episode.
    """

    environment: str
    model: str
    split: str
    seed: int
    episodes: int
    failed: int
    mean_reward: float
    ci95: tuple[float, float]
    accuracy: float | None
    accuracy_ci95: tuple[float, float] | None
    pass_at_k: Mapping[str, float]
    components: Mapping[str, float]
    transcripts: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-like data; it holds no time and no path, so that equal runs give equal files.

        The bounds of an interval that no spread is known for (a single task) are None: JSON has no infinity.
        """
        data = asdict(self)
        data["ci95"] = [bound if math.isfinite(bound) else None for bound in self.ci95]
        return data


def evaluate(
    player: EpisodePlayer,
    environment: Environment,
    *,
    model: str,
    num_episodes: int,
    split: str = "test",
    seed: int = 0,
    samples_per_task: int = 1,
) -> EvaluationReport:
    """The report of ``num_episodes`` episodes on tasks of a split.

    A sized split that is larger than needed is sampled without replacement; a smaller one is used whole.

    Args:
        player: plays the environment with the policies in their seats.
        environment: what is played.
        model: name for the report.
        num_episodes: episodes in all.
        split: split of the tasks.
        seed: of the tasks' choice and of the sampling.
        samples_per_task: episodes of each task.

    Raises:
        ConfigurationError: a number is below 1, or ``num_episodes`` is no multiple of ``samples_per_task``.
        RolloutError: every episode failed.
    """
    specs = evaluation_specs(environment, num_episodes, split, seed, samples_per_task)
    episodes = player.play_blocking(specs)
    return summarize(episodes, environment=environment.name, model=model, split=split, seed=seed)


def evaluation_specs(
    environment: Environment, num_episodes: int, split: str, seed: int, samples_per_task: int = 1
) -> list[EpisodeSpec]:
    """The episodes of an evaluation; see :func:`evaluate`."""
    if samples_per_task < 1 or num_episodes < 1 or num_episodes % samples_per_task:
        raise ConfigurationError(
            f"num_episodes {num_episodes} must be a multiple of samples_per_task {samples_per_task}, both at least 1"
        )
    source = environment.tasks(split)
    count = num_episodes // samples_per_task
    if source.size is None:
        tasks = [source[index] for index in range(count)]
    else:
        order = list(range(source.size))
        keyed_random("evaluation", seed, environment.name, split).shuffle(order)
        tasks = [source[index] for index in sorted(order[:count])]
    return [_spec(task, seed, sample) for task in tasks for sample in range(samples_per_task)]


def summarize(episodes: Sequence[Episode], *, environment: str, model: str, split: str, seed: int) -> EvaluationReport:
    """The report of episodes that were played.

    Raises:
        RolloutError: every episode failed.
    """
    played = [episode for episode in episodes if not episode.failed]
    if not played:
        reason = episodes[0].error if episodes else "none was played"
        raise RolloutError(f"no episode of {environment!r} ended: {reason}; try `mrlm check-env {environment}`")
    rewards = [episode.reward for episode in played]
    by_task: dict[str, list[Episode]] = defaultdict(list)
    by_problem: dict[str, list[Episode]] = defaultdict(list)
    for episode in played:
        by_task[episode.task.key].append(episode)
        by_problem[problem_of(episode.task)].append(episode)
    judged = any(episode.success is not None for episode in played)
    wins = sum(bool(episode.success) for episode in played)
    return EvaluationReport(
        environment=environment,
        model=model,
        split=split,
        seed=seed,
        episodes=len(played),
        failed=len(episodes) - len(played),
        mean_reward=math.fsum(rewards) / len(rewards),
        ci95=mean_interval([[episode.reward for episode in group] for group in by_problem.values()]),
        accuracy=wins / len(played) if judged else None,
        accuracy_ci95=clustered_wilson_interval(
            [[bool(episode.success) for episode in group] for group in by_problem.values()]
        )
        if judged
        else None,
        pass_at_k=_pass_at_k(by_task) if judged else {},
        components=_mean_components(played),
        transcripts=[_transcript(episode) for episode in episodes],
    )


def judged_successes(episodes: Sequence[Episode]) -> list[bool]:
    """Whether each episode succeeded, of the environments that judge.

    An episode that a limit cut short before its environment could judge it is a failure.
    """
    judging = judging_environments(episodes)
    return [bool(episode.success) for episode in episodes if episode.task.environment in judging]


def judging_environments(episodes: Sequence[Episode]) -> set[str]:
    """Names of the environments that said of at least one episode whether it succeeded."""
    return {episode.task.environment for episode in episodes if episode.success is not None}


def problem_of(task: Task) -> str:
    """Text that is equal for tasks which pose the same problem: a generator may draw one several times."""
    return f"{task.environment} {json.dumps(task.data, sort_keys=True, default=repr)}" if task.data else task.key


def mean_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % normal interval of the mean of all values, when values of one group depend on each other.

    The variance of the mean is that of a ratio estimator with groups as clusters; with one value in each group it is
    ``s^2 / n``. A single group tells nothing of the spread: the interval is infinite.

    >>> low, high = mean_interval([[0.0], [1.0], [1.0], [0.0]])
    >>> round(low, 4), round(high, 4)  # .5 +- 1.96 sqrt((1/3) / 4)
    (-0.0658, 1.0658)
    """
    total = sum(len(group) for group in groups)
    mean = math.fsum(value for group in groups for value in group) / total
    clusters = len(groups)
    if clusters < 2:
        return (-math.inf, math.inf)
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in groups)
    half = Z95 * math.sqrt(clusters / (clusters - 1) * squares) / total
    return (mean - half, mean + half)


def clustered_wilson_interval(groups: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """95 % Wilson interval of the share of True, when the values of a group depend on each other.

    The number of trials is divided by the design effect: the variance that :func:`mean_interval` sees over that of
    independent values, but no less than 1.

    >>> twice = [[True, True]] * 9 + [[False, False]]    # worth 10 trials, less what 10 groups leave uncertain
    >>> [round(bound, 2) for bound in clustered_wilson_interval(twice)]
    [0.58, 0.98]
    """
    trials, wins = sum(map(len, groups)), sum(map(sum, groups))
    share = wins / trials
    low, high = mean_interval([[float(value) for value in group] for group in groups])
    independent = share * (1 - share) / trials
    effect = 1.0
    if independent and math.isfinite(high):
        effect = max(1.0, ((high - low) / (2 * Z95)) ** 2 / independent)
    return wilson_interval(wins / effect, trials / effect)


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """95 % Wilson score interval of a share (Wilson 1927).

    >>> low, high = wilson_interval(9, 10)
    >>> round(low, 4), round(high, 4)
    (0.5958, 0.9821)
    """
    share = successes / trials
    scale = 1 + Z95**2 / trials
    centre = (share + Z95**2 / (2 * trials)) / scale
    half = Z95 / scale * math.sqrt(share * (1 - share) / trials + Z95**2 / (4 * trials**2))
    return (max(0.0, centre - half), min(1.0, centre + half))


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Chance that at least one of ``k`` samples, drawn without replacement from ``samples``, succeeds.

    >>> round(pass_at_k(1, 4, 2), 6)  # 1 - C(3,2) / C(4,2)
    0.5
    """
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def _pass_at_k(by_task: Mapping[str, Sequence[Episode]]) -> dict[str, float]:
    smallest = min(len(group) for group in by_task.values())
    powers = [2**exponent for exponent in range(smallest.bit_length()) if 2**exponent <= smallest]
    counts = [(sum(bool(episode.success) for episode in group), len(group)) for group in by_task.values()]
    return {
        str(k): math.fsum(pass_at_k(wins, total, k) for wins, total in counts) / len(counts)
        for k in sorted({*powers, smallest})
    }


def _mean_components(episodes: Sequence[Episode]) -> dict[str, float]:
    names = sorted({name for episode in episodes for name in episode.components()})
    return {
        name: math.fsum(episode.components().get(name, 0.0) for episode in episodes) / len(episodes) for name in names
    }


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


def _spec(task: Task, seed: int, sample: int) -> EpisodeSpec:
    return EpisodeSpec(
        id=f"evaluation/{task.key}/{sample}",
        task=task,
        group=task.key,
        seed=derive_seed("evaluation", seed, task.key, sample),
    )
