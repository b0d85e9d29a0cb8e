"""Policies behind gRPC: the service over an engine, and the engine that calls it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import grpc

from mrlm_pl.engines.base import Engine, Sample, SampleRequest, Sampling
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.connection import refuse

logger = logging.getLogger(__name__)

MAX_REQUESTS = 1024
"""Largest number of turns in one call."""


class PolicyService(environment_pb2_grpc.PolicyServiceServicer):
    """Sample for callers, one call after the other, each as one batch of the engine.

    Requests have seeds, so a repeated request gives the same tokens.

    Args:
        engine: with the policies loaded.
        policies: name of the model behind each policy.
        vocabularies: digest of each policy's vocabulary, where it is known.
    """

    def __init__(
        self, engine: Engine, policies: Mapping[str, str], vocabularies: Mapping[str, str] | None = None
    ) -> None:
        self.engine, self.policies, self.vocabularies = engine, dict(policies), dict(vocabularies or {})
        self._one_at_a_time = asyncio.Lock()

    async def Sample(self, request: pb.SampleBatch, context: Any) -> pb.SampleReplies:  # noqa: N802 (of the protocol)
        if len(request.requests) > MAX_REQUESTS:
            text = f"{len(request.requests)} turns in one call; at most {MAX_REQUESTS} are allowed"
            return await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        if unknown := sorted({item.policy for item in request.requests} - self.policies.keys()):
            text = f"there is no policy {unknown[0][:100]!r} here; there are {', '.join(sorted(self.policies))}"
            return await refuse(context, grpc.StatusCode.NOT_FOUND, text)
        try:
            requests = [_from_request(item) for item in request.requests]
            async with self._one_at_a_time:
                samples = await self.engine.sample(requests)
        except (ConfigurationError, EngineError, ValueError) as error:
            return await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"{type(error).__name__}: {error}")
        except Exception as error:  # clients repeat statuses that are no refusals
            logger.exception("turns could not be sampled")
            return await refuse(context, grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        return pb.SampleReplies(samples=[_to_sample(sample) for sample in samples])

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:  # noqa: N802
        if request.session_prefix:
            self.engine.release(request.session_prefix)
        return pb.ReleaseReply()

    async def DescribePolicies(  # noqa: N802
        self, request: pb.DescribePoliciesRequest, context: Any
    ) -> pb.DescribePoliciesReply:
        descriptions = [
            pb.PolicyDescription(name=name, model=model, vocabulary=self.vocabularies.get(name, ""))
            for name, model in self.policies.items()
        ]
        return pb.DescribePoliciesReply(policies=descriptions)


def _from_request(request: pb.SampleRequest) -> SampleRequest:
    sampling = request.sampling
    return SampleRequest(
        token_ids=tuple(request.token_ids),
        policy=request.policy,
        seed=int(request.seed),
        sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens),
        stop_ids=tuple(request.stop_ids),
        session=request.session,
    )


def _to_sample(sample: Sample) -> pb.Sample:
    return pb.Sample(
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        finish_reason=sample.finish_reason,
        version=sample.version,
        engine=sample.engine,
    )
