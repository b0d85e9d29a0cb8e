"""The value head."""

from __future__ import annotations

import pytest
import torch

from mrlm_pl.policy.value_head import ValueHead


@pytest.mark.parametrize(("hidden", "computed"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_values_are_computed_in_at_least_single_precision(hidden: torch.dtype, computed: torch.dtype) -> None:
    head = ValueHead(3)
    head.linear.weight.data = torch.tensor([[256.0, 1.0, 2.0**-7]])  # bf16 rounds the sum to 256
    values = head.bfloat16()(torch.ones(2, 3, dtype=hidden))
    assert values.dtype == computed
    assert values.tolist() == [257.0078125] * 2
