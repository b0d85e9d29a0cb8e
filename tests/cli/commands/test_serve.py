"""``mrlm serve`` and ``mrlm sessions``."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from mrlm_pl.cli.commands import serve as command
from mrlm_pl.cli.commands.serve import hosted_environments, read_settings, serve_parser
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, SandboxError
from mrlm_pl.runs.plugins import environments_by_name, import_environment
from mrlm_pl.sandbox import sandbox
from mrlm_pl.serving import RemoteEnvironment
from tests.support.models.verifier_models import tiny
from tests.support.servers.certificates import Authority
from tests.support.servers.environment_servers import eventually
from tests.support.servers.ports import free_port

ROOT = Path(__file__).parents[3]


class Running:
    """``mrlm serve`` in its own process."""

    def __init__(self, *arguments: str) -> None:
        words = [sys.executable, "-m", "mrlm_pl.cli.main", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        assert self.line.startswith("serving on 127.0.0.1:"), self.process.communicate()
        self.target = self.line.split()[-1]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit status and log."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, log = self.process.communicate(timeout=100)
        return self.process.returncode, log


@pytest.fixture
def running() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(*arguments))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.communicate()


def begun(environment: Any) -> Any:
    asyncio.run(environment.reset(environment.tasks("train")[0]))
    return environment


def test_the_hash_of_settings_is_that_of_the_environment_that_is_made() -> None:
    def hashed(name: str, settings: dict[str, Any]) -> str:
        (factory,) = hosted_environments([], {name: settings}, allow_settings=False).values()
        return factory.hashes

    words = {"class_path": "RuleJudge", "init_args": {"words": 60}}
    assert hashed("debate", {"judge": "RuleJudge"}) == hashed("debate", {"judge": words}), "defaults of a judge too"
    plain = hashed("math", {})
    assert hashed("MathEnvironment", {"kinds": None, "difficulty": [1, 3]}) == plain, "the defaults"
    assert hashed("math", {"difficulty": [1, 2]}) != plain
    assert hashed("coordination", {}) != plain


@pytest.mark.long
def test_servers_with_other_settings_are_named(running, caplog):
    first = running("--environments", "math")
    second = running("--environment", "math", "--environment.steps_bonus", "3")
    environment = RemoteEnvironment([first.target, second.target], "math")
    for _ in range(2):
        begun(environment.copy()).close()
    assert "hosts environment 'math' with other settings (steps_bonus) than" in caplog.text


@pytest.mark.long
def test_sessions_lists_the_workers_of_a_controller(running, mrlm):
    controller = running("--controller", "true")
    worker = running("--environments", "math,coordination", "--join", controller.target, "--max_sessions", "7")
    playing = begun(RemoteEnvironment(controller.target, "math"))  # waits until it has joined
    eventually(lambda: "1 of 7 sessions" in mrlm("sessions", controller.target)[1])  # after its next report
    status, out, _ = mrlm("sessions", controller.target)
    assert status == 0
    workers, sessions = out.split("1 session\n")
    heard = r"heard \d\.\d s ago"
    assert re.fullmatch(rf"1 worker\n\w+  {worker.target}  1 of 7 sessions  {heard}  coordination, math\n", workers), (
        workers
    )
    assert re.match(r"\S+  math +turn 0", sessions)
    (found,) = json.loads(mrlm("sessions", controller.target, "--json")[1])["workers"]
    assert found["report"]["address"] == worker.target
    assert [item["name"] for item in found["report"]["environments"]] == ["coordination", "math"]
    playing.close()


def test_a_server_from_its_start_to_its_end(running, mrlm, tmp_path):
    (tmp_path / "settings.yaml").write_text("math: {difficulty: [2, 2], kinds: [arithmetic]}\ncoordination:\n")
    metrics = free_port()
    options = ["--grace_seconds", "100", "--metrics_port", str(metrics), "--processes", "1"]
    server = running("--environments", "math,coordination", "--settings", str(tmp_path / "settings.yaml"), *options)
    environment = RemoteEnvironment(server.target, "math")
    task = environment.tasks("train")[0]
    assert task.data["question"].startswith("What is ")
    assert RemoteEnvironment(server.target, "coordination").agents == ("row", "column")
    begun(environment)

    status, out, _ = mrlm("sessions", server.target)
    assert status == 0
    assert re.fullmatch(r"1 session\n[0-9a-f]{12}  math +turn 0 +age \d+ s  lease 1\d\d s +\S+:\d+\n", out)
    status, out, _ = mrlm("sessions", server.target, "--json", "--environment", "coordination")
    assert (status, json.loads(out)) == (0, {"sessions": [], "total": "0"})

    numbers = urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=60).read().decode()
    assert "mrlm_sessions 1.0" in numbers
    assert "mrlm_sessions_opened_total 1.0" in numbers
    assert "mrlm_steps_total 0.0" in numbers

    begun(other := environment.copy())
    with pytest.raises(ConfigurationError, match=r"settings \['difficulty'\]: this server takes none from clients"):
        begun(RemoteEnvironment(server.target, "math", {"difficulty": [1, 1]}))
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # another Ctrl-C would end it immediately
        server.process.send_signal(number)
        time.sleep(0.3)
    step = asyncio.run(environment.step({"agent": Message("assistant", task.data["answer"])}))
    assert step.rewards == {"agent": 1.0}, "live sessions continue"
    assert server.process.poll() is None
    environment.close()
    other.close()
    server.process.wait(100)
    status, log = server.end()
    assert status == 0, log
    assert "environment math: agents agent" in log
    assert "going down: 2 sessions are live" in log
    assert log.count("Ctrl-C: shutting down; press it again to end immediately") == 1
    assert "Traceback" not in log


@pytest.mark.long
def test_reward_functions_of_an_own_file_are_served(running, tmp_path):
    (tmp_path / "grades_of_mine.py").write_text("def length(reply, row):\n    return len(reply) * row['weight']\n")
    rows = [{"prompt": f"say {number}", "weight": 2} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = f"[{{call: {tmp_path}/grades_of_mine.py:length, weight: 0.5}}]"
    words = ("--environment", "question", "--environment.data", str(tmp_path / "rows.jsonl"))
    server = running(*words, "--environment.rewards", rewards, "--processes", "1")
    environment = begun(RemoteEnvironment(server.target, "question"))
    step = asyncio.run(environment.step({"agent": Message("assistant", "four")}))
    assert step.rewards == {"agent": 4.0}


@pytest.mark.long
def test_settings_of_clients_are_checked_like_a_configuration(running):
    server = running("--environments", "math", "--allow_settings", "true")
    environment = RemoteEnvironment(server.target, "math", {"difficulty": [5, 5], "kinds": ["algebra"]})
    assert environment.tasks("train")[0].data["kind"] == "algebra"
    with pytest.raises(ConfigurationError, match="dificulty"):
        begun(RemoteEnvironment(server.target, "math", {"dificulty": [5, 5]}))
    with pytest.raises(ConfigurationError, match=r"difficulty is \(7, 9\)"):
        begun(RemoteEnvironment(server.target, "math", {"difficulty": [7, 9]}))
    with pytest.raises(ConfigurationError, match=r"settings \['data'\]: clients may set difficulty, kinds"):
        begun(RemoteEnvironment(server.target, "math", {"data": "/etc/passwd.jsonl", "difficulty": [1, 1]}))
    assert server.end(signal.SIGINT)[0] == 0


def test_clients_cannot_start_programs(tmp_path):
    make = hosted_environments(["tools"], {}, allow_settings=True)["tools"]
    mark = tmp_path / "attacked"
    program = {"class_path": "mrlm_environments.toolbox.mcp.McpTools", "init_args": {"command": "touch"}}
    program["init_args"]["args"] = [str(mark)]
    for settings in ({"tools": [program]}, {"kinds": [program]}, {"max_turns": program}, {"system_prompt": program}):
        with pytest.raises(ConfigurationError):
            make(settings)
    assert not mark.exists()
    with pytest.raises(ConfigurationError, match="clients may set nothing of 'kuhn_poker'"):
        hosted_environments(["kuhn_poker"], {}, allow_settings=True)["kuhn_poker"]({"data": "x"})


PLAIN = (int, float, bool, str, type(None))


def leaves(annotation):
    """The types that an annotation is made of; the values of a Literal for their types."""
    if get_origin(annotation) is Literal:
        return [type(value) for value in get_args(annotation)]
    parts = get_args(annotation)
    return [leaf for part in parts for leaf in leaves(part)] if parts else [annotation]


def test_what_clients_may_set_is_plain_and_names_no_place():
    import_environment("math")
    for cls in environments_by_name().values():
        hints = get_type_hints(cls.__init__)
        for name in cls.client_settings:
            assert set(leaves(hints[name])) <= set(PLAIN), f"{cls.__name__}.{name}"
            assert not {"data", "path", "url", "command", "sandbox"} & set(name.split("_")), f"{cls.__name__}.{name}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "environments: name at least one"),
        (("--environments", "mathh"), "did you mean 'math'"),
        (("--environments", "math", "--host", "0.0.0.0"), "there is no token"),
        (("--environments", "math", "--prot", "1"), "prot"),
        (("--environments", "math", "--port", "-1"), "port"),
        (("--environments", "math", "--token_file", "/nowhere/token"), "token_file: '/nowhere/token' cannot be read"),
        (("--environments", "math", "--tls_key", "/nowhere/key"), "needs both tls_certificate and tls_key"),
        (("--environments", "math", "--processes", "9" * 20), "processes is 99999999999999999999; it must be"),
        (("--settings", "/nowhere/settings.yaml"), "settings: '/nowhere/settings.yaml' cannot be read"),
        (("--environments", "math", "--message_mb", "4096"), "message_mb is 4096; it must be from 1 to 2"),
        (("--environments", "math", "--openenv_port", "-1"), "openenv_port: expected a number >= 0, but the"),
        (("--settings", sys.executable), "codec can't decode byte"),
        (
            ("--environments", "math", "--device", "cuda"),
            "device: 'cuda' does nothing without policies or verifier",
        ),
        (
            ("--environments", "math", "--policies_int8"),
            "policies_int8: True does nothing without policies",
        ),
        (("--environments", "math", "--verifier_batch", "2"), "verifier_batch: 2 does nothing without verifier; leave"),
        (
            ("--policies", "{a: builtin:tiny}", "--processes", "2"),
            "processes: 2 does nothing without environments or",
        ),
        (("--policies", "{a: builtin:tiny}", "--join", "h:1"), "join: 'h:1' does nothing without environments or"),
        (("--controller", "--threads", "2"), "threads: 2 does nothing without environments or environment or settings"),
    ],
)
def test_mistakes_are_told_before_anything_is_served(mrlm, monkeypatch, arguments, text):
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    status, out, err = mrlm("serve", "--port", "0", *arguments)
    assert status == 2
    assert text in err
    assert out == ""


@pytest.mark.parametrize("content", ["[math]", "math: 3", "math: [1]", "{"])
def test_a_settings_file_maps_names_to_arguments(tmp_path, content):
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="settings:"):
        read_settings(str(path))
    for doubled in (
        "math: {difficulty: [1, 1]}\nmath: {}\n",
        '{"math": {"difficulty": [1, 1],\n"difficulty": [1, 2]}}',
    ):
        path.write_text(doubled)
        with pytest.raises(
            ConfigurationError, match=r"settings.yaml', line 2: the key '\w+' is in line 1 already; remove"
        ):
            read_settings(str(path))
    path.write_text("math: {difficulty: [1, 2]}\nsql:\n")
    assert read_settings(str(path)) == {"math": {"difficulty": [1, 2]}, "sql": {}}


def test_environments_choose_among_those_with_settings():
    settings = {"MathEnvironment": {"difficulty": [2, 2]}, "coordination": {}}
    assert list(hosted_environments([], settings, allow_settings=False)) == ["math", "coordination"]
    (math,) = hosted_environments(["math"], settings, allow_settings=False).values()
    assert tuple(math({}).difficulty) == (2, 2), "by either of its names"
    with pytest.raises(ConfigurationError, match="'math' has settings already, as 'math'; name it once"):
        hosted_environments(["math"], {**settings, "math": {}}, allow_settings=False)


def raises(error: Exception) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


def test_a_machine_that_cannot_run_programs_says_so_at_the_start(mrlm, monkeypatch):
    monkeypatch.setattr(command, "_check_port", lambda endpoint: None)
    monkeypatch.setattr(command, "EnvironmentServer", lambda *_: pytest.fail("a server is made"))
    monkeypatch.setattr(sandbox, "_strongest_level", raises(SandboxError("the sandbox needs Linux")))
    assert mrlm("serve", "--environments", "code")[::2] == (1, "mrlm: error: the sandbox needs Linux\n")


def test_a_mistake_in_the_settings_is_told_at_the_start(mrlm, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("math: {difficulti: [1, 1]}")
    status, _, err = mrlm("serve", "--settings", str(path))
    assert status == 2
    fault = "MathEnvironment has no 'difficulti'; did you mean 'difficulty'?"
    assert f"error: settings of 'math', in the file of --settings: difficulti: {fault}" in err
    status, _, err = mrlm("serve", "--environments", "question")
    needs = "settings of 'question', in the file of --settings: QuestionEnvironment needs data, rewards\n"
    assert (status, err) == (2, f"mrlm: error: {needs}")


def test_policies_are_served_in_a_precision(mrlm, monkeypatch):
    given = []

    def engine(dtype):
        given.append(dtype)
        raise ConfigurationError("seen")

    monkeypatch.setattr("mrlm_pl.engines.InProcessEngine", engine)
    for words in ((), ("--policies_precision", "bf16-mixed")):
        assert "seen" in mrlm("serve", "--policies", "{judge: builtin:tiny}", "--port", "0", *words)[2]
    assert given == [None, torch.bfloat16]


@pytest.mark.long_after(1)
def test_a_closed_terminal_ends_a_server_in_order():
    usual = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # ignored where the tests run under nohup
    words = ["serve", "--environments", "coordination", "--port", "0"]
    program = f"{usual}import sys; from mrlm_pl.cli.main import main; sys.exit(main({words!r}))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) as server:
        assert server.stdout is not None
        assert "serving on 127.0.0.1:" in server.stdout.readline()
        server.send_signal(signal.SIGHUP)
        _, log = server.communicate(timeout=100)
    assert (server.returncode, "going down: 0 sessions are live" in log) == (0, True), log


def test_a_port_that_is_taken(mrlm):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, _, err = mrlm("serve", "--environments", "math", "--port", str(taken.getsockname()[1]))
    assert status == 2
    assert "port: cannot listen on 127.0.0.1" in err


def test_a_key_of_another_certificate(mrlm, tmp_path):
    authority = Authority(tmp_path, "authority")
    (certificate, _), (_, key) = authority.identity("server"), authority.identity("other")
    tls = ("--tls_certificate", certificate, "--tls_key", key)
    status, _, err = mrlm("serve", "--environments", "math", "--port", "0", *tls)
    assert status == 2
    assert "or is tls_key not the key of tls_certificate?" in err


@pytest.mark.long
def test_a_wrong_port_for_openenv_is_all_that_is_told():
    command = [sys.executable, "-m", "mrlm_pl.cli.main", "serve", "--environments", "math", "--port", "0"]
    done = subprocess.run([*command, "--openenv_port", "99999"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mrlm: error: openenv_port: cannot listen on port 99999")
    assert last.endswith("; use another")


def test_a_port_that_is_taken_is_told_before_a_model_is_read(mrlm, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, _, err = mrlm("serve", "--verifier", str(tmp_path / "missing"), "--port", port)
    assert status == 2
    assert f"port: cannot listen on 127.0.0.1:{port}: it is taken; use another" in err


def test_every_option_is_read(monkeypatch, tmp_path):
    class StoppedError(Exception):
        pass

    seen: dict[str, Any] = {}

    class Server:
        def __init__(self, offer, endpoint, limits, threads, queue, policies, verifier):
            seen.update(offer=offer, endpoint=endpoint, limits=limits, threads=threads, queue=queue, verifier=verifier)
            raise StoppedError

    monkeypatch.setattr(command, "EnvironmentServer", Server)
    monkeypatch.setenv("MRLM_TOKEN", "secret")
    values = {"host": "0.0.0.0", "port": 7, "threads": 3, "queue": 5, "processes": 0, "max_sessions": 11}
    values |= {"lease_seconds": 2.5, "step_seconds": 4.5, "message_mb": 9}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    tiny(tmp_path, "value")
    of_verifier = {"max_tokens": 40, "batch": 6, "batch_tokens": 50, "queue": 70, "precision": "bf16"}
    words += [word for name, value in of_verifier.items() for word in (f"--verifier_{name}", str(value))]
    with pytest.raises(StoppedError):
        command.run(["--environments", "math,coordination", "--verifier", str(tmp_path), *words])
    assert set(seen["offer"].factories) == {"math", "coordination"}
    assert (seen["endpoint"].host, seen["endpoint"].port, seen["endpoint"].token) == ("0.0.0.0", 7, "secret")
    limits = seen["limits"]
    assert (limits.lease_seconds, limits.step_seconds, limits.sessions, limits.message_mb) == (2.5, 4.5, 11, 9)
    assert (seen["threads"], seen["queue"]) == (3, 5)
    verifier, scorer = seen["verifier"], seen["verifier"].scorer
    assert (verifier.batch, verifier.queue, verifier.model) == (6, 70, str(tmp_path))
    assert (scorer.max_tokens, scorer.batch_tokens, scorer.precision, scorer.device) == (40, 50, "bf16", "cpu")
    assert {action.dest for action in serve_parser()._actions} >= set(values)


@pytest.mark.parametrize("dashed", [False, True])
def test_one_environment_is_given_as_in_the_other_commands(monkeypatch, dashed):
    seen = {}

    class StoppedError(BaseException):
        pass

    class Server:
        def __init__(self, offer, endpoint, limits, *_):
            seen.update(factories=offer.factories, lease=limits.lease_seconds)
            raise StoppedError

    monkeypatch.setattr(command, "EnvironmentServer", Server)
    monkeypatch.setattr(command, "_check_port", lambda endpoint: None)
    from mrlm_pl.cli.main import main

    lease = "--lease-seconds" if dashed else "--lease_seconds"
    with pytest.raises(StoppedError):
        main(["serve", "--environment", "math", "--environment.difficulty", "[2, 2]", lease, "7"])
    assert seen["lease"] == 7.0
    assert list(seen["factories"]) == ["math"]
    assert tuple(seen["factories"]["math"]({}).difficulty) == (2, 2)


def test_sessions_of_a_server_that_is_not_there(mrlm, monkeypatch):
    monkeypatch.setattr("mrlm_pl.cli.commands.sessions.ANSWER_SECONDS", 0.3)
    status, out, err = mrlm("sessions", f"127.0.0.1:{free_port()}")
    assert (status, out) == (1, "")
    assert "no server answers at 127.0.0.1" in err


def test_serving_imports_no_torch():
    code = (
        "import sys; from mrlm_pl.cli.commands import serve;"
        "serve.hosted_environments(['math'], {}, allow_settings=False)['math']({});"
        "print(sorted({'torch', 'transformers', 'lightning'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"
