"""The service: scores conversations of many callers in one call of the model, on one thread beside the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, RemoteError
from mrlm_pl.grouping import grouped
from mrlm_pl.reward_models.scorer import Conversation, TextScorer, as_probability
from mrlm_pl.serving.transport.codec import from_json
from mrlm_pl.serving.transport.connection import refuse
from mrlm_pl.serving.verifiers import verifier_pb2 as pb
from mrlm_pl.serving.verifiers import verifier_pb2_grpc
from mrlm_pl.serving.verifiers.asking import MAX_BATCH, MAX_CHARACTERS
from mrlm_pl.settings import at_least

logger = logging.getLogger(__name__)

Code = grpc.StatusCode
SERVICE = pb.DESCRIPTOR.services_by_name["VerifierService"].full_name
DECIMALS = 6
"""Decimals of a probability; further ones depend on the conversations that share a batch."""


@dataclass(frozen=True)
class ScoreLimits:
    """Limits of a service.

    Args:
        batch: conversations in one call of the model.
        queue: longest queue of conversations.

    Raises:
        ConfigurationError: a value is below 1.
    """

    batch: int = 64
    queue: int = 4096

    def __post_init__(self) -> None:
        at_least(1, "verifier: ", batch=self.batch, queue=self.queue)


class _Request:
    """The conversations of one call and their scores."""

    def __init__(self, conversations: Sequence[Conversation], deadline: float | None) -> None:
        self.conversations, self.deadline = conversations, deadline
        self.next = 0
        self.scores: dict[int, pb.Score] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def waiting(self) -> int:
        """Number of conversations that wait for the model."""
        return 0 if self.done.done() else len(self.conversations) - self.next


_Item = tuple[_Request, int]


class VerifierService(verifier_pb2_grpc.VerifierServiceServicer):
    """Score with one scorer; waiting requests share batches, one conversation of each in turn.

    Requests that are cancelled or late are not scored any further. All methods run on one event loop.

    Args:
        scorer: is called on a thread, never twice at the same time.
        model: its name.
        limits: of batches and queue.
    """

    def __init__(self, scorer: TextScorer, model: str, limits: ScoreLimits = ScoreLimits()) -> None:
        self.scorer, self.model, self.limits = scorer, model, limits
        self.draining = False
        self.scored_total = self.batches_total = self.refused_total = 0
        self._requests: deque[_Request] = deque()
        self._thread = ThreadPoolExecutor(1, "verifier")
        self._runner: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Conversations that wait for the model; also read by the thread of the metrics."""
        return sum(request.waiting for request in tuple(self._requests))

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
        if not conversations:
            return pb.ScoreReply()
        if self.draining:
            return await self._refuse(context, Code.UNAVAILABLE, "the verifier is going down; ask another")
        waiting = self.waiting
        if waiting and waiting + len(conversations) > self.limits.queue:
            text = f"{waiting} conversations are waiting, and {self.limits.queue} may; ask again later"
            return await self._refuse(context, Code.RESOURCE_EXHAUSTED, text)
        seconds = context.time_remaining()
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        asked = _Request(conversations, deadline)
        self._requests.append(asked)
        if not self.busy:
            self._runner = asyncio.ensure_future(self._run())
        try:
            await asked.done
        except asyncio.CancelledError:
            asked.done.cancel()  # the caller has gone
            raise
        except ConfigurationError as error:
            return await self._refuse(context, Code.INVALID_ARGUMENT, _told(error))
        except TimeoutError as error:
            return await self._refuse(context, Code.DEADLINE_EXCEEDED, str(error))
        except Exception as error:
            logger.exception("conversations could not be scored")
            return await self._refuse(context, Code.INTERNAL, _told(error))
        for number, item in enumerate(request.conversations):
            asked.scores[number].id = item.id
        return pb.ScoreReply(scores=[asked.scores[number] for number in range(len(conversations))])

    def close(self) -> None:
        """Stop scoring and cancel waiting requests; may be called twice."""
        self.draining = True
        for request in self._requests:
            request.done.cancel()
        if self._runner is not None:
            self._runner.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _refuse(self, context: Any, code: grpc.StatusCode, text: str) -> Any:
        self.refused_total += 1
        await refuse(context, code, text)

    async def _run(self) -> None:
        """Score until no request waits."""
        while batch := self._next_batch():
            await self._settle(batch)

    def _next_batch(self) -> list[_Item]:
        """Return conversations of the current requests, one of each in turn."""
        now = asyncio.get_running_loop().time()
        batch: list[_Item] = []
        while self._requests and len(batch) < self.limits.batch:
            request = self._requests.popleft()
            if request.deadline is not None and now > request.deadline and not request.done.done():
                request.done.set_exception(TimeoutError("the deadline passed before all conversations were scored"))
            if request.waiting:
                batch.append((request, request.next))
                request.next += 1
                self._requests.append(request)
        return batch

    async def _score(self, batch: Sequence[_Item]) -> None:
        """Score a batch, and answer the requests that are complete.

        Raises:
            Exception: of the scorer; no request of the batch is answered then.
        """
        conversations = [request.conversations[number] for request, number in batch]
        self.batches_total += 1
        scores = await asyncio.get_running_loop().run_in_executor(self._thread, self._scores, conversations)
        self.scored_total += len(batch)
        for (request, number), score in zip(batch, scores, strict=True):
            request.scores[number] = score
            if len(request.scores) == len(request.conversations) and not request.done.done():
                request.done.set_result(None)

    async def _settle(self, batch: Sequence[_Item]) -> None:
        """Score a batch; if that fails, request by request, so that one does not fail the others."""
        try:
            await self._score(batch)
        except Exception as error:
            shares = grouped((item[0], item) for item in batch)
            for request, share in shares.items():
                if not request.done.done():
                    if len(shares) > 1:
                        await self._settle(share)
                    else:
                        request.done.set_exception(error)

    def _scores(self, conversations: Sequence[Conversation]) -> list[pb.Score]:
        """Return the scores; runs on the thread of the model."""
        found = self.scorer.score_batch(conversations)
        if len(found) != len(conversations):
            raise RemoteError(f"the scorer gave {len(found)} scores for {len(conversations)} conversations")
        return [
            pb.Score(
                probability=round(as_probability(score, self.scorer.probability), DECIMALS), truncated=score.truncated
            )
            for score in found
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
    found: list[Conversation] = []
    for place, item in enumerate(request.conversations):
        messages = from_json(item.messages, tuple[Message, ...])
        size = sum(len(message.content) for message in messages)
        if not messages:
            raise RemoteError(f"conversation {place} has no messages")
        if size > MAX_CHARACTERS:
            raise RemoteError(f"conversation {place} has {size} characters; at most {MAX_CHARACTERS} are taken")
        found.append(messages)
    return found


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
