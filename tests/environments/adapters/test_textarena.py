"""TextArena's games: deterministic by seed in any thread, without network and without a trace in ``random``."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import TextArenaCodec, TextArenaEnvironment

from mrlm_pl.environment import Message, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.errors import ConfigurationError

textarena = pytest.importorskip("textarena", reason="textarena is not installed")

GAMES = [
    *("TicTacToe-v0", "ConnectFour-v0", "Nim-v0", "Chopsticks-v0", "Battleship-v0", "KuhnPoker-v0", "ColonelBlotto-v0"),
    *("Othello-v0", "Snake-v0", "IteratedRockPaperScissors-v0", "IteratedMatchingPennies-v0", "SimpleTak-v0"),
    "LiarsDice-v0",
]
DOWNLOADING = ["Codenames", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee", "WordChains", "WordLadder"]
DOWNLOADING += ["WordSearch", "Wordle"]


def task(seed: int = 0, first: str = "alpha") -> Task:
    return Task("textarena", "train", 0, 0, {"seed": seed, "first": first})


def act(environment: TextArenaEnvironment, agent: str, reply: str) -> Step:
    return environment.step({agent: Message("assistant", reply)})


def shown(observations: Any) -> tuple[str, str]:
    ((agent, (message,)),) = observations.items()
    return agent, message.content


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.long_after(1)
def test_every_offline_game_of_two_players_keeps_the_contract(name: str) -> None:
    check_environment(TextArenaEnvironment(name)).raise_on_failure()


def test_a_game_of_nim() -> None:
    environment = TextArenaEnvironment("Nim-v0", {"piles": [1, 2]})
    agent, text = shown(environment.reset(task(first="beta")))
    assert agent == "beta"
    assert text.startswith("Welcome to Nim, Player 0!")
    assert text.endswith("Current Pile:\n  pile 0: 1\n  pile 1: 2")
    agent, text = shown(act(environment, "beta", "1 1").observations)
    assert (agent, text.startswith("Welcome to Nim, Player 1!")) == ("alpha", True)
    assert text.endswith("[Player 0] [1 1]\nPlayer 0 removes 1 from pile 1.\nCurrent Pile:\n  pile 0: 1\n  pile 1: 1")
    assert text.count("Current Pile") == 1, "the latest board alone"
    step = act(environment, "alpha", "I take [0 1].")
    assert shown(step.observations)[1].count("Player 1 removes") == 1
    step = act(environment, "beta", "[1 1]")
    assert (step.done, step.stop_reason, step.rewards) == (True, "finished", {"alpha": -1.0, "beta": 1.0})
    assert step.metrics == {"illegal": 0.0, "illegal_of": 3.0, "alpha_won": 0.0, "beta_won": 1.0}


def test_the_game_allows_one_illegal_move_and_not_two() -> None:
    environment = TextArenaEnvironment("Nim-v0")
    environment.reset(task())
    step = act(environment, "alpha", "9 9")
    agent, text = shown(step.observations)
    assert agent == "alpha"
    assert "attempted an invalid move. Reason: Pile index 9 is out of range." in text
    assert "[9 9]" not in text, "the agent has its reply in its conversation"
    assert step.metrics == {"illegal": 1.0, "illegal_of": 1.0}
    step = act(environment, "alpha", "")
    assert (step.done, step.stop_reason) == (True, "illegal_move")
    assert step.rewards == {"alpha": -1.0}, "beta has not moved"
    assert step.metrics == {"illegal": 2.0, "illegal_of": 2.0, "alpha_won": 0.0, "beta_won": 1.0}


def test_a_legal_move_after_two_illegal_ones_is_legal() -> None:
    environment = TextArenaEnvironment("Taboo-v0", players=4)
    environment.reset(task(1, first="agent_1"))
    act(environment, "agent_1", "a clue")
    for count, guess in enumerate(("[", "[", "[pear]")):
        step = act(environment, "agent_2", guess)
        assert step.metrics["illegal"] == min(count + 1, 2), guess


def test_a_game_ends_once_all_players_are_eliminated() -> None:
    environment = TextArenaEnvironment("PublicGoodsGame-v0", {"communication_turns": 1}, players=2)
    environment.reset(task())
    for agent, said in (("alpha", "hello"), ("beta", "hello"), *(("alpha", move) for move in ("a", "a", "a", "[5]"))):
        assert shown(act(environment, agent, said).observations)
    for _ in range(3):
        step = act(environment, "beta", "a")
    assert (step.done, step.stop_reason, step.rewards) == (True, "illegal_move", {"alpha": -1.0, "beta": -1.0})


@pytest.mark.parametrize("name", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_an_echo_with_swapped_fields_is_not_shown(name: str) -> None:
    environment = TextArenaEnvironment(name, players=1)
    environment.reset(task(first="agent"))
    _, text = shown(act(environment, "agent", "[nothing]").observations)
    assert text.startswith("You attempted an invalid move.")
    assert act(environment, "agent", "[nothing]").rewards == {"agent": -1.0}, "its reward and reason are swapped too"


def test_the_seed_decides_the_cards_as_in_the_library() -> None:
    environment = TextArenaEnvironment("KuhnPoker-v0")
    for seed in range(20):
        deck = [0, 1, 2]
        random.Random(seed).shuffle(deck)
        _, text = shown(environment.reset(task(seed)))
        assert f"Your card is: '{'JQK'[deck[1]]}'" in text, "player 1 begins"


def test_games_neither_connect_nor_draw_from_the_process() -> None:
    code = """
import random, socket, sys
def refuse(*_, **__): raise SystemExit("connects")
socket.socket.connect = socket.getaddrinfo = refuse
import textarena
from mrlm_environments import TextArenaEnvironment
from mrlm_pl.environment import Message, Task
before = random.getstate()
for game in sys.argv[1:]:
    played = TextArenaEnvironment(game)
    due = played.reset(Task("textarena", "train", 0, 0, {"seed": 1, "first": "alpha"}))
    played.step({agent: Message("assistant", "[0]") for agent in due})
assert random.getstate() == before
random.seed(5)
own = random.Random(5).random()
assert textarena.core.random.random() == own, "other users of the library draw from the process"
print("ok")
"""
    found = subprocess.run([sys.executable, "-c", code, *GAMES], capture_output=True, text=True)
    assert found.stdout == "ok\n", found.stdout + found.stderr


@pytest.mark.long
def test_episodes_in_many_threads_are_those_of_one() -> None:
    def play(seed: int) -> list[Any]:
        environment, found = TextArenaEnvironment("LiarsDice-v0"), []
        due = shown(environment.reset(task(seed)))
        while due:
            found.append(due)
            step = act(environment, due[0], "[Call]" if len(found) % 3 == 0 else f"[Bid: {len(found)}, 6]")
            due = shown(step.observations) if not step.done else ()
        return [*found, step.rewards]

    alone = [play(seed) for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(16))) == alone
    assert len({str(game) for game in alone}) > 8


def test_a_copy_draws_the_same_numbers_as_the_original() -> None:
    environment = TextArenaEnvironment("LiarsDice-v0")
    environment.reset(task(2))
    act(environment, "alpha", "[Bid: 5, 6]")
    fork = environment.copy()
    steps = [act(game, "beta", "[Call]") for game in (environment, fork)]  # new dice
    assert steps[0] == steps[1]


def test_both_agents_begin() -> None:
    tasks = TextArenaEnvironment("TicTacToe-v0").tasks("train")
    assert {tasks[number].data["first"] for number in range(20)} == {"alpha", "beta"}


def test_agents_have_names_by_number() -> None:
    assert TextArenaEnvironment("Snake-v0", players=3).agents == ("agent_1", "agent_2", "agent_3")
    assert TextArenaEnvironment("FrozenLake-v0", players=1).agents == ("agent",)


def test_a_codec_of_ones_own() -> None:
    class Short(TextArenaCodec):
        def observation(self, lines: Any) -> str:
            return lines[-1].text.replace("\n", "")

        def action(self, reply: str) -> str:
            return f"[0 {reply}]"

    environment = TextArenaEnvironment("Nim-v0", codec=Short())
    assert shown(environment.reset(task()))[1] == "Current Pile:  pile 0: 3  pile 1: 4  pile 2: 5"
    assert "pile 0: 1" in shown(act(environment, "alpha", "2").observations)[1]


@pytest.mark.parametrize("name", DOWNLOADING)
def test_a_game_that_downloads_is_refused_unread(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}-v0' downloads word lists; set `downloads: true`"):
        TextArenaEnvironment(f"{name}-v0", players=4 if name == "Codenames" else 2)
    assert f"textarena.envs.{name}.env" not in sys.modules


def test_the_games_that_download_are_these() -> None:
    folder = Path(textarena.__file__).parent / "envs"
    found = {path.parent.name for path in folder.glob("*/env.py") if "nltk.download" in path.read_text()}
    assert found <= set(DOWNLOADING)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "Nims-v0"}, "did you mean 'Nim-v0'"),
        ({"id": "Nim-v0", "settings": {"heaps": [1]}}, "heaps"),
        ({"id": "Nim-v0", "players": 3}, "3 players raised AssertionError: The number of players has to be 2"),
        ({"id": "QuantumTicTacToe-v0", "players": 7}, "has 2 players; set players, now 7, to 2"),
    ],
    ids=str,
)
def test_a_mistake_is_named_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TextArenaEnvironment(**settings)
