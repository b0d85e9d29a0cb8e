"""Losses of labeled data: the tokens of demonstrations, right and wrong answers, ranked pairs."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from mrlm_pl.losses.masking import check_shape, masked_values


def cross_entropy_loss(logp: Tensor, token_mask: Tensor) -> Tensor:
    """Return the cross-entropy [B, T]: ``-logp`` of the observed tokens where ``token_mask`` is True, else exactly 0.

    The mask holds the trained tokens: the action tokens (end-of-sequence included) for behavioral cloning, the tokens
    of the next observation for a world model. A mixture is the weighted sum of the two *reduced* losses, each with the
    denominator of its own mask. A row without such tokens contributes 0, never NaN.

    >>> import torch
    >>> cross_entropy_loss(torch.tensor([[-0.5, float("-inf")]]), torch.tensor([[True, False]])).tolist()
    [[0.5, 0.0]]
    """
    return masked_values(-logp, token_mask)


def correctness_loss(logits: Tensor, correct: Tensor, score_mask: Tensor) -> Tensor:
    """Return the cross-entropy [B, T] of tokens' scores and their answer's correctness, 0 outside ``score_mask``.

    It is NaN where ``correct`` lies outside [0, 1]: an error would wait for the device at each call.

    Args:
        logits: [B, T], raw scores; ``sigmoid`` of one is the predicted probability of a correct answer.
        correct: [B], 1 (or True) for a right answer, 0 for a wrong one; a value between is a soft label.
        score_mask: [B, T] bool, True for scores that count: ``last_token_mask(action_mask)`` scores a finished answer,
            ``action_mask`` itself scores every token of the response.

    Raises:
        ValueError: ``correct`` is not [B].

    Source: arXiv 2502.18439.

    >>> import torch
    >>> logits, mask = torch.tensor([[9.0, 0.0]]), torch.tensor([[False, True]])
    >>> correctness_loss(logits, torch.tensor([1.0]), mask)  # ln 2 at score 0
    tensor([[0.0000, 0.6931]])
    """
    check_shape(logits.shape[:1], correct=correct)
    logits = masked_values(logits, score_mask)
    labels = correct.to(logits.dtype).where((correct >= 0) & (correct <= 1), math.nan)
    loss = F.binary_cross_entropy_with_logits(logits, labels[:, None].expand_as(logits), reduction="none")
    return masked_values(loss, score_mask)


def bradley_terry_loss(chosen_scores: Tensor, rejected_scores: Tensor, *, margin: float | Tensor = 0.0) -> Tensor:
    """Return the pairwise ranking loss [P]: ``-log sigmoid(chosen - rejected - margin)`` from scores [P].

    Source: arXiv 2203.02155 (pairs), 2307.09288 (margin).

    >>> import torch
    >>> round(bradley_terry_loss(torch.tensor([2.0]), torch.tensor([1.0])).item(), 6)  # ln(1 + e^-1)
    0.313262
    """
    check_shape(chosen_scores.shape, rejected_scores=rejected_scores)
    return -F.logsigmoid(chosen_scores - rejected_scores - margin)
