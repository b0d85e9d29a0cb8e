"""The generation loop and its view of a model: compute distinct contexts once, drop finished rows, keep sessions."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.engines.base import FinishReason, SampleRequest
from mrlm_pl.engines.local.sampling import Sampler
from mrlm_pl.grouping import common_prefix, grouped
from mrlm_pl.policy.forward.devices import on_device

_COMPACT_BELOW = 0.85
"""Fraction of unfinished rows down to which finished ones stay: dropping them copies the others' keys and values."""

_STEPS_AT_ONCE = 8
"""Steps whose tokens an asynchronous device sends together: more cost fewer waits, and keep finished rows longer."""


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
    """

    requests: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0


@dataclass
class Generated:
    """Tokens of one request, their log-probabilities and their finish reason."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"


@dataclass(frozen=True)
class States:
    """Keys and values of the first tokens of a row.

    Args:
        parts: consecutive parts, each ``[layers, 2, KV heads, T, head size]``; other rows may hold the same ones.
    """

    parts: tuple[Tensor, ...]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(part.shape[3] for part in self.parts)

    def first(self, length: int) -> States:
        """Return those of the first ``length`` tokens, without a copy."""
        parts = []
        for part in self.parts:
            parts.append(part[:, :, :, : max(0, length)])
            length -= part.shape[3]
        return States(tuple(parts))

    def copy_to(self, target: Tensor) -> None:
        """Copy them to a tensor ``[layers, 2, KV heads, length, head size]``."""
        for part, slot in zip(self.parts, target.split([part.shape[3] for part in self.parts], 3), strict=True):
            slot.copy_(part)


@dataclass(frozen=True)
class Context:
    """A distinct context of a batch.

    Args:
        token_ids: all tokens of the context, at least one.
        rows: number of rows that continue it; they share its computation.
        states: keys and values of its first tokens from an earlier turn, fewer than all; None computes all tokens.
        policy: name of the policy that continues it.
    """

    token_ids: Sequence[int]
    rows: int
    states: States | None = None
    policy: str = ""

    @property
    def cached(self) -> int:
        """Number of tokens with given keys and values."""
        return 0 if self.states is None else self.states.length


class Rows(ABC):
    """Rows in generation, with their keys and values."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of the next token after one more token per row, ``tokens`` ``[B]``."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows`` (ascending indices into the current ones, at least one)."""

    @abstractmethod
    def states(self, row: int, length: int) -> States | None:
        """Return copies of the keys and values of a row's first ``length`` tokens; None if the model has no such form.

        Rows of one context may hold the same copy of its keys and values.
        """


class RowsInParts(Rows):
    """Rows of several parts, which take each step one after the other.

    Args:
        parts: rows that take a step together, with their numbers in the batch, ascending.
    """

    def __init__(self, parts: Sequence[tuple[Rows, list[int]]]) -> None:
        self._parts = list(parts)

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of the next token after one more token per row, ``tokens`` ``[B]``."""
        order = self._order()
        ordered = tokens if order == sorted(order) else tokens[on_device(order, tokens.device)]
        parts = zip(self._parts, ordered.split([len(numbers) for _, numbers in self._parts]), strict=True)
        stepped = [
            result for (part, numbers), part_tokens in parts for result in self._step_part(part, numbers, part_tokens)
        ]
        self._parts = [(part, numbers) for part, numbers, _ in stepped]
        if len(stepped) == 1:
            return stepped[0][2]
        logits, order = torch.cat([part_logits for _, _, part_logits in stepped]), self._order()
        return logits if order == sorted(order) else logits[on_device(order, logits.device).argsort()]

    def _order(self) -> list[int]:
        """Return the numbers of the rows, part by part."""
        return [number for _, numbers in self._parts for number in numbers]

    def _step_part(self, part: Any, numbers: list[int], tokens: Tensor) -> list[tuple[Rows, list[int], Tensor]]:
        """Return the parts that a part's rows are in after a step with ``tokens``, with their numbers and logits."""
        return [(part, numbers, part.step(tokens))]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows``, and parts without rows."""
        new, parts = {row: index for index, row in enumerate(rows)}, []
        for part, numbers in self._parts:
            stay = [i for i, number in enumerate(numbers) if number in new]
            if 0 < len(stay) < len(numbers):
                part.keep(stay)
            if stay:
                parts.append((part, [new[numbers[i]] for i in stay]))
        self._parts = parts

    def states(self, row: int, length: int) -> States | None:
        """Return copies of the keys and values of a row's first ``length`` tokens; see :class:`Rows`."""
        part, numbers = next(entry for entry in self._parts if row in entry[1])
        return part.states(numbers.index(row), length)


class Backend(ABC):
    """The generation loop's view of a model.

    Attributes:
        device: device of the model's tensors.
        asynchronous: True if its steps run behind the host, as on an accelerator, and do not wait for it.
    """

    device: torch.device
    asynchronous: bool = False

    @abstractmethod
    def prefill(self, contexts: Sequence[Context], reserve: int) -> tuple[Tensor, Rows]:
        """Return logits ``[U, V]`` after each of the U contexts, and rows that continue them.

        The rows are in the order of the contexts: first ``contexts[0].rows`` rows, and so on; the contexts of a policy
        are side by side. ``reserve`` is the largest number of further tokens of a row.
        """


class SessionCache:
    """Least-recently-used cache of ``(policy, session) -> token ids and their keys and values``.

    Args:
        capacity: maximum bytes of keys and values; 0 keeps none.

    Attributes:
        size: bytes of the held keys and values; those that several sessions hold count once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[tuple[str, str], tuple[tuple[int, ...], States]] = OrderedDict()
        self._holders: Counter[int] = Counter()  # of each part, by its identity
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, policy: str, session: str, token_ids: Sequence[int]) -> States | None:
        """Return the keys and values of the longest stored prefix of ``token_ids``.

        It is shorter than ``token_ids``, so that a token is left to compute logits from. None if the session is
        unknown, or shares no token and is dropped.
        """
        entry = self._entries.get((policy, session))
        if entry is None:
            return None
        cached_ids, states = entry
        length = min(common_prefix(cached_ids, token_ids), len(token_ids) - 1)
        if length == 0:
            self._drop((policy, session))
            return None
        self._entries.move_to_end((policy, session))
        return states.first(length)

    def put(self, policy: str, session: str, token_ids: Sequence[int], states: States) -> None:
        """Store or replace a session; drop the least recently used ones for room."""
        self._drop((policy, session))
        if sum(part.nbytes for part in states.parts) > self._capacity:
            return
        self._entries[policy, session] = tuple(token_ids), states
        self._count(states, 1)
        while self.size > self._capacity:
            self._drop(next(iter(self._entries)))

    def drop_policy(self, policy: str) -> None:
        """Drop all sessions of a policy."""
        for key in [key for key in self._entries if key[0] == policy]:
            self._drop(key)

    def release(self, prefix: str) -> None:
        """Drop the sessions whose key begins with ``prefix``, of all policies."""
        for key in [key for key in self._entries if key[1].startswith(prefix)]:
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._count(entry[1], -1)

    def _count(self, states: States, change: int) -> None:
        """Add a holder to each part, or take one away."""
        for part in states.parts:
            before = self._holders[id(part)]
            self._holders[id(part)] += change
            self.size += part.nbytes * (bool(before + change) - bool(before))
            if not before + change:
                del self._holders[id(part)]


def generate(
    backend: Backend,
    requests: Sequence[SampleRequest],
    limits: Sequence[int],
    sessions: SessionCache,
    stats: EngineStats,
    given_up: threading.Event,
) -> list[Generated]:
    """Return one :class:`Generated` per request, in order.

    Args:
        backend: the model of the requests' policies.
        requests: at least one request.
        limits: maximum number of tokens of each request; at least 1.
        sessions: supplies the beginnings of contexts, and receives finished rows.
        stats: counters to increase.
        given_up: set if the caller was cancelled.

    Raises:
        CancelledError: the caller was cancelled.
    """
    contexts, order = _distinct_contexts(requests, sessions)
    stats.prefill_tokens += sum(len(context.token_ids) - context.cached for context in contexts)
    stats.cached_tokens += sum(context.cached for context in contexts)
    stats.shared_tokens += sum(len(context.token_ids) * (context.rows - 1) for context in contexts)
    most, batch = max(limits), _Batch([requests[r] for r in order], [limits[r] for r in order], sessions)
    reader = _StepReader(backend.asynchronous)
    logits, rows = backend.prefill(contexts, reserve=most)
    context_of_row = [index for index, context in enumerate(contexts) for _ in range(context.rows)]
    logits = logits[on_device(context_of_row, logits.device)]
    seeds = [request.seed for request in batch.requests]
    offsets = [request.offset for request in batch.requests]
    samplings = [request.sampling for request in batch.requests]
    sampler = Sampler(seeds, samplings, most, backend.device, offsets, backend.asynchronous)
    for n in range(most):
        if given_up.is_set():
            raise CancelledError
        tokens, logprobs = sampler.draw(logits, n)
        unfinished = batch.record(rows, reader.add(tokens, logprobs, batch.present, last=n + 1 == most))
        if not unfinished:
            break
        if len(unfinished) < len(tokens):
            sampler.keep(unfinished)
            tokens = tokens[on_device(unfinished, tokens.device)]
        stats.decode_tokens += len(tokens)
        logits = rows.step(on_device(tokens, backend.device))
    stats.requests += len(requests)
    stats.sampled_tokens += sum(len(out.token_ids) for out in batch.generated)
    by_request = dict(zip(order, batch.generated, strict=True))
    return [by_request[r] for r in range(len(requests))]


def _distinct_contexts(requests: Sequence[SampleRequest], sessions: SessionCache) -> tuple[list[Context], list[int]]:
    """Return the distinct contexts, and the indices of the requests in the order of the contexts' rows."""
    members = grouped(((request.policy, request.token_ids), r) for r, request in enumerate(requests))
    policies = list(dict.fromkeys(request.policy for request in requests))
    order = sorted(members.items(), key=lambda member: policies.index(member[0][0]))
    contexts = []
    for (policy, token_ids), indices in order:
        cached = [
            states
            for r in indices
            if requests[r].session and (states := sessions.get(policy, requests[r].session, token_ids)) is not None
        ]
        longest = max(cached, key=lambda states: states.length, default=None)
        contexts.append(Context(token_ids, len(indices), longest, policy))
    return contexts, [r for _, indices in order for r in indices]


@dataclass(frozen=True)
class _DrawnSteps:
    """Tokens and log-probabilities of some steps, of the rows that were present; each ``[steps, B]`` on the host.

    Attributes:
        ready: event after which the numbers are on the host; None: they are there already.
    """

    present: list[int]
    tokens: Tensor
    logprobs: Tensor
    ready: torch.cuda.Event | None = None

    def steps(self) -> Iterator[tuple[list[int], list[float]]]:
        """Yield the numbers of one step after the other."""
        if self.ready is not None:
            self.ready.synchronize()
        yield from zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)


class _StepReader:
    """The drawn tokens on their way from the device to the host.

    An asynchronous device sends those of several steps together, and the host reads them while the device computes the
    next ones: it never waits for a step that it has just started. So it learns late which rows are finished.

    Args:
        asynchronous: whether the device runs behind the host; False reads each step immediately.
    """

    def __init__(self, asynchronous: bool) -> None:
        self._asynchronous = asynchronous
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._sent: list[_DrawnSteps] = []

    def add(self, tokens: Tensor, logprobs: Tensor, present: list[int], last: bool) -> list[_DrawnSteps]:
        """Add a step's tokens and log-probabilities ``[B]``; return steps that the host is to read now.

        Args:
            present: the rows; they stay the same until steps are returned.
            last: whether no step follows, so that all are returned.
        """
        if not self._asynchronous:
            return [_DrawnSteps(present, tokens[None], logprobs[None])]
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        if len(self._tokens) < _STEPS_AT_ONCE and not last:
            return []
        sent = [torch.stack(numbers).to("cpu", non_blocking=True) for numbers in (self._tokens, self._logprobs)]
        ready = None
        if tokens.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(tokens.device))
        self._sent.append(_DrawnSteps(present, sent[0], sent[1], ready))
        self._tokens, self._logprobs = [], []
        due, self._sent = (self._sent, []) if last else (self._sent[:-1], self._sent[-1:])
        return due


class _Batch:
    """The present rows of one batch, the unfinished ones and their tokens.

    Args:
        requests: request of each row.
        limits: maximum number of tokens of each row.
        sessions: receives keys and values of finished rows.

    Attributes:
        present: indices of the rows in the current steps.
    """

    def __init__(self, requests: Sequence[SampleRequest], limits: Sequence[int], sessions: SessionCache) -> None:
        self.requests = requests
        self.generated = [Generated() for _ in requests]
        self._limits = limits
        self._stops = [frozenset(request.stop_ids) for request in requests]
        self._sessions = sessions
        self.present = list(range(len(requests)))
        self._unfinished = set(self.present)

    def record(self, rows: Rows, drawn: Sequence[_DrawnSteps]) -> list[int]:
        """Append drawn tokens to their rows; return the indices of the remaining rows, none when all are finished.

        Finished rows are dropped together once there are enough, because dropping copies the others; the session cache
        keeps their keys and values. Tokens drawn after a row's last one are ignored.
        """
        for steps in drawn:
            for tokens, logprobs in steps.steps():
                self._append(steps.present, tokens, logprobs)
        if len(self._unfinished) > _COMPACT_BELOW * len(self.present):
            return list(range(len(self.present)))
        for i, b in enumerate(self.present):
            request = self.requests[b]
            if request.session and b not in self._unfinished:
                fed = (*request.token_ids, *self.generated[b].token_ids[:-1])  # the last sampled token was never fed
                states = rows.states(i, len(fed))
                if states is not None:
                    self._sessions.put(request.policy, request.session, fed, states)
        unfinished = [i for i, b in enumerate(self.present) if b in self._unfinished]
        if unfinished:
            rows.keep(unfinished)
            self.present = [self.present[i] for i in unfinished]
        return unfinished

    def _append(self, present: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        for b, token, logprob in zip(present, tokens, logprobs, strict=True):
            if b not in self._unfinished:
                continue
            out = self.generated[b]
            out.token_ids.append(token)
            out.logprobs.append(logprob)
            stopped = token in self._stops[b]
            if stopped or len(out.token_ids) == self._limits[b]:
                out.finish_reason = "stop" if stopped else "length"
                self._unfinished.remove(b)
