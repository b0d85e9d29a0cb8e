"""The value head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from safetensors.torch import load_file

from mrlm_pl.advantages import Moments
from mrlm_pl.policy.value_head import ValueHead


@pytest.mark.parametrize(("hidden", "computed"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_values_are_computed_in_at_least_single_precision(hidden: torch.dtype, computed: torch.dtype) -> None:
    head = ValueHead(3)
    head.linear.weight.data = torch.tensor([[256.0, 1.0, 2.0**-7]])  # bf16 rounds the sum to 256
    values = head.bfloat16()(torch.ones(2, 3, dtype=hidden))
    assert values.dtype == computed
    assert values.tolist() == [257.0078125] * 2


def observed(*returns: float) -> Moments:
    mean = sum(returns) / len(returns)
    return Moments(len(returns), mean, sum((value - mean) ** 2 for value in returns))


@torch.no_grad()
def test_a_normalized_head_estimates_in_units_of_all_observed_returns(tmp_path: Path) -> None:
    head, states = ValueHead(2), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    head.observe(observed(-1004.0, -1000.0, -996.0))
    assert head(states).tolist() == [-1000, -1000], "a fresh head estimates the mean"
    head.linear.weight.copy_(torch.tensor([[1.0, -0.5]]))
    head.linear.bias.fill_(0.5)
    assert head(states).tolist() == [-1000 + 1.5 * 4, -1000 - 0.5 * 4], "the standard deviation is 4"
    head.observe(observed(-1004.0, -996.0))
    # -1004, -1000, -996, -1004, -996: mean -1000, sum of squares 64, deviation sqrt(64 / 4) = 4; then one of -976.
    head.observe(observed(-976.0))
    # Mean -996; squares 64 + 24^2 5/6 = 544; deviation sqrt(544 / 5).
    assert head(states).tolist() == pytest.approx([-996 + 1.5 * 108.8**0.5, -996 - 0.5 * 108.8**0.5])
    head.save(tmp_path)
    assert "moments" not in load_file(tmp_path / "value_head.safetensors"), "of heads that are not normalized"
    head.register_buffer("moments", head.moments)
    head.save(tmp_path)
    again = ValueHead(2)
    again.read(tmp_path)
    assert torch.equal(again(states), head(states))


@torch.no_grad()
def test_equal_returns_have_a_unit_of_1() -> None:
    head = ValueHead(1)
    head.observe(observed(-7.0, -7.0))
    assert head.moments.tolist() == [2, -7, 0, 1]


def test_the_moments_stay_in_single_precision() -> None:
    with HalfPrecision("bf16-true").module_init_context():  # as a trainer makes the modules
        head = ValueHead(1)
        head.observe(observed(-1001.0, -1003.0))
    assert head.bfloat16().moments.tolist() == pytest.approx([2, -1002, 2, 2**0.5])  # bf16 rounds -1002 to -1000
    assert head.double()(torch.zeros(1, 1)).tolist() == [-1002]
