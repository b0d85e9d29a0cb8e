"""seccomp: the system calls that a candidate is refused, as a filter program for the kernel."""

from __future__ import annotations

import ctypes
import errno
import struct
from dataclasses import dataclass

from mrlm_pl.sandbox.inside.syscalls import MACHINE, PR_SET_NO_NEW_PRIVS, prctl

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # offsets in the kernel's `struct seccomp_data`
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x10000
_CLONE_NAMESPACES = 0x7E020000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Numbers of linux/x86 `syscall_64.tbl` and of the generic table that aarch64 uses; from 424 on they are the same.
_SINCE_424 = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "clone3": 435,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "fchmodat2": 452,
}
_X86_64 = (
    "socket=41 connect=42 accept=43 bind=49 listen=50 socketpair=53 clone=56 fork=57 vfork=58 execve=59 kill=62 "
    "truncate=76 chmod=90 fchmod=91 chown=92 fchown=93 lchown=94 ptrace=101 setpgid=109 setsid=112 utime=132 "
    "personality=135 setpriority=141 sched_setscheduler=144 pivot_root=155 chroot=161 acct=163 mount=165 umount2=166 "
    "swapon=167 swapoff=168 reboot=169 init_module=175 delete_module=176 quotactl=179 setxattr=188 lsetxattr=189 "
    "fsetxattr=190 removexattr=197 lremovexattr=198 fremovexattr=199 tkill=200 tgkill=234 utimes=235 mq_open=240 "
    "kexec_load=246 add_key=248 request_key=249 keyctl=250 ioprio_set=251 fchownat=260 futimesat=261 fchmodat=268 "
    "unshare=272 utimensat=280 accept4=288 perf_event_open=298 fanotify_init=300 name_to_handle_at=303 "
    "open_by_handle_at=304 setns=308 process_vm_readv=310 process_vm_writev=311 kcmp=312 finit_module=313 "
    "memfd_create=319 kexec_file_load=320 bpf=321 execveat=322 userfaultfd=323 shmget=29 semget=64 msgget=68 "
    "rt_sigqueueinfo=129 rt_tgsigqueueinfo=297 prlimit64=302 sched_setparam=142 sched_setaffinity=203 "
    "sched_setattr=314 migrate_pages=256 move_pages=279"
)
_AARCH64 = (
    "setxattr=5 lsetxattr=6 fsetxattr=7 removexattr=14 lremovexattr=15 fremovexattr=16 ioprio_set=30 umount2=39 "
    "mount=40 pivot_root=41 truncate=45 chroot=51 fchmod=52 fchmodat=53 fchownat=54 fchown=55 quotactl=60 utimensat=88 "
    "acct=89 personality=92 unshare=97 kexec_load=104 init_module=105 delete_module=106 ptrace=117 "
    "sched_setscheduler=119 kill=129 tkill=130 tgkill=131 rt_sigqueueinfo=138 setpriority=140 reboot=142 setpgid=154 "
    "setsid=157 mq_open=180 msgget=186 semget=190 shmget=194 socket=198 socketpair=199 bind=200 listen=201 accept=202 "
    "connect=203 add_key=217 request_key=218 keyctl=219 clone=220 execve=221 swapon=224 swapoff=225 "
    "rt_tgsigqueueinfo=240 perf_event_open=241 accept4=242 fanotify_init=262 name_to_handle_at=264 "
    "open_by_handle_at=265 setns=268 process_vm_readv=270 process_vm_writev=271 kcmp=272 finit_module=273 "
    "prlimit64=261 sched_setparam=118 sched_setaffinity=122 sched_setattr=274 migrate_pages=238 move_pages=239 "
    "memfd_create=279 bpf=280 execveat=281 userfaultfd=282 kexec_file_load=294"
)
_ALWAYS = [
    "ptrace",
    "personality",
    "pivot_root",
    "chroot",
    "acct",
    "mount",
    "umount2",
    "swapon",
    "swapoff",
    "reboot",
    "init_module",
    "delete_module",
    "quotactl",
    "mq_open",
    "kexec_load",
    "add_key",
    "request_key",
    "keyctl",
    "unshare",
    "perf_event_open",
    "fanotify_init",
    "name_to_handle_at",
    "open_by_handle_at",
    "setns",
    "process_vm_readv",
    "process_vm_writev",
    "kcmp",
    "finit_module",
    "kexec_file_load",
    "bpf",
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "pidfd_getfd",
    "process_madvise",
    "mount_setattr",
    "memfd_secret",
    "memfd_create",
    "process_mrelease",
    "shmget",
    "semget",
    "msgget",
    "setpriority",
    "sched_setscheduler",
    "ioprio_set",
    "sched_setparam",
    "sched_setaffinity",
    "sched_setattr",
    "migrate_pages",
    "move_pages",
]
_NETWORK = "socket connect accept accept4 bind listen".split()  # noqa: SIM905 (a table)
_NEW_PROCESSES = "fork vfork execve execveat".split()  # noqa: SIM905 (a table)
_SIGNALS = "tkill pidfd_open pidfd_send_signal rt_sigqueueinfo rt_tgsigqueueinfo".split()  # noqa: SIM905 (a table)
_SESSIONS = "setsid setpgid".split()  # noqa: SIM905 (a table)
_OWNERS = ["chown", "fchown", "lchown", "fchownat"]
_METADATA = [
    "chmod",
    "fchmod",
    "utime",
    "setxattr",
    "lsetxattr",
    "fsetxattr",
    "removexattr",
    "lremovexattr",
    "fremovexattr",
    "utimes",
    "futimesat",
    "fchmodat",
    "utimensat",
    "fchmodat2",
]


@dataclass(frozen=True)
class Filter:
    """What a filter leaves open beyond plain computing and files.

    Args:
        processes: starting processes and programs.
        sessions: leaving the process group, by which a tree is killed where there is no process namespace.
        metadata: answer to changing modes and times, which Landlock does not govern: an error number, 0 to report
            success and do nothing, or None to allow it. Changing owners is refused unless it is None.
        truncate: truncating by path, which old versions of Landlock do not govern.
        only_signal: the only process that may be signalled; None allows whatever the namespaces allow.
    """

    processes: bool
    sessions: bool
    metadata: int | None
    truncate: bool
    only_signal: int | None


def numbers() -> dict[str, int]:
    """Numbers of the system calls on this machine.

    Raises:
        OSError: they are not known.
    """
    tables = {"x86_64": _X86_64, "aarch64": _AARCH64}
    if MACHINE not in tables:
        raise OSError(errno.ENOSYS, f"no system call numbers for {MACHINE}")
    return {name: int(number) for name, number in (pair.split("=") for pair in tables[MACHINE].split())} | _SINCE_424


def program(allowed: Filter) -> list[bytes]:
    """Instructions of the kernel's filter machine."""
    known = numbers()
    made = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_JUMP_EQUAL, _ARCHITECTURES[MACHINE], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
    ]
    if MACHINE == "x86_64":
        made += [_step(_JUMP_AT_LEAST, _X32_BIT, 0, 1), _step(_RETURN, _KILL)]

    def refuse(names: list[str], error: int = errno.EPERM) -> None:
        for name in names:
            if name in known:
                made.extend([_step(_JUMP_EQUAL, known[name], 0, 1), _step(_RETURN, _ERRNO | error)])

    def refuse_unless(name: str, jump: int, value: int) -> None:
        """Refuse a call unless its first argument passes a test."""
        made.extend(
            [
                _step(_JUMP_EQUAL, known[name], 0, 4),
                _step(_LOAD, _FIRST_ARGUMENT_AT),
                _step(jump, value, 1, 0),
                _step(_RETURN, _ERRNO | errno.EPERM),
                _step(_LOAD, _NUMBER_AT),
            ]
        )

    refuse(_ALWAYS)
    refuse(_NETWORK, errno.EACCES)
    if not allowed.truncate:
        refuse(["truncate"])
    if allowed.metadata is not None:
        refuse(_METADATA, allowed.metadata)
        refuse(_OWNERS)
    if not allowed.sessions:
        refuse(_SESSIONS)
    refuse(["clone3"], errno.ENOSYS)  # its flags are behind a pointer; the C library then uses clone
    if not allowed.processes:
        refuse(_NEW_PROCESSES)
        refuse_unless("clone", _JUMP_BITS, _CLONE_THREAD)
    refuse_unless("prlimit64", _JUMP_EQUAL, 0)  # limits of other processes
    made += [
        _step(_JUMP_EQUAL, known["clone"], 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT_AT),
        _step(_JUMP_BITS, _CLONE_NAMESPACES, 0, 1),
        _step(_RETURN, _ERRNO | errno.EPERM),
        _step(_LOAD, _NUMBER_AT),
    ]
    if allowed.only_signal is not None:
        refuse(_SIGNALS)
        for name in ("kill", "tgkill"):
            refuse_unless(name, _JUMP_EQUAL, allowed.only_signal)
    return [*made, _step(_RETURN, _ALLOW)]


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


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
