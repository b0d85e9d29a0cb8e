"""Cross-policy sampling: some turns are sampled by stale snapshots of the policy that learns from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrlm_pl.episode import Episode, Turn, base_agent
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.seeding import keyed_random
from mrlm_pl.settings import PositiveInt, Settings, UnitInterval


@dataclass(frozen=True)
class CrossPolicy(Settings):
    """The division of turns between a policy and its stale snapshots (AgentRL, arXiv 2510.04206).

    Snapshots start from the run's initial weights. At the beginning of every ``refresh``-th iteration the oldest of
    them is replaced by the weights of that moment.

    Args:
        share: probability that a snapshot samples a turn; all snapshots are equally likely. 0 has no snapshots.
        refresh: number of iterations between two replacements.
        snapshots: number of snapshots; each takes the memory of a model, with LoRA that of an adapter.
        unit: ``turn`` draws for every decision by itself; ``trajectory`` draws once for all that an agent decides in an
            episode, so that whole trajectories are of one policy; with turn trees, once for the whole tree.

    Raises:
        ConfigurationError: a value is out of range, or the snapshot would always be the current weights.
    """

    share: UnitInterval = 0.25
    refresh: PositiveInt = 10
    snapshots: PositiveInt = 1
    unit: Literal["turn", "trajectory"] = "turn"

    def __post_init__(self) -> None:
        if self.share and self.refresh == self.snapshots == 1:
            raise ConfigurationError(
                "data.cross_policy: one snapshot that is replaced in every iteration is always the current weights; "
                "raise refresh or snapshots"
            )

    def drawn(self, seed: int, agent: str, step: int, *branch: int | str) -> int | None:
        """Return the index of the snapshot that samples a decision; None for the current weights.

        Args:
            seed: seed of the episode.
            agent: agent that decides.
            step: number of environment steps before the decision.
            branch: indices of the decision among those requested in this state.

        >>> CrossPolicy(share=1.0).drawn(7, "solver", 0), CrossPolicy(share=0.0).drawn(7, "solver", 0)
        (0, None)
        >>> whole = CrossPolicy(share=0.5, snapshots=3, unit="trajectory")
        >>> len({whole.drawn(7, "solver", step) for step in range(20)})
        1
        """
        key = (agent, step, *branch) if self.unit == "turn" else (base_agent(agent),)
        random = keyed_random("cross-policy", seed, *key)
        return random.randrange(self.snapshots) if random.random() < self.share else None


def slot_name(policy: str, number: int) -> str:
    """Return the name, for engines, of a policy's snapshot by its number, whatever its weights.

    >>> slot_name("main", 0)
    'main@snapshot-0'
    """
    return f"{policy}@snapshot-{number}"


def snapshot_name(policy: str, version: int) -> str:
    """Return the name, in records, of a policy's snapshot after ``version`` optimizer steps.

    >>> snapshot_name("main", 120)
    'main@120'
    """
    return f"{policy}@{version}"


def stale_turns(episode: Episode) -> list[Turn]:
    """Return the turns of an episode that a snapshot sampled instead of the policy in the agent's seat."""
    return [turn for row in episode.rows() for turn in row.turns if turn.policy != row.policy]
