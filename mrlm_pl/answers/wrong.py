"""Generate plausible wrong answers from right ones, with another final number or another label of an inference."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from random import Random

from mrlm_pl.answers.numbers import equal_answers, expression_value, extract_answer, number_value

_LABELS = ("entailment", "neutral", "contradiction")
_LABEL = re.compile(r"\b(?:entailment|neutral|contradiction)\b", re.IGNORECASE)
_LABEL_STEM = re.compile(r"\b(?:entail|contradict)\w*", re.IGNORECASE)
_MARK = re.compile(r"####|\\boxed")
_DIGITS = re.compile(r"[0-9][0-9,]*(?:\.[0-9]+)?")
_WHOLE = re.compile(r"(?P<left>[0-9]{1,9})(?P<operator> ?[-+*/x] ?)(?P<right>[0-9]{1,9})(?P<equals> ?= ?)$")


def wrong_answers(question: str, right: Sequence[str], count: int, existing: Collection[str], rng: Random) -> list[str]:
    """Return at most ``count`` distinct wrong answers, generated from each of the right ones in turn.

    A number is changed by one or ten, by swapping two digits or changing one, or to the result of the last equation
    with an error in an operand; the text has the new number from its result on. Labels are replaced throughout. No
    wrong answer has the value of its right one. A right answer yields none if it has neither a readable number nor a
    label, if it states a label in other words (``contradicts``), or if it has both and is ambiguous: without labels in
    the question and without the marks ``####`` and ``\\boxed``.

    Args:
        question: the question.
        right: right answers to the question, at least one.
        count: maximum number of wrong answers.
        existing: existing answers, which are not generated again; answers that differ only in whitespace are the same.
        rng: source of all choices.

    >>> wrong_answers("What is 7 * 8 - 5?", ["7*8=56; 56-5=51"], 3, (), Random(0))
    ['7*8=56; 56-5=61', '7*8=56; 56-4=52', '7*8=56; 56-5=15']
    """
    asks_for_label = len({label.lower() for label in _LABEL.findall(question)}) > 1
    sources = [_wrong_versions(text, asks_for_label, rng) for text in right]
    seen = {plain(text) for text in existing}
    generated: list[str] = []
    while sources and len(generated) < count:
        source = sources.pop(0)
        text = next((text for text in source if plain(text) not in seen), None)
        if text is not None:
            seen.add(plain(text))
            generated.append(text)
            sources.append(source)
    return generated


def plain(text: str) -> str:
    """Return a text with all whitespace replaced by single spaces; equal answers differ in nothing else."""
    return " ".join(text.split())


def _wrong_versions(right: str, asks_for_label: bool, rng: Random) -> Iterator[str]:
    """Return wrong answers generated from one right answer, in random order."""
    final = extract_answer(right)
    has_number = final is not None and number_value(final) is not None
    has_label = bool(_LABEL_STEM.search(right) or _LABEL.search(right))
    if asks_for_label or (has_label and not has_number):
        yield from _other_labels(right, rng)
        return
    if final is None or not has_number or final not in right or (has_label and not _MARK.search(right)):
        return
    start = _result_start(right, final)
    texts = [right[:start] + _replace_number(right[start:], final, other) for other in _other_numbers(final)]
    texts += _operand_errors(right, final)
    for text in rng.sample(texts, len(texts)):
        stated = extract_answer(text)
        if stated is not None and not equal_answers(stated, final) and not equal_answers(final, stated):
            yield text


def _other_labels(right: str, rng: Random) -> Iterator[str]:
    """Return the text with each label replaced by the next, or the one after, so that none stays."""
    if not _LABEL.search(right) or any(word.lower() not in _LABELS for word in _LABEL_STEM.findall(right)):
        return
    for shift in rng.sample((1, 2), 2):
        other = {label: _LABELS[(index + shift) % len(_LABELS)] for index, label in enumerate(_LABELS)}
        yield _LABEL.sub(lambda match, other=other: _match_case(other[match[0].lower()], match[0]), right)  # type: ignore[misc]


def _match_case(label: str, like: str) -> str:
    return label.upper() if like.isupper() else label.capitalize() if like[0].isupper() else label


def _other_numbers(final: str) -> list[str]:
    """Return the number's text with other digits: off by one or ten, two digits swapped, one digit changed."""
    match = _DIGITS.search(final)
    if match is None:
        return []
    digits = match[0]
    without_commas = digits.replace(",", "")
    decimals = len(without_commas.partition(".")[2])
    units = int(without_commas.replace(".", ""))
    values = {units + step for step in (1, -1, 10, -10) if abs(step) == 1 or units >= 20}
    text = str(units)
    values |= {int(text[:left] + text[left + 1] + text[left] + text[left + 2 :]) for left in range(len(text) - 1)}
    for index in range(len(text)):
        for step in (-3, 3):
            digit = int(text[index]) + step
            if 0 <= digit <= 9 and (index or digit):
                values.add(int(text[:index] + str(digit) + text[index + 1 :]))
    grouped = "," in digits
    numbers = [_format_number(number, decimals, grouped) for number in sorted(values - {units}) if number >= 0]
    return [final[: match.start()] + changed_digits + final[match.end() :] for changed_digits in numbers]


def _format_number(units: int, decimals: int, grouped: bool) -> str:
    digits = str(units).rjust(decimals + 1, "0")
    whole = f"{int(digits[: len(digits) - decimals]):{',' if grouped else ''}}"
    return f"{whole}.{digits[-decimals:]}" if decimals else whole


def _operand_errors(right: str, final: str) -> Iterator[str]:
    """Yield the text with another operand in the final number's equation, and its result."""
    if not final.isdigit():
        return
    start = _result_start(right, final)
    match = _WHOLE.search(right[:start])
    if match is None:
        return
    a, b = int(match["left"]), int(match["right"])
    operator = match["operator"].strip()
    before = right[: match.start()]
    if expression_value(f"{a} {operator} {b}") != int(final):
        return
    for new_a, new_b in ((a + 1, b), (a - 1, b), (a, b + 1), (a, b - 1)):
        result = expression_value(f"{new_a} {operator} {new_b}") if min(new_a, new_b) >= 0 else None
        if result is not None and result >= 0 and result.denominator == 1:
            equation = f"{new_a}{match['operator']}{new_b}{match['equals']}"
            text_before = re.sub(
                rf"(?<![0-9.,]){a}(?P<space> ?)[-+*/x](?P=space){b}(?= ?= ?\$?<<$)",  # before `<<48+24=72>>72`
                rf"{new_a}\g<space>{operator}\g<space>{new_b}",
                before,
            )
            yield text_before + equation + _replace_number(right[start:], final, str(result))


def _result_start(text: str, number: str) -> int:
    """Return the first place of the number as a result, else its last place."""
    starts = [match.start() for match in _number_pattern(number).finditer(text)]
    results = [start for start in starts if text[:start].rstrip(" $").endswith("=")]
    return (results or starts[-1:] or [text.rfind(number)])[0]


def _replace_number(text: str, old: str, new: str) -> str:
    return _number_pattern(old).sub(lambda _: new, text)


def _number_pattern(number: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![0-9.,]){re.escape(number)}(?![0-9]|[.,][0-9])")
