"""The admissible action that is most similar to a text, as AgentBench chooses it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

LEAST = 0.01
WORDS = 40
"""Words of a text that are compared."""

_ORDERS, _K = 4, 5


def most_similar(text: str, choices: Iterable[str]) -> str | None:
    """Return the choice with the highest BLEU of the text, the first of equals; None if all are below 0.01.

    >>> most_similar("open the cabinet 1", ["close cabinet 1", "open cabinet 1"])
    'open cabinet 1'
    >>> most_similar("hm", ["look"]) is None
    True
    """
    words = text.split()[:WORDS]
    scores = {choice: bleu(choice.split(), words) for choice in choices}
    best = max(scores, key=lambda choice: scores[choice], default=None)
    return best if best is not None and scores[best] > LEAST else None


def bleu(reference: Sequence[str], words: Sequence[str]) -> float:
    """Return the sentence BLEU of 4 orders with smoothing method 4 of Chen and Cherry (2014), as nltk computes it."""
    if not set(reference) & set(words):
        return 0.0
    logs, zeros = [], 0
    for order in range(1, _ORDERS + 1):
        own, given = _ngrams(reference, order), _ngrams(words, order)
        hits: float = (own & given).total()
        if not hits and len(words) > 1:
            zeros += 1
            hits = math.log(len(words)) / (2**zeros * _K)
        if hits:
            logs.append(math.log(hits / max(1, given.total())) / _ORDERS)
    brevity = min(1.0, math.exp(1 - len(reference) / len(words)))
    return brevity * math.exp(math.fsum(logs))


def _ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + order]) for start in range(len(words) - order + 1))
