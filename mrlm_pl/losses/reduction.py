"""From token losses to one number, independent of how the global batch was cut into micro-batches and ranks.

A mean needs the size of the global batch, while one call sees a micro-batch of one rank. So the size is an argument:
add up the ``batch_totals`` of all micro-batches first. Each one's ``reduce_tokens`` is then a summand, and the *sum*
over micro-batches and ranks is the reduction of the global batch. A strategy that averages gradients over
``world_size`` ranks (DDP, FSDP) needs each summand multiplied by ``world_size``.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses.masking import masked_values

Reduction = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length", "episode_mean"]
"""The unit of equal weight.

- ``token_mean``: every action token.
- ``sequence_mean``: every row, as the mean of its tokens.
- ``sequence_sum``: every row, as the sum of its tokens.
- ``constant_length``: as ``sequence_sum``, divided by a constant ``max_length`` (Dr.GRPO, arXiv 2503.20783).
- ``episode_mean``: every episode, as the mean over the tokens of all its rows.
"""


@dataclasses.dataclass(frozen=True)
class BatchTotals:
    """Size of a batch, or of a micro-batch; ``a + b`` is the size of both together.

    Attributes:
        tokens: number of action tokens.
        sequences: number of rows with at least one action token.
        episodes: number of episodes; a micro-batch with a part of an episode's tokens counts that fraction of it.
    """

    tokens: float
    sequences: float
    episodes: float

    def __add__(self, other: BatchTotals) -> BatchTotals:
        return BatchTotals(self.tokens + other.tokens, self.sequences + other.sequences, self.episodes + other.episodes)


def batch_totals(action_mask: Tensor, episode_tokens: Tensor | None = None) -> BatchTotals:
    """Return the size of a micro-batch.

    Args:
        action_mask: [B, T] bool; a row without action tokens counts nowhere.
        episode_tokens: [B], number of action tokens of the row's episode; None makes every row its own episode.

    >>> mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    >>> batch_totals(mask)
    BatchTotals(tokens=3.0, sequences=2.0, episodes=2.0)
    >>> batch_totals(mask, torch.tensor([3, 3, 3]))
    BatchTotals(tokens=3.0, sequences=2.0, episodes=1.0)
    """
    lengths = action_mask.sum(-1).double()
    owner = lengths if episode_tokens is None else episode_tokens.double()
    episodes = lengths / owner.clamp(min=1)
    return BatchTotals(lengths.sum().item(), (lengths > 0).double().sum().item(), episodes.sum().item())


def token_weights(
    reduction: Reduction,
    action_mask: Tensor,
    totals: BatchTotals,
    *,
    max_length: int | None = None,
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """Return the weight [B, T] of each token's loss, 0 outside the mask.

    Over the global batch the weights of every ``*_mean`` sum to 1; the weighted sum of the token losses is the
    reduction. A row's weights depend on that row and ``totals`` alone, hence not on padding or on other rows.

    Args:
        reduction: see ``Reduction``.
        action_mask: [B, T] bool, action mask of the micro-batch.
        totals: size of the *global* batch for one policy (policies never share a denominator).
        max_length: longest response that a row may have, for ``constant_length``; not the padded width.
        episode_tokens: [B], number of action tokens of the row's episode, for ``episode_mean``.

    Raises:
        ConfigurationError: unknown ``reduction``, or its argument is missing.

    >>> mask = torch.tensor([[True, True, False], [True, False, False]])
    >>> token_weights("sequence_mean", mask, batch_totals(mask)).tolist()
    [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]
    """
    if reduction not in get_args(Reduction):
        raise ConfigurationError(f"reduction is {reduction!r}; choose from {', '.join(get_args(Reduction))}")
    if reduction == "constant_length" and (max_length is None or max_length < 1):
        raise ConfigurationError(
            f"constant_length needs max_length, the longest response in tokens, and not {max_length}"
        )
    if reduction == "episode_mean" and episode_tokens is None:
        raise ConfigurationError("episode_mean needs episode_tokens, the action tokens of each row's episode")
    lengths = action_mask.sum(-1)
    ones = torch.ones_like(lengths)
    units, denominator = {
        "token_mean": (ones, totals.tokens),
        "sequence_mean": (lengths, totals.sequences),
        "sequence_sum": (ones, totals.sequences),
        "constant_length": (ones, totals.sequences * (max_length or 1)),
        "episode_mean": (ones if episode_tokens is None else episode_tokens, totals.episodes),
    }[reduction]
    # Infinite for a row, or a whole batch, without action tokens: masked out with it.
    row_weights = 1.0 / (units.float() * denominator)
    return masked_values(row_weights[:, None].expand(action_mask.shape), action_mask)


def reduce_tokens(
    token_loss: Tensor,
    action_mask: Tensor,
    reduction: Reduction,
    totals: BatchTotals | None = None,
    *,
    max_length: int | None = None,
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """Return a micro-batch's summand (0-dim) of the global batch's loss; 0 without action tokens.

    Args:
        token_loss: [B, T], losses from a loss function; not read outside the mask.
        totals: size of the global batch; None takes the micro-batch as the whole.
        action_mask, reduction, max_length, episode_tokens: see ``token_weights``.

    >>> loss = torch.tensor([[1.0] * 2 + [0.0] * 6, [0.0] * 8])  # 2 tokens of loss 1, 8 tokens of loss 0
    >>> mask = torch.tensor([[True] * 2 + [False] * 6, [True] * 8])
    >>> round(reduce_tokens(loss, mask, "token_mean").item(), 6), reduce_tokens(loss, mask, "sequence_mean").item()
    (0.2, 0.5)
    """
    if totals is None:
        totals = batch_totals(action_mask, episode_tokens)
    weights = token_weights(reduction, action_mask, totals, max_length=max_length, episode_tokens=episode_tokens)
    return (masked_values(token_loss, action_mask) * weights).sum()
