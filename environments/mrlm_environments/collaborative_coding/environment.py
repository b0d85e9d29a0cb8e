"""Two agents write one program: a helper ``aux`` and the function that uses it. HumanEval, MBPP or generated tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from mrlm_environments.code.environment import feedback_on
from mrlm_environments.code.generated import KINDS, MAX_DIFFICULTY, CodeKind, generate_data
from mrlm_environments.code.rows import COMPLETE, ROW_FORM, entry_of, identity, program_of, task_data, tests_of
from mrlm_environments.collaborative_coding.aux_use import AUX, AuxUse, aux_use, compiles, defines, without
from mrlm_environments.collaborative_coding.gold import split_solution
from mrlm_environments.collaborative_coding.revealed import hold_out
from mrlm_environments.data_tasks import DataTasks, opening
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.environment.tools import clip
from mrlm_pl.errors import DataError
from mrlm_pl.sandbox import STRENGTH, Grade, Sandbox, grade
from mrlm_pl.settings import NonNegativeInt, between, some_of, whole_range

Feedback = Literal["plain", "passed", "level_passed", "level_feedback"]
HELPER, MAIN = "helper", "main"
HELPER_DEFINED, MAIN_DEFINED, PARSES, CALLS_AUX, NOT_THIN, IGNORES_AUX = 0.4, 0.6, 0.5, 0.5, 1.0, -0.5
MAXIMUM = 4.0
MAX_REPLY_CHARACTERS = 50_000


@dataclass(frozen=True)
class _Judgement:
    """The reward of two programs in named parts, and its evidence."""

    components: Mapping[str, float]
    use: AuxUse
    found: Grade
    program: str

    @property
    def total(self) -> float:
        return math.fsum(self.components.values())


class CollaborativeCodingEnvironment(Environment):
    """One program by two agents at the same time: ``helper`` writes ``aux``, ``main`` the function that uses it.

    Both earn 0.4 for an ``aux`` that is defined with a return, and 0.6 for a main function that is (else nothing more);
    0.5 if the whole program parses (else nothing more); the share of hidden tests that pass; and, if any passes and the
    main function calls ``aux``, 0.5, 1 if it is not a thin wrapper, and -0.5 if a call ignores the value: 4 at most. A
    program that ends its process while it is tested, or takes too long, passes no test.

    With two turns, the agents see how their programs did and write them again. The second turn's reward is the change,
    so that an episode's return is the score of its last programs; full marks end it after the first turn.

    Args:
        data: rows with the fields of HumanEval, CoopHumanEval, MBPP or own tasks that replace the generated tasks: a
            file or a hub name, or a mapping from splits to these; see docs/environments/collaborative_coding.md.
        difficulty: lowest and highest difficulty of generated tasks, from 1 to 3; 3 has two steps.
        kinds: kinds of generated tasks; None is all of them.
        turns: number of turns, 1 or 2.
        feedback: feedback between turns: ``plain`` gives none; ``passed`` says whether all levels passed;
            ``level_passed`` lists each level with yes or no; ``level_feedback`` with details and failed assertions,
            which are not graded.
        revealed_tests: assertions that ``level_feedback`` may show; they are held out of the graded ones.
        sandbox: sandbox that runs the programs.
        system_prompt: system message before the task.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "collaborative_coding"
    client_settings = ("difficulty", "kinds", "turns", "feedback", "revealed_tests", "system_prompt")
    agents = (HELPER, MAIN)

    def __init__(
        self,
        data: str | dict[str, str] | None = None,
        difficulty: tuple[int, int] = (3, 3),
        kinds: list[CodeKind] | None = None,
        turns: Annotated[int, between(1, 2)] = 1,
        feedback: Feedback = "plain",
        revealed_tests: NonNegativeInt = 2,
        sandbox: Sandbox = Sandbox(),  # noqa: B008 (frozen)
        system_prompt: str = "",
    ) -> None:
        self.difficulty = whole_range(1, MAX_DIFFICULTY, "collaborative_coding: ", difficulty=difficulty)
        self.kinds = some_of(KINDS, "collaborative_coding: ", kinds=kinds)
        self.turns, self.feedback, self.revealed_tests = turns, feedback, revealed_tests
        self.sandbox, self.system_prompt = sandbox, system_prompt
        self._tasks = DataTasks(self.name, data, ROW_FORM)

    def tasks(self, split: str) -> TaskSource:
        """Return generated tasks without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: every row is none of the known formats or asks for a function of the helper's name.
            ConfigurationError: the split is unknown or empty, or the machine does not offer ``sandbox.minimum``.
        """
        _ = self.sandbox.isolation  # a machine that cannot run programs so says it at the start
        read = partial(_shared_task, packages=self.sandbox.packages)
        generate = partial(generate_data, kinds=self.kinds, difficulty=self.difficulty)
        return self._tasks.source(split, (), read, identity, generate, "prompt")

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the programs that ``split_solution`` makes of the task's own solution, where it has one."""
        if task.data["solution"] is None:
            return None
        parts = split_solution(task.data["solution"], entry_of(task.data))
        return {agent: [f"```python\n{part}\n```"] for agent, part in zip(self.agents, parts, strict=True)}

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return 0 and full marks for both; see :meth:`Environment.bounds`."""
        return 0.0, MAXIMUM * len(self.agents)

    def reset(self, task: Task) -> Observations:
        """Return the task and its own part for each of the two; see :meth:`Environment.reset`."""
        self._entry, self._turn, self._paid = entry_of(task.data), 0, dict[str, float]()
        reveals = self.turns == 2 and self.feedback == "level_feedback"
        self._data, self._revealed = hold_out(task.data, self.revealed_tests if reveals else 0)
        text = task.data["prompt"].removeprefix(COMPLETE)
        parts = {
            HELPER: f"Write only {AUX}, a helper function that {self._entry} can call. "
            f"Another agent writes {self._entry} at the same time.",
            MAIN: f"Write only {self._entry}. It must call {AUX} and work on what that returns: "
            f"a helper function that another agent writes at the same time.",
        }
        return {agent: opening(text, self.system_prompt, part) for agent, part in parts.items()}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Grade the two programs together; see :meth:`Environment.step`.

        Raises:
            SandboxError: the sandbox is broken, which is not the program's fault.
        """
        self._turn += 1
        judged = self._judge(*(actions[agent].final_text[:MAX_REPLY_CHARACTERS] for agent in self.agents))
        done = self._turn == self.turns or judged.total == MAXIMUM
        change = {name: value - self._paid.get(name, 0.0) for name, value in judged.components.items()}
        self._paid = dict(judged.components)
        observations: Observations = {}
        if not done:
            observations = {agent: [Message("user", self._told(agent, judged))] for agent in self.agents}
        return Step(
            observations=observations,
            components={agent: dict(change) for agent in self.agents},
            done=done,
            stop_reason="answered" if done else "",
            success=judged.found.solved if done else None,
            metrics={"passed": judged.found.counted, "isolation": float(STRENGTH[judged.found.isolation])},
        )

    def _judge(self, helper_reply: str, main_reply: str) -> _Judgement:
        data, entry = self._data, self._entry
        # Neither takes the other's part.
        helper = without(program_of(helper_reply, "", AUX), entry)
        main = without(program_of(main_reply, data["given"], entry), AUX)
        program = f"{helper.rstrip()}\n\n\n{main}"
        use, main_defined = aux_use(main, entry), defines(main, entry)
        parses = main_defined and compiles(program)
        found = grade(self.sandbox, program if parses else None, tests_of(data))
        uses = found.counted > 0 and use.calls
        parts = {
            "helper_defined": HELPER_DEFINED * defines(helper, AUX),
            "main_defined": MAIN_DEFINED * main_defined,
            "parses": PARSES * parses,
            "tests": found.counted,
            "calls_aux": CALLS_AUX * uses,
            "not_thin": NOT_THIN * (uses and not use.thin),
            "ignores_aux": IGNORES_AUX if uses and use.ignores else 0.0,
        }
        return _Judgement(parts, use, found, program)

    def _told(self, agent: str, judged: _Judgement) -> str:
        """Return an agent's observation after the first turn."""
        mine = AUX if agent == HELPER else self._entry
        again = f"Write {mine} again, better, in a fenced block."
        if self.feedback == "plain":
            return again
        if self.feedback == "passed":
            return f"{'All' if judged.total == MAXIMUM else 'Not all'} levels passed. {again}"
        return "\n".join([*self._levels(judged, details=self.feedback == "level_feedback"), again])

    def _levels(self, judged: _Judgement, *, details: bool) -> list[str]:
        found, parts = judged.found, judged.components
        levels = {
            f"{AUX} is defined with a return": bool(parts["helper_defined"]),
            f"{self._entry} is defined with a return": bool(parts["main_defined"]),
            "the program parses": bool(parts["parses"]),
            "all tests pass": judged.found.solved,
            f"{self._entry} calls {AUX}": judged.use.calls,
            f"{self._entry} is more than a thin wrapper of {AUX}": judged.use.calls and not judged.use.thin,
            f"the value of {AUX} is used": judged.use.calls and not judged.use.ignores,
        }
        lines = [f"- {level}: {'yes' if passed else 'no'}" for level, passed in levels.items()]
        if details and parts["parses"]:
            lines.append(feedback_on(found))
            for test in self._revealed:
                alone = tests_of({**self._data, "tests": [test], "names": [self._entry]})
                if not grade(self.sandbox, judged.program, alone).solved:
                    lines.append(f"Failed: {clip(test, 500)}")
        return lines


def _shared_task(row: Mapping[str, Any], packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return a task's data, of a row that does not ask for a function of the helper's name."""
    data = task_data(row, packages)
    if entry_of(data) == AUX:
        raise DataError(f"it asks for a function {AUX!r}, the helper's name; rename it")
    return data
