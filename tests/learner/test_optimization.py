"""The optimizer and its learning rates."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from mrlm_pl.learner.optimization import Optimization
from tests.support.runs.logs import logged_here


def test_the_optimizer_is_fused_unless_gradients_have_a_scale() -> None:
    for scaled in (False, True):
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 1e-3}]
        made = Optimization().configured(groups, scaled, lambda: 1)
        assert bool(made.param_groups[0]["fused"]) != scaled


def test_a_run_without_an_update_at_the_full_learning_rate_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Update k of the warm-up, from 0, has k / ``warmup_steps`` of the rate."""
    for updates, warns in ((4, True), (5, False)):
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 1e-3}]
        optimization = Optimization(schedule="constant_with_warmup", warmup_steps=4)
        made = optimization.configured(groups, False, lambda updates=updates: updates)
        scheduler = made["lr_scheduler"]["scheduler"]
        rates = []
        for _ in range(updates):
            rates += scheduler.get_last_lr()
            made["optimizer"].step()
            scheduler.step()
        assert (max(rates) < 1e-3) == warns
        assert ("warmup_steps is 4 and the run has 4 updates" in caplog.text) == warns
        caplog.clear()


def test_one_rank_warns_of_the_warm_up(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 1e-3}]
    Optimization(schedule="constant_with_warmup", warmup_steps=4).configured(groups, False, lambda: 4)
    assert not logged_here(caplog)
