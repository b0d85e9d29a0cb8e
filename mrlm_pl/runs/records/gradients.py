"""The gradients of policies under two credits of the same recorded tokens, compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mrlm_pl.episode import Episode, Trajectory, person_of
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.batch import collate_rows
from mrlm_pl.learner.credit.returns import labels
from mrlm_pl.policy import Policy

ROWS = 16
"""Trajectories in a forward pass."""

Credited = tuple[str, Trajectory, list[float], list[float]]
"""Group, trajectory, and the recorded and new advantage of each of its turns."""


class Gradients:
    """Sums of ``A grad log pi`` over the sampled tokens, with the recorded and the new advantages.

    A decision that paths of a turn tree share counts once, and turns without an advantage count as 0. The gradients are
    those of the given weights, without ratio and clip. Memory holds two for each policy and agent.

    Args:
        policies: by name, with their weights.
        temperature: of the sampling, by policy.
    """

    def __init__(self, policies: Mapping[str, Policy], temperature: Mapping[str, float]) -> None:
        self.policies, self.temperature = policies, temperature
        self._sums: dict[tuple[str, str], list[list[Tensor]]] = {}

    def add(self, recorded: Sequence[Episode], new: Sequence[Episode]) -> None:
        """Add the episodes of an iteration, in equal order.

        Raises:
            ConfigurationError: the policies lack one of the episodes.
        """
        seen: set[tuple[str, str, str, int]] = set()
        rows: list[tuple[tuple[str, str], Credited]] = []
        for old, now in zip(recorded, new, strict=True):
            for row, other in zip(old.rows(), now.rows(), strict=True):
                counts = [old.key_of(turn) not in seen for turn in row.turns]
                seen.update(old.key_of(turn) for turn in row.turns)
                before, after = (
                    [(turn.advantage or 0.0) * count for turn, count in zip(side.turns, counts, strict=True)]
                    for side in (row, other)
                )
                if any(before) or any(after):
                    rows.append(((row.policy, person_of(row.agent)), (old.group, row, before, after)))
        for (policy, agent), agent_rows in grouped(rows).items():
            if policy not in self.policies:
                choices = f"the policies are {sorted(self.policies)}; give those of the run"
                raise ConfigurationError(f"policies: the episodes are of {policy!r}, and {choices}")
            for start in range(0, len(agent_rows), ROWS):
                self._add(policy, agent, agent_rows[start : start + ROWS])

    def _add(self, policy: str, agent: str, rows: Sequence[Credited]) -> None:
        model = self.policies[policy]
        trajectories = [row for _, row, _, _ in rows]
        groups = labels(group for group, _, _, _ in rows)
        batch = collate_rows(trajectories, groups, groups, groups, temperature=self.temperature.get(policy, 1.0))
        advantages = torch.zeros(2, *batch.action_mask.shape, dtype=torch.float32)
        for index, (_, row, *sides) in enumerate(rows):
            for turn, *values in zip(row.turns, *sides, strict=True):
                advantages[:, index, turn.start : turn.stop] = torch.tensor(values)[:, None]
        weights = [weight for weight in model.model.parameters() if weight.requires_grad]
        batch = batch.to(weights[0].device)
        sums = self._sums.setdefault(
            (policy, agent), [[torch.zeros_like(weight) for weight in weights] for _ in advantages]
        )
        for side, table in zip(sums, advantages.to(weights[0].device), strict=True):
            logp = model(**batch.inputs())  # once more, as compiled code keeps nothing for a second backward pass
            gradients = torch.autograd.grad((table * logp).sum(), weights, materialize_grads=True)
            for total, gradient in zip(side, gradients, strict=True):
                total += gradient

    def by_policy(self) -> dict[str, float | None]:
        """Return the cosine between the gradients of each policy; None where one is 0."""
        return self._cosines(lambda policy, agent: policy)

    def by_agent(self) -> dict[str, float | None]:
        """Return the cosine between the gradients of each agent; calls of one sub-agent count together."""
        return self._cosines(lambda policy, agent: agent)

    def _cosines(self, name_of: Callable[[str, str], str]) -> dict[str, float | None]:
        sums_by_name = grouped((name_of(*key), (key[0], sides)) for key, sides in self._sums.items())
        return {name: _cosine(grouped(policy_sums).values()) for name, policy_sums in sums_by_name.items()}


def _cosine(policies: Iterable[Sequence[list[list[Tensor]]]]) -> float | None:
    """Return the cosine between two gradients, given as pairs of summands of each policy."""
    product = squares_first = squares_second = 0.0
    for pairs in policies:
        for index in range(len(pairs[0][0])):
            first, second = (torch.stack([sides[side][index] for sides in pairs]).sum(0).double() for side in (0, 1))
            product += float((first * second).sum())
            squares_first += float(first.square().sum())
            squares_second += float(second.square().sum())
    norm = math.sqrt(squares_first) * math.sqrt(squares_second)
    return product / norm if norm else None
