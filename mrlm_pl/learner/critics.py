"""Critics: models that estimate the returns of a policy gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from mrlm_pl.advantages import Moments
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch, not_none
from mrlm_pl.learner.credit.tokens import RewardedRows, rows_of_agents
from mrlm_pl.learner.optimization import value_group, weight_group
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.losses import BatchTotals, masked_mean, reduce_tokens, value_loss
from mrlm_pl.policy import Policy
from mrlm_pl.settings import ChecksArguments, NonNegativeFloat, PositiveFloat


class Critic(ChecksArguments, nn.Module):
    """Models with value heads, by the name of the policy or agent whose returns they estimate.

    Args:
        models: models of the critics.
        policies: policies of the algorithm, by name.
        value_learning_rate: learning rate of the value heads; None is that of each head's model.
        value_clip: clipping range of a value around its old estimate; None does not clip.
        coefficient: weight of the value loss if a policy and its critic share their trajectories.
        normalize_values: estimate, clip and compare values in units of the standard deviation of the returns.

    Raises:
        ConfigurationError: a value is out of range, or a model is frozen.
    """

    option: ClassVar[str]
    """The option that gives the models, for messages."""

    def __init__(
        self,
        models: Mapping[str, Policy],
        policies: Mapping[str, Policy],
        value_learning_rate: NonNegativeFloat | None = None,
        value_clip: PositiveFloat | None = 0.2,
        coefficient: NonNegativeFloat = 0.5,
        normalize_values: bool = False,
    ) -> None:
        super().__init__()
        for key, model in models.items():
            if not model.trained:
                where = self.option if key == self.option else f"{self.option}.{key}"
                raise ConfigurationError(f"{where} has `trained: false`, but a critic must learn; set it to true")
        self.policies = dict(policies)
        self.value_learning_rate, self.value_clip, self.coefficient = value_learning_rate, value_clip, coefficient
        self.normalized = normalize_values
        self.models = nn.ModuleDict(dict(models))

    def model(self, key: str) -> Policy:
        """Return the critic's model with that name."""
        return cast("Policy", self.models[key])

    def model_for(self, policy: str, agent: str) -> Policy:
        """Return the model that estimates the returns of an agent that a policy plays."""
        return self.model(agent)

    def label(self, key: str) -> str:
        """Return the name of a model in metrics and messages."""
        return f"{key}/critic"

    @property
    def learners(self) -> dict[str, Policy]:
        """The models with their own trajectories in a batch, by label."""
        return {self.label(key): self.model(key) for key in self.models}

    def check_agents(self, seats: Mapping[str, str]) -> None:
        """Validate the critics against the agents with a trained policy.

        Args:
            seats: policy of each of these agents.

        Raises:
            ConfigurationError: the critics do not fit the agents.
        """

    def read_weights(self) -> None:
        """Read the weights of the models, and add the value heads."""
        for key in self.models:
            self.model(key).load_critic(self.label(key), self.normalized)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups: two for each model, its own and its value head's."""
        return [
            group
            for key in self.models
            for group in self._model_groups(self.label(key), self.label(key), self.model(key))
        ]

    def _model_groups(self, name: str, owner: str, model: Policy) -> list[dict[str, Any]]:
        """Return a model's groups; both are skipped in updates without trajectories of ``owner``."""
        return [weight_group(name, owner, model), value_group(owner, model, self.value_learning_rate)]

    def idle_values(self, policy: str) -> Tensor | float:
        """Return 0 with a gradient of 0 for a model whose value loss is part of the policy's."""
        return 0.0

    def estimates(self, policy: str, rewarded: RewardedRows) -> tuple[Tensor, Tensor]:
        """Return values [B, T] of the action tokens, and [B] of the last states of truncated episodes, else 0.

        The last state of a truncated episode is its whole row. If the last observation exceeds the context window,
        it is the row's beginning that fits: the value of a prefix is the expectation over all that may follow it.

        Args:
            policy: name of the policy that sampled the trajectories.
            rewarded: trajectories with their rewards.

        Raises:
            ConfigurationError: an action token is beyond the window of the model that estimates the values.
        """
        inputs = rewarded.batch.inputs()
        mask, lengths = inputs.action_mask, inputs.lengths
        models = [self.model_for(policy, agent) for agent in rewarded.agents]
        windows = torch.tensor([min(model.context_window, mask.shape[1]) for model in models])
        check_window(mask, windows, f"the critic of policy {policy!r}")
        unfinished = rewarded.unfinished
        last = lengths.minimum(windows)
        # The value of a state is read where its next token would be chosen.
        chosen_next = torch.arange(mask.shape[1] + 1) == last[:, None]
        inputs = inputs._replace(
            token_ids=nn.functional.pad(inputs.token_ids, (0, 1)),
            action_mask=nn.functional.pad(mask, (0, 1)) | (chosen_next & unfinished[:, None]),
            lengths=lengths + unfinished,
        )
        values = torch.zeros_like(inputs.token_ids, dtype=torch.float32)
        for agent, rows in self.rows_of_heads(rewarded.agents).items():
            values[rows] = self.model_for(policy, agent).values(inputs.select(rows)).float().cpu()
        ends = values.gather(1, last[:, None])[:, 0]
        return values[:, :-1].masked_fill(~mask, 0.0), torch.where(unfinished, ends, 0.0)

    def rows_of_heads(self, agents: Sequence[str]) -> dict[str, Tensor]:
        """Return the indices of a policy's rows by agent, or by "" if its agents share a value head.

        Args:
            agents: agent of each row.
        """
        return rows_of_agents(agents) if self.learners else {"": torch.arange(len(agents))}

    def rows(self, rewarded: RewardedRows) -> dict[str, PolicyBatch]:
        """Return the trajectories of the models that have their own, by label.

        Args:
            rewarded: trajectories of one policy; their batch has the values and returns.
        """
        return {}

    def observe(self, trainer: Any, returns: Mapping[tuple[str, str], Moments]) -> None:
        """Normalize the values by the returns of a rollout; every rank must call this before it estimates values.

        Args:
            trainer: trainer of the run.
            returns: moments of the returns here by policy and agent, for each head once.
        """
        for (policy, agent), moments in sum_over_ranks(trainer, returns).items():
            not_none(self.model_for(policy, agent).value_head).observe(moments)

    def value_losses(self, model: Policy, values: Tensor | None, rows: PolicyBatch) -> Tensor:
        """Return the value loss [B, T] of each action token.

        Args:
            model: model that estimates the values.
            values: [B, T], current values; None computes them.
            rows: rows with the values and returns at the start of the update.
        """
        values = model.values(rows.inputs()) if values is None else values
        unit = not_none(model.value_head).moments[3].to(values.device)
        old_values, returns = (not_none(known) / unit for known in (rows.values, rows.returns))
        return value_loss(values / unit, old_values, returns, rows.action_mask, clip=self.value_clip)

    def loss(self, label: str, rows: PolicyBatch, totals: BatchTotals) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a micro-batch's part (0-dim) of the mean value loss of a model with its own trajectories, and metrics.

        Args:
            label: label of the model.
            rows: trajectories of the model.
            totals: size of the update.
        """
        losses = self.value_losses(self.learners[label], None, rows)
        metrics = {"value_loss": masked_mean(losses.detach(), rows.action_mask)}
        return reduce_tokens(losses, rows.action_mask, "token_mean", totals), metrics

    def exported(self) -> dict[str, Policy]:
        """Return the models by the name of their folder in an exported run."""
        return {self.label(key).replace("/", "-"): self.model(key) for key in self.models}


class PolicyCritics(Critic):
    """A value head on each trained policy's last hidden state, or a separate model for the policies that have one.

    Its value loss is part of the policy's token losses; the arguments are those of :class:`Critic`.

    Raises:
        ConfigurationError: a model is for no trained policy, or has another tokenizer.
    """

    option = "critics"

    def __init__(self, models: Mapping[str, Policy], policies: Mapping[str, Policy], *settings: Any) -> None:
        super().__init__(models, policies, *settings)
        self._trained = trained = [name for name, policy in policies.items() if policy.trained]
        for name in models:
            if name not in trained:
                raise ConfigurationError(f"critics names {name!r}, which is not a trained policy; these are {trained}")
            check_reads(f"critics.{name}", self.model(name), name, policies[name])

    def model_for(self, policy: str, agent: str) -> Policy:
        return self.model(policy) if policy in self.models else self.policies[policy]

    @property
    def learners(self) -> dict[str, Policy]:
        return {}

    def read_weights(self) -> None:
        super().read_weights()
        for name in self._trained:
            if name not in self.models:
                self.policies[name].add_value_head(self.normalized)

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups = []
        for name in self._trained:
            if name in self.models:
                groups += self._model_groups(self.label(name), name, self.model(name))
            else:
                groups.append(value_group(name, self.policies[name], self.value_learning_rate))
        return groups

    def idle_values(self, policy: str) -> Tensor | float:
        return self.model(policy).idle_values() if policy in self.models else 0.0


class ScoreHead(PolicyCritics):
    """The value head of a reward model, on its policy, whose output head is not trained."""

    def __init__(self, models: Mapping[str, Policy], policies: Mapping[str, Policy], *settings: Any) -> None:
        super().__init__(models, policies, *settings)
        for policy in policies.values():
            policy.needs_head = False

    def read_weights(self) -> None:
        for name, policy in self.policies.items():
            policy.load_critic(name)

    def scores(self, name: str, rows: PolicyBatch, scored: Callable[[Tensor], Tensor], dropout_key: int) -> Tensor:
        """Return the value [B, T] before each token in ``scored`` of the action mask [B, T], 0 elsewhere."""
        inputs = rows.inputs()
        inputs = inputs._replace(action_mask=scored(inputs.action_mask))
        return self.policies[name].values(inputs, dropout_key=dropout_key)


class AgentCritics(Critic):
    """A model for each agent, which reads its tokens and learns from its trajectories alone.

    Raises:
        ConfigurationError: a model is frozen.
    """

    option = "agent_critics"

    def check_agents(self, seats: Mapping[str, str]) -> None:
        for agent in [*sorted(self.models.keys() - seats.keys()), *sorted(seats.keys() - self.models.keys())]:
            what = "has no critic, but others have" if agent in seats else "is not an agent that learns"
            raise ConfigurationError(
                f"agent_critics: {agent!r} {what}; give one to each of {sorted(seats)}, or to none for value heads"
            )
        for agent in sorted(seats):
            check_reads(f"agent_critics.{agent}", self.model(agent), seats[agent], self.policies[seats[agent]])

    def rows(self, rewarded: RewardedRows) -> dict[str, PolicyBatch]:
        return {
            self.label(agent): rewarded.batch.select(indices)
            for agent, indices in rows_of_agents(rewarded.agents).items()
        }


class CentralizedCritic(Critic):
    """One model for all agents, which reads joint states as text in its own chat format.

    Raises:
        ConfigurationError: the model is frozen, or a policy is named ``critic``.
    """

    option = "critic"

    def __init__(self, model: Policy, policies: Mapping[str, Policy], *settings: Any) -> None:
        if self.option in policies:
            raise ConfigurationError(f"a policy is named {self.option!r}, like the centralized critic; rename it")
        super().__init__({self.option: model}, policies, *settings)

    def label(self, key: str) -> str:
        return key


def check_window(action_mask: Tensor, windows: Tensor, name: str) -> None:
    """Validate that a critic reads every state in which an action was chosen.

    Args:
        action_mask: [B, T] bool, True for action tokens.
        windows: [B], context window in tokens of each row's critic.
        name: name of the critic, for the error.

    Raises:
        ConfigurationError: an action token is beyond the window.
    """
    last = (action_mask * torch.arange(action_mask.shape[1])).amax(1)
    if bool((last > windows).any()):
        row = int((last - windows).argmax())
        raise ConfigurationError(
            f"{name} reads {int(windows[row])} tokens, but token {int(last[row])} of a trajectory is an action; give "
            "it a model with a context window as long as the policy's"
        )


def check_reads(name: str, critic: Policy, owner: str, policy: Policy) -> None:
    """Validate that a critic can read the tokens of a policy.

    Raises:
        ConfigurationError: their tokenizers differ.
    """
    if critic.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigurationError(
            f"{name} has another tokenizer than policy {owner!r}, whose tokens it reads; use a model with the same "
            "tokenizer, or MAPPO, whose critic reads text"
        )
