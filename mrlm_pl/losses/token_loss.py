"""The token losses by name, with their settings and the reduction that belongs to them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError, did_you_mean, name_and_place
from mrlm_pl.losses.masking import masked_values
from mrlm_pl.losses.policy_gradient import Clip, cispo_loss, gmpo_loss, gspo_loss, policy_gradient_loss, ppo_clip_loss
from mrlm_pl.losses.reduction import Reduction
from mrlm_pl.losses.trust_region import dppo_loss, sapo_loss, vespo_loss
from mrlm_pl.settings import POSITIVE, check_arguments

LossName = Literal["reinforce", "ppo", "gspo", "luspo", "gmpo", "cispo", "sapo", "vespo", "dppo"]


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """A loss for each token, with its settings.

    Args:
        function: function that returns losses [B, T] from ``logp``, ``old_logp``, ``advantages`` and ``action_mask``,
            each [B, T], and from ``settings``.
        reduction: reduction of the loss's paper.
        uses_ratio: whether the loss uses the importance ratio ``pi / pi_old``.
        settings: extra arguments of the function.
        own: whether the function is a user's, whose loss may have a gradient where the advantage is 0.
    """

    function: Callable[..., Tensor]
    reduction: Reduction = "token_mean"
    uses_ratio: bool = True
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own: bool = False

    def __call__(self, logp: Tensor, old_logp: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
        """Return the losses [B, T]."""
        return self.function(logp, old_logp, advantages, action_mask, **self.settings)

    def with_weights(
        self, logp: Tensor, old_logp: Tensor, advantages: Tensor, action_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the losses [B, T], and the weight [B, T] of each token in the gradient: that of ``-w A logp``.

        The weight has no gradient. It is 1 for REINFORCE, the importance ratio for PPO, 0 for a token whose gradient
        the loss removes. It counts as 1 where the advantage is 0, and is 0 outside the mask.

        >>> logp, old = torch.tensor([[-1.5, -1.5]]), torch.tensor([[-1.0, -1.0]])  # rho 0.61
        >>> LOSSES["ppo"].with_weights(logp, old, torch.tensor([[-1.0, 1.0]]), torch.tensor([[True, True]]))[1]
        tensor([[0.0000, 0.6065]])
        """
        inputs = (old_logp, advantages, action_mask)
        losses = self.function(logp, *inputs, **self.settings)
        with torch.enable_grad():
            leaf = logp.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.function(leaf, *inputs, **self.settings).sum(), leaf)
        weighted = advantages != 0
        weights = torch.where(weighted, -gradient / torch.where(weighted, advantages, 1.0), 1.0)
        return losses, masked_values(weights, action_mask)


def _reinforce(logp: Tensor, _: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    return policy_gradient_loss(logp, advantages, action_mask)


LOSSES: dict[LossName, TokenLoss] = {
    "reinforce": TokenLoss(_reinforce, uses_ratio=False),
    "ppo": TokenLoss(ppo_clip_loss),
    "gspo": TokenLoss(gspo_loss, "sequence_mean"),
    "luspo": TokenLoss(gspo_loss, "sequence_sum"),
    "gmpo": TokenLoss(gmpo_loss, "sequence_mean"),
    "cispo": TokenLoss(cispo_loss),
    "sapo": TokenLoss(sapo_loss, "sequence_mean"),
    "vespo": TokenLoss(vespo_loss),
    "dppo": TokenLoss(dppo_loss),
}


@check_arguments
def token_loss(
    loss: LossName | Callable[..., Tensor],
    clip: Clip = Clip(),  # noqa: B008 (frozen)
    settings: Mapping[str, Any] | None = None,
) -> TokenLoss:
    """Return a loss with its settings, after a trial on one token.

    Args:
        loss: a name of :data:`LOSSES`, or a function as in :class:`TokenLoss`; its reduction is ``token_mean``.
        clip: clipping range, for a function with a ``clip`` argument.
        settings: extra arguments of the function.

    Raises:
        ConfigurationError: the name or a setting does not exist, a value is out of range, the loss has no clipping
            range, or the function does not return a finite loss for each token.

    >>> token_loss("gmpo").reduction, token_loss("sapo", settings={"positive_temperature": 2.0}).settings
    ('sequence_mean', {'positive_temperature': 2.0})
    """
    plain = LOSSES[loss] if isinstance(loss, str) else TokenLoss(loss, own=True)
    name, place = (loss, "") if isinstance(loss, str) else name_and_place(loss)
    accepted = list(inspect.signature(plain.function).parameters)[4:]
    given = dict(settings or {})
    for key in given:
        if key not in accepted or key == "clip":
            others = [other for other in accepted if other != "clip"]
            hint = did_you_mean(key, others, f"it accepts: {', '.join(others) or 'none'}")
            raise ConfigurationError(f"loss_settings.{key}: loss {name} has no such setting; {hint}")
    if isinstance(loss, str):  # a negative bound or temperature would reverse the gradient
        numbers = {key: value for key, value in given.items() if not isinstance(value, Sequence)}
        POSITIVE.check("loss_settings.", **numbers)
    if "clip" in accepted:
        given["clip"] = clip
    elif clip != Clip():
        given_clip = {key: value for key, value in dataclasses.asdict(clip).items() if value is not None}
        raise ConfigurationError(
            f"clip is {given_clip}, but loss {name} has no clipping range; leave it out, or choose a loss that has one"
        )
    configured = dataclasses.replace(plain, settings=given)
    try:
        with torch.inference_mode(False), torch.enable_grad():  # a script may construct its algorithm without gradients
            one, mask = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1, dtype=torch.bool)
            tried: Any = configured(-one, -torch.ones(1, 1), torch.ones(1, 1), mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"loss {name} with the settings {dict(settings or {})}: {error}{place}") from error
    if not isinstance(tried, Tensor) or tried.shape != (1, 1) or not tried.isfinite().all() or not tried.requires_grad:
        raise ConfigurationError(
            f"loss {name} with the settings {dict(settings or {})} returned {tried!r:.80} for one token; it must "
            f"return a finite loss for each token, [B, T], with a gradient in logp{place}"
        )
    return configured
