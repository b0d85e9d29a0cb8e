"""Sampler corrections: weights computed by hand from the log-ratios."""

import math

import pytest
import torch

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import Correction, ppo_clip_loss

# Log-ratios old - sampler of the action tokens: row 0 (0.3, -0.1), row 1 (1.0, 0.4, 0.1).
# Their sums are 0.2 and 1.5, their means 0.1 and 0.5.
OLD = torch.tensor([[-1.0, -1.0, 7.0], [-1.0, -1.0, -1.0]])
SAMPLER = torch.tensor([[-1.3, -0.9, float("nan")], [-2.0, -1.4, -1.1]])
MASK = torch.tensor([[True, True, False], [True, True, True]])


def exps(*rows: list[float]) -> torch.Tensor:
    return torch.tensor([[math.exp(x) if x > -99 else 0.0 for x in row] for row in rows])


OFF = -100.0  # stands for weight 0


def test_without_a_correction_all_tokens_weigh_the_same() -> None:
    assert Correction().weights(OLD, SAMPLER, MASK).tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]


def test_truncated_per_token() -> None:
    weights = Correction("truncated", cap=2.0).weights(OLD, SAMPLER, MASK)
    torch.testing.assert_close(weights, exps([0.3, -0.1, OFF], [math.log(2.0), 0.4, 0.1]))


def test_plain_has_no_bounds() -> None:
    weights = Correction("plain", cap=1.0, low=1.0, high=1.0).weights(OLD, SAMPLER, MASK)
    torch.testing.assert_close(weights, exps([0.3, -0.1, OFF], [1.0, 0.4, 0.1]))


def test_truncated_per_sequence() -> None:
    weights = Correction("truncated", cap=2.0, level="sequence").weights(OLD, SAMPLER, MASK)
    torch.testing.assert_close(weights, exps([0.2, 0.2, OFF], [math.log(2.0)] * 3))


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("token", 0.95, 2.0, exps([0.3, OFF, OFF], [OFF, 0.4, 0.1])),
        ("sequence", 0.5, 2.0, exps([0.2, 0.2, OFF], [OFF, OFF, OFF])),
        ("geometric_mean", 1.0, 2.0, exps([0.1, 0.1, OFF], [0.5, 0.5, 0.5])),
        ("geometric_mean", 1.2, 2.0, exps([OFF, OFF, OFF], [0.5, 0.5, 0.5])),
    ],
)
def test_masked_weight_levels(level, low: float, high: float, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        Correction("masked", low=low, high=high, level=level).weights(OLD, SAMPLER, MASK), expected
    )


def test_a_correction_needs_the_old_policy_from_the_learner() -> None:
    assert [Correction().recomputes(choice) for choice in (None, True, False)] == [None, True, False]
    assert [Correction("plain").recomputes(choice) for choice in (None, True)] == [True, True]
    with pytest.raises(ConfigurationError, match="recompute_old_logp is false, so pi_old is mu"):
        Correction("plain").recomputes(False)


def test_bounds_belong_to_the_kept_range() -> None:
    zeros, mask = torch.zeros(1, 1), torch.tensor([[True]])
    assert Correction("masked", low=1.0, high=1.0).weights(zeros, zeros, mask).item() == 1.0


def test_default_range_is_icepops() -> None:
    ratios = torch.tensor([[0.49, 0.51, 4.9, 5.1]])
    weights = Correction("masked").weights(ratios.log(), torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.51, 4.9, 0.0]]))


def test_nan_inside_the_mask_is_not_dropped_in_silence() -> None:
    nan, mask = torch.tensor([[float("nan")]]), torch.tensor([[True]])
    assert Correction("masked").weights(nan, torch.zeros(1, 1), mask).isnan().all()
    assert Correction("truncated").weights(nan, torch.zeros(1, 1), mask).isnan().all()


def test_weights_carry_no_gradient() -> None:
    logp = OLD.clone().requires_grad_()
    assert not Correction("truncated").weights(logp, SAMPLER, MASK).requires_grad
    assert not Correction("masked").weights(logp, SAMPLER, MASK).requires_grad


def test_decoupled_ppo_clips_around_the_proximal_policy() -> None:
    """w = e^0.5; r = e^0.5 clipped at 1.2 for A = 1, r itself for A = -1."""
    logp, proximal, sampler = (torch.full((1, 2), x) for x in (-0.5, -1.0, -1.5))
    advantages, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    clipped = ppo_clip_loss(logp, proximal, advantages, mask)
    loss = Correction("plain").weights(proximal, sampler, mask) * clipped
    torch.testing.assert_close(loss, torch.tensor([[-1.2 * math.exp(0.5), math.exp(1.0)]]))
    capped = Correction("truncated", cap=1.1).weights(proximal, sampler, mask) * clipped
    torch.testing.assert_close(capped, torch.tensor([[-1.2 * 1.1, 1.1 * math.exp(0.5)]]))


def test_decoupled_ppo_gradient_is_weighted() -> None:
    logp = torch.tensor([[-1.0]], requires_grad=True)
    mask = torch.tensor([[True]])
    weights = Correction("plain").weights(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), mask)
    loss = weights * ppo_clip_loss(logp, torch.tensor([[-1.0]]), torch.tensor([[2.0]]), mask)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    assert gradient.item() == pytest.approx(-2.0 * math.exp(0.5))


def test_rejected_options() -> None:
    with pytest.raises(ConfigurationError, match="cap is 0"):
        Correction("truncated", cap=0.0).weights(OLD, SAMPLER, MASK)
    with pytest.raises(ConfigurationError, match=r"correction\.low is 2"):
        Correction("masked", low=2.0, high=1.0).weights(OLD, SAMPLER, MASK)
    with pytest.raises(ConfigurationError, match=r"correction\.low is -1"):
        Correction("masked", low=-1.0)
    with pytest.raises(ConfigurationError, match="level is 'turn'"):
        Correction("masked", level="turn").weights(OLD, SAMPLER, MASK)  # type: ignore[arg-type]
