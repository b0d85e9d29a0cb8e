"""Whitening, alone and over several pieces."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlm_pl.advantages import Moments, masked_moments, whiten

NAN = float("nan")


def test_whiten_by_hand() -> None:
    """1, 2, 6 have mean 3 and unbiased variance (4 + 1 + 9) / 2 = 7."""
    whitened = whiten(torch.tensor([[1.0, NAN], [2.0, 6.0]]), torch.tensor([[True, False], [True, True]]))
    expected = torch.tensor([[-2.0, 0.0], [-1.0, 3.0]]) / 7**0.5
    torch.testing.assert_close(whitened, expected)


def test_eps_bounds_a_tiny_spread() -> None:
    whitened = whiten(torch.tensor([[0.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool), eps=1.0)
    torch.testing.assert_close(whitened, torch.tensor([[-1.0, 1.0]]) / (2 + 1) ** 0.5)


def test_values_that_differ_by_rounding_alone_stay_small() -> None:
    """Such as rewards of 0 less a KL divergence from a reference that is the policy itself."""
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 3e-8
    assert whiten(values, torch.ones_like(values, dtype=torch.bool)).abs().max() < 1e-2


@pytest.mark.parametrize("value", [0.1, -0.3, 1e8])
def test_equal_values_become_exactly_zero_also_over_pieces(value: float) -> None:
    pieces = [torch.full((1, n), value, dtype=torch.float64) for n in (3, 7, 1)]
    masks = [torch.ones_like(piece, dtype=torch.bool) for piece in pieces]
    moments = nothing = Moments(0, 0.0, 0.0)
    for piece, mask in zip(pieces, masks, strict=True):
        assert (whiten(piece, mask) == 0).all()
        assert nothing + masked_moments(piece, mask) == masked_moments(piece, mask) + nothing
        assert masked_moments(piece, mask) + nothing == Moments(mask.numel(), value, 0.0)
        moments = moments + masked_moments(piece, mask)
    assert moments == Moments(11, value, 0.0)
    assert all((whiten(piece, mask, moments) == 0).all() for piece, mask in zip(pieces, masks, strict=True))


def test_a_large_offset_costs_no_digits() -> None:
    values = torch.tensor([[1e8, 1e8 + 1, 1e8 + 2]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    merged = masked_moments(values[:, :1], mask[:, :1]) + masked_moments(values[:, 1:], mask[:, 1:])
    assert merged.std == pytest.approx(1.0)
    torch.testing.assert_close(whiten(values, mask, merged), torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.lists(st.integers(-50, 50), max_size=6), min_size=1, max_size=5),
    padding=st.integers(0, 3),
)
def test_pieces_give_the_moments_of_the_whole(numbers: list[list[int]], padding: int) -> None:
    """The standard library's mean and standard deviation of all numbers."""
    pieces = []
    for piece in numbers:
        values = torch.tensor([[*map(float, piece), *[NAN] * (padding + 1)]])
        pieces.append(masked_moments(values, torch.arange(values.shape[1])[None] < len(piece)))
    merged = sum(pieces, start=Moments(0, 0.0, 0.0))
    everything = [x for piece in numbers for x in piece]
    assert merged.count == len(everything)
    if everything:
        assert merged.mean == pytest.approx(statistics.fmean(everything), abs=1e-9)
        assert merged.std == pytest.approx(statistics.stdev(everything) if len(everything) > 1 else 0.0, abs=1e-9)


def test_an_empty_piece_is_whitened_to_zeros() -> None:
    assert whiten(torch.full((1, 2), NAN), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]]
