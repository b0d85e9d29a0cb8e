"""Counts of the writing game: a text's content words, and its kinds of transition words."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

_LISTS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
STOP_WORDS = frozenset(_LISTS["stop_words"].split())
"""Words without content."""

TRANSITIONS: dict[str, list[str]] = _LISTS["transitions"]
"""Categories of transitions, each with its words and phrases."""

_WORD = re.compile(r"\w+")
_CATEGORY = {phrase: category for category, phrases in TRANSITIONS.items() for phrase in phrases}
# The lookahead finds phrases that overlap. At most one begins at each word: none begins with the words of another.
_PHRASE = re.compile(rf"(?<![\w-])(?=({'|'.join(map(re.escape, _CATEGORY))})(?![\w-]))")


def content_words(text: str) -> frozenset[str]:
    """Return the different words of a text in lower case, without stop words.

    >>> sorted(content_words("The cat, the CAT and a dog's tail"))
    ['cat', 'dog', 'tail']
    """
    return frozenset(_WORD.findall(text.lower())) - STOP_WORDS


def jaccard(first: frozenset[str], second: frozenset[str]) -> float:
    """Return the share of the words of two sets that is in both, from 0 to 1; 0 where both are empty.

    >>> jaccard(frozenset("abc"), frozenset("bcd"))
    0.5
    """
    union = len(first | second)
    return len(first & second) / union if union else 0.0


def transition_categories(text: str) -> frozenset[str]:
    """Return the categories of which a text has a word or a phrase, as whole words in upper or lower case.

    Whitespace separates the words of a phrase; a part of a word, hyphenated or not, does not count.

    >>> sorted(transition_categories("However, this is a case in\\npoint. As a  RESULT, we stop."))
    ['cause', 'contrast']
    >>> transition_categories("A second-hand enthusiast says: despiteful iffy firsts. In. Short.")
    frozenset()
    """
    return frozenset(_CATEGORY[phrase] for phrase in _PHRASE.findall(" ".join(text.lower().split())))
