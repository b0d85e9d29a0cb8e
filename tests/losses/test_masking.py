"""The masking primitives."""

import torch

from mrlm_pl.losses import last_token_mask, masked_values
from mrlm_pl.losses.masking import clamped_exp


def test_gradient_outside_the_mask_is_exactly_zero_next_to_nan() -> None:
    values = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    masked_values(values, torch.tensor([[True, False]])).exp().sum().backward()
    assert values.grad is not None
    assert values.grad[0, 1].item() == 0.0
    assert values.grad[0, 0].item() == torch.tensor(1.0).exp().item()


def test_double_precision_stays() -> None:
    values = torch.zeros(1, 1, dtype=torch.float64)
    assert masked_values(values, torch.tensor([[True]])).dtype == torch.float64


def test_clamped_exp_is_exp_inside_and_keeps_nan() -> None:
    x = torch.tensor([-3.0, 0.0, 3.0])
    torch.testing.assert_close(clamped_exp(x), x.exp())
    assert clamped_exp(torch.tensor(float("nan"))).isnan()


def test_last_token_of_rows_with_gaps() -> None:
    mask = torch.tensor([[True, False, True, False], [True, True, True, True], [True, False, False, False]])
    assert last_token_mask(mask).long().argmax(1).tolist() == [2, 3, 0]
    assert last_token_mask(mask).sum(1).tolist() == [1, 1, 1]
