"""The default engine: generates in this process, from the weights that are being trained."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from mrlm_pl.concurrency.compute_queue import ComputeQueue
from mrlm_pl.engines.base import Engine, Sample, SampleRequest
from mrlm_pl.engines.local.backend import Backend
from mrlm_pl.engines.local.cache_check import cache_use, warn_of_cache
from mrlm_pl.engines.local.generation import EngineStats, Generated, generate
from mrlm_pl.engines.local.llama import FusedDecoder
from mrlm_pl.engines.local.llama_weights import read_affine, unsupported_reason
from mrlm_pl.engines.local.session_cache import SessionCache
from mrlm_pl.engines.local.transformers_model import GenericModel
from mrlm_pl.errors import EngineError, NonFiniteError
from mrlm_pl.settings import at_least

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Loaded:
    model: PreTrainedModel
    backend: Backend
    window: int | None
    vocabulary: int
    version: int


class InProcessEngine(Engine):
    """Generates with the modules of this process, off the event loop: in the thread that waits in
    :meth:`compute_during`, and in a thread of its own while none does.

    The requests of one :meth:`sample` call are batched by policy; requests of different calls are not, so that a run's
    batches, and with them the rounding of its log-probabilities, do not depend on timing. Within a batch a context
    that several requests share is computed once, a context that extends an earlier turn of its session is computed from
    there on, and rows leave when they have finished. A request's tokens depend on its seed, context and sampling, and
    on its batch only through floating-point rounding.

    Llama, Qwen2, Qwen3 and Mistral models take a decode step of our own
    (:class:`~mrlm_pl.engines.local.llama.FusedDecoder`); all others their own ``forward``. A model's weights may be
    read where they are, so nothing may change them while :meth:`sample` runs, and every change needs a :meth:`load`;
    with ``own_weights`` they may change at any time, and :meth:`load` takes them over between two computations.

    Args:
        dtype: compute dtype of the projections and attention; None is the module's own. With a module in float32 and
            bfloat16 here, the precision is that of ``torch.autocast`` (norms and residuals in float32).
        max_batch_tokens: bound on the sum over a batch's rows of context and ``max_tokens``, which bounds the memory
            for keys and values; more requests are done in several batches.
        cache_bytes: bound on the keys and values kept between turns for sessions; 0 keeps none.
        fused: False lets every model use its own ``forward``.
        own_weights: generate from a copy of the weights, which takes the memory of another model.

    Raises:
        ConfigurationError: a bound is out of its range.
    """

    name = "in_process"

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        max_batch_tokens: int = 131_072,
        cache_bytes: int = 2**30,
        fused: bool = True,
        own_weights: bool = False,
    ) -> None:
        at_least(1, "", max_batch_tokens=max_batch_tokens)
        at_least(0, "", cache_bytes=cache_bytes)
        self._dtype = dtype
        self._max_batch_tokens = max_batch_tokens
        self._fused, self._own_weights = fused, own_weights
        self._loaded: dict[str, _Loaded] = {}
        self._sessions = SessionCache(cache_bytes)
        self._stats = EngineStats()
        self._work = ComputeQueue("mrlm-engine")
        self._closed = False

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made; a copy."""
        return replace(self._stats)

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Make the module's current weights those of ``policy``; returns when they are taken over.

        Args:
            policy: the name that requests use.
            weights: a ``transformers`` causal LM.
            version: number stored in every sample made from now on. The policy's sessions are forgotten.

        Raises:
            EngineError: ``weights`` is not such a module.
        """
        if not isinstance(weights, PreTrainedModel):
            raise EngineError(
                f"policy {policy!r}: the in-process engine loads a transformers PreTrainedModel, not a "
                f"{type(weights).__name__}"
            )
        self._open_work().run(self._load, policy, weights, version)

    def _load(self, policy: str, model: PreTrainedModel, version: int) -> None:
        self._sessions.drop_policy(policy)
        loaded = self._loaded.get(policy)
        if loaded is not None and loaded.model is model:
            loaded.backend.refresh()
            loaded.version = version
            return
        window = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        window = window if window and window > 0 else None  # -1 is how XLNet says that it has no bound
        vocabulary = len(read_affine(model.get_input_embeddings())[0])
        self._loaded[policy] = _Loaded(model, self._backend(policy, model), window, vocabulary, version)

    def _backend(self, policy: str, model: PreTrainedModel) -> Backend:
        dtype = self._dtype or model.dtype
        reason = unsupported_reason(model) if self._fused else "fused is off"
        if reason is None:
            return FusedDecoder(model, dtype, self._own_weights)
        generic = GenericModel(model, dtype, self._own_weights)
        found = cache_use(generic)
        generic.use = found.use
        warn_of_cache(model.config.model_type, found)
        logger.info("policy %r generates through its own forward (%s), %s", policy, reason, generic.use)
        return generic

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one :class:`~mrlm_pl.engines.base.Sample` per request, in order.

        Generation stops at the model's context window with finish reason ``length``.

        Raises:
            EngineError: a policy is not loaded, or a context is empty, holds an id outside the vocabulary or leaves no
                room in the model's window.
            NonFiniteError: the model gave logits from which no token can be drawn.
        """
        if not requests:
            return []
        given_up = threading.Event()
        try:
            return await asyncio.wrap_future(self._open_work().submit(self._sample, list(requests), given_up))
        except asyncio.CancelledError:
            given_up.set()
            raise

    @property
    def holds_weights(self) -> bool:
        """True if the engine has a copy of the weights."""
        return self._own_weights

    @property
    def takes_pieces(self) -> bool:
        """Requests may have an ``offset`` and a ``piece``."""
        return True

    def window(self, policy: str) -> int | None:
        """Return the longest context of the policy in tokens; None while it is not loaded or if it is unbounded."""
        loaded = self._loaded.get(policy)
        return None if loaded is None else loaded.window

    def precision(self, policy: str) -> str | None:
        """Return the ``dtype``; see :meth:`Engine.precision`."""
        return None if self._dtype is None else str(self._dtype).removeprefix("torch.")

    def compute_during(self, start: Callable[[], Future[T]]) -> T:
        """Return the result of the future that ``start`` gives; until then this thread does the work of :meth:`sample`.

        With a second computing thread, OpenMP keeps two teams of threads, more than there are cores, and puts them to
        sleep after every operation: generation beside training took 1.6 times as long on two cores.
        """
        return self._work.serve_during(start)

    def _sample(self, requests: list[SampleRequest], given_up: threading.Event) -> list[Sample]:
        limits = [self._limit(request) for request in requests]
        by_policy: dict[str, list[int]] = {}
        for r, request in enumerate(requests):
            by_policy.setdefault(request.policy, []).append(r)
        samples: dict[int, Sample] = {}
        for policy, indices in by_policy.items():
            loaded = self._loaded[policy]
            for batch in self._batches(requests, limits, indices):
                with torch.inference_mode(isinstance(loaded.backend, FusedDecoder)):
                    generated = generate(
                        loaded.backend,
                        [requests[r] for r in batch],
                        [limits[r] for r in batch],
                        self._sessions,
                        self._stats,
                        given_up,
                    )
                for r, out in zip(batch, generated, strict=True):
                    samples[r] = self._finish(policy, loaded.version, out)
        return [samples[r] for r in range(len(requests))]

    def _finish(self, policy: str, version: int, out: Generated) -> Sample:
        if not math.isfinite(sum(out.logprobs)):
            raise NonFiniteError(
                f"policy {policy!r} version {version} gave a log-probability that is not finite: its logits hold NaN "
                "or infinity; look at the learning rate and at the weights of the last checkpoint"
            )
        return Sample(tuple(out.token_ids), tuple(out.logprobs), out.finish_reason, version, self.name)

    def _limit(self, request: SampleRequest) -> int:
        """Return tokens that may be sampled for a request."""
        loaded = self._loaded.get(request.policy)
        if loaded is None:
            known = ", ".join(sorted(self._loaded)) or "none"
            raise EngineError(f"policy {request.policy!r} is not loaded (loaded: {known}); call load() first")
        if not request.token_ids:
            raise EngineError(f"a request for policy {request.policy!r} has an empty context; give at least one token")
        worst = max(request.token_ids) if min(request.token_ids) >= 0 else min(request.token_ids)
        if not 0 <= worst < loaded.vocabulary:
            raise EngineError(
                f"token id {worst} is outside the vocabulary of policy {request.policy!r}, which has "
                f"{loaded.vocabulary} entries; encode the context with that policy's tokenizer"
            )
        most = request.sampling.max_tokens - request.offset
        if most < 1 or request.offset < 0:
            raise EngineError(
                f"a request for policy {request.policy!r} has the offset {request.offset} in a turn of at most "
                f"{request.sampling.max_tokens} tokens; it must be 0 or above, and leave a token to sample"
            )
        if request.piece is not None:
            most = min(most, request.piece)
        if loaded.window is None:
            return most
        room = loaded.window - len(request.token_ids)
        if room < 1:
            raise EngineError(
                f"a context of {len(request.token_ids)} tokens leaves no room in the {loaded.window}-token window of "
                f"policy {request.policy!r}; shorten the conversation or use a model with a longer window"
            )
        return min(room, most)

    def _batches(self, requests: list[SampleRequest], limits: list[int], indices: list[int]) -> list[list[int]]:
        """``indices`` cut, in order, so that no batch but one of a single request exceeds the token bound."""
        batches: list[list[int]] = []
        size = 0
        for r in indices:
            tokens = len(requests[r].token_ids) + limits[r]
            if not batches or size + tokens > self._max_batch_tokens:
                batches.append([])
                size = 0
            batches[-1].append(r)
            size += tokens
        return batches

    def release(self, session_prefix: str) -> None:
        """Forget the caches of all sessions whose key begins with ``session_prefix``; unknown keys are fine."""
        self._work.run_soon(self._sessions.release, session_prefix)

    def close(self) -> None:
        """Wait for the work in hand, then free weights and caches; may be called twice."""
        self._closed = True
        self._work.close()
        self._loaded.clear()
        self._sessions.clear()

    def _open_work(self) -> ComputeQueue:
        if self._closed:
            raise EngineError("the in-process engine is closed; make a new one")
        return self._work
