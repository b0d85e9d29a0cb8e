"""Reads, compares and counts the answers of replies: numbers, or labels of an inference."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

from mrlm_pl.answers.numbers import equal_answers, extract_answer, marked_answer, number_value

Format = Literal["math", "nli"]
ENTAILMENT, NEUTRAL, CONTRADICTION = LABELS = ("entailment", "neutral", "contradiction")
"""In the order in which data sets number them: 0, 1, 2."""

MAX_CHARACTERS = 100_000
_LABEL = re.compile(
    r"\b(?:(?P<entailment>entail(?:s|ed|ment|ing)?)|(?P<neutral>neutral)|"
    r"(?P<contradiction>contradict(?:s|ed|ion|ions|ory|ing)?))\b",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(
    r"[.;:!?,\n]|\b(?:but|so|hence|therefore|thus|because|since)\b|\brather(?! than)", re.IGNORECASE
)
_DENIED_BEFORE = re.compile(
    r"\b(?:not(?! only| just| merely)|non|cannot|no|nor|neither|never|without(?! doubt)|rul(?:e|es|ed|ing)\s+out|"
    r"exclud(?:e|es|ed|ing)|rather than|instead of|unlike)\b|n['\u2019]t\b(?! only| just| merely)",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[\"'*\u2019]*\s+(?:cannot\b|(?:is|was|can|could|would|does|must|may|has been)(?:n['\u2019]t| not)\b|"
    r"(?:is|was|can be|must be|may be|has been)\s+(?:ruled out|excluded|impossible|wrong|incorrect|false|out\b))",
    re.IGNORECASE,
)
_STATED = re.compile(r"\b(?:answer|label)[*_ ]{0,4}(?:\s{1,4}is\b|\s{0,4}[:=])[\s:*_\"'`(\[]{0,8}$", re.IGNORECASE)
_SUPPOSED_BEFORE = re.compile(r"\b(?:would|could|might|may)(?: also)?(?: be| have been)?\s+(?:an? )?$", re.IGNORECASE)
_SUPPOSED_AFTER = re.compile(r"[\"'*]*\s+(?:would|could|might|may|needs?|requires?|is close)\b", re.IGNORECASE)
_ALTERNATIVE = re.compile(r"[\s*\"']*(?:,|/|\||,?\s(?:or|and)\s)[\s*\"']*(?:an? )?", re.IGNORECASE)
_OPERATION = re.compile(r"(?<![0-9.,])-?[0-9]+(?:[.,][0-9]+)*(?:\s?[-+*/]\s?[0-9]+(?:[.,][0-9]+)*)+")
_REACH = 120
"""Characters before a label in which a denial of it is looked for."""


def read_answer(reply: str, form: Format, question: str = "", operations: bool = True) -> str | None:
    r"""Return the answer that a reply gives, or None if it gives none.

    A number is read as by :func:`~mrlm_pl.answers.numbers.extract_answer`, with its ``operations``, but for operations
    that are copied from the question: they are the problem and not its result. A label is the one in the last
    ``<answer>`` tag or box, else the last behind "answer is", else the last that is stated. Labels that are denied or
    appear in a list are not stated; labels that are supposed ("it would be neutral") count where no other is stated.

    >>> read_answer("3 apples and 4 pears, so 7", "math"), read_answer("\\boxed{}", "math")
    ('7', None)
    >>> [read_answer(reply, "math", "What is 185 / 5?") for reply in ("185 / 5 = 37", "The answer is 185/5.")]
    ['37', None]
    >>> read_answer("1/2", "math", "Which is more, 1/2 or 1/3?")
    '1/2'
    >>> read_answer("It rules out entailment, so contradiction.", "nli")
    'contradiction'
    >>> read_answer("Neutral, not entailment", "nli"), read_answer("It is not entailment but neutral", "nli")
    ('neutral', 'neutral')
    >>> read_answer("not entailment", "nli"), read_answer("entailment or neutral", "nli")
    (None, None)
    """
    if form == "math":
        answer = extract_answer(_without_copies(reply[-MAX_CHARACTERS:], question), operations)
        return answer if answer is not None and number_value(answer) is not None else None
    return _read_label(reply[-MAX_CHARACTERS:])


def _without_copies(reply: str, question: str) -> str:
    """Return a reply with ``x`` instead of each operation of the question."""
    for operation in _OPERATION.findall(question):
        value = number_value(operation)
        if value is None or value.denominator == 1 or " " in operation:  # else it is a number, such as 1/2
            copy = r"\s*".join(map(re.escape, "".join(operation.split())))
            reply = re.sub(rf"(?<![0-9.]){copy}(?![0-9]|[.,][0-9])", "x", reply)
    return reply


def is_right(answer: str | None, expected: str, form: Format) -> bool:
    """Return whether an answer that was read is the expected one: numbers by value, labels by name."""
    return answer is not None and (equal_answers(answer, expected) if form == "math" else answer == expected)


def vote(answers: Sequence[str | None], form: Format) -> str | None:
    """Return the answer that most give; None is not a vote, and no votes are None.

    Numbers of the same value are the same answer. Among answers with equally many votes the one given first in
    the sequence wins, so a vote between two different answers is the first one.

    >>> vote([None, None, "5"], "math"), vote(["4", "5", "5.0"], "math"), vote([None], "math")
    ('5', '5', None)
    >>> vote(["neutral", "entailment", "entailment", "neutral"], "nli")
    'neutral'
    """
    stated = [answer for answer in answers if answer is not None]
    votes = Counter(_comparison_key(answer, form) for answer in stated)
    return max(stated, key=lambda answer: votes[_comparison_key(answer, form)], default=None)


def agree(answers: Sequence[str | None], form: Format) -> bool:
    """Return whether all give the same answer; a missing answer agrees with none.

    >>> agree(["5", "5.0"], "math"), agree(["5", None], "math"), agree([None, None], "math")
    (True, False, False)
    """
    keys = {_comparison_key(answer, form) for answer in answers if answer is not None}
    return len(keys) == 1 and None not in answers


def _comparison_key(answer: str, form: Format) -> Hashable:
    return number_value(answer) if form == "math" else answer


def _read_label(text: str) -> str | None:
    text, _, _ = marked_answer(text)
    matches = [match for match in _LABEL.finditer(text) if not _is_denied(text, match)]
    listed = {
        index
        for index, (label, following) in enumerate(itertools.pairwise(matches))
        if label.lastgroup != following.lastgroup and _ALTERNATIVE.fullmatch(text, label.end(), following.start())
    }
    last_labels: dict[str, str | None] = {}
    for index, match in enumerate(matches):
        if {index - 1, index} & listed:
            continue
        before = text[max(0, match.start() - _REACH) : match.start()]
        supposed = _SUPPOSED_BEFORE.search(before) or _SUPPOSED_AFTER.match(text, match.end())
        last_labels["marked" if _STATED.search(before) else "supposed" if supposed else "stated"] = match.lastgroup
    return next((last_labels[kind] for kind in ("marked", "stated", "supposed") if kind in last_labels), None)


def _is_denied(text: str, label: re.Match[str]) -> bool:
    clause = _CLAUSE_END.split(text[max(0, label.start() - _REACH) : label.start()])[-1]
    return bool(_DENIED_BEFORE.search(clause) or _DENIED_AFTER.match(text, label.end()))
