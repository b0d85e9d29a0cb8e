from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import pickle
import time

import pytest
from mrlm_environments.toolbox.programs import OUTPUT_CHARACTERS, PythonRepl, Shell, told
from mrlm_environments.tools.environment import ToolEnvironment

from mrlm_pl.environment import Task
from mrlm_pl.environment.tools import argument_fault
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, SandboxError
from mrlm_pl.sandbox import Execution, IsolationName, Sandbox
from mrlm_pl.sandbox.host import cell as cells

TASK = Task("tools", "train", 0, 0, {"question": "?", "answer": "42", "required_tools": [], "gold": None})


def needs(level: IsolationName) -> None:
    try:
        _ = Sandbox(level=level).isolation
    except SandboxError as error:
        pytest.skip(f"this machine does not offer {level}: {error}")


def opened(tool: PythonRepl | Shell) -> PythonRepl | Shell:
    tool.open(TASK)
    return tool


def test_a_session_remembers_and_prints_its_last_value() -> None:
    tool = opened(PythonRepl())
    assert tool.call({"code": "x = 20\nprint('set')"}) == "set"
    assert tool.call({"code": "def twice(y): return 2 * y\ntwice(x) + 2"}) == "42"
    assert tool.call({"code": "x = 1"}) == "[no output]"
    tool.open(TASK)
    assert "NameError" in tool.call({"code": "x"}), "another episode has its own session"
    tool.close()
    tool.close()


@pytest.mark.parametrize("tool", ["python_repl", "shell"])
def test_a_machine_without_a_sandbox_is_an_error_before_the_first_episode(
    tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(sandbox: Sandbox) -> None:
        raise SandboxError("the sandbox needs Linux")

    environment = ToolEnvironment(tools=["calculator", tool])
    monkeypatch.setattr(Sandbox, "isolation", property(refuse))
    with pytest.raises(SandboxError, match="needs Linux"):
        environment.tasks("train")


def test_errors_and_exits_of_a_session() -> None:
    tool = opened(PythonRepl(Sandbox(wall_seconds=30.0)))
    assert tool.call({"code": "print('before'); 1 / 0"}) == "before\nZeroDivisionError: division by zero"
    assert "SyntaxError" in tool.call({"code": "1 +"})
    assert "SystemExit" in tool.call({"code": "kept = 5; raise SystemExit(3)"})
    assert tool.call({"code": "kept"}) == "5", "sys.exit ends a call, not the session"
    assert tool.call({"code": "import os; os._exit(0)"}) == "[ended: its process ended. The session begins anew.]"
    assert "NameError" in tool.call({"code": "kept"})
    tool.sandbox, patient = Sandbox(wall_seconds=1.0), tool.sandbox
    assert tool.call({"code": "while True: pass"}) == "[ended: it took too long. The session begins anew.]"
    tool.sandbox = patient
    assert tool.call({"code": "7"}) == "7"
    tool.close()


def test_a_session_has_the_processor_time_of_eight_calls() -> None:
    tool = opened(PythonRepl(Sandbox(wall_seconds=30.0)))
    code = "import resource; resource.getrlimit(resource.RLIMIT_CPU)[0]"
    assert tool.call({"code": code}) == str(8 * 30 + 1)
    tool.close()


def test_long_output_is_cut() -> None:
    tool = opened(PythonRepl())
    answer = tool.call({"code": "print('a' * 3000)"})
    assert answer == "a" * OUTPUT_CHARACTERS + "\n[1000 more characters]"
    assert "thrown away" in tool.call({"code": "print('a' * 300000)"})
    assert "[ended: it printed too much" in tool.call({"code": "while True: print('a' * 100000)"})
    tool.close()


def test_files_of_a_shell_last_for_the_episode() -> None:
    needs("namespaces")
    tool = opened(Shell())
    assert tool.call({"script": "echo 42 > kept; cat kept"}) == "42"
    assert tool.call({"script": "cat kept; exit 3"}) == "42\n[exit status 3]"
    tool.open(TASK)
    assert "No such file" in tool.call({"script": "cat kept"})
    tool.close()
    tool.close()


@pytest.mark.parametrize("level", ["landlock", "limits"])
def test_a_shell_at_a_weaker_level_forgets(level: IsolationName) -> None:
    needs(level)
    tool = opened(Shell(Sandbox(level=level)))
    assert tool.call({"script": "echo 42 > kept; cat kept"}) == "42"
    assert "[exit status 1]" in tool.call({"script": "cat kept"})
    tool.close()


def test_scripts_that_take_too_long_cannot_start_or_end_all() -> None:
    needs("namespaces")
    tool = opened(Shell(Sandbox(wall_seconds=30.0)))
    tool.call({"script": "echo 42 > kept"})
    tool.sandbox, patient = Sandbox(wall_seconds=3.0), tool.sandbox
    assert tool.call({"script": "echo soon; sleep 60"}) == "soon\n[ended: it took too long.]"
    tool.sandbox = patient
    assert tool.call({"script": "cat kept"}) == "42", "the files outlive a script that is ended"
    for script, told_of in (("echo " + "a" * 140_000, "too long"), ("\0", "null byte"), ("echo \ud800", "surrogates")):
        answer = tool.call({"script": script})
        assert told_of in answer
        assert answer.endswith("[exit status 126]")
    tool.call({"script": "kill -9 1; kill -9 -1"})  # which fails unless a process of an earlier script is just ending
    assert tool.call({"script": "echo alive"}) == "alive"
    tool.close()


def test_what_goes_on_printing_does_not_break_the_next_call() -> None:
    needs("namespaces")
    tool = opened(Shell(Sandbox(wall_seconds=1.0)))
    for _ in range(3):
        assert tool.call({"script": "yes & yes & echo begun"})
    assert tool.call({"script": "echo again"})
    tool.close()


def test_too_much_output_between_requests_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "MAX_PRINTED", 1000)
    needs("namespaces")
    sandbox = Sandbox(wall_seconds=30.0)
    with sandbox.open(shell=True) as cell:
        assert sandbox.script(cell, "(sleep 0.2; head -c 5000 /dev/zero) &").status == 0
        printed = 0
        while printed < 5000:
            text, cut = cell.output()
            printed += 5000 if cut else len(text)
            time.sleep(0.05)


def test_levels_that_the_machine_lacks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"sandbox\.level"):
        PythonRepl(Sandbox(minimum="namespaces", level="limits"))


def test_arguments_are_checked_against_the_schemas() -> None:
    for tool, name in ((PythonRepl, "code"), (Shell, "script")):
        assert argument_fault(tool.schema, {name: "1"}) is None
        assert argument_fault(tool.schema, {}) is not None
        assert argument_fault(tool.schema, {name: 1}) is not None
        assert argument_fault(tool.schema, {name: "1", "more": 1}) is not None
        assert argument_fault(tool.schema, {name: "1" * 100_001}) is not None


def test_what_an_agent_is_told() -> None:
    def done(**changes: object) -> Execution:
        plain = {"output": "", "cut": False, "error": None, "ending": None, "status": 0, "seconds": 0.1}
        return Execution(**{**plain, "isolation": "limits", **changes})  # type: ignore[arg-type]

    assert told(done(), limit=10) == "[no output]"
    assert told(done(output="\nabc\n\n"), limit=10) == "\nabc"
    assert told(done(output="a" * 12), limit=10) == "a" * 10 + "\n[2 more characters]"
    assert told(done(output="a", cut=True), limit=10) == "a\n[the rest of the output was thrown away]"
    assert told(done(status=2), limit=10) == "[exit status 2]"
    assert told(done(ending="memory", status=9), "Gone.", 10) == "[ended: it used too much memory. Gone.]"
    assert told(done(error="E" * 11), limit=10) == "E" * 10 + "\n[1 more characters]"


@pytest.mark.parametrize("kind", [PythonRepl, Shell])
def test_copies_have_sessions_of_their_own(kind: type[PythonRepl | Shell]) -> None:
    needs("namespaces")
    tool = opened(kind(Sandbox(wall_seconds=20.0)))
    name = "code" if kind is PythonRepl else "script"
    tool.call({name: "x=42"})
    for other in (copy.deepcopy(tool), pickle.loads(pickle.dumps(tool))):
        assert other.sandbox == tool.sandbox
        assert other._cell is None
        other.call({name: "y=1"})
        other.close()
    tool.close()


def opened_pipes() -> set[str]:
    """Return the names of this process's pipes and sockets, each with its own number."""
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as that of the folder itself
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {name for name in names if name.startswith(("pipe:", "socket:"))}


@pytest.mark.parametrize("in_cycle", [False, True])
def test_a_tool_that_nobody_closes_ends_its_session(in_cycle: bool) -> None:
    tool = opened(PythonRepl())
    tool.call({"code": "1"})
    tool.close()
    before = opened_pipes()
    tool.call({"code": "1"})
    assert tool._cell is not None
    own = opened_pipes() - before
    assert len(own) >= 2
    ended = tool._cell._ended
    if in_cycle:
        tool.itself = tool  # type: ignore[union-attr]
    del tool
    gc.collect()
    assert ended.wait(60), "its process is gone"
    assert not own & opened_pipes()


def test_a_session_that_nobody_closes_is_ended_while_it_computes() -> None:
    cell = Sandbox(wall_seconds=60.0).open()
    ended = cell._ended
    assert cell.request({"operation": "run", "source": "while True: pass"}, time.monotonic() + 0.3) == {}
    del cell
    gc.collect()
    assert ended.wait(60)


def test_both_in_a_tool_environment() -> None:
    needs("namespaces")
    environment = ToolEnvironment(tools=["python_repl", "shell"], data="rows.jsonl")
    environment.reset(TASK)

    def said(tool: str, **arguments: str) -> str:
        call = f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"
        return environment.step({"agent": Message("assistant", call)}).observations["agent"][0].content

    assert said("python_repl", code="6 * 7") == "42"
    assert said("shell", script="echo $((6 * 7))") == "42"
    assert said("python_repl", program="1").startswith("error: wrong arguments")
    assert environment.copy() is not environment
    last = environment.step({"agent": Message("assistant", "<answer>42</answer>")})
    assert last.success
    assert all(tool._cell is None for tool in environment.toolbox.items if isinstance(tool, (PythonRepl, Shell)))
