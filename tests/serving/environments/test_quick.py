from __future__ import annotations

import json
import threading
from collections.abc import Callable

import grpc
import pytest

from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment
from mrlm_pl.episode import Message, Task
from mrlm_pl.serving.transport import environment_pb2 as pb
from tests.support.servers.environment_servers import Served, offer, refusal


class Where(SingleAgentEnvironment):
    """Tells its thread and counts."""

    name = "where"

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{}])

    def begin(self, task: Task) -> str:
        self.count = 0
        return "begin"

    def reply(self, message: Message) -> Outcome:
        self.count += 1
        if message.content == "exit":
            raise SystemExit(3)
        return Outcome({"count": float(self.count)}, f"{self.count} {threading.current_thread().name}")


class QuickWhere(Where):
    """The same on the loop."""

    name = "quick"
    quick = True


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve(offer=offer(more={"where": lambda settings: Where(), "quick": lambda settings: QuickWhere()}))


def said(reply: pb.StepReply) -> str:
    return json.loads(reply.step)["observations"]["agent"][0]["content"]


def test_only_steps_of_quick_environments_are_made_on_the_loop(served: Served) -> None:
    for name, thread in {"where": "environment-worker", "quick": "mrlm-event-loop"}.items():
        assert said(served.step(served.open(name).session, 0)) == f"1 {thread}"


def test_a_quick_step_is_made_once_however_it_is_asked_for(served: Served) -> None:
    session = served.open("quick").session
    first = served.step(session, 0)
    assert served.step(session, 0) == first
    second = served.step(session, 1)
    assert (said(second).split()[0], served.step(session, 1)) == ("2", second)
    assert refusal(served.step, session, 5)[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert said(first).split()[0] == "1"
    assert said(served.step(session, 2)).split()[0] == "3"


def test_an_exit_of_a_quick_environment_is_told_again_and_ends_nothing(served: Served) -> None:
    session = served.open("quick").session
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as caught:
            served.step(session, 0, "exit")
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "SystemExit: 3" in caught.value.details()
    assert said(served.step(served.open("quick").session, 0)).startswith("1 ")
