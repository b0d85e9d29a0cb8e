"""seccomp: the table of system calls as a filter program for the kernel."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import struct

from mrlm_pl.sandbox.wall.kernel import MACHINE, PR_SET_NO_NEW_PRIVS, prctl
from mrlm_pl.sandbox.wall.system_calls import ITSELF, UNKNOWN, Filter, Outcome, outcomes

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # offsets in the kernel's `struct seccomp_data`
_STEP_BYTES = struct.calcsize("HBBI")
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@functools.cache
def program(allowed: Filter) -> bytes:
    """Return instructions of the kernel's filter machine, with ``ITSELF`` for the process that installs them.

    Raises:
        OSError: the numbers of this machine are not known.
    """
    table = outcomes(allowed)
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[MACHINE]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    for number, outcome in table.items():
        if outcome.checks:
            block = _argument_steps(outcome)
            steps += [(_JUMP_EQUAL, 0, len(block), number), *block]
    # The rest in ascending order, each run of equal answers as "below its end: this answer".
    answers = [_return_value(table.get(number, UNKNOWN)) for number in range(max(table) + 1)]
    end = 0
    for answer, run in itertools.groupby(answers):
        end += len(list(run))
        steps += [(_JUMP_AT_LEAST, 1, 0, end), (_RETURN, 0, 0, answer)]
    steps.append((_RETURN, 0, 0, _return_value(UNKNOWN)))
    return struct.pack("HBBI" * len(steps), *itertools.chain.from_iterable(steps))


def install(allowed: Filter) -> None:
    """Put the filter on this process and all that it starts, for good.

    Raises:
        OSError: the kernel refuses.
    """
    steps = program(allowed).replace(struct.pack("I", ITSELF), struct.pack("I", os.getpid()))
    buffer = ctypes.create_string_buffer(steps, len(steps))
    header = _Program(len(steps) // _STEP_BYTES, ctypes.cast(buffer, ctypes.c_void_p))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def _argument_steps(outcome: Outcome) -> list[tuple[int, int, int, int]]:
    """Return steps that test the arguments: code, steps to skip if true and if false, and value."""
    steps = []
    for check in outcome.checks:
        steps += [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * check.argument + 4 * check.word), (_AND, 0, 0, check.mask)]
        num_values = len(check.values)
        steps += [(_JUMP_EQUAL, num_values - index, 0, value) for index, value in enumerate(check.values)]
        steps.append((_RETURN, 0, 0, _return_value(outcome)))
    return [*steps, (_RETURN, 0, 0, _ALLOW)]


def _return_value(outcome: Outcome) -> int:
    return _ALLOW if outcome.error is None else _ERRNO | outcome.error
