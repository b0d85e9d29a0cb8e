"""Orderly ends at SIGTERM, which clusters send some seconds before they kill a process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException


class EndTogether(Callback):
    """End a run of several processes after the current update when any of them has received SIGTERM.

    The processes agree after each batch, validation and epoch. Lightning's own handler, which this one replaces,
    broadcasts immediately, in the middle of other exchanges.
    """

    def __init__(self) -> None:
        self.received = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace the trainer's handler before the trainer registers it."""
        self.received = False
        if trainer.world_size > 1 and stage == "fit":
            trainer._signal_connector._sigterm_notifier_fn = self._note_sigterm  # type: ignore[assignment]

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any, **options: Any) -> None:
        """End all processes, or none."""
        several = trainer.state.fn == TrainerFn.FITTING and trainer.world_size > 1
        if several and trainer.strategy.reduce_boolean_decision(self.received, all=False):
            self.received = True  # if an update is under way, after its last batch
            if not inside_update(trainer):
                trainer._signal_connector.received_sigterm = True  # the trainer checks it next

    on_validation_end = on_train_epoch_end = on_train_batch_end

    def _note_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.received = True


def ends_where_others_do(trainer: Trainer) -> bool:
    """Return whether all processes end after the same update."""
    if trainer.world_size == 1:
        return True
    together = any(isinstance(item, EndTogether) for item in trainer.callbacks)  # type: ignore[attr-defined]
    return together and trainer.state.fn == TrainerFn.FITTING


def inside_update(trainer: Trainer) -> bool:
    """Return whether a batch is a micro-batch before the last one of its update."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return ready % trainer.accumulate_grad_batches != 0 and ready != trainer.num_training_batches


@contextmanager
def ended_by_sigterm(trainer: Trainer, *, apart: bool = False) -> Iterator[None]:
    """Let SIGTERM end a single-process run immediately within the block; the trainer would wait for the next batch.

    A rollout may take longer than a cluster's grace period. Several processes end together, after the batch.

    Args:
        trainer: trainer of the run.
        apart: whether SIGTERM also interrupts one of several processes, which informs the others at their next
            exchange.

    Raises:
        SIGTERMException: the signal arrived in the block or shortly before, or the processes agreed to end.
    """
    callbacks: Sequence[Callback] = trainer.callbacks if apart else ()  # type: ignore[attr-defined]
    alone, together = trainer.world_size == 1, [item for item in callbacks if isinstance(item, EndTogether)]
    if alone or together:
        with _interrupted_by_sigterm(lambda: trainer.received_sigterm if alone else together[0].received):
            yield
    elif trainer.received_sigterm and ends_where_others_do(trainer):
        raise SIGTERMException
    else:
        yield


@contextmanager
def _interrupted_by_sigterm(received: Callable[[], bool]) -> Iterator[None]:
    """In this block SIGTERM raises after the handler that was there; also if it has been received before.

    Only the main thread has handlers.
    """
    former_handler: Any = signal.getsignal(signal.SIGTERM)
    has_handler = threading.current_thread() is threading.main_thread() and callable(former_handler)

    def end(number: int, frame: FrameType | None) -> None:
        former_handler(number, frame)
        raise SIGTERMException

    if has_handler:
        signal.signal(signal.SIGTERM, end)
    try:
        if received():
            raise SIGTERMException
        yield
    finally:
        if has_handler:
            signal.signal(signal.SIGTERM, former_handler)
