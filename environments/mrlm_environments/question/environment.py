"""Rows of data and reward functions as an environment: each agent replies once, or calls tools before."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from string import Formatter
from typing import Any, SupportsFloat

from mrlm_environments.data_tasks import DataTasks, opening
from mrlm_environments.toolbox.toolbox import Toolbox
from mrlm_pl.concurrency.calls import call_function, together
from mrlm_pl.concurrency.event_loop import shared_loop
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource, ToolSchema
from mrlm_pl.environment.tools import ToolSet, requested_calls
from mrlm_pl.errors import ConfigurationError, DataError, EnvironmentContractError, NonFiniteError
from mrlm_pl.grouping import grouped
from mrlm_pl.settings import PositiveInt, Settings


@dataclass(frozen=True)
class Reward(Settings):
    """A reward function and its weight.

    Copies of an environment share the function, so one that holds state, such as a judge's client, is thread-safe.

    Args:
        call: a function of the replies and the row, in a configuration its import path, ``./my_file.py:my_function`` or
            its name in a plugin.
        weight: factor of all values that it returns; those of weight 0 are metrics instead, means over the agents.
        name: name of its component; empty is the function's name.
    """

    call: Callable[..., Any]
    weight: float = 1.0
    name: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Reward:
        return self  # by its own method: with another base class the parser library writes it as a class with a path


class QuestionEnvironment(Environment):
    """Poses each row of a data set to all agents simultaneously, and rewards their replies with functions.

    A reward function is called with the reply and the row: the text of one agent's reply, or a mapping from agents to
    texts, and a copy of the row. It may be ``async``. It returns a number, which becomes a component of the
    reward, or a mapping of named components; all agents earn it. To reward agents apart it returns a mapping from
    agents to these; agents that are left out earn 0. A function that raises fails the episode, which is played again
    and then counted as failed; NaN and infinite values stop the run.

    With tools, an agent's calls are answered until it replies without one; that reply is rewarded. A function with a
    parameter ``chat`` also gets the messages from the first reply on, in OpenAI's form; with several agents a mapping
    from agents to these.

    Args:
        data: rows, or a file (``.jsonl``, ``.json``, ``.csv``, ``.parquet``) or a hub name, or a mapping from splits to
            these; see :func:`mrlm_pl.environment.rows.read_split`.
        rewards: reward functions, or :class:`Reward` with a weight and a name.
        prompt: user message, with fields of the row in braces. A field alone may also hold a list of messages
            (``{"role": ..., "content": ...}``).
        agents: agents that reply.
        prompts: prompts of agents whose prompt differs.
        system_prompt: system message before the prompt; empty is none.
        system_prompts: system messages of agents whose system message differs.
        gold: reply that earns the most, with fields of the row in braces, for ``check-env``; empty is unknown.
        success_at: the episode succeeds if the agents' mean reward is at least this; None: success is not known.
        tools: tools that the agents share, as those of :class:`~mrlm_environments.tools.environment.ToolEnvironment`.
        max_turns: replies of an agent with tools; the last one is rewarded even if it calls one.

    Raises:
        ConfigurationError: ``agents`` is a text or empty, there is no reward, two rewards have one name, a function
            does not take a reply and a row, a prompt is malformed or of an unknown agent, a weight is not finite,
            ``max_turns`` is below 1, or a tool has no name or two have the same one.
    """

    name = "question"
    forks = True
    secrets = (*Environment.secrets, "golden_answers")
    needs_reward = True
    """True if there must be a reward function."""

    def __init__(
        self,
        data: dict[str, Any] | list[dict[str, Any]] | str | os.PathLike[str],  # first: a path takes a mapping as text
        rewards: list[Reward | Callable[..., Any]],
        prompt: str = "{prompt}",
        agents: Sequence[str] = ("agent",),
        prompts: dict[str, str] | None = None,
        system_prompt: str = "",
        system_prompts: dict[str, str] | None = None,
        gold: str = "",
        success_at: float | None = None,
        tools: list[ToolSet | Callable[..., Any] | str] | None = None,
        max_turns: PositiveInt = 8,
    ) -> None:
        if isinstance(agents, str):
            raise ConfigurationError(f"{self.name}: agents is {agents!r}; give a list, as in [{agents}]")
        self.agents, self.best, self.success_at = tuple(agents), gold, success_at
        self.rewards = _by_name(self.name, rewards, has_chat=not self.whole_prompts)
        if self.needs_reward and not self.rewards:
            raise ConfigurationError(
                f"{self.name}: rewards is empty; give at least one function of the replies and the row"
            )
        self.prompts = self._of_agents("prompt", prompt, prompts)
        self.system_prompts = self._of_agents("system_prompt", system_prompt, system_prompts)
        self._asked = _fields(self.name, self.prompts.values())
        self._tasks = DataTasks(self.name, os.fspath(data) if isinstance(data, os.PathLike) else data)
        self.toolbox, self.max_turns = Toolbox(tools or ()), max_turns
        self._chats: dict[str, list[Message]] = {}
        if tools:
            self.forks = False  # tools may hold state that cannot be copied, such as a process
        calls = [call for reward in self.rewards.values() for call in (reward.call, type(reward.call).__call__)]
        if type(self) is QuestionEnvironment and any(map(inspect.iscoroutinefunction, calls)):
            self.__class__ = _Awaited  # a plain `step` runs in a thread, an async one on the event loop

    def tasks(self, split: str) -> TaskSource:
        """Return the rows of a split; rows that pose the same are in one; see :meth:`Environment.tasks`.

        Raises:
            DataError: the data cannot be read, or a row lacks a field of a prompt or is not JSON.
            ConfigurationError: the split is unknown or empty.
        """
        self.toolbox.named()  # a tool that cannot be used is an error before the first episode
        fields = sorted({*self._asked, *_fields(self.name, [self.best])})
        return self._tasks.source(split, fields, self._task_data, self._identity)

    def identity(self, task: Task) -> str:
        """Return the row's fields in the prompts as text; see :meth:`Environment.identity`."""
        return self._identity(task.data)

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return the schemas of all tools; see :meth:`Environment.tools`."""
        return self.toolbox.schemas()

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return ``gold`` for all agents; see :meth:`Environment.gold`."""
        return dict.fromkeys(self.agents, (self.best.format_map(task.data),)) if self.best else None

    def reset(self, task: Task) -> Observations:
        """Pose the row; see :meth:`Environment.reset`."""
        self._row = task.data
        self.toolbox.open(task)
        self._chats = {agent: [] for agent in self.agents}
        return self._pose(task.data)

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Answer calls of tools, or reward the replies; see :meth:`Environment.step`."""
        return self._answer(actions) or self._reward()

    def close(self) -> None:
        """Close all tools; see :meth:`Environment.close`."""
        self.toolbox.end("close")

    def _answer(self, actions: Mapping[str, Message]) -> Step | None:
        """Return the answers to the agents' calls; None after the last reply of all."""
        observations: dict[str, list[Message]] = {}
        for agent, message in actions.items():
            chat = self._chats[agent]
            chat.append(message)
            may_call = self.toolbox.available and sum(said.role == "assistant" for said in chat) < self.max_turns
            if may_call and (answers := self.toolbox.answer(message)):
                observations[agent] = answers
                chat += answers
        rewards, counts = dict.fromkeys(actions, 0.0), self._counts()
        return Step(observations, rewards, metrics=counts) if observations else None

    def _counts(self) -> dict[str, float]:
        return {**self.toolbox.counts} if self.toolbox.available else {}

    def _reward(self) -> Step:
        """Return the end of the episode."""
        values: list[Any] = []
        try:
            for name in self.rewards:
                values.append(self._function(name)(*self.arguments(self._replies())))
        except BaseException:
            for value in filter(inspect.iscoroutine, values):
                value.close()
            raise
        if any(map(inspect.isawaitable, values)):  # of a plain function, or in a subclass
            waiting = [value if inspect.isawaitable(value) else asyncio.sleep(0, value) for value in values]
            values = shared_loop().submit_watched(together(waiting)).result()
        self.toolbox.end("finish")
        return self._judge(values)

    def arguments(self, actions: Mapping[str, Message]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a reward function: the replies and a copy of the row."""
        replies = {agent: actions[agent].content for agent in self.agents}
        return (replies if len(replies) > 1 else replies[self.agents[0]]), copy.deepcopy(dict(self._row))

    async def awaited(self, arguments: Callable[[], tuple[Any, ...]]) -> list[Any]:
        """Return the values of the reward functions, which wait concurrently, each with its own arguments."""
        return await together(call_function(self._function(name), *arguments()) for name in self.rewards)

    def _function(self, name: str) -> Callable[..., Any]:
        """Return a reward function, with the conversation if it takes that."""
        call = self.rewards[name].call
        if self.whole_prompts or not _takes_chat(call):
            return call
        said = copy.deepcopy(self._chats)  # a function that changes arguments of a call must not change the record
        chats = {agent: [message.to_chat() for message in chat] for agent, chat in said.items()}
        return partial(call, chat=chats if len(chats) > 1 else chats[self.agents[0]])

    def _replies(self) -> dict[str, Message]:
        """Return the last reply of each agent."""
        return {agent: chat[-1] for agent, chat in self._chats.items()}

    def _of_agents(self, option: str, common: str, own: Mapping[str, str] | None) -> dict[str, str]:
        """Return an option's value for each agent."""
        if not self.agents or len(set(self.agents)) < len(self.agents) or not set(own or ()) <= set(self.agents):
            raise ConfigurationError(
                f"{self.name}: agents is {list(self.agents)} and {option}s names {sorted(own or ())}; give each agent "
                "its own name, and prompts to these"
            )
        return dict.fromkeys(self.agents, common) | dict(own or {})

    def _identity(self, row: Mapping[str, Any]) -> str:
        """Return the row's fields in the prompts as text; all fields where the prompts have none."""
        return json.dumps({name: row[name] for name in self._asked or row}, sort_keys=True)

    def _pose(self, row: Mapping[str, Any]) -> dict[str, list[Message]]:
        """Return each agent's first messages."""
        posed = {}
        for agent, template in self.prompts.items():
            system, chat = self.system_prompts[agent], row.get(template[1:-1])
            if not isinstance(chat, list):
                posed[agent] = opening(template.format_map(row), system)
            elif all(isinstance(message["content"], str) for message in chat):
                given = [Message(message["role"], message["content"]) for message in chat]
                posed[agent] = [Message("system", system), *given] if system else given
            else:
                raise DataError(f"{template}: {chat!r:.80} must hold messages whose content is text")
        return posed

    def _task_data(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row as JSON, since it is part of the records, after a check that it can be posed.

        Raises:
            DataError: it is not JSON, or has a null or no messages where a prompt asks for a text.
        """
        try:
            plain = json.loads(json.dumps(row, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(f"{error}; rows hold texts, finite numbers, lists and objects") from error
        for name in self._asked:
            if plain[name] is None or plain[name] == []:
                raise DataError(f"{name} is {plain[name]}, and a prompt asks for it; give a text or messages")
        self._pose(plain)
        return plain

    def _judge(self, values: Sequence[Any]) -> Step:
        """Return the end of the episode from the values of the reward functions."""
        components: dict[str, dict[str, float]] = {agent: {} for agent in self.agents}
        measured: dict[str, dict[str, float]] = {agent: {} for agent in self.agents}
        counts = self._counts()
        for (name, reward), value in zip(self.rewards.items(), values, strict=True):
            for agent, part in self._parts(name, value).items():
                for component, number in part.items():
                    if component in {**components[agent], **measured[agent], **counts}:
                        raise EnvironmentContractError(
                            f"{self.name}: the reward functions return the component {component!r} twice; rename one"
                        )
                    if not math.isfinite(number):
                        raise NonFiniteError(
                            f"{self.name}: the reward {name!r} is {number!r} for the row {self._row!r:.200}; rewards "
                            "must be finite; correct the function"
                        )
                    if reward.weight:
                        components[agent][component] = reward.weight * number
                    else:
                        measured[agent][component] = number
        rewards = {agent: math.fsum(parts.values()) for agent, parts in components.items()}
        mean = math.fsum(rewards.values()) / len(rewards)
        success = None if self.success_at is None else mean >= self.success_at
        values_by_name = grouped(item for parts in measured.values() for item in parts.items())
        metrics = {name: fmean(numbers) for name, numbers in values_by_name.items()} | counts
        unanswered = bool(self.toolbox.available) and any(map(requested_calls, self._replies().values()))
        return Step(
            components=components,
            done=True,
            stop_reason="max_turns" if unanswered else "answered",
            truncated=unanswered,
            success=success,
            metrics=metrics,
        )

    def _parts(self, name: str, value: Any) -> dict[str, dict[str, float]]:
        """Return the components of each agent from a reward function's value."""
        apart = isinstance(value, Mapping) and not set(value).isdisjoint(self.agents)
        given = {agent: value.get(agent, {}) for agent in self.agents} if apart else dict.fromkeys(self.agents, value)
        found = {agent: item if isinstance(item, Mapping) else {name: item} for agent, item in given.items()}
        numbers = [number for item in found.values() for number in item.values()]
        if (
            (apart and not set(value) <= set(self.agents))
            or not all(isinstance(item, SupportsFloat) for item in numbers)
            or not all(isinstance(component, str) for item in found.values() for component in item)
        ):
            raise EnvironmentContractError(
                f"{self.name}: the reward {name!r} returned {value!r:.200}; return a number, numbers by name ({{}} "
                f"for none), or either by agent ({', '.join(self.agents)})"
            )
        return {agent: {key: float(number) for key, number in item.items()} for agent, item in found.items()}


class _Awaited(QuestionEnvironment):
    """A :class:`QuestionEnvironment` with ``async`` reward functions, which wait concurrently."""

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        """Answer calls of tools, or reward the replies; see :meth:`Environment.step`."""
        # Daemon threads: a tool that hangs does not keep the process alive.
        if (answered := await call_function(self._answer, actions)) is not None:
            return answered
        values = await self.awaited(lambda: self.arguments(self._replies()))
        await call_function(self.toolbox.end, "finish")
        return self._judge(values)


def _by_name(owner: str, rewards: Sequence[Reward | Callable[..., Any]], has_chat: bool) -> dict[str, Reward]:
    if isinstance(rewards, str) or callable(rewards) or any(isinstance(given, str) for given in rewards):
        raise ConfigurationError(
            f"{owner}: rewards is {rewards!r:.80}; give a list of functions of a reply and its row, not their names"
        )
    found: dict[str, Reward] = {}
    for given in rewards:
        reward = Reward(given) if callable(given) else given
        name = reward.name or getattr(reward.call, "__name__", "reward").replace("<lambda>", "reward")
        if name in found:
            raise ConfigurationError(
                f"{owner}: two rewards are named {name!r}; name them, as in {{call: PATH, name: N}}, in Python "
                "Reward(function, name=...)"
            )
        if not callable(reward.call) or not math.isfinite(reward.weight):
            raise ConfigurationError(
                f"{owner}: the reward {name!r} has the function {reward.call!r:.80} and the weight {reward.weight!r}; "
                "give each a function and a finite weight, as in {call: PATH, weight: 0.1}"
            )
        with suppress(ValueError):  # functions in C may have no signature
            form = inspect.signature(reward.call)
            chat: dict[str, Any] = {"chat": []} if has_chat and _takes_chat(reward.call) else {}
            try:
                form.bind("", {}, **chat)
            except TypeError:
                raise ConfigurationError(
                    f"{owner}: the reward {name!r} has the arguments {form}, and is called with "
                    f"(reply, row{', chat=chat' if chat else ''}): give a function of these that calls it; with "
                    "several agents the first is a mapping from agents to texts"
                ) from None
        found[name] = reward
    return found


def _takes_chat(call: Callable[..., Any]) -> bool:
    try:
        return "chat" in inspect.signature(call).parameters
    except ValueError:  # functions in C may have no signature
        return False


def _fields(owner: str, templates: Iterable[str]) -> list[str]:
    """Return the names of the fields in templates.

    Raises:
        ConfigurationError: a template is malformed.
    """
    try:
        parts = [part[1] for template in templates for part in Formatter().parse(template)]
    except ValueError as error:
        raise ConfigurationError(f"{owner}: a prompt is malformed: {error}; write {{{{ for a brace") from error
    return sorted({name.partition(".")[0].partition("[")[0] for name in parts if name is not None})
