"""The gradients of policies under two credits of the same recorded tokens, compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mrlm_pl.episode import Episode, Trajectory, base_agent
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.batch import collate_rows
from mrlm_pl.learner.credit.returns import labels
from mrlm_pl.policy import Policy

ROWS = 16
"""Trajectories in a forward pass."""

Credited = tuple[str, Trajectory, Tensor]
"""Group, trajectory, and the recorded and new advantage of each of its tokens [T, 2]."""


class Gradients:
    """Sums of ``A grad log pi`` over the sampled tokens, with the recorded and the new advantages.

    A decision that paths of a turn tree share counts once, and turns without an advantage count as 0. The gradients are
    those of the given weights, without ratio and clip. Memory holds two for each policy and agent.

    Args:
        policies: policies by name, with their weights.
        temperature: sampling temperature of each policy.
    """

    def __init__(self, policies: Mapping[str, Policy], temperature: Mapping[str, float]) -> None:
        self.policies, self.temperature = policies, temperature
        self._sums: dict[tuple[str, str], list[Tensor]] = {}  # of each weight, both sides [2, ...]

    def add(self, recorded: Sequence[Episode], new: Sequence[Episode]) -> None:
        """Add the episodes of an iteration, in equal order.

        Raises:
            ConfigurationError: the policies lack one of the episodes.
        """
        seen: set[tuple[str, str, str, int]] = set()
        rows: list[tuple[tuple[str, str], Credited]] = []
        for old, now in zip(recorded, new, strict=True):
            for row, other in zip(old.rows(), now.rows(), strict=True):
                table = torch.zeros(len(row.token_ids), 2)
                for before, after in zip(row.turns, other.turns, strict=True):
                    if (key := old.key_of(before)) not in seen:
                        pair = [before.advantage or 0.0, after.advantage or 0.0]
                        table[before.start : before.stop] = torch.tensor(pair)
                    seen.add(key)
                if table.any():
                    rows.append(((row.policy, base_agent(row.agent)), (old.group, row, table)))
        for (policy, agent), agent_rows in grouped(rows).items():
            if policy not in self.policies:
                choices = f"the policies are {sorted(self.policies)}; give those of the run"
                raise ConfigurationError(f"policies: the episodes are of {policy!r}, and {choices}")
            for start in range(0, len(agent_rows), ROWS):
                self._add(policy, agent, agent_rows[start : start + ROWS])

    def _add(self, policy: str, agent: str, rows: Sequence[Credited]) -> None:
        model = self.policies[policy]
        numbers, trajectories, tables = zip(*rows, strict=True)
        groups = labels(numbers)
        batch = collate_rows(trajectories, groups, groups, groups, temperature=self.temperature.get(policy, 1.0))
        weights = [weight for weight in model.model.parameters() if weight.requires_grad]
        batch = batch.to(weights[0].device)
        sums = self._sums.setdefault((policy, agent), [weight.new_zeros(2, *weight.shape) for weight in weights])
        advantages = pad_sequence([*tables], batch_first=True).to(weights[0].device)
        for side, table in enumerate(advantages.unbind(-1)):
            logp = model(batch.inputs())  # once more, as compiled code keeps nothing for a second backward pass
            gradients = torch.autograd.grad((table * logp).sum(), weights, materialize_grads=True)
            for total, gradient in zip(sums, gradients, strict=True):
                total[side] += gradient

    def by_policy(self) -> dict[str, float | None]:
        """Return the cosine between the gradients of each policy; None where one is 0."""
        return self._cosines(0)

    def by_agent(self) -> dict[str, float | None]:
        """Return the cosine between the gradients of each agent; calls of one sub-agent count together."""
        return self._cosines(1)

    def _cosines(self, part: int) -> dict[str, float | None]:
        """Return the cosines by the policy (0) or the agent (1)."""
        sums_by_name = grouped((key[part], (key[0], sums)) for key, sums in self._sums.items())
        return {name: _cosine(grouped(policy_sums).values()) for name, policy_sums in sums_by_name.items()}


def _cosine(policies: Iterable[Sequence[Sequence[Tensor]]]) -> float | None:
    """Return the cosine between two gradients, given as summands of each policy."""
    products = torch.zeros(2, 2, dtype=torch.float64)
    for summands in policies:
        for sums in zip(*summands, strict=True):
            sides = torch.stack(sums).sum(0).reshape(2, -1).cpu().double()  # MPS has no float64
            products += sides @ sides.T
    norm = float(products.diagonal().sqrt().prod())
    return float(products[0, 1]) / norm if norm else None
