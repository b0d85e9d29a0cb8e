"""Questions that are answered with tools: a calculator, files, a search, a server's tools, or tools of one's own."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from mrlm_environments.answers import read_answer
from mrlm_environments.data_tasks import DataTasks, opening
from mrlm_environments.toolbox.files import FileSystem
from mrlm_environments.toolbox.search import WebSearch
from mrlm_environments.toolbox.toolbox import Toolbox
from mrlm_environments.tools.problems import KINDS, REQUIRED_TOOLS, Kind, data_problem, generate_problem
from mrlm_pl.answers.numbers import equal_answers, number_value
from mrlm_pl.environment import Message, Outcome, SingleAgentEnvironment, Task, TaskSource, ToolSchema
from mrlm_pl.environment.tools import Tool, ToolError, ToolSet, stated_answer
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import PositiveInt, between, some_of

CORRECT, TOOLS, SPEED = 0.5, 0.3, 0.2
DEFAULT_TOOLS = ("calculator", "file_system", "web_search")

NUDGE = "Call a tool, or write the answer as <answer>...</answer>."
_CALLS = re.compile(r"<tool_call>.*?(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


class ToolEnvironment(SingleAgentEnvironment):
    """A question, tools to answer it with, and ``<answer>`` to end.

    The last decision earns 0.5 for a right answer, 0.3 times the share of the required tools that were called
    successfully, and, for a right answer, 0.2 (1 - t/T), where t is the number of turns before the answer and T is
    ``max_turns``. Without required tools their share is 1 with a right answer and 0 with a wrong one. The maximum is 1,
    for an answer in the first turn, or 0.5 + 0.3 + 0.2 (1 - 1/T) if tools are required. Calls in a reply that answers
    are not made.

    A reply before the last one earns ``shaping`` times the increase of the share, and the last decision gives all of it
    back: the sum over an episode is the final reward alone, however often tools are called.

    Numbers are compared by value, with or without a unit or a sentence around them, other answers as text without
    regard to case, spacing and a full stop at the end. If a task names ``expected_files``, the answer is right only
    if the files hold their texts.

    Args:
        tools: tools by name (``calculator``, ``file_system``, ``web_search``, ``python_repl``, ``shell``), functions
            (see :class:`mrlm_environments.toolbox.functions.FunctionTool`), or instances of
            :class:`mrlm_pl.environment.tools.Tool` or :class:`mrlm_pl.environment.tools.ToolSet`; None is the first
            three names.
        kinds: kinds of generated problems; None is all that the tools can solve.
        data: rows that replace the generated problems, with ``question``, ``answer`` and, optionally,
            ``required_tools`` (a list of names) and ``files`` (contents by path): a file or a hub name, or a mapping
            from splits to these; see :func:`mrlm_pl.environment.rows.read_split`.
        max_turns: replies that the agent may give.
        shaping: total reward for the required tools on the way, from 0 to 0.3.
        max_output: characters of a tool's answer that the agent sees.
        system_prompt: system message before the question.

    Raises:
        ConfigurationError: a value is out of its range, a tool has no name or two have the same one, or the tools can
            solve none of the kinds.
    """

    name = "tools"
    client_settings = ("kinds", "max_turns", "shaping", "system_prompt")
    secrets = ("answer", "expected_files", "gold")

    def __init__(
        self,
        tools: list[Tool | ToolSet | Callable[..., Any] | str] | None = None,
        kinds: list[Kind] | None = None,
        data: str | dict[str, str] | None = None,
        max_turns: PositiveInt = 8,
        shaping: Annotated[float, between(0, TOOLS)] = 0.1,
        max_output: PositiveInt = 2000,
        system_prompt: str = "",
    ) -> None:
        self.toolbox = Toolbox(tools if tools is not None else DEFAULT_TOOLS, max_output)
        self.kinds = _solvable_kinds(self.toolbox.items, kinds, data is not None)
        self.max_turns, self.shaping, self.system_prompt = max_turns, shaping, system_prompt
        self._tasks = DataTasks(self.name, data)

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return the schemas of all tools; a server is asked for its own.

        Raises:
            ConfigurationError: two tools have the same name.
        """
        return self.toolbox.schemas()

    def tasks(self, split: str) -> TaskSource:
        """Return generated problems without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: a row lacks a field, or has a wrong one.
            ConfigurationError: the split is unknown or empty.
        """
        read = partial(data_problem, tools=self.toolbox.named())
        generate = partial(generate_problem, kinds=self.kinds)
        return self._tasks.source(split, ("question", "answer"), read, generate=generate, key="question")

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the calls in one reply, then the answer; None for rows that require tools, or with too few turns."""
        replies = task.data.get("gold")
        return None if replies is None or len(replies) > self.max_turns else {self.agents[0]: replies}

    def bounds(self, task: Task) -> tuple[float, float] | None:
        """Return 0 and the reward of a right answer after a turn of required calls; see :meth:`Environment.bounds`."""
        if not task.data.get("required_tools"):
            return 0.0, CORRECT + TOOLS + SPEED
        return (0.0, CORRECT + TOOLS + SPEED * (1 - 1 / self.max_turns)) if self.max_turns > 1 else None

    def begin(self, task: Task) -> Sequence[Message]:
        """Return the question; see :meth:`SingleAgentEnvironment.begin`."""
        self.toolbox.open(task)
        self._task, self._turn = task, 0
        self._required = frozenset(task.data.get("required_tools") or ())
        return opening(task.data["question"], self.system_prompt)

    def reply(self, message: Message) -> Outcome:
        """Make the calls of one reply, or judge its answer; see :meth:`SingleAgentEnvironment.reply`."""
        self._turn += 1
        answer = stated_answer(_CALLS.sub(" ", message.final_text))
        if answer is not None:
            return self._end(self._is_right(answer), self._share(), "answered")
        earned, answers = self._share(), self.toolbox.answer(message)
        if self._turn == self.max_turns:
            return self._end(False, earned, "max_turns")
        paid = {"shaping": self.shaping * (self._share() - earned)}
        return Outcome(paid, observation=answers or NUDGE, metrics={**self.toolbox.counts})

    def close(self) -> None:
        """Close all tools, even if one cannot be closed."""
        self.toolbox.end("close")

    def _is_right(self, answer: str) -> bool:
        files: Mapping[str, str] = self._task.data.get("expected_files") or {}
        question, expected = self._task.data["question"], self._task.data["answer"]
        if (value := number_value(expected)) is not None:  # computing the value of an operation is the task
            answer = read_answer(f"<answer>{answer}</answer>", "math", question, operations=False) or ""
            if value.denominator == 1 and re.search("/|frac", answer):
                return False
        return same_answer(answer, expected) and all(self._holds(*file) for file in files.items())

    def _end(self, correct: bool, earned: float, reason: str) -> Outcome:
        """Return the final reward; ``earned`` is the share of tools that earlier replies were rewarded for."""
        share = self._share() if self._required else float(correct)
        self.toolbox.end("finish")
        return Outcome(
            {
                "correct": CORRECT * correct,
                "tools": TOOLS * share,
                "speed": SPEED * (1 - (self._turn - 1) / self.max_turns) * correct,
                "shaping": -self.shaping * earned,
            },
            stop_reason=reason,
            truncated=reason == "max_turns",
            success=correct,
            metrics={**self.toolbox.counts},
        )

    def _share(self) -> float:
        """Return the share of the required tools that were called with success; 0 when none is required."""
        return len(self._required & self.toolbox.used) / len(self._required) if self._required else 0.0

    def _holds(self, path: str, text: str) -> bool:
        files = self.toolbox.available.get(FileSystem.schema.name)
        try:
            return isinstance(files, FileSystem) and same_answer(files.read(path), text)
        except ToolError:
            return False


def same_answer(reply: str, expected: str) -> bool:
    """Return whether two answers are the same: by value where the expected one is a number, else as normalized text.

    >>> same_answer("1,234.0", "1234"), same_answer(" The  EIFFEL tower.", "the Eiffel Tower"), same_answer("4, 5", "5")
    (True, True, False)
    """
    if number_value(expected) is not None:
        return equal_answers(reply.strip().removesuffix("."), expected)
    return _normalize(reply) == _normalize(expected)


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).removesuffix(".")


def _solvable_kinds(toolbox: Sequence[ToolSet], kinds: Sequence[Kind] | None, has_data: bool) -> tuple[Kind, ...]:
    """Return the kinds to generate: those that are asked for, else all that the tools can solve."""
    some_of(KINDS, "tools: ", kinds=kinds)
    if has_data:
        if kinds:
            raise ConfigurationError("tools: kinds and data are both given; give one of them")
        return ()
    # The generated lookups ask for facts of the embedded corpus, and sums are read back from the files.
    usable = {
        item.schema.name
        for item in toolbox
        if isinstance(item, Tool)
        and (item.schema.name != "web_search" or (isinstance(item, WebSearch) and item.searches_embedded_corpus))
        and (item.schema.name != "file_system" or isinstance(item, FileSystem))
    }
    solvable = [kind for kind in KINDS if usable.issuperset(REQUIRED_TOOLS[kind])]
    for kind in kinds or ():
        if kind not in solvable:
            raise ConfigurationError(
                f"tools: problems of kind {kind!r} need the tools {', '.join(REQUIRED_TOOLS[kind])} (the search with "
                "the embedded corpus); add them to `tools`"
            )
    if not solvable:
        raise ConfigurationError(f"tools: they solve none of the kinds {', '.join(KINDS)}; give `data`")
    return tuple(kinds or solvable)
