"""The products of a shop and the search for them: BM25 over stems of words."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mrlm_environments.libraries import library
from mrlm_pl.environment.tasks import Shared

RESULTS = 50
"""Products that a search finds at most."""

MAX_WORDS = 64
"""Words of a query that are searched for; others are left out."""

_WORD = re.compile(r"\w{1,64}")


@dataclass(frozen=True)
class Product:
    """A product of the shop.

    Args:
        asin: number of the product in the shop.
        title: title of the product.
        query: search that it belongs to.
        categories: names from the most general one to its own.
        price: price in dollars.
        price_text: price that its page shows, which may be a range.
        attributes: attributes of the product; pages do not show them as such.
        options: values to choose from, by name of the option.
        description: text of its page Description.
        features: texts of its page Features.
        rating: rating by its buyers.
        reviews: title, stars and text of each.
    """

    asin: str
    title: str
    query: str
    categories: tuple[str, ...]
    price: float
    price_text: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    description: str = ""
    features: tuple[str, ...] = ()
    rating: str = "N.A."
    reviews: tuple[tuple[str, str, str], ...] = ()

    def document(self) -> str:
        """Return the text that a search reads: title, description, first feature and options."""
        options = (f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join((self.title, self.description, *self.features[:1], ", and ".join(options)))


class Catalog(Shared):
    """Products by number, and their index. Copies of an environment share it.

    The index is Lucene's BM25 with k1 = 0.9 and b = 0.4, the values of pyserini, over Porter stems without Lucene's 33
    stop words.

    Args:
        products: products of the shop; those with equal scores are found in this order.
        nouns: returns the nouns of a title in lower case, which the reward compares.
        goals: data of tasks for the products; empty where they are generated.

    Raises:
        ConfigurationError: the extra ``webshop`` is not installed.
    """

    def __init__(
        self,
        products: Iterable[Product],
        nouns: Callable[[str], Sequence[str]],
        goals: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        library("rapidfuzz", "webshop")  # of the reward
        self.products = {product.asin: product for product in products}
        self.nouns, self.goals = nouns, goals
        self._asins = tuple(self.products)
        self._index = library("bm25s", "webshop").BM25(k1=0.9, b=0.4, method="lucene")
        self._index.index([words(product.document()) for product in self.products.values()], show_progress=False)

    def search(self, keywords: str) -> tuple[str, ...]:
        """Return the numbers of the best :data:`RESULTS` products that hold any of the words, best first."""
        known_words = [word for word in words(keywords, MAX_WORDS) if word in self._index.vocab_dict]
        if not known_words:
            return ()
        scores = self._index.get_scores(known_words)
        matches = scores.nonzero()[0]
        best_matches = matches[(-scores[matches]).argsort(kind="stable")[:RESULTS]]
        return tuple(self._asins[index] for index in best_matches)


def words(text: str, most: int | None = None) -> list[str]:
    """Return the stems that a text is found by, all or the first ones.

    >>> words("The Running shoes, for men")
    ['run', 'shoe', 'men']
    """
    stop_words = library("bm25s.stopwords", "webshop").STOPWORDS_EN
    found = (match[0] for match in _WORD.finditer(text.lower()))
    return list(itertools.islice((_stem(word) for word in found if word not in stop_words), most))


@functools.lru_cache(maxsize=65_536)
def _stem(word: str) -> str:
    stemmer = library("snowballstemmer", "webshop").stemmer("porter")  # a new one: it is not safe between threads
    return stemmer.stemWord(word) or word  # "s", of "men's" or a size, has no stem
