"""Questions about tables and changes of them, solved by SQL: AgentBench's DBBench, or generated tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from mrlm_environments.data_tasks import DataTasks, opening
from mrlm_environments.sql.dialect import SqlError
from mrlm_environments.sql.scoring import equal_answers
from mrlm_environments.sql.server import ServerDatabase
from mrlm_environments.sql.tasks import KINDS, ROW_FORM, Kind, dbbench_task, generated_task
from mrlm_environments.sql.worker import SqliteDatabase
from mrlm_pl.environment import Message, Outcome, SingleAgentEnvironment, Task, TaskSource, ToolSchema
from mrlm_pl.environment.tools import ToolCall, ToolError, answer_calls, requested_calls, tool_schema, written_call
from mrlm_pl.settings import PositiveInt, UnitInterval, between, some_of, whole_range

EXECUTE = tool_schema("execute_sql", "Execute one MySQL statement.", {"query": {"type": "string"}})
COMMIT = tool_schema(
    "commit_final_answer",
    "End with the list of answers; after a change of the table, with an empty list.",
    {"answers": {"type": "array", "items": {"type": ["string", "number", "null"]}}},
)
INSTRUCTION = (
    "Answer the question about the MySQL database with execute_sql, or make the change that it asks for; all columns "
    "hold text. Then call commit_final_answer."
)
HOW_TO_CALL = (
    'Call a tool: <tool_call>{"name": "execute_sql", "arguments": {"query": "SELECT ..."}}</tool_call> or '
    '<tool_call>{"name": "commit_final_answer", "arguments": {"answers": [...]}}</tool_call>.'
)


class SqlEnvironment(SingleAgentEnvironment):
    """Tables, a question about them or a change to make, and two tools: ``execute_sql`` and ``commit_final_answer``.

    Committing ends the episode. The reward is 1.0 if the committed answers equal the labels as multisets (numbers by
    value, to 0.01), or, for an INSERT, UPDATE or DELETE, if the tables are in the expected state, whatever the answers;
    else it is 0, and without a commit within ``max_turns`` replies ``-incomplete_penalty``.

    Args:
        data: rows in DBBench's format that replace the generated tasks: a file or a hub name, or a mapping from splits
            to these; see :func:`mrlm_pl.environment.rows.read_split`.
        kinds: kinds of generated tasks; None is all of them.
        rows: minimum and maximum number of rows of a generated table, from 1 to 8.
        max_turns: replies that the agent may give.
        incomplete_penalty: subtracted from the reward where nothing is committed; AgentRL's is 0.2.
        output_characters: number of characters after which a tool's answer is truncated.
        statement_seconds: deadline of a statement, which is then stopped.
        database_url: server that replaces SQLite, as SQLAlchemy's URL (``mysql+pymysql://user:password@host``); each
            episode has its own database on it. Needs the extra ``sql``.
        instruction: system message before the question.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "sql"
    client_settings = ("kinds", "rows", "max_turns", "incomplete_penalty", "instruction")
    secrets = ("answers", "statements", "state")

    def __init__(
        self,
        data: str | dict[str, str] | None = None,
        kinds: list[Kind] | None = None,
        rows: tuple[int, int] = (3, 6),
        max_turns: PositiveInt = 15,
        incomplete_penalty: UnitInterval = 0.0,
        output_characters: PositiveInt = 800,
        statement_seconds: Annotated[float, between(0.001, 600)] = 3.0,
        database_url: str | None = None,
        instruction: str = INSTRUCTION,
    ) -> None:
        self.kinds, self.rows = some_of(KINDS, "sql: ", kinds=kinds), whole_range(1, 8, "sql: ", rows=rows)
        self.max_turns, self.incomplete_penalty = max_turns, incomplete_penalty
        self.output_characters, self.statement_seconds = output_characters, statement_seconds
        self.database_url, self.instruction = database_url, instruction
        self._tasks = DataTasks(self.name, data, ROW_FORM)
        self._database: SqliteDatabase | ServerDatabase | None = None

    def tasks(self, split: str) -> TaskSource:
        """Return generated tasks without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: a row lacks a field or is of another form.
            ConfigurationError: the split is unknown or empty.
        """
        generate = partial(generated_task, kinds=self.kinds, rows=self.rows)
        return self._tasks.source(split, ("description", "table", "type"), dbbench_task, _identity, generate, "key")

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return the two tools; see :meth:`Environment.tools`."""
        return (EXECUTE, COMMIT)

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the statements that solve the task, and the commit; None where they do not fit in the turns."""
        replies = [written_call(EXECUTE.name, query=statement) for statement in task.data["statements"]]
        replies.append(written_call(COMMIT.name, answers=task.data["answers"]))
        if (task.data["state"] and len(replies) == 1) or len(replies) > self.max_turns:
            return None
        return {self.agents[0]: replies}

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the rewards without a commit and of a right one; see :meth:`Environment.bounds`."""
        return -self.incomplete_penalty, 1.0

    def begin(self, task: Task) -> Sequence[Message]:
        """Return the question, with a fresh database behind it; see :meth:`SingleAgentEnvironment.begin`."""
        self.close()
        self._task, self._turns = task, 0
        self._committed: Sequence[Any] | None = None
        tables, seconds = task.data["tables"], self.statement_seconds
        if self.database_url is None:
            self._database = SqliteDatabase(tables, seconds)
        else:
            self._database = ServerDatabase(self.database_url, tables, seconds)
        return opening(task.data["question"], self.instruction)

    def reply(self, message: Message) -> Outcome:
        """Answer the calls of a reply in order; see :meth:`SingleAgentEnvironment.reply`."""
        self._turns += 1
        answers: list[Message] = []
        faults = 0
        calls = requested_calls(message)
        for answer, made in answer_calls(
            calls, (EXECUTE, COMMIT), HOW_TO_CALL, self._call_tool, limit=self.output_characters
        ):
            if self._committed is not None:
                return self._end(self._is_right(self._committed), "answered")
            faults += not made
            answers.append(answer)
        metrics = {"failed_calls": float(faults if calls else 1)}
        if self._turns == self.max_turns:
            return self._end(False, "max_turns", metrics)
        return Outcome(observation=answers or HOW_TO_CALL, metrics=metrics)

    def _call_tool(self, call: ToolCall) -> str:
        """Execute a statement, or keep the final answers."""
        if call.name == COMMIT.name:
            self._committed = call.arguments["answers"]
            return ""
        assert self._database is not None
        try:
            return self._database.execute(call.arguments["query"])
        except SqlError as error:
            raise ToolError(str(error)) from None

    def close(self) -> None:
        """Remove the episode's database; see :meth:`Environment.close`."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy plays its own episodes; an open database cannot be copied.
        return {**self.__dict__, "_database": None}

    def _is_right(self, answers: Sequence[Any]) -> bool:
        data = self._task.data
        if not data["state"]:
            return equal_answers(answers, data["answers"])
        assert self._database is not None
        try:
            state = self._database.state(data["tables"])
        except SqlError:  # the agent dropped a table, or made it too large to be read
            return False
        return state == data["state"]

    def _end(self, right: bool, stop_reason: str, metrics: Mapping[str, float] | None = None) -> Outcome:
        self.close()
        incomplete = stop_reason == "max_turns"
        return Outcome(
            {"correct": float(right)} | ({"incomplete": -self.incomplete_penalty} if incomplete else {}),
            stop_reason=stop_reason,
            truncated=incomplete,
            success=right,
            metrics=metrics or {},
        )


def _identity(row: Mapping[str, Any]) -> str:
    return json.dumps([row["description"], row["table"]], sort_keys=True, default=str)
