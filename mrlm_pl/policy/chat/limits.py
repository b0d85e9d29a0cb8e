"""Limits of foreign chat templates: a deadline for renderings, and no operations that ignore it.

Jinja's sandbox protects the system, but lets a template compute forever: it bounds ``range``, but loops nest. The
deadline takes effect between two operations: the product of huge numbers or the comparison of deeply nested lists can
still block the process.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jinja2

from mrlm_pl.errors import PolicyError

RENDER_SECONDS = 10.0
"""Maximum CPU time in seconds to render one conversation, which usually takes less than a millisecond."""

_WATCH_SECONDS = 0.1
_UNINTERRUPTED = {"urlize": "the filter `urlize`", "**": "the operator `**`"}


class EndlessTemplateError(PolicyError):
    """A chat template that does not end, or might not."""


class _Interruption(BaseException):
    """Raised in the rendering thread."""


def check_template(template: str, name: str) -> None:
    """Reject a power and the filter ``urlize``, which can compute forever in a single step of the interpreter.

    Args:
        template: template in Jinja; other text fails when it is rendered.
        name: name of the model, for the message.

    Raises:
        EndlessTemplateError: the template has one of them.

    >>> check_template("{{ 10 ** 10 ** 10 }}", "m")
    Traceback (most recent call last):
    mrlm_pl.policy.chat.limits.EndlessTemplateError: the chat template of 'm' uses the operator `**`; ...
    """
    try:
        tokens = [(kind, value) for _, kind, value in jinja2.Environment().lex(template) if kind != "whitespace"]
    except jinja2.TemplateSyntaxError:
        return
    for (_, before), (kind, value) in itertools.pairwise(tokens):
        unpacking = value == "**" and before in ("(", ",")
        if kind in ("operator", "name") and value in _UNINTERRUPTED and not unpacking:
            raise EndlessTemplateError(
                f"the chat template of {name!r} uses {_UNINTERRUPTED[value]}; it could compute forever, so give the "
                "policy another `chat_template`"
            )


@contextmanager
def deadline(name: str) -> Iterator[None]:
    """Interrupt the calling thread in the block after :data:`RENDER_SECONDS` of its CPU time.

    If the system does not tell the time of a thread (macOS), it is the time that passes.

    Args:
        name: name of the model, for the message.

    Raises:
        EndlessTemplateError: the thread was interrupted.
    """
    thread, watch = threading.get_ident(), _watch()
    try:
        watch.begin(thread, RENDER_SECONDS)
        try:
            yield
        finally:
            watch.end(thread)
    except _Interruption:
        raise EndlessTemplateError(
            f"the chat template of {name!r} was not rendered within {RENDER_SECONDS:g} s of CPU time; give the "
            "policy another `chat_template`"
        ) from None


class _Watch:
    """A thread that interrupts others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, tuple[Callable[[], float], float]] = {}
        threading.Thread(target=self._run, name="template-watch", daemon=True).start()

    def begin(self, thread: int, seconds: float) -> None:
        """Interrupt a thread after these seconds of its CPU time."""
        clock: Callable[[], float] = time.monotonic
        if hasattr(time, "pthread_getcpuclockid"):  # a busy machine delays a rendering without being its fault
            clock = functools.partial(time.clock_gettime, time.pthread_getcpuclockid(thread))
        self._ends[thread] = clock, clock() + seconds

    def end(self, thread: int) -> None:
        """Do not interrupt the thread any more."""
        with self._lock:
            if self._ends.pop(thread, None) is None:  # a late interruption is revoked
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def _run(self) -> None:
        while True:
            time.sleep(_WATCH_SECONDS)
            with self._lock:
                for thread in [thread for thread, (clock, end) in list(self._ends.items()) if end < clock()]:
                    del self._ends[thread]
                    error = ctypes.py_object(_Interruption)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


@functools.cache
def _watch() -> _Watch:
    """Return the watch of this process."""
    return _Watch()


# A forked process has none of its parent's other threads.
os.register_at_fork(after_in_child=_watch.cache_clear)
