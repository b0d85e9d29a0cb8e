"""Metrics of a run: a table in the run folder, and TensorBoard."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from mrlm_pl.durable_files import draft_of, replacing
from mrlm_pl.errors import DataError, first_line, storing
from mrlm_pl.runs.folder import TENSORBOARD

_log = logging.getLogger(__name__)


class MetricsFile(Logger):
    """Write all numbers to ``RUN/metrics.csv``, one row for each call; a resumed run continues the file.

    The column ``step`` counts updates from 0.

    Rows of the earlier part that the resumed run repeats are dropped, so that every step is logged once.

    Args:
        folder: run folder.

    Attributes:
        rows: number of rows in the file; before the first row of a resumed run, the number in its checkpoint.
    """

    name, version = "metrics", ""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self._columns: list[str] = []
        self._started = False
        self._resumed_at = self.rows = 0

    def resume_at(self, step: int, rows: int) -> None:
        """Keep the first ``rows`` rows, and later ones at earlier steps than this, unless one is logged again."""
        self._resumed_at, self.rows = step, rows

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters; ``RUN/config.yaml`` holds all of them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add a row.

        Raises:
            DataError: the file of the earlier part cannot be read.
        """
        with storing(f"the metrics of {str(self.path)!r}"):
            self._log({"step": step or 0, **metrics})

    def _log(self, row: dict[str, Any]) -> None:
        rows = None if self._started else self._earlier_rows(row)
        new = row.keys() - self._columns
        if new or rows is not None:
            rows = self._read() if rows is None else rows
            self._columns = ["step", *sorted({*self._columns, *new} - {"step"})]
            with replacing(self.path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(rows)
            self._started, self.rows = True, len(rows)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)
        self.rows += 1

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Remove the draft that a kill left where the resumed run had no step to log."""
        draft_of(self.path).unlink(missing_ok=True)

    def _read(self) -> list[dict[str, str]]:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                table = csv.DictReader(file)
                if "step" not in (table.fieldnames or ["step"]):
                    raise ValueError("it has no column 'step'")
                return list(table)
        except (ValueError, csv.Error) as error:
            remedy = "restore it from a copy, or move it elsewhere, then resume the run"
            raise DataError(f"{self.path} is not a table of metrics: {error}; {remedy}") from error

    def _earlier_rows(self, new: Mapping[str, Any]) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        # A row that a kill has truncated lacks its step or its last columns.
        rows = [row for row in self._read() if (row.get("step") or "").isdigit() and None not in row.values()]
        saved, later = rows[: self.rows], rows[self.rows :]
        later = [row for row in later if int(row["step"]) < max(new["step"], self._resumed_at)]
        again = new.keys() - {"step", "epoch"}  # a validation that had been logged
        rows = [*saved, *(row for row in later if int(row["step"]) < new["step"] or not any(map(row.get, again)))]
        self._columns = list(rows[0]) if rows else []
        return rows


class RunTensorBoard(TensorBoardLogger):
    """Write all numbers for TensorBoard to ``RUN/tensorboard``; steps that a resumed run repeats replace the earlier.

    Args:
        folder: run folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, name=TENSORBOARD, version="", default_hp_metric=False)
        self._resumes = any(Path(self.log_dir).glob("events.*"))
        self._resumed_at, self.rows = -1, 0  # -1 is before the first update

    def resume_at(self, step: int, rows: int) -> None:
        """Keep the events of earlier steps than this; they are not counted as rows."""
        self._resumed_at = step or -1

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._resumes:
            self.experiment.purge_step = max(step or 0, self._resumed_at)  # of the file that the writer opens next
            self.experiment.close()
            self._resumes = False
        super().log_metrics(metrics, step)


def outlive(logger: Logger) -> Logger:
    """Return the logger with failures that do not end a run: the first failure of each of its methods is a warning.

    A server of curves may be away for a while, or its folder deleted; ``metrics.csv`` is the run's own. A method that
    was set on the logger itself, and not in its class, stays as it is.
    """
    for name in ("log_metrics", "save", "after_save_checkpoint", "finalize"):
        if getattr(vars(logger).get(name, partial(_call)), "func", None) is _call:  # none, or that of an earlier run
            vars(logger)[name] = partial(_call, logger, name, [])
    return logger


def _call(logger: Logger, name: str, told: list[str], *arguments: Any, **options: Any) -> None:
    try:
        getattr(type(logger), name)(logger, *arguments, **options)
    except Exception as error:
        # Lightning's for TensorBoard takes every failure for a wrong number.
        cause = error.__cause__ if isinstance(error, ValueError) and error.__cause__ else error
        if not told:
            told.append(f"{type(logger).__name__}.{name} has failed with {type(cause).__name__}: {first_line(cause)}")
            _log.warning("trainer.logger: %s; the run continues, and writes its metrics.csv", *told)
