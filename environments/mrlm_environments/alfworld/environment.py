"""Household tasks by text: ALFWorld, with generated games or its own files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mrlm_environments.alfworld.expert import solution
from mrlm_environments.alfworld.files import GameTasks, file_game
from mrlm_environments.alfworld.game import KINDS, NOTHING, Game, Kind
from mrlm_environments.alfworld.generated import generated, generated_game, identity
from mrlm_environments.alfworld.house import ROOMS
from mrlm_environments.alfworld.similarity import most_similar
from mrlm_environments.data_tasks import ending, opening
from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource, ToolSchema
from mrlm_pl.environment.tools import answer_calls, clip, requested_calls, tool_schema, written_call
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import PositiveInt, UnitInterval, at_least, some_of, whole_range

Snap = Literal["bleu", "exact"]
Room = Literal["kitchen", "living_room", "bedroom", "bathroom"]
TAKE_ACTION = tool_schema("take_action", "Act in the house.", {"action": {"type": "string"}})
INSTRUCTION = (
    "You are in a house and have a task. Actions: go to R, open R, close R, take O from R, move O to R, use O, "
    "clean O with R, heat O with R, cool O with R, slice O with O, examine R or O, look, inventory; R is a receptacle "
    "such as cabinet 1, O an object such as apple 1."
)
PLANNING = (
    "You plan for an actor in a house, who has a task. Write the next steps in words: where to search, what to take, "
    "what to do with it and where to put it. You see what the actor did before you plan again."
)
HOW_TO_ACT = (
    'Call the tool: <tool_call>{"name": "take_action", "arguments": {"action": "..."}}</tool_call>, or write a line '
    "such as: Action: go to cabinet 1"
)
AGENT, PLANNER, ACTOR = "agent", "planner", "actor"
PLAN_CHARACTERS = 1000
ANY_STEPS = (1, 50)
_WRITTEN = re.compile(r"^[ \t*>#-]{0,8}action[ \d*]{0,8}:(.*)", re.IGNORECASE | re.MULTILINE)


class AlfWorldEnvironment(Environment):
    """A task in a house, such as ``put a clean apple in fridge``, and one tool: ``take_action``.

    The reward is 1 when the goal is reached, which ends the episode, else 0.

    As a team, a planner writes the next steps and an actor takes actions; both earn the reward.

    Args:
        data: ALFWorld's games, which replace the generated ones: the folder of its archive, with ``train``,
            ``valid_seen`` and ``valid_unseen``; or a mapping from splits to folders or files ``game.tw-pddl``.
        kinds: goals of generated games: ``pick``, ``look``, ``clean``, ``heat``, ``cool``, ``pick_two``; None is all.
        rooms: rooms of generated games: ``kitchen``, ``living_room``, ``bedroom``, ``bathroom``; None is all.
        steps: minimum and maximum number of actions in which the scripted expert wins a generated game, from 1 to 50.
        team: two agents, ``planner`` and ``actor``, instead of one.
        plan_every: actions after which the planner plans again.
        max_turns: actions of an episode; a plan or another reply without an action counts as one.
        incomplete_penalty: subtracted from the reward where the goal is not reached; AgentRL's is 0.2.
        snap: an action that is not admissible becomes the most similar one (``bleu``, as in AgentBench) or does
            nothing (``exact``).
        list_actions: True ends every observation with the list of admissible actions.
        instruction: system message before the task, for the agent or the actor; the planner has one of its own.

    Raises:
        ConfigurationError: a value is out of its range, or options exclude each other.
    """

    name = "alfworld"
    forks = True
    client_settings = (
        *("kinds", "rooms", "steps", "team", "plan_every", "max_turns", "incomplete_penalty", "snap"),
        *("list_actions", "instruction"),
    )

    def __init__(
        self,
        data: str | dict[str, str] | None = None,
        kinds: list[Kind] | None = None,
        rooms: list[Room] | None = None,
        steps: tuple[int, int] = ANY_STEPS,
        team: bool = False,
        plan_every: PositiveInt = 10,
        max_turns: int = 50,
        incomplete_penalty: UnitInterval = 0.0,
        snap: Snap = "bleu",
        list_actions: bool = True,
        instruction: str = INSTRUCTION,
    ) -> None:
        at_least(2 if team else 1).check("alfworld: ", max_turns=max_turns)
        if data is not None and (kinds, rooms, tuple(steps)) != (None, None, ANY_STEPS):
            raise ConfigurationError(
                "alfworld: kinds, rooms and steps are for generated games; leave them or `data` out"
            )
        self.data = data
        self.agents = (PLANNER, ACTOR) if team else (AGENT,)
        self.kinds = some_of(KINDS, "alfworld: ", kinds=kinds)
        self.rooms = some_of(tuple(ROOMS), "alfworld: ", rooms=rooms)
        self.steps = whole_range(1, 50, "alfworld: ", steps=steps)
        self.plan_every, self.max_turns, self.incomplete_penalty = plan_every, max_turns, incomplete_penalty
        self.snap, self.list_actions, self.instruction = snap, list_actions, instruction

    def tasks(self, split: str) -> TaskSource:
        """Return generated games without end, or those of the data; see :meth:`Environment.tasks`.

        The split ``test`` has the floor plans that ALFRED keeps for its test, the others share the rest and have
        different goals in each plan.

        Raises:
            DataError: the data holds no game, or a file is of another form.
            ConfigurationError: the split is unknown.
        """
        if self.data is not None:
            return GameTasks(self.name, split, self.data)
        options = (split, self.kinds, self.rooms, self.steps)
        return SeededTasks(self.name, split, lambda rng: generated_game(rng, *options), identity)

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return ``take_action``, but for the planner."""
        return () if agent == PLANNER else (TAKE_ACTION,)

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the expert's actions, the planner's plans being lists of them; None if they exceed ``max_turns``."""
        actions = solution(_game(task.data), self.max_turns)
        replies = {self.agents[-1]: [written_call(TAKE_ACTION.name, action=action) for action in actions]}
        if len(self.agents) == 2:
            starts = range(0, len(actions), self.plan_every)
            replies[PLANNER] = [", then ".join(actions[start : start + self.plan_every]) for start in starts]
        return replies if 0 < sum(map(len, replies.values())) <= self.max_turns else None

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the returns of failure and of success; see :meth:`Environment.bounds`."""
        return -self.incomplete_penalty * len(self.agents), float(len(self.agents))

    def reset(self, task: Task) -> Observations:
        """Show the room and the task; see :meth:`Environment.reset`."""
        self._game: Game = _game(task.data)
        self._state = self._game.start
        self._turns, self._planned, self._faults = 0, 0, 0
        posed = self._game.opening()
        self._held: dict[str, list[Message]] = defaultdict(list)  # that the agent sees when it acts
        self._held[PLANNER] = opening(posed, PLANNING)
        self._held[self.agents[-1]] = opening(posed + self._listed(), self.instruction)
        return {self.agents[0]: self._held.pop(self.agents[0])}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Take the actions of a reply in order, or hand a plan to the actor; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        if agent == PLANNER:
            self._turns += 1
            self._planned = self._turns
            self._held[ACTOR].append(Message("user", f"Plan: {clip(message.final_text, PLAN_CHARACTERS)}"))
            return self._next(ACTOR)
        calls = requested_calls(message)
        written = None if calls else _WRITTEN.search(message.final_text)
        if not calls:
            text = self._act(agent, written[1]) if written else self._failed(HOW_TO_ACT)
            self._held[agent].append(Message("user", text))
        for answer, made in answer_calls(
            calls, self.tools(agent), HOW_TO_ACT, lambda call: self._act(agent, call.arguments["action"])
        ):
            self._turns += not made
            self._faults += not made
            self._held[agent].append(answer)
            if self._over():
                break
        if agent == ACTOR and (self._turns - self._planned >= self.plan_every or not (calls or written)):
            agent = PLANNER
            self._held[agent].append(Message("user", "Plan the next steps."))
        return self._next(agent)

    def _over(self) -> str:
        """Return why the episode is over, or an empty text."""
        return "won" if self._game.won(self._state) else "max_turns" if self._turns >= self.max_turns else ""

    def _failed(self, text: str) -> str:
        self._turns += 1
        self._faults += 1
        return text

    def _act(self, agent: str, given: str) -> str:
        """Take an action and return its observation."""
        text = " ".join(given[:PLAN_CHARACTERS].lower().split()).strip(" .!*\"'`")  # else the number is another word
        known = self._game.actions(self._state)
        if text not in known and self.snap == "bleu":
            text = most_similar(text, known) or text
        if text in known:
            self._turns += 1
            self._state, observed = self._game.act(self._state, known[text])
        else:
            observed = self._failed(NOTHING)
        if agent == ACTOR:
            self._held[PLANNER].append(Message("user", f"> {clip(text, 100)}\n{observed}"))
        return observed + self._listed()

    def _listed(self) -> str:
        """Return the list of admissible actions in AgentBench's form, if it is asked for."""
        listed = "\n".join(self._game.actions(self._state)) if self.list_actions else ""
        return f" AVAILABLE ACTIONS: {listed}\n" if listed else ""

    def _next(self, agent: str) -> Step:
        """Let an agent act, unless the episode is over."""
        reason = self._over()
        if not reason:
            return Step({agent: self._held.pop(agent)})
        won = reason == "won"
        components = {"won": 1.0} if won else {"incomplete": -self.incomplete_penalty}
        return ending(self.agents, components, reason, won, {"failed_actions": float(self._faults)})


def _game(data: Mapping[str, Any]) -> Game:
    return file_game(data) if "house" in data else generated(data)
