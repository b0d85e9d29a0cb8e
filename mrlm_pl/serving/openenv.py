"""Environments as OpenEnv servers: sessions of :class:`EnvironmentService` over OpenEnv's WebSocket protocol."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from mrlm_pl.environment import Message, Observations, Task, TaskSource
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.serving.environments.service import refusal_of
from mrlm_pl.serving.server import EnvironmentServer
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport.codec import from_json, step_from, to_json
from mrlm_pl.serving.transport.http_log import leave_out_malformed_requests
from mrlm_pl.serving.transport.security import carries_token, is_foreign

CLIENT = "openenv"
HEARTBEAT_SECONDS = 20.0


class OpenEnvServer:
    """The environments of a server for OpenEnv's clients, each at ``http://HOST:PORT/NAME``; an only one also at ``/``.

    A connection is an environment: ``reset`` takes ``split`` (``train``) and ``index`` of a task, or a ``seed`` that
    chooses it; without these, tasks follow each other. The action has ``message``, the reply of the agent that is due,
    or ``messages`` by agent where several are. The observation has the new ``messages`` by agent and, of a single
    agent, their ``text``; after a step also ``rewards`` and ``components`` by agent, ``success``, ``stop_reason``,
    ``truncated`` and ``metrics``. The reward is the mean over the agents.

    Args:
        server: the running server, whose sessions, limits and token it shares.
        port: port to listen on; 0 takes a free one.

    Raises:
        ConfigurationError: the server has TLS, which this protocol's port does not.
    """

    def __init__(self, server: EnvironmentServer, port: int) -> None:
        if not server.endpoint.identity.empty:
            raise ConfigurationError("openenv_port: it has no TLS; leave out tls_..., or put a proxy in front of it")
        self.server, self.port = server, port
        self._next_index = count()
        self._runner: web.AppRunner | None = None
        self._sockets: set[web.WebSocketResponse] = set()

    async def start(self) -> None:
        """Listen; ``port`` is then the port.

        Raises:
            ConfigurationError: the port is taken.
        """
        application = web.Application(middlewares=[self._with_token])
        names = list(self.server.offer.factories)
        for name in names:
            for base in (f"/{name}", *([""] if len(names) == 1 else [])):
                application.router.add_get(f"{base}/ws", partial(self._play, name))
                application.router.add_get(f"{base}/schema", partial(self._schema, name))
                application.router.add_get(f"{base}/metadata", partial(self._metadata, name))
                application.router.add_get(f"{base}/health", _health)
        leave_out_malformed_requests()
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.server.endpoint.host.strip("[]"), self.port)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            await self.stop()
            fault = f"openenv_port: cannot listen on port {self.port}: {error}"
            raise ConfigurationError(f"{fault}; use another") from error
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port and all connections; may be called twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await asyncio.gather(*(socket.close(code=WSCloseCode.GOING_AWAY) for socket in self._sockets))
            await runner.cleanup()

    @web.middleware
    async def _with_token(self, request: web.Request, handler: Any) -> web.StreamResponse:
        token = self.server.endpoint.token
        if token and not carries_token(request.headers.get("Authorization", ""), token):
            raise web.HTTPUnauthorized(text="the token is missing or wrong")
        if not token and is_foreign(origin := request.headers.get("Origin")):
            remedy = "open it at localhost, or start the server with a token and send it"
            raise web.HTTPForbidden(text=f"Origin {origin!r:.80} is a page of another machine; {remedy}")
        return await handler(request)

    async def describe(self, name: str) -> pb.EnvironmentDescription:
        """Return the description of an environment."""
        return (await self.server.service.describe(pb.DescribeRequest(environment=name))).environments[0]

    async def _schema(self, name: str, request: web.Request) -> web.Response:
        message = {"type": "string", "description": "The agent's reply"}
        action: dict[str, Any] = {"type": "object", "properties": {"message": message}, "required": ["message"]}
        if len((await self.describe(name)).agents) > 1:
            messages = {"type": "object", "additionalProperties": message, "description": "Replies by agent"}
            action = {"type": "object", "properties": {"message": message, "messages": messages}, "required": []}
        anything = {"type": "object"}
        return web.json_response({"action": action, "observation": anything, "state": anything})

    async def _metadata(self, name: str, request: web.Request) -> web.Response:
        return web.json_response({"name": name, "description": (await self.describe(name)).summary})

    async def _play(self, name: str, request: web.Request) -> web.WebSocketResponse:
        """Answer the messages of one connection."""
        limits = self.server.limits
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=limits.message_mb << 20)
        await socket.prepare(request)
        self._sockets.add(socket)
        episode = _Episode(self, name)
        renewing = asyncio.ensure_future(episode.renew(limits.lease_seconds / 3))
        received: asyncio.Queue[str | None] = asyncio.Queue(1)
        reading = asyncio.ensure_future(_read(socket, received))
        try:
            while (text := await received.get()) is not None:
                answer = await _answer(episode, text)
                if answer is None:
                    break
                await socket.send_json(answer)
        except ConnectionError as error:  # the client has left
            error.__traceback__ = None  # its frames hold the answer, in a cycle
        finally:
            renewing.cancel()
            reading.cancel()
            await asyncio.wait([reading])
            self._sockets.discard(socket)
            await episode.close()
        await socket.close()
        return socket

    async def task(self, name: str, data: Mapping[str, Any]) -> Task:
        """Return the task that the arguments of a reset choose.

        Raises:
            IndexError: the index is outside the split's tasks.
            InvalidMessageError: the index or the seed is no whole number, or is negative.
        """
        for option in ("index", "seed"):
            if data.get(option) is not None and (type(data[option]) is not int or data[option] < 0):
                raise InvalidMessageError(f"{option} is {data[option]!r:.60}; it must be a whole number, 0 or above")

        def read() -> Task:
            source: TaskSource = self.server.offer.source(name, {}, data.get("split", "train"))
            if data.get("index") is not None:
                return source[data["index"]]
            index = next(self._next_index) if data.get("seed") is None else data["seed"]
            return source[index % source.size if source.size else index]

        return await self.server.service.run(CLIENT, read)


class _Episode:
    """The environment of a connection: at most one session of the service at a time."""

    def __init__(self, server: OpenEnvServer, name: str) -> None:
        self.server, self.service, self.name = server, server.server.service, name
        self._session, self._id, self._turn = "", "", 0
        self._due: tuple[str, ...] = ()

    async def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Open a session and return its first observation."""
        await self.close()
        task = await self.server.task(self.name, data)
        opened = await self.service.open(pb.OpenRequest(environment=self.name, task=to_json(task), client=CLIENT))
        self._session, self._turn = opened.session, 0
        self._id = str(data.get("episode_id") or task.key)
        observations = from_json(opened.observations, dict[str, tuple[Message, ...]])
        return {"observation": self._observation(observations), "reward": None, "done": False}

    async def step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send the replies and return the next observation, the reward and whether the episode is done."""
        if not self._due:
            raise InvalidMessageError("there is no episode, or it is over; send reset first")
        request = pb.StepRequest(session=self._session, turn=self._turn, actions=to_json(self._actions(data)))
        step = step_from((await self.service.step(request)).step)
        self._turn += 1
        observation = {
            **self._observation(step.observations),
            "rewards": dict(step.rewards),
            "components": {agent: dict(parts) for agent, parts in step.components.items()},
            "success": step.success,
            "stop_reason": step.stop_reason,
            "truncated": step.truncated,
            "metrics": dict(step.metrics),
        }
        reward = math.fsum(step.rewards.values()) / len((await self.server.describe(self.name)).agents)
        return {"observation": observation, "reward": reward, "done": step.done}

    def state(self) -> dict[str, Any]:
        """Return the episode's id and its number of steps."""
        return {"episode_id": self._id or None, "step_count": self._turn}

    async def close(self) -> None:
        """End the session."""
        if self._session:
            await self.service.close(pb.CloseRequest(session=self._session))
            self._session, self._due = "", ()

    async def renew(self, seconds: float) -> None:
        """Keep the session's lease while the connection is open."""
        while True:
            await asyncio.sleep(seconds)
            await self.service.keep_alive(pb.KeepAliveRequest(sessions=[self._session]))

    def _observation(self, observations: Observations) -> dict[str, Any]:
        self._due = tuple(observations)
        messages = {
            agent: [message.to_chat() for message in agent_messages] for agent, agent_messages in observations.items()
        }
        texts = [message.content for agent_messages in observations.values() for message in agent_messages]
        return {"text": "\n\n".join(texts) if len(observations) == 1 else "", "messages": messages}

    def _actions(self, data: Mapping[str, Any]) -> dict[str, Message]:
        replies: Any = data.get("messages")
        if replies is None and len(self._due) == 1:
            replies = {self._due[0]: data.get("message")}
        named = isinstance(replies, dict) and replies.keys() == set(self._due)
        if not named or not all(isinstance(text, str) for text in replies.values()):
            texts = ", ".join(f'"{agent}": TEXT' for agent in self._due)
            expected = '{"message": TEXT}' if len(self._due) == 1 else f'{{"messages": {{{texts}}}}}'
            raise InvalidMessageError(f"the action is {json.dumps(data)[:200]}; give {expected}")
        return {agent: Message("assistant", text) for agent, text in replies.items()}


class InvalidMessageError(Exception):
    """A client's message is not of the protocol's form."""


async def _read(socket: web.WebSocketResponse, received: asyncio.Queue[str | None]) -> None:
    """Receive also during a step, before which the next request may come: a client waits for answers to its pings."""
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            break
        await received.put(message.data)
    await received.put(None)


async def _answer(episode: _Episode, text: str) -> dict[str, Any] | None:
    """Return the answer to a message; None ends the connection."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _error("INVALID_JSON", f"Invalid JSON: {error}")
    kind = message.get("type") if isinstance(message, dict) else None
    data = message.get("data", {}) if isinstance(message, dict) else {}
    try:
        if not isinstance(data, dict):
            raise InvalidMessageError("data must be an object")
        match kind:
            case "reset":
                return {"type": "observation", "data": await episode.reset(data)}
            case "step":
                return {"type": "observation", "data": await episode.step(data)}
            case "state":
                return {"type": "state", "data": episode.state()}
            case "close":
                return None
    except InvalidMessageError as error:
        return _error("VALIDATION_ERROR", str(error))
    except Exception as error:  # an environment may raise anything
        return _error("EXECUTION_ERROR", refusal_of(error).text)
    return _error("UNKNOWN_TYPE", f"Unknown message type: {kind}")


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "healthy"})
