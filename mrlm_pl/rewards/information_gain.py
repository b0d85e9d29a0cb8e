"""Rewards of turns for the information that they give about the reference answer."""

from __future__ import annotations

import torch
from torch import Tensor


def information_gains(answer_logp: Tensor, plays: Tensor) -> Tensor:
    """Return each turn's gain [S] in the log-probability of the reference answer; 0 for an agent's last turn.

    The gain is ``log p(answer | history before the next turn) - log p(answer | history before this turn)``.

    Args:
        answer_logp: [S], log-probability of the answer before each turn; NaN if unknown, which makes its gains 0.
        plays: [S] int64, equal for the turns of one agent in one episode, which follow each other in order.

    Source: arXiv 2510.14967, where the gain is a difference of probabilities.

    >>> information_gains(torch.tensor([-5.0, -3.0, -4.0, -7.0, torch.nan]), torch.tensor([0, 0, 0, 1, 1])).tolist()
    [2.0, -1.0, 0.0, 0.0, 0.0]
    """
    gains = torch.zeros_like(answer_logp)
    same = plays[1:] == plays[:-1]
    gains[:-1] = torch.where(same, answer_logp.diff(), 0.0).nan_to_num(0.0)
    return gains
