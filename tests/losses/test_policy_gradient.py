"""Policy losses against hand arithmetic and the published formulas written out in plain Python."""

import math

import pytest
import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import (
    Clip,
    Correction,
    cispo_loss,
    cross_entropy_loss,
    gspo_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_straight_through,
    policy_gradient_loss,
    ppo_clip_loss,
    value_loss,
)

ONE = torch.tensor([[True]])


def one(x: float) -> Tensor:
    return torch.tensor([[x]])


def ppo_at_ratio(ratio: float, advantage: float, clip: Clip = Clip()) -> float:  # noqa: B008 (frozen)
    return ppo_clip_loss(one(math.log(ratio)), one(0.0), one(advantage), ONE, clip).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(1.5, 1, -1.2), (1.5, -1, 1.5), (0.5, -1, 0.8), (0.5, 1, -0.5)]
)
def test_ppo_clip_published_corners(ratio: float, advantage: float, expected: float) -> None:
    assert ppo_at_ratio(ratio, advantage) == pytest.approx(expected, abs=1e-6)


def test_ppo_clip_from_log_probs() -> None:
    assert ppo_clip_loss(one(-0.5), one(-1.0), one(1.0), ONE).item() == pytest.approx(-1.2)
    assert ppo_clip_loss(one(-0.5), one(-1.0), one(-1.0), ONE).item() == pytest.approx(1.648721)


def test_ppo_asymmetric_clip_uses_each_side() -> None:
    assert ppo_at_ratio(1.5, 1.0, Clip(high=0.28)) == pytest.approx(-1.28, abs=1e-6)
    assert ppo_at_ratio(0.5, -1.0, Clip(high=0.28)) == pytest.approx(0.8, abs=1e-6)
    assert ppo_at_ratio(0.5, -1.0, Clip(low=0.3)) == pytest.approx(0.7, abs=1e-6)


def test_dual_clip_caps_only_negative_advantages() -> None:
    assert ppo_at_ratio(4.481689, -1.0) == pytest.approx(4.481689, abs=1e-5)
    assert ppo_at_ratio(4.481689, -1.0, Clip(dual=3.0)) == 3.0
    assert ppo_at_ratio(4.481689, 1.0, Clip(dual=3.0)) == pytest.approx(-1.2)
    assert ppo_at_ratio(0.5, -1.0, Clip(dual=3.0)) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [(1.0, 2.0, -2.0), (1.0, -2.0, 2.0), (1.5, 1.0, 0.0), (1.5, -1.0, 1.5), (0.5, -1.0, 0.0), (0.5, 1.0, -0.5)],
)
def test_ppo_gradient(ratio: float, advantage: float, gradient: float) -> None:
    """d(-rho A)/d logp = -rho A where the clip is inactive, else 0."""
    logp = one(math.log(ratio)).requires_grad_()
    ppo_clip_loss(logp, one(0.0), one(advantage), ONE).sum().backward()
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_ppo_on_its_own_log_probs_is_the_policy_gradient() -> None:
    """Passing logp as old_logp must not cancel the gradient: the old policy is a constant."""
    logp = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    advantages, mask = torch.tensor([[1.0] * 3, [-2.0] * 3]), torch.ones(2, 3, dtype=torch.bool)
    (gradient,) = torch.autograd.grad(ppo_clip_loss(logp, logp, advantages, mask).sum(), logp)
    torch.testing.assert_close(gradient, -advantages)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss", [ppo_clip_loss, gspo_loss, cispo_loss])
def test_extreme_ratios_keep_gradients_finite(loss, advantage: float) -> None:
    for logp_value, old in [(0.0, -1e4), (-1e4, 0.0)]:
        logp = one(logp_value).requires_grad_()
        value = loss(logp, one(old), one(advantage), ONE)
        value.sum().backward()
        assert value.isfinite().all()
        assert logp.grad is not None
        assert logp.grad.isfinite().all()


def test_nan_inside_the_mask_is_not_hidden() -> None:
    nan = one(float("nan"))
    assert ppo_clip_loss(nan, one(0.0), one(1.0), ONE).isnan().all()
    assert ppo_clip_loss(one(0.0), one(0.0), nan, ONE).isnan().all()
    assert gspo_loss(nan, one(0.0), one(1.0), ONE).isnan().all()
    assert cispo_loss(nan, one(0.0), one(1.0), ONE).isnan().all()


def test_policy_gradient_is_minus_advantage_times_logp() -> None:
    logp = torch.tensor([[-0.5, -2.0]], requires_grad=True)
    advantages = torch.tensor([[2.0, -3.0]])
    loss = policy_gradient_loss(logp, advantages, torch.tensor([[True, True]]))
    assert loss.tolist() == [[1.0, -6.0]]
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    assert gradient.tolist() == [[-2.0, 3.0]]


def test_gspo_value_is_the_clipped_sequence_ratio() -> None:
    logp = torch.tensor([[-1.0, -1.0, -9.0], [-2.0, -2.0, -2.0]])
    old = torch.tensor([[-1.2, -1.0, 0.0], [-2.0, -2.0, -2.3]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    loss = gspo_loss(logp, old, torch.ones(2, 3), mask, Clip(0.2, 0.102))
    # mean log ratios 0.2 / 2 and 0.3 / 3, e^0.1 = 1.105171 > 1.102
    torch.testing.assert_close(loss, torch.tensor([[-1.102, -1.102, 0.0], [-1.102, -1.102, -1.102]]))
    unclipped = gspo_loss(logp, old, -torch.ones(2, 3), mask, Clip(0.2, 0.102))
    torch.testing.assert_close(unclipped[1], torch.full((3,), math.exp(0.1)))
    bounded = gspo_loss(logp, old, -torch.ones(2, 3), mask, Clip(0.2, 0.102, dual=1.05))
    assert bounded[1].tolist() == pytest.approx([1.05] * 3)


def test_gspo_gradient_is_that_of_the_sequence_objective() -> None:
    """With sequence-mean reduction, the gradient of -mean_i s_i A_i with s_i = exp(mean_t log rho)."""
    generator = torch.Generator().manual_seed(1)
    logp = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    old = logp.detach() + 0.1 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True, True, False, False], [False, True, True, True]])
    row_advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    losses = gspo_loss(logp, old, row_advantages[:, None].expand(3, 4), mask, Clip(1.0, 5.0))
    (gradient,) = torch.autograd.grad((losses.sum(1) / mask.sum(1)).mean(), logp)
    objective = torch.stack(
        [-row_advantages[i] * (logp[i][mask[i]] - old[i][mask[i]]).mean().exp() for i in range(3)]
    ).mean()
    (expected,) = torch.autograd.grad(objective, logp)
    torch.testing.assert_close(gradient, expected)


def test_gspo_default_clip_is_the_papers() -> None:
    inside = gspo_loss(one(3.9e-4), one(0.0), one(1.0), ONE).item()
    outside = gspo_loss(one(9e-4), one(0.0), one(1.0), ONE).item()
    assert inside == pytest.approx(-math.exp(3.9e-4), abs=1e-6)
    assert outside == pytest.approx(-1.0004, abs=1e-6)
    assert gspo_loss(one(-9e-4), one(0.0), one(-1.0), ONE).item() == pytest.approx(0.9997, abs=1e-6)


def test_cispo_keeps_a_gradient_where_ppo_has_none() -> None:
    logp = one(-0.5).requires_grad_()
    loss = cispo_loss(logp, one(-1.0), one(1.0), ONE, Clip(1.0, 0.2))
    assert loss.item() == pytest.approx(1.2 * 0.5)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    assert gradient.item() == pytest.approx(-1.2)  # the clipped weight, without its own gradient


def test_cispo_weight_has_no_gradient_inside_the_clip_range_either() -> None:
    logp = one(-0.5).requires_grad_()
    (gradient,) = torch.autograd.grad(cispo_loss(logp, one(-1.0), one(1.0), ONE).sum(), logp)
    assert gradient.item() == pytest.approx(-math.exp(0.5))


def test_cispo_default_has_no_lower_bound() -> None:
    assert cispo_loss(one(-3.0), one(-1.0), one(1.0), ONE).item() == pytest.approx(3.0 * math.exp(-2))
    assert cispo_loss(one(-3.0), one(-1.0), one(1.0), ONE, Clip(low=0.2)).item() == pytest.approx(3.0 * 0.8)


def test_rejected_options() -> None:
    with pytest.raises(ConfigurationError, match=r"Clip: dual is 1\.0; it must be above 1"):
        ppo_at_ratio(1.0, 1.0, Clip(dual=1.0))
    with pytest.raises(ConfigurationError, match=r"Clip: low is 1\.5; it must be above 0 and at most 1"):
        ppo_at_ratio(1.0, 1.0, Clip(low=1.5))
    with pytest.raises(ConfigurationError, match=r"Clip: low is -0\.1"):
        ppo_at_ratio(1.0, 1.0, Clip(low=-0.1))
    with pytest.raises(ConfigurationError, match=r"Clip: high is -1"):
        cispo_loss(one(0.0), one(0.0), one(1.0), ONE, Clip(high=-1.0))


TOKEN_LOSSES = {
    "ppo": lambda x, a, b, c, m: ppo_clip_loss(x, a, b, m, Clip(dual=3.0)),
    "policy_gradient": lambda x, a, b, c, m: policy_gradient_loss(x, a, m),
    "gspo": lambda x, a, b, c, m: gspo_loss(x, a, b, m, Clip(low=0.2, high=0.2)),
    "cispo": lambda x, a, b, c, m: cispo_loss(x, a, b, m),
    "decoupled": lambda x, a, b, c, m: Correction("plain").weights(a, b, m) * ppo_clip_loss(x, a, c, m),
    "k1": lambda x, a, b, c, m: kl_k1(x, a, m),
    "k2": lambda x, a, b, c, m: kl_k2(x, a, m),
    "k3": lambda x, a, b, c, m: kl_k3(x, a, m),
    "k3_straight_through": lambda x, a, b, c, m: kl_k3_straight_through(x, a, m),
    "cross_entropy": lambda x, a, b, c, m: cross_entropy_loss(x, m),
    "value": lambda x, a, b, c, m: value_loss(x, a, b, m),
}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_tokens_outside_the_mask_never_count(name: str, garbage: float) -> None:
    """Garbage and padding outside the mask change neither the losses nor the gradients of the action tokens."""
    loss = TOKEN_LOSSES[name]
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(3, 4, generator=generator) for _ in range(4)]
    mask = torch.tensor([[False, True, True, False], [True] * 4, [False] * 4])
    padded_mask = torch.nn.functional.pad(mask, (2, 3))

    def run(inputs: list[Tensor], m: Tensor) -> tuple[Tensor, Tensor]:
        x = inputs[0].clone().requires_grad_()
        value = loss(x, *inputs[1:], m)
        (gradient,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), gradient

    clean, clean_gradient = run(tensors, mask)
    dirty, dirty_gradient = run(
        [torch.nn.functional.pad(t.masked_fill(~mask, garbage), (2, 3), value=garbage) for t in tensors], padded_mask
    )
    assert clean[mask].abs().sum() > 0
    assert (clean[~mask] == 0).all()
    assert (dirty[~padded_mask] == 0).all()
    assert (dirty_gradient[~padded_mask] == 0).all()
    torch.testing.assert_close(dirty[:, 2:-3], clean)
    torch.testing.assert_close(dirty_gradient[:, 2:-3], clean_gradient)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_half_precision_log_probs_are_lifted(name: str) -> None:
    tensors = [torch.tensor([[-0.5]], dtype=torch.bfloat16)] * 4
    assert TOKEN_LOSSES[name](*tensors, ONE).dtype == torch.float32


def test_a_wrong_shape_or_mask_is_named() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        policy_gradient_loss(torch.zeros(2, 2), torch.zeros(2), mask)
    with pytest.raises(TypeError, match="boolean"):
        policy_gradient_loss(torch.zeros(2, 2), torch.zeros(2, 2), mask.float())
