"""A client's requests to verifier servers: retries on other servers, and checks of the answers."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from mrlm_pl.concurrency.calls import together
from mrlm_pl.errors import DataError, RemoteError
from mrlm_pl.grouping import split_by_size
from mrlm_pl.reward_models.scorer import Conversation, TextScore
from mrlm_pl.serving.transport.addresses import Servers, warn_of_difference
from mrlm_pl.serving.transport.codec import to_json
from mrlm_pl.serving.transport.connection import Address, Connection, StatusError
from mrlm_pl.serving.verifiers import verifier_pb2 as pb
from mrlm_pl.serving.verifiers import verifier_pb2_grpc

Code = grpc.StatusCode
MAX_BATCH = 1024
MAX_CHARACTERS = 1 << 20
"""Maximum number of characters of a conversation."""

REQUEST_CHARACTERS = 1 << 20
"""A request is closed at this size, so that it fits into a message whatever the alphabet."""

AT_ONCE = 4
"""Maximum number of concurrent requests of one call."""

_AGAIN = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.CANCELLED)
"""Refusals that a repetition may change."""

_ids = itertools.count(1)


@dataclass(frozen=True)
class Terms:
    """Servers and deadlines of a client.

    Args:
        addresses: addresses of servers with the same model.
        timeout_seconds: deadline of one attempt, doubled after each late one.
        patience_seconds: deadline of a request, retries included.
        batch_size: maximum number of conversations in one request.
    """

    addresses: tuple[Address, ...]
    timeout_seconds: float
    patience_seconds: float
    batch_size: int


async def request_scores(terms: Terms, conversations: Sequence[Conversation]) -> list[TextScore]:
    """Return the scores of all conversations, in order; runs on the loop of all connections.

    Raises:
        RemoteTimeoutError: no server answered in time.
        RemoteError: a server rejected the call, or its answer is invalid.
        DataError: a conversation is empty or too long.
    """
    slots = asyncio.Semaphore(AT_ONCE)

    async def score_chunk(chunk: list[Conversation]) -> list[TextScore]:
        async with slots:
            return await _scores(terms, chunk)

    for number, messages in enumerate(conversations):
        if not messages or _characters(messages) > MAX_CHARACTERS:
            raise DataError(
                f"conversation {number} has {len(messages)} messages with {_characters(messages)} characters; a "
                f"verifier takes one message or more, and up to {MAX_CHARACTERS} characters"
            )
    chunks = split_by_size(conversations, _characters, terms.batch_size, REQUEST_CHARACTERS)
    return [score for scores in await together(map(score_chunk, chunks)) for score in scores]


def _characters(messages: Conversation) -> int:
    return sum(len(message.content) for message in messages)


async def _scores(terms: Terms, conversations: Sequence[Conversation]) -> list[TextScore]:
    """Return the scores of one request from the first server that answers."""
    request = pb.ScoreRequest(
        conversations=[pb.Conversation(id=next(_ids), messages=to_json(messages)) for messages in conversations]
    )
    attempt_seconds = terms.timeout_seconds

    async def ask(server: Connection, left: float) -> pb.ScoreReply:
        nonlocal attempt_seconds
        seconds = min(attempt_seconds, max(left, 0.05))
        try:
            return await server.call("Score", request, seconds, verifier_pb2_grpc.VerifierServiceStub, patience=0)
        except StatusError as error:
            if error.code is Code.DEADLINE_EXCEEDED:
                attempt_seconds *= 2  # an overloaded server may need longer
            raise

    def refusal(error: StatusError, address: Address) -> Exception:
        return RemoteError(f"the verifier at {address.target} refuses: {error}")

    servers = Servers(terms.addresses, "the verifier", refusal)
    late = (
        f"no verifier at {servers.targets} gave scores within {terms.patience_seconds:g} s; start it again "
        "with `mrlm serve --verifier ...`, or check the address and whether both sides use TLS"
    )
    reply, address = await servers.first_answer(ask, terms.patience_seconds, _AGAIN, late)
    fault = f"scores with {reply.model}, another model than"
    warn_of_difference(terms.addresses, address.target, reply.model, fault)
    return _check_scores(reply, request, address.target)


def _check_scores(reply: pb.ScoreReply, request: pb.ScoreRequest, target: str) -> list[TextScore]:
    """Return the scores of a reply that has one in [0, 1] for each conversation, in order.

    Raises:
        RemoteError: the reply has other scores.
    """
    if len(reply.scores) != len(request.conversations):
        raise RemoteError(
            f"the verifier at {target} gave {len(reply.scores)} scores for {len(request.conversations)} conversations"
        )
    for index, (score, conversation) in enumerate(zip(reply.scores, request.conversations, strict=True)):
        if score.id != conversation.id:
            raise RemoteError(
                f"the verifier at {target} gave score {index} to conversation {score.id}, not to {conversation.id}; "
                "the order of its answers cannot be trusted"
            )
        if not (math.isfinite(score.probability) and 0 <= score.probability <= 1):
            raise RemoteError(
                f"the verifier at {target} gave the score {score.probability!r}, and scores are in [0, 1]; "
                "check its model"
            )
    return [TextScore(score.probability, score.truncated) for score in reply.scores]
