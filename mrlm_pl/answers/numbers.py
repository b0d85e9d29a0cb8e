r"""Extract the final answer of a reply, and compare it by exact value.

The answer is the content of the last ``<answer>`` tag, or the last ``\boxed{}``, ``#### N`` or "answer is N", else the
last number. A box or a tag must hold one value: a list, an interval or an expression with variables is not an answer.
Values are exact fractions, without a tolerance, and every step is bounded: only the last ``MAX_CHARACTERS`` characters
of a reply are read, and numbers of more than ``MAX_DIGITS`` digits do not count.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction

from mrlm_pl.episode import final_text

MAX_CHARACTERS = 100_000
MAX_DIGITS = 300
MAX_EQUATIONS = 200

_UP_TO_TWELVE = "zero one two three four five six seven eight nine ten eleven twelve"
WORDS = {"one half": "1/2", "half": "1/2", **{word: str(value) for value, word in enumerate(_UP_TO_TWELVE.split())}}
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

_UNSIGNED = r"(?:[0-9]{1,3}(?:[,_'][0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_POWER_OF_TEN = r"[ ]?(?:\\times|\\cdot|\*|x|×)[ ]?10[ ]?\^[ ]?\{?[-+]?[0-9]+\}?"
_PLAIN = rf"\$?{_UNSIGNED}(?:[eE][-+]?[0-9]+(?![0-9A-Za-z])|{_POWER_OF_TEN})?"
_PART = rf"[ ]?[-+]?[ ]?{_UNSIGNED}[ ]?"
_MAGNITUDE = (
    rf"(?:(?:[0-9]{{1,9}}[ ]?)?\\frac\{{{_PART}\}}\{{{_PART}\}}|"
    rf"[0-9]{{1,9}}[ ]{{1,2}}[0-9]{{1,9}}/[0-9]{{1,9}}(?![0-9.,]?[0-9])|"
    rf"{_PLAIN}(?:[ ]?/[ ]?{_PLAIN})?)(?:[ ]{{0,3}}(?:{'|'.join(SCALES)})\b)?(?:[ ]?%)?"
)
_NUMBER = rf"(?:(?<![0-9A-Za-z_)\]}}.])[-+])?(?<![\^_0-9])(?<![\^_]\{{)(?<![\^_]-)(?<![\^_]\{{-)(?:\$[-+])?{_MAGNITUDE}"
_NUMBERS = re.compile(_NUMBER)
_VALUE = re.compile(
    rf"(?P<sign>[-+]?[ ]?\$?[-+]?)[ ]?"
    rf"(?:(?P<whole>[0-9]{{1,9}})?[ ]?\\frac\{{(?P<top>{_PART})\}}\{{(?P<bottom>{_PART})\}}|"
    rf"(?P<units>[0-9]{{1,9}})[ ]{{1,2}}(?P<over>[0-9]{{1,9}})/(?P<under>[0-9]{{1,9}})|"
    rf"(?P<left>{_PLAIN})(?:[ ]?/[ ]?(?P<right>{_PLAIN}))?)(?:[ ]{{0,3}}(?P<scale>{'|'.join(SCALES)}))?(?:[ ]?%)?"
)
_MARKED = re.compile(r"####")
_STATED = re.compile(
    r"\banswer[*_ ]{0,4}(?:\s{1,4}(?:is|was|equals|(?:would|will|should|must) be)\b|\s{0,4}[:=])", re.IGNORECASE
)
_LEADING = re.compile(
    r"(?:[\s:*_\"'`(\[{$\\]|(?:indeed|therefore|thus|then|just|simply|exactly|approximately|about|roughly|either|both|"
    r"between|USD|[a-z]\s?=)(?![A-Za-z])){0,20}?"
    rf"(?P<number>(?:(?:minus|negative)\s{{1,2}}|[-+][ ])?(?:\$[-+])?[-+]?{_MAGNITUDE}|"
    rf"(?:{'|'.join(WORDS)})\b(?![- ][a-z]))",
    re.IGNORECASE,
)
_OPERATION = re.compile(r"[0-9.,]*\s{0,2}(?:[-+*/x×=^]|\\times|\\cdot)\s{0,2}\$?[0-9]")
_MAYBE = r"(?:or\s{1,2}(?:(?:maybe|perhaps|possibly)\s)?|(?:maybe|perhaps|possibly)\s)"
_RESULT = rf"{_NUMBER}(?:[ ]?(?:[-+*/x×^]|\\times|\\cdot)[ ]?{_UNSIGNED}){{0,8}}"
_OTHERS = re.compile(
    rf"[^\S\n]{{0,2}}(?:(?:\b{_MAYBE}|\b(?:and|to)\s{{1,2}}|&\s?)(?P<other>{_RESULT})"
    rf"|(?:[,;][ ]?{_MAYBE}?|\({_MAYBE})(?P<listed>{_RESULT})"
    rf"(?=[ ]?(?:[\n;!?)\]}}&$]|\\[)\]}}]|\.(?![0-9])|,(?![0-9]{{3}})|(?:or|and)\b|$)|[ ]\())|[xyznk]\b|:[0-9]"
)
_MINUS = re.compile(r"(?i)(?:\bnegative|(?:^|[*_$]|[.,:;=(]\s*|\b(?:is|was|be|equals|to|of|at|s)\s+)minus|=\s*-)\s$")
_RESULT_END = re.compile(r"[.!?;](?=\s|$)|\n|,?\s(?=(?:or|and)\b)")
_BRACES = re.compile(r"\\[{}]|\\(?:boxed|fbox|framebox)\s{0,4}\{|[{}]")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.DOTALL)

_FONTS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|boldsymbol|mbox|operatorname)\s?\{([^{}]{0,200})\}")
_ARGUMENT = r"\s{0,2}(?:\{([^{}]{0,400})\}|([0-9]))"
_FRACTIONS = re.compile(rf"\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}")
_LATEX = (
    *(("\\!", ""), ("\\,", ""), ("{,}", ","), ("\\%", "%"), ("\\$", "$"), ("\\ ", " "), ("\\;", " "), ("\\:", " ")),
    *(("\\left", ""), ("\\right", ""), ("\\displaystyle", ""), ("^\\circ", ""), ("^{\\circ}", ""), ("~", " ")),
)
_NEGATED = re.compile(rf"-\(({_MAGNITUDE})\)")
_LATEX_MARKS = re.compile(r"[\\{^~]")
_NARROW_GROUPS = re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_SPACED_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_NO_ASCII = re.compile(r"[^\x00-\x7f]")

_UNIT_MARKS = re.compile(
    r"\\(?:boxed|fbox|framebox)|(?<=[A-Za-z])[ ]?\^[ ]?\{?[0-9]\}?|(?<=[A-Za-z])(?:-|[ ]{0,2}/[ ]{0,2})(?=[A-Za-z])|"
    r"(?<=[0-9])\^\{?[ ]?(?:st|nd|rd|th)\b[ ]?\}?"
)
_EMPHASIS = re.compile(r"(?<![0-9)] )(?<![\w)*])(\*\*|\*|__|_)(?=[^\s*_])([^*_]*[^\s*_])\1(?![\w*(])")
_LIST = re.compile(r"[,;]|\b(?:and|or)\b")
_NO_VALUE = re.compile(
    r"[-+*/^<>≤≥≠±×÷√|!]|(?<![A-Za-z]):|\\(?!approx|quad|qquad|degree|circ|euro|pounds)[A-Za-z]+|\b(?:not|[xyznk])\b|[0-9]"
)
_EXPRESSION_MARKS = ((r"\\times|\\cdot|×|·|(?<=[0-9]) x (?=[0-9])", "*"), (r"÷|\\div", "/"), (r"[ {}$,]", ""))
_EXPRESSION = re.compile(r"-?[0-9.]+(?:\^-?[0-9]+)?(?:[-+*/]-?[0-9.]+(?:\^-?[0-9]+)?){0,8}")
_DIGITS = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_OPERAND = r"-?\$?[0-9]{1,20}(?:,[0-9]{3}){0,5}(?:\.[0-9]{1,20})?"
_EQUATIONS = re.compile(
    rf"(?<![0-9.,/*+(-])({_OPERAND}(?:[ ]?[-+*/x×][ ]?{_OPERAND}){{1,8}})[ ]?=[ ]?({_OPERAND})(?![0-9])"
)
_TERMS = re.compile(r"([-+*/])(-?[0-9.]+(?:\^-?[0-9]+)?)")


def extract_answer(reply: str, operations: bool = True) -> str | None:
    r"""Return the text of the reply's final number, or None without one.

    A closed ``<answer>`` tag or box decides, even with no number or several.

    Args:
        reply: the whole text of the reply.
        operations: whether an operation in a tag, in a box or behind "answer is" counts by its value.

    >>> extract_answer(r"3 apples: \boxed{3}. No, \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> extract_answer("3 apples and 4 pears, so 7")
    '7'
    >>> extract_answer(r"\boxed{6, 5}") is extract_answer("I do not know") is None
    True
    """
    text, tagged, boxed = marked_answer(_plain_text(reply[-MAX_CHARACTERS:]))
    if boxed:
        return _single_number(text, operations)
    for pattern in (_MARKED, _STATED):
        # From the last one, since those before it do not count: reading them all takes quadratic time.
        for match in reversed(list(pattern.finditer(text))):
            for stated in _stated_number(text, match.end(), operations):
                return stated
    return _single_number(text, operations) if tagged else _last_number(text)


def marked_answer(reply: str) -> tuple[str, bool, bool]:
    r"""Return the part of a reply with its answer, and whether a tag, and a box, marks it.

    It is the text after ``</think>``, of that the content of the last ``<answer>`` tag, and of that the last box.

    >>> marked_answer(r"<think>7?</think> <answer>so \boxed{5}</answer>"), marked_answer("so 5")
    (('5', True, True), ('so 5', False, False))
    """
    text = final_text(reply)
    tags = [match.group(1) for match in _TAGGED.finditer(text)]
    text = tags[-1] if tags else text
    box = _last_box(text)
    return (text if box is None else box), bool(tags), box is not None


def number_value(text: str) -> Fraction | None:
    r"""Return the exact value of a number's text, or None if it is not a number or has too many digits.

    Supports thousands separators, a dollar sign, exponents, fractions (``2468/2``, ``\frac{1}{2}``), mixed numbers
    (``1 1/2``), ``thousand`` to ``trillion`` and percent.

    >>> number_value("$1,234.00") == number_value("1.234e3") == number_value("2468/2") == 1234
    True
    >>> number_value("50%"), number_value("1 1/2"), number_value("9e999999999"), number_value("1/0")
    (Fraction(1, 2), Fraction(3, 2), None, None)
    """
    plain = _plain_text(text).strip()
    match = _VALUE.fullmatch(plain) if len(plain) <= 3 * MAX_DIGITS else None
    if match is None:
        return None
    whole = Fraction(match["whole"] or match["units"] or 0)
    top = _part_value(match["top"] or match["over"] or match["left"])
    bottom = _part_value(match["bottom"] or match["under"] or match["right"] or "1")
    if top is None or not bottom:
        return None
    sign = -1 if "-" in match["sign"] else 1
    value = sign * (whole + top / bottom) * SCALES.get(match["scale"], 1)
    return value / 100 if plain.endswith("%") else value


def equal_answers(reply: str, expected: str) -> bool:
    r"""Return whether two numbers have the same value.

    A reply with a percent sign equals an expected number without one in both readings, since questions about
    percentages have expected answers such as ``50``.

    Args:
        reply: the reply's number.
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
    """Return whether the reply shows a calculation.

    That is a true equation with an operation that uses a number of the question or results in the answer, among the
    last :data:`MAX_EQUATIONS` different ones.

    Args:
        reply: the whole text of the reply.
        question: the problem's text.
        answer: the right answer.

    >>> shows_steps("7*8=56, so 51", "What is 7 * 8 - 5?", "51"), shows_steps("51=51", "What is 7 * 8 - 5?", "51")
    (True, False)
    >>> shows_steps("Step 1: I think. Step 2: 1+1=2", "What is 7 * 8 - 5?", "51")
    False
    """
    question_numbers = set(map(number_value, set(_DIGITS.findall(question[-MAX_CHARACTERS:]))))
    target = number_value(answer)
    equations = dict.fromkeys(_EQUATIONS.findall(_plain_text(reply[-MAX_CHARACTERS:])))
    for left, right in list(equations)[-MAX_EQUATIONS:]:
        terms = _TERMS.findall("+" + re.sub(r"[ $,]", "", left).replace("x", "*").replace("×", "*"))
        value = _chain_value(terms)
        used = {number_value(number) for _, number in terms}
        if value is not None and value == number_value(right) and (value == target or used & question_numbers):
            return True
    return False


def _plain_text(text: str) -> str:
    """Return the text with normalized signs, spaces, digits and LaTeX numbers."""
    if not text.isascii():
        text = _NARROW_GROUPS.sub("", text)
        text = _NO_ASCII.sub(lambda match: _ascii(match.group()), text)
    if _LATEX_MARKS.search(text):
        for latex, plain in _LATEX:
            text = text.replace(latex, plain)
        text = _FRACTIONS.sub(r"\\frac{\1\2}{\3\4}", _FONTS.sub(r" \1 ", text))
    return _NEGATED.sub(r"-\1", text)


def _ascii(character: str) -> str:
    """Replace dashes, spaces, digits, vulgar fractions and apostrophes by ASCII."""
    kind = unicodedata.category(character)
    if kind in ("Pd", "Zs") or character == "\u2212":
        return " " if kind == "Zs" else "-"
    if kind == "Nd":
        return str(unicodedata.digit(character))
    if kind == "No" and "\u2044" in (fraction := unicodedata.normalize("NFKC", character)):
        return " " + fraction.replace("\u2044", "/")
    return "" if kind == "Cf" else "'" if character == "\u2019" else character


def _last_box(text: str) -> str | None:
    """Return the content of the last closed box."""
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


def _single_number(text: str, operations: bool) -> str | None:
    """Return the number of a text with one value: a number with its unit, an equation's right side, an operation."""
    if len(text) > 2 * MAX_DIGITS:
        return None
    text = _UNIT_MARKS.sub("", _EMPHASIS.sub(r"\2", text))
    text = _SPACED_GROUPS.sub(lambda match: match.group().replace(" ", ""), text)
    if len(_NUMBERS.findall(text)) > 1 and _LIST.search(_NUMBERS.sub(" ", text)):
        return None
    side = text.rpartition("=")[2].strip()
    side = re.sub(r"\b(?:minus|negative)[ ]+|(?<![0-9A-Za-z)}])-[ ]+(?=[0-9.$\\])", "-", side)
    numbers = list(_NUMBERS.finditer(side))
    if len(numbers) == 1:
        rest = f"{side[: numbers[0].start()]} {side[numbers[0].end() :]}"
        if not _NO_VALUE.search(rest):
            return numbers[0].group().strip()
    value = WORDS.get(side.lower()) or (expression_value(side) if operations else None)
    return None if value is None else str(value)


def _stated_number(text: str, start: int, operations: bool) -> Iterator[str | None]:
    """Yield the number after each marker: None for several values, nothing without a number."""
    match = _LEADING.match(text, start)
    if match is None:
        return
    end = match.end()
    spaced = _SPACED_GROUPS.match(text, match.start("number"))
    if spaced and spaced.end() > end:
        yield spaced.group().replace(" ", "")
    else:
        word = match["number"].strip().lower()
        number: str | None = WORDS.get(word) or re.sub(r"^(?:minus|negative)\s+", "-", word)
        if _OPERATION.match(text, end):
            rest = _RESULT_END.split(text[end:], maxsplit=1)[0]
            number, end = _single_number(text[match.start("number") : end] + rest, operations), end + len(rest)
        while number and (others := _OTHERS.match(text, end)):
            other, end = _single_number(others["other"] or others["listed"] or "", operations) or "", others.end()
            if not any(map(equal_answers, (number, other), (other, number))):
                yield None
        yield number


def _last_number(text: str) -> str | None:
    for match in reversed(list(_NUMBERS.finditer(text))):
        before, after = text[max(0, match.start() - 20) : match.start()], text[match.end() : match.end() + 2]
        if not re.search(r"(?:\bnot|n't)\s$|[0-9]:$", before) and not re.match(r":[0-9]", after):
            return "-" * bool(_MINUS.search(before)) + match.group().strip()
    return None


def _part_value(text: str) -> Fraction | None:
    sign = -1 if "-" in text.lstrip()[:1] else 1
    digits = re.sub(r"[,_'$]", "", text.replace(" ", "").lstrip("+-"))
    digits = re.sub(r"(?:\\times|\\cdot|\*|x|×)10\^\{?([-+]?[0-9]+)\}?", r"e\1", digits)
    mantissa, _, exponent = digits.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > MAX_DIGITS:
        return None
    return sign * Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def expression_value(text: str) -> Fraction | None:
    """Return the value of an operation on plain numbers such as ``3 \\cdot 4`` or ``2^{-1}``."""
    if re.search(r"[0-9.][ ]+[0-9.]", text):
        return None
    for pattern, mark in _EXPRESSION_MARKS:
        text = re.sub(pattern, mark, text)
    return _chain_value(_TERMS.findall("+" + text)) if _EXPRESSION.fullmatch(text) else None


def _chain_value(terms: list[tuple[str, str]]) -> Fraction | None:
    """Return the value of ``+a*b-c...`` with the usual precedence; None for a malformed number or a divisor of 0."""
    total, product = Fraction(0), Fraction(0)
    for operator, text in terms:
        base, _, power = text.partition("^")
        value, exponent = number_value(base), int(power[:5] or 1)
        if value is None or abs(exponent) * len(base) > MAX_DIGITS or (value == 0 and exponent < 0):
            return None
        magnitude = value**exponent
        if operator == "/" and magnitude == 0:
            return None
        if operator in "+-":
            total += product
            product = magnitude if operator == "+" else -magnitude
        else:
            product = product * magnitude if operator == "*" else product / magnitude
    return total + product
