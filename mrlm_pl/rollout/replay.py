"""Recorded episodes, played again: as they were, or with other decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mrlm_pl.engines.base import Sample
from mrlm_pl.episode import CREDIT, Episode, Origin
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy.chat import ChatFormat
from mrlm_pl.rollout.play import CONTEXT_STOP, TURN_STOP, Decision, EpisodeSpec, Play
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.tree_player import THRESHOLD_STOP, UNEXPANDED_STOP
from mrlm_pl.seeding import derive_seed

Rest = Literal["play", "replay"]
"""The decisions after a replaced one.

- ``play``: sampled from the policies.
- ``replay``: the recorded ones, where the same agent is due at the same step; sampled where none is recorded.
"""

ENDED_BY_PLAYER = (TURN_STOP, CONTEXT_STOP, THRESHOLD_STOP, UNEXPANDED_STOP)
"""Reasons for which an episode ends before its environment does."""

NOT_RECORDED = "not_recorded"
"""Stop reason of a replay that lacks a decision."""

UNCOMPARED = ("id", "group", "attempts", "retried_decisions", "retried_tokens", "timings", "schema", "excluded")
"""Fields of an episode in which a replay may differ."""


def script_of(episode: Episode) -> dict[tuple[str, int], Decision]:
    """Return the decisions of an episode by agent and step, each with its tokens as they were sampled."""
    return {
        (turn.agent, turn.index): Decision(
            Sample(
                row.token_ids[turn.start : turn.stop],
                row.logprobs[turn.start : turn.stop],
                turn.finish_reason,  # type: ignore[arg-type]
                turn.version,
                turn.engine,
                turn.spans,
            ),
            turn.policy,
            turn.node,
            turn.sample,
            turn.scripted,
        )
        for row in episode.rows()
        for turn in row.turns
    }


def replayed(episode: Episode) -> EpisodeSpec:
    """Return the episode to play that repeats a recorded one decision by decision."""
    return _spec(episode, "replay", script_of(episode), episode.seed, episode.origin)


def written(text: str, chat: ChatFormat, policy: str) -> Decision:
    """Return a decision that is given as text; its log-probabilities are 0."""
    ids = (*chat.encode(text), chat.end_id)
    return Decision(Sample(ids, (0.0,) * len(ids), "stop", -1, "written"), policy, scripted=True)


def counterfactuals(
    episode: Episode, agent: str, step: int, alternatives: Sequence[Decision | None], rest: Rest = "play"
) -> list[EpisodeSpec]:
    """Return one episode to play for each alternative to a decision; all earlier decisions are the recorded ones.

    Decisions of other agents at the same step are recorded ones too: they did not see this one.

    Args:
        episode: recorded episode.
        agent: agent that decided.
        step: number of environment steps before the decision (:attr:`mrlm_pl.episode.Turn.index`).
        alternatives: decisions instead of the recorded one; None is a fresh sample of the policy, a different one for
            each None.
        rest: decisions after the replaced one; see :data:`Rest`.

    Raises:
        ConfigurationError: the agent did not decide at this step.
    """
    script = script_of(episode)
    if (agent, step) not in script:
        steps = {name: sorted(at for actor, at in script if actor == name) for name in episode.trajectories}
        choices = "; ".join(f"{name} at {', '.join(map(str, numbers))}" for name, numbers in steps.items() if numbers)
        raise ConfigurationError(
            f"turn: agent {agent!r} did not decide at turn {step} of episode {episode.id!r}; choose a turn of {choices}"
        )
    scripted = {
        key: replace(decision, scripted=True) for key, decision in script.items() if key[1] <= step or rest == "replay"
    }
    del scripted[agent, step]
    return [
        _spec(
            episode,
            f"{agent}/{step}/{number}",
            scripted if alternative is None else scripted | {(agent, step): alternative},
            derive_seed("counterfactual", episode.seed, agent, step, number),
            Origin(episode.id, (agent,), step),
        )
        for number, alternative in enumerate(alternatives)
    ]


def differences(recorded: Episode, again: Episode) -> list[str]:
    """Return the differences of a replay from the record, as ``place: recorded, replayed``; empty if they are equal.

    Tokens, messages, rewards, components and outcomes are compared exactly. An error comes first: it causes the rest.
    """
    old, new = recorded.to_dict(), again.to_dict()
    for record in (old, new):
        for name in UNCOMPARED:
            record.pop(name, None)
        for turn in (turn for rows in record["trajectories"].values() for row in rows for turn in row["turns"]):
            for name in CREDIT:
                turn.pop(name, None)  # a record of an older version has none
    return sorted(_differences("", old, new), key=lambda line: not line.startswith("error: "))


def continued(episode: Episode, step: int, number: int) -> EpisodeSpec:
    """Return the episode to play that repeats a recorded one up to a step, and samples all decisions from there on.

    Args:
        episode: recorded episode.
        step: number of environment steps to repeat.
        number: index that distinguishes the continuations from one step.

    Raises:
        ConfigurationError: no agent decided at this step.
    """
    script = script_of(episode)
    agents = tuple(agent for agent, index in script if index == step)
    if not agents:
        raise ConfigurationError(f"no agent decided at step {step} of episode {episode.id!r}; name an earlier step")
    scripted = {key: replace(decision, scripted=True) for key, decision in script.items() if key[1] < step}
    seed = derive_seed("continued", episode.seed, step, number)
    return _spec(episode, f"{step}/{number}", scripted, seed, Origin(episode.id, agents, step))


class RecordPlayer(EpisodePlayer):
    """Plays recorded episodes again; an episode ends at the first decision that its record lacks."""

    def play_again(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the replay of each episode, in order; nothing is sampled."""
        self._records = {f"{episode.id}/replay": episode for episode in episodes}
        return self.play_blocking([replayed(episode) for episode in episodes])

    def stop_at_limits(self, plays: Sequence[Play]) -> list[Play]:
        for play in plays:
            if play.over or all((agent, play.steps) in play.spec.script for agent in play.due):
                continue
            record = self._records[play.id]
            if record.stop_reason in ENDED_BY_PLAYER and play.steps == len(record.step_rewards):
                play.end_early(record.stop_reason, record.truncated)
            else:
                play.end_early(NOT_RECORDED)
        return [play for play in plays if not play.over]


def _spec(
    episode: Episode, name: str, script: Mapping[tuple[str, int], Decision], seed: int, origin: Origin | None
) -> EpisodeSpec:
    return EpisodeSpec(f"{episode.id}/{name}", episode.task, episode.group, seed, episode.iteration, script, origin)


def _differences(path: str, old: Any, new: Any) -> list[str]:
    if old == new:  # as nearly every record is, compared in C
        return []
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        return [text for name in names for text in _differences(f"{path}.{name}", old.get(name), new.get(name))]
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [
            text
            for number, (old_value, new_value) in pairs
            for text in _differences(f"{path}[{number}]", old_value, new_value)
        ]
    return [f"{path.lstrip('.')}: {old!r:.80}, {new!r:.80}"]
