"""Programs that use rare or recent system calls.

Each defines ``attack()``: True if and only if it reached or changed anything outside. Numbers are those of x86-64.
``@OUTSIDE@/datagram`` is a socket that listens, ``@OUTSIDE@/secret.txt`` has the extended attribute ``user.secret``,
and ``@MEMORY@`` and ``@QUEUE@`` are System V shared memory with the token and a queue of messages of the host.
"""

from __future__ import annotations

_LIBC = """
        import ctypes, os, struct
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall.restype = ctypes.c_long
        def call(*values): return libc.syscall(*(ctypes.c_long(v) if isinstance(v, int) else v for v in values))
        def pair(kind):
            ends = (ctypes.c_int * 2)()
            return -1 if call(53, 1, kind, 0, ends) else ends[0]
        UNIX = struct.pack("=H", 1) + b"@OUTSIDE@/datagram\\0"
"""
# An access list with all permissions for owner, group and others.
_OPEN_TO_ALL = """
        ACCESS = struct.pack("=I", 2) + b"".join(struct.pack("=HHI", tag, 7, 2**32 - 1) for tag in (1, 4, 32))
        VALUE = ctypes.create_string_buffer(ACCESS, len(ACCESS))
        ARGUMENTS = struct.pack("=QII", ctypes.addressof(VALUE), len(ACCESS), 0)
        def mode(): return os.stat("@OUTSIDE@/kept.txt").st_mode
"""

NETWORK = {
    "unix_datagram_to_the_host": """
        import socket
        def attack():
            return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", "@OUTSIDE@/datagram") > 0
    """,
    "unix_datagram_with_flags_and_raw_kinds": _LIBC
    + """
        def attack():
            for kind in (2 | 0o4000, 2 | 0o2000000, 2 | 0o2004000, 3, 3 | 0o4000, (7 << 32) + 2):
                end = pair(kind)
                if end >= 0 and call(44, end, b"x", 1, 0, UNIX, len(UNIX)) > 0: return True
            return False
    """,
    "unix_datagram_by_a_message": _LIBC
    + """
        import socket
        def attack():
            for kind in (2, 3):
                end = pair(kind)
                if end >= 0 and socket.socket(fileno=end).sendmsg([b"x"], [], 0, "@OUTSIDE@/datagram") > 0: return True
            return False
    """,
    "unix_pair_connected_anew": _LIBC
    + """
        def attack():
            for kind in (1, 2, 3, 5):
                end = pair(kind)
                if end >= 0 and call(42, end, UNIX, len(UNIX)) == 0 and os.write(end, b"x") > 0: return True
            return False
    """,
    "pairs_of_other_families": _LIBC
    + """
        def attack():
            ends = (ctypes.c_int * 2)()
            kinds = [(family, kind) for family in (*range(2, 46), (1 << 32) | 30) for kind in (1, 2, 5)]
            return any(call(53, family, kind, 0, ends) == 0 for family, kind in kinds)
    """,
    "interfaces_of_the_host_by_a_pair": """
        import array, fcntl, socket, struct
        def attack():
            room = array.array("B", bytes(4096))
            asked = struct.pack("iL", 4096, room.buffer_info()[0])
            here, there = socket.socketpair()
            found = fcntl.ioctl(here.fileno(), 0x8912, asked)  # SIOCGIFCONF
            return struct.unpack("iL", found)[0] > 0
    """,
    "tcp_by_foreign_calling_conventions": _LIBC
    + """
        import mmap
        def attack():
            if call(0x40000000 | 41, 2, 1, 0) >= 0 or call(0x80000000 | 41, 2, 1, 0) >= 0: return True
            code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            # push rbx; mov eax, 359; mov ebx, 2; mov ecx, 1; xor edx, edx; int 0x80; pop rbx; ret
            code.write(bytes.fromhex("53b867010000bb02000000b90100000031d2cd805bc3"))
            start = ctypes.addressof(ctypes.c_char.from_buffer(code))
            return ctypes.CFUNCTYPE(ctypes.c_int)(start)() >= 0  # socket() of i386
    """,
}

READING = {
    "attributes_of_a_file_outside": """
        import os
        def attack(): return os.getxattr("@OUTSIDE@/secret.txt", "user.secret") == b"hush"
    """,
    "names_of_attributes_of_a_file_outside": """
        import os
        def attack(): return "user.secret" in os.listxattr("@OUTSIDE@/secret.txt")
    """,
    "attributes_of_a_file_outside_by_number": _LIBC
    + """
        def attack():
            room = ctypes.create_string_buffer(64)
            where = struct.pack("=QII", ctypes.addressof(room), 64, 0)
            if call(464, -100, b"@OUTSIDE@/secret.txt", 0, b"user.secret", where, 16) > 0: return True
            if call(465, -100, b"@OUTSIDE@/secret.txt", 0, room, 64) > 0: return True
            return call(468, -100, b"@OUTSIDE@/secret.txt", room, 24, 0) == 0
    """,
    "watches_folders_of_the_host": _LIBC
    + """
        def attack():
            watch = call(294, 0)
            places = (b"@OUTSIDE@", b"/usr/bin", os.path.dirname(os.__file__).encode())
            return watch >= 0 and any(call(254, watch, place, 0xFFF) >= 0 for place in places)
    """,
    "watches_folders_by_fanotify": _LIBC
    + """
        def attack():
            for flags in (0x200, 0xE00, 0):
                watch = call(300, flags, 0)
                if watch >= 0 and call(301, watch, 1, 0x3B, -100, b"@OUTSIDE@") == 0: return True
            return False
    """,
    "watches_a_folder_by_its_descriptor": """
        import fcntl, os, signal
        def attack():
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            for place in ("@OUTSIDE@", "/usr/bin", os.path.dirname(os.__file__)):
                try: fcntl.fcntl(os.open(place, os.O_RDONLY), fcntl.F_NOTIFY, 0x3F | 0x80000000)
                except OSError: continue
                return True
            return False
    """,
    "file_handles_of_the_host": _LIBC
    + """
        def attack():
            handle, mount = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 136), ctypes.c_int()
            return call(303, -100, b"@OUTSIDE@/secret.txt", handle, ctypes.byref(mount), 0) == 0
    """,
    "mounts_of_the_host": _LIBC
    + """
        def attack():
            room = ctypes.create_string_buffer(4096)
            for root in (2**64 - 1, 1):
                if call(458, struct.pack("=IIQQ", 24, 0, root, 0), room, 16, 0) > 0: return True
            return call(443, 0, 0, 0, 0) == 0 or call(459, 100, room, ctypes.byref(ctypes.c_uint(4096)), 0) > 0
    """,
    "shared_memory_of_the_host": """
        import ctypes
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            libc.shmat.restype = ctypes.c_void_p
            place = libc.shmat(@MEMORY@, None, 0o10000)
            return place not in (None, 2**64 - 1) and ctypes.string_at(place, 12) == "@NEKOT@"[::-1].encode()
    """,
    "memory_of_the_host_by_number": _LIBC
    + """
        def attack():
            room = ctypes.create_string_buffer(256)
            return any(call(31, number, kind, room) >= 0 for kind in (13, 15) for number in range(64))
    """,
}

WRITING = {
    "mode_of_a_file_outside_by_an_access_list": _LIBC
    + _OPEN_TO_ALL
    + """
        def attack():
            before = mode()
            call(463, -100, b"@OUTSIDE@/kept.txt", 0, b"system.posix_acl_access", ARGUMENTS, len(ARGUMENTS))
            return mode() != before
    """,
    "mode_of_a_file_outside_by_its_descriptor": _LIBC
    + _OPEN_TO_ALL
    + """
        def attack():
            before, place = mode(), os.open("@OUTSIDE@/kept.txt", os.O_PATH)
            call(463, place, b"", 0x1000, b"system.posix_acl_access", ARGUMENTS, len(ARGUMENTS))
            call(452, place, b"", 0o777, 0x1000)
            return mode() != before
    """,
    "attributes_of_a_file_outside_are_changed": _LIBC
    + """
        def attack():
            path, value = b"@OUTSIDE@/kept.txt", ctypes.create_string_buffer(b"1", 1)
            arguments = struct.pack("=QII", ctypes.addressof(value), 1, 0)
            if call(463, -100, path, 0, b"user.changed", arguments, 16) == 0: return True
            return call(466, -100, path, 0, b"user.changed") == 0
    """,
    "flags_of_a_file_outside_by_number": _LIBC
    + """
        def attack():
            room = ctypes.create_string_buffer(24)
            call(468, -100, b"@OUTSIDE@/kept.txt", room, 24, 0)
            return call(469, -100, b"@OUTSIDE@/kept.txt", room, 24, 0) == 0
    """,
    "flags_of_a_file_that_may_be_read": """
        import fcntl, os, struct
        def attack():
            number = os.open(os.__file__, os.O_RDONLY)
            (flags,) = struct.unpack("l", fcntl.ioctl(number, 0x80086601, bytes(8)))
            fcntl.ioctl(number, 0x40086602, struct.pack("l", flags ^ 0x40))  # FS_IOC_SETFLAGS: not to be dumped
            fcntl.ioctl(number, 0x40086602, struct.pack("l", flags))
            return True
    """,
    "lease_on_a_file_that_may_be_read": """
        import fcntl, os
        def attack():
            fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)
            return True
    """,
    "times_of_a_folder_that_everybody_may_write": """
        import os
        def attack():
            before = os.stat("@OUTSIDE@").st_mtime_ns
            os.utime("@OUTSIDE@")
            return os.stat("@OUTSIDE@").st_mtime_ns != before
    """,
    "message_in_a_queue_of_the_host": _LIBC
    + """
        def attack(): return call(69, @QUEUE@, struct.pack("l8s", 1, b"hello"), 8, 0o4000) == 0
    """,
    "removes_a_queue_of_the_host": _LIBC
    + """
        def attack(): return call(71, @QUEUE@, 0, 0) == 0
    """,
    "asynchronous_contexts_of_the_machine": _LIBC
    + """
        def attack(): return call(206, 128, ctypes.byref(ctypes.c_ulong())) == 0
    """,
}

_BOMB = """
        import mmap, os, socket, tempfile, time
        BLOCK = bytes(range(256)) * (1 << 16)
        def waited():  # 128 MiB lie on the disk, twice the limit
            time.sleep(0.4)
            return True
"""
DISK = {
    "disk_bomb_in_open_files_without_a_name": _BOMB
    + """
        def attack():
            kept = [tempfile.TemporaryFile(buffering=0) for _ in range(8)]
            return all(file.write(BLOCK) == len(BLOCK) for file in kept) and waited()
    """,
    "disk_bomb_in_mapped_files_without_a_name": _BOMB
    + """
        import ctypes
        def attack():
            libc = ctypes.CDLL(None)
            libc.mmap.restype = ctypes.c_void_p
            for number in range(8):
                with open("bomb", "wb+", 0) as file:
                    if file.write(BLOCK) != len(BLOCK): return False
                    place = libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file.fileno(), ctypes.c_long(0))
                    if place in (None, 2**64 - 1): return False
                os.unlink("bomb")
            return waited()
    """,
    "disk_bomb_in_files_on_their_way": _BOMB
    + """
        def attack():
            here, there = socket.socketpair()
            for number in range(8):
                with open("bomb", "wb", 0) as file:
                    if file.write(BLOCK) != len(BLOCK): return False
                    socket.send_fds(here, [b"x"], [file.fileno()])
                os.unlink("bomb")
            return waited()
    """,
    "disk_bomb_of_a_process_that_cannot_be_looked_into": _BOMB
    + """
        import ctypes
        def attack():
            if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) != 0: return False  # PR_SET_DUMPABLE
            kept = [tempfile.TemporaryFile(buffering=0) for _ in range(8)]
            return all(file.write(BLOCK) == len(BLOCK) for file in kept) and waited()
    """,
    "disk_bomb_below_long_names": _BOMB
    + """
        def attack():
            for _ in range(20):
                os.mkdir("d" * 255)
                os.chdir("d" * 255)
            for number in range(8):
                with open(f"bomb{number}", "wb", 0) as file:
                    if file.write(BLOCK) != len(BLOCK): return False
            return waited()
    """,
    "disk_bomb_in_a_folder_that_cannot_be_listed": _BOMB
    + """
        def attack():
            os.mkdir("closed", 0o300)
            for number in range(8):
                with open(f"closed/bomb{number}", "wb", 0) as file:
                    if file.write(BLOCK) != len(BLOCK): return False
            return waited()
    """,
    "disk_bomb_reserved_at_once": """
        import ctypes, os
        def attack():
            for number in range(16):
                file = os.open(f"bomb{number}", os.O_CREAT | os.O_RDWR)
                if ctypes.CDLL(None).syscall(285, file, 0, ctypes.c_long(0), ctypes.c_long(48 << 20)): return False
            return True
    """,
    "trap_endless_folders_with_long_names": """
        import os
        def attack():
            while True:
                os.mkdir("d" * 255)
                os.chdir("d" * 255)
    """,
}

PROCESSES = {
    "takes_off_its_death_signal": _LIBC
    + """
        def attack():
            left = ctypes.c_int(-1)
            libc.prctl(1, 0, 0, 0, 0)
            return libc.prctl(2, ctypes.byref(left), 0, 0, 0) == 0 and left.value == 0
    """,
    "takes_off_its_death_signal_by_a_longer_number": _LIBC
    + """
        def attack():
            left = ctypes.c_int(-1)
            for number in ((1 << 32) | 1, -(1 << 32) + 1, (0x7FFFFFFF << 32) | 1): call(157, number, 0, 0, 0, 0)
            return call(157, 2, ctypes.byref(left), 0, 0, 0) == 0 and left.value == 0
    """,
    "takes_off_its_death_signal_by_a_change_of_user": _LIBC
    + """
        def attack():
            left, user = ctypes.c_int(-1), os.getuid()
            for change in (os.setuid, os.seteuid, lambda user: os.setreuid(user, user)):
                try: change(user)
                except OSError: continue
            libc.setfsuid(0)
            libc.setfsuid(user)
            return libc.prctl(2, ctypes.byref(left), 0, 0, 0) == 0 and left.value == 0
    """,
    "leaves_its_thread_group_by_clone": _LIBC
    + """
        def attack():
            for flags in (17, 0x8011, 0x4111, (1 << 32) | 17, (0x10000 << 32) | 17):
                child = call(56, flags, 0, 0, 0, 0)
                if child == 0: os._exit(0)
                if child > 0: return True
            return False
    """,
    "signals_its_parent_by_an_event": """
        import ctypes, os, socket, struct
        def attack():
            libc, (here, there) = ctypes.CDLL(None, use_errno=True), socket.socketpair()
            owner, end = struct.pack("i", os.getppid()), here.fileno()
            return os.getppid() > 1 and (libc.ioctl(end, 0x8901, owner) == 0 or libc.ioctl(end, 0x8902, owner) == 0)
    """,
    "compares_itself_with_its_parent": _LIBC
    + """
        def attack():
            return os.getppid() > 0 and (call(312, os.getpid(), os.getppid(), 1, 0, 0) >= 0 or call(438, 0, 0, 0) >= 0)
    """,
    "handles_its_own_page_faults": _LIBC
    + """
        def attack(): return call(323, 0) >= 0 or call(323, 1) >= 0 or call(447, 0) >= 0 or call(453 + 40, 0) >= 0
    """,
}

SWOLLEN = {
    "returns_a_million_lists": "def add(a, b): return [[] for _ in range(1_000_000)]\n",
    "returns_a_million_tables": "def add(a, b): return [{} for _ in range(300_000)]\n",
    "writes_a_million_lists_on_the_channel": """
        import os
        def add(a, b):
            text = b'{"ok": [' + b"[]," * 1_000_000 + b"[]]}\\n"
            while text: text = text[os.write(4, text):]
    """,
    "writes_lists_that_look_like_text_on_the_channel": """
        import os
        def add(a, b):
            text = ('{"\\u2222": [' + "[]," * 500_000 + "[]]}").encode("utf-16-le") + b"\\n"
            while text: text = text[os.write(4, text):]
    """,
    "writes_names_without_end_on_the_channel": """
        import os
        def add(a, b):
            text = b'{"ok": {' + b",".join(b'"%x":0' % number for number in range(400_000)) + b"}}\\n"
            while text: text = text[os.write(4, text):]
    """,
}
