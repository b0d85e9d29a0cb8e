"""A class that several agents complete together, each a part of its methods: ClassEval, or generated classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mrlm_environments.class_completion.generated import MAX_METHODS, generate_class
from mrlm_environments.class_completion.merge import merge, read_reply, shares
from mrlm_environments.class_completion.rows import FIELDS, ROW_FORM, class_task, solution_parts, tests_of
from mrlm_environments.code.syntax import BROKEN
from mrlm_environments.data_tasks import DataTasks, ending, opening
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.sandbox import STRENGTH, Sandbox, grade
from mrlm_pl.settings import PositiveInt, whole_range

METHODS, TESTS = 2.0, 4.0
MAX_REPLY_CHARACTERS = 50_000


class ClassCompletionEnvironment(Environment):
    """The methods of a class are divided over agents, who write them at the same time, and merged.

    Every agent earns 2 times the share of methods that at least one wrote, plus 4 times the share of test methods that
    pass, minus the share of methods that more than one agent defined: from -1 to 6, and 0 if the merged file does not
    compile. A program that ends its process while it is tested, or takes too long, passes no test.

    Agents that have no method, as the class has fewer methods than there are agents, do not act.

    Args:
        num_agents: agents ``agent_0``, ``agent_1`` and so on.
        data: rows with ClassEval's fields that replace the generated classes: a file or a hub name, or a mapping from
            splits to these; see docs/environments/collaborative_coding.md.
        methods: lowest and highest number of methods of generated classes, from 1 to 8.
        sandbox: sandbox that runs the programs.
        system_prompt: system message before the task.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "class_completion"
    client_settings = ("methods", "system_prompt")

    def __init__(
        self,
        num_agents: PositiveInt = 2,
        data: str | dict[str, str] | None = None,
        methods: tuple[int, int] = (2, 4),
        sandbox: Sandbox = Sandbox(),  # noqa: B008 (frozen)
        system_prompt: str = "",
    ) -> None:
        self.methods = whole_range(1, MAX_METHODS, "class_completion: ", methods=methods)
        self.agents = tuple(f"agent_{number}" for number in range(num_agents))
        self.sandbox, self.system_prompt = sandbox, system_prompt
        self._tasks = DataTasks(self.name, data, ROW_FORM)

    def tasks(self, split: str) -> TaskSource:
        """Return generated classes without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: no row is a class with tests.
            ConfigurationError: the split is unknown or empty, or the machine does not offer ``sandbox.minimum``.
        """
        _ = self.sandbox.isolation  # a machine that cannot run programs so says it at the start
        read = partial(class_task, packages=self.sandbox.packages)
        generate = partial(generate_class, methods=self.methods)
        return self._tasks.source(split, FIELDS, read, generate=generate, key="skeleton")

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the task's own solution, where it has one, divided as the methods are."""
        if task.data["solution"] is None:
            return None
        parts = self._parts(task)
        sources = solution_parts(task.data, list(parts.values()))
        replies = {agent: [f"```python\n{source}\n```"] for agent, source in zip(parts, sources, strict=True)}
        return {agent: replies.get(agent, [""]) for agent in self.agents}

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return 0 and full marks for all agents that act; see :meth:`Environment.bounds`."""
        return 0.0, (METHODS + TESTS) * len(self._parts(task))

    def reset(self, task: Task) -> Observations:
        """Return the skeleton and its own methods for each agent that has some; see :meth:`Environment.reset`."""
        self._task, parts = task, self._parts(task)
        return {agent: opening(_pose(task.data, methods), self.system_prompt) for agent, methods in parts.items()}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Merge and grade the agents' methods; see :meth:`Environment.step`.

        Raises:
            SandboxError: the sandbox is broken, which is not the program's fault.
        """
        data = self._task.data
        texts = [actions[agent].final_text[:MAX_REPLY_CHARACTERS] for agent in self.agents if agent in actions]
        merged = None
        with suppress(*BROKEN):
            replies = [read_reply(text, data["class"], data["methods"]) for text in texts]
            merged = merge(data["skeleton"], data["class"], data["methods"], replies)
        # A class without a written method cannot pass, and its tests would take the time of real ones.
        result = grade(self.sandbox, merged.source if merged and merged.written else None, tests_of(data))
        total = len(data["methods"])
        written = merged.written if merged else frozenset()
        components = {
            "methods": METHODS * len(written) / total,
            "tests": TESTS * result.counted,
            "overlap": -len(merged.overlapping) / total if merged else 0.0,
        }
        success, isolation = result.solved and len(written) == total, float(STRENGTH[result.isolation])
        metrics = {"compiles": float(merged is not None), "passed": result.counted, "isolation": isolation}
        return ending(actions, components, "answered" if merged else "invalid_program", success, metrics)

    def _parts(self, task: Task) -> dict[str, list[str]]:
        """Return the methods of each agent that acts."""
        return dict(zip(self.agents, shares(task.data["methods"], len(self.agents)), strict=False))


def _pose(data: Mapping[str, Any], methods: Sequence[str]) -> str:
    other_methods = [method for method in data["methods"] if method not in methods]
    others_note = f" Others write {', '.join(other_methods)} at the same time." if other_methods else ""
    return (
        f"```python\n{data['skeleton'].strip()}\n```\nOf this class, write {', '.join(methods)}.{others_note} "
        "Answer with these methods only, in a fenced block."
    )
