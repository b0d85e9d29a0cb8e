"""A model in the seats of an environment: what ``evaluate`` and ``collect`` play with."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrlm_pl.engines.base import Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.runs.plugins import environment_from, find_environment
from mrlm_pl.runs.recorded_run import SINGLE, RecordedRun, read_run

if TYPE_CHECKING:
    from mrlm_pl.policy import Policy
    from mrlm_pl.rollout.play import Seat
    from mrlm_pl.rollout.player import EpisodePlayer

    Model = str | Path | Policy | Mapping[str, Policy]
    """A run folder, model folder, hub id or ``builtin:tiny``; a policy, or several by name."""

MAX_TURNS = 64
"""Decisions of an episode where neither the caller nor a run says how many."""


def read_model(model: Model, seats: Mapping[str, str] | None = None) -> RecordedRun:
    """Return the policies of a model with its seats, those in ``seats`` instead where both name an agent.

    Raises:
        ConfigurationError: there is no such model, or a seat names a policy that it does not have.
    """
    if isinstance(model, (str, Path)):
        run = read_run(str(model))
    else:
        run = RecordedRun(model if isinstance(model, Mapping) else {SINGLE: model})
    run = replace(run, seats={**run.seats, **(seats or {})})
    unknown = sorted(set(run.seats.values()) - set(run.policies))
    if unknown:
        raise ConfigurationError(f"seats name the policies {unknown}; {model_name(model)!r} has {sorted(run.policies)}")
    return run


def model_name(model: Model) -> str:
    """Return the name of a model in reports and messages."""
    if isinstance(model, (str, Path)):
        return str(model)
    policies = model.values() if isinstance(model, Mapping) else [model]
    return ", ".join(str(policy.name_or_path) for policy in policies)


def played_environment(
    environment: str | type[Environment] | Environment | None, run: RecordedRun, model: str
) -> tuple[Environment, str, dict[str, Any]]:
    """Return the environment, its name in the run and its arguments as far as they are known.

    A name that the run has, and None for its only environment, stand for the run's settings.

    Raises:
        ConfigurationError: there is no such environment, the run has several, or its own would run a program and is
            not named.
    """
    if isinstance(environment, Environment):
        return environment, environment.name, {}
    if isinstance(environment, type):
        made = environment()
        return made, made.name, {}
    recorded = run.played(environment, model)
    if recorded is not None:
        made = environment_from(recorded.config)
        return made, recorded.name or made.name, dict(recorded.config.get("init_args") or {})
    assert environment is not None
    made = find_environment(environment)()
    return made, made.name, {}


def sampling_from(run_sampling: Mapping[str, Any], given: Mapping[str, Any]) -> Sampling:
    """Return the sampling of a run with the given settings instead of its own, else the defaults.

    Raises:
        ConfigurationError: a value is out of its range.

    >>> sampling_from({"temperature": 0.0, "max_tokens": 77}, {"temperature": 0.5}).max_tokens
    77
    """
    names = [setting.name for setting in fields(Sampling)]
    return Sampling(**{**{name: run_sampling[name] for name in names if name in run_sampling}, **given})


def warn_of_few(episodes: int, requested: int, split: str) -> None:
    """Warn on stderr if the split has too few tasks for the requested episodes."""
    if episodes < requested:
        print(
            f"mrlm: warning: {requested} episodes requested, but the {split} split has tasks for {episodes}; play each "
            "task several times with --samples-per-task",
            file=sys.stderr,
        )


@contextmanager
def player_of(
    run: RecordedRun,
    environment: Environment,
    sampling: Sampling,
    *,
    name: str,
    model: str,
    max_turns: int | None,
    device: str,
) -> Iterator[EpisodePlayer]:
    """Yield a player of the environment with the policies in their seats; close both at the end.

    Args:
        run: the policies and seats.
        environment: to play.
        sampling: how turns are sampled.
        name: of the environment in the run.
        model: name of the model, for messages.
        max_turns: decisions after which an episode is truncated; None is the run's limit.
        device: as torch names it; ``auto`` prefers an accelerator.

    Raises:
        ConfigurationError: an agent has no policy, or the device cannot be used.
    """
    from mrlm_pl.engines import InProcessEngine
    from mrlm_pl.rollout.player import EpisodePlayer

    _warn_of_idle(run, environment, model)
    engine = InProcessEngine()
    modes: list[tuple[Any, bool]] = []
    seats = _seats(run, environment, sampling, engine, device, modes)
    limit = max_turns or run.turn_limit(name) or MAX_TURNS
    player = EpisodePlayer({name: environment}, seats, engine, max_turns=limit)
    try:
        yield player
    finally:
        player.close()
        engine.close()
        environment.close()
        for network, training in modes:
            network.train(training)


def _warn_of_idle(run: RecordedRun, environment: Environment, model: str) -> None:
    playing = {run.policy_of(agent) for agent in environment.agents}
    missing = sorted(set(run.seats) - set(environment.agents))
    idle = sorted(set(run.policies) - playing)
    for what, names in (("the agents", missing), ("the policies", idle)):
        if names:
            print(
                f"mrlm: warning: {what} {', '.join(names)} of {model!r} do not play: {environment.name!r} has "
                f"the agents {', '.join(environment.agents)}",
                file=sys.stderr,
            )


def _seats(
    run: RecordedRun,
    environment: Environment,
    sampling: Sampling,
    engine: Any,
    device: str,
    modes: list[tuple[Any, bool]],
) -> dict[str, Seat]:
    """The agents' seats, after the policies that are needed have been loaded into the engine.

    The mode of each network of the caller is added to ``modes``.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from mrlm_pl.policy import Policy
    from mrlm_pl.rollout.play import Seat

    disable_progress_bar()
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator.type if accelerator is not None else "cpu"
    names = {agent: run.policy_of(agent) for agent in environment.agents}
    policies: dict[str, Policy] = {}
    for name in sorted(set(names.values())):
        given = run.policies[name]
        if isinstance(given, Policy):
            given.load(name=name)
            modes.append((given.network, given.network.training))
            given.network.eval()
            policies[name] = given
        else:
            policies[name] = loaded_policy(given, device)
        engine.load(name, policies[name].network, 0)
    return {
        agent: Seat(name, policies[name].chat, sampling, policies[name].context_window) for agent, name in names.items()
    }


def loaded_policy(settings: Mapping[str, Any], device: str) -> Policy:
    """Return a policy by its constructor arguments, its model on the device and ready to generate.

    Raises:
        ConfigurationError: the device cannot be used, or the model cannot be loaded.
    """
    from mrlm_pl.policy import Policy

    policy = Policy(**settings)
    policy.load()
    try:
        policy.model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"device: {device!r} cannot be used: {error}") from error
    return policy
