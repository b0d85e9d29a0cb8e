"""Rows of AgentBench's Knowledge Graph, and the replies of a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlm_environments.knowledge_graph.exploration import read_action
from mrlm_pl.environment.tools import written_call
from mrlm_pl.errors import DataError

ROW_FORM = "{question, entities: {NAME: ID}, answer: [{answer_argument}], actions: [CALL, ...]}"


def row_data(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's data from a row: question, entities, actions (empty where the row has none) and answer.

    Raises:
        DataError: a field is of another form.
    """
    question, entities, answers, actions = row["question"], row["entities"], row["answer"], row.get("actions") or []
    if not isinstance(question, str) or not question.strip():
        raise DataError("field 'question' is no text")
    if not isinstance(entities, Mapping) or not all(isinstance(value, str) for value in entities.values()):
        raise DataError("field 'entities' does not map names to identifiers")
    if not isinstance(answers, list) or not answers:
        raise DataError("field 'answer' is no list of answers")
    if not isinstance(actions, list) or any(read_action(str(action)) is None for action in actions):
        raise DataError("field 'actions' is no list of calls such as get_relations(m.03xxf2z)")
    answer = sorted({str(one["answer_argument"]) for one in answers})
    return {"question": question, "entities": dict(entities), "actions": actions, "answer": answer}


def gold_replies(data: Mapping[str, Any]) -> list[str]:
    """Return the replies of a question's program, with the names of entities, and the final answer."""
    names = {identifier: name for name, identifier in data["entities"].items()}
    replies, variables = [], 0
    for action in data["actions"]:
        read = read_action(action)
        assert read is not None, "rows are checked when they are read"
        tool, arguments = read
        replies.append(written_call(tool, **{key: names.get(value, value) for key, value in arguments.items()}))
        variables += not tool.startswith("get_") or tool == "get_neighbors"
    return [*replies, f"Final Answer: #{variables - 1}"] if variables else []
