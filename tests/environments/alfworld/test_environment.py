"""Generated games, the expert, the forms of an action, the team, and the defects of AgentBench's server."""

from __future__ import annotations

import gc
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mrlm_environments import AlfWorldEnvironment
from mrlm_environments.alfworld.environment import HOW_TO_ACT
from mrlm_environments.alfworld.game import KINDS, NOTHING
from mrlm_environments.alfworld.generated import GOALS, generated
from mrlm_environments.alfworld.house import HELD_OUT, OPENABLE, ROOMS, floor_plan, kind_of
from mrlm_environments.alfworld.similarity import bleu, most_similar

from mrlm_pl.environment import SPLITS, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.environment.tools import written_call
from mrlm_pl.episode import Message, ToolCall
from mrlm_pl.errors import ConfigurationError

BARE: dict[str, Any] = {"instruction": "", "list_actions": False}


def act(action: str) -> str:
    return written_call("take_action", action=action)


def played(environment: AlfWorldEnvironment, task: Task, replies: Sequence[str | Message]) -> list[Step]:
    environment.reset(task)
    messages = [reply if isinstance(reply, Message) else Message("assistant", reply) for reply in replies]
    return [environment.step({"agent": message}) for message in messages]


def read(step: Step) -> list[str]:
    return [message.content for message in step.observations["agent"]]


# Games


def wins(games: int) -> list[tuple[float, bool | None, str]]:
    environment = AlfWorldEnvironment(**BARE)
    found, opened = [], 0
    for split in SPLITS:
        source = environment.tasks(split)
        for index in range(games * 3 // 5 if split == "train" else games // 5):
            gold = environment.gold(source[index])
            assert gold is not None
            opened += any("take" in reply and f"from {kind}" in reply for reply in gold["agent"] for kind in OPENABLE)
            last = played(environment, source[index], gold["agent"])[-1]
            found.append((last.rewards["agent"], last.success, last.stop_reason))
    assert opened > games / 10, "objects behind doors are found"
    return found


def test_the_expert_wins() -> None:
    assert wins(60) == [(1.0, True, "won")] * 60


@pytest.mark.slow
def test_the_expert_wins_500_of_500_games() -> None:
    assert wins(500) == [(1.0, True, "won")] * 500


def test_random_actions_win_less_than_5_percent() -> None:
    environment = AlfWorldEnvironment()
    source, won = environment.tasks("train"), 0
    for index in range(120):
        game, rng = generated(source[index].data), Random(index)
        state = game.start
        for _ in range(50):
            known = game.actions(state)
            state, _ = game.act(state, known[rng.choice(list(known))])
            won += game.won(state)
            if game.won(state):
                break
    assert won < 6, f"{won} of 120"


@pytest.mark.parametrize("kind", KINDS)
def test_a_game_has_its_goal_in_the_room_that_alfred_poses_it_in(kind: Any) -> None:
    environment = AlfWorldEnvironment(kinds=[kind])
    for index in range(8):
        data = environment.tasks("train")[index].data
        room = next(name for name, numbers in ROOMS.items() if data["plan"] in numbers)
        assert room in GOALS[kind].rooms
        assert data["instruction"] in [
            text.format(o=data["target"], r=data["destination"]) for text in GOALS[kind].texts
        ]
        house = floor_plan(data["plan"]).house
        game = generated(data)
        assert not game.won(game.start)
        for name, (receptacle,) in data["objects"].items():
            assert house.may_hold(receptacle, name) or house.has("toggleable", name)
        targets = [own for name, (own,) in data["objects"].items() if kind_of(name) == data["target"]]
        assert len(targets) >= (2 if kind == "pick_two" else 1)
        assert data["destination"] not in map(kind_of, targets)


def test_floor_plans_are_alfreds() -> None:
    """Counts of alfworld's 120 files ``*-openable.json``; 30 plans of each of four rooms."""
    plans = [floor_plan(number) for numbers in ROOMS.values() for number in numbers]
    assert len(plans) == 120
    names = [name for plan in plans for name in plan.house.receptacles]
    counts = {kind: sum(kind_of(name) == kind for name in names) for kind in ("cabinet", "fridge", "microwave", "bed")}
    assert counts == {"cabinet": 437, "fridge": 30, "microwave": 30, "bed": 34}  # 436 and one without a place
    first = floor_plan(1).house.receptacles
    assert sum(kind_of(name) == "cabinet" for name in first) == 8
    assert first["fridge 1"].openable
    assert not first["countertop 1"].openable


def test_rooms_of_the_test_are_in_no_other_split_and_no_goal_of_a_plan_is_in_two() -> None:
    environment = AlfWorldEnvironment()
    held_out = {number for numbers in ROOMS.values() for number in numbers[:HELD_OUT]}
    goals: list[set[Any]] = []
    for split in SPLITS:
        data = [environment.tasks(split)[index].data for index in range(30)]
        assert {own["plan"] in held_out for own in data} == {split == "test"}
        goals.append({(own["plan"], own["kind"], own["target"], own["destination"]) for own in data})
    assert not goals[0] & goals[1]


def test_options_choose_games() -> None:
    environment = AlfWorldEnvironment(kinds=["pick", "clean"], rooms=["bathroom"], steps=(3, 6))
    for index in range(8):
        task = environment.tasks("train")[index]
        gold = environment.gold(task)
        assert gold is not None
        assert 3 <= len(gold["agent"]) <= 6
        assert task.data["kind"] in ("pick", "clean")
        assert task.data["plan"] in ROOMS["bathroom"]
    with pytest.raises(ConfigurationError, match="none of 10000 games of kinds heat in rooms bathroom"):
        _ = AlfWorldEnvironment(kinds=["heat"], rooms=["bathroom"]).tasks("train")[0]


# Actions


def test_an_action_comes_as_a_call_of_either_form_or_as_a_line() -> None:
    environment = AlfWorldEnvironment(**BARE)
    task = environment.tasks("train")[0]
    calls = (ToolCall("x", "take_action", {"action": "inventory"}), ToolCall("y", "take_action", {"action": "LOOK "}))
    replies = [
        Message("assistant", "", tool_calls=calls),
        act("inventory"),
        "I wonder.\n**Action 1**: inventory",
        "\n " * 100_000,
    ]
    steps = played(environment, task, [*replies, "<tool_call>{oops</tool_call>", written_call("fly", action="up")])
    first, *others = map(read, steps)
    assert [message.tool_call_id for message in steps[0].observations["agent"]] == ["x", "y"]
    assert first[0] == "You are not carrying anything."
    assert first[1].startswith("You are in the middle of a room.")
    assert others[:3] == [["You are not carrying anything."]] * 2 + [[HOW_TO_ACT]]
    assert others[3][0].startswith("Error: malformed call: it is not JSON.")
    assert others[4] == ["Error: there is no tool 'fly'; the tools are take_action"]


def test_an_action_that_is_not_admissible_snaps_to_the_most_similar_or_does_nothing() -> None:
    task = AlfWorldEnvironment().tasks("train")[0]
    target = next(iter(generated(task.data).house.receptacles))
    given = f"please go to the {target}"
    for snap, expected in (("bleu", f"You arrive at {target}."), ("exact", NOTHING)):
        (step,) = played(AlfWorldEnvironment(snap=snap, **BARE), task, [act(given)])
        assert read(step)[0].startswith(expected)
    (step,) = played(AlfWorldEnvironment(**BARE), task, [act("dance wildly")])
    assert read(step) == [NOTHING]


@pytest.mark.parametrize("written", ["{}.", '"{}"', "**{}**", "`{}`!"])
def test_marks_around_an_action_do_not_make_it_another_one(written: str) -> None:
    task = AlfWorldEnvironment().tasks("train")[0]
    *_, target = generated(task.data).house.receptacles
    for snap in ("bleu", "exact"):
        (step,) = played(AlfWorldEnvironment(snap=snap, **BARE), task, [act(written.format(f"go to {target}"))])
        assert read(step)[0].startswith(f"You arrive at {target}.")


def test_similarity_is_that_of_nltk() -> None:
    """AgentBench's ``sentence_bleu([choice], text, smoothing_function=SmoothingFunction().method4)``."""
    translate = pytest.importorskip("nltk.translate.bleu_score")
    smooth = translate.SmoothingFunction().method4
    rng, words = (
        Random(0),
        ["go", "to", "open", "close", "the", "cabinet", "fridge", "apple", "1", "2", "3", "take", "from", "move"],
    )
    for _ in range(300):
        choice, text = ([rng.choice(words) for _ in range(rng.randint(1, 9))] for _ in range(2))
        assert bleu(choice, text) == pytest.approx(translate.sentence_bleu([choice], text, smoothing_function=smooth))


def test_similarity_of_one_case_by_hand() -> None:
    """Precisions of "go to the sink 1" against "go to sink 1": 4/5, 2/4, then counts smoothed for 3 and 2 n-grams."""
    smoothed = [1.6094379124341003 / (2 * 5) / 3, 1.6094379124341003 / (4 * 5) / 2]  # ln 5
    expected = (0.8 * 0.5 * smoothed[0] * smoothed[1]) ** 0.25
    assert bleu(["go", "to", "sink", "1"], ["go", "to", "the", "sink", "1"]) == pytest.approx(expected)
    assert most_similar("", ["look"]) is None


def test_admissible_actions_end_an_observation() -> None:
    environment = AlfWorldEnvironment(instruction="")
    task = environment.tasks("train")[0]
    listed = environment.reset(task)["agent"][-1].content.partition(" AVAILABLE ACTIONS: ")[2].splitlines()
    game = generated(task.data)
    assert listed == list(game.actions(game.start))
    assert {"look", "inventory"} < set(listed)
    assert len(listed) == len(game.house.receptacles) + 2


# Rewards, and defects of AgentBench's server


def test_a_reply_without_a_call_does_not_spoil_a_later_success() -> None:
    """There the episode stays marked as not completed."""
    environment = AlfWorldEnvironment(incomplete_penalty=0.2, **BARE)
    task = environment.tasks("train")[0]
    gold = environment.gold(task)
    assert gold is not None
    last = played(environment, task, ["hm", *gold["agent"]])[-1]
    assert (last.rewards, last.success, last.metrics) == ({"agent": 1.0}, True, {"failed_actions": 1.0})


def test_sessions_do_not_wait_for_each_other_and_share_no_state() -> None:
    """There one lock serializes all steps. Here two episodes advance in turn, each as if alone."""
    environment = AlfWorldEnvironment(**BARE)
    tasks = [environment.tasks("train")[index] for index in range(2)]
    golds = [environment.gold(task) for task in tasks]
    assert golds[0] is not None
    assert golds[1] is not None
    replies = [gold["agent"] for gold in golds if gold]
    alone = [played(environment.copy(), task, own) for task, own in zip(tasks, replies, strict=True)]
    sessions = [environment.copy() for _ in tasks]
    for session, task in zip(sessions, tasks, strict=True):
        session.reset(task)
    for turn in range(max(map(len, replies))):
        for number, session in enumerate(sessions):
            if turn < len(replies[number]):
                assert session.step({"agent": Message("assistant", replies[number][turn])}) == alone[number][turn]


@pytest.mark.long
def test_ended_episodes_keep_no_memory_and_write_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the server leaks both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    environment = AlfWorldEnvironment()
    task = environment.tasks("train")[0]
    gold = environment.gold(task)
    assert gold is not None

    def held() -> int:
        for _ in range(20):
            assert played(environment.copy(), task, gold["agent"])[-1].done
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        held()
        first = held()
        assert held() - first < 20_000, "less than one session"
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []


def test_without_success_the_penalty_is_due_after_the_last_action() -> None:
    environment = AlfWorldEnvironment(max_turns=3, incomplete_penalty=0.2, **BARE)
    task = environment.tasks("train")[0]
    *_, last = played(environment, task, ["hm", act("look") + act("look")])
    assert (last.done, last.truncated, last.stop_reason, last.success) == (True, True, "max_turns", False)
    assert last.components == {"agent": {"incomplete": -0.2}}


# Forks and memory


def test_an_episode_can_be_forked() -> None:
    environment = AlfWorldEnvironment(**BARE)
    task = environment.tasks("train")[0]
    gold = environment.gold(task)
    assert gold is not None
    environment.reset(task)
    for reply in gold["agent"][:-1]:
        environment.step({"agent": Message("assistant", reply)})
    branch = environment.copy()
    assert read(environment.step({"agent": Message("assistant", act("inventory"))}))[0].startswith("You are carrying")
    assert branch.step({"agent": Message("assistant", gold["agent"][-1])}).rewards == {"agent": 1.0}
    assert branch._game is environment._game
    assert environment.step({"agent": Message("assistant", gold["agent"][-1])}).rewards == {"agent": 1.0}


def test_many_sessions_take_little_memory() -> None:
    environment = AlfWorldEnvironment()
    task = environment.tasks("train")[0]
    tracemalloc.start()
    try:
        sessions = [environment.copy() for _ in range(300)]
        for session in sessions:
            session.reset(task)
            session.step({"agent": Message("assistant", act("look"))})
        held = tracemalloc.get_traced_memory()[0] / len(sessions)
    finally:
        tracemalloc.stop()
    assert held < 20_000, f"{held:.0f} bytes a session"


@pytest.mark.long
def test_the_contract_holds_for_one_agent_and_for_the_team() -> None:
    check_environment(AlfWorldEnvironment(**BARE)).raise_on_failure()
    check_environment(AlfWorldEnvironment(team=True)).raise_on_failure()


# The team


def test_the_planner_plans_first_then_after_every_few_actions_and_when_the_actor_asks() -> None:
    environment = AlfWorldEnvironment(team=True, plan_every=2, list_actions=False)
    task = environment.tasks("train")[0]
    assert [len(environment.tools(agent)) for agent in environment.agents] == [0, 1]

    def step(agent: str, text: str) -> Step:
        return environment.step({agent: Message("assistant", text)})

    posed = environment.reset(task)
    assert list(posed) == ["planner"]
    room = posed["planner"][-1].content
    first = step("planner", "look around").observations["actor"]
    assert [message.content for message in first[1:]] == [room, "Plan: look around"]
    assert list(step("actor", act("inventory")).observations) == ["actor"]
    (*told, asked) = step("actor", act("look")).observations["planner"]
    assert told[0].content == "> inventory\nYou are not carrying anything."
    assert [told[1].content.partition("\n")[0], asked.content] == ["> look", "Plan the next steps."]
    again = step("planner", "again").observations["actor"]
    assert again[0].content.startswith("You are in the middle")
    assert again[-1].content == "Plan: again"
    assert list(step("actor", "What now?").observations) == ["planner"]


def test_the_team_wins_together() -> None:
    environment = AlfWorldEnvironment(team=True)
    task = environment.tasks("train")[0]
    gold = environment.gold(task)
    assert gold is not None
    replies = {agent: iter(own) for agent, own in gold.items()}
    (due,) = environment.reset(task)
    while True:
        step = environment.step({due: Message("assistant", next(replies[due]))})
        if step.done:
            break
        (due,) = step.observations
    assert step.rewards == {"planner": 1.0, "actor": 1.0}
    assert [list(own) for own in replies.values()] == [[], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 0}, "max_turns is 0; it must be 1 or above"),
        ({"team": True, "max_turns": 1}, "max_turns is 1; it must be 2 or above"),
        ({"kinds": ["fly"]}, r"kinds\[0\] is 'fly'; choose from pick, look"),
        ({"steps": (5, 60)}, r"steps is \(5, 60\); give \[lowest, highest\] from 1 to 50"),
        ({"snap": "none"}, "snap is 'none'; choose from bleu, exact"),
        ({"data": "games", "rooms": ["kitchen"]}, "kinds, rooms and steps are for generated games"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(alfworld|Environment): {message}"):
        AlfWorldEnvironment(**options)
