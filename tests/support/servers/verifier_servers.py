"""Scorers with scores in the texts, their servers, and servers that return wrong answers."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.episode import Message
from mrlm_pl.reward_models import TextScore, TextScorer
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.environments.service import Limits
from mrlm_pl.serving.server import Endpoint, EnvironmentServer
from mrlm_pl.serving.transport.codec import to_json
from mrlm_pl.serving.transport.connection import refuse
from mrlm_pl.serving.verifiers import verifier_pb2 as pb
from mrlm_pl.serving.verifiers import verifier_pb2_grpc
from mrlm_pl.serving.verifiers.service import VerifierService


class Spoken(TextScorer):
    """Score with the number in the reply; ``wait`` waits for the gate, ``boom`` raises, ``!`` truncates."""

    probability = True

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.batches: list[list[str]] = []
        self.at_once = 0

    def score(self, messages: Sequence[Message]) -> TextScore:
        text = messages[-1].content
        if text == "boom":
            raise OSError("the disk is away")
        if text == "wait":
            self.gate.wait(100)
            return TextScore(0.0)
        if text == "zzz":
            time.sleep(0.2)
            return TextScore(0.0)
        return TextScore(float(text.rstrip("!")), text.endswith("!"))

    def score_batch(self, conversations: Sequence[Sequence[Message]]) -> list[TextScore]:
        self.at_once += 1
        assert self.at_once == 1, "the scorer is called by one thread"
        try:
            self.batches.append([messages[-1].content for messages in conversations])
            return super().score_batch(conversations)
        finally:
            self.at_once -= 1


class Raw(Spoken):
    """Score with the logit of that number."""

    probability = False


class Verifier:
    """A server of a scorer on its own event loop, with a plain client."""

    def __init__(
        self,
        scorer: TextScorer,
        endpoint: Endpoint | None = None,
        message_mb: int = 16,
        **limits: int,
    ) -> None:
        self.scorer, self.loop = scorer, EventLoopThread()

        async def start() -> EnvironmentServer:
            service = VerifierService(scorer, "spoken", **limits)
            sizes = Limits(message_mb=message_mb)
            server = EnvironmentServer(Offer({}, 0, 20.0), endpoint or Endpoint(), sizes, threads=1, verifier=service)
            await server.start()
            return server

        self.server = self.loop.submit(start()).result(100)
        assert self.server.verifier is not None
        self.service = self.server.verifier
        self.port = self.server.port
        self.target = f"127.0.0.1:{self.port}"
        self.channel = grpc.insecure_channel(self.target)
        self.stub = verifier_pb2_grpc.VerifierServiceStub(self.channel)

    def ask(self, *texts: str, timeout: float = 60.0) -> pb.ScoreReply:
        return self.stub.Score(request(*texts), timeout=timeout)

    def drain(self, seconds: float) -> Any:
        return self.loop.submit(self.server.drain(seconds))

    def stop(self) -> None:
        self.channel.close()
        self.loop.submit(self.server.stop()).result(100)
        self.loop.close()


def request(*texts: str) -> pb.ScoreRequest:
    """Return the texts as replies to a question, numbered from 1."""
    conversations = [
        pb.Conversation(id=number, messages=to_json([Message("user", "q"), Message("assistant", text)]))
        for number, text in enumerate(texts, start=1)
    ]
    return pb.ScoreRequest(conversations=conversations)


class Broken(NamedTuple):
    """A status of the network."""

    code: grpc.StatusCode
    text: str


class Liar(verifier_pb2_grpc.VerifierServiceServicer):
    """Answer every request with the result of a function: a reply, a status of the service or one of the network."""

    def __init__(self, answer: Callable[[pb.ScoreRequest], pb.ScoreReply | tuple[grpc.StatusCode, str]]) -> None:
        self.answer, self.asked = answer, 0

    async def Score(self, request: pb.ScoreRequest, context: Any) -> Any:  # noqa: N802
        self.asked += 1
        found = self.answer(request)
        if isinstance(found, Broken):
            await context.abort(*found)
        elif isinstance(found, tuple):
            await refuse(context, *found)
        return found


class LyingServer:
    """Return such a server."""

    def __init__(self, answer: Callable[[pb.ScoreRequest], Any]) -> None:
        self.loop, self.liar = EventLoopThread(), Liar(answer)

        async def start() -> tuple[grpc.aio.Server, int]:
            server = grpc.aio.server()
            verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self.liar, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            return server, port

        self.server, port = self.loop.submit(start()).result(100)
        self.target = f"127.0.0.1:{port}"

    def stop(self) -> None:
        self.loop.submit(self.server.stop(0)).result(100)
        self.loop.close()


class Digits(TextScorer):
    """Score the fraction of digits in a reply, slowly; the reward of runs in other processes."""

    probability = True

    def score(self, messages: Sequence[Message]) -> TextScore:
        text = messages[-1].content
        time.sleep(0.002)
        return TextScore(sum(letter.isdigit() for letter in text) / max(len(text), 1))


async def _serve(port: int) -> None:
    service = VerifierService(Digits(), "digits")
    server = EnvironmentServer(Offer({}, 0, 20.0), Endpoint(port=port), Limits(), threads=1, verifier=service)
    await server.start()
    print(f"serving on 127.0.0.1:{server.port}", flush=True)
    await server.serve()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
