"""Spreading rows and turns over tokens."""

import pytest
import torch

from mrlm_pl.advantages import broadcast_to_tokens, rewards_at_last_token, turn_discounts

MASK = torch.tensor([[False, True, True, False, True], [True, False, False, False, False], [False] * 5])


def test_broadcast() -> None:
    tokens = broadcast_to_tokens(torch.tensor([2.0, -1.0, float("nan")]), MASK)
    assert tokens.tolist() == [[0, 2, 2, 0, 2], [-1, 0, 0, 0, 0], [0] * 5]


def test_reward_lands_once_per_row() -> None:
    tokens = rewards_at_last_token(torch.tensor([2.0, -1.0, 5.0]), MASK)
    assert tokens.tolist() == [[0, 0, 0, 0, 2], [-1, 0, 0, 0, 0], [0] * 5]


def test_turns_end_where_the_environment_speaks_or_the_row_ends() -> None:
    assert turn_discounts(MASK, 0.25).tolist() == [[0, 1, 0.25, 0, 0.25], [0.25, 0, 0, 0, 0], [0] * 5]


def test_shape_is_checked() -> None:
    with pytest.raises(ValueError, match="one number per row"):
        broadcast_to_tokens(torch.zeros(2), MASK)
