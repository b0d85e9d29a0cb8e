"""The collection of a fit."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mrlm_pl.data.rollout.collection import Collection
from mrlm_pl.data.rollout.collectors.asynchronous import AsyncOptions
from mrlm_pl.engines import Sampling


def test_a_signal_while_the_collector_takes_over_groups_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SimpleNamespace(world_size=1, received_sigterm=False, global_step=0)
    parts: Any = SimpleNamespace(plan_until=lambda *_: None, stale=None, groups=1)
    collection = Collection(parts, parts, parts, Sampling(), None, 1, AsyncOptions(), None)
    collection.trainer, collection.learner = trainer, SimpleNamespace(metrics=SimpleNamespace(tokens=None))  # type: ignore[assignment]
    holder: Any = object()

    def take_over(self: Collection) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return holder

    monkeypatch.setattr(Collection, "groups", range(1))
    monkeypatch.setattr(Collection, "_async_collector", take_over)
    before = signal.signal(signal.SIGTERM, lambda *_: vars(trainer).update(received_sigterm=True))
    try:
        with pytest.raises(SIGTERMException):
            collection.collect(0, 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert collection.collector is holder, "a checkpoint has its groups"
