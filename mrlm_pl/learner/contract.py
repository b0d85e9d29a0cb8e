"""The contract between an algorithm and the data module that collects rollouts for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mrlm_pl.engines.base import Engine, Sampling
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.decisions import TreeCredit
from mrlm_pl.learner.credit.returns import Tables
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.branches import FurtherEpisodes

EQUAL_RETURNS = "all returns within each group are equal"


@dataclass(frozen=True)
class RolloutFacts:
    """The common facts of a run's rollouts.

    Attributes:
        agents: that play in them.
        environments: their names, in one order on all ranks.
        engine: that samples; None is in process.
        updates: optimizer updates on each rollout, or None if it varies or is not known.
    """

    agents: Collection[str]
    environments: Sequence[str]
    engine: Engine | None = None
    updates: int | None = None


class RolloutLearner(Protocol):
    """All that the rollout data module reads and calls of an algorithm; :class:`~.algorithm.Algorithm` implements it.

    In the order of a run: the data module validates its options against the algorithm, plays episodes with its
    policies, has them prepared, and divides the rows into micro-batches.
    """

    smallest_group: int
    """Fewest episodes per task that the advantage is defined for."""

    no_signal: str
    """Text for groups that :meth:`without_signal` finds, for messages."""

    uses_greedy_baseline: bool
    """True if each group comes with one greedy episode of its task."""

    tree: TreeCredit | None
    """The turn trees in which decisions are compared; None plays separate episodes."""

    metrics: Metrics
    """Its numbers of a rollout are those that :meth:`prepare` left to be logged."""

    collection_over: bool
    """True if the remaining updates on the current rollout are skipped; the same on every rank."""

    further: FurtherEpisodes | None
    """The further episodes that each group is completed with; None has none. Not with turn trees."""

    @property
    def uses_importance_ratio(self) -> bool:
        """True if the loss uses the importance ratio; without it a rollout serves one update."""

    @property
    def divides_groups(self) -> bool:
        """True if the rows of a group may be in several micro-batches: no loss compares them."""

    @property
    def trainer(self) -> Any:
        """The Lightning trainer that both are attached to."""

    # Options.

    def meet_rollouts(self, rollouts: RolloutFacts) -> None:
        """Validate the agents, and keep the rest."""

    def weighs_sampler(self, sampling: Sampling) -> bool:
        """Return True if the loss weighs each token by its sampler's probability."""

    def turn_bonus(self, sampling: Sampling) -> Callable[[Turn], float] | None:
        """Return the function that adds to the reward of a turn, or None."""

    # Playing.

    @property
    def policies(self) -> Iterable[str]:
        """Names of the policies."""

    def policy(self, name: str) -> Policy:
        """Return a policy."""

    def seat(self, agent: str) -> str:
        """Return the name of the policy that decides for an agent."""

    def without_signal(self, group: Sequence[Episode]) -> bool:
        """Return True if a group carries no learning signal."""

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which all weights are whole; all ranks enter together."""

    @property
    def training(self) -> bool:
        """True if the modules are in training mode."""

    def train(self, mode: bool = True) -> Any:
        """Set training mode."""

    # Preparing a rollout.

    def prepare(self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode] = ()) -> Tables:
        """Return the rows of a rollout by policy, with advantages; called once per rollout, without gradient.

        The further episodes stand behind the ordinary ones.
        """

    def progress(self) -> dict[str, Any]:
        """Return the state beside the weights, such as running baselines, as plain values."""

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Restore what :meth:`progress` returned."""

    # Mini-batches.

    @property
    def learners(self) -> Mapping[str, Any]:
        """The models with rows of their own by name, in one order on all ranks."""

    def rows_with_gradient(self, rows: PolicyBatch) -> Tensor:
        """Return the indices [b] of the rows whose loss can have a gradient."""
