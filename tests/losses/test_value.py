"""Value loss by hand."""

import pytest
import torch

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import value_loss

ONE = torch.tensor([[True]])


def loss(value: float, old: float, target: float, clip: float | None = 0.2) -> float:
    tensors = [torch.tensor([[x]]) for x in (value, old, target)]
    return value_loss(*tensors, ONE, clip=clip).item()


def test_published_clip_number() -> None:
    """V_old 0, V 0.5, return 1: clipped to 0.2, (0.2 - 1)^2 = 0.64 exceeds 0.25; half of it."""
    assert loss(0.5, 0.0, 1.0) == pytest.approx(0.32)
    assert loss(0.5, 0.0, 1.0, clip=None) == pytest.approx(0.125)


def test_the_larger_error_wins() -> None:
    assert loss(0.5, 0.0, 0.1) == pytest.approx(0.5 * 0.16)  # unclipped 0.4^2 over clipped 0.1^2
    assert loss(0.1, 0.0, 1.0) == pytest.approx(0.5 * 0.81)  # inside the range
    assert loss(-0.5, 0.0, -1.0) == pytest.approx(0.32)  # below the range


def test_gradient_stops_where_the_clipped_error_wins() -> None:
    values = torch.tensor([[0.5, 0.1]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    value_loss(values, torch.zeros(1, 2), torch.ones(1, 2), mask).sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, -0.9]]))


def test_negative_clip_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="-1"):
        loss(0.0, 0.0, 0.0, clip=-1.0)
