"""The work of a locked-down child: loads a program, calls its functions, runs lines of Python or a shell.

Nothing here judges. It answers requests with values; whatever a candidate does to this process, it can only answer.
"""

from __future__ import annotations

import ast
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from mrlm_pl.sandbox.inside.channel import Channel
from mrlm_pl.sandbox.inside.files import pack, unpack
from mrlm_pl.sandbox.inside.grader import grade
from mrlm_pl.sandbox.inside.program import Program
from mrlm_pl.sandbox.inside.unit_tests import grade_unit_tests
from mrlm_pl.sandbox.wall import landlock
from mrlm_pl.sandbox.wall.confinement import SHELL_OPEN_FILES

MAX_ERROR_CHARACTERS = 2_000
SHELL = "/bin/bash"
SHELL_TIMED_OUT = 124
"""Status of a script that was ended for its time, as ``timeout`` reports it."""

CANNOT_START = 126


def serve(requests: int, replies: int) -> None:
    """Answer requests until the channel is closed."""
    channel = Channel(requests, replies)
    program = Program()
    session: dict[str, Any] = {"__name__": "__main__"}
    operations: dict[str, Callable[[dict[str, Any]], Any]] = {
        "load": program.load,
        "call": program.call,
        "use": program.use,
        "run": lambda request: _run(request["source"], session),
        "shell": _shell,
        "stop": lambda request: _stop_others(),
        "pack": lambda request: pack(request["root"]),
        "unpack": lambda request: unpack(request["root"], request["text"]),
        "grade": partial(grade, channel),
        "grade_unit_tests": partial(grade_unit_tests, channel),
    }
    while True:
        request = channel.receive()
        try:
            reply = {"ok": operations[request["operation"]](request)}
        except BaseException as error:  # whatever a program raises, also sys.exit, is an answer
            reply = {"error": _describe_error(error), "kind": type(error).__name__}
        try:
            channel.send(reply, within_limit=True)
        except ValueError as error:  # too large: it fails this call, and not all that come after it
            channel.send({"error": _describe_error(error), "kind": "ValueError"})


def _run(source: str, session: dict[str, Any]) -> None:
    """Execute lines in a lasting session, and print the value of a last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<input>", "exec"), session)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<input>", "eval"), session)
        if value is not None:
            print(repr(value))


def _shell(request: dict[str, Any]) -> int:
    """Return the exit status of a script; its background processes run until the cell ends."""
    deadline = time.monotonic() + request["seconds"]
    process = os.fork()
    if process == 0:
        if request["own_group"]:
            os.setpgid(0, 0)
        else:
            landlock.scope_signals()  # without a process namespace, this process must not be stopped
        os.closerange(3, SHELL_OPEN_FILES)
        try:
            os.chdir(request["folder"])
            os.execv(SHELL, [SHELL, "-c", request["script"]])
        except (OSError, ValueError) as error:  # too long, not to be encoded, or the folder is gone
            os.write(2, f"bash: {error}\n".encode("ascii", "backslashreplace"))
        os._exit(CANNOT_START)
    pause = 0.001
    ended_process, wait_status = os.waitpid(process, os.WNOHANG)
    while not ended_process and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
        ended_process, wait_status = os.waitpid(process, os.WNOHANG)
    if not ended_process:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL) if request["own_group"] else os.kill(process, signal.SIGKILL)
    with suppress(ChildProcessError):  # those that were left to this process, which is the first one
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return os.waitstatus_to_exitcode(wait_status) if ended_process else SHELL_TIMED_OUT


def _stop_others() -> None:
    """Stop, in a process namespace, all that scripts left running, for good: what runs later is out of its sight."""
    with suppress(ProcessLookupError):  # there is nothing
        os.kill(-1, signal.SIGSTOP)


def _describe_error(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(error)).strip()[-MAX_ERROR_CHARACTERS:]
    except BaseException:  # its own __str__ may raise anything
        return type(error).__name__
