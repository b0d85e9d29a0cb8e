"""An event loop in a thread of its own, so that its connections live on between calls and the caller can compute."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""What was cancelled has to end; who waits for it at the end of a run waits no longer than this."""


class EventLoopThread:
    """A running event loop; the thread is a daemon."""

    def __init__(self) -> None:
        self._loop, self._closed = asyncio.new_event_loop(), False
        self._thread = threading.Thread(target=self._loop.run_forever, name="mrlm-event-loop", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """The future of a coroutine that now runs on the loop; cancelling it cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def cancel_all(self) -> None:
        """Cancel what runs, and wait for a while until it has ended; a warning says what has not."""
        ending = self.submit(_cancel_others())
        try:
            left = ending.result(2 * END_SECONDS)
        except LateError:
            ending.cancel()
            left = ["whatever blocks the event loop"]
        if left:
            logger.warning("cancelled, but not ended within %g s: %s", END_SECONDS, ", ".join(left))

    def close(self) -> None:
        """Cancel what still runs, then end the thread, which is left where it does not end; may be called twice."""
        if self.closed:
            return
        self._closed = True
        self.cancel_all()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> list[str]:
    """Names of the coroutines that do not end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if not others:
        return []
    ended, running = await asyncio.wait(others, timeout=END_SECONDS)
    for task in ended:
        if not task.cancelled():
            task.exception()  # whoever waited for it has been told, or has gone
    return sorted(str(getattr(task.get_coro(), "__qualname__", task)) for task in running)
