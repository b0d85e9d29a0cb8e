"""A pool of workers: placement, weights that reach all of them, and workers that are lost; without Ray."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from mrlm_environments import MathEnvironment
from transformers import PreTrainedModel

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import (
    Engine,
    InProcessEngine,
    OpenAICompatible,
    PoolDeadlines,
    PoolResources,
    RayPool,
    Sample,
    WeightTransfer,
)
from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.engines.ray import pool as ray_pool
from mrlm_pl.engines.ray.spreading import Spreading
from mrlm_pl.engines.transfer.broadcast import WeightSender
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.policy import Policy
from mrlm_pl.policy.lora import LoRA, add_adapter
from tests.engines.conftest import build, request, run
from tests.support.models.pool_parts import CALLS, FakeActor, FakeCluster, sent_tensors, stand_in

MakePool = Callable[..., tuple[RayPool, FakeCluster]]


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    """A factory of pools whose workers are threads; all are closed afterwards."""
    pools: list[RayPool] = []

    def make(workers: int = 2, **options: Any) -> tuple[RayPool, FakeCluster]:
        cluster = stand_in(monkeypatch)
        options.setdefault("transfer", WeightTransfer(bucket_bytes=4096, transport="gloo"))
        options.setdefault("deadlines", PoolDeadlines(start=60, sample=60, transfer=60, silence=1))
        pools.append(RayPool(workers, **options))
        return pools[-1], cluster

    yield make
    for pool in pools:
        pool.close()


def changed(model: PreTrainedModel, seed: int) -> None:
    """Move all trained weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def expected(model: PreTrainedModel, requests: Sequence[Any], version: int) -> list[Sample]:
    """Return samples of an engine of this process, for one request after the other."""
    engine = InProcessEngine()
    engine.load("p", model, version)
    try:
        return [run(engine, item)[0] for item in requests]
    finally:
        engine.close()


def assert_same(found: Sequence[Sample], wanted: Sequence[Sample]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.token_ids, one.version, one.finish_reason) == (other.token_ids, other.version, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=3e-6)  # other batches, other rounding


# Placement.


def test_sessions_stay_and_the_rest_goes_where_least_is() -> None:
    spreading = Spreading(3)
    first = [request([n], session=f"{n}/a") for n in range(6)]
    assert spreading.place(first) == [0, 1, 2, 0, 1, 2]
    spreading.done([0, 1, 2, 0, 1, 2])
    assert spreading.place([request([9, 9], session=f"{n}/a") for n in (5, 3, 0)]) == [2, 0, 0]
    assert spreading.place([request([7]), request([8])]) == [1, 1], "the others are busy"


def test_requests_that_have_been_answered_count_no_more() -> None:
    spreading = Spreading(2)
    places = spreading.place([request([n]) for n in range(3)])
    assert places == [0, 1, 0]
    spreading.done(places)
    assert spreading.place([request([3])]) == [0]


def test_the_same_context_keeps_together_up_to_an_even_share() -> None:
    requests = [request([group], seed) for group in range(2) for seed in range(4)]
    assert Spreading(2).place(requests) == [0] * 4 + [1] * 4
    assert sorted(Spreading(2).place([request([1], seed) for seed in range(6)])) == [0, 0, 0, 1, 1, 1]


def test_released_sessions_are_forgotten() -> None:
    spreading = Spreading(2)
    spreading.done(spreading.place([request([1], session="e/1"), request([2], session="f/1")]))
    assert spreading.release("e/") == {0}
    assert spreading.release("e/") == set()
    spreading.done(spreading.place([request([3], session="g/1")]))
    assert spreading.place([request([2], session="f/1"), request([3], session="g/1")]) == [1, 0]


def test_two_event_loops_may_place_requests_at_the_same_time() -> None:
    spreading = Spreading(2)
    failed: list[BaseException] = []

    def play(name: str) -> None:
        try:
            for number in range(300):
                asked = [request([n], session=f"{name}{number}-{n}/a") for n in range(8)]
                spreading.done(spreading.place(asked))
                if number >= 20:
                    spreading.release(f"{name}{number - 20}-")
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=play, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
    assert spreading._busy == [0, 0]


# Models.


def test_a_worker_builds_a_model_anew_where_other_weights_are_trained(make_pool: MakePool) -> None:
    model = build("llama").requires_grad_(False)
    add_adapter(model, LoRA(rank=2), "p")
    pool, cluster = make_pool(1)
    for version, flag in enumerate((True, False, False)):
        pool.load("p", model.requires_grad_(flag), version)
        [there] = cluster.actors[0].worker._models.values()
        assert {item.requires_grad for item in there.parameters()} == {flag}
    assert cluster.actors[0].calls.count("build") == 2, "only when it changes"


# Weights.


def test_every_worker_answers_like_the_learner_after_every_update(make_pool: MakePool) -> None:
    pool, cluster = make_pool(3)
    model = build("qwen2")
    requests = [request([1 + n, 7, 3], n, temperature=0.0 if n % 2 else 1.0, max_tokens=6) for n in range(3)]
    for version in (1, 2, 3):
        pool.load("p", model, version)
        samples = run(pool, *requests)  # one for each worker
        wanted = expected(model, requests, version)
        assert_same(samples, wanted)
        assert [item.logprobs for item in samples] == [item.logprobs for item in wanted]
        assert {item.engine for item in samples} == {"ray_pool/0", "ray_pool/1", "ray_pool/2"}
        changed(model, version)
    assert [actor.calls.count("build") for actor in cluster.actors] == [1, 1, 1]
    assert pool.window("p") == 64
    assert pool.window("q") is None


def test_workers_compute_in_the_precision_of_the_run(make_pool: MakePool) -> None:
    pool, _ = make_pool(1)
    model, asked = build("qwen2"), request([3, 1, 2], max_tokens=8)
    pool.meet_learner(LearnerPlace(precision="bf16-mixed"))
    pool.load("p", model, 1)
    half = InProcessEngine(dtype=torch.bfloat16)
    half.load("p", model, 1)
    assert pool.precision("p") == "bfloat16"
    assert run(pool, asked)[0].logprobs == run(half, asked)[0].logprobs
    half.close()


def test_with_adapters_only_they_are_sent_again(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = make_pool(2)
    model = build("llama").requires_grad_(False)
    add_adapter(model, LoRA(rank=2), "p")
    sent = sent_tensors(monkeypatch)
    for version in (1, 2):
        pool.load("p", model, version)
        requests = [request([1, 2, 3], 5, max_tokens=4), request([4], 6, max_tokens=4)]
        assert_same(run(pool, *requests), expected(model, requests, version))
        changed(model, version)
    assert len(sent[0]) > len(sent[1]) > 0
    assert all(".lora_" in name for name in sent[1])


def test_nothing_is_asked_of_workers_that_have_it_all(make_pool: MakePool) -> None:
    pool, cluster = make_pool(2)
    model = build("llama")
    pool.load("p", model, 1)
    before = [len(actor.calls) for actor in cluster.actors]
    pool.load("p", model, 1)
    assert [len(actor.calls) for actor in cluster.actors] == before
    pool.load("p", model, 2)
    assert [actor.calls[-1] for actor in cluster.actors] == ["switch", "switch"]
    assert [len(actor.calls) for actor in cluster.actors] == [count + 1 for count in before]
    assert run(pool, request([1]))[0].version == 2


def test_two_policies_and_another_model_under_the_same_name(make_pool: MakePool) -> None:
    pool, _ = make_pool(2)
    models = {"p": build("gpt2"), "q": build("llama")}
    for name, model in models.items():
        pool.load(name, model, 1)
    one, other = request([1, 2], 1, max_tokens=5), request([3], 2, max_tokens=5, policy="q")
    first, second = run(pool, one, other)
    assert_same([first], expected(models["p"], [one], 1))
    alone = InProcessEngine()
    alone.load("q", models["q"], 1)
    assert_same([second], run(alone, other))
    alone.close()
    pool.load("p", models["q"], 2)
    assert_same(run(pool, one), expected(models["q"], [one], 2))


class SlowEngine(InProcessEngine):
    """Waits before it generates."""

    started, go_on = threading.Event(), threading.Event()

    async def sample(self, requests: Sequence[Any]) -> list[Sample]:
        self.started.set()
        await asyncio.to_thread(self.go_on.wait, 100)
        return await super().sample(requests)


def test_weights_change_between_two_calls_and_never_within_one(make_pool: MakePool) -> None:
    SlowEngine.started.clear()
    SlowEngine.go_on.clear()
    pool, cluster = make_pool(1, engine=SlowEngine)
    model, ask = build("llama"), request([1, 2, 3], 4, max_tokens=5)
    pool.load("p", model, 1)
    old = expected(model, [ask], 1)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(run(pool, ask)))
    asking.start()
    assert SlowEngine.started.wait(60)
    changed(model, 1)
    loading = threading.Thread(target=pool.load, args=("p", model, 2))
    loading.start()
    while "switch" not in cluster.actors[0].calls[3:]:
        threading.Event().wait(0.01)
    assert not answers, "staged while the call is in hand, and the switch waits for it"
    SlowEngine.go_on.set()
    loading.join(100)
    asking.join(100)
    assert_same(answers[0], old)
    assert_same(run(pool, ask), expected(model, [ask], 2))


class SlowLoadEngine(InProcessEngine):
    """Takes new weights only when it may."""

    loading, may, sampling = threading.Event(), threading.Event(), threading.Event()

    def load(self, policy: str, weights: Any, version: int) -> None:
        self.loading.set()
        assert self.may.wait(100)
        super().load(policy, weights, version)

    async def sample(self, requests: Sequence[Any]) -> list[Sample]:
        self.sampling.set()
        return await super().sample(requests)


def test_calls_that_come_while_a_worker_switches_are_held_back(make_pool: MakePool) -> None:
    engine = SlowLoadEngine
    engine.may.set()
    pool, _ = make_pool(1, engine=engine, deadlines=PoolDeadlines(60, 60, 60, 1))
    model, ask = build("llama"), request([1, 2, 3], 4, max_tokens=5)
    pool.load("p", model, 1)
    changed(model, 1)
    engine.may.clear()
    engine.loading.clear()
    engine.sampling.clear()
    loading = threading.Thread(target=pool.load, args=("p", model, 2))
    loading.start()
    assert engine.loading.wait(60)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(run(pool, ask)))
    asking.start()
    assert not engine.sampling.wait(0.5), "the weights are between two versions"
    engine.may.set()
    loading.join(100)
    asking.join(100)
    assert_same(answers[0], expected(model, [ask], 2))


# Lost workers.


def test_a_worker_that_dies_is_replaced_and_its_requests_are_sent_again(make_pool: MakePool) -> None:
    pool, cluster = make_pool(2)
    model = build("llama")
    pool.load("p", model, 1)
    requests = [request([n], n, max_tokens=6) for n in range(1, 5)]
    wanted = expected(model, requests, 1)

    def die(method: str) -> None:
        if method == "sample":
            cluster.actors[1].kill()

    cluster.actors[1].before = die
    changed(model, 5)  # the learner continues; the loaded weights count
    assert_same(run(pool, *requests), wanted)
    assert len(cluster.actors) == 3
    assert pool.replaced == 1
    assert cluster.of(1) is not cluster.actors[1]


@pytest.mark.parametrize("method", ["build", "stage", "switch"])
@pytest.mark.long_after(1)
def test_a_worker_that_dies_while_it_is_updated_never_serves_old_weights(method: str, make_pool: MakePool) -> None:
    pool, cluster = make_pool(3, deadlines=PoolDeadlines(60, 60, 5, 1))  # the others wait for it as long
    model = build("llama")
    if method != "build":
        pool.load("p", model, 1)
        changed(model, 1)

    def prepare(actor: FakeActor) -> None:
        def die(called: str) -> None:
            if called == method and len(cluster.actors) < 4:
                actor.kill()

        if actor.place == 1:
            actor.before = die

    if method == "build":
        cluster.prepare = prepare
    else:
        prepare(cluster.actors[1])
    pool.load("p", model, 2)
    requests = [request([n], n, max_tokens=6) for n in range(1, 7)]
    assert_same(run(pool, *requests), expected(model, requests, 2))
    assert pool.replaced == 1


def test_weights_that_arrive_spoilt_are_sent_again_and_then_the_worker_is_replaced(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool, cluster = make_pool(2)
    model = build("llama")
    pool.load("p", model, 1)
    changed(model, 1)
    spoilt = cluster.actors[1].worker
    receive = spoilt._receiver.receive

    def flip(invitation: Any, rank: int, manifest: Any) -> Any:
        staged = receive(invitation, rank, manifest)
        raise EngineError(f"weight {next(iter(staged))!r} arrived with checksum 0")

    spoilt._receiver.receive = flip
    pool.load("p", model, 2)
    requests = [request([n], n, max_tokens=6) for n in range(1, 5)]
    assert_same(run(pool, *requests), expected(model, requests, 2))
    assert pool.replaced == 1
    assert "did not reach worker 1" in caplog.text
    assert "'model.embed_tokens.weight'" in caplog.text


def test_too_many_lost_workers_end_the_run_with_a_remedy(make_pool: MakePool) -> None:
    pool, cluster = make_pool(1, replacements=2)
    pool.load("p", build("llama"), 1)

    def doomed(actor: FakeActor) -> None:
        actor.before = lambda method: actor.kill() if method == "describe" else None

    cluster.prepare = doomed
    cluster.actors[0].kill()
    with pytest.raises(EngineError, match=r"worker 0 .*; 2 workers have been replaced.*--ckpt_path last"):
        run(pool, request([1]))


def test_a_pool_that_cannot_start_begins_anew_when_it_is_asked_again(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[int] = []

    class Recording(WeightSender):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            ports.append(self.invite(1).port)

    monkeypatch.setattr(ray_pool, "WeightSender", Recording)
    pool, cluster = make_pool(2)
    model = build("llama")
    cluster.prepare = lambda actor: actor.kill()
    with pytest.raises(EngineError, match=r"gone while it should start; .*deadlines.start"):
        pool.load("p", model, 1)
    assert cluster.closed
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]))
    cluster.actors.clear()
    cluster.prepare = lambda actor: None
    pool.load("p", model, 2)
    assert run(pool, request([1]))[0].version == 2


def test_a_worker_that_does_not_start_in_time_does_not_stay(make_pool: MakePool) -> None:
    pool, cluster = make_pool(1)
    pool.load("p", build("llama"), 1)
    late = threading.Event()

    def hang(actor: FakeActor) -> None:
        async def describe() -> Any:
            await asyncio.to_thread(late.wait)

        pool.deadlines = PoolDeadlines(start=60, sample=60, transfer=60, silence=1)
        if len(cluster.actors) == 1:  # the first that takes the place of another
            actor.worker.describe = describe
            pool.deadlines = PoolDeadlines(start=0.5, sample=60, transfer=60, silence=1)

    cluster.prepare = hang
    cluster.of(0).kill()
    run(pool, request([1], 3))
    late.set()
    assert [actor.alive for actor in cluster.actors] == [False, False, True]


def test_a_worker_that_does_not_answer_is_replaced(make_pool: MakePool) -> None:
    SlowEngine.go_on.clear()
    made: list[Engine] = []

    def engine() -> Engine:
        pool.deadlines = PoolDeadlines(start=60, sample=60, transfer=60, silence=1)
        made.append(InProcessEngine() if made else SlowEngine())
        return made[-1]

    pool, _ = make_pool(1, engine=engine)
    model = build("llama")
    pool.load("p", model, 1)
    pool.deadlines = PoolDeadlines(start=60, sample=0.5, transfer=60, silence=1)
    assert_same(run(pool, request([1], 3)), expected(model, [request([1], 3)], 1))
    assert pool.replaced == 1
    SlowEngine.go_on.set()


def test_errors_of_the_engine_are_told_as_they_are(make_pool: MakePool) -> None:
    pool, cluster = make_pool(2)
    with pytest.raises(EngineError, match="no weights"):
        run(pool, request([1]))
    pool.load("p", build("llama"), 1)
    with pytest.raises(EngineError, match="'q' is not loaded"):
        run(pool, request([1], policy="q"))
    with pytest.raises(EngineError, match="not a str"):
        pool.load("p", "weights", 2)
    assert pool.replaced == 0
    cluster.gone = True
    cluster.actors[0].before = lambda method: cluster.actors[0].loop.close() if method == "sample" else None
    pool.close()
    pool.close()
    assert cluster.closed
    with pytest.raises(EngineError, match="closed"):
        run(pool, request([1]))


@pytest.mark.parametrize("method", ["release", "sample"])
def test_a_closed_group_answers_with_an_error(make_pool: MakePool, method: str) -> None:
    pool, cluster = make_pool(1)
    pool.load("p", build("llama"), 1)
    group, asked = pool, threading.Event()
    cluster.actors[0].worker.release = cluster.actors[0].worker.sample = lambda *arguments: never(asked)
    waiting = CALLS.submit(group.ask(0, "answer", method))
    assert asked.wait(60)
    pool.close()
    for answer in (waiting, CALLS.submit(group.ask(0, "answer", method))):
        with pytest.raises(EngineError, match="the pool is closed; make a new one"):
            answer.result(60)


async def never(asked: threading.Event) -> None:
    asked.set()
    await asyncio.Event().wait()


def test_released_sessions_are_released_where_they_are(make_pool: MakePool) -> None:
    pool, cluster = make_pool(2)
    pool.load("p", build("llama"), 1)
    run(pool, request([1, 2], session="a/1"), request([3, 4], session="b/1"))
    pool.release("b/")
    assert ["release" in actor.calls for actor in cluster.actors] == [False, True]
    pool.close()
    pool.release("a/")  # by an episode that ends late


def test_what_is_reserved(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = PoolResources(cpus=2, gpus=0.5, learner_cpus=1, learner_gpus=1, strategy="SPREAD")
    pool, cluster = make_pool(2, resources=resources)
    cluster.started_here = False
    monkeypatch.setattr(ray_pool, "visible_gpus", lambda: ("3",))
    pool.meet_learner(LearnerPlace((0,)))
    pool.load("p", build("llama"), 1)
    worker = {"CPU": 2, "GPU": 0.5}
    bundles, strategy, seconds = cluster.reserved
    assert bundles == [worker, worker, {"CPU": 1, "GPU": 1, "node:127.0.0.1": 0.001}]
    assert (strategy, seconds) == ("SPREAD", 60)


def test_numbers_out_of_range() -> None:
    for make, match in (
        (lambda: RayPool(0), "workers is 0"),
        (lambda: RayPool(replacements=-1), "replacements is -1"),
        (lambda: PoolResources(gpus=-1), "PoolResources: gpus is -1"),
        (lambda: PoolResources(gpus=1.5), "resources.gpus is 1.5; above 1 it must be whole"),
        (lambda: PoolDeadlines(sample=0), "PoolDeadlines: sample is 0"),
        (lambda: WeightTransfer(bucket_bytes=1), "WeightTransfer: bucket_bytes is 1"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            make()


# GPUs.


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A machine of four."""
    ids = ("0", "1", "2", "3")
    monkeypatch.setattr(ray_pool, "visible_gpus", lambda: ids)
    return ids


def given(cluster: FakeCluster) -> list[list[str]]:
    return [actor.gpus for actor in cluster.actors]


class NotedCluster(FakeCluster):
    """Remembers the visible GPUs of its workers, as under Ray."""

    def actor(self, cls: type, bundle: int, arguments: Any, resources: Any) -> FakeActor:
        actor = super().actor(cls, bundle, arguments, resources)
        actor.gpus = str(arguments[0]).split(",") if arguments and arguments[0] else []  # type: ignore[attr-defined]
        return actor


@pytest.mark.parametrize(
    ("place", "resources", "expected"),
    [
        (LearnerPlace((0,)), PoolResources(gpus=1), [["1"], ["2"]]),
        (LearnerPlace((1,)), PoolResources(gpus=0.5), [["0"], ["0"]]),
        (LearnerPlace((0, 1), 1, 2), PoolResources(gpus=0.5), [["3"], ["3"]]),
        (LearnerPlace((0, 1, 2, 3), 2, 4), PoolResources(gpus=0.25, share_learner_gpus=True), [["2"], ["2"]]),
        (LearnerPlace((0,)), PoolResources(), [[], []]),
    ],
)
def test_workers_of_an_own_ray_keep_off_the_learners_gpus(
    place: LearnerPlace,
    resources: PoolResources,
    expected: list[list[str]],
    make_pool: MakePool,
    gpus: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, _ = make_pool(2, resources=resources)
    cluster = NotedCluster()
    monkeypatch.setattr(ray_pool, "RayCluster", lambda *arguments: cluster)
    pool.meet_learner(place)
    pool.load("p", build("llama"), 1)
    assert given(cluster) == expected
    assert all("GPU" not in bundle or not bundle["GPU"] for bundle in cluster.reserved[0])


def test_without_a_gpu_left_the_remedy_is_told_at_once(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cluster = make_pool(1, resources=PoolResources(gpus=0.5))
    monkeypatch.setattr(ray_pool, "visible_gpus", lambda: ("0",))
    pool.meet_learner(LearnerPlace((0,)))
    with pytest.raises(ConfigurationError, match="share_learner_gpus: true"):
        pool.load("p", build("llama"), 1)
    assert cluster.closed
    assert not cluster.actors


def test_a_cluster_that_gives_a_worker_the_learners_gpu_is_refused(
    make_pool: MakePool, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = ray_pool.socket.gethostname()
    for device, share, machine, refused in (
        (1, False, host, True),
        (1, True, host, False),
        (0, False, host, False),
        (1, False, "another", False),
    ):
        pool, cluster = make_pool(1, resources=PoolResources(gpus=0.5, share_learner_gpus=share))
        cluster.started_here = False
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # Ray sets it for a worker's process
        monkeypatch.setattr(ray_pool, "socket", SimpleNamespace(gethostname=lambda machine=machine: machine))
        pool.meet_learner(LearnerPlace((device,)))
        if not refused:
            pool.load("p", build("llama"), 1)
        else:
            with pytest.raises(ConfigurationError, match=r"worker 0 of the pool on here was given GPU 1"):
                pool.load("p", build("llama"), 1)


def test_ranks_of_one_machine_divide_its_gpus(make_pool: MakePool, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = make_pool(2, resources=PoolResources(gpus=1))
    pool.meet_learner(LearnerPlace((0, 2), 0, 2))
    with pytest.raises(ConfigurationError, match="2 workers want 1 GPUs"):
        pool.load("p", build("llama"), 1)
    pool, _ = make_pool(1, resources=PoolResources(gpus=1))
    cluster = NotedCluster()
    monkeypatch.setattr(ray_pool, "RayCluster", lambda *arguments: cluster)
    pool.meet_learner(LearnerPlace((0, 2), 1, 2))
    pool.load("p", build("llama"), 1)
    assert given(cluster) == [["3"]]


class Silent(InProcessEngine):
    """An engine of text."""

    def reports_logprobs(self, policy: str) -> bool:
        return False


def test_workers_without_log_probabilities_are_refused_before_anything_is_sampled(make_pool: MakePool) -> None:
    pool, cluster = make_pool(1, engine=Silent)
    data = RolloutDataModule(MathEnvironment(), engine=pool, groups=1, group_size=2, iterations=1, save_episodes=False)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=1, limit_val_batches=0, enable_model_summary=False, **options)
    learns = GRPO({"main": Policy("builtin:tiny")})
    with pytest.raises(ConfigurationError, match=r"'main' is trained, .*no token ids and log-probabilities"):
        trainer.fit(learns, datamodule=data)
    assert "switch" in cluster.actors[0].calls
    assert "sample" not in cluster.actors[0].calls
    assert not pool.reports_logprobs("main")


def test_servers_are_no_engine_of_a_worker(make_pool: MakePool) -> None:
    """Several workers would write their weights to one folder, and hand them to the same servers."""
    engine = partial(OpenAICompatible, url=["http://a:1", "http://b:1"])
    pool, cluster = make_pool(2, engine=engine)
    with pytest.raises(ConfigurationError, match=r"samples from http://a:1, http://b:1, .*leave the pool out"):
        pool.load("p", build("llama"), 1)
    assert cluster.closed
