"""Which system calls a candidate may make, and how the others are answered.

Calls that are not listed here are rejected with ENOSYS: numbers newer than this list, gaps, and foreign calling
conventions. A call that a later kernel adds is therefore closed until it is added here.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass

from mrlm_pl.sandbox.wall.kernel import MACHINE

_COLUMN = {"x86_64": 0, "aarch64": -1}.get(MACHINE, 0)


def _numbers(table: str) -> dict[str, int]:
    """Return numbers by name on this machine from entries ``NAME=X86_64/AARCH64``, or one number for both."""
    pairs = (entry.split("=") for entry in table.split())
    numbers_by_name = {name: numbers.split("/")[_COLUMN] for name, numbers in pairs}
    return {name: int(number) for name, number in numbers_by_name.items() if number != "-"}


# Linux 6.18: arch/x86/entry/syscalls/syscall_64.tbl, and scripts/syscall.tbl for aarch64. From 424 on they agree.
_ALLOWED = _numbers("""
    read=0/63 write=1/64 open=2/- close=3/57 stat=4/- fstat=5/80 lstat=6/- poll=7/- lseek=8/62 mmap=9/222
    mprotect=10/226 munmap=11/215 brk=12/214 rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139
    pread64=17/67 pwrite64=18/68 readv=19/65 writev=20/66 access=21/- pipe=22/- select=23/- sched_yield=24/124
    mremap=25/216 msync=26/227 mincore=27/232 madvise=28/233 dup=32/23 dup2=33/- pause=34/- nanosleep=35/101
    getitimer=36/102 alarm=37/- setitimer=38/103 getpid=39/172 sendfile=40/71 recvfrom=45/207 recvmsg=47/212
    recvmmsg=299/243 shutdown=48/210 getsockname=51/204 getpeername=52/205 setsockopt=54/208 getsockopt=55/209
    exit=60/93 wait4=61/260 uname=63/160 flock=73/32 fsync=74/82 fdatasync=75/83 ftruncate=77/46 getdents=78/-
    getcwd=79/17 chdir=80/49 fchdir=81/50 rename=82/- mkdir=83/- rmdir=84/- creat=85/- link=86/- unlink=87/-
    symlink=88/- readlink=89/- umask=95/166 gettimeofday=96/169 getrlimit=97/163 getrusage=98/165 sysinfo=99/179
    times=100/153 getuid=102/174 getgid=104/176 setuid=105/146 setgid=106/144 geteuid=107/175 getegid=108/177
    getppid=110/173 getpgrp=111/- setreuid=113/145 setregid=114/143 getgroups=115/158 setgroups=116/159
    setresuid=117/147 getresuid=118/148 setresgid=119/149 getresgid=120/150 getpgid=121/155 setfsuid=122/151
    setfsgid=123/152 getsid=124/156 capget=125/90 capset=126/91 rt_sigpending=127/136 rt_sigtimedwait=128/137
    rt_sigsuspend=130/133 sigaltstack=131/132 mknod=133/- statfs=137/43 fstatfs=138/44 getpriority=140/141
    sched_getparam=143/121 sched_getscheduler=145/120 sched_get_priority_max=146/125 sched_get_priority_min=147/126
    sched_rr_get_interval=148/127 mlock=149/228 munlock=150/229 mlockall=151/230 munlockall=152/231 arch_prctl=158/-
    setrlimit=160/164 gettid=186/178 readahead=187/213 time=201/- futex=202/98 sched_getaffinity=204/123
    epoll_create=213/- getdents64=217/61 set_tid_address=218/96 restart_syscall=219/128 fadvise64=221/223
    timer_create=222/107 timer_settime=223/110 timer_gettime=224/108 timer_getoverrun=225/109 timer_delete=226/111
    clock_gettime=228/113 clock_getres=229/114 clock_nanosleep=230/115 exit_group=231/94 epoll_wait=232/-
    epoll_ctl=233/21 waitid=247/95 openat=257/56 mkdirat=258/34 mknodat=259/33 newfstatat=262/79 unlinkat=263/35
    renameat=264/38 linkat=265/37 symlinkat=266/36 readlinkat=267/78 faccessat=269/48 pselect6=270/72 ppoll=271/73
    set_robust_list=273/99 get_robust_list=274/100 splice=275/76 tee=276/77 sync_file_range=277/84 vmsplice=278/75
    epoll_pwait=281/22 signalfd=282/- timerfd_create=283/85 eventfd=284/- timerfd_settime=286/86
    timerfd_gettime=287/87 signalfd4=289/74 eventfd2=290/19 epoll_create1=291/20 dup3=292/24 pipe2=293/59
    preadv=295/69 pwritev=296/70 getcpu=309/168 sched_getattr=315/275 renameat2=316/276 getrandom=318/278
    membarrier=324/283 mlock2=325/284 copy_file_range=326/285 preadv2=327/286 pwritev2=328/287 pkey_mprotect=329/288
    pkey_alloc=330/289 pkey_free=331/290 statx=332/291 rseq=334/293 close_range=436 openat2=437 faccessat2=439
    epoll_pwait2=441 futex_waitv=449 map_shadow_stack=453 futex_wake=454 futex_wait=455 futex_requeue=456 mseal=462
""")
_CHECKED = _numbers("""
    kill=62/129 socketpair=53/199 sendto=44/206 clone=56/220 fcntl=72/25 ioctl=16/29 prctl=157/167 prlimit64=302/261
    tgkill=234/131
""")
_PROCESSES = _numbers("""
    fork=57/- vfork=58/- execve=59/221 execveat=322/281 seccomp=317/277 landlock_create_ruleset=444
    landlock_add_rule=445 landlock_restrict_self=446
""")
_SIGNALS = _numbers("""
    tkill=200/130 rt_sigqueueinfo=129/138 rt_tgsigqueueinfo=297/240 pidfd_send_signal=424 pidfd_open=434
""")
_SESSIONS = _numbers("setsid=112/157 setpgid=109/154")
_MESSAGES = _numbers("sendmsg=46/211 sendmmsg=307/269")
_OWNERS = _numbers("chown=92/- fchown=93/55 lchown=94/- fchownat=260/54")
_MODES = _numbers("chmod=90/- fchmod=91/52 fchmodat=268/53 fchmodat2=452")
_TIMES = _numbers("utime=132/- utimes=235/- futimesat=261/- utimensat=280/88")
_ATTRIBUTES = _numbers("""
    setxattr=188/5 lsetxattr=189/6 fsetxattr=190/7 getxattr=191/8 lgetxattr=192/9 fgetxattr=193/10 listxattr=194/11
    llistxattr=195/12 flistxattr=196/13 removexattr=197/14 lremovexattr=198/15 fremovexattr=199/16
""")
_TRUNCATE = _numbers("truncate=76/45")
_FALLOCATE = _numbers("fallocate=285/47")
_NETWORK = _numbers("socket=41/198 connect=42/203 accept=43/202 bind=49/200 listen=50/201 accept4=288/242")
_SYNC = _numbers("sync=162/81 syncfs=306/267")
_PRIVILEGED = _numbers("""
    ptrace=101/117 syslog=103/116 personality=135/92 setpriority=141/140 sched_setparam=142/118
    sched_setscheduler=144/119 vhangup=153/58 pivot_root=155/41 adjtimex=159/171 chroot=161/51 acct=163/89
    settimeofday=164/170 mount=165/40 umount2=166/39 swapon=167/224 swapoff=168/225 reboot=169/142
    sethostname=170/161 setdomainname=171/162 iopl=172/- ioperm=173/- init_module=175/105 delete_module=176/106
    quotactl=179/60 sched_setaffinity=203/122 clock_settime=227/112 kexec_load=246/104 add_key=248/217
    request_key=249/218 keyctl=250/219 ioprio_set=251/30 migrate_pages=256/238 unshare=272/97 move_pages=279/239
    perf_event_open=298/241 name_to_handle_at=303/264 clock_adjtime=305/266 setns=308/268 process_vm_readv=310/270
    process_vm_writev=311/271 kcmp=312/272 finit_module=313/273 sched_setattr=314/274 kexec_file_load=320/294
    bpf=321/280 userfaultfd=323/282 open_by_handle_at=304/265 memfd_create=319/279 modify_ldt=154/-
""")

_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_KINDS = 1, 1, 5, 0xF
_CLONE_THREAD, _CLONE_NAMESPACES = 0x10000, 0x7E020000
# Descriptor flags, locks, sizes of pipes, seals and hints; not owners of signals, leases and notices of changes.
_FCNTL = (*range(8), 9, 11, 16, 36, 37, 38, 1025, 1027, 1028, *range(1030, 1039))
# FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FIOQSIZE, and what asks for a terminal: TCGETS, TIOCGPGRP, TIOCGWINSZ, TIOCGSID.
_IOCTL = (0x541B, 0x5421, 0x5450, 0x5451, 0x5460, 0x5401, 0x540F, 0x5413, 0x5429)
# Names, capabilities to give up, no_new_privs, memory hints and questions; neither the signal at the parent's death nor
# whether the process may be looked into: the sandbox relies on both.
_PRCTL = (2, 3, 7, 8, 13, 15, 16, 21, 22, 23, 24, 25, 27, 29, 30, 36, 37, 38, 39, 40, 41, 42, 47, 50, 51, 52, 54, 55,
          56, 60, 61, 65, 66, 0x53564D41)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """A test of a word of an argument.

    Args:
        argument: index of the argument, from 0.
        values: allowed values.
        mask: bits that are compared.
        word: 0 for the lower 32 bits, 1 for the upper ones.
    """

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    word: int = 0


@dataclass(frozen=True)
class Outcome:
    """The answer to a system call.

    Args:
        error: error number of a refusal; 0 reports success and does nothing. None allows the call.
        checks: checks that must all hold, else the call is rejected with ``error``; without checks it always is.
    """

    error: int | None
    checks: tuple[Check, ...] = ()


ALLOWED, UNKNOWN = Outcome(None), Outcome(errno.ENOSYS)
ITSELF = 0x7FFFFFFE
"""Stands for the number of the process that installs the filter."""


@dataclass(frozen=True)
class Filter:
    """Permissions of a candidate beyond plain computing and files.

    Args:
        processes: whether it may start processes and programs.
        private: whether processes, users and disk are its own, as in namespaces. Else it may not leave its process
            group, by which it is ended; pass descriptors, in which files escape being counted; reserve disk faster than
            it is watched; or touch what Landlock does not govern, times and extended attributes.
        modes: error number for changing modes and owners, 0 to report success and do nothing, None to allow it.
        truncate: whether it may truncate by path, which Landlock governs since its version 3.
        only_itself: whether it may signal itself alone; else it may signal whatever namespaces and Landlock allow.
    """

    processes: bool
    private: bool
    modes: int | None
    truncate: bool
    only_itself: bool


def outcomes(allowed: Filter) -> dict[int, Outcome]:
    """Return answers by number; every other number is ``UNKNOWN``.

    Raises:
        OSError: the numbers of this machine are not known.
    """
    if MACHINE not in ("x86_64", "aarch64"):
        raise OSError(errno.ENOSYS, f"no system call numbers for {MACHINE}")
    by_number: dict[int, Outcome] = {}

    def answer(table: dict[str, int], error: int | None) -> None:
        by_number.update(dict.fromkeys(table.values(), Outcome(error)))

    def check(name: str, error: int, checks: Iterable[Check]) -> None:
        by_number[_CHECKED[name]] = Outcome(error, tuple(checks)) if checks else ALLOWED

    answer(_ALLOWED, None)
    answer(_PRIVILEGED, errno.EPERM)
    answer(_NETWORK, errno.EACCES)
    answer(_SYNC, 0)  # it would make every disk of the machine busy
    answer(_PROCESSES, None if allowed.processes else errno.EPERM)
    answer(_SIGNALS, errno.EPERM if allowed.only_itself else None)
    answer(_TRUNCATE, None if allowed.truncate else errno.EPERM)
    answer(_MODES, allowed.modes)
    answer(_OWNERS, None if allowed.modes is None else errno.EPERM)
    answer(_SESSIONS, None if allowed.private else errno.EPERM)
    answer(_MESSAGES, None if allowed.private else errno.EACCES)
    answer(_TIMES, None if allowed.private else 0)
    answer(_ATTRIBUTES, None if allowed.private else errno.EOPNOTSUPP)
    answer(_FALLOCATE, None if allowed.private else errno.EOPNOTSUPP)
    # A datagram socket needs no connection to send to any address, so pairs are of the connected kinds.
    pair = Check(0, (_AF_UNIX,)), Check(1, (_SOCK_STREAM, _SOCK_SEQPACKET), _SOCK_KINDS)
    check("socketpair", errno.EACCES, pair)
    check("sendto", errno.EACCES, (Check(4, (0,)), Check(4, (0,), word=1)))
    thread = () if allowed.processes else (Check(0, (_CLONE_THREAD,), _CLONE_THREAD),)
    check("clone", errno.EPERM, (Check(0, (0,), _CLONE_NAMESPACES), *thread))
    check("fcntl", errno.EINVAL, (Check(1, _FCNTL),))
    check("ioctl", errno.ENOTTY, (Check(1, _IOCTL),))
    check("prctl", errno.EPERM, (Check(0, _PRCTL),))
    check("prlimit64", errno.EPERM, (Check(0, (0,)),))  # limits of other processes
    itself = (Check(0, (ITSELF,)),) if allowed.only_itself else ()
    for name in ("kill", "tgkill"):
        check(name, errno.EPERM, itself)
    return by_number
