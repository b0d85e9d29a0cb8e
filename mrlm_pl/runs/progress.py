"""The console of a run: a live display in a terminal, one line per iteration elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from mrlm_pl.data import RolloutDataModule
from mrlm_pl.trainer.bounds import batches_in_all

_LINES = 50
"""Lines that a run without collections prints at most where there is no terminal."""


class RunProgress(ProgressBar):
    """Shows how far ``fit`` is, with the metrics that are logged with ``prog_bar=True`` under their whole names.

    The unit is the iteration for a rollout data module and the batch for any other. A terminal gets a live display;
    a file, a pipe and a notebook get one line per iteration, or about 50 lines for a run over batches.

    Args:
        live: whether to draw the live display; None draws it on a terminal.
    """

    def __init__(self, live: bool | None = None) -> None:
        super().__init__()
        self.live = live
        self._enabled = True
        self._display: Live | None = None
        self._bar: Progress | None = None
        self._began, self._first = 0.0, 0

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show progress again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the display at the position of a resumed run."""
        self._began, self._first = time.monotonic(), self._done(trainer)
        console = Console()
        live = self.live if self.live is not None else console.is_terminal and not console.is_jupyter
        if not self._enabled or not live:
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        self._bar.add_task(self._unit(trainer), total=self._total(trainer), completed=self._first)
        self._display = Live(self._bar, console=console, refresh_per_second=4)
        self._display.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Update the display, or print a line when an iteration is complete."""
        if not self._enabled or not self._complete(trainer):
            return
        done, total = self._done(trainer), self._total(trainer)
        metrics = trainer.progress_bar_metrics
        if self._display is not None and self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
            self._display.update(Group(self._bar, Text(_metric_line(metrics))))
        elif self._due(trainer, done, total):
            seconds = time.monotonic() - self._began
            print(_line(self._unit(trainer), done, total, metrics, seconds, done - self._first), flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the display; its last state stays on the screen."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the display, so that the error is printed below it."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the display."""
        self._stop()

    def print(self, *values: Any, **options: Any) -> None:
        """Print above the live display."""
        if self._enabled:
            print(*values, file=sys.stdout, **{key: value for key, value in options.items() if key in ("sep", "end")})

    def _stop(self) -> None:
        display, self._display, self._bar = self._display, None, None
        if display is not None:
            display.stop()

    def _unit(self, trainer: Trainer) -> str:
        return "iteration" if _rollout(trainer) else "batch"

    def _complete(self, trainer: Trainer) -> bool:
        data = _rollout(trainer)
        return data is None or data.stream.position == 0

    def _done(self, trainer: Trainer) -> int:
        """Iterations, or batches over all epochs, that are complete."""
        data = _rollout(trainer)
        return data.stream.iteration if data else trainer.fit_loop.epoch_loop.total_batch_idx + 1

    def _total(self, trainer: Trainer) -> int | None:
        """How many of them there will be, or None where the trainer has no bound that tells."""
        data = _rollout(trainer)
        total = batches_in_all(trainer) / (data.stream.cut.pieces if data else 1)
        return None if math.isinf(total) else math.ceil(total)

    def _due(self, trainer: Trainer, done: int, total: int | None) -> bool:
        if _rollout(trainer):
            return True
        every = max(1, -(-total // _LINES)) if total else 10
        return done % every == 0 or done == total


def _rollout(trainer: Trainer) -> RolloutDataModule | None:
    data = trainer.datamodule  # type: ignore[attr-defined]
    return data if isinstance(data, RolloutDataModule) else None


def _metric_line(metrics: Mapping[str, float]) -> str:
    """Return the metrics as text.

    >>> _metric_line({"rollout/reward": 0.69921, "rollout/tokens_per_second": 3531.8})
    'rollout/reward 0.699  rollout/tokens_per_second 3532'
    """
    return "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.001 and value else f"{value:.3f}"


def _line(unit: str, done: int, total: int | None, metrics: Mapping[str, float], seconds: float, of: int) -> str:
    """Return one line of progress.

    >>> _line("iteration", 3, 120, {"rollout/reward": 0.5}, 6.0, 3)
    'iteration   3/120  rollout/reward 0.500  0:06 elapsed, 3:54 left'
    """
    count = f"{done:>{len(str(total))}}/{total}" if total else str(done)
    left = f", {_clock(seconds / of * (total - done))} left" if total and of else ""
    return "  ".join(
        part for part in (f"{unit} {count}", _metric_line(metrics), f"{_clock(seconds)} elapsed{left}") if part
    )


def _clock(seconds: float) -> str:
    """Return minutes and seconds, with hours where there are any.

    >>> _clock(65.2), _clock(3700)
    ('1:05', '1:01:40')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
