"""The value of a recorded decision against others in its place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mrlm_pl.engines.base import Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode, turns_by_step
from mrlm_pl.errors import ConfigurationError, RolloutError
from mrlm_pl.evaluation.intervals import difference_interval, mean_interval
from mrlm_pl.evaluation.summary import MOST_EPISODES
from mrlm_pl.rollout.branches import departure
from mrlm_pl.rollout.replay import Rest, counterfactuals, script_of, written
from mrlm_pl.runs.records.replay import chosen_episodes
from mrlm_pl.runs.seated_model import Model, SeatedModel, sampling_from
from mrlm_pl.settings import between, check_arguments


@dataclass(frozen=True)
class Outcomes:
    """Episodes with one decision, or with samples of it.

    Args:
        texts: text of the decision in each episode.
        returns: return of each episode, from the decision's step on.
        mean: mean of the returns.
        ci95: 95 % interval of the mean; infinite if the returns of both sides are all equal, which shows no spread.
    """

    texts: tuple[str, ...]
    returns: tuple[float, ...]
    mean: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class WhatIfReport:
    """A recorded decision and its alternatives.

    Args:
        episode: id of the episode.
        agent: agent that decided.
        turn: number of environment steps before the decision.
        recorded: continuations of the recorded decision.
        other: continuations of the other decisions.
        advantage: advantage of the recorded decision: the difference of the means.
        ci95: 95 % interval of the advantage; infinite if the returns of both sides are all equal.
    """

    episode: str
    agent: str
    turn: int
    recorded: Outcomes
    other: Outcomes
    advantage: float
    ci95: tuple[float, float]


@check_arguments
def whatif(
    run: str | Path,
    environment: str | type[Environment] | Environment | None = None,
    *,
    episode: str,
    agent: str,
    turn: int,
    message: str | None = None,
    samples: Annotated[int, between(1, MOST_EPISODES)] = 16,
    rest: Rest = "play",
    own_reward: bool = False,
    model: Model | None = None,
    served_by: Mapping[str, str] | None = None,
    episodes: str | Path | None = None,
    sampling: Sampling | None = None,
    device: str = "auto",
    name: str | None = None,
) -> WhatIfReport:
    """Replay an episode to a decision, replace the decision, and play the rest.

    The recorded decision is continued as often as its replacements, so that both means are over fresh continuations.
    Decisions of other agents at the same step are the recorded ones: they did not see this one.

    Args:
        run: run folder.
        environment: environment to play; see :func:`mrlm_pl.runs.evaluate`.
        episode: id of the episode.
        agent: agent that decided.
        turn: number of environment steps before the decision.
        message: text that replaces the decision; None samples other decisions.
        samples: number of continuations of the recorded decision, and of the message or the sampled decisions.
        rest: whether later decisions are sampled (``play``) or, where the record has them, the recorded ones
            (``replay``).
        own_reward: count the agent's own reward instead of the mean over the agents.
        model: model whose policies and seats replace the run's; its other settings stay. None takes the run's.
        served_by: servers that play policies, by name; their tokenizers are read, not their weights.
        episodes: file of episodes, or folder of files; None is ``RUN/episodes``.
        sampling: sampling settings of decisions; None takes the run's training settings.
        device: see :func:`mrlm_pl.runs.evaluate`.
        name: name of the environment in the run, if an instance has another one.

    Raises:
        ConfigurationError: as :func:`mrlm_pl.runs.evaluate`; there is no such episode, the agent did not decide there,
            or what came before does not replay.
        DataError: the episodes cannot be read.
        RolloutError: the environment fails.
    """
    seated = SeatedModel(run, environment, None, name, weights=model is None)
    if model is not None:
        seated.play_with(model)
    seated.serve(served_by or {})
    (recorded,) = list(chosen_episodes(run, episodes, seated.name, None, episode))[:1]
    if recorded.failed:
        raise ConfigurationError(f"episode {episode!r} failed when it was played ({recorded.error}); choose another")
    counterfactuals(recorded, agent, turn, ())  # raises for a decision that is not there before models are read
    with seated.player(sampling or sampling_from(seated.run.sampling, {}), None, device) as player:
        decision = script_of(recorded)[agent, turn]
        other = None if message is None else written(message, player.seats[agent].chat, player.seats[agent].policy)
        specs = counterfactuals(recorded, agent, turn, [decision] * samples + [other] * samples, rest)
        played = player.play_blocking(specs)
    for continuation in played:
        if fault := departure(recorded, continuation):
            raise ConfigurationError(
                f"episode {episode!r} cannot be continued, as its beginning does not replay: {fault}; the environment, "
                "its settings, its code or the tokenizer are others than when it was recorded (see `mrlm replay`)"
            )
        if continuation.failed:
            raise RolloutError(f"episode {episode!r} cannot be continued: {continuation.error}")
    return _report(recorded, agent, turn, played[:samples], played[samples:], own_reward)


def _report(
    recorded: Episode, agent: str, turn: int, same: Sequence[Episode], other: Sequence[Episode], own_reward: bool
) -> WhatIfReport:
    def value(episode: Episode) -> float:
        steps = episode.step_rewards[turn:]
        if own_reward:
            return math.fsum(step.get(agent, 0.0) for step in steps)
        return math.fsum(math.fsum(step.values()) for step in steps) / episode.team_size

    returns = [[value(episode) for episode in items] for items in (same, other)]
    low, high = min(map(min, returns)), max(map(max, returns))
    if low == high:  # equal returns tell nothing of their range
        low, high = -math.inf, math.inf
    outcomes = [
        Outcomes(
            tuple(_text(episode, agent, turn) for episode in items),
            tuple(values),
            math.fsum(values) / len(values),
            mean_interval([[value] for value in values], low, high),
        )
        for items, values in zip((same, other), returns, strict=True)
    ]
    advantage = outcomes[0].mean - outcomes[1].mean
    ends = [(outcome.mean, outcome.ci95) for outcome in outcomes]
    return WhatIfReport(recorded.id, agent, turn, outcomes[0], outcomes[1], advantage, difference_interval(*ends))


def _text(episode: Episode, agent: str, step: int) -> str:
    """Return the message of an agent's decision."""
    turn, row = turns_by_step(episode)[step][agent]
    return row.messages[row.replies[row.turns.index(turn) - len(row.turns)]].content
