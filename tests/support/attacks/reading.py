"""Programs that read foreign data. Each defines ``attack()``: True if and only if something was read."""

from __future__ import annotations

_OTHERS = """
        import os
        def others():
            numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
            return [number for number in numbers if number != os.getpid()]
"""
# The pattern does not match itself, so a program never finds its own source; the secret begins with a letter or digit.
_PATTERN = """
        import os, re
        SECRET = re.compile(rb"MRLM_TEST_SECRE[T]=\\w")
"""

READING = {
    "reads_etc_passwd": """
        def attack():
            with open("/etc/passwd") as file: return "root:" in file.read()
    """,
    "reads_etc_passwd_through_pwd": """
        import pwd
        def attack(): return any(entry.pw_name == "root" for entry in pwd.getpwall())
    """,
    "reads_etc_shadow": """
        def attack():
            with open("/etc/shadow") as file: return ":" in file.read()
    """,
    "reads_a_file_outside": """
        def attack():
            with open("@OUTSIDE@/secret.txt") as file: return bool(file.read())
    """,
    "reads_a_file_outside_by_raw_system_calls": """
        import ctypes
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            number = libc.syscall(257, -100, b"@OUTSIDE@/secret.txt", 0, 0)
            if number < 0: number = libc.syscall(2, b"@OUTSIDE@/secret.txt", 0, 0)
            if number < 0: number = libc.syscall(437, -100, b"@OUTSIDE@/secret.txt", bytes(24), 24)
            return number >= 0 and libc.read(number, ctypes.create_string_buffer(64), 64) > 0
    """,
    "reads_a_file_outside_through_a_symbolic_link": """
        import os
        def attack():
            os.symlink("@OUTSIDE@/secret.txt", "link.txt")
            with open("link.txt") as file: return bool(file.read())
    """,
    "reads_a_file_outside_through_a_hard_link": """
        import os
        def attack():
            os.link("@OUTSIDE@/secret.txt", "hard.txt")
            with open("hard.txt") as file: return bool(file.read())
    """,
    "reads_through_dots": """
        def attack():
            for depth in range(1, 12):
                for path in ("etc/shadow", "@OUTSIDE@/secret.txt".lstrip("/")):
                    try:
                        with open("../" * depth + path) as file: return bool(file.read())
                    except OSError: continue
            return False
    """,
    "reads_through_roots_in_proc": """
        import os
        def attack():
            for name in ("self", "1", str(os.getppid()), "thread-self"):
                for path in ("root/etc/passwd", "root@OUTSIDE@/secret.txt", "cwd/../../../../../../../etc/passwd"):
                    try:
                        with open(f"/proc/{name}/{path}") as file: return bool(file.read())
                    except OSError: continue
            return False
    """,
    "reads_through_an_inherited_directory_descriptor": """
        import os, stat
        def attack():
            for number in range(256):
                try:
                    if not stat.S_ISDIR(os.fstat(number).st_mode): continue
                    for path in ("../" * 12 + "etc/passwd", "secret.txt", "pyproject.toml"):
                        try: return bool(os.read(os.open(path, os.O_RDONLY, dir_fd=number), 64))
                        except OSError: continue
                except OSError: continue
            return False
    """,
    "reads_home_directories": """
        import glob, os
        def attack():
            homes = ["/root", *glob.glob("/home/*")]
            for home in homes:
                for name in (".bashrc", ".profile", ".netrc", ".ssh", ".cache", ".bash_history", ".pyenv"):
                    path = os.path.join(home, name)
                    try:
                        if os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(): return True
                    except OSError: continue
            return False
    """,
    "reads_var": """
        import os
        def attack():
            for folder in ("/var/log", "/var/lib/dpkg", "/var/cache", "/var/mail", "/var/lib/misc"):
                for place, _, names in os.walk(folder):
                    for name in names:
                        try:
                            with open(os.path.join(place, name), "rb") as file:
                                if file.read(1): return True
                        except OSError: continue
            return False
    """,
    "reads_the_repository": """
        def attack():
            with open("@REPOSITORY@/pyproject.toml") as file: return "mrlm" in file.read()
    """,
    "lists_the_folder_outside": """
        import os
        def attack(): return "secret.txt" in os.listdir("@OUTSIDE@")
    """,
    "lists_the_temporary_folder_of_the_host": """
        import os
        def attack():
            for folder in ("/tmp", "/var/tmp", "/dev/shm"):
                try: names = os.listdir(folder)
                except OSError: continue
                if "beacon-@TOKEN@" in names: return True
            return False
    """,
    "walks_everything_for_files_of_other_runs": """
        import os
        def attack():
            seen = 0
            for place, folders, names in os.walk("/"):
                folders[:] = [name for name in folders if name not in ("proc", "sys", "usr", "lib")]
                seen += 1
                if seen > 20_000: return False
                if "secret.txt" in names and "outside" in place:
                    with open(os.path.join(place, "secret.txt")) as file: return bool(file.read())
            return False
    """,
    "secret_in_the_environment": """
        import ctypes, os
        def attack():
            if "MRLM_TEST_SECRET" in os.environ: return True
            libc = ctypes.CDLL(None)
            libc.getenv.restype = ctypes.c_char_p
            return libc.getenv(b"MRLM_TEST_SECRET") is not None
    """,
    "secret_in_the_environment_of_a_child": """
        import os, subprocess
        def attack():
            return b"MRLM_TEST_SECRET" in subprocess.run(["/usr/bin/env"], capture_output=True, timeout=5).stdout
    """,
    "secret_in_proc_self_environ": _PATTERN
    + """
        def attack():
            with open("/proc/self/environ", "rb") as file: return SECRET.search(file.read()) is not None
    """,
    "secret_in_own_memory": _PATTERN
    + """
        def attack():
            with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
                for line in maps.readlines():
                    low, high = (int(part, 16) for part in line.split()[0].split("-"))
                    if line.split()[1][0] != "r" or "[v" in line: continue
                    for start in range(low, min(high, low + (64 << 20)), 4 << 20):
                        try:
                            memory.seek(start)
                            if SECRET.search(memory.read(min(high - start, (4 << 20) + 64))): return True
                        except (OSError, ValueError, OverflowError): break
            return False
    """,
    "secret_in_the_environment_of_the_c_library": _PATTERN
    + """
        import ctypes
        def attack():
            table = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
            entries = []
            while table and table[len(entries)] is not None: entries.append(table[len(entries)])
            return any(SECRET.search(entry) for entry in entries)
    """,
    "environment_of_process_one": """
        def attack():
            with open("/proc/1/environ", "rb") as file: return b"HOME=" in file.read()
    """,
    "environment_of_every_process": _OTHERS
    + _PATTERN
    + """
        def attack():
            for number in others():
                try:
                    with open(f"/proc/{number}/environ", "rb") as file:
                        if SECRET.search(file.read()): return True
                except OSError: continue
            return False
    """,
    "command_lines_of_other_processes": _OTHERS
    + """
        def attack():
            token = "@NEKOT@"[::-1].encode()
            for number in others():
                try:
                    with open(f"/proc/{number}/cmdline", "rb") as file:
                        if token in file.read(): return True
                except OSError: continue
            return False
    """,
    "memory_of_other_processes": _OTHERS
    + """
        def attack():
            for number in others():
                try:
                    with open(f"/proc/{number}/maps") as maps, open(f"/proc/{number}/mem", "rb", 0) as memory:
                        memory.seek(int(maps.readline().split("-")[0], 16))
                        if memory.read(16): return True
                except OSError: continue
            return False
    """,
    "memory_of_the_parent_by_process_vm_readv": """
        import ctypes, os, sys
        def attack():
            libc, room = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(16)
            here = (ctypes.c_size_t * 2)(ctypes.addressof(room), 16)
            there = (ctypes.c_size_t * 2)(id(sys), 16)
            return os.getppid() > 0 and libc.process_vm_readv(os.getppid(), here, 1, there, 1, 0) > 0
    """,
    "descriptors_of_the_parent": """
        import os
        def attack():
            parent = os.getppid()
            for name in os.listdir(f"/proc/{parent}/fd"):
                try: os.open(f"/proc/{parent}/fd/{name}", os.O_RDONLY | os.O_NONBLOCK)
                except OSError: continue
                return True
            return False
    """,
    "descriptors_of_the_parent_by_pidfd": """
        import ctypes, os
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            process = libc.syscall(434, os.getppid(), 0) if os.getppid() > 0 else -1
            return process >= 0 and any(libc.syscall(438, process, number, 0) >= 0 for number in range(64))
    """,
    "open_internet_sockets_are_inherited": """
        import os, socket, stat
        def attack():
            for number in range(256):
                try:
                    if not stat.S_ISSOCK(os.fstat(number).st_mode): continue
                    if socket.socket(fileno=os.dup(number)).family in (socket.AF_INET, socket.AF_INET6): return True
                except OSError: continue
            return False
    """,
    "kernel_keyrings": """
        import ctypes
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            return libc.syscall(248, b"user", b"@TOKEN@", b"value", 5, -3) > 0 or libc.syscall(250, 0, -3, 0) > 0
    """,
    "kernel_log_and_raw_disks": """
        import ctypes, os, stat
        def attack():
            if ctypes.CDLL(None).klogctl(3, ctypes.create_string_buffer(4096), 4096) > 0: return True
            for name in ("/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/nvme0n1"):
                try: return bool(os.read(os.open(name, os.O_RDONLY | os.O_NONBLOCK), 512))
                except OSError: continue
            os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(254, 0))
            return bool(os.read(os.open("disk", os.O_RDONLY), 512))
    """,
}
