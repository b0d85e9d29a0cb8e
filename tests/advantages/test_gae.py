"""GAE against published numbers, a plain recursion over action tokens, and the boundaries of episodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrlm_pl.advantages import token_gae, transition_gae, turn_discounts
from mrlm_pl.errors import NonFiniteError

NEVER = torch.zeros(3, dtype=torch.bool)
FULL = torch.ones(1, 3, dtype=torch.bool)


def test_published_transitions() -> None:
    rewards, zeros = torch.tensor([1.0, 1.0, 5.0, 5.0]), torch.zeros(4)
    done, never = torch.tensor([False, True, False, False]), torch.zeros(4, dtype=torch.bool)
    advantages, returns = transition_gae(rewards, zeros, zeros, done, never, gamma=0.99, lam=0.95)
    assert advantages.tolist() == pytest.approx([1.9405, 1.0, 9.7025, 5.0], abs=1e-4)
    assert returns.tolist() == advantages.tolist()


def test_published_token_row() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    advantages, returns = token_gae(rewards, torch.full((1, 3), 0.5), FULL, gamma=1.0, lam=0.95)
    assert advantages[0].tolist() == pytest.approx([0.45125, 0.475, 0.5], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.95125, 0.975, 1.0], abs=1e-6)


@pytest.mark.parametrize(
    ("lam", "advantages", "returns"),
    [
        (0.0, [1.4, -0.82, 1.8], [1.9, 0.18, 2.0]),
        (0.95, [2.0147, 0.7190, 1.8], [2.5147, 1.7190, 2.0]),
        (1.0, [2.12, 0.8, 1.8], [2.62, 1.8, 2.0]),
    ],
)
def test_published_critic_targets(lam: float, advantages: list[float], returns: list[float]) -> None:
    """Temporal difference, GAE and Monte-Carlo of r = [1, 0, 2], V = [0.5, 1, 0.2], gamma 0.9, in both forms."""
    rewards, values = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.5, 1.0, 0.2])
    by_token = token_gae(rewards[None], values[None], FULL, gamma=0.9, lam=lam)
    next_values = torch.tensor([1.0, 0.2, float("nan")])
    terminated = torch.tensor([False, False, True])
    by_transition = transition_gae(rewards, values, next_values, terminated, NEVER, gamma=0.9, lam=lam)
    for computed, expected in [
        (by_token[0][0], advantages),
        (by_token[1][0], returns),
        (by_transition[0], advantages),
        (by_transition[1], returns),
    ]:
        assert computed.tolist() == pytest.approx(expected, abs=1e-4)


def test_environment_tokens_carry_value_and_advantage_through() -> None:
    """The row with environment tokens gives the numbers of the row without them."""
    mask = torch.tensor([[False, True, True, False, False, True, False]])
    rewards, values = torch.full((1, 7), float("nan")), torch.full((1, 7), float("nan"))
    rewards[mask], values[mask] = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.5, 1.0, 0.2])
    advantages, returns = token_gae(rewards, values, mask, gamma=0.9, lam=0.95)
    assert advantages[mask].tolist() == pytest.approx([2.0147, 0.7190, 1.8], abs=1e-4)
    assert returns[mask].tolist() == pytest.approx([2.5147, 1.7190, 2.0], abs=1e-4)
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


def test_a_truncated_row_bootstraps_and_a_terminated_one_does_not() -> None:
    """Both rows r = [0, 1], V = [0, 0]; the first is cut at V(s_T) = 10: d_1 = 1 + 0.5 * 10, A_0 = 0.5 * 0.8 * A_1."""
    rewards, mask = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([[True, True, False]] * 2)
    bootstrap = torch.tensor([10.0, 0.0])
    advantages, _ = token_gae(rewards, torch.zeros(2, 3), mask, gamma=0.5, lam=0.8, bootstrap_values=bootstrap)
    torch.testing.assert_close(advantages, torch.tensor([[2.4, 6.0, 0.0], [0.4, 1.0, 0.0]]))


def test_transitions_truncated_and_terminated_do_not_leak() -> None:
    """Episode 1 is truncated with V(s_2) = 4, episode 2 terminates, episode 3 is cut by the end of the fragment."""
    rewards = torch.tensor([1.0, 1.0, 2.0, 3.0, 5.0])
    values = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5])
    next_values = torch.tensor([0.5, 4.0, 0.5, 77.0, 2.0])
    terminated = torch.tensor([False, False, False, True, False])
    truncated = torch.tensor([False, True, False, False, False])
    advantages, _ = transition_gae(rewards, values, next_values, terminated, truncated, gamma=0.5, lam=0.5)
    a1 = 1.0 + 0.5 * 4.0 - 0.5
    a3 = 3.0 - 0.5
    expected = [1.0 + 0.25 - 0.5 + 0.25 * a1, a1, 2.0 + 0.25 - 0.5 + 0.25 * a3, a3, 5.0 + 0.5 * 2.0 - 0.5]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_discount_can_count_turns() -> None:
    """Turns of 2, 1 and 1 tokens, a reward at each end, gamma 0.5, lambda 1, V = 0: R = r + 0.5 R_next per turn."""
    mask = torch.tensor([[True, True, False, True, False, False, True]])
    rewards = torch.tensor([[0.0, 1.0, 9.0, 2.0, 9.0, 9.0, 4.0]])
    discounts = turn_discounts(mask, 0.5)
    advantages, _ = token_gae(rewards, torch.zeros(1, 7), mask, gamma=discounts, lam=1.0)
    assert advantages.tolist() == [[3.0, 3.0, 0.0, 4.0, 0.0, 0.0, 4.0]]


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float]:
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 8)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    rewards, values = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    bootstrap = torch.randn(shape[0], generator=generator, dtype=torch.float64)
    return (
        rewards,
        values,
        mask,
        bootstrap,
        draw(st.sampled_from([0.0, 0.9, 1.0])),
        draw(st.sampled_from([0.0, 0.95, 1.0])),
    )


@settings(max_examples=80, deadline=None)
@given(data=rows())
def test_each_row_is_the_sum_of_its_discounted_deltas(data) -> None:
    """The closed form ``A_t = sum_k (gamma lam)^k d_{t+k}`` over the row's action tokens, with garbage elsewhere."""
    rewards, values, mask, bootstrap, gamma, lam = data
    nan = float("nan")
    advantages, returns = token_gae(
        torch.nn.functional.pad(rewards.masked_fill(~mask, nan), (1, 2), value=nan),
        torch.nn.functional.pad(values.masked_fill(~mask, nan), (1, 2), value=nan),
        torch.nn.functional.pad(mask, (1, 2)),
        gamma=gamma,
        lam=lam,
        bootstrap_values=bootstrap,
    )
    for row in range(len(mask)):
        r, v = rewards[row][mask[row]].tolist(), values[row][mask[row]].tolist()
        v_next = [*v[1:], bootstrap[row].item()]
        deltas = [r[i] + gamma * v_next[i] - v[i] for i in range(len(r))]
        expected = [sum((gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(r))) for i in range(len(r))]
        assert advantages[row, 1:-2][mask[row]].tolist() == pytest.approx(expected, abs=1e-9)
        assert returns[row, 1:-2][mask[row]].tolist() == pytest.approx(
            [a + b for a, b in zip(expected, v, strict=True)]
        )


def test_a_non_finite_input_names_its_place() -> None:
    rewards, values = torch.zeros(2, 3), torch.zeros(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    rewards[1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="reward at row 1, token 2 is nan"):
        token_gae(rewards, values, mask)
    values[0, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="value at row 0, token 1 is inf"):
        token_gae(torch.zeros(2, 3), values, mask)
    with pytest.raises(NonFiniteError, match="bootstrap value at row 1 "):
        token_gae(torch.zeros(2, 3), torch.zeros(2, 3), mask, bootstrap_values=torch.tensor([0.0, float("nan")]))
    with pytest.raises(NonFiniteError, match="next value at row 0 "):
        transition_gae(torch.zeros(3), torch.zeros(3), torch.full((3,), float("inf")), NEVER, NEVER)


def test_targets_are_constants() -> None:
    values = torch.zeros(1, 3, requires_grad=True)
    advantages, returns = token_gae(torch.ones(1, 3), values, FULL)
    assert not advantages.requires_grad
    assert not returns.requires_grad


MASK = torch.tensor([[False, True, True, False, True], [True, False, False, False, False], [False] * 5])


def test_turns_end_where_the_environment_speaks_or_the_row_ends() -> None:
    assert turn_discounts(MASK, 0.25).tolist() == [[0, 1, 0.25, 0, 0.25], [0.25, 0, 0, 0, 0], [0] * 5]


def test_without_values_and_at_lambda_1_it_is_the_discounted_return() -> None:
    """Rewards -0.05, 0.1, 1 - 0.2 and -0.25, -1, at gamma 0.9, carried over text of the environment."""
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    rewards = torch.tensor([[-0.05, float("nan"), 0.1, 0.8], [-0.25, -1.0, float("nan"), float("nan")]])
    returns, _ = token_gae(rewards, torch.zeros(2, 4), mask, gamma=0.9, lam=1.0)
    middle = 0.1 + 0.9 * 0.8
    expected = [[-0.05 + 0.9 * middle, 0.0, middle, 0.8], [-0.25 - 0.9, -1.0, 0.0, 0.0]]
    torch.testing.assert_close(returns, torch.tensor(expected))
    by_turn, _ = token_gae(rewards.abs(), torch.zeros(2, 4), mask, gamma=turn_discounts(mask, 0.5), lam=1.0)
    torch.testing.assert_close(by_turn, torch.tensor([[0.05 + 0.5 * 0.9, 0.0, 0.9, 0.8], [1.25, 1.0, 0.0, 0.0]]))
