"""The optimizer and its learning rates."""

from __future__ import annotations

import torch

from mrlm_pl.learner.optimization import Optimization


def test_the_optimizer_is_fused_unless_gradients_have_a_scale() -> None:
    for scaled in (False, True):
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 1e-3}]
        made = Optimization().configured(groups, scaled, lambda: 1)
        assert bool(made.param_groups[0]["fused"]) != scaled
