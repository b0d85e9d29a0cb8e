"""The pages, their data, and requests that must not get any."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from mrlm_pl.viewer.runs import find_runs
from mrlm_pl.viewer.server import answer, application, pages
from tests.support.runs.recorded_runs import HOSTILE, episode, write_run
from tests.viewer.conftest import Asking


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text("SECRET")
    texts = [episode(f"{number}-0", text) for number, text in enumerate(HOSTILE[:-1])]
    return write_run(tmp_path / "runs" / "a", [texts], rewards=[0.5])


def run_name(folder: Path) -> str:
    return str(folder).replace("/", "%2F")


def test_the_pages_have_a_strict_policy(ask: Asking, folder: Path) -> None:
    for address in ("/", "/main.js", "/api/runs", "/none", "/api/none"):
        reply = ask(folder, address)
        assert reply.headers["Content-Security-Policy"].startswith("default-src 'self'; base-uri 'none'")
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
    page = ask(folder, "/").body.decode()
    assert "<script" in page
    for part in ("style=", "onclick", "<style", "http:", "https:"):
        assert part not in page


def test_the_pages_weigh_little_and_hold_no_way_to_write_html() -> None:
    found = pages()
    assert sum(map(len, found.values())) < 250_000
    for name, body in found.items():
        for word in (b"innerHTML", b"outerHTML", b"insertAdjacentHTML", b"document.write", b"eval(", b"Function("):
            assert word not in body, name


def test_the_data_of_a_run(ask: Asking, folder: Path) -> None:
    (run,) = ask(folder, "/api/runs").json()["runs"]
    assert run["key"] == str(folder)
    assert ask(folder, f"/api/metrics?run={run_name(folder)}").json()["columns"]["rollout/reward"] == [0.5]
    table = ask(folder, f"/api/episodes?run={run_name(folder)}").json()
    assert len(table["rows"]) == len(HOSTILE) - 1
    for last in ("--5", "1.5", "9" * 5000, ""):  # no number that Python reads
        assert ask(folder, f"/api/episodes?run={run_name(folder)}&last={last}").json() == table
    assert ask(folder, f"/api/episodes?run={run_name(folder)}&last=-1").json()["rows"] == []
    for content, found in (("{}", []), ('{"versions": {"torch": "2.9", "mrlm": "1"}}', ["torch 2.9", "mrlm 1"])):
        (folder / "state.json").write_text(content)
        assert ask(folder, f"/api/run?run={run_name(folder)}").json()["versions"] == found
    assert ask(folder, f"/api/episode?run={run_name(folder)}&id=none").status == 422


class _SlowLock:
    """A lock that gives other threads time after it is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        time.sleep(0.2)

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_a_pair_and_the_swapped_pair_are_compared_at_once(folder: Path) -> None:
    write_run(folder.parent / "b", [[episode("0-0")]])
    runs = find_runs([str(folder.parent)])
    for run in runs.values():
        run.lock = _SlowLock()  # type: ignore[assignment]
    found: list[object] = []
    for name, other in itertools.permutations(runs):
        query = {"run": name, "other": other}
        threading.Thread(target=lambda query=query: found.append(answer(runs, "compare", query)), daemon=True).start()
    end = time.monotonic() + 100
    while len(found) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(found) == 2


def test_a_run_that_starts_later_is_there_when_the_page_is_loaded_again(folder: Path) -> None:
    given = str(folder.parent)

    async def names(client: TestClient[web.Request, web.Application], page: str) -> list[str]:
        await client.get(page)
        runs = (await (await client.get("/api/runs")).json())["runs"]
        return [run["key"].removeprefix(f"{given}/") for run in runs]

    async def exchange() -> None:
        app = application(find_runs([given]), paths=["gone", given])
        async with TestClient(TestServer(app, host="127.0.0.1")) as client:
            write_run(folder.parent / "0", [[episode("0-0")]])
            assert await names(client, "/main.js") == ["a"]
            assert await names(client, "/") == ["a", "0"]
            shutil.rmtree(folder)
            assert await names(client, "/index.html") == ["a", "0"]

    asyncio.run(exchange())


def test_a_folder_that_cannot_be_read_hides_no_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, locked = Path.iterdir, folder.parent / "0"
    locked.mkdir()

    def iterdir(path: Path) -> Iterator[Path]:
        if path == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert list(find_runs([str(folder.parent)])) == [str(folder)]


@pytest.mark.parametrize("number", range(len(HOSTILE) - 1))
def test_hostile_text_comes_as_json(number: int, ask: Asking, folder: Path) -> None:
    reply = ask(folder, f"/api/episode?run={run_name(folder)}&id={number}-0")
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.json()["trajectories"]["first"][0]["messages"][1]["content"] == HOSTILE[number]


@pytest.mark.parametrize(
    "address",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/%2e%2e/secret.txt",
        "/....//secret.txt",
        "/..%5csecret.txt",
        "/%2Fetc%2Fpasswd",
        "//etc/passwd",
        "/api/../secret.txt",
        "/api/run?run=../secret.txt",
        "/api/run?run={folder}/../../secret.txt",
        "/api/episode?run={folder}&id=../../../secret.txt",
        "/api/episodes?run=/etc",
        "/api/metrics?run=%00",
        "/main.js%00.html",
    ],
)
def test_no_path_leads_out(address: str, ask: Asking, folder: Path) -> None:
    reply = ask(folder, address.replace("{folder}", str(folder)))
    assert reply.status in (400, 404, 422)
    assert b"SECRET" not in reply.body
    assert b"root:" not in reply.body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "", "8.8.8.8"]
)
def test_a_foreign_host_is_refused(host: str, ask: Asking, folder: Path) -> None:
    reply = ask(folder, "/api/runs", Host=host)
    assert reply.status in (400, 421)
    assert b"runs" not in reply.body


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8010"])
def test_names_of_this_machine_are_answered(host: str, ask: Asking, folder: Path) -> None:
    assert ask(folder, "/api/runs", Host=host).status == 200


def test_a_token_guards_every_address(ask: Asking, folder: Path) -> None:
    for address in ("/", "/main.js", "/api/runs"):
        assert ask(folder, address, "s3cret").status == 401
        assert ask(folder, f"{address}?token=wrong", "s3cret").status == 401
        assert ask(folder, address, "s3cret", Cookie="mrlm_token=wrong").status == 401
        assert ask(folder, address, "s3cret", Cookie="mrlm_token=s3cret", Host="gpu7.lab:8010").status == 200
    entered = ask(folder, "/?token=s3cret", "s3cret")
    assert (entered.status, entered.headers["Location"]) == (303, "/")
    assert "HttpOnly" in entered.headers["Set-Cookie"]
    assert "SameSite=Strict" in entered.headers["Set-Cookie"]


def test_a_damaged_episode_is_an_answer(ask: Asking, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"id": "a", "trajectories": {}}) + "\n")
    reply = ask(path, f"/api/episode?run={run_name(path)}&id=a")
    assert reply.status == 422
    assert "episode 'a' of x.jsonl cannot be read" in reply.json()["error"]


def test_the_command_serves_until_it_is_ended() -> None:
    command = [sys.executable, "-m", "mrlm_pl.cli.main", "view", "--demo", "--port"]
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())
            assert address is not None
            with urllib.request.urlopen(f"{address[0]}/api/runs", timeout=100) as reply:
                assert len(json.load(reply)["runs"]) == 3
            taken = subprocess.run([*command, address[1]], capture_output=True, text=True, timeout=200, check=False)
            assert taken.returncode == 1
            assert "Address already in use; choose another `--port`" in taken.stderr
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(100) == 0


def test_the_command_ends_with_its_terminal() -> None:
    usual = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # ignored where the tests run under nohup
    start = usual + "import sys; from mrlm_pl.cli.main import main; sys.exit(main(['view', '--demo', '--port', '0']))"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert "http://127.0.0.1:" in server.stdout.readline()
        server.send_signal(signal.SIGHUP)
        assert server.wait(100) == 0
