"""seccomp: the table of system calls as a filter program for the kernel."""

from __future__ import annotations

import ctypes
import errno
import itertools
import struct

from mrlm_pl.sandbox.inside.syscalls import MACHINE, PR_SET_NO_NEW_PRIVS, prctl
from mrlm_pl.sandbox.inside.system_calls import UNKNOWN, Filter, Outcome, outcomes

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # offsets in the kernel's `struct seccomp_data`
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def program(allowed: Filter) -> list[bytes]:
    """Instructions of the kernel's filter machine.

    Raises:
        OSError: the numbers of this machine are not known.
    """
    table = outcomes(allowed)
    made = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_JUMP_EQUAL, _ARCHITECTURES[MACHINE], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
    ]
    for number, outcome in table.items():
        if outcome.checks:
            block = _checked(outcome)
            made += [_step(_JUMP_EQUAL, number, 0, len(block)), *block]
    # The rest in ascending order, each run of equal answers as "below its end: this answer".
    answers = [_answer(table.get(number, UNKNOWN)) for number in range(max(table) + 1)]
    end = 0
    for answer, run in itertools.groupby(answers):
        end += len(list(run))
        made += [_step(_JUMP_AT_LEAST, end, 1, 0), _step(_RETURN, answer)]
    return [*made, _step(_RETURN, _ERRNO | errno.ENOSYS)]


def install(allowed: Filter) -> None:
    """Put the filter on this process and all that it starts, for good.

    Raises:
        OSError: the kernel refuses.
    """
    steps = program(allowed)
    raw = b"".join(steps)
    buffer = ctypes.create_string_buffer(raw, len(raw))
    header = _Program(len(steps), ctypes.cast(buffer, ctypes.c_void_p))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def _checked(outcome: Outcome) -> list[bytes]:
    """Steps that test the arguments and return the answer."""
    made = []
    for check in outcome.checks:
        made += [_step(_LOAD, _ARGUMENTS_AT + 8 * check.argument + 4 * check.word), _step(_AND, check.mask)]
        left = len(check.values)
        made += [_step(_JUMP_EQUAL, value, left - place, 0) for place, value in enumerate(check.values)]
        made.append(_step(_RETURN, _answer(outcome)))
    return [*made, _step(_RETURN, _ALLOW)]


def _answer(outcome: Outcome) -> int:
    return _ALLOW if outcome.error is None else _ERRNO | outcome.error


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
