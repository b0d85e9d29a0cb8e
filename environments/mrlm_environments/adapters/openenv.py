"""Environments on OpenEnv servers, over their WebSocket protocol. Needs no package of OpenEnv."""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import aiohttp
import msgspec

from mrlm_environments.data_tasks import DataTasks
from mrlm_pl.concurrency.backoff import Backoff
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.errors import ConfigurationError, RemoteError
from mrlm_pl.serving.transport.connection import submit
from mrlm_pl.serving.transport.security import read_token
from mrlm_pl.settings import PositiveFloat, PositiveInt

MESSAGE_BYTES = 100 << 20
"""Size of the largest message of a server."""
_OF_THE_STEP = ("metadata", "done", "reward")
_identity = partial(json.dumps, sort_keys=True)


class OpenEnvEnvironment(Environment):
    """Plays on an OpenEnv server with one agent; each episode is a connection.

    The action has one field for the whole reply, or the reply is a JSON object of the action's fields. A reply that is
    not, or that the server rejects as invalid, earns 0, and the agent receives the reason. An error of the server's
    environment fails the episode. The reward is the server's.

    Args:
        url: URL of the server, ``http://HOST:PORT``, as OpenEnv's ``base_url``.
        data: rows of arguments of ``reset``, or a file of these; None resets with a seed that differs for each task.
        action: field of the action that holds the reply, ``json`` if the reply is the whole action; empty asks the
            server: the only required field if it is a text other than a tool's name, else ``json``.
        observation: text for the agent with fields of the observation in braces; empty is the conversation where the
            observation holds one, else the text if no other field has a value, else the observation as JSON.
        system_prompt: system message before the first observation; empty is none.
        max_turns: steps after which the episode is truncated; None leaves the end to the server.
        message_seconds: deadline of one answer, and of the wait for a session on a full server.
        token_file: file with a token that is sent as ``Authorization: Bearer``; None sends none.

    Raises:
        ConfigurationError: the URL is not of that form, or a number is out of range.
    """

    name = "openenv"

    def __init__(
        self,
        url: str,
        data: str | list[dict[str, Any]] | None = None,
        action: str = "",
        observation: str = "",
        system_prompt: str = "",
        max_turns: PositiveInt | None = None,
        message_seconds: PositiveFloat = 60.0,
        token_file: str | None = None,
    ) -> None:
        scheme, _, place = url.partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not place:
            raise ConfigurationError(f"openenv: url is {url!r}; give http://HOST:PORT")
        self.url = f"{scheme.replace('ws', 'http')}://{place.rstrip('/')}"
        self.action, self.observation, self.system_prompt = action, observation, system_prompt
        self.max_turns, self.message_seconds = max_turns, message_seconds
        # Without a file no token is sent: MRLM_TOKEN is not meant for servers of others.
        self._headers = {"Authorization": f"Bearer {read_token(token_file)}"} if token_file else {}
        self._tasks = DataTasks(self.name, data)
        self._link: _Link | None = None
        self._disconnect: Callable[[], object] = lambda: None

    def tasks(self, split: str) -> TaskSource:
        """Return the rows of the data, or seeds without end; see :meth:`Environment.tasks`."""
        return self._tasks.source(split, (), dict, _identity, lambda rng: {"seed": rng.randrange(1 << 31)}, "seed")

    def identity(self, task: Task) -> str:
        """Return the arguments of ``reset``; see :meth:`Environment.identity`."""
        return _identity(task.data)

    async def reset(self, task: Task) -> Observations:  # type: ignore[override] # async versions are accepted
        """Connect and reset; see :meth:`Environment.reset`.

        Raises:
            RemoteError: the server does not answer, rejects the call, or has no room for ``message_seconds``.
        """
        self._turn, self._form = 0, self.action
        waiting = Backoff(self.message_seconds)
        while True:
            self.close()
            self._link = link = _Link(self.url, self._headers, self.message_seconds)
            self._disconnect = weakref.finalize(self, lambda link: submit(link.close()), link)
            try:
                result = await link.ask("reset", task.data)
                break
            except FullServerError:
                if not await waiting.pause():
                    raise
        if result.get("done"):
            raise RemoteError(f"openenv: {self.url} ends the episode at its reset of {dict(task.data)}")
        messages = [Message("system", self.system_prompt)] * bool(self.system_prompt) + self._as_messages(result)
        if self.action in ("", "json"):
            schema = (await link.ask("schema"))["action"]
            self._form = self.action or _only_text(schema) or "json"
            if self._form == "json":
                messages.append(Message("user", f"Reply with one JSON object of this schema: {json.dumps(schema)}"))
        return {self.agents[0]: messages}

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        """Send the action; see :meth:`Environment.step`.

        Raises:
            RemoteError: the server does not answer, or its environment raised an error.
        """
        assert self._link is not None
        self._turn += 1
        ((agent, action),), fault = actions.items(), ""
        try:
            result = await self._link.ask("step", _fields(action.final_text, self._form))
        except InvalidActionError as error:
            result, fault = {"observation": {}}, f"This is no valid action: {error}"
        seen, done = result["observation"], bool(result.get("done"))
        late = self.max_turns is not None and self._turn >= self.max_turns
        over = done or late  # its observation may lack the fields of the others
        return Step(
            {} if over else {agent: [Message("user", fault)] if fault else self._as_messages(result)},
            {agent: float(result.get("reward") or 0.0)},
            done=over,
            stop_reason="done" if done else "max_turns" if late else "",
            truncated=bool(seen.get("truncated")) if done else late,
            success=seen["success"] if done and isinstance(seen.get("success"), bool) else None,
            metrics={"invalid": float(bool(fault))},
        )

    def close(self) -> None:
        """Close the connection; see :meth:`Environment.close`."""
        self._disconnect()
        self._link = None

    def _as_messages(self, result: Mapping[str, Any]) -> list[Message]:
        """Return an observation as messages."""
        fields = {name: part for name, part in result["observation"].items() if name not in _OF_THE_STEP}
        if self.observation:
            return [Message("user", self.observation.format_map(fields))]
        if isinstance(chat := fields.get("messages"), dict) and len(chat) == 1:
            (given,) = chat.values()
            return [Message(message["role"], message["content"]) for message in given]
        values = [value for value in fields.values() if value is not None]
        alone = len(values) == 1 and isinstance(values[0], str)
        return [Message("user", values[0] if alone else json.dumps(fields, ensure_ascii=False))]


class FullServerError(RemoteError):
    """The server has as many sessions as it allows."""


class InvalidActionError(Exception):
    """A reply is not an action of the server's schema."""


class _Link:
    """A connection, made with its first message, on the event loop that all connections of the process share."""

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float) -> None:
        self.url, self.headers, self.seconds = url, headers, seconds
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a message, or get the page ``schema``, and return the data of the answer.

        Raises:
            InvalidActionError: the server rejects the action as invalid.
            FullServerError: it has no room for a session.
            RemoteError: it does not answer within the deadline, ends the connection, or answers with another error.
        """
        asked = self._page(kind) if data is None else self._answer({"type": kind, "data": dict(data)})
        try:
            return dict(await asyncio.wrap_future(submit(asyncio.wait_for(asked, self.seconds))))
        except (aiohttp.ClientError, OSError, ValueError, TypeError, LookupError) as error:
            told = str(error) or f"no answer within {self.seconds:g} s"
            raise RemoteError(f"openenv: {self.url}: {type(error).__name__}: {told}") from error

    async def _page(self, name: str) -> Any:
        async with aiohttp.ClientSession(headers=self.headers, raise_for_status=True) as session:
            return await (await session.get(f"{self.url}/{name}")).json()

    async def _answer(self, sent: Mapping[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self.headers)
            self._socket = await self._session.ws_connect(f"{self.url}/ws", max_msg_size=MESSAGE_BYTES, heartbeat=20.0)
            self._next = asyncio.ensure_future(self._socket.receive())
        await self._socket.send_json(sent)
        message = await self._next
        # Receive also while the agent decides: a server ends a connection that does not answer its pings.
        self._next = asyncio.ensure_future(self._socket.receive())
        if not isinstance(message.data, str):
            raise RemoteError(f"openenv: {self.url} ended the connection: {message.type.name} {message.data}")
        kind, data = (answer := message.json())["type"], answer["data"]
        if kind != "error":
            return data
        code, told = data.get("code"), f"{data.get('message')} {data.get('errors') or ''}".strip()
        if sent["type"] == "step" and code == "VALIDATION_ERROR":
            raise InvalidActionError(told)
        failure = FullServerError if code == "CAPACITY_REACHED" else RemoteError
        raise failure(f"openenv: {self.url} answers {sent['type']!r} with {code}: {told}")

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()


def _only_text(schema: Mapping[str, Any]) -> str | None:
    """Return the only required field of an action if it is a text, else None; a tool also needs arguments.

    >>> text = {"type": "string"}
    >>> _only_text({"properties": {"message": text, "tone": text}, "required": ["message"]})
    'message'
    >>> _only_text({"properties": {"tool_name": text, "arguments": {}}, "required": ["tool_name"]})
    """
    match schema.get("required"):
        case [name] if name != "tool_name" and schema["properties"][name].get("type") == "string":
            return str(name)
    return None


def _fields(reply: str, form: str) -> dict[str, Any]:
    """Return the fields of the action that a reply is: of its JSON object, which may be in a fenced block, or one.

    Raises:
        InvalidActionError: the form is ``json``, and the reply is no JSON object.

    >>> _fields('```json\\n{"move": 3}\\n```', "json"), _fields("up", "move")
    ({'move': 3}, {'move': 'up'})
    """
    if form != "json":
        return {form: reply}
    fenced = re.fullmatch(r"\s*```(?:json)?(.*)```\s*", reply, re.DOTALL)
    try:
        return msgspec.json.decode(fenced[1] if fenced else reply, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidActionError(f"it is not a JSON object: {error}") from error
