"""Ctrl-C, SIGTERM and SIGHUP: the first shuts a command down cleanly, a Ctrl-C after a Ctrl-C ends it immediately."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class _EndError(KeyboardInterrupt):
    """A subclass, since after a KeyboardInterrupt in an import `python -m` ends by SIGINT, even if it was caught."""


class Interruption:
    """The signal that ends a command.

    Attributes:
        received: number of the signal; None before a signal.
        own: handler of SIGTERM that a script installed before the block, if any.
        raised: exception of that handler while a trainer ends its run cleanly; the end of the block raises it.
    """

    received: int | None = None
    own: Callable[[int, FrameType | None], Any]
    raised: BaseException | None = None

    @property
    def name(self) -> str:
        """Return the common name of the signal."""
        return _NAMES[signal.Signals(self.received or signal.SIGTERM)]

    @property
    def status(self) -> int:
        """Return the exit status by which a shell reports a process that the signal has ended."""
        return 128 + (self.received or signal.SIGTERM)

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: end the code in this block."""
        first, self.received = self.received is None, self.received or number
        has_handler = callable(handler := signal.getsignal(signal.SIGTERM)) and handler != self.end
        if number == signal.SIGTERM and has_handler:
            return  # a trainer's handler calls the one before it too
        next_handler = signal.default_int_handler if in_session() else signal.SIG_DFL
        signal.signal(number, next_handler if number == signal.SIGINT else signal.SIG_IGN)
        if number == signal.SIGHUP:
            _leave_terminal()
        elif number == signal.SIGINT:
            print("\nmrlm: Ctrl-C: shutting down; press it again to end immediately", file=sys.stderr, flush=True)
        if has_handler:
            signal.raise_signal(signal.SIGTERM)  # not a call of the handler: an event loop's does nothing itself
        elif first:  # schedulers send several, and a second would interrupt the end
            raise _EndError

    def call_own(self, number: int, frame: FrameType | None) -> None:
        """Call the script's handler of SIGTERM, which may raise, such as ``SystemExit``.

        A trainer's handler calls this one and ends the run; an error amid its work could leave a lock held, and one in
        a ``__del__`` is lost.
        """
        try:
            self.own(number, frame)
        except BaseException as raised:
            if signal.getsignal(signal.SIGTERM) == self.call_own:
                raise
            self.raised = raised


def in_session() -> bool:
    """Return whether this is a notebook or an interactive interpreter, whose variables outlive an interrupt."""
    return hasattr(sys, "ps1")


@contextmanager
def ending_in_order() -> Iterator[Interruption]:
    """In this block Ctrl-C and SIGHUP act as SIGTERM does: by its handler, without one as KeyboardInterrupt.

    A script's own handler of SIGTERM is called, and one that is installed within the block, as a trainer's, stays. A
    block within another one has its interruption.

    Raises:
        BaseException: of the script's handler, while a trainer ended its run.
    """
    outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    interruption = outer if isinstance(outer, Interruption) else Interruption()
    if threading.current_thread() is not threading.main_thread():  # only there signals arrive
        yield interruption
        return

    former_handlers = {number: signal.getsignal(number) for number in _NAMES}
    for number, handler in former_handlers.items():
        if number == signal.SIGTERM and callable(handler):
            if interruption is not outer:
                interruption.own = handler
                signal.signal(number, interruption.call_own)
        elif handler is not signal.SIG_IGN:  # a shell's background ignores Ctrl-C, `nohup` SIGHUP
            signal.signal(number, interruption.end)
    try:
        yield interruption
    finally:
        for number, handler in former_handlers.items():
            if handler is not None:  # an interrupted Lightning leaves its own
                signal.signal(number, handler)
        if interruption.raised is not None:
            raised, interruption.raised = interruption.raised, None
            raise raised


def _leave_terminal() -> None:
    """Discard all further output to a terminal that is gone."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        with suppress(OSError):  # it is closed
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
