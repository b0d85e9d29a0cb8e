"""The service: scores conversations of many callers in one call of the model, on one thread off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, RemoteError
from mrlm_pl.reward_models.scorer import Conversation, TextScorer, as_probability
from mrlm_pl.serving.transport.codec import from_json
from mrlm_pl.serving.transport.connection import refuse
from mrlm_pl.serving.verifiers import verifier_pb2 as pb
from mrlm_pl.serving.verifiers import verifier_pb2_grpc
from mrlm_pl.serving.verifiers.asking import MAX_BATCH, MAX_CHARACTERS
from mrlm_pl.settings import PositiveInt, check_arguments

logger = logging.getLogger(__name__)

Code = grpc.StatusCode
SERVICE = pb.DESCRIPTOR.services_by_name["VerifierService"].full_name
DECIMALS = 6
"""Decimals of a probability; further ones depend on the conversations that share a batch."""


_Item = tuple[Conversation, "asyncio.Future[pb.Score]"]


class VerifierService(verifier_pb2_grpc.VerifierServiceServicer):
    """Score with one scorer; waiting requests share batches, one conversation of each in turn.

    Requests that are cancelled or late are not scored any further. All methods run on one event loop.

    Args:
        scorer: scorer, called on a thread, never twice at the same time.
        model: name of the model.
        batch: maximum number of conversations in one call of the model.
        queue: maximum number of waiting conversations.

    Raises:
        ConfigurationError: ``batch`` or ``queue`` is below 1.
    """

    @check_arguments
    def __init__(self, scorer: TextScorer, model: str, batch: PositiveInt = 64, queue: PositiveInt = 4096) -> None:
        self.scorer, self.model, self.batch, self.queue = scorer, model, batch, queue
        self.draining = False
        self.scored_total = self.batches_total = self.refused_total = 0
        self._requests: deque[deque[_Item]] = deque()
        self._thread = ThreadPoolExecutor(1, "verifier")
        self._runner: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Conversations that wait for the model; also read by the thread of the metrics."""
        return sum(map(len, tuple(self._requests)))

    @property
    def busy(self) -> bool:
        """True while conversations are scored."""
        return self._runner is not None and not self._runner.done()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:  # noqa: N802
        return pb.DescribeReply(model=self.model, max_conversations=MAX_BATCH, max_characters=MAX_CHARACTERS)

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreReply:  # noqa: N802 (of the protocol)
        try:
            conversations = _conversations(request)
        except RemoteError as error:
            return await self._refuse(context, Code.INVALID_ARGUMENT, str(error))
        if self.draining:
            return await self._refuse(context, Code.UNAVAILABLE, "the verifier is going down; ask another")
        waiting = self.waiting
        if waiting and waiting + len(conversations) > self.queue:
            text = f"{waiting} conversations are waiting, and {self.queue} may; ask again later"
            return await self._refuse(context, Code.RESOURCE_EXHAUSTED, text)
        loop = asyncio.get_running_loop()
        items = deque((conversation, loop.create_future()) for conversation in conversations)
        scores = [score for _, score in items]
        self._requests.append(items)
        if not self.busy:
            self._runner = asyncio.ensure_future(self._run())
        try:
            results: list[pb.Score] = await asyncio.gather(*scores)
        except ConfigurationError as error:
            return await self._refuse(context, Code.INVALID_ARGUMENT, _error_text(error))
        except Exception as error:  # one request does not end the server
            logger.exception("conversations could not be scored")
            return await self._refuse(context, Code.INTERNAL, _error_text(error))
        finally:
            items.clear()  # of a request that failed, or whose caller has gone or is late
            for score in scores:
                score.cancel()
        for reply, item in zip(results, request.conversations, strict=True):
            reply.id = item.id
        return pb.ScoreReply(scores=results, model=self.model)

    def close(self) -> None:
        """Stop scoring; may be called twice."""
        self.draining = True
        if self._runner is not None:
            self._runner.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _refuse(self, context: Any, code: grpc.StatusCode, text: str) -> Any:
        self.refused_total += 1
        await refuse(context, code, text)

    async def _run(self) -> None:
        """Score until no request waits."""
        while batch := self._next_batch():
            await self._score(batch)

    def _next_batch(self) -> list[_Item]:
        """Return conversations of the current requests, one of each in turn."""
        batch: list[_Item] = []
        while self._requests and len(batch) < self.batch:
            request = self._requests.popleft()
            if request:
                batch.append(request.popleft())
                self._requests.append(request)
        return batch

    async def _score(self, batch: Sequence[_Item]) -> None:
        """Score a batch; if that fails, one by one, so that no conversation fails the requests of others."""
        self.batches_total += 1
        conversations = [conversation for conversation, _ in batch]
        try:
            scores = await asyncio.get_running_loop().run_in_executor(self._thread, self._scores, conversations)
        except Exception as error:  # a model may raise anything on a conversation
            for item in batch:
                if item[1].done():
                    continue
                if len(batch) > 1:
                    await self._score([item])
                else:
                    item[1].set_exception(error)
            return
        self.scored_total += len(batch)
        for (_, score), result in zip(batch, scores, strict=True):
            if not score.done():
                score.set_result(result)

    def _scores(self, conversations: Sequence[Conversation]) -> list[pb.Score]:
        """Return the scores; runs on the thread of the model."""
        scores = self.scorer.score_batch(conversations)
        if len(scores) != len(conversations):
            raise RemoteError(f"the scorer gave {len(scores)} scores for {len(conversations)} conversations")
        return [
            pb.Score(
                probability=round(as_probability(score, self.scorer.probability), DECIMALS), truncated=score.truncated
            )
            for score in scores
        ]


def _conversations(request: pb.ScoreRequest) -> list[Conversation]:
    """Return the conversations of a request.

    Raises:
        RemoteError: there are too many, one is empty, too long or malformed, or an id comes twice.
    """
    count = len(request.conversations)
    if count > MAX_BATCH:
        raise RemoteError(f"{count} conversations in one request; at most {MAX_BATCH} are taken")
    if len({item.id for item in request.conversations}) < count:
        raise RemoteError("two conversations of the request have the same id; number them")
    conversations: list[Conversation] = []
    for index, item in enumerate(request.conversations):
        messages = from_json(item.messages, tuple[Message, ...])
        size = sum(len(message.content) for message in messages)
        if not messages:
            raise RemoteError(f"conversation {index} has no messages")
        if size > MAX_CHARACTERS:
            raise RemoteError(f"conversation {index} has {size} characters; at most {MAX_CHARACTERS} are taken")
        conversations.append(messages)
    return conversations


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
