from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mrlm_environments.data_tasks import DataTasks
from mrlm_environments.shell.environment import ShellEnvironment
from mrlm_environments.shell.tasks import COMPARISONS, ROW_FORM, generate_data, task_data

from mrlm_pl.environment.tasks import split_of
from mrlm_pl.episode import Message
from mrlm_pl.errors import DataError
from tests.support.environments.data_sets import files_of, rows_of
from tests.support.environments.shell_rows import COUNT, FINISH, answer

pytestmark = pytest.mark.usefixtures("namespaces")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("integer-match", [("3", "3"), (" 3\n", "3"), ("+3", "03"), ("-1", "-1")],
         [("3", "4"), ("", ""), ("x", "x"), ("3.0", "3"), ("3 files", "3"), ("", "3"), ("9" * 99, "9" * 99)]),
        ("size-match", [("1K", "1024"), ("1 MB", "1024KB"), ("1.5k", "1536"), ("20", "20 bytes"), ("1GiB", "1024M")],
         [("1K", "1000"), ("", ""), ("x", "x"), ("1X", "1X"), ("-1", "-1")]),
        ("string-match", [("a b", " a b\n"), ("a\r\nb", "a\nb")], [("a", "b"), ("", ""), (" ", ""), ("a", "ab")]),
        ("containing", [("it is b.txt", "b.txt\n"), ("a", "a")], [("b", "b.txt"), ("x", ""), ("", "x"), ("", "")]),
        ("in", [("b", "a\nb\nc"), ("a", "a")], [("", "a"), (" ", "a"), ("d", "a"), ("", "")]),
    ],
)  # fmt: skip
def test_comparisons(name: str, right: list[tuple[str, str]], wrong: list[tuple[str, str]]) -> None:
    assert [COMPARISONS[name](*pair) for pair in right] == [True] * len(right)
    assert [COMPARISONS[name](*pair) for pair in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"evaluation": {}}, "check"),
        ({"evaluation": {"check": []}}, "anything would pass"),
        ({"evaluation": {"check": [{"file": "check/in.py"}], "example": "ls"}}, "null"),
        ({"evaluation": {"check": [None, {"file": "in"}]}}, "no.*example|example.*none"),
        ({"evaluation": {"check": [{"file": "check/own.py"}]}}, "own.py"),
        ({"evaluation": {"check": ["in"]}}, "null"),
        ({"evaluation": {"check": [{"language": "c++", "code": "x"}]}}, r"c\+\+"),
        ({"evaluation": {"match": {}}}, "answer"),
        ({"evaluation": {"match": " "}}, "empty"),
        ({"evaluation": {"match": {"regex": "("}}}, "unterminated|error"),
        ({"create": {"init": {"file": "a.sh"}}}, r"a\.sh.*set `scripts`"),
        ({"create": {"init": {"language": "c++", "code": "x"}}}, r"c\+\+"),
        ({"create": "default"}, "default"),
        ({"start": 5}, "int"),
        ({"evaluation": None}, "NoneType"),
    ],
    ids=range(15),
)
def test_bad_rows_are_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps([{**COUNT, **change}]))
    tasks = DataTasks("shell", {"train": str(path)}, ROW_FORM)
    with pytest.raises(DataError, match=r"my\.json, row 1: .*a row is") as caught:
        tasks.source("train", (), task_data, str)
    assert re.search(told, str(caught.value))


def test_scripts_and_checks_may_be_mere_texts() -> None:
    row = {
        **COUNT,
        "create": {"init": ["mkdir ~/d", {"code": "touch ~/d/a"}]},
        "evaluation": {"check": ["test -e ~/d/a"]},
    }
    made = task_data(row)
    assert made["init"] == "mkdir ~/d\ntouch ~/d/a"
    assert made["checks"] == [{"language": "bash", "code": "test -e ~/d/a"}]


def test_scripts_in_files_are_read_from_their_folder_only(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    (scripts / "init").mkdir(parents=True)
    (scripts / "init" / "make.sh").write_text("mkdir ~/d")
    (scripts / "own.py").write_text("assert True")
    (tmp_path / "outside.sh").write_text("secret")
    row = {
        **COUNT,
        "create": {"local": "default", "init": [{"file": "init/make.sh"}, "touch ~/d/a"]},
        "evaluation": {
            "check": [{"language": "python", "file": "own.py"}],
            "example": {"file": "init/make.sh"},
        },
    }
    made = task_data(row, str(scripts))
    assert made["init"] == "mkdir ~/d\ntouch ~/d/a"
    assert made["checks"] == [{"language": "python", "code": "assert True"}]
    assert made["reference"] == "mkdir ~/d"
    assert task_data(COUNT, str(scripts))["checks"] == [None, "integer-match"]
    for file in ("../outside.sh", str(tmp_path / "outside.sh"), "init/none.sh", "init"):
        with pytest.raises(ValueError, match="is not a file in"):
            task_data({**COUNT, "start": {"file": file}}, str(scripts))
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    environment = ShellEnvironment(data={"test": str(tmp_path / "rows.json")}, scripts=str(scripts))
    assert environment.tasks("test")[0].data == made


def test_published_rows_that_repeat_their_check_have_no_setup() -> None:
    checks = COUNT["evaluation"]["check"]  # type: ignore[index]
    assert task_data({**COUNT, "create": checks})["init"] == ""
    with pytest.raises(TypeError, match="not an object with init"):
        task_data({**COUNT, "create": ["mkdir ~/d"]})


def test_rows_of_a_file(tmp_path: Path) -> None:
    rows = [{**COUNT, "description": f"Task {n}"} for n in range(60)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    environment = ShellEnvironment(data=str(path))
    asked = {split: {task.data["description"] for task in environment.tasks(split)} for split in ("train", "test")}
    assert asked["train"]
    assert not asked["train"] & asked["test"]
    assert all(split_of(json.dumps(row)) == "train" for row in rows if row["description"] in asked["train"])
    path.write_text(json.dumps([{"description": "x"}]))
    with pytest.raises(DataError, match=r"rows\.json.*row 1.*evaluation"):
        ShellEnvironment(data=str(path)).tasks("train")


def test_generated_tasks_are_solved_by_their_reference() -> None:
    environment = ShellEnvironment()
    tasks = {task.data["description"][:14]: task for task in map(environment.tasks("train").__getitem__, range(60))}
    assert len(tasks) == 5, "one of each kind"
    for task in tasks.values():
        gold = environment.gold(task)
        assert gold is not None
        environment.reset(task)
        steps = [environment.step({"agent": Message("assistant", reply)}) for reply in gold["agent"]]
        assert steps[-1].rewards["agent"] == 1.0, task.data
        environment.reset(task)
        assert environment.step({"agent": Message("assistant", FINISH)}).rewards["agent"] == 0.0
    environment.close()


def test_generated_answers_by_counting_here() -> None:
    """Compute the answer a second time from the text of the script that sets the system up."""
    environment, found = ShellEnvironment(), set()
    for index in range(60):
        data = generate_data(Random(index))
        question, init = data["description"], data["init"].split("\n")[1:]
        if "How many files" in question:
            suffix = question.rpartition(" in ")[2].removesuffix("?")
            expected = sum(line.endswith(suffix) for line in init)
        elif "sum of" in question:
            expected = sum(int(line.split()[1]) for line in init)
        elif "How many lines" in question:
            expected = sum(line.split()[1] == f"'{question.split()[-1].removesuffix('?')}" for line in init)
        else:
            continue
        kind = question[:14]
        if kind not in found:
            assert environment._expected_of(data).strip() == str(expected), data
            found.add(kind)
    assert len(found) == 3


def test_splits_share_no_question() -> None:
    environment = ShellEnvironment()
    asked = {s: {environment.tasks(s)[n].data["description"] for n in range(200)} for s in ("train", "test")}
    assert all(split_of(text) == split for split, texts in asked.items() for text in texts)
    assert not asked["train"] & asked["test"]


@pytest.mark.parametrize("path", files_of("agentbench_os", "agentbench_os_train_sample.json"))
def test_references_of_agentbench_are_right(path: Path) -> None:
    """The agent runs the reference in its own system and answers with its output."""
    environment = ShellEnvironment(data={"train": str(path), "test": str(path)})
    failed = []
    tasks = list(environment.tasks("test"))
    for task in tasks:
        environment.reset(task)
        cell = environment._cell
        assert cell is not None
        printed = environment.sandbox.script(cell, task.data["reference"]).output
        if not environment.step({"agent": Message("assistant", answer(printed))}).success:
            failed.append(task.data["description"])
    environment.close()
    assert len(tasks) == len(rows_of(path))
    assert failed == []
