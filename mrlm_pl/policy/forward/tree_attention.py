"""Attention over a packed row in one kernel, which reads only the blocks of keys that are seen: FlexAttention.

The kernel needs no copies of shared keys and values, and no table of queries by keys: the blocks that it reads follow
from the segments (FlexAttention: arXiv 2412.05496).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import PretrainedConfig

from mrlm_pl.policy.forward.devices import on_device
from mrlm_pl.policy.forward.packing import Segments

_LEAST_HEAD_SIZE = 16
_BLOCK = 128
_MOST_KERNELS = 64
# PyTorch's other kernel, which it takes for less than 128 queries, cannot be compiled for any number of them.
_KERNEL: Any = {"FORCE_USE_FLEX_ATTENTION": True}


def has_kernel(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, dropout: bool) -> bool:
    """Return whether the kernel computes a model's attention on a device: on a GPU, without dropout or tiny heads.

    It adds up in single precision.
    """
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return device.type == "cuda" and dtype != torch.float64 and not dropout and size >= _LEAST_HEAD_SIZE


def tree_mask(segments: Segments, device: torch.device) -> BlockMask:
    """Return the mask of a packed row: a token sees the segments of its chain, and its own up to itself.

    The largest tables are of blocks by blocks of 128 tokens.
    """
    first = [0, *itertools.accumulate(len(level) for level in segments.lengths)]
    chains = [
        [first[level] + piece for level, piece in enumerate(chain) if piece >= 0]
        for of_level in segments.ancestors
        for chain in of_level
    ]
    lengths = [length for level in segments.lengths for length in level]
    enter, leave = _intervals(chains)
    sizes = torch.tensor(lengths)
    of_token = [on_device(torch.tensor(numbers).repeat_interleave(sizes), device) for numbers in (enter, leave)]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # a token's segment is in the chain of another if its interval holds the other's
        enter_of_query = of_token[0][q]
        return (of_token[0][k] <= enter_of_query) & (enter_of_query < of_token[1][k]) & (k <= q)

    (some, some_columns), (whole, whole_columns) = (
        tuple(on_device(table, device) for table in _block_columns(blocks)) for blocks in _blocks(chains, lengths)
    )
    tokens = sum(lengths)
    return BlockMask.from_kv_blocks(
        some, some_columns, whole, whole_columns, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(tokens, tokens)
    )


def _intervals(chains: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return an interval of numbers for each segment that holds those of the segments that continue it, no others.

    >>> _intervals([[], [0], [0], [0, 2]])
    ([0, 1, 2, 3], [4, 2, 4, 4])
    """
    sizes = [1] * len(chains)
    for segment, chain in reversed(list(enumerate(chains))):
        if chain:
            sizes[chain[-1]] += sizes[segment]
    enter: list[int] = []
    free, roots = [0] * len(chains), 0
    for segment, chain in enumerate(chains):
        if chain:
            enter.append(free[chain[-1]])
            free[chain[-1]] += sizes[segment]
        else:
            enter.append(roots)
            roots += sizes[segment]
        free[segment] = enter[segment] + 1
    return enter, [begin + size for begin, size in zip(enter, sizes, strict=True)]


def _blocks(chains: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks of keys a block of queries sees in part, and which as a whole, each [blocks, blocks]."""
    ends = list(itertools.accumulate(lengths))
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    count = -(-ends[-1] // _BLOCK)
    seen = np.zeros((count, count), dtype=bool)
    # of each block of queries, how many segments it touches, and how many of these see all of a block of keys
    touched, seen_whole = np.zeros(count, dtype=np.int64), np.zeros((count, count), dtype=np.int64)
    for (start, stop), chain in zip(spans, chains, strict=True):
        queries = slice(start // _BLOCK, -(-stop // _BLOCK))
        touched[queries] += 1
        for begin, end in (*(spans[segment] for segment in chain), (start, stop)):
            seen[queries, begin // _BLOCK : -(-end // _BLOCK)] = True
            seen_whole[queries, -(-begin // _BLOCK) : max(-(-begin // _BLOCK), end // _BLOCK)] += 1
    seen = np.tril(seen)
    full = np.tril(seen_whole == touched[:, None], -1) & seen
    if ends[-1] % _BLOCK:
        full[-1] = False
    return seen & ~full, full


def _block_columns(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the number of each row's blocks, [1, 1, rows], and their columns before all others, [1, 1, rows, rows]."""
    columns = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    numbers = blocks.sum(1, dtype=np.int32)
    return torch.from_numpy(numbers)[None, None], torch.from_numpy(columns)[None, None]


@functools.cache
def compiled_flex_attention() -> Any:
    """Return the kernel for rows of any length, compiled at its first use with a dtype, a number of heads and so on.

    For more kernels than its limit PyTorch would compute a table of tokens by tokens; here it raises an error.
    """
    from torch._dynamo import config  # takes two seconds to import

    attend = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return config.patch(recompile_limit=_MOST_KERNELS)(attend)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None) -> Tensor:
    """Return the attention [N, heads, dim] of queries [N, heads, dim] to keys and values [N, kv heads, dim]."""
    attend = compiled_flex_attention() if query.device.type == "cuda" else flex_attention
    heads_first = (states.transpose(0, 1)[None] for states in (query, key, value))
    attended: Tensor = attend(
        *heads_first,
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=_KERNEL,
    )
    return attended[0].transpose(0, 1)
