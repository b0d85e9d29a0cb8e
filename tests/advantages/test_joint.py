"""Credit of joint actions, on the numbers of the reference (section "Joint modes") and on arithmetic."""

from __future__ import annotations

import pytest
import torch

from mrlm_pl.advantages import (
    counterfactual_advantages,
    decision_returns,
    group_centred_advantages,
    group_max_advantages,
    group_scaled_advantages,
    leave_one_out_advantages,
    tree_returns,
)
from mrlm_pl.errors import NonFiniteError
from mrlm_pl.turn_tree import TurnTree

ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def returns_of(agent: int, rewards: torch.Tensor, reduction: str = "mean") -> list[float]:
    """Returns of an agent's decisions when each is combined with each."""
    joints = TurnTree("cross").joint_actions(rewards.dim(), rewards.shape[0])
    values = torch.tensor([rewards[joint].item() for joint in joints])
    return decision_returns(values, torch.tensor(joints)[:, agent], reduction).tolist()


def test_two_agents_aligned() -> None:
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    joints = TurnTree("align").joint_actions(2, 2)
    returns = torch.tensor([rewards[joint].item() for joint in joints])
    assert returns.tolist() == [1.0, 4.0]
    group = torch.zeros(2, dtype=torch.int64)
    assert group_centred_advantages(returns, group).tolist() == [-1.5, 1.5]
    assert leave_one_out_advantages(returns, group).tolist() == [-3.0, 3.0]
    assert group_max_advantages(returns, group).tolist() == [-3.0, 0.0]


def test_two_agents_crossed() -> None:
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert [returns_of(agent, rewards) for agent in (0, 1)] == [[1.5, 3.5], [2.0, 3.0]]
    assert [returns_of(agent, rewards, "sum") for agent in (0, 1)] == [[3.0, 7.0], [4.0, 6.0]]
    group = torch.zeros(2, dtype=torch.int64)
    centred = [group_centred_advantages(torch.tensor(returns_of(agent, rewards)), group) for agent in (0, 1)]
    assert [values.tolist() for values in centred] == [[-1.0, 1.0], [-0.5, 0.5]]
    others = [leave_one_out_advantages(torch.tensor(returns_of(agent, rewards)), group) for agent in (0, 1)]
    assert [values.tolist() for values in others] == [[-2.0, 2.0], [-1.0, 1.0]]


def test_three_agents_crossed() -> None:
    grid = torch.tensor([[[4.0 * i + 2 * j + k for k in (0, 1)] for j in (0, 1)] for i in (0, 1)])
    assert [returns_of(agent, grid) for agent in range(3)] == [[1.5, 5.5], [2.5, 4.5], [3.0, 4.0]]
    assert [returns_of(agent, grid, "sum") for agent in range(3)] == [[6.0, 22.0], [10.0, 18.0], [12.0, 16.0]]


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [2, 6]), (0.9, [1.9, 5.6]), (0.5, [1.5, 4]), (0.0, [1, 2])])
def test_returns_of_a_tree(gamma: float, expected: list[float]) -> None:
    rewards = torch.tensor([1.0, 2.0, 0.0, 2.0, 3.0, 5.0])
    assert tree_returns(rewards, [-1, -1, 0, 0, 1, 1], gamma)[:2].tolist() == pytest.approx(expected)


def test_three_levels_are_discounted_twice() -> None:
    # 1 + .5 (mean of 2 + .5 * 8 and 4) = 1 + .5 * 5
    assert tree_returns(torch.tensor([1.0, 2.0, 8.0, 4.0]), [-1, 0, 1, 0], 0.5)[0] == 3.5


def test_a_tree_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="joint action 0 follows 1"):
        tree_returns(torch.tensor([1.0, 2.0]), [1, -1], 1.0)


def test_counterfactuals_of_the_reference_and_of_three_agents() -> None:
    first, second = counterfactual_advantages(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert first.tolist() == [[-1.0, -1.0], [1.0, 1.0]]
    assert second.tolist() == [[-0.5, 0.5], [-0.5, 0.5]]
    grid = torch.tensor([[[4.0 * i + 2 * j + k for k in (0, 1)] for j in (0, 1)] for i in (0, 1)])
    tables = counterfactual_advantages(grid)
    assert [table.abs().unique().tolist() for table in tables] == [[2.0], [1.0], [0.5]]
    assert tables[1][1, 0, 1] == -1.0


def test_baselines_of_the_reference() -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0, 9.0])
    assert group_max_advantages(rewards, ONE_GROUP).tolist() == [-8.0, -7.0, -5.0, 0.0]
    scaled = group_scaled_advantages(group_centred_advantages(rewards, ONE_GROUP), rewards, ONE_GROUP)
    assert scaled.tolist() == pytest.approx([-0.8429, -0.5620, 0.0, 1.4049], abs=1e-4)


def test_groups_are_kept_apart_and_need_not_be_adjacent() -> None:
    rewards, labels = torch.tensor([1.0, 10.0, 3.0, 30.0, 5.0]), torch.tensor([7, 2, 7, 2, 9])
    assert group_max_advantages(rewards, labels).tolist() == [-2.0, -20.0, 0.0, 0.0, 0.0]
    centred = torch.tensor([-1.0, -10.0, 1.0, 10.0, 4.0])
    # Standard deviations sqrt(2) and sqrt(200); the group of one is left as it is.
    expected = [-(0.5**0.5), -(0.5**0.5), 0.5**0.5, 0.5**0.5, 4.0]
    assert group_scaled_advantages(centred, rewards, labels).tolist() == pytest.approx(expected, abs=1e-5)


def test_decisions_without_a_joint_action_are_unknown() -> None:
    values = decision_returns(torch.tensor([1.0, 3.0]), torch.tensor([2, 2])).tolist()
    assert values[2] == 2.0
    assert all(value != value for value in values[:2])


def test_rewards_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(NonFiniteError, match="row 1"):
        tree_returns(torch.tensor([0.0, float("nan")]), [-1, -1], 1.0)
