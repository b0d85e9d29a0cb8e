"""``mrlm gateway``: programs that were started elsewhere open episodes, which are written to a file."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import HarnessEnvironment, MathEnvironment

from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.runs.collection import serve_gateway
from tests.support.servers.harness_programs import posted, until

ROWS = [{"n": n} for n in range(4)]


def chat(opened: Any, agent: str, text: str) -> str:
    body = {"model": agent, "messages": [{"role": "user", "content": text}]}
    status, reply = posted(f"{opened['base_url']}/chat/completions", body, opened["api_key"])
    assert status == 200, reply
    return str(reply["choices"][0]["message"]["content"])


def program(address: str) -> int:
    """Open an episode, play it, and return the number of its row."""
    _, opened = posted(f"{address}/episodes", {})
    number = int(opened["row"]["n"])
    draft = chat(opened, "solver", f"{number}+1?")
    final = chat(opened, "checker", f"{number}+1? {draft}")
    if number == 3:
        assert posted(f"{opened['url']}/end", {"error": "it gave up"})[0] == 200
    else:
        assert posted(f"{opened['url']}/reward", {"solver": number})[0] == 200
        assert posted(f"{opened['url']}/end", {"output": final})[0] == 200
    return number


def test_programs_open_episodes_side_by_side(tmp_path: Path) -> None:
    environment = HarnessEnvironment({"train": ROWS}, agents=["solver", "checker"])
    numbers: list[int] = []

    def start(address: str) -> None:
        def play() -> None:
            with ThreadPoolExecutor(4) as pool:
                numbers.extend(pool.map(program, [address] * 4))

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        threads.append(thread)

    threads: list[threading.Thread] = []
    file = serve_gateway(
        "builtin:tiny",
        environment,
        output=tmp_path / "episodes.jsonl",
        listening=start,
        num_episodes=4,
        sampling=Sampling(max_tokens=4),
        device="cpu",
    )
    threads[0].join(60)
    assert sorted(numbers) == [0, 1, 2, 3]
    assert (file.played, file.kept, file.failed) == (4, 3, 1)
    episodes = list(read_episodes(tmp_path / "episodes.jsonl"))
    assert sorted(episode.task.data["n"] for episode in episodes) == [0, 1, 2]
    for episode in episodes:
        assert episode.rewards() == {"solver": float(episode.task.data["n"]), "checker": 0.0}
        (solver,) = episode.trajectories["solver"]
        assert solver.messages[0].content == f"{episode.task.data['n']}+1?"
        assert all(value < 0 for value, sampled in zip(solver.logprobs, solver.action_mask, strict=True) if sampled)


def test_the_endpoint_stays_after_an_episode_that_failed(tmp_path: Path) -> None:
    environment = HarnessEnvironment({"train": ROWS[:2]}, agents=["solver"])
    ends: list[int] = []

    def start(address: str) -> None:
        def play() -> None:
            for body in ({"error": "it gave up"}, {"output": "done"}):
                opened = posted(f"{address}/episodes", {})[1]
                chat(opened, "solver", "1?")
                posted(f"{opened['url']}/reward", {"solver": 1})
                ends.append(posted(f"{opened['url']}/end", body)[0])

        threads.append(threading.Thread(target=play, daemon=True))
        threads[0].start()

    threads: list[threading.Thread] = []
    file = serve_gateway(
        "builtin:tiny",
        environment,
        output=tmp_path / "episodes.jsonl",
        listening=start,
        num_episodes=2,
        at_once=1,
        sampling=Sampling(max_tokens=4),
        device="cpu",
    )
    threads[0].join(60)
    assert (ends, file.kept, file.failed) == ([200, 200], 1, 1)
    assert environment.gateway.start() != "", "it has closed, and would listen again"
    environment.close()


def test_a_program_that_waits_at_the_end_is_refused() -> None:
    environment = HarnessEnvironment({"train": ROWS[:1]}, agents=["solver"])
    address = environment.gateway.start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(posted, f"{address}/episodes", {})
        until(lambda: environment.gateway._requests.qsize() == 1)
        environment.close()
        status, body = waiting.result(60)
    assert (status, body["error"]["code"]) == (503, "no_episode")


def test_a_page_of_another_site_opens_no_episode() -> None:
    environment = HarnessEnvironment({"train": ROWS[:1]}, agents=["solver"])
    address = environment.gateway.start()
    asking = urllib.request.Request(f"{address}/episodes", b"{}", {"Origin": "http://evil.example:8100"})
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(asking, timeout=5)
    assert b"Origin 'http://evil.example:8100' is a page of another machine; open it at loc" in refused.value.read()
    environment.close()


def test_a_program_that_is_gone_receives_no_episode() -> None:
    environment = HarnessEnvironment({"train": ROWS[:1]}, agents=["solver"])
    host, port = environment.gateway.start().removeprefix("http://").split(":")
    gone = socket.create_connection((host, int(port)))
    gone.sendall(b"POST /episodes HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    waiting = environment.gateway._requests
    until(lambda: waiting.qsize() == 1)
    gone.close()
    until(lambda: waiting._queue[0][0].transport is None)  # type: ignore[attr-defined]
    _, left = waiting._queue[0]  # type: ignore[attr-defined]
    found: list[Any] = []

    def play() -> None:
        headers = {"Host": "gateway.example:81", "Content-Type": "application/json"}
        asking = urllib.request.Request(f"http://{host}:{port}/episodes", b"{}", headers)
        with urllib.request.urlopen(asking, timeout=120) as response:
            found.append(json.load(response))
        posted(f"http://{host}:{port}/v1/chat/completions", {"messages": [{"role": "user", "content": "Q"}]}, key())

    def key() -> str:
        return f"{found[0]['api_key']}.solver"

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    try:
        assert set(asyncio.run(environment.reset(environment.tasks("train")[0]))) == {"solver"}
        assert left.cancelled(), "its request does not wait forever"
    finally:
        environment.close()
    thread.join(60)
    assert found[0]["base_url"] == "http://gateway.example:81/v1", "as the program reaches it"
    assert found[0]["url"].startswith("http://gateway.example:81/episodes/")


@pytest.mark.parametrize(
    "environment", [MathEnvironment(), HarnessEnvironment([{"n": 1}], ["true"])], ids=["math", "own"]
)
def test_other_environments_are_refused(environment: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="neither command nor function"):
        serve_gateway("builtin:tiny", environment, output=tmp_path / "a.jsonl", listening=print)


def test_an_output_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape("a.csv' must be a file that ends in .jsonl")):
        serve_gateway("builtin:tiny", HarnessEnvironment([{}]), output=tmp_path / "a.csv", listening=print)
