"""Programs that write where they must not, leave traps for the cleanup, or leave something for the next run.

Each defines ``attack()``: True if and only if the harm was done. It removes its files again where it can.
"""

from __future__ import annotations

_PRIVATE_OR_HOST = """
        import os
        def written_on_the_host(folder):
            # A private folder of that name is harmless: only the host's has the beacon.
            path = os.path.join(folder, "written-@TOKEN@")
            with open(path, "w") as file: file.write("here")
            return os.path.exists(os.path.join(folder, "beacon-@TOKEN@"))
"""

WRITING = {
    "writes_a_file_outside": """
        def attack():
            with open("@OUTSIDE@/written", "w") as file: return file.write("here") == 4
    """,
    "appends_to_and_truncates_a_file_outside": """
        import os
        def attack():
            with open("@OUTSIDE@/kept.txt", "a") as file: file.write("more")
            os.truncate("@OUTSIDE@/kept.txt", 0)
            return True
    """,
    "truncates_a_file_outside_by_path_alone": """
        import os
        def attack():
            os.truncate("@OUTSIDE@/kept.txt", 0)
            return True
    """,
    "renames_or_removes_a_file_outside": """
        import os
        def attack():
            try: os.rename("@OUTSIDE@/kept.txt", "@OUTSIDE@/moved.txt")
            except OSError: os.unlink("@OUTSIDE@/kept.txt")
            return True
    """,
    "changes_mode_and_times_of_a_file_outside": """
        import os
        def attack():
            path = "@OUTSIDE@/kept.txt"
            def state(): return os.stat(path)[:9]  # without the time of the last status change
            before = state()
            for change in (lambda: os.chmod(path, 0o777), lambda: os.utime(path, (1, 1)),
                           lambda: os.setxattr(path, "user.x", b"1"), lambda: os.chown(path, 65534, 65534)):
                try: change()
                except OSError: continue
                if state() != before: return True
            try: return bool(os.listxattr(path))
            except OSError: return False
    """,
    "makes_a_folder_and_a_link_outside": """
        import os
        def attack():
            for make in (lambda: os.mkdir("@OUTSIDE@/made"), lambda: os.symlink("/etc", "@OUTSIDE@/made-link"),
                         lambda: os.mkfifo("@OUTSIDE@/made-pipe")):
                try: make()
                except OSError: continue
                return True
            return False
    """,
    "writes_outside_through_a_symbolic_link": """
        import os
        def attack():
            os.symlink("@OUTSIDE@", "way")
            with open("way/through-a-link", "w") as file: return file.write("here") == 4
    """,
    "writes_outside_from_a_shell": """
        import subprocess
        def attack():
            return subprocess.run(["sh", "-c", "echo here > @OUTSIDE@/from-a-shell"], timeout=5).returncode == 0
    """,
    "writes_to_tmp": _PRIVATE_OR_HOST + '        def attack(): return written_on_the_host("/tmp")\n',
    "writes_to_var_tmp": _PRIVATE_OR_HOST + '        def attack(): return written_on_the_host("/var/tmp")\n',
    "writes_to_shared_memory": _PRIVATE_OR_HOST + '        def attack(): return written_on_the_host("/dev/shm")\n',
    "writes_to_site_packages": """
        import os, site, sys, sysconfig
        def attack():
            places = {*sysconfig.get_paths().values(), *sys.path, *site.getsitepackages(), site.getusersitepackages()}
            for place in sorted(place for place in places if os.path.isabs(place) and os.path.isdir(place)):
                if os.path.realpath(place).startswith(os.path.realpath(".")): continue
                path = os.path.join(place, "written-@TOKEN@.pth")
                try:
                    with open(path, "x") as file: file.write("")
                    os.unlink(path)
                except OSError: continue
                return True
            return False
    """,
    "writes_to_the_folder_of_the_interpreter": """
        import os, sys
        def attack():
            for place in (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), os.path.dirname(sys.executable)):
                if not os.path.isabs(place): continue
                path = os.path.join(place, "written-@TOKEN@")
                try:
                    with open(path, "x") as file: file.write("")
                    os.unlink(path)
                except OSError: continue
                return True
            return False
    """,
    "writes_to_the_repository": """
        import os
        def attack():
            with open("@REPOSITORY@/written-@TOKEN@", "x"): os.unlink("@REPOSITORY@/written-@TOKEN@")
            return True
    """,
    "writes_to_proc_and_sys": """
        import os
        def attack():
            # Each value is the current one, so that a successful write changes nothing.
            for path in ("/proc/sys/vm/swappiness", "/proc/sys/kernel/core_pattern"):
                try:
                    with open(path) as file: value = file.read()
                    with open(path, "w") as file: file.write(value)
                except OSError: continue
                return True
            return False
    """,
    "makes_its_parent_the_first_to_be_killed": """
        import os
        def attack():
            parent = os.getppid()
            with open(f"/proc/{parent}/oom_score_adj") as file: value = int(file.read())
            with open(f"/proc/{parent}/oom_score_adj", "w") as file: file.write(str(min(value + 1, 1000)))
            return parent > 1
    """,
    "joins_another_control_group": """
        import os
        def attack():
            for folder in ("", "memory/", "pids/"):
                try:
                    with open(f"/sys/fs/cgroup/{folder}cgroup.procs", "w") as file: file.write(str(os.getpid()))
                except OSError: continue
                return True
            return False
    """,
    "disk_bomb": """
        import os
        def attack():
            names, block = [], bytes(16 << 20)
            try:
                while len(names) < 192:
                    names.append(f"bomb{len(names)}")
                    with open(names[-1], "wb", 0) as file:
                        if file.write(block) != len(block): return False
                return True
            finally:
                for name in names:
                    if os.path.exists(name): os.unlink(name)
    """,
    "disk_bomb_in_one_file": """
        import os
        def attack():
            try:
                with open("bomb", "wb", 0) as file:
                    os.posix_fallocate(file.fileno(), 0, 3 << 30)
                return True
            finally: os.unlink("bomb")
    """,
    "disk_bomb_in_files_without_a_name": """
        import os, tempfile
        def attack():
            kept = []
            for number in range(192):
                kept.append(tempfile.TemporaryFile(buffering=0))
                if kept[-1].write(bytes(16 << 20)) != 16 << 20: return False
            return True
    """,
    "inode_bomb": """
        import os, shutil
        def attack():
            os.mkdir("many")
            try:
                for number in range(200_000): os.close(os.open(f"many/{number}", os.O_CREAT | os.O_WRONLY))
                return True
            finally: shutil.rmtree("many", ignore_errors=True)
    """,
    "trap_folders_without_permissions": """
        import os
        def attack():
            for number in range(20):
                os.makedirs(f"closed{number}/deeper/deepest")
                open(f"closed{number}/deeper/deepest/file", "w").close()
                os.chmod(f"closed{number}/deeper", 0)
                os.chmod(f"closed{number}", 0)
            os.chmod(".", 0)
            return False
    """,
    "trap_five_thousand_folders_deep": """
        import os
        def attack():
            for _ in range(5000):
                os.mkdir("d" * 20)
                os.chdir("d" * 20)
            return False
    """,
    "trap_links_that_lead_outside": """
        import os
        def attack():
            for number in range(10):
                os.symlink("@OUTSIDE@", f"link{number}")
                os.symlink("/etc", f"etc{number}")
            os.symlink(".", "loop")
            os.symlink("@OUTSIDE@/kept.txt", "report.json")
            return False
    """,
    "trap_names_that_are_not_text": """
        import os
        def attack():
            for name in (b"\\xff\\xfe", b"new\\nline", b"-rf *", b" ", b"$(touch x)", b"n" * 255):
                os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0))
            os.mkfifo("pipe")
            return False
    """,
    "trap_folder_moved_away_and_replaced_by_a_link": """
        import os
        def attack():
            here = os.getcwd()
            os.rename(here, here + "-moved")
            os.symlink("@OUTSIDE@", here)
            return os.path.exists(os.path.join(here, "secret.txt"))
    """,
    "trap_folder_that_cannot_be_changed": """
        import fcntl, os, struct
        def attack():
            number = os.open("kept", os.O_CREAT | os.O_RDWR)
            fcntl.ioctl(number, 0x40086602, struct.pack("l", 0x10))  # FS_IOC_SETFLAGS: immutable
            fcntl.ioctl(number, 0x40086602, struct.pack("l", 0))
            return True
    """,
}

# Each looks first for traces of its own earlier run, so it works on its second run only.
PERSISTENCE = {
    "finds_a_file_of_an_earlier_run": """
        import os, tempfile
        PLACES = [os.getcwd(), "..", tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/"]
        def attack():
            paths = [os.path.join(place, "left-@TOKEN@") for place in PLACES]
            found = any(os.path.exists(path) for path in paths)
            for path in paths:
                try:
                    with open(path, "w") as file: file.write("here")
                except OSError: continue
            return found
        FOUND = attack()
        def attack(): return FOUND
    """,
    "finds_patched_modules_of_an_earlier_run": """
        import builtins, gc, json, os, sys, types
        def attack():
            places = [builtins, json, os, sys, types, sys.modules.get("__main__")]
            found = any(hasattr(place, "mrlm_left_here") for place in places) or "mrlm_left_here" in sys.modules
            for place in places: setattr(place, "mrlm_left_here", True)
            sys.modules["mrlm_left_here"] = types.ModuleType("mrlm_left_here")
            return found
        FOUND = attack()
        def attack(): return FOUND
    """,
    "finds_shared_memory_of_an_earlier_run": """
        import ctypes
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.shmget(int("@TOKEN@"[4:], 16) & 0x7FFFFFFF, 4096, 0o1666) >= 0: return False
            return ctypes.get_errno() == 17
        FOUND = attack()
        def attack(): return FOUND
    """,
    "finds_a_bytecode_cache_of_an_earlier_run": """
        import os, sys
        sys.path[:0] = ["", "/tmp"]
        try: import left_module_@TOKEN@ as left
        except ImportError: left = None
        for place in (".", "/tmp"):
            try:
                with open(os.path.join(place, "left_module_@TOKEN@.py"), "w") as file: file.write("HERE = True")
            except OSError: continue
        def attack(): return left is not None
    """,
    "finds_a_changed_limit_or_umask_of_an_earlier_run": """
        import os, resource, signal
        def attack():
            mask = os.umask(0o123)
            return mask == 0o123 or signal.signal(signal.SIGUSR2, signal.SIG_IGN) is signal.SIG_IGN
        FOUND = attack()
        def attack(): return FOUND
    """,
    "a_thread_goes_on_after_the_call": """
        import builtins, threading, time
        def run():
            while True:
                time.sleep(0.2)
                try: open("@OUTSIDE@/from-a-thread", "w").close()
                except OSError: builtins.mrlm_thread = True
        def attack():
            threading.Thread(target=run).start()
            return hasattr(builtins, "mrlm_thread")
    """,
}
