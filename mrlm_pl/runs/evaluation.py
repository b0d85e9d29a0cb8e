"""A model's score in an environment, and models against each other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from mrlm_pl.engines.base import Precision, Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.errors import ConfigurationError, RolloutError
from mrlm_pl.evaluation.arena import ArenaReport, arena_report
from mrlm_pl.evaluation.report import EvaluationReport
from mrlm_pl.policy import Policy
from mrlm_pl.runs.seated_model import Model, SeatedModel, read_model, sampling_from
from mrlm_pl.settings import check_arguments


@check_arguments
def evaluate(
    model: Model,
    environment: str | type[Environment] | Environment | None = None,
    *,
    num_episodes: int = 200,
    split: str = "test",
    seed: int = 0,
    samples_per_task: int = 1,
    sampling: Sampling | None = None,
    max_turns: int | None = None,
    seats: Mapping[str, str] | None = None,
    device: str = "auto",
    precision: Precision | None = None,
    name: str | None = None,
    served_by: Mapping[str, str] | None = None,
) -> EvaluationReport:
    """Return the report of a model's episodes in an environment.

    A sized split that is larger than needed is sampled without replacement; a smaller one is used whole.

    Args:
        model: run folder, model folder, hub id or ``builtin:tiny``; a policy, or several by name.
        environment: short name, class or instance, which is closed at the end; a name of the run's environments, and
            None for its only one, stand for the run's settings.
        num_episodes: total number of episodes.
        split: split of the tasks.
        seed: seed of the choice of tasks and of the sampling.
        samples_per_task: number of episodes of each task, for pass@k.
        sampling: sampling settings of the turns; None takes the run's validation settings, else the defaults.
        max_turns: number of decisions after which an episode is truncated; None is the run's limit, else 64.
        seats: policy of each agent; a run has its own.
        device: device of policies whose weights are read, as torch names it; ``auto`` prefers an accelerator.
        precision: precision in which turns are generated; None is that of the run's training, else float32, which also
            replaces bf16 on a CPU without instructions for it.
        name: name of the environment in the run, if an instance has another one.
        served_by: servers that play policies, by name; their tokenizers are read, not their weights.

    Raises:
        ConfigurationError: there is no such model or environment, an agent has no policy, a number is below 1, or
            ``num_episodes`` is not a multiple of ``samples_per_task``.
        RolloutError: every episode failed.
    """
    seated = SeatedModel(model, environment, seats, name, precision=precision)
    seated.serve(served_by or {})
    sampling = sampling or sampling_from(seated.run.validation_sampling, {})
    report = seated.evaluate(num_episodes, split, seed, samples_per_task, sampling, max_turns, device)
    if not report.episodes:
        raise RolloutError(f"every episode of {seated.name!r} failed; the first: {report.transcripts[0]['error']}")
    return report


@check_arguments
def arena(
    models: Mapping[str, Model],
    environment: str | type[Environment] | Environment | None = None,
    *,
    num_episodes: int = 100,
    split: str = "test",
    seed: int = 0,
    samples_per_task: int = 1,
    sampling: Sampling | None = None,
    max_turns: int | None = None,
    device: str = "auto",
    precision: Precision | None = None,
    name: str | None = None,
    max_seatings: int = 64,
) -> ArenaReport:
    """Return the results of models against each other: the same episodes in every seating of the agents.

    A model plays an agent with the policy that its own run has for it. Sampling settings of a policy hold for the
    policies of that name of all players.

    Args:
        models: runs or models by the names of the players, two or more; see :func:`evaluate`.
        environment: environment to play, as in :func:`evaluate`; None is that of the first model's run.
        num_episodes: number of episodes of each seating.
        split, seed, samples_per_task, sampling, max_turns, device, precision, name: see :func:`evaluate`; settings that
            are left out are those of the first model's run.
        max_seatings: maximum number of seatings; more are an error. P players and N agents have P^N.

    Raises:
        ConfigurationError: there are fewer than two models or too many seatings, one cannot be used, an agent has no
            policy, or a number is below 1.
    """
    if len(models) < 2:
        raise ConfigurationError(f"the arena has the players {list(models)}; give two or more, as in A=runs/a B=runs/b")
    leader, *others = models
    first = SeatedModel(models[leader], environment, None, name, precision=precision)
    agents = first.environment.agents
    if (count := len(models) ** len(agents)) > max_seatings:
        raise ConfigurationError(
            f"max_seatings: {len(models)} players and {len(agents)} agents of environment {first.name!r} make {count} "
            f"seatings of {num_episodes} episodes, and {max_seatings} are the most; give fewer players or raise it"
        )
    specs = first.specs(num_episodes, split, seed, samples_per_task)
    runs = {leader: first.run, **{player: read_model(models[player], weights=True)[1] for player in others}}
    policies = {(player, agent): run.policy_of(agent, player) for player, run in runs.items() for agent in agents}
    names = {key: f"{key[0]}.{policy}" for key, policy in policies.items()}
    sampling = sampling or sampling_from(first.run.validation_sampling, {})
    sampling.check_policies({name for run in runs.values() for name in run.policies}, "sampling")
    own_sampling = {names[key]: sampling.policies[name] for key, name in policies.items() if name in sampling.policies}
    sampling = replace(sampling, policies=own_sampling)
    named_policies = {names[key]: runs[key[0]].policies[name] for key, name in policies.items()}
    first.run = replace(first.run, policies=named_policies, seats={agent: names[leader, agent] for agent in agents})
    played, loaded = [], dict[str, Policy]()
    with first.player(sampling, max_turns, device, playing=[*named_policies], loaded=loaded) as player:
        for players in itertools.product(models, repeat=len(agents)):
            seating = dict(zip(agents, players, strict=True))
            first.run = replace(first.run, seats={agent: names[seated, agent] for agent, seated in seating.items()})
            player.seats = first.seats(loaded, sampling)
            played.append((seating, player.play_blocking(specs)))
    bounds = first.environment.bounds
    return arena_report(list(models), played, environment=first.name, split=split, seed=seed, bounds=bounds)
