"""A pool whose workers sample from OpenAI-compatible servers; without Ray, and with servers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from mrlm_environments import MathEnvironment

from mrlm_pl.algorithms import GRPO
from mrlm_pl.concurrency.backoff import until
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import InProcessEngine, OpenAICompatible, PoolDeadlines, RayPool, Sample, WeightTransfer
from mrlm_pl.engines.http.replicas import Terms
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.lora import add_adapter
from tests.engines.conftest import build, request, run
from tests.support.models.pool_parts import FakeCluster, sent_tensors, stand_in
from tests.support.servers.fake_servers import FakeServer, FakeSglang, FakeVllm

QUICK = Terms(timeout_seconds=60, patience_seconds=60, retries=4)
CONTEXTS = [(5, 9, 2), (7,), (11, 3, 3, 20, 41), (4, 4)]
MakePool = Callable[..., tuple[RayPool, FakeCluster]]


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Starts servers in the mode in which weights are updated; all are stopped afterwards."""
    started: list[FakeServer] = []

    def start(kind: type[FakeServer] = FakeVllm, **options: Any) -> Any:
        server = kind(options.pop("model", None) or build("llama"), **options)
        server.development = server.scaled = True
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MakePool]:
    """Makes pools whose workers are threads of this process, with an engine for these servers; closes them."""
    pools: list[RayPool] = []

    def make(*servers: FakeServer, workers: int = 2, options: dict[str, Any] | None = None, **pool: Any) -> Any:
        cluster = stand_in(monkeypatch)
        urls = [server.url for server in servers]
        settings: dict[str, Any] = {"url": urls[0] if len(urls) == 1 else urls, "terms": QUICK}
        settings |= {"weights_folder": str(tmp_path), "dialect": "sglang" if is_sglang(servers) else "vllm"}
        engine = partial(OpenAICompatible, **(settings | (options or {})))
        deadlines = PoolDeadlines(start=60, sample=60, transfer=60, silence=1)
        made = RayPool(workers, engine=engine, transfer=WeightTransfer(4096), deadlines=deadlines, **pool)
        pools.append(made)
        return made, cluster

    yield make
    for pool in pools:
        pool.close()


def is_sglang(servers: Any) -> bool:
    return any(isinstance(server, FakeSglang) for server in servers)


def changed(model: Any, seed: int) -> None:
    """Move all trained weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def expected(model: Any, requests: Any, version: int) -> list[Sample]:
    """Return samples of an engine of this process."""
    engine = InProcessEngine()
    engine.load("p", model, version)
    try:
        return asyncio.run(engine.sample(requests))
    finally:
        engine.close()


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.token_ids, one.version, one.finish_reason) == (other.token_ids, other.version, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


GREEDY = [request(context, temperature=0.0, max_tokens=8) for context in CONTEXTS]


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
@pytest.mark.long_after(1)
def test_the_servers_get_the_weights_of_every_version(
    kind: type[FakeServer], serve: Callable[..., Any], make_pool: MakePool
) -> None:
    servers = [serve(kind), serve(kind)]
    pool, _ = make_pool(*servers)
    model, before = build("llama"), None
    for version in (0, 1, 4):
        pool.load("p", model, version)
        found = run(pool, *GREEDY)
        assert_same(found, expected(model, GREEDY, version))
        assert {sample.engine for sample in found} == {"ray_pool/0", "ray_pool/1"}
        tokens = [sample.token_ids for sample in found]
        assert tokens != before, "the weights matter"
        before = tokens
        changed(model, version)


@pytest.mark.long
def test_each_worker_has_its_share_of_the_servers_and_a_folder(
    serve: Callable[..., Any], make_pool: MakePool, tmp_path: Path
) -> None:
    servers = [serve(name="one") for _ in range(4)]
    pool, _ = make_pool(*servers)
    model = build("llama")
    for version in range(4):
        pool.load("p", model, version)
        changed(model, version)
    folders = [reload["kwargs"]["weights_path"] for server in servers for reload in server.asked("/collective_rpc")]
    numbers = [(place, version) for place in (0, 1, 0, 1) for version in range(4)]
    assert folders == [str(tmp_path / f"worker-{place}/p/version-{version:08d}") for place, version in numbers]
    for place in (0, 1):
        kept = [path.name for path in (tmp_path / f"worker-{place}/p").iterdir()]
        assert sorted(kept) == ["version-00000002", "version-00000003"]
    for server in servers:
        server.log.clear()
    run(pool, *(request((5, n), n, session=f"{n}/a", max_tokens=2) for n in range(8)))
    assert [len(server.asked("/v1/completions")) for server in servers] == [2, 2, 2, 2]
    first = {tuple(body["prompt"]) for n in (0, 2) for body in servers[n].asked("/v1/completions")}
    for server in servers:
        server.log.clear()
    run(pool, *(request((5, n, 1), n, session=f"{n}/a", max_tokens=2) for n in range(8)))
    again = {tuple(body["prompt"][:2]) for n in (0, 2) for body in servers[n].asked("/v1/completions")}
    assert again == first, "a session stays with its worker"
    assert len(pool.describe()[0]["claims"]) == 2


def test_servers_that_cannot_be_shared_out_are_told_before_anything_is_sampled(
    serve: Callable[..., Any], make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [serve() for _ in range(3)]
    pool, cluster = make_pool(*servers)
    with pytest.raises(ConfigurationError, match=r"3 servers cannot be shared out among 2 workers; give 2 urls"):
        pool.load("p", build("llama"), 0)
    assert cluster.closed
    pool, _ = make_pool(servers[0], options={"url": "http://gpu-7:8000"})
    with pytest.raises(ConfigurationError, match=r"2 workers would hand their weights to one server, http://gpu-7:"):
        pool.load("p", build("llama"), 0)
    pool, _ = make_pool(servers[0], options={"url": "gpu-7:8000"})
    with pytest.raises(ConfigurationError, match=r"url 'gpu-7:8000' is not of the form"):
        pool.load("p", build("llama"), 0)
    pool, _ = make_pool(servers[0])
    with pytest.raises(ConfigurationError, match=rf"worker 0 .*worker 1 .* share the server at port {servers[0].port}"):
        pool.load("p", build("llama"), 0)
    assert not servers[0].log
    pool, _ = make_pool(servers[0], workers=1)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ConfigurationError, match=r"each of 2 processes has a pool, .*port \d+ .*trainer\.devices to 1"):
        pool.load("p", build("llama"), 0)


def test_one_url_is_the_server_of_each_workers_machine(
    serve: Callable[..., Any], make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(["alpha", "beta"])
    monkeypatch.setattr("mrlm_pl.engines.http.replicas.socket", SimpleNamespace(gethostname=lambda: next(hosts)))
    server = serve()  # stands for one on each machine
    pool, cluster = make_pool(server)
    pool.load("p", build("llama"), 3)
    claims = [item["claims"] for item in pool.describe()]
    assert claims == [[f"the server at port {server.port} of {host}"] for host in ("alpha", "beta")]
    assert cluster.actors[0].worker._engine._replicas.targets == server.url


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
@pytest.mark.long_after(1)
def test_a_worker_in_the_place_of_another_gives_the_same_servers_the_weights(
    kind: type[FakeServer], serve: Callable[..., Any], make_pool: MakePool
) -> None:
    servers = [serve(kind), serve(kind)]
    pool, cluster = make_pool(*servers)
    model = build("llama")
    pool.load("p", model, 1)
    wanted = expected(model, GREEDY, 1)
    changed(model, 1)  # the learner continues; the loaded weights count

    def die(method: str) -> None:
        if method == "sample":
            servers[1].model, servers[1].version = build("llama", seed=5), "default"  # it was started again meanwhile
            cluster.actors[1].kill()

    cluster.actors[1].before = die
    assert_same(run(pool, *GREEDY), wanted)
    assert pool.replaced == 1
    pool.load("p", model, 2)
    assert_same(run(pool, *GREEDY), expected(model, GREEDY, 2))


def test_a_server_that_a_lost_worker_left_paused_goes_on(serve: Callable[..., Any], make_pool: MakePool) -> None:
    servers = [serve(), serve()]
    pool, cluster = make_pool(*servers)
    model = build("llama")
    pool.load("p", model, 1)
    changed(model, 1)

    def die(method: str) -> None:
        if method == "switch":
            servers[1].paused = True
            cluster.actors[1].kill()

    cluster.actors[1].before = die
    pool.load("p", model, 2)
    assert_same(run(pool, *GREEDY), expected(model, GREEDY, 2))
    assert pool.replaced == 1


async def six_calls(pool: RayPool, server: FakeVllm, at_once: int) -> None:
    calls = asyncio.gather(*(pool.sample([request((5,), n, max_tokens=1)]) for n in range(6)))
    assert await until(lambda: server.busy == at_once, 60)
    server.wake()
    await calls


def test_a_server_is_given_many_calls_at_once_unless_calls_says_less(
    serve: Callable[..., Any], make_pool: MakePool
) -> None:
    server = serve()
    for options, peak in (({}, 6), ({"calls": 2}, 2)):
        pool, _ = make_pool(server, workers=1, **options)
        pool.load("p", build("llama"), 1)
        server.peak = 0
        server.awake.clear()
        asyncio.run(six_calls(pool, server, peak))
        assert server.peak == peak
        pool.close()


def test_adapters_travel_alone_and_servers_get_merged_weights(
    serve: Callable[..., Any], make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = sent_tensors(monkeypatch)
    pool, _ = make_pool(serve(), workers=1)
    model = build("llama").requires_grad_(False)
    add_adapter(model, LoRA(rank=2), "p")
    for version in (1, 2):
        changed(model, version)
        pool.load("p", model, version)
        assert_same(run(pool, *GREEDY), expected(model, GREEDY, version))
    assert all(".lora_" in name for name in sent[1])


def test_a_policy_that_is_not_trained_is_what_the_server_has(
    serve: Callable[..., Any], make_pool: MakePool, tmp_path: Path
) -> None:
    server, model = serve(), build("llama").requires_grad_(False)
    server.model = model
    pool, _ = make_pool(server, workers=1)
    for version in (1, 2):
        pool.load("p", model, version)
        assert_same(run(pool, *GREEDY), expected(model, GREEDY, version))
    assert not server.asked("/collective_rpc")
    assert not list(tmp_path.iterdir())
    other, _ = make_pool(server, workers=1)
    with pytest.raises(ConfigurationError, match="has other weights than the policy's model"):
        other.load("p", build("llama", seed=9).requires_grad_(False), 0)


def test_what_the_workers_engine_says_is_known_after_the_first_weights(
    serve: Callable[..., Any], make_pool: MakePool
) -> None:
    servers = [serve(), serve()]
    pool, cluster = make_pool(*servers)
    pool.load("p", build("llama"), 1)
    before = [len(server.asked("/v1/completions")) for server in servers]
    run(pool, *GREEDY)
    assert not pool.takes_pieces, "a server batches by itself"
    assert pool.window("p") == 64
    assert pool.reports_logprobs("p")
    asked = [len(server.asked("/v1/completions")) for server in servers]
    assert [now - earlier for now, earlier in zip(asked, before, strict=True)] == [2, 2]
    engines = [actor.worker._engine for actor in cluster.actors]
    pool.close()
    for engine in engines:
        with pytest.raises(EngineError, match="closed"):
            run(engine, *GREEDY)


class Silent(InProcessEngine):
    """An engine of text."""

    def reports_logprobs(self, policy: str) -> bool:
        return False


def test_workers_without_log_probabilities_are_refused_before_anything_is_sampled(
    make_pool: MakePool, serve: Callable[..., Any]
) -> None:
    pool, cluster = make_pool(serve(), workers=1)
    pool._make_engine = Silent
    data = RolloutDataModule(MathEnvironment(), engine=pool, groups=1, group_size=2, iterations=1, save_episodes=False)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=1, limit_val_batches=0, enable_model_summary=False, **options)
    learns = GRPO({"main": Policy("builtin:tiny")})
    with pytest.raises(ConfigurationError, match=r"'main' is trained, .*no token ids and log-probabilities"):
        trainer.fit(learns, datamodule=data)
    assert "switch" in cluster.actors[0].calls
    assert "sample" not in cluster.actors[0].calls
    assert not pool.reports_logprobs("main")
