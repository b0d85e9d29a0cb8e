"""A verifier on a server, used like any other scorer of texts. gRPC is imported when a client is made."""

from __future__ import annotations

from collections.abc import Sequence

from mrlm_pl.reward_models.scorer import Conversation, TextScore, TextScorer
from mrlm_pl.settings import PositiveFloat, between


class VerifierClient(TextScorer):
    """Probabilities from ``mrlm serve --verifier``. All clients of a process, and copies of them, share a connection.

    Requests to a server that cannot be reached, is late or is full are repeated for ``patience_seconds``, with several
    addresses at the next one. Repetitions change nothing; only the pauses between them are random.

    Args:
        address: ``HOST:PORT`` of a server, or of several with the same model.
        token_file: file with the token; without it, the environment variable ``MRLM_TOKEN``.
        tls_authority: PEM file of the certificates that sign the servers'; with it the connection is encrypted.
        tls_certificate: PEM file of this client's certificate, where servers require one.
        tls_key: PEM file of the key of this certificate.
        timeout_seconds: deadline of one attempt; the next one has twice the time.
        patience_seconds: deadline of a score; set the data module's ``step_timeout`` above it.
        batch_size: maximum number of conversations in one request.

    Raises:
        ConfigurationError: no address is given, or one is not ``HOST:PORT``; a number is out of range; a file cannot be
            read.
    """

    probability = True  # the server has applied the sigmoid

    def __init__(
        self,
        address: str | list[str],
        token_file: str | None = None,
        tls_authority: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        timeout_seconds: PositiveFloat = 30.0,
        patience_seconds: PositiveFloat = 300.0,
        batch_size: int = 64,
    ) -> None:
        from mrlm_pl.serving.transport.addresses import addresses_of
        from mrlm_pl.serving.transport.security import Identity
        from mrlm_pl.serving.verifiers.asking import MAX_BATCH, Terms

        between(1, MAX_BATCH).check("VerifierClient: ", batch_size=batch_size)
        identity = Identity(tls_certificate, tls_key, tls_authority)
        self.terms = Terms(
            addresses_of(address, token_file, identity), float(timeout_seconds), float(patience_seconds), batch_size
        )

    def score(self, messages: Conversation) -> TextScore:
        """Return the probability of one conversation; see :meth:`score_batch`."""
        return self.score_batch([messages])[0]

    def score_batch(self, conversations: Sequence[Conversation]) -> list[TextScore]:
        """Return the probabilities, in order, each in [0, 1].

        Raises:
            RemoteError: no server answered in time, one rejected the call, or its answer does not fit the
                conversations; the message names the server.
            DataError: a conversation is empty or longer than servers take.
        """
        from mrlm_pl.serving.transport.connection import submit
        from mrlm_pl.serving.verifiers.asking import request_scores

        return submit(request_scores(self.terms, list(conversations))).result() if conversations else []
