"""System calls that the standard library does not offer, by ctypes: namespaces, mounts, process control."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 1, 2, 4, 8, 4096, 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38

MACHINE = platform.machine()
CAP_SYS_PTRACE = 19
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_CAPSET, _PIVOT_ROOT = {"x86_64": (126, 155), "aarch64": (91, 41)}.get(MACHINE, (-1, -1))
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def check_result(result: int, what: str) -> int:
    """Return the result of a call of libc.

    Raises:
        OSError: the result is negative; the error has the error number and the name of the call.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: Any) -> int:
    """Return the result of a system call by number.

    Raises:
        OSError: it failed, or this machine's numbers are not known.
    """
    if number < 0:
        raise OSError(f"no system call numbers for {MACHINE}")
    c_arguments = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return check_result(libc.syscall(ctypes.c_long(number), *c_arguments), f"system call {number}")


def prctl(option: int, value: int = 0, pointer: Any = None) -> None:
    """Set an attribute of this process."""
    extra = ctypes.c_ulong(0) if pointer is None else pointer
    check_result(libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), extra, 0, 0), f"prctl {option}")


def ending_with_parent(number: signal.Signals) -> tuple[str, ...]:
    """Return the start of a command whose process receives a signal when this thread dies; empty except on Linux.

    A program of its own sets this: code between fork and exec is not safe in a process with threads. Python ignores two
    signals from its start, which the command would inherit: their defaults are set again.
    """
    if sys.platform != "linux":
        return ()
    program = (
        f"import ctypes, os, sys; libc = ctypes.CDLL(None); libc.prctl({PR_SET_PDEATHSIG}, {int(number)}); "
        f"libc.signal({int(signal.SIGPIPE)}, None); libc.signal({int(signal.SIGXFSZ)}, None); "
        f"os.getppid() == {os.getpid()} and os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return (sys.executable, "-I", "-S", "-c", program)


def unshare(flags: int) -> None:
    """Give this process new namespaces (for ``CLONE_NEWPID``, its next children)."""
    check_result(libc.unshare(ctypes.c_int(flags)), "unshare")


def enter_namespace(descriptor: int, kind: int) -> None:
    """Join the namespace that a descriptor names."""
    check_result(libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    """Mount a file system."""
    values = [None if value is None else value.encode() for value in (source, target, kind, options)]
    result = libc.mount(values[0], values[1], values[2], ctypes.c_ulong(flags), values[3])
    check_result(result, f"mount {target}")


def restrict_mounts(path: str, flags: int, *, below: bool = True) -> None:
    """Add flags, such as ``MS_RDONLY``, to a mount, and to all mounts below it (Linux 5.12)."""
    attributes = ctypes.create_string_buffer(struct.pack("4Q", flags, 0, 0, 0), 32)
    syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE if below else 0, attributes, 32)


def pivot_root(new_root: str, old_root: str) -> None:
    """Make ``new_root`` the root, and the old root reachable at ``old_root`` below it."""
    syscall(_PIVOT_ROOT, new_root.encode(), old_root.encode())


def detach(path: str) -> None:
    """Unmount a path and all below it."""
    check_result(libc.umount2(path.encode(), MNT_DETACH), f"umount {path}")


def map_identity(inner_uid: int, inner_gid: int, outer_uid: int, outer_gid: int) -> None:
    """Write the user and group maps of a new user namespace: one user, one group."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner_uid} {outer_uid} 1"),
        ("gid_map", f"{inner_gid} {outer_gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def become_user(uid: int) -> None:
    """Change from root to another user and group for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def has_capability(number: int) -> bool:
    """Return whether a capability is in effect in this process."""
    with open("/proc/self/status") as file:
        (effective,) = (line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)


def drop_capabilities() -> None:
    """Give up every capability, for programs that are executed later too."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # beyond the kernel's last one, or not allowed, which is as good once the sets below are empty
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0), 8)
    nothing = ctypes.create_string_buffer(bytes(24), 24)
    syscall(_CAPSET, header, nothing)
