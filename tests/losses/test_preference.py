"""Preference losses by hand."""

import math

import pytest
import torch

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import (
    dpo_hinge_loss,
    dpo_sigmoid_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    preference_gap,
    preference_loss,
    sequence_logp,
    simpo_loss,
)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_step_zero_is_ln_2_exactly() -> None:
    sums = torch.tensor([-12.3, -4.5])
    gap = preference_gap(sums, sums * 2, sums, sums * 2)
    assert dpo_sigmoid_loss(gap).tolist() == [torch.tensor(math.log(2)).item()] * 2


def test_dpo_from_token_log_probs() -> None:
    """gap = ((-1 - 2) - (-4)) - ((-5) - (-5.5)) = 1 - 0.5; loss = softplus(-0.2 * 0.5)."""
    mask = torch.tensor([[True, True, False]])
    chosen = sequence_logp(torch.tensor([[-1.0, -2.0, float("nan")]]), mask)
    gap = preference_gap(chosen, torch.tensor([-5.0]), torch.tensor([-4.0]), torch.tensor([-5.5]))
    assert gap.item() == 0.5
    assert dpo_sigmoid_loss(gap, beta=0.2).item() == pytest.approx(softplus(-0.1))


def test_reference_free_gap() -> None:
    assert preference_gap(torch.tensor([-1.0]), torch.tensor([-4.0])).item() == 3.0


def test_robust_and_exo_pair_by_name() -> None:
    gap = torch.tensor([2.0, -4.0])
    right = [1 / (1 + math.exp(-0.5 * value)) for value in gap.tolist()]
    robust = [(-0.8 * math.log(q) + 0.2 * math.log(1 - q)) / 0.6 for q in right]
    exo = [q * math.log(q / 0.8) + (1 - q) * math.log((1 - q) / 0.2) for q in right]
    for name, expected in (("robust", robust), ("exo_pair", exo)):
        loss = preference_loss(name, beta=0.5, label_smoothing=0.2)  # type: ignore[arg-type]
        torch.testing.assert_close(loss(gap), torch.tensor(expected))
    torch.testing.assert_close(preference_loss("robust")(gap), preference_loss("sigmoid")(gap))


def test_label_smoothing_and_margin() -> None:
    gap = torch.tensor([2.0])
    smoothed = dpo_sigmoid_loss(gap, beta=0.5, label_smoothing=0.1)
    assert smoothed.item() == pytest.approx(0.9 * softplus(-1.0) + 0.1 * softplus(1.0))
    assert dpo_sigmoid_loss(gap, beta=0.5, margin=0.4).item() == pytest.approx(softplus(-0.6))
    per_pair = dpo_sigmoid_loss(torch.tensor([2.0, 2.0]), beta=0.5, margin=torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(per_pair, torch.tensor([softplus(-1.0), math.log(2)]))


def test_hinge_and_ipo() -> None:
    gap = torch.tensor([0.0, 4.0, 30.0])
    torch.testing.assert_close(dpo_hinge_loss(gap, beta=0.1), torch.tensor([1.0, 0.6, 0.0]))
    torch.testing.assert_close(dpo_hinge_loss(gap, beta=0.1, margin=2.0), torch.tensor([2.0, 1.6, 0.0]))
    torch.testing.assert_close(ipo_loss(gap, beta=0.25), torch.tensor([4.0, 4.0, 784.0]))


def test_gradient_pushes_the_pair_apart() -> None:
    """d loss / d chosen = -beta sigmoid(-z), and the opposite for rejected; the references get none."""
    tensors = [torch.tensor([x], requires_grad=True) for x in (-1.0, -2.0, -1.5, -1.5)]
    loss = dpo_sigmoid_loss(preference_gap(*tensors), beta=0.3).sum()
    chosen, rejected, *references = torch.autograd.grad(loss, tensors, allow_unused=True)
    expected = -0.3 / (1 + math.exp(0.3))
    assert chosen.item() == pytest.approx(expected)
    assert rejected.item() == pytest.approx(-expected)
    assert references == [None, None]


def test_extreme_gaps_stay_finite() -> None:
    gap = torch.tensor([1e5, -1e5], requires_grad=True)
    loss = dpo_sigmoid_loss(gap, beta=1.0)
    assert loss.tolist() == [0.0, 1e5]
    loss.sum().backward()
    assert gap.grad is not None
    assert gap.grad.tolist() == [0.0, -1.0]


def test_rejected_arguments() -> None:
    with pytest.raises(ValueError, match="neither"):
        preference_gap(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="has shape"):
        preference_gap(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ConfigurationError, match=r"label_smoothing is 0\.5"):
        dpo_sigmoid_loss(torch.zeros(1), label_smoothing=0.5)


def test_simpo_has_a_margin() -> None:
    assert simpo_loss(torch.tensor([0.3]), beta=2.0, margin=1.6).item() == pytest.approx(softplus(1.0))


@pytest.mark.parametrize(("chosen", "rejected"), [(0.5, 0.25), (0.1, 0.9), (0.999, 1e-6)])
def test_orpo_from_odds(chosen: float, rejected: float) -> None:
    ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    expected = -math.log(chosen) + 0.3 * math.log1p(1 / ratio)
    logps = torch.tensor([[chosen], [rejected]], dtype=torch.float64).log()
    assert orpo_loss(*logps, odds_weight=0.3).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("logp", [-1e-6, 0.0])
def test_orpo_of_a_near_certain_answer_has_a_finite_gradient(logp: float) -> None:
    chosen = torch.tensor([logp], requires_grad=True)
    orpo_loss(chosen, torch.tensor([-30.0])).sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.isfinite().all()


def test_kto_rewards_either_label() -> None:
    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    log_ratio, labels = torch.tensor([2.0, 2.0], requires_grad=True), torch.tensor([True, False])
    loss = kto_loss(log_ratio, labels, torch.tensor(0.5), beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    assert loss.tolist() == pytest.approx([1.5 * (1 - sigmoid(0.3)), 0.5 * (1 - sigmoid(-0.3))])
    below_zero = kto_loss(log_ratio, labels, torch.tensor(-3.0), beta=0.2)
    assert below_zero.tolist() == pytest.approx([1 - sigmoid(0.4), 1 - sigmoid(-0.4)]), "a divergence is at least 0"
    loss.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad[0] < 0 < log_ratio.grad[1]
