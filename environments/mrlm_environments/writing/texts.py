"""Small texts to write about, made by seed: posts of people who ask for advice, and abstracts of papers.

Each comes with two parts that earn the highest score, as a demonstration. The sentences are made for this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

_POST = {
    "giver": (
        *("an older sister", "a neighbour", "a friend from work", "an uncle", "an old teacher", "a flatmate"),
        *("the woman downstairs", "a distant cousin"),
    ),
    "thing": (
        *("a bicycle", "a coffee machine", "a sewing machine", "a laptop", "a record player", "a lawn mower"),
        *("a telescope", "an electric piano"),
    ),
    "event": (
        *("a long trip", "the first winter", "moving house", "a thunderstorm", "a birthday party", "two quiet months"),
        *("a visit of small children", "a week in the cellar"),
    ),
    "trouble": (
        *("makes a grinding noise", "stops after ten minutes", "smells of burnt rubber", "refuses to start"),
        *("shakes the whole table", "works on dry days only", "leaks something brown", "hums through the night"),
    ),
    "tried": (
        *("cleaned every part", "replaced the cable", "asked a repair shop", "watched hours of videos"),
        *("tightened all screws", "measured the current"),
    ),
    "also": (
        *("borrowed better tools", "called the maker", "ordered a spare belt", "searched three forums"),
        *("emailed the seller", "dried it on a radiator"),
    ),
    "keep": ("pay for a repair", "keep trying alone", "wait for a spare part", "take a course in mechanics"),
    "leave": ("sell it for scrap", "return the present politely", "put it on the street", "buy something new"),
}

_POST_TEXT = (
    "Last year {giver} gave me {thing}. It was fine until {event}. Now it {trouble}. I {tried} and {also}, but nothing "
    "helped, and I do not want to seem ungrateful. Should I {keep} or {leave}? What would you do?"
)
_BRIEF = (
    "After {event} {thing} from {giver} {trouble}; the writer {tried} and {also} in vain, and asks whether "
    "to {keep} or {leave}."
)
_DETAILED = (
    "Recently the writer received {thing}, a present of {giver}. To begin with, everything ran smoothly; after {event} "
    "it, however, {trouble}. Therefore the writer {tried}. Moreover, the writer {also}, for instance. In other words, "
    "no effort was spared. Although that cost patience, the defect stayed; likewise, acquaintances knew no answer. "
    "Indeed, gratitude makes a decision harder. Provided that the price stays fair, somebody might {keep}. In short, "
    "the remaining question is whether to {keep} or {leave}."
)

_PAPER = {
    "task": (
        *("the sorting of household waste", "the counting of migrating birds", "the timing of traffic lights"),
        *("the search for leaks in water pipes", "the forecast of river levels", "the reading of old handwriting"),
        *("the planning of bus routes", "the detection of tired drivers"),
    ),
    "weakness": (
        *("need expensive sensors", "fail in bad weather", "take hours for a single answer"),
        *("rely on rules written by hand", "forget rare cases", "cannot explain their answers"),
    ),
    "method": (
        *("a small graph network", "a tree of simple tests", "a memory of typical cases", "a pair of linear filters"),
        *("a probabilistic grammar", "a committee of weak models"),
    ),
    "idea": (
        *("learns from a few corrected mistakes", "shares its weights between places", "asks for help when in doubt"),
        *("splits each problem into two smaller ones", "ignores whatever repeats itself"),
    ),
    "data": (
        *("recordings from twelve towns", "five years of public measurements", "pictures taken by volunteers"),
        *("simulated and real examples", "nine thousand photographs"),
    ),
    "result": (
        *("halves the error", "needs a tenth of the energy", "answers within a second", "agrees with experts"),
        *("works without further adjustment in a new place",),
    ),
}

_ABSTRACT = (
    "We study {task}. Existing methods {weakness}, which keeps them from everyday use. We propose {method} that "
    "{idea}. On {data} it {result}. The approach is simple enough to run on common hardware, and its limits are "
    "discussed."
)
_BACKGROUND = (
    "Everyday life depends on {task}. Existing methods {weakness}, which keeps them from everyday use, and common "
    "hardware is rarely enough. Recently, public measurements and cheap hardware have changed this picture; however, "
    "the limits of existing methods are seldom discussed. For example, a method that works in one place may fail in "
    "another place, although both places look alike. In other words, results do not carry over. Therefore a simple "
    "approach is needed. Moreover, it should explain its limits, just like a careful expert. First, it must run on "
    "common hardware. Indeed, without that, everyday use stays out of reach. If a simple approach answers well in a "
    "new place, public use becomes possible. In short, {task} calls for a simple approach that runs anywhere and whose "
    "limits are known before everyday use begins."
)
_METHOD = (
    "For {task} the paper proposes {method} that {idea}. The approach is simple: where existing methods {weakness}, "
    "this approach runs on common hardware and is ready for everyday use. It is tested on {data}. On {data} the "
    "approach {result}; existing methods do not, and that is so in one place as in another place. The results carry "
    "over to a new place, and the limits of the approach are discussed like the results: it may fail where public "
    "measurements are rare, and it needs an expert who looks at what it answers. For everyday use this means that "
    "common hardware is enough, that a simple approach answers as well as existing methods, and that its limits are "
    "known before it runs in a new place. For public use it means that measurements are worth their price, as results "
    "depend on them. What is proposed for {task} may work for other problems as well, and it is simple enough that "
    "others can run the approach, look at its results and discuss its limits in their own place. What the approach "
    "answers there, an expert may check against public measurements before the results are put to use."
)

MADE_TEXTS = {
    "tldr": (_POST, _POST_TEXT, (_BRIEF, _DETAILED)),
    "arxiv": (_PAPER, _ABSTRACT, (_BACKGROUND, _METHOD)),
}


def make_text(family: str, rng: Random) -> dict[str, Any]:
    """Return a text of a family, under ``text``, and the choices that it was made of, under ``choices``.

    >>> made = make_text("arxiv", Random(1))
    >>> made["text"].startswith(f"We study {made['choices']['task']}.")
    True
    """
    slots, template, _ = MADE_TEXTS[family]
    choices = {name: rng.choice(options) for name, options in slots.items()}
    return {"text": template.format_map(choices), "choices": choices}


def demonstrate(family: str, choices: Mapping[str, str]) -> tuple[str, str]:
    """Return the two parts that earn the highest score on the text made of these choices."""
    first, second = MADE_TEXTS[family][2]
    return first.format_map(choices), second.format_map(choices)
