"""The small games: rules and payoffs by arithmetic."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from mrlm_environments.games.halves import Halves
from mrlm_environments.games.helpers import Helpers
from mrlm_environments.games.kuhn_poker import KuhnPoker
from mrlm_environments.games.tic_tac_toe import TicTacToe
from mrlm_environments.games.word_emission import WordEmission

from mrlm_pl.environment import Environment, Message, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.errors import ConfigurationError


def say(**replies: str) -> dict[str, Message]:
    return {agent: Message("assistant", text) for agent, text in replies.items()}


def play(environment: Environment, task: Task, replies: list[str]) -> tuple[Step, list[str]]:
    """Return the last step of a game by turns, and who was asked, in order."""
    observations, asked = environment.reset(task), []
    for reply in replies:
        ((agent, _),) = observations.items()
        asked.append(agent)
        step = environment.step(say(**{agent: reply}))
        observations = step.observations
    return step, asked


@pytest.mark.parametrize(
    "environment", [WordEmission(3, ["on", "off"]), Halves("sunset"), TicTacToe(), KuhnPoker()], ids=lambda e: e.name
)
def test_the_contract_is_kept(environment: Environment) -> None:
    check_environment(environment).raise_on_failure()


@pytest.mark.parametrize(
    ("first", "second", "reward"),
    [
        ("on", "on on\non", 1.0),
        ("on", "", 0.5),
        ("onon", "go on", 0.75),  # the second says 2 of 4 letters
        ("On", "no", 0.0),
        ("onx", "on", 5 / 6),
        ("x" * 4096 + "on", "on", 0.5),  # what comes after the first 4096 characters is not looked at
    ],
)
def test_word_emission_pays_the_team_the_mean_share(first: str, second: str, reward: float) -> None:
    game = WordEmission(words=["on"])
    game.reset(game.tasks("train")[0])
    step = game.step(say(agent_1=first, agent_2=second))
    assert step.rewards == {"agent_1": pytest.approx(reward), "agent_2": pytest.approx(reward)}
    assert step.success == (reward == 1.0)


def test_every_agent_is_told_the_word_of_the_task() -> None:
    game = WordEmission(3, ["yes", "no"])
    words = set()
    for index in range(20):
        task = game.tasks("train")[index]
        observations = game.reset(task)
        assert sorted(observations) == ["agent_1", "agent_2", "agent_3"]
        assert {messages[0].content for messages in observations.values()} == {
            f"Round {task.data['round']}: say {task.data['word']}"
        }
        words.add(task.data["word"])
    assert words == {"yes", "no"}


@pytest.mark.parametrize("options", [{"num_agents": 0}, {"words": []}, {"words": ["a b"]}, {"words": [""]}])
def test_word_emission_refuses_what_cannot_be_played(options: dict) -> None:
    with pytest.raises(ConfigurationError, match=r"word_emission|WordEmission: num_agents is 0"):
        WordEmission(**options)


@pytest.mark.parametrize(
    ("left", "right", "reward"),
    [
        ("sun", "set", 1.0),
        ("SET it is", "s u n", 1.0),
        ("sun", "sun", 0.0),
        ("set", "set", 0.0),
        ("sun", "the set", 0.0),
        ("", "set", 0.0),
        ("", "", 0.0),
        ("su", "set", 0.0),
    ],
)
def test_halves_pay_only_the_right_combination(left: str, right: str, reward: float) -> None:
    game = Halves("sunset")
    game.reset(game.tasks("train")[0])
    step = game.step(say(left=left, right=right))
    assert step.rewards == {"left": reward, "right": reward}
    assert step.success is bool(reward)


def test_halves_tell_both_players_the_same() -> None:
    game = Halves("sunset")
    left, right = game.reset(game.tasks("train")[3]).values()
    assert left == right


@pytest.mark.parametrize("word", ["", "odd", "aa", "a b ", "a1"])
def test_halves_refuse_a_word_without_two_halves(word: str) -> None:
    with pytest.raises(ConfigurationError, match="halves: word"):
        Halves(word)


ALPHA = Task("tic_tac_toe", "train", 0, 0, {"game": 7, "first": "alpha"})
BETA = Task("tic_tac_toe", "train", 0, 0, {"game": 7, "first": "beta"})


@pytest.mark.parametrize("line", ["123", "456", "789", "147", "258", "369", "159", "357"])
def test_three_in_a_row_win(line: str) -> None:
    others = [cell for cell in "123456789" if cell not in line]
    step, asked = play(TicTacToe(), ALPHA, [line[0], others[0], line[1], others[1], line[2]])
    assert step.rewards == {"alpha": 1.0, "beta": -1.0}
    assert (step.done, step.stop_reason) == (True, "three_in_a_row")
    assert asked == ["alpha", "beta", "alpha", "beta", "alpha"]


def test_the_second_player_can_win_and_the_task_says_who_it_is() -> None:
    step, asked = play(TicTacToe(), BETA, ["1", "4", "2", "5", "9", "6"])
    assert asked == ["beta", "alpha"] * 3
    assert step.rewards == {"alpha": 1.0, "beta": -1.0}


def test_a_full_board_is_a_draw() -> None:
    step, _ = play(TicTacToe(), ALPHA, list("512837469"))
    assert step.rewards == {"alpha": 0.0, "beta": 0.0}
    assert (step.stop_reason, step.metrics["draw"], step.metrics["moves"]) == ("draw", 1.0, 9.0)


@pytest.mark.parametrize(
    ("replies", "rewards"),
    [
        (["5", "5"], {"alpha": 1.0, "beta": -1.0}),
        (["5", "what?"], {"alpha": 1.0, "beta": -1.0}),
        (["5", "1", "0"], {"alpha": -1.0, "beta": 1.0}),
        ([""], {"alpha": -1.0, "beta": 0.0}),  # beta has not had a turn, and earns nothing before one
    ],
)
def test_an_illegal_move_loses(replies: list[str], rewards: dict[str, float]) -> None:
    step, _ = play(TicTacToe(), ALPHA, replies)
    assert step.rewards == rewards
    assert (step.stop_reason, step.metrics["illegal"]) == ("illegal_move", 1.0)


def test_players_see_their_mark_and_the_board() -> None:
    game = TicTacToe()
    assert game.reset(ALPHA)["alpha"][0].content == "Tic-tac-toe 7. X 123/456/789"
    assert game.step(say(alpha="I take 5!")).observations["beta"][0].content == "Tic-tac-toe 7. O 123/4X6/789"
    assert game.step(say(beta="1")).observations["alpha"][0].content == "X O23/4X6/789"


@pytest.mark.parametrize("game", [TicTacToe(), KuhnPoker()], ids=lambda game: game.name)
def test_each_agent_begins_half_of_the_tasks(game: Environment) -> None:
    first = [game.tasks("train")[index].data["first"] for index in range(200)]
    assert 70 < first.count("alpha") < 130  # 4.2 standard deviations


def hand(own: str, other: str, first: str = "alpha") -> Task:
    second = "beta" if first == "alpha" else "alpha"
    return Task("kuhn_poker", "train", 0, 0, {"hand": 3, "cards": {first: own, second: other}, "first": first})


@pytest.mark.parametrize("first", ["alpha", "beta"])
@pytest.mark.parametrize(
    ("actions", "own", "other", "chips"),
    [
        ("PP", "K", "Q", 1),
        ("PP", "J", "Q", -1),
        ("BB", "K", "J", 2),
        ("BB", "Q", "K", -2),
        ("BP", "J", "K", 1),
        ("PBP", "K", "J", -1),
        ("PBB", "Q", "J", 2),
        ("PBB", "J", "Q", -2),
    ],
)
def test_kuhn_payoffs(actions: str, own: str, other: str, chips: float, first: str) -> None:
    step, asked = play(KuhnPoker(), hand(own, other, first), list(actions))
    second = "beta" if first == "alpha" else "alpha"
    assert step.rewards == {first: chips, second: -chips}
    assert asked == [first, second, first][: len(actions)]


@pytest.mark.parametrize(
    ("replies", "own"), [(["call"], (-1, 0)), (["b", ""], (1, -1)), (["P", "x"], (1, -1)), (["P", "b!", "2"], (-1, 1))]
)
def test_text_that_is_no_action_folds(replies: list[str], own: tuple[int, int]) -> None:
    step, _ = play(KuhnPoker(), hand("K", "J"), replies)
    assert (step.rewards["alpha"], step.rewards["beta"]) == own
    assert step.stop_reason == "illegal_action"


def test_a_player_sees_its_own_card_only() -> None:
    game = KuhnPoker()
    assert game.reset(hand("K", "J"))["alpha"][0].content == "Hand 3. Card K, so far nothing: P or B?"
    assert game.step(say(alpha="P")).observations["beta"][0].content == "Hand 3. Card J, so far P: P or B?"
    assert game.step(say(beta="B")).observations["alpha"][0].content == "Card K, so far PB: P or B?"


def first_player_value(bluff: Fraction, responses: dict[tuple[str, str], Fraction]) -> Fraction:
    """Return mean payoff of the first player with Kuhn's equilibrium strategy, through the environment.

    ``responses[card, history]`` is the chance that the second player bets.
    """
    own = {
        ("J", ""): bluff,
        ("Q", ""): Fraction(0),
        ("K", ""): 3 * bluff,
        ("J", "PB"): Fraction(0),
        ("Q", "PB"): bluff + Fraction(1, 3),
        ("K", "PB"): Fraction(1),
    }
    value = Fraction(0)
    for mine, theirs in itertools.permutations("JQK", 2):
        for actions in ("PP", "PBP", "PBB", "BP", "BB"):
            chance = Fraction(1, 6)
            for turn, action in enumerate(actions):
                bets = own[mine, actions[:turn]] if turn != 1 else responses[theirs, actions[:turn]]
                chance *= bets if action == "B" else 1 - bets
            if chance:
                step, _ = play(KuhnPoker(), hand(mine, theirs), list(actions))
                value += chance * Fraction(step.rewards["alpha"])
    return value


@pytest.mark.parametrize("bluff", [Fraction(0), Fraction(1, 6), Fraction(1, 3)])
def test_kuhns_equilibrium_is_worth_minus_an_eighteenth(bluff: Fraction) -> None:
    third = Fraction(1, 3)
    zero, one = Fraction(0), Fraction(1)
    nash = {("J", "P"): third, ("Q", "P"): zero, ("K", "P"): one, ("J", "B"): zero, ("Q", "B"): third, ("K", "B"): one}
    assert first_player_value(bluff, nash) == Fraction(-1, 18)
    pure = [
        first_player_value(bluff, dict(zip(nash, map(Fraction, choices), strict=True)))
        for choices in itertools.product((0, 1), repeat=6)
    ]
    assert min(pure) == Fraction(-1, 18), "no reply of the second player gains more"


@pytest.mark.parametrize(("cost", "planner", "total"), [(0.1, ["C", "C"], 1.8), (0.7, ["A"], 1.0)])
def test_helpers_are_asked_where_the_team_earns_by_it(cost: float, planner: list[str], total: float) -> None:
    """1 for the right letter, and for each of two helpers 0.5 less its cost of 0.1; nothing is worth a cost of 0.7."""
    game = Helpers(calls=2, cost=cost)
    task = game.tasks("train")[0]
    gold = game.gold(task)
    assert list(gold["planner"]) == [*planner, task.data["letter"]]
    assert game.bounds(task) == (0.5, pytest.approx(total))
    earned, observations, said = 0.0, game.reset(task), {agent: list(replies) for agent, replies in gold.items()}
    while observations:
        ((agent, _),) = observations.items()
        step = game.step(say(**{agent: said[agent].pop(0)}))
        earned, observations = earned + sum(step.rewards.values()), step.observations
    assert earned == pytest.approx(total)
