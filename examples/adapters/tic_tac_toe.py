"""Play tic-tac-toe of PettingZoo and of TextArena with your own codecs, and train by self-play.

python examples/adapters/tic_tac_toe.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jsonargparse import auto_cli
from mrlm_callbacks import SelfPlay
from mrlm_environments import PettingZooEnvironment, TextArenaCodec, TextCodec

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.policy import Policy
from mrlm_pl.runs import Trainer


class BoardCodec(TextCodec):
    """Show PettingZoo's board as ``0x2/3o5/678``: free cells by number, the agent that moves as x."""

    def observation(self, value: Any, agent: str) -> str:
        """Return the board; the observation has a plane of the agent's marks and one of the other's."""
        marks = zip(value[..., 0].ravel(), value[..., 1].ravel(), strict=True)
        return in_rows(["x" if own else "o" if other else str(cell) for cell, (own, other) in enumerate(marks)])

    def choices(self, space: Any, mask: Any) -> str:
        """Return no list of legal actions, which the board shows."""
        return ""


class LinesCodec(TextArenaCodec):
    """Show TextArena's board in the same way."""

    def observation(self, lines: Sequence[Any]) -> str:
        """Return the board of the last message, whose cells are between lines: `` 0 | X | 2 ``."""
        board = lines[-1].text.partition("Available")[0]
        cells = re.findall(r"[\dXO]", board.partition(":")[2])
        mover = "O" if cells.count("O") == cells.count("X") else "X"
        return in_rows([cell if cell.isdigit() else "x" if cell == mover else "o" for cell in cells])


def in_rows(cells: Sequence[str]) -> str:
    """Return nine cells as three rows."""
    return "/".join("".join(cells[row : row + 3]) for row in (0, 3, 6))


def main(iterations: int = 100, output: str = "runs/tic-tac-toe") -> None:
    """Train the built-in tiny model against its own past."""
    opponent = Policy("builtin:tiny", trained=False)
    algorithm = GRPO(
        {"learner": Policy("builtin:tiny", learning_rate=5e-4), "opponent": opponent},
        seats={"player_1": "learner", "player_2": "opponent"},
    )
    game = PettingZooEnvironment("classic/tictactoe_v3", codec=BoardCodec(), prompt="", retries=0)
    sampling = Sampling(temperature=1.5, max_tokens=1)
    data = RolloutDataModule(game, groups=8, group_size=16, iterations=iterations, sampling=sampling)
    self_play = SelfPlay()
    trainer = Trainer(accelerator="cpu", default_root_dir=output, limit_val_batches=0, callbacks=[self_play])
    trainer.fit(algorithm, data)
    scores = [round(games["score"], 3) for games in self_play.history]
    print("scores against the initial policy:", scores)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
