"""The contract between an algorithm and the data module that collects rollouts for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mrlm_pl.engines.base import Engine, Sampling
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.returns import Batches, EpisodeCredit, equal_returns
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.policy import Policy

EQUAL_RETURNS = "all returns within each group are equal"


@dataclass(frozen=True)
class RolloutFacts:
    """The common facts of a run's rollouts.

    Attributes:
        agents: names of the agents that play.
        environments: names of the environments, in the same order on all ranks.
        engine: engine that samples; None is the in-process engine.
        updates: optimizer updates on each rollout; None if the number varies or is not known.
    """

    agents: Collection[str]
    environments: Sequence[str]
    engine: Engine | None = None
    updates: int | None = None


class RolloutLearner(Protocol):
    """All that the rollout data module reads and calls of an algorithm.

    :class:`~mrlm_pl.learner.algorithm.Algorithm` implements it. In the order of a run: the data module
    validates its options against the algorithm, plays episodes with its policies, has them prepared, and divides the
    rows into micro-batches.
    """

    smallest_group: int = 1
    """Fewest episodes per task that the advantage is defined for."""

    no_signal_reason: str = EQUAL_RETURNS
    """Explanation of groups that :meth:`lacks_signal` finds, for messages."""

    uses_greedy_baseline: bool = False
    """Play each task once more with the most probable tokens, for comparison."""

    unit: EpisodeCredit = EpisodeCredit()
    """The unit of credit, such as whole episodes, turns, decisions of turn trees, or contributions of agents."""

    collection_over: bool = False
    """True if the remaining updates on the current rollout are skipped; equal on all ranks."""

    metrics: Metrics
    """Metrics of the algorithm; :meth:`prepare` adds the numbers of a rollout."""

    policies: Iterable[str]
    """Names of the policies."""

    training: bool
    """True if the modules are in training mode."""

    @property
    def uses_importance_ratio(self) -> bool:
        """True if the loss uses the importance ratio ``pi / pi_old``; without it a rollout serves one update."""
        return True

    @property
    def divides_groups(self) -> bool:
        """True if the rows of a group may be in several micro-batches, because no loss compares them."""
        return False

    @property
    def trainer(self) -> Any:
        """The Lightning trainer that both are attached to."""

    # Options.

    def check_rollouts(self, rollouts: RolloutFacts) -> None:
        """Validate the agents of a run, and store the common facts of its rollouts."""

    def weighs_sampler(self, sampling: Sampling) -> bool:
        """Return whether the loss weighs each token by its sampler's probability, so that stale weights may sample."""
        return False

    def turn_bonus(self, sampling: Sampling) -> Callable[[Turn], float] | None:
        """Return the function that adds to the reward of a turn, or None."""
        return None

    # Playing.

    def policy(self, name: str) -> Policy:
        """Return the policy of that name."""

    def seat(self, agent: str) -> str:
        """Return the name of the policy that decides for an agent."""

    def lacks_signal(self, group: Sequence[Episode]) -> bool:
        """Return whether the episodes of a task have equal returns, agent by agent; failures do not count.

        Returns are those of the environment. What :meth:`turn_bonus` adds does not count: answers that are all right or
        all wrong carry no signal about the task, whatever their lengths are (DAPO, arXiv 2503.14476).
        """
        return equal_returns(group)

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which all weights are whole on every rank; all ranks must enter together."""

    def train(self, mode: bool = True) -> Any:
        """Set training mode."""

    # Preparing a rollout.

    def prepare(self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode] = ()) -> Batches:
        """Return a rollout's trajectories by learner, on the host, with advantages; called once, without gradient.

        Args:
            episodes: one rollout, ordinary episodes before branches; failed episodes are left out.
            sampling: distribution that the turns were sampled from.
            greedy: one greedy episode for each group, if :attr:`uses_greedy_baseline` is set; not trained on.

        Raises:
            ConfigurationError: the algorithm does not learn from rollouts.
        """
        raise ConfigurationError(f"{type(self).__name__} does not learn from rollouts")

    def progress(self) -> dict[str, Any]:
        """Return the state other than the weights, such as running baselines, as plain values for the checkpoint."""
        return {}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`progress` returned; an empty mapping is the state before the first rollout."""
        return

    # Mini-batches.

    @property
    def learners(self) -> Mapping[str, Any]:
        """The models with their own trajectories in a batch, by name, in the same order on all ranks."""

    def rows_with_gradient(self, rows: PolicyBatch) -> Tensor:
        """Return the indices [b] of the rows whose loss can have a gradient; the others need no forward pass."""
        return torch.arange(len(rows))
