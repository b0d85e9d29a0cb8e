"""The generation loop: compute distinct contexts once, drop finished rows, keep sessions."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrlm_pl.engines.base import FinishReason, SampleRequest
from mrlm_pl.engines.local.backend import Backend, Context, Rows
from mrlm_pl.engines.local.sampling import Sampler
from mrlm_pl.engines.local.session_cache import SessionCache

_COMPACT_BELOW = 0.85


@dataclass
class EngineStats:
    """Counters of an engine.

    Args:
        requests: returned samples.
        prefill_tokens: computed context tokens.
        cached_tokens: context tokens with keys and values of an earlier turn of the session.
        shared_tokens: context tokens computed for another request of the batch.
        decode_tokens: tokens fed one per row and step, including those of finished rows that were not yet dropped.
        sampled_tokens: returned tokens.
        prefill_seconds: wall time of computing contexts.
        decode_seconds: wall time of drawing tokens and feeding them.
    """

    requests: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass
class Generated:
    """Tokens of one request, their log-probabilities and their finish reason."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"


def generate(
    backend: Backend,
    requests: Sequence[SampleRequest],
    limits: Sequence[int],
    sessions: SessionCache,
    stats: EngineStats,
    given_up: threading.Event,
) -> list[Generated]:
    """Return one :class:`Generated` per request, in order; all requests name the same policy.

    Args:
        backend: the policy's model.
        requests: at least one.
        limits: most tokens of each request; at least 1.
        sessions: gives the beginnings of contexts, and receives finished rows.
        stats: counters to increase.
        given_up: set if the caller was cancelled.

    Raises:
        CancelledError: the caller was cancelled.
    """
    started = time.perf_counter()
    contexts, order = _distinct_contexts(requests, sessions)
    most = max(limits)
    logits, rows = backend.prefill(contexts, reserve=most)
    logits = logits.repeat_interleave(torch.tensor([context.rows for context in contexts], device=logits.device), dim=0)
    prefilled = time.perf_counter()
    batch = _Batch([requests[r] for r in order], [limits[r] for r in order], rows, sessions)
    seeds, offsets = [q.seed for q in batch.requests], [q.offset for q in batch.requests]
    sampler = Sampler(seeds, [q.sampling for q in batch.requests], most, backend.device, offsets)
    for n in range(most):
        if given_up.is_set():
            raise CancelledError
        tokens, logprobs = sampler.draw(logits, n)
        kept = batch.record(tokens, logprobs)
        if not kept:
            break
        if len(kept) < len(tokens):
            sampler.keep(kept)
            tokens = tokens[tokens.new_tensor(kept)]
        stats.decode_tokens += len(tokens)
        logits = rows.step(tokens)
    stats.requests += len(requests)
    stats.prefill_tokens += sum(len(context.token_ids) - context.cached for context in contexts)
    stats.cached_tokens += sum(context.cached for context in contexts)
    stats.shared_tokens += sum(len(context.token_ids) * (context.rows - 1) for context in contexts)
    stats.sampled_tokens += sum(len(out.token_ids) for out in batch.out)
    stats.prefill_seconds += prefilled - started
    stats.decode_seconds += time.perf_counter() - prefilled
    by_request = dict(zip(order, batch.out, strict=True))
    return [by_request[r] for r in range(len(requests))]


def _distinct_contexts(requests: Sequence[SampleRequest], sessions: SessionCache) -> tuple[list[Context], list[int]]:
    """Return the distinct contexts, and the indices of the requests in the order of the contexts' rows."""
    members: dict[tuple[int, ...], list[int]] = {}
    for r, request in enumerate(requests):
        members.setdefault(request.token_ids, []).append(r)
    contexts = []
    for token_ids, indices in members.items():
        found = [
            states
            for r in indices
            if requests[r].session
            and (states := sessions.get(requests[r].policy, requests[r].session, token_ids)) is not None
        ]
        longest = max(found, key=lambda states: states.shape[3], default=None)
        contexts.append(Context(token_ids, len(indices), longest))
    return contexts, [r for indices in members.values() for r in indices]


class _Batch:
    """The present rows of one batch, the unfinished ones and their tokens.

    Args:
        requests: one for each row of ``rows``.
        limits: most tokens of each row.
        rows: the rows.
        sessions: receives keys and values of finished rows.
    """

    def __init__(
        self, requests: Sequence[SampleRequest], limits: Sequence[int], rows: Rows, sessions: SessionCache
    ) -> None:
        self.requests = requests
        self.out = [Generated() for _ in requests]
        self._limits = limits
        self._stops = [frozenset(request.stop_ids) for request in requests]
        self._rows = rows
        self._sessions = sessions
        self._present = list(range(len(requests)))
        self._unfinished = [True] * len(requests)
        self._left = len(requests)

    def record(self, tokens: Tensor, logprobs: Tensor) -> list[int]:
        """Append one token per present row; return the indices of the remaining rows, none when all are finished.

        Finished rows are dropped together once there are enough, because dropping copies the others.
        """
        for b, token, logprob in zip(self._present, tokens.tolist(), logprobs.tolist(), strict=True):
            if not self._unfinished[b]:
                continue
            out = self.out[b]
            out.token_ids.append(token)
            out.logprobs.append(logprob)
            stopped = token in self._stops[b]
            if stopped or len(out.token_ids) == self._limits[b]:
                out.finish_reason = "stop" if stopped else "length"
                self._unfinished[b] = False
                self._left -= 1
        if self._left and self._left > _COMPACT_BELOW * len(self._present):
            return list(range(len(self._present)))
        kept = [i for i, b in enumerate(self._present) if self._unfinished[b]]
        self._store_finished()
        if kept:
            self._rows.keep(kept)
            self._present = [self._present[i] for i in kept]
        return kept

    def _store_finished(self) -> None:
        """Store keys and values of finished rows in the session cache; the last sampled token was never fed."""
        for i, b in enumerate(self._present):
            request = self.requests[b]
            if self._unfinished[b] or not request.session:
                continue
            fed = (*request.token_ids, *self.out[b].token_ids[:-1])
            states = self._rows.states(i, len(fed))
            if states is not None:
                self._sessions.put(request.policy, request.session, fed, states)
