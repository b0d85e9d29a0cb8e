"""Topics of debates, written for this package, and rows of topics from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from mrlm_pl.errors import DataError

MAX_TOPIC_CHARACTERS = 2000
_TOPICS = Path(__file__).with_name("topics.txt")

PROPOSALS = tuple(
    (who, proposal.strip())
    for who, _, proposals in (line.partition(": ") for line in _TOPICS.read_text(encoding="utf-8").splitlines())
    for proposal in proposals.split("|")
)
"""The embedded topics: actors and proposals."""


def generate_topic(rng: Random) -> dict[str, Any]:
    """Return a topic's data: the wording (``X should ...`` or ``X should not ...``, equally likely) and the proposal.

    The two wordings swap the positions.
    """
    who, what = rng.choice(PROPOSALS)
    negated = rng.random() < 0.5
    return {"topic": f"{who} should {'not ' if negated else ''}{what}.", "proposal": f"{who}: {what}"}


def row_topic(row: Mapping[str, Any], number: int, source: object) -> dict[str, Any]:
    """Return a topic's data from a row of a data set.

    Raises:
        DataError: the topic is empty, no text, or too long.
    """
    topic = row["topic"]
    if not isinstance(topic, str) or not topic.strip() or len(topic) > MAX_TOPIC_CHARACTERS:
        raise DataError(
            f"{source}, row {number}: topic is {str(topic)[:80]!r}; it must be a text of 1 to {MAX_TOPIC_CHARACTERS} "
            "characters"
        )
    return {"topic": topic.strip()}
