"""The default engine: generates in this process, from the weights that are being trained."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from mrlm_pl.concurrency.event_loop import ComputeQueue
from mrlm_pl.engines.base import Engine, LearnerPlace, Sample, SampleRequest
from mrlm_pl.engines.local.adapters import AdaptedWeights, base_of
from mrlm_pl.engines.local.cache_check import cache_use, warn_of_cache
from mrlm_pl.engines.local.compiled_layers import CompiledRows, compiled_layers
from mrlm_pl.engines.local.decoder import Decoder, DecoderWeights
from mrlm_pl.engines.local.generation import Backend, EngineStats, SessionCache, generate
from mrlm_pl.engines.local.llama import FusedDecoder, MakeRows, unsupported_reason
from mrlm_pl.engines.local.llama_rows import DecoderRows
from mrlm_pl.engines.local.static_decode import CudaGraphs, StaticDecode
from mrlm_pl.engines.local.team import TeamDecoder
from mrlm_pl.engines.local.transformers_model import GenericModel
from mrlm_pl.errors import ConfigurationError, EngineError, NonFiniteError
from mrlm_pl.grouping import grouped, split_by_size
from mrlm_pl.policy.compilation import compilation_seconds
from mrlm_pl.policy.forward.devices import MIN_FREED_WEIGHTS
from mrlm_pl.policy.pretrained import context_window
from mrlm_pl.settings import NonNegativeInt, PositiveInt

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Loaded:
    """A policy that generates here."""

    model: PreTrainedModel
    dtype: torch.dtype
    backend: FusedDecoder | GenericModel
    window: int | None
    vocabulary: int
    version: int
    kind: Hashable
    """Policies of one kind generate in one batch."""


class InProcessEngine(Engine):
    """Generates with the modules of this process, off the event loop: in the thread that waits in
    :meth:`compute_during`, else in its own thread.

    The requests of one :meth:`sample` call are batched, those of policies with one architecture together
    (:class:`~mrlm_pl.engines.local.team.TeamDecoder`); those of different calls are not, so that a run's batches, and
    the rounding of its log-probabilities, do not depend on timing. A batch computes a shared context once,
    continues a context from an earlier turn of its session, and drops finished rows. A request's tokens depend on its
    seed, context and sampling, and on its batch only through floating-point rounding.

    Llama, Qwen2, Qwen3 and Mistral models use :class:`~mrlm_pl.engines.local.llama.FusedDecoder`; all others their own
    ``forward``. Weights may be read in place, so they must not change while :meth:`sample` runs, and every change needs
    a :meth:`load`; with ``own_weights`` they may change at any time, and :meth:`load` copies them between two
    computations.

    Args:
        dtype: compute dtype of the projections and, but on a CPU, of all between them; None is bfloat16 beside a
            learner in ``bf16-mixed`` or ``bf16-true``, else the module's own. Norms and residuals are in the module's.
            On a CPU attention, with its keys and values, is in at least float32.
        max_batch_tokens: maximum number of tokens in a batch, contexts and ``max_tokens`` together, which bounds the
            memory of keys and values; more requests take several batches.
        cache_bytes: maximum size of the sessions' keys and values between turns; 0 keeps none.
        fused: False lets every model use its own ``forward``.
        own_weights: generate from a copy of the weights, with the memory of another model.
        cuda_graphs: on a GPU, replay the decode steps of a fused model as CUDA graphs. The keys and values of the
            largest batch up to now then keep their memory between two calls; False frees it.
        compile: on a CPU, compile the layers of the decode step in the first :meth:`load` of an architecture, which
            takes about ten seconds.

    Raises:
        ConfigurationError: a bound is out of its range, or ``compile`` is on and ``fused`` off.
    """

    name = "in_process"
    takes_chunks = True

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        max_batch_tokens: PositiveInt = 131_072,
        cache_bytes: NonNegativeInt = 2**30,
        fused: bool = True,
        own_weights: bool = False,
        cuda_graphs: bool = True,
        compile: bool = False,
    ) -> None:
        if compile and not fused:
            raise ConfigurationError("compile: true compiles the fused decode step; set fused: true, or leave it out")
        self._given_dtype = self._dtype = dtype
        self._max_batch_tokens = max_batch_tokens
        self._fused, self._own_weights, self._cuda_graphs, self._compile = fused, own_weights, cuda_graphs, compile
        self._loaded: dict[str, _Loaded] = {}
        self._sessions = SessionCache(cache_bytes)
        self._static: StaticDecode | None = None  # made where a GPU decodes
        self._stats = EngineStats()
        self._work = ComputeQueue("mrlm-engine")
        self._closed = False

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made; a copy."""
        return replace(self._stats)

    def meet_learner(self, place: LearnerPlace) -> None:
        """Compute in the learner's precision unless a ``dtype`` was given."""
        self._dtype = self._given_dtype or (torch.bfloat16 if "bf16" in place.precision else None)

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Make the module's current weights those of ``policy``; return when they are in use.

        Args:
            policy: name of the policy in requests.
            weights: a ``transformers`` causal LM.
            version: version of the weights, reported in samples. The policy's sessions are dropped.

        Raises:
            EngineError: ``weights`` is not such a module, or cannot be compiled.
        """
        if not isinstance(weights, PreTrainedModel):
            raise EngineError(
                f"policy {policy!r}: the in-process engine loads a transformers PreTrainedModel, not a "
                f"{type(weights).__name__}"
            )
        with self._open_work().running:
            self._load(policy, weights, version)

    def _load(self, policy: str, model: PreTrainedModel, version: int) -> None:
        loaded, dtype = self._loaded.get(policy), self._dtype or model.dtype
        if loaded and loaded.model is model and (loaded.dtype, loaded.backend.device) == (dtype, model.device):
            loaded.backend.refresh()
            loaded.version = version
        else:
            embedding: Any = model.get_input_embeddings()
            vocabulary = embedding.weight.shape[0]
            if self._static is not None:
                self._static.clear()  # its steps keep decoders that are replaced here
            backend, window = self._backend(policy, model, dtype), context_window(model.config)
            loaded = _Loaded(model, dtype, backend, window, vocabulary, version, policy)
        if isinstance(loaded.backend, FusedDecoder):
            loaded.backend.rows = self._rows(policy, loaded.backend)
            together = self._compile or loaded.backend.rows is DecoderRows
            loaded.kind = loaded.backend.weights.architecture if together else policy
        self._loaded[policy] = loaded
        self._sessions.drop_policy(policy)

    def _backend(self, policy: str, model: PreTrainedModel, dtype: torch.dtype) -> FusedDecoder | GenericModel:
        reason = unsupported_reason(model) if self._fused else "fused is off"
        if reason is None:
            if self._compile and model.device.type != "cpu":
                raise EngineError(
                    f"policy {policy!r} is on {model.device}, and compile is for CPUs; leave it out: on a GPU the "
                    "decode steps run as CUDA graphs"
                )
            base = self._shared_base(policy, model, dtype) if self._loaded else None
            return FusedDecoder(model, dtype, self._own_weights, base)
        if self._compile:
            raise EngineError(
                f"policy {policy!r} generates through its own forward ({reason}), which is not compiled; "
                "leave compile out"
            )
        generic = GenericModel(model, dtype, self._own_weights)
        checked = cache_use(generic)
        generic.use = checked.use
        warn_of_cache(model.config.model_type, checked)
        logger.info("policy %r generates through its own forward (%s), %s", policy, reason, generic.use)
        return generic

    def _rows(self, policy: str, decoder: FusedDecoder) -> MakeRows:
        """Return what makes the rows of a policy's batches; compile its layers if that is asked for."""
        if not self._compile:
            if decoder.device.type != "cuda" or not self._cuda_graphs:
                return DecoderRows
            self._static = self._static or StaticDecode(CudaGraphs())
            return self._static
        before = compilation_seconds()
        codes = compiled_layers(decoder)
        seconds = compilation_seconds() - before
        if seconds:
            logger.info("policy %r: layers of the decode step compiled in %.1f s", policy, seconds)
        return partial(CompiledRows, codes)

    def _shared_base(self, policy: str, model: PreTrainedModel, dtype: torch.dtype) -> DecoderWeights | None:
        """Return the weights below the model's adapters if another policy has adapters on them, else None.

        A single policy adds its adapters to the weights: its steps then have fewer products.
        """
        for name, loaded in self._loaded.items():
            decoder = loaded.backend
            if name == policy or loaded.dtype != dtype or not isinstance(decoder, FusedDecoder):
                continue
            base = base_of(model)
            if base is None or base_of(loaded.model) != base:
                continue
            if isinstance(decoder.weights, AdaptedWeights):
                return decoder.weights.base
            shared = DecoderWeights(model, dtype, self._own_weights, adapters=False)
            loaded.backend = FusedDecoder(loaded.model, dtype, self._own_weights, shared)
            loaded.backend.rows = self._rows(name, loaded.backend)
            return shared
        return None

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one :class:`~mrlm_pl.engines.base.Sample` per request, in order.

        Generation stops at the model's context window with finish reason ``length``.

        Raises:
            EngineError: a policy is not loaded, or a context is empty, holds an id outside the vocabulary or leaves no
                room in the model's window.
            NonFiniteError: the model's logits are not finite.
        """
        given_up = threading.Event()
        try:
            return await asyncio.wrap_future(self._open_work().submit(self._sample, list(requests), given_up))
        except asyncio.CancelledError:
            given_up.set()
            raise

    @property
    def holds_weights(self) -> bool:
        """True with ``own_weights``."""
        return self._own_weights

    def window(self, policy: str) -> int | None:
        """Return the policy's context window in tokens; None while it is not loaded or if it is unbounded."""
        loaded = self._loaded.get(policy)
        return None if loaded is None else loaded.window

    def precision(self, policy: str) -> str | None:
        """Return the ``dtype``; see :meth:`Engine.precision`."""
        return None if self._dtype is None else str(self._dtype).removeprefix("torch.")

    def compute_during(self, start: Callable[[], Future[T]]) -> T:
        """Return the result of the future from ``start``; until then this thread does the work of :meth:`sample`.

        With a second computing thread, OpenMP keeps two teams of threads, more than there are cores, and puts them to
        sleep after every operation: generation during training took 1.6 times as long on two cores. Afterwards the
        copies of large weights are freed until the next :meth:`load` or :meth:`sample`: the learner's gradients take as
        much memory.
        """
        try:
            return self._work.serve_during(start)
        finally:
            # own copies cannot be read again once the module has changed, and CUDA graphs read theirs where they are;
            # after an interrupt other samples may still run
            frees = not self._own_weights and self._static is None
            if frees and self._work.running.acquire(blocking=False):
                try:
                    backends = [loaded.backend for loaded in self._loaded.values()]
                    held = [backend.weights for backend in backends if isinstance(backend, FusedDecoder)]
                    for weights in held if sum(weights.copied for weights in held) >= MIN_FREED_WEIGHTS else ():
                        weights.free()
                finally:
                    self._work.running.release()

    def _sample(self, requests: list[SampleRequest], given_up: threading.Event) -> list[Sample]:
        samples: dict[int, Sample] = {}
        for limits in self._batches(requests):
            batch = [requests[number] for number in limits]
            policies = {request.policy for request in batch}
            members = {name: loaded.backend for name, loaded in self._loaded.items() if name in policies}
            for member in members.values():
                if isinstance(member, FusedDecoder) and not member.weights.layers:  # freed by `compute_during`
                    member.refresh()
            backend: Backend = next(iter(members.values()))
            if len(members) > 1:  # of one kind
                fused = {name: member for name, member in members.items() if isinstance(member, FusedDecoder)}
                backend = TeamDecoder(fused)
            with torch.inference_mode(isinstance(backend, Decoder)):
                generated = generate(backend, batch, list(limits.values()), self._sessions, self._stats, given_up)
            for number, out in zip(limits, generated, strict=True):
                policy = requests[number].policy
                version = self._loaded[policy].version
                if not math.isfinite(sum(out.logprobs)):
                    raise NonFiniteError(
                        f"policy {policy!r} version {version} gave a log-probability that is not finite: its "
                        "logits hold NaN or infinity; check the learning rate and the weights of the last checkpoint"
                    )
                tokens, logprobs = tuple(out.token_ids), tuple(out.logprobs)
                samples[number] = Sample(tokens, logprobs, out.finish_reason, version, self.name)
        return [samples[number] for number in range(len(requests))]

    def _limit(self, request: SampleRequest) -> int:
        """Return how many tokens may be sampled for a request."""
        loaded = self._loaded.get(request.policy)
        if loaded is None:
            loaded_names = ", ".join(sorted(self._loaded)) or "none"
            raise EngineError(f"policy {request.policy!r} is not loaded (loaded: {loaded_names}); call load() first")
        limit = request.limit(loaded.window)
        worst = max(request.token_ids) if min(request.token_ids) >= 0 else min(request.token_ids)
        if not 0 <= worst < loaded.vocabulary:
            raise EngineError(
                f"token id {worst} is outside the vocabulary of policy {request.policy!r}, which has "
                f"{loaded.vocabulary} entries; encode the context with that policy's tokenizer"
            )
        return limit

    def _batches(self, requests: list[SampleRequest]) -> list[dict[int, int]]:
        """Return the batches, each the limits of its requests by their numbers.

        The requests of policies of one kind are in order, in batches within the token bound or of a single longer
        request.
        """
        limits = list(map(self._limit, requests))
        sizes = [len(request.token_ids) + limit for request, limit in zip(requests, limits, strict=True)]
        kinds = grouped((self._loaded[request.policy].kind, r) for r, request in enumerate(requests))
        batches_by_kind = (
            split_by_size(numbers, sizes.__getitem__, len(numbers), self._max_batch_tokens)
            for numbers in kinds.values()
        )
        return [{r: limits[r] for r in batch} for batches in batches_by_kind for batch in batches]

    def release(self, session_prefix: str) -> None:
        """Drop the caches of all sessions whose key begins with ``session_prefix``; unknown keys are fine."""
        if not self._closed:
            self._work.submit(self._sessions.release, session_prefix)

    def close(self) -> None:
        """Finish the submitted work, then free weights and caches; may be called twice."""
        self._closed = True
        self._work.close()
        self._loaded.clear()
        self._sessions.release("")
        if self._static is not None:
            self._static.clear()

    def _open_work(self) -> ComputeQueue:
        if self._closed:
            raise EngineError("the in-process engine is closed; make a new one")
        return self._work
