"""REINFORCE++, its baseline variant and ReMax by hand."""

import pytest
import torch

from mrlm_pl.advantages import (
    Moments,
    discounted_returns,
    masked_moments,
    reinforce_plus_plus_baseline,
    reinforce_plus_plus_returns,
    remax_advantages,
    turn_discounts,
    whiten,
)
from mrlm_pl.errors import NonFiniteError

NAN = float("nan")
MASK = torch.tensor([[True, False, True, True], [True, True, False, False]])
KL = torch.tensor([[0.1, NAN, -0.2, 0.4], [0.5, 0.0, NAN, NAN]])
REWARDS = torch.tensor([1.0, -1.0])


def test_return_of_the_penalised_reward() -> None:
    """beta .5, gamma .9; row 0: rewards -.05, .1, 1 - .2; row 1: -.25, -1."""
    returns = reinforce_plus_plus_returns(REWARDS, KL, MASK, beta=0.5, gamma=0.9)
    last = 1 - 0.2
    middle = 0.1 + 0.9 * last
    expected = [[-0.05 + 0.9 * middle, 0.0, middle, last], [-0.25 - 0.9, -1.0, 0.0, 0.0]]
    torch.testing.assert_close(returns, torch.tensor(expected))


def test_without_penalty_and_discount_it_is_the_reward_everywhere() -> None:
    returns = reinforce_plus_plus_returns(REWARDS, KL, MASK, beta=0.0)
    assert returns.tolist() == [[1, 0, 1, 1], [-1, -1, 0, 0]]


def test_discount_per_turn() -> None:
    rewards = torch.tensor([[1.0, NAN, 0.0, 4.0], [0.0, 2.0, NAN, NAN]])
    returns = discounted_returns(rewards, MASK, gamma=turn_discounts(MASK, 0.5))
    assert returns.tolist() == [[3, 0, 4, 4], [2, 2, 0, 0]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_whitening_spans_the_ranks(ranks: int) -> None:
    """Returns 1 (3 tokens) and -1 (2 tokens): mean .2, unbiased variance (3 * .64 + 2 * 1.44) / 4 = 1.2."""
    pieces = [slice(0, 1), slice(1, 2)] if ranks == 2 else [slice(0, 2)]
    returns = [reinforce_plus_plus_returns(REWARDS[p], KL[p], MASK[p], beta=0.0) for p in pieces]
    moments = Moments(0, 0.0, 0.0)
    for piece, part in zip(pieces, returns, strict=True):
        moments = moments + masked_moments(part, MASK[piece])
    whitened = torch.cat([whiten(part, MASK[p], moments) for p, part in zip(pieces, returns, strict=True)])
    high, low = 0.8 / 1.2**0.5, -1.2 / 1.2**0.5
    torch.testing.assert_close(whitened, torch.tensor([[high, 0, high, high], [low, low, 0, 0]]))


def test_baseline_variant_centres_inside_the_group() -> None:
    mask = torch.tensor([[True, True], [True, False], [False, True], [True, True]])
    tokens = reinforce_plus_plus_baseline(torch.tensor([1.0, 5.0, 2.0, 5.0]), torch.tensor([1, 2, 1, 2]), mask)
    assert tokens.tolist() == [[-0.5, -0.5], [0, 0], [0, 0.5], [0, 0]]


def test_remax_subtracts_the_greedy_reward() -> None:
    assert remax_advantages(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.5, 0.5, 0.5])).tolist() == [0.5, -0.5, 0.0]
    assert remax_advantages(torch.tensor([3, 1]), torch.tensor([0.5, 0.5])).tolist() == [2.5, 0.5]
    assert remax_advantages(torch.tensor([3, 1]), torch.tensor([1, 1])).dtype == torch.float32


def test_bad_inputs_are_named() -> None:
    bad = torch.tensor([1.0, NAN])
    with pytest.raises(NonFiniteError, match="row 1 is nan"):
        reinforce_plus_plus_returns(bad, KL, MASK, beta=0.1)
    with pytest.raises(NonFiniteError, match="row 1 is nan"):
        reinforce_plus_plus_baseline(bad, torch.tensor([0, 0]), MASK)
    for pair in [(bad, REWARDS), (REWARDS, bad)]:
        with pytest.raises(NonFiniteError, match="row 1 is nan"):
            remax_advantages(*pair)
    with pytest.raises(NonFiniteError, match="row 0, token 2 is nan"):
        reinforce_plus_plus_returns(REWARDS, KL.index_fill(1, torch.tensor([2]), NAN), MASK, beta=0.1)
    with pytest.raises(ValueError, match="one per reward"):
        remax_advantages(torch.zeros(2), torch.zeros(1))
