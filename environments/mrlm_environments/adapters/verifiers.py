"""Environments of verifiers 0.4. Its pinned packages need an environment of their own, behind ``mrlm serve``."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

from mrlm_environments.data_tasks import DataTasks
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.errors import ConfigurationError, RemoteError
from mrlm_pl.serving.transport.connection import submit
from mrlm_pl.settings import at_least

HARNESS = "mrlm_chat"
TRACE_HEADER = "X-Session-ID"


class VerifiersEnvironment(Environment):
    """Plays an environment of verifiers (``verifiers.v1``); each seat without a client of its own is an agent.

    verifiers runs the episode and scores it. The model calls of the seats are the agents' turns, and each agent earns
    the reward of its trace after its last turn, with verifiers' weighted rewards as components. Text only: seats
    converse in this process, without tools, and each has one conversation per episode.

    Args:
        taskset: id of an installed taskset, or a module on the path, as in ``--env.taskset.id`` of verifiers.
        config: other settings of ``env`` in verifiers: ``id``, ``taskset``, ``agent`` and further seats.
        limit: tasks that are read from the taskset.

    Raises:
        ConfigurationError: verifiers is not installed, there is no such taskset, or a setting is wrong.
    """

    name = "verifiers"

    def __init__(self, taskset: str, config: dict[str, Any] | None = None, limit: int = 10_000) -> None:
        at_least(1, "verifiers: ", limit=limit)
        self._host = _Host(taskset, config or {}, limit)
        self.agents = self._host.agents
        self._tasks = DataTasks(self.name, self._host.rows, "stop")
        self._episode: _Episode | None = None

    def tasks(self, split: str) -> TaskSource:
        """Return the taskset's tasks, divided by their content; see :meth:`Environment.tasks`."""
        return self._tasks.rows(split, (), lambda row: json.dumps(row["task"], sort_keys=True), dict)

    def identity(self, task: Task) -> str:
        """Return the task's content; see :meth:`Environment.identity`."""
        return json.dumps(task.data["task"], sort_keys=True)

    async def reset(self, task: Task) -> Observations:  # type: ignore[override] # async versions are accepted
        """Start the episode; see :meth:`Environment.reset`.

        Raises:
            RemoteError: it ends before its first model call.
        """
        self.close()
        self._episode = await asyncio.wrap_future(submit(self._host.begin(task.data["index"])))
        shown = await asyncio.wrap_future(submit(self._episode.next({})))
        if not shown:
            step = _end(self._episode.running.result())
            raise RemoteError(f"verifiers: the episode of {task.key} ended without a model call: {step.stop_reason}")
        return shown

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        """Answer the model call of the agent that is due; see :meth:`Environment.step`.

        Raises:
            RemoteError: the episode failed.
        """
        assert self._episode is not None
        shown = await asyncio.wrap_future(submit(self._episode.next(actions)))
        return Step(shown) if shown else _end(self._episode.running.result())

    def close(self) -> None:
        """Cancel the episode; see :meth:`Environment.close`."""
        if self._episode is not None:
            self._episode.running.get_loop().call_soon_threadsafe(self._episode.running.cancel)
            self._episode = None


class _Host:
    """A loaded environment of verifiers and the endpoint of its model calls; copies share it."""

    def __init__(self, taskset: str, config: Mapping[str, Any], limit: int) -> None:
        self._vf = vf = _library()
        try:
            base = {**config, "taskset": {**config.get("taskset", {}), "id": taskset}}
            seats = [name for name, value in vf.resolve_env_config(base) if isinstance(value, vf.AgentConfig)]
            here = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
            resolved = vf.resolve_env_config({**base, **{seat: {**here, **config.get(seat, {})} for seat in seats}})
            self._environment = vf.load_environment(resolved)
            self._tasks = list(self._environment.taskset.take(limit))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(f"verifiers: taskset {taskset!r} with {dict(config)}: {error}") from error
        self.agents = tuple(seat for seat in seats if getattr(resolved, seat).client is None)
        self.rows = [
            {"index": index, "task": task.data.model_dump(mode="json", exclude={"idx"}, exclude_defaults=True)}
            for index, task in enumerate(self._tasks)
        ]
        self._lock = asyncio.Lock()
        self._client: Any = None
        self._playing: set[_Episode] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Host:
        return self

    async def begin(self, index: int) -> _Episode:
        """Start the episode of a task."""
        async with self._lock:
            if self._client is None:
                await self._environment.serving().__aenter__()  # until the process ends
                self._client = self._vf.EvalClientConfig(base_url=await self._listen(), api_key_var="MRLM_NO_KEY")
        episode, context = _Episode(), self._vf.ModelContext(model="policy", client=self._client)
        playing = self._environment.run_episode(self._tasks[index], context, on_trace=episode.traces.append)
        self._playing.add(episode)
        episode.running = asyncio.ensure_future(playing)
        episode.running.add_done_callback(lambda done: self._playing.discard(episode))
        return episode

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
        body, trace = await request.json(), request.headers.get(TRACE_HEADER)
        found = ((episode, one.agent.name) for episode in self._playing for one in episode.traces if one.id == trace)
        episode, agent = next(found, (None, ""))
        said = [(message["role"], _text(message.get("content"))) for message in body["messages"]]
        if episode is None or body.get("tools") or body.get("stream") or not episode.continues(agent, said):
            reason = f"seat {agent!r} uses tools, streams, or begins a second conversation; an agent here does not"
            return web.json_response({"error": {"message": reason}}, status=400)
        message = {"role": "assistant", "content": await episode.reply(agent, said)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        made = {"id": "call", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        return web.json_response(made)


class _Episode:
    """An episode that runs, and the conversations of its seats."""

    running: asyncio.Future[Any]

    def __init__(self) -> None:
        self.traces: list[Any] = []
        self._calls: asyncio.Queue[tuple[str, list[tuple[Any, str]]]] = asyncio.Queue()
        self._replies: dict[str, asyncio.Future[str]] = {}
        self._said: dict[str, list[tuple[Any, str]]] = {}

    def continues(self, agent: str, said: list[tuple[Any, str]]) -> bool:
        """Return whether a call's messages extend the agent's conversation."""
        known = self._said.get(agent, [])
        return said[: len(known)] == known and len(said) > len(known)

    async def reply(self, agent: str, said: list[tuple[Any, str]]) -> str:
        """Return the agent's reply to a conversation."""
        self._replies[agent] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((agent, said[len(self._said.get(agent, [])) :]))
        text = await self._replies[agent]
        self._said[agent] = [*said, ("assistant", text)]
        return text

    async def next(self, actions: Mapping[str, Message]) -> dict[str, list[Message]]:
        """Give replies and return the new messages of the next call; empty at the end of the episode."""
        for agent, action in actions.items():
            whole = action.content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # as JSON returns it
            self._replies[agent].set_result(whole)
        call = asyncio.ensure_future(self._calls.get())
        await asyncio.wait([call, self.running], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            return {}
        agent, said = call.result()
        return {agent: [Message(role, text) for role, text in said]}


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


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content or [])


def _library() -> Any:
    """Return ``verifiers.v1`` with a harness that converses in this process.

    Raises:
        ConfigurationError: verifiers is not installed.
    """
    try:
        import verifiers.v1 as vf
        from verifiers.v1.dialects.chat import message_to_wire
    except ImportError as error:
        raise ConfigurationError(
            f"verifiers: verifiers 0.4 cannot be imported ({error}); its packages collide with ours: run "
            "`make verifiers` and host it by `.venv-verifiers/bin/mrlm serve`"
        ) from error

    for name in ("verifiers", "httpx", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they write several lines for each model call

    class ChatHarness(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            """Ask for one reply to the conversation."""
            system, prompt = self.resolve_prompt(data)
            said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
            said = [*([vf.SystemMessage(content=system)] if system else []), *said]
            body = {"model": ctx.model, "messages": [message_to_wire(message) for message in said]}
            key = {"Authorization": f"Bearer {secret}"}
            async with ClientSession(headers=key, timeout=ClientTimeout(None)) as session:
                answer = await session.post(f"{endpoint}/chat/completions", json=body)
                return vf.ProgramResult(int(answer.status != 200), "", await answer.text())

    name = f"verifiers.v1.harnesses.{HARNESS}"  # where verifiers looks for harnesses
    module = ModuleType(name)
    module.__spec__, module.__dict__["ChatHarness"] = ModuleSpec(name, None), ChatHarness
    module.__dict__["__all__"] = ["ChatHarness"]
    sys.modules.setdefault(name, module)
    return vf
