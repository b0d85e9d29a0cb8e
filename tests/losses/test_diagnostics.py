"""Logged metrics by hand."""

import math

import pytest
import torch

from mrlm_pl.losses import (
    approx_kl,
    masked_max,
    masked_mean,
    ratio_max_deviation,
)

NAN = float("nan")
MASK = torch.tensor([[True, True, False], [True, True, False]])


def test_mean_and_max_ignore_what_is_masked() -> None:
    values = torch.tensor([[-1.0, -4.0, NAN], [-2.0, -5.0, 7.0]])
    assert masked_mean(values, MASK).item() == -3.0
    assert masked_max(values, MASK).item() == -1.0


def test_nothing_to_measure_is_nan() -> None:
    nothing = torch.zeros(1, 1, dtype=torch.bool)
    assert masked_mean(torch.ones(1, 1), nothing).isnan()
    assert masked_max(torch.ones(1, 1), nothing).isnan()


def test_approx_kl_is_unbiased_under_the_sampler() -> None:
    """Tokens in the sampler's own proportions: the estimate equals KL(sampler || learner)."""
    sampler, learner = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    tokens = torch.tensor([0, 0, 1, 2])
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    mask = torch.ones(1, 4, dtype=torch.bool)
    estimate = approx_kl(learner[tokens].log()[None], sampler[tokens].log()[None], mask)
    assert estimate.item() == pytest.approx(kl, abs=1e-6)


def test_fresh_data_shows_no_drift() -> None:
    logp = torch.tensor([[-0.3, -7.0, NAN], [-1.0, -2.0, NAN]])
    assert approx_kl(logp, logp, MASK).item() == 0.0
    assert ratio_max_deviation(logp, logp, MASK).item() == 0.0


def test_ratio_max_deviation_looks_both_ways() -> None:
    old = torch.zeros(2, 3)
    logp = torch.tensor([[1.2, 0.5, NAN], [1.0, 0.9, NAN]]).log()
    assert ratio_max_deviation(logp, old, MASK).item() == pytest.approx(0.5)


def test_metrics_carry_no_gradient() -> None:
    logp = torch.zeros(2, 3, requires_grad=True)
    old = torch.zeros(2, 3)
    metrics = [
        masked_mean(logp, MASK),
        masked_max(logp, MASK),
        approx_kl(logp, old, MASK),
        ratio_max_deviation(logp, old, MASK),
    ]
    assert not any(metric.requires_grad for metric in metrics)
