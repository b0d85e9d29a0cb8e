"""The rule judge: scores of arguments by what can be counted in their text. English; quick; no model.

All counting is linear in the text, of which at most :data:`MAX_CHARACTERS` are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mrlm_environments.debate.judge import OPPONENT, SIDES, Debate, Judge, Side, Verdict
from mrlm_pl.settings import PositiveInt

WEIGHTS: Mapping[str, float] = {
    "length": 0.2,
    "evidence": 0.25,
    "reasoning": 0.25,
    "structure": 0.15,
    "relevance": 0.15,
}
"""Weights of an argument's parts."""

ARGUMENTS, CONSISTENCY, COVERAGE = 0.6, 0.2, 0.2
"""Weights in a side's score: the mean of its arguments, their consistency, and its coverage of the other side's."""

MAX_CHARACTERS = 8000


_LISTS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
_WORDS: Mapping[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in _LISTS.items()}
FUNCTION_WORDS = _WORDS["function_words"]
CONNECTIVES = (_WORDS["reasons"], _WORDS["conditions"], _WORDS["contrasts"])
_ALL_CONNECTIVES: frozenset[str] = frozenset().union(*CONNECTIVES)
_MARKERS = _ALL_CONNECTIVES.union(_WORDS["sources"], _WORDS["examples"], _WORDS["signposts"])
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_NUMBER = re.compile(r"\d")
_SENTENCE_END = re.compile(r"[.!?;](?=\s|$)|\n")
_STEM = 5
_VARIETY_WORDS = 120
"""Longer texts need not use more different words: language repeats its words."""


class RuleJudge(Judge):
    """Scores by rule: 0.6 of the mean of a side's arguments, 0.2 of their consistency and 0.2 of its coverage.

    An argument's score is 0.2 length + 0.25 evidence + 0.25 reasoning + 0.15 structure + 0.15 relevance, all in [0, 1];
    :func:`measure` says how each is counted. Consistency is the lowest score of a side's arguments over the highest,
    times their mean soundness. Coverage is the share of the other side's arguments, of those heard before a side's last
    turn, that are taken up later; a side that has heard none gets the mean relevance of its own arguments. A side that
    says nothing scores 0.

    It reads no meaning: it is for tests, small models and as a check on other judges. A policy that is trained long
    enough against it will exploit its blind spots.

    Args:
        words: number of words of an argument of full length.

    Raises:
        ConfigurationError: ``words`` is below 1.
    """

    def __init__(self, words: PositiveInt = 60) -> None:
        self.words = words

    def judge(self, debate: Debate) -> Verdict:
        """Return the seven parts of each side's score, weighted; see :meth:`Judge.judge`."""
        topic = _Text.read(debate.topic)
        seen = set(topic.runs)
        turns = []
        for argument in debate.arguments:
            text = _Text.read(argument.text)
            turns.append((argument.side, text, measure(text, topic, seen, self.words)))
            seen.update(text.runs)
        return Verdict({side: self._side(side, topic, turns) for side in SIDES})

    def _side(self, side: Side, topic: _Text, turns: Sequence[tuple[Side, _Text, Measures]]) -> dict[str, float]:
        own = [measures for speaker, _, measures in turns if speaker == side]
        if not own:
            return dict.fromkeys((*WEIGHTS, "consistency", "coverage"), 0.0)
        means = {name: sum(item.parts[name] for item in own) / len(own) for name in WEIGHTS}
        scores = [item.score for item in own]
        soundness = sum(item.soundness for item in own) / len(own)
        taken_up = _coverage(side, topic, turns)
        return {
            **{name: ARGUMENTS * weight * means[name] for name, weight in WEIGHTS.items()},
            "consistency": CONSISTENCY * soundness * (min(scores) / max(scores) if max(scores) else 0.0),
            "coverage": COVERAGE * (means["relevance"] if taken_up is None else taken_up),
        }


@dataclass(frozen=True)
class _Text:
    """A text as the judge sees it."""

    words: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...]
    sentences: tuple[tuple[str, ...], ...]
    stems: frozenset[str]
    has_number: bool

    @classmethod
    def read(cls, text: str) -> _Text:
        text = text[:MAX_CHARACTERS].casefold()
        sentences = tuple(tuple(_WORD.findall(sentence)) for sentence in _SENTENCE_END.split(text))
        words = tuple(word for sentence in sentences for word in sentence)
        length = min(3, len(words))
        runs = tuple(words[start : start + length] for start in range(len(words) - length + 1)) if words else ()
        stems = frozenset(
            word[:_STEM].removesuffix("s") for word in words if word not in FUNCTION_WORDS and word not in _MARKERS
        )
        return cls(words, runs, tuple(filter(None, sentences)), stems, _NUMBER.search(text) is not None)


@dataclass(frozen=True)
class Measures:
    """Measures of one argument: its parts, and its soundness, all in [0, 1]."""

    parts: Mapping[str, float]
    soundness: float

    @property
    def score(self) -> float:
        """The argument's score in [0, 1]."""
        return sum(weight * self.parts[name] for name, weight in WEIGHTS.items())


def measure(text: _Text, topic: _Text, seen: set[tuple[str, ...]], full_length: int) -> Measures:
    """Return the parts of one argument.

    All parts but the length are multiplied by the soundness ``novelty * variety * prose * size``, the length by
    ``novelty * variety``. Novelty is the share of runs of three words that are new: in neither the topic, nor what
    either side said before, nor the earlier text. Variety is the share of different words (among 120 at most) over a
    half. Prose is low where function words are fewer than a quarter, or the words that the rules look for more than a
    fifth of all. Size is the number of words over a third of a full argument's. Each is at most 1.

    Args:
        text: argument to measure.
        topic: topic of the debate.
        seen: runs of words in the topic and in the arguments before.
        full_length: number of words of an argument of full length.
    """
    count = len(text.words)
    if not count:
        return Measures(dict.fromkeys(WEIGHTS, 0.0), 0.0)
    novelty = len(set(text.runs) - seen) / len(text.runs)
    variety = min(1.0, len(set(text.words)) / (0.5 * min(count, _VARIETY_WORDS)))
    function_words = sum(word in FUNCTION_WORDS for word in text.words) / count
    markers = sum(word in _MARKERS for word in text.words) / count
    few_markers = min(1.0, max(0.0, (0.5 - markers) / 0.3))  # 1 up to a fifth, 0 from a half
    prose = min(1.0, function_words / 0.25) * few_markers
    size = min(1.0, 3 * count / full_length)
    soundness = novelty * variety * prose * size
    length = min(1.0, count / full_length, 3 * full_length / count)
    parts = {
        "length": length * novelty * variety,
        "evidence": _evidence(text) * soundness,
        "reasoning": _reasoning(text) * soundness,
        "structure": _structure(text) * soundness,
        "relevance": _relevance(text, topic) * soundness,
    }
    return Measures(parts, soundness)


def _evidence(text: _Text) -> float:
    """Return the number of kinds of evidence (numbers, sources, examples) over two, at most 1."""
    found = set(text.words)
    kinds = text.has_number + bool(found & _WORDS["sources"]) + bool(found & _WORDS["examples"])
    return min(1.0, kinds / 2)


def _reasoning(text: _Text) -> float:
    """Return half for two sentences with a connective and half for connectives of two families."""
    sentences = sum(not _ALL_CONNECTIVES.isdisjoint(sentence) for sentence in text.sentences)
    families = sum(not family.isdisjoint(text.words) for family in CONNECTIVES)
    return 0.5 * min(1.0, sentences / 2) + 0.5 * min(1.0, families / 2)


def _structure(text: _Text) -> float:
    """Return the number of sentences over three, times the share of them that have 4 to 40 words."""
    plausible = sum(4 <= len(sentence) <= 40 for sentence in text.sentences) / len(text.sentences)
    return min(1.0, len(text.sentences) / 3) * plausible


def _relevance(text: _Text, topic: _Text) -> float:
    """Return the share of the topic's content words that occur, over a half; 1 where the topic has none."""
    return min(1.0, len(text.stems & topic.stems) / (0.5 * len(topic.stems))) if topic.stems else 1.0


def _coverage(side: Side, topic: _Text, turns: Sequence[tuple[Side, _Text, Measures]]) -> float | None:
    """Return the share of the other side's arguments that are taken up later; None if there was none to take up.

    Taken up means that two content words beyond the topic's (or as many as there are) recur; it counts as much as the
    argument in which they do is sound.
    """
    last = max(place for place, (speaker, _, _) in enumerate(turns) if speaker == side)
    found = []
    for place, (speaker, text, _) in enumerate(turns[:last]):
        if speaker != OPPONENT[side]:
            continue
        points = text.stems - topic.stems
        answers = [
            measures.soundness
            for who, answer, measures in turns[place + 1 :]
            if who == side and len(points & answer.stems) >= min(2, len(points))
        ]
        found.append(max(answers, default=0.0))
    return sum(found) / len(found) if found else None
