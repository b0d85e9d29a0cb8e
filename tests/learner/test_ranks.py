"""Sums over the ranks of a run."""

from __future__ import annotations

from typing import Any

import pytest

from mrlm_pl.advantages import Moments
from mrlm_pl.learner import ranks


def test_the_values_of_every_key_are_added_up_also_where_a_rank_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 1, 3, 3 has mean 2 and squared deviations 4."""
    shares: list[dict[str, Any]] = [
        {"moments": Moments(2, 1.0, 0.0), "episodes": 3},
        {"episodes": 4, "other": 0.5},
        {"moments": Moments(2, 3.0, 0.0)},
    ]
    monkeypatch.setattr(ranks, "gather_ranks", lambda trainer, own: shares)
    assert ranks.sum_over_ranks(None, shares[0]) == {"moments": Moments(4, 2.0, 4.0), "episodes": 7, "other": 0.5}
