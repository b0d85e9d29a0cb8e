"""An engine whose policies are on a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
from mrlm_pl.serving.transport.codec import to_message
from mrlm_pl.serving.transport.connection import Address, RefusalError, StatusError, connection, submit
from mrlm_pl.serving.transport.security import Identity

_STUB = environment_pb2_grpc.PolicyServiceStub
Code = grpc.StatusCode
MAX_TOKENS = 1 << 20
"""Maximum tokens of a call, contexts and replies: a message of 16 MiB holds them at 11 bytes per sampled token."""


class RemoteEngine(Engine):
    """An engine whose policies are on a server (``mrlm serve --policies NAME=MODEL``); their weights stay as they are.

    Args:
        address: ``HOST:PORT`` of the server.
        token_file: file with the token; without it, the environment variable ``MRLM_TOKEN``.
        identity: keys for TLS.
        seconds: deadline of one call, retries included.
    """

    def __init__(
        self, address: str, token_file: str | None = None, identity: Identity | None = None, seconds: float = 300.0
    ) -> None:
        self.address = Address(address, token_file, identity or Identity())
        self.seconds = seconds
        self._weights: dict[str, str] = {}

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request; see :meth:`Engine.sample`.

        Raises:
            EngineError: the server rejects the requests.
            RemoteTimeoutError: the server does not answer.
            RemoteError: the server's answer does not follow the protocol.
        """
        samples: list[Sample] = []
        for chunk in split_by_size(requests, _tokens, MAX_REQUESTS, MAX_TOKENS):
            batch = pb.SampleBatch(requests=[_to_request(item, self._weights.get(item.policy, "")) for item in chunk])
            found = (await asyncio.wrap_future(submit(self._ask("Sample", batch)))).samples
            if len(found) != len(chunk):
                raise RemoteError(f"{self.address.target} answered {len(chunk)} turns with {len(found)} samples")
            samples += [_from_sample(*pair, self.address.target) for pair in zip(found, chunk, strict=True)]
        return samples

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Raise an error: the server keeps its weights.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"policy {policy!r} is on {self.address.target}; its weights cannot be set from here")

    def precision(self, policy: str) -> str | None:
        """Return ``unknown``, since servers do not report it; see :meth:`Engine.precision`."""
        return "unknown"

    def described(self) -> dict[str, pb.PolicyDescription]:
        """Return the server's description of each of its policies, whose weights later samples must be from.

        Raises:
            RemoteTimeoutError: the server does not answer.
        """
        policies = submit(self._ask("DescribePolicies", pb.DescribePoliciesRequest())).result().policies
        self._weights = {description.name: description.weights for description in policies}
        return {description.name: description for description in policies}

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
            wrong = isinstance(error, RefusalError) and error.code is Code.INVALID_ARGUMENT
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


def _to_request(request: SampleRequest, weights: str) -> pb.SampleRequest:
    if request.offset or request.chunk_tokens is not None:
        raise EngineError("policies on a server sample whole turns: a request may have neither offset nor chunk_tokens")
    sampling = to_message(pb.Sampling, request.sampling)
    return to_message(pb.SampleRequest, request, seed=str(request.seed), sampling=sampling, weights=weights)


def _from_sample(sample: pb.Sample, request: SampleRequest, target: str) -> Sample:
    tokens, logprobs, most = len(sample.token_ids), len(sample.logprobs), request.sampling.max_tokens
    if sample.finish_reason not in ("stop", "length") or tokens != logprobs or tokens > most:
        raise RemoteError(
            f"{target} gave a sample that is not of the protocol: {tokens} tokens of at most {most}, {logprobs} "
            f"log-probabilities, ended by {sample.finish_reason!r:.40}; update the server"
        )
    return Sample(
        tuple(sample.token_ids),
        tuple(sample.logprobs),
        "stop" if sample.finish_reason == "stop" else "length",
        sample.version,
        sample.engine,
    )
