"""An engine over HTTP against servers that follow the documented wire formats of vLLM and SGLang."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from mrlm_environments import QuestionEnvironment
from transformers import AutoModelForCausalLM

from mrlm_pl.algorithms import GRPO, MADPO, MAGRPO, PPO
from mrlm_pl.concurrency.backoff import until
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.checks import check_logprobs
from mrlm_pl.engines import InProcessEngine, OpenAICompatible, Sample, SampleRequest, Sampling
from mrlm_pl.engines.http.probes import PROBES
from mrlm_pl.engines.http.replicas import UNUSABLE_REPLIES, Terms
from mrlm_pl.engines.routing import RoutingEngine
from mrlm_pl.errors import ConfigurationError, EngineError, RemoteError
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.pretrained import write_version
from mrlm_pl.serving.policies.placement import with_served
from tests.engines.conftest import build
from tests.engines.conftest import request as any_request
from tests.support.servers.fake_servers import FakeServer, FakeSglang, FakeVllm

QUICK = Terms(timeout_seconds=60, patience_seconds=60, retries=4)
ONCE = Terms(timeout_seconds=60, patience_seconds=60, retries=0)
CONTEXTS = [(5, 9, 2), (7,), (11, 3, 3, 20, 41)]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama").requires_grad_(False)


@pytest.fixture
def serve(model: Any) -> Iterator[Callable[..., Any]]:
    started: list[FakeServer] = []

    def start(kind: type[FakeServer] = FakeVllm, **options: Any) -> Any:
        started.append(kind(options.pop("model", model), **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def engine() -> Iterator[Callable[..., OpenAICompatible]]:
    made: list[OpenAICompatible] = []

    def make(*servers: FakeServer, **options: Any) -> OpenAICompatible:
        options.setdefault("terms", QUICK)
        options.setdefault("dialect", "sglang" if isinstance(servers[0], FakeSglang) else "vllm")
        urls = [server.url for server in servers]
        made.append(OpenAICompatible(urls[0] if len(urls) == 1 else urls, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


def request(token_ids: Sequence[int], seed: int = 0, **changes: Any) -> SampleRequest:
    """Return a short turn."""
    return any_request(token_ids, seed, **({"max_tokens": 4} | changes))


def different_lengths(replies: dict[str, str], row: Any) -> float:
    return float(len(replies["first"]) - len(replies["second"]))


def run(engine: OpenAICompatible, *requests: SampleRequest) -> list[Sample]:
    return asyncio.run(asyncio.wait_for(engine.sample(requests), 100))


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
def test_greedy_tokens_and_log_probabilities_are_those_of_the_in_process_engine(
    kind: type[FakeServer], model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    own = InProcessEngine()
    own.load("p", model, 4)
    asked = [request(context, temperature=0.0, max_tokens=12, stop_ids=(13,)) for context in CONTEXTS]
    expected = asyncio.run(own.sample(asked))
    own.close()
    remote = engine(serve(kind))
    remote.load("p", model, 4)
    found = run(remote, *asked)
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in expected]
    assert [sample.finish_reason for sample in found] == [sample.finish_reason for sample in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert (one.version, one.engine) == (4, f"openai/{'vllm' if kind is FakeVllm else 'sglang'}")


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
def test_sampled_tokens_have_the_log_probability_of_their_temperature(
    kind: type[FakeServer], model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve(kind)
    server.scaled = True
    [sample] = run(engine(server), request(CONTEXTS[0], seed=3, temperature=1.7, max_tokens=6))
    row = torch.tensor([[*CONTEXTS[0], *sample.token_ids]])
    with torch.no_grad():
        logits = model(row).logits[0, len(CONTEXTS[0]) - 1 : -1] / 1.7
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_what_vllm_is_asked(serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]) -> None:
    server = serve()
    server.scaled = True
    run(
        engine(server),
        request((4, 5), seed=2**62 + 1, temperature=0.7, top_p=0.9, top_k=5, max_tokens=3, stop_ids=(1,)),
    )
    body = server.asked("/v1/completions")[-1]
    assert body["prompt"] == [4, 5]
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.7, 0.9, 5, 3)
    assert (body["seed"], body["stop_token_ids"], body["ignore_eos"]) == (2**62 + 1, [1], True)
    assert body["return_token_ids"] is True
    assert (body["min_p"], body["repetition_penalty"]) == (0.0, 1.0)
    run(engine(server), request((4, 5)))
    assert server.asked("/v1/completions")[-1]["top_k"] == -1


def test_what_sglang_is_asked(serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]) -> None:
    server = serve(FakeSglang)
    run(engine(server), request((4, 5), seed=2**62 + 9, temperature=0.7, top_p=0.9, max_tokens=3, stop_ids=(1,)))
    body = server.asked("/generate")[-1]
    how = body["sampling_params"]
    assert (body["input_ids"], body["return_logprob"]) == ([4, 5], True)
    assert (how["temperature"], how["top_p"], how["top_k"], how["max_new_tokens"]) == (0.7, 0.9, -1, 3)
    assert (how["sampling_seed"], how["stop_token_ids"]) == (9, [1])


def test_a_turn_ends_at_a_stop_token_and_at_the_window(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve()
    remote = engine(server)
    [free] = run(remote, request((5, 9, 2), temperature=0.0, max_tokens=6))
    stop = free.token_ids[2]
    end = free.token_ids.index(stop)
    [cut] = run(remote, request((5, 9, 2), temperature=0.0, max_tokens=6, stop_ids=(stop,)))
    assert (cut.token_ids, cut.finish_reason) == (free.token_ids[: end + 1], "stop")
    [long] = run(remote, request((5,) * 60, temperature=0.0, max_tokens=20))
    assert (len(long.token_ids), long.finish_reason) == (4, "length")
    assert remote.window("p") == 64
    with pytest.raises(EngineError, match="64 tokens leaves no room in the 64-token window"):
        run(remote, request((5,) * 64))
    served = engine(serve(FakeSglang), dialect="sglang")
    [last] = run(served, request((5,) * 57, temperature=0.0, max_tokens=20))
    assert (len(last.token_ids), served.window("p")) == (1, 58), "SGLang keeps 6 tokens of its window free"
    with pytest.raises(EngineError, match="empty context"):
        run(remote, request(()))


def test_a_server_that_stops_elsewhere_is_refused(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve(FakeSglang)
    remote = engine(server)
    [free] = run(remote, request((5, 9, 2), temperature=0.0, max_tokens=6))
    server.eos = free.token_ids[0]
    with pytest.raises(EngineError, match=f"ended a turn at token {server.eos}, which is not among"):
        run(remote, request((5, 9, 2), temperature=0.0, max_tokens=6))


def test_a_server_without_token_ids_is_refused_before_the_first_sample(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], model: Any
) -> None:
    server = serve()
    server.old = True
    with pytest.raises(ConfigurationError, match=r"no token ids.*no engine re-tokenizes"):
        engine(server).load("p", model, 0)
    asked = {tuple(body["prompt"]) for body in server.asked("/v1/completions")}
    assert asked, "some of the probes, which are asked at once and end at the first fault"
    assert asked <= set(PROBES)


def test_a_server_of_another_kind_is_told(serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]) -> None:
    server = serve(FakeSglang)
    with pytest.raises(ConfigurationError, match=r"does not answer as vllm does.*status 404.*dialect"):
        run(engine(server, dialect="vllm"), request((5,)))


def test_other_weights_than_the_policys_are_refused(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], model: Any
) -> None:
    bad = serve(model=build("llama", seed=9))
    with pytest.raises(ConfigurationError, match=f"{bad.url} has other weights than the policy's model"):
        engine(bad).load("p", model, 0)


def test_servers_with_different_weights_are_both_named(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], model: Any
) -> None:
    servers = serve(), serve(model=build("llama", seed=9))
    one, other = (server.url for server in servers)  # the first to answer is taken for right
    with pytest.raises(ConfigurationError, match=rf"({one}.*than {other}|{other}.*than {one}); start all servers"):
        engine(*servers).load("p", model, 0)


def test_a_temperature_that_the_log_probabilities_do_not_have_is_refused(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], caplog: pytest.LogCaptureFixture
) -> None:
    remote = engine(serve())
    with pytest.raises(ConfigurationError, match=r"temperature is 0\.7.*processed_logprobs"):
        run(remote, request((5,), temperature=0.7))
    run(remote, request((5,), temperature=1.0), request((5,), temperature=0.0))
    assert "before top-p and top-k" not in caplog.text
    run(remote, request((5,), top_k=3))
    assert "before top-p and top-k" in caplog.text


@pytest.mark.parametrize("late", [0, 1])
def test_what_one_of_the_servers_cannot_do_is_asked_of_none(
    late: int, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], caplog: pytest.LogCaptureFixture
) -> None:
    servers = plain, scaled = serve(window=32), serve(window=48)
    scaled.scaled = True
    servers[late].delay = 0.1  # its check ends last
    remote = engine(*servers)
    run(remote, request((5,), top_k=3))
    assert "before top-p and top-k" in caplog.text
    assert remote.window("p") == 32
    with pytest.raises(ConfigurationError, match=rf"is 0\.7, and {plain.url}, {scaled.url} gives the log-prob"):
        run(remote, request((5,), temperature=0.7))


def test_a_sample_of_a_server_that_begins_late_is_refused_if_its_log_probabilities_are_others(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrlm_pl.engines.http.replicas.FIRST_REST", 30.0)  # it does not begin during the first sample
    scaled, late = serve(), serve()
    scaled.scaled, late.faults = True, [(503, {})]
    remote = engine(scaled, late)
    assert len(run(remote, request((5,), temperature=0.7))) == 1
    remote._replicas.all[1].rests_until = 0.0  # it gets the next request
    with pytest.raises(ConfigurationError, match=r"is 0\.7, and .* gives the log-prob"):
        run(remote, request((5,), temperature=0.7))


def test_processed_log_probabilities_hold_after_top_k(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    server.scaled = True
    [sample] = run(engine(server), request((5,), temperature=0.7, top_k=1, max_tokens=3))
    assert sample.logprobs == pytest.approx((0.0, 0.0, 0.0), abs=1e-6)
    assert "before top-p and top-k" not in caplog.text


CUT, NO_SAMPLE = (200, b'{"choices": ['), (200, {"error": {"message": "the engine is dead"}})


@pytest.mark.parametrize("fault", [(429, {"error": {"message": "busy"}}), (503, {}), (500, {}), None, CUT, NO_SAMPLE])
def test_what_may_pass_is_tried_again_and_counted(
    fault: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve()
    remote = engine(server)
    run(remote, request((5,)))
    server.faults, before = [fault], len(server.asked("/v1/completions"))
    [sample] = run(remote, request((5,), seed=1, max_tokens=2))
    assert len(sample.token_ids) == 2
    asked = server.asked("/v1/completions")[before:]
    assert [body for body in asked if body["seed"] == 1 and body["max_tokens"] == 2] == 2 * [asked[-1]]


def test_tries_are_bounded_and_the_error_names_all(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrlm_pl.engines.http.replicas.FIRST_REST", 0.01)
    server = serve()
    remote = engine(server, terms=Terms(timeout_seconds=60, patience_seconds=60, retries=2))
    run(remote, request((5,)))
    server.faults = [(500, {"error": {"message": "no room"}})] * 20
    with pytest.raises(RemoteError, match=rf"policy 'p'.*{server.url}.*in 3 tries.*status 500: no room"):
        run(remote, request((5,)))
    assert len(server.faults) == 17


def test_a_refusal_is_not_tried_again(serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]) -> None:
    server = serve()
    remote = engine(server)
    run(remote, request((5,)))
    server.faults, before = [(400, {"error": {"message": "bad top_p"}})], len(server.asked("/v1/completions"))
    with pytest.raises(EngineError, match=rf"policy 'p': POST {server.url}/v1/completions: status 400: bad top_p"):
        run(remote, request((5,)))
    assert len(server.asked("/v1/completions")) == before + 1


def test_a_server_that_hangs_is_given_up_in_time(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve()
    remote = engine(server)
    run(remote, request((5,)))
    remote._replicas.terms = Terms(timeout_seconds=0.5, patience_seconds=2.0, retries=50)
    server.delay = 300.0
    with pytest.raises(RemoteError, match=r"gave a sample in \d tries .*no answer within 0\.\d+ s"):
        run(remote, request((5,)))


def test_nobody_there(engine: Callable[..., OpenAICompatible], serve: Callable[..., Any], model: Any) -> None:
    server = serve()
    server.stop()
    remote = engine(server, terms=Terms(timeout_seconds=1, patience_seconds=0.5, retries=9))
    for ask in (lambda: remote.check("p"), lambda: remote.load("p", model, 0)):
        with pytest.raises(RemoteError, match=f"policy 'p': no server is ready.*{server.url}.*check the URL$"):
            ask()


def test_a_server_that_is_gone_is_waited_for_whatever_the_retries(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("mrlm_pl.engines.http.replicas.FIRST_REST", 0.01)
    monkeypatch.setattr("mrlm_pl.engines.http.replicas.LONGEST_REST", 0.01)
    servers = [serve()]
    remote = engine(servers[0], terms=Terms(timeout_seconds=60, patience_seconds=60, retries=1))
    once = remote._replicas.once

    async def counted(*arguments: Any, **options: Any) -> Any:
        tries.append(arguments[1])
        if len(tries) == 6:
            servers.append(serve(port=servers[0].port))
        return await once(*arguments, **options)

    monkeypatch.setattr(remote._replicas, "once", counted)
    for ask in (lambda: remote.check("p"), lambda: run(remote, request((5,), max_tokens=2))):
        tries: list[str] = []
        servers[-1].stop()
        caplog.clear()
        ask()
        assert len(tries) > 6, "the sixth reaches the server"
        assert "start the server if it is not running" in caplog.messages[0]
        assert "answers again" in caplog.messages[1]
        assert len(caplog.messages) == 2


def test_a_server_that_a_proxy_misses_is_waited_for_whatever_the_retries(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve()
    remote = engine(server, terms=Terms(timeout_seconds=60, patience_seconds=60, retries=1))
    for ask in (lambda: remote.check("p"), lambda: run(remote, request((5,)))):
        server.faults = [(502, {}), (503, {}), (504, {})]
        ask()
        assert not server.faults


def test_a_server_without_tls_is_refused_and_not_waited_for() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        remote = OpenAICompatible(f"https://127.0.0.1:{server.server_port}", terms=Terms(patience_seconds=5))
        with pytest.raises(ConfigurationError, match=r"WRONG_VERSION_NUMBER.*; check http or https, and the certif"):
            remote.check("p")
        remote.close()


def test_a_server_that_names_its_pause_gets_it(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve()
    remote = engine(server)
    run(remote, request((5,)))
    server.header, server.faults = b"Retry-After: 120", [(429, {"error": {"message": "busy"}})]
    with pytest.raises(RemoteError, match=r"in 1 tries.*raise the bound.*429 \(Retry-After: 120\): busy"):
        run(remote, request((5,)))
    server.header, server.faults = b"Retry-After: Wed, 21 Oct 2065 07:28:00 GMT", [(429, {})]
    remote._replicas.all[0].rests_until = 0.0
    assert len(run(remote, request((5,)))) == 1


def test_the_probes_of_a_check_are_asked_at_once(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    """A server is checked before its first sample, and again after each failure."""
    server = serve()
    server.awake.clear()
    with ThreadPoolExecutor() as threads:
        checked = threads.submit(engine(server).check, "p")
        asyncio.run(until(lambda: server.busy > len(PROBES), 3))
        busy = server.busy
        server.wake()
        checked.result()
    assert busy == len(PROBES) + 1, "the greedy samples, and the one that top-k leaves a token"


def test_a_server_that_comes_back_with_other_weights_is_refused(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrlm_pl.engines.http.replicas.IDLE_SECONDS", 0.0)
    server = serve()
    remote = engine(server)
    remote.load("p", model, 0)
    server.stop()
    server = serve(port=server.port)
    run(remote, request((5,)))
    server.stop()
    serve(port=server.port, model=build("llama", seed=1))
    with pytest.raises(
        ConfigurationError, match=rf"{server.url} has other weights \(no greedy sample is the same\) than before"
    ):
        run(remote, request((5,)))


def test_a_server_that_was_idle_is_recognized_by_two_samples(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    remote = engine(server)
    before = run(remote, request((5,)))
    monkeypatch.setattr("mrlm_pl.engines.http.replicas.IDLE_SECONDS", 0.0)
    server.log.clear()
    assert run(remote, request((5,))) == before
    paths = [path for _, path, _, _ in server.log]
    assert paths == ["/v1/models", *3 * ["/v1/completions"]], "the last is the request itself"


@pytest.mark.parametrize("change", [{"scaled": True}, {"window": 32}])
def test_a_server_that_has_changed_while_it_was_idle_is_checked_again(
    change: dict[str, Any],
    serve: Callable[..., Any],
    engine: Callable[..., OpenAICompatible],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve()
    remote = engine(server)
    with pytest.raises(ConfigurationError, match="log-probabilities of temperature 1"):
        run(remote, request((5,), temperature=0.7))
    assert remote.window("p") == 64
    monkeypatch.setattr("mrlm_pl.engines.http.replicas.IDLE_SECONDS", 0.0)
    vars(server).update(change)
    run(remote, request((5,)))
    assert remote.window("p") == server.window
    if server.scaled:
        assert len(run(remote, request((5,), temperature=0.7))) == 1


def test_the_least_busy_is_asked_and_no_more_at_once_than_allowed(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    servers = [serve(), serve()]
    remote = engine(*servers, terms=Terms(60, 60, 4, concurrency=6))
    run(remote, request((5,)))
    for server in servers:
        server.peak = 0
        server.awake.clear()
        server.log.clear()

    async def play() -> None:
        asked = asyncio.ensure_future(remote.sample([request((5,), seed=n, max_tokens=1) for n in range(12)]))
        assert await until(lambda: [server.busy for server in servers] == [3, 3], 60)
        for server in servers:
            server.wake()
        await asked

    asyncio.run(asyncio.wait_for(play(), 100))
    assert [server.peak for server in servers] == [3, 3]
    assert sum(len(server.asked("/v1/completions")) for server in servers) >= 12


def test_a_dead_server_is_left_out_and_tried_again_later(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    one, other = serve(), serve()
    remote = engine(one, other)
    run(remote, *(request((5,), seed=number) for number in range(4)))
    other.stop()
    found = run(remote, *(request((5,), seed=number, max_tokens=2) for number in range(12)))
    assert len(found) == 12
    back = serve(port=other.port)
    deadline = time.monotonic() + 100
    while not back.asked("/v1/completions") and time.monotonic() < deadline:
        run(remote, *(request((5,), seed=number, max_tokens=2) for number in range(4)))
        time.sleep(0.1)
    assert back.asked("/v1/models"), "it is checked before it is used"
    assert len(back.asked("/v1/completions")) > 4


def changed(model: Any, by: float) -> Any:
    """Return a copy that is trained, with a bias towards token 30."""
    copy = build("llama")
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        copy.get_output_embeddings().weight[30] += by
    return copy.requires_grad_(True)


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
def test_trained_weights_reach_the_server_and_samples_carry_their_version(
    kind: type[FakeServer],
    model: Any,
    serve: Callable[..., Any],
    engine: Callable[..., OpenAICompatible],
    tmp_path: Path,
) -> None:
    server = serve(kind)
    server.development = True
    remote = engine(server, weights_folder=str(tmp_path))
    own = InProcessEngine()
    for version in (0, 3, 5):
        current = changed(model, 0.3 * version)
        remote.load("p", current, version)
        own.load("p", current, version)
        asked = request((5, 9, 2), temperature=0.0, max_tokens=8)
        [found], [expected] = run(remote, asked), asyncio.run(own.sample([asked]))
        assert (found.token_ids, found.version) == (expected.token_ids, version)
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    own.close()
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["version-00000003", "version-00000005"]
    if kind is FakeVllm:
        order = [path for _, path, _, _ in server.log if path.startswith(("/pause", "/coll", "/resume"))]
        assert order == ["/resume", *["/pause?mode=wait", "/collective_rpc", "/resume"] * 3], (
            "awake before it is checked"
        )
    else:
        assert server.version == "p-5"


def test_the_same_weights_are_written_once(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], tmp_path: Path
) -> None:
    server = serve(FakeVllm)
    server.development = True
    remote = engine(server, weights_folder=str(tmp_path))
    reloads = []
    for weights, version in (
        (changed(model, 0.3), 1),
        (changed(model, 0.3), 1),
        (changed(model, 0.6), 1),
        (changed(model, 0.6), 2),
    ):
        remote.load("p", weights, version)
        reloads.append(sum(path == "/collective_rpc" for _, path, _, _ in server.log))
    assert reloads == [1, 1, 2, 3]


def test_weights_that_were_refused_are_compared_again(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    server = serve(FakeVllm)
    server.development = True
    remote = engine(server, weights_folder=str(tmp_path))

    def refuse(*arguments: Any) -> None:
        raise ConfigurationError("other weights")

    with monkeypatch.context() as patch:
        patch.setattr("mrlm_pl.engines.http.engine.check_weights", refuse)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="other weights"):
                remote.load("p", changed(model, 0.3), 1)
    remote.load("p", changed(model, 0.3), 1)


@pytest.mark.parametrize(("kept", "warnings"), [([], 0), ([1, 3], 0), ([1, 2, 3, 4, 5], 1)])
def test_a_server_that_keeps_old_weights_in_three_updates_is_noticed_once(
    kept: list[int], warnings: int,
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    server = serve(FakeVllm)
    server.development = True
    reload, remote = server.reload, engine(server, weights_folder=str(tmp_path))
    for version in range(6):
        server.reload = (lambda folder: None) if version in kept else reload
        remote.load("p", changed(model, 1.0 * (version > 0)), version)
    assert caplog.text.count(f"the log-probabilities of {server.url} are") == warnings


def test_new_weights_wait_for_the_requests_under_way(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], tmp_path: Path
) -> None:
    server = serve(FakeSglang)
    remote = engine(server, weights_folder=str(tmp_path))
    remote.load("p", changed(model, 0.0), 1)
    server.awake.clear()

    async def play() -> tuple[list[Sample], list[Sample]]:
        weights, before = changed(model, 2.0), len(server.asked("/generate"))
        first = asyncio.ensure_future(remote.sample([request((5,), seed=1)] * 3))
        assert await until(lambda: len(server.asked("/generate")) == before + 3, 60)
        loading = asyncio.get_running_loop().run_in_executor(None, remote.load, "p", weights, 2)
        assert await until(lambda: not remote._open.is_set(), 60)
        second = asyncio.ensure_future(remote.sample([request((5,), seed=1)]))
        await asyncio.sleep(0.2)  # were it not held back, its request would be at the server by now
        server.wake()
        await loading
        return await first, await second

    first, second = asyncio.run(asyncio.wait_for(play(), 100))
    assert {sample.version for sample in first} == {1}
    assert {sample.version for sample in second} == {2}
    paths = [path for _, path, _, body in server.log if path != "/generate" or len(body["input_ids"]) == 1]
    assert paths.index("/update_weights_from_disk", paths.index("/update_weights_from_disk") + 1) > 4


def test_a_server_that_was_started_again_gets_the_weights_before_it_is_asked(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], tmp_path: Path
) -> None:
    server = serve(FakeSglang)
    remote = engine(server, weights_folder=str(tmp_path))
    remote.load("p", changed(model, 1.0), 7)
    server.stop()
    back = serve(FakeSglang, port=server.port)
    [sample] = run(remote, request((5,), temperature=0.0))
    assert (back.version, sample.version) == ("p-7", 7)
    back.version, back.model = "default", model  # it was replaced without our noticing
    run(remote, request((5,), temperature=0.0))
    assert back.version == "p-7"


@pytest.fixture
def idle_server(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[FakeVllm, OpenAICompatible]:  # fmt: skip
    """Return a server with weights of version 1, which is idle before each request, and its engine."""
    monkeypatch.setattr("mrlm_pl.engines.http.replicas.IDLE_SECONDS", 0.0)
    monkeypatch.setattr("mrlm_pl.engines.http.replicas.FIRST_REST", 0.01)
    server = serve()
    server.development = server.scaled = True
    remote = engine(server, weights_folder=str(tmp_path))
    remote.load("p", changed(model, 1.0), 1)
    return server, remote


@pytest.mark.parametrize("loaded_again", [False, True])
def test_a_server_that_was_started_again_while_it_was_idle_gets_the_current_weights(
    loaded_again: bool, model: Any, idle_server: tuple[FakeVllm, OpenAICompatible]
) -> None:
    (server, remote), asked = idle_server, request((5, 9, 2))
    before = run(remote, asked)
    assert run(remote, asked) == before
    assert len(server.asked("/collective_rpc")) == 1, "it is recognized"
    server.model = model  # no request saw that it was gone
    if loaded_again:
        remote.load("p", changed(model, 1.0), 1)
    assert run(remote, asked) == before
    remote.load("p", changed(model, 2.0), 1)
    assert run(remote, asked)[0].logprobs != before[0].logprobs
    assert len(server.asked("/collective_rpc")) == 3


@pytest.mark.parametrize("fault", [(429, {"error": {"message": "too much to do"}}), (200, {"error": "out of memory"})])
def test_a_server_whose_hand_over_failed_gets_the_weights_again(
    fault: Any, model: Any, idle_server: tuple[FakeVllm, OpenAICompatible]
) -> None:
    server, remote = idle_server
    before = run(remote, request((5, 9, 2)))
    other, faults = server.other, [fault]

    def answer(path: str, body: Any) -> Any:
        return faults.pop() if faults and path == "/pause?mode=wait" else other(path, body)

    server.model, server.other = model, answer  # started again while idle
    assert run(remote, request((5, 9, 2))) == before
    assert not faults


def test_a_server_with_nearly_the_current_weights_gets_them(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], tmp_path: Path
) -> None:
    server = serve(FakeSglang)
    remote = engine(server, weights_folder=str(tmp_path))
    remote.load("p", changed(model, 0.0), 0)
    server.version, server.model = "default", model  # started again with the weights of version 0
    assert run(remote, request((5,)))[0].version == 0
    assert server.version == "p-0"


def test_a_server_that_is_busy_when_weights_are_compared_does_not_end_the_run(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], tmp_path: Path
) -> None:
    server = serve()
    server.development = True
    remote = engine(server, weights_folder=str(tmp_path))
    remote.load("p", changed(model, 0.0), 0)
    for version, fault in enumerate([(429, {"error": {"message": "too much to do"}}), CUT, NO_SAMPLE], 1):
        server.faults = [..., ..., fault]  # behind the samples by which the server is recognized
        remote.load("p", changed(model, 1.0), version)
        assert not server.faults
        assert run(remote, request((5,)))[0].version == version


def test_a_server_that_a_proxy_missed_gets_the_weights_again(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], tmp_path: Path
) -> None:
    server = serve()
    server.development = True
    remote = engine(server, weights_folder=str(tmp_path))
    remote.load("p", changed(model, 1.0), 1)
    server.model, server.faults = model, [(502, {})]  # started again behind a proxy, whose connections stay
    asked = request((5, 9, 2), temperature=0.0)
    [found] = run(remote, asked)
    own = InProcessEngine()
    own.load("p", changed(model, 1.0), 1)
    [expected] = asyncio.run(own.sample([asked]))
    own.close()
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


NO_REPLY = "not a reply of vllm: .*; check the server's URL"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ({"choices": [None]}, NO_REPLY),
        ({"choices": ["text"]}, NO_REPLY),
        (
            {"choices": [{"token_ids": ["a"], "prompt_token_ids": [5], "logprobs": 3, "finish_reason": "stop"}]},
            NO_REPLY,
        ),
        (b'{"choices": [', r"http://127\.0\.0\.1:\d+/\S+ answered with invalid JSON: .*; check the URL"),
    ],
    ids=["null", "text", "wrong types", "cut"],
)
def test_a_reply_of_something_else_is_an_error_that_shows_it(
    reply: Any, text: str, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve()
    remote = engine(server, terms=ONCE)
    run(remote, request((5,)))
    server.faults = [(200, reply)]
    with pytest.raises(RemoteError, match=text):
        run(remote, request((5,)))


def test_a_server_whose_replies_stay_unusable_is_told_after_a_few(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve()
    remote = engine(server, terms=QUICK)
    run(remote, request((5,)))
    server.faults = [CUT] * 9
    with pytest.raises(RemoteError, match="answered with invalid JSON"):
        run(remote, request((5,)))
    assert len(server.faults) == 9 - (UNUSABLE_REPLIES + 1)


def test_more_tokens_than_asked_for_are_refused(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve()
    remote = engine(server, terms=ONCE)
    run(remote, request((5,)))
    server.faults = [(server.sample(server.asked("/v1/completions")[-1] | {"max_tokens": 9}))]
    with pytest.raises(RemoteError, match="sampled 9 tokens, and 4 were asked for"):
        run(remote, request((5,)))


def test_weights_that_a_server_cannot_read_are_an_error_that_says_so(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    server = serve()
    server.development = server.paused = True  # an earlier run died in an update
    remote = engine(server, weights_folder=str(tmp_path), terms=Terms(60, 60, retries=1))
    remote.load("p", changed(model, 0.0), 0)

    def absent(folder: str) -> None:
        raise OSError("no file")

    monkeypatch.setattr(server, "reload", absent)
    text = r"'p': no server is ready: .*status 500: .*no file; .*reads weights_folder under the same path"
    with pytest.raises(RemoteError, match=text):
        remote.load("p", changed(model, 1.0), 1)
    monkeypatch.undo()
    remote.load("p", changed(model, 1.0), 1)
    assert run(remote, request((5,)))[0].version == 1


def test_folders_of_another_run_do_not_push_out_those_in_use(tmp_path: Path) -> None:
    small = build("llama")
    for version in (100, 104, 0, 4):
        write_version(tmp_path, "p", small, version, also=str)
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["version-00000000", "version-00000004"]


def test_a_trained_policy_without_a_way_for_its_weights_is_refused(
    model: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"policy 'p' is trained.*weights_folder.*trained: false"):
        engine(serve()).load("p", changed(model, 0.0), 0)
    with pytest.raises(ConfigurationError, match=r"VLLM_SERVER_DEV_MODE=1 \(0\.17 or newer\)"):
        engine(serve(), weights_folder=str(tmp_path)).load("p", changed(model, 0.0), 0)
    server = serve(FakeSglang)
    remote = engine(server, weights_folder=str(tmp_path))
    remote.load("p", changed(model, 0.0), 0)
    known = len(server.log)
    with pytest.raises(ConfigurationError, match="'p' and 'q' are both trained"):
        remote.load("q", changed(model, 0.0), 0)
    assert len(server.log) == known


def test_two_trained_policies_take_a_server_each(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible], quiet_trainer: Any, tmp_path: Path
) -> None:
    def fit(*servers: FakeServer) -> None:
        default, other = (engine(server, weights_folder=str(tmp_path / "weights")) for server in servers)
        data = RolloutDataModule(
            QuestionEnvironment(
                [{"prompt": f"{n}"} for n in range(9)], [different_lengths], agents=["first", "second"]
            ),
            engine=RoutingEngine(default, {"second": other}),
            groups=1,
            group_size=4,
            iterations=2,
            sampling=Sampling(max_tokens=4),
        )
        policies = {agent: Policy("builtin:tiny", learning_rate=1e-3) for agent in ("first", "second")}
        quiet_trainer().fit(MAGRPO(policies), data)

    tiny = Policy("builtin:tiny")
    tiny.load()
    first, second = (serve(model=tiny.network.eval()) for _ in range(2))
    first.development = second.development = True
    with pytest.raises(ConfigurationError, match=r"'first' and 'second' are both.*a server for each.*RoutingEngine"):
        fit(first, first)
    assert not first.log, "it is refused before a request"
    fit(first, second)
    for server, name in ((first, "first"), (second, "second")):
        loaded = [Path(body["kwargs"]["weights_path"]) for body in server.asked("/collective_rpc")]
        assert [path.parent.name for path in loaded] == [name, name], "of the start and of the first update"


def test_several_processes_are_refused_before_their_parts_of_the_weights_are_read(
    serve: Callable[..., Any],
    engine: Callable[..., OpenAICompatible],
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote, trained = engine(serve(), weights_folder=str(tmp_path)), changed(model, 0.0)
    monkeypatch.setattr("mrlm_pl.engines.http.probes.world_size", lambda: 2)
    monkeypatch.setattr(type(model), "state_dict", lambda *_: pytest.fail("it holds parts of tensors"))
    with pytest.raises(ConfigurationError, match=r"'p' is trained by 2 processes.*trainer\.devices to 1"):
        remote.load("p", trained, 0)


def test_a_key_is_sent_and_shown_nowhere(
    serve: Callable[..., Any],
    engine: Callable[..., OpenAICompatible],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve()
    with pytest.raises(ConfigurationError, match=r"SERVER_KEY.*not set"):
        engine(server, api_key_env="SERVER_KEY")
    monkeypatch.setenv("SERVER_KEY", "sk-123")
    remote = engine(server, api_key_env="SERVER_KEY")
    run(remote, request((5,)))
    assert {headers.get("authorization") for _, _, headers, _ in server.log} == {"Bearer sk-123"}
    server.faults = [(401, {"error": "Unauthorized"})]
    with pytest.raises(EngineError, match="Unauthorized; set `api_key_env`") as refused:
        run(remote, request((5,)))
    assert "sk-123" not in str(refused.value)
    assert "sk-123" not in repr(vars(remote)) + repr(vars(remote._replicas))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"url": "localhost:8000"}, "not of the form http://"),
        ({"url": "http://h:99999"}, "not of the form http://"),
        ({"url": "http://h:port"}, "not of the form http://"),
        ({"url": []}, "names no server"),
        ({"url": "http://user:key@host:1"}, "api_key_env"),
        ({"url": "http://h:1", "dialect": "tgi"}, "vllm, sglang, transformers"),
        ({"url": "http://h:1", "dialect": "transformers"}, "data.engine.tokenizer"),
        ({"url": "http://h:1", "tokenizer": "builtin:tiny"}, "leave data.engine.tokenizer out"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        OpenAICompatible(**options)


def test_terms_are_checked() -> None:
    for bad in ({"timeout_seconds": 0}, {"patience_seconds": -1}, {"retries": -1}, {"concurrency": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(bad))):
            Terms(**bad)


def test_the_model_is_chosen_by_the_policys_name_or_is_the_only_one(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    run(engine(serve(name="p")), request((5,)))
    run(engine(serve(name="anything")), request((5,)))
    with pytest.raises(ConfigurationError, match="`another` does not exist"):
        run(engine(serve(name="p"), model="another"), request((5,)))


@pytest.mark.parametrize("bad", [float("nan"), None])
def test_a_log_probability_that_is_none_is_refused(
    bad: Any, serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve()
    remote = engine(server, terms=ONCE)
    run(remote, request((5,)))
    status, reply = server.sample(server.asked("/v1/completions")[-1])
    reply["choices"][0]["logprobs"]["token_logprobs"][0] = bad
    server.faults = [(status, reply)]
    with pytest.raises(RemoteError, match="must have a finite one"):
        run(remote, request((5,)))
    assert math.isfinite(sum(run(remote, request((5,)))[0].logprobs))


def test_a_changed_context_is_told(serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]) -> None:
    server = serve()
    remote = engine(server, terms=ONCE)
    run(remote, request((5,)))
    status, reply = server.sample(server.asked("/v1/completions")[-1])
    reply["choices"][0]["prompt_token_ids"] = [0, 5]
    server.faults = [(status, reply)]
    with pytest.raises(RemoteError, match=rf"{server.url}: the server generated from 2 tokens that are not the 1"):
        run(remote, request((5,)))


def test_samples_of_sglang_without_their_log_probabilities_are_refused(
    serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]
) -> None:
    server = serve(FakeSglang)
    remote = engine(server, terms=ONCE)
    run(remote, request((5,)))
    for key, value, error, text in (
        ("output_token_logprobs", None, ConfigurationError, "no log-probabilities of sampled tokens"),
        ("output_ids", [3], RemoteError, "output_ids are not the tokens of its output_token_logprobs"),
    ):
        status, reply = server.sample(server.asked("/generate")[-1])
        (reply["meta_info"] if key in reply["meta_info"] else reply)[key] = value
        server.faults = [(status, reply)]
        with pytest.raises(error, match=f"{server.url}: .*{text}"):
            run(remote, request((5,)))
    status, reply = server.sample(server.asked("/generate")[-1])
    server.faults = [(status, reply | {"output_ids": None})]
    assert run(remote, request((5,)))[0].token_ids, "older servers do not give them"


def test_a_closed_engine_says_so(serve: Callable[..., Any], engine: Callable[..., OpenAICompatible]) -> None:
    remote = engine(serve())
    remote.close()
    remote.close()
    with pytest.raises(EngineError, match="closed"):
        run(remote, request((5,)))


def test_adapters_are_merged_into_the_weights_that_servers_read(tmp_path: Path) -> None:
    policy = Policy("builtin:tiny", lora=LoRA(rank=4))
    policy.load()
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    policy.model.eval()
    folder = write_version(tmp_path, "main", policy.network, 2, also=str)
    assert folder == tmp_path / "main/version-00000002"
    row = torch.tensor([[4, 27, 20, 28]])
    read = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(read(row).logits, policy.network(row).logits, atol=1e-4, rtol=1e-4)
        with policy.model.disable_adapter():
            assert (read(row).logits - policy.network(row).logits).abs().max() > 0.01, "the adapter matters"


def test_a_partner_by_url_is_asked_there(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRLM_API_KEY", "sk-9")
    server = serve(name="partner")
    own = InProcessEngine()
    policies = {"main": Policy("builtin:tiny")}
    policies["partner"] = Policy("builtin:tiny", trained=False, served_by=server.url)
    routed = with_served(own, policies)
    assert server.asked("/v1/completions"), "it is checked first"
    assert server.log[0][2]["authorization"] == "Bearer sk-9"
    [sample] = asyncio.run(routed.sample([request((5, 9), policy="partner")]))
    assert sample.engine == "openai/vllm"
    assert routed.reports_logprobs("partner")
    routed.close()
    with pytest.raises(ConfigurationError, match="'ftp://h:1' is neither HOST:PORT, nor http://HOST:PORT"):
        Policy("builtin:tiny", trained=False, served_by="ftp://h:1")


def test_training_refuses_a_server_of_text() -> None:
    text = OpenAICompatible("http://127.0.0.1:9", "transformers", tokenizer="builtin:tiny")
    vllm = OpenAICompatible("http://127.0.0.1:9")
    trained, frozen = Policy("builtin:tiny"), Policy("builtin:tiny", trained=False)
    for cls in (GRPO, PPO, MADPO):
        learner = cls({"partner": frozen, "main": trained})
        check_logprobs(learner, vllm)
        check_logprobs(learner, RoutingEngine(vllm, {"partner": text}))
        for engine in (text, RoutingEngine(vllm, {"main": text})):
            with pytest.raises(ConfigurationError, match=r"'main' is trained.*no token ids.*dialect: vllm.*trained:"):
                check_logprobs(learner, engine)
    text.close()
    vllm.close()
