"""SIGTERM while episodes are collected."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException


@contextmanager
def ended_by_sigterm(trainer: Trainer) -> Iterator[None]:
    """In this block SIGTERM ends the run of one process at once, as Ctrl-C does; the trainer waits for the next batch.

    A collection may take longer than the time that a cluster leaves a process to end. Several processes do wait for the
    batch, since one that leaves the others in the middle of a collection would let them wait for it.

    Raises:
        SIGTERMException: the signal came, in the block or shortly before.
    """
    theirs = signal.getsignal(signal.SIGTERM)
    alone = trainer.world_size == 1 and threading.current_thread() is threading.main_thread()
    if not alone or not callable(theirs):  # in other threads the trainer has no handler either
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
