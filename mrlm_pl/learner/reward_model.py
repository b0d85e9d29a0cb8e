"""The base of the reward models: one policy with a value head; the value before a row's last token is the score."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.optimization import Optimization, value_group
from mrlm_pl.losses.masking import last_token_mask
from mrlm_pl.policy import Policy


class RewardModelAlgorithm(Algorithm):
    """Base of the algorithms that train a reward model, exported as a policy's folder with its value head.

    Args:
        policies: the weights; one policy.
        optimization: see :class:`Algorithm`.
        value_learning_rate: of the value head; None is the policy's own.

    Raises:
        ConfigurationError: there are several policies.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        optimization: Optimization = Optimization(),  # noqa: B008 (frozen)
        value_learning_rate: float | None = None,
    ) -> None:
        super().__init__(policies, None, optimization)
        self.refuse_several_policies()
        self.value_learning_rate = value_learning_rate

    def read_weights(self) -> None:
        for name in self.policies:
            self.policy(name).load_critic(name)

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups = super().parameter_groups()
        heads = [value_group(group["name"], self.policy(group["name"]), self.value_learning_rate) for group in groups]
        return groups + heads

    def idle_loss(self, name: str) -> Tensor:
        return self.policy(name).idle_values()

    def values(self, name: str, rows: PolicyBatch, mask: Tensor) -> Tensor:
        """Return the value [B, T] before each token where ``mask`` [B, T] is True, 0 elsewhere."""
        inputs = {**rows.inputs(), "action_mask": mask}
        return self.policy(name).values(**inputs, dropout_key=self.global_step)

    def scores(self, name: str, rows: PolicyBatch) -> Tensor:
        """Return the score [B] of each row: the value before its last token."""
        last = last_token_mask(rows.action_mask)
        return self.values(name, rows, last)[last]
