"""Decode steps of few shapes over tensors that stay in place, which a GPU replays as CUDA graphs.

A step of a small model is hundreds of kernels that each take less time than their launch. A CUDA graph launches them
all at once, if nothing of the step but the numbers in its tensors changes: so rows, contexts and lengths are rounded up
to buckets, the place of the next token is a number on the device, and a mask hides the places that are still empty.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor

from mrlm_pl.engines.local.llama import FusedDecoder
from mrlm_pl.engines.local.llama_rows import ContextRows, hidden_beyond, places_in_contexts
from mrlm_pl.policy.forward.devices import on_device

_LEAST_ROWS = 8
_LEAST_LENGTH = 64
_FIRST_CAPACITY = 512
_MOST_STEPS = 64
_CAPTURING = threading.Lock()  # by one engine of the process at a time

Step = Callable[[], Tensor]
"""Computes one step from tensors that stay in place, and returns the logits."""

Capture = Callable[[Step, torch.device], Step]
"""Returns a step that does the same on the device, by replaying it."""


def bucket(number: int, least: int) -> int:
    """Return the number rounded up to a multiple of ``least``, and of a quarter of the power of two below it.

    >>> [bucket(number, 8) for number in (1, 9, 33, 41, 100, 256)]
    [8, 16, 40, 48, 112, 256]
    """
    step = max(least, 2 ** (number.bit_length() - 1) // 4)
    return -(-number // step) * step


class CudaGraphs:
    """Captures steps as CUDA graphs; they share their memory, as only one is replayed at a time."""

    def __init__(self) -> None:
        self._captured: dict[torch.device, tuple[torch.cuda.Stream, WeakSet[torch.cuda.CUDAGraph]]] = {}

    def __call__(self, step: Step, device: torch.device) -> Step:
        """Return the replay of a step."""
        with torch.cuda.device(device):
            if device not in self._captured:
                self._captured[device] = torch.cuda.Stream(device), WeakSet()
            stream, graphs = self._captured[device]
            pool = next((captured.pool() for captured in graphs), None)  # a pool ends with its last graph
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, as an asynchronous learner does, but not draw from its default
            # generator, nor wait for the whole device, with which each capture begins.
            with _CAPTURING, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                logits = step()
            graphs.add(graph)

        def replay() -> Tensor:
            with torch.cuda.device(device):
                graph.replay()
            return logits

        return replay


class StaticStep:
    """One step of a fixed number of rows and contexts, over tensors that stay in place.

    Args:
        decoder: the weights and the arithmetic.
        shared: keys and values of the contexts, ``[layers, 2, U, KV heads, T, head size]``.
        own: keys and values of the rows' own tokens, ``[layers, 2, B, KV heads, capacity, head size]``.
        logits: receives the logits, ``[B, V]``.
        width: maximum number of rows of a context.
        capture: makes the replay of a step.

    Attributes:
        tokens: the last token of each row, ``[B]``.
        width: maximum number of rows of a context.
    """

    def __init__(
        self, decoder: FusedDecoder, shared: Tensor, own: Tensor, logits: Tensor, width: int, capture: Capture
    ) -> None:
        self._decoder, self._shared, self._own, self._logits, self.width = decoder, shared, own, logits, width
        rows, contexts, kv_heads = own.shape[2], shared.shape[2], own.shape[3]
        self._rotation = decoder.rotation(shared.shape[4] + own.shape[4])  # the decoder's may move during a batch
        numbers = partial(torch.zeros, dtype=torch.long, device=shared.device)
        self.tokens, self._lengths, self._place = numbers(rows), numbers(rows), numbers(rows, kv_heads)
        self._row, self._fed = numbers(contexts, kv_heads, width), numbers(1)
        self._mask = shared.new_zeros(rows, 1, 1, shared.shape[4])
        self._capture = capture
        self._replays: dict[int, Step | None] = {}

    def arrange(self, contexts: Sequence[int], lengths: Sequence[int], fed: int) -> None:
        """Set the context of each row, the length of each context, and the number of tokens fed since.

        There may be fewer rows and contexts than the step has: it computes the others from the numbers of row 0 and
        from contexts without tokens.
        """
        device, (most, kv_heads, width) = self.tokens.device, self._row.shape
        heads, places = torch.arange(kv_heads), torch.tensor(places_in_contexts(contexts, width))
        rows = torch.zeros(most * width, dtype=torch.long)
        rows[places] = torch.arange(len(places))
        self._row.copy_(on_device(rows.view(most, 1, width) * kv_heads + heads[:, None], device))
        of_head = (places // width * kv_heads * width + places % width)[:, None] + heads * width
        self._place[: len(places)].copy_(on_device(of_head, device))
        self._lengths[: len(places)].copy_(on_device([lengths[u] for u in contexts], device))
        self._mask.copy_(hidden_beyond(self._lengths, self._mask.shape[3], self._mask.dtype))
        self._fed.fill_(fed)

    def run(self, window: int) -> Tensor:
        """Return the logits ``[B, V]``, reading the first ``window`` columns of the rows' own tokens.

        The first use of a window runs the step as it is, which loads all that its kernels need; the second captures it.
        """
        if window not in self._replays:
            self._replays[window] = None
            return self._compute(window)
        replay = self._replays[window]
        if replay is None:
            replay = self._replays[window] = self._capture(partial(self._compute, window), self.tokens.device)
        return replay()

    def _compute(self, window: int) -> Tensor:
        sizes, positions = self._decoder.weights.sizes, self._lengths + self._fed
        cos, sin = self._rotation
        own_mask = hidden_beyond(self._fed + 1, window, self._mask.dtype)
        mask = torch.cat((self._mask, own_mask.expand(len(self._mask), -1, -1, -1)), -1)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._own[i]
            keys.index_copy_(2, self._fed, k[:, :, None])
            values.index_copy_(2, self._fed, v[:, :, None])
            # The query heads of a group take the place of query positions, so keys and values are not repeated.
            grouped = (q.unflatten(1, (sizes.kv_heads, -1)) * sizes.scale).flatten(0, 1)
            keys, values = keys[:, :, :window].flatten(0, 1), values[:, :, :window].flatten(0, 1)
            context_keys, context_values = self._shared[i].flatten(1, 2)
            of_context = torch.bmm(self._by_context(grouped), context_keys.transpose(1, 2))
            scores = torch.cat((self._by_row(of_context), torch.bmm(grouped, keys.transpose(1, 2))), -1)
            scores.view(len(mask), sizes.kv_heads, *scores.shape[1:]).add_(mask)
            of_context, of_own = scores.softmax(-1).split((context_keys.shape[1], window), -1)
            mixed = self._by_row(torch.bmm(self._by_context(of_context), context_values))
            return mixed.baddbmm_(of_own, values).view(q.shape)

        x = self._decoder.hidden(self.tokens, cos[positions][:, None], sin[positions][:, None], attend)
        self._fed += 1
        return self._logits.copy_(self._decoder.logits(x))

    def _by_context(self, x: Tensor) -> Tensor:
        """Return rows ``[B * KV heads, group, N]`` as ``[U * KV heads, width * group, N]``: a context is read once."""
        return x.index_select(0, self._row.flatten()).view(-1, self.width * x.shape[1], x.shape[2])

    def _by_row(self, x: Tensor) -> Tensor:
        """Return the inverse of :meth:`_by_context`."""
        return x.view(-1, x.shape[1] // self.width, x.shape[2]).index_select(0, self._place.flatten())


class StaticDecode:
    """Makes the rows of the batches of some decoders, one batch at a time, in memory that stays in place.

    The memory is that of the largest batch up to now, and is kept with the replays until :meth:`clear`: all steps have
    their states, and all of a vocabulary their logits, in the same places. New numbers in a decoder's weights need no
    new replay; weights at another place in memory do.

    Args:
        capture: makes the replay of a step.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._steps: OrderedDict[tuple[int, Hashable], StaticStep] = OrderedDict()
        self._addresses: dict[int, tuple[int, ...]] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._logits: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, decoder: FusedDecoder, lengths: Sequence[int], rows: Sequence[int], reserve: int) -> StaticRows:
        """Return the rows of a batch; those of the batch before are lost."""
        return StaticRows(self, decoder, lengths, rows, reserve)

    def clear(self) -> None:
        """Free all memory."""
        self._steps.clear()
        self._addresses.clear()
        self._logits.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def zeros(self, first: Sequence[int], second: Sequence[int], like: FusedDecoder) -> tuple[Tensor, Tensor]:
        """Return zeros of two shapes for a decoder's keys and values; tensors returned before are lost."""
        sizes = [math.prod(first), math.prod(second)]
        dtype, device = like.weights.sizes.dtype, like.device
        needed = sum(sizes) * dtype.itemsize
        if self._memory.device != device or len(self._memory) < needed:
            self.clear()  # before the allocation, as the steps keep the memory too
            self._memory = torch.empty(needed, dtype=torch.uint8, device=device)
        first_states, second_states = self._memory[:needed].view(dtype).zero_().split(sizes)
        return first_states.view(*first), second_states.view(*second)

    def step(self, decoder: FusedDecoder, shared: Tensor, own: Tensor, width: int) -> StaticStep:
        """Return the step over these tensors, the one of an earlier batch if there is one."""
        addresses = decoder.addresses()
        if self._addresses.get(id(decoder)) != addresses:
            self._addresses[id(decoder)] = addresses
            for key in [key for key in self._steps if key[0] == id(decoder)]:
                del self._steps[key]
        layout = tuple((states.data_ptr(), states.shape, states.stride()) for states in (shared, own))
        key = id(decoder), (layout, width)
        if key not in self._steps:
            kind, rows = (decoder.weights.head.weight.shape[0], decoder.weights.sizes.dtype), own.shape[2]
            if kind not in self._logits or len(self._logits[kind]) < rows:  # earlier steps keep the place of fewer rows
                self._logits[kind] = torch.empty(rows, kind[0], dtype=kind[1], device=decoder.device)
            self._steps[key] = StaticStep(decoder, shared, own, self._logits[kind][:rows], width, self._capture)
        self._steps.move_to_end(key)
        if len(self._steps) > _MOST_STEPS:
            self._steps.popitem(last=False)
        return self._steps[key]


class StaticRows(ContextRows):
    """Rows of a :class:`~mrlm_pl.engines.local.llama.FusedDecoder`, in tensors of few shapes.

    As in :class:`~mrlm_pl.engines.local.llama_rows.DecoderRows` a context is held once for all its rows. The rows move
    together when some leave, and to a smaller bucket when they fit.

    Args:
        static: gives memory and steps.
        decoder: the weights and the arithmetic.
        lengths: number of tokens of each context.
        rows: number of rows of each context.
        reserve: maximum number of tokens to append.
    """

    def __init__(
        self, static: StaticDecode, decoder: FusedDecoder, lengths: Sequence[int], rows: Sequence[int], reserve: int
    ) -> None:
        super().__init__(lengths, rows)
        self._static, self._decoder = static, decoder
        self._take(bucket(max(lengths), _LEAST_LENGTH), min(bucket(reserve, _LEAST_LENGTH), _FIRST_CAPACITY))
        self._arrange()

    def _take(self, length: int, capacity: int) -> None:
        """Take memory for the present contexts and rows."""
        w = self._decoder.weights
        contexts, rows = bucket(len(self._lengths), 1), bucket(len(self._contexts), _LEAST_ROWS)
        shared_shape, own_shape = (
            (len(w.layers), 2, count, w.sizes.kv_heads, columns, w.sizes.head_dim)
            for count, columns in ((contexts, length), (rows, capacity))
        )
        self.shared, self._own = self._static.zeros(shared_shape, own_shape, self._decoder)
        self._choose_step()

    def _choose_step(self) -> None:
        most = max(self._contexts.count(u) for u in range(len(self._lengths)))
        self._step = self._static.step(self._decoder, self.shared, self._own, bucket(most, 1))

    def _arrange(self) -> None:
        self._step.arrange(self._contexts, self._lengths, self._fed)

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of the next token after ``tokens`` ``[B]``; the next step overwrites them."""
        if self._fed == self._own.shape[4]:
            self._grow()
        self._step.tokens[: len(tokens)].copy_(tokens)
        logits = self._step.run(min(bucket(self._fed + 1, _LEAST_LENGTH), self._own.shape[4]))
        self._fed += 1
        return logits[: len(tokens)]

    def _grow(self) -> None:
        """Move to twice the capacity, with the rows that are left."""
        shared, own_states = self.shared.clone(), self._own[:, :, : len(self._contexts)].clone()
        self.shared, self._own = shared, own_states
        del self._step  # the last owner of the memory, which may have to grow
        self._take(shared.shape[4], 2 * self._fed)
        self.shared.copy_(shared)
        self._own[:, :, : own_states.shape[2], :, : self._fed].copy_(own_states)
        self._arrange()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows``, and contexts without rows when the rest fits a smaller bucket."""
        _move_together(self._own[..., : self._fed, :], rows)
        self._contexts = [self._contexts[b] for b in rows]
        if bucket(len(rows), _LEAST_ROWS) < self._own.shape[2]:
            self._own = self._own[:, :, : bucket(len(rows), _LEAST_ROWS)]
            contexts_left = sorted(set(self._contexts))
            if bucket(len(contexts_left), 1) < self.shared.shape[2]:
                _move_together(self.shared, contexts_left)
                self.shared = self.shared[:, :, : bucket(len(contexts_left), 1)]
                self._keep_contexts(contexts_left)
            self._choose_step()
        self._arrange()


def _move_together(states: Tensor, rows: Sequence[int]) -> None:
    """Move these rows of ``[layers, 2, N, ...]`` to the front, in order; layer by layer, to copy little at a time."""
    index = on_device(rows, states.device)
    for layer in states:
        layer[:, : len(rows)] = layer.index_select(1, index)
