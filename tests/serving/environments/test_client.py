from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.concurrency.backoff import until
from mrlm_pl.environment import Environment
from mrlm_pl.environment.check import check_environment
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, RemoteError
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving.environments import client
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport.addresses import warn_of_difference
from mrlm_pl.serving.transport.connection import Connection
from tests.support.servers.environment_servers import TASK, Scripted, Served, eventually, offer, step_request
from tests.support.servers.ports import nowhere

Server = Callable[..., Served]


def remote(*servers: Served, name: str = "scripted", **options: Any) -> RemoteEnvironment:
    return RemoteEnvironment([server.target for server in servers], name, **{"open_seconds": 60.0, **options})


def begun(environment: Environment) -> Environment:
    """A copy in whose episode nothing was said yet."""
    made = environment.copy()
    asyncio.run(made.reset(TASK))  # type: ignore[arg-type]
    return made


def say(environment: Environment, text: str = "go") -> Any:
    return asyncio.run(environment.step({"agent": Message("assistant", text)}))  # type: ignore[arg-type]


def test_it_is_an_environment_like_any_other(serve: Server) -> None:
    from mrlm_environments.math.environment import MathEnvironment

    served = serve(offer=offer(more={"math": lambda settings: MathEnvironment(**settings)}))
    report = check_environment(remote(served, name="math"), tasks_per_split=3)
    # A half of a character cannot be sent; it is the only thing that is not as it was said.
    assert [check.message for check in report.checks if not check.passed] == []
    gc.collect()  # copies that rejected a call are still in tracebacks
    eventually(lambda: served.live == 0)


def test_what_it_tells_without_an_episode(served: Served) -> None:
    duo = remote(served, name="duo")
    assert (duo.name, duo.agents) == ("duo", ("left", "right"))
    assert duo.gold(TASK) is None
    tasks = remote(served).tasks("validation")
    assert tasks.size == 200
    assert [task.data["n"] for task in tasks] == list(range(200))
    assert dict(tasks[199].data) == {"n": 199, "split": "validation"}
    for index in (-1, 200):
        with pytest.raises(IndexError):
            _ = tasks[index]
    assert served.live == 0


def test_an_endless_source_is_read_in_parts(serve: Server) -> None:
    from mrlm_environments.math.environment import MathEnvironment

    served = serve(offer=offer(more={"math": lambda settings: MathEnvironment(**settings)}))
    there, here = remote(served, name="math").tasks("train"), MathEnvironment().tasks("train")
    assert there.size is None
    for index in (0, 63, 64, *range(1000, 4000, 64), 0):
        assert repr(there[index]) == repr(here[index])
    assert len(there._parts) == client.KEPT_PARTS
    with pytest.raises(ConfigurationError, match="has no split 'holdout'"):
        remote(served, name="math").tasks("holdout")


def test_tools_are_those_of_the_episode(served: Served) -> None:
    environment = remote(served)
    assert environment.tools("agent") == ()
    assert begun(environment).tools("agent") == Scripted.tools_offered
    assert begun(environment).tools("other") == ()


def test_copies_have_sessions_of_their_own(served: Served) -> None:
    template = remote(served)
    first, second = begun(template), begun(template)
    assert served.live == 2
    say(first)
    say(first)
    assert say(second).rewards == {"agent": 1.0}
    copy.deepcopy(first).close()
    assert say(first).rewards == {"agent": 3.0}
    first.close()
    first.close()
    assert eventually(lambda: served.live == 1)
    second.close()
    pickle.loads(pickle.dumps(template))


def test_steps_out_of_order(served: Served) -> None:
    environment = remote(served)
    with pytest.raises(EnvironmentContractError, match="before reset"):
        say(environment)
    playing = begun(environment)
    with pytest.raises(EnvironmentContractError, match=r"\['other'\]"):
        asyncio.run(playing.step({"other": Message("assistant", "x")}))  # type: ignore[arg-type]
    assert say(playing, "end").done
    with pytest.raises(EnvironmentContractError, match="after the episode was done"):
        say(playing)


def test_errors_say_what_happened_there(served: Served) -> None:
    with pytest.raises(RemoteError, match="'scripted', turn 0: ABORTED: OSError: the back end is away"):
        say(begun(remote(served)), "raise")
    with pytest.raises(ConfigurationError, match="no environment 'nothing' here; there are duo, scripted"):
        begun(remote(served, name="nothing"))
    with pytest.raises(ConfigurationError, match="no environment 'nothing'"):
        _ = remote(served, name="nothing").agents
    with pytest.raises(RemoteError, match="a value of type set cannot be sent"):
        begun(remote(served, settings={"a": {1}}))


@pytest.mark.parametrize("address", ["localhost", ":50051", "host:", "host:port", "", [], "h:0", "h:99999"])
def test_an_address_has_a_host_and_a_port(address: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is not HOST:PORT"):
        RemoteEnvironment(address, "x")


@pytest.mark.parametrize("option", ["open_seconds", "step_seconds"])
def test_times_are_above_0(option: str) -> None:
    with pytest.raises(ConfigurationError, match=option):
        RemoteEnvironment("a:1", "x", **{option: 0.0})


def test_settings_go_to_the_server(served: Served) -> None:
    made = remote(served, settings={"greeting": "hello", "size": 3})
    assert made.tasks("train").size == 3
    (message,) = asyncio.run(made.reset(TASK))["agent"]
    assert message.content.startswith("hello ")
    made.close()


def test_episodes_are_spread_over_several_servers(serve: Server) -> None:
    servers = [serve(), serve(), serve()]
    playing = [begun(remote(*servers)) for _ in range(30)]
    assert [server.live for server in servers] == [10, 10, 10]
    for environment in playing:
        say(environment)
        environment.close()


def test_a_server_that_is_full_draining_or_gone_is_passed_over(serve: Server) -> None:
    full, draining, gone, good = serve(sessions=1), serve(), serve(), serve()
    full.open()
    busy = draining.open().session
    going = draining.loop.submit(draining.server.drain(10))
    gone.run(gone.server.stop())
    with ThreadPoolExecutor(8) as pool:
        playing = list(pool.map(lambda _: begun(remote(full, draining, gone, good)), range(8)))
    assert good.live == 8
    for environment in playing:
        assert say(environment, "end").done
    draining.stub.Close(pb.CloseRequest(session=busy))
    going.result(60)


def test_no_server_at_all(serve: Server) -> None:
    gone = serve()
    gone.run(gone.server.stop())
    with pytest.raises(RemoteError, match=r"no server opened a session within 0\.5 s \(UNAVAILABLE"):
        begun(remote(gone, open_seconds=0.5))


def test_nobody_answers_who_is_asked(serve: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = serve()
    gone.run(gone.server.stop())
    with monkeypatch.context() as patch:
        patch.setattr(client, "ASK_SECONDS", 0.3)
        with pytest.raises(RemoteError, match=r"no server answers at .* within 0\.3 s; start one with `mrlm serve`"):
            _ = remote(gone).agents
    assert remote(gone, serve()).agents == ("agent",)


def test_nobody_waits_for_the_server_of_another(serve: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    ask = RemoteEnvironment._ask

    def met(self: RemoteEnvironment, method: str, request: Any) -> Any:
        both.wait(100)
        return ask(self, method, request)

    monkeypatch.setattr(RemoteEnvironment, "_ask", met)
    environments = [remote(serve()), remote(serve())]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda each: each.agents, environments)) == [("agent",)] * 2
    assert environments[0].agents == ("agent",), "asked for once"


def test_a_server_is_swapped_for_another_on_the_same_port(serve: Server) -> None:
    first = serve()
    environment = remote(first)
    for _ in range(3):
        assert say(begun(environment), "end").done
    lost = begun(environment)
    first.run(first.server.stop())
    second = serve(port=first.server.port)
    with pytest.raises(RemoteError, match="never opened here, or the server was started again"):
        say(lost)
    for _ in range(3):
        assert say(begun(environment), "end").done
        time.sleep(0.05)
    assert second.server.service.sessions.opened_total == 3


def test_another_server_takes_over_while_the_first_drains(serve: Server) -> None:
    first, second = serve(), serve()
    environment = remote(first, second)
    old = [begun(environment) for _ in range(6)]
    draining = first.loop.submit(first.server.drain(60))
    eventually(lambda: first.server.service.draining)
    new = [begun(environment) for _ in range(6)]
    assert (first.live, second.live) == (3, 9)
    for playing in old + new:
        assert say(playing, "end").done
        playing.close()
    draining.result(60)
    assert first.server.service.steps_total == 3


def test_leases_are_kept_while_nothing_happens(serve: Server, clock: SimpleNamespace) -> None:
    served = serve(lease_seconds=2.0)
    playing = begun(remote(served))
    (session,) = served.server.service.sessions.values()
    for _ in range(3):
        clock.now += 1.5
        eventually(lambda: session.touched == clock.now, 60)
    assert say(playing).rewards == {"agent": 1.0}
    playing.close()


def test_an_environment_that_is_dropped_ends_its_session(served: Served) -> None:
    playing = begun(remote(served))
    asyncio.run(playing.reset(TASK))  # type: ignore[arg-type]
    eventually(lambda: served.live == 1)
    assert served.server.service.sessions.opened_total == 2, "the second reset ended the first session"
    del playing
    gc.collect()
    eventually(lambda: served.live == 0)
    eventually(lambda: len(Scripted.closed) == 2)
    assert served.server.service.expired_total == 0, "and no lease had to run out"


def test_a_forked_process_does_not_end_its_parents_sessions(served: Served) -> None:
    playing: Any = begun(remote(served))
    client._close_in_background(playing._address, playing._session, os.getpid() + 1)
    time.sleep(0.2)
    assert say(playing).rewards == {"agent": 1.0}
    playing.close()


def test_servers_with_other_settings_are_named_once(serve: Server, caplog: pytest.LogCaptureFixture) -> None:
    hashes = ("size=a low=c", "size=a low=c", "size=b low=c")
    first, second, other = (serve(offer=offer(settings={"scripted": text})) for text in hashes)
    alike, older = remote(first, second), remote(first, serve())  # which sends no hash
    for _ in range(2):
        begun(alike).close()
        begun(older).close()
    assert "other settings" not in caplog.text
    playing = remote(second, other)
    for _ in range(4):
        begun(playing).close()
    (told,) = [message for message in caplog.messages if "other settings" in message]
    places = {second.target, other.target}
    assert {word for word in told.replace(": ", " ").split() if word in places} == places
    assert "hosts environment 'scripted' with other settings (size) than" in told


def test_a_server_that_starts_again_with_other_settings_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for value in ("high=a low=c", "low=d high=a top=e"):
        warn_of_difference(
            "guess", "1.2.3.4:50051", value, "hosts environment 'guess' with other settings ({changed}) than"
        )
    (told,) = caplog.messages
    assert told.startswith("1.2.3.4:50051 hosts environment 'guess' with other settings (low, top) than before: ")


def test_a_cancelled_reset_at_a_server_that_is_gone_logs_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    submit, submitted = client.submit, list[Any]()

    def noting(coroutine: Any) -> Any:
        submitted.append(submit(coroutine))
        return submitted[-1]

    async def give_up() -> None:
        asked = asyncio.ensure_future(RemoteEnvironment(nowhere(), "scripted", open_seconds=1.0).reset(TASK))
        await asyncio.sleep(0)  # it has sent its request
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
        assert await until(submitted[0].done, 60.0)
        assert isinstance(submitted.pop().exception(), RemoteError)
        await asyncio.sleep(0.1)
        gc.collect()

    gc.collect()  # what earlier tests have left
    caplog.clear()
    monkeypatch.setattr(client, "submit", noting)
    asyncio.run(give_up())
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
    assert "does not answer" in caplog.text


def test_a_reset_that_nobody_waits_for_any_more_leaves_no_session(serve: Server) -> None:
    making, left = threading.Event(), threading.Event()
    slow = offer(more={"scripted": lambda settings: (making.set(), left.wait(100), Scripted(**settings))[-1]})
    served = serve(offer=slow)

    async def give_up() -> None:
        asked = asyncio.ensure_future(remote(served).reset(TASK))
        assert await asyncio.to_thread(making.wait, 60)
        asked.cancel()
        await asked

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(give_up())
    left.set()
    eventually(lambda: served.server.service.sessions.opened_total == 1)
    eventually(lambda: served.live == 0)


def test_a_server_that_stays_full_is_named(serve: Server, caplog: pytest.LogCaptureFixture) -> None:
    full = serve(sessions=1)
    full.open()
    with pytest.raises(RemoteError, match=r"no server opened a session within 0\.4 s .*raise its max_sessions"):
        begun(remote(full, open_seconds=0.4))
    assert "is full (RESOURCE_EXHAUSTED: 1 sessions are live" in caplog.text
    assert "retrying for 0.2 s" in caplog.text


def test_a_server_that_is_full_again_and_again_is_named_once(serve: Server, caplog: pytest.LogCaptureFixture) -> None:
    served = serve(sessions=1)
    for _ in range(2):
        only, other = begun(remote(served)), remote(served, open_seconds=0.2)
        with pytest.raises(RemoteError, match="no server opened a session"):
            begun(other)
        only.close()
        eventually(lambda: served.live == 0)
    assert (caplog.text.count("is full"), caplog.text.count("answers again")) == (1, 0)


def test_a_queue_that_is_full_for_a_while_is_waited_for(serve: Server) -> None:
    served = serve(threads=1, queue=1)
    playing = [begun(remote(served, step_seconds=90.0)) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        steps = list(pool.map(lambda environment: say(environment, "sleep 0.1"), playing))
    assert [step.rewards for step in steps] == [{"agent": 1.0}] * 6
    assert len(Scripted.steps) == 6
    for environment in playing:
        environment.close()


@pytest.mark.long
def test_a_request_that_is_too_large_disturbs_no_other(served: Served) -> None:
    huge, playing = begun(remote(served)), [begun(remote(served)) for _ in range(30)]
    with ThreadPoolExecutor(31) as pool:
        refused = pool.submit(say, huge, "9" * 100_000_000)
        steps = list(pool.map(lambda environment: say(environment, "9" * 1_000_000), playing))
        with pytest.raises(RemoteError, match=r"larger than max \(1000\d+ vs\. 16777216\); make the message smaller"):
            refused.result(100)
    assert [step.rewards for step in steps] == [{"agent": 1.0}] * 30
    assert say(huge).rewards == {"agent": 1.0}, "and the session continues"
    for environment in (huge, *playing):
        environment.close()


@pytest.mark.parametrize(("ours", "theirs", "limit"), [(64, 16, 16), (16, 64, 16), (64, 64, 64)])
@pytest.mark.long_after(1)
def test_both_ends_keep_to_the_smaller_limit_of_messages(serve: Server, ours: int, theirs: int, limit: int) -> None:
    served = serve(message_mb=theirs)
    playing, other = (begun(remote(served, message_mb=ours)) for _ in range(2))
    if limit == 64:
        assert say(playing, "9" * 30_000_000).rewards == {"agent": 1.0}
        assert len(say(playing, "big 30000000").observations["agent"][0].content) == 30_000_000
    else:
        with pytest.raises(RemoteError, match=r"larger than max \(300\d+ vs\. 16777216\); make the message smaller"):
            say(playing, "9" * 30_000_000)
        assert say(playing).rewards == {"agent": 1.0}, "the connection is whole, and the session continues"
        with pytest.raises(RemoteError, match=r"larger than max \(300\d+ vs\. 16777216\).*; .* raise message_mb"):
            say(playing, "big 30000000")
    assert say(other).rewards == {"agent": 1.0}
    for environment in (playing, other):
        environment.close()


@pytest.mark.parametrize("size", [0, -1, 2048])
def test_a_size_of_messages_that_cannot_be(size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"message_mb is {size}; it must be from 1 to 2047"):
        RemoteEnvironment("a:1", "x", message_mb=size)


@pytest.mark.long
def test_many_sessions_get_their_own_answers(served: Served) -> None:
    environment = remote(served)

    async def play(number: int) -> list[str]:
        playing = environment.copy()
        await playing.reset(TASK)  # type: ignore[misc]
        said = []
        for turn in range(5):
            step = await playing.step({"agent": Message("assistant", f"{number}-{turn}")})  # type: ignore[misc]
            said.append(step.observations["agent"][0].content)
        playing.close()
        return said

    async def play_all() -> list[list[str]]:
        return await asyncio.gather(*(play(number) for number in range(100)))

    for number, said in enumerate(asyncio.run(play_all())):
        assert said == [f"{turn + 1} {number}-{turn}" for turn in range(5)]
    assert set(Counter(text for _, text in Scripted.steps).values()) == {1}
    eventually(lambda: served.live == 0)


def test_names_of_clients_tell_processes_apart(served: Served) -> None:
    playing = begun(remote(served))
    (session,) = served.stub.ListSessions(pb.ListSessionsRequest()).sessions
    assert session.client.endswith(f":{os.getpid()}")
    playing.close()


def test_a_stale_turn_is_not_taken_for_an_answer(served: Served) -> None:
    playing: Any = begun(remote(served))
    served.stub.Step(step_request(playing._session, 0, "from elsewhere"))
    assert say(playing).observations["agent"][0].content == "1 from elsewhere", "the recorded answer of the turn"
    served.stub.Step(step_request(playing._session, 1))
    served.stub.Step(step_request(playing._session, 2))
    with pytest.raises(RemoteError, match="the session is at turn 3, and the request is of 1"):
        say(playing)
    playing.close()


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("Describe", {"environments": []}),
        ("GetTasks", {"tasks": b"[]"}),
        ("GetTasks", {"size": -1}),
        ("GetTasks", {"identities": b"[]"}),
        ("Open", {"observations": b"{"}),
        ("Open", {"lease_seconds": float("nan")}),
        ("Open", {"direct": "nowhere"}),
        ("Step", {"step": b"[]"}),
    ],
)
def test_an_answer_that_is_not_of_the_protocol_names_the_server(
    served: Served, monkeypatch: pytest.MonkeyPatch, method: str, fields: dict[str, Any]
) -> None:
    call = Connection.call

    async def changed(self: Connection, asked: str, *arguments: Any, **options: Any) -> Any:
        reply = await call(self, asked, *arguments, **options)
        for name, value in fields.items() if asked == method else ():
            reply.ClearField(name)
            if value:
                setattr(reply, name, value)
        return reply

    monkeypatch.setattr(Connection, "call", changed)
    environment = remote(served)

    def play() -> None:
        assert environment.agents
        environment.identity(environment.tasks("train")[3])
        asyncio.run(environment.reset(TASK))
        say(environment)

    with pytest.raises(RemoteError, match=f"{served.target} gave an answer that is not of the protocol"):
        play()
    environment.close()
    eventually(lambda: method == "Open" or served.live == 0)
