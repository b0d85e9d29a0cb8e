"""Faults of programs: each is a failed episode or a rejected call with its name, never a reward of 0; nothing stays."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import struct
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mrlm_environments import HarnessEnvironment

from mrlm_pl.concurrency import calls, event_loop
from mrlm_pl.environment.prompts import Reply
from mrlm_pl.errors import DataError, ProgramError
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.serving.gateway import programs
from tests.support.servers.harness_programs import asked, harness, is_running, played, player_of, posted, script, until

USER = [{"role": "user", "content": "Q"}]
DEEP = json.loads('{"items": ' * 300 + "{}" + "}" * 300)
NAN = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1e999}'}}


def test_a_program_that_hangs_fails_alone() -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            await asked(http, endpoint, "agent", USER)
        if row["n"] == 0:
            await asyncio.sleep(3600)
        return 1.0

    hung, fine = played(harness(program, 2, lease_seconds=5.0), [{"agent": ["a"]}] * 2)
    assert "made no call within 5 s" in str(hung.error)
    assert (hung.stop_reason, fine.error, fine.reward) == ("error", None, 1.0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("ask('agent', 'Q')\nraise SystemExit('boom')", "ended with status 1: boom"),
        ("import signal\nask('agent', 'Q')\nos.kill(os.getpid(), signal.SIGKILL)", "ended with signal SIGKILL"),
        ("pass", "ended without a call"),
        ("ask('agent', 'Q')", "ended without a reward"),
        ("ask('critic', 'Q')", "HTTP Error 404"),
        ("raise SystemExit(5000 * 'x' + ' boom')", "x boom"),
    ],
    ids=["crash", "killed", "no call", "no reward", "wrong agent", "long error output"],
)
def test_a_program_that_fails_is_no_reward_of_0(code: str, said: str) -> None:
    environment = HarnessEnvironment({"train": [{}]}, script(code), agents=["agent", "other"])
    (episode,) = played(environment, [{"agent": ["a"]}])
    assert said in str(episode.error)


@pytest.mark.parametrize(("text", "limit", "said"), [("Q", 1, "turn_limit"), ("Q" * 3000, 64, "context_window")])
def test_a_program_that_a_limit_of_the_run_stops_is_no_reward_of_0(text: str, limit: int, said: str) -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            for content in ("Q", text):
                await asked(http, endpoint, "agent", [{"role": "user", "content": content}])
        return 1.0

    environment = harness(program)
    player = player_of(environment, [{"agent": ["a", "b"]}])
    player.max_turns = limit
    try:
        (episode,) = player.play_blocking([EpisodeSpec("e0", environment.tasks("train")[0], "g", seed=0)])
    finally:
        player.close()
    assert f"{said} before the program had ended" in str(episode.error)


def test_a_prompt_beyond_the_context_is_refused_as_openai_does(caplog: pytest.LogCaptureFixture) -> None:
    found: list[Any] = []

    async def program(endpoint: Any) -> None:
        async with aiohttp.ClientSession() as http:
            url, headers = f"{endpoint.base_url}/chat/completions", {"Authorization": f"Bearer {endpoint.key}"}
            body: Any = {"model": "agent", "messages": [{"role": "user", "content": "Q" * 3000}]}
            async with http.post(url, json=body, headers=headers) as response:
                found.append((response.status, (await response.json())["error"]))

    environment = harness(lambda row, endpoint: asyncio.run(program(endpoint)))
    player = player_of(environment, [{"agent": ["a"]}])
    with environment.gateway.kept():
        try:
            player.play_blocking([EpisodeSpec("e0", environment.tasks("train")[0], "g", seed=0)])
        finally:
            player.close()
        until(lambda: found)
    ((status, error),) = found
    assert (status, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
    assert re.match(r"prompt is too long: 30\d\d tokens, and .* maximum context length is 2048; send", error["message"])
    assert "refused a call" not in caplog.text


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_program_that_prints_without_end_is_stopped(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PRINTED_MB", 3)
    code = f"ask('agent', 'Q')\nwhile True: print('x' * 100_000, file=sys.{stream})"
    (episode,) = played(HarnessEnvironment({"train": [{}]}, script(code), lease_seconds=600.0), [{"agent": ["a"]}])
    assert "printed more than 3 MiB" in str(episode.error)


def test_the_end_of_a_long_output_is_read_and_a_process_left_behind_is_not_awaited(tmp_path: Path) -> None:
    def end(output: str, row: Any) -> float:
        return float(output == (" ".join(map(str, range(700_000))) + "\n")[-programs.OUTPUT_BYTES :])

    pid = tmp_path / "pid"
    code = (
        "import subprocess\n"
        f"command = [{sys.executable!r}, '-c', 'import time; time.sleep(3600)']\n"
        f"open({str(pid)!r}, 'w').write(str(subprocess.Popen(command, start_new_session=True).pid))\n"
        "ask('agent', 'Q')\nprint(*range(700_000))"
    )
    environment = HarnessEnvironment({"train": [{}]}, script(code), rewards=[end], lease_seconds=600.0)
    try:
        (episode,) = played(environment, [{"agent": ["a"]}])
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert (episode.error, episode.reward) == (None, 1.0)


def test_a_row_without_a_field_of_the_command_is_named() -> None:
    environment = HarnessEnvironment({"train": [{"question": "1+1?"}]}, ["python", "a.py", "{text}"])
    with pytest.raises(DataError, match="row 1: the field 'text' is missing"):
        environment.tasks("train")


def test_a_missing_program_is_named() -> None:
    (episode,) = played(HarnessEnvironment({"train": [{}]}, ["no-such-program"]), [{}])
    assert "there is no program 'no-such-program'" in str(episode.error)


def test_a_flood_of_calls_is_refused_beyond_the_budget() -> None:
    codes: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            replies = await asyncio.gather(*(asked(http, endpoint, "agent", USER) for _ in range(50)))
        codes.extend(reply.get("code") for reply in replies)
        return 1.0

    (episode,) = played(harness(program, max_calls=3), [{"agent": ["a"]}])
    assert (episode.error, episode.reward) == (None, 1.0)
    assert sorted(map(str, codes)) == ["None"] * 3 + ["budget_exhausted"] * 47
    assert (episode.metrics["calls"], episode.metrics["refused"]) == (3, 47)


def test_a_program_that_hides_the_refusals_of_its_calls_is_told_them() -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            await asked(http, endpoint, "agent", USER, temperature=0)
        return 1.0

    (episode,) = played(harness(program), [{}])
    assert "all calls of the program were refused, the last one since the parameter 'temperature' (0)" in str(
        episode.error
    )


def test_a_refusal_that_a_program_hides_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            await asked(http, endpoint, "agent", USER)
            await asked(http, endpoint, "agent", USER, seed=1)
        return 1.0

    for episode in played(harness(program, 2), [{"agent": ["a"]}] * 2):
        assert (episode.error, episode.metrics["refused"]) == (None, 1)
    assert caplog.text.count("the gateway refused a call: the parameter 'seed' (1) cannot be served") == 1


def test_a_budget_of_tokens() -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            replies = [await asked(http, endpoint, "agent", USER) for _ in range(3)]
        return float(replies[2]["code"] == "budget_exhausted")

    (episode,) = played(harness(program, max_tokens=4), [{"agent": ["ab"]}])  # three tokens a reply
    assert (episode.error, episode.reward) == (None, 1.0)


def test_prompts_that_do_not_extend_a_conversation_are_counted_by_kind() -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            for said in (
                USER,
                USER,
                [{"role": "user", "content": "a sub-agent"}],
                [*USER, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "R"}],
                [*USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "R"}],
            ):
                await asked(http, endpoint, "agent", said)
            tool = {"type": "function", "function": {"name": "add"}}
            await asked(http, endpoint, "agent", said, tools=[tool])  # extends the first conversation
        return 1.0

    (episode,) = played(harness(program), [{"agent": ["a", "b", "c", "d", "e", "f"]}])
    kinds = ("retries", "new_conversations", "edited_histories", "changed_tools")
    assert [episode.metrics[name] for name in kinds] == [1, 1, 1, 1]
    assert (episode.row_restarts, len(episode.trajectories["agent"])) == (4, 5)
    assert [len(row.turns) for row in episode.trajectories["agent"]] == [2, 1, 1, 1, 1]


def test_wrong_keys_and_calls_after_the_end_are_refused_and_counted() -> None:
    endpoints: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        endpoints.append(endpoint)
        async with aiohttp.ClientSession() as http:
            await asked(http, endpoint, "agent", USER)
        return 1.0

    async def play() -> tuple[Any, ...]:
        await environment.reset(environment.tasks("train")[0])
        url = f"{endpoints[0].base_url}/chat/completions"
        body = {"model": "agent", "messages": USER}
        wrong = await asyncio.to_thread(posted, url, body, "sk-wrong")
        last = await environment.step({"agent": Reply("assistant", "a")})
        late = await asyncio.to_thread(posted, url, body, endpoints[0].key)
        reward = await asyncio.to_thread(posted, f"{endpoints[0].url}/reward", {"agent": 5})
        return wrong, last, late, reward

    environment = harness(program)
    try:
        wrong, last, late, reward = asyncio.run(play())
    finally:
        environment.close()
    assert (wrong[0], wrong[1]["error"]["code"]) == (401, "invalid_api_key")
    assert (late[0], late[1]["error"]["code"]) == (410, "episode_ended")
    assert reward[0] == 410
    assert last.rewards == {"agent": 1.0}
    assert environment.gateway.counts == {"invalid_api_key": 1, "episode_ended": 2}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_is_counted(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def program(row: Any, endpoint: Any) -> float:
        host, port = endpoint.url.split("/")[2].split(":")
        text = f'{{"model": "x", "stream": {str(stream).lower()}, "messages": [{{"role": "user", "content": "Q"}}]}}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.agent_key('a')}\r\n"
        gone = socket.create_connection((host, int(port)))
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        await asyncio.to_thread(until, lambda: shown)  # else the call of b could be shown with it
        gone.close()
        async with aiohttp.ClientSession() as http:
            await asked(http, endpoint, "b", USER)
        return 1.0

    class Watched(HarnessEnvironment):
        def called(self, agent: str) -> bool:
            return self._session is not None and bool(self._session._queues[agent])

    shown: list[set[str]] = []

    async def play() -> Any:
        shown.append(set(await environment.reset(environment.tasks("train")[0])))
        assert shown == [{"a"}]
        await asyncio.to_thread(until, lambda: environment.called("b"))
        assert not (await environment.step({"a": Reply("assistant", "x")})).done
        return await environment.step({"b": Reply("assistant", "y")})

    environment = Watched({"train": [{}]}, function=program, agents=["a", "b"])
    try:
        step = asyncio.run(play())
    finally:
        environment.close()
    assert (step.done, step.rewards, step.metrics["disconnected"]) == (True, {"a": 1.0, "b": 1.0}, 1.0)
    assert "Error handling request" not in caplog.text, "it is not an error of the gateway"


def test_nothing_of_a_stopped_program_is_left(tmp_path: Path) -> None:
    started = tmp_path / "pids"
    code = (
        "import subprocess, time\n"
        f"child = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(3600)'])\n"
        f"open({str(started)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "ask('agent', 'Q')\ntime.sleep(3600)\n"
    )
    environment = HarnessEnvironment({"train": [{}]}, script(code))
    try:
        asyncio.run(environment.reset(environment.tasks("train")[0]))
        pids = [int(pid) for pid in started.read_text().split()]
        assert all(map(is_running, pids))
    finally:
        environment.close()
    until(lambda: not any(map(is_running, pids)))


def test_leaving_an_episode_refuses_the_waiting_call_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found: list[Any] = []

    async def program(row: Any, endpoint: Any) -> None:
        async with aiohttp.ClientSession() as http:
            found.append(await asyncio.shield(asked(http, endpoint, "agent", USER)))

    environment = harness(lambda row, endpoint: asyncio.run(program(row, endpoint)))
    asyncio.run(environment.reset(environment.tasks("train")[0]))
    with environment.gateway.kept():
        environment.close()
        until(lambda: found)
    assert found[0]["code"] == "episode_left"
    assert "another prompt is longer than the context window of its policy" in found[0]["message"]
    assert environment.gateway.counts == {"episode_left": 1}
    assert "the gateway refused" not in caplog.text


def test_the_endpoint_closes_with_the_last_environment() -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            await asked(http, endpoint, "agent", USER)
        return 1.0

    template = harness(program)
    one, two = template.copy(), template.copy()
    task = template.tasks("train")[0]
    asyncio.run(one.reset(task))
    asyncio.run(two.reset(task))
    address = one.gateway.start()
    one.close()
    assert posted(f"{address}/v1/responses", {})[0] == 401, "another episode is played"
    two.close()
    with pytest.raises(OSError, match="refused"):
        posted(f"{address}/v1/responses", {})
    asyncio.run(one.reset(task))  # it starts again
    one.close()
    one.close()


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_an_async_function_that_would_end_its_event_loop_fails_alone(raised: type[BaseException]) -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            await asked(http, endpoint, "agent", USER)
        if row["n"] == 0:
            raise raised("no such option")
        return 1.0

    left, fine = played(harness(program, 2), [{"agent": ["a"]}] * 2)
    assert f"'program' raised RuntimeError: {raised.__name__}: no such option" in str(left.error)
    assert (fine.error, fine.reward) == (None, 1.0)


def test_a_function_that_blocks_the_shared_event_loop_is_named_and_later_ones_have_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()

    async def blocks(row: Any, endpoint: Any) -> float:
        assert released.wait(120)
        return 1.0

    async def asks(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            return float("content" in await asked(http, endpoint, "agent", USER))

    for name, value in (("_shared", None), ("_LOOK_SECONDS", 0.05), ("STUCK_SECONDS", 1.0)):
        monkeypatch.setattr(event_loop, name, value)
    try:
        (named,) = played(harness(blocks, lease_seconds=600.0), [{}])
        (fine,) = played(harness(asks, lease_seconds=600.0), [{"agent": ["a"]}])
        assert not released.is_set()
    finally:
        released.set()
    assert "the event loop has stood still for 1 s in wait (" in str(named.error)
    assert ", called in blocks (" in str(named.error)
    assert (fine.error, fine.reward) == (None, 1.0)


def test_a_lease_and_a_deadline_name_what_blocks_the_shared_event_loop_before_it_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()

    async def blocks(*arguments: Any) -> float:
        assert released.wait(120)
        return 1.0

    for name, value in (("_shared", None), ("_LOOK_SECONDS", 0.05)):
        monkeypatch.setattr(event_loop, name, value)
    caller = calls.EnvironmentCaller(1, timeout=2.0)
    try:
        (lease,) = played(harness(blocks, lease_seconds=2.0), [{}])
        (deadline,) = asyncio.run(caller.run([partial(calls.call_function, blocks)]))
    finally:
        caller.close()
        released.set()
    for error, begin in ((lease.error, "made no call within 2 s"), (deadline.error, "did not answer within 2.0 s")):
        assert begin in str(error)
        assert "; the event loop has stood still for " in str(error)
        assert ", called in blocks (" in str(error)


def test_a_function_that_is_stopped_may_fail_or_run_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "CANCEL_SECONDS", 0.1)
    cleaned, released = list[int](), threading.Event()

    async def program(row: Any, endpoint: Any) -> float:
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(row["n"])
            if row["n"] == 0:
                raise OSError("boom")
            while not released.is_set():
                await asyncio.sleep(0.01)
        return 1.0

    try:
        episodes = played(harness(program, 2, lease_seconds=0.2), [{}] * 2)
        until(lambda: "program was cancelled and has not ended within 0.1 s; it runs on" in caplog.text)
    finally:
        released.set()
    assert all("made no call within 0.2 s" in str(episode.error) for episode in episodes)
    assert sorted(cleaned) == [0, 1]
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_plain_function_may_return_a_coroutine() -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            return float("content" in await asked(http, endpoint, "agent", USER))

    (episode,) = played(harness(lambda row, endpoint: program(row, endpoint)), [{"agent": ["a"]}])
    assert (episode.error, episode.reward) == (None, 1.0)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"stop": 5}, "invalid_request"),
        ({"stop": ["x"] * 17}, "invalid_request"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "invalid_request"),
        ({"messages": [{"role": "assistant", "tool_calls": [NAN]}]}, "invalid_request"),
        ({"messages": [{"role": "tool", "content": "3", "tool_call_id": 5}]}, "invalid_request"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "invalid_request"),
        ({"tools": [{"type": "function", "function": {"name": ["f"]}}]}, "invalid_request"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"properties": 5}}]}, "invalid_request"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "invalid_json"),
        ({"tools": "search"}, "invalid_request"),
        ({"messages": [{"role": "user", "content": "x" * (17 << 20)}]}, "body_too_large"),
    ],
    ids=["stop", "stops", "calls", "nan", "id", "tool", "name", "properties", "deep", "tools", "size"],
)
def test_a_malformed_call_is_refused_and_its_episode_continues(wrong: Any, code: str) -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            refused = await asked(http, endpoint, "agent", **{"messages": USER, **wrong})
            await asked(http, endpoint, "agent", USER)
        return float(refused["code"] == code)

    (episode,) = played(harness(program), [{"agent": ["a"]}])
    assert (episode.error, episode.reward, episode.metrics["refused"]) == (None, 1.0, 1.0)


def test_a_reward_without_a_number_is_none() -> None:
    async def program(row: Any, endpoint: Any) -> None:
        async with aiohttp.ClientSession() as http:
            await asked(http, endpoint, "agent", USER)
            for body in ({}, {"agent": {}}):
                async with http.post(f"{endpoint.url}/reward", json=body) as response:
                    assert response.status == 200
            async with http.post(f"{endpoint.url}/reward", json={"agent": 10**400}) as response:
                assert response.status == 400

    (episode,) = played(harness(program), [{"agent": ["a"]}])
    assert "ended without a reward" in str(episode.error)


def test_a_function_that_raises_is_named() -> None:
    def program(row: Any, endpoint: Any) -> float:
        raise ValueError("no such file")

    environment = harness(program)
    try:
        with pytest.raises(ProgramError, match="'program' raised ValueError: no such file"):
            asyncio.run(environment.reset(environment.tasks("train")[0]))
    finally:
        environment.close()
