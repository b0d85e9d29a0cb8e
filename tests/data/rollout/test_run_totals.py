from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.data.rollout import history
from mrlm_pl.data.rollout.history import RunTotals
from tests.support.runs.short_fits import make


def test_totals_go_on_from_a_checkpoint() -> None:
    totals = RunTotals()
    totals.start()
    totals.after(1, {"episodes": 8.0, "failed_episodes": 1.0, "decisions": 16.0, "generated_tokens": 100.0})
    resumed = RunTotals()
    resumed.load({**totals.state(), "seconds": 1000.0})
    found = resumed.after(2, {"episodes": 8.0, "failed_episodes": 2.0, "decisions": 17.0, "generated_tokens": 50.0})
    seconds = found.pop("progress/seconds")
    assert found == {
        "progress/iteration": 2.0,
        "progress/episodes": 16.0,
        "progress/failed_episodes": 3.0,
        "progress/decisions": 33.0,
        "progress/generated_tokens": 150.0,
    }
    assert 1000.0 <= seconds < 1060.0


def test_a_checkpoint_without_totals_starts_at_nothing() -> None:
    totals = RunTotals()
    totals.load(None)
    played = dict.fromkeys(("episodes", "failed_episodes", "decisions", "generated_tokens"), 1.0)
    assert totals.after(5, played)["progress/episodes"] == 1.0


def test_the_seconds_of_several_fits_add_up_without_the_time_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(history, "time", SimpleNamespace(monotonic=lambda: now[0]))
    totals = RunTotals()
    now[0] = 200.0  # a validation before the first fit
    totals.stop()
    for seconds in (3.0, 4.0):
        totals.start()
        now[0] += seconds
        totals.stop()
        now[0] += 1000.0
    totals.stop()
    assert totals.state()["seconds"] == 7.0


def test_a_second_fit_continues_the_clock(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1)
    totals = data.collection.totals
    totals.load({"seconds": 1000.0})
    for _ in range(2):
        trainer = quiet_trainer()
        trainer.fit(algorithm, data)
        before = totals.state()["seconds"]
        totals.load({"seconds": 2000.0})
        assert before > float(trainer.callback_metrics["progress/seconds"])
    assert before > 2000.0
