"""Answers that are masked: too short, looping, or without an answer in them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from mrlm_pl.settings import NonNegativeFloat, NonNegativeInt, Settings

MAX_CHARACTERS = 100_000
MOST_REPEATS = 3
TOO_SHORT, LOOPING, UNANSWERED = FAULTS = ("too_short", "looping", "unanswered")


@dataclass(frozen=True)
class AnswerMasks(Settings):
    """Which answers are masked, and what that costs. A masked answer has score 0, is shown as it is and has no vote.

    An answer that gives no number or label is always masked.

    Args:
        penalty: subtracted once from the reward of a masked answer, for any number of faults, as a separate component.
        min_characters: an answer of fewer, not counting space around it, is too short; 0 masks none.
        loop_ngram: an answer that repeats a run of this many words more than 3 times is looping; 0 masks none.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    penalty: NonNegativeFloat = 0.0
    min_characters: NonNegativeInt = 0
    loop_ngram: NonNegativeInt = 8

    def faults(self, text: str, *, answered: bool) -> frozenset[str]:
        """Return the faults of an answer, a subset of ``too_short``, ``looping`` and ``unanswered``.

        >>> sorted(AnswerMasks(min_characters=3, loop_ngram=2).faults(" so a b a b a b a b", answered=False))
        ['looping', 'unanswered']
        >>> sorted(AnswerMasks(min_characters=3).faults(" 7 ", answered=True))
        ['too_short']
        """
        found = {
            TOO_SHORT: len(text.strip()) < self.min_characters,
            LOOPING: self.loop_ngram > 0 and most_repeats(text[-MAX_CHARACTERS:], self.loop_ngram) > MOST_REPEATS,
            UNANSWERED: not answered,
        }
        return frozenset(name for name, holds in found.items() if holds)


def most_repeats(text: str, length: int) -> int:
    """Return how many times the most frequent run of ``length`` words occurs, overlaps included; 0 without any.

    >>> most_repeats("one two one two one two three", 2), most_repeats("one", 2)
    (3, 0)
    """
    words = text.split()
    runs = Counter(zip(*(itertools.islice(words, start, None) for start in range(length)), strict=False))
    return max(runs.values(), default=0)
