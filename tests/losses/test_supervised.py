"""Cross-entropy against torch's own implementation, losses of reward models by hand."""

import math

import pytest
import torch

from mrlm_pl.losses import (
    bradley_terry_loss,
    correctness_loss,
    cross_entropy_loss,
    last_token_mask,
    reduce_tokens,
)


def test_equals_torch_cross_entropy_over_action_tokens() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 4, 0], [2, 2, 3]])
    mask = torch.tensor([[False, True, True], [True, False, False]])
    logp = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    expected = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    torch.testing.assert_close(reduce_tokens(cross_entropy_loss(logp, mask), mask, "token_mean"), expected)


def test_an_empty_action_is_skipped() -> None:
    logp = torch.full((1, 2), float("-inf"), requires_grad=True)
    mask = torch.zeros(1, 2, dtype=torch.bool)
    loss = reduce_tokens(cross_entropy_loss(logp, mask), mask, "token_mean")
    loss.backward()
    assert loss.item() == 0.0
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0, 0.0]]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


LOGITS = torch.tensor([[5.0, 1.0, float("nan")], [-2.0, 0.0, 3.0]])
MASK = torch.tensor([[True, True, False], [True, True, True]])


def test_score_at_the_last_token() -> None:
    loss = correctness_loss(LOGITS, torch.tensor([True, False]), last_token_mask(MASK))
    torch.testing.assert_close(loss, torch.tensor([[0.0, softplus(-1.0), 0.0], [0.0, 0.0, softplus(3.0)]]))


def test_score_at_every_token() -> None:
    loss = correctness_loss(LOGITS, torch.tensor([1, 0]), MASK)
    expected = [[softplus(-5.0), softplus(-1.0), 0.0], [softplus(-2.0), softplus(0.0), softplus(3.0)]]
    torch.testing.assert_close(loss, torch.tensor(expected))


def test_soft_label_and_gradient() -> None:
    """d loss / d logit = sigmoid(logit) - label."""
    logits = torch.tensor([[0.0, math.nan]], requires_grad=True)
    loss = correctness_loss(logits, torch.tensor([0.75]), torch.tensor([[True, False]]))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.tolist() == [[-0.25, 0.0]]


def test_labels_are_checked() -> None:
    with pytest.raises(ValueError, match=r"correct has shape \(1,\); it must be \(2,\)"):
        correctness_loss(LOGITS, torch.tensor([1.0]), MASK)
    for outside in (-0.5, 1.5, math.nan):  # the trainer stops at a loss of NaN
        loss = correctness_loss(LOGITS, torch.tensor([1.0, outside]), MASK)
        assert [of_row.isnan().tolist() for of_row in loss] == [[False] * 3, MASK[1].tolist()]


def test_bradley_terry() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 3.0])
    expected = torch.tensor([softplus(-1.0), math.log(2), softplus(2.0)])
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected), expected)
    assert bradley_terry_loss(chosen[:1], rejected[:1], margin=1.0).item() == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match=r"rejected_scores has shape \(2,\); it must be \(3,\)"):
        bradley_terry_loss(chosen, rejected[:2])
