"""Critics that are models of their own: their parameter groups and their loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.losses import BatchTotals, masked_mean, reduce_tokens, value_loss
from mrlm_pl.policy import Policy


def check_critic(name: str, critic: Policy) -> None:
    """Validate that a critic is trained.

    Raises:
        ConfigurationError: it is frozen.
    """
    if not critic.trained:
        raise ConfigurationError(f"{name} has `trained: false`, but a critic must learn; set it to true")


def check_window(action_mask: Tensor, windows: Tensor, name: str) -> None:
    """Validate that a critic reads every state in which an action was chosen.

    Args:
        action_mask: [B, T] bool.
        windows: [B], the context window of each row's critic in tokens.
        name: of the critic, for the error.

    Raises:
        ConfigurationError: an action token lies beyond the window.
    """
    last = (action_mask * torch.arange(action_mask.shape[1], device=windows.device)).amax(1)
    if bool((last > windows).any()):
        row = int((last - windows).argmax())
        raise ConfigurationError(
            f"{name} reads {int(windows[row])} tokens, but token {int(last[row])} of a trajectory is an action; give "
            "it a model with a context window as long as the policy's"
        )


def check_reads(name: str, critic: Policy, owner: str, policy: Policy) -> None:
    """Nothing when a critic can read the token rows of a policy.

    Raises:
        ConfigurationError: their tokenizers differ.
    """
    if critic.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigurationError(
            f"{name} has another tokenizer than policy {owner!r}, whose tokens it reads; use a model with the same "
            "tokenizer, or MAPPO, whose critic reads text"
        )


def critic_groups(name: str, owner: str, critic: Policy, value_learning_rate: float | None) -> list[dict[str, Any]]:
    """The optimizer's groups of a critic: its model and its value head.

    Args:
        name: of the model's group; the head's is ``owner/value``.
        owner: whose rows the critic learns from: it rests in an update without any.
        critic: with its weights read.
        value_learning_rate: of the head; None is the critic's own.
    """
    weights = [weight for weight in critic.model.parameters() if weight.requires_grad]
    model = {"params": weights, "lr": critic.learning_rate, "weight_decay": critic.weight_decay}
    return [{**model, "name": name, "policy": owner}, value_group(owner, critic, value_learning_rate)]


def value_group(owner: str, critic: Policy, value_learning_rate: float | None) -> dict[str, Any]:
    """The optimizer's group of a value head; the arguments are those of :func:`critic_groups`."""
    assert critic.value_head is not None
    rate = critic.learning_rate if value_learning_rate is None else value_learning_rate
    head = list(critic.value_head.parameters())
    return {"params": head, "lr": rate, "weight_decay": 0.0, "name": f"{owner}/value", "policy": owner}


def critic_loss(
    critic: Policy, rows: PolicyBatch, totals: BatchTotals, value_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """This piece's share (0-dim) of the mean value loss of a critic's rows, and ``value_loss`` for the log."""
    assert rows.values is not None
    assert rows.returns is not None
    losses = value_loss(critic.values(**rows.inputs()), rows.values, rows.returns, rows.action_mask, clip=value_clip)
    metrics = {"value_loss": masked_mean(losses.detach(), rows.action_mask)}
    return reduce_tokens(losses, rows.action_mask, "token_mean", totals), metrics
