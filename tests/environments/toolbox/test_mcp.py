from __future__ import annotations

import copy
import gc
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from mrlm_environments.toolbox import mcp as mcp_tools
from mrlm_environments.toolbox.mcp import McpError, McpTools

from mrlm_pl.environment import ToolSchema
from mrlm_pl.environment.tools import Tool, ToolError
from mrlm_pl.episode import Task
from mrlm_pl.errors import ConfigurationError
from tests.support.servers.ports import free_port, nowhere

TASK = Task("tools", "train", 0)
SERVER = """
import os, sys, time
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")
counted = []

@server.tool(description="Add two numbers.")
def add(a: int, b: int) -> int:
    return a + b

@server.tool()
def count() -> str:
    counted.append(0)
    return f"{len(counted)} in {os.getpid()}"

@server.tool()
def parts() -> list:
    return ["one", Image(data=b"", format="png"), "", "two"]

@server.tool()
def refuse() -> str:
    raise ToolError("no such thing")

@server.tool()
async def sleep() -> str:
    import anyio
    await anyio.sleep(60)

@server.tool()
def die() -> str:
    os._exit(3)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return str(path)


@pytest.fixture(scope="module")
def server(program: str) -> Iterator[McpTools]:
    tools = McpTools(sys.executable, [program], timeout=100)
    tools.open(TASK)
    yield tools
    tools.close()


def named(tools: McpTools, name: str) -> Tool:
    return next(tool for tool in tools.tools() if tool.schema.name == name)


def processes() -> list[int]:
    """Return the servers that this process has started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # another test's, that has just ended
            if "server.py" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


def test_the_servers_tools_are_tools(server: McpTools) -> None:
    assert [tool.schema.name for tool in server.tools()] == ["add", "count", "parts", "refuse", "sleep", "die"]
    add = named(server, "add")
    assert add.schema.description == "Add two numbers."
    assert set(add.schema.parameters["properties"]) == {"a", "b"}
    assert add.call({"a": 17, "b": 25}) == "42"
    assert named(server, "parts").call({}) == "one\n[image]\n\ntwo", "an empty text is empty"


def test_nobody_waits_for_the_server_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def met(self: McpTools) -> Any:
        both.wait(100)
        raise McpError(f"{self.url} is gone")

    monkeypatch.setattr(McpTools, "_connect", met)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(McpTools(url=f"http://{host}").tools) for host in "ab"]
    assert [str(item.exception()) for item in asked] == ["http://a is gone", "http://b is gone"]


def test_a_tool_that_fails_tells_why(server: McpTools) -> None:
    with pytest.raises(ToolError, match="no such thing"):
        named(server, "refuse").call({})
    with pytest.raises(ToolError):
        server.call("absent", {})
    assert named(server, "add").call({"a": 1, "b": 1}) == "2"


def test_a_call_has_a_deadline(server: McpTools) -> None:
    server.timeout = 0.5
    started = time.perf_counter()
    with pytest.raises(ToolError, match=r"within 0\.5 s"):
        named(server, "sleep").call({})
    assert time.perf_counter() - started < 30
    server.timeout = 100
    assert named(server, "add").call({"a": 1, "b": 1}) == "2"


@pytest.mark.long
def test_a_server_that_dies_is_an_error_and_the_next_episode_has_a_new_one(program: str) -> None:
    before = processes()
    tools = McpTools(sys.executable, [program], shared=True, only=["count", "die"])
    assert [tool.schema.name for tool in tools.tools()] == ["count", "die"]
    assert processes() == before, "listing leaves no process behind"
    tools.open(TASK)
    first = named(tools, "count").call({})
    tools.finish()
    tools.open(TASK)
    assert named(tools, "count").call({}) == first.replace("1 in", "2 in"), "a shared server is kept"
    for _ in range(2):
        started = time.perf_counter()
        with pytest.raises(ToolError, match="server has ended"):
            named(tools, "die").call({})
        assert time.perf_counter() - started < 20
    tools.open(TASK)
    again = named(tools, "count").call({})
    assert again.startswith("1 in")
    assert again != first
    del tools
    gc.collect()
    assert processes() == before, "a server ends with its tools"


@pytest.mark.long
def test_every_episode_and_copy_has_its_own_server(server: McpTools) -> None:
    before = processes()
    first = named(server, "count").call({})
    for other in (copy.deepcopy(server), pickle.loads(pickle.dumps(server))):
        with pytest.raises(ToolError, match="no episode"):
            other.call("count", {})
        assert len(other.tools()) == 6, "a copy knows the tools without asking"
        assert processes() == before
    other.open(TASK)
    assert named(other, "count").call({}).startswith("1 in")
    assert named(server, "count").call({}) == first.replace("1 in", "2 in")
    other.finish()
    assert processes() == before, "a server that is not shared ends with its episode"
    other.close()


def test_a_server_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(McpError, match="no-such-program"):
        McpTools("no-such-program").open(TASK)
    with pytest.raises(McpError, match="out of order"):
        McpTools(sys.executable, ["-c", "raise SystemExit('out of order')"]).open(TASK)
    hangs = tmp_path / "server.py"
    hangs.write_text("import time; time.sleep(60)")
    before = processes()
    with pytest.raises(McpError, match="within 1 s"):
        McpTools(sys.executable, [str(hangs)], start_timeout=1).open(TASK)
    assert processes() == before
    with pytest.raises(McpError, match="127"):
        McpTools(url=f"http://{nowhere()}/mcp", start_timeout=5).tools()


@pytest.mark.slow
def test_a_server_by_its_address(program: str) -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, program, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 100
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
            time.sleep(0.1)
        tools = McpTools(url=f"http://127.0.0.1:{port}/mcp", only=["add"])
        tools.open(TASK)
        assert named(tools, "add").call({"a": 2, "b": 3}) == "5"
        process.kill()
        process.wait()
        with pytest.raises(ToolError):
            named(tools, "add").call({"a": 2, "b": 3})
        tools.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_server_ends_with_the_program(program: str) -> None:
    code = f"""
from mrlm_environments.toolbox.mcp import McpTools
from mrlm_pl.environment import ToolSchema
from mrlm_pl.episode import Task
import sys
tools = McpTools(sys.executable, [{program!r}])
tools.open(Task("tools", "train", 0))
print(tools.call("count", {{}}).split()[-1])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert not psutil.pid_exists(int(result.stdout))
    assert result.stderr == ""


class Stuck:
    """A client that blocks its event loop, or whose end cannot be canceled."""

    def __init__(self, place: str) -> None:
        self.place, self.free = place, threading.Event()

    @asynccontextmanager
    async def __call__(self, server: Any, errors: Any, seconds: float) -> AsyncIterator[Any]:
        self.block("start")
        yield self
        self.block("end")
        with anyio.CancelScope(shield=True):
            while self.place == "shielded end" and not self.free.is_set():
                await anyio.sleep(0.05)

    async def call_tool(self, name: str, arguments: Any) -> None:
        self.block("call")

    def block(self, place: str) -> None:
        if place == self.place:
            self.free.wait(100)


@pytest.mark.parametrize("place", ["start", "call", "end", "shielded end"])
def test_a_client_that_is_stuck_holds_nothing_up(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    stuck = Stuck(place)
    monkeypatch.setattr(mcp_tools, "_client", stuck)
    monkeypatch.setattr(mcp_tools, "CLOSE_SECONDS", 0.3)
    monkeypatch.setattr("mrlm_pl.concurrency.event_loop.END_SECONDS", 0.3)
    tools = McpTools("server", timeout=0.3, start_timeout=0.3 if place == "start" else 60)
    if place == "start":
        with pytest.raises(McpError, match=r"cannot be used: no answer within 0\.3 s"):
            tools.open(TASK)
    else:
        tools.open(TASK)
        if place == "call":
            with pytest.raises(ToolError, match=r"no answer within 0\.3 s"):
                tools.call("add", {})
        tools.close()
    assert not stuck.free.is_set()
    stuck.free.set()


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigurationError, match="give one of them"):
        McpTools()
    with pytest.raises(ConfigurationError, match="give one of them"):
        McpTools("x", url="y")
    with pytest.raises(ConfigurationError, match="timeout is 0"):
        McpTools("x", timeout=0)


HOSTILE = """
import json, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("hostile")
settings = json.loads(sys.argv[1])

@server.tool()
def honest(a: int) -> str:
    return "yes"

@server.tool()
def odd(a: str = "") -> dict[str, str]:
    return {"text": "x" * 50_000}

tool = server._tool_manager.get_tool("odd")
tool.parameters = settings.get("parameters", tool.parameters)
tool.fn_metadata.output_schema = settings.get("output", tool.fn_metadata.output_schema)
server.run()
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Any]:
    """Makes tools of a server whose tool ``odd`` has other schemas than it should."""
    path, made = tmp_path / "hostile.py", []
    path.write_text(HOSTILE)

    def make(only: list[str] | None = None, **schemas: Any) -> McpTools:
        made.append(McpTools(sys.executable, [str(path), json.dumps(schemas)], timeout=100, only=only))
        return made[-1]

    yield make
    for tools in made:
        tools.close()


@pytest.mark.long
def test_a_tool_whose_schema_cannot_be_used_is_named_when_it_is_listed(hostile: Any) -> None:
    reference = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema"}}}
    with pytest.raises(McpError, match=r"the tool 'odd' cannot be used: of its schema, it refers to 'http.*`only`"):
        hostile(parameters=reference).tools()
    assert [tool.schema.name for tool in hostile(only=["honest"], parameters=reference).tools()] == ["honest"]


@pytest.mark.long
def test_the_schema_of_a_result_holds_nothing_up(hostile: Any) -> None:
    pattern = {"type": "object", "properties": {"text": {"type": "string", "pattern": "^(x+x+)+y$"}}}
    tools = hostile(output=pattern)
    tools.open(TASK)
    assert "xxx" in named(tools, "odd").call({})


RAW = """
import json, sys

mode = sys.argv[1]
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "initialize":
        version, info = asked["params"]["protocolVersion"], {"name": "raw", "version": "1"}
        answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif asked["method"] == "tools/list":
        names = [f"t{number}" for number in range(200 if mode == "many" else 1)]
        answer["result"] = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}
        if mode == "unlisted":
            continue
    elif mode == "refuses":
        answer["error"] = {"code": -32000, "message": "quota exceeded"}
    else:
        sys.stdout.buffer.write(b"\\xff\\xfe\\n")
        answer["result"] = {"content": [{"type": "text", "text": "yes"}]}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[Any]:
    """Makes tools of a server without a library, which has a fault."""
    path, made = tmp_path / "raw.py", []
    path.write_text(RAW)

    def make(mode: str, **options: Any) -> McpTools:
        made.append(McpTools(sys.executable, [str(path), mode], **options))
        return made[-1]

    yield make
    for tools in made:
        tools.close()


def test_bytes_that_are_no_text_cost_no_answer(raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    tools = raw("bytes", timeout=5, shared=True)
    for _ in range(2):
        tools.open(TASK)
        assert named(tools, "t0").call({}) == "yes"
    assert not [record.getMessage() for record in caplog.records if record.exc_info], "no tracebacks"


def test_an_error_with_the_code_of_a_closed_connection_is_the_tools_own(raw: Any) -> None:
    tools = raw("refuses", timeout=100, shared=True)
    tools.open(TASK)
    for _ in range(2):
        with pytest.raises(ToolError, match="quota exceeded"):
            named(tools, "t0").call({})


def test_of_too_many_tools_some_are_to_be_selected(raw: Any) -> None:
    with pytest.raises(McpError, match=r"has 200 tools, more than 128; select some with `only`"):
        raw("many").tools()
    assert [tool.schema.name for tool in raw("many", only=["t199"]).tools()] == ["t199"]


@pytest.mark.long
def test_a_server_that_does_not_list_its_tools_is_told_with_the_deadline(raw: Any) -> None:
    with pytest.raises(McpError, match=r"raw\.py unlisted' does not list its tools: no answer within 2 s; check the"):
        raw("unlisted", start_timeout=2).tools()


@pytest.mark.parametrize(
    ("tool", "fault"),
    [
        (ToolSchema("a b", ""), "its name"),
        (ToolSchema("a\x1b[2J", ""), "its name"),
        (ToolSchema("x" * 129, ""), "its name"),
        (ToolSchema("x", "y" * 20_001), "its description"),
        (ToolSchema("x", "", {"type": 3}), "of its schema, at type"),
    ],
)
def test_tools_that_cannot_be_offered(tool: ToolSchema, fault: str) -> None:
    assert (mcp_tools._fault(tool) or "").startswith(fault)
