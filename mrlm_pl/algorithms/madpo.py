"""Direct preference optimization of joint actions: several agents, and policies, behind one preference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import Batch, PolicyBatch, not_none
from mrlm_pl.learner.contract import RolloutFacts
from mrlm_pl.learner.credit.pairs import RowPair, collate_pairs, joint_pairs
from mrlm_pl.learner.credit.returns import Batches, group_numbers
from mrlm_pl.learner.policies.reference import ReferencePolicy
from mrlm_pl.losses import PreferenceLoss, joint_logp, preference_gap, preference_loss
from mrlm_pl.losses.preference import preference_metrics, sequence_logp
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.devices import on_device


class MADPO(Algorithm):
    """Multi-agent direct preference optimization: DPO (arXiv 2305.18290) where the answers are joint actions.

    For a pair with the joint actions ``w`` (chosen) and ``l`` (rejected), of which agent a's parts are ``w_a`` and
    ``l_a``, summed over their tokens::

        gap  = sum over agents of (log pi_a(w_a) - log pi_ref_a(w_a)) - (log pi_a(l_a) - log pi_ref_a(l_a))
        loss = mean over pairs of -log sigmoid(beta gap)                                  or another loss of DPO

    There is one preference for all agents, so the loss is one over all policies, and each one's gradient depends on
    the others' log-probabilities. With one agent it is DPO. The reference of a policy is the policy as it is
    before the first update. Use it with

    - ``JointPreferenceDataModule``: given pairs; the reference's log-probabilities are computed once for all of them;
    - ``RolloutDataModule`` (iterative MADPO): in each rollout the best and the worst episode of a group, by the mean
      return of the agents, are a pair; groups of equal returns have none. A frozen copy of the weights, or the model
      without its adapters, is the reference. ``data.passes`` may be above 1: the loss needs no importance ratio.

    Logged under ``train/``: ``rewards_chosen`` and ``rewards_rejected`` (means of ``beta (log pi - log pi_ref)`` of the
    joint actions), ``reward_margin`` (their difference), ``preference_accuracy`` (fraction of pairs with a positive
    gap); for each of several policies ``reward_margin``, its part of the joint one, and ``grad_norm``; under ``val/``
    and ``test/`` ``loss`` and the means of the joint actions.

    Args:
        policies, seats, optimization: see :class:`Algorithm`.
        loss: ``sigmoid``, ``hinge``, ``ipo``, ``robust`` or ``exo_pair``; see :class:`~mrlm_pl.algorithms.dpo.DPO`.
        beta: strength of the pull towards the reference.
        label_smoothing: assumed rate of swapped labels, for ``sigmoid``, ``robust`` and ``exo_pair``.
        margin: gap by which the chosen joint action must win; None is 0 for ``sigmoid`` and 1 for ``hinge``.

    Raises:
        ConfigurationError: a value is out of range or does not belong to the loss.
    """

    data_module = "JointPreferenceDataModule"
    reads_reference_sums = True
    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        loss: PreferenceLoss = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        margin: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.check_no_dropout()
        self.loss = preference_loss(loss, beta=beta, label_smoothing=label_smoothing, margin=margin)
        self.beta = beta

    def check_rollouts(self, rollouts: RolloutFacts) -> None:
        super().check_rollouts(rollouts)
        self.reference = ReferencePolicy(used=True)

    def prepare(self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode] = ()) -> Batches:
        pairs, numbers = joint_pairs(episodes), group_numbers(episodes)
        rows_of_pairs = [RowPair(self._trained_rows(best), self._trained_rows(worst)) for best, worst in pairs]
        collated = collate_pairs(rows_of_pairs, [numbers[pair.chosen.group] for pair in pairs])
        batches = {name: rows for name, (rows, _) in collated.items()}
        for name, rows in batches.items():
            rows.temperature = torch.full_like(rows.temperature, sampling.of(name).temperature or 1.0)
            reference = self.policy(name).reference_logprobs(rows.inputs()).cpu()
            rows.reference_sums = sequence_logp(reference, rows.action_mask)
        return batches

    def _trained_rows(self, episode: Episode) -> tuple[Trajectory, ...]:
        return tuple(row for row in episode.rows() if row.num_actions and self.policy(row.policy).trained)

    def lacks_signal(self, group: Sequence[Episode]) -> bool:
        return not joint_pairs(group)

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        """Return the log-probabilities [2, 2 P] of the policy's part of each joint action: its own, its reference's."""
        pairs = torch.cat([rows.layout.groups for rows in batch.policies.values()]).unique()
        part = 2 * torch.searchsorted(pairs, rows.layout.groups) + not_none(rows.layout.joint_actions) % 2
        joint_actions = on_device(part, rows.groups.device)
        sums = sequence_logp(self.policies[name](rows.inputs()), rows.action_mask)
        both = (sums, not_none(rows.reference_sums))
        return torch.stack([joint_logp(of_rows, joint_actions, 2 * len(pairs)) for of_rows in both])

    def combined(self, losses: Mapping[str, Tensor], batch: Batch) -> Tensor:
        gaps, rewards = self._compare(losses)
        for metric, mean in preference_metrics(gaps, rewards).items():
            self.metrics.add(f"train/{metric}", mean, len(gaps))
        with torch.no_grad():
            if len(self.policies) > 1:
                for name, part in losses.items():
                    margin = self.beta * self._compare({name: part})[0].mean()
                    self.metrics.add_means(name, {"reward_margin": margin}, len(gaps))
        # An update has one denominator, its pairs; each policy counts the fraction of their tokens that it sampled.
        return self.loss(gaps).sum() / round(sum(size.episodes for size in batch.totals.values()))

    def _compare(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return gaps [P] and implicit rewards [P, 2] (chosen, rejected) of joint actions from the policies' parts."""
        logp, references = torch.stack(list(parts.values())).sum(0).view(2, -1, 2)
        gaps = preference_gap(logp[:, 0], logp[:, 1], references[:, 0], references[:, 1])
        return gaps, self.beta * (logp - references).detach()

    def measure(self, prefix: str, batch: Any) -> None:
        if not isinstance(batch, Batch):  # of episodes
            super().measure(prefix, batch)
            return
        parts = {name: self.policy_loss(name, rows, batch) for name, rows in self.measured_rows(batch)}
        if not parts:
            return
        gaps, rewards = self._compare(parts)
        means = {"loss": self.loss(gaps).mean(), **preference_metrics(gaps, rewards)}
        self.metrics.add_evaluation_means(prefix, means, len(gaps))
