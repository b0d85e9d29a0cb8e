"""Programs that act on processes. Each defines ``attack()``: True if and only if it succeeded.

If success is visible only outside (a surviving daemon), ``attack()`` is never True and the bait reports it.
"""

from __future__ import annotations

# The bait looks on the host for the name that a process gives itself; it goes by itself after 20 seconds.
_DAEMON = """
        import ctypes, os, signal, sys, time
        def be_a_daemon(seconds=20):
            ctypes.CDLL(None).prctl(15, b"@TOKEN@", 0, 0, 0)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                try: open("@OUTSIDE@/daemon", "w").close()
                except OSError: pass
                time.sleep(0.1)
            os._exit(0)
"""

PROCESSES = {
    "kills_everything": """
        import os, signal
        def attack():
            os.kill(-1, signal.SIGKILL)
            return False
    """,
    "kills_everything_at_import": "import os, signal\nos.kill(-1, signal.SIGKILL)\n\ndef attack():\n    return False\n",
    "kills_its_process_group": """
        import os, signal
        def attack():
            os.kill(0, signal.SIGKILL)
            return False
    """,
    "kills_the_process_group_of_its_parent": """
        import os, signal
        def attack():
            group = os.getpgid(os.getppid()) if os.getppid() > 1 else 0
            if group <= 1 or group == os.getpgrp(): return False
            os.killpg(group, signal.SIGKILL)
            return True
    """,
    "kills_its_parent": """
        import os, signal, time
        def attack():
            parent = os.getppid()
            if parent <= 1: return False
            os.kill(parent, signal.SIGKILL)
            time.sleep(0.2)
            return os.getppid() != parent
    """,
    "stops_its_parent": """
        import os, signal
        def attack():
            parent = os.getppid()
            if parent <= 1: return False
            os.kill(parent, signal.SIGSTOP)
            return True
    """,
    "signals_the_process_of_the_bait": """
        import os, signal
        def attack():
            token = "@NEKOT@"[::-1].encode()
            for name in os.listdir("/proc"):
                if not name.isdigit() or int(name) == os.getpid(): continue
                try:
                    with open(f"/proc/{name}/cmdline", "rb") as file:
                        if token not in file.read().split(b"\\0")[0]: continue
                except OSError: continue
                os.kill(int(name), signal.SIGKILL)
                return True
            return False
    """,
    "signals_a_parent_by_pidfd": """
        import ctypes, os
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            process = libc.syscall(434, os.getppid(), 0) if os.getppid() > 1 else -1
            return process >= 0 and libc.syscall(424, process, 0, None, 0) == 0
    """,
    "kills_its_parent_by_fcntl": """
        import fcntl, os, signal, time
        def attack():
            parent = os.getppid()
            if parent <= 1: return False
            read, write = os.pipe()
            fcntl.fcntl(read, 8, parent)  # F_SETOWN
            fcntl.fcntl(read, 10, signal.SIGKILL)  # F_SETSIG
            fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
            os.write(write, b"x")
            time.sleep(0.2)
            return os.getppid() != parent
    """,
    "traces_its_parent": """
        import ctypes, os
        def attack():
            libc, parent = ctypes.CDLL(None, use_errno=True), os.getppid()
            if parent <= 0 or libc.ptrace(16, parent, 0, 0) != 0: return False
            libc.ptrace(17, parent, 0, 0)
            return True
    """,
    "asks_to_be_traced": """
        import ctypes
        def attack(): return ctypes.CDLL(None, use_errno=True).ptrace(0, 0, 0, 0) == 0
    """,
    "daemon_by_double_fork": _DAEMON
    + """
        def attack():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0: be_a_daemon()
                os._exit(0)
            os.wait()
            return False
    """,
    "daemon_at_import": _DAEMON
    + """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: be_a_daemon()
            os._exit(0)
        def attack(): return False
    """,
    "daemon_before_an_endless_loop": _DAEMON
    + """
        def attack():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.closerange(0, 64)
                    be_a_daemon()
                os._exit(0)
            while True: pass
    """,
    "daemon_without_a_death_signal": _DAEMON
    + """
        def attack():
            libc = ctypes.CDLL(None)
            libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
            if os.fork() == 0:
                libc.prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: none
                os.setsid()
                be_a_daemon()
            return False
    """,
    "daemons_that_fork_faster_than_they_are_killed": _DAEMON
    + """
        def attack():
            if os.fork() == 0:
                try:
                    os.setsid()
                    for _ in range(2000):
                        if os.fork() != 0: os._exit(0)
                        time.sleep(0.002)
                    be_a_daemon()
                finally: os._exit(0)
            return False
    """,
    "a_child_holds_the_pipes_open": _DAEMON
    + """
        def attack():
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(15, b"@TOKEN@", 0, 0, 0)
                time.sleep(20)
                os._exit(0)
            os._exit(0)
    """,
    "becomes_another_user": """
        import os
        def attack():
            before = os.geteuid()
            for user in (0, 1, 1000, 65534):
                for change in (os.setuid, os.seteuid, lambda number: os.setresuid(number, number, number)):
                    try: change(user)
                    except OSError: continue
                    if os.geteuid() != before: return True
            return False
    """,
    "runs_programs_with_the_set_user_bit": """
        import os, subprocess
        def attack():
            for command in (["sudo", "-n", "id"], ["su", "-c", "id"], ["pkexec", "id"]):
                if os.geteuid() == 0: return False
                try: done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=5)
                except (OSError, subprocess.TimeoutExpired): continue
                if b"uid=0" in done.stdout: return True
            return False
    """,
    "raises_its_priority": """
        import os
        def attack():
            before = os.nice(0)
            return os.nice(-5) < before
    """,
    "asks_for_real_time_scheduling": """
        import os
        def attack():
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            return True
    """,
    "raises_its_limits": """
        import resource
        def attack():
            for number in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
                if resource.getrlimit(number)[0] == resource.RLIM_INFINITY: continue
                try: resource.setrlimit(number, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                except (OSError, ValueError): continue
                return True
            return False
    """,
    "lowers_the_limits_of_its_parent": """
        import os, resource
        def attack():
            if os.getppid() <= 1: return False
            before = resource.prlimit(os.getppid(), resource.RLIMIT_CORE)
            resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, before[1]))
            return True
    """,
    "new_namespaces": """
        import ctypes
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            return any(libc.unshare(flag) == 0 for flag in (0x10000000, 0x20000000, 0x40000000, 0x20000, 0x8000000))
    """,
    "new_namespaces_by_clone": """
        import ctypes, os, struct
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            flags = (0x10000000, 0x10000000 | 0x40000000, 0x20000000)
            for flag in flags:
                for call in (lambda: libc.syscall(56, flag | 17, 0, 0, 0, 0),
                             lambda: libc.syscall(435, struct.pack("=11Q", flag, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)):
                    child = call()
                    if child == 0: os._exit(0)
                    if child > 0: return True
            return False
    """,
    "enters_the_namespaces_of_its_parent": """
        import ctypes, os
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            for number in (1, os.getppid()):
                for name in ("user", "mnt", "net", "pid"):
                    try: space = os.open(f"/proc/{number}/ns/{name}", os.O_RDONLY)
                    except OSError: continue
                    if libc.setns(space, 0) == 0: return True
            return False
    """,
    "mounts": """
        import ctypes, os
        def attack():
            os.mkdir("point")
            libc = ctypes.CDLL(None, use_errno=True)
            done = [libc.mount(b"none", b"point", kind, 0, None) for kind in (b"tmpfs", b"proc", b"sysfs")]
            done.append(libc.mount(b"/etc", b"point", None, 4096, None))
            number = libc.syscall(430, b"tmpfs", 0)  # fsopen
            while libc.umount2(b"point", 2) == 0: continue
            return 0 in done or number >= 0
    """,
    "breaks_out_of_a_changed_root": """
        import os
        def attack():
            os.mkdir("inner")
            os.chroot("inner")
            for _ in range(64): os.chdir("..")
            os.chroot(".")
            with open("/etc/passwd") as file: return "root:" in file.read()
    """,
    "another_personality": """
        import ctypes
        def attack(): return ctypes.CDLL(None, use_errno=True).personality(0x0040000) != -1
    """,
    "kernel_interfaces_with_a_history": """
        import ctypes
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            table, event = bytes([2, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0]).ljust(72, b"\\0"), bytes(128)
            return libc.syscall(321, 0, table, 72) >= 0 or libc.syscall(298, event, 0, -1, -1, 0) >= 0
    """,
    "types_into_the_terminal": """
        import fcntl, os
        def attack():
            for number in (0, 1, 2, os.open("/dev/tty", os.O_RDWR)):
                try: fcntl.ioctl(number, 0x5412, b"\\n")  # TIOCSTI
                except OSError: continue
                return True
            return False
    """,
    "sets_the_clock": """
        import time
        def attack():
            time.clock_settime(time.CLOCK_REALTIME, time.time())
            return True
    """,
}
