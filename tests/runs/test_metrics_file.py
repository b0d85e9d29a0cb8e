"""The table of a run's metrics, and the curves of TensorBoard."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from mrlm_pl.errors import DataError, StorageError
from mrlm_pl.runs.metrics_file import MetricsFile, RunTensorBoard, outlive


@pytest.fixture(autouse=True)
def first_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number event files from 0: those of one second are read by their names' order, in which 10 precedes 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_draft_that_a_kill_left_is_gone_at_the_end_of_the_resumed_run(tmp_path: Path) -> None:
    table = MetricsFile(tmp_path)
    table.log_metrics({"train/loss": 0.5}, step=0)
    (tmp_path / "metrics.csv.part").write_text("step,tr")
    resumed = MetricsFile(tmp_path)  # from the checkpoint of the last step, so that it logs no row
    resumed.finalize("success")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,train/loss", "0,0.5"]


def test_curves_have_each_step_once_after_a_kill(tmp_path: Path) -> None:
    for first, loss in ((0, 0.5), (2, 0.25)):  # the second run starts from a checkpoint before the last steps
        curves = RunTensorBoard(tmp_path)
        curves.save()  # as Lightning does before it reads the checkpoint
        for step in range(first, first + 4):
            curves.log_metrics({"train/loss": loss}, step)
        curves.experiment.flush()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(item.step, item.value) for item in found] == [(0, 0.5), (1, 0.5), *((step, 0.25) for step in range(2, 6))]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_run_that_begins_again_repeats_the_evaluation_before_its_first_update(resumes: bool, tmp_path: Path) -> None:
    for reward in (0.5, 0.25):
        curves = RunTensorBoard(tmp_path)
        if resumes:
            curves.resume_at(0, 0)
        for step in (-1, 0):
            curves.log_metrics({"held_out/echo/reward": reward}, step)
        curves.experiment.flush()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("held_out/echo/reward")
    assert [(item.step, item.value) for item in found] == [(-1, 0.25), (0, 0.25)]


@pytest.mark.parametrize("saved", [1, 2])
def test_a_validation_that_is_played_again_replaces_its_row(saved: int, tmp_path: Path) -> None:
    """The row of the update may come after its checkpoint."""
    table = MetricsFile(tmp_path)
    for metrics in ({"val/reward": 0.0}, {"train/loss": 0.5}):  # a validation between the micro-batches of the update
        table.log_metrics(metrics | {"epoch": 0}, step=1)
    table.log_metrics({"val/reward": 1.0, "epoch": 0}, step=1)
    resumed = MetricsFile(tmp_path)  # from the checkpoint before the validation
    resumed.resume_at(2, saved)
    resumed.log_metrics({"val/reward": 2.0, "epoch": 0}, step=1)
    resumed.log_metrics({"train/loss": 0.25, "epoch": 0}, step=2)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert rows == ["step,epoch,train/loss,val/reward", "1,0,,0.0", "1,0,0.5,", "1,0,,2.0", "2,0,0.25,"]
    assert resumed.rows == 4


def test_an_empty_table_begins_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").touch()
    MetricsFile(tmp_path).log_metrics({"train/loss": 0.5}, step=3)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,train/loss", "3,0.5"]


@pytest.mark.parametrize("content", [b"step,loss\n0,\xff\xfe\n", b"step,loss\n" + b"1" * 200_000, b"\0" * 9])
def test_a_table_of_binary_content_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"metrics\.csv is not a table of metrics: .*; restore it .*, or move it"):
        MetricsFile(tmp_path).log_metrics({"train/loss": 0.5}, step=0)
    assert (tmp_path / "metrics.csv").read_bytes() == content


def test_metrics_that_cannot_be_written_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = MetricsFile(tmp_path)
    monkeypatch.setattr(Path, "open", full)
    fault = f"the metrics of '{tmp_path}/metrics.csv' cannot be written: No space left on device; free"
    with pytest.raises(StorageError, match=fault):
        table.log_metrics({"train/loss": 0.5}, 0)


def test_curves_that_cannot_be_written_are_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    curves = RunTensorBoard(tmp_path)
    outlive(curves)
    monkeypatch.setattr(curves.experiment, "add_scalar", full)
    for step in range(3):
        curves.log_metrics({"train/loss": 0.5}, step)
    (record,) = caplog.records
    assert record.getMessage() == (
        "trainer.logger: RunTensorBoard.log_metrics has failed with OSError: [Errno 28] No space left on device; the "
        "run continues, and writes its metrics.csv"
    )


def test_a_row_that_could_not_be_written_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = MetricsFile(tmp_path)
    table.log_metrics({"train/loss": 0.5}, 0)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(StorageError):
        table.log_metrics({"train/loss": 0.25}, 1)
    assert table.rows == 1


def test_a_method_that_was_set_on_a_logger_itself_is_called(tmp_path: Path) -> None:
    curves, logged = RunTensorBoard(tmp_path), list[Any]()
    vars(curves)["log_metrics"] = lambda metrics, step: logged.append((metrics, step))
    for _ in range(2):  # each run does so
        outlive(curves)
    curves.log_metrics({"train/loss": 0.5}, 3)
    assert logged == [({"train/loss": 0.5}, 3)]
