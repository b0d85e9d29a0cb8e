from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from mrlm_environments import Centralized, CoordinationGame

from mrlm_pl.environment import Message, Task, ToolSchema
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving.environments import sessions
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport.codec import from_json, step_from, to_json
from tests.support.servers.environment_servers import (
    TASK,
    Scripted,
    Served,
    attempt,
    eventually,
    offer,
    refusal,
    step_request,
)

Code = grpc.StatusCode


def test_an_episode(served: Served) -> None:
    opened = served.open()
    (message,) = from_json(opened.observations, dict[str, tuple[Message, ...]])["agent"]
    assert message == Message(
        "user", "task {'flag': True, 'one': 1, 'share': 1.0, 'large': 1180591620717411303424} 18446744073709551617"
    )
    assert from_json(opened.tools, dict[str, tuple[ToolSchema, ...]])["agent"] == Scripted.tools_offered
    assert opened.lease_seconds == 120
    reply = served.step(opened.session, 0, "hello")
    assert (reply.session, reply.turn) == (opened.session, 0)
    step = step_from(reply.step)
    assert step.observations["agent"] == (Message("user", "1 hello"),)
    assert repr(step.rewards) == "{'agent': 1.0}"
    end = step_from(served.step(opened.session, 1, "end").step)
    assert (end.done, end.stop_reason, end.success, end.components) == (True, "answered", True, {"agent": {"count": 2}})


def test_a_turn_is_made_once_however_often_it_is_asked_for(served: Served) -> None:
    session = served.open().session
    first = served.step(session, 0, "a")
    assert served.step(session, 0, "a") == first
    assert served.step(session, 0, "something else") == first
    second = served.step(session, 1, "b")
    assert served.step(session, 1, "b") == second
    assert [text for _, text in Scripted.steps] == ["a", "b"]


def test_the_same_turn_at_the_same_time_is_made_once(served: Served) -> None:
    session = served.open().session
    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: served.step(session, 0, "sleep 0.2"), range(20)))
    assert all(reply == replies[0] for reply in replies)
    assert len(Scripted.steps) == 1


def test_turns_out_of_order_are_refused_and_change_nothing(served: Served) -> None:
    session = served.open().session
    for turn in (0, 1, 2):
        served.step(session, turn)
    for turn in (0, 1, 4, 99, -1, 2**62):
        code, text = refusal(served.step, session, turn)
        assert code is Code.FAILED_PRECONDITION
        assert text == f"the session is at turn 3, and the request is of {turn}"
    assert step_from(served.step(session, 3).step).rewards == {"agent": 4.0}


def test_another_turn_while_one_is_made_is_refused(served: Served) -> None:
    session = served.open().session
    call = served.stub.Step.future(step_request(session, 0, "hang"))
    eventually(lambda: Scripted.steps)
    assert refusal(served.step, session, 1)[0] is Code.FAILED_PRECONDITION
    Scripted.gate.set()
    assert call.result(60).turn == 0


def test_a_turn_whose_caller_went_away_is_there_for_its_retry(served: Served) -> None:
    session = served.open().session
    call = served.stub.Step.future(step_request(session, 0, "hang"))
    eventually(lambda: Scripted.steps)
    call.cancel()
    Scripted.gate.set()
    assert served.step(session, 0, "hang").turn == 0
    assert len(Scripted.steps) == 1


def test_a_turn_that_failed_is_not_made_again(served: Served) -> None:
    session = served.open().session
    for _ in range(3):
        assert refusal(served.step, session, 0, "raise") == (Code.ABORTED, "OSError: the back end is away")
    assert len(Scripted.steps) == 1


@pytest.mark.parametrize(
    ("word", "code", "text"),
    [
        ("late", Code.DEADLINE_EXCEEDED, "TimeoutError: a tool of mine was late"),
        ("exit", Code.ABORTED, "RuntimeError: SystemExit: 3"),
    ],
)
def test_errors_of_an_environment_are_told_by_their_class(served: Served, word: str, code: Any, text: str) -> None:
    session = served.open().session
    assert refusal(served.step, session, 0, word) == (code, text)
    assert served.live == 1
    assert served.step(served.open().session, 0).turn == 0


def test_an_episode_that_cannot_begin_is_no_session(served: Served) -> None:
    task = type(TASK)("scripted", "train", 0, 0, {"fail": True})
    assert refusal(served.open, task=task, key="k") == (Code.ABORTED, "OSError: the back end is away")
    assert served.live == 0
    eventually(lambda: len(Scripted.closed) == 1)
    assert refusal(served.open, task=task, key="k")[0] is Code.ABORTED, "and may be asked for again"


def test_a_step_after_the_end_and_one_of_the_wrong_agents(served: Served) -> None:
    session = served.open().session
    code, text = refusal(served.step, session, 0, left="a")
    assert code is Code.FAILED_PRECONDITION
    assert "EnvironmentContractError" in text
    assert "['left']" in text
    assert "['agent']" in text
    assert refusal(served.stub.Step, pb.StepRequest(session=session, actions=b"{}"))[0] is Code.FAILED_PRECONDITION
    assert step_from(served.step(session, 0, "end").step).done, "nothing was done, so the turn is still due"
    code, text = refusal(served.step, session, 1)
    assert code is Code.FAILED_PRECONDITION
    assert "after the episode was done" in text


def test_several_agents_and_async_environments(serve: Any) -> None:
    served = serve(step_seconds=1.0)
    session = served.open("duo").session
    step = step_from(served.step(session, 0, left="0", right="x").step)
    assert repr(step.rewards) == "{'left': 0.5, 'right': True}"
    code, text = refusal(served.step, session, 1, left="30", right="x")
    assert code is Code.DEADLINE_EXCEEDED
    assert "1 s" in text
    code, text = refusal(served.step, session, 1, left="0", right="x")
    assert code is Code.NOT_FOUND
    assert "turn 1 took longer than 1 s" in text


def test_opening_with_the_same_key_opens_one_session(served: Served) -> None:
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: served.open(key="same"), range(16)))
    assert len({reply.session for reply in opened}) == 1
    assert served.live == 1
    assert served.open(key="other").session != opened[0].session
    assert served.open().session != served.open().session


def test_an_opening_without_a_key_ends_with_its_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begins, begin = threading.Event(), threading.Event(), Scripted.begin
    monkeypatch.setattr(Scripted, "begin", lambda *given: (begun.set(), begins.wait(60), begin(*given))[-1])
    service = served.server.service

    async def leave() -> None:
        opening = asyncio.ensure_future(service.open(pb.OpenRequest(environment="scripted", task=to_json(TASK))))
        while not begun.is_set():  # before that there is no environment to close
            await asyncio.sleep(0.01)
        opening.cancel()
        await asyncio.wait([opening])

    served.run(leave())
    begins.set()
    eventually(lambda: len(Scripted.closed) == 1)
    assert served.live == 0
    assert not service._opened


def test_a_lease_runs_out_with_the_reason(serve: Any, clock: SimpleNamespace) -> None:
    served = serve(lease_seconds=2.0)
    kept, lost = served.open().session, served.open().session
    longer = served.open(lease_seconds=30)
    assert longer.lease_seconds == 2.0, "a client may ask for less only"
    served.stub.Close(pb.CloseRequest(session=longer.session))
    assert not served.stub.KeepAlive(pb.KeepAliveRequest(sessions=[kept, lost])).unknown
    begun = clock.now
    while served.live > 1:
        clock.now += 0.5
        assert not served.stub.KeepAlive(pb.KeepAliveRequest(sessions=[kept])).unknown
        served.run(served.server.service.expire())
    assert clock.now - begun >= 2.0
    code, text = refusal(served.step, lost, 0)
    assert code is Code.NOT_FOUND
    assert text == f"session {lost!r} is unknown: its lease of 2 s ran out without a call"
    assert served.step(kept, 0).turn == 0
    assert list(served.stub.KeepAlive(pb.KeepAliveRequest(sessions=[kept, lost, "x"])).unknown) == [lost, "x"]
    eventually(lambda: len(Scripted.closed) == 2)
    assert served.server.service.expired_total == 1


@pytest.mark.parametrize("lease", [-1.0, float("nan"), float("inf")])
def test_a_lease_that_would_never_or_always_end_is_refused(served: Served, lease: float) -> None:
    code, text = refusal(served.open, lease_seconds=lease)
    assert code is Code.INVALID_ARGUMENT
    assert text.startswith("lease_seconds is ")
    assert served.open(lease_seconds=1e9).lease_seconds == 120
    assert served.open(lease_seconds=7).lease_seconds == 7


def test_a_step_that_takes_long_keeps_its_lease(served: Served, clock: SimpleNamespace) -> None:
    session = served.open().session
    call = served.stub.Step.future(step_request(session, 0, "hang"))
    eventually(lambda: Scripted.steps)
    clock.now += 1000.0
    served.run(served.server.service.expire())
    Scripted.gate.set()
    assert call.result(60).turn == 0
    served.run(served.server.service.expire())
    assert served.step(session, 1).turn == 1, "its end renews the lease"


def test_closing_twice(served: Served) -> None:
    session = served.open().session
    served.stub.Close(pb.CloseRequest(session=session))
    served.stub.Close(pb.CloseRequest(session=session))
    assert refusal(served.step, session, 0) == (Code.NOT_FOUND, f"session {session!r} is unknown: it was closed")
    assert eventually(lambda: len(Scripted.closed)) == 1
    assert served.live == 0


def test_closing_stops_what_waits(serve: Any) -> None:
    served = serve(threads=1)
    first, second = served.open().session, served.open().session
    hung = served.stub.Step.future(step_request(first, 0, "hang"))
    eventually(lambda: Scripted.steps)
    waiting = served.stub.Step.future(step_request(second, 0, "never made"))
    eventually(lambda: served.server.workers.waiting == 1)
    served.stub.Close(pb.CloseRequest(session=second))
    assert waiting.code() is Code.ABORTED
    assert waiting.details() == "the session was ended during its turn"
    Scripted.gate.set()
    hung.result(60)
    eventually(lambda: len(Scripted.closed) == 1)
    assert [text for _, text in Scripted.steps] == ["hang"]


def test_a_hung_step_ends_its_session_and_no_other(serve: Any) -> None:
    served = serve(threads=2)
    sessions = [served.open().session for _ in range(3)]
    patient = served.server.service.limits
    served.server.service.limits = replace(patient, step_seconds=1.0)
    for session in sessions[:2]:
        code, text = refusal(served.step, session, 0, "hang")
        assert code is Code.DEADLINE_EXCEEDED
        assert "1 s" in text
        assert "turn 0 took longer than 1 s" in refusal(served.step, session, 0)[1]
    served.server.service.limits = patient
    assert served.step(sessions[2], 0).turn == 0
    assert served.live == 1


def test_a_full_queue_and_a_full_server(serve: Any) -> None:
    served = serve(threads=1, queue=1, sessions=3)
    sessions = [served.open().session for _ in range(3)]
    code, text = refusal(served.open)
    assert code is Code.RESOURCE_EXHAUSTED
    assert text == "3 sessions are live, as many as the server allows; raise its max_sessions"
    first = served.stub.Step.future(step_request(sessions[0], 0, "hang"))
    eventually(lambda: Scripted.steps)
    second = served.stub.Step.future(step_request(sessions[1], 0))
    eventually(lambda: served.server.workers.waiting == 1)
    code, text = refusal(served.step, sessions[2], 0)
    assert code is Code.RESOURCE_EXHAUSTED
    assert text == "1 calls are waiting, as many as the queue holds"
    served.stub.Close(pb.CloseRequest(session=sessions[2]))
    Scripted.gate.set()
    assert (first.result(60).turn, second.result(60).turn) == (0, 0)
    assert eventually(lambda: len(Scripted.closed)) == 1, "environments are closed although the queue was full"
    assert served.open().session


def test_the_bound_on_sessions_holds_when_many_open_at_once(serve: Any) -> None:
    served = serve(sessions=5)
    with ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(lambda _: attempt(served.open), range(40)))
    assert served.live == 5
    assert codes.count(None) == 5
    assert codes.count(Code.RESOURCE_EXHAUSTED) == 35


def test_health_and_draining(served: Served) -> None:
    health = health_pb2_grpc.HealthStub(served.channel)

    def status(name: str = "mrlm.remote.v2.EnvironmentService") -> int:
        return health.Check(health_pb2.HealthCheckRequest(service=name)).status

    assert status() == status("") == health_pb2.HealthCheckResponse.SERVING
    session = served.open(key="k").session
    draining = served.loop.submit(served.server.drain(20))
    eventually(lambda: status() == health_pb2.HealthCheckResponse.NOT_SERVING)
    code, text = refusal(served.open)
    assert code is Code.UNAVAILABLE
    assert "going down" in text
    assert served.step(session, 0).turn == 0, "live sessions continue"
    assert not draining.done()
    served.stub.Close(pb.CloseRequest(session=session))
    draining.result(60)
    assert len(Scripted.closed) == 2, "the session's and the one that it is a copy of"


def test_stopping_closes_every_environment(serve: Any) -> None:
    served = serve(threads=1)
    for _ in range(20):
        served.open()
    served.run(served.server.drain(0.1))
    assert len(Scripted.closed) == 20 + 1, "and the one that they are copies of"
    served.run(served.server.stop())


def test_reflection_lists_the_service(served: Served) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (reply,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in reply.list_services_response.service}
    assert {"mrlm.remote.v2.EnvironmentService", "grpc.health.v1.Health"} <= names


def test_tasks_of_a_wrapper_have_the_name_under_which_it_is_served(serve: Callable[..., Served]) -> None:
    served = serve(offer=Offer({"alone": lambda settings: Centralized(CoordinationGame())}, 0, 10.0))
    client = RemoteEnvironment(served.target, "alone")
    task = client.tasks("train")[1]
    assert task == replace(CoordinationGame().tasks("train")[1], environment="alone")
    (message,) = asyncio.run(client.reset(task))["team"]
    assert "<agent_1>" in message.content
    client.close()


class Alike(Scripted):
    """Tasks that begin alike, of which the first is not told apart."""

    def identity(self, task: Task) -> str | None:
        return f"{task.key} of {task.environment}" if task.index else None


def test_the_client_tells_tasks_apart_as_the_environment_does(serve: Callable[..., Served]) -> None:
    factories = {"alike": lambda settings: Alike(), "game": lambda settings: CoordinationGame()}
    served = serve(offer=Offer(factories, 0, 10.0))
    client, own = RemoteEnvironment(served.target, "alike"), Alike()
    expected = [own.identity(task) for task in (own.tasks("test")[index] for index in (0, 3))]
    assert [client.identity(client.tasks("test")[index]) for index in (0, 3)] == expected
    assert expected[0] is None
    game = RemoteEnvironment(served.target, "game")
    assert game.identity(game.tasks("train")[1]) == CoordinationGame().identity(CoordinationGame().tasks("train")[1])


def test_environments_and_tasks_are_listed(served: Served) -> None:
    reply = served.stub.Describe(pb.DescribeRequest())
    assert [(item.name, list(item.agents)) for item in reply.environments] == [
        ("duo", ["left", "right"]),
        ("scripted", ["agent"]),
    ]
    assert reply.environments[0].summary == "Let two agents act simultaneously, three times; ``async``."
    tasks = served.stub.GetTasks(pb.TasksRequest(environment="scripted", split="train", start=198, count=10))
    assert [task["index"] for task in json.loads(tasks.tasks)] == [198, 199]
    assert tasks.size == 200
    for fields in ({"start": -1, "count": 1}, {"count": -1}, {"count": 10**6}):
        request = pb.TasksRequest(environment="scripted", split="train", **fields)
        assert refusal(served.stub.GetTasks, request)[0] is Code.INVALID_ARGUMENT
    assert refusal(served.stub.Describe, pb.DescribeRequest(environment="x"))[0] is Code.NOT_FOUND


def test_live_sessions_are_listed(served: Served) -> None:
    session = served.open(client="me").session
    served.step(session, 0)
    served.open("duo")
    reply = served.stub.ListSessions(pb.ListSessionsRequest(environment="scripted"))
    (shown,) = reply.sessions
    assert (shown.environment, shown.client, shown.turn) == ("scripted", "me", 1)
    assert 60 < shown.lease_left_seconds <= 120
    assert shown.busy is False
    reply = served.stub.ListSessions(pb.ListSessionsRequest(limit=1))
    assert (len(reply.sessions), reply.total) == (1, 2)


def test_a_listed_session_can_neither_be_stepped_nor_closed(served: Served) -> None:
    session = served.open(client="me").session
    (shown,) = served.stub.ListSessions(pb.ListSessionsRequest()).sessions
    assert session not in str(shown)
    assert refusal(served.step, shown.session, 0)[0] is Code.NOT_FOUND
    served.stub.Close(pb.CloseRequest(session=shown.session))
    assert list(served.stub.KeepAlive(pb.KeepAliveRequest(sessions=[shown.session])).unknown) == [shown.session]
    assert served.step(session, 0).turn == 0
    (again,) = served.stub.ListSessions(pb.ListSessionsRequest()).sessions
    assert again.session == shown.session, "the digest of a session stays"


@pytest.mark.parametrize("end", ["close", "step", "lease"])
def test_the_answer_to_an_opening_is_kept_until_it_has_been_used(
    served: Served, clock: SimpleNamespace, end: str
) -> None:
    kept = served.server.service._opened
    opened = served.open(key="mine")
    assert served.open(key="mine").session == opened.session
    if end == "close":
        served.stub.Close(pb.CloseRequest(session=opened.session))
    elif end == "step":
        served.step(opened.session, 0)
    else:
        clock.now += 1000.0
    eventually(lambda: not kept)
    code, text = refusal(served.open, key="mine")
    assert code is Code.ALREADY_EXISTS, "a request that comes late opens no second session"
    assert "use a new key" in text


def test_keys_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(served.open, key="x" * 129)[0] is Code.INVALID_ARGUMENT
    monkeypatch.setattr(sessions, "REMEMBERED", 5)
    for number in range(20):
        served.stub.Close(pb.CloseRequest(session=served.open(key=f"key {number}").session))
    assert not served.server.service._opened
    assert refusal(served.open, key="key 15")[0] is Code.ALREADY_EXISTS
    served.open(key="key 14")  # only the ids of ended sessions are kept


@pytest.mark.parametrize("turn", [0, 7], ids=["the environment fails", "the request is wrong"])
def test_a_refused_step_keeps_no_environment_until_cycles_are_collected(served: Served, turn: int) -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(30):
            session = served.open().session
            assert refusal(served.step, session, turn, "raise")[0] in (Code.ABORTED, Code.FAILED_PRECONDITION)
            served.stub.Close(pb.CloseRequest(session=session))
        eventually(lambda: len(Scripted.closed) == 30)
        kept = [item for item in gc.get_objects() if type(item) is Scripted and item.of == Scripted.era]
    finally:
        gc.enable()
    assert len(kept) <= 1 + 8, "the template, and at most one in each thread, which holds its last call"


def test_settings_that_are_wrong_leave_nothing_behind(served: Served) -> None:
    for number in range(20):
        refusal(served.open, settings={f"nonsense{number}": "x" * 1000})
    assert not served.server.offer._variants
    served.open()
    assert len(served.server.offer._variants) == 1


def test_environments_that_make_room_are_closed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offer, "MAX_VARIANTS", 2)
    made: list[Scripted] = []

    def make(settings: Any) -> Scripted:
        made.append(Scripted(**settings))
        return made[-1]

    served = serve(offer=offer(more={"scripted": make}))
    for greeting in ("a", "b", "c"):
        served.open(settings={"greeting": greeting})
    assert [id(item) in Scripted.closed for item in made] == [True, False, False]
    served.run(served.server.stop())
    assert all(id(item) in Scripted.closed for item in made)


def test_a_slow_environment_is_kept_though_quicker_ones_began_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offer, "MAX_VARIANTS", 2)
    monkeypatch.setattr(Scripted, "closed", [])
    begun, go_on = threading.Event(), threading.Event()

    def make(settings: Any) -> Scripted:
        if settings["greeting"] == "slow":
            begun.set()
            assert go_on.wait(100)
        return Scripted(**settings)

    made = offer(more={"scripted": make})
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(made.template, "scripted", {"greeting": "slow"})
        assert begun.wait(100)
        quick = [made.template("scripted", {"greeting": greeting}) for greeting in ("a", "b")]
        go_on.set()
        slow.result(100)
    assert made.template("scripted", {"greeting": "slow"}) is slow.result()
    assert [id(item) in Scripted.closed for item in (slow.result(), *quick)] == [False, True, False]
    made.close()


def test_an_environment_that_fails_during_the_end_leaves_no_other_open() -> None:
    begun, go_on, failed = threading.Event(), threading.Event(), threading.Event()

    class Last(Scripted):
        """Its end waits for the failure of another one."""

        def close(self) -> None:
            go_on.set()
            assert failed.wait(100)
            super().close()

    def make(settings: Any) -> Scripted:
        if settings["greeting"] == "fails":
            begun.set()
            assert go_on.wait(100)
            raise ValueError("no such greeting")
        return (Last if settings["greeting"] == "first" else Scripted)(**settings)

    made = offer(more={"scripted": make})
    with ThreadPoolExecutor(1) as pool:
        first = made.template("scripted", {"greeting": "first"})
        failing = pool.submit(made.template, "scripted", {"greeting": "fails"})
        failing.add_done_callback(lambda done: failed.set())
        assert begun.wait(100)
        last = made.template("scripted", {"greeting": "last"})
        made.close()
    assert isinstance(failing.exception(), ValueError)
    assert all(id(item) in Scripted.closed for item in (first, last))


def test_an_environment_is_made_once_for_all_its_sessions(serve: Any) -> None:
    slow = threading.Lock()

    def make(settings: Any) -> Scripted:
        with slow:
            time.sleep(0.05)
            return Scripted(**settings)

    served = serve(offer=offer(more={"scripted": make}))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: served.open(), range(16)))
    assert Scripted.made == 1
    served.open(settings={"greeting": "hello"})
    assert Scripted.made == 2


def test_settings_are_those_of_the_session(served: Served) -> None:
    hello = served.open(settings={"greeting": "hello"})
    assert json.loads(hello.observations)["agent"][0]["content"].startswith("hello ")
    assert json.loads(served.open().observations)["agent"][0]["content"].startswith("task ")
    code, text = refusal(served.open, settings={"nonsense": 1})
    assert code is Code.ABORTED
    assert "nonsense" in text
