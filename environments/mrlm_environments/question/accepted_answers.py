"""Rewards for an answer in ``<answer>`` tags that is compared with the accepted ones, as SQuAD does."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.environment.tools import stated_answer
from mrlm_pl.episode import final_text
from mrlm_pl.errors import DataError

_LEFT_OUT = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact_match(reply: str, row: Mapping[str, Any]) -> float:
    """Return 1 if a reply's last ``<answer>`` is one of the accepted answers, else 0.

    Case, punctuation, articles and spacing do not count. The accepted answers are the row's ``golden_answers``, or its
    ``answer`` if it has none: a text or a list of texts.

    >>> exact_match("It is <answer>the Eiffel Tower.</answer>", {"golden_answers": ["Louvre", "Eiffel tower"]})
    1.0

    Raises:
        DataError: the row has none, or they are not texts.
    """
    given, accepted = _words(reply, row)
    return float(given in accepted)


def token_f1(reply: str, row: Mapping[str, Any]) -> float:
    """Return the F1 of the words of a reply's last ``<answer>``, with the accepted answer that has the highest.

    Words and accepted answers are those of :func:`exact_match`.

    >>> token_f1("<answer>Eiffel Tower, Paris</answer>", {"answer": "the Eiffel Tower"})  # 2 of 3 and 2 of 2 words
    0.8

    Raises:
        DataError: as for :func:`exact_match`.
    """
    given, accepted = _words(reply, row)
    return max(_f1(given, answer) for answer in accepted)


def _f1(given: list[str] | None, accepted: list[str]) -> float:
    if not given or not accepted:
        return float(given == accepted)
    return 2 * (Counter(given) & Counter(accepted)).total() / (len(given) + len(accepted))


def _words(reply: str, row: Mapping[str, Any]) -> tuple[list[str] | None, list[list[str]]]:
    """Return the words of the reply's answer, None if it gives none, and those of each accepted answer."""
    accepted = row.get("golden_answers", row.get("answer"))
    answers = [accepted] if isinstance(accepted, str) else accepted
    if not isinstance(answers, Sequence) or not answers or not all(isinstance(text, str) for text in answers):
        raise DataError(
            f"the accepted answers of the row {dict(row)!r:.200} are {accepted!r}; give a text or a list of texts as "
            "its golden_answers or answer"
        )
    answer = stated_answer(final_text(reply))
    return None if answer is None else _normalized(answer), [_normalized(text) for text in answers]


def _normalized(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_LEFT_OUT)).split()
