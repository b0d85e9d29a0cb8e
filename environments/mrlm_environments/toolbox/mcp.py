"""The tools of a server that speaks the Model Context Protocol, as tools of an environment. Needs the extra ``mcp``."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from mrlm_environments.libraries import library
from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.environment import ToolSchema
from mrlm_pl.environment.schemas import schema_fault
from mrlm_pl.environment.tools import Tool, ToolError, ToolSet, clip
from mrlm_pl.episode import Task
from mrlm_pl.errors import ConfigurationError, MRLMError
from mrlm_pl.settings import PositiveFloat

T = TypeVar("T")

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
        args: arguments of the program.
        env: environment variables of the program, in addition to harmless ones such as PATH.
        url: address of a server that speaks streamable HTTP, instead of a command.
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
        timeout: PositiveFloat = 20.0,
        start_timeout: PositiveFloat = 30.0,
        shared: bool = False,
        only: list[str] | None = None,
    ) -> None:
        if bool(command) == bool(url):
            raise ConfigurationError(f"McpTools: command is {command!r} and url is {url!r}; give one of them")
        library("mcp", "mcp", "McpTools")
        self.command, self.args, self.env, self.url = command, list(args), env, url
        self.timeout, self.start_timeout, self.shared, self.only = timeout, start_timeout, shared, only
        self._label = f"MCP server {url or ' '.join([str(command), *args])!r}"
        self._offered: tuple[ToolSchema, ...] | None = None
        self._connection: _Connection | None = None
        self._finalizer: weakref.finalize[..., McpTools] | None = None

    def tools(self) -> Sequence[Tool]:
        """Return the server's tools; the first time, the server is asked for them.

        Raises:
            McpError: the server cannot be started or reached, has no tool of a name in ``only``, or offers one whose
                name or schema cannot be used; the message names it.
        """
        if self._offered is None:  # no cached_property: before Python 3.12 all instances would wait for one another
            self._offered = self._list_tools()
        return [_RemoteTool(schema, self) for schema in self._offered]

    def open(self, task: Task) -> None:
        """Begin an episode: with a new server, or where it is ``shared``, the one that runs.

        Raises:
            McpError: the server cannot be started or reached.
        """
        if not self.shared or (self._connection is not None and self._connection.lost):
            self.close()
        self._connect()

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

    def _connect(self) -> _Connection:
        if self._connection is None:
            from mcp.client.stdio import StdioServerParameters

            process = StdioServerParameters(
                command=self.command or "",
                args=self.args,
                env=self.env,
                encoding_error_handler="replace",  # one stray byte would end all later answers; requests too
            )
            self._connection = _Connection(self.url or process, self._label, self.start_timeout)
            self._finalizer = weakref.finalize(self, self._connection.close)
        return self._connection

    def _list_tools(self) -> tuple[ToolSchema, ...]:
        running = self._connection is not None
        try:
            schemas = self._connect().list_tools(self.start_timeout)
        finally:
            if not running:
                self.close()
        names = [schema.name for schema in schemas]
        for name in self.only or ():
            if name not in names:
                has = clip(", ".join(names), MAX_REASON) or "none"
                raise McpError(f"{self._label} has no tool {name!r}; it has {has}")
        offered = tuple(schema for schema in schemas if self.only is None or schema.name in self.only)
        if len(offered) > MAX_TOOLS:
            raise McpError(f"{self._label} has {len(offered)} tools, more than {MAX_TOOLS}; select some with `only`")
        for schema in offered:
            if fault := _fault(schema):
                raise McpError(
                    f"{self._label}: the tool {schema.name[:100]!r} cannot be used: {fault}; leave it out with `only`"
                )
        return offered


class _RemoteTool(Tool):
    """A tool of a server; its life is the server's."""

    def __init__(self, schema: ToolSchema, server: McpTools) -> None:
        self.schema, self._server = schema, server

    def call(self, arguments: Mapping[str, Any]) -> str:
        return self._server.call(self.schema.name, arguments)


class _Connection:
    """A client on an event loop in its own thread. It is entered and left in one task, as its scopes demand.

    The loop keeps the deadlines. Each has a second one outside it, for a loop that is blocked and for an end that
    cannot be canceled.

    Args:
        server: an address, or the process to start.
        label: the server's name, for messages.
        seconds: deadline for the start of the server.

    Raises:
        McpError: it cannot be started or reached.
    """

    def __init__(self, server: Any, label: str, seconds: float) -> None:
        self.label, self.lost = label, False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open while the server writes to it)
        self._loop, self._thread, self._leave = EventLoopThread(), 0, asyncio.Event()
        entered: Future[Any] = Future()
        self._life = self._loop.submit(self._live(server, seconds, entered))
        try:
            self._client = entered.result(seconds + CLOSE_SECONDS)
        except Exception as error:  # a server's process, transport and protocol may fail in any way
            message = f"{label} cannot be used: {self._reason(error, seconds)}"
            self.close()
            raise McpError(message) from error

    def list_tools(self, seconds: float) -> list[ToolSchema]:
        try:
            return self._wait(self._list_tools(), seconds)
        except Exception as error:  # as above
            raise McpError(f"{self.label} does not list its tools: {self._reason(error, seconds)}") from error

    def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        from mcp_types import CONNECTION_CLOSED

        if self.lost:
            raise ToolError("the tool's server has ended")
        try:
            result = self._wait(self._client.call_tool(name, dict(arguments)), seconds)
        except Exception as error:  # the protocol, the transport or the server's answer may fail in any way
            found = getattr(error, "code", None), getattr(error, "message", None)  # servers use the same code
            self.lost = self.lost or found == (CONNECTION_CLOSED, "Connection closed")
            why = "the tool's server has ended" if self.lost else f"it failed: {_text(error, seconds)}"
            raise ToolError(why) from error
        text = _result_text(result)
        if result.is_error:
            raise ToolError(text or "the tool failed")
        return text

    def close(self) -> None:
        """Leave the client, which ends the server's process; one that does not end is abandoned."""
        if threading.get_ident() == self._thread:  # garbage collected by the loop's thread, which cannot join itself
            threading.Thread(target=self.close).start()
            return
        if not self._loop.closed:
            self._loop.call_soon(self._leave.set)
            wait([self._life], 2 * CLOSE_SECONDS)
        self._loop.close()
        self._errors.close()

    async def _live(self, server: Any, seconds: float, entered: Future[Any]) -> None:
        self._thread = threading.get_ident()
        try:
            async with _client(server, self._errors, seconds) as client:
                entered.set_result(client)
                await self._leave.wait()
        except Exception as error:  # a server that has died leaves its transport in any state
            self.lost = True
            if not entered.done():
                entered.set_exception(error)

    async def _list_tools(self) -> list[ToolSchema]:
        found: list[ToolSchema] = []
        page = await self._client.list_tools()
        while True:
            found += [ToolSchema(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            if page.next_cursor is None:
                return found
            page = await self._client.list_tools(cursor=page.next_cursor)

    def _wait(self, answer: Awaitable[T], seconds: float) -> T:
        return self._loop.submit(asyncio.wait_for(answer, seconds)).result(seconds + CLOSE_SECONDS)

    def _reason(self, error: BaseException, seconds: float) -> str:
        """Return an error's text, and the end of the server's standard error; the position in it is not moved."""
        handle = self._errors.fileno()
        size = os.fstat(handle).st_size
        text = os.pread(handle, MAX_REASON, max(0, size - MAX_REASON)).decode(errors="replace").strip()
        words = f"; its last words: {text}" if text else ""
        return f"{_text(error, seconds)}; check the command or address{words}"


@asynccontextmanager
async def _client(server: Any, errors: Any, seconds: float) -> AsyncIterator[Any]:
    """Enter a client within ``seconds``, and leave it within :data:`CLOSE_SECONDS`."""
    import anyio
    import mcp
    from mcp.client.stdio import stdio_client

    # It logs a traceback for each line that is no message; what fails by it is an error of ours.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)
    if not isinstance(server, str):
        server = stdio_client(server, errlog=errors)
    with anyio.CancelScope(deadline=anyio.current_time() + seconds) as scope:
        async with mcp.Client(server) as client:
            # Results are shown without a check by the server's schema, of which a regular expression could hold up the
            # whole process.
            client.session.validate_tool_result = _unchecked  # type: ignore[method-assign]
            scope.deadline = math.inf
            yield client
            scope.deadline = anyio.current_time() + CLOSE_SECONDS
    if scope.cancelled_caught:
        raise TimeoutError


async def _unchecked(name: str, result: Any) -> None:
    """Stands for the check of a result by the server's schema."""


def _fault(schema: ToolSchema) -> str | None:
    """Return the fault that makes a tool unfit to be offered, or None."""
    if not _NAME.fullmatch(schema.name):
        return "its name has other characters than letters, digits and _ . / -, or more than 128 of them"
    if len(schema.description) > MAX_DESCRIPTION:
        return f"its description has more than {MAX_DESCRIPTION} characters"
    fault = schema_fault(schema.parameters)
    return f"of its schema, {fault}" if fault else None


def _text(error: BaseException, seconds: float) -> str:
    """Return the error's name and text, or the deadline of ``seconds``; of a group, those of its first error."""
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    inner = getattr(error, "exceptions", None)
    return _text(inner[0], seconds) if inner else clip(f"{type(error).__name__}: {error}", MAX_REASON)


def _result_text(result: Any) -> str:
    """Return a tool's answer as text: its texts, and for other content the kind of it."""
    parts = []
    for block in result.content:
        parts.append(getattr(getattr(block, "resource", block), "text", f"[{block.type}]"))
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content))
    return "\n".join(parts)
