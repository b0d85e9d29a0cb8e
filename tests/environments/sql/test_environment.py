from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.sql.environment import HOW_TO_CALL, SqlEnvironment
from mrlm_environments.sql.scoring import equal_answers, state_hash
from mrlm_environments.sql.tasks import KINDS

from mrlm_pl.environment import SPLITS, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.episode import Message, ToolCall
from mrlm_pl.errors import ConfigurationError, DataError
from tests.support.environments.data_sets import files_of, rows_of
from tests.support.environments.sql_rows import TEAMS


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def sql(query: str) -> str:
    return call("execute_sql", query=query)


def commit(*answers: Any) -> str:
    return call("commit_final_answer", answers=list(answers))


def posed(**data: Any) -> Task:
    given = {"question": "?", "tables": [TEAMS], "kind": "other", "answers": [], "state": "", "statements": []}
    return Task("sql", "train", 0, 0, {**given, **data})


def played(task: Task, *replies: str | Message, **options: Any) -> list[Step]:
    environment = SqlEnvironment(**options)
    environment.reset(task)
    messages = [reply if isinstance(reply, Message) else Message("assistant", reply) for reply in replies]
    return [environment.step({"agent": message}) for message in messages]


# Scoring


def test_the_state_hash_is_the_one_of_the_reference() -> None:
    rows = [("a", "1"), ("b", None)]
    first, second = (hashlib.md5(text).hexdigest()[:5] for text in (b"a,1", b"b"))
    expected = hashlib.md5(",".join(sorted([first, second])).encode()).hexdigest()
    assert state_hash([rows]) == state_hash([rows[::-1]]) == expected
    assert state_hash([[*rows, rows[0]]]) != expected


@pytest.mark.parametrize(
    ("given", "expected", "equal"),
    [
        (["1.0"], ["1"], True),
        ([1], ["1.0"], True),
        (["1,234"], ["1234"], True),
        (["99.8"], ["99.8%"], True),
        (["2.005"], ["2.0"], True),
        (["2.02"], ["2.0"], False),
        (["b", "a"], ["a", "b"], True),
        (["a"], ["a", "a"], False),
        (["a", "a"], ["a"], False),
        (["3", "1.001"], ["1", "3"], True),
        ([" a "], ["a"], True),
        (["A"], ["a"], False),
        ([], ["none"], True),
        ([None], ["none"], True),
        (["0"], ["none"], False),
        (["['a']"], ["a"], False),
        (["__import__('os')"], ["a"], False),
        ([10**400], ["inf"], False),
        (["nan"], ["nan"], True),
        (["1e5000"], ["1e5001"], False),
        (["2010-11"], ["2010"], False),
    ],
)
def test_answers_are_compared_by_value(given: list[Any], expected: list[Any], equal: bool) -> None:
    assert equal_answers(given, expected) is equal


def test_a_question_is_judged_by_its_answers() -> None:
    task = posed(answers=["10"])
    looked, ended = played(task, sql("SELECT Points FROM `2nd league` WHERE `1st name` = 'ada'"), commit("10.0"))
    assert looked.observations["agent"][0].content == "[('10',)]"
    assert looked.rewards["agent"] == 0.0
    assert (ended.done, ended.success, ended.stop_reason) == (True, True, "answered")
    assert ended.components["agent"] == {"correct": 1.0}
    assert played(task, commit("9"))[0].components["agent"] == {"correct": 0.0}


def test_a_change_is_judged_by_the_state_whatever_the_answers() -> None:
    rows = [list(row) for row in TEAMS["rows"]]
    rows[0][1] = "11"
    task = posed(state=state_hash([rows]))
    change = sql("UPDATE `2nd league` SET Points = 11 WHERE `1st name` = 'Zoe'")
    assert played(task, change, commit())[-1].success
    assert played(task, change + commit("anything"))[-1].success
    assert not played(task, commit("11"))[-1].success
    assert not played(task, sql("DROP TABLE `2nd league`"), commit())[-1].success


def test_without_a_commit_a_right_state_earns_nothing() -> None:
    task = posed(state=state_hash([[]]))
    steps = played(task, sql("DELETE FROM `2nd league`"), "I am done.", max_turns=2)
    last = steps[-1]
    assert (last.done, last.truncated, last.stop_reason, last.success) == (True, True, "max_turns", False)
    assert last.rewards["agent"] == 0.0


def test_an_episode_without_a_commit_costs_the_penalty() -> None:
    last = played(posed(), "hm", max_turns=1, incomplete_penalty=0.2)[-1]
    assert last.components["agent"] == {"correct": 0.0, "incomplete": -0.2}
    assert played(posed(), commit("wrong"), incomplete_penalty=0.2)[-1].components["agent"] == {"correct": 0.0}
    assert SqlEnvironment(incomplete_penalty=0.2).bounds(posed()) == (-0.2, 1.0)


def test_fifteen_rounds_are_the_default() -> None:
    steps = played(posed(), *["hm"] * 15)
    assert [step.done for step in steps] == [False] * 14 + [True]


def test_a_table_that_cannot_be_read_to_the_end_is_wrong_not_a_crash() -> None:
    loop = "WITH RECURSIVE c AS (SELECT {} UNION ALL SELECT * FROM c) SELECT * FROM c"
    bomb = loop.format("REPEAT('a', 90000) AS `1st name`, 1 AS Points, 2 AS founded")
    view = sql(f"CREATE VIEW `2nd league` AS {bomb}")
    steps = played(posed(state="0" * 32), sql("DROP TABLE `2nd league`"), view, commit())
    assert "OK" in steps[1].observations["agent"][0].content
    assert steps[-1].rewards["agent"] == 0.0


# Calls


def test_calls_of_one_reply_are_answered_in_order() -> None:
    (step,) = played(posed(), sql("SELECT 1") + sql("SELECT 2") + call("guess", x=1) + "<tool_call>{oops</tool_call>")
    told = [message.content for message in step.observations["agent"]]
    assert told[:2] == ["[(1,)]", "[(2,)]"]
    assert "no tool 'guess'" in told[2]
    assert "not JSON" in told[3]
    assert {message.role for message in step.observations["agent"]} == {"tool"}
    assert step.metrics["failed_calls"] == 2.0


@pytest.mark.parametrize("reply", ["", "SELECT 1", "answer: 4"])
def test_a_reply_without_a_call_is_told_how(reply: str) -> None:
    (step,) = played(posed(), reply)
    assert step.observations["agent"][0].content == HOW_TO_CALL


@pytest.mark.parametrize(
    "reply", [call("execute_sql"), call("execute_sql", query=3), call("commit_final_answer", answers="x"), commit([1])]
)
def test_wrong_arguments_do_not_end_the_episode(reply: str) -> None:
    (step,) = played(posed(), reply)
    assert step.observations["agent"][0].content.startswith("Error: ")
    assert not step.done


def test_native_tool_calls_are_read() -> None:
    message = Message("assistant", "", tool_calls=(ToolCall("id7", "execute_sql", {"query": "SELECT 3"}),))
    (step,) = played(posed(), message)
    answer = step.observations["agent"][0]
    assert (answer.content, answer.tool_call_id) == ("[(3,)]", "id7")


def test_output_is_cut() -> None:
    (step,) = played(posed(), sql("SELECT REPEAT('a', 5000)"))
    answer = step.observations["agent"][0].content
    assert answer.startswith("[('aaa")
    assert 800 <= len(answer) < 840
    assert "aaa" not in answer[800:]


def test_feedback_does_not_show_the_expected_answer() -> None:
    for reply in ("", "?", sql("SELECT x"), call("guess")):
        (step,) = played(posed(answers=["swordfish"]), reply)
        assert "swordfish" not in step.observations["agent"][0].content


# Tasks


@pytest.mark.parametrize("database_url", [None, "sqlite://"])
@pytest.mark.parametrize("kind", KINDS)
def test_generated_statements_give_the_answers_that_python_computed(kind: Any, database_url: str | None) -> None:
    environment = SqlEnvironment(kinds=[kind], rows=(1, 8), database_url=database_url)
    for split in SPLITS:
        for index in range(6):
            task = environment.tasks(split)[index]
            replies = environment.gold(task)["agent"]
            steps = played(task, *replies, database_url=database_url)
            assert steps[-1].rewards["agent"] == 1.0, task
            if not task.data["state"]:
                rows = ast.literal_eval(steps[0].observations["agent"][0].content)
                assert equal_answers([value for row in rows for value in row], task.data["answers"]), task


def test_generated_splits_share_no_question() -> None:
    environment = SqlEnvironment()
    asked = {split: {environment.tasks(split)[n].data["question"] for n in range(150)} for split in SPLITS}
    assert not asked["train"] & asked["test"]
    assert not asked["train"] & asked["validation"]
    assert environment.tasks("test")[7] == SqlEnvironment().tasks("test")[7]


def test_the_contract_holds() -> None:
    check_environment(SqlEnvironment(max_turns=3), tasks_per_split=3).raise_on_failure()


def test_a_copy_of_an_environment_in_play_begins_anew() -> None:
    environment = SqlEnvironment()
    task = posed(state=state_hash([[]]))
    environment.reset(task)
    copy = environment.copy()
    copy.reset(task)
    copy.step({"agent": Message("assistant", sql("DELETE FROM `2nd league`"))})
    told = environment.step({"agent": Message("assistant", sql("SELECT COUNT(*) FROM `2nd league`"))})
    assert told.observations["agent"][0].content == "[(4,)]"


def dbbench_row(**changed: Any) -> dict[str, Any]:
    info = {"columns": [{"name": "a", "type": "INT"}], "rows": [[1], ["2"]]}
    row = {
        "description": "How many?",
        "table": {"table_name": "t", "table_info": info},
        "type": ["counting"],
        "label": ["2"],
    }
    return {key: value for key, value in {**row, **changed}.items() if value is not None}


def test_a_file_with_dbbenchs_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    state = state_hash([[("1",)]])
    changing = dbbench_row(type=["DELETE"], label=["DELETE FROM t WHERE a = 2"], answer_md5=f"[('{state}',)]")
    path.write_text(json.dumps(dbbench_row()) + "\n" + json.dumps(changing))
    environment = SqlEnvironment(data={"train": str(path), "test": str(path)})
    for task in environment.tasks("test"):
        assert played(task, *environment.gold(task)["agent"])[-1].rewards["agent"] == 1.0
        assert "swordfish" not in task.data["question"]
    assert environment.tasks("test")[0].data["question"] == "How many?\nTable `t`, columns a."


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"label": None}, "label"),
        ({"type": ["INSERT"]}, "answer_md5"),
        ({"table": {"table_name": "t"}}, "table_info"),
        ({"table": {"table_name": "t", "table_info": {"columns": [{"name": "a"}], "rows": [[1, 2]]}}}, "length"),
        ({"description": 3}, "description"),
    ],
)
def test_faults_of_a_row_are_named(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([dbbench_row(**changed)]))
    with pytest.raises(DataError, match=rf"rows\.json.*row 1.*{named}"):
        SqlEnvironment(data={"train": str(path), "validation": str(path)}).tasks("train")


@pytest.mark.parametrize(
    "options",
    [{"kinds": ["art"]}, {"kinds": []}, {"rows": (0, 3)}, {"rows": (3, 9)}, {"max_turns": 0}, {"output_characters": 0},
     {"statement_seconds": 0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        SqlEnvironment(**options)


@pytest.mark.parametrize("url", ["no url", "postgresql://host/x", "mysql+pymysql://u:hidden@127.0.0.1:1/"])
def test_a_server_that_cannot_be_used_is_a_configuration_error(url: str) -> None:
    environment = SqlEnvironment(database_url=url)
    with pytest.raises(ConfigurationError, match="sql: ") as error:
        environment.reset(posed())
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize("path", files_of("dbbench", "dbbench_dev.jsonl"))
@pytest.mark.parametrize("database_url", [None, "sqlite://"])
def test_all_of_dbbenchs_development_set_earns_the_maximum(database_url: str | None, path: Path) -> None:
    environment = SqlEnvironment(data={"train": str(path), "test": str(path)}, database_url=database_url)
    right = {"changes": 0, "questions": 0}
    unnamed = 0
    for task in environment.tasks("test"):
        if database_url and any("" in table["columns"] for table in task.data["tables"]):
            unnamed += 1  # of questions; neither SQLAlchemy nor MySQL takes a column without a name
            continue
        environment.reset(task)
        for reply in environment.gold(task)["agent"]:
            step = environment.step({"agent": Message("assistant", reply)})
        right["changes" if task.data["state"] else "questions"] += int(step.rewards["agent"] == 1.0)
        if task.data["state"]:
            environment.reset(task)
            assert environment.step({"agent": Message("assistant", commit())}).rewards["agent"] == 0.0
    changes = sum(row["type"] in (["INSERT"], ["UPDATE"], ["DELETE"]) for row in rows_of(path))
    assert right == {"changes": changes, "questions": len(rows_of(path)) - changes - unnamed}
    assert unnamed <= 1
    assert min(right.values()) >= 8
