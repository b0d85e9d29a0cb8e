"""Tic-tac-toe by cell number, for two players."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from mrlm_environments.games.opponents import OpponentsGame
from mrlm_pl.environment import Message, Observations, SeededTasks, Step, Task, TaskSource

MARKS = ("X", "O")
LINES = ("123", "456", "789", "147", "258", "369", "159", "357")
"""The eight lines of three cells; a player who has all cells of one wins."""

_DIGIT = re.compile(r"[0-9]")
_DRAWN_GAME = (("5", "2", "3", "4", "9"), ("1", "8", "7", "6"))


class TicTacToe(OpponentsGame):
    """Players take turns to mark a free cell of a 3 x 3 board; three in a row win.

    A move is the first digit in a reply. The winner earns 1 and the loser -1; a draw earns 0. A reply
    without a digit, or with that of a cell that is not free, loses the game immediately: -1, and 1 to the other player,
    or 0 when that one has not moved yet (agents earn nothing before their first decision).

    The task says which agent begins, so an agent, and with it a seat, is not bound to X or O. A player sees its mark
    and the board with the number of each free cell: ``X 1O3/4X6/789``.
    """

    name = "tic_tac_toe"

    def tasks(self, split: str) -> TaskSource:
        """Return numbered games that either agent begins, without end; see :meth:`Environment.tasks`."""
        return SeededTasks(self.name, split, _game, lambda data: str(data["game"]))

    def gold(self, task: Task) -> Mapping[str, Sequence[str]]:
        """Return a game that neither player can do better in against a perfect other: a draw."""
        return dict(zip(self._in_order(task), _DRAWN_GAME, strict=True))

    def reset(self, task: Task) -> Observations:
        """Ask the agent that begins; see :meth:`Environment.reset`."""
        self._players = self._in_order(task)
        self._board = list("123456789")
        self._moves = 0
        self._number = task.data["game"]
        return self._ask()

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Make a move; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        cell = move(message.final_text)
        if cell is None or self._board[cell - 1] in MARKS:
            return self._end("illegal_move", winner=self._other(agent))
        mark = MARKS[self._moves % 2]
        self._board[cell - 1] = mark
        self._moves += 1
        if any(all(self._board[int(cell) - 1] == mark for cell in line) for line in LINES):
            return self._end("three_in_a_row", winner=agent)
        return self._end("draw", winner=None) if self._moves == len(self._board) else Step(self._ask())

    def _ask(self) -> Observations:
        turn = self._moves % 2
        rows = "/".join("".join(self._board[row : row + 3]) for row in (0, 3, 6))
        text = f"{MARKS[turn]} {rows}"
        if self._moves < 2:
            text = f"Tic-tac-toe {self._number}. {text}"
        return {self._players[turn]: (Message("user", text),)}

    def _end(self, reason: str, winner: str | None) -> Step:
        metrics = {"draw": winner is None, "illegal": reason == "illegal_move", "moves": self._moves}
        return self._last_step(
            reason, winner, 1.0, self._moves, {name: float(value) for name, value in metrics.items()}
        )


def move(reply: str) -> int | None:
    """Return the cell, from 1 to 9, that a reply names by its first digit, or None.

    >>> move("I take 5."), move("0"), move("centre")
    (5, None, None)
    """
    digit = _DIGIT.search(reply[:1000])
    return int(digit.group()) or None if digit else None


def _game(rng: Random) -> dict[str, Any]:
    return {"game": rng.randint(1, 9999), "first": rng.choice(TicTacToe.agents)}
