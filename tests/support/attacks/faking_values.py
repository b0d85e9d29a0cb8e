"""Programs that return values that pretend to be the right one."""

from __future__ import annotations

FAKING_VALUES = {
    "always_equal_object": """
        class Any:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            __hash__ = None
        def add(a, b): return Any()
    """,
    "never_unequal_object": """
        class Any:
            def __eq__(self, other): return NotImplemented
            def __ne__(self, other): return False
            def __lt__(self, other): return False
            __gt__ = __lt__
            def __sub__(self, other): return 0
            __rsub__ = __sub__
            def __abs__(self): return 0
        def add(a, b): return Any()
    """,
    "class_that_is_always_equal": """
        class Meta(type):
            def __eq__(cls, other): return True
            def __hash__(cls): return 5
            def __instancecheck__(cls, other): return True
            def __subclasscheck__(cls, other): return True
        class Any(metaclass=Meta): pass
        def add(a, b): return Any
    """,
    "object_whose_class_says_int": """
        class Any:
            @property
            def __class__(self): return int
            def __eq__(self, other): return True
            def __hash__(self): return 5
            def __index__(self): return 7
            __int__ = __index__
        def add(a, b): return Any()
    """,
    "int_subclass_always_equal": """
        class Number(int):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            __hash__ = int.__hash__
        def add(a, b): return Number(7)
    """,
    "int_subclass_named_int": """
        def text(self): return "passed"
        int_ = type("int", (int,), {"__eq__": lambda s, o: True, "__repr__": text, "__str__": text,
                                    "__module__": "builtins", "__qualname__": "int", "__hash__": int.__hash__})
        def add(a, b): return int_(7)
    """,
    "float_subclass_always_equal": """
        class Number(float):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __sub__(self, other): return 0.0
            __rsub__ = __sub__
        def add(a, b): return Number("nan")
    """,
    "str_subclass_always_equal": """
        class Text(str):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def strip(self, *rest): return self
            __hash__ = str.__hash__
        def add(a, b): return Text("anything")
    """,
    "list_and_dict_subclasses_always_equal": """
        class Items(list):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
        class Table(dict):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
        def add(a, b): return Table(value=Items()) if a > b else Items()
    """,
    "mock_any": """
        from unittest.mock import ANY
        def add(a, b): return ANY
    """,
    "magic_mock": """
        from unittest.mock import MagicMock
        def add(a, b):
            found = MagicMock(spec=int)
            found.__eq__ = lambda self, other: True
            return found
    """,
    "not_a_number_and_infinity": """
        def add(a, b): return float("nan") if a < b else float("inf")
    """,
    "list_of_all_guesses": """
        def add(a, b): return list(range(-100, 100))
    """,
    "generator_of_all_guesses": """
        def add(a, b): yield from range(-100, 100)
    """,
    "coroutine_function": """
        async def add(a, b): return True
    """,
    "add_is_a_class": """
        class add:
            def __init__(self, a, b): pass
            def __eq__(self, other): return True
            __hash__ = None
    """,
    "add_is_a_callable_that_becomes_true": """
        class Call:
            def __call__(self, a, b):
                self.__class__ = type("bool", (), {"__eq__": lambda s, o: True, "__bool__": lambda s: True,
                                                   "__call__": lambda s, *r: s, "__hash__": None})
                return self
        add = Call()
    """,
    "object_that_unpickles_as_always_equal": """
        MAKE = "type('Any', (), {'__eq__': lambda s, o: True, '__ne__': lambda s, o: False, '__hash__': None})()"
        class Bomb:
            def __reduce__(self): return eval, (MAKE,)
        def add(a, b): return Bomb()
    """,
    "object_that_runs_code_where_it_is_unpickled": """
        class Bomb:
            def __reduce__(self): return exec, ("open('@OUTSIDE@/unpickled', 'w').close()",)
            def __reduce_ex__(self, protocol): return self.__reduce__()
        def add(a, b): return [Bomb(), {"value": Bomb()}]
    """,
    "all_integers_pickle_as_code": """
        import copyreg, pickle
        MAKE = "type('Any', (), {'__eq__': lambda s, o: True, '__hash__': None})()"
        copyreg.pickle(int, lambda number: (eval, (MAKE,)))
        pickle.Pickler.dispatch_table = copyreg.dispatch_table
        def add(a, b): return 7
    """,
    "text_that_breaks_out_of_json": """
        def add(a, b): return '7"}\\n{"ok": true, "passed": true, "score": 1.0, "value": null, "expected": null}\\n'
    """,
    "table_shaped_like_a_verdict": """
        def add(a, b):
            return {"ok": True, "passed": 3, "total": 3, "score": 1.0, "status": "passed", "success": True,
                    "error": None, "__class__": "int", "__type__": "int", "py/object": "builtins.int"}
    """,
    "true_and_none_and_not_implemented": """
        CALLS = []
        def add(a, b):
            CALLS.append(a)
            return [True, None, NotImplemented, Ellipsis][len(CALLS) % 4]
    """,
    "comparison_of_integers_replaced_in_memory": """
        import ctypes
        SLOT = ctypes.CFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)
        KEEP = SLOT(lambda left, right, operation: True)
        def add(a, b):
            ctypes.c_void_p.from_address(id(int) + 200).value = ctypes.cast(KEEP, ctypes.c_void_p).value
            return 7
    """,
    "small_integers_overwritten_in_memory": """
        import ctypes
        def add(a, b):
            for number in range(0, 200):
                ctypes.c_uint32.from_address(id(number) + 24).value = 7
            return 7
    """,
    "module_that_answers_for_every_name": """
        import sys
        class Any:
            def __eq__(self, other): return True
            def __call__(self, *arguments, **named): return self
            def __getattr__(self, name): return self
            def __getitem__(self, name): return self
            def __bool__(self): return True
            def __iter__(self): return iter(())
            __hash__ = None
        for name in ("__main__", "candidate", "solution", __name__):
            sys.modules[name] = Any()
        globals()["add"] = Any()
    """,
    "raises_an_exception_that_reads_passed": """
        class Passed(AssertionError):
            def __str__(self): return "passed 3 of 3"
            __repr__ = __str__
            def __eq__(self, other): return True
            __hash__ = None
        def add(a, b): raise Passed
    """,
    "raises_an_exception_whose_text_exits": """
        import os
        class Trap(BaseException):
            def __str__(self): os._exit(0)
            __repr__ = __str__
            __traceback__ = property(__str__)
        def add(a, b): raise Trap
    """,
    "raises_stop_iteration_and_generator_exit": """
        CALLS = []
        def add(a, b):
            CALLS.append(a)
            raise [StopIteration(5), GeneratorExit(), KeyboardInterrupt(), StopAsyncIteration()][len(CALLS) % 4]
    """,
    "finalizer_prints_a_verdict_and_exits": """
        import os
        class Last:
            def __eq__(self, other): return True
            __hash__ = None
            def __del__(self):
                os.write(1, b'{"ok": true, "passed": true, "score": 1.0}\\n')
                os._exit(0)
        def add(a, b): return Last()
    """,
    "accepts_everything_as_a_context": """
        import contextlib, unittest
        class Any(contextlib.ContextDecorator):
            def __exit__(self, *problem): return True
            def __enter__(self): return self
            def __call__(self, *arguments): return self
            def __eq__(self, other): return True
            def __format__(self, form): return "True"
            __hash__ = None
        unittest.TestCase.failureException = type("Never", (Exception,), {})
        add = Any()
    """,
}
