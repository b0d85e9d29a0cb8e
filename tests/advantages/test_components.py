"""Advantages of reward components."""

import pytest
import torch

from mrlm_pl.advantages import component_normalized_advantages, group_normalized_advantages


def test_components_count_alike_whatever_their_scale() -> None:
    """Mean and standard deviation by hand: (2, 0, 1) has 1 and 1, (0, 30, 0) has 10 and sqrt 300."""
    components = torch.tensor([[2.0, 0.0], [0.0, 30.0], [1.0, 0.0], [4.0, 4.0], [0.0, 4.0]])
    found = component_normalized_advantages(components, torch.tensor([0, 0, 0, 1, 1]), [1.0, 0.5], eps=1e-12)
    wide = 0.5 * 10 / 300**0.5
    assert found.tolist() == pytest.approx([1 - wide, -1 + 2 * wide, -wide, 0.5**0.5, -(0.5**0.5)])


def test_one_component_is_grpo() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([0, 0, 1, 1])
    found = component_normalized_advantages(rewards[:, None], group)
    torch.testing.assert_close(found, group_normalized_advantages(rewards.double(), group))


def test_weights_are_one_for_each() -> None:
    with pytest.raises(ValueError, match="3 weights for 2 reward components"):
        component_normalized_advantages(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), [1.0, 1.0, 1.0])
