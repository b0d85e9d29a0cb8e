"""Two agents write two parts of a text, and are rewarded together for how well the parts match (CoMLRL)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

from mrlm_environments.data_tasks import DataTasks, ending
from mrlm_environments.writing.score import GATES, MAXIMUM, RULES, STRUCTURE, Score, score_parts
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.environment.tools import clip
from mrlm_pl.errors import DataError
from mrlm_pl.settings import NonNegativeFloat, PositiveInt

Family = Literal["tldr", "arxiv"]

FIELDS: dict[str, tuple[str, ...]] = {"tldr": ("prompt",), "arxiv": ("abstract_text", "abstract")}
"""Names of the field with a row's text; the first that the row has."""

SHOWN_CHARACTERS = 3_000
MADE_TEXTS = yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text(encoding="utf-8"))
"""By family: the orders of the agents, a text with slots, the choices for them, and the two parts that earn the highest
score on it."""

AGENTS = {family: tuple(made["orders"]) for family, made in MADE_TEXTS.items()}


class WritingEnvironment(Environment):
    """Two agents simultaneously write one part each; both earn the same reward, from 0 to 2.98, for the pair.

    Four levels: both parts have the right number of words (0.5); the ratio of their lengths (up to 1) and of
    their numbers of different content words (up to 0.5); transition words (up to 0.4) and common
    content words (up to 0.6). A failed level ends the score at the levels before it. The exact bounds
    are in docs/environments/writing.md; they are those of CoMLRL (arXiv 2508.04652).

    Args:
        family: ``tldr``, a brief and a detailed summary of a post, by the agents ``brief`` and ``detailed``; or
            ``arxiv``, an introduction's first and second part from an abstract, by ``background`` and ``method``.
        data: rows that replace the generated texts, with ``prompt`` (``tldr``) or ``abstract_text`` or ``abstract``
            (``arxiv``): a file or a hub name, or a mapping from splits to these; see
            :func:`mrlm_pl.environment.rows.read_split`.
        turns: versions that each agent writes. Before a new one it reads its partner's last one and where the pair
            fell short, without numbers; only the last pair is rewarded.
        faithfulness: weight of a fifth component, behind the last gate: the share of content words that both parts
            together and the text have in common.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "writing"
    client_settings = ("family", "turns", "faithfulness")
    agents = AGENTS["tldr"]
    quick = True
    forks = True

    def __init__(
        self,
        family: Family = "tldr",
        data: str | dict[str, str] | None = None,
        turns: PositiveInt = 1,
        faithfulness: NonNegativeFloat = 0.0,
    ) -> None:
        self.family, self.turns, self.faithfulness = family, turns, faithfulness
        self.agents = AGENTS[family]
        self._tasks = DataTasks(self.name, data)

    def tasks(self, split: str) -> TaskSource:
        """Return made texts without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: a row has no text.
            ConfigurationError: the split is unknown or empty.
        """
        read = partial(_task_data, family=self.family)
        return self._tasks.source(split, (), read, lambda row: str(_text(row, self.family)), self._make, "text")

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the demonstration of a made text; None for data, and where faithfulness is rewarded."""
        if self.faithfulness or "choices" not in task.data:
            return None
        parts = MADE_TEXTS[self.family]["parts"]
        choices = task.data["choices"]
        return {agent: [part.format_map(choices)] for agent, part in zip(self.agents, parts, strict=True)}

    def bounds(self, task: Task) -> tuple[float, float] | None:
        """Return the returns of texts of the right length and of the best parts; see :meth:`Environment.bounds`."""
        return None if self.faithfulness else (len(self.agents) * STRUCTURE, len(self.agents) * MAXIMUM)

    def reset(self, task: Task) -> Observations:
        """Give both agents the text and their orders; see :meth:`Environment.reset`."""
        self._source, self._turn = task.data["text"], 0
        orders = MADE_TEXTS[self.family]["orders"]
        return {agent: (Message("user", f"{order}\n\n{self._source}"),) for agent, order in orders.items()}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Score the pair, or show it to both agents; see :meth:`Environment.step`."""
        self._turn += 1
        parts = (actions[self.agents[0]].final_text, actions[self.agents[1]].final_text)
        score = score_parts(RULES[self.family], parts, self._source, self.faithfulness)
        if self._turn < self.turns:
            return self._shown(parts, score)
        metrics = {"gates": float(score.gates), **score.measures}
        return ending(self.agents, score.components, "answered", score.gates == GATES, metrics)

    def _shown(self, parts: tuple[str, str], found: Score) -> Step:
        advice = self._advice(parts, found)
        observations = {}
        for agent, own, other in zip(self.agents, parts, reversed(parts), strict=True):
            text = (
                f"Your part has {_count(own)} and your partner's {_count(other)}. {advice}\n"
                f"Your partner's part:\n{clip(other, SHOWN_CHARACTERS)}\n\nWrite a new version of your part."
            )
            observations[agent] = (Message("user", text),)
        return Step(observations=observations)

    def _advice(self, parts: tuple[str, str], found: Score) -> str:
        """Describe the pair's deficit: the first closed gate, or the reward that is still to be earned."""
        rules, (first, second) = RULES[self.family], self.agents
        if found.gates == 0:
            return "A part is too short or too long."
        for measure, band, below, above in (
            ("length_ratio", rules.length, "be longer", "be shorter"),
            ("vocabulary_ratio", rules.vocabulary, "have more different words", "have fewer different words"),
        ):
            ratio = found.measures[measure]
            if not band.low <= ratio <= band.high:
                return f"The {second} part should {below if ratio < band.low else above} beside the {first} one."
        if found.measures["common_words"] < rules.overlap:
            return "The parts should have more words in common."
        return "Use more kinds of transition words."

    def _make(self, rng: Random) -> Mapping[str, Any]:
        made = MADE_TEXTS[self.family]
        choices = {name: rng.choice(options) for name, options in made["slots"].items()}
        return {"text": made["text"].format_map(choices), "choices": choices}


def _count(part: str) -> str:
    shown = len(part) <= SHOWN_CHARACTERS
    return f"{len(part.split())} words" if shown else f"more than {SHOWN_CHARACTERS} characters"


def _text(row: Mapping[str, Any], family: str) -> Any:
    """Return the row's text; arXiv's files hold a list of sentences, each between ``<S>`` and ``</S>``."""
    text = next((row[name] for name in FIELDS[family] if name in row), None)
    if family == "arxiv" and isinstance(text, list) and all(isinstance(sentence, str) for sentence in text):
        return " ".join(re.sub(r"</?S>", "", sentence).strip() for sentence in text)
    return text


def _task_data(row: Mapping[str, Any], family: str) -> dict[str, Any]:
    text = _text(row, family)
    if not isinstance(text, str) or not text.strip():
        raise DataError(
            f"the text is {text!r:.80}; a row of family {family!r} has it in {' or '.join(FIELDS[family])}, and this "
            f"one has the fields {sorted(row)}"
        )
    return {"text": text}
