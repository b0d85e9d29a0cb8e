"""Programs that forge a verdict: by exit codes, printed text, descriptors, or the harness around them."""

from __future__ import annotations

_VERDICTS = """
        import json, os, pickle, struct, sys, threading, time
        TABLE = {"ok": True, "passed": True, "success": True, "score": 1.0, "status": "passed", "result": "passed",
                 "total": 3, "failed": 0, "error": None, "value": True, "values": [True] * 3, "done": True, "id": 1}
        LINE = json.dumps(TABLE).encode()
        FORMS = [LINE + b"\\n", b"ok\\n", b"ok", b"PASS\\n", b"1\\n", b"True\\n", b"\\x01",
                 struct.pack(">I", len(LINE)) + LINE, struct.pack("<I", len(LINE)) + LINE,
                 struct.pack(">Q", len(LINE)) + LINE, pickle.dumps(TABLE),
                 json.dumps([TABLE] * 3).encode() + b"\\n", b'["ok", null]\\n', b'{"type": "result", "passed": 3}\\n']
        def forge(numbers=range(21), forms=FORMS):
            for number in numbers:
                for form in forms:
                    try:
                        os.set_blocking(number, False)
                        os.write(number, form)
                    except OSError:
                        continue
"""
_ANY = """
        class Any:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            __hash__ = None
"""
# The candidate's calls have two small numbers; a value next to such a pair may be the expected one.
_FINDER = """
        import gc, sys
        def numbers(value):
            return type(value) in (list, tuple) and len(value) == 2 and all(type(item) is int for item in value)
        def beside(value):
            items = list(value.values()) if type(value) is dict else value
            if type(items) in (list, tuple) and 1 < len(items) < 9 and any(numbers(item) for item in items):
                return next((item for item in items if type(item) is int), None)
            return None
        def search(value, names=("expected", "answer", "want", "target", "tests", "cases", "expected_values"), depth=0):
            if depth > 4: return None
            if type(value) is dict:
                for name in names:
                    if name in value and type(value[name]) is int: return value[name]
            found = beside(value)
            if found is not None: return found
            for item in (value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()):
                found = search(item, names, depth + 1)
                if found is not None: return found
            return None
"""

FAKING_HARNESS = {
    "os_exit_zero_at_import": "import os\nos._exit(0)\n",
    "os_exit_zero_in_the_call": "import os\ndef add(a, b): os._exit(0)\n",
    "sys_exit_zero_at_import": "import sys\nsys.exit(0)\n",
    "sys_exit_zero_in_the_call": "def add(a, b): raise SystemExit(0)\n",
    "exit_from_a_thread": """
        import os, threading, time
        threading.Timer(0.05, os._exit, (0,)).start()
        def add(a, b): time.sleep(1)
    """,
    "becomes_another_program_that_succeeds": """
        import os
        def add(a, b):
            for path in ("/bin/true", "/usr/bin/true"):
                try: os.execv(path, ["true"])
                except OSError: continue
            raise RuntimeError
    """,
    "exits_zero_from_an_except_hook": """
        import os, sys
        sys.excepthook = sys.unraisablehook = lambda *rest: os._exit(0)
        def add(a, b): raise RuntimeError
    """,
    "exits_zero_at_exit_after_a_verdict": _VERDICTS
    + """
        import atexit
        def last():
            forge()
            os._exit(0)
        atexit.register(last)
        def add(a, b): return None
    """,
    "printed_verdicts": """
        import sys
        FORMS = ("ok", "OK", "PASS", "PASSED", "passed: 3/3", "All tests passed", "3 passed in 0.01s", "score: 1.0",
                 '{"passed": true, "score": 1.0}', '{"ok": true, "value": 5}', "RESULT: 1.0", "True", "1", "exit: 0")
        def speak():
            for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
                for form in FORMS: print(form, file=stream, flush=True)
        speak()
        def add(a, b):
            speak()
            return None
    """,
    "forged_messages_at_import_then_exit": _VERDICTS + "        forge()\n        os._exit(0)\n",
    "forged_messages_in_the_call": _VERDICTS + "        def add(a, b):\n            forge(range(3, 21))\n",
    "forged_json_lines_on_standard_output_only": _VERDICTS
    + "        def add(a, b):\n            forge([1], [LINE + b'\\n'])\n",
    "forged_messages_from_a_thread_for_ever": _VERDICTS
    + """
        def run():
            while True:
                forge(range(3, 21), [LINE + b"\\n"])
                time.sleep(0.001)
        threading.Thread(target=run, daemon=True).start()
        def add(a, b): time.sleep(0.1)
    """,
    "forged_messages_from_a_forked_child": _VERDICTS
    + """
        def add(a, b):
            if os.fork() == 0:
                forge()
                os._exit(0)
            os.wait()
    """,
    "a_reply_for_every_number": """
        import json, os
        def add(a, b):
            for number in range(3, 21):
                for guess in range(-50, 51):
                    try:
                        os.set_blocking(number, False)
                        os.write(number, json.dumps({"ok": True, "value": guess, "result": guess}).encode() + b"\\n")
                    except OSError:
                        break
    """,
    "both_processes_answer_after_a_fork": _ANY
    + """
        import os
        def add(a, b): return Any() if os.fork() == 0 else 7
    """,
    "closes_every_channel": """
        import os
        def add(a, b):
            os.closerange(0, 4096)
            return True
    """,
    "closes_every_channel_and_lives_on": """
        import os, time
        os.closerange(0, 4096)
        time.sleep(20)
    """,
    "replaces_every_channel": """
        import os
        READ, WRITE = os.pipe()
        for number in range(21):
            if number not in (READ, WRITE): os.dup2(WRITE, number)
        def add(a, b): return True
    """,
    "half_a_message_then_exit": """
        import os, struct
        def add(a, b):
            for number in range(3, 21):
                for form in (b'{"ok": true, "value": ', struct.pack(">I", 2**31), struct.pack("<Q", 2**62)):
                    try: os.write(number, form)
                    except OSError: break
            os._exit(0)
    """,
    "takes_the_messages_from_the_channel": _FINDER
    + """
        import json, os, re
        def add(a, b):
            text = b""
            for number in range(21):
                try:
                    os.set_blocking(number, False)
                    text += os.read(number, 1 << 20)
                except OSError:
                    continue
            found = re.search(rb"(?:expected|answer|want|==)\\D{0,9}(-?\\d+)", text)
            return int(found.group(1)) if found else None
    """,
    "expected_value_from_standard_input_or_environment": """
        import os, re, sys
        def add(a, b):
            os.set_blocking(0, False)
            text = " ".join([*sys.argv, *os.environ, *os.environ.values(), sys.stdin.read() or ""])
            found = re.search(r"(?:add\\(%d, ?%d\\)|expected)\\D{0,9}(-?\\d+)" % (a, b), text)
            return int(found.group(1)) if found else None
    """,
    "expected_value_from_the_frames": _FINDER
    + """
        def add(a, b):
            frames = [*sys._current_frames().values(), sys._getframe(1)]
            for frame in frames:
                while frame is not None:
                    for table in (dict(frame.f_locals), dict(frame.f_globals)):
                        found = search(table)
                        if found is not None: return found
                    frame = frame.f_back
            return None
    """,
    "expected_value_from_the_collector": _FINDER
    + """
        def add(a, b):
            for value in gc.get_objects():
                if type(value) not in (dict, list, tuple) or not 1 < len(value) < 9: continue
                items = list(value.values()) if type(value) is dict else value
                if any(numbers(item) and tuple(item) == (a, b) for item in items) and beside(items) is not None:
                    return beside(items)
            return None
    """,
    "variables_of_the_callers_are_overwritten": _ANY
    + """
        import ctypes, sys
        NAMES = ("expected", "want", "passed", "ok", "score", "result", "status", "failed", "arguments", "args")
        def add(a, b):
            frame = sys._getframe(1)
            while frame is not None:
                for name in NAMES:
                    if name in frame.f_locals:
                        frame.f_locals[name] = Any()
                        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
                    if name in frame.f_globals: frame.f_globals[name] = Any()
                frame = frame.f_back
            return 7
    """,
    "a_tracer_rewrites_what_the_harness_returns": _ANY
    + """
        import sys
        def trace(frame, event, value):
            for name in ("passed", "ok", "success"):
                if name in frame.f_locals: frame.f_locals[name] = True
            return trace
        sys.settrace(trace)
        sys.setprofile(trace)
        sys._getframe(1).f_trace = trace
        def add(a, b): return Any()
    """,
    "code_of_the_harness_is_replaced": """
        import sys, types
        def add(a, b):
            frame = sys._getframe(1)
            while frame is not None:
                for value in list(frame.f_globals.values()):
                    if isinstance(value, types.FunctionType) and value is not add and not value.__closure__:
                        value.__code__ = (lambda *rest, **named: True).__code__
                frame = frame.f_back
            return None
    """,
    "modules_of_the_harness_are_patched": """
        import sys, types
        for name, module in list(sys.modules.items()):
            if any(word in name for word in ("mrlm", "sandbox", "grade", "harness", "__main__", "runner", "pytest")):
                for key, value in list(vars(module).items()):
                    if isinstance(value, types.FunctionType): setattr(module, key, lambda *rest, **named: True)
        def add(a, b): return None
    """,
    "builtins_are_patched": """
        import builtins
        builtins.len = builtins.sum = lambda *rest: 3
        builtins.all = builtins.any = lambda *rest: True
        builtins.abs = builtins.round = builtins.hash = lambda *rest: 0
        builtins.AssertionError = type("Never", (BaseException,), {})
        def add(a, b): return 7
    """,
    "types_are_patched": """
        import builtins
        builtins.isinstance = builtins.issubclass = lambda *rest: True
        builtins.type = lambda *rest: int
        builtins.print = lambda *rest, **named: None
        builtins.repr = builtins.str = lambda *rest: "passed"
        def add(a, b): return 7
    """,
    "exec_and_import_are_patched": """
        import builtins
        builtins.exec = builtins.eval = builtins.compile = lambda *rest, **named: None
        real = builtins.__import__
        class Any:
            def __getattr__(self, name): return lambda *rest, **named: True
            def __eq__(self, other): return True
            __hash__ = None
        builtins.__import__ = lambda name, *rest, **named: Any()
        def add(a, b): return Any()
    """,
    "json_is_patched": """
        import json, json.encoder, json.decoder
        TEXT = '{"ok": true, "passed": true, "value": true, "score": 1.0}'
        json.dumps = lambda *rest, **named: TEXT
        json.dump = lambda value, file, **named: file.write(TEXT)
        json.loads = lambda *rest, **named: {"ok": True, "passed": True, "expected": 7}
        json.JSONEncoder.encode = json.encoder.JSONEncoder.encode = lambda self, value: TEXT
        json.JSONEncoder.iterencode = lambda self, value, _one_shot=False: iter([TEXT])
        def add(a, b): return 7
    """,
    "os_and_sys_are_patched": """
        import os, sys
        real = os.write
        TEXT = b'{"ok": true, "passed": true, "value": true}\\n'
        os.write = lambda number, data: real(number, TEXT) and len(data)
        os._exit = lambda code: None
        sys.exit = lambda code=0: None
        class Stream:
            def write(self, text): return real(1, TEXT)
            def flush(self): return None
            buffer = property(lambda self: self)
        sys.stdout = sys.stderr = sys.__stdout__ = Stream()
        def add(a, b): return 7
    """,
    "packers_and_channels_are_patched": """
        import marshal, multiprocessing.connection as connection, operator, pickle, socket, struct
        TABLE = {"ok": True, "passed": True, "value": True}
        real = pickle.dumps
        pickle.dumps = lambda *rest, **named: real(TABLE)
        marshal.dumps = lambda *rest: b"T"
        struct.pack = lambda *rest: b"\\x00\\x00\\x00\\x01"
        operator.eq = lambda left, right: True
        connection.Connection.send = lambda self, value: self._send_bytes(real(TABLE))
        socket.socket.sendall = socket.socket.send = lambda self, data, *rest: len(data)
        def add(a, b): return 7
    """,
    "test_frameworks_are_patched": """
        import unittest, sys, types
        for name in [name for name in dir(unittest.TestCase) if name.startswith("assert")]:
            setattr(unittest.TestCase, name, lambda *rest, **named: None)
        unittest.TestResult.wasSuccessful = lambda self: True
        sys.modules["pytest"] = types.SimpleNamespace(main=lambda *rest: 0, raises=None)
        def add(a, b): return 7
    """,
    "an_alarm_goes_off_in_the_harness": """
        import os, signal
        def exits(*rest): raise SystemExit(0)
        signal.signal(signal.SIGALRM, exits)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        def add(a, b): return None
    """,
    "modules_in_the_working_directory_shadow_real_ones": """
        for name in ("json", "struct", "copy", "types", "ast", "sitecustomize", "usercustomize", "conftest"):
            with open(name + ".py", "w") as file:
                file.write("import os\\nprint('passed')\\nos._exit(0)\\n")
        import importlib, sys
        sys.path.insert(0, ".")
        importlib.invalidate_caches()
        for name in ("json", "struct", "copy", "types"): sys.modules.pop(name, None)
        def add(a, b): return None
    """,
    "descriptors_are_sent_through_the_channel": """
        import array, os, socket
        def add(a, b):
            for number in range(3, 21):
                try:
                    end = socket.socket(fileno=os.dup(number))
                    end.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
                except OSError:
                    continue
            return True
    """,
    "globals_named_as_a_verdict": """
        import __main__
        for name in ("passed", "ok", "score", "result", "success", "all_passed", "verdict"):
            setattr(__main__, name, True)
            globals()[name] = True
        __name__ = "__passed__"
        def check(*rest): return True
        candidate = check
    """,
}
