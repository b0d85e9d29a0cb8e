"""Cross-play: arithmetic of the report, and games of the tiny model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import Helpers
from transformers.utils.logging import enable_progress_bar

from mrlm_pl.cli.commands.evaluate import arena_table
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.evaluation.arena import ArenaReport, arena_report
from mrlm_pl.policy import Policy
from mrlm_pl.policy.tiny import tiny_model_path
from mrlm_pl.runs import arena, seated_model
from mrlm_pl.runs.records.run import read_run
from tests.support.runs.recorded_runs import episode


def games(*rewards: tuple[float, float], failed: int = 0) -> list[Episode]:
    played = [episode(f"{task}-0", task=task, rewards=pair) for task, pair in enumerate(rewards)]
    return [*played, *(episode("f-0", error="down") for _ in range(failed))]


def report(players: Sequence[str], *played: tuple[str, Sequence[Episode]]) -> ArenaReport:
    seated = [(dict(zip(("first", "second"), seating, strict=True)), found) for seating, found in played]
    return arena_report(players, seated, environment="math", split="test", seed=0)


def test_scores_rewards_and_ratings_are_those_of_the_games() -> None:
    won, lost, drawn = (1.0, 0.0), (0.0, 1.0), (0.5, 0.5)
    found = report(
        "ba",
        ("bb", games(won, won)),
        ("ba", games(won, won, won, lost, failed=2)),
        ("ab", games(lost, drawn, drawn, lost)),
        ("aa", games(lost)),
    )
    # b earns more in 3 and 2 games, less in 1, as much in 2: (3 + 2 + 1) / 8.
    assert [(item.player, item.other, item.games, item.score.value) for item in found.scores] == [
        ("b", "a", 8, 0.75),
        ("a", "b", 8, 0.25),
    ]
    b, a = (item.score for item in found.scores)
    assert (b.low, b.high) == pytest.approx((1 - a.high, 1 - a.low))
    assert 0 < b.low < 0.75 < b.high <= 1
    # One drawn game is added: the odds of b are 6.5 to 2.5.
    assert found.ratings["b"].elo == 0.0
    assert found.ratings["a"].elo == pytest.approx(-400 * math.log10(6.5 / 2.5))
    assert list(found.ratings) == ["b", "a"]
    seating = found.seatings[1]
    assert (seating.players, seating.episodes, seating.failed) == ({"first": "b", "second": "a"}, 4, 2)
    # 3 of 4 with t(3) = 3.1824 and a standard deviation of 0.5: 0.75 +- 3.1824 * 0.25.
    first = seating.rewards["first"]
    assert (first.value, first.low, first.high) == pytest.approx((0.75, 0.75 - 0.7956, 0.75 + 0.7956), abs=1e-3)


def test_ratings_of_dependent_games_have_no_interval() -> None:
    won, lost = (1.0, 0.0), (0.0, 1.0)
    played = [*games(won, lost), episode("1-1", task=1, rewards=won)]
    found = report("ab", ("ab", played), ("ba", games(lost, lost)))
    assert [(rating.low, rating.high) for rating in found.ratings.values()] == [(-math.inf, math.inf)] * 2
    table = arena_table(found)
    assert "Elo a 0\n" in table
    assert table.endswith("Elo has no intervals with several samples per task: they depend on each other.")


def test_equal_ratings_have_the_order_of_the_command_line() -> None:
    drawn = games((1.0, 0.0), (0.0, 1.0))
    found = report("cab", *((pair, drawn) for pair in ("ca", "cb", "ab")))
    assert list(found.ratings) == ["c", "a", "b"]
    assert [line for line in arena_table(found).splitlines() if line.startswith("Elo")][1].startswith("Elo a 0 ")


def alone(*rewards: float | None) -> list[Episode]:
    """Return episodes of one agent with these rewards, two of each task; None is a failed one."""
    found = []
    for number, reward in enumerate(rewards):
        task, name = number // 2, f"{number // 2}-{number % 2}"
        whole = episode(name, task=task, rewards=(reward or 0.0, 0.0), error="down" if reward is None else None)
        rows = {"first": whole.trajectories["first"]}
        found.append(replace(whole, trajectories=rows))
    return found


def test_players_of_one_agent_are_compared_by_their_returns_in_the_same_episodes() -> None:
    seated = [({"first": "new"}, alone(1.0, 3.0, -1.0, None)), ({"first": "old"}, alone(-1.0, -1.0, 0.0, 9.0))]
    found = arena_report(["new", "old"], seated, environment="math", split="test", seed=0)
    assert (found.scores, found.ratings) == ([], {})
    (item,) = found.differences
    # Differences 2, 4 | -1: mean 5/3; residuals of the sums 6 - 10/3 and -1 - 5/3, so that the half-width is
    # t(1) sqrt(2 (64/9 + 64/9)) / 3 = 12.70620 * 16 / 9 = 22.58881.
    assert (item.player, item.other, item.episodes) == ("new", "old", 3)
    difference = (item.difference.value, item.difference.low, item.difference.high)
    assert difference == pytest.approx((5 / 3, 5 / 3 - 22.5888, 5 / 3 + 22.5888), abs=1e-3)
    assert "new minus old +1.6667  95 % [-20.9221, 24.2555]  3 pairs of episodes" in arena_table(found)


def test_tasks_that_pose_one_problem_are_one_cluster() -> None:
    def drawn_again(episodes: Sequence[Episode]) -> list[Episode]:
        tasks = [replace(one.task, index=n, data={"problem": one.task.index}) for n, one in enumerate(episodes)]
        return [replace(one, task=task) for one, task in zip(episodes, tasks, strict=True)]

    new, old = alone(3.0, 5.0, 1.0), alone(1.0, 1.0, 2.0)
    found = arena_report(
        ["new", "old"],
        [({"first": "new"}, drawn_again(new)), ({"first": "old"}, drawn_again(old))],
        environment="math",
        split="test",
        seed=0,
    )
    # The returns are 3, 5 | 1: mean 3, residuals of the sums 2 and -2: t(1) sqrt(2 (4 + 4)) / 3 = 12.70620 * 4 / 3.
    mean = found.seatings[0].rewards["first"]
    assert (mean.low, mean.high) == pytest.approx((3 - 16.9416, 3 + 16.9416), abs=1e-3)
    # The differences are 2, 4 | -1, as in the test above.
    assert found.differences[0].difference.high == pytest.approx(5 / 3 + 22.5888, abs=1e-3)
    won, lost = (1.0, 0.0), (0.0, 1.0)
    twice = [*games(won, won, lost), *(episode(f"{n}-1", task=n, rewards=won) for n in range(3))]
    assert report("ab", ("ab", drawn_again(twice))).scores == report("ab", ("ab", twice)).scores


def test_intervals_of_one_agent_and_of_a_team_end_at_the_bounds_of_the_environment() -> None:
    def intervals(agents: Sequence[str], *found: Episode, most: float) -> list[tuple[float, float]]:
        seated = [(dict.fromkeys(agents, "a"), found)]
        names = {"environment": "math", "split": "test", "seed": 0}
        (seating,) = arena_report(["a"], seated, **names, bounds=lambda task: (0.0, most)).seatings  # type: ignore[arg-type]
        return [(mean.low, mean.high) for mean in seating.rewards.values()]

    assert intervals(["first"], *alone(1.0, 1.0, 0.0), most=1.0) == [(0.0, 1.0)]
    both = ["first", "second"]
    assert intervals(both, *games((1.0, 1.0), (0.0, 0.0)), most=2.0) == [(0.0, 1.0)] * 2
    assert intervals(both, *games((2.0, 0.0), (0.0, 2.0)), most=2.0)[0][1] > 2, "bounds of the sum bound no agent"


def test_a_team_has_no_winner_and_is_compared_by_teams_of_one_player() -> None:
    won, lost = (1.0, 1.0), (0.0, 0.0)
    seatings = (("ab", games(won, won, won)), ("ba", games(lost, lost, lost)), ("bb", games(lost, won, lost)))
    found = report("ab", ("aa", games(won, won, lost, failed=1)), *seatings)
    assert (found.scores, found.ratings) == ([], {})
    (item,) = found.differences
    # Differences 1, 0, 0: mean 1/3, standard deviation 1 / sqrt 3, t(2) = 4.30265, half-width 4.30265 / 3 = 1.43422.
    assert (item.player, item.other, item.episodes) == ("a", "b", 3)
    difference = (item.difference.value, item.difference.low, item.difference.high)
    assert difference == pytest.approx((1 / 3, 1 / 3 - 1.43422, 1 / 3 + 1.43422), abs=1e-4)
    told = arena_table(found)
    assert (
        "All agents earn the same in every episode, as a team, so no player wins. Whole teams of one player:\na min"
        in told
    )
    assert "against" not in told
    assert "Elo" not in told


def test_a_member_that_is_absent_makes_no_rivals_of_a_team() -> None:
    def played(seating: str, *rewards: tuple[float, float]) -> tuple[dict[str, str], list[Episode]]:
        return dict(zip(("first", "second", "absent"), seating, strict=True)), games(*rewards)

    seatings = [played(seating, (1.0, 1.0), (0.0, 0.0)) for seating in ("aaa", "aab", "abb", "bba")]
    found = arena_report(
        "ab", [*seatings, played("bbb", (0.0, 0.0), (0.0, 0.0))], environment="x", split="test", seed=0
    )
    assert (found.scores, found.ratings) == ([], {})
    assert [item.difference.value for item in found.differences] == [0.5]  # of two tasks a's teams solved one
    assert [mean.value for mean in found.seatings[0].rewards.values()] == [0.5, 0.5, 0.0]


def test_tasks_for_one_agent_alone_are_no_games() -> None:
    def alone(*rewards: float) -> list[Episode]:
        found = games(*((reward, 0.0) for reward in rewards))
        return [replace(item, trajectories={"first": item.trajectories["first"]}) for item in found]

    lone = [(pair, alone(*rewards)) for pair, rewards in (("aa", (1.0, 0.0)), ("ab", (1.0, 1.0)), ("bb", (0.0, 0.0)))]
    found = report("ab", *lone)
    assert (found.scores, found.ratings) == ([], {})
    assert [item.difference.value for item in found.differences] == [0.5]  # of two tasks a solved one


def test_one_unequal_episode_makes_no_team() -> None:
    drawn = (0.0, 0.0)
    pairs = ("aa", "ab", "ba", "bb")
    found = report("ab", *((pair, games(drawn, (1.0, 0.0) if pair == "ba" else drawn)) for pair in pairs))
    assert [item.score.value for item in found.scores] == [0.375, 0.625]  # a, the second, lost one game of four
    assert found.differences == []
    assert arena_table(found).endswith("Elo a 0  the reference")


def test_agents_that_did_not_act_earned_nothing() -> None:
    alone_lost = [replace(item, trajectories={"first": item.trajectories["first"]}) for item in games((-1.0, 0.0))]
    found = report("ab", ("ab", alone_lost), ("ba", games((0.0, 0.0))))
    assert [item.score.value for item in found.scores] == [0.25, 0.75]


def test_players_that_never_met_have_no_ratings() -> None:
    found = report("ab", ("aa", games((1.0, 0.0))), ("ab", games(failed=1)))
    assert (found.scores, found.ratings) == ([], {})
    assert found.seatings[1].rewards == {}


def test_a_model_against_itself_has_mirrored_results(tmp_path: Path) -> None:
    found = arena({"A": "builtin:tiny", "B": "builtin:tiny"}, "kuhn_poker", num_episodes=12, device="cpu")
    assert [tuple(seating.players.values()) for seating in found.seatings] == [
        ("A", "A"),
        ("A", "B"),
        ("B", "A"),
        ("B", "B"),
    ]
    assert len({tuple(mean.value for mean in seating.rewards.values()) for seating in found.seatings}) == 1
    assert [item.score.value for item in found.scores] == [0.5, 0.5], "both play the same cards from both seats"
    assert found.ratings["B"].elo == pytest.approx(0.0, abs=1e-6)


def test_seatings_are_bounded_before_a_model_is_read() -> None:
    """Two players and the 7 agents of Helpers(calls=6) make 2^7 seatings."""
    players = {"A": "builtin:tiny", "B": "builtin:tiny"}
    with pytest.raises(ConfigurationError, match="2 players and 7 agents of environment 'helpers' make 128 seatings"):
        arena(players, Helpers(calls=6), num_episodes=1, device="cpu")


def test_each_player_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(
        seated_model, "read_run", lambda model, **options: read.append(model) or read_run(model, **options)
    )
    arena({"A": "builtin:tiny", "B": "builtin:tiny"}, "kuhn_poker", num_episodes=2, device="cpu")
    assert read == ["builtin:tiny"] * 2


def test_a_player_without_a_policy_for_an_agent_is_named() -> None:
    players = {"A": "builtin:tiny", "B": {name: Policy("builtin:tiny") for name in ("x", "y")}}
    with pytest.raises(ConfigurationError, match=r"player 'B': agent '.*' has .*; give one .* `B=RUN/policies/NAME`"):
        arena(players, "kuhn_poker")


def test_one_player_is_no_arena() -> None:
    with pytest.raises(ConfigurationError, match=r"the arena has the players \['A'\]; give two or more"):
        arena({"A": "builtin:tiny"}, "kuhn_poker")


def test_a_missing_folder_is_refused_before_any_player_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: Any) -> None:
        raise AssertionError("a player is loaded")

    monkeypatch.setattr("mrlm_pl.runs.seated_model.loaded_policy", loaded)
    with pytest.raises(ConfigurationError, match="there is no folder"):
        arena({"A": "builtin:tiny", "B": str(tmp_path / "runs/b")}, "kuhn_poker", device="cpu")


def test_the_command_prints_and_writes_the_report(mrlm: Any) -> None:
    words = (
        "--environment",
        "coordination",
        "-n",
        "4",
        "--max-tokens",
        "2",
        "--device",
        "cpu",
        "--output",
        "arena.json",
    )
    enable_progress_bar()
    status, out, err = mrlm("arena", "old=builtin:tiny", "new=builtin:tiny", *words)
    assert status == 0, err
    assert "Loading weights" not in err
    assert "coordination (test, seed 0)" in out
    assert "row: old, column: new\n  4 episodes" in out
    assert "old against new 0.5000" in out
    assert "Elo old 0" in out
    written = json.loads(Path("arena.json").read_text())
    assert [seating["players"]["row"] for seating in written["seatings"]] == ["old", "old", "new", "new"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["A=builtin:tiny"], "give two or more"),
        (["builtin:tiny", "B=builtin:tiny"], "must be NAME=MODEL for each player"),
        (["A=builtin:tiny", "A=builtin:tiny"], "must be NAME=MODEL for each player, each with its own name"),
        (["A=builtin:tiny", "B=./runs/b"], "there is no folder './runs/b'; there is no folder 'runs' either"),
        (["A=builtin:tiny", "B=builtin:tiny", "--seats", '{"row": "main"}'], "leave both out"),
        (["A=builtin:tiny", "B=builtin:tiny", "--model", str(tiny_model_path())], "leave both out"),
        (["A=builtin:tiny", "B=builtin:tiny", "--output", "."], "output: '.' is a folder; name a file, as in"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, mrlm: Any) -> None:
    status, _, err = mrlm("arena", *words, "--environment", "coordination")
    assert (status, message in err) == (2, True), err
