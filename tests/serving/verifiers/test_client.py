"""The client: order, retries, several addresses, and wrong answers."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from mrlm_environments.debate.judge import Argument, Debate
from mrlm_environments.debate.judge_by_reward_model import RewardModelJudge

from mrlm_pl.environment import Message
from mrlm_pl.errors import ConfigurationError, DataError, RemoteError
from mrlm_pl.reward_models.scorer import exchange
from mrlm_pl.serving.server import Endpoint
from mrlm_pl.serving.transport import connection
from mrlm_pl.serving.transport.security import Identity
from mrlm_pl.serving.verifiers import VerifierClient
from mrlm_pl.serving.verifiers import verifier_pb2 as pb
from mrlm_pl.serving.verifiers.asking import MAX_CHARACTERS
from tests.support.servers.certificates import Authority
from tests.support.servers.environment_servers import eventually
from tests.support.servers.ports import free_port
from tests.support.servers.verifier_servers import Broken, LyingServer, Spoken, Verifier

Code = grpc.StatusCode


def client(*targets: str, **options: Any) -> VerifierClient:
    return VerifierClient(list(targets), **{"timeout_seconds": 60.0, "patience_seconds": 60.0, **options})


def scored(scorer: VerifierClient, *texts: str) -> list[float]:
    return scorer.score_texts(["q"] * len(texts), texts)


def test_it_is_an_ordinary_scorer(serve: Any) -> None:
    server: Verifier = serve()
    scorer = VerifierClient(server.target)
    assert scorer.probability
    assert scored(scorer, "0.5", "0", "1") == [0.5, 0.0, 1.0]
    found = scorer.score(exchange("q", "0.25!"))
    assert (found.value, found.truncated) == (0.25, True)
    assert scorer.score_batch([]) == scorer.score_texts([], []) == []
    scorer.close()
    assert scored(scorer, "0.5") == [0.5]


def test_a_judge_takes_its_scores_as_they_are(serve: Any) -> None:
    debate = Debate("x", (Argument("PRO", "0.75"), Argument("CON", "0.5")))
    verdict = RewardModelJudge(VerifierClient(serve().target)).judge(debate)
    assert (verdict.score("PRO"), verdict.score("CON")) == (0.75, 0.5)


@pytest.mark.parametrize("batch_size", [1, 7, 1024])
@pytest.mark.long_after(1)
def test_order_holds_from_many_threads_at_any_size(serve: Any, batch_size: int) -> None:
    server: Verifier = serve(batch=9)
    scorer = client(server.target, batch_size=batch_size)
    draw = random.Random(batch_size)
    texts = [[f"{draw.randrange(1000) / 1000}" for _ in range(draw.randrange(60))] for _ in range(20)]
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda mine: scored(scorer, *mine), texts))
    assert found == [[float(text) for text in mine] for mine in texts]
    assert server.service.scored_total == sum(map(len, texts)), "each once"


def test_large_texts_go_in_several_requests(serve: Any) -> None:
    server: Verifier = serve(message_mb=4)
    texts = ["0." + "5" * 400_000] * 5
    assert scored(client(server.target), *texts) == [pytest.approx(5 / 9, abs=1e-6)] * 5


def test_copies_share_one_connection(serve: Any) -> None:
    server: Verifier = serve()
    scorer = client(server.target)
    copies = [pickle.loads(pickle.dumps(scorer)), copy.deepcopy(scorer), copy.copy(scorer), client(server.target)]
    assert [scored(copied, "0.5") for copied in copies] == [[0.5]] * 4
    ours = [address for address in connection._shared_process().connections if address.target == server.target]
    assert len(ours) == 1


FORKED = """
import os
from mrlm_pl.errors import RemoteError
from mrlm_pl.serving.verifiers import VerifierClient
scorer = VerifierClient(TARGET, patience_seconds=60)
def in_child(expected):
    child = os.fork()
    if child == 0:
        try:
            told = str(scorer.score_texts(["q"], ["0.25"]))
        except RemoteError as error:
            told = str(error)
        if expected not in told:
            print(told, flush=True)
        os._exit(0 if expected in told else 1)
    assert os.waitpid(child, 0)[1] == 0, expected
in_child("[0.25]")
in_child("[0.25]")
assert scorer.score_texts(["q"], ["0.5"]) == [0.5]
in_child("gRPC cannot work in it; fork before the first call, or start it with `spawn`")
assert scorer.score_texts(["q"], ["0.5"]) == [0.5]
"""


def test_forks_connect_by_themselves_or_are_told_that_they_cannot(serve: Any) -> None:
    server: Verifier = serve()
    script = FORKED.replace("TARGET", repr(server.target))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.service.scored_total == 4


def test_a_spawned_process_unpickles_it(serve: Any) -> None:
    server: Verifier = serve()
    script = (
        f"import pickle; s = pickle.loads({pickle.dumps(client(server.target))!r}); print(s.score_texts('q', ['1']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[1.0]", done.stderr


def test_it_starts_and_scores_without_torch(serve: Any) -> None:
    script = (
        "import sys\nfrom mrlm_pl.serving.verifiers import VerifierClient\n"
        f"assert VerifierClient({serve().target!r}).score_texts(['q'], ['1']) == [1.0]\n"
        "print(sorted({'torch', 'transformers', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


def test_it_waits_for_a_server_that_starts_late_and_says_so_once(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    scorer = client(f"127.0.0.1:{port}")
    with ThreadPoolExecutor(5) as pool, caplog.at_level(logging.WARNING):
        asked = [pool.submit(scored, scorer, f"0.{number}") for number in range(1, 6)]
        eventually(lambda: any(f"127.0.0.1:{port} does not answer" in message for message in caplog.messages))
        assert not any(item.done() for item in asked)
        serve(endpoint=Endpoint(port=port))
        assert [item.result() for item in asked] == [[0.1], [0.2], [0.3], [0.4], [0.5]]
    told = [message for message in caplog.messages if f"127.0.0.1:{port}" in message]
    assert len(told) == 2, told
    assert told[0].startswith(f"the verifier at 127.0.0.1:{port} does not answer (UNAVAILABLE")
    assert told[0].endswith("; retrying for 60 s: start it if it is not running")
    assert told[1] == f"the verifier at 127.0.0.1:{port} answers again"


def test_another_model_at_the_address_is_warned_of_once(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    scorer = client(server.target)
    for model in ("spoken", "spoken", "100%s", "100%s"):
        server.service.model = model
        assert scored(scorer, "0.5") == [0.5]
    text = f"{server.target} scores with 100%s, another model than before: rewards may differ"
    assert [message for message in caplog.messages if message.startswith(text)] == caplog.messages
    assert len(caplog.messages) == 1


def test_patience_ends() -> None:
    port, started = free_port(), time.monotonic()
    with pytest.raises(RemoteError, match=rf"no verifier at 127.0.0.1:{port} gave scores within 1 s; start it again"):
        scored(client(f"127.0.0.1:{port}", patience_seconds=1.0), "0.5")
    assert 0.9 < time.monotonic() - started < 60


def test_a_server_that_is_silent_is_asked_again(serve: Any) -> None:
    scorer = Spoken()
    server: Verifier = serve(scorer)
    with pytest.raises(RemoteError, match=r"within 1\.5 s.*DEADLINE_EXCEEDED"):
        scored(client(server.target, timeout_seconds=0.4, patience_seconds=1.5), "wait")
    eventually(lambda: server.service.waiting == 0)  # none of the attempts is left to be done


def test_a_server_with_much_to_do_is_given_more_time(serve: Any) -> None:
    server: Verifier = serve(batch=1)
    assert scored(client(server.target, timeout_seconds=0.3), *["zzz"] * 5) == [0.0] * 5, "it takes a second"


def test_another_address_answers_for_one_that_is_gone(serve: Any) -> None:
    gone, server = f"127.0.0.1:{free_port()}", serve()
    scorer = client(gone, server.target)
    assert [scored(scorer, "0.5", "1") for _ in range(4)] == [[0.5, 1.0]] * 4
    assert server.service.scored_total == 8


def test_one_that_is_full_is_asked_later_and_another_at_once(serve: Any) -> None:
    blocked = Spoken()
    full: Verifier = serve(blocked, batch=1, queue=1)
    with ThreadPoolExecutor(3) as pool:
        taken = [pool.submit(full.ask, "wait")]
        eventually(lambda: blocked.batches)
        taken.append(pool.submit(full.ask, "0"))
        eventually(lambda: full.service.waiting == 1)
        assert scored(client(full.target, serve().target), "0.5") == [0.5]
        later = pool.submit(scored, client(full.target), "0.25")
        time.sleep(0.3)
        assert not later.done()
        blocked.gate.set()
        assert later.result() == [0.25]


def test_a_token(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Verifier = serve(endpoint=Endpoint(token="secret"))
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("secret\n")
    wrong.write_text("guess\n")
    assert scored(client(server.target, token_file=str(right)), "0.5") == [0.5]
    started = time.monotonic()
    for scorer in (client(server.target, token_file=str(wrong)), client(server.target)):
        with pytest.raises(RemoteError, match=rf"{server.target} refuses: UNAUTHENTICATED.*token is missing or wrong"):
            scored(scorer, "0.5")
    assert time.monotonic() - started < 40, "not when the patience is over"
    with pytest.raises(ConfigurationError, match="token_file"):
        client(server.target, token_file=str(tmp_path / "missing"))


def test_certificates(serve: Any, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="certificates are made with the cryptography package")
    ours, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "stranger")
    server: Verifier = serve(endpoint=Endpoint(identity=Identity(*ours.identity("server"), ours.file)))
    certificate, key = ours.identity("client")
    keys = {"tls_authority": ours.file, "tls_certificate": certificate, "tls_key": key}
    assert scored(client(server.target, **keys), "0.5") == [0.5]
    wrong = {**keys, "tls_authority": stranger.file}
    asks = "check the address and whether both sides use TLS"
    for options, remedy in (
        ({}, r"refuses: UNAVAILABLE.*the server wants TLS; give tls_authority"),
        ({"tls_authority": ours.file}, asks),
        (wrong, r"refuses: UNAVAILABLE.*that signed it"),
    ):
        with pytest.raises(RemoteError, match=remedy):
            scored(client(server.target, patience_seconds=0.5, **options), "0.5")
    with pytest.raises(ConfigurationError, match="both tls_certificate and tls_key"):
        client(server.target, tls_certificate=certificate)


def honest(request: pb.ScoreRequest, *values: float) -> list[pb.Score]:
    return [pb.Score(id=item.id, probability=value) for item, value in zip(request.conversations, values, strict=True)]


LIES: dict[str, tuple[Callable[[pb.ScoreRequest], list[pb.Score]], str]] = {
    "none": (lambda asked: [], "gave 0 scores for 2 conversations"),
    "one too few": (lambda asked: honest(asked, 0.5, 0.5)[:1], "gave 1 scores for 2 conversations"),
    "one too many": (lambda asked: honest(asked, 0.5, 0.5) * 2, "gave 4 scores for 2 conversations"),
    "order": (lambda asked: honest(asked, 0.5, 0.5)[::-1], "gave score 0 to conversation"),
    "ids": (
        lambda asked: [pb.Score(id=2**60, probability=0.5)] * 2,
        f"gave score 0 to conversation {1 << 60}, not to",
    ),
    "no ids": (lambda asked: [pb.Score(probability=0.5)] * 2, "gave score 0 to conversation 0"),
    "nan": (lambda asked: honest(asked, 0.5, math.nan), "gave the score nan, and scores are in"),
    "inf": (lambda asked: honest(asked, math.inf, 0.5), "gave the score inf"),
    "above": (lambda asked: honest(asked, 0.5, 1.0000001), "gave the score 1.0000001"),
    "below": (lambda asked: honest(asked, 0.5, -1e-9), "gave the score -1e-09"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_is_not_believed(lying: Callable[..., LyingServer], lie: str) -> None:
    answer, text = LIES[lie]
    server = lying(lambda asked: pb.ScoreReply(scores=answer(asked)))
    with pytest.raises(RemoteError, match=rf"the verifier at {server.target} {text}"):
        scored(client(server.target), "a", "b")
    assert server.liar.asked == 1


FINAL = ["UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "INTERNAL", "NOT_FOUND"]


@pytest.mark.parametrize("name", FINAL)
def test_what_is_refused_for_good_is_told_at_once(lying: Callable[..., LyingServer], name: str) -> None:
    server = lying(lambda asked: (Code[name], "because"))
    with pytest.raises(RemoteError, match=rf"the verifier at {server.target} refuses: {name}: .*because"):
        scored(client(server.target), "a")
    assert server.liar.asked == 1


@pytest.mark.parametrize("name", ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED"])
def test_what_may_pass_is_asked_again(lying: Callable[..., LyingServer], name: str) -> None:
    left = [3]

    def answer(asked: pb.ScoreRequest) -> Any:
        left[0] -= 1
        return (Code[name], "later") if left[0] >= 0 else pb.ScoreReply(scores=honest(asked, 0.5, 1.0))

    server = lying(answer)
    assert scored(client(server.target), "a", "b") == [0.5, 1.0]
    assert server.liar.asked == 4


def test_a_connection_that_breaks_is_asked_again(lying: Callable[..., LyingServer]) -> None:
    broken = [
        Broken(Code.INTERNAL, "Received RST_STREAM with error code 2"),
        Broken(Code.UNKNOWN, "Stream removed"),
        Broken(Code.RESOURCE_EXHAUSTED, "ENHANCE_YOUR_CALM"),
        Broken(Code.ABORTED, "by a proxy"),
    ]
    answers = iter([*broken, None])
    server = lying(lambda asked: next(answers) or pb.ScoreReply(scores=honest(asked, 0.5)))
    assert scored(client(server.target), "a") == [0.5]


def test_a_message_that_the_server_does_not_take_is_not_sent_for_ever(serve: Any) -> None:
    server: Verifier = serve(message_mb=1)
    started = time.monotonic()
    with pytest.raises(RemoteError, match=r"larger than max .* raise message_mb on both sides"):
        scored(client(server.target), "0." + "é" * 600_000)
    assert time.monotonic() - started < 40, "not when the patience is over"


def test_conversations_that_nobody_takes(serve: Any) -> None:
    scorer = client(serve().target)
    with pytest.raises(DataError, match="conversation 1 has 0 messages"):
        scorer.score_batch([exchange("q", "0.5"), ()])
    with pytest.raises(DataError, match=rf"has 1 messages with {MAX_CHARACTERS + 1} characters"):
        scorer.score([Message("user", "x" * (MAX_CHARACTERS + 1))])
    with pytest.raises(DataError, match="2 questions and 1 answers"):
        scorer.score_texts(["a", "b"], ["c"])


def test_pauses_grow_and_are_bounded(lying: Callable[..., LyingServer]) -> None:
    times: list[float] = []

    def answer(asked: pb.ScoreRequest) -> Any:
        times.append(time.monotonic())
        return Code.UNAVAILABLE, "later"

    with pytest.raises(RemoteError, match="within 3 s"):
        scored(client(lying(answer).target, patience_seconds=3.0), "a")
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses
    for number, pause in enumerate(pauses[:4]):
        assert pause >= 0.5 * 0.1 * 2**number
    assert len(pauses) <= 7


def test_the_global_generator_is_left_alone() -> None:
    before = random.getstate()
    with pytest.raises(RemoteError):
        scored(client(f"127.0.0.1:{free_port()}", patience_seconds=0.3), "a")
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"address": "nowhere"}, "'nowhere' is not HOST:PORT"),
        ({"address": []}, "'' is not HOST:PORT"),
        ({"address": "h:1", "timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"address": "h:1", "patience_seconds": -1}, "patience_seconds is -1"),
        ({"address": "h:1", "batch_size": 0}, "batch_size is 0; it must be from 1 to 1024"),
        ({"address": "h:1", "tls_authority": "/nowhere/ca"}, "tls_authority: '/nowhere/ca' cannot be read"),
    ],
)
def test_wrong_settings(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        VerifierClient(**options)
