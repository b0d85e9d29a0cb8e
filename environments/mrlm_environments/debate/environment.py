"""Two agents debate a topic; a judge scores both sides when the debate is over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Literal

from mrlm_environments.data_tasks import DataTasks
from mrlm_environments.debate.judge import OPPONENT, SIDES, TIE, Argument, Debate, Judge, Side, Verdict
from mrlm_environments.debate.judge_by_rules import RuleJudge
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.errors import DataError, counted
from mrlm_pl.seeding import derive_seed
from mrlm_pl.settings import FractionBelowOne, PositiveInt

Reward = Literal["score", "margin", "win"]
AGENT_OF: Mapping[Side, str] = {"PRO": "pro", "CON": "con"}
SIDE_OF: Mapping[str, Side] = {agent: side for side, agent in AGENT_OF.items()}

MAX_TOPIC_CHARACTERS = 2000
_TOPICS = Path(__file__).with_name("topics.txt")

PROPOSALS = tuple(
    (who, proposal.strip())
    for who, _, proposals in (line.partition(": ") for line in _TOPICS.read_text(encoding="utf-8").splitlines())
    for proposal in proposals.split("|")
)
"""The embedded topics: actors and proposals."""


class DebateEnvironment(Environment):
    """PRO argues for a topic and CON against it, in turns, ``max_turns`` each; then a judge scores both sides.

    The agents are ``pro`` and ``con``; ``seats`` binds them to one policy or to two. Both see the topic and all
    arguments. Both sides are rewarded with the last turn. Episodes have no success; the metrics
    ``pro_wins``, ``con_wins`` and ``tie`` tell who won.

    Positions change in two ways, both functions of the task, so that the episodes of a group agree in them: the task's
    seed tells which side opens (``swap_opening``), and an embedded topic is worded as ``X should ...`` or, as often,
    ``X should not ...``, which makes PRO argue for the other position.

    Args:
        judge: judge of the debate; None is :class:`~mrlm_environments.debate.judge_by_rules.RuleJudge`.
        reward: reward of a side: its own ``score``; the ``margin``, its score minus the other's, which sums to 0 over
            the sides; or the ``win``, 1, or -1 for the loser, 0 for both in a tie.
        max_turns: number of turns of each side.
        tie_margin: scores that differ by this or less are a tie.
        swap_opening: False lets PRO open every debate.
        data: rows with ``topic`` that replace the embedded topics: a file or a hub name, or a mapping from splits to
            these; see :func:`mrlm_pl.environment.rows.read_split`.
        max_characters: number of characters of an argument that opponent and judge read; the rest is left out.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "debate"
    client_settings = ("reward", "max_turns", "tie_margin", "swap_opening")
    forks = True
    agents = ("pro", "con")

    def __init__(
        self,
        judge: Judge | None = None,
        reward: Reward = "margin",
        max_turns: PositiveInt = 2,
        tie_margin: FractionBelowOne = 0.01,
        swap_opening: bool = True,
        data: str | dict[str, str] | None = None,
        max_characters: PositiveInt = 4000,
    ) -> None:
        self.judge = judge if judge is not None else RuleJudge()
        self.reward, self.max_turns, self.tie_margin = reward, max_turns, tie_margin
        self.swap_opening, self.max_characters = swap_opening, max_characters
        self._tasks = DataTasks(self.name, data)

    def tasks(self, split: str) -> TaskSource:
        """Return embedded topics without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: a row lacks a topic.
            ConfigurationError: the split is unknown or empty.
        """
        return self._tasks.source(
            split, ("topic",), row_topic, lambda row: str(row["topic"]).strip(), generate_topic, "proposal"
        )

    def bounds(self, task: Task) -> tuple[float, float] | None:
        """Return the sum of both rewards; unknown for scores; see :meth:`Environment.bounds`."""
        return None if self.reward == "score" else (0.0, 0.0)

    def reset(self, task: Task) -> Observations:
        """Give the opening side the topic; see :meth:`Environment.reset`."""
        self._topic, self._seed = str(task.data["topic"]), task.seed
        self._opener = opening_side(task.seed) if self.swap_opening else SIDES[0]
        self._arguments: list[Argument] = []
        self._clipped = 0
        return self._observations(self._opener)

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Pass an argument on to the other side, or have the debate judged; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        self._arguments.append(Argument(SIDE_OF[agent], self._read(message.final_text)))
        if len(self._arguments) < 2 * self.max_turns:
            return Step(self._observations(OPPONENT[SIDE_OF[agent]]))
        debate = Debate(self._topic, tuple(self._arguments), derive_seed("judge", self._seed))
        return self._judge(self.judge.judge(debate))

    def close(self) -> None:
        """Free the judge's resources."""
        self.judge.close()

    def _read(self, text: str) -> str:
        """Return the part of an argument that is read, without lone surrogates, which tokenizers refuse."""
        self._clipped += len(text) > self.max_characters
        return text[: self.max_characters].encode("utf-8", "replace").decode()

    def _observations(self, side: Side) -> Observations:
        """Return the next side's observation: all that it has not seen yet, as one user message."""
        turn = sum(argument.side == side for argument in self._arguments) + 1
        parts = []
        if turn == 1:
            position = "for" if side == SIDES[0] else "against"
            parts.append(f"Debate: {self._topic}\nYou argue {position} this, in {counted(self.max_turns, 'turn')}.")
        if self._arguments:
            parts.append(f"Your opponent says:\n{self._arguments[-1].text}")
        parts.append(f"Turn {turn} of {self.max_turns}:")
        return {AGENT_OF[side]: (Message("user", "\n\n".join(parts)),)}

    def _judge(self, verdict: Verdict) -> Step:
        winner = verdict.winner(self.tie_margin)
        components = {AGENT_OF[side]: self._components(side, verdict, winner) for side in SIDES}
        return Step(
            rewards={agent: sum(parts.values()) for agent, parts in components.items()},  # as in recorded episodes
            components=components,
            done=True,
            stop_reason="judged",
            metrics={
                **{f"{AGENT_OF[side]}_score": verdict.score(side) for side in SIDES},
                **{f"{AGENT_OF[side]}_wins": float(winner == side) for side in SIDES},
                "tie": float(winner == TIE),
                "pro_opens": float(self._opener == SIDES[0]),
                "clipped_arguments": float(self._clipped),
                **verdict.metrics,
            },
        )

    def _components(self, side: Side, verdict: Verdict, winner: str) -> dict[str, float]:
        if self.reward == "win":
            return {"win": 0.0 if winner == TIE else 1.0 if winner == side else -1.0}
        parts, opponent_parts = verdict.parts[side], verdict.parts[OPPONENT[side]]
        if self.reward == "score":
            return dict(parts)
        return {
            name: parts.get(name, 0.0) - opponent_parts.get(name, 0.0) for name in sorted({*parts, *opponent_parts})
        }


def opening_side(seed: int) -> Side:
    """Return the side that opens the debate of a task with this seed; each as often as the other.

    >>> {opening_side(seed) for seed in range(20)} == {"PRO", "CON"}
    True
    """
    return SIDES[derive_seed("opening side", seed) % 2]


def generate_topic(rng: Random) -> dict[str, Any]:
    """Return a topic's data: the wording (``X should ...`` or ``X should not ...``, equally likely) and the proposal.

    The two wordings swap the positions.
    """
    who, what = rng.choice(PROPOSALS)
    negated = rng.random() < 0.5
    return {"topic": f"{who} should {'not ' if negated else ''}{what}.", "proposal": f"{who}: {what}"}


def row_topic(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a topic's data from a row of a data set.

    Raises:
        DataError: the topic is empty, no text, or too long.
    """
    topic = row["topic"]
    if not isinstance(topic, str) or not topic.strip() or len(topic) > MAX_TOPIC_CHARACTERS:
        raise DataError(f"topic is {str(topic)[:80]!r}; it must be a text of 1 to {MAX_TOPIC_CHARACTERS} characters")
    return {"topic": topic.strip()}
