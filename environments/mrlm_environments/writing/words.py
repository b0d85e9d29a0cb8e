"""Counts of the writing game: a text's content words, and its kinds of transition words."""

from __future__ import annotations

import re

_STOP_WORDS = """
    a about above after again all am an and any are as at be because been before being below between both but by can
    could d did do does doing down during each few for from further had has have having he her here hers him his how i
    if in into is it its just ll m may me might more most must my no nor not now of off on once only or other our ours
    out over own re s same shall she should so some such t than that the their theirs them then there these they this
    those through to too under until up upon us ve very was we were what when where which while who whom why will with
    would you your yours
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""Words that are no content: articles, pronouns, auxiliaries, prepositions, and what contractions leave behind."""

TRANSITIONS: dict[str, tuple[str, ...]] = {
    "addition": (
        *("additionally", "also", "besides", "furthermore", "moreover", "in addition", "as well as", "what is more"),
        *("along with", "not only"),
    ),
    "example": (
        *("for example", "for instance", "such as", "namely", "in particular", "particularly", "to illustrate"),
        *("specifically", "including"),
    ),
    "explanation": (
        *("in other words", "that is", "that means", "to put it simply", "put simply", "put differently", "to clarify"),
        "more precisely",
    ),
    "cause": (
        *("accordingly", "as a consequence", "as a result", "because of", "consequently", "due to", "for this reason"),
        *("hence", "owing to", "thanks to", "thereby", "therefore", "thus"),
    ),
    "contrast": (
        *("by contrast", "conversely", "however", "in contrast", "instead", "on the contrary", "on the other hand"),
        *("rather than", "unlike", "whereas"),
    ),
    "sequence": (
        *("after that", "at first", "finally", "first", "firstly", "lastly", "next", "second", "secondly", "third"),
        *("thirdly", "to begin with", "to start with"),
    ),
    "emphasis": (
        *("above all", "certainly", "clearly", "definitely", "in fact", "indeed", "most importantly", "notably"),
        *("obviously", "of course", "undoubtedly", "without doubt"),
    ),
    "summary": (
        *("all in all", "altogether", "in brief", "in conclusion", "in short", "in summary", "on the whole", "overall"),
        *("to conclude", "to sum up", "to summarize"),
    ),
    "comparison": (
        *("by analogy", "compared with", "equally", "in comparison", "in the same way", "just like", "likewise"),
        *("similar to", "similarly"),
    ),
    "concession": (
        *("admittedly", "albeit", "although", "despite", "even so", "even though", "in spite of", "nevertheless"),
        *("nonetheless", "notwithstanding", "regardless of", "though"),
    ),
    "condition": (
        *("as long as", "assuming that", "given that", "if", "in case", "on condition that", "otherwise"),
        *("provided that", "supposing that", "unless"),
    ),
    "time": (
        *("afterwards", "at the same time", "currently", "earlier", "eventually", "formerly", "later", "meanwhile"),
        *("nowadays", "previously", "recently", "simultaneously", "since then", "subsequently"),
    ),
}
"""Twelve categories, each with its words and phrases; none is in two of them."""

_WORD = re.compile(r"\w+")
_PART_OF_WORD = re.compile(r"[\w-]")

_BY_FIRST_WORD: dict[str, list[tuple[str, str]]] = {}
for _category, _phrases in TRANSITIONS.items():
    for _phrase in _phrases:
        _BY_FIRST_WORD.setdefault(_phrase.partition(" ")[0], []).append((_phrase, _category))


def content_words(text: str) -> frozenset[str]:
    """Return the different words of a text in lower case, without stop words.

    >>> sorted(content_words("The cat, the CAT and a dog's tail"))
    ['cat', 'dog', 'tail']
    """
    return frozenset(_WORD.findall(text.lower())) - STOP_WORDS


def jaccard(first: frozenset[str], second: frozenset[str]) -> float:
    """Share of the words of two sets that is in both, from 0 to 1; 0 where both are empty.

    >>> jaccard(frozenset("abc"), frozenset("bcd"))
    0.5
    """
    union = len(first | second)
    return len(first & second) / union if union else 0.0


def transition_categories(text: str) -> frozenset[str]:
    """Categories of which a text has a word or a phrase, as whole words and in upper or lower case.

    The words of a phrase stand apart by white space; a part of a word, also of a hyphenated one, is no word.

    >>> sorted(transition_categories("However, this is a case in\\npoint. As a  RESULT, we stop."))
    ['cause', 'contrast']
    >>> transition_categories("A second-hand enthusiast says: despiteful iffy firsts. In. Short.")
    frozenset()
    """
    plain = " ".join(text.lower().split())
    found = set()
    for word in _WORD.finditer(plain):
        for phrase, category in _BY_FIRST_WORD.get(word.group(), ()):
            start, end = word.start(), word.start() + len(phrase)
            if plain.startswith(phrase, start) and not (
                _PART_OF_WORD.match(plain[start - 1 : start]) or _PART_OF_WORD.match(plain[end : end + 1])
            ):
                found.add(category)
    return frozenset(found)
