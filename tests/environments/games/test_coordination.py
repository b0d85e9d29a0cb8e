from __future__ import annotations

import pytest
from mrlm_environments.games.coordination import CoordinationGame

from mrlm_pl.environment import Message
from mrlm_pl.environment.tasks import split_of
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError


def play(row: str, column: str) -> tuple[float, float, bool | None]:
    game = CoordinationGame()
    game.reset(game.tasks("train")[0])
    step = game.step({"row": Message("assistant", row), "column": Message("assistant", column)})
    return step.rewards["row"], step.rewards["column"], step.success


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        ("C", "C", (1.0, 1.0, True)),
        ("C", "A", (0.0, 0.4, False)),
        ("A", "C", (0.4, 0.0, False)),
        ("a", "A", (0.4, 0.4, False)),
        ("c!", "...", (0.0, 0.0, False)),
        ("", "A", (0.0, 0.4, False)),
    ],
)
def test_payoffs(row: str, column: str, expected: tuple[float, float, bool]) -> None:
    assert play(row, column) == expected


def test_splits_share_no_question() -> None:
    game = CoordinationGame()
    for split in ("train", "validation", "test"):
        assert all(split_of(game.tasks(split)[n].data["question"]) == split for n in range(50))


def test_order_of_calls_is_enforced() -> None:
    game = CoordinationGame()
    both = {agent: Message("assistant", "C") for agent in game.agents}
    with pytest.raises(EnvironmentContractError, match="before reset"):
        game.step(both)
    game.reset(game.tasks("train")[0])
    with pytest.raises(EnvironmentContractError, match="due are"):
        game.step({"row": Message("assistant", "C")})
    game.step(both)
    with pytest.raises(EnvironmentContractError, match="after the episode was done"):
        game.step(both)


def test_payoffs_must_make_a_coordination_game() -> None:
    with pytest.raises(ConfigurationError, match="together > alone > deserted"):
        CoordinationGame(alone=2.0)
