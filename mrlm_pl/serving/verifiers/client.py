"""A verifier on a server, used like any other scorer of texts: retries on other servers, and checks of the answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import grpc

from mrlm_pl.concurrency.calls import together
from mrlm_pl.errors import DataError, RemoteError
from mrlm_pl.grouping import in_parts
from mrlm_pl.reward_models.scorer import Conversation, TextScore, TextScorer
from mrlm_pl.serving.transport.addresses import Servers, addresses_of
from mrlm_pl.serving.transport.codec import to_json
from mrlm_pl.serving.transport.connection import Address, Connection, StatusError, submit
from mrlm_pl.serving.transport.security import Identity
from mrlm_pl.serving.verifiers import verifier_pb2 as pb
from mrlm_pl.serving.verifiers import verifier_pb2_grpc
from mrlm_pl.settings import between, positive

Code = grpc.StatusCode
MAX_BATCH = 1024
MAX_CHARACTERS = 1 << 20
"""Longest conversation."""

REQUEST_CHARACTERS = 1 << 20
"""A request is closed at this size, so that it fits into a message whatever the alphabet."""

AT_ONCE = 4
"""Requests of one call in flight."""

_AGAIN = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.CANCELLED)
"""Refusals that a repetition may change."""

_ids = itertools.count(1)


class VerifierClient(TextScorer):
    """Probabilities from ``mrlm serve --verifier``. All clients of a process, and copies of them, share a connection.

    Requests to a server that cannot be reached, is late or is full are repeated for ``patience_seconds``, with several
    addresses at the next one. Repetitions change nothing; only the pauses between them are random.

    Args:
        address: ``HOST:PORT`` of a server, or of several with the same model.
        token_file: file with the token; without it, the environment variable ``MRLM_TOKEN``.
        tls_authority: PEM file of the certificates that sign the servers'; with it the connection is encrypted.
        tls_certificate: PEM file of this client's certificate, where servers want one.
        tls_key: PEM file of its key.
        timeout_seconds: deadline of one attempt; the next one has twice the time.
        patience_seconds: deadline of a score; set the data module's ``step_timeout`` above it.
        batch_size: conversations in one request.

    Raises:
        ConfigurationError: no address is given, or one is not ``HOST:PORT``; a number is out of range; a file cannot be
            read.
    """

    def __init__(
        self,
        address: str | list[str],
        token_file: str | None = None,
        tls_authority: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        timeout_seconds: float = 30.0,
        patience_seconds: float = 300.0,
        batch_size: int = 64,
    ) -> None:
        positive("verifier client: ", timeout_seconds=timeout_seconds, patience_seconds=patience_seconds)
        between(1, MAX_BATCH, "verifier client: ", batch_size=batch_size)
        self.addresses = addresses_of(address, token_file, Identity(tls_certificate, tls_key, tls_authority))
        self.timeout_seconds, self.patience_seconds = timeout_seconds, patience_seconds
        self.batch_size = batch_size

    @property
    def probability(self) -> bool:
        """True: the server has applied the sigmoid."""
        return True

    def score(self, messages: Conversation) -> TextScore:
        """Return the probability of one conversation; see :meth:`score_batch`."""
        return self.score_batch([messages])[0]

    def score_batch(self, conversations: Sequence[Conversation]) -> list[TextScore]:
        """Return the probabilities, in order, each in [0, 1].

        Raises:
            RemoteError: no server answered in time, one refused, or its answer is not one to these conversations; the
                message names the server.
            DataError: a conversation is empty or longer than servers take.
        """
        for number, messages in enumerate(conversations):
            if not messages or _characters(messages) > MAX_CHARACTERS:
                raise DataError(
                    f"conversation {number} has {len(messages)} messages with {_characters(messages)} characters; a "
                    f"verifier takes one message or more, and up to {MAX_CHARACTERS} characters"
                )
        parts = in_parts(conversations, _characters, self.batch_size, REQUEST_CHARACTERS)
        return submit(self._all_scores(list(parts))).result()

    async def _all_scores(self, parts: Sequence[Sequence[Conversation]]) -> list[TextScore]:
        """Return the scores of several requests, in order; runs on the loop of all connections."""
        allowed = asyncio.Semaphore(AT_ONCE)

        async def one(part: Sequence[Conversation]) -> list[TextScore]:
            async with allowed:
                return await self._scores(part)

        return [score for scores in await together(map(one, parts)) for score in scores]

    async def _scores(self, conversations: Sequence[Conversation]) -> list[TextScore]:
        """Return the scores of one request from the first server that answers."""
        request = pb.ScoreRequest(
            conversations=[pb.Conversation(id=next(_ids), messages=to_json(messages)) for messages in conversations]
        )
        allowed = self.timeout_seconds

        async def ask(server: Connection, left: float) -> pb.ScoreReply:
            nonlocal allowed
            seconds = min(allowed, max(left, 0.05))
            try:
                return await server.call("Score", request, seconds, verifier_pb2_grpc.VerifierServiceStub, patience=0)
            except StatusError as error:
                if error.code is Code.DEADLINE_EXCEEDED:
                    allowed *= 2  # an overloaded server may need longer
                raise

        def refusal(error: StatusError, address: Address) -> Exception:
            return RemoteError(f"the verifier at {address.target} refuses: {error}")

        servers = Servers(self.addresses, "the verifier", refusal)
        late = (
            f"no verifier at {servers.targets} gave scores within {self.patience_seconds:g} s; start it again "
            "with `mrlm serve --verifier ...`, or check the address and whether both sides use TLS"
        )
        reply, address = await servers.first_answer(ask, self.patience_seconds, _AGAIN, late)
        return _checked(reply, request, address.target)


def _characters(messages: Conversation) -> int:
    return sum(len(message.content) for message in messages)


def _checked(reply: pb.ScoreReply, request: pb.ScoreRequest, target: str) -> list[TextScore]:
    """Return the scores of a reply that has one in [0, 1] for each conversation, in order.

    Raises:
        RemoteError: it has not.
    """
    if len(reply.scores) != len(request.conversations):
        raise RemoteError(
            f"the verifier at {target} gave {len(reply.scores)} scores for {len(request.conversations)} conversations"
        )
    for place, (score, conversation) in enumerate(zip(reply.scores, request.conversations, strict=True)):
        if score.id != conversation.id:
            raise RemoteError(
                f"the verifier at {target} gave score {place} to conversation {score.id}, not to {conversation.id}; "
                "the order of its answers cannot be trusted"
            )
        if not 0 <= score.probability <= 1:
            raise RemoteError(
                f"the verifier at {target} gave the score {score.probability!r}, and scores are in [0, 1]; "
                "check its model"
            )
    return [TextScore(score.probability, score.truncated) for score in reply.scores]
