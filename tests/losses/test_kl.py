"""KL estimators: hand numbers, and their expectations over a small categorical distribution."""

import pytest
import torch

from mrlm_pl.losses import kl_k1, kl_k2, kl_k3, kl_k3_importance_weighted, kl_k3_straight_through

ONE = torch.tensor([[True]])
MASK2 = torch.tensor([[True, True]])


def test_published_k3_numbers() -> None:
    assert kl_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), ONE).item() == pytest.approx(0.106531, abs=1e-6)
    # e^x - x - 1 for x = ref - logp = 0.1, -0.5
    k3 = kl_k3(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.9, -1.5]]), MASK2)
    torch.testing.assert_close(k3, torch.tensor([[0.005171, 0.106531]]), atol=1e-6, rtol=0)


def test_sign_convention_is_learner_minus_reference() -> None:
    logp, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    assert kl_k1(logp, ref, MASK2).tolist() == [[0.5, -1.0]]
    assert kl_k2(logp, ref, MASK2).tolist() == [[0.125, 0.5]]


def test_expectations_over_a_categorical() -> None:
    """E_pi[k1] = E_pi[k3] = KL(pi || ref); the gradient of E over fixed samples of k2 is the gradient of KL."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, -0.2], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    probabilities = logp.exp().detach()
    mask = torch.ones(1, 3, dtype=torch.bool)
    kl = (logp.exp() * (logp - ref)).sum()
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)

    def expectation(estimator) -> torch.Tensor:
        return (probabilities * estimator(logp[None], ref[None], mask)[0]).sum()

    torch.testing.assert_close(expectation(kl_k1), kl)
    torch.testing.assert_close(expectation(kl_k3), kl)
    for estimator, right in [(kl_k2, True), (kl_k3_straight_through, True), (kl_k3, False), (kl_k1, False)]:
        (gradient,) = torch.autograd.grad(expectation(estimator), logits, retain_graph=True)
        assert torch.allclose(gradient, kl_gradient, atol=1e-9) is right, estimator.__name__


def test_straight_through_has_k3_values() -> None:
    logp, ref = torch.tensor([[-1.0, -0.2]]), torch.tensor([[-1.5, -4.0]])
    assert torch.equal(kl_k3_straight_through(logp, ref, MASK2), kl_k3(logp, ref, MASK2))


def test_k3_keeps_digits_for_tiny_differences() -> None:
    """k3(d) ~ d^2 / 2: about 5e-9 at d = 1e-4, which a plain fp32 exp(-d) - 1 + d rounds to noise."""
    logp = torch.tensor([[1e-4]])
    assert kl_k3(logp, torch.zeros(1, 1), ONE).item() == pytest.approx(5e-9, rel=1e-2)


def test_k3_of_an_impossible_reference_stays_finite() -> None:
    logp = torch.tensor([[-500.0]], requires_grad=True)
    loss = kl_k3(logp, torch.zeros(1, 1), ONE)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()


def test_the_reference_gets_no_gradient() -> None:
    ref = torch.zeros(1, 1, requires_grad=True)
    for estimator in (kl_k1, kl_k2, kl_k3, kl_k3_straight_through):
        assert not estimator(torch.ones(1, 1), ref, ONE).requires_grad


def test_the_importance_weighted_estimate_is_unbiased_off_policy() -> None:
    """Summed over all tokens under the sampler, value and gradient are those of the divergence itself."""
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    ref, old = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in ([0.0, 0.4, 0.1], [1.0, -0.5, 0.2]))
    logp = logits.log_softmax(0)
    divergence = (logp.exp() * (logp - ref)).sum()
    (slope,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    estimate = (old.exp() * kl_k3_importance_weighted(logp[None], ref[None], old[None], mask)[0]).sum()
    assert estimate.item() == pytest.approx(divergence.item(), abs=1e-12)
    (own,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    torch.testing.assert_close(own, slope)
    for estimator in (kl_k2, kl_k3, kl_k3_straight_through):
        biased = (old.exp() * estimator(logp[None], ref[None], mask)[0]).sum()
        (other,) = torch.autograd.grad(biased, logits, retain_graph=True)
        assert not torch.allclose(other, slope, atol=1e-2), estimator.__name__
