"""WebShop's own files: products, their attributes, and people's goals."""

from __future__ import annotations

import functools
import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mrlm_environments.webshop.catalog import Catalog, Product
from mrlm_environments.webshop.generated import WORDS, goal_data
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.seeding import keyed_random

logger = logging.getLogger(__name__)

NO_PRICE = 100.0
SHUFFLE_SEED = 233
NAMED_ROWS = 5
_FUNCTION_WORDS = frozenset(WORDS["function_words"].split())
T = TypeVar("T")


class _Value(msgspec.Struct):
    value: str


class _Row(msgspec.Struct):
    """A product, with the fields that are read."""

    asin: str
    name: str
    query: str
    product_category: str
    full_description: str | None = None
    small_description: list[str] | str | None = None
    pricing: str | None = None
    customization_options: dict[str, list[_Value] | None] | str | None = None


class _Attributes(msgspec.Struct):
    attributes: list[str] = []


class _Goal(msgspec.Struct):
    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str] | dict[str, str] = []


@functools.lru_cache(maxsize=2)
def read_shop(products: str, attributes: str, goals: str, size: int | None, noun_model: str | None) -> Catalog:
    """Return the catalog of WebShop's files with its goals, in the order of WebShop's shuffle.

    A price range is drawn from by the product's number, and a limit by the product and the number of its goal: they are
    equal in every process, for any other products.

    Args:
        products: path of ``items_shuffle.json``, or of a part of it.
        attributes: path of ``items_ins_v2.json``.
        goals: path of ``items_human_ins.json``.
        size: only the first products of the file.
        noun_model: spaCy's model that finds the nouns of titles; None takes all words but function words.

    Raises:
        DataError: a file is missing or of another form, or no goal belongs to the products.
        ConfigurationError: spaCy or its model is missing.
    """
    known = _decode(attributes, dict[str, _Attributes])
    rows: dict[str, Product] = {}
    faults = []
    for number, raw in enumerate(_decode(products, list[msgspec.Raw])[:size], start=1):
        try:
            row = msgspec.json.decode(raw, type=_Row)
            if row.asin not in rows and row.asin != "nan" and len(row.asin) <= 10:
                own = known.get(row.asin)
                rows[row.asin] = _product(row, own.attributes if own else [])
        except (msgspec.MsgspecError, ValueError) as error:
            faults.append(f"{products}, product {number}: {error}")
    if faults:
        more = len(faults) - NAMED_ROWS
        named = "\n".join([*faults[:NAMED_ROWS], *([f"and {more} more"] * (more > 0))])
        logger.warning("skipped %d products of %s:\n%s", len(faults), products, named)
    asked = _decode(goals, dict[str, list[_Goal]])
    posed = [
        _goal_data(rows[asin], number, item)
        for asin in rows
        for number, item in enumerate(asked.get(asin, []))
        if item.instruction_attributes
    ]
    if not posed:
        raise DataError(f"no goal of {goals} is for a product of {products}; give files that belong together")
    random.Random(SHUFFLE_SEED).shuffle(posed)
    return Catalog(rows.values(), _nouns_by(noun_model), posed)


def split_goals(goals: Sequence[T], split: str) -> Sequence[T]:
    """Return the goals of a split: the first 500 are ``test``, the next 500 ``validation``, a tenth each of fewer.

    >>> [len(split_goals(range(12_087), split)) for split in ("test", "validation", "train")]
    [500, 500, 11087]
    """
    held = min(500, len(goals) // 10)
    begin, end = {"test": (0, held), "validation": (held, 2 * held), "train": (2 * held, len(goals))}[split]
    return goals[begin:end]


def prices(text: str | None) -> list[float]:
    """Return the one or two prices of a product's field ``pricing``, 100 dollars where it has none.

    >>> prices("$1,049.50"), prices("$9.99$24.00"), prices("")
    ([1049.5], [9.99, 24.0], [100.0])
    """
    found = [float(re.sub(r"[^\d.]", "", part)) for part in (text or "").split("$")[1:]]
    return found[:2] or [NO_PRICE]


def plain_nouns(title: str) -> list[str]:
    """Return a title's words but numbers, single letters and function words: an estimate of its nouns."""
    return [word for word in re.findall(r"[^\W\d_]{2,}", title.lower()) if word not in _FUNCTION_WORDS]


def _nouns_by(model: str | None) -> Callable[[str], Sequence[str]]:
    if model is None:
        return plain_nouns
    try:
        # Imported here: it has its own extra, which few need.
        import spacy

        parse = spacy.load(model)
    except (ImportError, OSError) as error:
        raise ConfigurationError(
            f"webshop: noun_model {model!r} cannot be loaded ({error}); pip install spacy and "
            f"python -m spacy download {model}, or leave it out"
        ) from error
    return functools.lru_cache(maxsize=100_000)(
        lambda title: [token.text.lower() for token in parse(title) if token.pos_ in ("NOUN", "PROPN")]
    )


def _product(row: _Row, attributes: Sequence[str]) -> Product:
    small = row.small_description or []
    choices = row.customization_options
    price_range = prices(row.pricing)
    return Product(
        asin=row.asin,
        title=row.name,
        query=row.query.lower().strip(),
        categories=tuple(part.strip() for part in row.product_category.split("›")),
        price=price_range[0]
        if len(price_range) == 1
        else keyed_random("webshop price", row.asin).uniform(*price_range),
        price_text=" to ".join(f"${price}" for price in price_range),
        attributes=tuple(attributes),
        options={
            name.lower(): tuple(item.value.strip().replace("/", " | ").lower() for item in values)
            for name, values in (choices if isinstance(choices, Mapping) else {}).items()
            if values is not None
        },
        description=row.full_description or "",
        features=(small,) if isinstance(small, str) else tuple(small),
    )


def _goal_data(product: Product, number: int, item: _Goal) -> dict[str, Any]:
    options = item.instruction_options
    wanted = list(options.values() if isinstance(options, dict) else options)
    rng = keyed_random("webshop limit", product.asin, number)
    return goal_data(product, item.instruction.strip("."), item.instruction_attributes, wanted, rng)


def _decode(path: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(Path(path).expanduser().read_bytes(), type=kind)
    except OSError as error:
        raise DataError(f"webshop: {path} cannot be read ({error}); give a path to WebShop's file") from error
    except msgspec.MsgspecError as error:
        raise DataError(f"webshop: {path} is not of WebShop's form: {error}") from error
