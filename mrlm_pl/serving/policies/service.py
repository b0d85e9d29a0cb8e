"""Policies behind gRPC: the service over an engine, and the engine that calls it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc

from mrlm_pl.engines.base import Engine, SampleRequest, Sampling
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.codec import to_message
from mrlm_pl.serving.transport.connection import refuse

logger = logging.getLogger(__name__)

MAX_REQUESTS = 1024
"""Largest number of turns in one call."""


class PolicyService(environment_pb2_grpc.PolicyServiceServicer):
    """Sample for callers, one call after the other, each as one batch of the engine.

    Requests have seeds, so a repeated request gives the same tokens.

    Args:
        engine: engine with the policies loaded.
        policies: descriptions of the policies.
    """

    def __init__(self, engine: Engine, policies: Sequence[pb.PolicyDescription]) -> None:
        self.engine, self.policies = engine, {policy.name: policy for policy in policies}
        self._one_at_a_time = asyncio.Lock()

    async def Sample(self, request: pb.SampleBatch, context: Any) -> pb.SampleReplies:  # noqa: N802 (of the protocol)
        try:
            if len(request.requests) > MAX_REQUESTS:
                raise EngineError(f"{len(request.requests)} turns in one call; at most {MAX_REQUESTS} are allowed")
            requests = [self._read(item) for item in request.requests]
            async with self._one_at_a_time:
                samples = await self.engine.sample(requests)
        except (ConfigurationError, EngineError, ValueError) as error:
            return await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception as error:  # clients repeat statuses that are no refusals
            logger.exception("turns could not be sampled")
            return await refuse(context, grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        return pb.SampleReplies(samples=[to_message(pb.Sample, sample) for sample in samples])

    def _read(self, request: pb.SampleRequest) -> SampleRequest:
        name, policy = request.policy, self.policies.get(request.policy)
        if policy is None:
            raise EngineError(f"there is no policy {name[:100]!r} here; there are {', '.join(sorted(self.policies))}")
        if request.weights not in ("", policy.weights):
            raise EngineError(
                f"policy {name!r} has other weights or another precision than at the caller's start; "
                f"serve those again, not {policy.model!r}, or start the caller's run again"
            )
        sampling = request.sampling
        return SampleRequest(
            token_ids=tuple(request.token_ids),
            policy=request.policy,
            seed=int(request.seed),
            sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens),
            stop_ids=tuple(request.stop_ids),
            session=request.session,
        )

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:  # noqa: N802
        if request.session_prefix:
            self.engine.release(request.session_prefix)
        return pb.ReleaseReply()

    async def DescribePolicies(  # noqa: N802
        self, request: pb.DescribePoliciesRequest, context: Any
    ) -> pb.DescribePoliciesReply:
        return pb.DescribePoliciesReply(policies=self.policies.values())
