"""Programming tasks, graded by hidden tests in a sandbox: HumanEval, MBPP, own tasks, or generated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from mrlm_environments.code.generated import KINDS, MAX_DIFFICULTY, CodeKind, generate_data
from mrlm_environments.code.rows import ROW_FORM, identity, program_of, task_data, tests_of
from mrlm_environments.data_tasks import DataTasks, opening
from mrlm_pl.environment import Message, Outcome, SingleAgentEnvironment, Task, TaskSource
from mrlm_pl.environment.tools import clip
from mrlm_pl.sandbox import STRENGTH, Grade, Sandbox, grade
from mrlm_pl.settings import PositiveInt, some_of, whole_range

ALL_PASSED, INVALID = 1.0, -0.5
MAX_PROGRAM_CHARACTERS = 100_000
MAX_FAULT_CHARACTERS = 500


class CodeEnvironment(SingleAgentEnvironment):
    """One programming task, one program as answer.

    The reward is the share of hidden tests that pass, plus 1.0 if all do; 0 for a program that ends its process while
    it is tested, whatever it answered before; -0.5 for one that is missing, does not parse, fails when it is loaded or
    takes too long: from -0.5 to 2.0. A further attempt earns the change, so that the return is the score of the last
    program. The program is the last fenced block of the reply that defines the function, else the last fenced block,
    else the whole reply.

    It runs in the sandbox, and the tests in another process, so that it can only answer calls; see
    docs/environments/sandbox.md.

    Args:
        data: rows with the fields of HumanEval, MBPP or own tasks that replace the generated tasks: a file or a hub
            name, or a mapping from splits to these; see docs/environments/code.md.
        difficulty: lowest and highest difficulty of generated tasks, from 1 to 3; each is equally likely.
        kinds: kinds of generated tasks; None is all of them.
        max_attempts: programs that the agent may give; after a failure it learns how many tests passed, or the error
            with which its program was loaded, but nothing of the tests.
        sandbox: sandbox that runs the programs.
        instruction: text after the task, on its own line.
        system_prompt: system message before the task.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "code"
    client_settings = ("difficulty", "kinds", "max_attempts", "instruction", "system_prompt")

    def __init__(
        self,
        data: str | dict[str, str] | None = None,
        difficulty: tuple[int, int] = (1, 3),
        kinds: list[CodeKind] | None = None,
        max_attempts: PositiveInt = 1,
        sandbox: Sandbox = Sandbox(),  # noqa: B008 (frozen)
        instruction: str = "",
        system_prompt: str = "",
    ) -> None:
        self.difficulty = whole_range(1, MAX_DIFFICULTY, "code: ", difficulty=difficulty)
        self.kinds = some_of(KINDS, "code: ", kinds=kinds)
        self.max_attempts, self.sandbox = max_attempts, sandbox
        self.instruction, self.system_prompt = instruction, system_prompt
        self._tasks = DataTasks(self.name, data, ROW_FORM)

    def tasks(self, split: str) -> TaskSource:
        """Return generated tasks without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: every row is none of the known formats.
            ConfigurationError: the split is unknown or empty, or the machine does not offer ``sandbox.minimum``.
        """
        _ = self.sandbox.isolation  # a machine that cannot run programs so says it at the start
        read = partial(task_data, packages=self.sandbox.packages)
        generate = partial(generate_data, kinds=self.kinds, difficulty=self.difficulty)
        return self._tasks.source(split, (), read, identity, generate, "prompt")

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the task's own solution, where it has one."""
        solution = task.data["solution"]
        return None if solution is None else {self.agents[0]: [f"```python\n{solution}\n```"]}

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return 0 and the reward of a program that passes all tests; see :meth:`Environment.bounds`."""
        return 0.0, 1.0 + ALL_PASSED

    def begin(self, task: Task) -> Sequence[Message]:
        """Return the task's text; see :meth:`SingleAgentEnvironment.begin`."""
        self._task, self._attempts, self._rewarded = task, 0, dict[str, float]()
        return opening(task.data["prompt"], self.system_prompt, self.instruction)

    def reply(self, message: Message) -> Outcome:
        """Grade one program; see :meth:`SingleAgentEnvironment.reply`.

        Raises:
            SandboxError: the sandbox is broken, which is not the program's fault.
        """
        self._attempts += 1
        data = self._task.data
        program = program_of(message.final_text[:MAX_PROGRAM_CHARACTERS], data["given"], data["entry"])
        result = grade(self.sandbox, program, tests_of(data))
        valid = result.loaded and result.ending != "time"
        components = {
            "tests": result.counted,
            "all_passed": ALL_PASSED * result.solved,
            "invalid": 0.0 if valid else INVALID,
        }
        change = {name: value - self._rewarded.get(name, 0.0) for name, value in components.items()}
        self._rewarded = components
        last = result.solved or self._attempts == self.max_attempts
        return Outcome(
            change,
            observation=None if last else f"{feedback_on(result)} Try again.",
            stop_reason="answered" if valid else "invalid_program",
            success=result.solved,
            metrics={"valid": float(valid), "isolation": float(STRENGTH[result.isolation])},
        )


def feedback_on(result: Grade) -> str:
    """Return the feedback on a program that did not solve its task."""
    if result.ending == "time":
        return "The program took too long."
    if not result.loaded:
        return f"The program could not be loaded: {clip(result.fault or 'it ended', MAX_FAULT_CHARACTERS)}"
    if result.ending is not None:
        return "The program ended its process while it was tested."
    return f"{result.passed} of {result.run} tests passed."
