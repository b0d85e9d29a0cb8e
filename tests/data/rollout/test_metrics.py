from __future__ import annotations

from mrlm_pl.data.rollout.metrics import RunTotals


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
