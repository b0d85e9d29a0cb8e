"""The score of two parts of a text by CoMLRL's rules (arXiv 2508.04652): four levels and three gates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mrlm_environments.writing.words import content_words, jaccard, transition_categories

MAX_CHARACTERS = 3_000
"""A longer part fails the first gate: 256 words have about 1,700 characters, and scoring takes a bounded time."""

STRUCTURE, VOCABULARY, TRANSITIONS, OVERLAP = 0.5, 0.5, 0.4, 0.6
GATES = 3
MAXIMUM = STRUCTURE + 1.0 + VOCABULARY + TRANSITIONS * 0.95 + OVERLAP
"""The published rule gives all of the transitions' weight for 13 kinds of transition words, and there are 12."""


@dataclass(frozen=True)
class Band:
    """1 from ``low`` to ``high``, falling linearly to 0 at ``least`` and ``most``, and nothing outside these."""

    least: float
    low: float
    high: float
    most: float

    def share(self, value: float) -> float | None:
        """Return a number from 0 to 1, or None outside.

        >>> band = Band(1.0, 2.0, 3.0, 5.0)
        >>> [band.share(value) for value in (0.9, 1.0, 1.25, 2.0, 3.0, 4.0, 5.0, 5.1)]
        [None, 0.0, 0.25, 1.0, 1.0, 0.5, 0.0, None]
        """
        if not self.least <= value <= self.most:
            return None
        if value < self.low:
            return (value - self.least) / (self.low - self.least)
        return 1.0 if value <= self.high else 1.0 - (value - self.high) / (self.most - self.high)


@dataclass(frozen=True)
class Rules:
    """The standard of a pair of parts.

    Args:
        words: fewest and most words of each part.
        length: band of the second part's characters over the first's.
        vocabulary: band of the second part's different content words over the first's.
        overlap: share of common content words from which more earns no more.
        both: transition words count in both parts; else in the second alone.
    """

    words: tuple[int, int]
    length: Band
    vocabulary: Band
    overlap: float
    both: bool


RULES = {
    "tldr": Rules((8, 256), Band(1.1, 1.6, 3.2, 5.0), Band(1.3, 2.0, math.inf, math.inf), 0.03, both=False),
    "arxiv": Rules((128, 256), Band(0.8, 1.3, 1.6, 2.0), Band(0.5, 0.7, 1.3, 1.7), 0.23, both=True),
}


@dataclass(frozen=True)
class Score:
    """Score of a pair: named parts, which sum to it, the number of the three gates it passed, and its measures.

    ``measures`` has the numbers that were looked at: those behind a closed gate are left out.
    """

    components: Mapping[str, float]
    gates: int
    measures: Mapping[str, float]


def score_parts(rules: Rules, parts: tuple[str, str], source: str = "", faithfulness: float = 0.0) -> Score:
    """Return the score of two parts: 0 to 3, plus up to ``faithfulness``.

    Args:
        rules: bounds and bands.
        parts: the first and the second agent's text.
        source: the text they write about.
        faithfulness: weight of the share of content words that parts and source have in common; 0 leaves the
            component out.

    >>> twenty, forty = (" ".join(f"w{n:03}" for n in range(k, k + size)) for k, size in ((0, 20), (20, 40)))
    >>> sum(score_parts(RULES["tldr"], (twenty, forty)).components.values())
    2.0
    """
    components = dict.fromkeys(("words", "length", "vocabulary", "transitions", "overlap"), 0.0)
    if faithfulness:
        components["faithfulness"] = 0.0
    measures: dict[str, float] = {}
    fewest, most = rules.words
    if not all(len(part) <= MAX_CHARACTERS and fewest <= len(part.split()) <= most for part in parts):
        return Score(components, 0, measures)
    components["words"] = STRUCTURE
    measures["length_ratio"] = len(parts[1]) / len(parts[0])
    length = rules.length.share(measures["length_ratio"])
    if length is None:
        return Score(components, 1, measures)
    components["length"] = length
    first, second = content_words(parts[0]), content_words(parts[1])
    # No ratio to nothing: a first part of stop words alone ends here.
    measures["vocabulary_ratio"] = len(second) / len(first) if first else 0.0
    vocabulary = rules.vocabulary.share(measures["vocabulary_ratio"])
    if vocabulary is None:
        return Score(components, 2, measures)
    components["vocabulary"] = VOCABULARY * vocabulary
    linking = parts if rules.both else parts[1:]
    kinds = len({kind for part in linking for kind in transition_categories(part)})
    measures |= {"transition_kinds": float(kinds), "common_words": jaccard(first, second)}
    components["transitions"] = TRANSITIONS * (min(1.0, 0.4 + 0.05 * (kinds - 1)) if kinds else 0.0)
    components["overlap"] = OVERLAP * min(measures["common_words"], rules.overlap) / rules.overlap
    if faithfulness:
        components["faithfulness"] = faithfulness * jaccard(first | second, content_words(source))
    return Score(components, GATES, measures)
