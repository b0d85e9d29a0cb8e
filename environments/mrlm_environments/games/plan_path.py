"""A team of a planner and an executor that finds the way through a grid with walls."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from random import Random
from typing import Annotated, Any

from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import between

MOVES = "UDLR"
START, GOAL, WALL, FREE, END = "AG#-/"
SHARE = 0.5
"""Most that each component can add up to in an episode."""

_MOVES = re.compile(rf"\s*([{MOVES}]+)\b", re.IGNORECASE)
_ATTEMPTS = 1000


class PlanPath(Environment):
    """In each turn the planner proposes up to ``moves`` moves, and the executor, who is shown them, moves.

    Both see the grid: ``A`` is where the team is, ``G`` the goal, ``#`` a wall and ``-`` free; a slash ends a row. The
    first word of a reply names the moves if it has no letters besides U, D, L and R; otherwise there is none. A move
    into a wall or off the grid stays. The episode ends at the goal, or after ``turns`` turns.

    Distances d are those of shortest paths to the goal, d0 that of the start. In the executor's step both agents earn
    ``progress``, 0.5 (d before - d after) / d0, and at the goal ``solved``, 0.5. The planner earns ``proposal`` for
    where its moves would end, 0.5 (d of its last proposal - d of this one) / d0, beginning with d0. So all components
    telescope, the executor earns 1 at the most and the planner 1.5.

    After Plan-Path of AT-GRPO (arXiv 2510.11062), whose first agent proposes a path with a program.

    Args:
        size: number of rows and of columns.
        walls: number of walls.
        distance: least and largest d0 of a task.
        moves: maximum number of moves in a reply.
        turns: number of turns of each agent.
        planner: False lets the executor act alone.

    Raises:
        ConfigurationError: a value is out of range, or no grid has such a distance.
    """

    name = "plan_path"
    client_settings = ("size", "walls", "distance", "moves", "turns", "planner")
    quick = True
    forks = True

    def __init__(
        self,
        size: Annotated[int, between(3, 9)] = 3,
        walls: int = 2,
        distance: tuple[int, int] = (2, 4),
        moves: Annotated[int, between(1, 9)] = 1,
        turns: Annotated[int, between(1, 99)] = 5,
        planner: bool = True,
    ) -> None:
        between(0, size * size - 2).check("plan_path: ", walls=walls)
        least, most = distance
        if not 1 <= least <= most <= moves * turns:
            raise ConfigurationError(
                f"plan_path: distance is {distance!r}; give [least, largest], from 1 to moves x turns = {moves * turns}"
            )
        self.size, self.walls, self.distance = size, walls, (least, most)
        self.moves, self.turns, self.planner = moves, turns, planner
        self.agents = ("planner", "executor") if planner else ("executor",)

    def tasks(self, split: str) -> TaskSource:
        """Return grids with a start and a goal, without end; see :meth:`Environment.tasks`."""
        draw = partial(_grid, size=self.size, walls=self.walls, distance=self.distance)
        return SeededTasks(self.name, split, draw, lambda data: data["grid"])

    def gold(self, task: Task) -> Mapping[str, Sequence[str]]:
        """Return a shortest path in both agents' replies."""
        grid = task.data["grid"]
        distances = _distances(grid)
        path, here = "", grid.index(START)
        while distances[here]:
            ways = {move: _move(distances, here, step) for move, step in _steps(grid).items()}
            move = next(move for move, there in ways.items() if distances[there] < distances[here])
            path, here = path + move, ways[move]
        replies = [path[first : first + self.moves] for first in range(0, len(path), self.moves)]
        return dict.fromkeys(self.agents, replies)

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the rewards of staying and of a shortest path; see :meth:`Environment.bounds`."""
        return 0.0, SHARE * (5 if self.planner else 2)

    def reset(self, task: Task) -> Observations:
        """Show the grid to the agent that begins; see :meth:`Environment.reset`."""
        grid = task.data["grid"]
        self._grid, self._here, self._distances = grid.replace(START, FREE), grid.index(START), _distances(grid)
        self._far = self._proposed = self._distances[self._here]
        self._turn = 0
        return self._shown(self.agents[0], "Plan")

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Judge a proposal, or move; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        moves = moves_of(message.final_text, self.moves)
        reached = self._after(moves)
        if agent == "planner":
            earned = SHARE * (self._proposed - self._distances[reached]) / self._far
            self._proposed = self._distances[reached]
            shown = self._shown("executor", "Move", f" {moves or '?'}")
            return Step(shown, components={agent: {"proposal": earned}})
        progress = SHARE * (self._distances[self._here] - self._distances[reached]) / self._far
        self._here, self._turn = reached, self._turn + 1
        left = self._distances[reached]
        parts = {"progress": progress, "solved": SHARE * (left == 0)}
        done = left == 0 or self._turn == self.turns
        return Step(
            {} if done else self._shown(self.agents[0], "Plan"),
            components=dict.fromkeys(self.agents, parts),
            done=done,
            stop_reason="" if not done else "turns" if left else "solved",
            success=left == 0 if done else None,
            metrics={"distance_left": float(left), "turns": float(self._turn)} if done else {},
        )

    def _shown(self, agent: str, order: str, proposal: str = "") -> Observations:
        """Show an agent the grid, with its order in the first turn."""
        ordered = f"{order} {self.moves} of UDLR. " if self._turn == 0 else ""
        here = f"{self._grid[: self._here]}{START}{self._grid[self._here + 1 :]}"
        return {agent: (Message("user", f"{ordered}{here}{proposal}"),)}

    def _after(self, moves: str) -> int:
        """Return the place that moves lead to; they end at the goal."""
        here, steps = self._here, _steps(self._grid)
        for move in moves:
            here = here if self._distances[here] == 0 else _move(self._distances, here, steps[move])
        return here


def moves_of(reply: str, most: int) -> str:
    """Return the moves that the first word of a reply names, ``most`` of them at most.

    >>> moves_of(" ru.", 2), moves_of("UDLR", 2), moves_of("Right", 2), moves_of("go R", 2)
    ('RU', 'UD', '', '')
    """
    found = _MOVES.match(reply[:1000])
    return found[1][:most].upper() if found else ""


def _steps(grid: str) -> dict[str, int]:
    """Return the number that each move adds to a place, an index into the grid's text."""
    width = grid.index(END) + 1
    return dict(zip(MOVES, (-width, width, -1, 1), strict=True))


def _move(free: Collection[int], here: int, step: int) -> int:
    """Return the place that a step leads to; one that is not free, or outside the grid, is not entered."""
    return here + step if here + step in free else here


def _distances(grid: str) -> dict[int, int]:
    """Return the length of a shortest path to the goal from every place that has one, by breadth-first search."""
    free = {place for place, mark in enumerate(grid) if mark not in (WALL, END)}
    reached = [grid.index(GOAL)]
    distances = {reached[0]: 0}
    for here in reached:
        for there in (_move(free, here, step) for step in _steps(grid).values()):
            if there not in distances:
                distances[there] = distances[here] + 1
                reached.append(there)
    return distances


def _grid(rng: Random, size: int, walls: int, distance: tuple[int, int]) -> dict[str, Any]:
    """Return a grid with a distance in the range.

    Raises:
        ConfigurationError: none was found.
    """
    for _ in range(_ATTEMPTS):
        marks = list(WALL * walls + FREE * (size * size - walls - 1) + GOAL)
        rng.shuffle(marks)
        grid = END.join("".join(marks[first : first + size]) for first in range(0, size * size, size))
        starts = sorted(place for place, steps in _distances(grid).items() if distance[0] <= steps <= distance[1])
        if starts:
            start = rng.choice(starts)
            return {"grid": f"{grid[:start]}{START}{grid[start + 1 :]}"}
    raise ConfigurationError(
        f"plan_path: no start is {distance[0]} to {distance[1]} moves from the goal in {_ATTEMPTS} grids of size "
        f"{size} with {walls} walls; change distance, size or walls"
    )
