"""Attention in float32 beside projections in half precision, on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from mrlm_pl.policy.forward.attention import PackedLayout, packed_attention_forward
from mrlm_pl.policy.forward.packing import Segments


def test_attention_under_autocast_is_that_of_float32() -> None:
    torch.manual_seed(0)
    layout = PackedLayout(Segments(((6, 6),), (((), ()),)), torch.device("cpu"))
    # as autocast leaves them: the rotary embedding promotes queries and keys, values are a projection's result
    query, key = torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16)
    value = torch.randn(1, 2, 12, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = packed_attention_forward(nn.Identity(), query, key, value, None, packed_layout=layout)
    for first in (0, 6):
        q, k, v = (x[0, :, first : first + 6].double() for x in (query, key, value))
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf"))
        expected = (scores.softmax(-1) @ v).transpose(0, 1)
        # rounded once, at the end; scores in bfloat16 would be wrong by about 1e-2
        torch.testing.assert_close(found[0, first : first + 6], expected.bfloat16(), rtol=2**-7, atol=1e-5)
        assert (found[0, first : first + 6] == expected.bfloat16()).float().mean() > 0.99
    assert found.dtype == torch.bfloat16
