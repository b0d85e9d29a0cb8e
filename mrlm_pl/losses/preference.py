"""Direct preference losses over P pairs of a chosen and a rejected answer.

Every loss is a function of the *gap*, how much more the policy has come to prefer the chosen answer than the reference
does. Compute it once with ``preference_gap`` (it is also the metric to log) and pass it to one of the losses.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses.masking import check_shape, masked_values
from mrlm_pl.settings import NonNegativeFloat, PositiveFloat, check_arguments


def sequence_logp(logp: Tensor, action_mask: Tensor) -> Tensor:
    """Return the log-probability [B] of each row's action tokens: the sum of ``logp`` [B, T] over the mask.

    >>> logp, mask = torch.tensor([[-1.0, -2.0, -4.0]]), torch.tensor([[False, True, True]])
    >>> sequence_logp(logp, mask).tolist()
    [-6.0]
    """
    return masked_values(logp, action_mask).sum(-1)


def joint_logp(row_logp: Tensor, joint_actions: Tensor, count: int) -> Tensor:
    """Return the log-probability [count] of each joint action: the sum of its rows', as agents decide alone.

    Args:
        row_logp: [B], log-probabilities from ``sequence_logp``; the rows of all agents, in any order.
        joint_actions: [B] int64, index of the joint action of each row.
        count: number of joint actions; a joint action without rows has 0.

    >>> joint_logp(torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([1, 0, 1]), 3).tolist()
    [-2.0, -5.0, 0.0]
    """
    return row_logp.new_zeros(count).index_add(0, joint_actions, row_logp)


def preference_gap(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor | None = None,
    ref_rejected_logp: Tensor | None = None,
) -> Tensor:
    """Return ``(chosen - ref_chosen) - (rejected - ref_rejected)`` [P] from sequence log-prob sums [P].

    Without the two reference tensors the gap is reference-free: ``chosen - rejected``.

    Raises:
        ValueError: only one of the reference tensors is given, or the shapes differ.

    >>> sums = [torch.tensor([x]) for x in (-1.0, -3.0, -2.0, -2.5)]
    >>> preference_gap(*sums).item(), preference_gap(*sums[:2]).item()
    (1.5, 2.0)
    """
    named = {"ref_chosen_logp": ref_chosen_logp, "ref_rejected_logp": ref_rejected_logp}
    references = {name: logp for name, logp in named.items() if logp is not None}
    if len(references) == 1:
        raise ValueError("give both ref_chosen_logp and ref_rejected_logp, or neither for a reference-free gap")
    check_shape(chosen_logp.shape, rejected_logp=rejected_logp, **references)
    gap = chosen_logp - rejected_logp
    return gap - (references["ref_chosen_logp"] - references["ref_rejected_logp"]).detach() if references else gap


def dpo_sigmoid_loss(
    gap: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0, margin: float | Tensor = 0.0
) -> Tensor:
    """Return the DPO loss [P]: ``-(1 - e) log sigmoid(z) - e log sigmoid(-z)`` with ``z = beta gap - margin``.

    Args:
        gap: [P], gaps from ``preference_gap``.
        beta: strength of the pull towards the reference.
        label_smoothing: ``e``, the assumed rate of swapped labels, in [0, 0.5).
        margin: gap by which the chosen answer must win, a number or [P] (for example a difference of scores).

    Raises:
        ConfigurationError: ``label_smoothing`` outside [0, 0.5).

    Sources: arXiv 2305.18290 (DPO), E. Mitchell's note on conservative DPO (smoothing), arXiv 2402.10571 (margin).

    >>> round(dpo_sigmoid_loss(torch.zeros(1)).item(), 6)  # ln 2: policy equal to the reference
    0.693147
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ConfigurationError(f"label_smoothing is {label_smoothing}; it must be at least 0 and below 0.5")
    logits = beta * gap - margin
    return -(1.0 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def dpo_hinge_loss(gap: Tensor, *, beta: float = 0.1, margin: float | Tensor = 1.0) -> Tensor:
    """Return the hinge loss [P]: ``max(0, margin - beta gap)``.

    Source: arXiv 2309.06657, which puts the hinge of SLiC-HF (2305.10425) on the gap to the reference.

    >>> dpo_hinge_loss(torch.tensor([5.0, 20.0])).tolist()  # 1 - 0.5, and past the margin
    [0.5, 0.0]
    """
    return torch.relu(margin - beta * gap)


def ipo_loss(gap: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return the identity preference loss [P]: ``(gap - 1 / (2 beta))^2``.

    Source: arXiv 2310.12036 (there ``tau`` is ``beta``).

    >>> ipo_loss(torch.tensor([5.0, 3.0])).tolist()  # target 1 / (2 * 0.1) = 5
    [0.0, 4.0]
    """
    return (gap - 1.0 / (2.0 * beta)).square()


def robust_dpo_loss(gap: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Return the robust DPO loss [P]: ``(-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e)``, ``z = beta gap``.

    Its mean over labels that are swapped at the rate ``e = label_smoothing`` is the DPO loss of the true labels.
    Source: arXiv 2403.00409.

    >>> round(robust_dpo_loss(torch.zeros(1), label_smoothing=0.1).item(), 6)  # ln 2
    0.693147
    """
    right, swapped = -F.logsigmoid(beta * gap), -F.logsigmoid(-beta * gap)
    return ((1.0 - label_smoothing) * right - label_smoothing * swapped) / (1.0 - 2.0 * label_smoothing)


def exo_pair_loss(gap: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.001) -> Tensor:
    """Return the reverse KL divergence [P] of the policy's preference from that of the labels.

    ``q log(q / (1 - e)) + (1 - q) log((1 - q) / e)`` with ``q = sigmoid(beta gap)`` and ``e = label_smoothing``.
    Source: arXiv 2402.00856.

    >>> round(exo_pair_loss(torch.zeros(1), label_smoothing=0.1).item(), 6)  # ln(1 / (2 sqrt(0.9 * 0.1)))
    0.510826
    """
    log_q, log_rest = F.logsigmoid(beta * gap), F.logsigmoid(-beta * gap)
    divergence = log_q.exp() * (log_q - math.log1p(-label_smoothing))
    return divergence + log_rest.exp() * (log_rest - math.log(label_smoothing))


def preference_metrics(gaps: Tensor, rewards: Tensor) -> dict[str, Tensor]:
    """Return means (0-dim) over pairs: both rewards, the margin between them, and the proportion of positive gaps.

    Args:
        gaps: [P], gaps from ``preference_gap``.
        rewards: [P, 2], implicit rewards ``beta (log pi - log pi_ref)`` of the chosen and the rejected answer.

    >>> found = preference_metrics(torch.tensor([2.0, -1.0]), torch.tensor([[3.0, 1.0], [0.0, 1.0]]))
    >>> {name: value.item() for name, value in found.items()}
    {'rewards_chosen': 1.5, 'rewards_rejected': 1.0, 'reward_margin': 0.5, 'preference_accuracy': 0.5}
    """
    chosen, rejected = rewards.detach().unbind(1)
    return {
        "rewards_chosen": chosen.mean(),
        "rewards_rejected": rejected.mean(),
        "reward_margin": (chosen - rejected).mean(),
        "preference_accuracy": (gaps > 0).float().mean(),
    }


def simpo_loss(gap: Tensor, *, beta: float = 2.0, margin: float = 1.0) -> Tensor:
    """Return the SimPO loss [P]: ``-log sigmoid(beta gap - margin)`` of a gap of mean log-probabilities per token.

    Source: arXiv 2405.14734.

    >>> round(simpo_loss(torch.tensor([0.5])).item(), 6)  # ln 2: just at the margin
    0.693147
    """
    return -F.logsigmoid(beta * gap - margin)


def orpo_loss(chosen_mean_logp: Tensor, rejected_mean_logp: Tensor, *, odds_weight: float = 0.1) -> Tensor:
    """Return the odds-ratio loss [P]: ``-mean log p(chosen) - odds_weight log sigmoid(log odds ratio)``.

    Args:
        chosen_mean_logp, rejected_mean_logp: [P], mean log-probabilities per token; their exponentials are the ``p`` of
            ``odds = p / (1 - p)``.
        odds_weight: weight of the odds ratio, the paper's ``lambda`` and TRL's ``beta``.

    Source: arXiv 2403.07691.

    >>> half = torch.tensor([0.5]).log()
    >>> round(orpo_loss(half, half).item(), 6)  # ln 2 + 0.1 ln 2
    0.762462
    """
    log_odds = chosen_mean_logp - rejected_mean_logp - (_log1mexp(chosen_mean_logp) - _log1mexp(rejected_mean_logp))
    return -chosen_mean_logp - odds_weight * F.logsigmoid(log_odds)


def kto_loss(
    log_ratio: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the Kahneman-Tversky loss [B] of single labelled answers.

    ``w_d (1 - sigmoid(beta (h - z)))`` for desirable answers, ``w_u (1 - sigmoid(beta (z - h)))`` for others.

    Args:
        log_ratio: ``h`` [B], ``log pi - log pi_ref`` of the answer.
        desirable: [B] bool, or the probability of being desirable: the loss is then the mean of both.
        baseline: ``z``, a scalar: the divergence from the reference, estimated as the mean ``h`` of answers to other
            prompts; a constant to the gradient, and at least 0.
        beta: strength of the pull towards the reference.
        desirable_weight, undesirable_weight: ``w_d`` and ``w_u``.

    Source: arXiv 2402.01306.

    >>> kto_loss(torch.zeros(2), torch.tensor([True, False]), torch.tensor(0.0)).tolist()
    [0.5, 0.5]
    """
    advantage, share = beta * (log_ratio - baseline.detach().clamp(min=0.0)), desirable.to(log_ratio.dtype)
    liked, disliked = torch.sigmoid(-advantage), torch.sigmoid(advantage)
    return desirable_weight * share * liked + undesirable_weight * (1.0 - share) * disliked


def _log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` of ``x <= 0``; a probability that rounds to 1 counts as the next smaller number."""
    return torch.log(-torch.expm1(x.clamp(max=-torch.finfo(x.dtype).eps)))


PreferenceLoss = Literal["sigmoid", "hinge", "ipo", "robust", "exo_pair"]

_LOSSES: dict[PreferenceLoss, Callable[..., Tensor]] = {
    "sigmoid": dpo_sigmoid_loss,
    "hinge": dpo_hinge_loss,
    "ipo": ipo_loss,
    "robust": robust_dpo_loss,
    "exo_pair": exo_pair_loss,
}


@check_arguments
def preference_loss(
    loss: PreferenceLoss,
    *,
    beta: PositiveFloat = 0.1,
    label_smoothing: float = 0.0,
    margin: NonNegativeFloat | None = None,
) -> Callable[[Tensor], Tensor]:
    """Return the loss of that name, from gap [P] to loss [P].

    Args:
        loss: ``sigmoid``, ``hinge``, ``ipo``, ``robust`` or ``exo_pair``.
        beta: strength of the pull towards the reference.
        label_smoothing: assumed rate of swapped labels, for ``sigmoid``, ``robust`` and ``exo_pair``.
        margin: gap by which the chosen answer must win; None is 0 for ``sigmoid`` and 1 for ``hinge``.

    Raises:
        ConfigurationError: an unknown name, or a value is out of range or does not belong to the loss.

    >>> preference_loss("ipo", beta=0.5)(torch.tensor([3.0])).tolist()
    [4.0]
    """
    dpo_sigmoid_loss(torch.zeros(0), label_smoothing=label_smoothing)  # validates it
    given = {"label_smoothing": label_smoothing or None, "margin": margin}
    options = {name: value for name, value in given.items() if value is not None}
    if foreign := [name for name in options if name not in _options(loss)]:
        owners = " or ".join(repr(name) for name in _LOSSES if foreign[0] in _options(name))
        raise ConfigurationError(f"{foreign[0]} {options[foreign[0]]} belongs to loss {owners}, not to {loss!r}")
    if loss == "exo_pair" and not label_smoothing:
        raise ConfigurationError("label_smoothing is 0; loss 'exo_pair' needs a rate above 0, such as 0.001")
    return functools.partial(_LOSSES[loss], beta=beta, **options)


def _options(loss: PreferenceLoss) -> Collection[str]:
    return inspect.signature(_LOSSES[loss]).parameters
