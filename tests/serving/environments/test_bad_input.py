"""Any request of a client has the right status and text, and the server continues."""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest

from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport.codec import to_json
from tests.support.servers.environment_servers import TASK, Scripted, Served, attempt, refusal, step_request

Code = grpc.StatusCode


def test_an_answer_that_is_too_large_for_a_message(serve: Any) -> None:
    served = serve(message_mb=1)
    first, second = served.open().session, served.open().session
    code, text = refusal(served.step, first, 0, "big 3000000")
    assert code is Code.RESOURCE_EXHAUSTED
    assert "larger than max" in text
    assert served.step(second, 0).turn == 0


@pytest.mark.long
def test_an_action_of_a_hundred_megabytes(served: Served) -> None:
    session = served.open().session
    code, text = refusal(served.step, session, 0, "9" * 100_000_000)
    assert code is Code.RESOURCE_EXHAUSTED
    assert "larger than max" in text
    assert Scripted.steps == []
    assert served.step(session, 0, "9" * 1_000_000).turn == 0


MALFORMED = [b"\xff\xff\xff", b"\x0a\xff\x01", b"\x0a\x02\xff\xfe", bytes(range(256))]
METHODS = ["Describe", "GetTasks", "Open", "Step", "KeepAlive", "Close", "ListSessions"]


@pytest.mark.parametrize("method", METHODS)
def test_malformed_messages_are_refused(served: Served, method: str) -> None:
    session = served.open().session
    path = f"/mrlm.remote.v2.EnvironmentService/{method}"
    for data in MALFORMED[1:3]:
        code, text = refusal(served.channel.unary_unary(path), data)
        assert code is Code.INVALID_ARGUMENT, (method, data, text)
        assert "malformed" in text
    assert served.step(session, 0).turn == 0


def test_malformed_messages_of_a_stream_are_refused(served: Served) -> None:
    call = served.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    code, text = refusal(lambda: list(call(iter([MALFORMED[1]]), timeout=20)))
    assert (code, "malformed" in text) == (Code.INVALID_ARGUMENT, True), text


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (pb.StepRequest(actions=b'{"agent": {"role": "", "content": ""}}'), "enum value '' - at"),
        (pb.StepRequest(actions=b'{"agent": {"content": ""}}'), "missing required field `role`"),
        (pb.StepRequest(actions=b"[" * 100_000), "malformed"),
        (pb.OpenRequest(environment="scripted"), "malformed"),
        (pb.OpenRequest(environment="scripted", task=to_json({**vars(TASK), "seed": "x"})), "at `$.seed`"),
        (pb.OpenRequest(environment="scripted", task=to_json(TASK), settings=b"[1]"), "malformed"),
    ],
)
def test_messages_that_make_no_sense_are_refused(served: Served, request_: Any, text: str) -> None:
    session = served.open().session
    if isinstance(request_, pb.StepRequest):
        request_.session = session
        found = refusal(served.stub.Step, request_)
    else:
        found = refusal(served.stub.Open, request_)
    assert found[0] is Code.INVALID_ARGUMENT
    assert text in found[1]
    assert served.step(session, 0).turn == 0


def test_no_random_message_disturbs_the_server(served: Served) -> None:
    rng = random.Random(0)
    session, bystander = served.open().session, served.open().session
    samples = [
        step_request(session, 5, "x"),
        pb.OpenRequest(environment="scripted", task=to_json(TASK), settings=b"{}"),
        pb.TasksRequest(environment="scripted", split="train", count=5),
        pb.ListSessionsRequest(limit=-5),
        pb.CloseRequest(session="x"),
    ]
    allowed = {
        Code.INVALID_ARGUMENT,
        Code.NOT_FOUND,
        Code.FAILED_PRECONDITION,
        Code.ABORTED,
        Code.RESOURCE_EXHAUSTED,
        Code.DEADLINE_EXCEEDED,
    }
    seen = set()
    for number in range(600):
        data = bytearray(rng.choice(samples).SerializeToString() if number % 3 else rng.randbytes(rng.randrange(60)))
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        path = f"/mrlm.remote.v2.EnvironmentService/{rng.choice(METHODS)}"
        seen.add(attempt(served.channel.unary_unary(path), bytes(data), timeout=20))
    assert seen - {None} <= allowed
    assert {None, Code.INVALID_ARGUMENT, Code.NOT_FOUND} <= seen
    assert served.step(bystander, 0).turn == 0


def test_methods_that_do_not_exist(served: Served) -> None:
    path = "/mrlm.remote.v2.EnvironmentService/Explode"
    assert refusal(served.channel.unary_unary(path), b"")[0] is Code.UNIMPLEMENTED


def test_the_protocol_of_the_first_version_does_not_exist(served: Served) -> None:
    path = "/mrlm.remote.v1.EnvironmentService/KeepAlive"
    assert refusal(served.channel.unary_unary(path), b"")[0] is Code.UNIMPLEMENTED
