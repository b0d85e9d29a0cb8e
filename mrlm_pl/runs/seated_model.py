"""A model in the seats of an environment, which plays there."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers.utils.logging import disable_progress_bar

from mrlm_pl.engines import Engine, InProcessEngine
from mrlm_pl.engines.base import Precision, Sampling
from mrlm_pl.environment import DatasetTasks, Environment
from mrlm_pl.environment.trial import close
from mrlm_pl.errors import ConfigurationError, counted, did_you_mean, tell
from mrlm_pl.evaluation.report import EvaluationReport
from mrlm_pl.evaluation.summary import evaluation_specs, summarize
from mrlm_pl.learner.policies.seats import check_seats
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.devices import computes_bf16, usable_device
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.runs.plugins import environment_from, find_environment, shown_settings
from mrlm_pl.runs.records.environment_code import code_of
from mrlm_pl.runs.records.run import SAVED, SETTINGS_OF_TOKENS, SINGLE, RecordedRun, checkpoints_of, read_run
from mrlm_pl.settings import at_least, check_served_by

logger = logging.getLogger(__name__)

Model: TypeAlias = str | Path | Policy | Mapping[str, Policy | str]
"""A run folder, model folder, hub id or ``builtin:tiny``; a policy, or several by name, each a policy or its model."""


class SeatedModel:
    """A model in the seats of an environment.

    Args:
        model: run folder, model folder, hub id or ``builtin:tiny``; a policy, or several by name.
        environment: short name, class or instance; a name of the run's environments, and None for its only one, stand
            for the run's settings.
        seats: policy of each agent, instead of the run's seats.
        name: name of the environment in the run, if an instance has another one.
        weights: whether a run must have policies or a checkpoint.
        precision: precision of generation; None is that of the run's training, except for bf16 on a CPU that emulates
            it.
        recorded: policies and settings of the model, if they are already read; None reads them now.

    Attributes:
        run: policies, seats and settings.
        label: name of the model in reports and messages.
        arguments: arguments of the environment; None if an instance is given, unless the caller sets them.

    Raises:
        ConfigurationError: there is no such model or environment, a seat is of no agent or names a policy that the
            model does not have, the run has several environments, or its own would run a program and is not named.
    """

    def __init__(
        self,
        model: Model,
        environment: str | type[Environment] | Environment | None,
        seats: Mapping[str, str] | None,
        name: str | None,
        weights: bool = True,
        precision: Precision | None = None,
        recorded: RecordedRun | None = None,
    ) -> None:
        self.precision = precision
        self.label, run = read_model(model, weights) if recorded is None else (str(model), recorded)
        self.run = replace(run, seats={**run.seats, **(seats or {})})
        check_seats(self.run.seats, run.policies, f"{self.label}: ")
        self.arguments: dict[str, Any] | None = None if isinstance(environment, Environment) else {}
        recorded_environment = None
        if not isinstance(environment, Environment | type | str | None):
            remedy = "give a short name, a class or an instance"
            raise ConfigurationError(f"environment is {environment!r:.80}; {remedy}")
        if isinstance(environment, Environment):
            self.environment = environment
        elif isinstance(environment, type):
            self.environment = environment()
        elif (recorded_environment := self.run.environment_to_play(environment, self.label)) is not None:
            self.environment = environment_from(recorded_environment.config)
            self.arguments = dict(recorded_environment.config.get("init_args") or {})
        else:
            self.environment = find_environment(str(environment))()
        self.name = name or (recorded_environment.name if recorded_environment else None) or self.environment.name
        for agent in seats or {}:
            if agent not in (agents := self.environment.agents):
                hint = did_you_mean(agent, agents, f"the agents are {', '.join(agents)}")
                raise ConfigurationError(f"seats: environment {self.name!r} has no agent {agent!r}; {hint}")

    def play_with(self, model: Model) -> None:
        """Put the policies and seats of another model in the place of the run's; its settings of all policies stay.

        Raises:
            ConfigurationError: there is no such model.
        """
        self.label, other_run = read_model(model, weights=True)
        sampling = {name: value for name, value in self.run.sampling.items() if name != "policies"}
        self.run = replace(self.run, policies=other_run.policies, seats=other_run.seats, sampling=sampling)

    def serve(self, addresses: Mapping[str, str]) -> None:
        """Let servers play policies, by name; see ``served_by`` of :class:`~mrlm_pl.policy.Policy`.

        Raises:
            ConfigurationError: a policy does not exist, or an address is not of the form of ``served_by``.
        """
        check_served(addresses, self.run.policies, self.label)
        for name, address in addresses.items():
            settings = self.run.policies[name]
            token_settings = {key: settings[key] for key in (*SETTINGS_OF_TOKENS, "revision") if key in settings}
            served_policy = Policy(**token_settings, trained=False, served_by=address)
            self.run = replace(self.run, policies={**self.run.policies, name: served_policy})

    def specs(self, num_episodes: int, split: str, seed: int, samples_per_task: int) -> list[EpisodeSpec]:
        """Return the episodes to play; say on stderr if the split has fewer tasks, and how to play a whole file.

        Raises:
            ConfigurationError: a number is below 1, or ``num_episodes`` is not a multiple of ``samples_per_task``.
        """
        specs = evaluation_specs(self.environment, num_episodes, split, seed, samples_per_task, self.name)
        if len(specs) < num_episodes:
            remedy = "raise `samples_per_task` to play each more often"
            source = self.environment.tasks(split)
            if isinstance(source, DatasetTasks) and source.numbers and source.numbers[-1] > len(source.rows):
                remedy += f"; other rows of the data are left out, and `data: {{{split}: FILE}}` plays a whole file"
            tell(f"the {split} split has tasks for {len(specs)} of up to {counted(num_episodes, 'episode')}; {remedy}")
        return specs

    def policy_by_agent(self) -> dict[str, str]:
        """Return the policy of each agent of the environment.

        Raises:
            ConfigurationError: an agent has none.
        """
        return {agent: self.run.policy_of(agent) for agent in self.environment.agents}

    def policies(self) -> dict[str, Policy]:
        """Return the policies of the agents by name; no weights are read.

        Raises:
            ConfigurationError: an agent has no policy, or a model cannot be found.
        """
        policies = {name: self.run.policies[name] for name in sorted(set(self.policy_by_agent().values()))}
        return {name: policy if isinstance(policy, Policy) else Policy(**policy) for name, policy in policies.items()}

    def seats(self, policies: Mapping[str, Policy], sampling: Sampling) -> dict[str, Seat]:
        """Return the seat of each agent of the environment.

        Raises:
            ConfigurationError: an agent has no policy.
        """
        return {
            agent: Seat(name, policy.chat, sampling.of(name), policy.context_window, vocabulary=policy.vocabulary)
            for agent, name in self.policy_by_agent().items()
            for policy in [policies[name]]
        }

    def evaluate(
        self,
        num_episodes: int,
        split: str,
        seed: int,
        samples_per_task: int,
        sampling: Sampling,
        max_turns: int | None,
        device: str,
        loaded: dict[str, Policy] | None = None,
    ) -> EvaluationReport:
        """Return the report of episodes; see :func:`evaluate`.

        Args:
            num_episodes, split, seed, samples_per_task, sampling, max_turns, device: see :func:`evaluate`.
            loaded: policies of the model in memory; those that this environment needs are added.

        Raises:
            ConfigurationError: as :func:`evaluate`.
        """
        # Raises for wrong numbers before a model is loaded.
        specs = self.specs(num_episodes, split, seed, samples_per_task)
        checkpoints = checkpoints_of(self.run.policies[name] for name in sorted(set(self.policy_by_agent().values())))
        arguments = self.arguments
        with self.player(sampling, max_turns, device, loaded=loaded) as player:
            return summarize(
                player.play_blocking(specs),
                environment=self.name,
                model=self.label,
                split=split,
                seed=seed,
                requested=num_episodes,
                majority=self.environment.majority if len(self.environment.agents) == 1 else None,
                bounds=self.environment.bounds,
                settings=arguments,
                changed_settings="" if arguments is None else shown_settings(type(self.environment), arguments),
                sampling=sampling,
                code=code_of(self.environment),
                precision=generation_precision(self.run, self.precision, device),
                checkpoint=", ".join(checkpoint.when for checkpoint in checkpoints),
            )

    @contextmanager
    def player(
        self,
        sampling: Sampling,
        max_turns: int | None,
        device: str,
        *,
        playing: Collection[str] | None = None,
        loaded: dict[str, Policy] | None = None,
    ) -> Iterator[EpisodePlayer]:
        """Yield a player of the environment with the policies in their seats; close both at the end.

        Args:
            sampling: sampling settings of the turns.
            max_turns: number of decisions after which an episode is truncated; None is the run's limit.
            device: device of the weights, as torch names it; ``auto`` prefers an accelerator.
            playing: names of the policies, if others may take the seats; None takes those in the seats.
            loaded: policies of the model in memory; see :meth:`evaluate`.

        Raises:
            ConfigurationError: an agent has no policy, the sampling names a policy that does not exist, or the device
                cannot be used.
        """
        sampling.check_policies([*self.run.policies], "sampling")
        at_least(1).check(max_turns=max_turns)
        playing = set(self.policy_by_agent().values() if playing is None else playing)
        self._warn_of_idle(playing)
        with ExitStack() as stack:
            stack.callback(close_environment, self.environment)
            half = generation_precision(self.run, self.precision, device) == "bf16-mixed"
            single = None if self.precision is None else torch.float32  # else the dtype of weights in memory
            engine: Engine = InProcessEngine(torch.bfloat16 if half else single)
            stack.callback(engine.close)
            configured = {**self.run.policies, **(loaded or {})}
            policies = loaded_policies({name: configured[name] for name in sorted(playing)}, device)
            if loaded is not None:
                loaded |= policies
            sampling.warn_of_windows({name: policy.context_window for name, policy in policies.items()}, "sampling")
            for name, policy in policies.items():
                if policy.served_by is None:
                    stack.callback(policy.network.train, policy.network.training)
                    policy.network.eval()
                    engine.load(name, policy.network, 0)
            if any(policy.served_by is not None for policy in policies.values()):
                from mrlm_pl.serving.policies.placement import with_served  # gRPC and aiohttp

                engine = with_served(engine, policies)
                stack.callback(engine.close)
            limit = max_turns or self.run.turn_limit(self.name)
            player = EpisodePlayer(
                {self.name: self.environment}, self.seats(policies, sampling), engine, max_turns=limit
            )
            stack.callback(player.close)
            yield player

    def _warn_of_idle(self, playing: Collection[str]) -> None:
        """Warn of the run's agents and policies that the environment does not use."""
        agents = self.environment.agents
        idle = {"agents": {*self.run.seats}.difference(agents), "policies": {*self.run.policies}.difference(playing)}
        for kind, names in idle.items():
            if names:
                fault = f"the {kind} {', '.join(sorted(names))} of {self.label!r} do not play"
                tell(f"warning: {fault}: {self.environment.name!r} has the agents {', '.join(agents)}")


def close_environment(environment: Environment) -> None:
    """Close an environment, and warn of an error: the episodes are kept."""
    try:
        close(environment)
    except Exception as error:  # an environment may raise anything
        logger.warning("closing the %r environment: %s: %s", environment.name, type(error).__name__, error)


def check_served(addresses: Mapping[str, str], policies: Mapping[str, Any], label: str) -> None:
    """Validate the servers of a model's policies, by name.

    Raises:
        ConfigurationError: a policy does not exist or is in memory, or an address is not of the form of ``served_by``.
    """
    for name, address in addresses.items():
        if isinstance(policies.get(name), Policy | None):
            hint = did_you_mean(name, policies, f"the policies are {sorted(policies)}")
            raise ConfigurationError(f"served_by: {label!r} has no policy {name!r} to be served; {hint}")
        check_served_by(address, f"policies.{name}: ")


def read_model(model: Model, weights: bool) -> tuple[str, RecordedRun]:
    """Return the name of a model in messages, and its policies and settings."""
    if isinstance(model, (str, Path)):
        return str(model), read_run(str(model), weights=weights)
    named = model.items() if isinstance(model, Mapping) else [(SINGLE, model)]
    run = RecordedRun({name: Policy(policy) if isinstance(policy, str) else policy for name, policy in named})
    for policy in run.policies.values():
        if not isinstance(policy, Policy):
            remedy = "give a run folder, a model folder, a hub id, a Policy, or several by name"
            raise ConfigurationError(f"model holds {policy!r:.80}; {remedy}")
    return ", ".join(str(policy.name_or_path) for policy in run.policies.values()), run


def generation_precision(run: RecordedRun, requested: Precision | None, device: str) -> Precision:
    """Return the precision of generation: the given one, else bf16 if the run trained in it and the device computes it.

    All other runs and models play in float32.
    """
    half = requested is None and "bf16" in run.precision and computes_bf16(usable_device(device))
    return "bf16-mixed" if half else requested or "32-true"


def sampling_from(run_sampling: Mapping[str, Any], given: Mapping[str, Any]) -> Sampling:
    """Return the sampling of a run with the given settings instead of its own, else the defaults.

    A given setting holds for all policies, except those that the given ``policies`` set.

    Raises:
        ConfigurationError: a value is out of its range.

    >>> sampling_from({"temperature": 0.0, "max_tokens": 77}, {"temperature": 0.5}).max_tokens
    77
    """
    names = [setting.name for setting in fields(Sampling)]
    for_all_policies = {name: value for name, value in given.items() if name != "policies"}
    sampling = Sampling(**{name: run_sampling[name] for name in names if name in run_sampling}).for_all(
        **for_all_policies
    )
    policy_changes = Sampling(policies=given.get("policies") or {}).policies
    changed = {
        name: replace(sampling.policies.get(name, change), **change.given()) for name, change in policy_changes.items()
    }
    return replace(sampling, policies={**sampling.policies, **changed})


def loaded_policy(
    given: Policy | Mapping[str, Any], device: str, name: str = SINGLE, bases: dict[Any, Any] | None = None
) -> Policy:
    """Return a policy with its weights, unless a server has them; one that is made here is ready to generate.

    Args:
        given: policy, whose weights stay where they are if it has any, or its settings in a run.
        device: device of weights that are read, as torch names it; ``auto`` prefers an accelerator.
        name: name of the policy.
        bases: models that policies with adapters share; see :meth:`~mrlm_pl.policy.Policy.load`.

    Raises:
        ConfigurationError: the device cannot be used, or the model cannot be loaded.
    """
    disable_progress_bar()
    settings = {} if isinstance(given, Policy) else dict(given)
    saved = settings.pop(SAVED, None)
    policy = given if isinstance(given, Policy) else Policy(**settings)
    if policy.model is None and policy.served_by is None:
        target = usable_device(device)
        policy.load(name=name, bases=bases)
        if saved is not None:
            checkpoint, saved_name = saved
            checkpoint.read(policy, saved_name)
        policy.network.to(target).train(policy is given)  # which its owner may train
    return policy


def loaded_policies(given: Mapping[str, Policy | Mapping[str, Any]], device: str) -> dict[str, Policy]:
    """Return policies with their weights, by name; print the checkpoint of those of a run that has not finished.

    Args:
        given: policies or their settings; see :func:`loaded_policy`.
        device: device of weights that are read; see :func:`loaded_policy`.

    Raises:
        ConfigurationError: as :func:`loaded_policy`.
    """
    bases: dict[Any, Any] = {}
    policies = {name: loaded_policy(policy, device, name, bases) for name, policy in given.items()}
    for checkpoint in checkpoints_of(given.values()):
        checkpoint.tell()
    return policies
