"""A quick run of self-play, and runs that a signal ends."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.runs import LastCheckpoint, MetricsFile, Trainer
from tests.support.environments.duel import make


@pytest.fixture
def duel(model_folder: Path) -> Any:
    """A factory of an algorithm, data and the callback, for a run of self-play."""
    return partial(make, str(model_folder))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs or continues a run; SIGTERM ends it when it plays held-out tasks the n-th time."""
    original = Players.play

    def fit(folder: Path, algorithm: Any, data: Any, callback: Callback, ended_in: int | None = None) -> None:
        plays = itertools.count(1)

        def play(players: Players, *arguments: Any) -> Any:
            if next(plays) == ended_in:
                signal.raise_signal(signal.SIGTERM)
            return original(players, *arguments)

        monkeypatch.setattr(Players, "play", play)
        trainer = Trainer(
            output=str(folder),
            resume=True,
            accelerator="cpu",
            logger=MetricsFile(folder),
            callbacks=[callback, LastCheckpoint()],
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        try:
            if ended_in is None:
                trainer.fit(algorithm, data)
            else:
                with pytest.raises(SystemExit):
                    trainer.fit(algorithm, data)
        finally:
            signal.signal(signal.SIGTERM, before)

    return fit
