"""The service: order, batches, bounds, deadlines and refusals."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.reward_models import RewardModel
from mrlm_pl.serving.server import Endpoint
from mrlm_pl.serving.transport.codec import to_json
from mrlm_pl.serving.transport.security import TOKEN_VARIABLE
from mrlm_pl.serving.verifiers import verifier_pb2 as pb
from mrlm_pl.serving.verifiers.asking import MAX_BATCH, MAX_CHARACTERS
from mrlm_pl.serving.verifiers.service import VerifierService
from tests.support.models.verifier_models import tiny
from tests.support.servers.environment_servers import eventually, refusal
from tests.support.servers.verifier_servers import Raw, Spoken, Verifier, request

Code = grpc.StatusCode


def chances(reply: pb.ScoreReply) -> list[float]:
    return [score.probability for score in reply.scores]


def test_scores_come_in_order_with_their_ids(serve: Any) -> None:
    server: Verifier = serve()
    reply = server.ask("0.5", "0", "1!", "0.25")
    assert chances(reply) == [0.5, 0.0, 1.0, 0.25]
    assert [score.id for score in reply.scores] == [1, 2, 3, 4]
    assert [score.truncated for score in reply.scores] == [False, False, True, False]
    assert chances(server.ask()) == []
    described = server.stub.Describe(pb.DescribeRequest())
    assert (described.model, described.max_conversations) == ("spoken", MAX_BATCH)


def test_the_sigmoid_is_applied_to_raw_numbers_alone(serve: Any) -> None:
    assert chances(serve(Raw()).ask("0", "2", "-2")) == pytest.approx(
        [0.5, 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))], abs=5e-7
    )
    assert chances(serve(Raw()).ask("-1000", "1000")) == [0.0, 1.0]
    assert chances(serve().ask("0.1234567")) == [0.123457], "six digits"


def test_order_holds_under_concurrency_at_any_sizes(serve: Any) -> None:
    server: Verifier = serve(batch=5)
    sizes = st.lists(st.integers(0, 23), min_size=1, max_size=12)

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(sizes, st.randoms(use_true_random=False))
    def ask(counts: list[int], draw: random.Random) -> None:
        texts = [[f"{draw.randrange(1000) / 1000}" for _ in range(count)] for count in counts]
        with ThreadPoolExecutor(len(counts)) as pool:
            replies = list(pool.map(lambda mine: server.ask(*mine), texts))
        assert [chances(reply) for reply in replies] == [[float(text) for text in mine] for mine in texts]

    ask()
    assert isinstance(server.scorer, Spoken)
    assert max(map(len, server.scorer.batches)) == 5


@pytest.mark.parametrize("kind", ["value", "classifier"])
@pytest.mark.long_after(1)
def test_a_model_gives_a_text_the_same_number_in_any_company(serve: Any, kind: str, tmp_path: Path) -> None:
    tiny(tmp_path, kind)
    server: Verifier = serve(RewardModel(str(tmp_path), precision="64", batch_tokens=600))
    draw = random.Random(2)
    texts = ["".join(draw.choices("0123456789 +=", k=draw.randrange(1, 80))) for _ in range(40)]
    alone = [chances(server.ask(text))[0] for text in texts]
    assert chances(server.ask(*texts)) == alone, "to the last bit"
    expected = RewardModel(str(tmp_path)).score_texts(["q"] * len(texts), texts)
    assert alone == pytest.approx(expected, abs=2e-6)


def test_what_a_classifier_cannot_read_is_the_callers_fault(serve: Any, tmp_path: Path) -> None:
    tiny(tmp_path, "classifier")
    scorer = RewardModel(str(tmp_path), precision="64", max_tokens=64)
    server: Verifier = serve(scorer)
    tokenizer = scorer.load().tokenizer  # type: ignore[attr-defined]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    code, told = refusal(server.ask, "0.5")
    assert code is Code.INVALID_ARGUMENT
    assert "roles must alternate" in told
    tokenizer.chat_template = None
    one = pb.Conversation(id=1, messages=to_json([Message("user", "q")]))
    code, told = refusal(server.stub.Score, pb.ScoreRequest(conversations=[one]))
    assert code is Code.INVALID_ARGUMENT
    assert "a conversation has 1 messages" in told


def waiting(server: Verifier, count: int) -> bool:
    return eventually(lambda: server.service.waiting == count)


def test_what_waits_is_scored_together_one_of_each_request_in_turn(serve: Any) -> None:
    scorer = Spoken()
    server: Verifier = serve(scorer, batch=4)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(server.ask, "wait")
        eventually(lambda: scorer.batches)
        others = []
        for texts in (("0.1", "0.2", "0.3", "0.4", "0.5"), ("0.6",), ("0.7",)):
            before = server.service.waiting
            others.append(pool.submit(server.ask, *texts))
            waiting(server, before + len(texts))
        scorer.gate.set()
        assert [chances(asked.result()) for asked in others] == [[0.1, 0.2, 0.3, 0.4, 0.5], [0.6], [0.7]]
        first.result()
    assert scorer.batches == [["wait"], ["0.1", "0.6", "0.7", "0.2"], ["0.3", "0.4", "0.5"]]
    assert (server.service.scored_total, server.service.batches_total) == (8, 3)


def test_requests_that_nobody_waits_for_are_not_scored(serve: Any) -> None:
    scorer = Spoken()
    server: Verifier = serve(scorer)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(server.ask, "wait")
        eventually(lambda: scorer.batches)
        cancelled = server.stub.Score.future(request("0.3"))
        kept = pool.submit(server.ask, "0.4")
        waiting(server, 2)
        late = pool.submit(refusal, server.ask, "0.1", "0.2", timeout=2.0)
        eventually(lambda: server.service.waiting == 4 or late.done())
        cancelled.cancel()
        assert late.result()[0] is Code.DEADLINE_EXCEEDED
        waiting(server, 1)
        scorer.gate.set()
        assert chances(kept.result()) == [0.4]
        first.result()
    assert scorer.batches == [["wait"], ["0.4"]]


def test_a_large_request_stops_at_its_deadline(serve: Any) -> None:
    scorer = Spoken()
    server: Verifier = serve(scorer, batch=1)
    assert refusal(server.ask, *["zzz"] * 500, timeout=0.5)[0] is Code.DEADLINE_EXCEEDED
    eventually(lambda: not server.service.busy, 200)
    assert len(scorer.batches) < 250  # 50 seconds of work


def test_the_metrics_may_count_while_requests_arrive() -> None:
    service = VerifierService(Spoken(), "spoken")

    class Arriving:
        def __len__(self) -> int:
            service._requests.append(Arriving())  # type: ignore[arg-type]
            return 1

    service._requests.append(Arriving())  # type: ignore[arg-type]
    assert service.waiting == 1


def test_the_queue_is_bounded(serve: Any) -> None:
    scorer = Spoken()
    server: Verifier = serve(scorer, queue=3, batch=1)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(server.ask, "wait")
        eventually(lambda: scorer.batches)
        kept = pool.submit(server.ask, "0.1", "0.2")
        waiting(server, 2)
        code, text = refusal(server.ask, "0.3", "0.4")
        assert code is Code.RESOURCE_EXHAUSTED
        assert text == "2 conversations are waiting, and 3 may; ask again later"
        scorer.gate.set()
        assert chances(kept.result()) == [0.1, 0.2]
        first.result()
    assert chances(server.ask(*["0.5"] * 5)) == [0.5] * 5, "when nothing waits, any request is taken"


@pytest.mark.parametrize("scorer", [Spoken, Raw])
@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_score_that_is_no_number_is_never_sent(serve: Any, scorer: type[Spoken], text: str) -> None:
    server: Verifier = serve(scorer())
    code, told = refusal(server.ask, "0.5", text)
    assert code is Code.INTERNAL
    assert told.startswith(f"NonFiniteError: a scorer gave {text}")
    assert len(server.ask("0.5").scores) == 1, "it continues"


@pytest.mark.parametrize("text", ["1.0001", "-0.0001"])
def test_a_probability_out_of_range_is_never_sent(serve: Any, text: str) -> None:
    code, told = refusal(serve().ask, text)
    assert code is Code.INTERNAL
    assert "a probability in [0, 1] is expected" in told


def test_one_request_that_cannot_be_scored_does_not_fail_the_others(serve: Any) -> None:
    scorer = Spoken()
    server: Verifier = serve(scorer)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(server.ask, "wait")
        eventually(lambda: scorer.batches)
        broken = pool.submit(refusal, server.ask, "0.1", "boom")
        good = [pool.submit(server.ask, "0.2", "0.3"), pool.submit(server.ask, "0.4")]
        waiting(server, 5)
        scorer.gate.set()
        assert broken.result() == (Code.INTERNAL, "OSError: the disk is away")
        assert [chances(asked.result()) for asked in good] == [[0.2, 0.3], [0.4]]
        first.result()


def test_the_event_loop_answers_while_the_model_computes(serve: Any) -> None:
    scorer = Spoken()
    server: Verifier = serve(scorer)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.ask, "wait")
        eventually(lambda: scorer.batches)
        health = health_pb2_grpc.HealthStub(server.channel)
        for name in ("", "mrlm.verifier.v2.VerifierService"):
            found = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert found.status == health_pb2.HealthCheckResponse.SERVING
        scorer.gate.set()
        first.result()


def test_wrong_requests(serve: Any) -> None:
    server: Verifier = serve(message_mb=4)
    for asked, text in (
        (request(*["0"] * (MAX_BATCH + 1)), "1025 conversations in one request; at most 1024 are taken"),
        (request("x" * MAX_CHARACTERS), f"conversation 0 has {MAX_CHARACTERS + 1} characters"),
        (pb.ScoreRequest(conversations=[pb.Conversation(id=1, messages=b"[]")]), "conversation 0 has no messages"),
        (pb.ScoreRequest(conversations=[*request("0").conversations] * 2), "have the same id"),
        (pb.ScoreRequest(conversations=[pb.Conversation(messages=b'[{"role": "root", "content": ""}]')]), "root"),
    ):
        code, told = refusal(server.stub.Score, asked)
        assert code is Code.INVALID_ARGUMENT
        assert text in told
    raw = server.channel.unary_unary("/mrlm.verifier.v2.VerifierService/Score")
    code, told = refusal(raw, b"\xff\xff", timeout=60)
    assert code is Code.INVALID_ARGUMENT
    assert "verifier.proto" in told
    assert refusal(server.ask, *["x" * 900_000] * 6)[0] is Code.RESOURCE_EXHAUSTED
    assert server.service.waiting == 0
    assert server.service.refused_total == 5


def test_the_token_is_asked_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Verifier = serve(endpoint=Endpoint(token="secret"))
    assert refusal(server.ask, "0.5") == (
        Code.UNAUTHENTICATED,
        f"the token is missing or wrong; give it with token_file or in {TOKEN_VARIABLE}",
    )
    reply = server.stub.Score(request("0.5"), metadata=[("authorization", "Bearer secret")], timeout=60)
    assert chances(reply) == [0.5]


def test_a_drain_answers_what_waits_and_takes_no_more(serve: Any) -> None:
    scorer = Spoken()
    server: Verifier = serve(scorer, batch=1)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.ask, "wait", "0.5")]
        eventually(lambda: scorer.batches)
        draining = server.drain(100)
        eventually(lambda: server.service.draining)
        code, text = refusal(server.ask, "0.5", timeout=60)
        assert (code, "going down" in text) == (Code.UNAVAILABLE, True)
        assert not draining.done()
        scorer.gate.set()
        assert chances(asked[0].result()) == [0.0, 0.5]
        draining.result(60)


def test_a_drain_ends_in_time(serve: Any) -> None:
    scorer = Spoken()
    server: Verifier = serve(scorer)
    asked = server.stub.Score.future(request("wait"))
    eventually(lambda: scorer.batches)
    server.drain(0.3).result(60)
    assert not scorer.gate.is_set()
    assert asked.code() in (Code.CANCELLED, Code.UNAVAILABLE, Code.UNKNOWN)


def test_limits_that_are_none() -> None:
    for limits in ({"batch": 0}, {"queue": 0}):
        with pytest.raises(ConfigurationError, match="must be 1 or above"):
            VerifierService(Spoken(), "spoken", **limits)
