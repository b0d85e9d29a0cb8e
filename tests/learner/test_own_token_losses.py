"""The losses and metrics that an algorithm's own rule returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.metrics import check_token_losses

LOSSES = torch.ones(2, 3)


def rule() -> None:
    """Stands in for a method."""


def test_metrics_that_are_numbers_become_tensors() -> None:
    losses, metrics = check_token_losses((LOSSES, {"share": 0.5, "ratio": torch.tensor(2.0)}), LOSSES, rule)
    assert losses is LOSSES
    assert {name: value.item() for name, value in metrics.items()} == {"share": 0.5, "ratio": 2.0}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (LOSSES, r"must return a loss for each token, a tensor of shape \[2, 3\], and a dict"),
        ((LOSSES.mean(), {}), "must return a loss for each token"),
        ((LOSSES, None), "must return a loss for each token"),
        ((LOSSES, {"ratio": LOSSES}), r"the metric 'ratio' has shape \[2, 3\]; give each metric .*masked_mean"),
        ((LOSSES, {"ratio": None}), "the metric 'ratio' is None; give each metric"),
        ((LOSSES, {"mine": 1.0, "loss": 9.0}), "the metric 'loss' has the name of one that is logged already"),
        ((LOSSES, {"approx_kl": 9.0}), "the metric 'approx_kl' has the name of one that is logged already"),
        ((LOSSES, {"mismatch_k1": 9.0}), "the metric 'mismatch_k1' has the name of one that is logged already"),
    ],
)
def test_what_else_is_returned_is_refused(found: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        check_token_losses(found, LOSSES, rule)
    assert "rule" in str(error.value)
    assert "test_own_token_losses.py" in str(error.value), "where the rule stands"


def test_losses_without_a_gradient_are_refused_unless_they_are_0() -> None:
    logp = LOSSES.clone().requires_grad_()
    with pytest.raises(ConfigurationError, match="rule returned losses without a gradient in logp"):
        check_token_losses(((-logp).detach(), {}), logp, rule)
    check_token_losses((-logp, {}), logp, rule)
    check_token_losses((torch.zeros(2, 3), {}), logp, rule)
    with torch.no_grad():
        check_token_losses((-logp * 1, {}), LOSSES, rule)
