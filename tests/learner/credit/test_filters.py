"""Filters of advantages over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrlm_pl.learner.credit import filters
from mrlm_pl.learner.metrics import Metrics


def test_the_threshold_of_a_policy_with_rows_on_another_rank_alone_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank writes the metrics."""
    other = {"main": torch.tensor([0.0, 1.0, 2.0, 3.0])}
    monkeypatch.setattr(filters, "gather_ranks", lambda trainer, own: [own, other])
    metrics: Any = Metrics(["main"])
    filters.keep_top_entropy(metrics, {}, {}, 0.25)
    assert metrics.rollout == {"train/entropy_threshold": 2.25}  # between 2 and 3
