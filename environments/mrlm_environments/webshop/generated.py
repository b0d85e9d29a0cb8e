"""A generated catalog, and goals for it."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

from mrlm_environments.webshop.catalog import Catalog, Product
from mrlm_pl.seeding import keyed_random

LIMITS = tuple(10.0 * step for step in range(1, 100))
NO_LIMIT = 1_000_000.0
MAX_PRODUCTS = 10_000


class Category(NamedTuple):
    """Words of a category, each list a text: names of its products, parts, uses, attributes, and two options."""

    path: str
    names: str
    parts: str
    uses: str
    attributes: str
    options: Mapping[str, str]


_COLORS = "black|white|navy|red|green|purple|orange|yellow"
CATEGORIES = (
    Category(
        "Clothing, Shoes & Jewelry › Shoes › Running",
        "running shoes|trail sneakers|jogging trainers",
        "mesh upper|gel heel|cushion insole",
        "marathon|gym|street walking",
        "arch support|anti slip|machine washable|memory foam|quick drying|water resistant|high traction|wide fit",
        {"color": _COLORS, "size": "6|7|8|9|10|11"},
    ),
    Category(
        "Clothing, Shoes & Jewelry › Women › Dresses",
        "summer dress|evening gown|wrap skirt",
        "lace collar|side pockets|waist belt",
        "beach wedding|office party|garden dinner",
        "hand wash|long sleeve|floral print|stretchy fabric|knee length|wrinkle free|fully lined|short sleeve",
        {"color": _COLORS, "size": "small|medium|extra wide"},
    ),
    Category(
        "Home & Kitchen › Dining › Mugs",
        "travel mug|coffee tumbler|tea cup",
        "bamboo lid|cork base|silicone sleeve",
        "office desk|camping trip|morning commute",
        "dishwasher safe|leak proof|double wall|bpa free|hand painted|lead free|microwave safe|easy grip",
        {"color": _COLORS, "capacity": "8 ounces|one pint|one quart|half gallon"},
    ),
    Category(
        "Home & Kitchen › Furniture › Tables",
        "coffee table|side table|writing desk",
        "oak top|metal frame|storage drawer",
        "living room|bedroom corner|study nook",
        "easy assembly|solid wood|heavy duty|space saving|scratch proof|height adjustable|eco friendly|fold flat",
        {"color": "walnut|white|black|natural|gray", "style": "round|square|oval"},
    ),
    Category(
        "Electronics › Audio › Headphones",
        "wireless headphones|studio earbuds|gaming headset",
        "charging case|boom microphone|carry pouch",
        "podcast recording|airplane travel|night gaming",
        "noise cancelling|long battery|fast charging|sweat proof|deep bass|low latency|plug and play|tangle free",
        {"color": _COLORS, "bundle": "single|with adapter|with stand"},
    ),
    Category(
        "Electronics › Computers › Cables",
        "charging cable|monitor cord|network adapter",
        "braided jacket|gold connector|ferrite core",
        "laptop docking|home theater|phone car",
        "high speed|heavy shielding|gold plated|ultra slim|flame retardant|lifetime warranty|certified safe|easy use",
        {"color": _COLORS, "length": "3 feet|6 feet|10 feet|25 feet"},
    ),
    Category(
        "Beauty & Personal Care › Hair Care › Shampoo",
        "hair shampoo|scalp conditioner|curl cream",
        "argan oil|aloe extract|keratin blend",
        "salon treatment|daily shower|holiday kit",
        "sulfate free|cruelty free|tea tree|paraben free|color safe|deep moisture|natural ingredients|travel sized",
        {"scent": "lavender|lemon|mint|coconut", "pack": "one bottle|two bottles|family box"},
    ),
    Category(
        "Grocery & Gourmet Food › Snacks › Nuts",
        "roasted almonds|cashew mix|trail granola",
        "sea salt|honey glaze|cocoa dust",
        "lunch box|hiking snack|movie evening",
        "gluten free|low sodium|non gmo|low carb|sugar free|high protein|soy free|resealable bag",
        {"flavor": "plain|smoky|spicy|maple", "pack": "one bag|four bags|twelve bags"},
    ),
    Category(
        "Sports & Outdoors › Camping › Tents",
        "camping tent|beach shelter|hammock canopy",
        "aluminum poles|mesh window|rain fly",
        "family weekend|festival field|mountain expedition",
        "water proof|easy setup|storm ready|ultra light|mildew resistant|uv protection|double layer|compact storage",
        {"color": _COLORS, "room": "for two|for four|for six"},
    ),
    Category(
        "Office Products › Supplies › Notebooks",
        "spiral notebook|leather journal|pocket planner",
        "elastic band|ribbon marker|pen loop",
        "school lecture|travel diary|project meeting",
        "acid free|bleed proof|recycled paper|hard cover|lay flat|dotted grid|fountain friendly|perforated pages",
        {"color": _COLORS, "paper": "ruled|blank|checked"},
    ),
)
_BRANDS = [
    "Norwen",
    "Talvik",
    "Ostara",
    "Brimhold",
    "Quillon",
    "Merrow",
    "Fennick",
    "Hollin",
    "Aldery",
    "Sorrel",
    "Wexley",
    "Pinmoor",
]
_REQUESTS = ("i need", "i am looking for", "find me", "i want to buy", "show me", "can you get me")
_ASIN = string.digits + string.ascii_uppercase
_WORD = re.compile("[a-z]+")
_NOUNS = frozenset(
    _WORD.findall(
        " ".join([*_BRANDS, *(part for own in CATEGORIES for part in (own.names, own.parts, own.uses))]).lower()
    )
)


@functools.lru_cache(maxsize=4)
def generated_catalog(size: int) -> Catalog:
    """Return a catalog of ``size`` products, the same one every time; a larger one begins with a smaller one."""
    return Catalog(map(_product, range(size)), nouns)


def nouns(title: str) -> list[str]:
    """Return the nouns of a generated title.

    >>> nouns("Norwen Tea Cup with Cork Base for Office Desk, Leak Proof")
    ['norwen', 'tea', 'cup', 'cork', 'base', 'office', 'desk']
    """
    return [word for word in _WORD.findall(title.lower()) if word in _NOUNS]


def generated_goal(rng: Random, catalog: Catalog) -> dict[str, Any]:
    """Return data of a task: an instruction, the product it was made of, attributes, options and the price's limit."""
    product = rng.choice(tuple(catalog.products.values()))
    attributes = rng.sample(product.attributes, rng.randint(1, 2))
    options = {name: rng.choice(values) for name, values in product.options.items() if rng.random() < 0.75}
    chosen = ", and ".join(f"{name}: {value}" for name, value in options.items())
    wanted = f"{rng.choice(_REQUESTS)} {', '.join(attributes)} {product.query}{' with ' * bool(chosen)}{chosen}"
    return goal_data(product, wanted, attributes, list(options.values()), rng)


def goal_data(
    product: Product, instruction: str, attributes: list[str], options: list[str], rng: Random
) -> dict[str, Any]:
    """Return data of a task, with WebShop's limit: the larger of two draws from the four steps above the price.

    A product above 970 dollars has no limit.
    """
    steps = [step for step in LIMITS if step > product.price][:4]
    limit = max(rng.sample(steps, 2)) if len(steps) >= 2 else NO_LIMIT
    text = f", and price lower than {limit:.2f} dollars" if len(steps) >= 2 else ""
    return {
        "instruction": instruction + text,
        "asin": product.asin,
        "attributes": attributes,
        "options": options,
        "price_upper": limit,
    }


def _product(number: int) -> Product:
    rng = keyed_random("webshop product", number)
    category = CATEGORIES[number % len(CATEGORIES)]
    name, part, use = (rng.choice(texts.split("|")) for texts in (category.names, category.parts, category.uses))
    brand, attributes = rng.choice(_BRANDS), rng.sample(category.attributes.split("|"), 4)
    price = round(rng.randint(5, 180) + 0.99, 2)
    options = {
        option: tuple(value for value in values.split("|") if rng.random() < 0.75) or (values.split("|")[0],)
        for option, values in category.options.items()
    }
    stars = rng.randint(2, 5)
    return Product(
        asin=f"B0{''.join(rng.choices(_ASIN, k=4))}{number:04d}",
        title=f"{brand} {name} with {part} for {use}, {attributes[0]}".title(),
        query=name,
        categories=tuple(part.strip() for part in f"{category.path} › {name}".split("›")),
        price=price,
        price_text=f"${price}",
        attributes=tuple(attributes),
        options=options,
        description=f"This {name} by {brand} is {attributes[1]}. Made for {use}, it comes with {part}.",
        features=tuple(f"{attribute.capitalize()}." for attribute in attributes),
        rating=str(stars),
        reviews=((f"My {use}", str(stars), f"The {part} is {'good' if stars > 3 else 'poor'}."),),
    )
