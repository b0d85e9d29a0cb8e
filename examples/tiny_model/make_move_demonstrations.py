"""Write demonstrations of random moves at tic-tac-toe for the built-in tiny model.

    python examples/tiny_model/make_move_demonstrations.py --output runs/tiny-moves.jsonl

Both players take a random free cell, and a row is one player's conversation. So the trained model knows the rules, but
not how to win.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from mrlm_environments.games.tic_tac_toe import TicTacToe

from mrlm_pl.environment import Task
from mrlm_pl.episode import Message
from mrlm_pl.seeding import keyed_random

FIRST = 1_000_000
"""Index of the first task, far from those of a run."""


def demonstrations(environment: TicTacToe, task: Task, rng: Random) -> Iterator[dict[str, Any]]:
    """Yield the conversation of each player in a game, rows for ``TrajectoryDataModule``."""
    seen: dict[str, list[Message]] = {agent: [] for agent in environment.agents}
    observations = environment.reset(task)
    while observations:
        ((agent, messages),) = observations.items()
        board = messages[-1].content.split()[-1]
        reply = Message("assistant", rng.choice([cell for cell in board if cell.isdigit()]))
        seen[agent] += [*messages, reply]
        observations = environment.step({agent: reply}).observations
    for conversation in seen.values():
        yield {"messages": [message.to_chat() for message in conversation]}


def main() -> None:
    """Write the command line's file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSONL file")
    parser.add_argument("--games", type=int, default=6_000)
    options = parser.parse_args()
    environment = TicTacToe()
    tasks = environment.tasks("train")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for index in range(options.games):
            for row in demonstrations(environment, tasks[FIRST + index], keyed_random("move demonstration", index)):
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
