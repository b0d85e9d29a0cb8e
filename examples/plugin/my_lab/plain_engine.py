"""An engine: one request at a time, one forward pass per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mrlm_pl.engines import Engine, Sample, SampleRequest
from mrlm_pl.errors import EngineError


class PlainEngine(Engine):
    """Sample with the model's own forward pass, without a cache."""

    def __init__(self) -> None:
        self.models: dict[str, tuple[Any, int]] = {}

    @property
    def holds_weights(self) -> bool:
        """Return False: the engine uses the learner's module, whose weights change with every update."""
        return False

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Take a ``transformers`` causal LM as the current weights of a policy."""
        self.models[policy] = weights, version

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request, in order."""
        return [self.generate(request) for request in requests]

    @torch.no_grad()
    def generate(self, request: SampleRequest) -> Sample:
        """Sample one turn; all randomness comes from the request's seed."""
        if request.policy not in self.models:
            raise EngineError(f"policy {request.policy!r} is not loaded; there are: {', '.join(self.models) or 'none'}")
        if request.sampling.top_p < 1 or request.sampling.top_k:
            raise EngineError("PlainEngine samples from the whole distribution; set top_p to 1 and top_k to 0")
        model, version = self.models[request.policy]
        generator = torch.Generator().manual_seed(request.seed % 2**63)
        limit = request.limit(model.config.max_position_embeddings)
        ids, logprobs = list(request.token_ids), list[float]()
        while len(logprobs) < limit and (not logprobs or ids[-1] not in request.stop_ids):
            logits = model(torch.tensor([ids], device=model.device)).logits[0, -1].float().cpu()
            logp = torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1)
            greedy = request.sampling.temperature == 0
            token = int(logp.argmax() if greedy else torch.multinomial(logp.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(logp[token]))
        sampled = tuple(ids[len(request.token_ids) :])
        stopped = sampled[-1] in request.stop_ids
        return Sample(sampled, tuple(logprobs), "stop" if stopped else "length", version, "plain")
