"""Attention in float32 beside projections in half precision, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mrlm_pl.policy.forward.attention import PackedLayout, packed_attention_forward
from mrlm_pl.policy.forward.packing import Segments


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_is_that_of_float32(dtype: torch.dtype, autocast: bool, kv_heads: int) -> None:
    torch.manual_seed(0)
    layout = PackedLayout(Segments(((6, 6),), (((), ()),)), torch.device("cpu"))
    query, key, value = (torch.randn(1, heads, 12, 16) for heads in (2, kv_heads, kv_heads))
    value = value.to(dtype)
    if not autocast:  # under autocast the rotary embedding promotes queries and keys; values are a projection's result
        query, key = query.to(dtype), key.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        found, _ = packed_attention_forward(nn.Identity(), query, key, value, None, packed_layout=layout)
    assert found.dtype == dtype
    for first in (0, 6):
        q, k, v = (x[0, :, first : first + 6].double() for x in (query, key, value))
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf"))
        expected = (scores.softmax(-1) @ v).transpose(0, 1).to(dtype)
        # rounded once, at the end; scores in half precision would be wrong by up to 1e-2
        torch.testing.assert_close(found[0, first : first + 6], expected, rtol=2**-7, atol=1e-5)
        assert (found[0, first : first + 6] == expected).float().mean() > 0.98
