"""Mistakes of new users with servers end in one line, with the documented exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.math.environment import MathEnvironment

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.serving.cluster import ControllerServer
from mrlm_pl.serving.environments import client
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.environments.service import Limits
from mrlm_pl.serving.server import Endpoint, EnvironmentServer
from tests.support.servers.certificates import Authority
from tests.support.servers.ports import nowhere

ROOT = Path(__file__).parents[3]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[EnvironmentServer], str]]:
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    loop, started = EventLoopThread(), list[EnvironmentServer]()

    def run(server: EnvironmentServer) -> str:
        loop.submit(server.start()).result(100)
        started.append(server)
        return f"127.0.0.1:{server.port}"

    yield run
    for server in started:
        loop.submit(server.stop()).result(100)
    loop.close()


@pytest.fixture
def guarded(start: Callable[[EnvironmentServer], str]) -> str:
    """A server with a token."""
    offer = Offer({"math": lambda settings: MathEnvironment()}, 0, 20.0)
    return start(EnvironmentServer(offer, Endpoint(token="right")))


def short(err: str) -> bool:
    lines = err.strip().splitlines()
    return sum(line.startswith("mrlm: error: ") for line in lines) == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("serve --environments math --port 99999", "port: there is no port 99999; give 1 to 65535, or 0"),
        ("serve --environments math --port 0 --metrics_port 99999", "99999: bind(): port must be 0-65535.; use"),
        ("serve --environments math --join nowhere", "join: the address 'nowhere' is not HOST:PORT"),
        ("serve --environments math --join h:1 --advertise h", "advertise: the address 'h' is not HOST:PORT"),
        ("serve --environments math --advertise h:1", "advertise: 'h:1' does nothing without join; leave it out"),
        ("serve --controller --environments math", "controller: it hosts nothing; leave out environments"),
        ("serve --controller true --environments math", "controller: it hosts nothing; leave out environments"),
        ("serve --environments math --tls_key {not} --tls_certificate {not}", "tls_key: '{not}' is no PEM file"),
        ("sessions 127.0.0.1", "the address '127.0.0.1' is not HOST:PORT"),
        ("sessions http://127.0.0.1:50051", "the address 'http://127.0.0.1:50051' is not HOST:PORT"),
        ("sessions 127.0.0.1:99999", "with a port of 1 to 65535"),
        ("sessions 127.0.0.1:1 --limit -1", "limit: -1 is not a number of sessions; 0 lists all"),
        ("sessions 127.0.0.1:1 --limit 2147483648", "limit: 2147483648 is not a number of sessions; 0 lists all"),
        ("sessions 127.0.0.1:1 --tls_authority {not}", "tls_authority: '{not}' is no PEM file with a certificate"),
        ("check-env RemoteEnvironment --environment.name math", "environment: RemoteEnvironment needs address"),
        ("check-env RemoteEnvironment --environment.name math --environment.address h", "'h' is not HOST:PORT"),
    ],
)
def test_mistakes_in_the_options(mrlm: Any, monkeypatch: pytest.MonkeyPatch, arguments: str, text: str) -> None:
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    Path("not.pem").write_text("hello")
    status, out, err = mrlm(*arguments.format(**{"not": "not.pem"}).split())
    assert (status, out) == (2, "")
    assert text.format(**{"not": "not.pem"}) in err
    assert short(err)


def test_a_worker_that_nobody_could_reach(mrlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRLM_TOKEN", "right")
    status, _, err = mrlm("serve", "--environments", "math", "--host", "0.0.0.0", "--join", "127.0.0.1:1")
    assert status == 2
    assert "host: clients cannot reach a worker at '0.0.0.0'; name an address of this machine with `--advertise" in err


def test_a_wrong_token(mrlm: Any, monkeypatch: pytest.MonkeyPatch, guarded: str, tmp_path: Path) -> None:
    remote = ["--environment.address", guarded, "--environment.name", "math"]
    for arguments in (["sessions", guarded], ["check-env", "RemoteEnvironment", *remote]):
        monkeypatch.setenv("MRLM_TOKEN", f"wrong {arguments[0]}")  # connections are kept; each has its token
        (tmp_path / arguments[0]).write_text("wrong")
        option = "--token_file" if arguments[0] == "sessions" else "--environment.token_file"
        status, out, err = mrlm(*arguments, option, str(tmp_path / arguments[0]))
        assert (status, out) == (1, "")
        assert "the token is missing or wrong; give it with token_file or in MRLM_TOKEN" in err
        assert short(err)


def test_nobody_listens(mrlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASK_SECONDS", 0.5)
    environment = {"address": nowhere(), "name": "math"}
    flags = [word for key, value in environment.items() for word in (f"--environment.{key}", value)]
    fresh = json.dumps({"class_path": "RemoteEnvironment", "init_args": {}})  # drops the settings of the file's own
    own = [word.replace("--environment", "--data.environment") for word in flags]
    fit = ["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--data.environment", fresh, *own]
    for arguments in (["check-env", "RemoteEnvironment", *flags], [*fit, "--trainer.default_root_dir", "run"]):
        status, out, err = mrlm(*arguments)
        assert (status, out) == (1, "")
        assert "no server answers at 127.0.0.1" in err
        assert "start one with `mrlm serve`" in err
        assert short(err)
    assert not Path("run").exists()


def test_an_environment_that_the_server_has_not(mrlm: Any, start: Callable[[EnvironmentServer], str]) -> None:
    target = start(EnvironmentServer(Offer({"math": lambda settings: MathEnvironment()}, 0, 20.0)))
    flags = ["--environment.address", target, "--environment.name", "chess"]
    status, out, err = mrlm("check-env", "RemoteEnvironment", *flags)
    assert (status, out) == (2, "")
    assert "there is no environment 'chess' here; there are math" in err
    assert short(err)


@pytest.mark.parametrize(
    ("controller", "text"),
    [(True, "does not take this worker: the token is missing or wrong"), (False, "it is not a controller")],
)
@pytest.mark.long
def test_a_worker_that_is_not_taken_ends(start: Any, guarded: str, controller: bool, text: str) -> None:
    target = start(ControllerServer(Endpoint(token="right"), Limits())) if controller else guarded
    words = [
        sys.executable,
        "-m",
        "mrlm_pl.cli.main",
        "serve",
        "--environments",
        "math",
        "--port",
        "0",
        "--join",
        target,
    ]
    given = {**os.environ, "MRLM_TOKEN": "wrong" if controller else "right"}
    ended = subprocess.run(words, env=given, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    assert f"mrlm: error: join: {target}" in ended.stderr
    assert text in ended.stderr
    assert short(ended.stderr)


@pytest.mark.long
def test_a_worker_with_tls_at_a_controller_without_is_told_at_once(start: Any, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="certificates are made with the cryptography package")
    authority, target = Authority(tmp_path, "ours"), start(ControllerServer(Endpoint(), Limits()))
    words = [sys.executable, "-m", "mrlm_pl.cli.main", "serve", "--environments", "math", "--port", "0"]
    certificate, key = authority.identity("worker")
    words += ["--join", target, "--tls_authority", authority.file, "--tls_certificate", certificate, "--tls_key", key]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 2, ended.stderr
    assert f"mrlm: error: join: {target} does not take this worker: " in ended.stderr
    assert "the server has no TLS: leave tls_... out" in ended.stderr
    assert short(ended.stderr)


def test_a_host_without_an_address_is_named(mrlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRLM_TOKEN", "secret")
    status, _, err = mrlm("serve", "--environments", "math", "--host", "no.such.host.invalid")
    assert status == 2
    assert "host: 'no.such.host.invalid' is no address of this machine" in err
