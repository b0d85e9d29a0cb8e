"""Answers from rows and from episodes, and the errors for other rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.answers.records import Answer, answers_of_episode, read_answers
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.episode_files import write_episodes
from mrlm_pl.errors import DataError

ROW = {"question": "2+2?", "answer": "4", "correct": True}


def write(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    path = folder / name
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def trajectory(agent: str, *replies: str, scores: tuple[float, ...] | None = None) -> Trajectory:
    messages: list[Message] = [Message("system", "Be brief."), Message("user", "2+2?")]
    turns = []
    for number, reply in enumerate(replies):
        messages += [Message("assistant", reply), Message("user", "Again")]
        parts = {"correct": 1.0} if scores is None else {"score": scores[number]}
        turns.append(Turn(agent, number, 1, 2, sum(parts.values()), parts, "stop", "main", 0, "e"))
    return Trajectory(agent, "main", (8, 9), (False, True), (0.0, -1.0), tuple(turns), tuple(messages[:-1]))


def episode(*rows: Trajectory, success: bool | None = True, error: str | None = None) -> Episode:
    found = {row.agent: (row,) for row in rows}
    task = Task("math", "train", 3)
    return Episode("0", task, "g", 0, -1, found, "end", success=success, metrics={"temperature": 0.7}, error=error)


def test_rows_are_read_and_written_without_loss(tmp_path: Path) -> None:
    rows = [
        {**ROW, "task": "math/train/3", "temperature": 0.7},
        {**ROW, "answer": "5", "correct": False, "task": "", "temperature": None, "generated": True},
        {**ROW, "answer": "", "correct": 0.25, "task": "", "temperature": None},
    ]
    answers, failed = read_answers(write(tmp_path, rows, "rows.jsonl.gz"))
    assert [answer.to_row() for answer in answers] == rows
    assert failed == 0
    assert read_answers(write(tmp_path, [ROW]))[0] == [Answer("2+2?", "4", 1.0)]


def test_an_episode_is_the_last_reply_to_the_first_question(tmp_path: Path) -> None:
    failed = episode(trajectory("agent", "4"), error="away")
    records = [episode(trajectory("agent", "5", "4")), episode(trajectory("agent", "6"), success=False), failed]
    expected = [Answer("2+2?", "4", 1.0, "math/train/3", 0.7), Answer("2+2?", "6", 0.0, "math/train/3", 0.7)]
    assert read_answers(write(tmp_path, [record.to_dict() for record in records])) == (expected, 1)
    write_episodes(tmp_path / "episodes" / "a.jsonl.gz", records)
    assert read_answers(str(tmp_path / "episodes")) == (expected, 1)


def test_turns_of_several_agents_are_answers_by_their_scores(tmp_path: Path) -> None:
    record = episode(trajectory("solver_1", "5", "4", scores=(0.5, 0.9)), trajectory("solver_2", "4", scores=(1.0,)))
    answers, _ = read_answers(write(tmp_path, [record.to_dict()]))
    assert [(answer.answer, answer.correct) for answer in answers] == [("5", 0.0), ("4", 1.0), ("4", 1.0)]
    assert {answer.question for answer in answers} == {"2+2?"}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"question": None}, "'question' is None; it must be text"),
        ({"question": " "}, "'question' is ' '; it must be text"),
        ({"answer": 4}, "'answer' is 4; it must be text"),
        ({"correct": "yes"}, "'correct' is 'yes'; it must be true or false"),
        ({"correct": 1.5}, r"'correct' is 1.5; .* lie in \[0, 1\]"),
        ({"correct": float("nan")}, "'correct' is nan"),
        ({"correct": float("inf")}, "'correct' is inf"),
        ({"temperature": -1}, "'temperature' is -1"),
        ({"temperature": float("inf")}, "'temperature' is inf"),
        ({"task": 3}, "'task' is 3"),
        ({"generated": 1}, "'generated' is 1"),
        ({"trajectories": 3}, "is not an episode record"),
    ],
)
def test_a_bad_row_is_named_by_its_line(change: dict[str, Any], fault: str, tmp_path: Path) -> None:
    path = Path(write(tmp_path, [ROW]))
    path.write_text(path.read_text() + "\n" + json.dumps({**ROW, **change}) + "\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 3\b.*{fault}"):
        read_answers(str(path))


@pytest.mark.parametrize("field", ["question", "answer", "correct"])
def test_a_field_that_is_missing_is_named(field: str, tmp_path: Path) -> None:
    row = {name: value for name, value in ROW.items() if name != field}
    with pytest.raises(DataError, match=f"row 1: no field '{field}'.*an answer is"):
        read_answers(write(tmp_path, [row]))


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (episode(trajectory("agent", "4"), success=None), "'success' is null"),
        (episode(trajectory("left", "4"), trajectory("right", "5")), "2 agents of 'math' acted, and no 'score'"),
        (episode(trajectory("agent", "4", scores=(1.5,))), "'score' is 1.5"),
        (episode(trajectory("agent", "4"), error="away"), "every episode failed, 1 in all"),
    ],
)
def test_an_episode_that_says_nothing_of_what_is_right_is_refused(record: Episode, fault: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=fault):
        read_answers(write(tmp_path, [record.to_dict()]))


def test_a_leader_answers_the_question_of_the_others() -> None:
    def row(agent: str, step: int, asked: str) -> Trajectory:
        turn = Turn(agent, step, 1, 2, 1.0, {"score": 1.0}, "stop", "main", 0, "e")
        said = (Message("user", asked), Message("assistant", "5"))
        return Trajectory(agent, "main", (1, 2), (False, True), (0.0, -1.0), (turn,), said)

    rows = {"solver_1": (row("solver_1", 0, "2+3?"),), "leader": (row("leader", 1, "You lead.\n\nsolver_1: 5"),)}
    episode = Episode("0", Task("d", "train", 0), "g", 0, 0, rows, "turns", agents=tuple(rows))
    assert [answer.question for answer in answers_of_episode(episode, "here")] == ["2+3?", "2+3?"]


@pytest.mark.parametrize("change", ["no turns", "no trajectory", "no messages"])
def test_an_episode_in_which_no_agent_answers_is_named(change: str, tmp_path: Path) -> None:
    components = {"score": 1.0} if change == "no messages" else {}
    turn = Turn("a", 0, 0, 1, 1.0, components, "stop", "main", 0, "e")
    row = Trajectory("a", "main", (1,), (True,), (-0.5,), () if change == "no turns" else (turn,))
    rows = {"a": () if change == "no trajectory" else (row,)}
    write_episodes(tmp_path / "e.jsonl", [Episode("0", Task("math", "train", 0), "g", 1, 0, rows, "end", success=True)])
    with pytest.raises(
        DataError,
        match=r"e\.jsonl, row 1: (0 agents of 'math' acted|agent 'a' has 1 turn, and replies in its messages: 0)",
    ):
        read_answers(str(tmp_path / "e.jsonl"))
