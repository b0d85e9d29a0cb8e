"""The table of a run's metrics."""

from __future__ import annotations

from pathlib import Path

from mrlm_pl.runs.metrics_file import MetricsFile


def test_the_draft_that_a_kill_left_is_gone_at_the_end_of_the_resumed_run(tmp_path: Path) -> None:
    table = MetricsFile(tmp_path)
    table.log_metrics({"train/loss": 0.5}, step=0)
    (tmp_path / "metrics.csv.part").write_text("step,tr")
    resumed = MetricsFile(tmp_path)  # from the checkpoint of the last step, so that it logs no row
    resumed.finalize("success")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,train/loss", "0,0.5"]
