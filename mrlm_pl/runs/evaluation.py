"""Score a model on an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mrlm_pl.engines.base import Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.evaluation.report import EvaluationReport, evaluation_specs, summarize
from mrlm_pl.runs.models import model_name, played_environment, player_of, read_model, sampling_from, warn_of_few

if TYPE_CHECKING:
    from mrlm_pl.runs.models import Model


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
    name: str | None = None,
) -> EvaluationReport:
    """Return the report of a model's episodes on an environment.

    A sized split that is larger than needed is sampled without replacement; a smaller one is used whole.

    Args:
        model: a run folder, model folder, hub id or ``builtin:tiny``; a policy, or several by name.
        environment: a short name, class or instance, which is closed at the end; a name that the run has, and None for
            its only environment, stand for the run's settings.
        num_episodes: episodes in all.
        split: split of the tasks.
        seed: of the tasks' choice and of the sampling.
        samples_per_task: episodes of each task, for pass@k.
        sampling: how turns are sampled; None is as the run validates, else by default.
        max_turns: decisions after which an episode is truncated; None is the run's limit, else 64.
        seats: the policy of each agent; a run has its own.
        device: where policies that are read are placed, as torch names it; ``auto`` prefers an accelerator.
        name: of the environment in the run where an instance has another one.

    Raises:
        ConfigurationError: there is no such model or environment, an agent has no policy, a number is below 1, or
            ``num_episodes`` is no multiple of ``samples_per_task``.
    """
    run, label = read_model(model, seats), model_name(model)
    played, own_name, _ = played_environment(environment, run, label)
    name = name or own_name
    # Raises for wrong numbers before a model is loaded.
    specs = evaluation_specs(played, num_episodes, split, seed, samples_per_task, name)
    warn_of_few(len(specs), num_episodes, split)
    sampling = sampling or sampling_from(run.validation_sampling, {})
    options = {"name": name, "model": label, "max_turns": max_turns, "device": device}
    with player_of(run, played, sampling, **options) as player:  # type: ignore[arg-type]
        episodes = player.play_blocking(specs)
        return summarize(
            episodes,
            environment=name,
            model=label,
            split=split,
            seed=seed,
            requested=num_episodes,
            majority=played.majority if len(played.agents) == 1 else None,
        )
