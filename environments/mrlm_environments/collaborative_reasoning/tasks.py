"""The problems of collaborative reasoning: mathematics and natural language inference, generated or from rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from random import Random
from typing import Any

from mrlm_environments.answers import CONTRADICTION, ENTAILMENT, LABELS, NEUTRAL, Format
from mrlm_environments.math.environment import worked_problem
from mrlm_environments.math.problems import KINDS, NAMES, THINGS, generate_problem
from mrlm_pl.errors import DataError

MATH_FIELDS = ("question", "answer")
PLACES = ("garden", "house", "park", "school", "shop", "train", "village")
COLORS = ("black", "blue", "green", "red", "white", "yellow")
COMPARISONS = (("older", "younger"), ("taller", "shorter"), ("faster", "slower"), ("louder", "quieter"))
ASKED = "Is this entailment, neutral or contradiction?"
FORMS = (
    ("premise", "hypothesis", "label"),  # the hub's SNLI, MNLI and ANLI
    ("context", "hypothesis", "label"),  # ANLI's own files, with the labels e, n and c
    ("sentence1", "sentence2", "gold_label"),  # SNLI's and MNLI's own files
)
"""Fields of the premise, the hypothesis and the label, as data sets are published."""

NO_LABEL = (-1, "-1", "-", "")
_LABELS = {text: label for number, label in enumerate(LABELS) for text in (str(number), label[0], label)}
"""Labels by their numbers, first letters and names."""


def inference_fields(row: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the fields in which a row has its premise, hypothesis and label; None of a row that is no inference.

    >>> inference_fields({"context": "It rains.", "hypothesis": "It is wet.", "label": "e", "reason": ""})
    ('context', 'hypothesis', 'label')
    """
    return next((fields for fields in FORMS if all(name in row for name in fields)), None)


def generate_inference(rng: Random) -> dict[str, Any]:
    """Return a generated task's data; the three labels are equally likely.

    >>> made = generate_inference(Random(3))
    >>> print(made["question"], made["answer"], sep="\\n")
    Premise: All blue nuts are in the shop.
    Hypothesis: No blue nuts are in the school.
    Is this entailment, neutral or contradiction?
    entailment
    """
    label = LABELS[rng.randrange(len(LABELS))]
    premise, hypothesis = rng.choice(_FAMILIES)(rng, label)
    return _data(premise, hypothesis, label)


def _data(premise: str, hypothesis: str, label: str) -> dict[str, Any]:
    question = f"Premise: {premise}\nHypothesis: {hypothesis}\n{ASKED}"
    return {"format": "nli", "question": question, "answer": label, "solution": label, "key": premise}


def _amounts(rng: Random, label: str) -> tuple[str, str]:
    """Return a premise about the number of things that a person has, and a hypothesis."""
    name, (thing, other) = rng.choice(NAMES), rng.sample(THINGS, 2)
    count, less = rng.randint(3, 30), rng.randint(1, 2)
    hypotheses = {
        ENTAILMENT: (f"{name} has more than {count - less} {thing}.", f"{name} has fewer than {count + less} {thing}."),
        NEUTRAL: (f"{name} has {rng.randint(3, 30)} {other}.", f"{name} wants more {thing}."),
        CONTRADICTION: (f"{name} has fewer than {count - less} {thing}.", f"{name} has no {thing}."),
    }
    return f"{name} has exactly {count} {thing}.", rng.choice(hypotheses[label])


def _orders(rng: Random, label: str) -> tuple[str, str]:
    """Return a premise that orders three people, and a hypothesis."""
    one, two, three = rng.sample(NAMES, 3)
    more, less = rng.choice(COMPARISONS)
    hypotheses = {
        ENTAILMENT: (f"{three} is {less} than {one}.", f"{one} is {more} than {three}."),
        NEUTRAL: (f"{two} is in the {rng.choice(PLACES)}.", f"{one} likes {three}."),
        CONTRADICTION: (f"{three} is {more} than {one}.", f"{one} is {less} than {two}."),
    }
    return f"{one} is {more} than {two}, and {two} is {more} than {three}.", rng.choice(hypotheses[label])


def _quantities(rng: Random, label: str) -> tuple[str, str]:
    """Return a premise about the place of all things of a kind, and a hypothesis."""
    thing, (color, other) = rng.choice(THINGS), rng.sample(COLORS, 2)
    place, elsewhere = rng.sample(PLACES, 2)
    hypotheses = {
        ENTAILMENT: (
            f"No {color} {thing} are in the {elsewhere}.",
            f"Every one of the {color} {thing} is in the {place}.",
        ),
        NEUTRAL: (f"All {other} {thing} are in the {place}.", f"The {color} {thing} in the {place} are new."),
        CONTRADICTION: (
            f"Some {color} {thing} are in the {elsewhere}.",
            f"There are {color} {thing} outside the {place}.",
        ),
    }
    return f"All {color} {thing} are in the {place}.", rng.choice(hypotheses[label])


_FAMILIES: tuple[Callable[[Random, str], tuple[str, str]], ...] = (_amounts, _orders, _quantities)


def generate(rng: Random, form: Format | None, difficulty: tuple[int, int]) -> dict[str, Any]:
    """Return an inference, or a problem of the ``math`` environment; those of its training split are in this one's."""
    if form == "nli":
        return generate_inference(rng)
    return {"format": "math", **asdict(generate_problem(rng, rng.choice(KINDS), rng.randint(*difficulty)))}


def identity(row: Mapping[str, Any]) -> str:
    """Return text that is equal for rows that must stay in one split: inferences from one premise belong together."""
    fields = inference_fields(row)
    return str(row[fields[0]] if fields else row["question"])


def task_data(row: Mapping[str, Any], form: Format | None) -> dict[str, Any] | None:
    """Return a task's data: ``format``, ``question``, ``answer`` (as expected) and ``solution`` (a text that gives it).

    None for an inference without an agreed label (``-1`` or ``-``, as in SNLI).

    Args:
        row: row with GSM8K's fields or those of an inference.
        form: form of the row; None detects it by the fields.

    Raises:
        DataError: the row cannot be used.
    """
    fields, is_math = inference_fields(row), all(name in row for name in MATH_FIELDS)
    if form is None and is_math == (fields is not None):
        known = f"math: {', '.join(MATH_FIELDS)}; nli: {' or '.join(map(', '.join, FORMS))}"
        fault = "fit both formats, say which by `format`" if is_math else "are those of no known format"
        raise DataError(f"its fields {sorted(row)} {fault} ({known})")
    if form == "math" or (form is None and is_math):
        problem = worked_problem(row)
        return {"format": "math", **problem, "key": problem["question"]}
    if fields is None:
        raise DataError(f"its fields {sorted(row)} are those of no inference ({'; '.join(map(', '.join, FORMS))})")
    premise, hypothesis, label = (row[name] for name in fields)
    if label in NO_LABEL:
        return None
    name = _LABELS.get(str(label).strip().lower())
    texts = isinstance(premise, str) and isinstance(hypothesis, str) and premise.strip() and hypothesis.strip()
    if not texts or name is None:
        raise DataError(
            f"the premise is {premise!r:.80}, the hypothesis {hypothesis!r:.80} and the label {label!r:.40}; the first "
            f"two must be texts, the label one of {', '.join(LABELS)} or 0, 1, 2"
        )
    return _data(premise.strip(), hypothesis.strip(), name)
