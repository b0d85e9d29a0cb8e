"""A candidate's program: it is loaded, and its functions and objects are used at the request of tests."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from mrlm_pl.sandbox.inside.files import Files
from mrlm_pl.sandbox.inside.shared import KINDS, Shared
from mrlm_pl.sandbox.inside.values import Opaque, decode, encode

MODULE = "solution"
BUILT_IN: dict[str, Callable[..., Any]] = {
    "get": getattr, "set": setattr, "delete": delattr, "is_instance": isinstance, "__bool__": bool, "__hash__": hash,
    "__iter__": iter, "__len__": len, "__next__": next, "__repr__": repr, "__str__": str,
}  # fmt: skip


class Program:
    """A program and its objects, by number: those that cannot be passed by value stay here and are mentioned."""

    def __init__(self) -> None:
        self._module = types.ModuleType(MODULE)
        self._names = self._module.__dict__
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._files = Files()
        self._shared = Shared(lambda value: encode(value, self.keep), lambda data: decode(data, self.recall))

    def load(self, request: dict[str, Any]) -> None:
        """Execute the program as a module, after the given code; it must define the required names."""
        sys.modules[MODULE] = self._module
        exec(compile(request["given"], "<given>", "exec"), self._names)
        for name in request["required"]:
            self._names.pop(name, None)
        exec(compile(request["source"], f"<{MODULE}>", "exec"), self._names)
        for name in request["required"]:
            if name not in self._names:
                raise NameError(f"the program does not define {name}")

    def call(self, request: dict[str, Any]) -> Any:
        """Call a function of the program with copies of the arguments."""
        arguments, named = (decode(request[kind], self.recall) for kind in ("arguments", "named"))
        return encode(self._names[request["name"]](*arguments, **named), self.keep)

    def use(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return an action's value or error, numbers of containers, and files and containers that changed.

        Args:
            request: ``action`` (``global``, ``call``, a key of ``BUILT_IN`` or the name of an operator's method),
                ``arguments`` and ``named``, encoded, and ``files`` and ``shared`` containers that changed.
        """
        self._files.apply(request["files"])
        self._shared.apply(request["shared"])
        arguments = [self._decode_argument(data, number) for data, number in request["arguments"]]
        named = {key: self._decode_argument(data, number) for key, data, number in request["named"]}
        numbers = [self._hold(value) for value in (*arguments, *named.values())]
        reply: dict[str, Any] = {"held": numbers}
        try:
            value = self._run_action(request["action"], arguments, named)
            reply["value"] = encode(value, self.keep)
            reply["number"] = self._hold(value)
        except Exception as error:  # of the candidate
            details = encode(list(error.args), self.keep)
            reply["raised"] = {"kind": type(error).__name__, "text": f"{error}"[:2000], "arguments": details}
        return {**reply, "files": self._files.changed(), "shared": self._shared.changed()}

    def _decode_argument(self, data: Any, number: int | None) -> Any:
        """Return an argument: the container of a number, where the tests got it from here."""
        return decode(data, self.recall) if number is None else self._objects[number]

    def _hold(self, value: Any) -> int | None:
        """Return the number of a container, of which the tests have a copy from now on; None of other values."""
        if type(value) not in KINDS:
            return None
        number = self.keep(value).number
        self._shared.hold(number, value)
        return number

    def keep(self, value: Any) -> Opaque:
        """Return the mention of an object, the same one each time."""
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return Opaque(number, type(value).__name__)

    def recall(self, mention: Opaque) -> Any:
        """Return the object of a mention."""
        return self._objects[mention.number]

    def _run_action(self, action: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        if action == "global":
            return self._names[arguments[0]]
        if action == "call":
            return arguments[0](*arguments[1:], **named)
        function = BUILT_IN.get(action) or getattr(operator, action, None)
        if function is not None:
            return function(*arguments)
        return getattr(arguments[0], action)(*arguments[1:])
