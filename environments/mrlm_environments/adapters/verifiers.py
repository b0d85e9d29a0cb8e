"""Environments of verifiers 0.4. Its pinned packages need their own environment, behind ``mrlm serve``."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from mrlm_environments.data_tasks import DataTasks
from mrlm_environments.libraries import asked_for
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.environment.tasks import Shared
from mrlm_pl.errors import ConfigurationError, RemoteError
from mrlm_pl.serving.gateway.protocol import ProtocolError, chat_body, read_call
from mrlm_pl.serving.gateway.session import Limits, Session
from mrlm_pl.serving.transport.connection import submit
from mrlm_pl.settings import PositiveInt

HARNESS = "mrlm_chat"
TRACE_HEADER = "X-Session-ID"
UNLIMITED = Limits(calls=sys.maxsize, lease_seconds=math.inf)


class VerifiersEnvironment(Environment):
    """Plays an environment of verifiers (``verifiers.v1``); each seat without its own client is an agent.

    verifiers runs the episode and scores it. The model calls of the seats are the agents' turns, and each agent earns
    the reward of its trace after its last turn, with verifiers' weighted rewards as components. Text only: seats
    converse in this process, without tools, and each has one conversation per episode.

    Args:
        taskset: id of an installed taskset, or a module on the path, as in ``--env.taskset.id`` of verifiers.
        config: other settings of ``env`` in verifiers: ``id``, ``taskset``, ``agent`` and extra seats.
        limit: tasks that are read from the taskset.

    Raises:
        ConfigurationError: verifiers is not installed, there is no such taskset, or a setting is wrong.
    """

    name = "verifiers"

    def __init__(self, taskset: str, config: dict[str, Any] | None = None, limit: PositiveInt = 10_000) -> None:
        self._host = _Host(taskset, config or {}, limit)
        self.agents = self._host.agents
        self._tasks = DataTasks(self.name, self._host.rows)
        self._session: Session | None = None

    def tasks(self, split: str) -> TaskSource:
        """Return the taskset's tasks, divided by their content; see :meth:`Environment.tasks`."""
        return self._tasks.source(split, (), dict, lambda row: json.dumps(row["task"], sort_keys=True))

    def identity(self, task: Task) -> str:
        """Return the task's content; see :meth:`Environment.identity`."""
        return json.dumps(task.data["task"], sort_keys=True)

    async def reset(self, task: Task) -> Observations:  # type: ignore[override] # async versions are accepted
        """Start the episode; see :meth:`Environment.reset`.

        Raises:
            RemoteError: it ends before its first model call.
        """
        self.close()
        self._said: dict[str, tuple[Message, ...]] = {}
        self._session = await asyncio.wrap_future(submit(self._host.begin(task.data["index"])))
        if shown := await asyncio.wrap_future(submit(self._next({}))):
            return shown
        step = _end(self._session.program.result())
        raise RemoteError(f"verifiers: the episode of {task.key} ended without a model call: {step.stop_reason}")

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        """Answer the model calls of the agents that are due; see :meth:`Environment.step`.

        Raises:
            RemoteError: the episode failed.
        """
        assert self._session is not None
        shown = await asyncio.wrap_future(submit(self._next(actions)))
        return Step(shown) if shown else _end(self._session.program.result())

    def close(self) -> None:
        """Cancel the episode; see :meth:`Environment.close`."""
        if self._session is not None:
            submit(self._session.end())
            self._session = None

    async def _next(self, actions: Mapping[str, Message]) -> Observations:
        """Give replies and return the new messages of the calls that wait next; none at the end of the episode."""
        assert self._session is not None
        for agent, action in actions.items():
            text = action.content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # as JSON returns it
            self._session.answer({agent: (reply := Message("assistant", text))})
            self._said[agent] += (reply,)
        shown = {}
        for agent, prompt in (await self._session.next()).items():
            known = self._said.get(agent, ())
            if prompt.messages[: len(known)] != known or len(prompt) == len(known):
                raise RemoteError(f"verifiers: seat {agent!r} begins a second conversation; an agent here has one")
            shown[agent], self._said[agent] = prompt.messages[len(known) :], prompt.messages
        return shown


class _Host(Shared):
    """A loaded environment of verifiers and the endpoint of its model calls; copies share it."""

    def __init__(self, taskset: str, config: Mapping[str, Any], limit: int) -> None:
        self._vf = vf = _library()
        with asked_for(f"verifiers: taskset {taskset!r} with {dict(config)}"):
            base = {**config, "taskset": {**config.get("taskset", {}), "id": taskset}}
            seats = [name for name, value in vf.resolve_env_config(base) if isinstance(value, vf.AgentConfig)]
            here = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
            resolved = vf.resolve_env_config({**base, **{seat: {**here, **config.get(seat, {})} for seat in seats}})
            self._environment = vf.load_environment(resolved)
            self._tasks = list(self._environment.taskset.take(limit))
        self.agents = tuple(seat for seat in seats if getattr(resolved, seat).client is None)
        self.rows = [
            {"index": index, "task": task.data.model_dump(mode="json", exclude={"idx"}, exclude_defaults=True)}
            for index, task in enumerate(self._tasks)
        ]
        self._lock = asyncio.Lock()
        self._client: Any = None
        self._playing: dict[Session, list[Any]] = {}

    async def begin(self, index: int) -> Session:
        """Start the episode of a task and return its calls."""
        async with self._lock:
            if self._client is None:
                await self._environment.serving().__aenter__()  # until the process ends
                self._client = self._vf.EvalClientConfig(base_url=await self._listen(), api_key_var="MRLM_NO_KEY")
        session, context = Session(self.agents, UNLIMITED, {}, ()), self._vf.ModelContext("policy", self._client)
        traces = self._playing[session] = []
        playing = self._environment.run_episode(self._tasks[index], context, on_trace=traces.append)
        session.program = asyncio.ensure_future(playing)
        session.program.add_done_callback(lambda done: self._playing.pop(session))
        return session

    async def _listen(self) -> str:
        """Start the endpoint and return its address."""
        application = web.Application(client_max_size=1 << 26)
        application.router.add_post("/chat/completions", self._complete)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _complete(self, request: web.Request) -> web.Response:
        """Answer a model call with the agent's reply."""
        trace = request.headers.get(TRACE_HEADER)
        found = ((session, one.agent.name) for session, own in self._playing.items() for one in own if one.id == trace)
        session, agent = next(found, (None, ""))
        try:
            call = read_call("chat", await request.json(), ())
            if session is None or call.prompt.tools or call.stream:
                raise ProtocolError(400, "unsupported", f"seat {agent!r} uses tools or streams; an agent here does not")
            return web.json_response(chat_body(call, await session.ask(agent, call), "call"))
        except ProtocolError as error:
            return web.json_response(error.body(), status=error.status)


def _end(episode: Any) -> Step:
    """Return the last step of a finished episode of verifiers.

    Raises:
        RemoteError: the episode failed.
    """
    traces = [trace for trace in episode.traces if trace.num_turns]
    if not episode.ok or not traces:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        told = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RemoteError(f"verifiers: the episode failed: {told or 'no agent took a turn'}")
    parts = {
        trace.agent.name: {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        for trace in traces
    }
    metrics = {
        name if len(traces) == 1 else f"{trace.agent.name}_{name}": value
        for trace in traces
        for name, value in trace.metrics.items()
        if value is not None
    }
    return Step(
        rewards={trace.agent.name: trace.reward for trace in traces},
        components=parts,
        done=True,
        stop_reason=traces[0].stop_condition or "done",
        truncated=any(trace.is_truncated for trace in traces),
        metrics=metrics,
    )


def _library() -> Any:
    """Return ``verifiers.v1`` with a harness that converses in this process.

    Raises:
        ConfigurationError: verifiers is not installed.
    """
    try:
        import verifiers.v1 as vf

        from mrlm_environments.adapters import chat_harness
    except ImportError as error:
        raise ConfigurationError(
            f"verifiers: version 0.4 of the package cannot be imported ({error}); its packages collide with ours: run "
            "`make verifiers` and host it by `.venv-verifiers/bin/mrlm serve`"
        ) from error
    for name in ("verifiers", "httpx", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they write several lines for each model call
    sys.modules.setdefault(f"verifiers.v1.harnesses.{HARNESS}", chat_harness)  # where verifiers looks for harnesses
    return vf
