"""Credit of joint actions, on the numbers of the reference (section "Joint modes") and on arithmetic."""

from __future__ import annotations

import pytest
import torch

from mrlm_pl.advantages import (
    counterfactual_advantages,
    decision_returns,
    group_centered_advantages,
    group_max_advantages,
    group_scaled_advantages,
    leave_one_out_advantages,
    tree_returns,
)
from mrlm_pl.errors import NonFiniteError
from mrlm_pl.rollout.tree_player import Branching

ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def table(rewards: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The joint actions that combine each decision with each."""
    joints = Branching("cross").joint_actions(rewards.dim(), rewards.shape[0])
    return {joint: rewards[joint].item() for joint in joints}


def returns_of(agent: int, rewards: torch.Tensor, partners: int | None = None) -> list[float]:
    """Returns of an agent's decisions when each is combined with each."""
    found = decision_returns(table(rewards), agent, partners)
    return [found[number] for number in range(len(found))]


def test_two_agents_aligned() -> None:
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    joints = Branching("align").joint_actions(2, 2)
    returns = torch.tensor([rewards[joint].item() for joint in joints])
    assert returns.tolist() == [1.0, 4.0]
    group = torch.zeros(2, dtype=torch.int64)
    assert group_centered_advantages(returns, group).tolist() == [-1.5, 1.5]
    assert leave_one_out_advantages(returns, group).tolist() == [-3.0, 3.0]
    assert group_max_advantages(returns, group).tolist() == [-3.0, 0.0]


def test_two_agents_crossed() -> None:
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert [returns_of(agent, rewards) for agent in (0, 1)] == [[1.5, 3.5], [2.0, 3.0]]
    assert [returns_of(agent, rewards, 2) for agent in (0, 1)] == [[3.0, 7.0], [4.0, 6.0]]
    group = torch.zeros(2, dtype=torch.int64)
    centred = [group_centered_advantages(torch.tensor(returns_of(agent, rewards)), group) for agent in (0, 1)]
    assert [values.tolist() for values in centred] == [[-1.0, 1.0], [-0.5, 0.5]]
    others = [leave_one_out_advantages(torch.tensor(returns_of(agent, rewards)), group) for agent in (0, 1)]
    assert [values.tolist() for values in others] == [[-2.0, 2.0], [-1.0, 1.0]]


def test_three_agents_crossed() -> None:
    grid = torch.tensor([[[4.0 * i + 2 * j + k for k in (0, 1)] for j in (0, 1)] for i in (0, 1)])
    assert [returns_of(agent, grid) for agent in range(3)] == [[1.5, 5.5], [2.5, 4.5], [3.0, 4.0]]
    assert [returns_of(agent, grid, 4) for agent in range(3)] == [[6.0, 22.0], [10.0, 18.0], [12.0, 16.0]]


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [2, 6]), (0.9, [1.9, 5.6]), (0.5, [1.5, 4]), (0.0, [1, 2])])
def test_returns_of_a_tree(gamma: float, expected: list[float]) -> None:
    rewards = torch.tensor([1.0, 2.0, 0.0, 2.0, 3.0, 5.0])
    assert tree_returns(rewards, [-1, -1, 0, 0, 1, 1], gamma)[:2].tolist() == pytest.approx(expected)


def test_three_levels_are_discounted_twice() -> None:
    # 1 + 0.5 (mean of 2 + 0.5 * 8 and 4) = 1 + 0.5 * 5
    assert tree_returns(torch.tensor([1.0, 2.0, 8.0, 4.0]), [-1, 0, 1, 0], 0.5)[0] == 3.5


def test_a_tree_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="joint action 0 follows 1"):
        tree_returns(torch.tensor([1.0, 2.0]), [1, -1], 1.0)


def test_counterfactuals_of_the_reference_and_of_three_agents() -> None:
    square = table(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert list(counterfactual_advantages(square, 0).values()) == [-1.0, -1.0, 1.0, 1.0]
    assert list(counterfactual_advantages(square, 1).values()) == [-0.5, 0.5, -0.5, 0.5]
    grid = torch.tensor([[[4.0 * i + 2 * j + k for k in (0, 1)] for j in (0, 1)] for i in (0, 1)])
    found = [counterfactual_advantages(table(grid), agent) for agent in range(3)]
    assert [{abs(value) for value in values.values()} for values in found] == [{2.0}, {1.0}, {0.5}]
    assert found[1][1, 0, 1] == -1.0


def test_a_bonus_of_every_decision_makes_no_difference() -> None:
    square = table(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert counterfactual_advantages(square, 0, lambda number: -1.0) == counterfactual_advantages(square, 0)
    punished = counterfactual_advantages(square, 0, lambda number: -2.0 * number)
    assert list(punished.values()) == [0.0, 0.0, 0.0, 0.0], "3 - 2 is as good as 1"


def test_equal_returns_have_no_counterfactual_advantage_at_all() -> None:
    assert set(counterfactual_advantages({(n, 0): 0.7 for n in range(3)}, 0).values()) == {0.0}


def test_baselines_of_the_reference() -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0, 9.0])
    assert group_max_advantages(rewards, ONE_GROUP).tolist() == [-8.0, -7.0, -5.0, 0.0]
    scaled = group_scaled_advantages(group_centered_advantages(rewards, ONE_GROUP), rewards, ONE_GROUP)
    assert scaled.tolist() == pytest.approx([-0.8429, -0.5620, 0.0, 1.4049], abs=1e-4)


def test_groups_are_kept_apart_and_need_not_be_adjacent() -> None:
    rewards, labels = torch.tensor([1.0, 10.0, 3.0, 30.0, 5.0]), torch.tensor([7, 2, 7, 2, 9])
    assert group_max_advantages(rewards, labels).tolist() == [-2.0, -20.0, 0.0, 0.0, 0.0]
    centred = torch.tensor([-1.0, -10.0, 1.0, 10.0, 4.0])
    # Standard deviations sqrt(2) and sqrt(200); the group of one is left as it is.
    expected = [-(0.5**0.5), -(0.5**0.5), 0.5**0.5, 0.5**0.5, 4.0]
    assert group_scaled_advantages(centred, rewards, labels).tolist() == pytest.approx(expected, abs=1e-5)


def test_decisions_are_compared_beside_the_same_decisions_of_the_others() -> None:
    # Only the second agent matters, and (1, 1) failed: the first agent's decisions must not differ.
    assert decision_returns({(0, 0): 0.0, (0, 1): 10.0, (1, 0): 0.0}, 0) == {0: 0.0, 1: 0.0}
    assert decision_returns({(0, 0): 1.0, (0, 1): 1.0, (1, 0): 1.0}, 0, partners=2) == {0: 2.0, 1: 2.0}
    assert decision_returns({(0, 0): 1.0, (1, 1): 2.0}, 0) == {}, "nothing to compare them beside"
    assert decision_returns({(0,): 1.0, (2,): 3.0}, 0) == {0: 1.0, 2: 3.0}, "one agent: what failed is left out"


def test_groups_of_equal_rewards_are_not_scaled() -> None:
    rewards = torch.tensor([1.0, 1.0, 5.0])
    assert group_scaled_advantages(rewards, rewards, torch.tensor([0, 0, 1])).tolist() == [1.0, 1.0, 5.0]


def test_rewards_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(NonFiniteError, match="row 1"):
        tree_returns(torch.tensor([0.0, float("nan")]), [-1, -1], 1.0)
