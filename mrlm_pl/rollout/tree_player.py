"""Plays turn trees: several decisions of each agent in one state, combined to joint actions.

Each agent that is due in a state makes as many decisions as the tree has branches; a joint action takes one decision of
each, and leads to a state of the next level or to the end. The decisions of a whole level, of all trees and agents, are
sampled in one engine call, and all its joint actions are judged together. The episodes that come back are the paths of
a :class:`~mrlm_pl.turn_tree.TurnTree`.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from mrlm_pl.engines.base import sample_checked
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError
from mrlm_pl.rollout.play import Decision, EpisodeSpec, Play
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.settings import Settings

logger = logging.getLogger(__name__)

MOST_JOINT_ACTIONS = 65_536
"""Maximum number of joint actions in one level of all trees of a collection; more would fill the memory."""

THRESHOLD_STOP, UNEXPANDED_STOP = "reward_threshold", "not_expanded"
"""Stop reasons of paths that the tree ended, not the environment."""


@dataclass(frozen=True)
class Branching(Settings):
    """The combination of decisions in a state, and the expansion of the tree.

    Args:
        joint_mode: ``align`` combines the g-th decisions of all agents, G joint actions; ``cross`` combines each with
            each, G^N of N agents; ``counterfactual`` is ``align``, and for each of its joint actions those in which one
            agent's decision is replaced by another of its own.
        expand: continue with ``all`` joint actions of a state, or with the ``best``, which has the highest mean reward
            over the agents among those that do not end the episode.
        stop_above: end all paths of a state when the mean reward of its joint actions is above this; None never does.

    Raises:
        ConfigurationError: an unknown name.
    """

    joint_mode: Literal["align", "cross", "counterfactual"] = "align"
    expand: Literal["all", "best"] = "all"
    stop_above: float | None = None

    def joint_actions(self, agents: int, branches: int) -> list[tuple[int, ...]]:
        """Return the joint actions of a state: for each, the number of every agent's decision.

        >>> Branching("align").joint_actions(2, 2)
        [(0, 0), (1, 1)]
        >>> Branching("cross").joint_actions(2, 2)
        [(0, 0), (0, 1), (1, 0), (1, 1)]
        >>> Branching("counterfactual").joint_actions(3, 2)[2:]
        [(0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0)]
        """
        aligned = [(number,) * agents for number in range(branches)]
        if self.joint_mode == "align":
            return aligned
        if self.joint_mode == "cross":
            return list(itertools.product(range(branches), repeat=agents))
        replaced = {
            (*joint[:agent], replacement, *joint[agent + 1 :])
            for joint in aligned
            for agent in range(agents)
            for replacement in range(branches)
        }
        return aligned + sorted(replaced.difference(aligned))

    def count(self, agents: int, branches: int) -> int:
        """Return the number of joint actions of a state, without making them."""
        if self.joint_mode == "align" or agents == 1:
            return branches
        if self.joint_mode == "cross":
            return int(branches**agents)
        return branches + (branches * (branches - 1) * agents if agents > 2 else branches * (branches - 1))


@dataclass
class _Branch:
    """A joint action, and its play until its step is done; the step may be tried again."""

    node: Play
    name: str
    decided: Mapping[str, Decision]
    seconds: float
    play: Play = field(init=False)

    def begin(self, environment: Environment) -> None:
        """Make the play, decided and not yet judged."""
        self.play = self.node.fork(self.name, environment)
        self.play.generate_seconds += self.seconds
        for agent, decision in self.decided.items():
            self.play.record(agent, decision)


class TreePlayer:
    """Plays turn trees with the environments, seats and engine of an :class:`EpisodePlayer`.

    Args:
        player: player whose environments, seats and engine are used.
        tree: combination of decisions and expansion of the tree.
        branches: number of decisions of each agent in each state; by environment where they differ.
    """

    def __init__(self, player: EpisodePlayer, tree: Branching, branches: int | Mapping[str, int]) -> None:
        self.player, self.tree, self.branches = player, tree, branches
        self._warned = False

    def branches_of(self, play: Play) -> int:
        """Return the number of decisions of each agent in each state of a play."""
        return self.branches if isinstance(self.branches, int) else self.branches[play.spec.task.environment]

    async def play(self, specs: Sequence[EpisodeSpec]) -> list[list[Episode]]:
        """Return the episodes of each spec's tree, one for each path; paths that fail for good have ``error`` set.

        Raises:
            ConfigurationError: a level has more joint actions than fit into memory.
        """
        nodes = await self.player.reset_with_retries([self.player.new_play(spec, attempt=1) for spec in specs])
        paths: dict[str, list[Play]] = {spec.id: [] for spec in specs}
        kept_environment: set[str] = set()
        while nodes:
            waiting = self.player.stop_at_limits(nodes)
            self._check_size(waiting)
            for node in (node for node in nodes if node.over):
                tree, forks = node.spec.id, node.environment.forks
                paths[tree].append(node)
                # Of environments that can be forked, one of a tree is enough.
                self.player.finish(node, keep=not (forks and tree in kept_environment))
                if forks and node.error is None and not node.ended_early:
                    kept_environment.add(tree)
            await self.player.close_unwanted()
            branches = await self._branch(waiting)
            await self._step([branch for siblings in branches for branch in siblings])
            for siblings in branches:
                self._prune([branch.play for branch in siblings])
            nodes = [branch.play for siblings in branches for branch in siblings]
        for spec in specs:
            self.player.playing.pop(spec.id, None)
            self.player.engine.release(f"{spec.id}/")
        return [[play.episode(self.player.seats) for play in paths[spec.id]] for spec in specs]

    def _check_size(self, nodes: Sequence[Play]) -> None:
        total = sum(self.tree.count(len(node.due), self.branches_of(node)) for node in nodes)
        align = "" if self.tree.joint_mode == "align" else "use joint_mode align, "
        remedy = f"lower data.group_size, data.groups or data.max_turns, {align}or train with ATGRPO or GRPO"
        if total > MOST_JOINT_ACTIONS:
            most = max(map(self.branches_of, nodes))
            raise ConfigurationError(
                f"a level of the turn trees has {total} joint actions ({most} decisions of each agent, "
                f"joint_mode {self.tree.joint_mode!r}); at most {MOST_JOINT_ACTIONS} fit: {remedy}"
            )
        growth = total // max(len(nodes), 1) if self.tree.expand == "all" else 1
        depth = max((node.steps for node in nodes), default=0)
        # The first turns may be all that there are: a wide tree of two turns is meant.
        if depth > 1 and total * growth**2 > MOST_JOINT_ACTIONS and not self._warned:
            self._warned = True
            logger.warning(
                "turn %d of the turn trees has %d joint actions, and each further turn %d times as many; above %d the "
                "run ends: %s",
                depth + 1,
                total,
                growth,
                MOST_JOINT_ACTIONS,
                remedy,
            )

    async def _branch(self, nodes: Sequence[Play]) -> list[list[_Branch]]:
        """Return the joint actions of each node, decided and not yet judged."""
        if not nodes:
            return []
        requests = [
            node.request(agent, self.player.seats[agent], node.id, number, session=_session(node, agent, number))
            for node in nodes
            for agent in node.due
            for number in range(self.branches_of(node))
        ]
        started = time.perf_counter()
        self.player.set_waiting(nodes, "the engine")
        answers = iter(zip(requests, await sample_checked(self.player.engine, requests), strict=True))
        share = (time.perf_counter() - started) / len(nodes)
        branches = []
        for node in nodes:
            decided = {
                agent: [
                    self.player.seats[agent].decision(*next(answers), node.id, number)
                    for number in range(self.branches_of(node))
                ]
                for agent in node.due
            }
            branches.append(self._joint_actions(node, decided, share))
        # The last child of a node takes over its environment.
        await self._restore(
            [branch.play for siblings in branches for branch in siblings[:-1] if not branch.node.environment.forks]
        )
        return branches

    def _joint_actions(self, node: Play, decided: Mapping[str, Sequence[Decision]], seconds: float) -> list[_Branch]:
        joints = self.tree.joint_actions(len(decided), self.branches_of(node))
        branches = []
        for index, joint in enumerate(joints):
            environment = node.environment
            if index < len(joints) - 1:
                environment = (
                    self.player.copy_of(environment)
                    if environment.forks
                    else self.player.idle_environment(node.spec.task.environment)
                )
            chosen = {
                agent: decisions[number] for (agent, decisions), number in zip(decided.items(), joint, strict=True)
            }
            branches.append(_Branch(node, f"{node.id}-{index}", chosen, seconds / len(joints)))
            branches[-1].begin(environment)
        return branches

    async def _restore(self, plays: Sequence[Play]) -> None:
        """Bring the environments of plays into their states, by playing the turns again, each within its deadline."""
        for level in itertools.count():
            due = [play for play in plays if play.error is None and level <= len(play.history)]
            if not due:
                return
            calls = [
                partial(play.environment.step, play.history[level - 1])
                if level
                else partial(play.environment.reset, play.spec.task)
                for play in due
            ]
            for play, result in zip(due, await self.player.call(calls), strict=True):
                play.environment_seconds += result.seconds
                play.queue_seconds += result.queued
                if result.error is not None:
                    what = f"{type(result.error).__name__} when {play.spec.task.key} was played again"
                    play.error = f"{what}, at turn {level}: {result.error}"
                elif (
                    level == len(play.history)
                    and (result.value.observations if level else result.value) != play.observed
                ):
                    raise EnvironmentContractError(
                        f"environment {play.environment.name!r}: the same actions led to another state when they were "
                        "played again; a turn tree needs an environment that is deterministic in the task"
                    )

    async def _step(self, branches: Sequence[_Branch]) -> None:
        """Judge the joint actions; what fails is begun again in a new environment."""
        due = list(branches)
        while due:
            await self.player.step([branch.play for branch in due if branch.play.error is None])
            last = self.player.retries
            due = [branch for branch in due if branch.play.error and branch.play.attempt - branch.node.attempt < last]
            for branch in due:
                self.player.finish(branch.play)
                attempt = branch.play.attempt + 1
                branch.begin(self.player.idle_environment(branch.node.spec.task.environment))
                branch.play.attempt = attempt
            await self._restore([branch.play for branch in due])
            await self.player.close_unwanted()

    def _prune(self, children: Sequence[Play]) -> None:
        """End the paths that the tree does not expand."""
        judged = [child for child in children if child.error is None]
        if not judged:
            return
        agents = len(judged[0].environment.agents)
        rewards = {child.id: math.fsum(child.step_rewards[-1].values()) / agents for child in judged}
        going = [child for child in judged if not child.over]
        threshold = self.tree.stop_above
        if threshold is not None and math.fsum(rewards.values()) / len(rewards) > threshold:
            for child in going:
                child.end_early(THRESHOLD_STOP, truncated=False)
        elif self.tree.expand == "best" and going:
            best = max(going, key=lambda child: rewards[child.id])
            for child in going:
                if child is not best:
                    child.end_early(UNEXPANDED_STOP)


def _session(node: Play, agent: str, number: int) -> str:
    """Return the engine's session of a decision: the first in a state continues that of the decision before.

    Joint actions of ``cross`` that share a decision share its session, which the last of them keeps.
    """
    before = node.sessions.get(agent)
    return f"{node.spec.id}/{agent}/{node.id}/{number}" if number or not before else before
