"""SIGTERM, which clusters send some seconds before they end a process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException


class EndTogether(Callback):
    """Ends a run of several processes after the update in hand when SIGTERM has come to any of them.

    They agree on it after each batch, each validation and each epoch. Lightning's own handler, in whose place this one
    is, broadcasts as soon as the signal is there, whatever the processes exchange at that moment.
    """

    def __init__(self) -> None:
        self._received = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the place of the trainer's handler before the trainer registers it."""
        self._received = False
        if trainer.world_size > 1 and stage == "fit":
            trainer._signal_connector._sigterm_notifier_fn = self._note  # type: ignore[assignment]

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any, **options: Any) -> None:
        """End all processes, or none."""
        self._agree(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End all processes, or none."""
        self._agree(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End all processes, or none."""
        self._agree(trainer)

    def _agree(self, trainer: Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if (
            not fitting
            or trainer.world_size == 1
            or not trainer.strategy.reduce_boolean_decision(self._received, all=False)
        ):
            return
        self._received = True  # if an update is under way, after its last batch
        if not inside_update(trainer):
            trainer._signal_connector.received_sigterm = True  # for which the trainer looks next

    @property
    def received(self) -> bool:
        """Whether the signal has come to this process, or the processes have agreed to end."""
        return self._received

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True


def ends_where_others_do(trainer: Trainer) -> bool:
    """Whether SIGTERM finds all processes after the same update."""
    if trainer.world_size == 1:
        return True
    together = any(isinstance(item, EndTogether) for item in trainer.callbacks)  # type: ignore[attr-defined]
    return together and trainer.state.fn == TrainerFn.FITTING


def inside_update(trainer: Trainer) -> bool:
    """Whether a batch is not the last of those whose gradients make up an update."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return ready % trainer.accumulate_grad_batches != 0 and ready != trainer.num_training_batches


@contextmanager
def ended_by_sigterm(trainer: Trainer) -> Iterator[None]:
    """In this block SIGTERM ends the run of one process at once; the trainer waits for the next batch.

    A collection may take longer than a cluster waits before it kills. Several processes end together: in a collection
    through :func:`leaving_at_sigterm`, else after the batch.

    Raises:
        SIGTERMException: the signal came, in the block or shortly before, or several have agreed to end.
    """
    theirs = signal.getsignal(signal.SIGTERM)
    alone = trainer.world_size == 1 and threading.current_thread() is threading.main_thread()
    if not alone or not callable(theirs):  # in other threads the trainer has no handler either
        if trainer.received_sigterm and ends_where_others_do(trainer):
            raise SIGTERMException
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        theirs(number, frame)
        raise SIGTERMException

    signal.signal(signal.SIGTERM, end)
    try:
        if trainer.received_sigterm:
            raise SIGTERMException
        yield
    finally:
        signal.signal(signal.SIGTERM, theirs)


@contextmanager
def leaving_at_sigterm(trainer: Trainer) -> Iterator[None]:
    """In this block SIGTERM interrupts one of several processes, which then tells the others where they next meet.

    Raises:
        SIGTERMException: the signal came, in the block or before.
    """
    together = [item for item in trainer.callbacks if isinstance(item, EndTogether)]  # type: ignore[attr-defined]
    theirs = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    if trainer.world_size == 1 or not together or not main or not callable(theirs):
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        theirs(number, frame)
        raise SIGTERMException

    signal.signal(signal.SIGTERM, leave)
    try:
        if together[0].received:
            raise SIGTERMException
        yield
    finally:
        signal.signal(signal.SIGTERM, theirs)
