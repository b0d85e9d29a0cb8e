"""The tools of a server that speaks the Model Context Protocol, as tools of an environment. Needs the extra ``mcp``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import re
import tempfile
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.environment import ToolSchema
from mrlm_pl.environment.schemas import schema_fault
from mrlm_pl.environment.tools import Tool, ToolError, ToolSet, clipped
from mrlm_pl.episode import Task
from mrlm_pl.errors import ConfigurationError, MRLMError
from mrlm_pl.settings import positive

T = TypeVar("T")

_TIMEOUTS = (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError)  # one class from Python 3.11 on
MAX_TOOLS = 128
MAX_REASON = 500
MAX_DESCRIPTION = 20_000
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
CLOSE_SECONDS = 15.0
"""A server that ignores the end of its input is killed after about half of this by the protocol's package."""


class McpError(MRLMError):
    """A server of tools cannot be started or reached, or does not answer while it is set up."""


class McpTools(ToolSet):
    """The tools of one MCP server: a command that is started, or the address of one that runs.

    A command is started for each episode and stopped after it, so that episodes share no state; ``shared`` keeps it
    over the episodes that one copy of the environment plays. A call that fails, takes too long or finds the server
    dead is a :class:`ToolError` for the agent. A process ends when it is closed, when its tools are no longer
    referred to, and at the end of the program; should the program be killed, its input is closed.

    Args:
        command: program to start, which speaks over its standard input and output.
        args: its arguments.
        env: environment variables for it, beside a few harmless ones such as PATH.
        url: address of a server that speaks streamable HTTP, in place of a command.
        timeout: seconds that a call may take.
        start_timeout: seconds that the server may take to start and to list its tools.
        shared: keep the server over episodes.
        only: names of the tools to offer; None is all.

    Raises:
        ConfigurationError: neither or both of command and url are given, a timeout is not above 0, or the package
            ``mcp`` is not installed.
    """

    def __init__(
        self,
        command: str | None = None,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        url: str | None = None,
        timeout: float = 20.0,
        start_timeout: float = 30.0,
        shared: bool = False,
        only: list[str] | None = None,
    ) -> None:
        if bool(command) == bool(url):
            raise ConfigurationError(f"McpTools: command is {command!r} and url is {url!r}; give one of them")
        positive("McpTools: ", timeout=timeout, start_timeout=start_timeout)
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(f"McpTools needs the package mcp ({error}); pip install 'mrlm[mcp]'") from error
        self.command, self.args, self.env, self.url = command, list(args), env, url
        self.timeout, self.start_timeout, self.shared, self.only = timeout, start_timeout, shared, only
        self._schemas: tuple[ToolSchema, ...] | None = None
        self._connection: _Connection | None = None
        self._finalizer: weakref.finalize[..., McpTools] | None = None

    def tools(self) -> Sequence[Tool]:
        """Return the server's tools; the first time, the server is asked for them.

        Raises:
            McpError: the server cannot be started or reached, has no tool of a name in ``only``, or offers one whose
                name or schema cannot be used; the message names it.
        """
        if self._schemas is None:
            self._schemas = self._listed()
        return [_RemoteTool(schema, self) for schema in self._schemas]

    def open(self, task: Task) -> None:
        """Begin an episode: with a new server, or where it is ``shared``, the one that runs.

        Raises:
            McpError: the server cannot be started or reached.
        """
        if not self.shared or (self._connection is not None and not self._connection.alive):
            self.close()
        self._connected()

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the server and return its answer.

        Raises:
            ToolError: the tool failed, took longer than the timeout, or the server has ended.
        """
        if self._connection is None:
            raise ToolError("no episode is running")
        return self._connection.call(name, arguments, self.timeout)

    def finish(self) -> None:
        """End an episode: a server that is not ``shared`` ends with it."""
        if not self.shared:
            self.close()

    def close(self) -> None:
        """End the connection, and the server's process if there is one."""
        if self._finalizer is not None:
            self._finalizer()
        self._connection, self._finalizer = None, None

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts its own server; it knows the tools already.
        return {**self.__dict__, "_connection": None, "_finalizer": None}

    def _connected(self) -> _Connection:
        if self._connection is None:
            connection = _Connection(self._target(), self._label())
            self._finalizer = weakref.finalize(self, connection.close)
            connection.start(self.start_timeout)
            self._connection = connection
        return self._connection

    def _listed(self) -> tuple[ToolSchema, ...]:
        running = self._connection is not None
        try:
            schemas = self._connected().list_tools(self.start_timeout)
        finally:
            if not running:
                self.close()
        names = [schema.name for schema in schemas]
        for name in self.only or ():
            if name not in names:
                raise McpError(f"{self._label()} has no tool {name!r}; it has {', '.join(names) or 'none'}")
        offered = tuple(schema for schema in schemas if self.only is None or schema.name in self.only)
        for schema in offered:
            if fault := _fault(schema):
                raise McpError(
                    f"{self._label()}: the tool {schema.name[:100]!r} cannot be used: {fault}; leave it out with `only`"
                )
        return offered

    def _target(self) -> Any:
        """Return the address, or the process to start."""
        if self.url:
            return self.url
        from mcp.client.stdio import StdioServerParameters

        assert self.command is not None
        return StdioServerParameters(command=self.command, args=self.args, env=self.env)

    def _label(self) -> str:
        return f"MCP server {self.url or ' '.join([str(self.command), *self.args])!r}"


class _RemoteTool(Tool):
    """A tool of a server; its life is the server's."""

    def __init__(self, schema: ToolSchema, server: McpTools) -> None:
        self.schema, self._server = schema, server

    def call(self, arguments: Mapping[str, Any]) -> str:
        return self._server.call(self.schema.name, arguments)


class _Connection:
    """A client on an event loop of its own. The client is entered and left in one task, as its scopes demand."""

    def __init__(self, target: Any, label: str) -> None:
        self._target, self._label = target, label
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open for as long as the server writes to it)
        self._loop = EventLoopThread()
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._life: concurrent.futures.Future[None] | None = None
        self._client: Any = None
        self._scope: Any = None
        self._thread: int | None = None
        self._lost = False

    @property
    def alive(self) -> bool:
        return self._life is not None and not self._life.done() and not self._lost

    def start(self, seconds: float) -> None:
        self._life = self._loop.submit(self._live())
        try:
            self._ready.result(seconds)
        except Exception as error:
            reason = f"no answer within {seconds:g} s" if isinstance(error, _TIMEOUTS) else _text(error)
            self._end()
            message = f"{self._label} cannot be used: {reason}; check the command or address{self._last_words()}"
            self.close()
            raise McpError(message) from error

    def list_tools(self, seconds: float) -> list[ToolSchema]:
        deadline = time.monotonic() + seconds
        schemas: list[ToolSchema] = []
        cursor = None
        while True:
            try:
                page = self._wait(self._client.list_tools(cursor=cursor), max(0.0, deadline - time.monotonic()))
            except Exception as error:
                raise McpError(f"{self._label} does not list its tools: {_text(error)}{self._last_words()}") from error
            schemas += [ToolSchema(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None or len(schemas) >= MAX_TOOLS:
                return schemas[:MAX_TOOLS]

    def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        if not self.alive:
            raise ToolError("the tool's server has ended")
        try:
            result = self._wait(self._client.call_tool(name, dict(arguments)), seconds)
        except _TIMEOUTS:
            raise ToolError(f"no answer within {seconds:g} s") from None
        except Exception as error:  # whatever the protocol, the transport or the server's answer had wrong
            self._lost = _is_closed(error)
            raise ToolError("the tool's server has ended" if self._lost else f"it failed: {_text(error)}") from error
        text = _shown(result)
        if result.is_error:
            raise ToolError(text or "the tool failed")
        return text

    def close(self) -> None:
        if threading.get_ident() == self._thread:
            self._scope.cancel()  # collected as garbage by the loop's own thread, which cannot wait for itself
            return
        self._end()
        self._loop.close()
        self._errors.close()

    def _end(self) -> None:
        """Leave the client, which stops the server, and wait for that."""
        if self._life is not None and not self._life.done():
            self._loop.submit(self._cancel())
            concurrent.futures.wait([self._life], CLOSE_SECONDS)

    async def _live(self) -> None:
        import anyio
        import mcp
        from mcp.client.stdio import stdio_client

        self._thread = threading.get_ident()
        with anyio.CancelScope() as self._scope:
            try:
                server = self._target
                if not isinstance(server, str):
                    server = stdio_client(server, errlog=self._errors)  # type: ignore[arg-type]
                async with mcp.Client(server) as self._client:
                    # What comes back is shown as it is. The library would check it by a schema of the server's, of
                    # which a regular expression could hold up the whole process.
                    self._client.session.validate_tool_result = _taken_as_it_is
                    self._ready.set_result(None)
                    await anyio.sleep_forever()
            except Exception as error:
                self._lost = True
                if not self._ready.done():
                    self._ready.set_exception(error)

    async def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    def _wait(self, answer: Coroutine[Any, Any, T], seconds: float) -> T:
        # The loop keeps the deadline; the second one is for a loop that has died.
        return self._loop.submit(asyncio.wait_for(answer, seconds)).result(seconds + CLOSE_SECONDS)

    def _last_words(self) -> str:
        """Return the end of what the server wrote to its standard error; its position in the file is not moved."""
        handle = self._errors.fileno()
        size = os.fstat(handle).st_size
        text = os.pread(handle, MAX_REASON, max(0, size - MAX_REASON)).decode(errors="replace").strip()
        return f"; its last words: {text}" if text else ""


async def _taken_as_it_is(name: str, result: Any) -> None:
    """Stands for the check of a result by the server's schema."""


def _fault(schema: ToolSchema) -> str | None:
    """Return the fault that makes a tool unfit to be offered, or None."""
    if not _NAME.fullmatch(schema.name):
        return "its name has other characters than letters, digits and _ . / -, or more than 128 of them"
    if len(schema.description) > MAX_DESCRIPTION:
        return f"its description has more than {MAX_DESCRIPTION} characters"
    fault = schema_fault(schema.parameters)
    return f"of its schema, {fault}" if fault else None


def _is_closed(error: Exception) -> bool:
    from mcp_types import CONNECTION_CLOSED

    return getattr(error, "code", None) == CONNECTION_CLOSED


def _text(error: BaseException) -> str:
    """Return the error's name and text; of a group, those of its first error."""
    inner = getattr(error, "exceptions", None)
    if inner:
        return _text(inner[0])
    return clipped(f"{type(error).__name__}: {error}", MAX_REASON)


def _shown(result: Any) -> str:
    """Return a tool's answer as text: its texts, and for other content the kind of it."""
    parts = []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        parts.append(text if isinstance(text, str) else f"[{block.type}]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content))
    return "\n".join(parts)
