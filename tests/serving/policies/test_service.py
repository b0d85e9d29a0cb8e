"""Policies behind gRPC sample the same as in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.engines.base import Sample, SampleRequest
from mrlm_pl.errors import ConfigurationError, EngineError, RemoteError
from mrlm_pl.policy import Policy
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.policies import engine as policy_engine
from mrlm_pl.serving.policies.engine import RemoteEngine
from mrlm_pl.serving.policies.service import PolicyService
from mrlm_pl.serving.server import EnvironmentServer
from mrlm_pl.serving.transport import environment_pb2 as pb
from tests.support.servers.ports import nowhere


@pytest.fixture
def local(model_folder: Path) -> InProcessEngine:
    policy = Policy(str(model_folder))
    policy.load()
    policy.model.eval()
    engine = InProcessEngine()
    engine.load("judge", policy.model, 3)
    return engine


@pytest.fixture
def service(local: InProcessEngine) -> PolicyService:
    return PolicyService(local, [pb.PolicyDescription(name="judge", model="a model")])


@pytest.fixture
def remote(service: PolicyService, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteEngine]:
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    server = EnvironmentServer(Offer({}, 0, 10.0), policies=service)
    loop = EventLoopThread()
    loop.submit(server.start()).result(100)
    yield RemoteEngine(f"127.0.0.1:{server.port}", seconds=100.0)
    loop.submit(server.stop()).result(100)
    loop.close()


def requests(count: int, policy: str = "judge") -> list[SampleRequest]:
    sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=5)
    return [SampleRequest((7, 8, 9 + index), policy, 2**70 + index, sampling, (2,)) for index in range(count)]


def test_samples_are_those_of_the_engine_itself(local: InProcessEngine, remote: RemoteEngine) -> None:
    assert asyncio.run(remote.sample(requests(6))) == asyncio.run(local.sample(requests(6)))
    assert asyncio.run(remote.sample([])) == []
    assert {name: item.model for name, item in remote.described().items()} == {"judge": "a model"}
    remote.release("s")


def test_turns_whose_caller_is_gone_are_not_sampled_to_their_end(local: InProcessEngine, remote: RemoteEngine) -> None:
    long = [replace(request, sampling=Sampling(max_tokens=200), stop_ids=()) for request in requests(2)]
    asyncio.run(remote.sample(long))
    whole = local.stats.decode_tokens

    async def leave() -> None:
        asking = asyncio.ensure_future(remote.sample(long))
        waiting = asyncio.ensure_future(remote.sample(long))
        while local.stats.decode_tokens < whole + 4:
            await asyncio.sleep(0.001)
        asking.cancel()
        waiting.cancel()
        await asyncio.gather(asking, waiting, return_exceptions=True)

    slow = local._loaded["judge"].backend
    step = slow.prefill

    def slowed(*arguments: Any, **options: Any) -> Any:
        logits, rows = step(*arguments, **options)
        inner = rows.step
        rows.step = lambda tokens: time.sleep(0.05) or inner(tokens)
        return logits, rows

    slow.prefill = slowed
    asyncio.run(leave())
    sampled = local.stats.decode_tokens
    slow.prefill = step
    asyncio.run(remote.sample(requests(1)))  # comes after whatever is still computed
    assert sampled < whole + whole // 2
    assert local.stats.decode_tokens < whole + whole // 2


def test_many_turns_are_asked_for_in_parts(remote: RemoteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = asyncio.run(remote.sample(requests(5)))
    monkeypatch.setattr(policy_engine, "MAX_REQUESTS", 1)
    again = asyncio.run(remote.sample(requests(5)))
    assert [sample.token_ids for sample in again] == [sample.token_ids for sample in whole]


@pytest.mark.parametrize(("context", "reply"), [(700_000, 1), (1, 200_000)])
@pytest.mark.long_after(1)
def test_long_turns_fit_the_messages(
    context: int, reply: int, local: InProcessEngine, remote: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    async def longest(requests: Any) -> list[Sample]:
        calls.append(len(requests))
        return [Sample((150_000,) * reply, (-0.5,) * reply, "length", 1, "in_process")] * len(requests)

    monkeypatch.setattr(local, "sample", longest)
    asked = [SampleRequest((150_000,) * context, "judge", row, Sampling(max_tokens=reply)) for row in range(8)]
    assert [len(sample.token_ids) for sample in asyncio.run(remote.sample(asked))] == [reply] * 8
    assert calls == ([1] * 8 if context > reply else [5, 3])


def test_a_fault_of_the_engine_is_told_at_once(
    local: InProcessEngine, remote: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    async def failing(requests: Any) -> Any:
        calls.append(len(requests))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(local, "sample", failing)
    with pytest.raises(RemoteError, match=f"{remote.address.target}: INTERNAL: RuntimeError: out of memory"):
        asyncio.run(remote.sample(requests(2)))
    assert calls == [2]


def test_weights_that_change_between_two_calls_are_refused(service: PolicyService, remote: RemoteEngine) -> None:
    service.policies["judge"].weights = "first"
    remote.described()
    before = asyncio.run(remote.sample(requests(2)))
    service.policies["judge"].weights = "second"
    with pytest.raises(EngineError, match="policy 'judge' has other weights or another precision than at the caller's"):
        asyncio.run(remote.sample(requests(2)))
    service.policies["judge"].weights = "first"
    assert asyncio.run(remote.sample(requests(2))) == before


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((3, 1), "answered 2 turns with 3 samples"),
        ((2, 2), "6 tokens of at most 5, 6 log-probabilities, ended by 'length'"),
    ],
    ids=["one more, then one fewer", "more tokens than asked for"],
)
def test_replies_to_other_requests_are_refused(
    counts: tuple[int, int], text: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(counts)

    async def reply(service: PolicyService, batch: pb.SampleBatch, context: Any) -> pb.SampleReplies:
        sample = pb.Sample(token_ids=[5] * 6, logprobs=[-0.5] * 6, finish_reason="length")
        return pb.SampleReplies(samples=[sample] * left.pop(0))

    monkeypatch.setattr(PolicyService, "Sample", reply)
    monkeypatch.setattr(policy_engine, "MAX_REQUESTS", 2)
    with pytest.raises(RemoteError, match=text):
        asyncio.run(request.getfixturevalue("remote").sample(requests(4)))


def test_what_cannot_be_served_is_told(remote: RemoteEngine) -> None:
    with pytest.raises(EngineError, match=f"{remote.address.target}: there is no policy 'other' here"):
        asyncio.run(remote.sample(requests(1, "other")))
    with pytest.raises(EngineError, match="empty"):
        asyncio.run(remote.sample([SampleRequest((), "judge", 0, Sampling())]))
    with pytest.raises(EngineError, match="its weights cannot be set from here"):
        remote.load("judge", None, 1)
    with pytest.raises(ConfigurationError, match="no environment 'math' here; there are none"):
        _ = RemoteEnvironment(remote.address.target, "math").agents
    absent = RemoteEngine(nowhere(), seconds=0.5)
    with pytest.raises(RemoteError):
        asyncio.run(absent.sample(requests(1)))
