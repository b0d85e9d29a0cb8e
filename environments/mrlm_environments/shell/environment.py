"""A shell to look into and change a small system, as in AgentBench's operating system tasks."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from mrlm_environments.data_tasks import DataTasks, opening
from mrlm_environments.shell.tasks import COMPARISONS, ROW_FORM, generate_data, matches, task_data
from mrlm_environments.toolbox.programs import SOURCE, CellHolder, told
from mrlm_pl.environment import Message, Outcome, SingleAgentEnvironment, Task, TaskSource, ToolSchema
from mrlm_pl.environment.tools import ToolCall, answer_calls, requested_calls, tool_schema, written_call
from mrlm_pl.errors import ConfigurationError, SandboxError
from mrlm_pl.sandbox import MACHINE_PATH, Cell, Execution, Sandbox, running
from mrlm_pl.settings import PositiveInt, UnitInterval

logger = logging.getLogger(__name__)

SHOWN_CHARACTERS = 800
SOLVED = 1.0
_CHECKERS = {"bash": ("bash", "-c"), "python": ("python3", "-I -c")}
"""Program and options of a check. ``-I``: else it would import modules that the agent left in its home folder."""

_NO_ERRORS = "2> /dev/null"
"""A script's errors are not part of its output."""

_SILENT = "exec > /dev/null 2>&1\n"
"""The output of background processes is not part of the reference's."""


TOOLS = (
    tool_schema(
        "bash_action", "Run a bash script on the system. Returns what it prints.", {"script": SOURCE}, closed=True
    ),
    tool_schema(
        "finish_action",
        "End: the system is as it was asked for.",
        {},
        {"thought": {"type": "string", "description": "Why the work is done; not judged."}},
        closed=True,
    ),
    tool_schema("answer_action", "End with the answer to the question.", {"answer": SOURCE}, closed=True),
)
_HOW = 'Call a tool, for example <tool_call>{"name": "bash_action", "arguments": {"script": "ls"}}</tool_call>.'


class ShellEnvironment(CellHolder, SingleAgentEnvironment):
    """A question about a system, or a change to make to it, with ``bash`` as the tool.

    The reward is 1.0 if the answer, or the system at the end, is right, else 0. It is ``-incomplete_penalty`` if the
    agent does not end within ``max_turns`` replies. Tools are ``bash_action(script)``, ``answer_action(answer)`` and
    ``finish_action()``. The system has the programs of this machine, read-only, in a private file system that is
    writable elsewhere and lasts for the episode; it has no network.

    Answers are compared with the output of the reference solution on a copy of the system that is made before the agent
    acts. So set-ups may be random, and the agent cannot change the expected answer.

    Args:
        data: rows in AgentBench's format that replace the generated tasks: a file or a hub name, or a mapping from
            splits to these.
        max_turns: replies that the agent may give.
        incomplete_penalty: subtracted from the reward where the agent does not end; AgentRL's is 0.2.
        sandbox: sandbox that runs the scripts; ``wall_seconds`` is for each script, and a reply begins no further
            script when its scripts have taken this long together. Namespaces are needed.
        system_prompt: system message before the task.
        scripts: folder that holds the files of scripts that rows name, such as ``init/words.sh``.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "shell"
    client_settings = ("max_turns", "incomplete_penalty", "system_prompt")
    secrets = ("match", "reference")

    def __init__(
        self,
        data: str | dict[str, str] | None = None,
        max_turns: PositiveInt = 8,
        incomplete_penalty: UnitInterval = 0.0,
        sandbox: Sandbox = Sandbox(minimum="namespaces"),  # noqa: B008 (frozen)
        system_prompt: str = "",
        scripts: str | None = None,
    ) -> None:
        if sandbox.minimum != "namespaces":
            raise ConfigurationError(
                f"shell: sandbox.minimum is {sandbox.minimum!r}; the shell's system needs 'namespaces'"
            )
        self.max_turns, self.incomplete_penalty = max_turns, incomplete_penalty
        self.sandbox, self.system_prompt = sandbox, system_prompt
        self._task_data = partial(task_data, scripts=scripts)
        self._tasks = DataTasks(self.name, data, ROW_FORM)

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return the three tools."""
        return TOOLS

    def tasks(self, split: str) -> TaskSource:
        """Return generated tasks without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: a row is malformed.
            ConfigurationError: the split is unknown or empty, or this machine has no namespaces.
        """
        _ = self.sandbox.isolation  # a machine that cannot run the tasks says so at the start
        return self._tasks.source(
            split, ("description", "evaluation"), self._task_data, json.dumps, generate_data, "description"
        )

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the reference's output as the answer, after the reference itself where a change is asked for."""
        data = task.data
        if data["match"] is not None:
            if "regex" in data["match"]:
                return None
            replies = [written_call("answer_action", answer=str(data["match"]["answer"]))]
        elif data["checks"][0] is None:
            outputs = {self._expected_of(data) for _ in range(3)}
            if len(outputs) > 1:
                return None  # a random set-up: the right answer is known within an episode only
            replies = [written_call("answer_action", answer=outputs.pop().strip())]
        elif data["reference"]:
            printed = self._expected_of(data).strip()
            last = written_call("answer_action", answer=printed) if printed else written_call("finish_action")
            replies = [written_call("bash_action", script=data["reference"]), last]
        else:
            return None
        return {self.agents[0]: replies}

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the rewards without an end and of a right answer; see :meth:`Environment.bounds`."""
        return -self.incomplete_penalty, SOLVED

    def begin(self, task: Task) -> Sequence[Message]:
        """Return the question; see :meth:`SingleAgentEnvironment.begin`.

        Raises:
            SandboxError: a script that sets the system up failed, or the reference solution was ended.
        """
        self.close()
        self._task, self._turns = task, 0
        self._given: str | None = None
        self._cell, self._expected = self._system(task.data)
        return opening(task.data["description"], self.system_prompt)

    def reply(self, message: Message) -> Outcome:
        """Run the scripts of one reply, or judge its answer; see :meth:`SingleAgentEnvironment.reply`."""
        self._turns += 1
        self._deadline = time.monotonic() + self.sandbox.wall_seconds
        answers: list[Message] = []
        for answer, _ in answer_calls(requested_calls(message), TOOLS, _HOW, self._call_tool, fault=""):
            if self._given is not None:
                return self._judge(self._given)
            answers.append(answer)
        if self._turns == self.max_turns:
            self.close()
            parts = {"solved": 0.0, "incomplete": -self.incomplete_penalty}
            return Outcome(parts, stop_reason="max_turns", truncated=True, success=False)
        return Outcome({"solved": 0.0}, observation=answers or [Message("user", _HOW)])

    def _call_tool(self, call: ToolCall) -> str:
        """Run a script, or keep the final answer."""
        if call.name == "bash_action":
            return self._run(call.arguments["script"])
        self._given = call.arguments.get("answer", "")
        return ""

    def _run(self, script: str) -> str:
        if self._cell is None:
            return "[the system was ended]"
        if time.monotonic() > self._deadline:
            return "[not run: the scripts before it took too long]"
        done = self._script(self._cell, script)
        if self._cell.ending is None:
            return told(done, limit=SHOWN_CHARACTERS)
        self.close()
        return told(done, "The system is gone.", SHOWN_CHARACTERS)

    def _judge(self, answer: str) -> Outcome:
        data = self._task.data
        rule = data["match"]
        right = self._passes(answer) if rule is None else matches(answer, rule, self.sandbox)
        self.close()
        return Outcome({"solved": SOLVED * right}, stop_reason="answered", success=right)

    def _passes(self, answer: str) -> bool:
        """Return whether every check holds; each one receives the answer and the outputs of those before it."""
        values = [answer]
        if self._cell is not None:  # else a background process reads the expected output, and provides it
            self.sandbox.execute(self._cell, {"operation": "stop"})
        for check in self._task.data["checks"]:
            if check is None:
                values.append(self._expected)
            elif isinstance(check, str):
                if not COMPARISONS[check](*values[:2]):
                    return False
            elif self._cell is None:
                return False
            else:
                done = self._run_check(self._cell, check, values)
                if done.status != 0:
                    return False
                values.append(done.output)
        return True

    def _run_check(self, cell: Cell, check: Mapping[str, str], values: Sequence[str]) -> Execution:
        """Run a check program in the agent's system."""
        name = ["--"] if check["language"] == "bash" else []
        words = [shlex.quote(word) for word in (check["code"], *name, *values)]
        program, options = _CHECKERS[check["language"]]
        found = f'"$(PATH={MACHINE_PATH} type -P {program})"'  # nothing, which fails, where the machine has none
        return self._script(cell, f"PATH={MACHINE_PATH}:$PATH {found} {options} {' '.join(words)} {_NO_ERRORS}")

    def _expected_of(self, data: Mapping[str, Any], original: Cell | None = None) -> str:
        """Return the reference's output, without errors, on its own system, or on a copy of another one."""
        with self.sandbox.open(shell=True) as cell:
            # On a copy too, for its background processes.
            self._set_up(cell, data["init"], "" if original is None else _SILENT)
            if original is not None and not self.sandbox.copy_files(original, cell):  # for its random draws
                logger.warning(
                    "shell: the files of %r are too large to be copied; no answer to a random set-up is right",
                    data["description"][:200],
                )
            self._set_up(cell, data["start"], _SILENT)
            # In place of the shell around it, so that it counts as many processes as the same script of the agent.
            done = self._script(cell, f"exec bash -c {shlex.quote(data['reference'])} {_NO_ERRORS}")
        if done.ending is not None:
            raise SandboxError(f"the reference solution of {data['description'][:200]!r} was ended ({done.ending})")
        return done.output

    def _system(self, data: Mapping[str, Any]) -> tuple[Cell, str]:
        """Return a fresh system that the task's scripts have set up, and the reference's output on a copy of it."""
        with ExitStack() as stack:
            cell = stack.enter_context(self.sandbox.open(shell=True))
            self._set_up(cell, data["init"])
            expected = self._expected_of(data, cell) if None in data["checks"] else ""
            self._set_up(cell, data["start"])
            cell.output()
            stack.pop_all()
        return cell, expected

    def _set_up(self, cell: Cell, script: str, first: str = "") -> None:
        if not script:
            return
        done = self._script(cell, first + script)
        if done.ending is not None or done.status:
            how = f"was ended ({done.ending})" if done.ending else f"left with status {done.status}"
            raise SandboxError(
                f"a script that sets the system up {how}: {script[:200]!r}; it printed {done.output[-200:]!r}"
            )

    def _script(self, cell: Cell, script: str) -> Execution:
        with running():
            return self.sandbox.script(cell, script)
