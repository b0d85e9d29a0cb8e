"""A calculator for agents: exact arithmetic on integers and fractions, the usual functions, at a bounded cost.

The text is cut into tokens of a short list, so that nothing but numbers, names, operators, brackets and commas reaches
``ast.parse``; the tree is then evaluated by node type. Nothing of Python can be reached from an expression.
"""

from __future__ import annotations

import ast
import decimal
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

from mrlm_pl.environment.tools import Tool, ToolError, tool_schema

Number: TypeAlias = "int | float | Fraction"

MAX_CHARACTERS = 4_000
MAX_DEPTH = 100
"""Levels of brackets, calls, signs and powers inside one another."""

MAX_DIGITS = 1_000
"""Decimal digits of the largest number; intermediate results count as well."""

_MAX_BITS = math.ceil(MAX_DIGITS * math.log2(10))
_SIGNIFICANT = 15

_TOKEN = re.compile(
    r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)|(?P<name>[a-z][a-z_0-9]*)|"
    r"(?P<per_cent>%\s*of\b|%(?!\s*[0-9.a-z(]))|(?P<sign>\*\*|//|[-+*/%!^(),])|(?P<strange>\S)"
)
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "π": " pi "})
_PER_CENT, _FACTORIAL = "_per_cent", "_factorial"
_TOO_LARGE = f"the result is too large: more than {MAX_DIGITS} digits"


def evaluate(expression: str) -> Number:
    """Return the value of an expression: an int wherever it is whole and exact, else a fraction or a float.

    Operators are ``+ - * / // ** ^`` (both are powers), ``!`` (factorial) and ``%``. A per cent sign before a number, a
    name or an opening bracket is the remainder (``17 % 5``), else it is per cent (``50%``, ``15% of 280``). An equals
    sign at the end is ignored.

    Args:
        expression: the text; upper and lower case are alike.

    Raises:
        ToolError: the text is no expression, has no real value, or is too long, too deep or too large.

    >>> evaluate("17*23+4"), evaluate("15% of 280"), evaluate("sqrt(16)"), evaluate("2^10"), evaluate("1/3 + 1/6")
    (395, 42, 4, 1024, Fraction(1, 2))
    """
    source = _source(expression)
    try:
        tree = ast.parse(source, mode="eval")
    except SyntaxError:
        raise ToolError("it is not an expression; write for example (2 + 3) * sqrt(16)") from None
    except (RecursionError, MemoryError, ValueError):
        raise ToolError("it is nested too deeply") from None
    try:
        return _value(tree.body, 0)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError(_TOO_LARGE) from None
    except (ValueError, TypeError) as error:
        raise ToolError(f"no real value: {error}") from None


def shown(value: Number) -> str:
    """Return the number as text: integers in full, others with up to 15 significant digits.

    >>> shown(42), shown(Fraction(1, 8)), shown(Fraction(2, 3)), shown(1.0)
    ('42', '0.125', '0.666666666666667', '1')
    """
    if isinstance(value, int):
        return str(value)
    with decimal.localcontext(decimal.Context(prec=_SIGNIFICANT, Emax=10_000, Emin=-10_000)):
        top, bottom = map(decimal.Decimal, value.as_integer_ratio())
        rounded = (top / bottom).normalize()
        return f"{rounded:f}" if -7 <= rounded.adjusted() < _SIGNIFICANT else f"{rounded:e}"


class Calculator(Tool):
    """Evaluates one expression for each call; see :func:`evaluate`."""

    schema = tool_schema(
        "calculator", "Evaluate an expression such as 17*23+4, sqrt(2), 15% of 280.", {"expression": {"type": "string"}}
    )

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the value as text; see :meth:`Tool.call`."""
        return shown(evaluate(arguments["expression"]))


def _source(expression: str) -> str:
    """Return Python source of the expression, made of known tokens only."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters; {MAX_CHARACTERS} are the most")
    text = expression.lower().translate(_SPELLINGS).rstrip("=? \n\t")
    if not text.strip():
        raise ToolError("the expression is empty")
    return " ".join(map(_python_token, _TOKEN.finditer(text)))


def _python_token(token: re.Match[str]) -> str:
    """Return a token as Python; a postfix sign (per cent, factorial) becomes a subscript, which binds as closely."""
    kind, text = token.lastgroup, token.group()
    if kind == "strange":
        raise ToolError(f"{text!a} is not allowed; use numbers, + - * / // % ^ ! ( ) and functions")
    if kind == "number":
        return _literal(text)
    if kind == "per_cent":
        return f"[{_PER_CENT}] *" if text.endswith("of") else f"[{_PER_CENT}]"
    if text == "of":
        raise ToolError("'of' follows a per cent sign, as in 15% of 280")
    return {"^": "**", "!": f"[{_FACTORIAL}]"}.get(text, text)


def _literal(text: str) -> str:
    mantissa, _, exponent = text.partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent.lstrip("+-0")) > 4 or abs(int(exponent or 0)) > MAX_DIGITS:
        raise ToolError(f"the number {text[:20]} is too long: more than {MAX_DIGITS} digits")
    value = Fraction(text)
    return f"{value.numerator}" if value.denominator == 1 else f"_fraction({value.numerator}, {value.denominator})"


def _value(node: ast.expr, depth: int) -> Number:
    """Return the value of a node; every intermediate result is checked for its size."""
    if depth > MAX_DEPTH:
        raise ToolError(f"it is nested too deeply; {MAX_DEPTH} levels are the most")
    spine: list[ast.BinOp] = []  # a long sum leans to the left; walking down it takes no recursion
    while isinstance(node, ast.BinOp):
        spine.append(node)
        node = node.left
    value = _operand(node, depth)
    for step in reversed(spine):
        value = _check_number(_OPERATORS[type(step.op)](value, _value(step.right, depth + 1)))
    return value


def _operand(node: ast.expr, depth: int) -> Number:
    if isinstance(node, ast.Constant):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Name):
        if node.id not in _CONSTANTS:
            raise ToolError(f"there is no name {node.id[:40]!r}; {_KNOWN}")
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
        return _call_function(node.slice.id, [node.value], depth)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _call_function(node.func.id, node.args, depth)
    if isinstance(node, ast.Tuple):
        raise ToolError("a comma separates the arguments of a function; write 1234, not 1,234")
    raise ToolError("it is not an expression; write a sign between two numbers, as in 2*(3+4)")


def _call_function(name: str, nodes: Sequence[ast.expr], depth: int) -> Number:
    arguments = [_value(node, depth + 1) for node in nodes]
    if name not in _FUNCTIONS:
        raise ToolError(f"there is no function {name[:40]!r}; {_KNOWN}")
    least, most, function = _FUNCTIONS[name]
    if not least <= len(arguments) <= most:
        raise ToolError(f"{name} takes {least if least == most else f'{least} or more'} arguments")
    return _check_number(function(*arguments))


def _check_number(value: Any) -> Number:
    if isinstance(value, complex):
        raise ToolError("it has no real value")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ToolError(_TOO_LARGE)
        return value
    if _bits(value) > _MAX_BITS:
        raise ToolError(_TOO_LARGE)
    return value.numerator if value.denominator == 1 else value


def _bits(value: int | Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _divide(left: Number, right: Number) -> Number:
    return left / right if isinstance(left, float) else Fraction(left) / right


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, float) or not isinstance(exponent, int):
        return base**exponent
    if (_bits(base) - 1) * abs(exponent) > _MAX_BITS:
        raise ToolError(_TOO_LARGE)
    return Fraction(base) ** exponent


def _square_root(value: Number) -> Number:
    if isinstance(value, (int, Fraction)) and value >= 0:
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if top * top == value.numerator and bottom * bottom == value.denominator:
            return Fraction(top, bottom)
    return math.sqrt(value)


def _factorial(value: Number) -> int:
    number = _whole(value)
    if number > MAX_DIGITS:
        raise ToolError(_TOO_LARGE)
    return math.factorial(number)


def _choices(function: Callable[[int, int], int], n: Number, k: Number) -> int:
    total, chosen = _whole(n), _whole(k)
    drawn = min(chosen, abs(total - chosen)) if function is math.comb else chosen
    if 0 <= drawn <= total and drawn * total.bit_length() > 8 * _MAX_BITS:
        raise ToolError(_TOO_LARGE)
    return function(total, chosen)


def _whole(value: Number) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int):
        raise ToolError(f"{shown(value)} is not a whole number")
    return value


def _round(value: Number, digits: Number = 0) -> Number:
    places = _whole(digits)
    if abs(places) > MAX_DIGITS:
        raise ToolError(f"rounding to {places} places; {MAX_DIGITS} are the most")
    return round(value, places) if isinstance(value, float) else round(Fraction(value), places)


def _integers(function: Callable[..., int], *values: Number) -> int:
    return function(*map(_whole, values))


def _logarithm(value: Number, base: Number = math.e) -> float:
    if base == 10:
        return math.log10(value)
    return math.log(value) if base == math.e else math.log(value, base)


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}
_MANY = 100
_OF_ONE = "acos asin atan ceil cos cosh degrees exp floor log10 log2 radians sin sinh tan tanh"
_FUNCTIONS: dict[str, tuple[int, int, Callable[..., Any]]] = {
    **{name: (1, 1, getattr(math, name)) for name in _OF_ONE.split()},
    "_fraction": (2, 2, Fraction),
    _FACTORIAL: (1, 1, _factorial),
    _PER_CENT: (1, 1, lambda value: _divide(value, 100)),
    "abs": (1, 1, abs),
    "atan2": (2, 2, math.atan2),
    "comb": (2, 2, partial(_choices, math.comb)),
    "factorial": (1, 1, _factorial),
    "gcd": (1, _MANY, partial(_integers, math.gcd)),
    "lcm": (1, _MANY, partial(_integers, math.lcm)),
    "ln": (1, 1, math.log),
    "log": (1, 2, _logarithm),
    "max": (1, _MANY, max),
    "min": (1, _MANY, min),
    "perm": (2, 2, partial(_choices, math.perm)),
    "round": (1, 2, _round),
    "sqrt": (1, 1, _square_root),
    "sum": (1, _MANY, lambda *values: sum(values)),
}
_KNOWN = "known are " + ", ".join(name for name in (*_CONSTANTS, *sorted(_FUNCTIONS)) if not name.startswith("_"))
