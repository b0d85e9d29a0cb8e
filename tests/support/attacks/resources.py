"""Programs that exhaust resources or never end.

``BOMBS`` define ``attack()``: True if and only if they got more than a sandbox may give. ``ENDLESS`` stay forever or
flood; ``SWOLLEN`` give answers that are too large; ``BROKEN`` are no programs that could answer.
"""

from __future__ import annotations

BOMBS = {
    "fork_bomb": """
        import os, time
        def attack():
            for _ in range(300):
                if os.fork() == 0:
                    time.sleep(5)
                    os._exit(0)
            return True
    """,
    "fork_bomb_of_families": """
        import os, select, time
        def attack():
            read, write = os.pipe()
            first, text = os.getpid(), b""
            try:
                for _ in range(8): os.fork()
                os.write(write, b"1")
                if os.getpid() != first: time.sleep(5)
            finally:
                if os.getpid() != first: os._exit(0)
            while len(text) < 256 and select.select([read], [], [], 3)[0]: text += os.read(read, 256)
            return len(text) == 256
    """,
    "fork_bomb_without_end": """
        import os
        def attack():
            while True:
                try: os.fork()
                except OSError: continue
    """,
    "thread_bomb": """
        import threading, time
        def attack():
            for _ in range(1000): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
            return True
    """,
    "memory_bomb": """
        def attack():
            kept = []
            for _ in range(64): kept.append(bytearray(b"x") * (64 << 20))
            return True
    """,
    "memory_bomb_in_one_piece": """
        def attack():
            return len(b"x" * (4 << 30)) > 0
    """,
    "memory_bomb_of_objects": """
        def attack():
            kept = []
            for number in range(40_000_000): kept.append([number])
            return True
    """,
    "mapping_bomb": """
        import mmap
        def attack():
            kept = mmap.mmap(-1, 4 << 30)
            for place in range(0, 4 << 30, 4096): kept[place] = 1
            return True
    """,
    "shared_mapping_bomb": """
        import mmap
        def attack():
            kept = []
            for _ in range(64):
                kept.append(mmap.mmap(-1, 64 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
                kept[-1].write(b"x" * (64 << 20))
            return True
    """,
    "memory_bomb_in_files_without_a_name": """
        import os
        def attack():
            block, kept = b"x" * (4 << 20), []
            for _ in range(192):
                kept.append(os.memfd_create("bomb"))
                for _ in range(4):
                    if os.write(kept[-1], block) != len(block): return False
            return True
    """,
    "memory_bomb_spread_over_children": """
        import os, time
        def attack():
            read, write = os.pipe()
            for _ in range(40):
                if os.fork() == 0:
                    try:
                        kept = b"x" * (100 << 20)
                        os.write(write, b"1")
                        time.sleep(5)
                    finally: os._exit(0)
            text = b""
            while len(text) < 40: text += os.read(read, 40)
            return True
    """,
    "descriptor_bomb": """
        import os
        def attack():
            for _ in range(20_000): os.open("/dev/null" if os.path.exists("/dev/null") else ".", os.O_RDONLY)
            return True
    """,
    "bomb_of_pipes_filled_with_bytes": """
        import fcntl, os
        def attack():
            for _ in range(3000):
                read, write = os.pipe()
                fcntl.fcntl(write, 1031, 1 << 20)  # F_SETPIPE_SZ
                os.write(write, bytes(1 << 20))
            return True
    """,
}

ENDLESS = {
    "endless_loop_at_import": "while True: pass\n",
    "endless_loop_in_the_call": "def add(a, b):\n    while True: pass\n",
    "endless_loop_that_catches_everything": """
        import time
        def add(a, b):
            while True:
                try:
                    while True: time.sleep(0.01)
                except BaseException: continue
    """,
    "signals_are_ignored_and_timers_reset": """
        import signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): continue
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        def add(a, b):
            while True:
                signal.alarm(0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                signal.setitimer(signal.ITIMER_PROF, 0)
    """,
    "one_long_operation_in_c": """
        def add(a, b): return 7 ** (10 ** 9) % 10
    """,
    "a_number_with_ten_million_digits": """
        import sys
        if hasattr(sys, "set_int_max_str_digits"): sys.set_int_max_str_digits(0)
        def add(a, b): return str(10 ** 10 ** 7)
    """,
    "a_regular_expression_that_explodes": """
        import re
        def add(a, b): return re.match("(a+)+$", "a" * 60 + "b")
    """,
    "sleeps_for_ever": "import time\ndef add(a, b): time.sleep(10 ** 6)\n",
    "stops_itself": """
        import os, signal
        def add(a, b): os.kill(os.getpid(), signal.SIGSTOP)
    """,
    "stops_itself_at_import": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n",
    "stops_its_process_group": """
        import os, signal
        def add(a, b): os.kill(0, signal.SIGSTOP)
    """,
    "waits_for_input": "def add(a, b):\n    while True:\n        try: input()\n        except EOFError: continue\n",
    "deadlock": """
        import threading
        def add(a, b):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
    """,
    "a_thread_that_never_ends_after_a_wrong_answer": """
        import threading
        def run():
            while True: pass
        threading.Thread(target=run, daemon=False).start()
        def add(a, b): return 7
    """,
    "a_long_way_out": """
        import atexit, time
        atexit.register(time.sleep, 10 ** 6)
        class Slow:
            def __del__(self): time.sleep(10 ** 6)
        KEPT = Slow()
        def add(a, b): return 7
    """,
    "waits_for_its_children": """
        import os, time
        def add(a, b):
            for _ in range(8):
                if os.fork() == 0:
                    try: time.sleep(20)
                    finally: os._exit(0)
            os.wait()
    """,
    "output_for_ever_in_trickles": """
        import os, time
        def add(a, b):
            while True:
                os.write(1, b".")
                os.write(2, b".")
                time.sleep(0.05)
    """,
    "trickle_on_every_descriptor": """
        import os, time
        def add(a, b):
            while True:
                for number in range(1, 21):
                    try: os.write(number, b" ")
                    except OSError: continue
                time.sleep(0.05)
    """,
    "output_of_a_gigabyte": """
        import os
        def add(a, b):
            block = b"x" * (1 << 20)
            for _ in range(1024): os.write(1, block)
    """,
    "error_output_of_a_gigabyte": """
        import os
        def add(a, b):
            block = (b"x" * 1023 + b"\\n") * 1024
            for _ in range(1024): os.write(2, block)
    """,
    "output_of_a_gigabyte_at_import": """
        import sys
        for _ in range(1024): sys.stdout.write("\\u20ac" * (1 << 19))
    """,
    "gigabyte_on_every_descriptor": """
        import os
        def add(a, b):
            block = b"x" * (1 << 20)
            for number in range(3, 21):
                for _ in range(128):
                    try: os.write(number, block)
                    except OSError: break
    """,
    "compiles_for_ever": """
        def add(a, b): return compile("x = [" + "(lambda: 0)," * 3_000_000 + "]\\n", "x", "exec")
    """,
    "decompression_bomb": """
        import zlib
        def add(a, b):
            data = zlib.compress(bytes(64 << 20))
            return [zlib.decompress(data) for _ in range(64)]
    """,
}

SWOLLEN = {
    "returns_a_huge_text": "def add(a, b): return 'x' * 10 ** 9\n",
    "returns_a_huge_list": "def add(a, b): return [0] * 10 ** 8\n",
    "returns_a_list_that_repeats_itself": """
        def add(a, b):
            value = ["x" * 1000]
            for _ in range(30): value = [value] * 10
            return value
    """,
    "returns_a_deep_list": """
        def add(a, b):
            value = []
            for _ in range(1_000_000): value = [value]
            return value
    """,
    "returns_a_list_within_itself": """
        def add(a, b):
            value = []
            value.append(value)
            return value
    """,
    "returns_a_table_within_itself": """
        def add(a, b):
            value = {}
            value["value"] = value
            return value
    """,
    "returns_a_huge_integer": "def add(a, b): return 1 << 10 ** 9\n",
    "returns_an_integer_of_five_thousand_digits": """
        import sys
        if hasattr(sys, "set_int_max_str_digits"): sys.set_int_max_str_digits(0)
        def add(a, b): return 10 ** 5000
    """,
    "returns_half_a_character": "def add(a, b): return '\\ud800'\n",
    "returns_odd_tables": """
        def add(a, b): return {1: 2, None: 3, (1, 2): 4, 1.5: b"bytes", "x": {1, 2}, True: object()}
    """,
    "returns_a_list_that_never_ends": """
        class Items(list):
            def __iter__(self):
                while True: yield 0
            def __len__(self): return 1
        class Table(dict):
            def items(self):
                while True: yield "key", 0
            keys = __iter__ = items
        def add(a, b): return Items([1]) if a < b else Table(a=1)
    """,
    "returns_an_object_that_loops_when_looked_at": """
        class Trap:
            def __getattribute__(self, name):
                while True: pass
            def __repr__(self):
                while True: pass
            __str__ = __hash__ = __reduce__ = __eq__ = __repr__
        def add(a, b): return Trap()
    """,
    "raises_an_error_of_a_gigabyte": "def add(a, b): raise ValueError('x' * 10 ** 9)\n",
    "raises_errors_in_a_long_chain": """
        def add(a, b):
            error = None
            for number in range(200_000):
                new = ValueError(number)
                new.__cause__ = error
                error = new
            raise error
    """,
    "deep_recursion": """
        import sys
        sys.setrecursionlimit(10 ** 9)
        def add(a, b): return add(a, b) + 1
    """,
    "deep_recursion_in_c": """
        import sys
        sys.setrecursionlimit(10 ** 9)
        class Deep:
            def __repr__(self): return repr([self])
        def add(a, b): return repr(Deep())
    """,
    "segmentation_fault": "import ctypes\ndef add(a, b): return ctypes.string_at(0)\n",
    "segmentation_fault_at_import": "import ctypes\nctypes.memset(1, 0, 1 << 20)\n",
    "aborts": "import os\ndef add(a, b): os.abort()\n",
    "dies_by_its_own_signal": "import os\ndef add(a, b): os.kill(os.getpid(), 9)\n",
}

BROKEN = {
    "not_a_program": "I think that the answer is to add the two numbers.\n",
    "brackets_without_end": "add = " + "(" * 5000 + ")" * 5000 + "\n",
    "a_null_byte": "def add(a, b):\n    return 7\n\0\n",
    "half_a_character_in_the_source": "def add(a, b):\n    return '\ud800'\n",
    "a_million_minus_signs": "VALUE = " + "-" * 1_000_000 + "1\n",
    "a_sum_of_fifty_thousand_powers": "VALUE = " + "+".join(["9**9"] * 50_000) + "\n",
    "no_program_at_all": "",
    "no_function_of_that_name": "def sum_of(a, b):\n    return a + b\n",
    "a_name_that_is_no_function": "add = 5\n",
    "wrong_number_of_arguments": "def add(a):\n    return a\n",
}
