"""Honest programs, some of them clumsy, that must get the full score."""

from __future__ import annotations

HONEST_SOURCES = {
    "plain": "def add(a, b):\n    return a + b\n",
    "windows_line_ends": "def add(a, b):\r\n    return a + b\r\n",
    "lambda_without_a_last_line_end": "add = lambda a, b: a + b",
    "recursion": """
        def add(a, b):
            if b == 0: return a
            return add(a + 1, b - 1) if b > 0 else add(a - 1, b + 1)
    """,
    "recursion_three_thousand_deep": """
        import sys
        sys.setrecursionlimit(10_000)
        def count(n): return 0 if n == 0 else 1 + count(n - 1)
        def add(a, b): return a + b + count(3000) - 3000
    """,
    "class_with_methods": """
        class Adder:
            def __init__(self, start): self.total = start
            def __add__(self, other): return Adder(self.total + other)
            def __repr__(self): return f"Adder({self.total})"
        def add(a, b): return (Adder(a) + b).total
    """,
    "callable_object": """
        class Add:
            def __call__(self, a, b): return a + b
        add = Add()
    """,
    "generators": """
        def numbers(a, b):
            yield a
            yield b
        def add(a, b): return sum(numbers(a, b))
    """,
    "type_hints_and_dataclasses": """
        from __future__ import annotations
        import dataclasses
        import typing
        from typing import List, Optional, Tuple
        @dataclasses.dataclass(frozen=True)
        class Pair:
            a: int
            b: int
            rest: Optional[List[int]] = None
            def total(self) -> int: return self.a + self.b
        def add(a: int, b: int) -> int:
            pair: Tuple[int, int] = (a, b)
            return Pair(*pair).total()
    """,
    "regular_expressions": """
        import re
        def add(a, b): return sum(int(part) for part in re.findall(r"-?\\d+", f"{a} and {b}"))
    """,
    "collections_and_itertools": """
        import collections, itertools
        from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
        def add(a, b):
            table = defaultdict(int)
            for key, value in itertools.product(["x"], [a, b]): table[key] += value
            return deque([table["x"]], maxlen=1).pop()
    """,
    "functools_and_operator": """
        import functools, operator
        @functools.lru_cache(maxsize=None)
        def add(a, b): return functools.reduce(operator.add, (a, b))
    """,
    "math_and_numbers": """
        import cmath, decimal, fractions, math, statistics
        def add(a, b): return int(math.fsum([a, b])) + int(fractions.Fraction(0)) + int(decimal.Decimal("0"))
    """,
    "heaps_and_bisection": """
        import bisect, heapq
        def add(a, b):
            heap = [a, b]
            heapq.heapify(heap)
            return heapq.heappop(heap) + heapq.heappop(heap)
    """,
    "json_and_text": """
        import json, string, textwrap
        def add(a, b): return sum(json.loads(json.dumps({"values": [a, b]}))["values"])
    """,
    "random_and_hashes": """
        import hashlib, random, uuid
        def add(a, b):
            random.seed(a)
            noise = random.randint(1, 9)
            assert len(hashlib.sha256(b"x").hexdigest()) == 64 and uuid.uuid4()
            return a + noise + b - noise
    """,
    "dates": """
        import calendar, datetime, time
        def add(a, b):
            start = datetime.date(2024, 2, 28)
            time.sleep(0.01)
            return ((start + datetime.timedelta(days=a)) - (start - datetime.timedelta(days=b))).days
    """,
    "a_file_in_the_working_directory": """
        def add(a, b):
            with open("numbers.txt", "w") as file: file.write(f"{a}\\n{b}\\n")
            with open("numbers.txt") as file: return sum(int(line) for line in file)
    """,
    "temporary_files_and_folders": """
        import os, tempfile
        def add(a, b):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "numbers")
                with open(path, "w") as file: file.write(f"{a} {b}")
                with open(path) as file, tempfile.NamedTemporaryFile("w") as other:
                    other.write("x")
                    return sum(map(int, file.read().split()))
    """,
    "a_database_in_memory": """
        import sqlite3
        def add(a, b): return sqlite3.connect(":memory:").execute("select ? + ?", (a, b)).fetchone()[0]
    """,
    "text_in_memory_and_archives": """
        import base64, csv, gzip, io, pickle, zlib
        def add(a, b):
            data = zlib.decompress(zlib.compress(gzip.decompress(gzip.compress(pickle.dumps([a, b])))))
            next(csv.reader(io.StringIO("1,2")))
            return sum(pickle.loads(base64.b64decode(base64.b64encode(data))))
    """,
    "much_printing": """
        import sys
        print("The program starts")
        def add(a, b):
            for number in range(200): print("adding", number)
            print("warning", file=sys.stderr)
            return a + b
    """,
    "printing_what_looks_like_a_verdict": """
        import logging
        def add(a, b):
            print('{"ok": false, "passed": false, "error": "failed"}')
            logging.warning("FAILED")
            return a + b
    """,
    "sorting_a_long_list": """
        def add(a, b):
            values = sorted(range(200_000, 0, -1), key=lambda value: value % 1000)
            return a + b if len(values) == 200_000 else None
    """,
    "fifty_megabytes": """
        def add(a, b):
            data = bytearray(50 << 20)
            data[-1] = 1
            return a + b + data[-1] - 1
    """,
    "a_third_of_a_second_of_work": """
        import time
        TABLE = None
        def add(a, b):
            global TABLE
            if TABLE is None:
                end = time.process_time() + 0.3
                while time.process_time() < end: TABLE = sum(range(1000))
            return a + b
    """,
    "letters_of_the_world": """
        # Größe, naïve, 数学, 🙂
        größe = {"数": 0, "🙂": 0}
        def add(a, b):
            print("Ergebnis für 数学 🙂")
            return a + b + sum(größe.values())
    """,
    "exceptions_are_caught": """
        def add(a, b):
            try: return [][a]
            except (IndexError, TypeError) as error: kept = str(error)
            finally: total = a + b
            try: raise SystemExit(1)
            except BaseException: return total
    """,
    "fences_in_a_text": '''
        """Adds.

        ```python
        add(1, 2)
        ```
        """
        TEXT = """```
        not the end
        ```"""
        def add(a, b):
            return a + b
    ''',
    "program_with_a_main_part": """
        import argparse, os, sys
        def add(a, b): return a + b
        def main():
            print(add(1, 2), len(sys.argv), os.getcwd(), os.environ.get("HOME"))
        if __name__ == "__main__": main()
    """,
    "asks_for_input_in_its_main_part": """
        def add(a, b): return a + b
        if __name__ == "__main__":
            try: print(add(int(input()), int(input())))
            except (EOFError, ValueError): print("no input")
    """,
    "a_coroutine_inside": """
        import asyncio
        async def slow(a, b): return a + b
        def add(a, b):
            step = slow(a, b)
            try: step.send(None)
            except StopIteration as done: return done.value
    """,
    "match_and_walrus": """
        import abc, contextlib, copy, enum, inspect, types
        class Sign(enum.Enum):
            PLUS = "+"
        def add(a, b, sign=Sign.PLUS):
            match sign:
                case Sign.PLUS if (total := a + b) is not None: return copy.deepcopy(total)
            return None
    """,
    "keeps_state_between_calls": """
        import gc, weakref
        SEEN = []
        def add(a, b):
            SEEN.append((a, b))
            gc.collect()
            return sum(SEEN[-1])
    """,
}
