"""Landlock: limit a process's access to files, TCP and other processes, without privileges."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from mrlm_pl.sandbox.wall.kernel import PR_SET_NO_NEW_PRIVS, prctl, syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on x86-64 and aarch64
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK, _REFER, _TRUNCATE, _IOCTL = 1 << 6, 1 << 11, 1 << 13, 1 << 14, 1 << 15
_ALL_OF_FIRST_VERSION = (1 << 13) - 1
_RULE_PATH_BENEATH = 1
_BIND_TCP, _CONNECT_TCP = 1, 2
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL


def version() -> int:
    """Return the kernel's version of Landlock, 0 without Landlock."""
    try:
        return syscall(_CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict(read: Iterable[str], write: Iterable[str], execute: Iterable[str]) -> None:
    """Permanently deny access to TCP, outside sockets and processes, and all files but these.

    Args:
        read: files and folders that may be read.
        write: files and folders that may be read, written, made and removed in, but not executed.
        execute: files and folders that may be read and executed; one in ``write`` as well has the rights of both.

    Raises:
        OSError: the kernel refuses.
    """
    landlock_version = version()
    handled = _ALL_OF_FIRST_VERSION
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL)):
        handled |= right if landlock_version >= since else 0
    fields = [handled]
    if landlock_version >= 4:
        fields.append(_BIND_TCP | _CONNECT_TCP)
    if landlock_version >= 6:
        fields.append(_ABSTRACT_SOCKETS | _SIGNALS)
    rules = _ruleset(fields)
    writing = handled & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _IOCTL)
    reading = _READ_FILE | _READ_DIR
    for paths, rights in ((read, reading), (execute, reading | _EXECUTE), (write, writing)):
        for path in paths:
            _allow(rules, path, rights)  # the kernel adds the rights of rules for one path
    _enforce(rules)


def scope_signals() -> None:
    """Keep this process and its children from signaling processes outside, where the kernel can."""
    if version() >= 6:
        _enforce(_ruleset([0, 0, _SIGNALS]))


def _ruleset(fields: list[int]) -> int:
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    return syscall(_CREATE, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes), 0)


def _enforce(rules: int) -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(_RESTRICT, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return  # this user can reach nothing of that name
    try:
        if not os.path.isdir(path):
            rights &= _ON_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        syscall(_ADD, rules, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
