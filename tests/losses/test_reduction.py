"""Reductions: hand numbers, and invariance to cutting, padding, ranks and row order."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import episode_token_counts
from mrlm_pl.losses import (
    BatchTotals,
    Reduction,
    batch_totals,
    reduce_tokens,
    token_weights,
)

REDUCTIONS = get_args(Reduction)
MAX_LENGTH = 10


def mask_of_lengths(*lengths: int, width: int | None = None) -> Tensor:
    return torch.arange(width or max(max(lengths), 1))[None] < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", 2 / 10),
        ("sequence_mean", (1 + 0) / 2),
        ("sequence_sum", (2 + 0) / 2),
        ("constant_length", (2 + 0) / (2 * 10)),
        ("episode_mean", 2 / 10),
    ],
)
def test_hand_numbers(reduction: Reduction, expected: float) -> None:
    """Row A: 2 tokens of loss 1, row B: 8 of loss 0, both of one episode; a third row has no action token."""
    mask = mask_of_lengths(2, 8, 0)
    loss = torch.stack([torch.ones(8), torch.zeros(8), torch.full((8,), float("nan"))])
    episode_tokens = episode_token_counts(mask, torch.tensor([5, 5, 6]))
    value = reduce_tokens(loss, mask, reduction, max_length=MAX_LENGTH, episode_tokens=episode_tokens)
    assert value.item() == pytest.approx(expected)


def test_episode_mean_weighs_episodes_not_rows() -> None:
    """Episode 1 has rows of 1 and 3 tokens, episode 2 one row of 2: (mean of 4 tokens + mean of 2 tokens) / 2."""
    mask = mask_of_lengths(1, 2, 3)
    loss = torch.tensor([[4.0, 0, 0], [1.0, 3.0, 0], [0.0, 2.0, 2.0]])
    counts = episode_token_counts(mask, torch.tensor([1, 2, 1]))
    assert counts.tolist() == [4, 2, 4]
    value = reduce_tokens(loss, mask, "episode_mean", episode_tokens=counts)
    assert value.item() == pytest.approx((8 / 4 + 4 / 2) / 2)


def test_an_episode_cut_in_two_counts_once() -> None:
    mask = mask_of_lengths(1, 3)
    counts = episode_token_counts(mask, torch.tensor([1, 1]))
    pieces = [batch_totals(mask[i : i + 1], counts[i : i + 1]) for i in range(2)]
    assert [piece.episodes for piece in pieces] == [0.25, 0.75]
    assert pieces[0] + pieces[1] == BatchTotals(tokens=4, sequences=2, episodes=1)


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """Row lengths, episode ids, the micro-batch of each row, extra padding."""
    rows = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows))
    episodes = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    pieces = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return lengths, episodes, pieces, draw(st.integers(0, 5))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=60, deadline=None)
@given(batch=cut_batches(), seed=st.integers(0, 2**16))
@pytest.mark.long_after(2)
def test_any_cut_and_padding_gives_the_same_loss_and_gradient(reduction: Reduction, batch, seed: int) -> None:
    lengths, episodes, pieces, padding = batch
    mask = mask_of_lengths(*lengths)
    parameter = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    episode_tokens = episode_token_counts(mask, torch.tensor(episodes))

    whole = reduce_tokens(parameter.sin(), mask, reduction, max_length=MAX_LENGTH, episode_tokens=episode_tokens)
    (whole_gradient,) = torch.autograd.grad(whole, parameter)

    rows = [[i for i, piece in enumerate(pieces) if piece == p] for p in sorted(set(pieces), reverse=True)]
    totals = BatchTotals(0, 0, 0)
    for chosen in rows:
        totals = totals + batch_totals(mask[chosen], episode_tokens[chosen])
    shares = []
    for chosen in rows:
        width = max(lengths[i] for i in chosen) + padding
        piece_mask = mask_of_lengths(*(lengths[i] for i in chosen), width=max(width, 1))
        loss = torch.full(piece_mask.shape, float("nan"))
        loss[:, : mask.shape[1]] = parameter.sin()[chosen][:, : loss.shape[1]]
        options = {"max_length": MAX_LENGTH, "episode_tokens": episode_tokens[chosen]}
        shares.append(reduce_tokens(loss, piece_mask, reduction, totals, **options))
    summed = torch.stack(shares).sum()
    (summed_gradient,) = torch.autograd.grad(summed, parameter)

    torch.testing.assert_close(summed, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(summed_gradient, whole_gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "episode_mean"])
@settings(max_examples=40, deadline=None)
@given(batch=cut_batches())
def test_means_have_unit_weight_and_reproduce_a_constant(reduction: Reduction, batch) -> None:
    lengths, episodes, _, _ = batch
    mask = mask_of_lengths(*lengths)
    episode_tokens = episode_token_counts(mask, torch.tensor(episodes))
    weights = token_weights(reduction, mask, batch_totals(mask, episode_tokens), episode_tokens=episode_tokens)
    assert weights.sum().item() == pytest.approx(1.0 if sum(lengths) else 0.0, abs=1e-5)
    assert (weights[~mask] == 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_without_action_tokens_is_zero_and_differentiable(reduction: Reduction) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    counts = episode_token_counts(mask, torch.tensor([0, 1]))
    value = reduce_tokens(loss, mask, reduction, max_length=4, episode_tokens=counts)
    value.backward()
    assert value.item() == 0.0
    assert loss.grad is not None
    assert (loss.grad == 0).all()


def test_totals_that_deny_the_tokens_of_a_piece_do_not_pass_in_silence() -> None:
    value = reduce_tokens(torch.ones(1, 2), mask_of_lengths(2), "token_mean", BatchTotals(0, 0, 0))
    assert not value.isfinite()


def test_rejected_arguments() -> None:
    mask = mask_of_lengths(2)
    totals = batch_totals(mask)
    with pytest.raises(ConfigurationError, match="reduction is 'mean'; choose from token_mean"):
        token_weights("mean", mask, totals)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="max_length"):
        token_weights("constant_length", mask, totals)
    with pytest.raises(ConfigurationError, match="needs episode_tokens"):
        token_weights("episode_mean", mask, totals)
