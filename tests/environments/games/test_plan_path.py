"""The planner and the executor in a grid: moves, distances and rewards by hand."""

from __future__ import annotations

from typing import Any

import pytest
from mrlm_environments.games.plan_path import PlanPath, moves_of

from mrlm_pl.environment import Message, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.environment.tasks import split_of
from mrlm_pl.errors import ConfigurationError

# A - -    distances to the goal: 4 3 2
# - # -                           3 # 1
# - - G                           2 1 0
RING = Task("plan_path", "train", 0, 0, {"grid": "A--/-#-/--G"})


def played(*turns: tuple[str, str], **options: Any) -> list[Step]:
    """Return the steps of both agents in each turn."""
    game = PlanPath(**options)
    game.reset(RING)
    pairs = [
        (game.step({"planner": Message("assistant", plan)}), game.step({"executor": Message("assistant", move)}))
        for plan, move in turns
    ]
    return [step for pair in pairs for step in pair]


def total(steps: list[Step], agent: str, component: str) -> float:
    return sum(step.components.get(agent, {}).get(component, 0.0) for step in steps)


def test_a_shortest_path_earns_all() -> None:
    steps = played(("R", "R"), ("R", "R"), ("D", "D"), ("D", "D"))
    assert [step.rewards for step in steps[:2]] == [{"planner": 0.125}, {"planner": 0.125, "executor": 0.125}]
    assert steps[-1].rewards == {"planner": 0.625, "executor": 0.625}
    assert steps[-1].components["executor"] == {"progress": 0.125, "solved": 0.5}
    assert (steps[-1].done, steps[-1].success, steps[-1].stop_reason) == (True, True, "solved")
    assert steps[-1].metrics == {"distance_left": 0.0, "turns": 4.0}
    assert total(steps, "planner", "proposal") == 0.5


def test_a_way_back_costs_what_the_way_there_earned() -> None:
    steps = played(("R", "R"), ("L", "L"), ("L", "U"), ("D", "D"), ("U", "R"))
    assert [step.rewards["executor"] for step in steps[1::2]] == [0.125, -0.125, 0.0, 0.125, 0.0]
    assert (steps[-1].success, steps[-1].stop_reason) == (False, "turns")
    assert steps[-1].metrics == {"distance_left": 3.0, "turns": 5.0}


def test_a_proposal_that_is_repeated_earns_once() -> None:
    steps = played(("R", ""), ("R", "?"), ("R", "no"), ("", "the"), ("R", "L"))
    assert [step.rewards["planner"] for step in steps[::2]] == [0.125, 0.0, 0.0, -0.125, 0.125]
    assert total(steps, "executor", "progress") == 0.0


def test_moves_stop_at_walls_and_at_the_goal() -> None:
    steps = played(("RD", "DDRR"), moves=4, turns=1)
    assert steps[0].components["planner"] == {"proposal": 0.125}, "down of the cell on the right is the wall"
    assert steps[1].rewards["executor"] == 1.0
    assert played(("", "DDRRU"), moves=5, turns=1)[1].rewards["executor"] == 1.0, "nothing moves after the goal"


def test_both_see_the_grid_and_the_executor_the_proposal() -> None:
    game = PlanPath(moves=2)
    (first,) = game.reset(RING)["planner"]
    assert first.content == "Plan 2 of UDLR. A--/-#-/--G"
    (shown,) = game.step({"planner": Message("assistant", "rrr")}).observations["executor"]
    assert shown.content == "Move 2 of UDLR. A--/-#-/--G RR"
    (later,) = game.step({"executor": Message("assistant", "R")}).observations["planner"]
    assert later.content == "-A-/-#-/--G"
    (shown,) = game.step({"planner": Message("assistant", "what?")}).observations["executor"]
    assert shown.content == "-A-/-#-/--G ?"


def test_without_a_planner_the_executor_acts_alone() -> None:
    game = PlanPath(planner=False)
    assert game.agents == ("executor",)
    assert game.gold(RING) == {"executor": ["D", "D", "R", "R"]}
    assert game.bounds(RING) == (0.0, 1.0)
    (shown,) = game.reset(RING)["executor"]
    assert shown.content == "Plan 1 of UDLR. A--/-#-/--G"
    assert game.step({"executor": Message("assistant", "D")}).rewards == {"executor": 0.125}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"planner": False},
        {"size": 5, "walls": 8, "distance": (4, 8), "moves": 3, "turns": 3},
        {"size": 3, "walls": 0, "distance": (1, 1)},
    ],
)
def test_the_contract_is_kept(options: dict[str, Any]) -> None:
    check_environment(PlanPath(**options)).raise_on_failure()


def test_tasks_have_a_distance_in_the_range_and_belong_to_their_split() -> None:
    game = PlanPath(size=5, walls=6, distance=(3, 4))
    lengths = set()
    for split in ("train", "validation", "test"):
        for task in (game.tasks(split)[index] for index in range(40)):
            grid = task.data["grid"]
            assert split_of(grid) == split
            assert [grid.count(mark) for mark in "AG#-/"] == [1, 1, 6, 17, 4]
            lengths.add(len(game.gold(task)["planner"]))
    assert lengths == {3, 4}


@pytest.mark.parametrize("reply", ["up", "U-D", "go U", "UDX", "", "7"])
def test_other_words_are_no_moves(reply: str) -> None:
    assert moves_of(reply, 9) == ("U" if reply == "U-D" else "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, "size"),
        ({"walls": 8}, "walls"),
        ({"moves": 0}, "moves"),
        ({"turns": 0}, "turns"),
        ({"distance": (0, 2)}, "distance"),
        ({"distance": (3, 2)}, "distance"),
        ({"distance": (2, 6)}, "moves x turns = 5"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PlanPath(**options)


def test_a_distance_that_no_grid_has_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="change distance, size or walls"):
        PlanPath(size=3, walls=0, distance=(5, 5)).tasks("train")[0]
