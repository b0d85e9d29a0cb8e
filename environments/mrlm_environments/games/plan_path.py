"""A team of a planner and an executor that finds the way through a grid with walls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import between

MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""Row and column that a move adds."""

START, GOAL, WALL, FREE = "AG#-"
SHARE = 0.5
"""Most that each component can add up to in an episode."""

_MOVES = re.compile(r"\s*([UDLR]+)\b", re.IGNORECASE)
_ATTEMPTS = 1000

Cell = tuple[int, int]


class PlanPath(Environment):
    """In each turn the planner proposes up to ``moves`` moves, and the executor, who is shown them, moves.

    Both see the grid: ``A`` is where the team is, ``G`` the goal, ``#`` a wall and ``-`` free; a slash ends a row. The
    first word of a reply names the moves if it has no letters besides U, D, L and R; otherwise there is none. A move
    into a wall or off the grid stays. The episode ends at the goal, or after ``turns`` turns.

    Distances d are those of shortest paths to the goal, d0 that of the start. In the executor's step both agents earn
    ``progress``, .5 (d before - d after) / d0, and at the goal ``solved``, .5. The planner earns ``proposal`` for
    where its moves would end, .5 (d of its last proposal - d of this one) / d0, beginning with d0. So all components
    telescope, the executor earns 1 at the most and the planner 1.5.

    After Plan-Path of AT-GRPO (arXiv 2510.11062), whose first agent proposes a path with a program.

    Args:
        size: rows and columns.
        walls: their number.
        distance: least and largest d0 of a task.
        moves: most that a reply can make.
        turns: of each agent.
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
        size: int = 3,
        walls: int = 2,
        distance: tuple[int, int] = (2, 4),
        moves: int = 1,
        turns: int = 5,
        planner: bool = True,
    ) -> None:
        between(3, 9, "plan_path: ", size=size)
        between(0, size * size - 2, "plan_path: ", walls=walls)
        between(1, 9, "plan_path: ", moves=moves)
        between(1, 99, "plan_path: ", turns=turns)
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
        cells, start, distances = _read(task.data["grid"])
        path, here = "", start
        while distances[here]:
            for move in MOVES:
                there = _moved(cells, here, move)
                if distances[there] < distances[here]:
                    path, here = path + move, there
                    break
        replies = [path[first : first + self.moves] for first in range(0, len(path), self.moves)]
        return dict.fromkeys(self.agents, replies)

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the rewards of staying and of a shortest path; see :meth:`Environment.bounds`."""
        return 0.0, SHARE * (5 if self.planner else 2)

    def reset(self, task: Task) -> Observations:
        """Show the grid to the agent that begins; see :meth:`Environment.reset`."""
        self._cells, self._here, self._distances = _read(task.data["grid"])
        self._far = self._proposed = self._distances[self._here]
        self._turn = 0
        return self._ask()

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Judge a proposal, or move; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        moves = moves_of(message.content, self.moves)
        reached = self._after(moves)
        if agent == "planner":
            earned = SHARE * (self._proposed - self._distances[reached]) / self._far
            self._proposed = self._distances[reached]
            text = f"{self._map()} {moves or '?'}"
            if self._turn == 0:
                text = f"Move {self.moves} of UDLR. {text}"
            return Step({"executor": (Message("user", text),)}, components={agent: {"proposal": earned}})
        progress = SHARE * (self._distances[self._here] - self._distances[reached]) / self._far
        self._here, self._turn = reached, self._turn + 1
        left = self._distances[reached]
        parts = {"progress": progress, "solved": SHARE * (left == 0)}
        done = left == 0 or self._turn == self.turns
        return Step(
            {} if done else self._ask(),
            components=dict.fromkeys(self.agents, parts),
            done=done,
            stop_reason="" if not done else "turns" if left else "solved",
            success=left == 0 if done else None,
            metrics={"distance_left": float(left), "turns": float(self._turn)} if done else {},
        )

    def _ask(self) -> Observations:
        """Show the grid to the agent that begins a turn."""
        text = self._map()
        if self._turn == 0:
            text = f"Plan {self.moves} of UDLR. {text}"
        return {self.agents[0]: (Message("user", text),)}

    def _after(self, moves: str) -> Cell:
        """Return the cell that moves lead to; they end at the goal."""
        here = self._here
        for move in moves:
            here = here if self._distances[here] == 0 else _moved(self._cells, here, move)
        return here

    def _map(self) -> str:
        marks = [*map(list, self._cells)]
        row, column = self._here
        marks[row][column] = START
        return "/".join(map("".join, marks))


def moves_of(reply: str, most: int) -> str:
    """Return the moves that the first word of a reply names, ``most`` of them at most.

    >>> moves_of(" ru.", 2), moves_of("UDLR", 2), moves_of("Right", 2), moves_of("go R", 2)
    ('RU', 'UD', '', '')
    """
    found = _MOVES.match(reply[:1000])
    return found[1][:most].upper() if found else ""


def _moved(cells: Sequence[str], here: Cell, move: str) -> Cell:
    """Return the cell that a move leads to."""
    row, column = here[0] + MOVES[move][0], here[1] + MOVES[move][1]
    inside = 0 <= row < len(cells) and 0 <= column < len(cells)
    return (row, column) if inside and cells[row][column] != WALL else here


def _read(grid: str) -> tuple[list[str], Cell, dict[Cell, int]]:
    """Return the rows without the start, the start, and the distances to the goal of the cells that lead to it."""
    marks = {mark: place for place, mark in enumerate(grid.replace("/", ""))}
    cells = grid.replace(START, FREE).split("/")
    start, goal = (divmod(marks[mark], len(cells)) for mark in (START, GOAL))
    return cells, start, _distances(cells, goal)


def _distances(cells: Sequence[str], goal: Cell) -> dict[Cell, int]:
    """Return the length of a shortest path to the goal from every cell that has one, by breadth-first search."""
    found, reached = {goal: 0}, [goal]
    for here in reached:
        for move in MOVES:
            there = _moved(cells, here, move)
            if there not in found:
                found[there] = found[here] + 1
                reached.append(there)
    return found


def _grid(rng: Random, size: int, walls: int, distance: tuple[int, int]) -> dict[str, Any]:
    """Return a grid with a distance in the range.

    Raises:
        ConfigurationError: none was found.
    """
    for _ in range(_ATTEMPTS):
        marks = list(WALL * walls + FREE * (size * size - walls - 1) + GOAL)
        rng.shuffle(marks)
        cells = ["".join(marks[row * size : (row + 1) * size]) for row in range(size)]
        far = _distances(cells, divmod(marks.index(GOAL), size))
        starts = sorted(cell for cell, steps in far.items() if distance[0] <= steps <= distance[1])
        if starts:
            row, column = rng.choice(starts)
            marks[row * size + column] = START
            return {"grid": "/".join("".join(marks[row * size : (row + 1) * size]) for row in range(size))}
    raise ConfigurationError(
        f"plan_path: no start is {distance[0]} to {distance[1]} moves from the goal in {_ATTEMPTS} grids of size "
        f"{size} with {walls} walls; change distance, size or walls"
    )
