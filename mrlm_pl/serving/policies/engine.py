"""An engine whose policies are on a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

import grpc

from mrlm_pl.engines.base import Engine, Sample, SampleRequest
from mrlm_pl.errors import EngineError, RemoteError
from mrlm_pl.grouping import split_by_size
from mrlm_pl.serving.policies.service import MAX_REQUESTS
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.addresses import Servers
from mrlm_pl.serving.transport.connection import Address, RefusalError, StatusError, connection, submit
from mrlm_pl.serving.transport.security import Identity

logger = logging.getLogger(__name__)

_STUB = environment_pb2_grpc.PolicyServiceStub
NOTICE_SECONDS = 5.0
"""Seconds without an answer after which a message says who is waited for."""

Code = grpc.StatusCode
MAX_TOKENS = 1 << 20
"""Most tokens of a call, contexts and replies: a message of 16 MiB holds them at the 11 bytes of a sampled token."""


class RemoteEngine(Engine):
    """An engine whose policies are on a server (``mrlm serve --policies NAME=MODEL``); their weights stay as they are.

    Args:
        address: ``HOST:PORT``.
        token_file: file with the token; without it, the environment variable ``MRLM_TOKEN``.
        identity: for TLS.
        seconds: deadline of one call, retries included.
    """

    def __init__(
        self, address: str, token_file: str | None = None, identity: Identity | None = None, seconds: float = 300.0
    ) -> None:
        self.address = Address(address, token_file, identity or Identity())
        self.seconds = seconds

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request; see :meth:`Engine.sample`.

        Raises:
            EngineError: the server refuses the requests.
            RemoteTimeoutError: the server does not answer.
            RemoteError: its answer is not of the protocol.
        """
        samples: list[Sample] = []
        for chunk in split_by_size(requests, _tokens, MAX_REQUESTS, MAX_TOKENS):
            batch = pb.SampleBatch(requests=[_to_request(request) for request in chunk])
            reply = await asyncio.wrap_future(submit(self._ask("Sample", batch)))
            samples += [_from_sample(sample, self.address.target) for sample in reply.samples]
        if len(samples) != len(requests):
            raise RemoteError(f"{self.address.target} answered {len(requests)} turns with {len(samples)} samples")
        return samples

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Raise: the weights are the server's.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"policy {policy!r} is on {self.address.target}; its weights cannot be set from here")

    def precision(self, policy: str) -> str | None:
        """Return ``unknown``, since servers do not report it; see :meth:`Engine.precision`."""
        return "unknown"

    def described(self) -> dict[str, pb.PolicyDescription]:
        """Return the server's description of each of its policies.

        Raises:
            RemoteTimeoutError: the server does not answer.
        """
        answer = submit(self._ask("DescribePolicies", pb.DescribePoliciesRequest()))
        if not wait([answer], NOTICE_SECONDS).done:
            logger.warning(
                "no policies are served at %s yet; waiting for at most %g s", self.address.target, self.seconds
            )
        return {description.name: description for description in answer.result().policies}

    def release(self, session_prefix: str) -> None:
        """Forget caches, in the background; see :meth:`Engine.release`."""
        submit(self._release(session_prefix))

    async def _release(self, session_prefix: str) -> None:
        server, request = await connection(self.address), pb.ReleaseRequest(session_prefix=session_prefix)
        with suppress(StatusError):  # caches are bounded; a server that is gone has none
            await server.call("Release", request, self.seconds, _STUB, patience=0)

    async def _ask(self, method: str, request: Any) -> Any:
        """Return the reply; requests have seeds, so that a restarted server gives the same one."""

        def refusal(error: StatusError, address: Address) -> Exception:
            wrong = isinstance(error, RefusalError) and error.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
            target = address.target
            return EngineError(f"{target}: {error.text}") if wrong else RemoteError(f"{target}: {error}")

        late = (
            f"the policies at {self.address.target} did not answer within {self.seconds:g} s; start their server again "
            "with `mrlm serve --policies ...`"
        )
        servers = Servers([self.address], "the server of policies", refusal)
        reply, _ = await servers.first_answer(
            lambda server, left: server.call(method, request, max(left, 0.001), _STUB, patience=0),
            self.seconds,
            (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED),
            late,
        )
        return reply


def _tokens(request: SampleRequest) -> int:
    return len(request.token_ids) + request.sampling.max_tokens


def _to_request(request: SampleRequest) -> pb.SampleRequest:
    if request.offset or request.piece is not None:
        raise EngineError("policies on a server sample whole turns: a request may have neither offset nor piece")
    sampling = request.sampling
    return pb.SampleRequest(
        token_ids=request.token_ids,
        policy=request.policy,
        seed=str(request.seed),
        sampling=pb.Sampling(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, max_tokens=sampling.max_tokens
        ),
        stop_ids=request.stop_ids,
        session=request.session,
    )


def _from_sample(sample: pb.Sample, target: str) -> Sample:
    if sample.finish_reason not in ("stop", "length") or len(sample.token_ids) != len(sample.logprobs):
        raise RemoteError(
            f"{target} gave a sample that is not of the protocol: it ended by {sample.finish_reason!r:.40}"
        )
    return Sample(
        tuple(sample.token_ids),
        tuple(sample.logprobs),
        "stop" if sample.finish_reason == "stop" else "length",
        sample.version,
        sample.engine,
    )
