r"""Reading the final answer out of a reply, and comparing it by exact value.

The answer is the last ``\boxed{}``, else the last ``#### N``, else the last "answer is N", else the last number. Values
are exact fractions, so there is no tolerance to tune, and every step is bounded: a reply is judged by its last
``MAX_CHARACTERS`` characters, and numbers of more than ``MAX_DIGITS`` digits are not numbers here.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARACTERS = 100_000
MAX_DIGITS = 300

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_POWER_OF_TEN = r"[ ]?(?:\\times|\\cdot|\*|x|×)[ ]?10[ ]?\^[ ]?\{?[-+]?[0-9]+\}?"
_PLAIN = rf"\$?{_UNSIGNED}(?:[eE][-+]?[0-9]+(?![0-9A-Za-z])|{_POWER_OF_TEN})?"
_LATEX_FRACTION = (
    rf"(?:[0-9]{{1,9}}[ ]?)?\\[dt]?frac(?:\{{[ ]?[-+]?{_UNSIGNED}[ ]?\}}\{{[ ]?{_UNSIGNED}[ ]?\}}|[0-9]{{2}})"
)
_NUMBER = (
    rf"(?:(?<![0-9A-Za-z_)\]}}.])[-+])?(?<![\^_0-9])(?<![\^_]\{{)(?<![\^_]-)(?<![\^_]\{{-)(?:\$[-+])?"
    rf"(?:{_LATEX_FRACTION}|{_PLAIN}(?:[ ]?/[ ]?{_PLAIN})?)(?:[ ]?%)?"
)
_NUMBERS = re.compile(_NUMBER)
_MARKED = re.compile(rf"####[ \t]{{0,4}}({_NUMBER})")
_STATED = re.compile(
    rf"answer\s{{1,4}}is\s{{0,4}}:?\s{{0,4}}(?:[\\*(\[]{{0,4}})(?:[a-z]\s?=\s?)?({_NUMBER})(?![0-9.,]*\s{{0,2}}[-+*/x×=]\s{{0,2}}\$?[0-9])",
    re.IGNORECASE,
)
_BRACES = re.compile(r"\\[{}]|\\boxed\s{0,4}\{|[{}]")
_PARTS = re.compile(
    rf"(?P<sign>[-+]?\$?[-+]?)(?:(?P<whole>[0-9]{{1,9}})?\\[dt]?frac(?:\{{(?P<top>[-+]?{_UNSIGNED})\}}"
    rf"\{{(?P<bottom>{_UNSIGNED})\}}|(?P<one>[0-9])(?P<two>[0-9]))|(?P<left>{_PLAIN})(?:/(?P<right>{_PLAIN}))?)%?"
)
_DIGITS = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_OPERAND = r"-?\$?[0-9]{1,20}(?:,[0-9]{3}){0,5}(?:\.[0-9]{1,20})?"
_EQUATIONS = re.compile(
    rf"(?<![0-9.,/*+(-])({_OPERAND}(?:[ ]?[-+*/x×][ ]?{_OPERAND}){{1,8}})[ ]?=[ ]?({_OPERAND})(?![0-9])"
)
_TERMS = re.compile(r"([-+*/])(-?[0-9.]+)")


def extract_answer(reply: str) -> str | None:
    r"""The text of the number that the reply gives as its answer, or None if it gives none.

    A closed box decides, even when it holds no number.

    Args:
        reply: the whole text of the reply.

    >>> extract_answer(r"3 apples: \boxed{3}. No, \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> extract_answer("3 apples and 4 pears, so 7")
    '7'
    >>> extract_answer("I do not know") is None
    True
    """
    text = _plain_text(reply[-MAX_CHARACTERS:])
    box = _last_box(text)
    if box is not None:
        return _last_number(box)
    for pattern in (_MARKED, _STATED):
        stated = [match.group(1) for match in pattern.finditer(text)]
        if stated:
            return stated[-1].strip()
    return _last_number(text)


def number_value(text: str) -> Fraction | None:
    r"""The exact value of a number's text, or None if it is none (or has too many digits).

    Understood are thousands separators, a dollar sign, exponents, fractions (``2468/2``, ``\frac{1}{2}``) and per cent.

    >>> number_value("$1,234.00") == number_value("1.234e3") == number_value("2468/2") == 1234
    True
    >>> number_value("50%"), number_value("9e999999999"), number_value("1/0")
    (Fraction(1, 2), None, None)
    """
    compact = _plain_text(text).replace(" ", "")
    parts = _PARTS.fullmatch(compact) if len(compact) <= 2 * MAX_DIGITS else None
    if parts is None:
        return None
    if parts["left"] is not None:
        top, bottom = _unsigned_value(parts["left"]), _unsigned_value(parts["right"] or "1")
    else:
        top, bottom = _unsigned_value(parts["top"] or parts["one"]), _unsigned_value(parts["bottom"] or parts["two"])
    if top is None or not bottom:
        return None
    value = top / bottom + int(parts["whole"] or 0)
    if "-" in parts["sign"]:
        value = -value
    return value / 100 if compact.endswith("%") else value


def equal_answers(reply: str, expected: str) -> bool:
    r"""Whether two numbers have the same value.

    A reply with a per cent sign equals an expected number without one in both readings, because questions that ask for
    a percentage have expected answers such as ``50``.

    Args:
        reply: the number that the reply gave.
        expected: the right answer.

    >>> equal_answers("0.5", r"\frac{1}{2}"), equal_answers("50%", "0.5"), equal_answers("50%", "50")
    (True, True, True)
    >>> equal_answers("0.5", "50"), equal_answers("1234", "1.234")
    (False, False)
    """
    value, target = number_value(reply), number_value(expected)
    if value is None or target is None:
        return False
    per_cent = "%" in reply and "%" not in expected
    return value == target or (per_cent and 100 * value == target)


def shows_steps(reply: str, question: str, answer: str) -> bool:
    """Whether the reply works something out.

    That is: it holds a true equation with an operation, which uses a number of the question or arrives at the answer.

    Args:
        reply: the whole text of the reply.
        question: the problem's text.
        answer: the right answer.

    >>> shows_steps("7*8=56, so 51", "What is 7 * 8 - 5?", "51"), shows_steps("51=51", "What is 7 * 8 - 5?", "51")
    (True, False)
    >>> shows_steps("Step 1: I think. Step 2: 1+1=2", "What is 7 * 8 - 5?", "51")
    False
    """
    given = {number_value(text) for text in _DIGITS.findall(question[-MAX_CHARACTERS:])}
    target = number_value(answer)
    for left, right in _EQUATIONS.findall(_plain_text(reply[-MAX_CHARACTERS:])):
        terms = _TERMS.findall("+" + re.sub(r"[ $,]", "", left).replace("x", "*").replace("×", "*"))
        value = _chain_value(terms)
        used = {number_value(number) for _, number in terms}
        if value is not None and value == number_value(right) and (value == target or used & given):
            return True
    return False


def _plain_text(text: str) -> str:
    for latex, plain in (("\\!", ""), ("\\,", ""), ("{,}", ","), ("\\%", "%"), ("\\$", "$"), ("\u2212", "-")):
        text = text.replace(latex, plain)
    return text


def _last_box(text: str) -> str | None:
    """Content of the box that was closed last; boxes that are never closed do not count."""
    opened: list[int] = []
    box: str | None = None
    start_of_box = -1
    for match in _BRACES.finditer(text):
        token = match.group()
        if token in ("\\{", "\\}"):
            continue
        if token != "}":
            opened.append(match.end() if len(token) > 1 else start_of_box)
        elif opened and (start := opened.pop()) >= 0:
            box = text[start : match.start()]
    return box


def _last_number(text: str) -> str | None:
    found = [match.group() for match in _NUMBERS.finditer(text)]
    return found[-1].strip() if found else None


def _unsigned_value(text: str) -> Fraction | None:
    digits = text.replace(",", "").replace("$", "")
    digits = re.sub(r"(?:\\times|\\cdot|\*|x|×)10\^\{?([-+]?[0-9]+)\}?", r"e\1", digits)
    mantissa, _, exponent = digits.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > MAX_DIGITS:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def _chain_value(terms: list[tuple[str, str]]) -> Fraction | None:
    """Value of ``+a*b-c...`` with the usual precedence, or None where a number is malformed or a divisor is 0."""
    total, product = Fraction(0), Fraction(0)
    for operator, text in terms:
        magnitude = number_value(text)
        if magnitude is None or (operator == "/" and magnitude == 0):
            return None
        if operator in "+-":
            total += product
            product = magnitude if operator == "+" else -magnitude
        else:
            product = product * magnitude if operator == "*" else product / magnitude
    return total + product
