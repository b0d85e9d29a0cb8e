"""Draw tokens from logits by inverse CDF, with exact log-probabilities and counter-based randomness.

The uniform number behind token ``n`` of a request is a function of the request's seed and ``n`` alone, and a row is
drawn from its own logits alone. So a request's tokens do not depend on its batch, and no global generator is read or
changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mrlm_pl.engines.base import Sampling
from mrlm_pl.grouping import grouped
from mrlm_pl.policy.forward.devices import on_device

# The constants of SplitMix64; see `_splitmix`.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SEED_BITS = 0xFFFFFFFFFFFFFFFF

_BLOCK = 256
"""Tokens in a block: near the square root of usual vocabularies V, where V / 256 + 256 is smallest."""

_ONE_LEVEL_VOCABULARY = 4096
"""Largest vocabulary that is drawn by one cumulative sum instead of in blocks."""

_NUCLEUS_CANDIDATES = 1024
"""Most probable tokens that are sorted for ``top_p``; a row whose nucleus is larger sorts its whole vocabulary."""


def _splitmix(state: np.ndarray) -> np.ndarray:
    """Return the SplitMix64 finalizer of each ``uint64`` (Steele, Lea and Flood 2014, "Fast splittable ...")."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def uniforms(seeds: Sequence[int], count: int, offsets: Sequence[int] | None = None) -> np.ndarray:
    """Return numbers in ``[0, 1)``, ``[len(seeds), count]`` float64; each is a function of its seed and place alone.

    Column n is output number n, and in a row with an offset number offset + n, of a SplitMix64 generator that starts at
    the mixed seed. The numbers are on a grid of 2**-52, so that ``u * total < total`` even after rounding.

    >>> bool((uniforms([7, 8], 3)[1] == uniforms([8], 3)[0]).all())
    True
    >>> bool((uniforms([7], 5)[:, :3] == uniforms([7], 3)).all())
    True
    >>> bool((uniforms([7], 2, offsets=[3]) == uniforms([7], 5)[:, 3:]).all())
    True
    """
    start = _splitmix(np.array([seed & _SEED_BITS for seed in seeds], dtype=np.uint64) + _GOLDEN)
    if offsets is not None:
        start = start + np.array(offsets, dtype=np.uint64) * _GOLDEN
    steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    return (_splitmix(start[:, None] + steps) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling, asynchronous: bool = False) -> tuple[Tensor, Tensor]:
    """Return one token per row and its natural-log probability under the distribution it was drawn from.

    The distribution is ``softmax(logits / temperature)`` cut to the ``top_k`` most probable tokens, then to the
    smallest set of those whose renormalized mass reaches ``top_p``, and renormalized over the kept ones. Temperature 0
    takes the most probable token and reports its log-probability at temperature 1, whatever ``top_k`` and ``top_p``.

    Args:
        logits: shape ``[B, V]``, any floating dtype; the arithmetic is float32 with float64 cumulative sums.
        uniform: shape ``[B]``, float64 in ``[0, 1)``, one number for each row.
        sampling: the distribution.
        asynchronous: do nothing that depends on a number of the device, which the host would have to wait for.

    Returns:
        token ids ``[B]`` (int64) and log-probabilities ``[B]`` (float32). Logits that hold NaN give some token and a
        NaN log-probability.

    >>> logits = torch.tensor([[0.6, 0.1, 0.3]]).log()
    >>> [draw(logits, torch.tensor([u], dtype=torch.float64), Sampling())[0].item() for u in (0.59, 0.61, 0.71)]
    [0, 1, 2]
    >>> tokens, logprobs = draw(logits, torch.tensor([0.9], dtype=torch.float64), Sampling(top_k=2))
    >>> tokens.item(), round(logprobs.exp().item(), 4)    # 0.3 of the 0.9 that is kept
    (2, 0.3333)
    """
    plain = sampling.temperature == 1 and not sampling.top_k and sampling.top_p == 1
    if plain and logits.device.type != "cpu":
        return draw_shares(logits, uniform[:, None])
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        return _draw_truncated(logits, uniform[:, None], sampling, asynchronous)
    return _draw_whole(logits, uniform[:, None])


def _invert(mass: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the drawn index of each row, the row's total, and the position in ``[0, 1)`` within the index.

    ``mass`` ``[B, N]`` and ``uniform`` ``[B, 1]`` are given; all results are ``[B, 1]``. Since ``uniform * total`` is
    strictly below the total, the first cumulative sum above it belongs to an index whose mass is not 0.
    """
    cumulative = mass.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = uniform * total
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=mass.shape[-1] - 1)
    upper = cumulative.gather(-1, index)
    lower = torch.where(index > 0, cumulative.gather(-1, (index - 1).clamp_(min=0)), 0.0)
    return index, total, ((target - lower) / (upper - lower)).clamp_(0.0, 1.0 - 2.0**-52)


def _draw_whole(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the whole softmax, by one cumulative sum where the vocabulary is small, else in two levels."""
    peak = logits.amax(-1, keepdim=True)
    mass = (logits - peak).exp_()
    if mass.shape[-1] <= _ONE_LEVEL_VOCABULARY:
        cumulative = mass.contiguous().cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        index = torch.searchsorted(cumulative, uniform * total, right=True).clamp_(max=mass.shape[-1] - 1)
    else:
        index, total = _in_blocks(mass, uniform)
    return index[:, 0], (logits.gather(-1, index) - peak - total.log().float())[:, 0]


def draw_shares(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the whole softmax, which a GPU computes in one kernel from logits of any dtype; see :func:`draw`.

    ``uniform`` is ``[B, 1]``.
    """
    shares = logits.softmax(-1, dtype=torch.float32)
    index, total = _in_blocks(shares, uniform)
    return index[:, 0], (shares.gather(-1, index).log() - total.log().float())[:, 0]


def _in_blocks(mass: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the drawn index and the total ``[B, 1]`` of rows ``[B, V]``: a block is drawn, then a token in it.

    Cumulative sums then run over V / 256 + 256 numbers instead of V.
    """
    padding = -mass.shape[-1] % _BLOCK
    blocks = (F.pad(mass, (0, padding)) if padding else mass).unflatten(-1, (-1, _BLOCK))
    block, total, rest = _invert(blocks.sum(-1), uniform)
    inside, _, _ = _invert(blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0], rest)
    return (block * _BLOCK + inside).clamp_(max=mass.shape[-1] - 1), total


def _draw_truncated(logits: Tensor, uniform: Tensor, sampling: Sampling, asynchronous: bool) -> tuple[Tensor, Tensor]:
    """Draw after top-k and top-p, from the most probable tokens in descending order.

    With top-p alone the head of the distribution is tried first, and rows with a larger nucleus sort everything; an
    asynchronous device, whose host does not know these rows, sorts all.
    """
    vocabulary = logits.shape[-1]
    width = min(sampling.top_k or (vocabulary if asynchronous else _NUCLEUS_CANDIDATES), vocabulary)
    values, ids = logits.topk(width, dim=-1)
    log_mass = values.logsumexp(-1, keepdim=True) if sampling.top_k else logits.logsumexp(-1, keepdim=True)
    tokens, logprobs, covered = _draw_nucleus(values, ids, log_mass, uniform, sampling.top_p)
    if sampling.top_k or width == vocabulary:
        return tokens, logprobs
    wide = (~covered).nonzero()[:, 0]
    if len(wide):
        values, ids = logits[wide].sort(dim=-1, descending=True)
        tokens[wide], logprobs[wide], _ = _draw_nucleus(values, ids, log_mass[wide], uniform[wide], sampling.top_p)
    return tokens, logprobs


def _draw_nucleus(
    values: Tensor, ids: Tensor, log_mass: Tensor, uniform: Tensor, top_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, log-probabilities and whether the candidates reach ``top_p``, each ``[B]``.

    ``values`` ``[B, N]`` are descending logits of the tokens ``ids``; ``log_mass`` ``[B, 1]`` is the log of the mass
    that ``top_p`` is a share of.
    """
    cumulative = (values - log_mass).exp_().cumsum(-1, dtype=torch.float64)
    reached = cumulative[:, -1] >= top_p
    last = values.shape[-1] - 1
    below = (cumulative < top_p).sum(-1, keepdim=True)
    size = below.clamp_(max=last) if top_p < 1 else torch.full_like(below, last)
    total = cumulative.gather(-1, size)
    index = torch.searchsorted(cumulative, uniform * total, right=True).minimum(size)
    logprobs = values.gather(-1, index) - log_mass - total.log().float()
    return ids.gather(-1, index)[:, 0], logprobs[:, 0], reached


class Sampler:
    """Draws the next token for each row of a batch; rows may differ in seed and :class:`Sampling`.

    Args:
        seeds: seed of each row.
        samplings: sampling settings of each row.
        count: maximum number of tokens of a row.
        device: device of the logits. Where it has no float64, tokens are drawn on the host.
        offsets: number of tokens drawn before, for each row; None: 0.
        asynchronous: see :func:`draw`.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        samplings: Sequence[Sampling],
        count: int,
        device: torch.device,
        offsets: Sequence[int] | None = None,
        asynchronous: bool = False,
    ) -> None:
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._asynchronous = asynchronous
        self._uniforms = on_device(torch.from_numpy(uniforms(seeds, count, offsets)).T.contiguous(), self._device)
        self._samplings = list(samplings)
        self._group()

    def _group(self) -> None:
        members = grouped(((one.temperature, one.top_p, one.top_k), b) for b, one in enumerate(self._samplings))
        self._groups = [(self._samplings[rows[0]], on_device(rows, self._device)) for rows in members.values()]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows`` (indices into the current ones, at least one)."""
        self._uniforms = self._uniforms[:, on_device(rows, self._device)]
        self._samplings = [self._samplings[b] for b in rows]
        self._group()

    def draw(self, logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return token number ``n`` (from 0) of every row and its log-probability, each ``[B]``; see :func:`draw`."""
        uniform, logits = self._uniforms[n], logits.to(self._device)
        if len(self._groups) == 1:
            return draw(logits, uniform, self._groups[0][0], self._asynchronous)
        tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for sampling, rows in self._groups:
            tokens[rows], logprobs[rows] = draw(logits[rows], uniform[rows], sampling, self._asynchronous)
        return tokens, logprobs
